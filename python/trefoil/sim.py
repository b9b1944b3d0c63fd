"""The simulator from Python: points, sweeps, data frames, figures.

    import trefoil
    outcomes = trefoil.sim.sweep([{"gpus": g, "tokens": 64} for g in (8, 16, 32)])
    trefoil.sim.frame(outcomes)                                      # pandas
    trefoil.sim.figure(outcomes, x="gpus").savefig("time.png")       # matplotlib

A point is a dictionary of the options of `trefoil simulate`: "physical_experts" for
--physical-experts, True for a flag. Sweeps are those of trefoil.sweeping: resumed, on all cores or
many machines. Names end in the unit: seconds, bytes, us (microseconds), gb (10^9 bytes), gb_per_s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trefoil.sweeping import Outcome, SweepError, Value, sweep
from trefoil.table import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Outcome", "SweepError", "figure", "frame", "rows", "simulate", "sweep"]


def simulate(**point: Value) -> dict[str, Any]:
    """What `trefoil simulate --json` prints for these options (docs/sim.md); `seconds` is the time
    of dispatch and combine.

    ValueError, with the command's sentence: the options make no sense. SweepError: the command was
    not found, or failed.
    """
    (outcome,) = sweep([point], progress=False)
    if outcome.answer is None:
        raise ValueError(outcome.refusal)
    return outcome.answer


def _flat(answer: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects, each by its path; null and lists are left out."""
    for name, value in answer.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, (bool, int, float, str)):
            yield before + name, value


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A dictionary an outcome, all with the same names: the points' options, the answers' values,
    `refusal`.

    Nested values have dots, "dispatch.seconds" or "combine.bytes.net". An option has the point's
    value (rail_fail for "rail-fail"), else the answer's; None: neither says it. A refused point
    has its options and the sentence in `refusal`, which is "" for others.
    """
    points = [{n.replace("-", "_"): v for n, v in o.point.items()} for o in outcomes]
    answers = [dict(_flat(o.answer or {})) for o in outcomes]
    names = dict.fromkeys(n for values in (*points, *answers) for n in values)
    for name in ("format", "version", "refusal"):
        names.pop(name, None)
    return [
        {**{n: p.get(n, a.get(n)) for n in names}, "refusal": o.refusal}
        for o, p, a in zip(outcomes, points, answers, strict=True)
    ]


def frame(outcomes: Sequence[Outcome]) -> Any:
    """The rows as a pandas data frame. ImportError: without pandas."""
    return data_frame(rows(outcomes))


def figure(
    outcomes: Sequence[Outcome],
    x: str,
    y: str = "seconds",
    by: str | Sequence[str] | None = None,
) -> Figure:
    """A matplotlib figure of column y over column x of `rows`; a line for each value of `by`.

    `by` may be several columns. Axes are logarithmic where values span a wide range. Refused points
    are left out. Marks are hollow where the costs are used outside of what they were fitted to.

    ValueError: a column does not exist or holds no numbers, no point has an answer, or a line has
    two values of y at one x.
    """
    from trefoil.sweep_plot import picture

    return picture(rows(outcomes), x, y, (by,) if isinstance(by, str) else tuple(by or ()))
