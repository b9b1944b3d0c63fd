"""How intervals widen outside the range of a fit (trefoilCostRecordInterval).

The closed form is fitted to parts of a split's rows: those up to, or from, each value of a column.
The rows beyond are at one step (up to one doubling) or at two. The growth is the one with which the
widened intervals cover nearly 90 % at either step. Rows that are not balanced are not scored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trefoil.fit.cases import OPS, Case
from trefoil.fit.job import Job
from trefoil.fit.model import Array, ClosedForm
from trefoil.fit.record import range_of
from trefoil.fit.search import fit, scores
from trefoil.simulator import CostRecord, Interval
from trefoil.structs import Record, Residuals

Indices = npt.NDArray[np.int64]
COLUMNS = ("ranks", "tokens", "hidden", "experts", "topk", "sms")  # that parts are made by
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

    @property
    def across_nodes(self) -> bool:
        return self.case.nodes > 1 and self.record.fields.range.nodes[1] == 1

    @property
    def is_near(self) -> bool:
        return self.doublings <= 1 + 1e-9

    @property
    def excess(self) -> float:
        """The logarithm by which the part's interval would have to widen, to hold the row."""
        inside = self.record.interval(self.case.op, _point(self.case), self.us)
        us = self.case.us
        return math.log(max(1.0, us / inside.high_us, inside.low_us / us))

    def interval(self, growth: CostRecord) -> Interval:
        """With the growth of a record."""
        fields = copy.copy(self.record.fields)
        fields.per_doubling = growth.fields.per_doubling
        fields.across_nodes = growth.fields.across_nodes
        return CostRecord.of_fields(fields).interval(self.case.op, _point(self.case), self.us)


def _point(case: Case) -> dict[str, int]:
    return {**case.point, "sms": case.sms}


def _subsets(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """All rows; the rows up to each value of a column, and from it on, EP groups only up to."""
    yield list(cases)
    for column in COLUMNS:
        values = sorted({getattr(case, column) for case in cases})
        for most in values[:-1]:
            yield [case for case in cases if getattr(case, column) <= most]
        for least in values[1:] if column != "ranks" else ():
            yield [case for case in cases if getattr(case, column) >= least]


def _of_part(job: Job, part: list[Case]) -> CostRecord:
    """With the part's range, and nothing else."""
    fields = Record()
    for name, ends in range_of(replace(job, inside=part)).items():
        op, _, rest = name.partition("_")
        is_row = rest == "row_bytes"
        place = fields.range.row_bytes[OPS.index(op)] if is_row else getattr(fields.range, name)
        place[:] = ends
    return CostRecord.of_fields(fields)


class _Parts:
    """Fits to parts of a split. All rows are counted once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cases = job.inside + [case for case in job.outside if case.is_balanced]
        self.form = ClosedForm(job.plans, self.cases)
        self.measured = np.array([case.us for case in self.cases])
        self.is_held = np.arange(len(self.cases)) >= len(job.inside)
        self.is_balanced = np.array([case.is_balanced for case in self.cases])
        self.whole = self._doublings(_of_part(job, job.inside))

    def _doublings(self, record: CostRecord) -> Array:
        intervals = (record.interval(case.op, _point(case), 1.0) for case in self.cases)
        return np.array([interval.doublings for interval in intervals])

    def _predict(self, chosen: Indices) -> Array:
        """All rows, by costs fitted to some. A cost that they do not show stays where it starts."""
        costs, ranges = self.job.split.given(), self.job.split.ranges
        part = self.form.part(chosen)
        fit(part.predict, self.measured[chosen], costs, ranges, tolerance=TOLERANCE)
        return self.form.predict(costs)

    def beyond(self, part: list[Case]) -> list[Beyond]:
        """Rows beyond the whole range count for that, and for a part that ends farther away."""
        record = _of_part(self.job, part)
        doublings = self._doublings(record)
        is_farther = doublings > (self.whole if len(part) < len(self.job.inside) else 0)
        places = np.flatnonzero(is_farther & (doublings <= MOST_DOUBLINGS) & self.is_balanced)
        least = max(LEAST_OF_PART, len(self.job.split.ranges) + 1)
        if len(part) < least or len(places) == 0:
            return []
        members = set(part)
        chosen = np.flatnonzero([case in members for case in self.cases])
        predicted = self._predict(chosen)
        near = np.flatnonzero(self.is_held & (doublings == 0))
        for residuals, rows in (
            (record.fields.inside, chosen),
            (record.fields.outside, near),
        ):
            found = scores([self.cases[i] for i in rows], predicted[rows])
            for i, op in enumerate(OPS):
                score = found[op]
                residuals[i] = Residuals(score.n, score.low, score.high, score.mape_percent)
        return [
            Beyond(self.cases[i], float(predicted[i]), record, float(doublings[i])) for i in places
        ]


def rows_beyond(job: Job) -> list[Beyond]:
    """The rows of a split beyond its parts."""
    parts = _Parts(job)
    return [row for part in _subsets(job.inside) for row in parts.beyond(part)]


def _nearest(needed: Array, near: npt.NDArray[np.bool_]) -> float:
    """The growth that covers nearly COVER of the rows at one step, and of those at two."""
    steps = [np.sort(needed[chosen]) for chosen in (near, ~near) if chosen.any()]
    growths = np.unique(needed)
    shares = [np.searchsorted(step, growths, side="right") / len(step) for step in steps]
    off = np.max([np.abs(share - COVER) for share in shares], axis=0)
    return math.ceil(1e4 * growths[int(np.argmin(off))]) / 1e4


def growth_of(job: Job) -> dict[str, Any]:
    """The growth of a record's intervals, as JSON (models/cost.schema.json)."""
    rows, found = rows_beyond(job), {}
    for op in OPS:
        own = [row for row in rows if row.case.op == op]
        per_doubling = across_nodes = None
        within = [row for row in own if not row.across_nodes]
        if len(within) >= LEAST_ROWS:
            per_doubling = _growth([row.excess / row.doublings for row in within], within)
        across = [row for row in own if row.across_nodes]
        if len(across) >= LEAST_ROWS and per_doubling:
            each = per_doubling["value"]
            needed = [
                max(0.0, row.excess - each * row.doublings) / math.log2(row.case.nodes)
                for row in across
            ]
            across_nodes = _growth(needed, across)
        found[op] = {
            "per_doubling": per_doubling or _borrowed("per_doubling", job, op),
            "across_nodes": across_nodes or _borrowed("across_nodes", job, op),
        }
    return found


def _growth(needed: Sequence[float], rows: Sequence[Beyond]) -> dict[str, Any]:
    near = np.array([row.is_near for row in rows])
    return {"value": _nearest(np.array(needed), near), "n": len(rows)}


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
