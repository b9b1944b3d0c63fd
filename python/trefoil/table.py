"""The one way to make tables: aligned text, Markdown, CSV and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trefoil.outputs import open_whole


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def markdown(rows: Sequence[Sequence[str]], rule: str = "--:") -> Iterator[str]:
    """Lines; rule: of the columns after the first."""
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|---" + f"|{rule}" * (len(rows[0]) - 1) + "|"
    for row in rows[1:]:
        yield "| " + " | ".join(row) + " |"


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], head: str = ""
) -> None:
    """The columns of each row, after `head`; what else a row holds is left out."""
    with open_whole(path, newline="") as file:
        file.write(head)
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas data frame. ImportError: without pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "a data frame needs pandas (pip install pandas); rows() has the same as dictionaries"
        ) from None
    return pandas.DataFrame(rows)
