"""Dispatch and combine through trefoil.ep are the reference's, byte for byte."""

from __future__ import annotations

from functools import partial

import pytest

import ep_needs  # noqa: F401
from ep_steps import MODES, Case, Outputs, by_reference, through_ep, with_processes, with_threads


def check(case: Case, outputs: list[Outputs]) -> None:
    for rank, (got, expected) in enumerate(zip(outputs, by_reference(case), strict=True)):
        assert got.bytes() == expected.bytes(), f"rank {rank}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_threads(mode: str, seed: int) -> None:
    case = Case(mode, seed=seed)
    check(case, with_threads(partial(through_ep, case), case.ranks))


@pytest.mark.parametrize("mode", MODES)
def test_processes(mode: str) -> None:
    case = Case(mode, ranks=2, seed=9)
    check(case, with_processes(partial(through_ep, case), case.ranks))
