"""Tensors of torch through trefoil.ep: needs torch, which tools/test does not install."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from call_time import Described
from ep_steps import with_threads
from trefoil import check_combine, check_dispatch, ep


def test_torch_tensors() -> None:
    """A tensor of the CPU is taken where it lies."""
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    found = ep.Tensor(tensor)
    assert (found.data, found.sizes, found.datatype) == (tensor.data_ptr(), (2, 3), 9)
    with pytest.raises(ep.InvalidArgumentError, match="not C-contiguous"):
        ep.Tensor(tensor.t())


def test_views_of_torch_and_numpy() -> None:
    """The same memory by torch and by NumPy, the part first and the whole first."""
    array = np.zeros(4000, np.float32)
    for one, other in ((array[10:20], array), (array, array[10:20])):
        first = ep.Tensor(torch.from_numpy(one))
        second = ep.Tensor(other)
        third = ep.Tensor(torch.from_numpy(array[15:400]))
        assert third.data == array.ctypes.data + 60
        del first, second, third


def test_tensors_that_are_no_plain_arrays() -> None:
    plain = torch.ones(4, 4)
    for kind, tensor in (
        ("nested", torch.nested.nested_tensor([plain, plain[:2]])),
        ("layout torch._mkldnn", plain.to_mkldnn()),
        ("layout torch.sparse_coo", plain.to_sparse()),
        ("quantised", torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)[:, :2]),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=f"the tensor is .*{kind}"):
            ep.Tensor(tensor)


def test_resized_storage() -> None:
    """A call refuses what was freed under its tensor; a new tensor works."""
    ids = torch.zeros(1 << 16, 1, dtype=torch.int64)
    config = ep.GroupConfig(
        num_experts=1, max_dispatch_tokens_per_rank=len(ids), max_token_bytes=16
    )

    def work(rank: int, comm: ep.Communicator) -> None:
        with (
            ep.Group.create(comm, config) as group,
            group.init_handle(ep.Layout.EXPERT_MAJOR, 1) as handle,
        ):
            tensor = ep.Tensor(ids)
            handle.update(tensor)
            ids.untyped_storage().resize_(0)
            with pytest.raises(ep.InvalidArgumentError, match="was resized"):
                handle.update(tensor)
            ids.untyped_storage().resize_(8 << 16)
            handle.update(ep.Tensor(ids.zero_()))

    with_threads(work, 1)


def test_checks_take_tensors_of_torch() -> None:
    """bfloat16, whose bits NumPy does not know: compared as bits, shown as values."""
    ids = [torch.tensor([[0, 2], [1, -1]]), torch.tensor([[3, 0]])]
    rows = [torch.arange(8.0).reshape(2, 4).bfloat16(), torch.full((1, 4), 9.0).bfloat16()]
    right = torch.stack([rows[0][0], rows[0][1], rows[1][0]])
    assert check_dispatch("ht-flat", ids, rows, {0: right}, num_experts=4).ok
    right[2, 1] = 2.5
    found = check_dispatch("ht-flat", ids, rows, {0: right}, num_experts=4)
    assert "first in value 1: found 2.5, expected 9.0" in str(found)
    back = [
        torch.stack([rows[0][0], rows[0][1], rows[1][0]]),
        torch.stack([rows[0][0], rows[1][0]]),
    ]
    sums = {0: torch.stack([rows[0][0] * 2, rows[0][1]]), 1: rows[1] * 2}
    assert check_combine("ht-flat", ids, back, sums, num_experts=4, epsilon=2**-8).ok


# ---- DLPack's table of functions --------------------------------------------------------------


class Table(ctypes.Structure):
    """As trefoil._c reads it."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("read", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


CODES = {
    torch.bfloat16: (4, 16, 1),
    torch.float32: (2, 32, 1),
    torch.int64: (0, 64, 1),
    torch.bool: (6, 8, 1),
    torch.float8_e4m3fn: (10, 8, 1),
    torch.float8_e5m2: (12, 8, 1),
}


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_torch_has_the_table_that_tensors_on_a_gpu_are_read_by(dtype: torch.dtype) -> None:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        pytest.skip("torch before 2.10 has none; tensors are read by their methods")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = Table.from_address(pointer(capsule, b"dlpack_exchange_api"))
    assert table.major == 1
    read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(table.read)
    t, about = torch.zeros(4, 6).to(dtype)[1:, 2:], Described()
    assert read(t, ctypes.addressof(about)) == 0
    assert (about.data + about.offset, about.device_type, about.ndim) == (t.data_ptr(), 1, 2)
    assert (about.code, about.bits, about.lanes) == CODES[dtype]
    sizes = (ctypes.c_int64 * 2).from_address(about.shape)
    strides = (ctypes.c_int64 * 2).from_address(about.strides)
    assert (tuple(sizes), tuple(strides)) == (tuple(t.shape), t.stride())
