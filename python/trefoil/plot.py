"""The one way to draw: style, axes, panels, and the element or file that a figure becomes.

Colours are Okabe and Ito's, which readers with any colour vision tell apart, and no fact is in the
colour alone: lines differ by marker and label, cells carry their number. Pictures of a page are
narrow (about 400 points), so that a phone shows them at full size.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator

from trefoil.outputs import open_whole
from trefoil.units import format_seconds

BLUE, ORANGE, GREEN, SKY, INK = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#222222"
GREY = "#8a8f98"
OP_COLOURS = {"dispatch": BLUE, "combine": ORANGE, "update": GREEN, "reference": "#999999"}
SUFFIXES = (".svg", ".png", ".pdf")
LEAST_PX = 11  # of text on a page

rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "trefoil",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.edgecolor": "#888888",
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


# ---- Axes ---------------------------------------------------------------------------------------


def grid_lines(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    steps = (m * 10.0**e for e in range(-10, 16) for m in (1, 2, 5))
    return [tick for tick in steps if low <= tick <= high] or [low]


def tick_of(text: str) -> str:
    """A number and its unit without the digits that say nothing: "2 ms", not "2.00 ms"."""
    number, _, unit = text.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}".strip()


def tick_seconds(value: float, _: object = None) -> str:
    return tick_of(format_seconds(value))


def log_axis(
    axes: Axes, low: float, high: float, label: Callable[[float], str], most: int = 6
) -> None:
    """Numbers up a logarithmic axis, about `most` ticks."""
    ticks = log_ticks(low, high)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(ticks[:: max(1, len(ticks) // most)])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def time_axis(
    axes: Axes,
    low: float,
    high: float,
    most: int = 6,
    label: Callable[[float], str] = format_seconds,
) -> None:
    """Seconds up a logarithmic axis, about `most` ticks."""
    log_axis(axes, low, high, label, most)


def _readable(axes: Axes, values: Sequence[int], first: Sequence[int]) -> set[int]:
    """Of rising values those whose labels lie side by side; `first` and the ends before others."""
    wide = 72 * axes.figure.get_figwidth() * axes.get_position().width
    doubling = wide / (math.log2(values[-1] / values[0]) + 1)  # points, with room at the ends
    digit = 0.64 * rcParams["font.size"]
    kept: set[int] = set()
    for value in [*first, values[-1], values[0], *values]:
        needs = {k: digit * (len(f"{value:,}") + len(f"{k:,}") + 1) / 2 for k in kept}
        if all(abs(math.log2(value / k)) * doubling >= n for k, n in needs.items()):
            kept.add(value)
    return kept


def doubling_axis(axes: Axes, values: Sequence[int], first: Sequence[int] = ()) -> None:
    """Rising numbers that about double, along a logarithmic axis; where labels would overlap, not
    all have one, but those of `first`."""
    kept = _readable(axes, values, first)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{v:,}" if v in kept else "" for v in values])
    axes.xaxis.set_minor_locator(NullLocator())


def named_rows(axes: Axes, rows: Iterable[Any], names: Sequence[str]) -> None:
    """Rows from the top down, each with its name."""
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def bars_up(axes: Axes, x: Sequence[float], us: Sequence[float], high: Sequence[float], **how: Any):
    """A line of medians with bars up to `high`."""
    above = [max(h - m, 0) for m, h in zip(us, high, strict=True)]
    axes.errorbar(x, us, yerr=[[0] * len(us), above], **{"elinewidth": 0.8, "capsize": 2, **how})


def annotate(
    axes: Axes, text: str, at: tuple[Any, Any], off: tuple[float, float], **how: Any
) -> None:
    """Text `off` points from a place; of: whose coordinates x and y are, else the data's."""
    of = {"xycoords": how.pop("of")} if "of" in how else {}
    axes.annotate(text, at, xytext=off, textcoords="offset points", **of, **how)


# ---- Figures ------------------------------------------------------------------------------------


def picture(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty picture of so many inches, free of pyplot's global state."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def panels(
    count: int, columns: int, size: tuple[float, float], more: float
) -> tuple[Figure, list[Axes]]:
    """So many panels of a size in inches, the rest of the grid empty; more: inches for titles."""
    rows = -(-count // columns)
    inches = (size[0] * columns, size[1] * rows + more)
    figure = Figure(figsize=inches, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, list(grid[:count])


def share_legend(figure: Figure, shown: Iterable[Axes], columns: int) -> None:
    """One legend below for all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in shown:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(list(found.values()), list(found), **place)


def _smallest_px(figure: Figure) -> float:
    """Of the texts that show, at the figure's own size: a point is 4/3 pixels of a page."""
    shown = (t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip())
    return min((t.get_fontsize() * 4 / 3 for t in shown), default=LEAST_PX)


def _svg_text(figure: Figure, **how: Any) -> str:
    """With fonts to fall back on where a machine lacks ours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", **how)
    family = "'DejaVu Sans', Verdana, Arial, sans-serif"
    return re.sub(r"(['\"]?)DejaVu Sans\1", family, buffer.getvalue())


def as_svg(figure: Figure, title: str) -> str:
    """The figure as an inline element, named for screen readers.

    It takes the width of its column between that at which its smallest text has LEAST_PX pixels
    and its own (if larger); in a narrower column it is scrolled.
    """
    text = _svg_text(figure, bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    width = re.search(r'width="([\d.]+)pt"', text)
    own = float(width.group(1)) * 4 / 3 if width else 0
    least = math.ceil(own * LEAST_PX / _smallest_px(figure))
    style = f'style="min-width:{least}px;max-width:{max(math.ceil(own), least)}px"'
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}" {style}', 1)


def own_ids(svg: str, number: int) -> str:
    """The picture with ids of its own: they are unique within a picture, but a page holds many."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="p{number}-\1"', svg)
    return re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>p{number}-", svg)


def write(path: Path, figure: Figure) -> None:
    """As .svg, .png or .pdf, whole or not at all; .svg so large that no text is below LEAST_PX."""
    if path.suffix == ".svg":
        factor = max(1.0, LEAST_PX / _smallest_px(figure))

        def scaled(size: re.Match[str]) -> str:
            return f' {size[1]}="{float(size[2]) * factor:.6g}pt"'

        text = re.sub(
            r'\s(width|height)="([\d.]+)pt"',
            scaled,
            _svg_text(figure, metadata={"Date": None}),
            count=2,
        )
        with open_whole(path, "wb") as file:
            file.write(text.encode())
        return
    with open_whole(path, "wb") as file:
        figure.savefig(file, dpi=160, format=path.suffix[1:])
