"""Rows between ranks, whatever their type: HT, flat, an expert for each rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trefoil import ep
from trefoil.deep_ep.host_group import Ranks
from trefoil.on_device import settle, stream_of

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


def as_bytes(t: Tensor) -> Tensor:
    """uint8 [B, bytes of a row]."""
    if t.numel():
        return t.contiguous().view(torch.uint8).reshape(t.shape[0], -1)
    return torch.empty(t.shape[0], row_bytes(t), dtype=torch.uint8, device=t.device)


def plain(rows: Tensor) -> Tensor:
    """As a type that the library moves without looking into it."""
    return rows.contiguous().view(torch.bfloat16)


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
    small.append(small[0].new_zeros(len(small[0]), padded(width, 16) - width))
    return [*alone, plain(torch.cat(small, 1))]


def unpack(payloads: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The fields of pack(like), for other rows."""
    alone, fields, at = iter(payloads), [], 0
    rows = payloads[-1].view(torch.uint8)
    for field in like:
        if travels_alone(field):
            fields.append(next(alone).view(field.dtype))
            continue
        width = row_bytes(field)
        part = rows[:, at : at + width].clone(memory_format=torch.contiguous_format)
        part = part.view(field.dtype)
        fields.append(part.reshape(rows.shape[0], *field.shape[1:]))
        at += width
    return fields


@dataclass(eq=False)
class Route:
    """A routing: what a handle of the library knows, and how many rows come and went. rows: of
    results, those that nobody sent included."""

    handle: ep.Handle
    sent: int
    received: int
    rows: int

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and self.handle.live:
            self.handle.destroy()


class Exchange:
    """Routes over a communicator. Its groups grow with what all ranks ask for."""

    def __init__(self, comm: ep.Communicator, ranks: Ranks) -> None:
        self.comm, self.ranks, self.num_ranks = comm, ranks, ranks.size
        self.device = ep.get_device()
        self.tokens = self.bytes = 0
        self.groups: list[ep.Group] = []
        self.routes: weakref.WeakSet[Route] = weakref.WeakSet()

    def _grow(self, tokens: int, width: int) -> ep.Group:
        """A group for so many tokens and bytes, the greatest of all ranks. Older ones stay, for the
        routes that were made on them."""
        if tokens <= self.tokens and width <= self.bytes:
            return self.groups[-1]
        self.tokens = max(self.tokens, power_of_two(LEAST_TOKENS, tokens))
        self.bytes = max(self.bytes, power_of_two(LEAST_BYTES, width))
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=self.num_ranks,
            max_dispatch_tokens_per_rank=self.tokens,
            max_token_bytes=self.bytes,
            num_topk=self.num_ranks,
        )
        self.groups.append(ep.Group.create(self.comm, config))
        return self.groups[-1]

    def route(self, is_token_in_rank: Tensor, received: int, most: tuple[int, int]) -> Route:
        """Collective. most: tokens of a rank and bytes of a row, the greatest of all ranks."""
        ep.set_device(self.device)
        group = self._grow(*most)
        ranks = torch.arange(self.num_ranks, device=is_token_in_rank.device).expand(
            is_token_in_rank.shape
        )
        ids = torch.where(is_token_in_rank, ranks, -1).contiguous()
        handle = group.create_handle(ep.Layout.FLAT, T(ids), stream=stream_of(ids))
        settle(ids)
        route = Route(handle, len(ids), received, received)
        self.routes.add(route)
        return route

    def scatter(self, route: Route, rows: Tensor) -> Tensor:
        """Collective: rows [B, ...] of all ranks, by source rank, then token."""
        ep.set_device(self.device)
        out = rows.new_empty(route.received, *rows.shape[1:])
        route.handle.dispatch(
            ep.DispatchInputs(tokens=T(rows)),
            ep.DispatchOutputs(tokens=T(out)),
            config=ep.DispatchConfig(pass_direction=BACKWARD),
            stream=stream_of(out),
        )
        settle(out)
        return out

    def reduce(self, route: Route, rows: Tensor) -> Tensor:
        """Collective: for each token the sum of its rows, ranks ascending, in float32."""
        ep.set_device(self.device)
        out = rows.new_empty(route.sent, rows.shape[1])
        rows = rows.contiguous()
        inputs, outputs = ep.CombineInputs(tokens=T(rows)), ep.CombineOutputs(tokens=T(out))
        route.handle.combine(inputs, outputs, stream=stream_of(out))
        settle(out)
        return out

    def destroy(self) -> None:
        """Collective. Routes that callers still hold are of no use afterwards."""
        for route in self.routes:
            route.handle.destroy()
        for group in self.groups:
            group.destroy()
        self.groups = []
