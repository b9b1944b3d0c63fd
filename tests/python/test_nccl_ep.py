"""NVIDIA's package nccl.ep, unchanged, on the CPU library, and trefoil.ep beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import Case, by_reference
from hosts import needs_host
from trefoil import ep

pytestmark = needs_host("nccl", "nccl-extensions")
HERE = Path(__file__).parent
LIMIT = 120.0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_packages_give_what_the_reference_gives(ranks: int, tmp_path: Path) -> None:
    from nccl_ep_rank import CASES

    preload = f"{os.environ['TREFOIL_HOST']}:{os.environ['TREFOIL_CPU']}"
    path = os.pathsep.join([str(HERE), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "nccl_ep_rank.py", str(rank), str(ranks), tmp_path],
            env=os.environ | {"LD_PRELOAD": preload, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, told
    for said, _ in told:
        assert said.split() == [str(ep.get_lib_version()), os.environ["TREFOIL_CPU"]]
    for i, of in enumerate(CASES):
        case = Case(of.mode, ranks, dtype=of.dtype, seed=i)
        for rank, expected in enumerate(by_reference(case)):
            with np.load(tmp_path / f"{i}_{rank}.npz", allow_pickle=True) as found:
                for package in ("nccl_ep", "trefoil_ep"):
                    assert list(found[package]) == expected.bytes(), (case, rank, package)


def parameters(function: Any) -> list[tuple[str, Any]]:
    """Names and kinds; a stream may have a default."""
    found = signature(function).parameters.values()
    return [(p.name, p.kind) for p in found if p.kind is not Parameter.VAR_KEYWORD]


def test_names_and_parameters_are_theirs() -> None:
    from nccl import ep as theirs

    assert set(theirs.__all__) <= set(ep.__all__)
    for name in theirs.__all__:
        one, other = getattr(theirs, name), getattr(ep, name)
        assert type(other) is type(one) or isclass(one) == isclass(other), name
        if isclass(one) and issubclass(one, int):
            assert {e.name: int(e) for e in one} == {e.name: int(e) for e in other}, name
        elif name in ("AllocFn", "FreeFn"):
            assert one._restype_ is other._restype_ and one._argtypes_ == other._argtypes_, name
        else:
            assert parameters(one) == parameters(other), name
        for method in () if not isclass(one) else [m for m in vars(one) if m[0] != "_"]:
            assert hasattr(other, method), (name, method)
            if callable(getattr(one, method)) and not issubclass(one, int):
                given = [parameters(getattr(of, method)) for of in (one, other)]
                assert given[0] == given[1], (name, method)
