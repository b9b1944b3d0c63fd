"""Groups whose handles take turns: two dispatches at a time each."""

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


@dataclass(frozen=True)
class Sizes:
    """Of a group: N, H, E, the layout of its handles, and the bytes of an element, at most."""

    tokens: int
    hidden: int
    experts: int
    layout: ep.Layout = ep.Layout.EXPERT_MAJOR
    element: int = 4

    @property
    def routed(self) -> bool:
        """Of high throughput, where ranks tell each other their routing."""
        return self.layout == ep.Layout.FLAT


class SlotGroup:
    """The ranks of comm with limits."""

    def __init__(self, comm: ep.Communicator, sizes: Sizes, masks: bool = False) -> None:
        self.sizes, self.rank_count = sizes, comm.num_ranks
        self.device = ep.get_device()
        config = ep.GroupConfig(
            num_experts=sizes.experts,
            max_dispatch_tokens_per_rank=sizes.tokens,
            max_token_bytes=-(-sizes.element * sizes.hidden // 16) * 16,
            enable_mask=masks,
        )
        if sizes.routed:
            config.algorithm = ep.Algorithm.HIGH_THROUGHPUT
            config.max_recv_tokens_per_rank = self.rank_count * sizes.tokens
        self.group = ep.Group.create(comm, config)
        self.slots: list[Slot] = []
        self.dispatches = 0

    def next_slot(self, topk_idx: Tensor) -> Slot:
        """Combine reads topk_idx, too: on a GPU the caller leaves it as it is until then."""
        number, num_topk = self.dispatches, topk_idx.shape[1]
        slot = None if number < IN_FLIGHT else self.slots[number % IN_FLIGHT]
        if slot is not None:
            slot.complete()
        kept = topk_idx.contiguous()
        if not kept.is_cuda and kept is topk_idx:
            kept = kept.clone()
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

    def require_current(self, slot: Slot, number: int) -> None:
        """Refuses the combine of a dispatch whose slot another one has taken."""
        if slot.number != number:
            raise ep.InvalidUsageError(
                "two later dispatches took the place of the one that this handle is of"
            )

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
        settle_of(
            slot.topk_idx, self.group, self.sizes.layout, slot.num_topk, asks=self.sizes.routed
        )

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
            slot.kept = None  # by the order of the stream nobody has their memory before
            slot.handle.drop_tensors(but_routing=True)
        return complete if later else None

    def destroy(self) -> None:
        """Collective."""
        for slot in self.slots:
            slot.destroy()
        self.group.destroy()
