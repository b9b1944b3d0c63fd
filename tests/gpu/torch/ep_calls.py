#!/usr/bin/env python3
"""trefoil.ep and trefoil.torch with torch's tensors, on GPUs: every byte is the reference's, eager
and from a CUDA graph; gradients are those of the layer without ranks.

    TREFOIL_EP_LIBRARY=gpu torchrun --nproc-per-node 2 tests/gpu/torch/ep_calls.py

Small steps run on CuPy's arrays, too, where it is installed; a note says where it is not. --device
cpu: the same calls on the CPU library, without graphs. Exit code 1: a check failed; 77: no GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ranks import Ranks, bytes_of, parser, require_close, to_torch, wait

import ep_needs  # noqa: F401
from ep_steps import MODES, Case, Outputs, by_reference
from trefoil import ep
from trefoil.torch import (
    EPGroup,
    MoEDispatcher,
    grouped_linear,
    ll_combine,
    ll_dispatch,
)

CASES = [
    Case("", experts=8, topk=3, tokens=6, hidden=32, dtype="float32"),
    Case("", experts=8, topk=2, tokens=1, hidden=64, dtype="float16", seed=1),
    Case("", experts=16, topk=4, tokens=33, hidden=2048, dtype="bfloat16", seed=2),
    Case("", experts=64, topk=8, tokens=128, hidden=7168, dtype="bfloat16", seed=3),
]


class Step:
    """A step's tensors and handle; results are poisoned by reset. wrap makes of torch's tensors
    what ep.Tensor is given, over the same memory."""

    def __init__(
        self,
        case: Case,
        ranks: Ranks,
        comm: ep.Communicator,
        wrap: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.case, self.ranks, self.wrap = case, ranks, wrap
        device, rank = ranks.device, ranks.rank
        self.poison = [
            None if a is None else to_torch(a, device) for a in self._arrays(Outputs.poisoned)
        ]
        self.rows, self.back, self.row_weights, self.row_ids = (
            None if t is None else t.clone() for t in self.poison
        )
        assert self.rows is not None and self.back is not None
        self.x, self.ids = to_torch(case.rows(rank), device), to_torch(case.routing(rank), device)
        self.weights = to_torch(case.weights(rank), device)
        self.counts = torch.zeros(case.local, dtype=torch.int32, device=device)
        expert_major = case.mode == "ll-expert-major"
        weights = self.over(self.weights)
        info = ep.LayoutInfo(expert_counters=self.over(self.counts))
        self.info = info if expert_major else None
        sent, read = (None, weights) if expert_major else (weights, None)
        self.inputs = ep.DispatchInputs(tokens=self.over(self.x), topk_weights=sent)
        self.outputs = ep.DispatchOutputs(
            tokens=self.over(self.rows),
            topk_weights=self.over(self.row_weights),
            topk_idx=self.over(self.row_ids),
        )
        self.sums = ep.CombineOutputs(tokens=self.over(self.back), topk_weights=read)
        self.group = ep.Group.create(comm, replace(case.group_config(), timeout_ns=20_000_000_000))
        self.handle = self.make_handle()

    def _arrays(self, make: Callable[[Case, int], Outputs]) -> list[Any]:
        made = make(self.case, self.ranks.rank)
        return [made.tokens, made.combined, made.weights, made.ids]

    def over(self, t: torch.Tensor | None) -> ep.Tensor | None:
        return None if t is None else ep.Tensor(t if self.wrap is None else self.wrap(t))

    def stream(self) -> Any:
        return torch.cuda.current_stream() if self.ranks.device.type == "cuda" else None

    def make_handle(self) -> ep.Handle:
        ids = self.over(self.ids)
        return self.group.create_handle(self.case.layout(), ids, stream=self.stream())

    def reset(self) -> None:
        wait(self.ranks.device)
        for now, poison in zip(self.results(), self.poison, strict=True):
            if now is not None and poison is not None:
                now.copy_(poison)
        wait(self.ranks.device)

    def results(self) -> list[torch.Tensor | None]:
        return [self.rows, self.back, self.row_weights, self.row_ids]

    def run(self, handle: ep.Handle | None = None, staged: bool = False) -> None:
        """Dispatch, the experts, combine. On the CPU work is waited for: torch has no queue."""
        handle, stream = handle or self.handle, self.stream()
        config = ep.DispatchConfig(send_only=int(staged))
        handle.dispatch(
            self.inputs, self.outputs, layout_info=self.info, config=config, stream=stream
        )
        if staged:
            handle.complete(stream=stream)
        if stream is None:
            ep.synchronize()
        received = self.rows * 1.5
        handle.combine(
            ep.CombineInputs(tokens=self.over(received)),
            self.sums,
            config=ep.CombineConfig(send_only=int(staged)),
            stream=stream,
        )
        if staged:
            handle.complete(stream=stream)
        if stream is None:
            ep.synchronize()

    def require(self, expected: list[bytes], what: str) -> None:
        wait(self.ranks.device)
        names = ("rows", "sums", "weights", "ids")
        for name, got, want in zip(names, self.results(), expected, strict=True):
            if bytes_of(got) != want:
                raise AssertionError(f"{what}: {name} differ from the reference's")

    def close(self) -> None:
        wait(self.ranks.device)
        self.handle.destroy()
        self.group.destroy()


def eager(step: Step, expected: list[bytes], staged: bool = False) -> None:
    for number in range(2):
        step.reset()
        step.run(staged=staged)
        step.require(expected, f"call {number}")


def captured(step: Step, expected: list[bytes], staged: bool = False) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(staged=staged)
    for number in range(3):
        step.reset()
        graph.replay()
        step.require(expected, f"replay {number}")


def handle_captured(step: Step, expected: list[bytes]) -> None:
    """A handle made and used inside a capture, as serving engines do."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle = step.make_handle()
        step.run(handle)
    for number in range(2):
        step.reset()
        graph.replay()
        step.require(expected, f"replay {number}")
    handle.destroy()


def on_a_side_stream(step: Step, expected: list[bytes]) -> None:
    stream = torch.cuda.Stream()
    step.reset()
    with torch.cuda.stream(stream):
        step.run()
    stream.synchronize()
    step.require(expected, "side stream")


def calls(ranks: Ranks, comm: ep.Communicator, case: Case) -> None:
    about = f"{case.mode} {case.dtype} B={case.tokens} H={case.hidden} E={case.experts}"
    made: list[Step] = []
    expected = by_reference(case)[ranks.rank].bytes()
    ranks.check(f"{about} made", lambda: made.append(Step(case, ranks, comm)))
    if ranks.found[f"{about} made"].get("failures"):
        return
    step = made[0]
    works = {"eager": eager, "captured": captured, "side stream": on_a_side_stream}
    if not case.is_ht:
        works["staged"] = partial(eager, staged=True)
        works["staged captured"] = partial(captured, staged=True)
        works["handle in a capture"] = handle_captured
    for name, work in works.items():
        if ranks.device.type == "cuda" or work is eager or name == "staged":
            ranks.check(f"{about} {name}", partial(work, step, expected))
    ranks.check(f"{about} destroyed", step.close)


def on_cupy(ranks: Ranks, comm: ep.Communicator, case: Case) -> None:
    """CuPy's arrays over torch's memory. It has no bfloat16."""
    import cupy

    step = Step(case, ranks, comm, cupy.from_dlpack)
    assert isinstance(step.inputs.tokens.buffer, cupy.ndarray)
    expected = by_reference(case)[ranks.rank].bytes()
    eager(step, expected)
    step.close()


def cupy_calls(ranks: Ranks, comm: ep.Communicator) -> None:
    if ranks.device.type == "cpu" or importlib.util.find_spec("cupy") is None:
        if ranks.rank == 0:
            print("NOTE CuPy's arrays: not tried (needs a GPU and cupy)", flush=True)
        return
    for mode in MODES:
        for case in CASES[:2]:
            work = partial(on_cupy, ranks, comm, replace(case, mode=mode, ranks=ranks.size))
            ranks.check(f"CuPy's arrays {mode} {case.dtype}", work)


# ---- trefoil.torch ------------------------------------------------------------------------------

EXPERTS, TOPK, TOKENS, HIDDEN = 8, 3, 37, 64


def data(rank: int, what: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * what + rank))


def ids_of(rank: int) -> torch.Tensor:
    return data(rank, 2, TOKENS - rank, EXPERTS).argsort(1)[:, :TOPK].contiguous()


def dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: torch.Tensor) -> Any:
    terms = torch.stack([torch.bmm(x[:, None], w[ids[:, k]])[:, 0] for k in range(TOPK)], 1)
    return (terms * weights.unsqueeze(2)).sum(1)


def gradients(
    ranks: Ranks, comm: ep.Communicator, dtype: torch.dtype, rtol: float
) -> dict[str, float]:
    """Outputs and all gradients against the layer without ranks, in float32 on the CPU."""
    size, rank, device = ranks.size, ranks.rank, ranks.device
    whole = (data(0, 5, EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5).to(dtype).float()
    rows = [data(r, 1, TOKENS - r, HIDDEN).to(dtype).float() for r in range(size)]
    weights = [data(r, 3, TOKENS - r, TOPK).sigmoid() for r in range(size)]
    factors = [data(r, 4, TOKENS - r, HIDDEN) for r in range(size)]
    for t in (whole, *rows, *weights):
        t.requires_grad_()
    outs = [dense(rows[r], ids_of(r), weights[r], whole) for r in range(size)]
    sum((outs[r] * factors[r]).sum() for r in range(size)).backward()

    x = rows[rank].detach().to(device, dtype).requires_grad_()
    scale = weights[rank].detach().to(device).requires_grad_()
    mine = whole.detach().chunk(size)[rank].to(device, dtype).requires_grad_()
    with EPGroup(
        comm,
        num_experts=EXPERTS,
        num_topk=TOPK,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        dtype=dtype,
        timeout=20,
    ) as group:
        out = MoEDispatcher(group)(
            x,
            lambda part, counts: grouped_linear(part, counts, mine),
            topk_idx=ids_of(rank).to(device),
            topk_weights=scale,
        )
        (out.float() * factors[rank].to(device)).sum().backward()
        wait(device)
    assert whole.grad is not None
    return {
        "out": require_close("out", out, outs[rank], rtol),
        "x": require_close("gradient of x", x.grad, rows[rank].grad, rtol),
        "weights": require_close("of weights", scale.grad, weights[rank].grad, rtol * HIDDEN**0.5),
        "experts": require_close(
            "of experts", mine.grad, whole.grad.chunk(size)[rank], rtol * TOKENS**0.5
        ),
    }


def low_latency(ranks: Ranks, comm: ep.Communicator) -> float:
    rank, device = ranks.rank, ranks.device
    x, ids = data(rank, 1, TOKENS - rank, HIDDEN), ids_of(rank)
    weights = data(rank, 3, TOKENS - rank, TOPK).sigmoid()
    with EPGroup(
        comm,
        num_experts=EXPERTS,
        num_topk=TOPK,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        low_latency=True,
        timeout=20,
    ) as group:
        rows, counts, routing = ll_dispatch(group, x.to(device, torch.bfloat16), ids.to(device))
        every = torch.cat([ids_of(r) for r in range(ranks.size)])
        mine = range(rank * group.local_experts, (rank + 1) * group.local_experts)
        assert counts.tolist() == [int((every == e).sum()) for e in mine]
        out = ll_combine(group, rows, weights.to(device), routing)
        wait(device)
    want = x.bfloat16().float() * weights.sum(1, keepdim=True)
    return require_close("sums", out, want, 2**-7)


def torch_captured(ranks: Ranks, comm: ep.Communicator, is_low: bool) -> None:
    """A pair of operations, high throughput's with gradients, in a CUDA graph that is replayed with
    other tokens and ids: what eager calls give, in high throughput but for the order of torch's
    atomic sums."""
    if ranks.device.type == "cpu":
        return
    size = {"num_experts": EXPERTS, "num_topk": TOPK, "max_tokens": TOKENS, "hidden": HIDDEN}
    rank, device, dtype = ranks.rank, ranks.device, torch.bfloat16
    x = torch.zeros(TOKENS - rank, HIDDEN, dtype=dtype, device=device, requires_grad=True)
    ids, weights = ids_of(rank).to(device), torch.zeros(TOKENS - rank, TOPK, device=device)
    weights.requires_grad_()

    def low(group: EPGroup) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            rows, _, routing = ll_dispatch(group, x, ids)
            return (ll_combine(group, rows, weights, routing),)

    def high(group: EPGroup) -> tuple[torch.Tensor, ...]:
        exchange = MoEDispatcher(group)
        out = exchange(x, lambda rows, counts: 2 * rows, topk_idx=ids, topk_weights=weights)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weights))

    work = low if is_low else high
    with EPGroup(comm, **size, dtype=dtype, low_latency=is_low, timeout=20) as group:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                work(group)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side):
                found = work(group)
        for seed in (10, 20, 30):
            with torch.no_grad():
                x.copy_(data(rank, seed, TOKENS - rank, HIDDEN))
                weights.copy_(data(rank, seed + 1, TOKENS - rank, TOPK).sigmoid())
                ids.copy_(data(rank, seed + 2, TOKENS - rank, EXPERTS).argsort(1)[:, :TOPK])
            graph.replay()
            wait(device)
            kept = [t.clone() for t in found]
            for one, eager_one in zip(kept, work(group), strict=True):
                require_close(f"replay {seed}", one, eager_one, 1e-9 if is_low else 2**-7)
        del graph


def main() -> int:
    about = parser(__doc__.splitlines()[0])
    about.add_argument("--small", action="store_true", help="small sizes only")
    options = about.parse_args()
    ranks = Ranks(options)
    ep.set_device(ranks.device.index if ranks.device.type == "cuda" else ranks.rank)
    comm = ep.Communicator.from_torch(ranks.gloo)
    for mode in MODES:
        for case in CASES[: 2 if options.small else None]:
            calls(ranks, comm, replace(case, mode=mode, ranks=ranks.size))
    cupy_calls(ranks, comm)
    for dtype, rtol in ((torch.float32, 2e-5), (torch.bfloat16, 2**-5)):
        work = partial(gradients, ranks, comm, dtype, rtol)
        ranks.check(f"trefoil.torch gradients {dtype}", work)
    ranks.check("trefoil.torch low latency", partial(low_latency, ranks, comm))
    for low in (True, False):
        name = "low latency" if low else "high throughput"
        ranks.check(f"trefoil.torch captured, {name}", partial(torch_captured, ranks, comm, low))
    ranks.check("communicator destroyed", comm.destroy)
    return ranks.finish({"library": str(ep.get_lib_path()), "version": str(ep.get_lib_version())})


if __name__ == "__main__":
    sys.exit(main())
