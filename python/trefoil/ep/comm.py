"""Communicators and streams: what groups stand on."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from trefoil.ep._load import c

COMM, GROUP, HANDLE, STREAM = range(4)
T = TypeVar("T", bound="Scoped")


class Scoped:
    """An object that a `with` block destroys at its end."""

    __slots__ = ()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end(kind is not None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} of trefoil cannot be copied or pickled: it stands for "
            "buffers of this process and its peers; make another one, or share this one"
        )

    def destroy(self) -> None:
        raise NotImplementedError

    def _end(self, failed: bool) -> None:
        """failed: an exception is on its way. Other ranks may not come, queued work may not end."""
        if not failed:
            self.destroy()


def get_unique_id() -> bytes:
    """The 128 bytes by which ranks find each other; its maker lives until they have met."""
    return c.unique_id()


def set_device(device: int) -> None:
    """The device of this thread. Ranks that are threads of one process need one each."""
    c.set_device(device)


def get_device() -> int:
    return c.get_device()


def device_count() -> int:
    return c.device_count()


class Communicator(Scoped, c.Object):
    """The ranks that make groups. As a context manager: destroyed, or aborted on an exception."""

    __slots__ = ("_groups", "_owned")
    _groups: weakref.WeakSet[Any]
    _owned: bool

    def __new__(cls, ptr: int) -> Communicator:
        """Of an ncclComm_t that somebody else made and destroys."""
        self = super().__new__(cls, COMM, ptr)
        self._owned, self._groups = False, weakref.WeakSet()
        return self

    @classmethod
    def create(cls, num_ranks: int, rank: int, unique_id: bytes) -> Communicator:
        """Collective over num_ranks ranks, on this thread's device; Ctrl-C ends the wait."""
        self = cls(c.comm_init(num_ranks, rank, unique_id))
        self._owned = True
        return self

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], num_ranks: int, rank: int, timeout: float = 100.0
    ) -> Communicator:
        """Ranks meet by a file that rank 0 makes: a path that does not exist yet, new each time."""
        exchange = _write_id if rank == 0 else _read_id
        return cls.create(num_ranks, rank, exchange(Path(path), timeout))

    @classmethod
    def from_mpi(cls, comm: Any) -> Communicator:
        """Of the ranks of an mpi4py communicator."""
        unique_id = comm.bcast(get_unique_id() if comm.rank == 0 else None, root=0)
        return cls.create(comm.size, comm.rank, unique_id)

    @classmethod
    def from_torch(cls, group: Any = None) -> Communicator:
        """Of the ranks of a torch.distributed process group; None: the default one."""
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        box = [get_unique_id() if rank == 0 else None]
        source = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(box, src=source, group=group)
        assert box[0] is not None
        return cls.create(size, rank, box[0])

    @property
    def num_ranks(self) -> int:
        return c.comm_count(self)

    def destroy(self) -> None:
        """Of one that this class made; InvalidUsageError while a group of it is there. A second
        time: nothing happens."""
        if not (self.live and self._owned):
            return
        if left := sum(group.live for group in self._groups):
            raise c.InvalidUsageError(
                f"Communicator.destroy: {left} of its groups not destroyed yet; destroy handles, "
                "then groups, then the communicator, or abort it"
            )
        c.comm_destroy(self)

    def abort(self) -> None:
        """Ends what waits for other ranks, here and there. Its groups are lost with it: their
        memory stays until the process ends; their handles can be destroyed."""
        if self.live:
            c.comm_abort(self)

    def _end(self, failed: bool) -> None:
        if not failed:
            self.destroy()
        elif self._owned:
            self.abort()


def _write_id(path: Path, timeout: float) -> bytes:
    """A link of a whole file: readers see it whole, and an old one is not taken for a new one."""
    unique_id = get_unique_id()
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_bytes(unique_id)
    try:
        os.link(whole, path)
    finally:
        whole.unlink()
    return unique_id


def _read_id(path: Path, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 did not make {path} within {timeout:g} s")
        time.sleep(0.01)
    return path.read_bytes()


class Stream(Scoped, c.Object):
    """A stream of this thread's device. Work queued on it runs in order, beside the program."""

    __slots__ = ("_owned",)
    _owned: bool

    def __new__(cls, ptr: int | None = None) -> Stream:
        """A new one, or that of a cudaStream_t that somebody else made and destroys."""
        self = super().__new__(cls, STREAM, c.stream_create() if ptr is None else ptr)
        self._owned = ptr is None
        return self

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def synchronize(self) -> None:
        """Waits for the queued work; Ctrl-C ends the wait, not the work."""
        c.stream_synchronize(self)

    def destroy(self) -> None:
        if self.live and self._owned:
            c.stream_destroy(self)

    def _end(self, failed: bool) -> None:
        if not failed:
            self.synchronize()
            self.destroy()


def synchronize(stream: Any = None) -> None:
    """Waits for a stream's queued work (Stream, int, __cuda_stream__; None: the default stream)."""
    c.stream_synchronize(stream)
