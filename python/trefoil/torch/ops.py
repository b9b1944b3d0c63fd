"""The operations torch.ops.trefoil.*, their fake kernels and gradients, and functions over them.

Each is functional but for `order`, a tensor of its group that it counts up: so a compiler keeps
their order, which is equal on all ranks, and those whose results nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trefoil import ep
from trefoil.on_device import require, require_tensor
from trefoil.torch.ep_group import EPGroup, group_of

Tensor = torch.Tensor
IDS = (torch.int64, torch.int32)
BACKWARD = ep.PassDir.BWD
_library = torch.library.Library("trefoil", "DEF")


def ep_tensor(t: Tensor) -> ep.Tensor:
    """Of what a call reads, whatever its strides, or of what it writes, which is made here."""
    return ep.Tensor(t.contiguous())


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    arguments, results = schema.split("->")
    _library.define(f"{name}({arguments}, int group, Tensor(a!) order) -> {results}")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trefoil::{name}", fake, lib=_library)


# ---- The routing --------------------------------------------------------------------------------


class Routing(NamedTuple):
    """Where the tokens of all ranks go; may be used by any number of dispatches and combines.

    memory: uint8, of the library. counts: int64 [L], received tokens of each local expert.
    tokens: B, of this rank.
    """

    memory: Tensor
    counts: Tensor
    tokens: int


def _require_kinds(group: object, routing: object, kind: type, **tensors: object) -> None:
    """Before torch looks at the arguments."""
    for name, given, wanted in (("group", group, EPGroup), ("routing", routing, kind)):
        if not isinstance(given, wanted):
            raise ep.InvalidArgumentError(
                f"{name}: found {type(given).__name__}, expected {wanted.__name__}"
            )
    for name, given in tensors.items():
        require_tensor(name, given)


def _require_ids(g: EPGroup, topk_idx: Tensor) -> None:
    require("topk_idx", topk_idx, IDS, -1, g.num_topk, device=g.torch_device)
    if g.captured:
        return
    ids = topk_idx.sort(dim=1).values
    bad = ((ids < -1) | (ids >= g.num_experts)).any(1)
    bad |= ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ep.InvalidArgumentError(
            f"topk_idx[{row}] is {topk_idx[row].tolist()}; "
            f"experts in [0, {g.num_experts}), each once, or -1 expected"
        )


def _about(g: EPGroup, memory: Tensor, given: int) -> tuple[int, int]:
    """The tokens and the arriving rows of a routing; refuses that of another group. While they are
    captured nobody knows: as many tokens as are given, and perhaps no row."""
    require("routing", memory, (torch.uint8,), g.memory_bytes + 32, device=g.torch_device)
    if g.captured:
        return given, 0
    key, tokens, rows, _ = memory[g.memory_bytes :].view(torch.int64).tolist()
    if key != g.key:
        raise ep.InvalidUsageError(f"the routing is of group {key}, this is group {g.key}")
    return tokens, rows


def _route(topk_idx: Tensor, group: int, order: Tensor) -> tuple[Tensor, Tensor]:
    g = group_of(group)
    g.require_algorithm(low_latency=False)
    _require_ids(g, topk_idx)
    memory = topk_idx.new_zeros(g.memory_bytes + 32, dtype=torch.uint8)
    counts = topk_idx.new_zeros(g.local_experts, dtype=torch.int64)
    total = topk_idx.new_zeros(1, dtype=torch.int64)
    info = ep.LayoutInfo(expert_counters=ep_tensor(counts), recv_total_counter=ep_tensor(total))
    with g.handle(memory) as handle:
        handle.update(ep_tensor(topk_idx), layout_info=info, stream=g.stream)
    about = memory[g.memory_bytes :].view(torch.int64)
    about[0].fill_(g.key)
    about[1].fill_(len(topk_idx))
    about[2:3].copy_(total.clamp(max=g.slots))
    order.add_(1)
    return memory, counts


def _fake_route(topk_idx: Tensor, group: int, order: Tensor) -> tuple[Tensor, Tensor]:
    g = group_of(group)
    require("topk_idx", topk_idx, IDS, -1, g.num_topk, device=g.torch_device)
    memory = topk_idx.new_empty(g.memory_bytes + 32, dtype=torch.uint8)
    return memory, topk_idx.new_empty(g.local_experts, dtype=torch.int64)


_define("route", "Tensor topk_idx -> (Tensor, Tensor)", _route, _fake_route)


def route(group: EPGroup, topk_idx: Tensor) -> Routing:
    """Tells all ranks where the tokens go. topk_idx [B, K] int32 or int64: experts in [0, E), each
    once in a row, or -1. Collective, as all operations here: all ranks make the same ones in the
    same order, those without tokens too (B = 0).

    Raises ep.Error (InvalidArgumentError, InvalidUsageError, RemoteError) with the reason, as all
    operations here.
    """
    _require_kinds(group, None, type(None), topk_idx=topk_idx)
    memory, counts = torch.ops.trefoil.route(topk_idx, group.key, group.order)
    return Routing(memory, counts, topk_idx.shape[0])


# ---- Dispatch and combine, high throughput, flat ------------------------------------------------


def _received(g: EPGroup, like: Tensor, rows: int) -> Tensor:
    """Memory for rows; those that nobody writes are zero."""
    out = like.new_empty(g.slots, like.shape[1])
    out[rows:] = 0
    return out


def _dispatch(
    x: Tensor, weights: Tensor, routing: Tensor, group: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = group_of(group)
    tokens, rows = _about(g, routing, len(x))
    require("x", x, (g.dtype,), tokens, -1, device=g.torch_device)
    require("topk_weights", weights, (torch.float32,), tokens, g.num_topk, device=g.torch_device)
    out = _received(g, x, rows)
    out_weights = weights.new_empty(g.slots, g.num_topk)
    ids = x.new_empty(g.slots, g.num_topk, dtype=torch.int64)
    with g.handle(routing) as handle:
        handle.dispatch(
            ep.DispatchInputs(tokens=ep_tensor(x), topk_weights=ep_tensor(weights)),
            ep.DispatchOutputs(
                tokens=ep_tensor(out), topk_weights=ep_tensor(out_weights), topk_idx=ep_tensor(ids)
            ),
            stream=g.stream,
        )
    order.add_(1)
    return out, out_weights, ids


def _combine(rows: Tensor, routing: Tensor, tokens: int, group: int, order: Tensor) -> Tensor:
    g = group_of(group)
    own, _ = _about(g, routing, tokens)
    require("rows", rows, (g.dtype,), g.slots, -1, device=g.torch_device)
    out = rows.new_empty(own, rows.shape[1])
    with g.handle(routing) as handle:
        handle.combine(
            ep.CombineInputs(tokens=ep_tensor(rows)),
            ep.CombineOutputs(tokens=ep_tensor(out)),
            stream=g.stream,
        )
    order.add_(1)
    return out


def _dispatch_backward(
    grad: Tensor, grad_weights: Tensor, routing: Tensor, tokens: int, group: int, order: Tensor
) -> tuple[Tensor, Tensor]:
    g = group_of(group)
    own, _ = _about(g, routing, tokens)
    require("grad", grad, (g.dtype,), g.slots, -1, device=g.torch_device)
    require(
        "grad_weights", grad_weights, (torch.float32,), g.slots, g.num_topk, device=g.torch_device
    )
    out, out_weights = grad.new_empty(own, grad.shape[1]), grad_weights.new_empty(own, g.num_topk)
    with g.handle(routing) as handle:
        handle.combine(
            ep.CombineInputs(tokens=ep_tensor(grad), topk_weights=ep_tensor(grad_weights)),
            ep.CombineOutputs(tokens=ep_tensor(out), topk_weights=ep_tensor(out_weights)),
            config=ep.CombineConfig(pass_direction=BACKWARD),
            stream=g.stream,
        )
    order.add_(1)
    return out, out_weights


def _combine_backward(grad: Tensor, routing: Tensor, group: int, order: Tensor) -> Tensor:
    g = group_of(group)
    tokens, rows = _about(g, routing, len(grad))
    require("grad", grad, (g.dtype,), tokens, -1, device=g.torch_device)
    out = _received(g, grad, rows)
    with g.handle(routing) as handle:
        handle.dispatch(
            ep.DispatchInputs(tokens=ep_tensor(grad)),
            ep.DispatchOutputs(tokens=ep_tensor(out)),
            config=ep.DispatchConfig(pass_direction=BACKWARD),
            stream=g.stream,
        )
    order.add_(1)
    return out


def _fake_dispatch(
    x: Tensor, weights: Tensor, routing: Tensor, group: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = group_of(group)
    require("x", x, (g.dtype,), -1, -1, device=g.torch_device)
    require("topk_weights", weights, (torch.float32,), -1, g.num_topk, device=g.torch_device)
    rows, row_weights = x.new_empty(g.slots, x.shape[1]), weights.new_empty(g.slots, g.num_topk)
    return rows, row_weights, row_weights.new_empty(row_weights.shape, dtype=torch.int64)


def _fake_combine(rows: Tensor, routing: Tensor, tokens: int, group: int, order: Tensor) -> Tensor:
    g = group_of(group)
    require("rows", rows, (g.dtype,), g.slots, -1, device=g.torch_device)
    return rows.new_empty(tokens, rows.shape[1])


def _fake_dispatch_backward(
    grad: Tensor, grad_weights: Tensor, routing: Tensor, tokens: int, group: int, order: Tensor
) -> tuple[Tensor, Tensor]:
    weights = grad_weights.new_empty(tokens, grad_weights.shape[1])
    return grad.new_empty(tokens, grad.shape[1]), weights


def _fake_combine_backward(grad: Tensor, routing: Tensor, group: int, order: Tensor) -> Tensor:
    return grad.new_empty(group_of(group).slots, grad.shape[1])


_ROUTED = "Tensor routing, SymInt tokens"
_define(
    "dispatch",
    "Tensor x, Tensor weights, Tensor routing -> (Tensor, Tensor, Tensor)",
    _dispatch,
    _fake_dispatch,
)
_define("combine", f"Tensor rows, {_ROUTED} -> Tensor", _combine, _fake_combine)
_define(
    "dispatch_backward",
    f"Tensor grad, Tensor grad_weights, {_ROUTED} -> (Tensor, Tensor)",
    _dispatch_backward,
    _fake_dispatch_backward,
)
_define(
    "combine_backward",
    "Tensor grad, Tensor routing -> Tensor",
    _combine_backward,
    _fake_combine_backward,
)
_ops = torch.ops.trefoil


class _Dispatch(torch.autograd.Function):
    """order stays out of save_for_backward, which would refuse that it has changed since."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, routing: Tensor, group: int, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(routing)
        ctx.tokens, ctx.group, ctx.order = x.shape[0], group, order
        with torch._C._AutoDispatchBelowAutograd():
            rows, row_weights, ids = _ops.dispatch(x, weights, routing, group, order)
        ctx.mark_non_differentiable(ids)
        return rows, row_weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        (routing,) = ctx.saved_tensors
        grads = grad.contiguous(), grad_weights.contiguous()
        out = _ops.dispatch_backward(*grads, routing, ctx.tokens, ctx.group, ctx.order)
        return *out, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, routing: Tensor, tokens: int, group: int, order: Tensor
    ) -> Tensor:
        ctx.save_for_backward(routing)
        ctx.group, ctx.order = group, order
        with torch._C._AutoDispatchBelowAutograd():
            return _ops.combine(rows, routing, tokens, group, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (routing,) = ctx.saved_tensors
        rows = _ops.combine_backward(grad.contiguous(), routing, ctx.group, ctx.order)
        return rows, None, None, None, None


_library.impl("dispatch", _Dispatch.apply, "Autograd")
_library.impl("combine", _Combine.apply, "Autograd")


def dispatch(
    group: EPGroup, x: Tensor, topk_weights: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends the rows x [B, H] to the ranks of their experts, once a rank.

    topk_weights: float32 [B, K]. Results, in which received rows stand first: rows [slots, H], and
    0 after them; their weights, float32 [slots, K]; and their local experts in [0, L), int64
    [slots, K], ascending, then -1 (weight 0). Rows and weights are differentiable.
    """
    _require_kinds(group, routing, Routing, x=x, topk_weights=topk_weights)
    return torch.ops.trefoil.dispatch(x, topk_weights, routing.memory, group.key, group.order)


def combine(group: EPGroup, rows: Tensor, routing: Routing) -> Tensor:
    """Brings rows [slots, H] back to their tokens and sums them over ranks: [B, H], in float32 and
    rounded once; 0 for a token without a row. The caller has weighted. Differentiable."""
    _require_kinds(group, routing, Routing, rows=rows)
    return torch.ops.trefoil.combine(rows, routing.memory, routing.tokens, group.key, group.order)


# ---- Low latency, expert-major: for inference ---------------------------------------------------


class LLRouting(NamedTuple):
    """The dispatch that an ll_combine belongs to: int64 [3] on the CPU (group, its number, B), and
    B."""

    number: Tensor
    tokens: int


def _ll_dispatch(
    x: Tensor, topk_idx: Tensor, group: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = group_of(group)
    g.require_algorithm(low_latency=True)
    _require_ids(g, topk_idx)
    require("x", x, (g.dtype,), len(topk_idx), -1, device=g.torch_device)
    wide = g.num_ranks * g.max_tokens
    rows = x.new_zeros(g.local_experts, wide, x.shape[1])
    counts = x.new_zeros(g.local_experts, dtype=torch.int32)
    inputs, outputs = (
        ep.DispatchInputs(tokens=ep_tensor(x)),
        ep.DispatchOutputs(tokens=ep_tensor(rows)),
    )
    info = ep.LayoutInfo(expert_counters=ep_tensor(counts))
    ids = ep_tensor(topk_idx.clone(memory_format=torch.contiguous_format))  # combine reads it, too
    number, handle = g.next_handle(ids)
    handle.dispatch(inputs, outputs, layout_info=info, stream=g.stream)
    g.finish()
    order.add_(1)
    return rows, counts, torch.tensor([g.key, number, len(x)])


def _ll_combine(
    rows: Tensor, weights: Tensor, number: Tensor, tokens: int, group: int, order: Tensor
) -> Tensor:
    g = group_of(group)
    require("routing", number, (torch.int64,), 3)
    key, dispatched, own = number.tolist()
    if key != g.key:
        raise ep.InvalidUsageError(f"the routing is of group {key}, this is group {g.key}")
    require(
        "rows",
        rows,
        (g.dtype,),
        g.local_experts,
        g.num_ranks * g.max_tokens,
        -1,
        device=g.torch_device,
    )
    require("topk_weights", weights, (torch.float32,), own, g.num_topk, device=g.torch_device)
    out = rows.new_empty(own, rows.shape[2])
    sums = ep.CombineOutputs(tokens=ep_tensor(out), topk_weights=ep_tensor(weights))
    g.pending_handle(dispatched).combine(
        ep.CombineInputs(tokens=ep_tensor(rows)), sums, stream=g.stream
    )
    g.finish()
    order.add_(1)
    return out


def _fake_ll_dispatch(
    x: Tensor, topk_idx: Tensor, group: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = group_of(group)
    rows = x.new_empty(g.local_experts, g.num_ranks * g.max_tokens, x.shape[1])
    counts = x.new_empty(g.local_experts, dtype=torch.int32)
    return rows, counts, x.new_empty(3, dtype=torch.int64, device="cpu")


def _fake_ll_combine(
    rows: Tensor, weights: Tensor, number: Tensor, tokens: int, group: int, order: Tensor
) -> Tensor:
    return rows.new_empty(tokens, rows.shape[2])


_define(
    "ll_dispatch",
    "Tensor x, Tensor topk_idx -> (Tensor, Tensor, Tensor)",
    _ll_dispatch,
    _fake_ll_dispatch,
)
_define(
    "ll_combine",
    "Tensor rows, Tensor weights, Tensor number, SymInt tokens -> Tensor",
    _ll_combine,
    _fake_ll_combine,
)


def _forward_only(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ep.InvalidUsageError("low latency has no backward pass; use torch.no_grad()")


def ll_dispatch(group: EPGroup, x: Tensor, topk_idx: Tensor) -> tuple[Tensor, Tensor, LLRouting]:
    """Sends x [B, H] to the experts of topk_idx [B, K]. Results: rows [L, R N, H], whose first
    counts[l] are those of expert l and the rest 0; counts, int32 [L]; and what combine needs."""
    _require_kinds(group, None, type(None), x=x, topk_idx=topk_idx)
    _forward_only(x)
    rows, counts, number = torch.ops.trefoil.ll_dispatch(x, topk_idx, group.key, group.order)
    return rows, counts, LLRouting(number, x.shape[0])


def ll_combine(group: EPGroup, rows: Tensor, topk_weights: Tensor, routing: LLRouting) -> Tensor:
    """The sums of rows [L, R N, H] by topk_weights, float32 [B, K]: [B, H]. routing: of one of the
    group's last two dispatches."""
    _require_kinds(group, routing, LLRouting, rows=rows, topk_weights=topk_weights)
    _forward_only(rows, topk_weights)
    return torch.ops.trefoil.ll_combine(
        rows, topk_weights, routing.number, routing.tokens, group.key, group.order
    )
