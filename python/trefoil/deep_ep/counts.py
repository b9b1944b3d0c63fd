"""Numbers that all ranks tell each other: rows of the library, each from one rank to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trefoil import ep
from trefoil.on_device import HostCopy, raise_what_failed, settle, stream_of

Tensor = torch.Tensor
Numbers = np.ndarray[Any, np.dtype[np.int32]]
T = ep.Tensor
LEAST = 64  # numbers of a row; a power of two
BACKWARD = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)


class Row:
    """A row of numbers, its length first, and room for those of all ranks: the same memory for
    every call, as each ends with a wait."""

    def __init__(self, num_ranks: int, width: int, device: torch.device) -> None:
        self.mine = torch.zeros(1, width, dtype=torch.int32, device=device)
        self.all = torch.zeros(num_ranks, width, dtype=torch.int32, device=device)
        self.on_host = HostCopy(self.all)
        self.inputs = ep.DispatchInputs(tokens=T(self.mine.view(torch.bfloat16)))
        self.outputs = ep.DispatchOutputs(tokens=T(self.all.view(torch.bfloat16)))
        self.length = 0
        self._known: list[int] = []

    def write(self, numbers: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Numbers that lie there from the last call are not written again."""
        self.length = len(numbers) + sum(map(len, parts))
        known = [self.length, *numbers]
        for i, number in enumerate(known):
            if len(self._known) != len(known) or self._known[i] != number:
                self.mine[0, i].fill_(number)
        self._known = known
        if parts:
            torch.cat(list(parts), out=self.mine[0, len(known) : self.length + 1])


class Counts:
    """Of the ranks of comm, on the device. Its group grows with what a call tells, as much on all
    ranks."""

    def __init__(self, comm: ep.Communicator, on: torch.device) -> None:
        self.comm, self.num_ranks, self.device = comm, comm.num_ranks, ep.get_device()
        self.on = on
        self.width = 0
        self.row: Row | None = None
        self.group: ep.Group | None = None
        self.handle: ep.Handle | None = None

    def _grow(self, width: int) -> None:
        """Collective: rows of so many numbers."""
        self.destroy()
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=self.num_ranks,
            max_dispatch_tokens_per_rank=1,
            max_recv_tokens_per_rank=self.num_ranks,
            max_token_bytes=4 * width,
            num_topk=self.num_ranks,
        )
        self.group = ep.Group.create(self.comm, config)
        self.handle, self.row = self._routed(), Row(self.num_ranks, width, self.on)
        self.width = width

    def _routed(self) -> ep.Handle:
        """Collective: a token that goes to all ranks."""
        assert self.group is not None
        ids = torch.arange(self.num_ranks, device=self.on).unsqueeze(0)
        handle = self.group.create_handle(ep.Layout.FLAT, T(ids), stream=stream_of(ids))
        settle(ids)
        return handle

    def _raise_what_failed(self) -> None:
        assert self.group is not None
        raise_what_failed(self.group, ep.Layout.FLAT, self.num_ranks, asks=True)

    def queue(self, numbers: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Collective: what every rank tells, int32 [R, length], until the next call: numbers below
        2^31, then parts, int32 [any] on the device. Waits for nothing, but where rows grow."""
        ep.set_device(self.device)
        length = len(numbers) + sum(map(len, parts))
        if length >= self.width:
            self._grow(max(LEAST, 1 << length.bit_length()))
        assert self.row is not None and self.handle is not None
        row = self.row
        row.write(numbers, parts)
        stream = stream_of(row.all)
        self.handle.dispatch(row.inputs, row.outputs, config=BACKWARD, stream=stream)
        settle(row.all)
        self._raise_what_failed()  # on the CPU it is known by now
        return row.all[:, 1 : length + 1]

    def fetch(self) -> None:
        """Queues the copy to the host, after what was queued since on the current stream: the last
        use of the answer of queue."""
        assert self.row is not None
        self.row.on_host.queue()

    def read(self, besides: int) -> Numbers:
        """That answer on the host, until the next call: waits for fetch alone. besides: how many of
        a rank's numbers are no expert's."""
        assert self.row is not None
        told = self.row.on_host.wait().numpy()
        self._raise_what_failed()
        lengths = told[:, 0].tolist()
        if lengths != [self.row.length] * self.num_ranks:
            experts = [length - besides for length in lengths]
            raise ep.InvalidArgumentError(
                f"num_tokens_per_expert: ranks have {experts} experts; must be as many on all ranks"
            )
        return told[:, 1 : self.row.length + 1]

    def destroy(self) -> None:
        """Collective."""
        if self.handle is not None:
            self.handle.destroy()
        if self.group is not None:
            self.group.destroy()
        self.group = self.handle = self.row = None
        self.width = 0
