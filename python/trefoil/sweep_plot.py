"""The picture of a sweep: a column over another, a line for each value of a third."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from trefoil.plot import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    doubling_axis,
    grid_lines,
    log_axis,
    panels,
    share_legend,
    tick_of,
    tick_seconds,
)
from trefoil.units import format_bytes

Row = Mapping[str, Any]
COLOURS = (BLUE, ORANGE, GREEN, INK, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", ":")
OUTSIDE = "outside the fitted ranges"
WIDE = 4  # an axis is logarithmic where the largest value is so many times the smallest
UNITS = {"_gb_per_s": " (GB/s)", "_gb": " (GB)", "_us": " (µs)", "_tflops": " (TFLOP/s)"}
LABELS = {
    "ep": "GPUs of an EP group",
    "gpus": "GPUs",
    "replicas": "EP groups",
    "seconds": "time of dispatch and combine",
    "sms": "SMs of an operation",
    "tokens": "tokens a GPU",
    "topk": "experts a token",
    "zipf": "exponent of Zipf's law",
}
WORDS = {"ep": "EP", "gpu": "GPU", "hbm": "HBM", "nic": "NIC", "nvlink": "NVLink", "sms": "SMs"}
OF_ALL = ("moe", "cluster", "mode", "gpus", "ep", "tokens", "costs")  # named where all are alike


def label_of(name: str) -> str:
    """A column's name in words, with its unit; ticks of times and bytes have theirs."""
    if name in LABELS:
        return LABELS[name]
    name = name.replace(".", " ")
    for end, unit in UNITS.items():
        if name.endswith(end):
            return label_of(name.removesuffix(end)) + unit
    if name.endswith("seconds"):
        name = name.removesuffix("seconds") + "time"
    return " ".join(WORDS.get(word, word) for word in name.replace("_", " ").split())


def _tick(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return tick_seconds(value)
    if name.rpartition(".")[0].endswith("bytes") or name.endswith("bytes"):
        return tick_of(format_bytes(value))
    return f"{value:,.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(rows: Sequence[Row], answered: Sequence[Row], names: Mapping[str, str]) -> None:
    if not answered:
        said = next((r["refusal"] for r in rows), "there is no outcome")
        raise ValueError(f"no point has an answer: {said}")
    for role, name in names.items():
        if name not in answered[0]:
            near = difflib.get_close_matches(name, answered[0], 3, 0.4)
            raise ValueError(f"{role}: no column {name!r}; near are {', '.join(near) or 'none'}")
    for role, name in names.items():
        values = [r[name] for r in answered if r[name] is not None]
        wrong = [v for v in values if not _is_number(v)]
        if role in ("x", "y") and (wrong or not values):
            found = repr(wrong[0]) if wrong else "no value"
            raise ValueError(f"{role}: column {name!r} has {found}; numbers expected")


def _name(column: str, value: Any) -> str:
    """Of a line: values that are words speak for themselves."""
    if column == "mode":
        return str(value)[:2].upper() + str(value)[2:].replace("-", " ", 1)
    if isinstance(value, str):
        return value
    if column == "ep":
        return f"EP {value}"
    return f"{label_of(column)}: {_tick(column, value) if _is_number(value) else value}"


def _line(rows: Sequence[Row], x: str, y: str, line: str) -> list[Row]:
    """Rising in x, each once. ValueError: two values of y at one x; names what differs first."""
    found: dict[Any, Row] = {}
    for row in rows:
        other = found.setdefault(row[x], row)
        if other[y] != row[y]:
            differ = (n for n in row if other[n] != row[n] and not n.endswith("seconds"))
            what = f"{x} {row[x]}" + (f", {line}" if line else "")
            raise ValueError(
                f"{what}: two values of {y}; by= tells apart: {next(differ, 'nothing')}"
            )
    return [found[value] for value in sorted(found)]


def _along(axes: Axes, name: str, values: Sequence[float]) -> None:
    """The axis of x: logarithmic for whole numbers that span a wide range."""
    whole = all(isinstance(v, int) for v in values)
    if whole and values[0] > 0 and values[-1] >= WIDE * values[0]:
        doubling_axis(axes, [int(v) for v in values])
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(name, v)))
    axes.set_xlabel(label_of(name))


def _up(axes: Axes, name: str, values: Sequence[float]) -> None:
    """The axis of y: logarithmic where values span a wide range, else from 0."""
    low, high = min(values), max(values)
    if low > 0 and high >= WIDE * low:
        log_axis(axes, low / 1.4, high * 1.4, lambda v: _tick(name, v))
    else:
        axes.set_ylim(min(0, 1.1 * low), max(0, 1.1 * high) or 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(name, v)))
    axes.set_ylabel(label_of(name))


def _outside(row: Row, y: str) -> bool:
    """A time whose costs are used outside of what they were fitted to."""
    if not y.endswith("seconds") or y == "wall_seconds":
        return False
    op = y.partition(".")[0]
    ops = [op] if op in ("dispatch", "combine") else ["dispatch", "combine"]
    return any(row.get(f"{op}.interval.covers") is False for op in ops)


def _title(rows: Sequence[Row], drawn: Sequence[str]) -> str:
    """What all points share."""
    parts = []
    grouped = any(r.get("ep") != r.get("gpus") for r in rows)
    for name in OF_ALL if grouped else (n for n in OF_ALL if n != "ep"):
        values = {r.get(name) for r in rows}
        if name in drawn or len(values) != 1 or (value := values.pop()) is None:
            continue
        if isinstance(value, str) or name == "ep":
            parts.append(_name(name, value))
        else:
            parts.append(f"{value:,} {label_of(name)}")
    text = ", ".join(parts)
    if len(text) > 60:
        middle = text.rfind(", ", 0, len(text) // 2 + 10) + 1
        text = text[:middle] + "\n" + text[middle:].strip()
    return text


def _columns(names: Sequence[str]) -> int:
    """Of a legend as wide as the picture."""
    wide = [len(name) + 8 for name in names if name]
    return len(wide) if sum(wide) <= 70 else max(1, 66 // max(wide))


def picture(rows: Sequence[Row], x: str, y: str, by: Sequence[str]) -> Figure:
    """As trefoil.sim.figure of these rows."""
    answered = [r for r in rows if not r["refusal"]]
    _check(rows, answered, {"x": x, "y": y, **{f"by {n}": n for n in by}})
    shown = [r for r in answered if r[x] is not None and r[y] is not None]
    if not shown:
        raise ValueError(f"no point has both {x} and {y}")
    lines: dict[str, list[Row]] = {}
    for row in shown:
        name = ", ".join(_name(n, row[n]) for n in by)
        lines.setdefault(name, []).append(row)
    figure, (axes,) = panels(1, 1, (4.7, 3.1), 0.3 if by else 0.1)
    hollow = False
    for n, (name, of) in enumerate(lines.items()):
        of = _line(of, x, y, name)
        style = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)]}
        dashes = DASHES[n // len(COLOURS) % len(DASHES)]
        how = {"markersize": 5, "linewidth": 1.2, "linestyle": dashes, "label": name or None}
        axes.plot([r[x] for r in of], [r[y] for r in of], **style, **how)
        out = [r for r in of if _outside(r, y)]
        how = {"markersize": 5, "linestyle": "none", "markerfacecolor": "white"}
        axes.plot([r[x] for r in out], [r[y] for r in out], **style, **how)
        hollow |= bool(out)
    if hollow:
        how = {"color": GREY, "marker": "o", "linestyle": "none", "markerfacecolor": "white"}
        axes.plot([], [], **how, markersize=5, label=OUTSIDE)
    _up(axes, y, [r[y] for r in shown])
    _along(axes, x, sorted({r[x] for r in shown}))
    grid_lines(axes, "both")
    axes.set_title(_title(shown, (x, y, *by)), fontsize=9, loc="left")
    if by or hollow:
        share_legend(figure, [axes], _columns([*lines, *([OUTSIDE] if hollow else [])]))
    return figure
