"""The picture of a search: tokens a second of a GPU against latency. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from trefoil import plot
from trefoil.capacity.batch_search import Search
from trefoil.capacity.plan_plots import MODE_COLOURS, MODE_MARKERS
from trefoil.plot import GREY, INK, grid_lines, panels, tick_seconds


def _panel_title(s: Search, context: int) -> str:
    best = s.best(context)
    if best is None:
        return f"context {context:,}: nothing meets the limits"
    c = best.configuration
    most = f"{c.mode.upper()} EP {c.ep}, {best.question.tokens:,} tokens a GPU"
    return f"context {context:,}; most tokens: {most}"


def pareto(s: Search) -> Figure:
    """A panel a context: what meets the limits, what does not, and the frontier."""
    contexts = s.contexts
    figure, axes = panels(len(contexts), 1, (4.7, 3.1), 0.5)
    for of, context in zip(axes, contexts, strict=True):
        known = [c for c in s.candidates(context) if c.throughput > 0]
        frontier = s.frontier(context)
        for mode in dict.fromkeys(c.configuration.mode for c in known):
            here = [c for c in known if c.configuration.mode == mode]
            style = {"linestyle": "none", "marker": MODE_MARKERS[mode], "markersize": 4}
            meets = [c for c in here if c.meets]
            of.plot(
                [c.latency for c in meets],
                [c.throughput for c in meets],
                color=MODE_COLOURS[mode],
                label=f"{mode.upper()}, meets the limits",
                **style,
            )
            misses = [c for c in here if not c.meets]
            of.plot(
                [c.latency for c in misses],
                [c.throughput for c in misses],
                color=GREY,
                markerfacecolor="none",
                label=f"{mode.upper()}, does not",
                **style,
            )
        of.plot(
            [c.latency for c in frontier],
            [c.throughput for c in frontier],
            color=INK,
            linewidth=1.2,
            label="frontier",
        )
        _time_axis(of, [c.latency for c in known])
        of.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        of.set_ylim(0, max(c.throughput for c in known) * 1.15)
        grid_lines(of, "both")
        of.set_title(_panel_title(s, context), fontsize=9, loc="left")
        idle = any(c.configuration.used(c.question) < c.question.gpus for c in known)
        of.set_ylabel("tokens/s a GPU" + (", idle ones too" if idle else ""))
    axes[-1].set_xlabel(
        "time " + {"prefill": "to the first token"}.get(s.question.load, "of a token")
    )
    plot.share_legend(figure, axes, 2)
    return figure


def _time_axis(axes: Axes, times: list[float]) -> None:
    """Seconds along a logarithmic axis, five ticks at most."""
    low, high = min(times) / 1.25, max(times) * 1.25
    ticks = plot.log_ticks(low, high)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    if len(ticks) < 3:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.set_xticks(ticks[:: max(1, -(-len(ticks) // 5))])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(tick_seconds))


def save_all(s: Search, folder: Path) -> list[Path]:
    figure = pareto(s)
    written = []
    for suffix in (".svg", ".png"):
        path = folder / f"pareto{suffix}"
        plot.write(path, figure)
        written.append(path)
    return written
