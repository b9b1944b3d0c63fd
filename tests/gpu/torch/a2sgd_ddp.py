#!/usr/bin/env python3
"""A2SGD's hook of DistributedDataParallel on GPUs: updates and parameters are the reference's, bit
for bit; its time is beside that of DDP's own all-reduce.

    TREFOIL_EP_LIBRARY=PATH/libnccl_ep.so.0 torchrun --nproc-per-node 2 tests/gpu/torch/a2sgd_ddp.py

--device cpu: the same steps over gloo. Needs libtrefoil.so.0 (TREFOIL_LIB). Exit code 1: a check
failed; 77: no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from ranks import Ranks, parser, wait
from torch.nn.parallel import DistributedDataParallel

from trefoil.a2sgd import Averaging
from trefoil.a2sgd_torch import A2SGD, AveragingOptimizer, ddp_hook

RATE, PERIOD, STEPS = 0.125, 2, 4
DTYPES = (torch.float32, torch.bfloat16)


def network(width: int, depth: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return torch.nn.Sequential(*layers).to(device, dtype)


def backward(net: torch.nn.Module, rank: int, step: int, rows: int) -> None:
    like = next(net.parameters())
    draw = torch.Generator().manual_seed(100 + 10 * step + rank)
    x = torch.randn(rows, like.shape[1], generator=draw)
    net(x.to(like.device, like.dtype)).float().square().mean().backward()


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1).cpu()
    narrow = flat.element_size() == 2
    return flat.view(torch.int16).numpy().view(np.uint16) if narrow else flat.numpy()


def row_of(tensors: Any) -> np.ndarray:
    return np.concatenate([bits(t) for t in tensors])


def require_same(name: str, have: np.ndarray, want: np.ndarray) -> None:
    different = int((have != want).sum())
    if different:
        raise AssertionError(f"{name}: {different} of {have.size} elements differ")


class Replicas:
    """The networks of all workers, each a copy on this rank's device, averaged by the reference."""

    def __init__(self, ranks: Ranks, width: int, depth: int, dtype: torch.dtype) -> None:
        self.nets = [network(width, depth, dtype, ranks.device) for _ in range(ranks.size)]
        sizes = [p.numel() for p in self.nets[0].parameters()]
        kind = "f32" if dtype == torch.float32 else "bf16"
        self.averaging = Averaging("a2sgd", sizes, ranks.size, kind, sync_period=PERIOD)

    def updates(self, step: int, rows: int) -> np.ndarray:
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            backward(net, rank, step, rows)
        return self.averaging.step(
            np.stack([row_of(p.grad for p in n.parameters()) for n in self.nets])
        )


def hook_results(ranks: Ranks, dtype: torch.dtype) -> None:
    """Gradients that DDP leaves behind; the parameters stay."""
    replicas = Replicas(ranks, 96, 3, dtype)
    workers = A2SGD()
    model = DistributedDataParallel(network(96, 3, dtype, ranks.device))
    model.register_comm_hook(workers, ddp_hook)
    for step in range(STEPS):
        want = replicas.updates(step, 32)[ranks.rank]
        model.zero_grad()
        backward(model, ranks.rank, step, 32)
        wait(ranks.device)
        require_same(f"step {step}", row_of(p.grad for p in model.parameters()), want)
    workers.close()


def optimizer_results(ranks: Ranks, dtype: torch.dtype) -> None:
    """Gradients that the optimizer leaves behind; its parameters are one after PERIOD steps."""
    workers = A2SGD()
    net = network(96, 3, dtype, ranks.device)
    optimizer = AveragingOptimizer(torch.optim.SGD(net.parameters(), RATE), workers, PERIOD)
    replicas = Replicas(ranks, 96, 3, dtype)
    for step in range(STEPS):
        want = replicas.updates(step, 32)
        optimizer.zero_grad()
        backward(net, ranks.rank, step, 32)
        optimizer.step()
        wait(ranks.device)
        require_same(f"step {step}", row_of(p.grad for p in net.parameters()), want[ranks.rank])
        follow(replicas, want)
        mine = row_of(replicas.nets[ranks.rank].parameters())
        require_same(f"parameters {step}", row_of(net.parameters()), mine)
    workers.close()


@torch.no_grad()
def follow(replicas: Replicas, updates: np.ndarray) -> None:
    """Each replica steps by its update; where the period says so they become their mean."""
    for net, row in zip(replicas.nets, updates, strict=True):
        at = 0
        for p in net.parameters():
            part = torch.from_numpy(row[at : at + p.numel()].copy())
            part = part.view(p.dtype) if p.element_size() == 2 else part
            p.grad, at = part.view_as(p).to(p.device), at + p.numel()
        torch.optim.SGD(net.parameters(), RATE).step()
    rows = np.stack([row_of(net.parameters()) for net in replicas.nets])
    replicas.averaging.sync(rows)
    for net, row in zip(replicas.nets, rows, strict=True):
        at = 0
        for p in net.parameters():
            part = torch.from_numpy(row[at : at + p.numel()].copy())
            part = part.view(p.dtype) if p.element_size() == 2 else part
            p.copy_(part.view_as(p))
            at += p.numel()


def step_ms(ranks: Ranks, model: torch.nn.Module, steps: int) -> float:
    """Of a backward pass with its communication: the median."""
    like = next(model.parameters())
    x = torch.randn(64, like.shape[1], device=like.device, dtype=like.dtype)
    times = []
    for number in range(steps + 5):
        model.zero_grad(set_to_none=False)
        loss = model(x).float().square().mean()
        torch.distributed.barrier(group=ranks.gloo)
        wait(ranks.device)
        begin = time.perf_counter()
        loss.backward()
        wait(ranks.device)
        if number >= 5:
            times.append(time.perf_counter() - begin)
    return round(sorted(times)[len(times) // 2] * 1000, 3)


def times(ranks: Ranks, width: int, depth: int, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Of the backward pass alone, with DDP's all-reduce, and with the hook."""
    found: dict[str, Any] = {}
    net = network(width, depth, dtype, ranks.device)
    found["MB"] = round(sum(p.numel() * p.element_size() for p in net.parameters()) / 1e6, 1)
    found["backward_ms"] = step_ms(ranks, net, steps)
    model = DistributedDataParallel(net)
    found["all_reduce_ms"] = step_ms(ranks, model, steps)
    workers = A2SGD()
    model = DistributedDataParallel(network(width, depth, dtype, ranks.device))
    model.register_comm_hook(workers, ddp_hook)
    found["a2sgd_ms"] = step_ms(ranks, model, steps)
    workers.close()
    return found


def main() -> int:
    about = parser(__doc__.splitlines()[0])
    about.add_argument("--steps", type=int, default=30)
    options = about.parse_args()
    ranks = Ranks(options)
    results: dict[str, Callable[[Ranks, torch.dtype], None]] = {
        "hook": hook_results,
        "optimizer": optimizer_results,
    }
    for dtype in DTYPES:
        for name, work in results.items():
            ranks.check(f"{name} {dtype}", partial(work, ranks, dtype))
    shapes = [(1024, 8), (4096, 8)] if ranks.device.type == "cuda" else [(64, 2)]
    for width, depth in shapes:
        for dtype in DTYPES:
            work = partial(times, ranks, width, depth, dtype, options.steps)
            ranks.check(f"time {width} x {depth} {dtype}", work)
    return ranks.finish()


if __name__ == "__main__":
    sys.exit(main())
