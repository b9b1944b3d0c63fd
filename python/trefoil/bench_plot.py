"""A picture of what `trefoil bench --gpu` measured.

    python -m trefoil.bench_plot OUT.svg < bench.json

One panel an operation: kernel time and event time over tokens, beside what the bytes alone would
take (those of the busiest port at the rate of a plain copy of the same run, and 3.4 µs). Bars reach
up to the 99th percentile. OUT ends in .svg, .png or .pdf.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from trefoil.outputs import open_whole
from trefoil.report.pictures import BLUE, INK, ORANGE, _log_ticks
from trefoil.units import format_seconds
from trefoil.verb import run

GREY = "#8a8f98"
BASE_SECONDS = 3.4e-6
MODES = {
    "ll-expert-major": "LL expert-major",
    "ll-rank-major": "LL rank-major",
    "ht-flat": "HT flat",
    "ht-expert-major": "HT expert-major",
}
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


def _line(axes: Axes, x: list[int], values: list[tuple[float, float]], **style: Any) -> None:
    p50 = [v[0] for v in values]
    above = [max(v[1] - v[0], 0) for v in values]
    axes.errorbar(x, p50, yerr=[[0] * len(x), above], capsize=2, elinewidth=0.8, **style)


def _scale(axes: Axes, tokens: Iterable[int], low: float, high: float) -> None:
    ticks = _log_ticks(low, high)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(ticks[:: max(1, len(ticks) // 6)])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: format_seconds(v)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(tokens), [f"{t:,}" for t in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def picture(data: Any) -> Figure:
    """All curves, a panel each, on one scale of time."""
    curves = curves_of(data)
    if not curves:
        raise BenchError("nothing was timed: no benchmark passed its check")
    columns = 4 if len(curves) in (4, 7, 8) else min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.7 * rows + 0.5), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    all_times = [t for c in curves for v in (c.event + (c.kernel or [])) for t in v]
    low = min(all_times + [f for c in curves for f in c.floor]) / 1.3
    high = max(all_times) * 1.3
    for axes, c in zip(panels, curves, strict=False):
        if c.floor:
            axes.plot(c.tokens, c.floor, color=GREY, linestyle="--", label="bytes and 3.4 µs")
        _line(axes, c.tokens, c.event, color=ORANGE, marker="s", markersize=4, label="event")
        if c.kernel:
            _line(axes, c.tokens, c.kernel, color=BLUE, marker="o", markersize=5, label="kernel")
        _scale(axes, c.tokens, low, high)
        axes.set_title(c.title, fontsize=9, color=INK)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(curves) - columns) : len(curves)]:
        axes.set_xlabel("tokens a rank")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    gpu, first = data.get("gpu", {}), data["gpu_benchmarks"][0]
    figure.suptitle(
        f"{gpu.get('count', '?')} × {gpu.get('name', 'GPU')}, hidden {first['hidden']}, "
        f"top-{first['topk']} of {first['experts']}; median and 99th percentile of "
        f"{first['iterations']}",
        fontsize=10,
    )
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Reads JSON from stdin, writes the picture; 1 and a sentence if that cannot be done."""
    arguments = sys.argv if arguments is None else arguments
    if len(arguments) != 2 or Path(arguments[1]).suffix not in (".svg", ".png", ".pdf"):
        print(
            "usage: python -m trefoil.bench_plot OUT.svg < bench.json (or .png, .pdf)",
            file=sys.stderr,
        )
        return 2
    try:
        path = Path(arguments[1])
        figure = picture(json.load(sys.stdin))
        with open_whole(path, "wb") as file:
            figure.savefig(file, dpi=160, format=path.suffix[1:])
    except (BenchError, json.JSONDecodeError, OSError) as error:
        print(f"trefoil bench: no picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run("bench", main))
