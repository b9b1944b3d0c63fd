"""The picture of what `trefoil bench --against` measured: two libraries, timed in turn.

A panel for each mode and operation: the time of both libraries (kernels where CUPTI told them,
else events, else without a GPU the wall clock) for each number of tokens, bars up to the 99th
percentile; above each pair the ratio of the medians and its spread over the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from trefoil.bench_plot import MODES, BenchError
from trefoil.plot import BLUE, INK, ORANGE, panels, share_legend, time_axis

FIGURES = {
    "kernel_span": "kernels, first start to last end",
    "event": "events",
    "wall": "barrier to the end of the stream",
}
OPERATIONS = ("dispatch", "combine")


@dataclass
class Panel:
    """One mode and operation; times in seconds."""

    title: str
    tokens: list[int] = field(default_factory=list)
    times: list[list[tuple[float, float]]] = field(default_factory=lambda: [[], []])
    ratios: list[tuple[float, float, float]] = field(default_factory=list)


def figure_of(data: Any) -> str:
    """Which time is drawn: one that every shape that was timed has."""
    timed = [r for r in data["against_benchmarks"] if r["ok"]]
    if not timed:
        raise BenchError("nothing was timed: no benchmark passed its check")
    for name in FIGURES:
        if all(name in r["dispatch"]["against_over_library"] for r in timed):
            return name
    raise BenchError("the shapes have no time in common")


def panels_of(data: Any) -> list[Panel]:
    """The panels of all shapes that were timed."""
    try:
        name = figure_of(data)
        panels: dict[tuple[str, str], Panel] = {}
        rows = sorted(data["against_benchmarks"], key=lambda r: r["tokens"])
        for row in (r for r in rows if r["ok"]):
            for operation in OPERATIONS:
                of = row[operation]
                if name not in of["against_over_library"]:
                    continue
                title = f"{operation.capitalize()} {MODES.get(row['mode'], row['mode'])}"
                panel = panels.setdefault((row["mode"], operation), Panel(title))
                panel.tokens.append(int(row["tokens"]))
                ratio = of["against_over_library"][name]
                panel.ratios.append((ratio["p50"], ratio["min"], ratio["max"]))
                for times, library in zip(panel.times, of["libraries"], strict=True):
                    times.append((library[name]["p50_s"], library[name]["p99_s"]))
        return list(panels.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"not an output of trefoil bench --against --json: {error!r}") from error


def _draw(axes: Any, panel: Panel, names: list[str], low: float, high: float) -> None:
    x = np.arange(len(panel.tokens))
    for i, (times, colour) in enumerate(zip(panel.times, (BLUE, ORANGE), strict=True)):
        p50 = [t[0] for t in times]
        above = [max(t[1] - t[0], 0) for t in times]
        at = x + (i - 0.5) * 0.38
        axes.bar(at, p50, width=0.36, color=colour, label=names[i])
        axes.errorbar(at, p50, yerr=[[0] * len(x), above], fmt="none", ecolor=INK, elinewidth=0.7)
    for i, (middle, least, most) in enumerate(panel.ratios):
        top = max(t[i][1] for t in panel.times)
        text = f"{middle:.2f}\n{least:.2f}–{most:.2f}"
        axes.text(x[i], top * 1.08, text, ha="center", va="bottom", fontsize=8, color=INK)
    time_axis(axes, low, high)
    axes.set_xticks(x, [f"{t:,}" for t in panel.tokens])
    axes.set_title(panel.title, fontsize=9, color=INK)


def picture(data: Any) -> Figure:
    """All panels on one scale of time."""
    shown = panels_of(data)
    columns = min(4, len(shown))
    figure, grid = panels(len(shown), columns, (3.4, 2.9), 0.6)
    times = [t for p in shown for of in p.times for pair in of for t in pair if t > 0]
    names = [Path(data["library"]).name, "against " + Path(data["against"]).name]
    for axes, panel in zip(grid, shown, strict=True):
        _draw(axes, panel, names, min(times) / 1.5, max(times) * 2)
    for axes in grid[-columns:]:
        axes.set_xlabel("tokens a rank")
    share_legend(figure, grid[:1], 2)
    gpu, first = data.get("gpu", {}), data["against_benchmarks"][0]
    where = f"{gpu['count']} × {gpu['name']}" if gpu else f"{first['ranks']} ranks without a GPU"
    figure.suptitle(
        f"{where}, hidden {first['hidden']}, top-{first['topk']} of {first['experts']}; "
        f"{FIGURES[figure_of(data)]}; above: against / library, spread of the blocks",
        fontsize=9,
    )
    return figure
