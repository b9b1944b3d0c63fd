"""One fit: cases by a split, a form of the model, parameters and scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trefoil.fit.cases import Case, read_table
from trefoil.fit.model import ClosedForm, Plans, Replay
from trefoil.fit.search import Fitted, Score, fit, scores
from trefoil.fit.split import Split, SplitError
from trefoil.reference import TrefoilError
from trefoil.simulator import Costs
from trefoil.verb import show_progress

SIMGRID_TOKENS = 4096  # of all ranks together


@dataclass
class Outcome:
    """One form, fitted and scored."""

    form: str
    fitted: Fitted
    costs: Costs
    inside: dict[str, Score]
    outside: dict[str, Score]
    inside_us: list[float]  # predicted, in the job's order
    outside_us: list[float]


@dataclass
class Job:
    split: Split
    plans: Plans
    inside: list[Case]
    outside: list[Case]


def make_job(split: Split, table: Path | None = None) -> Job:
    cases = read_table(
        table or split.table, split.text.get("time", "transmit"), split.text.get("gpus_per_node", 8)
    )
    if cases[0].mode != split.text["mode"]:
        raise SplitError(
            f"{split.path}: is for {split.text['mode']}, but {table or split.table} has the "
            f"columns of {cases[0].mode}"
        )
    cases = split.with_masks(cases)
    inside, outside = split.choose("fit", cases), split.choose("score", cases)
    if set(inside) & set(outside):
        raise SplitError(f"{split.path}: some rows are both fitted and scored")
    if len(inside) <= len(split.ranges):
        raise SplitError(
            f"{split.path}: {len(inside)} times are fitted, too few for {len(split.ranges)} costs"
        )
    return Job(split, Plans(split.setting), inside, outside)


def run_form(job: Job, form: str, also: Sequence[dict[str, float]] = ()) -> Outcome:
    def model(cases: list[Case]) -> Any:
        return ClosedForm(job.plans, cases) if form == "closed-form" else Replay(job.plans, cases)

    costs = job.split.given()
    measured = np.array([case.us for case in job.inside])
    predictor = model(job.inside)
    found = fit(
        predictor.predict,
        measured,
        costs,
        job.split.ranges,
        also=also,
        starts=24 if form == "closed-form" else 1,
        report=lambda evaluations: show_progress(f"{form}: {evaluations} evaluations"),
    )
    show_progress()
    outside = model(job.outside).predict(costs) if job.outside else np.empty(0)
    inside = predictor.predict(costs)
    return Outcome(
        form,
        found,
        costs,
        scores(job.inside, inside),
        scores(job.outside, outside),
        inside.tolist(),
        outside.tolist(),
    )


def compare_with_simgrid(job: Job, outcome: Outcome, count: int) -> dict[str, float] | None:
    """SimGrid against the queues on `count` cases, none larger than SimGrid does quickly."""
    cases = [c for c in job.inside + job.outside if c.ranks * c.tokens <= SIMGRID_TOKENS]
    cases.sort(key=lambda c: (c.ranks * c.tokens, c.op, c.sms))
    chosen = [cases[i] for i in np.linspace(0, len(cases) - 1, count).round().astype(int)]
    try:
        simgrid = Replay(job.plans, chosen, "simgrid").predict(outcome.costs)
    except TrefoilError as error:
        print(f"trefoil fit: SimGrid was not asked: {error}", file=sys.stderr)
        return None
    queues = Replay(job.plans, chosen, "queues").predict(outcome.costs)
    apart = 100 * np.abs(queues / simgrid - 1)
    return {
        "n": count,
        "mean_percent": round(float(apart.mean()), 2),
        "worst_percent": round(float(apart.max()), 2),
    }
