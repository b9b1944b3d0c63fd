"""What is wrong raises an exception with the sentence, and nothing is lost by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import Case, Outputs, with_threads
from trefoil import ep

CASE = Case("ht-flat", ranks=1, experts=4)
T = ep.Tensor


def step(comm: ep.Communicator, group: ep.Group, handle: ep.Handle) -> SimpleNamespace:
    """A good dispatch; a case below spoils one thing of it."""
    out = Outputs.poisoned(CASE, 0)
    assert out.weights is not None
    assert out.ids is not None
    return SimpleNamespace(
        comm=comm,
        group=group,
        handle=handle,
        rows=CASE.rows(0),
        idx=T(CASE.routing(0)),
        weights=T(CASE.weights(0)),
        out=out,
        config=None,
        stream=None,
    )


def run(s: SimpleNamespace) -> None:
    inputs = ep.DispatchInputs(tokens=T(s.rows), topk_weights=s.weights)
    out = s.out
    outputs = ep.DispatchOutputs(
        tokens=T(out.tokens), topk_weights=T(out.weights), topk_idx=T(out.ids)
    )
    s.handle.update(s.idx, stream=s.stream)
    s.handle.dispatch(inputs, outputs, config=s.config, stream=s.stream)
    ep.synchronize(s.stream)


def spoil(**changes: object) -> Callable[[SimpleNamespace], None]:
    def action(s: SimpleNamespace) -> None:
        s.__dict__.update(changes)
        run(s)

    return action


def read_only(s: SimpleNamespace) -> None:
    s.out.tokens.flags.writeable = False
    run(s)


def output_in_input(s: SimpleNamespace) -> None:
    s.rows = s.out.tokens[: len(s.rows)]
    run(s)


def freed(s: SimpleNamespace) -> None:
    """An address of memory that nobody keeps."""
    tensor = T(np.zeros(CASE.routing(0).shape, np.int64))
    address, shape = tensor.data, tensor.sizes
    del tensor
    s.idx = T(address, dtype=ep.DataType.INT64, shape=shape)
    run(s)


def deleted_field(s: SimpleNamespace) -> None:
    outputs = ep.DispatchOutputs(tokens=T(s.out.tokens))
    del outputs.tokens
    s.handle.update(s.idx)
    s.handle.dispatch(ep.DispatchInputs(tokens=T(s.rows)), outputs)


def destroyed(s: SimpleNamespace) -> None:
    s.handle.destroy()
    run(s)


ROWS, REFUSED = CASE.rows(0), ep.InvalidArgumentError
LOCAL_IDS = ep.LayoutInfo(recv_topk_idx_kind="local")  # type: ignore[arg-type]
BACKWARD_TWICE = ep.DispatchConfig(pass_direction=9)  # type: ignore[arg-type]
ONE = np.zeros(1, np.int32)
TABLE: dict[str, tuple[Callable[[SimpleNamespace], None], type[Exception], str]] = {
    "type of rows": (spoil(rows=ROWS.astype(np.int64)), REFUSED, "tokens"),
    "no type of NCCL's": (
        spoil(rows=ROWS.astype(np.complex64)),
        REFUSED,
        "complex64",
    ),
    "byte order": (spoil(rows=ROWS.astype(">f4")), REFUSED, "byte order"),
    "shape": (spoil(rows=ROWS[:2]), REFUSED, "tokens"),
    "too wide": (spoil(rows=np.zeros((6, 999), np.float32)), REFUSED, "tokens"),
    "strides": (
        spoil(rows=np.asfortranarray(ROWS)),
        REFUSED,
        "not C-contiguous",
    ),
    "dimensions": (spoil(rows=np.zeros((1,) * 9, np.float32)), ValueError, "9 dimensions"),
    "no tensor": (spoil(rows="rows"), TypeError, "str is no tensor"),
    "array for a tensor": (spoil(weights=CASE.weights(0)), TypeError, "ep.Tensor"),
    "type of ids": (spoil(idx=T(ROWS)), REFUSED, "topk_idx"),
    "none for ids": (spoil(idx=None), REFUSED, "topk_idx"),
    "read-only output": (read_only, REFUSED, "read-only"),
    "overlap": (output_in_input, REFUSED, "overlaps"),
    "freed": (freed, REFUSED, "was freed"),
    "null": (spoil(idx=T(0, dtype=4, shape=(2, 3))), REFUSED, "topk_idx"),
    "enum": (
        spoil(config=BACKWARD_TWICE),
        REFUSED,
        "pass_direction",
    ),
    "negative": (spoil(config=ep.DispatchConfig(send_only=-1)), OverflowError, "negative"),
    "too large": (spoil(config=ep.DispatchConfig(send_only=1 << 32)), OverflowError, "send_only"),
    "config": (spoil(config=object()), AttributeError, "send_only"),
    "no inputs": (
        lambda s: s.handle.dispatch(None, ep.DispatchOutputs()),
        TypeError,
        "ep.DispatchInputs, not .*NoneType",
    ),
    "inputs for outputs": (
        lambda s: s.handle.dispatch(ep.DispatchInputs(), ep.DispatchInputs()),
        TypeError,
        "ep.DispatchOutputs, not .*DispatchInputs",
    ),
    "deleted field": (deleted_field, REFUSED, "tokens"),
    "kind of ids": (
        lambda s: s.handle.update(s.idx, layout_info=LOCAL_IDS),
        TypeError,
        "str",
    ),
    "stream": (spoil(stream="main"), AttributeError, "cuda_stream"),
    "destroyed handle": (destroyed, ep.InvalidUsageError, "destroyed"),
    "group for a handle": (
        lambda s: ep.Handle.update(s.group, s.idx),
        TypeError,
        "expected a handle",
    ),
    "wrong address": (lambda s: ep.Handle(16).update(s.idx), REFUSED, "handle"),
    "group with handles": (lambda s: s.group.destroy(), ep.InvalidUsageError, "handle"),
    "mask of HT": (lambda s: s.group.query_mask(T(ONE)), ep.InvalidUsageError, "mask"),
    "mask of another size": (
        lambda s: s.group.update_mask([1, 1, 1]),
        REFUSED,
        "expected 1",
    ),
    "layout": (
        lambda s: s.group.init_handle(ep.Layout.RANK_MAJOR, 1),
        REFUSED,
        "layout",
    ),
    "handle_mem": (
        lambda s: s.group.init_handle(ep.Layout.FLAT, 3, handle_mem=T(np.zeros(4, np.uint8))),
        REFUSED,
        "handle_mem",
    ),
    "unique id": (lambda s: ep.Communicator.create(1, 0, b"short"), ValueError, "5 bytes"),
    "rank": (
        lambda s: ep.Communicator.create(1, 3, ep.get_unique_id()),
        REFUSED,
        "rank",
    ),
    "experts": (
        lambda s: ep.Group.create(s.comm, ep.GroupConfig()),
        REFUSED,
        "num_experts",
    ),
    "device": (lambda s: ep.set_device(999), REFUSED, "999"),
    "complete's config": (lambda s: s.handle.complete(config=1), REFUSED, "expected 0"),
    "library": (lambda s: ep.load("/nowhere/lib.so"), OSError, "/nowhere/lib.so"),
    "library of others": (lambda s: ep.load("libm.so.6"), OSError, "cuda|ncclEp"),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str) -> None:
    """The exception comes, and a new handle of the same group works."""
    action, kind, match = TABLE[name]

    def work(rank: int, comm: ep.Communicator) -> None:
        with ep.Group.create(comm, CASE.group_config()) as group:
            with group.init_handle(ep.Layout.FLAT, CASE.topk) as handle:
                with pytest.raises(kind, match=match):
                    action(step(comm, group, handle))
                ep.set_device(0)
            with group.init_handle(ep.Layout.FLAT, CASE.topk) as handle:
                good = step(comm, group, handle)
                run(good)
                assert np.array_equal(good.out.tokens[0], good.rows[0])

    with_threads(work, 1)


def test_second_operation_in_flight() -> None:
    """LL, send_only: a third operation is refused, and both that are pending finish."""
    case = Case("ll-rank-major", ranks=1, experts=4)

    def work(rank: int, comm: ep.Communicator) -> None:
        config = ep.DispatchConfig(send_only=1)
        outs = [Outputs.poisoned(case, 0) for _ in range(3)]
        idx, rows, weights = T(case.routing(0)), T(case.rows(0)), T(case.weights(0))
        with ep.Group.create(comm, case.group_config()) as group:
            handles = [group.create_handle(case.layout(), idx) for _ in outs]

            def send(i: int) -> None:
                o = outs[i]
                outputs = ep.DispatchOutputs(
                    tokens=T(o.tokens), topk_weights=T(o.weights), topk_idx=T(o.ids)
                )
                inputs = ep.DispatchInputs(tokens=rows, topk_weights=weights)
                handles[i].dispatch(inputs, outputs, config=config)

            send(0)
            send(1)
            with pytest.raises(ep.InvalidUsageError, match="send_only"):
                send(2)
            with pytest.raises(ep.InvalidUsageError, match="pending"):
                handles[0].destroy()
            for handle in handles:
                handle.complete()
            ep.synchronize()
            assert outs[0].tokens.tobytes() == outs[1].tokens.tobytes() != outs[2].tokens.tobytes()
            for handle in handles:
                handle.destroy()

    with_threads(work, 1)


def test_after_fork() -> None:
    """The child's use of what its parent made is refused; what it makes itself works."""

    def work(rank: int, comm: ep.Communicator) -> None:
        with (
            ep.Group.create(comm, CASE.group_config()) as group,
            group.init_handle(ep.Layout.FLAT, CASE.topk) as handle,
        ):
            idx = T(CASE.routing(0))
            child = os.fork()
            if not child:
                os._exit(in_child(comm, group, handle, idx))
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            run(step(comm, group, handle))

    with_threads(work, 1)


def in_child(comm: ep.Communicator, group: ep.Group, handle: ep.Handle, idx: ep.Tensor) -> int:
    calls: list[Callable[[], object]] = [
        lambda: handle.update(idx),
        lambda: group.create_handle(ep.Layout.FLAT, idx),
        lambda: ep.Group.create(comm, CASE.group_config()),
        lambda: comm.num_ranks,
    ]
    for number, call in enumerate(calls, start=1):
        try:
            call()
        except ep.InvalidUsageError as error:
            if "fork" not in str(error):
                return 10 + number
        else:
            return number
    ep.Communicator.create(1, 0, ep.get_unique_id()).destroy()
    return 0
