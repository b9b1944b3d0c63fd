#!/usr/bin/env python3
"""Times of dispatch and combine across pretended NVLink domains, also of ranks that share a GPU.

    NCCL_LSA_TEAM_SIZE=2 NCCL_RMA_PLUGIN=... TREFOIL_EP_LIBRARY=gpu torchrun --nproc-per-node 4 \
        tests/gpu/torch/domain_times.py --mode ll --tokens 1 8 32 128

docs/net.md has the rest of the environment; ranks that share GPUs need MPS. Low latency in
expert-major, high throughput flat, bf16. An operation is called when all ranks have finished the
one before; by events, us, of the slowest rank: [10 %, median, 90 %]. Sums are compared with the
rows that were sent. Exit code 1: a check failed; 77: no GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks, parser, require_close, wait

from trefoil import ep

WARM, EXPERTS, TOPK, HIDDEN = 10, 256, 8, 7168
T = ep.Tensor


class Step:
    """A handle, its tensors, and its calls."""

    def __init__(self, ranks: Ranks, comm: ep.Communicator, tokens: int, mode: str) -> None:
        self.ranks, self.is_ll = ranks, mode == "ll"
        draw = torch.Generator().manual_seed(ranks.rank)
        scores = torch.rand(tokens, EXPERTS, generator=draw)
        self.ids = scores.topk(TOPK, 1).indices.to(ranks.device)
        self.x = torch.randn(tokens, HIDDEN, generator=draw).bfloat16().to(ranks.device)
        self.weights = torch.rand(tokens, TOPK, generator=draw).to(ranks.device)
        self.sums = torch.zeros_like(self.x)
        algorithm = ep.Algorithm.LOW_LATENCY if self.is_ll else ep.Algorithm.HIGH_THROUGHPUT
        config = ep.GroupConfig(
            algorithm=algorithm,
            num_experts=EXPERTS,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=2 * HIDDEN,
            timeout_ns=20_000_000_000,
        )
        self.group = ep.Group.create(comm, config)
        layout = ep.Layout.EXPERT_MAJOR if self.is_ll else ep.Layout.FLAT
        self.handle = self.group.init_handle(layout, TOPK)
        self.make(EXPERTS // ranks.size, ranks.size * tokens)
        self.handle.update(T(self.ids))

    def make(self, local: int, rows: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.ranks.device)

        shape = (local, rows, HIDDEN) if self.is_ll else (rows, HIDDEN)
        received = T(zeros(*shape))
        self.rows = ep.CombineInputs(tokens=received)
        if self.is_ll:
            self.inputs = ep.DispatchInputs(tokens=T(self.x))
            self.outputs = ep.DispatchOutputs(tokens=received)
            self.info = ep.LayoutInfo(expert_counters=T(zeros(local, dtype=torch.int32)))
            self.back = ep.CombineOutputs(tokens=T(self.sums), topk_weights=T(self.weights))
            return
        self.inputs = ep.DispatchInputs(tokens=T(self.x), topk_weights=T(self.weights))
        self.outputs = ep.DispatchOutputs(
            tokens=received,
            topk_weights=T(zeros(rows, TOPK, dtype=torch.float32)),
            topk_idx=T(zeros(rows, TOPK, dtype=torch.int64)),
        )
        self.info = None
        self.back = ep.CombineOutputs(tokens=T(self.sums))

    def dispatch(self) -> None:
        self.handle.dispatch(self.inputs, self.outputs, layout_info=self.info)

    def combine(self) -> None:
        self.handle.combine(self.rows, self.back)

    def expected(self) -> torch.Tensor:
        """Of a token, whose rows come back as they were sent."""
        if self.is_ll:
            return self.x.float() * self.weights.sum(1, keepdim=True)
        here = self.ids // (EXPERTS // self.ranks.size)
        visits = torch.nn.functional.one_hot(here, self.ranks.size).amax(1).sum(1, keepdim=True)
        return self.x.float() * visits

    def close(self) -> None:
        self.handle.destroy()
        self.group.destroy()


def took(ranks: Ranks, call: Callable[[], None]) -> float:
    """us of this rank; on the CPU by the clock."""
    dist.barrier(group=ranks.gloo)
    if ranks.device.type == "cpu":
        start = time.perf_counter()
        call()
        wait(ranks.device)
        return 1e6 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    wait(ranks.device)
    return 1000 * begin.elapsed_time(end)


def slowest(ranks: Ranks, times: list[float]) -> list[float]:
    """Of each repetition the slowest rank's; [10 %, median, 90 %]."""
    of_all = torch.tensor(times)
    dist.all_reduce(of_all, dist.ReduceOp.MAX, group=ranks.gloo)
    of = statistics.quantiles(of_all.tolist(), n=10)
    return [round(of[at], 1) for at in (0, 4, 8)]


def times(ranks: Ranks, step: Step, count: int) -> dict[str, list[float]]:
    both = [(took(ranks, step.dispatch), took(ranks, step.combine)) for _ in range(WARM + count)]
    require_close("sums", step.sums, step.expected(), 0.02)
    dispatches, combines = zip(*both[WARM:], strict=True)
    return {
        "dispatch": slowest(ranks, list(dispatches)),
        "combine": slowest(ranks, list(combines)),
    }


def measure(ranks: Ranks, comm: ep.Communicator, tokens: int, o: Any) -> dict[str, list[float]]:
    step = Step(ranks, comm, tokens, o.mode)
    try:
        return times(ranks, step, o.steps)
    finally:
        step.close()


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--mode", choices=("ll", "ht"), default="ll")
    options.add_argument("--tokens", type=int, nargs="+", default=[128])
    options.add_argument("--steps", type=int, default=100)
    o = options.parse_args()
    if o.device == "cuda" and int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    ranks = Ranks(o, "gloo")
    ep.set_device(ranks.device.index if ranks.device.type == "cuda" else ranks.rank)
    comm = ep.Communicator.from_torch(ranks.gloo)
    for tokens in o.tokens:
        ranks.check(f"{tokens} tokens", lambda n=tokens: measure(ranks, comm, n, o))
    ranks.check("destroyed", comm.destroy)
    dispatched = os.environ.get("NCCL_EP_LL_DISPATCH", "mesh")
    return ranks.finish({"mode": o.mode, "dispatch": dispatched, "hidden": HIDDEN, "topk": TOPK})


if __name__ == "__main__":
    sys.exit(main())
