#!/usr/bin/env python3
"""SGLang's DeepEPDispatcher over trefoil.deep_ep, on the CPU: prefill (normal mode) and decode (low
latency, with and without hooks, bf16 and fp8), one batch or two at once, against the layer without
ranks.

    torchrun --nproc-per-node 2 tests/examples/sglang_dispatcher.py

Needs torch and the packages of tools/requirements-host-sglang.txt. What exists for CUDA alone is
replaced here: the GPU's properties, and the flag that DeepGEMM was found, without which the
dispatcher has no normal mode. SGLang's experts, its fp8 in normal mode and its overlap of combine
with the experts are kernels for GPUs: not covered. Exit code 1: something differs.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import trefoil.deep_ep

trefoil.deep_ep.install()  # before SGLang looks for deep_ep

from sglang.srt.layers import deep_gemm_wrapper  # noqa: E402
from sglang.srt.layers.dp_attention import set_is_extend_in_batch  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import deepep  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.runtime_context import publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

Tensor = torch.Tensor
EXPERTS, TOPK, TOKENS, HIDDEN = 8, 3, 37, 512


def expert(rows: Tensor, matrix: Tensor) -> Tensor:
    return (rows.float() @ matrix.float()).bfloat16()


def of_rows(got: Any, matrices: Tensor) -> Tensor:
    """Normal mode: for each row the sum over its experts here, weighed; -1 is no expert."""
    out = torch.zeros(got.hidden_states.shape)
    for e, matrix in enumerate(matrices):
        rows, columns = torch.where(got.topk_ids == e)
        done = expert(got.hidden_states[rows], matrix).float()
        out.index_add_(0, rows, got.topk_weights[rows, columns].unsqueeze(1) * done)
    return out.bfloat16()


def of_slots(got: Any, matrices: Tensor) -> Tensor:
    """Low latency: the first rows of each expert; combine weighs them."""
    rows = got.hidden_states
    if got.hidden_states_scale is not None:
        scales = got.hidden_states_scale.repeat_interleave(128, -1)
        rows = (rows.float() * scales).bfloat16()
    out = torch.full(rows.shape, float("nan")).bfloat16()
    for e, count in enumerate(got.masked_m.tolist()):
        out[e, :count] = expert(rows[e, :count], matrices[e])
    return out


class Layer:
    """The tokens of this rank, and what the layer without ranks makes of them."""

    def __init__(self, rank: int, batch: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.matrices = (torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5).bfloat16()
        torch.manual_seed(1 + 2 * rank + batch)
        self.x = torch.randn(tokens, HIDDEN).bfloat16()
        self.ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOPK].to(torch.int32)
        self.weights = torch.rand(tokens, TOPK)
        done = torch.stack([expert(self.x, matrix).float() for matrix in self.matrices], 1)
        chosen = done.gather(1, self.ids.long().unsqueeze(2).expand(-1, -1, HIDDEN))
        self.expected = (chosen * self.weights.unsqueeze(2)).sum(1)

    def routed(self) -> Any:
        return StandardTopKOutput(self.weights, self.ids, torch.empty(0))

    def combined(self, got: Any) -> Any:
        """What the experts here made of the rows that came."""
        mine = self.matrices.chunk(dist.get_world_size())[dist.get_rank()]
        kind, back = deepep.DeepEPLLCombineInput, of_slots
        if isinstance(got, deepep.DeepEPNormalDispatchOutput):
            kind, back = deepep.DeepEPNormalCombineInput, of_rows
            self._require_counts(got)
        return kind(back(got, mine), got.topk_ids, got.topk_weights)

    def difference(self, out: Tensor) -> float:
        """The largest, beside the largest value."""
        assert out.shape == self.x.shape and out.dtype == self.x.dtype
        if not len(out):
            return 0.0
        return float((out.float() - self.expected).abs().max() / self.expected.abs().max())

    def _require_counts(self, got: Any) -> None:
        """Of each expert's rows, rounded up as DeepGEMM wants them."""
        each = EXPERTS // dist.get_world_size()
        counts = [int((got.topk_ids == e).sum()) for e in range(each)]
        assert got.num_recv_tokens_per_expert == [-(-count // 128) * 128 for count in counts]


def dispatcher_of(hook: bool, dtype: str) -> Any:
    made = deepep.DeepEPDispatcher(
        group=dist.group.WORLD,
        router_topk=TOPK,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS // dist.get_world_size(),
        hidden_size=HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=deepep.DeepEPMode.AUTO,
        async_finish=True,
        return_recv_hook=hook,
    )
    made.set_quant_config({"dispatcher_output_dtype": dtype})
    return made


def worst_of(layers: list[Layer], hook: bool, dtype: str) -> float:
    """The micro batches' steps one after the other, as SGLang's overlap of two batches does."""
    pairs = [(layer, dispatcher_of(hook, dtype)) for layer in layers]
    for layer, dispatcher in pairs:
        dispatcher.dispatch_a(layer.x, layer.routed())
    received = [dispatcher.dispatch_b() for _, dispatcher in pairs]
    for (layer, dispatcher), got in zip(pairs, received, strict=True):
        dispatcher.combine_a(layer.combined(got))
    return max(layer.difference(dispatcher.combine_b()) for layer, dispatcher in pairs)


# Prefill?, with hooks?, what travels, the largest difference: bf16 and e4m3 round.
CASES = [
    (True, False, "bf16", 0.01),
    (False, False, "bf16", 0.01),
    (False, True, "bf16", 0.01),
    (False, False, "fp8", 0.05),
    (False, True, "fp8", 0.05),
]


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert deepep.use_deepep
    publish(ServerArgs(model_path="dummy"), role="scheduler")
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    bad = 0
    for extend, hook, dtype, bound in CASES:
        set_is_extend_in_batch(extend)
        for tokens in ([TOKENS], [rank], [TOKENS, 5]):  # rank 0 has none of its own
            layers = [Layer(rank, batch, count) for batch, count in enumerate(tokens)]
            worst = worst_of(layers, hook, dtype)
            bad += not worst < bound
            about = "normal mode" if extend else f"low latency, {dtype}"
            about += f"{', hook' if hook else ''}, {tokens} tokens"
            print(f"rank {rank}: {about}: largest difference {worst:.1e}", flush=True)
    assert isinstance(deepep.DeepEPBuffer._state().buffer, trefoil.deep_ep.Buffer)
    dist.barrier()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
