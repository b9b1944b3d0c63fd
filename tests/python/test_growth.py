"""Intervals beyond what was fitted: on every committed split, about nine rows in ten lie inside.

Parts of a split are fitted anew by the closed form. The rows beyond, which were not fitted, are at
one step (up to one doubling) or at two. Prints the table of docs/fit.md.
"""

import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from trefoil.fit.growth import Beyond, _nearest, coverage, growth_of, rows_beyond
from trefoil.fit.job import make_job
from trefoil.fit.model import ClosedForm
from trefoil.fit.split import load_split, split_files
from trefoil.simulator import CostRecord, Costs

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="Python lacks scipy")
NO_STEP = {  # no part of ten rows
    "trefoil-ll-h200": "10 rows",
    "trefoil-ht-h200": "8 rows",
    "trefoil-ll-domains-h100x2": "10 rows",
    "trefoil-ht-domains-h100x2": "2 rows",
}
FEW = {  # rows beyond, so that one is a large share
    ("deepep-ht-h100", 1, 4),  # 32 of 38
    ("deepep-ll-h100", 1, 2),  # 11 of 13 of each operation
}
MANY_ROWS = 40  # with fewer, one row is too much of a share for an upper bound
POINTS = 4  # a cost that rows hardly determine ends elsewhere on another CPU's BLAS
PAGE = Path(__file__).parents[2] / "docs" / "fit.md"


@cache
def beyond(name: str) -> list[Beyond]:
    return rows_beyond(make_job(load_split(name)))


def shares(name: str, growth: str) -> dict[str, tuple[int, float]]:
    found = coverage(beyond(name), CostRecord(growth))
    return {step: (n, 100 * covered / n) for step, (n, covered) in found.items() if n}


@needs_scipy
@pytest.mark.parametrize("name", sorted(split_files()))
def test_nine_in_ten_lie_inside_beyond_the_fit(name: str) -> None:
    found = shares(name, name)
    if name in NO_STEP:
        assert not found
        return
    assert set(found) == {"one", "two"}
    for step, (n, percent) in found.items():
        print(f"{name:<24} {step} beyond: {percent:.1f} % of {n}")
        assert percent >= 85, step
        assert percent <= 95 or n < MANY_ROWS, step
    row = re.search(rf"\| {name} \| (\d+) % of (\d+) \| (\d+) % of (\d+) \|", PAGE.read_text())
    stated = [int(cell) for cell in row.groups()]
    assert stated[1::2] == [n for n, _ in found.values()]
    assert stated[::2] == pytest.approx([percent for _, percent in found.values()], abs=POINTS)


@needs_scipy
def test_more_nodes_than_fitted() -> None:
    """One node fitted, two tested; one and two, four; one, four."""
    for name in ("deepep-ll-h100", "deepep-ht-h100"):
        for fitted, tested in ((1, 2), (2, 4), (1, 4)):
            rows = [
                row
                for row in beyond(name)
                if row.record.fields.range.nodes[1] == fitted and row.case.nodes == tested
            ]
            rows = [row for row in rows if row.doublings == pytest.approx(np.log2(tested / fitted))]
            counts = coverage(rows, CostRecord(name)).values()
            few = (name, fitted, tested) in FEW
            n, covered = (sum(part) for part in zip(*counts, strict=True))
            print(f"{name}: {fitted} fitted, {tested} tested: {covered} of {n}")
            assert n >= 26 and covered >= (0.8 if few else 0.85) * n


@needs_scipy
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("deepep-ll-h100-1node", "deepep-ll-h200-1node"),
        ("deepep-ll-h200-1node", "deepep-ll-h100-1node"),
    ],
)
def test_the_growth_of_another_cluster_covers_as_well(name: str, other: str) -> None:
    for step, (n, percent) in shares(name, other).items():
        print(f"{name} by {other}: {step} beyond: {percent:.1f} % of {n}")
        assert 80 <= percent <= 95 + POINTS


@needs_scipy
def test_a_record_has_the_growth_of_its_split() -> None:
    """The smallest; one with rows of its own, and one that takes another record's."""
    for name in ("trefoil-ll-h200x2b", "trefoil-ht-h200"):
        fields, found = CostRecord(name).fields, growth_of(make_job(load_split(name)))
        for i, op in enumerate(("dispatch", "combine")):
            for key in ("per_doubling", "across_nodes"):
                stated, own = getattr(fields, key)[i], found[op][key]
                assert (stated.n, stated.value) == (own["n"], pytest.approx(own["value"], abs=2e-3))
                assert ("from" in own) == (own["n"] == 0)


def test_every_record_widens() -> None:
    for name in CostRecord.names():
        fields = CostRecord(name).fields
        point = {key: getattr(fields.range, key)[1] for key in ("nodes", "ranks", "hidden")}
        point |= {key: getattr(fields.range, key)[1] for key in ("experts", "topk", "tokens")}
        for op in ("dispatch", "combine"):
            ends = []
            for times in (1, 2, 4):
                where = {**point, "ranks": times * point["ranks"]}
                found = CostRecord(name).interval(op, where, 100.0)
                assert found.doublings == pytest.approx(np.log2(times))
                ends.append((-found.low_us, found.high_us))
            assert ends[0] < ends[1] < ends[2]


def test_the_growth_nearest_to_nine_in_ten() -> None:
    """Ten rows at one step and ten at two, covered from 0.01, 0.02, ... and from twice as much."""
    needed = np.array([*np.arange(1, 11), *(2 * np.arange(1, 11))]) / 100
    near = np.arange(20) < 10
    assert _nearest(needed[:10], near[:10]) == pytest.approx(0.09)
    assert _nearest(needed, near) == pytest.approx(0.16)  # 100 % and 80 %


def test_a_part_of_the_closed_form_predicts_the_same() -> None:
    job = make_job(load_split("trefoil-ll-h200x2b"))
    costs = Costs.record("trefoil-ll-h200x2b")
    cases = [replace(case) for case in job.outside[:12]]
    form, chosen = ClosedForm(job.plans, cases), np.array([1, 4, 7])
    assert form.part(chosen).predict(costs).tolist() == form.predict(costs)[chosen].tolist()
