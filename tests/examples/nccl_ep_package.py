"""NVIDIA's Python package nccl.ep on two libraries: the same calls, results and times in turn.

    torchrun --nproc-per-node 2 tests/examples/nccl_ep_package.py --json nvidia.json
    torchrun --nproc-per-node 2 tests/examples/nccl_ep_package.py --json trefoil.json \
        --library /path/to/libnccl_ep.so.0

Needs GPUs, torch, and from PyPI nccl4py and nccl-extensions. Without --library the package loads
the library it brings, which compiles its kernels at the first call (NCCL_EP_JIT_* say with what). A
row is one shape: dispatch, then combine of the received rows as they are, called, and replayed from
a CUDA graph with other contents; both are compared with what torch computes. Times are means of
calls between CUDA events, the slowest rank's, each after a barrier. Exit code 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CALLS = 50


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="the library to use (default: the package's own)")
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--ll-tokens", type=int, nargs="*", default=[8, 32, 64, 128])
    parser.add_argument("--ht-tokens", type=int, nargs="*", default=[4096])
    return parser.parse_args()


class Step:
    """Tensors, group and handle of one shape."""

    def __init__(self, comm: Any, ep: Any, options: Any, mode: str, tokens: int) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        hidden, experts = options.hidden, options.experts
        local = experts // ranks
        self.mode, self.topk = mode, options.topk
        generator = torch.Generator("cuda").manual_seed(1000 * tokens + rank)
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        self.idx = scores.topk(self.topk, dim=1).indices
        self.weights = torch.rand(tokens, self.topk, device="cuda", generator=generator)
        self.x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.y = torch.zeros_like(self.x)
        self.ranks_hit = torch.stack([(self.idx // local == r).any(1) for r in range(ranks)]).sum(0)
        high = mode.startswith("ht")
        slots = ranks * tokens * (1 if mode == "ht-flat" else min(self.topk, local))
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT if high else ep.Algorithm.LOW_LATENCY,
            num_experts=experts,
            max_dispatch_tokens_per_rank=tokens,
            max_recv_tokens_per_rank=slots if high else 0,
            max_token_bytes=2 * hidden,
        )
        self.group = ep.Group.create(comm, config)
        layout = ep.Layout.FLAT if mode == "ht-flat" else ep.Layout.EXPERT_MAJOR
        stream = torch.cuda.current_stream()
        self.handle = self.group.create_handle(layout, ep.Tensor(self.idx), stream=stream)
        shape = (slots, hidden) if high else (local, ranks * tokens, hidden)
        self.received = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        outputs = {"tokens": ep.Tensor(self.received)}
        counts = torch.zeros(local, device="cuda", dtype=torch.int32)
        self.info = None if high else ep.LayoutInfo(expert_counters=ep.Tensor(counts))
        if high:
            shape = (slots, self.topk) if mode == "ht-flat" else (slots,)
            outputs["topk_weights"] = ep.Tensor(torch.zeros(shape, device="cuda"))
        if mode == "ht-flat":
            outputs["topk_idx"] = ep.Tensor(torch.zeros(shape, device="cuda", dtype=torch.int64))
        weights = {"topk_weights": ep.Tensor(self.weights)}
        self.dispatch_in = ep.DispatchInputs(tokens=ep.Tensor(self.x), **(weights if high else {}))
        self.dispatch_out = ep.DispatchOutputs(**outputs)
        self.combine_in = ep.CombineInputs(tokens=ep.Tensor(self.received))
        self.combine_out = ep.CombineOutputs(tokens=ep.Tensor(self.y), **({} if high else weights))

    def fill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed + dist.get_rank())
        self.x.copy_(torch.randn(self.x.shape, device="cuda", generator=generator))
        self.y.zero_()
        torch.cuda.synchronize()
        dist.barrier()

    def dispatch(self) -> None:
        stream = torch.cuda.current_stream()
        self.handle.dispatch(
            self.dispatch_in, self.dispatch_out, layout_info=self.info, stream=stream
        )

    def combine(self) -> None:
        stream = torch.cuda.current_stream()
        self.handle.combine(self.combine_in, self.combine_out, stream=stream)

    def error(self) -> float:
        """The largest difference from torch's result, over what topk roundings to bf16 may make."""
        torch.cuda.synchronize()
        factor = {"ht-flat": self.ranks_hit.float(), "ht-expert-major": self.topk}
        times = factor.get(self.mode, self.weights.sum(1))
        want = self.x.float() * (times[:, None] if torch.is_tensor(times) else times)
        bound = want.abs() * (self.topk + 2) * 2.0**-8 + 1e-30
        return float(((self.y.float() - want).abs() / bound).max())

    def digest(self) -> str:
        data = self.y.view(torch.int16).cpu().numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16]

    def mean_us(self, operation: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        total = 0.0
        for _ in range(CALLS):
            torch.cuda.synchronize()
            dist.barrier()
            begin.record()
            operation()
            end.record()
            torch.cuda.synchronize()
            total += begin.elapsed_time(end)
        slowest = torch.tensor([1000 * total / CALLS])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.handle.destroy()
        self.group.destroy()


def run(comm: Any, ep: Any, options: Any, mode: str, tokens: int) -> dict[str, Any]:
    step = Step(comm, ep, options, mode, tokens)
    row: dict[str, Any] = {"mode": mode, "tokens": tokens, "ranks": dist.get_world_size()}
    step.fill(1)
    step.dispatch()
    step.combine()
    row["error"], row["result"] = step.error(), step.digest()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.dispatch()
        step.combine()
    step.fill(2)
    graph.replay()
    row["graph_error"], row["graph_result"] = step.error(), step.digest()
    row["dispatch_us"] = step.mean_us(step.dispatch)
    row["combine_us"] = step.mean_us(step.combine)
    row["graph_us"] = step.mean_us(graph.replay)
    worst = torch.tensor([max(row["error"], row["graph_error"])])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    row["ok"] = bool(worst <= 1)
    del graph
    step.close()
    return row


def tell(row: dict[str, Any]) -> None:
    print(
        f"{row['mode']:16} {row['tokens']:5} tokens  {'agrees' if row['ok'] else 'DIFFERS'}  "
        f"dispatch {row['dispatch_us']:7.1f} us  combine {row['combine_us']:7.1f} us  "
        f"both from a graph {row['graph_us']:7.1f} us  result {row['result']}",
        flush=True,
    )


def main() -> int:
    options = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    if options.library:  # the package looks for the functions in the process first
        ctypes.CDLL(options.library, ctypes.RTLD_GLOBAL)
    from nccl import ep
    from nccl.ep.interop.torch import get_nccl_comm_from_group

    comm = get_nccl_comm_from_group()
    shapes = [("ll-expert-major", n) for n in options.ll_tokens]
    shapes += [(mode, n) for n in options.ht_tokens for mode in ("ht-flat", "ht-expert-major")]
    rows = []
    for mode, tokens in shapes:
        rows.append(run(comm, ep, options, mode, tokens))
        if dist.get_rank() == 0:
            tell(rows[-1])
    if options.json and dist.get_rank() == 0:
        about = {
            "library": options.library or "the package's",
            "version": str(ep.get_lib_version()),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "hidden": options.hidden,
            "experts": options.experts,
            "topk": options.topk,
            "calls": CALLS,
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
