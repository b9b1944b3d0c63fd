"""Numbers that all ranks tell each other: rows of the library, each from one rank to all."""

from __future__ import annotations

import torch

from trefoil import ep
from trefoil.on_device import settle, stream_of

Tensor = torch.Tensor
T = ep.Tensor
LEAST = 64  # numbers of a row; a power of two


class Counts:
    """Of the ranks of comm. Its group grows with what a call tells, as much on all ranks."""

    def __init__(self, comm: ep.Communicator) -> None:
        self.comm, self.num_ranks, self.device = comm, comm.num_ranks, ep.get_device()
        self.width = 0
        self.group: ep.Group | None = None
        self.handle: ep.Handle | None = None

    def _grow(self, width: int) -> None:
        """Collective: rows of so many numbers."""
        self.destroy()
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=self.num_ranks,
            max_dispatch_tokens_per_rank=1,
            max_token_bytes=4 * width,
            num_topk=self.num_ranks,
        )
        self.group, self.width = ep.Group.create(self.comm, config), width

    def _routed(self, like: Tensor) -> ep.Handle:
        """Collective the first time: a token that goes to all ranks."""
        assert self.group is not None
        if self.handle is None:
            ids = torch.arange(self.num_ranks, device=like.device).unsqueeze(0)
            stream = stream_of(ids)
            self.handle = self.group.create_handle(ep.Layout.FLAT, T(ids), stream=stream)
            settle(ids)
        return self.handle

    def _raise_what_failed(self) -> None:
        assert self.group is not None
        if self.group.async_error:  # the next call says what it was; this one is local
            self.group.init_handle(ep.Layout.FLAT, self.num_ranks).destroy()

    def gather(self, mine: list[int], device: torch.device) -> list[list[int]]:
        """Collective: mine of every rank, of one length, each below 2^31. Rows lie on the device,
        whose current stream is waited for."""
        ep.set_device(self.device)
        if len(mine) >= self.width:
            self._grow(max(LEAST, 1 << len(mine).bit_length()))
        row = torch.zeros(1, self.width, dtype=torch.int32)
        row[0, : len(mine) + 1] = torch.tensor([len(mine), *mine])
        told = self._sent(row.to(device)).tolist()
        self._raise_what_failed()
        lengths = [one[0] for one in told]
        if lengths != [len(mine)] * self.num_ranks:
            raise ep.InvalidArgumentError(
                f"ranks tell {lengths} numbers; num_tokens_per_expert must be as long on all ranks"
            )
        return [one[1 : len(mine) + 1] for one in told]

    def _sent(self, row: Tensor) -> Tensor:
        """Those of all ranks, [R, width]."""
        out = row.new_empty(self.num_ranks, self.width)
        self._routed(row).dispatch(
            ep.DispatchInputs(tokens=T(row.view(torch.bfloat16))),
            ep.DispatchOutputs(tokens=T(out.view(torch.bfloat16))),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=stream_of(out),
        )
        settle(out)
        return out

    def destroy(self) -> None:
        """Collective."""
        if self.handle is not None:
            self.handle.destroy()
        if self.group is not None:
            self.group.destroy()
        self.group, self.handle, self.width = None, None, 0
