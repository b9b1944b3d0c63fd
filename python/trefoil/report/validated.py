"""What `trefoil validate --json` says, as typed records for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.report.results import Fields, ResultError, load


@dataclass(frozen=True)
class ValidatedPart:
    """Results or bytes: how much was compared, and what differed first."""

    name: str
    ok: bool
    cases: int
    compared: str
    failure: str


@dataclass(frozen=True)
class TimedPoint:
    """One measured time beside the replay's, and what the replay's is made of; microseconds."""

    op: str
    part: str  # "fitted", "held out", "other"
    nodes: int
    ranks: int
    hidden: int
    tokens: int
    topk: int
    sms: int
    measured_us: float
    predicted_us: float
    fixed_us: float
    busy_us: float
    limit: str


@dataclass(frozen=True)
class ValidatedTimes:
    """One set of measurements beside the models; errors in percent."""

    name: str
    part: str
    rows: int
    mape: float
    stated: float | None
    p90: float
    worst: float
    worst_row: str
    closed_form: float  # with the same costs
    fitted_closed_form: float | None  # fitted for itself to the same rows
    inside: int
    agrees: bool
    meets_goal: bool
    points: list[TimedPoint]


IN_JSON = {
    "mape": "mape_percent",
    "stated": "stated_mape_percent",
    "p90": "p90_percent",
    "worst": "worst_percent",
    "closed_form": "closed_form_mape_percent",
    "fitted_closed_form": "fitted_closed_form_mape_percent",
    "inside": "inside_interval",
}


@dataclass(frozen=True)
class Validation:
    ok: bool
    parts: list[ValidatedPart]
    times_ok: bool
    times: list[ValidatedTimes]
    goal: str


def load_validation(path: Path) -> Validation:
    top = load(path)
    if top.data.get("format") != "trefoil-validate":
        raise ResultError(f"{path}: is not the output of trefoil validate --json")
    parts, times = [], []
    for name in ("results", "bytes"):
        if top.data.get(name) is not None:
            parts.append(_part(name, Fields(top.data[name], f"{path}: {name}")))
    found, goal = top.data.get("times"), ""
    if found is not None:
        fields = Fields(found, f"{path}: times")
        for n, data in enumerate(fields.get("sets", list)):
            times.append(_times(data, f"{path}: times.sets[{n}]"))
        limits = Fields(fields.get("goal", dict), f"{path}: times.goal")
        mape, p90 = limits.number("mape_percent"), limits.number("p90_percent")
        goal = f"at most {mape:g} % on average and {p90:g} % in the 90th percentile"
    return Validation(
        ok=top.get("ok", bool),
        parts=parts,
        times_ok=found is None or bool(found.get("ok")),
        times=times,
        goal=goal,
    )


def _part(name: str, fields: Fields) -> ValidatedPart:
    if name == "results":
        compared = f"{fields.get('bytes_compared', int):,} bytes of outputs, guards and inputs"
        if counted := fields.get("bytes_counted", int, default=0):
            compared += f"; {counted:,} bytes counted by the library, by pair as in the plan"
    else:
        tables = fields.get("tables", dict)
        legs = ", ".join(f"{leg} {count:,}" for leg, count in tables.items())
        compared = f"{fields.get('numbers_compared', int):,} numbers; tables: {legs}"
    return ValidatedPart(
        name=name,
        ok=fields.get("ok", bool),
        cases=fields.get("cases", int),
        compared=compared,
        failure=str(fields.data.get("failure") or ""),
    )


def _times(data: Any, where: str) -> ValidatedTimes:
    fields = Fields(data, where)
    points = fields.get("points", list, default=[])
    return fields.record(
        ValidatedTimes,
        IN_JSON,
        points=[
            Fields(data, f"{where}.points[{n}]").record(TimedPoint) for n, data in enumerate(points)
        ],
    )


def verdict(validations: list[Validation]) -> str:
    """One sentence for the top of the page, or ""."""
    if not validations:
        return ""
    if all(v.ok for v in validations):
        times = [t for v in validations for t in v.times]
        if not times:
            return "All legs agree."
        met = sum(t.meets_goal for t in times)
        return (
            "All legs agree; times are off by what the records state, "
            f"{met} of {len(times)} sets within the goal."
        )
    names = [p.name for v in validations for p in v.parts if not p.ok]
    names += ["times" for v in validations if not v.times_ok]
    return f"The legs disagree in {' and '.join(dict.fromkeys(names))}."
