"""What is planned, and what it must meet."""

from __future__ import annotations

from dataclasses import dataclass, field

from trefoil.capacity.compute_costs import ROOFLINE
from trefoil.capacity.step import Gpu
from trefoil.capacity.terms import NEUTRAL, Terms
from trefoil.capacity.whole_model import Model

DEFAULT_CONTEXT = 4096  # tokens
# What a load does in a step: default tokens of a GPU, and passes through dispatch and combine.
LOADS = {"decode": (128, 1), "prefill": (4096, 1), "training": (4096, 2)}


class PlanError(ValueError):
    """A plan cannot be made or read; the text says why."""


@dataclass(frozen=True)
class Question:
    """What is planned, and what it must meet."""

    cluster: str
    moe: str
    load: str  # a key of LOADS
    tokens: int  # of a GPU: sequences in decode
    gpus: int
    modes: list[str]
    ep_sizes: list[int]
    moe_layers: int
    compute_us: float | None = None  # the caller's: a layer's other work, one pass
    max_us: float | None = None  # limit of a layer's time
    max_memory_gb: float | None = None  # limit of a GPU's memory
    max_sms: int | None = None  # limit of SMs that an operation takes
    weight_dtype: str = "bf16"
    other_gb: float = 0.0  # the caller's: what else a GPU holds
    details: str = ""  # what else fixes the numbers
    gpu_memory_gb: float | None = None  # of the cluster's GPUs; None: its file does not say
    reserve_gb: float = 0.0  # of that, kept free: CUDA's context, NCCL, workspaces
    gpus_per_node: int = 0  # 0: a plan of before
    dispatch_dtype: str = "bf16"  # of rows in dispatch
    gpus_per_host: int = 0  # of one operating system; 0: a plan of before
    context: int = DEFAULT_CONTEXT  # tokens of a sequence
    kv_dtype: str = "bf16"
    attention_tp: int = 1  # GPUs that compute a sequence's attention together
    cached: int = 0  # prefill: of a prompt's tokens, those whose keys and values are there already
    max_step_ms: float | None = None  # limit of a step: time per output token, or to the first one
    model: Model | None = None  # all of it; None: `missing` says which key its file lacks
    missing: str = ""
    gpu: Gpu | None = None  # None: the cluster's file does not state its rates
    gpu_hour_usd: float | None = None  # the caller's: price of a GPU for an hour
    gpu_watts: float | None = None  # the caller's: power of a GPU with its share of all the rest
    compute_costs: str = ROOFLINE  # a compute record's name or file
    compute_gpu: str = ""  # that the record was measured on
    overlaps: list[str] = field(default_factory=list)  # schedules to replay; []: nothing overlaps
    terms: Terms = NEUTRAL

    @property
    def is_whole(self) -> bool:
        """A step is known: its compute, by the caller's word, a record or the roofline."""
        return not why_no_step(self)

    @property
    def steps_to_first_token(self) -> int:
        """Prefill: a prompt longer than a step's tokens takes several."""
        computed = self.context - self.cached
        together = self.tokens * self.attention_tp
        return -(-computed // together) if self.load == "prefill" else 1

    def kv_bytes_of_gpu(self, context: int) -> int:
        """Of a sequence, on each GPU that shares its attention."""
        if self.model is None:
            return 0
        return self.model.shard(self.attention_tp).kv_bytes(context, self.kv_dtype)

    @property
    def steps_of_latency(self) -> float:
        """To the first token, or per output token: draft tokens that are taken make it less."""
        return self.steps_to_first_token * self.tokens / self.tokens_out

    @property
    def draft_layers(self) -> int:
        """Of multi-token prediction, with weights and keys and values of their own; one model
        drafts all tokens."""
        return 1 if self.rows > 1 else 0

    @property
    def rows(self) -> int:
        """That a token of `tokens` is in a step: with draft tokens several."""
        return self.terms.rows if self.load == "decode" else 1

    @property
    def tokens_out(self) -> float:
        """Of a GPU and step, on average."""
        return self.tokens * (self.terms.tokens_out if self.load == "decode" else 1.0)

    @property
    def passes(self) -> int:
        return LOADS[self.load][1]

    @property
    def usable_gb(self) -> float | None:
        """What a configuration may take of a GPU; None: nothing says it."""
        if self.gpu_memory_gb is None:
            return self.max_memory_gb
        usable = max(0.0, self.gpu_memory_gb - self.reserve_gb)
        return usable if self.max_memory_gb is None else min(usable, self.max_memory_gb)


def why_no_step(q: Question) -> str:
    """Why a step is not known, or ""."""
    if q.load == "training":
        return "a training step's compute is not modelled"
    if q.compute_us is not None:
        return ""
    if q.model is None:
        return f"the file of {q.moe} does not say enough of the whole model ({q.missing})"
    if q.gpu is None:
        return f"cluster {q.cluster} does not state gpu_hbm_gb_per_s and gpu_bf16_tflops"
    return ""
