"""Pictures of what averaging takes, by the number of GPUs, and of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from trefoil.plot import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    doubling_axis,
    grid_lines,
    panels,
    share_legend,
    tick_seconds,
    time_axis,
    write,
)

STYLES = {
    "dense": (INK, "o", "-"),
    "a2sgd": (BLUE, "s", "-"),
    "a2sgd, sync": (SKY, "D", "--"),
    "topk": (ORANGE, "^", "-"),
    "qsgd": (GREEN, "v", "-"),
    "none": (GREY, "x", ":"),
    "local": (GREY, "+", "--"),
}


PERPLEXITIES = (60, 70, 80, 90, 100, 120, 150, 200, 250, 300, 400, 500)


def style_of(label: str) -> dict[str, Any]:
    """Of a method by the longest beginning of its label."""
    name = max((n for n in STYLES if label.startswith(n)), key=len)
    colour, marker, line = STYLES[name]
    return {"color": colour, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.2}


def _by_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _times(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, title: str) -> None:
    for label, of in _by_method(rows).items():
        axes.plot([r["gpus"] for r in of], [r[key] for r in of], label=label, **style_of(label))
    values = [r[key] for r in rows if r[key] > 0]
    time_axis(axes, min(values) * 0.7, max(values) * 1.4, label=tick_seconds)
    doubling_axis(axes, sorted({r["gpus"] for r in rows}))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("GPUs")
    grid_lines(axes)


def times(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The averaging alone and, of a training step, what it adds."""
    shown = [("alone_seconds", "averaging alone")]
    if "exposed_seconds" in rows[0]:
        shown.append(("exposed_seconds", "added to a step with experts"))
    figure, axes = panels(len(shown), 2 if len(shown) > 1 else 1, (3.0, 2.6), 0.4)
    for one, (key, title) in zip(axes, shown, strict=True):
        _times(one, rows, key, title)
    share_legend(figure, axes, 3)
    return figure


def write_times(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write(path, times(rows))


# ---- Training runs -------------------------------------------------------------------------------


def curve(case: Mapping[str, Any], key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean and sample standard deviation over the runs."""
    values = np.array([[p[key] for p in run["points"]] for run in case["runs"]])
    steps = np.array([p["step"] for p in case["runs"][0]["points"]])
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(steps, dtype=float)
    return steps, values.mean(0), spread


def _perplexities(
    axes: Axes, cases: Mapping[str, Any], key: str, seconds: Mapping[str, float] | None
) -> None:
    for label, case in cases.items():
        steps, mean, spread = curve(case, key)
        x = steps * (seconds[label] if seconds else 1)
        axes.fill_between(
            x[1:],
            (mean - spread)[1:],
            (mean + spread)[1:],
            color=style_of(label)["color"],
            alpha=0.15,
        )
        axes.plot(x[1:], mean[1:], label=label, **style_of(label))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_yticks([t for t in PERPLEXITIES if low <= t <= high])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    grid_lines(axes)


def training(data: Mapping[str, Any], seconds: Mapping[str, float], where: str) -> Figure:
    """Perplexity of the replicas by step and by simulated time; seconds: of a step, by method."""
    figure, axes = panels(2, 2, (3.0, 2.6), 0.5)
    cases = data["cases"]
    for one, times_of in zip(axes, (None, seconds), strict=True):
        _perplexities(one, cases, "replicas", times_of)
        one.set_ylabel("perplexity of the replicas")
    axes[0].set_xlabel("step")
    axes[1].set_xlabel(f"simulated time, {where}")
    axes[1].set_xscale("log")
    axes[1].xaxis.set_major_formatter(FuncFormatter(tick_seconds))
    share_legend(figure, axes, 4)
    return figure
