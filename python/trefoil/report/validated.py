"""What `trefoil validate --json` says, as typed records for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.report.results import ResultError, _Fields, _load


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


@dataclass(frozen=True)
class Validation:
    ok: bool
    parts: list[ValidatedPart]
    times_ok: bool
    times: list[ValidatedTimes]
    goal: str


def load_validation(path: Path) -> Validation:
    top = _load(path)
    if top.data.get("format") != "trefoil-validate":
        raise ResultError(f"{path}: is not the output of trefoil validate --json")
    parts, times = [], []
    for name in ("results", "bytes"):
        if top.data.get(name) is not None:
            parts.append(_part(name, _Fields(top.data[name], f"{path}: {name}")))
    found, goal = top.data.get("times"), ""
    if found is not None:
        fields = _Fields(found, f"{path}: times")
        for n, data in enumerate(fields.get("sets", list)):
            times.append(_times(data, f"{path}: times.sets[{n}]"))
        limits = _Fields(fields.get("goal", dict), f"{path}: times.goal")
        mape, p90 = limits.number("mape_percent"), limits.number("p90_percent")
        goal = f"at most {mape:g} % on average and {p90:g} % in the 90th percentile"
    return Validation(
        ok=top.get("ok", bool),
        parts=parts,
        times_ok=found is None or bool(found.get("ok")),
        times=times,
        goal=goal,
    )


def _part(name: str, fields: _Fields) -> ValidatedPart:
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
    fields = _Fields(data, where)
    stated = fields.data.get("stated_mape_percent")
    own_form = fields.data.get("fitted_closed_form_mape_percent")
    points = fields.get("points", list, default=[])
    return ValidatedTimes(
        name=fields.get("name", str),
        part=fields.get("part", str),
        rows=fields.get("rows", int),
        mape=fields.number("mape_percent"),
        stated=None if stated is None else fields.number("stated_mape_percent"),
        p90=fields.number("p90_percent"),
        worst=fields.number("worst_percent"),
        worst_row=fields.get("worst_row", str),
        closed_form=fields.number("closed_form_mape_percent"),
        fitted_closed_form=(
            None if own_form is None else fields.number("fitted_closed_form_mape_percent")
        ),
        inside=fields.get("inside_interval", int),
        agrees=fields.get("agrees", bool),
        meets_goal=fields.get("meets_goal", bool),
        points=[_point(data, f"{where}.points[{n}]") for n, data in enumerate(points)],
    )


def _point(data: Any, where: str) -> TimedPoint:
    fields = _Fields(data, where)
    numbers = ("nodes", "ranks", "hidden", "tokens", "topk", "sms")
    times = ("measured_us", "predicted_us", "fixed_us", "busy_us")
    return TimedPoint(
        op=fields.get("op", str),
        part=fields.get("part", str),
        limit=fields.get("limit", str),
        **{name: fields.get(name, int) for name in numbers},
        **{name: fields.number(name) for name in times},
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
