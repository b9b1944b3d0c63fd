"""An MoE layer's exchange: route, dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trefoil import ep
from trefoil.on_device import require
from trefoil.torch.ep_group import EPGroup
from trefoil.torch.ops import combine, dispatch, route

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor], Tensor]


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm takes these sizes."""
    sizes = (rows.shape[1], *weight.shape[1:])
    return all(size * weight.element_size() % 16 == 0 for size in sizes)


def _parts(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    sizes = counts.tolist()
    return rows[: sum(sizes)].split(sizes)


def _product(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    if _fits(rows, weight):
        ends = counts.cumsum(0).to(torch.int32)
        return torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    done = torch.cat([part @ w for part, w in zip(_parts(rows, counts), weight, strict=True)])
    return torch.nn.functional.pad(done, (0, 0, 0, len(rows) - len(done)))


@torch.library.custom_op("trefoil::grouped_linear", mutates_args=())
def _grouped_linear(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return _product(rows, counts, weight).contiguous()


@_grouped_linear.register_fake
def _(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("trefoil::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    grad, rows = grad.contiguous(), rows.contiguous()
    of_rows = _product(grad, counts, weight.transpose(1, 2))
    if _fits(rows, weight):
        ends = counts.cumsum(0).to(torch.int32)
        of_weight = torch.nn.functional.grouped_mm(rows.t(), grad, offs=ends)
        return of_rows.contiguous(), of_weight.contiguous()
    pairs = zip(_parts(rows, counts), _parts(grad, counts), strict=True)
    return of_rows.contiguous(), torch.stack([part.t() @ of for part, of in pairs])


@_grouped_linear_backward.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    of_rows, of_weight = _grouped_linear_backward(grad, *ctx.saved_tensors)
    return of_rows, None, of_weight


_grouped_linear.register_autograd(_gradients, setup_context=_keep)


def grouped_linear(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """rows [P, H], counts[l] of them for each local expert one after the other, times weight
    [L, H, H']: [P, H']. Rows past the last group give anything.

    Where the bytes of H and H' are multiples of 16, torch's grouped_mm; else a product an expert.
    Under torch.compile what torch's compiler does not take, as grouped_mm of float32 in torch 2.11,
    is an operation that it leaves whole.
    """
    known = rows.dtype == torch.bfloat16 and _fits(rows, weight)
    if torch.compiler.is_compiling() and not known:
        return _grouped_linear(rows, counts, weight)
    return _product(rows, counts, weight)


class MoEDispatcher:
    """Puts expert parallelism into a layer: each rank gives its tokens and has its experts. Copies
    share the group."""

    def __init__(self, group: EPGroup) -> None:
        group.require_algorithm(low_latency=False)
        self.group = group

    def __call__(
        self,
        x: Tensor,
        experts: Experts,
        *,
        logits: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """The layer's output [B, H] for x [B, H], of any strides: for each token the sum over its K
        experts, by weight. Differentiable in x, in logits or topk_weights, and in what experts
        uses.

        logits [B, E]: the K largest of each row are the experts, their softmax the weights. Or
        topk_idx [B, K], int, with -1 for none, and topk_weights [B, K].
        experts(rows [P, H], counts int64 [L]): the results [P, H] of this rank's experts for
        their rows, which are sorted by expert; P may be 0, and more than counts.sum().
        """
        if (logits is None) == (topk_idx is None) or (topk_idx is None) != (topk_weights is None):
            raise ep.InvalidArgumentError("give logits, or topk_idx and topk_weights")
        if logits is not None:
            require(
                "logits", logits, (), -1, self.group.num_experts, device=self.group.torch_device
            )
            top = logits.float().topk(self.group.num_topk)
            topk_idx, topk_weights = top.indices, top.values.softmax(-1)
        assert topk_idx is not None and topk_weights is not None
        routing = route(self.group, topk_idx)
        received = dispatch(self.group, x, topk_weights.float(), routing)
        return combine(self.group, self._local(*received, routing.counts, experts), routing)

    def _local(
        self,
        rows: Tensor,
        weights: Tensor,
        ids: Tensor,
        counts: Tensor,
        experts: Experts,
    ) -> Tensor:
        """The sum over local experts for each row. A pair is a row and one of its experts."""
        none = self.group.local_experts
        wide = min(self.group.num_topk, none)
        expert = ids[:, :wide].flatten()
        expert = torch.where(expert < 0, none, expert)
        pairs = expert.argsort(stable=True)
        if not torch.compiler.is_compiling() and not self.group.captured:
            pairs = pairs[: int(counts.sum())]
        used = (expert[pairs] < none).unsqueeze(1)
        source = pairs // wide
        done = experts(torch.where(used, rows[source], 0), counts)
        if done.dim() != 2 or len(done) != len(pairs):
            raise ep.InvalidArgumentError(
                f"experts: found {list(done.shape)}, expected [{len(pairs)}, any]"
            )
        weight = weights[:, :wide].flatten()[pairs].unsqueeze(1)
        terms = torch.where(used, done.float() * weight, 0)  # nothing of an unused pair counts
        sums = terms.new_zeros(rows.shape[0], done.shape[1]).index_add(0, source, terms)
        return sums.to(rows.dtype)
