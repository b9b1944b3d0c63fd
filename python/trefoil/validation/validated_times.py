"""The committed measurements against the models: errors, their stated size, and the closed form.

A set is a split with its record (rows that were fitted, rows that were held out), or operations of
ours that no record was fitted to: other layouts and row types by the same costs. It agrees if the
error on the rows held out is what the record says of them: a record that no longer scores what it
states, or rows that changed, are findings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trefoil import places
from trefoil.compare.compare_rows import ROUNDED
from trefoil.export.interchange import OTHER_OPERATIONS, other_cases_of_bench
from trefoil.fit.cases import Case
from trefoil.fit.job import make_job
from trefoil.fit.model import Array, ClosedForm, Plans
from trefoil.fit.search import scores
from trefoil.fit.split import load_split, split_files
from trefoil.inputs import read_text
from trefoil.simulator import CostRecord, Costs, Result

STATED_WITHIN = 0.1  # percent points: records keep four digits
GOAL_MAPE, GOAL_P90 = 4.0, 8.0  # percent, on rows that were not fitted
OTHERS = "ll_kernels_h200x4.json"  # its OTHER_OPERATIONS are set beside the record of LL


@dataclass(frozen=True)
class TimedRow:
    """One measured time beside the replay's, and what the replay's is made of; microseconds."""

    case: Case
    part: str  # "fitted", "held out", "other"
    predicted_us: float
    low_us: float
    high_us: float
    fixed_us: float  # launch, flags, rounds
    busy_us: float  # of the resource that needs longest; the rest is latency and filling
    limit: str  # which that is

    @property
    def is_inside(self) -> bool:
        return self.low_us * (1 - ROUNDED) <= self.case.us <= self.high_us * (1 + ROUNDED)


@dataclass(frozen=True)
class Times:
    """One set of measurements beside the models; errors in percent of the measured time."""

    name: str
    about: str
    mode: str
    ours: bool
    part: str  # "held out", "other operations than were fitted"
    rows: int
    mape: float
    p90: float
    worst: float
    worst_row: str
    inside: int  # rows in their 90 % interval
    fitted_mape: float | None  # on the rows that were fitted
    stated_mape: float | None  # of the same rows, by the record
    closed_form_mape: float  # with the same costs
    fitted_closed_form_mape: float | None  # fitted for itself to the same rows, by the record
    points: tuple[TimedRow, ...]  # those that were fitted, too

    @property
    def agrees(self) -> bool:
        stated = self.stated_mape
        return stated is None or abs(self.mape - stated) <= STATED_WITHIN

    @property
    def meets_goal(self) -> bool:
        return self.mape <= GOAL_MAPE and self.p90 <= GOAL_P90


class Rows:
    """Replays measured cases; both operations of a shape come from one run."""

    def __init__(self, plans: Plans, record: CostRecord, costs: Costs) -> None:
        self._plans, self._record, self._costs = plans, record, costs
        self._runs: dict[tuple[object, ...], Result] = {}

    def of(self, case: Case, part: str) -> TimedRow:
        simulation = self._plans.of(case)
        key = (id(simulation), *case.run_key)
        if key not in self._runs:
            self._runs[key] = simulation.run(self._plans.cluster, self._costs, **case.circumstances)
        found = self._runs[key][case.op]
        us = self._plans.setting.time_of(found)
        interval = self._record.interval(case.op, {**case.point, "sms": case.sms}, us)
        busy = found.max_busy_us
        limit = max(busy, key=lambda kind: busy[kind], default="")
        fixed = self._costs.fixed_us(case.op, self._plans.setting.workload(case).shape)
        return TimedRow(
            case,
            part,
            us,
            interval.low_us,
            interval.high_us,
            fixed,
            busy.get(limit, 0),
            limit,
        )


def _worst(cases: Sequence[Case], predicted: Sequence[float]) -> str:
    errors = [abs(us / case.us - 1) for case, us in zip(cases, predicted, strict=True)]
    i = int(np.argmax(errors))
    c, us = cases[i], predicted[i]
    sms = f", {c.sms} SMs" if c.sms else ""
    return (
        f"{c.op}, {c.ranks} GPUs, {c.tokens} tokens, hidden {c.hidden}, top-{c.topk} of "
        f"{c.experts}{sms}: measured {c.us:.1f} us, predicted {us:.1f} us"
    )


def _times(
    scored: Sequence[TimedRow], closed: Array, also: Sequence[TimedRow] = (), **more: Any
) -> Times:
    """The errors of the rows that are scored; also: further points."""
    cases, predicted = [row.case for row in scored], [row.predicted_us for row in scored]
    found = scores(cases, np.array(predicted))["both"]
    return Times(
        rows=found.n,
        mape=found.mape_percent,
        p90=found.p90_percent,
        worst=found.worst_percent,
        worst_row=_worst(cases, predicted),
        inside=sum(row.is_inside for row in scored),
        closed_form_mape=scores(cases, closed)["both"].mape_percent,
        points=(*scored, *also),
        **more,
    )


def times_of_split(name: str) -> Times:
    split = load_split(name)
    job, record = make_job(split), CostRecord(name)
    costs = Costs.of(record)
    rows_of = Rows(job.plans, record, costs)
    learnt = [rows_of.of(case, "fitted") for case in job.inside]
    fitted = scores(job.inside, np.array([row.predicted_us for row in learnt]))["both"]
    stated = [record.fields.outside[i] for i in range(2)]
    return _times(
        [rows_of.of(case, "held out") for case in job.outside],
        ClosedForm(job.plans, job.outside).predict(costs),
        learnt,
        name=name,
        about=str(split.text["about"]),
        mode=str(split.text["mode"]),
        ours=name.startswith("trefoil"),
        part="held out",
        fitted_mape=fitted.mape_percent,
        stated_mape=sum(s.n * s.mape_pct for s in stated) / max(1, sum(s.n for s in stated)),
        fitted_closed_form_mape=_fitted_closed_form(name),
    )


def _fitted_closed_form(record: str) -> float | None:
    """What the record says of the closed form that was fitted to the same rows and scored on the
    same rows held out; None where the file of the record is not at hand."""
    for folder in places.homes("models/costs", "costs"):
        path = folder / f"{record}.json"
        if path.exists():
            forms = json.loads(read_text(path))["fit"]["forms"]
            return float(forms["closed-form"]["outside"]["mape_percent"])
    return None


def times_of_others(path: Path) -> Times:
    """Rank-major, partial sums and quantised rows, by the costs of expert-major, exact and bf16."""
    record = CostRecord("trefoil-ll-h200")
    costs, setting = Costs.of(record), load_split("trefoil-ll-h200").setting
    points: list[TimedRow] = []
    closed: list[float] = []
    for name, own in other_cases_of_bench(path).items():
        plans = Plans(replace(setting, **OTHER_OPERATIONS[name][1]))
        rows_of = Rows(plans, record, costs)
        points += [rows_of.of(case, "other") for case in own]
        closed += ClosedForm(plans, own).predict(costs).tolist()
    return _times(
        points,
        np.array(closed),
        name="trefoil-ll-h200, others",
        about="Rank-major, partial sums and e4m3 of the kernels alone, by the costs of "
        "expert-major, exact and bf16",
        mode="ll",
        ours=True,
        part="other operations than were fitted",
        fitted_mape=None,
        stated_mape=None,
        fitted_closed_form_mape=None,
    )


def all_times() -> Iterator[Times]:
    files = split_files()
    for name in sorted(files):
        if make_job(load_split(name)).outside:  # else nothing was held out, and nothing is scored
            yield times_of_split(name)
    others = files["trefoil-ll-h200"].parent / OTHERS
    if others.exists():
        yield times_of_others(others)


def _in_json(name: str) -> str:
    if name.endswith(("mape", "p90", "worst")):
        return f"{name}_percent"
    return "inside_interval" if name == "inside" else name


def json_of(t: Times) -> dict[str, Any]:
    own = ((f.name, getattr(t, f.name)) for f in fields(t) if f.name != "points")
    return {
        **{_in_json(name): round(v, 3) if isinstance(v, float) else v for name, v in own},
        "agrees": t.agrees,
        "meets_goal": t.meets_goal,
        "points": [_json_of_row(row) for row in t.points],
    }


def _json_of_row(row: TimedRow) -> dict[str, Any]:
    case = row.case
    return {
        "op": case.op,
        **case.point,
        "sms": case.sms,
        "part": row.part,
        "measured_us": round(case.us, 4),
        "predicted_us": round(row.predicted_us, 3),
        "low_us": round(row.low_us, 3),
        "high_us": round(row.high_us, 3),
        "fixed_us": round(row.fixed_us, 3),
        "busy_us": round(row.busy_us, 3),
        "limit": row.limit,
    }
