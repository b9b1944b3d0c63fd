"""Rows by token: each once on a rank, whatever experts it is for there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trefoil import ep
from trefoil.deep_ep.refusals import FLOATS, IDS
from trefoil.deep_ep.slots import Slot, SlotGroup
from trefoil.on_device import require, require_tensor, stream_of

Tensor = torch.Tensor
T = ep.Tensor


@dataclass
class TokenRows:
    """What a dispatch brings. Letters as in Buffer; N: the group's most tokens of a rank.

    Low latency: rows [R N, H], a source's in a block of N, in its order. local_ids, int32 [R N, K]:
    the local experts, -1 for those of other ranks; of rows that nobody sent all are -1, and the
    rest is unspecified. weights, float32 [R N, K]: the source's. hook: receives, with later.

    High throughput: rows [most, H], by source, then token. local_ids, int64 [most, K]: the local
    experts, ascending, then -1; weights, float32 [most, K]: theirs, then 0. Rows after those that
    came are unspecified, their ids -1.
    """

    rows: Tensor
    local_ids: Tensor
    weights: Tensor
    group: TokenRowsGroup
    slot: Slot
    number: int
    hook: Callable[[], None] | None

    def combine(
        self, rows: Tensor, out: Tensor, *, later: bool = False
    ) -> Callable[[], None] | None:
        """out [B, H]: of each token the sum of its ranks' rows, which lie as those of the dispatch.
        later (low latency): in the hook that is returned."""
        self.group.require_current(self.slot, self.number)
        for name, of in (("x", rows), ("out", out)):
            require_tensor(name, of)
        if rows.shape[:-1].numel() != len(self.rows):
            raise ep.InvalidArgumentError(
                f"x: {rows.shape[:-1].numel()} rows, the dispatch received {len(self.rows)}"
            )
        return self.group.combine_tokens(rows, self.slot, out, later=later)


class TokenRowsGroup(SlotGroup):
    """Experts take rows by token, and weigh and sum them. Low latency or high throughput, by the
    layout of its sizes."""

    def _require_now(self, later: bool) -> None:
        if later and self.sizes.routed:
            raise ep.InvalidArgumentError("later: low latency alone receives in a hook")

    def _shape(self, most: int | None) -> tuple[int, ...]:
        """Of what the library writes: high throughput, too, asks for room for R N rows."""
        wide = self.rank_count * self.sizes.tokens
        if not self.sizes.routed:
            if most is not None:
                raise ep.InvalidArgumentError("most: low latency has R N rows")
            return self.rank_count, self.sizes.tokens
        if most is not None and not 0 <= most <= wide:
            raise ep.InvalidArgumentError(f"most is {most}; must be in [0, {wide}]")
        return (wide,)

    def _require_fits(self, ids: Tensor, most: int) -> None:
        """No row came past the first `most`. On a GPU it is known there, and the kernel asserts."""
        fits = (ids[most:] < 0).all()
        if ids.is_cuda:
            torch._assert_async(fits, "most: more rows came")  # type: ignore[call-overload]
        elif not fits:
            raise ep.InvalidArgumentError(f"most is {most}; more rows came")

    def dispatch_tokens(
        self,
        x: Tensor,
        topk_idx: Tensor,
        weights: Tensor,
        *,
        later: bool = False,
        most: int | None = None,
    ) -> TokenRows:
        """Collective. x [B, H], topk_idx int64 [B, K], weights [B, K]. later (low latency): the
        rows are there after hook(). most (high throughput): the rows of results, at least as many
        as come (on a GPU a device-side assertion): the tokens of all ranks together always suffice;
        None: R N."""
        self._require_now(later)
        require_tensor("x", x)
        require("x", x, FLOATS, -1, -1, device=x.device)
        require("topk_idx", topk_idx, IDS, len(x), -1, device=x.device)
        require("weights", weights, FLOATS, *topk_idx.shape, device=x.device)
        shape, num_topk = self._shape(most), topk_idx.shape[1]
        ep.set_device(self.device)
        slot = self.next_slot(topk_idx)
        make = x.new_empty if x.is_cuda else x.new_zeros
        rows = make(*shape, x.shape[1])
        found = make(*shape, num_topk, dtype=torch.float32)
        id_type = torch.int64 if self.sizes.routed else torch.int32
        local = make(*shape, num_topk, dtype=id_type)
        x, weights = x.contiguous(), weights.float().contiguous()
        slot.kept = x, weights, rows, found, local
        slot.handle.dispatch(
            ep.DispatchInputs(tokens=T(x), topk_weights=T(weights)),
            ep.DispatchOutputs(tokens=T(rows), topk_weights=T(found), topk_idx=T(local)),
            config=ep.DispatchConfig(send_only=int(later)),
            stream=stream_of(x),
        )
        hook = self._finish(slot, later)
        if most is not None:
            self._require_fits(local, most)
        given = [t.flatten(0, -2)[:most] for t in (rows, local, found)]
        return TokenRows(*given, self, slot, slot.number, hook)

    def _as_asked(self, rows: Tensor) -> Tensor:
        """As the library wants them, R N; high throughput reads none past those that came."""
        shape = *self._shape(None), rows.shape[-1]
        if rows.shape[:-1].numel() == self.rank_count * self.sizes.tokens:
            return rows.contiguous().view(shape)
        room = rows.new_empty(shape)
        room[: len(rows)] = rows
        return room

    def combine_tokens(
        self, rows: Tensor, slot: Slot, out: Tensor, *, later: bool
    ) -> Callable[[], None] | None:
        """As TokenRows.combine."""
        self._require_now(later)
        ep.set_device(self.device)
        rows = self._as_asked(rows)
        slot.kept = rows, out
        slot.handle.combine(
            ep.CombineInputs(tokens=T(rows)),
            ep.CombineOutputs(tokens=T(out)),
            config=ep.CombineConfig(send_only=int(later)),
            stream=stream_of(out),
        )
        return self._finish(slot, later)
