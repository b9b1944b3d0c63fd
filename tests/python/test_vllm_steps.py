"""What tests/gpu/torch/vllm_steps.py makes of a profile, without GPUs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "gpu" / "torch" / "vllm_steps.py"
OURS, THEIRS, OTHER = "void ns::dispatchKernel<1>(Args)", "ncclDevKernel_X(Args)", "moe_kernel"


@pytest.fixture(scope="module")
def steps():
    about = importlib.util.spec_from_file_location("vllm_steps", PROGRAM)
    module = importlib.util.module_from_spec(about)
    sys.modules["vllm_steps"] = module
    about.loader.exec_module(module)
    return module


def of_rank(steps, wait: float) -> dict:
    """Two steps of three layers; the first layer's launch waits."""
    ours = [1.0 + wait, 2.0, 3.0, 1.0 + 3 * wait, 2.0, 4.0]
    launches = {OTHER: [5.0] * 6, OURS: ours, THEIRS: [0.5, 0.5]}
    return {
        "ms": 10.0 + wait,
        "kernels_ms": steps.kernels_of(launches, 2),
        "launches_ms": steps.launches_of(launches, 2),
    }


def test_the_rank_that_waits_least_is_told(steps) -> None:
    row = steps.time_row([of_rank(steps, 8.0), of_rank(steps, 1.0)], tokens=36)
    assert (row["ms"], row["tokens_per_s"]) == (18.0, 2000)
    assert row["communication_of_ranks_ms"] == [6.5 + 0.5 + 16.0, 6.5 + 0.5 + 2.0]
    assert row["communication_ms"] == 9.0
    assert row["kernels_ms"] == 9.0 + 15.0
    assert list(row["longest_ms"]) == [OTHER, OURS, THEIRS]
    # Medians over both steps are 3, 2 and 3.5; the first is taken for that of the others, 2.75.
    assert row["launches_us"] == {OURS: [3000.0, 2000.0, 3500.0], THEIRS: [500.0]}
    assert row["communication_without_first_ms"] == 2.75 + 2.0 + 3.5 + 0.5


def test_steps_of_unlike_launches_have_no_medians(steps) -> None:
    launches = {OURS: [1.0] * 7, OTHER: [1.0] * 4}
    assert steps.launches_of(launches, 2) == {}
    row = {"ms": 1.0, "kernels_ms": steps.kernels_of(launches, 2), "launches_ms": {}}
    found = steps.time_row([row], tokens=1)
    assert found["communication_ms"] == 3.5
    assert "communication_without_first_ms" not in found


def test_a_profile_without_kernels(steps) -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        steps.kernels_of({}, 2)
