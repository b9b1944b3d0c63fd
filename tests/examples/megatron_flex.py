#!/usr/bin/env python3
"""Megatron-core's own exchange of its flex dispatcher (backend deepep) over trefoil.deep_ep, on the
CPU: outputs and gradients against the layer without ranks.

    torchrun --nproc-per-node 2 tests/examples/megatron_flex.py

Needs torch and the packages of tools/requirements-host-megatron.txt. Exit code 1: something
differs.
"""

import sys

import torch
import torch.distributed as dist

import trefoil.deep_ep

trefoil.deep_ep.install()  # before Megatron looks for deep_ep

from megatron.core.transformer.moe import fused_a2a  # noqa: E402

EXPERTS, TOKENS, HIDDEN, TOPK = 8, 37, 96, 3


def expert_rows(
    rows: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """For each row the sum over its experts, by probability; -1 is no expert."""
    out = torch.zeros_like(rows)
    for k in range(ids.shape[1]):
        used = (ids[:, k] >= 0).unsqueeze(1)
        product = torch.einsum("bh,bhj->bj", rows, matrices[ids[:, k].clamp(min=0)])
        out = out + torch.where(used, probs[:, k : k + 1] * product, 0)
    return out


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert fused_a2a.HAVE_DEEP_EP
    torch.manual_seed(0)
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
    torch.manual_seed(1 + rank)
    ids = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK].contiguous()
    direction = torch.randn(TOKENS, HIDDEN)
    results = []
    for over_ranks in (False, True):
        torch.manual_seed(100 + rank)
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        probs = torch.rand(TOKENS, TOPK, requires_grad=True)
        if over_ranks:
            mine = matrices.chunk(ranks)[rank]
            rows, local, row_probs, counts, handle = fused_a2a.fused_dispatch(
                x, ids, probs, EXPERTS, dist.group.WORLD
            )
            assert counts.tolist() == [int((local == e).sum()) for e in range(EXPERTS // ranks)]
            done = expert_rows(rows, local, row_probs, mine)
            out, _ = fused_a2a.fused_combine(done, dist.group.WORLD, handle)
        else:
            out = expert_rows(x, ids, probs, matrices)
        out.backward(direction)
        results.append((out.detach(), x.grad, probs.grad))
    bad = 0
    for name, dense, found in zip(("output", "rows", "probabilities"), *results, strict=True):
        worst = float((dense - found).abs().max())
        bad += worst > 1e-5
        print(f"rank {rank}: {name}: largest difference {worst:.1e}", flush=True)
    dist.barrier()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
