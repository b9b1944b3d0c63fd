"""Rows between ranks, whatever their type: HT, flat, an expert for each rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trefoil import ep
from trefoil.deep_ep.fixed import Fixed
from trefoil.on_device import settle, settle_of, stream_of

Tensor = torch.Tensor
T = ep.Tensor
BACKWARD = ep.PassDir.BWD
LEAST_TOKENS, LEAST_BYTES = 128, 4096
ALONE_BYTES = 512  # rows of so many bytes are not packed with others


def padded(count: int, to: int) -> int:
    return -(-count // to) * to


def power_of_two(least: int, count: int) -> int:
    return max(least, 1 << max(count - 1, 0).bit_length())


def row_bytes(t: Tensor) -> int:
    width = t.element_size()
    for size in t.shape[1:]:
        width *= size
    return width


def _viewed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of a contiguous tensor as another type. A dimension of one element may have any
    stride, and torch's view of another type looks at it: hence flat first."""
    return t.view(-1).view(dtype).view(t.shape[0], row_bytes(t) // dtype.itemsize)


def as_bytes(t: Tensor) -> Tensor:
    """uint8 [B, bytes of a row]."""
    if t.numel():
        return _viewed(t.contiguous(), torch.uint8)
    return torch.empty(t.shape[0], row_bytes(t), dtype=torch.uint8, device=t.device)


def plain(rows: Tensor) -> Tensor:
    """As a type that the library moves without looking into it, from a multiple of 16 bytes on."""
    rows = rows.contiguous()
    return _viewed(rows.clone() if rows.data_ptr() % 16 else rows, torch.bfloat16)


def travels_alone(field: Tensor) -> bool:
    width = row_bytes(field)
    return field.dim() == 2 and width >= ALONE_BYTES and width % 16 == 0


def pack(fields: list[Tensor]) -> list[Tensor]:
    """What travels for the fields of each row: those with long rows as they lie, the others in rows
    of a multiple of 16 bytes, one after the other."""
    alone = [plain(field) for field in fields if travels_alone(field)]
    small = [as_bytes(field) for field in fields if not travels_alone(field)]
    if not small:
        return alone
    width = sum(part.shape[1] for part in small)
    if width % 16:
        small.append(small[0].new_zeros(len(small[0]), padded(width, 16) - width))
    return [*alone, plain(torch.cat(small, 1))]


def widest_payload(fields: list[Tensor]) -> int:
    """Bytes of the longest row of pack(fields)."""
    widths = [(travels_alone(field), row_bytes(field)) for field in fields]
    small = padded(sum(width for alone, width in widths if not alone), 16)
    return max([small, *(width for alone, width in widths if alone)])


def unpack(payloads: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The fields of pack(like), for other rows."""
    alone, found, at = iter(payloads), [], 0
    rows = payloads[-1].view(torch.uint8)
    for one in like:
        if travels_alone(one):
            found.append(next(alone).view(one.dtype))
            continue
        width = row_bytes(one)
        part = rows[:, at : at + width].clone(memory_format=torch.contiguous_format)
        part = part.view(one.dtype)
        found.append(part.reshape(rows.shape[0], *one.shape[1:]))
        at += width
    return found


@dataclass(eq=False)
class Pool:
    """Handles of a group that no route has, each with the stream of its last call. To destroy a
    handle waits for the GPU; one that is used again on its stream need not wait."""

    group: ep.Group
    free: list[tuple[ep.Handle, Any]] = field(default_factory=list)

    def take(self, ids: Tensor, stream: Any) -> ep.Handle:
        """Collective: a handle with the routing ids."""
        for i, (handle, last) in enumerate(self.free):
            if last == stream:
                handle.update(T(ids), stream=stream)
                del self.free[i]
                return handle
        return self.group.create_handle(ep.Layout.FLAT, T(ids), stream=stream)

    def destroy(self) -> None:
        while self.free:
            self.free.pop()[0].destroy()


@dataclass(eq=False)
class Route:
    """A routing: what a handle of the library knows, and how many rows come and go. rows: of
    results, those that nobody sent included."""

    pool: Pool
    handle: ep.Handle
    sent: int
    received: int
    rows: int
    stream: Any  # of the last call

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a handle of a dispatch cannot be copied or pickled: its routing is once")

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and self.handle.live:
            self.handle.drop_tensors()
            self.pool.free.append((self.handle, self.stream))


class Exchange:
    """Routes over a communicator. Its groups grow with what all ranks ask for."""

    def __init__(self, comm: ep.Communicator, fixed: Fixed) -> None:
        self.comm, self.num_ranks, self.fixed = comm, comm.num_ranks, fixed
        self.device = ep.get_device()
        self.tokens = self.bytes = 0
        self.pools: list[Pool] = []
        self.routes: weakref.WeakSet[Route] = weakref.WeakSet()

    def _grow(self, tokens: int, width: int) -> Pool:
        """Of a group for so many tokens and bytes, the greatest of all ranks. Older ones stay, for
        the routes that were made on them."""
        if tokens <= self.tokens and width <= self.bytes:
            return self.pools[-1]
        self.tokens = max(self.tokens, power_of_two(LEAST_TOKENS, tokens))
        self.bytes = max(self.bytes, power_of_two(LEAST_BYTES, width))
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=self.num_ranks,
            max_dispatch_tokens_per_rank=self.tokens,
            max_token_bytes=self.bytes,
            num_topk=self.num_ranks,
        )
        self.pools.append(Pool(ep.Group.create(self.comm, config)))
        return self.pools[-1]

    def _route(self, pool: Pool, in_rank: Tensor) -> Route:
        ids = torch.where(in_rank, self.fixed.ranks, self.fixed.nobody)
        stream = stream_of(ids)
        handle = pool.take(ids, stream)
        settle(ids)
        route = Route(pool, handle, len(ids), 0, 0, stream)
        self.routes.add(route)
        return route

    def begin(self, in_rank: Tensor) -> Route | None:
        """Collective: a routing by in_rank, bool [B, R], if there is a group. Before ranks know
        of each other how many tokens they have: one with more than the group takes routes none."""
        ep.set_device(self.device)
        if not self.pools:
            return None
        return self._route(self.pools[-1], in_rank if len(in_rank) <= self.tokens else in_rank[:0])

    def fitted(
        self, begun: Route | None, in_rank: Tensor, received: int, most: tuple[int, int]
    ) -> Route:
        """Collective: begun, or where the group was too small a routing on a greater one. most:
        tokens of a rank and bytes of a row, the greatest of all ranks."""
        pool = self._grow(*most)
        if begun is None or begun.pool is not pool:
            begun = self._route(pool, in_rank)
        begun.received = begun.rows = received
        return begun

    def scatter(self, route: Route, rows: Tensor) -> Tensor:
        """Collective: rows [B, ...] of all ranks, by source rank, then token."""
        ep.set_device(self.device)
        out = rows.new_empty(route.received, *rows.shape[1:])
        route.stream = stream_of(out)
        route.handle.dispatch(
            ep.DispatchInputs(tokens=T(rows)),
            ep.DispatchOutputs(tokens=T(out)),
            config=ep.DispatchConfig(pass_direction=BACKWARD),
            stream=route.stream,
        )
        self._settle(route, out)
        return out

    def _settle(self, route: Route, out: Tensor) -> None:
        settle_of(out, route.pool.group, ep.Layout.FLAT, self.num_ranks, asks=True)

    def reduce(self, route: Route, rows: Tensor) -> Tensor:
        """Collective: for each token the sum of its rows, ranks ascending, in float32."""
        ep.set_device(self.device)
        out = rows.new_empty(route.sent, rows.shape[1])
        rows = rows.contiguous()
        inputs, outputs = ep.CombineInputs(tokens=T(rows)), ep.CombineOutputs(tokens=T(out))
        route.stream = stream_of(out)
        route.handle.combine(inputs, outputs, stream=route.stream)
        self._settle(route, out)
        return out

    def destroy(self) -> None:
        """Collective. Routes that callers still hold are of no use afterwards."""
        for route in self.routes:
            route.handle.destroy()
        for pool in self.pools:
            pool.destroy()
            pool.group.destroy()
        self.pools = []
