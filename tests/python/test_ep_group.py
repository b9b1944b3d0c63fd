"""What nccl.ep does not have: masks, init_handle, preflight; and how communicators meet."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

import ep_needs  # noqa: F401
from ep_steps import Case, Outputs, with_threads
from trefoil import ep

LL = Case("ll-rank-major", ranks=2)


def test_masks() -> None:
    """Query shows what update set, in stream order; clean undoes it on all ranks."""

    def work(rank: int, comm: ep.Communicator) -> list[list[int]]:
        config = LL.group_config()
        config.enable_mask = True
        found, mask = [], np.full(LL.ranks, -1, np.int32)
        with ep.Group.create(comm, config) as group, ep.Stream() as stream:

            def look() -> None:
                group.query_mask(ep.Tensor(mask), stream=stream)
                stream.synchronize()
                found.append(mask.tolist())

            look()
            group.update_mask([int(r == rank) for r in range(LL.ranks)], stream=stream)
            look()
            group.update_mask([1, 1], stream=stream)
            group.clean_mask(stream=stream)
            look()
            assert not group.async_error
            group.clear_error()
        return found

    assert with_threads(work, 2) == [
        [[1, 1], [1, 0], [1, 1]],
        [[1, 1], [0, 1], [1, 1]],
    ]


def test_async_error() -> None:
    """An id out of range: async_error is set, the next call tells it."""
    case = Case("ht-flat", ranks=1, experts=4)

    def work(rank: int, comm: ep.Communicator) -> None:
        idx = case.routing(0)
        idx[0, 0] = 99
        with (
            ep.Group.create(comm, case.group_config()) as group,
            group.create_handle(case.layout(), ep.Tensor(idx)) as handle,
        ):
            ep.synchronize()
            assert group.async_error
            with pytest.raises(ep.Error, match="99"):
                handle.update(ep.Tensor(case.routing(0)))
            group.clear_error()
            assert not group.async_error

    with_threads(work, 1)


def ll_group(comm: ep.Communicator, **more: object) -> ep.Group:
    config = LL.group_config()
    for name, value in more.items():
        setattr(config, name, value)
    return ep.Group.create(comm, config)


def dispatch(handle: ep.Handle, rank: int) -> Outputs:
    """All that a dispatch of LL brings."""
    out = Outputs.poisoned(LL, rank)
    handle.dispatch(
        ep.DispatchInputs(
            tokens=ep.Tensor(LL.rows(rank)), topk_weights=ep.Tensor(LL.weights(rank))
        ),
        ep.DispatchOutputs(
            tokens=ep.Tensor(out.tokens),
            topk_weights=ep.Tensor(out.weights),
            topk_idx=ep.Tensor(out.ids),
        ),
    )
    ep.synchronize()
    return out


def test_check_tells_of_a_lost_rank() -> None:
    """Low latency without masks: rank 1 does not come, and nothing else says so."""

    def work(rank: int, comm: ep.Communicator) -> None:
        group = ll_group(comm, timeout_ns=300_000_000)
        group.check()
        handle = group.create_handle(LL.layout(), ep.Tensor(LL.routing(rank)))
        group.check()
        if rank == 0:
            dispatch(handle, rank)
            with pytest.raises(ep.InvalidUsageError, match="only with enable_mask"):
                assert group.async_error
            for _ in range(2):
                with pytest.raises(ep.RemoteError, match=r"rank 1 .* the group is lost"):
                    group.check()
        came.wait(30)
        handle.destroy()
        group.destroy()

    came = threading.Barrier(2)
    with_threads(work, 2)


@pytest.mark.parametrize("asks", [True, False])
def test_bad_ids_are_told_once(asks: bool) -> None:
    """The rank that has them hears of it from check, or from combine, which it can make again:
    nothing is lost, and they counted as unused."""
    tokens = [len(LL.routing(r)) for r in range(LL.ranks)]

    def work(rank: int, comm: ep.Communicator) -> bytes:
        ids = LL.routing(rank)
        if rank == 0:
            ids[0, 0] = 99 if spoilt else -1
        with ll_group(comm) as group, group.create_handle(LL.layout(), ep.Tensor(ids)) as handle:
            out = dispatch(handle, rank)
            rows = ep.Tensor(np.where(np.isnan(out.tokens), 0, out.tokens))
            sums = ep.CombineOutputs(tokens=ep.Tensor(out.combined))

            def combine() -> None:
                handle.combine(ep.CombineInputs(tokens=rows), sums)

            if rank == 0 and spoilt:
                with pytest.raises(ep.InvalidArgumentError, match="token 0, k = 0: expert 99"):
                    group.check() if asks else combine()
            if asks:
                group.check()
            combine()
            ep.synchronize()
            group.check()
            return out.combined.tobytes()

    spoilt = False
    expected = with_threads(work, 2)
    assert [len(found) for found in expected] == [n * LL.hidden * 4 for n in tokens]
    spoilt = True
    assert with_threads(work, 2) == expected


def test_check_with_masks() -> None:
    """A rank that does not come is masked: nothing raises, the flag and the mask have it."""

    def work(rank: int, comm: ep.Communicator) -> None:
        with (
            ll_group(comm, enable_mask=True, timeout_ns=300_000_000) as group,
            group.create_handle(LL.layout(), ep.Tensor(LL.routing(rank))) as handle,
        ):
            if rank == 0:
                dispatch(handle, rank)
                group.check()
                mask = np.full(LL.ranks, -1, np.int32)
                group.query_mask(ep.Tensor(mask))
                ep.synchronize()
                assert group.async_error and mask.tolist() == [1, 0]
            came.wait(30)

    came = threading.Barrier(2)
    with_threads(work, 2)


def test_memory_of_a_handle() -> None:
    """Preflight and handle_mem_size agree, and that much is enough."""

    def work(rank: int, comm: ep.Communicator) -> None:
        config = LL.group_config()
        answer = ep.preflight(config, LL.layout(), num_topk=LL.topk, num_ranks=LL.ranks)
        with ep.Group.create(comm, config) as group:
            size = group.handle_mem_size(LL.layout(), LL.topk)
            assert answer.supported
            assert answer.handle_device_bytes == size > 0
            memory = ep.Tensor(np.zeros(size, np.uint8))
            with group.init_handle(LL.layout(), LL.topk, handle_mem=memory) as handle:
                handle.update(ep.Tensor(LL.routing(rank)))

    with_threads(work, 2)


def test_preflight_says_why_not() -> None:
    answer = ep.preflight(LL.group_config(), ep.Layout.FLAT, num_topk=2, num_ranks=2)
    assert not answer.supported
    assert (answer.limit, answer.nearest) == ("layout", 1)
    assert "low latency" in answer.reason


def test_an_allocator_in_python() -> None:
    """Every byte of the group's and its handle's memory is asked for and given back."""
    held: dict[int, ctypes.Array[ctypes.c_char]] = {}
    contexts: set[int] = set()

    @ep.AllocFn
    def alloc(found: Any, size: int, context: int) -> int:
        memory = ctypes.create_string_buffer(size + 256)
        found[0] = address = ctypes.addressof(memory) + 255 & ~255
        held[address] = memory
        contexts.add(context)
        return 0

    @ep.FreeFn
    def free(address: int, context: int) -> int:
        contexts.add(context)
        return 0 if held.pop(address, None) else 1

    given = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (alloc, free)]
    case = Case("ht-flat", ranks=1)

    def work(rank: int, comm: ep.Communicator) -> tuple[int, int]:
        config = case.group_config()
        config.alloc = ep.AllocConfig(alloc_fn=given[0], free_fn=given[1], context=7)
        with ep.Group.create(comm, config) as group:
            of_group = len(held)
            with group.create_handle(case.layout(), ep.Tensor(case.routing(0))):
                return of_group, len(held)
        raise AssertionError

    ((of_group, of_both),) = with_threads(work, 1)
    assert of_group <= of_both > 0
    assert not held
    assert contexts == {7}


def test_the_version_is_the_headers() -> None:
    code = Path(__file__).parents[2].joinpath("include/nccl_ep.h").read_text()
    parts = [re.search(rf"NCCL_EP_{part} +(\d+)", code) for part in ("MAJOR", "MINOR", "PATCH")]
    assert ep.get_lib_version() == Version(".".join(p[1] for p in parts if p))


def test_rendezvous_by_file(tmp_path: Path) -> None:
    """A file from before is refused; ranks that come early wait for the new one."""
    path, counts = tmp_path / "id", []

    def rank(r: int) -> None:
        ep.set_device(r)
        with ep.Communicator.from_file(path, 2, r) as comm:
            counts.append(comm.num_ranks)

    early = threading.Thread(target=rank, args=(1,))
    early.start()
    rank(0)
    early.join(30)
    assert counts == [2, 2]
    with pytest.raises(FileExistsError):
        ep.Communicator.from_file(path, 2, 0)
    with pytest.raises(TimeoutError, match="rank 0 did not make"):
        ep.Communicator.from_file(tmp_path / "none", 2, 1, timeout=0.05)


def test_groups_come_before_their_communicator() -> None:
    """A communicator with groups is not destroyed, and works on; aborted, it takes them along."""

    def work(rank: int, comm: ep.Communicator) -> None:
        first, second = (ep.Group.create(comm, LL.group_config()) for _ in range(2))
        with pytest.raises(ep.InvalidUsageError, match="destroy: 2 of its groups not destroyed"):
            comm.destroy()
        first.destroy()
        with pytest.raises(ep.InvalidUsageError, match="destroy: 1 of its groups not destroyed"):
            comm.destroy()
        handle = second.init_handle(LL.layout(), LL.topk)
        handle.update(ep.Tensor(LL.routing(rank)))
        comm.abort()
        with pytest.raises(ep.InvalidUsageError, match="its groups are lost with it"):
            second.destroy()
        handle.destroy()
        with pytest.raises(ep.InvalidUsageError, match="the handle was destroyed"):
            handle.update(ep.Tensor(LL.routing(rank)))
        with pytest.raises(ep.InvalidUsageError, match="the group was destroyed"):
            first.handle_mem_size(LL.layout(), LL.topk)

    with_threads(work, 2)


class OfCudaCore:
    """A stream of others: cuda.core's protocol."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


def test_streams_of_others() -> None:
    """Torch's attribute and cuda.core's protocol are read; what is no stream is refused."""
    with ep.Stream() as stream:
        ep.synchronize(SimpleNamespace(cuda_stream=stream.ptr))
        ep.synchronize(OfCudaCore(stream.ptr))
        for wrong in (SimpleNamespace(cuda_stream=stream.ptr + 8), OfCudaCore(stream.ptr + 8)):
            with pytest.raises(ep.Error):
                ep.synchronize(wrong)
        with pytest.raises(TypeError):
            ep.synchronize(SimpleNamespace(cuda_stream="main"))
