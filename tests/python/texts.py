"""Where the texts of a picture lie."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def _undrawn(figure: Figure) -> set[Text]:
    """Labels of ticks that lie outside of their axis."""
    found: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            found |= _outside(axis)
    return found


def _outside(axis: Axis) -> set[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return {text for t in ticks if not low <= t.get_loc() <= high for text in (t.label1, t.label2)}


def texts_of(figure: Figure) -> list[tuple[str, float, Bbox]]:
    """Each drawn text with its size in points and its box in pixels."""
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    undrawn = _undrawn(figure)
    return [
        (t.get_text(), t.get_fontsize(), t.get_window_extent(renderer))
        for t in figure.findobj(Text)
        if t.get_visible() and t.get_text().strip() and t not in undrawn
    ]


def overlapping(figure: Figure) -> Iterator[tuple[str, str]]:
    """Pairs of texts whose boxes share more than a pixel's edge."""
    texts = texts_of(figure)
    for i, (one, _, a) in enumerate(texts):
        for other, _, b in texts[i + 1 :]:
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            if wide > 1 and high > 1:
                yield one, other
