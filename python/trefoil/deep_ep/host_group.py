"""How the ranks of a buffer reach each other on the host: torch.distributed or mpi4py."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from trefoil import ep
from trefoil.on_device import device_of_library


class Ranks(Protocol):
    rank: int
    size: int

    def communicator(self) -> ep.Communicator:
        """Collective."""

    def gather(self, mine: list[int]) -> list[list[int]]:
        """Collective: mine of every rank, all of one length."""


class GroupRanks:
    """Of a torch.distributed group. Its backend gathers host tensors, or those of a GPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_host = "cpu:" in dist.get_backend_config(group)
        self.device = torch.device("cpu") if on_host else device_of_library()

    def communicator(self) -> ep.Communicator:
        return ep.Communicator.from_torch(self.group)

    def gather(self, mine: list[int]) -> list[list[int]]:
        own = torch.tensor(mine, dtype=torch.int64, device=self.device)
        box = own.new_empty(self.size, len(mine))
        dist.all_gather(list(box), own, group=self.group)
        return box.tolist()


class MpiRanks:
    """Of an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def communicator(self) -> ep.Communicator:
        return ep.Communicator.from_mpi(self.comm)

    def gather(self, mine: list[int]) -> list[list[int]]:
        return self.comm.allgather(mine)


def ranks_of(group: dist.ProcessGroup | None, comm: Any) -> Ranks:
    """Of the group, or where that is None of the mpi4py communicator."""
    if isinstance(group, dist.ProcessGroup):
        return GroupRanks(group)
    if group is not None:
        raise ep.InvalidArgumentError(
            f"group is {group!r}; a torch.distributed process group of this rank is needed"
        )
    if comm is not None:
        return MpiRanks(comm)
    raise ep.InvalidArgumentError(
        "group and comm are None; a torch.distributed group or an mpi4py communicator is needed"
    )
