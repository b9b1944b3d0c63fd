"""Groups of the operations of torch: limits, the stream, and what turns a call into results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trefoil import ep
from trefoil.ep.comm import Scoped
from trefoil.on_device import device_of_library, enter_device, raise_what_failed

_live: dict[int, EPGroup] = {}
_keys = itertools.count(1)
PENDING = 2  # low-latency dispatches whose combine is still possible


def group_of(key: int) -> EPGroup:
    """An operation knows its group by its key."""
    if key not in _live:
        raise ep.InvalidUsageError(f"group {key} of trefoil.torch was destroyed")
    return _live[key]


class EPGroup(Scoped):
    """The ranks of comm, with limits that are equal on all of them. Making it is collective.

    num_experts: of all ranks. num_topk: K. max_tokens: N, of one rank in one call. hidden: largest
    H. dtype: of the rows; float32, bfloat16 or float16. low_latency: for ll_dispatch and
    ll_combine. max_recv: most rows that a rank receives, at least N; 0: R N, which always suffice.
    drop: a rank with more keeps the first ones, else its dispatch raises. timeout: seconds to wait
    for other ranks; 0: 100. A copy, as copy.deepcopy of a module makes it, is the same group.

    Attributes: comm, num_ranks R, local_experts L, slots (rows of dispatch's output), key, order,
    torch_device (of all tensors: the GPU that is current here, or the CPU).
    """

    def __init__(
        self,
        comm: ep.Communicator,
        *,
        num_experts: int,
        num_topk: int,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        low_latency: bool = False,
        max_recv: int = 0,
        drop: bool = False,
        timeout: float = 0,
    ) -> None:
        if not isinstance(comm, ep.Communicator):
            raise ep.InvalidArgumentError(
                f"comm: found {type(comm).__name__}, a Communicator expected"
            )
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ep.InvalidArgumentError(f"dtype is {dtype}; rows are float32, bfloat16, float16")
        self.comm, self.num_ranks, self.num_experts = comm, comm.num_ranks, num_experts
        self.num_topk, self.max_tokens, self.dtype = num_topk, max_tokens, dtype
        self.local_experts = -(-num_experts // self.num_ranks)
        self.slots = max_recv or self.num_ranks * max_tokens
        enter_device()
        self.low_latency, self.device = low_latency, ep.get_device()
        self.torch_device = device_of_library()
        self.layout = ep.Layout.EXPERT_MAJOR if low_latency else ep.Layout.FLAT
        self._group = ep.Group.create(
            comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm(not low_latency),
                num_experts=num_experts,
                max_dispatch_tokens_per_rank=max_tokens,
                max_recv_tokens_per_rank=0 if low_latency else self.slots,
                max_token_bytes=-(-hidden * dtype.itemsize // 16) * 16,
                overflow_policy=ep.OverflowPolicy.DROP if drop else ep.OverflowPolicy.AUTO,
                num_topk=num_topk,
                timeout_ns=int(timeout * 1e9),
            ),
        )
        self._stream = None if self.torch_device.type == "cuda" else ep.Stream()
        self.pending: list[tuple[int, ep.Handle]] = []
        self._of_graphs: list[ep.Handle] = []
        # the library's handle memory, and three numbers: key, tokens, rows that arrive
        self.memory_bytes = -(-self._group.handle_mem_size(self.layout, num_topk) // 16) * 16
        self._group.init_handle(self.layout, num_topk).destroy()  # collective: makes the buffers
        self.order = torch.zeros(1, dtype=torch.int64)
        self.key = next(_keys)
        _live[self.key] = self

    def __copy__(self) -> EPGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EPGroup:
        return self

    @property
    def captured(self) -> bool:
        """Whether operations are captured into a CUDA graph now: then nothing is waited for, and
        ids and what failed are not looked at."""
        return self._stream is None and torch.cuda.is_current_stream_capturing()

    @property
    def stream(self) -> Any:
        """What the library's work is queued on: torch's current stream, on the CPU its own."""
        return self._stream or torch.cuda.current_stream(self.torch_device)

    def require_algorithm(self, *, low_latency: bool) -> None:
        """Refuses an operation of the other algorithm."""
        if self.low_latency != low_latency:
            raise ep.InvalidUsageError(
                f"low_latency of the group is {self.low_latency}; "
                f"this operation needs {low_latency}"
            )

    @contextmanager
    def handle(self, memory: torch.Tensor) -> Iterator[ep.Handle]:
        """A handle on a routing's memory; what is queued in the block has run at its end. What a
        graph has captured lives as long as the group."""
        ep.set_device(self.device)
        held = ep.Tensor(memory[: self.memory_bytes])
        handle = self._group.init_handle(self.layout, self.num_topk, handle_mem=held)
        if self.captured:
            self._of_graphs.append(handle)
            yield handle
            return
        try:
            yield handle
            self.finish()
        finally:
            handle.destroy()

    def finish(self) -> None:
        """Waits for the queued work, and raises what failed in it; not while it is captured."""
        if self.captured:
            return
        ep.synchronize(self.stream)
        asks = not self.low_latency
        try:
            raise_what_failed(self._group, self.layout, self.num_topk, asks)
        except ep.Error:
            if asks:
                self._group.clear_error()
            raise

    def next_handle(self, ids: ep.Tensor) -> tuple[int, ep.Handle]:
        """Low latency: the handle of the next dispatch, with the routing ids, which forgets an
        older one. Ids that are refused change nothing."""
        ep.set_device(self.device)
        if len(self.pending) < PENDING:
            number = len(self.pending)
            handle = self._group.init_handle(self.layout, self.num_topk)
        else:
            number, handle = self.pending[0][0] + PENDING, self.pending[0][1]
        try:
            handle.update(ids, stream=self.stream)
        except ep.Error:
            if number < PENDING:
                handle.destroy()
            raise
        self.pending = [*self.pending, (number, handle)][-PENDING:]
        return number, handle

    def pending_handle(self, number: int) -> ep.Handle:
        ep.set_device(self.device)
        if number not in dict(self.pending):
            raise ep.InvalidUsageError(
                f"ll_combine: dispatch {number} of the group is not among its last {PENDING}"
            )
        return dict(self.pending)[number]

    def destroy(self) -> None:
        """Collective. A second time: nothing happens."""
        if _live.pop(self.key, None):
            for handle in [*(handle for _, handle in self.pending), *self._of_graphs]:
                handle.destroy()
            self._group.destroy()
            if self._stream:
                self._stream.destroy()

    def _end(self, failed: bool) -> None:
        """With an exception on its way other ranks may not come: the communicator is aborted."""
        if failed:
            _live.pop(self.key, None)
        else:
            self.destroy()
