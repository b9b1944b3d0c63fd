"""Low latency with rows by expert, and what these say of their sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trefoil import ep
from trefoil.deep_ep.slots import Sizes, Slot, SlotGroup
from trefoil.on_device import stream_of

Tensor = torch.Tensor
T = ep.Tensor
FP8 = torch.float8_e4m3fn
BLOCK = 128  # values that share a scale


class LowLatencyHandle(tuple[Any, ...]):
    """What dispatch gives to combine: (source tokens int32 [L, R N], (begin << 32 | count) int64
    [L, R] of each source rank's rows, N, H, E). Without sources the first two are None."""

    group: LowLatencyGroup
    slot: Slot
    number: int


class LowLatencyGroup(SlotGroup):
    """Rows by expert."""

    def __init__(self, comm: ep.Communicator, sizes: Sizes, masks: bool, sources: bool) -> None:
        super().__init__(comm, sizes, masks)
        self.local, self.sources = sizes.experts // comm.num_ranks, sources

    @property
    def wide(self) -> int:
        """Slots of an expert."""
        return self.rank_count * self.sizes.tokens

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
        sources: tuple[Tensor | None, Tensor | None] = (None, None)
        refused: ep.Error | None = None
        if self.sources:
            try:
                sources = self._sources(slot, rank, len(x))
            except ep.Error as error:  # the other ranks wait for the rows, too
                refused = error
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
        hook = self._finish(slot, later)
        if refused is not None:
            raise refused
        return out, scales, counts, handle, hook

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


def packed_exponents(scales: Tensor) -> Tensor:
    """UE8M0: the exponents of scales that are powers of two, four to an int32 [L, R N, H / 512]."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return exponents.contiguous().view(torch.int32)
