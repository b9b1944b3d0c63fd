#!/usr/bin/env python3
"""Wall time of high throughput through trefoil.deep_ep's Buffer, call by call.

    TREFOIL_EP_LIBRARY=gpu torchrun --nproc-per-node 2 tests/gpu/torch/ht_time.py

Layout and dispatch of a new routing, dispatch of a known one, combine: until the call returns
("host") and until the GPU is done. The sums are compared with the rows that were sent. Times in us:
[10 %, median, 90 %] on rank 0.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks, parser, require_close, wait

from trefoil.deep_ep import Buffer

WARM, EXPERTS, TOPK = 10, 64, 8


def timed(ranks: Ranks, call: Callable[[], Any], name: str, took: dict[str, list[float]]) -> Any:
    begin = time.perf_counter()
    found = call()
    back = time.perf_counter()
    wait(ranks.device)
    took.setdefault(f"{name} host", []).append(1e6 * (back - begin))
    took.setdefault(name, []).append(1e6 * (time.perf_counter() - begin))
    return found


def steps(ranks: Ranks, buffer: Buffer, tokens: int, hidden: int, count: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(tokens, hidden, generator=draw).bfloat16().to(ranks.device)
    ids = torch.rand(tokens, EXPERTS, generator=draw).topk(TOPK, 1).indices.to(ranks.device)
    weights = torch.rand(tokens, TOPK, generator=draw).to(ranks.device)

    def routed() -> tuple[Any, ...]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        return in_rank, buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, ids, weights)

    took: dict[str, list[float]] = {}
    for _ in range(WARM + count):
        dist.barrier()
        wait(ranks.device)
        in_rank, (rows, _, _, _, handle, _) = timed(ranks, routed, "layout and dispatch", took)
        timed(ranks, lambda h=handle: buffer.dispatch(x, handle=h), "known dispatch", took)
        sums = timed(ranks, lambda r=rows, h=handle: buffer.combine(r, h)[0], "combine", took)
    visits = in_rank.sum(1, keepdim=True)
    require_close("sums", sums, x.float() * visits, 0.02)
    return {name: quantiles(times[WARM:]) for name, times in took.items()}


def quantiles(times: list[float]) -> list[float]:
    of = statistics.quantiles(times, n=10)
    return [round(of[at], 1) for at in (0, 4, 8)]


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--tokens", type=int, nargs="+", default=[128, 4096])
    options.add_argument("--hidden", type=int, default=7168)
    options.add_argument("--steps", type=int, default=60)
    o = options.parse_args()
    ranks = Ranks(o)
    buffer = Buffer(dist.group.WORLD)
    for tokens in o.tokens:
        ranks.check(f"{tokens} tokens", lambda n=tokens: steps(ranks, buffer, n, o.hidden, o.steps))
    buffer.destroy()
    return ranks.finish({"hidden": o.hidden, "experts": EXPERTS, "topk": TOPK})


if __name__ == "__main__":
    sys.exit(main())
