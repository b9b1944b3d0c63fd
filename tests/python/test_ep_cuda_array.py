"""ep.Tensor over CUDA's array interface, version 3, as CuPy and Numba have it. Without a GPU what
offers it here is a stand-in, over memory that the CPU library's runtime knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import with_threads
from trefoil import ep


class OnGpu:
    """The interface of an array's memory; entries may be others. It has no dtype and no owner."""

    def __init__(self, array: np.ndarray, **entries: Any) -> None:
        self.array = array
        self.known = ep.Tensor(array.reshape(-1).view(np.uint8)) if array.size else None
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data if array.size else 0, False),
            "version": 3,
            "strides": None,
            "descr": array.dtype.descr,
            "mask": None,
            "stream": None,
            **entries,
        }


def sums(wrap: Callable[[np.ndarray], Any], tokens: int) -> list[bytes]:
    """What two ranks' dispatch of rows and combine of three times these give."""

    def work(rank: int, comm: ep.Communicator) -> bytes:
        x = np.arange(tokens * 8, dtype=np.float32).reshape(tokens, 8) + 100 * rank
        ids = np.stack([np.arange(2) + (rank + t) % 3 for t in range(tokens)] or [[0, 1]])
        ids = ids[:tokens].astype(np.int64)
        rows, out = np.zeros((2, 8, 8), np.float32), np.zeros_like(x)
        counts, weights = np.zeros(2, np.int32), np.full((tokens, 2), 0.5, np.float32)
        config = ep.GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, max_token_bytes=32)
        with (
            ep.Group.create(comm, config) as group,
            group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(wrap(ids))) as handle,
        ):
            handle.dispatch(
                ep.DispatchInputs(tokens=ep.Tensor(wrap(x))),
                ep.DispatchOutputs(tokens=ep.Tensor(wrap(rows))),
                layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(wrap(counts))),
            )
            ep.synchronize()
            rows *= 3
            handle.combine(
                ep.CombineInputs(tokens=ep.Tensor(wrap(rows))),
                ep.CombineOutputs(
                    tokens=ep.Tensor(wrap(out)), topk_weights=ep.Tensor(wrap(weights))
                ),
            )
            ep.synchronize()
        assert np.array_equal(out, 3 * x)
        return out.tobytes() + counts.tobytes()

    return with_threads(work, 2)


@pytest.mark.parametrize("tokens", [4, 0])
@pytest.mark.parametrize("stream", [None, 1, 2, 94_000_000])
def test_a_step(tokens: int, stream: int | None) -> None:
    """Results are NumPy's; the stream of the producer, which may be gone, is not touched."""
    assert sums(lambda array: OnGpu(array, stream=stream), tokens) == sums(lambda a: a, tokens)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 8), (32, 4)), ((4, 1, 8), (32, 999, 4)), ((1, 8), (7, 4)), ((), ()), ((0, 8), (5, 3))],
)
def test_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Those of C order, whatever they are where a dimension has one element or the array none."""
    tensor = ep.Tensor(OnGpu(np.zeros(shape, np.float32), strides=strides))
    assert tensor.sizes == shape and tensor.datatype == ep.DataType.FLOAT32


@pytest.mark.parametrize("strides", [(64, 4), (4, 16), (32, -4), (0, 4)])
def test_other_strides(strides: tuple[int, ...]) -> None:
    with pytest.raises(ep.InvalidArgumentError, match="it is not C-contiguous"):
        ep.Tensor(OnGpu(np.zeros((4, 8), np.float32), strides=strides))


@pytest.mark.parametrize(
    ("typestr", "name"),
    [("<f2", "FLOAT16"), ("<f8", "FLOAT64"), ("<i8", "INT64"), ("|i1", "INT8"), ("|b1", "UINT8")],
)
def test_types(typestr: str, name: str) -> None:
    array = np.zeros(3, np.dtype(typestr))
    assert ep.Tensor(OnGpu(array)).datatype == ep.DataType[name]


def test_types_of_extensions() -> None:
    """NumPy has no bfloat16: the interface says bytes, and the array's dtype says what they are."""
    whole = OnGpu(np.zeros(3, "V2"), typestr="<V2")
    with pytest.raises(ep.InvalidArgumentError, match="no type of NCCL's"):
        ep.Tensor(whole)
    whole.dtype = "bfloat16"
    assert ep.Tensor(whole).datatype == ep.DataType.BFLOAT16


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"typestr": ">f4"}, "another byte order"),
        ({"typestr": "<c8"}, "no type of NCCL's"),
        ({"typestr": "|O"}, "no type of NCCL's"),
        ({"mask": np.zeros(6, bool)}, "the tensor has a mask"),
        ({"data": (1 << 45, False)}, "lies on a GPU, and the library works on host memory"),
    ],
)
def test_refused(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=told):
        ep.Tensor(OnGpu(np.zeros(6, np.float32), **entries))


def test_read_only() -> None:
    """An input may be; an output is refused by its call."""

    def work(_: int, comm: ep.Communicator) -> None:
        x, ids = np.ones((1, 8), np.float32), np.zeros((1, 1), np.int64)
        fixed = OnGpu(x, data=(x.ctypes.data, True))
        rows, counts = np.zeros((1, 1, 8), np.float32), np.zeros(1, np.int32)
        shut = OnGpu(rows, data=(rows.ctypes.data, True))
        config = ep.GroupConfig(num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=32)
        with (
            ep.Group.create(comm, config) as group,
            group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(ids)) as handle,
        ):
            given = ep.DispatchInputs(tokens=ep.Tensor(fixed))
            info = ep.LayoutInfo(expert_counters=ep.Tensor(counts))
            with pytest.raises(ep.InvalidArgumentError, match="an output, and its array is read"):
                outputs = ep.DispatchOutputs(tokens=ep.Tensor(shut))
                handle.dispatch(given, outputs, layout_info=info)
            handle.dispatch(given, ep.DispatchOutputs(tokens=ep.Tensor(rows)), layout_info=info)
            ep.synchronize()
        assert np.array_equal(rows[0], x)

    with_threads(work, 1)
