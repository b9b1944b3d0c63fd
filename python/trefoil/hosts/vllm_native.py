"""vLLM's backends for DeepEP by the library's own layouts, for layers without quantisation.

Low latency brings rows by token: experts' kernels for these, which vLLM has for prefill, take what
a decode step brings, too. High throughput's host waits for no count of rows."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import all2all_utils, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import (
    DeepEPHTPrepareAndFinalize,
)
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
from trefoil.deep_ep.exchange import power_of_two
from trefoil.deep_ep.token_rows import TokenRows, TokenRowsGroup

Tensor = torch.Tensor
LEAST_TOKENS = 8  # of low latency's smallest group
WITHOUT_MAP = ("FlashInferExperts", "TrtLlmBf16ExpertsModular")
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


class NativeRows:
    """What both backends have: received are rows, and ids and weights [rows, K]. Entries of other
    ranks, and all of rows that nobody sent, name an expert of another rank, which vLLM's kernels
    leave out."""

    buffer: Buffer
    num_dispatchers_: int
    local_expert_global_ids: Tensor | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.overlaps = overlaps()
        self.sent: list[TokenRows | None] = [None, None]
        self.names: Tensor | None = None

    def post_init_setup(self, fused_experts: Any) -> None:
        """Refuses experts that do not ask vLLM's map where an expert lies, if they do not lie in
        one block."""
        spread = self.local_expert_global_ids is not None
        if spread and fused_experts.__class__.__name__ in WITHOUT_MAP:
            raise NotImplementedError(
                "rows by token: experts placed round robin need --moe-backend triton"
            )

    def told(self) -> list[int] | None:
        """The tokens of each rank, as far as vLLM's ranks have told each other."""
        found = get_forward_context().dp_metadata if is_forward_context_available() else None
        if found is None:
            return None
        sizes = found.local_sizes or found.num_tokens_across_dp_cpu.tolist()
        return sizes if len(sizes) == self.num_dispatchers_ else None

    def taken(self) -> TokenRows | None:
        """What was sent, once: it holds memory."""
        batch = dbo_current_ubatch_id()
        sent, self.sent[batch] = self.sent[batch], None
        return sent

    def global_ids(self, local: Tensor, num_experts: int) -> Tensor:
        """As vLLM numbers experts, by a table whose last entry is of another rank."""
        if self.names is None:
            each, rank = num_experts // self.num_dispatchers_, self.buffer.rank
            mine = self.local_expert_global_ids
            if mine is None:
                mine = torch.arange(rank * each, (rank + 1) * each, device=local.device)
            self.names = torch.cat([mine, mine.new_full((1,), 0 if rank else num_experts - 1)])
        return self.names[local]

    def _send(
        self, a1: Tensor, ids: Tensor, weights: Tensor, experts: int, later: bool
    ) -> TokenRows:
        raise NotImplementedError

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
        a1 = weighed(a1, topk_weights, apply_router_weight_on_input)
        sent = self._send(a1, topk_ids, topk_weights, num_experts, later)
        self.sent[dbo_current_ubatch_id()] = sent

        def received() -> Any:
            names = self.global_ids(sent.local_ids, num_experts)
            return sent.rows, None, None, names, sent.weights

        return sent, received

    def _combine(
        self,
        sent: TokenRows,
        later: bool,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None] | None:
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
        return sent.combine(rows, output, later=later)


class LowLatency(NativeRows, DeepEPLLPrepareAndFinalize):  # type: ignore[misc]
    """Received are [R N, H]. N is a power of two that suffices for the step, since experts' kernels
    take time for rows that nobody sent, too. Groups of all N are made at once, in the first step,
    which all ranks make at the same time and before they capture graphs."""

    @property
    def activation_format(self) -> Any:
        return modular.FusedMoEActivationFormat.Standard

    def supports_async(self) -> bool:
        """Without two micro batches an operation is one kernel that sends and receives."""
        return self.overlaps

    def group_of(self, hidden: int, experts: int) -> TokenRowsGroup:
        """That of the step."""
        sizes = [self.max_tokens_per_rank]
        while sizes[-1] > LEAST_TOKENS:
            sizes.append(power_of_two(1, -(-sizes[-1] // 2)))
        groups = {n: self.buffer.low_latency_tokens(n, hidden, experts) for n in sizes}
        told = None if self.overlaps else self.told()
        most = sizes[0] if told is None else max(told)
        return groups[min((n for n in sizes if n >= most), default=sizes[0])]

    def _send(
        self, a1: Tensor, ids: Tensor, weights: Tensor, experts: int, later: bool
    ) -> TokenRows:
        group = self.group_of(a1.shape[1], experts)
        ids = self._map_global_to_physical_ids(ids)
        return group.dispatch_tokens(a1, ids, weights, later=later)

    def prepare(self, *given: Any, **named: Any) -> Any:
        return self._begin(False, *given, **named)[1]()

    def prepare_async(self, *given: Any, **named: Any) -> Any:
        sent, received = self._begin(True, *given, **named)
        return sent.hook, received

    def _finalize(
        self, *given: Any, do_async: bool, **named: Any
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        sent = self.taken()
        assert sent is not None
        return self._combine(sent, dbo_enabled() or do_async, *given, **named), lambda: None


class HighThroughput(NativeRows, DeepEPHTPrepareAndFinalize):  # type: ignore[misc]
    """Received are as many rows as all ranks have tokens: the host does not wait to know how many
    came. With two micro batches, and for rows that are no multiple of 16 bytes, as vLLM does it."""

    max_tokens: int  # of a rank, in any step

    def _send(
        self, a1: Tensor, ids: Tensor, weights: Tensor, experts: int, later: bool
    ) -> TokenRows:
        group = self.buffer.high_throughput_tokens(self.max_tokens, a1.shape[1], experts, a1.dtype)
        told = self.told()
        return group.dispatch_tokens(a1, ids, weights, most=None if told is None else sum(told))

    def prepare_async(self, a1: Tensor, *given: Any, **named: Any) -> Any:
        if self.overlaps or a1.shape[1] * a1.element_size() % 16:
            return super().prepare_async(a1, *given, **named)
        return self._begin(False, a1, *given, **named)[1]

    def _finalize(self, *given: Any) -> Callable[[], None] | None:
        sent = self.taken()
        if sent is None:
            return super()._finalize(*given)
        *operands, do_async = given
        self._combine(sent, False, *operands)
        return (lambda: None) if do_async else None


def weighed(a1: Tensor, topk_weights: Tensor, on_input: bool) -> Tensor:
    if on_input and topk_weights.shape[1] != 1:
        raise NotImplementedError("weights on the input: with one expert a token alone")
    return a1 * topk_weights.to(a1.dtype) if on_input else a1


def make_prepare_finalize(made: Callable[..., Any], moe: Any, *arguments: Any, **named: Any) -> Any:
    """What vLLM makes, with these classes in the place of its own."""
    whole = {name: getattr(all2all_utils, name) for name in NATIVE}
    try:
        for name, native in NATIVE.items():
            setattr(all2all_utils, name, native)
        found = made(moe, *arguments, **named)
    finally:
        for name, own in whole.items():
            setattr(all2all_utils, name, own)
    if isinstance(found, HighThroughput):
        found.max_tokens = moe.max_num_tokens
    return found


NATIVE = {
    "DeepEPLLPrepareAndFinalize": LowLatency,
    "DeepEPHTPrepareAndFinalize": HighThroughput,
}


def register() -> None:
    """For layers without quantisation. Once is enough."""
    oracle: Any = importlib.import_module(ORACLE)
    if isinstance(oracle.maybe_make_prepare_finalize, partial):
        return
    whole = oracle.maybe_make_prepare_finalize
    oracle.maybe_make_prepare_finalize = partial(make_prepare_finalize, whole)
    select = oracle.select_unquantized_moe_backend
    oracle.select_unquantized_moe_backend = lambda moe_config: select(by_token(moe_config))
    method: Any = unquantized_fused_moe_method
    method.select_unquantized_moe_backend = oracle.select_unquantized_moe_backend
