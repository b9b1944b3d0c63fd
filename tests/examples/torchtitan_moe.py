#!/usr/bin/env python3
"""torchtitan's MoE layer with DeepEP (DeepEPMoE, sharded by DeepEPExpertParallel) over
trefoil.deep_ep, on the CPU: outputs and all gradients against the layer without ranks.

    torchrun --nproc-per-node 2 tests/examples/torchtitan_moe.py

Needs torch and the packages of tools/requirements-host-torchtitan.txt. What exists for CUDA alone
is replaced here: torchtitan's two operations are registered for the CPU, too, and ids are counted
by bincount, for torch.histc takes no integers there. Its experts are a loop here: as grouped
products they round to bfloat16. Exit code 1: something differs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import trefoil.deep_ep

trefoil.deep_ep.install()  # before torchtitan looks for deep_ep

from torchtitan.distributed.deepep import deepep  # noqa: E402
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel  # noqa: E402
from torchtitan.models.moe import MoEArgs, build_moe  # noqa: E402

Tensor = torch.Tensor
EXPERTS, TOPK, BATCH, LENGTH, HIDDEN, WIDTH = 8, 3, 2, 19, 96, 48


def layer_of(scores_first: bool) -> Any:
    """The same on all ranks."""
    args = MoEArgs(
        num_experts=EXPERTS,
        top_k=TOPK,
        score_before_experts=scores_first,
        use_grouped_mm=False,
    )
    torch.manual_seed(0)
    layer = build_moe(args, HIDDEN, WIDTH, moe_impl="deepep")
    with torch.no_grad():
        layer.init_weights(HIDDEN**-0.5, torch.device("cpu"))
    return layer


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and the direction of their gradient."""
    torch.manual_seed(1 + rank)
    return torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(BATCH, LENGTH, HIDDEN)


def plain(layer: Any, x: Tensor, scores_first: bool) -> Tensor:
    """The layer by its definition: all experts for all tokens, then the chosen ones by score."""
    scores, chosen = layer.router.gate(x).sigmoid().topk(TOPK, -1)
    weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, scores)
    chosen = torch.zeros_like(weights).scatter(-1, chosen, 1.0)
    before, after = (weights, chosen) if scores_first else (chosen, weights)
    rows = x.unsqueeze(-2) * before.unsqueeze(-1)  # [..., E, H]
    experts = layer.experts
    gate, up = (torch.einsum("bteh,ewh->btew", rows, w) for w in (experts.w1, experts.w3))
    done = torch.einsum("btew,ehw->bteh", torch.nn.functional.silu(gate) * up, experts.w2)
    return layer.shared_experts(x) + (done * after.unsqueeze(-1)).sum(-2)


def gradient(parameter: Any, first: int) -> Tensor:
    """Of a whole parameter, or of the experts that a rank has, from the first on."""
    grad: Any = parameter.grad
    if isinstance(grad, DTensor):
        return grad.to_local()
    return grad[first : first + EXPERTS // dist.get_world_size()] if first >= 0 else grad


def compared(mesh: DeviceMesh, scores_first: bool, again: bool) -> float:
    """The largest difference. again: the backward pass computes the layer a second time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, layer = layer_of(scores_first), layer_of(scores_first)
    inputs, outputs = [], []
    for r in range(ranks):
        x, direction = tokens_of(r)
        inputs.append(x.requires_grad_())
        outputs.append(plain(whole, x, scores_first))
        outputs[r].backward(direction)
    parallelize_module(layer.experts, mesh, DeepEPExpertParallel(scores_first))
    x, direction = tokens_of(rank)
    x.requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    out.backward(direction)
    pairs = [(outputs[rank], out), (inputs[rank].grad, x.grad)]
    mine = rank * EXPERTS // ranks
    for (name, want), (_, got) in zip(
        whole.named_parameters(), layer.named_parameters(), strict=True
    ):
        of_experts = name.startswith("experts.")
        found = gradient(got, -1)
        if not of_experts:  # on all ranks
            dist.all_reduce(found)
        pairs.append((gradient(want, mine if of_experts else -1), found))
    assert all(want.abs().max() > 0.01 for want, _ in pairs)
    return max(float((want - got).detach().abs().max()) for want, got in pairs)


def main() -> int:
    dist.init_process_group("gloo")
    torch.histc = lambda ids, bins, **_: ids.bincount(minlength=bins)
    torch.library.impl("deepep::dispatch", "cpu", deepep._dispatch_op_impl)
    torch.library.impl("deepep::combine", "cpu", deepep._combine_op_impl)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    bad = 0
    for scores_first in (True, False):
        for again in (False, True):
            worst = compared(mesh, scores_first, again)
            bad += not worst < 1e-4
            about = f"scores {'before' if scores_first else 'after'} the experts"
            about += ", computed again" if again else ""
            print(f"rank {dist.get_rank()}: {about}: largest difference {worst:.1e}", flush=True)
    assert isinstance(deepep._buffer, trefoil.deep_ep.Buffer)
    dist.barrier()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
