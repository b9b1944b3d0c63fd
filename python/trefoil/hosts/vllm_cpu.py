"""What vLLM lacks on its CPU platform to serve with expert parallelism: experts that take what a
dispatch brings, the choice of experts by softmax, and a method of layers that joins them."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.all2all_utils as all2all
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from vllm.distributed import get_ep_group
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import (
    DeepEPHTPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import (
    DeepEPLLPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

from trefoil.deep_ep import Buffer
from trefoil.hosts.vllm import is_native
from trefoil.hosts.vllm_native import HighThroughput, LowLatency

Tensor = torch.Tensor
BATCHED = modular.FusedMoEActivationFormat.BatchedExperts
STANDARD = modular.FusedMoEActivationFormat.Standard
_kept: dict[str, Any] = {}


def gated(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """An expert."""
    gate, up = (rows @ w1.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


class _Experts(modular.FusedMoEExpertsModular):  # type: ignore[misc]
    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weights: Any, activations: Any) -> bool:
        return weights is None and activations is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(config: Any) -> bool:
        return True


class ExpertsOfSlots(_Experts):
    """Low latency: rows [L, slots, H], the first ones of each expert. Combine weighs them."""

    @staticmethod
    def activation_format() -> Any:
        return BATCHED

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, slots: int, n: int, hidden: int, *more: Any) -> Any:
        return (0,), (0,), (more[2], slots, hidden)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *_: Any, **more: Any
    ) -> None:
        counts = more["expert_tokens_meta"].expert_num_tokens.tolist()
        for expert, count in enumerate(counts):
            output[expert, :count] = gated(hidden_states[expert, :count], w1[expert], w2[expert])


class ExpertsOfRows(_Experts):
    """Rows by token [B, H] with global ids and weights [B, K]; sums are weighed here."""

    @staticmethod
    def activation_format() -> Any:
        return STANDARD

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, rows: int, n: int, hidden: int, *more: Any) -> Any:
        return (0,), (0,), (rows, hidden)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *_: Any, **more: Any
    ) -> None:
        local = more["expert_map"][more["topk_ids"]]
        total = torch.zeros_like(output, dtype=torch.float32)
        for expert in range(len(w1)):
            rows, columns = torch.where(local == expert)
            weights = more["topk_weights"][rows, columns].float().unsqueeze(1)
            done = gated(hidden_states[rows], w1[expert], w2[expert])
            total.index_add_(0, rows, weights * done.float())
        output.copy_(total)


class EPMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Of a layer with data and expert parallelism; of others what vLLM has."""

    @property
    def is_monolithic(self) -> bool:
        return super().is_monolithic and not self.moe.moe_parallel_config.use_all2all_kernels

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self.moe.moe_parallel_config.use_all2all_kernels:
            super().process_weights_after_loading(layer)
            return
        if not is_workspace_manager_initialized():
            init_workspace_manager(torch.device("cpu"))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        parts = self._high_throughput if self.moe.use_deepep_ht_kernels else self._low_latency
        self.moe_kernel = modular.FusedMoEKernel(*parts(buffer()))

    def _low_latency(self, shared: Buffer) -> tuple[Any, Any]:
        most = {
            "max_num_tokens": self.moe.max_num_tokens,
            "num_dispatchers": shared.group_size,
        }
        sizes = most["max_num_tokens"], shared.group_size
        if is_native():
            exchange = LowLatency(shared, *sizes)
            return exchange, ExpertsOfRows(self.moe, self.moe_quant_config)
        exchange = DeepEPLLPrepareAndFinalize(shared, *sizes)
        return exchange, ExpertsOfSlots(self.moe, self.moe_quant_config, **most)

    def _high_throughput(self, shared: Buffer) -> tuple[Any, Any]:
        first = shared.rank * self.moe.num_local_experts
        size = shared.group_size
        made = HighThroughput if is_native() else DeepEPHTPrepareAndFinalize
        exchange = made(shared, size, size, rank_expert_offset=first)
        exchange.max_tokens = self.moe.max_num_tokens
        return exchange, ExpertsOfRows(self.moe, self.moe_quant_config)


def buffer() -> Buffer:
    """One for all layers of the process. Collective the first time."""
    if "buffer" not in _kept:
        _kept["buffer"] = Buffer(get_ep_group().cpu_group, low_latency_mode=True)
    return _kept["buffer"]


def topk_softmax(
    weights: Tensor, ids: Tensor, _: Tensor, logits: Tensor, renormalize: bool, bias: Tensor | None
) -> None:
    """Writes the greatest probabilities of each token, and their experts."""
    chances = torch.softmax(logits.float(), -1)
    chosen = chances if bias is None else chances + bias
    found = chosen.topk(weights.shape[1], -1).indices
    values = chances.gather(1, found)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(found)


def register() -> None:
    all2all.DeepEPLLPrepareAndFinalize = DeepEPLLPrepareAndFinalize
    all2all.DeepEPHTPrepareAndFinalize = DeepEPHTPrepareAndFinalize
    if "method" not in _kept:
        _kept["method"] = CustomOp.register_oot(name="UnquantizedFusedMoEMethod")(EPMethod)
    if "ops" not in _kept and not hasattr(torch.ops._moe_C, "topk_softmax"):
        _kept["ops"] = ops = torch.library.Library("_moe_C", "FRAGMENT")
        ops.define(
            "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) source, Tensor logits, "
            "bool renormalize, Tensor? bias) -> ()"
        )
        ops.impl("topk_softmax", topk_softmax, "CPU")
