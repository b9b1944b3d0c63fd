"""Predictions before measurements: dated tables of times with intervals, a command for each row.

    make_predictions   runs `trefoil simulate --json` for every size of SETS -> rows
    write_predictions  rows -> a CSV with its provenance in comment lines
    read_predictions   and back; Predictions.find is what `trefoil compare` asks

A committed table is never made anew: when costs change, a new date is a new file, so that whoever
measures a size sees how far off the prediction was that stood there before.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trefoil.fit.cases import OPS, Case, TableError
from trefoil.inputs import read_text
from trefoil.places import measurements
from trefoil.program import run_json
from trefoil.table import write_csv

LL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
HT_TOKENS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Predicted:
    """One operation of one size; times in microseconds."""

    kernels: str  # whose: "trefoil", "deepep"
    op: str
    mode: str
    variant: str
    record: str
    cluster: str
    gpus: int
    gpus_per_node: int
    hidden: int
    tokens: int
    topk: int
    experts: int
    physical_experts: int
    dispatch_dtype: str
    sms: int
    us: float
    low_us: float
    high_us: float
    rows_behind: int  # measured rows that the interval comes from
    extrapolated: int
    bound_us: float
    closed_form_us: float
    engine: str
    command: str


COLUMNS = tuple(f.name for f in fields(Predicted))


@dataclass(frozen=True)
class Set:
    """What is predicted together: one file."""

    name: str
    kernels: str
    mode: str
    record: str
    cluster: str
    gpus: tuple[int, ...]
    variant: str = "ours"
    dispatch_dtype: str = "bf16"

    @property
    def tokens(self) -> tuple[int, ...]:
        return LL_TOKENS if self.mode == "ll" else HT_TOKENS


SETS = (
    Set("trefoil-ll", "trefoil", "ll", "trefoil-ll-h200", "hgx-h200", (8, 16, 32, 64, 1024)),
    # Between nodes, one copy a (token, node).
    Set("trefoil-ll-rails", "trefoil", "ll", "trefoil-ll-h200", "hgx-h200", (16, 32, 64), "rails"),
    # Our high throughput was measured inside a node; across nodes use the record that was.
    Set("trefoil-ht-1node", "trefoil", "ht", "trefoil-ht-h200", "hgx-h200", (8,)),
    Set("trefoil-ht", "trefoil", "ht", "deepep-ht-h100", "hgx-h200", (16, 32, 64, 1024)),
    Set("deepep-ll", "deepep", "ll", "deepep-ll-h100", "dgx-h100", (64, 1024), "per-expert", "fp8"),
    Set("deepep-ht", "deepep", "ht", "deepep-ht-h100", "dgx-h100", (64, 1024), "ours", "fp8"),
)


def make_predictions(
    what: Set,
    moe: str = "deepseek-v3",
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Predicted]:
    for gpus in what.gpus:
        for tokens in what.tokens:
            arguments = ["simulate", "--cluster", what.cluster, "--moe", moe, "--mode", what.mode]
            arguments += ["--gpus", str(gpus), "--tokens", str(tokens), "--costs", what.record]
            if what.variant != "ours":
                arguments += ["--variant", what.variant]
            if what.dispatch_dtype != "bf16":
                arguments += ["--dispatch-dtype", what.dispatch_dtype]
            if gpus > 256:  # an EP group has at most as many GPUs as physical experts
                arguments += ["--physical-experts", str(gpus)]
            report(f"{what.name}, {gpus} GPUs, {tokens} tokens")
            answer = run_json(arguments)
            for op in OPS:
                yield _row(what, arguments, answer, op)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 4)


def _row(what: Set, arguments: Sequence[str], answer: dict[str, Any], op: str) -> Predicted:
    o = answer[op]
    interval = o["interval"]
    return Predicted(
        kernels=what.kernels,
        op=op,
        mode=what.mode,
        variant=answer["variant"],
        record=what.record,
        cluster=answer["cluster"],
        gpus=answer["gpus"],
        gpus_per_node=answer["ranks_per_node"],
        hidden=answer["hidden"],
        tokens=answer["tokens"],
        topk=answer["topk"],
        experts=answer["experts"],
        physical_experts=answer["physical_experts"],
        dispatch_dtype=answer["dispatch_dtype"],
        sms=answer["sms"],
        us=_us(o["seconds"]),
        low_us=_us(interval["low_seconds"]),
        high_us=_us(interval["high_seconds"]),
        rows_behind=interval["n"],
        extrapolated=int(interval["kind"] == "extrapolated"),
        bound_us=_us(o["bound_seconds"]),
        closed_form_us=_us(o["closed_form_seconds"]),
        engine=o["engine"],
        command="trefoil " + " ".join(arguments),
    )


def write_predictions(path: Path, rows: Sequence[Predicted], about: dict[str, str]) -> int:
    """about: what the comment lines say, "date" first. Returns the rows."""
    head = "".join(f"# {key}: {text}\n" for key, text in about.items())
    write_csv(path, COLUMNS, map(asdict, rows), head)
    return len(rows)


@dataclass(frozen=True)
class Predictions:
    path: Path
    about: dict[str, str]
    rows: list[Predicted]


def _number(kind: type, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise TableError(f"{where} is {text!r}: must be a number") from None


def read_predictions(path: Path) -> Predictions:
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TableError(f"{path}: is not text") from None
    about = dict(
        line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line
    )
    body = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not body or tuple(body[0][1].split(",")) != COLUMNS:
        raise TableError(f"{path}: has not the columns of a table of predictions")
    rows = []
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Predicted)}
    for (number, _), cells in zip(body[1:], csv.reader(t for _, t in body[1:]), strict=True):
        if len(cells) != len(COLUMNS):
            raise TableError(f"{path}, line {number}: {len(cells)} fields, not {len(COLUMNS)}")
        values = {
            name: _number(kinds[name], cell, f"{path}, line {number}: {name}")
            for name, cell in zip(COLUMNS, cells, strict=True)
        }
        row = Predicted(**values)
        if not 0 < row.low_us <= row.us <= row.high_us:
            raise TableError(f"{path}, line {number}: {row.us} us lies outside its own interval")
        rows.append(row)
    return Predictions(path, about, rows)


def prediction_files() -> list[Path]:
    """Committed tables, the newest first: of the source tree, or of the installation."""
    found = (p for home in measurements() for p in home.glob("predictions/*.csv"))
    return sorted(found, reverse=True)


def find_prediction(
    tables: Sequence[Predictions],
    case: Case,
    kernels: str,
    dispatch_dtype: str,
    by_rails: bool = False,
) -> tuple[Predictions, Predicted] | None:
    """The first table's row for a case. sms 0: the table does not say.

    Predictions are of uniform routing and full ranks.
    """
    if not case.is_balanced:
        return None
    for table in tables:
        for row in table.rows:
            same = (row.kernels, row.op, row.mode, row.gpus, row.hidden, row.tokens, row.topk) == (
                kernels,
                case.op,
                case.mode,
                case.ranks,
                case.hidden,
                case.tokens,
                case.topk,
            )
            same = same and row.gpus // row.gpus_per_node == case.nodes
            same = same and (row.variant == "rails") == by_rails
            same = same and case.experts in (row.experts, row.physical_experts)
            same = same and case.sms in (0, row.sms) and row.dispatch_dtype == dispatch_dtype
            if same:
                return table, row
    return None
