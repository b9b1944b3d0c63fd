"""Where tensors of torch lie, what they must be, and what is waited for there: for trefoil.deep_ep,
trefoil.hosts and trefoil.torch.

On a GPU, calls are queued on torch's current stream, which orders them. On the CPU every call has
done its work when it returns.
"""

from __future__ import annotations

from typing import Any

import torch

from trefoil import ep
from trefoil.ep._load import c
from trefoil.ep.tensor import odd_kind

CPU = torch.device("cpu")


def require_tensor(name: str, t: object) -> None:
    if not isinstance(t, torch.Tensor):
        raise ep.InvalidArgumentError(f"{name}: found {type(t).__name__}, expected a tensor")


def require(
    name: str,
    t: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    *shape: int,
    device: torch.device = CPU,
) -> None:
    """Refuses another type, shape (-1: any size) or device; no dtypes: any. Strides are the
    kernel's to check."""
    require_tensor(name, t)
    if t.layout != torch.strided or t.is_nested or t.is_quantized:
        raise ep.InvalidArgumentError(
            f"{name}: found a tensor that is {odd_kind(t)}, expected a plain one"
        )
    sizes = tuple(t.shape)
    fits = len(sizes) == len(shape) and all(
        want in (-1, size) for size, want in zip(sizes, shape, strict=True)
    )
    if fits and (t.dtype in dtypes or not dtypes) and t.device == device:
        return
    types = " or ".join(_name(d) for d in dtypes) or "any type"
    want = ["any" if size == -1 else str(size) for size in shape]
    raise ep.InvalidArgumentError(
        f"{name}: found {_name(t.dtype)} {list(sizes)} on {t.device}, "
        f"expected {types} [{', '.join(want)}] on {device}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stream_of(t: torch.Tensor) -> Any:
    """The stream of calls on t: torch's current one, or the default one of the CPU library."""
    return _raw_stream(t.device.index) if t.is_cuda else None


def _stream_handle(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# As Triton and inductor ask: without an object made for each call.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)


def settle(t: torch.Tensor) -> None:
    """After calls on t."""
    if not t.is_cuda:
        ep.synchronize()


def raise_what_failed(group: ep.Group, layout: ep.Layout, num_topk: int, asks: bool) -> None:
    """Raises what is known to have failed in operations of group, by a call that no other rank
    takes part in: any call says it. asks: whether the group answers async_error (low latency
    without masks does not)."""
    if not asks or group.async_error:
        group.init_handle(layout, num_topk).destroy()


def settle_of(
    t: torch.Tensor, group: ep.Group, layout: ep.Layout, num_topk: int, asks: bool
) -> None:
    """After operations of group on t: on the CPU what failed is raised now, on a GPU by the next
    call."""
    settle(t)
    if not t.is_cuda:
        raise_what_failed(group, layout, num_topk, asks)


def wait_for_stream(device: torch.device) -> None:
    """What torch's current stream of the device was given is done; on the CPU it is anyway."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostCopy:
    """A tensor's values on the host, copied in the order of a stream and waited for later."""

    def __init__(self, t: torch.Tensor) -> None:
        self.source = self._values = t
        if t.is_cuda:
            self._values = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()

    def queue(self) -> None:
        """After what the current stream was given."""
        if self.source.is_cuda:
            self._values.copy_(self.source, non_blocking=True)
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """The values as they were there; on the CPU the tensor itself."""
        if self.source.is_cuda:
            self._copied.synchronize()
        return self._values


def device_of_library() -> torch.device:
    """Where the library in use takes tensors."""
    _, _, on_host = c.library()
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def enter_device() -> None:
    """Makes torch's GPU the library's in this thread."""
    device = device_of_library()
    if device.type == "cuda":
        ep.set_device(device.index)
