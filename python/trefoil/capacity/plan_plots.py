"""Pictures of a capacity plan: scaling, LL against HT, what-ifs, memory, and loads of links.

Each function returns a matplotlib figure; as_svg makes an element for a page of it, save_all files.
Colours are Okabe and Ito's; mode is told apart by marker and label too, cells of maps by a colour
scale that is even in lightness. Labels name units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from trefoil import plot
from trefoil.capacity.configuration import Configuration
from trefoil.capacity.crossover import Sample
from trefoil.capacity.plan import CapacityPlan
from trefoil.plot import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    annotate,
    as_svg,
    grid_lines,
    named_rows,
    panels,
    tick_seconds,
)
from trefoil.units import format_bytes, format_seconds

MODE_COLOURS = {"ll": BLUE, "ht": ORANGE}
MODE_MARKERS = {"ll": "o", "ht": "s"}
WHAT_IF_STYLES: dict[str, dict[str, Any]] = {
    "ll": {"marker": "o", "markerfacecolor": None, "linestyle": "-"},
    "ht": {"marker": "s", "markerfacecolor": "white", "linestyle": (0, (4, 2))},
}
# Colour and hatch of a part of a GPU's memory.
MEMORY_STYLES = {
    "routed experts": (SKY, ""),
    "attention": (GREEN, ""),
    "shared and dense": (GREEN, "//"),
    "embeddings and head": (GREEN, ".."),
    "KV cache": (ORANGE, ""),
    "EP buffers": (BLUE, ""),
    "activations": (ORANGE, "//"),
    "other": (GREY, ""),
}
# A kind of link, and how many columns it has a node.
MAP_KINDS = (
    ("nvlink-out", "NVLink out"),
    ("nvlink-in", "NVLink in"),
    ("nic-out", "network out"),
    ("nic-in", "network in"),
)


OF_LINE: dict[str, Any] = {"of": ("data", "axes fraction"), "va": "top", "fontsize": 8}
LEGEND: dict[str, Any] = {"facecolor": "white", "framealpha": 1, "edgecolor": "none", "fontsize": 8}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, (axes,) = panels(1, 1, (width, height), 0)
    return figure, axes


def _modes(plan: CapacityPlan) -> list[str]:
    return list(dict.fromkeys(c.mode for c in plan.configurations))


def _of_mode(plan: CapacityPlan, mode: str) -> list[Configuration]:
    return sorted((c for c in plan.configurations if c.mode == mode), key=lambda c: c.ep)


def _time_axis(axes: Axes, values: Sequence[float]) -> None:
    plot.time_axis(axes, min(values) / 1.5, max(values) * 1.5, 7, tick_seconds)
    grid_lines(axes)


def _doubling_axis(
    axes: Axes, values: Sequence[int], room: float = 1.0, first: Sequence[int] = ()
) -> None:
    plot.doubling_axis(axes, values, first)
    axes.set_xlim(min(values) / 1.25, max(values) * 1.25 * room)


def _mode_line(axes: Axes, mode: str, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(
        x, y, color=MODE_COLOURS[mode], marker=MODE_MARKERS[mode], markersize=5, linewidth=1.8
    )


def _band(
    axes: Axes, mode: str, x: Sequence[float], ends: Sequence[tuple[float, float] | None]
) -> bool:
    known = [(at, *e) for at, e in zip(x, ends, strict=True) if e is not None]
    if not known:
        return False
    at, low, high = zip(*known, strict=True)
    if len(known) == 1:
        axes.vlines(at, low, high, color=MODE_COLOURS[mode], alpha=0.35, linewidth=6)
    else:
        axes.fill_between(at, low, high, color=MODE_COLOURS[mode], alpha=0.16, linewidth=0)
    return True


EMPTY: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": "none"}


def _hollow(axes: Axes, mode: str, points: Sequence[tuple[float, float]]) -> bool:
    """Marks that lie outside what the costs were fitted to; whether there are any."""
    if points:
        style = {**EMPTY, "marker": MODE_MARKERS[mode], "markersize": 5}
        axes.plot(*zip(*points, strict=True), color=MODE_COLOURS[mode], **style)
    return bool(points)


def _name_lines(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Names lines at their right ends, a line's height apart."""
    order = sorted(ends, key=lambda mode: ends[mode][1])
    close = len(order) == 2 and ends[order[1]][1] < 1.3 * ends[order[0]][1]
    for n, mode in enumerate(order):
        up = (-6 if n == 0 else 6) if close else 0
        style = {"va": "center", "color": MODE_COLOURS[mode], "fontweight": "bold"}
        annotate(axes, mode.upper(), ends[mode], (8, up), **style)


def scaling(plan: CapacityPlan) -> Figure:
    """A layer's time over EP size: expected, interval, bound."""
    q = plan.question
    figure, axes = _figure(4.7, 3.5)
    values, ends, banded, carried = [], {}, False, False
    for mode in _modes(plan):
        of = _of_mode(plan, mode)
        eps, times = [c.ep for c in of], [c.layer for c in of]
        banded |= _band(axes, mode, eps, [c.interval for c in of])
        axes.plot(
            eps, [c.bound for c in of], color=MODE_COLOURS[mode], linestyle=":", linewidth=1.4
        )
        _mode_line(axes, mode, eps, times)
        carried |= _hollow(axes, mode, [(c.ep, c.layer) for c in of if c.outside])
        values += times + [c.bound for c in of] + [c.high for c in of]
        ends[mode] = (eps[-1], times[-1])
    _name_lines(axes, ends)
    if q.max_us is not None:
        limit = q.max_us * 1e-6
        axes.axhline(limit, color=INK, linewidth=1, linestyle=(0, (6, 3)))
        of = ("axes fraction", "data")
        annotate(axes, f"limit {q.max_us:g} µs", (0.01, limit), (0, 3), of=of, fontsize=8)
        values.append(limit)
    _time_axis(axes, values)
    _doubling_axis(axes, sorted({c.ep for c in plan.configurations}), 1.25)
    axes.set_xlabel("EP size: GPUs of a group")
    axes.set_ylabel("dispatch + combine of a layer")
    axes.plot([], [], color=GREY, linestyle=":", linewidth=1.4, label="bound: bytes over line rate")
    if banded:
        axes.fill_between([], [], [], color=GREY, alpha=0.3, label="about 90 %")
    if carried:
        axes.plot([], [], color=GREY, markersize=5, label="extrapolated", **EMPTY)
    axes.legend(loc="lower right", **LEGEND)
    axes.set_title(f"{q.moe} on {q.cluster}, {q.tokens:,} tokens a GPU", fontsize=9)
    return figure


def _samples(plan: CapacityPlan, ep: int, mode: str) -> list[Sample]:
    unique = {s.tokens: s for s in plan.samples if s.ep == ep and s.mode == mode}
    return [unique[tokens] for tokens in sorted(unique)]


def crossover(plan: CapacityPlan) -> Figure | None:
    """A layer's time over tokens, LL and HT, in the groups that are shown; where they cross."""
    if plan.pictured is None:
        return None
    ep = plan.configurations[plan.pictured].ep
    lines = {mode: _samples(plan, ep, mode) for mode in ("ll", "ht")}
    if not all(len(line) > 1 for line in lines.values()):
        return None
    figure, axes = _figure(4.7, 3.5)
    ends, values, tokens = {}, [], set()
    for mode, line in lines.items():
        at, times = [s.tokens for s in line], [s.seconds for s in line]
        bands = [
            (s.low, s.high) if s.low is not None and s.high is not None else None for s in line
        ]
        _band(axes, mode, at, bands)
        _mode_line(axes, mode, at, times)
        _hollow(axes, mode, [(s.tokens, s.seconds) for s in line if not s.covers])
        ends[mode] = (at[-1], times[-1])
        values += times + [b[1] for b in bands if b] + [b[0] for b in bands if b]
        tokens |= set(at)
    _name_lines(axes, ends)
    _time_axis(axes, values)
    shown = sorted(tokens)
    of_plan = [n for n in shown if n == plan.question.tokens]
    _doubling_axis(axes, shown if len(shown) < 9 else shown[::2], 1.5, of_plan)
    ends_at = shown[0] / 1.3, shown[-1] * 2.2
    axes.set_xlim(ends_at)
    found = next((x for x in plan.crossovers if x.ep == ep), None)
    if found and found.tokens is not None:
        axes.axvline(found.tokens, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        text = f"HT faster from\n~{round(found.tokens):,} tokens"
        is_left = found.tokens**2 < ends_at[0] * ends_at[1]  # of the middle: more room on the right
        side, ha = (5, "left") if is_left else (-5, "right")
        annotate(axes, text, (found.tokens, 0.97), (side, 0), ha=ha, **OF_LINE)
    axes.set_xlabel("tokens a GPU")
    axes.set_ylabel("dispatch + combine of a layer")
    if any(not s.covers for line in lines.values() for s in line):
        axes.plot([], [], color=GREY, markersize=5, label="extrapolated", **EMPTY)
        axes.legend(loc="lower right", **LEGEND)
    costs = ", ".join(found.costs) if found else ""
    axes.set_title(
        f"LL or HT in groups of {ep} GPUs" + (f"\ncosts {costs}" if costs else ""), fontsize=9
    )
    return figure


def memory(plan: CapacityPlan) -> Figure:
    """Memory of a GPU by what takes it, a bar a configuration."""
    q = plan.question
    of = plan.configurations
    figure, axes = _figure(4.7, 0.95 + 0.27 * len(of))
    names = [name for name in of[0].memory.parts if any(c.memory.parts[name] for c in of)]
    y = np.arange(len(of))
    left = np.zeros(len(of))
    for name in names:
        colour, hatch = MEMORY_STYLES[name]
        width = np.array([c.memory.parts[name] for c in of]) / 1e9
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(y, width, left=left, height=0.72, label=name, **style)
        left += width
    limit, most = q.usable_gb or 0.0, max([*left, q.usable_gb or 0]) * 1.3
    for at, total, c in zip(y, left, of, strict=True):
        text = format_bytes(total * 1e9) + (" ✓ cheapest" if c.verdict == "cheapest" else "")
        # Beside the line of the limit, not across it.
        begin = limit if 0 <= limit - total < 0.3 * most else total
        annotate(axes, text, (begin, at), (4, 0), va="center", fontsize=8)
    if q.usable_gb is not None:
        axes.axvline(q.usable_gb, color=INK, linewidth=1, linestyle=(0, (6, 3)))
        above = {"of": ("data", "axes fraction"), "ha": "center", "va": "bottom", "fontsize": 8}
        annotate(axes, f"limit {q.usable_gb:g} GB", (q.usable_gb, 1.0), (0, 2), **above)
    named_rows(axes, y, [f"{c.mode.upper()} EP {c.ep}" for c in of])
    axes.set_xlim(0, most)
    axes.set_xlabel("GB of a GPU")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def what_if(plan: CapacityPlan) -> Figure | None:
    """How many times as long a layer takes under each change, over EP size."""
    names = list(dict.fromkeys(w.name for c in plan.configurations for w in c.what_if))
    if not names:
        return None
    figure, axes = _figure(4.7, 3.3)
    colours = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", SKY, INK)
    eps = sorted({c.ep for c in plan.configurations})
    most = 1.0
    for n, name in enumerate(names):
        for mode in _modes(plan):
            of = [
                (c.ep, w.factor)
                for c in _of_mode(plan, mode)
                for w in c.what_if
                if w.name == name and w.factor is not None
            ]
            if not of:
                continue
            at, factors = zip(*of, strict=True)
            most = max(most, *factors)
            style = {"color": colours[n % len(colours)], "linewidth": 1.5, "markersize": 5}
            style |= WHAT_IF_STYLES[mode]
            axes.plot(at, factors, label=f"{name}, {mode.upper()}", **style)
    axes.axhline(1, color=GREY, linewidth=0.8)
    _doubling_axis(axes, eps)
    if most > 4:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"× {value:g}"))
    grid_lines(axes)
    axes.set_xlabel("EP size: GPUs of a group")
    axes.set_ylabel("layer's time, of that without")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def link_maps(plan: CapacityPlan, op: str) -> Figure | None:
    """Share of the operation's time that each port works: a row a node, a column a GPU or port."""
    if plan.pictured is None or not plan.links:
        return None
    c = plan.configurations[plan.pictured]
    maps = []
    for kind, name in MAP_KINDS:
        links = [link for link in plan.links if link["op"] == op and link["kind"] == kind]
        if links:
            maps.append((name, links))
    if not maps:
        return None
    nodes, per_node = c.nodes, c.ep // c.nodes
    across = min(2, len(maps))  # NVLink above the network, out beside in
    down = len(maps) // across
    height = min(0.75 + 0.17 * nodes, 3.4)
    figure, grids = panels(down * across, across, (4.7 / across, height), 0.6)
    image, colours = None, colormaps["YlGnBu"].resampled(25)
    for axes, (name, links) in zip(grids, maps, strict=True):
        columns = _columns(links, nodes, per_node)
        grid = np.full((nodes, columns), np.nan)
        for link in links:
            grid[link["index"] // columns, link["index"] % columns] = 100 * link["share"]
        image = axes.pcolormesh(
            np.arange(columns + 1) - 0.5,
            np.arange(nodes + 1) - 0.5,
            np.ma.masked_invalid(grid),
            cmap=colours,
            vmin=0,
            vmax=100,
            edgecolors="white",
            linewidth=0.6 if nodes <= 16 else 0,
        )
        if nodes <= 8 and columns <= 8:
            for (node, column), share in np.ndenumerate(grid):
                if np.isfinite(share):
                    ink = "white" if share > 55 else INK
                    place = {"ha": "center", "va": "center", "fontsize": 8}
                    axes.text(column, node, f"{share:.0f}", color=ink, **place)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
        axes.set_xticks(range(columns) if columns <= 8 else range(0, columns, 8))
        axes.set_yticks(range(nodes) if nodes <= 16 else range(0, nodes, max(1, nodes // 16)))
        busiest = max(links, key=lambda link: link["bytes"])
        axes.set_title(f"{name}: at most {format_bytes(busiest['bytes'])}", fontsize=8)
        axes.set_xlabel("GPU" if "NVLink" in name else "port", fontsize=8)
        if axes in grids[::across]:
            axes.set_ylabel("node", fontsize=8)
        else:
            axes.set_yticklabels([])
    bar = figure.colorbar(image, ax=grids, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("busy, % of the time", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    seconds = getattr(c, op).seconds
    figure.suptitle(f"{c.mode.upper()} {op}, EP {c.ep}: {format_seconds(seconds)}", fontsize=9)
    return figure


def _columns(links: Sequence[dict], nodes: int, per_node: int) -> int:
    """Ports of a node: as many as GPUs, or fewer where GPUs share them."""
    most = max(link["index"] for link in links) + 1
    return per_node if most > nodes * per_node // 2 else max(1, -(-most // nodes))


PICTURES: tuple[tuple[str, str, Callable[[CapacityPlan], Figure | None]], ...] = (
    ("scaling", "a layer's time over EP size", scaling),
    ("crossover", "LL and HT over tokens", crossover),
    ("what-if", "a layer's time under changes", what_if),
    ("memory", "memory of a GPU by what takes it", memory),
    ("links-dispatch", "work of every link in dispatch", lambda p: link_maps(p, "dispatch")),
    ("links-combine", "work of every link in combine", lambda p: link_maps(p, "combine")),
)


def as_svgs(plan: CapacityPlan) -> dict[str, str]:
    """Elements for a page, by name."""
    figures = ((name, title, draw(plan)) for name, title, draw in PICTURES)
    return {name: as_svg(figure, title) for name, title, figure in figures if figure is not None}


def save_all(plan: CapacityPlan, folder: Path) -> list[Path]:
    """Every picture as SVG and PNG."""
    written = []
    for name, _, draw in PICTURES:
        figure = draw(plan)
        if figure is None:
            continue
        for suffix in ("svg", "png"):
            path = folder / f"{name}.{suffix}"
            plot.write(path, figure)
            written.append(path)
    return written
