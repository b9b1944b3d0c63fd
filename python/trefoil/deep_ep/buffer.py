"""`Buffer`: the methods of DeepEP's first version, with their names, defaults, shapes and types.

Letters: R ranks, E experts, L = E / R of them here, B tokens of this rank, N most tokens of a rank
in a low-latency call, K experts of a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from trefoil import ep
from trefoil.deep_ep.counts import Counts, Numbers
from trefoil.deep_ep.exchange import Exchange, Route, pack, padded, unpack, widest_payload
from trefoil.deep_ep.fixed import Fixed
from trefoil.deep_ep.host_group import ranks_of
from trefoil.deep_ep.low_latency import (
    BLOCK,
    LowLatencyGroup,
    LowLatencyHandle,
    packed_exponents,
)
from trefoil.deep_ep.refusals import (
    COUNTS,
    FLOATS,
    IDS,
    biases_of,
    counts_of,
    fields_of,
    kind_of,
    require_agreement,
    require_alike,
    require_count,
    require_experts,
    require_handle,
    require_known,
    require_topk,
)
from trefoil.deep_ep.slots import Sizes, Slot, SlotGroup
from trefoil.deep_ep.token_rows import TokenRowsGroup
from trefoil.deep_ep.utils import EventOverlap, after, event_of
from trefoil.on_device import device_of_library, enter_device, require, settle, stream_of

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]  # fp8 rows come with their scales
Hook = Callable[[], None]


@dataclass
class Config:
    """Kept for callers; the library chooses for itself."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: the library sizes its own buffers."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, too."""
        return 0


class Handle(NamedTuple):
    """What dispatch gives to combine and to a later dispatch with the same routing.

    rank_prefix_matrix: int32 [R, R], tokens that ranks 0 to i send to rank j. recv_src_idx: int32,
    the source token of each received row.
    """

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: None
    recv_channel_prefix_matrix: None
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    route: Route


class NodesHandle(NamedTuple):
    """The same where the ranks are on several nodes. recv_rdma_rank_prefix_sum: int32 [nodes], the
    rows received of nodes 0 to i; recv_gbl_rank_prefix_sum: int32 [R], of ranks 0 to i."""

    is_token_in_rank: Tensor
    rdma_channel_prefix_matrix: None
    gbl_channel_prefix_matrix: None
    recv_rdma_channel_prefix_matrix: None
    recv_rdma_rank_prefix_sum: Tensor
    recv_gbl_channel_prefix_matrix: None
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_meta: None
    send_rdma_head: None
    route: Route


HANDLES = Handle, NodesHandle


class Buffer:
    """Dispatch and combine over the ranks of a torch.distributed group or an mpi4py communicator.

    group: where the ranks meet when a buffer is made, not later; comm counts where it is None.
    enable_shrink: low latency goes on without ranks that are masked or late. Sizes in bytes and the
    other options are accepted and not needed.

    ranks_per_node: of a multiple of so many ranks, layouts and handles are those of several nodes.

    sources: whether a low-latency handle begins with the source tokens and ranges, which take a
    dispatch of their own; None: on the CPU only. Set it before the first dispatch, on all ranks.
    """

    num_sms: int = 20
    ranks_per_node: int = 8
    sources: bool | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        ranks = ranks_of(group, comm)
        self.group, self.rank, self.group_size = group, ranks.rank, ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        enter_device()
        self.device = device_of_library()
        self.comm = ranks.communicator()
        self._fixed = Fixed(self.group_size, self.device)
        self._exchange = Exchange(self.comm, self._fixed)
        self._counts = Counts(self.comm, self.device)
        self._low_latency: dict[Sizes, SlotGroup] = {}
        self._routed_rows: dict[Sizes, TokenRowsGroup] = {}
        self._masked: set[int] = set()

    def _require_live(self) -> None:
        if not self.comm.live:
            raise ep.InvalidUsageError("the buffer was destroyed, or made before a fork")

    @property
    def _nodes(self) -> int:
        """Of ranks_per_node ranks; 1: all are on one."""
        each = self.ranks_per_node
        return 1 if self.group_size % each else self.group_size // each

    def destroy(self) -> None:
        """Collective. A second time: nothing happens."""
        if self.comm.live:
            for group in [*self._low_latency.values(), *self._routed_rows.values()]:
                group.destroy()
            self._exchange.destroy()
            self._counts.destroy()
            self.comm.destroy()

    # ---- Settings ----------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """All features are there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """An even number; kept for callers."""
        require_count("new_num_sms", new_num_sms, 0)
        if new_num_sms % 2:
            raise ep.InvalidArgumentError(f"new_num_sms is {new_num_sms}; must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of now."""
        return event_of(True)

    def get_comm_stream(self) -> Any:
        """The stream that calls are queued on: torch's current one."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device) if on_gpu else torch.cpu.current_stream()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes that low latency takes a rank, as the library states them."""
        config = ep.GroupConfig(
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            max_token_bytes=4 * hidden,
        )
        need = ep.preflight(config, ep.Layout.EXPERT_MAJOR, num_topk=1, num_ranks=num_ranks)
        if not need.supported:
            raise ep.InvalidArgumentError(need.reason)
        return need.group_device_bytes + need.group_shared_bytes + need.group_host_bytes

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of so many elements, which nobody else uses; without size as many as were asked
        for when the buffer was made."""
        whole = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if size is None:
            size = torch.Size([max(whole - offset, 0) // dtype.itemsize])
        return torch.zeros(size, dtype=dtype, device=self.device)

    # ---- High throughput ---------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """What dispatch needs of topk_idx, int64 [B, K] with -1 for none: tokens for each rank,
        int32 [R]; for each node, where there are several, int32 [R / ranks_per_node], else None;
        for each expert, int32 [E]; whether a token goes to a rank, bool [B, R]; an event."""
        require_experts(num_experts, self.group_size)
        require("topk_idx", topk_idx, IDS, -1, -1, device=self.device)
        after(previous_event)
        each, one = num_experts // self.group_size, self._fixed.one
        if self.device.type == "cpu":
            require_known(topk_idx, num_experts)
        places = topk_idx.long().clamp(-1, num_experts).add_(1)  # 0: none, the last: no expert
        per_expert = one.new_zeros(num_experts + 2)
        per_expert.scatter_add_(0, places.flatten(), one.expand(places.numel()))
        ranks = places.add_(each - 1).div_(each, rounding_mode="floor")  # the same
        in_rank = ranks.new_zeros(len(ranks), self.group_size + 2, dtype=torch.bool)
        in_rank = in_rank.scatter_(1, ranks, True)[:, 1:-1].contiguous()
        per_node = None
        if self._nodes > 1:
            per_node = in_rank.unflatten(1, (self._nodes, -1)).any(2).sum(0, dtype=torch.int32)
        per_rank = in_rank.sum(0, dtype=torch.int32)
        return per_rank, per_node, per_expert[1:-1], in_rank, event_of(async_finish)

    def dispatch(
        self,
        x: Rows,
        handle: Handle | NodesHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        Tensor | None,
        Tensor | None,
        list[int] | None,
        Handle | NodesHandle | None,
        EventOverlap,
    ]:
        """Sends rows x [B, H] (with scales [B, S]: a pair) to the ranks of their experts.

        Results, rows by source rank, then token: rows; local experts int64 [rows, K], -1 for those
        of other ranks; their weights float32 [rows, K], 0 there; rows of each local expert, each
        rounded up to expert_alignment; a handle; an event. num_worst_tokens: so many rows, the ones
        past those that came with no expert, and an empty list. With a handle of before: the rows,
        None and the event.
        """
        self._require_live()
        parts = fields_of(x, self.device)
        after(previous_event)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ep.InvalidArgumentError("topk_idx and topk_weights do not go with a handle")
            rows = self._dispatch_again(parts, handle)
            return self._rows(x, rows), None, None, None, None, event_of(async_finish)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ep.InvalidArgumentError(
                "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are needed "
                "without a handle"
            )
        require_count("expert_alignment", expert_alignment, 1)
        require_count("num_worst_tokens", num_worst_tokens, 0)
        tokens = len(parts[0])
        require_topk(topk_idx, topk_weights, tokens, self.device)
        counts = counts_of(
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, tokens, self.group_size
        )
        num_experts = num_tokens_per_expert.numel()
        fields = [self._fixed.numbers(tokens), *parts]
        if topk_idx is not None:
            weights = topk_weights if topk_weights is not None else torch.zeros_like(topk_idx)
            fields += [topk_idx.long(), weights.float()]
        tell = [*counts, self._strays(topk_idx, num_experts)]
        kind = kind_of(parts, topk_idx)
        route, payloads, prefix, told = self._routed(fields, is_token_in_rank.bool(), kind, tell)
        require_agreement(told, self.rank, topk_idx)
        sources, *rest = self._scatter(route, payloads, fields)
        received_idx = received_weights = None
        if topk_idx is not None:
            *rest, received_idx, received_weights = rest
            self._localise(received_idx, received_weights, num_experts)
        per_expert = self._per_expert(told, num_experts, expert_alignment)
        if num_worst_tokens:
            route.rows = num_worst_tokens
            sources = _grown(sources, num_worst_tokens, -1)
            rest = [_grown(part, num_worst_tokens, 0) for part in rest]
            received_idx = _grown(received_idx, num_worst_tokens, -1)
            received_weights = _grown(received_weights, num_worst_tokens, 0)
            per_expert = []
        return (
            self._rows(x, rest),
            received_idx,
            received_weights if topk_weights is not None else None,
            per_expert,
            self._handle(prefix, sources, is_token_in_rank, route),
            event_of(async_finish),
        )

    def _dispatch_again(self, parts: list[Tensor], handle: Handle | NodesHandle) -> list[Tensor]:
        require_handle(handle, HANDLES)
        route = handle.route
        if len(parts[0]) != route.sent:
            raise ep.InvalidArgumentError(
                f"x: {len(parts[0])} rows, the handle's dispatch had {route.sent}"
            )
        rows = self._scatter(route, pack(parts), parts)
        return [_grown(part, route.rows, 0) for part in rows]

    def _scatter(self, route: Route, payloads: list[Tensor], fields: list[Tensor]) -> list[Tensor]:
        """What of the fields came here."""
        return unpack([self._exchange.scatter(route, rows) for rows in payloads], fields)

    def _handle(
        self, prefix: Tensor, sources: Tensor, in_rank: Tensor, route: Route
    ) -> Handle | NodesHandle:
        if self._nodes == 1:
            return Handle(prefix, None, None, sources, in_rank, route)
        of_ranks = prefix[:, self.rank].contiguous()
        of_nodes = of_ranks[self.ranks_per_node - 1 :: self.ranks_per_node].contiguous()
        return NodesHandle(in_rank, None, None, None, of_nodes, None, of_ranks, None, None, route)

    def _rows(self, x: Rows, parts: list[Tensor]) -> Rows:
        return (parts[0], parts[1]) if isinstance(x, tuple) else parts[0]

    def _routed(
        self, fields: list[Tensor], in_rank: Tensor, kind: list[int], tell: list[Tensor]
    ) -> tuple[Route, list[Tensor], Tensor, Numbers]:
        """Collective: a routing; what travels for the fields, of which the second are the rows;
        tokens that ranks 0 to i send to rank j; what each rank tells, all that is waited for."""
        tokens = len(in_rank)
        widest = max(widest_payload(fields), 4 * fields[1].shape[1])  # float32 may come back
        numbers = [tokens, widest, *kind]
        of_all = self._counts.queue(numbers, tell)
        prefix = of_all[:, len(numbers) :][:, : self.group_size].cumsum(0, dtype=torch.int32)
        self._counts.fetch()
        begun = self._exchange.begin(in_rank)
        payloads = pack(fields)
        told = self._counts.read(len(numbers) + 2 * self.group_size + 1)
        require_alike(told[:, 2 : len(numbers)], self.rank)
        most, told = told[:, :2].max(0), told[:, len(numbers) :]
        received = int(told[:, self.rank].sum())
        route = self._exchange.fitted(begun, in_rank, received, (int(most[0]), int(most[1])))
        return route, payloads, prefix, told

    def _strays(self, topk_idx: Tensor | None, num_experts: int) -> Tensor:
        """int32 [1]: ids past the experts."""
        if topk_idx is None:
            return self._fixed.zero
        return (topk_idx >= num_experts).sum(dtype=torch.int32).unsqueeze(0)

    def _localise(self, ids: Tensor, weights: Tensor, num_experts: int) -> None:
        """Ids become those of the experts here, and of others -1, with weight 0."""
        each = num_experts // self.group_size
        others = ids.div(each, rounding_mode="floor") != self.rank
        ids.sub_(self.rank * each).masked_fill_(others, -1)
        weights.masked_fill_(others, 0.0)

    def _per_expert(self, told: Numbers, experts: int, alignment: int) -> list[int]:
        each = experts // self.group_size
        at = 2 * self.group_size + self.rank * each
        return [padded(count, alignment) for count in told[:, at : at + each].sum(0).tolist()]

    def combine(
        self,
        x: Tensor,
        handle: Handle | NodesHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows x [rows, H] of each token over ranks, in float32, and rounds; adds bias, of
        one or two [B, H], that other ranks need not have, and rounds again. topk_weights,
        float32 [rows, K], are summed, too: [B, K]."""
        self._require_live()
        require_handle(handle, HANDLES)
        require("x", x, FLOATS, -1, -1, device=self.device)
        if topk_weights is not None:
            require("topk_weights", topk_weights, FLOATS, len(x), -1, device=self.device)
        biases = biases_of(bias, handle.route.sent, x.shape[1], self.device)
        after(previous_event)
        received = handle.route.received
        if len(x) < received:
            raise ep.InvalidArgumentError(f"x: {len(x)} rows, the dispatch received {received}")
        total = self._exchange.reduce(handle.route, x[:received])
        if biases:
            total = sum((one.float() for one in biases), start=total.float())
        weights = None
        if topk_weights is not None:
            width = padded(topk_weights.shape[1], 4)
            wide = torch.nn.functional.pad(
                topk_weights[:received].float(), (0, width - topk_weights.shape[1])
            )
            weights = self._exchange.reduce(handle.route, wide)[:, : topk_weights.shape[1]]
            weights = weights.contiguous()
        return total.to(x.dtype), weights, event_of(async_finish)

    # ---- Low latency -------------------------------------------------------------------------

    def _sized(self, sizes: Sizes) -> SlotGroup:
        if sizes not in self._low_latency:
            made = self._low_latency[sizes] = self._low_latency_group(sizes)
            if self._masked:  # set before there was such a group
                self._set_active(made, self._masked, False)
        return self._low_latency[sizes]

    def _low_latency_group(self, sizes: Sizes) -> SlotGroup:
        if sizes.layout == ep.Layout.RANK_MAJOR:
            return TokenRowsGroup(self.comm, sizes, self.enable_shrink)
        sources = self.device.type == "cpu" if self.sources is None else self.sources
        return LowLatencyGroup(self.comm, sizes, self.enable_shrink, sources)

    def low_latency_tokens(self, tokens: int, hidden: int, num_experts: int) -> TokenRowsGroup:
        """Not of DeepEP: low latency with rows by token, not by expert, for at most so many tokens
        a rank. Collective the first time."""
        self._require_token_rows(tokens, hidden, num_experts)
        sized = self._sized(Sizes(tokens, hidden, num_experts, ep.Layout.RANK_MAJOR))
        return cast(TokenRowsGroup, sized)

    def high_throughput_tokens(
        self, tokens: int, hidden: int, num_experts: int, dtype: torch.dtype = torch.bfloat16
    ) -> TokenRowsGroup:
        """Not of DeepEP: high throughput with rows by token, whose number the host need not know:
        it waits for nothing. For at most so many tokens a rank, of so many elements of dtype, a
        multiple of 16 bytes. Collective the first time."""
        self._require_token_rows(tokens, hidden, num_experts)
        if hidden * dtype.itemsize % 16:
            raise ep.InvalidArgumentError(
                f"a row has {hidden * dtype.itemsize} bytes; must be a multiple of 16"
            )
        sizes = Sizes(tokens, hidden, num_experts, ep.Layout.FLAT, dtype.itemsize)
        if sizes not in self._routed_rows:
            self._routed_rows[sizes] = TokenRowsGroup(self.comm, sizes)
        return self._routed_rows[sizes]

    def _require_token_rows(self, tokens: int, hidden: int, num_experts: int) -> None:
        self._require_live()
        require_experts(num_experts, self.group_size)
        require_count("tokens", tokens, 1)
        require_count("hidden", hidden, 1)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to clean: operations are numbered."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends x, bf16 [B, H], to the experts of topk_idx, int64 [B, K], -1 for none.

        Results: rows [L, R N, H], of which the first count[l] are expert l's, by source rank, then
        token; with use_fp8 E4M3, and scales float32 [L, R N, H / 128] in column-major order;
        use_ue8m0 (with round_scale): their exponents, int32 [L, R N, H / 512]. Then count, int32
        [L]; a handle; an event; with return_recv_hook the function that receives, else None.
        Of a buffer two dispatches of a size may wait for their combine.
        """
        self._require_live()
        require("x", x, (torch.bfloat16,) if use_fp8 else FLOATS, -1, -1, device=self.device)
        require("topk_idx", topk_idx, IDS, len(x), -1, device=self.device)
        require_experts(num_experts, self.group_size)
        require_count("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        if (stats := cumulative_local_expert_recv_stats) is not None:
            each = num_experts // self.group_size
            require("cumulative_local_expert_recv_stats", stats, COUNTS, each, device=self.device)
        round_scale, use_ue8m0 = use_fp8 and round_scale, use_fp8 and use_ue8m0
        if use_ue8m0 and not round_scale:
            raise ep.InvalidArgumentError("use_ue8m0 needs round_scale")
        if use_fp8 and x.shape[1] % (4 * BLOCK):
            raise ep.InvalidArgumentError(
                f"hidden is {x.shape[1]}; with use_fp8 a multiple of {4 * BLOCK}"
            )
        sizes = Sizes(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        group = cast(LowLatencyGroup, self._sized(sizes))
        rows, scales, counts, handle, hook = group.dispatch(
            x, topk_idx, self.rank, fp8=use_fp8, pow2=round_scale, later=return_recv_hook
        )
        columns = None if scales is None else _columns(scales, use_ue8m0)

        def arrived() -> None:
            if hook is not None:
                hook()
            if scales is not None and columns is not None:
                columns.copy_(packed_exponents(scales) if use_ue8m0 else scales)
            if stats is not None:
                stats.add_(counts)

        if not return_recv_hook:
            arrived()
        received = rows if columns is None else (rows, columns)
        later = arrived if return_recv_hook else None
        return received, counts, handle, event_of(async_finish), later

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Sums x, bf16 [L, R N, H], by topk_weights, float32 [B, K]: bf16 [B, H].

        topk_idx: that of the dispatch; on the CPU an entry may have become -1, whose row does not
        count. use_logfmt: accepted; rows travel whole. zero_copy: the rows are in
        get_next_low_latency_combine_buffer(handle).
        """
        group, slot = self._slot_of(handle)
        tokens, hidden = len(slot.topk_idx), group.sizes.hidden
        require("topk_idx", topk_idx, IDS, *slot.topk_idx.shape, device=self.device)
        require("topk_weights", topk_weights, FLOATS, *slot.topk_idx.shape, device=self.device)
        if zero_copy:
            x = self.get_next_low_latency_combine_buffer(handle)
        require("x", x, FLOATS, group.local, group.wide, hidden, device=self.device)
        if out is not None:
            require("out", out, (x.dtype,), tokens, hidden, device=self.device)
        if not topk_idx.is_cuda:
            kept = topk_idx == slot.topk_idx
            if not (kept | (topk_idx == -1)).all():
                raise ep.InvalidArgumentError("topk_idx differs from that of the dispatch")
            topk_weights = torch.where(kept, topk_weights, 0.0)
        result = out if out is not None else x.new_empty(tokens, hidden)
        hook = group.combine(x, topk_weights, slot, result, later=return_recv_hook)
        return result, event_of(async_finish), hook

    def _slot_of(self, handle: LowLatencyHandle) -> tuple[LowLatencyGroup, Slot]:
        self._require_live()
        require_handle(handle, LowLatencyHandle)
        handle.group.require_current(handle.slot, handle.number)
        return handle.group, handle.slot

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Where rows for a combine with zero_copy are written: bf16 [L, R N, H]."""
        group, slot = self._slot_of(handle)
        if slot.combine_buffer is None:
            shape = group.local, group.wide, group.sizes.hidden
            slot.combine_buffer = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        return slot.combine_buffer

    # ---- Masks, with enable_shrink -------------------------------------------------------------

    def _masked_groups(self) -> list[SlotGroup]:
        self._require_live()
        if not self.enable_shrink:
            raise ep.InvalidUsageError("masks need enable_shrink=True")
        return list(self._low_latency.values())

    def _active(self, group: SlotGroup) -> Tensor:
        """int32 [R], 1 for ranks that take part."""
        active = torch.empty(self.group_size, dtype=torch.int32, device=self.device)
        group.group.query_mask(ep.Tensor(active), stream=stream_of(active))
        settle(active)
        return active

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Low latency goes on without the rank (mask), or with it again."""
        groups = self._masked_groups()
        require_count("rank_to_mask", rank_to_mask, 0)
        if rank_to_mask >= self.group_size or (mask and rank_to_mask == self.rank):
            raise ep.InvalidArgumentError(
                f"rank_to_mask is {rank_to_mask}; must be another of {self.group_size} ranks"
            )
        (self._masked.add if mask else self._masked.discard)(rank_to_mask)
        for group in groups:
            self._set_active(group, [rank_to_mask], not mask)

    def _set_active(self, group: SlotGroup, ranks: Iterable[int], on: bool) -> None:
        active = self._active(group)
        active[list(ranks)] = int(on)
        group.group.update_mask(active.tolist(), stream=stream_of(active))
        settle(active)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes int32 [R]: 1 for ranks that are masked."""
        groups = self._masked_groups()
        require("mask_status", mask_status, COUNTS, self.group_size, device=self.device)
        mask_status.zero_()
        mask_status[list(self._masked)] = 1
        for group in groups:
            mask_status |= 1 - self._active(group)

    def low_latency_clean_mask_buffer(self) -> None:
        """Collective: all ranks take part again. One that missed dispatches and combines while it
        was masked makes up for them before, with the others masked."""
        groups = self._masked_groups()
        self._masked.clear()
        for group in groups:
            like = torch.empty(0, device=self.device)
            group.group.clean_mask(stream=stream_of(like))
            settle(like)


def _grown(t: Tensor | None, rows: int, fill: int) -> Tensor | None:
    if t is None:
        return None
    if len(t) == rows:
        return t
    if len(t) > rows:
        raise ep.InvalidArgumentError(f"num_worst_tokens is {rows}; {len(t)} rows came")
    out = t.new_full((rows, *t.shape[1:]), fill) if t.dtype.itemsize > 1 else None
    if out is None:
        out = torch.zeros(rows, *t.shape[1:], dtype=torch.uint8, device=t.device).view(t.dtype)
    out[: len(t)] = t
    return out


def _columns(scales: Tensor, packed: bool) -> Tensor:
    """Room for scales [L, R N, S], or a quarter of S as int32, in column-major order."""
    experts, wide, count = scales.shape
    dtype, width = (torch.int32, count // 4) if packed else (scales.dtype, count)
    room = torch.empty(experts, width, wide, dtype=dtype, device=scales.device)
    return room.transpose(1, 2)
