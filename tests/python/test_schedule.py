"""Schedules of a step: the replay against sums and bounds that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trefoil.capacity.configuration import left_of
from trefoil.capacity.schedule import (
    COMPUTE,
    NETWORK,
    Batch,
    Task,
    replay,
    step_seconds,
    whole_step,
)
from trefoil.capacity.step import Gpu

# 10 layers, 8 of them MoE.
BATCH = Batch(before=3.0, shared=1.0, routed=4.0, dispatch=2.0, combine=3.0, dense=5.0, head=7.0)
OUTSIDE = 2 * 3.0 + 5.0 + 7.0


def step(how: str, *batches: Batch, left: float = 1.0) -> float:
    return step_seconds(batches, 10, 8, how, left)


def test_without_overlap_all_times_add_up() -> None:
    assert step("none", BATCH) == pytest.approx(OUTSIDE + 8 * (3 + 2 + 4 + 3 + 1))
    assert step("none", BATCH, left=0.5) == pytest.approx(OUTSIDE + 8 * 13), "nothing runs beside"


def test_shared_experts_hide_behind_dispatch() -> None:
    # 1 of 2 seconds of dispatch: 12 a layer.
    assert step("shared", BATCH) == pytest.approx(OUTSIDE + 8 * 12)
    # At half the speed the shared expert takes all of dispatch.
    assert step("shared", BATCH, left=0.5) == pytest.approx(OUTSIDE + 8 * 12)
    # At a quarter, half of it is left when dispatch ends.
    assert step("shared", BATCH, left=0.25) == pytest.approx(OUTSIDE + 8 * 12.5)


def test_two_batches_are_as_long_as_the_busier_stream() -> None:
    compute = 2 * (OUTSIDE + 8 * (3 + 1 + 4))
    assert compute <= step("two-batch", BATCH, BATCH) < 1.05 * compute, "the network is hidden"
    slow = Batch(**{**BATCH.__dict__, "dispatch": 20.0, "combine": 30.0})
    network = 2 * 8 * 50.0
    assert network < step("two-batch", slow, slow) < 1.1 * network, "compute is hidden"
    # Less speed for compute beside the network, but never less than without overlap allows.
    free, held = step("two-batch", BATCH, BATCH), step("two-batch", BATCH, BATCH, left=0.8)
    assert free < held < free / 0.8


def test_no_schedule_is_faster_than_its_longest_chain() -> None:
    chain = OUTSIDE + 8 * (3 + 2 + 4 + 3)
    for how, n in (("none", 1), ("shared", 1), ("two-batch", 2)):
        assert step(how, *[BATCH] * n) >= chain


def test_one_layer_stands_for_all_where_layers_do_not_overlap() -> None:
    for how, left in (("none", 1.0), ("shared", 1.0), ("shared", 0.3)):
        whole = whole_step([BATCH], 10, 8, how, left)
        assert step(how, BATCH, left=left) == pytest.approx(whole, rel=1e-12)


def test_the_replay_by_hand() -> None:
    # 4 of compute, of which 2 run beside 2 of the network at half speed.
    tasks = [Task(COMPUTE, 4.0), Task(NETWORK, 2.0)]
    assert replay(tasks) == 4.0
    assert replay(tasks, left=0.5) == 5.0
    assert replay([Task(NETWORK, 1.0), Task(COMPUTE, 1.0, (0,))]) == 2.0
    assert replay([]) == 0.0
    with pytest.raises(ValueError, match="waits"):
        replay([Task(COMPUTE, 1.0, (1,)), Task(COMPUTE, 1.0)])


@pytest.mark.parametrize(
    ("sms", "left"), [(132, 1 - 24 / 132), (78, 1 - 24 / 78), (None, 1 - 24 / 132)]
)
def test_compute_has_what_an_operation_leaves_of_the_gpu(sms: int | None, left: float) -> None:
    c: Any = SimpleNamespace(sms=24, mode="ht", costs="deepep-ht-h100")
    q: Any = SimpleNamespace(gpu=Gpu(1.0, 1.0, sms=sms))
    assert left_of(c, {}, q) == pytest.approx(left)
