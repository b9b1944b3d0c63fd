"""The report's pictures of runs and closed forms: each function returns one SVG element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from trefoil.plot import (
    INK,
    OP_COLOURS,
    annotate,
    as_svg,
    grid_lines,
    log_ticks,
    named_rows,
    picture,
    tick_seconds,
)
from trefoil.report.results import Plan, Run
from trefoil.units import format_bytes, format_seconds

ALONE = {"linestyle": "none"}
LIMIT_MARKERS = {"nvlink": "o", "nic": "s", "latency": "^"}


def _byte_unit(largest: float) -> tuple[float, str]:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= factor:
            return factor, unit
    return 1, "B"


def traffic_map(run: Run, op: str) -> str:
    """Bytes from each rank (row) to each rank (column) of one operation."""
    data = np.array(run.dispatch_bytes if op == "dispatch" else run.combine_bytes, dtype=float)
    factor, unit = _byte_unit(data.max(initial=0.0))
    many = run.ranks > 16
    figure, axes = picture(4.3, 3.75)
    edges = np.arange(run.ranks + 1) - 0.5
    # Few enough colours that the bar, like the cells, is drawn as shapes and not as a picture.
    colours = colormaps["cividis_r"].resampled(32)
    colours.set_bad("white")  # nothing was sent: no colour
    shown = np.ma.masked_equal(data / factor, 0)
    image = axes.pcolormesh(edges, edges, shown, cmap=colours, vmin=0)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    for n in range(1, run.nodes):
        edge = n * run.ranks_per_node - 0.5
        axes.axhline(edge, color=INK, linewidth=1.2)
        axes.axvline(edge, color=INK, linewidth=1.2)
    if not many:
        middle = data.max(initial=0.0) * 0.55
        for (source, target), count in np.ndenumerate(data):
            value = count / factor
            label = (
                f"{value:.0f}"
                if value >= 99.5
                else f"{value:.1f}"
                if value >= 10
                else f"{value:.2g}"
            )
            colour = "white" if count > middle else INK
            axes.text(target, source, label, ha="center", va="center", color=colour, fontsize=8)
            if run.tiers[source][target] == "self":
                box = Rectangle((target - 0.44, source - 0.44), 0.88, 0.88, fill=False)
                box.set(edgecolor=colour, linestyle=":", linewidth=0.9)
                axes.add_patch(box)
        axes.set_xticks(range(run.ranks))
        axes.set_yticks(range(run.ranks))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"{op}: {format_bytes(data.sum())} in all", fontsize=9)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)
    bar.set_label(f"{unit} per rank pair")
    return as_svg(figure, f"{run.mode} {op}: bytes from each rank to each rank")


def time_points(runs: Sequence[Run]) -> str:
    """Seconds of each operation of each run: points, as a logarithmic axis has no start."""
    ops = ("update", "dispatch", "combine", "reference")
    figure, axes = picture(4.6, 0.55 + 0.78 * len(runs))
    low = min((s for r in runs for s in r.seconds.values() if s > 0), default=1e-6)
    high = max((s for r in runs for s in r.seconds.values()), default=1.0)
    for n, run in enumerate(runs):
        for m, op in enumerate(ops):
            seconds = run.seconds.get(op, 0.0)
            if seconds <= 0:
                continue
            y = n + (m - 1.5) * 0.2
            axes.plot(seconds, y, "o", color=OP_COLOURS[op], markersize=5)
            text = f"{op} {format_seconds(seconds)}"
            annotate(axes, text, (seconds, y), (6, 0), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * 60)
    grid_lines(axes, "x")
    nodes = [f", {r.nodes} nodes" if r.nodes > 1 else "" for r in runs]
    labels = [f"{r.mode}\n{r.tokens:,} tokens{n}" for r, n in zip(runs, nodes, strict=True)]
    named_rows(axes, range(len(runs)), labels)
    axes.xaxis.set_major_formatter(FuncFormatter(tick_seconds))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_xlabel("time (logarithmic)")
    return as_svg(figure, "time of update, dispatch, combine and of the reference, per run")


def limit_kind(limit: str) -> str:
    """nvlink, nic or latency: what a limiting port belongs to."""
    for kind in ("nvlink", "nic", "net"):
        if kind in limit:
            return "nic" if kind == "net" else kind
    return "latency"


def prediction_curves(plan: Plan) -> str:
    """Time over the number of GPUs, both logarithmic; the marker says what limits."""
    figure, axes = picture(4.6, 3.4)
    gpus = [p.gpus for p in plan.points]
    last = plan.points[-1].seconds
    upper = "dispatch" if last["dispatch"] > last["combine"] else "combine"
    close = max(last.values()) < 1.25 * min(last.values())
    for op in ("dispatch", "combine"):
        seconds = [p.seconds[op] for p in plan.points]
        dashes = "-" if op == "dispatch" else (0, (3, 2))  # both show where they coincide
        axes.plot(gpus, seconds, color=OP_COLOURS[op], linewidth=1.8, linestyle=dashes)
        for point, value in zip(plan.points, seconds, strict=True):
            marker = LIMIT_MARKERS[limit_kind(point.limit[op])]
            filled = OP_COLOURS[op] if marker == "o" else "white"
            style = {"marker": marker, "markersize": 7 if op == "dispatch" else 4.5, **ALONE}
            axes.plot(point.gpus, value, color=OP_COLOURS[op], markerfacecolor=filled, **style)
        up = 0 if not close else 6 if op == upper else -6
        annotate(axes, op, (gpus[-1], seconds[-1]), (7, up), va="center", color=OP_COLOURS[op])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(gpus, [str(g) for g in gpus])
    axes.minorticks_off()
    axes.set_xlim(gpus[0] / 1.2, gpus[-1] * 2.4)
    values = [v for p in plan.points for v in p.seconds.values() if v > 0]
    axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
    axes.set_yticks(log_ticks(min(values) / 1.6, max(values) * 1.6))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_seconds))
    grid_lines(axes)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("time of one operation")
    used = {limit_kind(text) for p in plan.points for text in p.limit.values()}
    names = {"nvlink": "NVLink port limits", "nic": "NIC port limits", "latency": "latency limits"}
    for kind in (k for k in LIMIT_MARKERS if k in used):
        marker = LIMIT_MARKERS[kind]
        filled = INK if marker == "o" else "white"
        style = {"marker": marker, "markerfacecolor": filled, **ALONE}
        axes.plot([], [], color=INK, label=names[kind], **style)
    axes.legend(loc="lower right", frameon=False, fontsize=8, handletextpad=0.2)
    title = f"{plan.mode.upper()}, {plan.tokens:,} tokens a GPU"
    axes.set_title(title, fontsize=9)
    return as_svg(figure, f"predicted time over GPUs: {title}")
