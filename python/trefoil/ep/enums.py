"""Enums of the C API, with the names of nccl.ep."""

from enum import IntEnum


class Algorithm(IntEnum):
    """LOW_LATENCY (LL) for decoding, HIGH_THROUGHPUT (HT) for prefill and training."""

    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    """Where received rows lie: LL EXPERT_MAJOR or RANK_MAJOR, HT EXPERT_MAJOR or FLAT."""

    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    """FWD, or BWD (HT only): gradients, with the routing of the last update."""

    FWD = 0
    BWD = 1


class OverflowPolicy(IntEnum):
    """HT, a rank over max_recv_tokens_per_rank: TRAP receives nothing, DROP keeps the first."""

    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(IntEnum):
    """AUTO: windows are used where given; ON: they are required."""

    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(IntEnum):
    """Received topk_idx: LOCAL ids in [0, L) (AUTO too), or GLOBAL ids in [0, E)."""

    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    """FWD: the caller's scales travel beside the rows; DS_FP8E3M4 (LL): bf16 in, E4M3 out."""

    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(IntEnum):
    """NVFP4 (LL, experimental): rows cross the wire as E2M1."""

    NONE = 0
    NVFP4 = 1


class DataType(IntEnum):
    """ncclDataType_t."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11
    FLOAT4X2 = 12
