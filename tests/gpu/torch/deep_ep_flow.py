#!/usr/bin/env python3
"""A program for DeepEP's first version, on trefoil.deep_ep: low latency with bf16 and fp8 rows,
hooks and a CUDA graph; high throughput with a cached dispatch. Sums are checked in float32.

    TREFOIL_EP_LIBRARY=gpu torchrun --nproc-per-node 2 tests/gpu/torch/deep_ep_flow.py

--device cpu: on the CPU library, without graphs. Exit code 1: a check failed; 77: no GPU.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks, parser, require_close

import trefoil.deep_ep

trefoil.deep_ep.install()

from deep_ep import Buffer  # noqa: E402
from deep_ep.utils import EventOverlap  # noqa: E402

BF16, FP8 = 2**-7, 0.08  # of a sum of rows that were rounded once; and of E4M3 with scales


class Case:
    """Sizes, and the data of every rank."""

    def __init__(self, ranks: Ranks, tokens: int, hidden: int, experts: int, topk: int) -> None:
        self.ranks, self.tokens, self.hidden, self.experts = ranks, tokens, hidden, experts
        self.local = experts // ranks.size
        made = [self._of_rank(r, topk) for r in range(ranks.size)]
        self.all_x, self.all_ids, _ = zip(*made, strict=True)
        self.x, self.ids, self.weights = made[ranks.rank]

    def _of_rank(self, rank: int, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(7 + rank)
        count = self.tokens - 3 * rank
        x = torch.randn(count, self.hidden, generator=draw).bfloat16()
        ids = torch.rand(count, self.experts, generator=draw).topk(topk, dim=1).indices
        ids[torch.rand(ids.shape, generator=draw) < 0.05] = -1
        weights = torch.rand(count, topk, generator=draw)
        device = self.ranks.device
        return x.to(device), ids.to(device), weights.to(device)

    def sums(self) -> torch.Tensor:
        used = torch.where(self.ids >= 0, self.weights, 0.0)
        return self.x.float() * used.sum(1, keepdim=True)

    def rows_of(self, expert: int) -> torch.Tensor:
        """Those of a local expert, by source rank, then token."""
        number = self.ranks.rank * self.local + expert
        pairs = zip(self.all_x, self.all_ids, strict=True)
        return torch.cat([x[(ids == number).any(1)] for x, ids in pairs])

    def rows_here(self) -> torch.Tensor:
        """Those that come to this rank in high throughput."""
        pairs = zip(self.all_x, self.all_ids, strict=True)
        here = self.ranks.rank
        mine = [(x, (ids >= 0) & (ids // self.local == here)) for x, ids in pairs]
        return torch.cat([x[hit.any(1)] for x, hit in mine])


def plain_rows(received: Any) -> torch.Tensor:
    """float32 [L, R N, H] of rows, or of fp8 rows and their scales."""
    if not isinstance(received, tuple):
        return received.float()
    rows, scales = received
    parts = rows.float().unflatten(2, (-1, 128))
    return (parts * scales.unsqueeze(3)).flatten(2)


def require_rows(case: Case, received: Any, counts: torch.Tensor, fp8: bool) -> float:
    rows, worst = plain_rows(received), 0.0
    for expert in range(case.local):
        want = case.rows_of(expert)
        if counts[expert] != len(want):
            raise AssertionError(f"expert {expert}: {counts[expert]} rows, expected {len(want)}")
        got = rows[expert, : len(want)]
        if not fp8 and not torch.equal(got, want.float()):
            raise AssertionError(f"expert {expert}: rows differ")
        worst = max(worst, require_close(f"expert {expert}", got, want, FP8))
    return worst


def low_latency(case: Case, buffer: Buffer, fp8: bool, hooks: bool) -> dict[str, float]:
    """Dispatch, the experts (none), combine."""
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        case.x,
        case.ids,
        case.tokens,
        case.experts,
        use_fp8=fp8,
        async_finish=not hooks,
        return_recv_hook=hooks,
    )
    hook() if hooks else event.current_stream_wait()
    worst = require_rows(case, received, counts, fp8)
    back, event, hook = buffer.low_latency_combine(
        plain_rows(received).bfloat16(),
        case.ids,
        case.weights,
        handle,
        async_finish=not hooks,
        return_recv_hook=hooks,
    )
    hook() if hooks else event.current_stream_wait()
    sums = require_close("sums", back, case.sums(), 0.1 if fp8 else BF16)
    return {"rows": worst, "sums": sums}


def captured(case: Case, buffer: Buffer, fp8: bool, hooks: bool) -> dict[str, float]:
    """A step in a CUDA graph; other rows in each replay."""
    kept: dict[str, Any] = {}

    def step() -> None:
        received, counts, handle, _, hook = buffer.low_latency_dispatch(
            case.x,
            case.ids,
            case.tokens,
            case.experts,
            use_fp8=fp8,
            return_recv_hook=hooks,
        )
        if hooks:
            hook()
        kept["received"], kept["counts"] = received, counts
        kept["back"], _, hook = buffer.low_latency_combine(
            plain_rows(received).bfloat16(),
            case.ids,
            case.weights,
            handle,
            return_recv_hook=hooks,
        )
        if hooks:
            hook()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = {"rows": 0.0, "sums": 0.0}
    before = [x.clone() for x in case.all_x]
    for number in range(3):
        for x, first in zip(case.all_x, before, strict=True):
            x.copy_(first * (1 - 0.5 * number))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        found = require_rows(case, kept["received"], kept["counts"], fp8)
        worst["rows"] = max(worst["rows"], found)
        sums = require_close("sums", kept["back"], case.sums(), 0.1 if fp8 else BF16)
        worst["sums"] = max(worst["sums"], sums)
    for x, first in zip(case.all_x, before, strict=True):
        x.copy_(first)
    return worst


def high_throughput(case: Case, buffer: Buffer) -> dict[str, float]:
    """Layout, dispatch, a cached dispatch, combine with weights; events as DeepEP's programs use
    them."""
    layout = buffer.get_dispatch_layout(
        case.ids, case.experts, previous_event=Buffer.capture(), async_finish=True
    )
    per_rank, per_rdma, per_expert, in_rank, event = layout
    rows, ids, weights, counts, handle, event = buffer.dispatch(
        case.x,
        topk_idx=case.ids,
        topk_weights=case.weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
        config=Buffer.get_dispatch_config(case.ranks.size),
    )
    assert isinstance(event, EventOverlap)
    event.current_stream_wait()
    want = case.rows_here()
    if not torch.equal(rows, want):
        raise AssertionError("rows differ")
    if counts != [int((ids == expert).sum()) for expert in range(case.local)]:
        raise AssertionError(f"{counts} rows of local experts")
    again, *_, event = buffer.dispatch(case.x, handle=handle, async_finish=True)
    event.current_stream_wait()
    if not torch.equal(again, want):
        raise AssertionError("rows of the cached dispatch differ")
    back, back_weights, event = buffer.combine(
        rows, handle, topk_weights=weights, async_finish=True
    )
    event.current_stream_wait()
    visits = in_rank.sum(1, keepdim=True)
    used = torch.where(case.ids >= 0, case.weights, 0.0)
    return {
        "sums": require_close("sums", back, case.x.float() * visits, BF16),
        "weights": require_close("weights", back_weights, used, 1e-6),
    }


def high_throughput_fp8(case: Case, buffer: Buffer) -> float:
    """fp8 rows travel with their scales."""
    parts = case.x.float().unflatten(1, (-1, 128))
    scales = parts.abs().amax(2).clamp(min=1e-4) / 448
    rows8 = (parts / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids, case.experts)
    (rows, row_scales), *_ = buffer.dispatch(
        (rows8, scales),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    got = (rows.float().unflatten(1, (-1, 128)) * row_scales.unsqueeze(2)).flatten(1)
    return require_close("rows", got, case.rows_here(), FP8)


def main() -> int:
    about = parser(__doc__.splitlines()[0])
    about.add_argument("--small", action="store_true", help="small sizes only")
    options = about.parse_args()
    ranks = Ranks(options)
    sizes = [(17, 512, 8, 2)] if options.small else [(17, 512, 8, 2), (128, 7168, 64, 8)]
    groups = {"gloo": ranks.gloo}
    if ranks.device.type == "cuda":  # as DeepEP's programs make their group
        groups["nccl"] = dist.new_group(backend="nccl")
    for backend, group in groups.items():
        made: list[Buffer] = []
        ranks.check(
            f"{backend} Buffer",
            lambda group=group, made=made: made.append(Buffer(group, low_latency_mode=True)),
        )
        if not made:
            continue
        for size in sizes:
            case = Case(ranks, *size)
            name = f"{backend} B={case.tokens} H={case.hidden} E={case.experts}"
            buffer = made[0]
            ranks.check(f"{name} ht", partial(high_throughput, case, buffer))
            ranks.check(f"{name} ht fp8", partial(high_throughput_fp8, case, buffer))
            for fp8 in (False, True):
                for hooks in (False, True):
                    kind = f"{name} ll {'fp8' if fp8 else 'bf16'}{' hooks' if hooks else ''}"
                    ranks.check(kind, partial(low_latency, case, buffer, fp8, hooks))
                    if ranks.device.type == "cuda":
                        work = partial(captured, case, buffer, fp8, hooks)
                        ranks.check(f"{kind} captured", work)
        ranks.check(f"{backend} destroy", made[0].destroy)
    return ranks.finish()


if __name__ == "__main__":
    sys.exit(main())
