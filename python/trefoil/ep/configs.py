"""The C API's structs, with the names of nccl.ep. Letters: R ranks, E experts, L = ceil(E / R)
local experts, B tokens of this rank, N = max_dispatch_tokens_per_rank, K top-k, H hidden."""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any, TypeVar

from trefoil.ep._load import c
from trefoil.ep.enums import (
    Algorithm,
    CombineQuantizationRecipe,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from trefoil.ep.tensor import Tensor

_Bundle = TypeVar("_Bundle")


def _in_c(bundle: type[_Bundle]) -> type[_Bundle]:
    """The fields are the base class's, which makes and reads them without a call of Python's."""
    of: Any = bundle
    of.__signature__ = signature(bundle)
    for f in fields(of):
        delattr(bundle, f.name)
    del of.__init__
    return bundle


c.layout_info_kind(ExpertIdKind.AUTO)


# ncclEpAllocFn_t: stores the address of memory of some bytes; 0 = success.
AllocFn = CFUNCTYPE(c_int, POINTER(c_void_p), c_size_t, c_void_p)
FreeFn = CFUNCTYPE(c_int, c_void_p, c_void_p)  # ncclEpFreeFn_t


@dataclass(kw_only=True, slots=True)
class AllocConfig:
    """Addresses of the caller's allocator and deallocator (both or none), and their argument.

    Of a function made by AllocFn or FreeFn: ctypes.cast(function, ctypes.c_void_p).value. The
    caller keeps functions until the group is destroyed.
    """

    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0


@dataclass(kw_only=True, slots=True)
class GroupConfig:
    """Limits and policies, equal on all ranks but for hints, alloc and timeout_ns.

    max_token_bytes: bytes of one token row plus its scales. max_recv_tokens_per_rank (HT): 0 =
    eager, outputs are sized from the counters. timeout_ns: 0 = 100 s. enable_mask: LL only.
    """

    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


@dataclass(kw_only=True, slots=True)
class HandleConfig:
    """HT expert-major: zones are padded to the alignment, a power of two; 0 = none."""

    dispatch_output_per_expert_alignment: int = 0


@_in_c
@dataclass(kw_only=True)
class LayoutInfo(c.LayoutInfo):
    """1-D int32 or int64 tensors for counters, written in stream order.

    expert_counters [L]: LL expert-major at dispatch (int32, required), HT at update.
    src_rank_counters [R]: LL rank-major at dispatch. expert_offsets [L]: HT expert-major at
    update. recv_total_counter [1]: HT at update.
    """

    __slots__ = ()
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@_in_c
@dataclass(kw_only=True)
class DispatchInputs(c.DispatchInputs):
    """tokens [B, H]; topk_weights [B, K] f32 (LL rank-major, HT forward); scales [B, S]."""

    __slots__ = ()
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@_in_c
@dataclass(kw_only=True)
class DispatchOutputs(c.DispatchOutputs):
    """tokens: LL expert-major [L, R*N, H], LL rank-major [R, N, H], HT [slots, H].

    topk_weights f32: LL rank-major [R, N, K], HT flat [slots, K], HT expert-major [slots].
    topk_idx: LL rank-major int32 [R, N, K], HT flat int64 [slots, K].
    """

    __slots__ = ()
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@_in_c
@dataclass(kw_only=True)
class CombineInputs(c.CombineInputs):
    """tokens: shape of the dispatch output. topk_weights: HT backward. scales: NVFP4."""

    __slots__ = ()
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@_in_c
@dataclass(kw_only=True)
class CombineOutputs(c.CombineOutputs):
    """tokens [B, H]; topk_weights [B, K] f32: LL expert-major read, HT backward written."""

    __slots__ = ()
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class DispatchConfig:
    """send_only (LL): complete() receives. round_scales: DS_FP8E3M4's are powers of two."""

    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True, slots=True)
class CombineConfig:
    """send_only (LL): complete() receives."""

    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE


@dataclass(slots=True, frozen=True)
class Preflight:
    """What a group and a handle would need, per rank, or why not: reason, limit, nearest."""

    supported: bool
    reason: str
    limit: str
    nearest: int
    group_device_bytes: int
    group_shared_bytes: int
    group_host_bytes: int
    handle_device_bytes: int
    handle_shared_bytes: int
    handle_host_bytes: int
    nccl_bytes: int
