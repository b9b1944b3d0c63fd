"""Where tensors of torch lie, and what is waited for there: for trefoil.deep_ep, trefoil.hosts
and trefoil.torch.

On a GPU, calls are queued on torch's current stream, which orders them. On the CPU every call has
done its work when it returns.
"""

from __future__ import annotations

from typing import Any

import torch

from trefoil import ep
from trefoil.ep._load import c


def stream_of(t: torch.Tensor) -> Any:
    """The stream of calls on t: torch's current one, or the default one of the CPU library."""
    return torch.cuda.current_stream(t.device) if t.is_cuda else None


def settle(t: torch.Tensor) -> None:
    """After calls on t."""
    if not t.is_cuda:
        ep.synchronize()


def device_of_library() -> torch.device:
    """Where the library in use takes tensors."""
    _, _, on_host = c.library()
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def enter_device() -> None:
    """Makes torch's GPU the library's in this thread."""
    device = device_of_library()
    if device.type == "cuda":
        ep.set_device(device.index)
