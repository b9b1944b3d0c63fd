"""A picture of ht_bench's sweep over SMs.

    python -m trefoil.ht_plot BENCH.json OUT.svg

One panel an operation: kernel time over SMs, the best of all numbers of sending blocks, bars up to
the 99th percentile; beside it what the bytes of the busiest port take at the rate of the plain copy
of the same run, and the goal. OUT ends in .svg, .png or .pdf.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trefoil.ht_rows import OPERATIONS, TOKENS, Row, RowsError, goals_of, read
from trefoil.plot import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    SUFFIXES,
    bars_up,
    grid_lines,
    panels,
    share_legend,
    write,
)

SHOWN_SMS = 32  # more only where there is nothing else


def curve(rows: Sequence[Row], operation: str) -> list[Row]:
    """The fastest row of each number of SMs, ascending."""
    fastest: dict[int, Row] = {}
    for row in rows:
        if row["operation"] != operation or row["tokens"] != TOKENS:
            continue
        sms = row["sms"]
        if sms not in fastest or row["kernel_us"] < fastest[sms]["kernel_us"]:
            fastest[sms] = row
    few = {n: row for n, row in fastest.items() if n <= SHOWN_SMS} or fastest
    return [few[n] for n in sorted(few)]


def _draw(axes: Axes, rows: Sequence[Row], label: str, **style: Any) -> None:
    high = [r.get("kernel_p99_us", r["kernel_max_us"]) for r in rows]
    at, us = [r["sms"] for r in rows], [r["kernel_us"] for r in rows]
    bars_up(axes, at, us, high, label=label, markersize=4, **style)


def _panel(axes: Axes, rows: Sequence[Row], operation: str) -> None:
    plain, window = curve(rows, operation), curve(rows, f"{operation} window")
    if window:
        side = "input" if operation.startswith("combine") else "output"
        _draw(axes, window, f"{side} in a window", color=SKY, marker="s")
    if plain:
        _draw(axes, plain, "kernel, p50 to p99", color=BLUE, marker="o")
    shown = [*plain, *window]
    bound = shown[0]["port_bytes"] and shown[0]["kernel_us"] * shown[0]["copy_share"]
    if bound:
        axes.axhline(bound, color=GREY, linestyle="--", label="its bytes by the plain copy")
    for goal in goals_of(shown).times:
        if goal.operation in (operation, f"{operation} window") and goal.sms:
            axes.plot([goal.sms], [goal.us], color=ORANGE, marker="D", linestyle="", label="goal")
    axes.set_ylim(bottom=0)
    axes.set_title(operation, fontsize=9, color=INK)
    axes.set_xlabel("SMs")
    axes.set_ylabel("µs")
    grid_lines(axes)


def picture(data: Mapping[str, Any]) -> Figure:
    """A panel for each of the four operations that was measured."""
    rows = [r for r in data["rows"] if r.get("check", "ok") == "ok" and "kernel_us" in r]
    there = [o for o in OPERATIONS if curve(rows, o) or curve(rows, f"{o} window")]
    if not there:
        raise RowsError(f"nothing was timed with {TOKENS} tokens: there is nothing to draw")
    figure, grid = panels(len(there), min(2, len(there)), (3.6, 2.7), 0.5)
    for axes, operation in zip(grid, there, strict=True):
        _panel(axes, rows, operation)
    share_legend(figure, grid, 2)
    first = curve(rows, there[0]) or curve(rows, f"{there[0]} window")
    figure.suptitle(
        f"{data.get('device', 'GPUs')}, {TOKENS} tokens a rank, hidden {first[0]['hidden']}, "
        f"top-{first[0]['topk']} of {first[0]['experts']}",
        fontsize=10,
    )
    return figure


def main(arguments: Sequence[str]) -> int:
    """Writes the picture; 1 and a sentence if that cannot be done."""
    if len(arguments) != 2 or Path(arguments[1]).suffix not in SUFFIXES:
        usage = "usage: python -m trefoil.ht_plot BENCH.json OUT.svg (or .png, .pdf)"
        print(usage, file=sys.stderr)
        return 2
    try:
        write(Path(arguments[1]), picture(read(Path(arguments[0]), "rows")))
    except (RowsError, OSError) as error:
        print(f"trefoil: no picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
