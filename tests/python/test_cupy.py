"""ep.Tensor over CuPy's arrays. Needs cupy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hosts import needs_host
from test_ep_cuda_array import sums
from trefoil import ep

pytestmark = needs_host("cupy", "cupy-cuda13x")


def test_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own arrays, over host memory. Version 3 of the interface would ask a GPU for the
    current stream; version 2 does not."""
    monkeypatch.setenv("CUPY_CUDA_ARRAY_INTERFACE_EXPORT_VERSION", "2")
    import cupy

    def over(array: np.ndarray) -> Any:
        owner = array, ep.Tensor(array)
        memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, owner, 0)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))

    assert sums(over, 4) == sums(lambda array: array, 4)
    with pytest.raises(ep.InvalidArgumentError, match="it is not C-contiguous"):
        ep.Tensor(over(np.zeros((4, 8), np.float32))[:, ::2])
