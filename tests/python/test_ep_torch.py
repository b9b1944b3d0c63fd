"""Tensors of torch through trefoil.ep: needs torch, which tools/test does not install."""

from __future__ import annotations

import pytest
import torch

from trefoil import ep


def test_torch_tensors() -> None:
    """A tensor of the CPU is taken where it lies."""
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    found = ep.Tensor(tensor)
    assert (found.data, found.sizes, found.datatype) == (tensor.data_ptr(), (2, 3), 9)
    with pytest.raises(ep.InvalidArgumentError, match="not C-contiguous"):
        ep.Tensor(tensor.t())
