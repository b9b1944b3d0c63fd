"""The committed measurements against the models: errors, their stated size, and the closed form.

A set is a split with its record (rows that were fitted, rows that were held out), or operations of
ours that no record was fitted to: other layouts and row types by the same costs. It agrees if the
error on the rows held out is what the record says of them: a record that no longer scores what it
states, or rows that changed, are findings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trefoil.calibrate import ClosedForm, Plans, Replay, Score, scores
from trefoil.compare_rows import Model, compare
from trefoil.fit_job import make_job
from trefoil.interchange import OTHER_OPERATIONS, other_cases_of_bench
from trefoil.measured import Case
from trefoil.simulator import CostRecord, Costs
from trefoil.split import load_split, split_files

STATED_WITHIN = 0.1  # percent points: records keep four digits
GOAL_MAPE, GOAL_P90 = 4.0, 8.0  # percent, on rows that were not fitted
OTHERS = "ll_kernels_h200x4.json"  # its OTHER_OPERATIONS are set beside the record of LL


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

    @property
    def agrees(self) -> bool:
        stated = self.stated_mape
        return stated is None or abs(self.mape - stated) <= STATED_WITHIN

    @property
    def meets_goal(self) -> bool:
        return self.mape <= GOAL_MAPE and self.p90 <= GOAL_P90


def _inside(record: CostRecord, cases: Sequence[Case], predicted: Sequence[float]) -> int:
    count = 0
    for case, us in zip(cases, predicted, strict=True):
        interval = record.interval(case.op, {**case.point, "sms": case.sms}, float(us))
        count += interval.low_us * 0.9995 <= case.us <= interval.high_us * 1.0005
    return count


def _worst(cases: Sequence[Case], predicted: Sequence[float]) -> str:
    errors = [abs(us / case.us - 1) for case, us in zip(cases, predicted, strict=True)]
    i = int(np.argmax(errors))
    c, us = cases[i], predicted[i]
    sms = f", {c.sms} SMs" if c.sms else ""
    return (
        f"{c.op}, {c.ranks} GPUs, {c.tokens} tokens, hidden {c.hidden}, top-{c.topk} of "
        f"{c.experts}{sms}: measured {c.us:.1f} us, predicted {us:.1f} us"
    )


def times_of_split(name: str) -> Times:
    split = load_split(name)
    job, record = make_job(split), CostRecord(name)
    costs = Costs.of(record)
    cases = job.outside
    predicted = Replay(job.plans, cases).predict(costs)
    found = scores(cases, predicted)["both"]
    fitted = scores(job.inside, Replay(job.plans, job.inside).predict(costs))["both"]
    closed = scores(cases, ClosedForm(job.plans, cases).predict(costs))["both"]
    stated = [record.fields.outside[i] for i in range(2)]
    rows = sum(s.n for s in stated)
    return Times(
        name=name,
        about=str(split.text["about"]),
        mode=str(split.text["mode"]),
        ours=name.startswith("trefoil"),
        part="held out",
        rows=found.n,
        mape=found.mape_percent,
        p90=found.p90_percent,
        worst=found.worst_percent,
        worst_row=_worst(cases, predicted),
        inside=_inside(record, cases, predicted),
        fitted_mape=fitted.mape_percent,
        stated_mape=sum(s.n * s.mape_pct for s in stated) / max(1, rows),
        closed_form_mape=closed.mape_percent,
        fitted_closed_form_mape=_fitted_closed_form(name),
    )


def _fitted_closed_form(record: str) -> float | None:
    """What the record says of the closed form that was fitted to the same rows and scored on the
    same rows held out; None where the file of the record is not at hand."""
    root = Path(__file__).resolve().parents[2]
    for folder in (root / "models/costs", root / "costs"):
        path = folder / f"{record}.json"
        if path.exists():
            beside = json.loads(path.read_text(encoding="utf-8"))["fit"]["beside"]
            return float(beside["closed-form"]["outside"]["mape_percent"])
    return None


def times_of_others(path: Path) -> Times:
    """Rank-major, partial sums and quantised rows, by the costs of expert-major, exact and bf16."""
    cases: list[Case] = []
    predicted: list[float] = []
    closed: list[float] = []
    inside = 0
    for name, own in other_cases_of_bench(path).items():
        model = Model("trefoil-ll-h200")
        model.setting = replace(model.setting, **OTHER_OPERATIONS[name][1])
        rows = compare(own, model, [])
        cases += own
        predicted += [r.us for r in rows]
        inside += sum(r.is_inside for r in rows)
        closed += ClosedForm(Plans(model.setting), own).predict(model.costs_of(own[0])).tolist()
    found = Score.of(np.array(predicted), np.array([c.us for c in cases]))
    return Times(
        name="trefoil-ll-h200, others",
        about="Rank-major, partial sums and e4m3 of the same run, by the costs of expert-major, "
        "exact and bf16",
        mode="ll",
        ours=True,
        part="other operations than were fitted",
        rows=found.n,
        mape=found.mape_percent,
        p90=found.p90_percent,
        worst=found.worst_percent,
        worst_row=_worst(cases, predicted),
        inside=inside,
        fitted_mape=None,
        stated_mape=None,
        closed_form_mape=scores(cases, np.array(closed))["both"].mape_percent,
        fitted_closed_form_mape=None,
    )


def all_times() -> Iterator[Times]:
    files = split_files()
    for name in sorted(files):
        yield times_of_split(name)
    others = files["trefoil-ll-h200"].parent / OTHERS
    if others.exists():
        yield times_of_others(others)


def json_of(t: Times) -> dict[str, Any]:
    def rounded(x: float | None) -> float | None:
        return None if x is None else round(x, 3)

    return {
        "name": t.name,
        "about": t.about,
        "mode": t.mode,
        "ours": t.ours,
        "part": t.part,
        "rows": t.rows,
        "mape_percent": rounded(t.mape),
        "p90_percent": rounded(t.p90),
        "worst_percent": rounded(t.worst),
        "worst_row": t.worst_row,
        "inside_interval": t.inside,
        "fitted_mape_percent": rounded(t.fitted_mape),
        "stated_mape_percent": rounded(t.stated_mape),
        "closed_form_mape_percent": rounded(t.closed_form_mape),
        "fitted_closed_form_mape_percent": rounded(t.fitted_closed_form_mape),
        "agrees": t.agrees,
        "meets_goal": t.meets_goal,
    }
