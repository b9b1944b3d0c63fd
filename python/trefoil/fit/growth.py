"""How intervals widen outside the range of a fit (trefoilCostRecordInterval).

The closed form is fitted to parts of a split's rows: those up to, or from, each value of a column.
The rows beyond are at one step (up to one doubling) or at two. Rows beyond the whole range are
predicted by the record itself. Of each kind of distance the growth is the one with which widened
intervals cover nearly 90 % at either step, beyond parts and beyond the whole. Rows that are not
balanced are not scored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trefoil.fit.cases import OPS, Case
from trefoil.fit.job import Job, Outcome
from trefoil.fit.model import Array, ClosedForm
from trefoil.fit.record import point_of, range_record
from trefoil.fit.search import fit, scores
from trefoil.simulator import CostRecord, Interval
from trefoil.structs import Growth, Residuals

Indices = npt.NDArray[np.int64]
COLUMNS = ("ranks", "tokens", "hidden", "experts", "topk", "sms")  # that parts are made by
GROWTHS = (
    "per_doubling",
    "per_scale",
    "across_nodes",
)  # each counts where those before it are known
COVER = 0.9
MOST_DOUBLINGS = 2 + 1e-9
LEAST_OF_PART = 10  # rows, half of them of an operation
LEAST_ROWS = 20  # beyond parts; with fewer the growth is another record's
TOLERANCE = 1e-4  # of the fits to parts


@dataclass(frozen=True)
class Beyond:
    """A row that was not fitted, beyond a part."""

    case: Case
    us: float  # by the costs of the part
    record: CostRecord  # of the part: range and residuals, no growth
    doublings: float
    is_whole: bool  # beyond all that was fitted, by the record's own costs

    @property
    def is_near(self) -> bool:
        return self.doublings <= 1 + 1e-9

    @property
    def excess(self) -> float:
        """The logarithm by which the part's interval would have to widen, to hold the row."""
        inside = self.record.interval(self.case.op, point_of(self.case), self.us)
        us = self.case.us
        return math.log(max(1.0, us / inside.high_us, inside.low_us / us))

    @cached_property
    def distances(self) -> dict[str, float]:
        """Doublings that each growth counts."""
        found = {}
        for name in GROWTHS:
            fields = copy.copy(self.record.fields)
            fields.inside = fields.within = (Residuals * 2)()
            setattr(fields, name, (Growth * 2)(*[Growth(1, 1.0)] * 2))
            unit = CostRecord.of_fields(fields).interval(self.case.op, point_of(self.case), 1.0)
            found[name] = math.log(unit.high_us)
        return found

    @property
    def kind(self) -> str:
        """The last growth that counts."""
        return [name for name in GROWTHS if self.distances[name] > 1e-9][-1]

    def interval(self, growth: CostRecord) -> Interval:
        """With the growth of a record."""
        fields = copy.copy(self.record.fields)
        for name in GROWTHS:
            setattr(fields, name, getattr(growth.fields, name))
        return CostRecord.of_fields(fields).interval(self.case.op, point_of(self.case), self.us)


def _subsets(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """All rows; the rows up to each value of a column, and from it on, EP groups only up to."""
    yield list(cases)
    for column in COLUMNS:
        values = sorted({getattr(case, column) for case in cases})
        for most in values[:-1]:
            yield [case for case in cases if getattr(case, column) <= most]
        for least in values[1:] if column != "ranks" else ():
            yield [case for case in cases if getattr(case, column) >= least]


def scored_cases(job: Job) -> list[Case]:
    """Rows that were fitted, and balanced ones that were held out."""
    return job.inside + [case for case in job.outside if case.is_balanced]


class _Parts:
    """Fits to parts of a split. All rows are counted once."""

    def __init__(self, job: Job, whole_us: Array) -> None:
        self.job, self.whole_us = job, whole_us
        self.cases = scored_cases(job)
        self.form = ClosedForm(job.plans, self.cases)
        self.measured = np.array([case.us for case in self.cases])
        self.is_held = np.arange(len(self.cases)) >= len(job.inside)
        self.is_balanced = np.array([case.is_balanced for case in self.cases])
        self.whole = self._doublings(range_record(job))

    def _doublings(self, record: CostRecord) -> Array:
        intervals = (record.interval(case.op, point_of(case), 1.0) for case in self.cases)
        return np.array([interval.doublings for interval in intervals])

    def _predict(self, chosen: Indices) -> Array:
        """All rows, by costs fitted to some. A cost that they do not show stays where it starts."""
        costs, ranges = self.job.split.given(), self.job.split.ranges
        part = self.form.part(chosen)
        fit(part.predict, self.measured[chosen], costs, ranges, tolerance=TOLERANCE)
        return self.form.predict(costs)

    def beyond(self, part: list[Case]) -> list[Beyond]:
        """Rows beyond the whole range count for that, and for a part that ends farther away."""
        record = range_record(replace(self.job, inside=part))
        doublings, is_whole = self._doublings(record), len(part) == len(self.job.inside)
        is_farther = doublings > (0 if is_whole else self.whole)
        places = np.flatnonzero(is_farther & (doublings <= MOST_DOUBLINGS) & self.is_balanced)
        least = max(LEAST_OF_PART, len(self.job.split.ranges) + 1)
        if len(part) < least or len(places) == 0:
            return []
        members = set(part)
        chosen = np.flatnonzero([case in members for case in self.cases])
        predicted = self.whole_us if is_whole else self._predict(chosen)
        within = np.flatnonzero(self.is_held & (doublings == 0))
        for residuals, rows in (
            (record.fields.inside, chosen),
            (record.fields.within, within),
        ):
            found = scores([self.cases[i] for i in rows], predicted[rows])
            for i, op in enumerate(OPS):
                score = found[op]
                residuals[i] = Residuals(score.n, score.low, score.high, score.mape_percent)
        return [
            Beyond(self.cases[i], float(predicted[i]), record, float(doublings[i]), is_whole)
            for i in places
        ]


def rows_beyond(job: Job, whole_us: Array) -> list[Beyond]:
    """The rows of a split beyond its parts. whole_us: of scored_cases, by the record."""
    parts = _Parts(job, whole_us)
    return [row for part in _subsets(job.inside) for row in parts.beyond(part)]


def _nearest(needed: Array, groups: Indices) -> float:
    """The growth that covers nearly COVER of each group of rows that is no smaller than a part:
    least squares of the shares."""
    labels, sizes = np.unique(groups, return_counts=True)
    labels = labels[sizes >= min(LEAST_OF_PART, sizes.max())]
    growths = np.unique(needed)
    each = [np.sort(needed[groups == label]) for label in labels]
    shares = [np.searchsorted(group, growths, side="right") / len(group) for group in each]
    off = np.sum([(share - COVER) ** 2 for share in shares], axis=0)
    return math.ceil(1e4 * growths[int(np.argmin(off))]) / 1e4


def growth_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The growth of a record's intervals, as JSON (models/cost.schema.json)."""
    held = zip(job.outside, outcome.outside_us, strict=True)
    balanced = [us for case, us in held if case.is_balanced]
    rows = rows_beyond(job, np.array([*outcome.inside_us, *balanced]))
    found: dict[str, Any] = {}
    for op in OPS:
        own, known = [row for row in rows if row.case.op == op], {}
        for name in GROWTHS:
            chosen = [row for row in own if row.kind == name]
            growth = _growth(name, chosen, known) if len(chosen) >= LEAST_ROWS else None
            known[name] = growth if growth and growth["value"] else _borrowed(name, job, op)
        found[op] = known
    return found


def _growth(
    name: str, rows: Sequence[Beyond], known: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Of one kind, beside the growths before it."""

    def needed(row: Beyond) -> float:
        of_others = sum(known[other]["value"] * row.distances[other] for other in known)
        return max(0.0, row.excess - of_others) / row.distances[name]

    groups = np.array([2 * row.is_whole + row.is_near for row in rows])
    return {"value": _nearest(np.array([needed(row) for row in rows]), groups), "n": len(rows)}


def _borrowed(name: str, job: Job, op: str) -> dict[str, Any]:
    """The largest of the library's records of the same mode that have rows of their own."""
    known: list[tuple[float, str]] = []
    for other in CostRecord.names():
        fields = CostRecord(other).fields
        own = getattr(fields, name)[OPS.index(op)]
        is_of_mode = bool(fields.is_ht) == (job.split.text["mode"] == "ht")
        if own.n > 0 and is_of_mode and other != job.split.text["name"]:
            known.append((own.value, other))
    value, other = max(known)
    return {"value": value, "n": 0, "from": other}


def coverage(rows: Sequence[Beyond], growth: CostRecord) -> dict[str, tuple[int, int]]:
    """Rows, and those in their intervals with the growth of a record, at one step and at two."""
    found = {}
    for name, is_near in (("one", True), ("two", False)):
        chosen = [row for row in rows if row.is_near == is_near]
        intervals = ((row.case.us, row.interval(growth)) for row in chosen)
        covered = sum(i.low_us <= us <= i.high_us for us, i in intervals)
        found[name] = (len(chosen), covered)
    return found
