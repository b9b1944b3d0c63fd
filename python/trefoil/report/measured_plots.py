"""Pictures of what was measured and what was predicted: each function returns one SVG element.

latency_curve   an operation of low latency over tokens: median, spread, goals, the plain copy
sm_sweep        an operation of high throughput over SMs: the same
scatter         measured against predicted times, rows held out apart from those fitted
parts           what the predicted times are made of, the measured ones beside them
scaling         predictions to many GPUs, with intervals
ratios          times under other circumstances, relative to balanced and undisturbed ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from trefoil.export.predicted import Predicted
from trefoil.plot import (
    BLUE,
    GREEN,
    GREY,
    INK,
    OP_COLOURS,
    ORANGE,
    SKY,
    annotate,
    as_svg,
    doubling_axis,
    grid_lines,
    log_ticks,
    named_rows,
    picture,
    tick_seconds,
)
from trefoil.report.figures import Figure
from trefoil.report.goals import Answer
from trefoil.report.validated import TimedPoint

BASE_US = 3.4  # added to the copy's time in low latency (docs/results.md)
PARTS = (("fixed", BLUE), ("busiest resource", ORANGE), ("latency, filling", GREEN))
PART_HATCHES = ("", "///", "...")


def _us_axis(axes: Axes, values: Sequence[float], log: bool = True, of: str = "y") -> None:
    """An axis of microseconds, labelled with units; a short range is linear in any case."""
    axis, low, high = (axes.yaxis if of == "y" else axes.xaxis), min(values), max(values)
    limits = axes.set_ylim if of == "y" else axes.set_xlim
    if log and high > 3 * low:
        (axes.set_yscale if of == "y" else axes.set_xscale)("log")
        limits(low / 1.3, high * 1.3)
        ticks = [1e6 * t for t in log_ticks(1e-6 * low / 1.3, 1e-6 * high * 1.3)]
        most = 7 if of == "y" else 5
        if len(ticks) > most:
            ticks = [t for t in ticks if f"{t:.0e}"[0] == "1"]
        axis.set_ticks(ticks)
        axis.set_minor_locator(NullLocator())
    elif log:
        room = 0.12 * (high - low)
        limits(low - room, high + room)
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda v, _: tick_seconds(1e-6 * v)))
    grid_lines(axes, "y" if of == "y" else "both")


def _legend_below(axes: Axes, columns: int, down: float = -0.2) -> None:
    axes.legend(
        frameon=False,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, down),
        ncols=columns,
        handlelength=1.8,
        columnspacing=1.2,
    )


def _spread(axes: Axes, x: Sequence[float], of: Sequence[Figure], colour: str) -> None:
    below = [f.us - f.low_us for f in of]
    above = [f.high_us - f.us for f in of]
    axes.errorbar(
        x,
        [f.us for f in of],
        yerr=[below, above],
        color=colour,
        marker="o",
        markersize=4.5,
        linewidth=1.7,
        elinewidth=1.2,
        capsize=3,
        label=f"measured, bars {of[0].spread}",
    )


def _goal_marks(axes: Axes, x: Sequence[float], us: Sequence[float]) -> None:
    if x:
        style = {"marker": "_", "markersize": 15, "markeredgewidth": 2, "linestyle": "none"}
        axes.plot(x, us, color=INK, label="goal: at most", **style)


def latency_curve(title: str, figures: Sequence[Figure], goals: Sequence[Answer]) -> str:
    """figures: one operation, ascending tokens."""
    figure, axes = picture(4.2, 3.1)
    tokens = [f.tokens for f in figures]
    _spread(axes, tokens, figures, BLUE)
    bounds = [(f.tokens, f.bound_us + BASE_US) for f in figures if f.bound_us]
    if bounds:
        x, us = zip(*bounds, strict=True)
        label = f"plain copy of its bytes + {BASE_US} µs"
        axes.plot(x, us, color=GREY, linestyle="--", linewidth=1.3, label=label)
    _goal_marks(axes, [g.tokens for g in goals], [g.goal_us for g in goals])
    values = [*(f.us for f in figures), *(f.high_us for f in figures)]
    _us_axis(axes, [*values, *(us for _, us in bounds), *(g.goal_us for g in goals)])
    doubling_axis(axes, tokens)
    axes.set_xlabel("tokens of a rank")
    axes.set_ylabel("time of the slowest rank")
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return as_svg(figure, f"{title}: time over tokens")


def _apart(values: Sequence[int], least: float) -> list[int]:
    """Of ascending values the first, and each that is `least` or more above the last one kept."""
    kept: list[int] = []
    for value in values:
        if not kept or value - kept[-1] >= least:
            kept.append(value)
    return kept


def sm_sweep(title: str, figures: Sequence[Figure], goals: Sequence[Answer]) -> str:
    """figures: one operation, ascending SMs."""
    figure, axes = picture(4.2, 3.1)
    sms = [f.sms for f in figures]
    _spread(axes, sms, figures, BLUE)
    bound = next((f.bound_us for f in figures if f.bound_us), 0.0)
    if bound:
        label = "plain copy of its bytes"
        axes.axhline(bound, color=GREY, linestyle="--", linewidth=1.3, label=label)
    _goal_marks(axes, [g.max_sms for g in goals], [g.goal_us for g in goals])
    labelled = _apart([f.sms for f in figures if f.bound_us], 0.13 * max(sms))
    for f in figures:
        if f.bound_us and f.sms in labelled:
            share = f"{100 * f.bound_us / f.us:.0f} %"
            annotate(axes, share, (f.sms, f.high_us), (4, 5), ha="left", fontsize=8)
    high = max(f.high_us for f in figures)
    axes.set_ylim(0, high * 1.25)
    _us_axis(axes, [high], log=False)
    axes.set_xlim(0, max(sms) * 1.12)
    axes.set_xticks(_apart(sms, 0.08 * max(sms)))
    axes.set_xlabel("SMs of the kernel")
    axes.set_ylabel("time of the slowest rank")
    axes.set_title(f"{title}; % of the copy's rate", fontsize=9)
    _legend_below(axes, 3)
    return as_svg(figure, f"{title}: time over SMs")


# ---- Predicted against measured ------------------------------------------------------------------


def scatter(title: str, points: Sequence[TimedPoint]) -> str:
    """Filled marks are rows that were not fitted; lines are equality and 10 % to both sides."""
    figure, axes = picture(4.2, 3.9)
    values = [v for p in points for v in (p.measured_us, p.predicted_us)]
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
                      color=GREY, alpha=0.15, linewidth=0, label="within 10 %")  # fmt: skip
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.9)
    for op, marker in (("dispatch", "o"), ("combine", "s")):
        for fitted in (True, False):
            own = [p for p in points if p.op == op and (p.part == "fitted") is fitted]
            if not own:
                continue
            axes.plot(
                [p.measured_us for p in own],
                [p.predicted_us for p in own],
                linestyle="none",
                marker=marker,
                markersize=4 if len(points) > 60 else 5.5,
                color=OP_COLOURS[op],
                markerfacecolor="white" if fitted else OP_COLOURS[op],
                markeredgewidth=0.8,
                alpha=0.85,
                label=f"{op}, {'fitted' if fitted else 'not fitted'} ({len(own)})",
            )
    _us_axis(axes, values, of="x")
    _us_axis(axes, values)
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return as_svg(figure, f"{title}: predicted against measured times")


# ---- Where the time goes -------------------------------------------------------------------------


def parts(title: str, points: Sequence[TimedPoint], labels: Sequence[str]) -> str:
    """Stacked bars, one a point, in percent of the measured time."""
    figure, axes = picture(4.3, 0.9 + 0.27 * len(points))
    rows, left = np.arange(len(points)), np.zeros(len(points))
    shares = [
        [p.fixed_us for p in points],
        [p.busy_us for p in points],
        [max(0.0, p.predicted_us - p.fixed_us - p.busy_us) for p in points],
    ]
    for (name, colour), hatch, share in zip(PARTS, PART_HATCHES, shares, strict=True):
        width = np.array([100 * us / p.measured_us for us, p in zip(share, points, strict=True)])
        style = {"color": colour, "alpha": 0.75, "hatch": hatch, "edgecolor": "white"}
        axes.barh(rows, width, left=left, height=0.62, linewidth=0, label=name, **style)
        left += width
    axes.axvline(100, color=INK, linewidth=1.2, label="measured")
    named_rows(axes, rows, labels)
    axes.set_xlim(0, 1.05 * max(110.0, *left))
    axes.set_xlabel("% of the measured time")
    axes.set_title(title, fontsize=9)
    _legend_below(axes, 4, -0.52 / (0.35 + 0.27 * len(points)))
    return as_svg(figure, f"{title}: what the predicted time is made of")


# ---- Scaling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One operation and number of tokens over GPUs, predicted and measured."""

    label: str
    rows: Sequence[Predicted]
    measured: Sequence[Figure] = ()  # of the same operation, by GPUs


def scaling(title: str, lines: Sequence[Line]) -> str:
    figure, axes = picture(4.4, 3.4)
    styles = ((BLUE, "o", "-"), (ORANGE, "s", "-"), (SKY, "^", "--"), (GREEN, "D", "--"))
    for line, (colour, marker, style) in zip(lines, styles * 2, strict=False):
        gpus = [r.gpus for r in line.rows]
        axes.plot(gpus, [r.us for r in line.rows], color=colour, marker=marker, markersize=4.5,
                  linestyle=style, linewidth=1.7, label=line.label)  # fmt: skip
        low, high = [r.low_us for r in line.rows], [r.high_us for r in line.rows]
        if len(gpus) > 1:
            axes.fill_between(gpus, low, high, color=colour, alpha=0.16, linewidth=0)
        else:
            axes.vlines(gpus, low, high, color=colour, linewidth=1.5)
    every = [r for line in lines for r in line.rows]
    seen = {id(f): f for line in lines for f in line.measured}.values()
    if seen:
        style = {"marker": "x", "markersize": 7, "markeredgewidth": 1.6, "linestyle": "none"}
        axes.plot(
            [f.ranks for f in seen], [f.us for f in seen], color=INK, label="measured", **style
        )
    gpus = sorted({r.gpus for r in every} | {f.ranks for f in seen})
    _us_axis(axes, [*(v for r in every for v in (r.low_us, r.high_us)), *(f.us for f in seen)])
    doubling_axis(axes, gpus)
    axes.set_xlim(gpus[0] / 1.4, gpus[-1] * 1.4)
    axes.set_xlabel("GPUs of the EP group")
    axes.set_ylabel("time, predicted with interval")
    axes.set_title(title, fontsize=9)
    _legend_below(axes, 1 if max(len(line.label) for line in lines) > 24 else 2)
    return as_svg(figure, f"{title}: predicted time over GPUs")


# ---- Circumstances ------------------------------------------------------------------------------


def ratios(
    title: str, labels: Sequence[str], times: Sequence[float], bounds: Sequence[float]
) -> str:
    """Bars: time over that of the balanced, undisturbed run; mark: what its bytes alone would be.

    bounds: the same ratio of the bytes of the busiest port; 0: not known.
    """
    figure, axes = picture(4.6, 0.8 + 0.27 * len(labels))
    rows = np.arange(len(labels))
    axes.barh(rows, times, height=0.62, color=BLUE, alpha=0.75, label="time")
    known = [(b, r) for b, r in zip(bounds, rows, strict=True) if b]
    if known:
        x, y = zip(*known, strict=True)
        axes.plot(x, y, linestyle="none", marker="D", markersize=4.5, color=INK,
                  label="bytes of the busiest port")  # fmt: skip
    for row, value, bound in zip(rows, times, bounds, strict=True):
        annotate(axes, f"{value:.2f}", (max(value, bound), row), (7, 0), va="center", fontsize=8)
    axes.axvline(1, color=GREY, linewidth=0.9)
    named_rows(axes, rows, labels)
    axes.set_xlim(0, 1.15 * max(*times, *bounds, 1))
    axes.set_xlabel("times the balanced, undisturbed run")
    axes.set_title(title, fontsize=9)
    _legend_below(axes, 2, -0.52 / (0.35 + 0.27 * len(labels)))
    return as_svg(figure, f"{title}: times under other circumstances")
