"""How the ranks of a buffer reach each other on the host: torch.distributed or mpi4py."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from trefoil import ep


class Ranks(Protocol):
    rank: int
    size: int

    def communicator(self) -> ep.Communicator:
        """Collective."""


class GroupRanks:
    """Of a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def communicator(self) -> ep.Communicator:
        return ep.Communicator.from_torch(self.group)


class MpiRanks:
    """Of an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def communicator(self) -> ep.Communicator:
        return ep.Communicator.from_mpi(self.comm)


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
