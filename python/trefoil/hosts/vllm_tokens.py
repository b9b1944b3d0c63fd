"""vLLM's deepep_low_latency with rows by token: experts' kernels for rows by token, which vLLM has
for prefill, take what a decode step brings, too. Layers without quantisation alone."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import all2all_utils, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import (
    DeepEPLLPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
)

from trefoil.deep_ep import Buffer
from trefoil.deep_ep.low_latency import TokenRows

Tensor = torch.Tensor
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.unquantized"


class ByToken(FusedMoEParallelConfig):  # type: ignore[misc]
    """Asks for experts that take rows by token."""

    @property
    def use_batched_activation_format(self) -> bool:
        return False


def by_token(moe_config: Any) -> Any:
    """The same, of class ByToken, for low latency."""
    if not moe_config.moe_parallel_config.use_deepep_ll_kernels:
        return moe_config
    found = copy.copy(moe_config)
    found.moe_parallel_config = copy.copy(moe_config.moe_parallel_config)
    found.moe_parallel_config.__class__ = ByToken
    return found


def overlaps() -> bool:
    """Whether vLLM overlaps two micro batches."""
    return bool(get_current_vllm_config().parallel_config.enable_dbo)


class TokensPrepareAndFinalize(DeepEPLLPrepareAndFinalize):  # type: ignore[misc]
    """A token's row comes once to each rank that has experts of it. Received are [R N, H], ids and
    weights [R N, K]; entries of other ranks, and all of rows that nobody sent, name an expert of
    another rank, which vLLM's kernels leave out."""

    buffer: Buffer

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.overlaps = overlaps()
        self.sent: list[TokenRows | None] = [None, None]
        self.names: Tensor | None = None

    @property
    def activation_format(self) -> Any:
        return modular.FusedMoEActivationFormat.Standard

    def supports_async(self) -> bool:
        """Without two micro batches an operation is one kernel that sends and receives."""
        return self.overlaps

    def post_init_setup(self, fused_experts: Any) -> None:
        pass

    def global_ids(self, local: Tensor, num_experts: int) -> Tensor:
        """As vLLM numbers experts, by a table whose last entry is of another rank."""
        if self.names is None:
            each, rank = num_experts // self.num_dispatchers_, self.buffer.rank
            mine = self.local_expert_global_ids
            if mine is None:
                mine = torch.arange(rank * each, (rank + 1) * each, device=local.device)
            self.names = torch.cat([mine, mine.new_full((1,), 0 if rank else num_experts - 1)])
        return self.names[local]

    def _begin(
        self,
        later: bool,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[TokenRows, Callable[[], Any]]:
        """What was sent, and what experts take of it, once it is received."""
        if quant_config.quant_dtype is not None:
            raise NotImplementedError("rows by token: layers with quantisation have rows by expert")
        group = self.buffer.low_latency_tokens(self.max_tokens_per_rank, a1.shape[1], num_experts)
        ids = self._map_global_to_physical_ids(topk_ids)
        a1 = weighed(a1, topk_weights, apply_router_weight_on_input)
        sent = group.dispatch_tokens(a1, ids, topk_weights, later=later)
        self.sent[dbo_current_ubatch_id()] = sent

        def received() -> Any:
            names = self.global_ids(sent.local_ids, num_experts)
            return sent.rows, None, None, names, sent.weights

        return sent, received

    def prepare(self, *given: Any, **named: Any) -> Any:
        return self._begin(False, *given, **named)[1]()

    def prepare_async(self, *given: Any, **named: Any) -> Any:
        sent, received = self._begin(True, *given, **named)
        return sent.hook, received

    def _finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
        do_async: bool,
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        sent = self.sent[dbo_current_ubatch_id()]
        assert sent is not None
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        dbo_maybe_run_recv_hook()
        hook = sent.combine(rows, output, later=dbo_enabled() or do_async)
        return hook, lambda: None


def weighed(a1: Tensor, topk_weights: Tensor, on_input: bool) -> Tensor:
    if on_input and topk_weights.shape[1] != 1:
        raise NotImplementedError("weights on the input: with one expert a token alone")
    return a1 * topk_weights.to(a1.dtype) if on_input else a1


def make_prepare_finalize(made: Callable[..., Any], moe: Any, *arguments: Any, **named: Any) -> Any:
    """What vLLM makes, with rows by token in the place of low latency's rows by expert."""
    whole = all2all_utils.DeepEPLLPrepareAndFinalize
    all2all_utils.DeepEPLLPrepareAndFinalize = TokensPrepareAndFinalize
    try:
        return made(moe, *arguments, **named)
    finally:
        all2all_utils.DeepEPLLPrepareAndFinalize = whole


def register() -> None:
    """Layers without quantisation get rows by token. Once is enough."""
    oracle: Any = importlib.import_module(ORACLE)
    if isinstance(oracle.maybe_make_prepare_finalize, partial):
        return
    whole = oracle.maybe_make_prepare_finalize
    oracle.maybe_make_prepare_finalize = partial(make_prepare_finalize, whole)
    select = oracle.select_unquantized_moe_backend
    oracle.select_unquantized_moe_backend = lambda moe_config: select(by_token(moe_config))
    method: Any = unquantized_fused_moe_method
    method.select_unquantized_moe_backend = oracle.select_unquantized_moe_backend
