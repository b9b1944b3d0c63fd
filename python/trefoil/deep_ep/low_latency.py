"""Low latency: groups by size and layout, two dispatches at a time each, and what an expert's rows
say of their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trefoil import ep
from trefoil.on_device import settle_of, stream_of

Tensor = torch.Tensor
T = ep.Tensor
IN_FLIGHT = 2  # dispatches of a group whose combine is still to come
FP8 = torch.float8_e4m3fn
BLOCK = 128  # values that share a scale


@dataclass
class Slot:
    """A handle, and what lives until it is used again."""

    handle: ep.Handle
    num_topk: int  # of the handle
    number: int = -1  # of the dispatch that uses it
    topk_idx: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    kept: Any = None
    combine_buffer: Tensor | None = None
    pending: bool = False  # sent, and the hook that receives was not called

    def complete(self) -> None:
        """Receives what is pending."""
        if self.pending:
            self.handle.complete(stream=stream_of(self.topk_idx))
            self.pending = False

    def destroy(self) -> None:
        self.complete()
        self.handle.destroy()


class LowLatencyHandle(tuple[Any, ...]):
    """What dispatch gives to combine: (source tokens int32 [L, R N], (begin << 32 | count) int64
    [L, R] of each source rank's rows, N, H, E). Without sources the first two are None."""

    group: LowLatencyGroup
    slot: Slot
    number: int


@dataclass(frozen=True)
class Sizes:
    """Of a group: N, H, E, and the layout of its handles."""

    tokens: int
    hidden: int
    experts: int
    layout: ep.Layout = ep.Layout.EXPERT_MAJOR


class LowLatencyGroup:
    """The ranks of comm with limits."""

    def __init__(self, comm: ep.Communicator, sizes: Sizes, masks: bool, sources: bool) -> None:
        self.sizes, self.rank_count, self.sources = sizes, comm.num_ranks, sources
        self.local = sizes.experts // comm.num_ranks
        self.device = ep.get_device()
        self.group = ep.Group.create(
            comm,
            ep.GroupConfig(
                num_experts=sizes.experts,
                max_dispatch_tokens_per_rank=sizes.tokens,
                max_token_bytes=max(16, 4 * sizes.hidden),
                enable_mask=masks,
            ),
        )
        self.slots: list[Slot] = []
        self.dispatches = 0

    @property
    def wide(self) -> int:
        """Slots of an expert."""
        return self.rank_count * self.sizes.tokens

    def next_slot(self, topk_idx: Tensor) -> Slot:
        """Combine reads topk_idx, too: on a GPU the caller leaves it as it is until then."""
        number, num_topk = self.dispatches, topk_idx.shape[1]
        slot = None if number < IN_FLIGHT else self.slots[number % IN_FLIGHT]
        if slot is not None:
            slot.complete()
        kept = topk_idx.contiguous() if topk_idx.is_cuda else topk_idx.clone()
        handle = self._updated(slot, kept)
        if slot is None:
            slot = Slot(handle, num_topk)
            self.slots.append(slot)
        elif handle is not slot.handle:
            slot.handle.destroy()
            slot.handle, slot.num_topk = handle, num_topk
        slot.number, slot.topk_idx, slot.combine_buffer = number, kept, None
        self.dispatches += 1
        return slot

    def _updated(self, slot: Slot | None, ids: Tensor) -> ep.Handle:
        """The slot's handle, or one of another K, with the routing ids. What is refused changes
        nothing."""
        num_topk = ids.shape[1]
        if slot is not None and slot.num_topk == num_topk:
            slot.handle.update(T(ids), stream=stream_of(ids))
            return slot.handle
        handle = self.group.init_handle(self.sizes.layout, num_topk)
        try:
            handle.update(T(ids), stream=stream_of(ids))
        except ep.Error:
            handle.destroy()
            raise
        return handle

    def _settle(self, slot: Slot) -> None:
        settle_of(slot.topk_idx, self.group, self.sizes.layout, slot.num_topk, asks=False)

    def _dispatch(
        self, slot: Slot, rows: Tensor, out: Tensor, scales: Tensor | None, config: Any
    ) -> Tensor:
        counts = torch.empty(self.local, dtype=torch.int32, device=rows.device)
        slot.kept = rows, out, scales, counts
        slot.handle.dispatch(
            ep.DispatchInputs(tokens=T(rows)),
            ep.DispatchOutputs(tokens=T(out), scales=None if scales is None else T(scales)),
            layout_info=ep.LayoutInfo(expert_counters=T(counts)),
            config=config,
            stream=stream_of(rows),
        )
        return counts

    def _finish(self, slot: Slot, later: bool) -> Callable[[], None] | None:
        """What the caller calls later, or None when all is done."""

        number, slot.pending = slot.number, later

        def complete() -> None:
            if slot.number == number:
                ep.set_device(self.device)
                slot.complete()
                self._settle(slot)

        if not later:
            self._settle(slot)
        return complete if later else None

    def _sources(self, slot: Slot, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The source token of each slot and each rank's part of an expert, by a dispatch of its
        own."""
        device = slot.topk_idx.device
        head = torch.zeros(tokens, 4, dtype=torch.int32, device=device)
        head[:, 0], head[:, 1] = rank, torch.arange(tokens, device=device)
        shape = self.local, self.wide, 8
        out = torch.full(shape, -1, dtype=torch.int16, device=device).view(torch.bfloat16)
        self._dispatch(slot, head.view(torch.bfloat16), out, None, None)
        self._settle(slot)
        found = out.view(torch.int32)
        ranks = torch.arange(self.rank_count, device=device)
        each = (found[:, :, :1] == ranks).sum(1)
        return found[:, :, 1].contiguous(), (each.cumsum(1) - each) << 32 | each

    def _room(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """[L, R N, width]. On a GPU what no row is written to holds anything."""
        make = like.new_empty if like.is_cuda else like.new_zeros
        return make(self.local, self.wide, width, dtype=dtype)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, rank: int, *, fp8: bool, pow2: bool, later: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, LowLatencyHandle, Callable[[], None] | None]:
        """Rows, scales, counts, handle, hook."""
        ep.set_device(self.device)
        slot = self.next_slot(topk_idx)
        sources = self._sources(slot, rank, len(x)) if self.sources else (None, None)
        out = self._room(x, x.shape[1], FP8 if fp8 else x.dtype)
        scales = None
        recipe = ep.DispatchQuantizationRecipe.NONE
        if fp8:
            scales = self._room(x, x.shape[1] // BLOCK, torch.float32)
            recipe = ep.DispatchQuantizationRecipe.DS_FP8E3M4
        config = ep.DispatchConfig(
            send_only=int(later), round_scales=int(pow2), quantization_recipe=recipe
        )
        counts = self._dispatch(slot, x.contiguous(), out, scales, config)
        handle = LowLatencyHandle((*sources, self.sizes.tokens, x.shape[1], self.sizes.experts))
        handle.group, handle.slot, handle.number = self, slot, slot.number
        return out, scales, counts, handle, self._finish(slot, later)

    def combine(
        self, rows: Tensor, weights: Tensor, slot: Slot, out: Tensor, *, later: bool
    ) -> Callable[[], None] | None:
        """Sums into out, or in the hook."""
        ep.set_device(self.device)
        rows, weights = rows.contiguous(), weights.float().contiguous()
        slot.kept = rows, weights, out
        slot.handle.combine(
            ep.CombineInputs(tokens=T(rows)),
            ep.CombineOutputs(tokens=T(out), topk_weights=T(weights)),
            config=ep.CombineConfig(send_only=int(later)),
            stream=stream_of(out),
        )
        return self._finish(slot, later)

    def destroy(self) -> None:
        """Collective."""
        for slot in self.slots:
            slot.destroy()
        self.group.destroy()


@dataclass
class TokenRows:
    """What a dispatch in rank-major brings: each token once, whatever experts of this rank want it.

    rows [R N, H]: a source's in a block of N, in its order. local_ids, int32 [R N, K]: the local
    experts, -1 for those of other ranks; of rows that nobody sent all are -1, and the rest is
    unspecified. weights, float32 [R N, K]: the source's. hook: receives, with later.
    """

    rows: Tensor
    local_ids: Tensor
    weights: Tensor
    group: TokenRowsGroup
    slot: Slot
    hook: Callable[[], None] | None

    def combine(self, rows: Tensor, out: Tensor, *, later: bool) -> Callable[[], None] | None:
        """out [B, H]: of each token the sum of its ranks' rows, [R N, H]. With later in the hook
        that is returned."""
        return self.group.combine_tokens(rows, self.slot, out, later=later)


class TokenRowsGroup(LowLatencyGroup):
    """The same in rank-major: experts take rows by token, and weigh and sum them."""

    def dispatch_tokens(
        self, x: Tensor, topk_idx: Tensor, weights: Tensor, *, later: bool
    ) -> TokenRows:
        """x [B, H], topk_idx int64 [B, K], weights [B, K]. later: the rows are there after
        hook()."""
        ep.set_device(self.device)
        slot = self.next_slot(topk_idx)
        wide, num_topk = (self.rank_count, self.sizes.tokens), topk_idx.shape[1]
        make = x.new_empty if x.is_cuda else x.new_zeros
        rows = make(*wide, x.shape[1])
        found = make(*wide, num_topk, dtype=torch.float32)
        local = make(*wide, num_topk, dtype=torch.int32)
        x, weights = x.contiguous(), weights.float().contiguous()
        slot.kept = x, weights, rows, found, local
        slot.handle.dispatch(
            ep.DispatchInputs(tokens=T(x), topk_weights=T(weights)),
            ep.DispatchOutputs(tokens=T(rows), topk_weights=T(found), topk_idx=T(local)),
            config=ep.DispatchConfig(send_only=int(later)),
            stream=stream_of(x),
        )
        hook = self._finish(slot, later)
        flat = (t.flatten(0, 1) for t in (rows, local, found))
        return TokenRows(*flat, self, slot, hook)

    def combine_tokens(
        self, rows: Tensor, slot: Slot, out: Tensor, *, later: bool
    ) -> Callable[[], None] | None:
        ep.set_device(self.device)
        rows = rows.contiguous().view(self.rank_count, self.sizes.tokens, -1)
        slot.kept = rows, out
        slot.handle.combine(
            ep.CombineInputs(tokens=T(rows)),
            ep.CombineOutputs(tokens=T(out)),
            config=ep.CombineConfig(send_only=int(later)),
            stream=stream_of(out),
        )
        return self._finish(slot, later)


def packed_exponents(scales: Tensor) -> Tensor:
    """UE8M0: the exponents of scales that are powers of two, four to an int32 [L, R N, H / 512]."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return exponents.contiguous().view(torch.int32)
