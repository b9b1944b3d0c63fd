"""A picture of what `trefoil bench` measured: with --gpu, or of two libraries with --against.

    python -m trefoil.bench_plot OUT.svg < bench.json

Of --against see against_plot.py. Of --gpu, one panel an operation: kernel time and event time over
tokens, beside what the bytes alone would take (those of the busiest port at the rate of a plain
copy of the same run, and 3.4 µs). Bars reach up to the 99th percentile. OUT ends in .svg, .png or
.pdf.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from trefoil.plot import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SUFFIXES,
    bars_up,
    doubling_axis,
    grid_lines,
    panels,
    share_legend,
    time_axis,
    write,
)
from trefoil.verb import run

BASE_SECONDS = 3.4e-6
MODES = {
    "ll-expert-major": "LL expert-major",
    "ll-rank-major": "LL rank-major",
    "ht-flat": "HT flat",
    "ht-expert-major": "HT expert-major",
}
EVENT = {"color": ORANGE, "marker": "s", "markersize": 4, "label": "event"}
KERNEL = {"color": BLUE, "marker": "o", "markersize": 5, "label": "kernel"}
VARIANTS = {"plain": "", "e4m3": ", to E4M3", "partial": ", partial sums"}


class BenchError(ValueError):
    """What was read is no output of `trefoil bench --gpu --json`."""


@dataclass
class Curve:
    """One operation over tokens; times in seconds, replayed from a graph."""

    title: str
    tokens: list[int]
    event: list[tuple[float, float]]  # p50, p99
    kernel: list[tuple[float, float]] | None
    floor: list[float]


def _spread(data: Any) -> tuple[float, float]:
    return float(data["replayed"]["p50_s"]), float(data["replayed"]["p99_s"])


def _shown(row: dict[str, Any], op: str) -> bool:
    """Partial sums change the combine alone: its dispatch is that of the plain variant."""
    return op in row["times"] and not (row["variant"] == "partial" and op == "dispatch")


def curves_of(data: Any) -> list[Curve]:
    """The curves of every mode, variant and operation that was timed."""
    try:
        rows = [r for r in data["gpu_benchmarks"] if "times" in r]
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in rows:
            for op in ("dispatch", "combine"):
                if _shown(row, op):
                    groups.setdefault((op, row["mode"], row["variant"]), []).append(row)
        return [_curve(op, mode, variant, of) for (op, mode, variant), of in groups.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"not an output of trefoil bench --gpu --json: {error!r}") from error


def _curve(op: str, mode: str, variant: str, rows: list[dict[str, Any]]) -> Curve:
    rows = sorted(rows, key=lambda r: r["tokens"])
    times = [r["times"][op] for r in rows]
    title = f"{op} {MODES.get(mode, mode)}{VARIANTS.get(variant, ', ' + variant)}"
    kernel = [_spread(t["kernel"]) for t in times] if all("kernel" in t for t in times) else None
    floor = [
        t["busiest_port_bytes"] / r["copy_bytes_per_second"] + BASE_SECONDS
        for t, r in zip(times, rows, strict=True)
        if r["copy_bytes_per_second"] > 0
    ]
    return Curve(
        title=title[0].upper() + title[1:],
        tokens=[int(r["tokens"]) for r in rows],
        event=[_spread(t["event"]) for t in times],
        kernel=kernel,
        floor=floor,
    )


def picture(data: Any) -> Figure:
    """All curves, a panel each, on one scale of time."""
    curves = curves_of(data)
    if not curves:
        raise BenchError("nothing was timed: no benchmark passed its check")
    columns = 4 if len(curves) in (4, 7, 8) else min(3, len(curves))
    figure, grid = panels(len(curves), columns, (3.4, 2.7), 0.5)
    all_times = [t for c in curves for v in (c.event + (c.kernel or [])) for t in v]
    low = min(all_times + [f for c in curves for f in c.floor]) / 1.3
    high = max(all_times) * 1.3
    for axes, c in zip(grid, curves, strict=True):
        if c.floor:
            axes.plot(c.tokens, c.floor, color=GREY, linestyle="--", label="bytes and 3.4 µs")
        bars_up(axes, c.tokens, *zip(*c.event, strict=True), **EVENT)
        if c.kernel:
            bars_up(axes, c.tokens, *zip(*c.kernel, strict=True), **KERNEL)
        time_axis(axes, low, high)
        doubling_axis(axes, c.tokens)
        grid_lines(axes)
        axes.set_title(c.title, fontsize=9, color=INK)
    for axes in grid[-columns:]:
        axes.set_xlabel("tokens a rank")
    share_legend(figure, grid[:1], 3)
    gpu, first = data.get("gpu", {}), data["gpu_benchmarks"][0]
    figure.suptitle(
        f"{gpu.get('count', '?')} × {gpu.get('name', 'GPU')}, hidden {first['hidden']}, "
        f"top-{first['topk']} of {first['experts']}; median and 99th percentile of "
        f"{first['iterations']}",
        fontsize=10,
    )
    return figure


def figure_of(data: Any) -> Figure:
    if isinstance(data, dict) and "against_benchmarks" in data:
        from trefoil import against_plot

        return against_plot.picture(data)
    return picture(data)


def main(arguments: list[str] | None = None) -> int:
    """Reads JSON from stdin, writes the picture; 1 and a sentence if that cannot be done."""
    arguments = sys.argv if arguments is None else arguments
    if len(arguments) != 2 or Path(arguments[1]).suffix not in SUFFIXES:
        usage = "usage: python -m trefoil.bench_plot OUT.svg < bench.json (or .png, .pdf)"
        print(usage, file=sys.stderr)
        return 2
    try:
        write(Path(arguments[1]), figure_of(json.load(sys.stdin)))
    except (BenchError, json.JSONDecodeError, OSError) as error:
        print(f"trefoil bench: no picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run("bench", main))
