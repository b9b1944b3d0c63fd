"""Hugging Face transformers 5.22 and newer: `ep_implementation="trefoil"`.

    import trefoil.hosts.transformers

    trefoil.hosts.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(ep_size=2, ep_implementation="trefoil")
    )

On the CPU the ranks' process groups use gloo; on GPUs (TREFOIL_EP_LIBRARY=gpu) nccl, beside gloo or
alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from trefoil.deep_ep import Buffer

Tensor = torch.Tensor
_buffers: dict[dist.ProcessGroup, Buffer] = {}


def buffer_of(group: dist.ProcessGroup) -> Buffer:
    """One for all layers of a group's ranks. Collective the first time."""
    if group not in _buffers:
        _buffers[group] = Buffer(group)
    return _buffers[group]


def close() -> None:
    """Collective: gives back what the models used. They can be used again."""
    while _buffers:
        _buffers.popitem()[1].destroy()


class _Dispatch(torch.autograd.Function):
    """x [B, H], ids and weights [B, K] to the experts' ranks; gradients come back by combine."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, experts: int, buffer: Buffer
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        rows, local, row_weights, _, ctx.handle, _ = buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights.float(),
        )
        ctx.buffer, ctx.dtype = buffer, weights.dtype
        ctx.mark_non_differentiable(local)
        return rows, local, row_weights, ctx.handle

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any, grad_weights: Tensor, __: Any) -> tuple[Any, ...]:
        out, out_weights, _ = ctx.buffer.combine(grad.contiguous(), ctx.handle, grad_weights)
        return out, None, out_weights.to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    """The sums of the rows of each token; gradients go back by a dispatch of the same routing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Any, buffer: Buffer) -> Tensor:
        ctx.handle, ctx.buffer = handle, buffer
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


class TrefoilEP(EPImplementation):
    """Each rank gives its tokens; rows go to the ranks of their experts and come back as sums."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[B, H], [B, K] global ids, [B, K] -> [B, H]."""
        experts = self.ep_mesh.size() * self.num_local_experts
        buffer = buffer_of(self.ep_mesh.get_group())
        rows, local, weights, handle = _Dispatch.apply(
            hidden_states, top_k_index, top_k_weights, experts, buffer
        )
        none = self.num_local_experts  # how transformers marks an entry of another rank
        ids = torch.where(local < 0, none, local)
        if len(rows):
            rows = self.experts_forward(rows, ids, weights.to(top_k_weights.dtype)).to(rows.dtype)
        else:
            rows = rows + 0 * sum(p.sum() for p in self._parameters_here())
        return _Combine.apply(rows, handle, buffer)

    def _parameters_here(self) -> list[Tensor]:
        """Of the experts: without rows they still take part in the backward pass."""
        return list(self.experts_forward.__self__.parameters())


def register() -> None:
    """Makes "trefoil" an ep_implementation."""
    EPImplementationInterface.register("trefoil", TrefoilEP)
