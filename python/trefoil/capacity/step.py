"""The compute of one step on one GPU by the roofline: for each part the larger of its operations
over the tensor cores' peak rate and its bytes over the memory's. Nothing is measured: no kernel is
faster, and real ones are slower.

Routed experts get equally many rows on every GPU. Weights are read once a pass and layer, those of
an expert only if a row of the group goes to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trefoil.capacity.whole_model import BF16, KV_BYTES, WEIGHT_BYTES, Model, other_dtype


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU."""

    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None  # None: fp8 products at the rate of bf16

    def tflops(self, dtype: str) -> float:
        return self.bf16_tflops if dtype == "bf16" else self.fp8_tflops or self.bf16_tflops


@dataclass(frozen=True)
class Work:
    """What one step does on a GPU."""

    tokens: int  # of a GPU: sequences in decode, prompt tokens in prefill
    context: int  # tokens that each of them sees; in prefill a prompt's length
    is_prefill: bool
    ep: int
    physical_experts: int
    weight_dtype: str
    kv_dtype: str

    @property
    def sequences(self) -> int:
        return -(-self.tokens // self.context) if self.is_prefill else self.tokens


@dataclass(frozen=True)
class Part:
    """Of a step, all layers together."""

    name: str
    seconds: float
    limit: str  # "memory" or "math"


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of one kernel."""

    flops: float
    bytes: float
    dtype: str = "bf16"

    def seconds(self, gpu: Gpu) -> tuple[float, float]:
        """At the peaks of the tensor cores, and of the memory."""
        return self.flops / (gpu.tflops(self.dtype) * 1e12), self.bytes / (gpu.hbm_gb_per_s * 1e9)


def product(rows: float, inner: int, outer: int, dtype: str) -> Cost:
    """rows x inner times inner x outer; rows in and out in bf16."""
    weights = inner * outer * WEIGHT_BYTES[dtype]
    return Cost(2.0 * rows * inner * outer, weights + BF16 * rows * (inner + outer), dtype)


def part_of(name: str, gpu: Gpu, costs: Iterable[tuple[float, Cost]]) -> Part:
    """Costs one after the other, each so many times."""
    math, memory, total = 0.0, 0.0, 0.0
    for times, cost in costs:
        m, b = cost.seconds(gpu)
        math, memory, total = math + times * m, memory + times * b, total + times * max(m, b)
    return Part(name, total, "math" if math > memory else "memory")


def attention_costs(m: Model, w: Work, dtype: str) -> list[tuple[float, Cost]]:
    """Products of all layers, and attention itself. In decode MLA works on the compressed keys and
    values: kv_b is applied to queries and results, a head at a time."""
    costs = [
        (float(m.num_layers), product(w.tokens, a, b, dtype))
        for name, a, b in m.attention_products()
        if name != "kv_b" or w.is_prefill
    ]
    if m.is_mla and not w.is_prefill:
        latent = m.num_heads * m.kv_lora * (m.nope + m.v)
        rows = m.num_heads * (m.nope + m.v + 2 * m.kv_lora)
        # In bf16: engines keep the absorbed halves of kv_b in it.
        absorbed = Cost(2.0 * w.tokens * latent, BF16 * (latent + w.tokens * rows))
        costs.append((float(m.num_layers), absorbed))
    for layers, seen in m.windows(w.context):
        costs.append((float(layers), attention_core(m, w, seen)))
    return costs


def attention_core(m: Model, w: Work, seen: int) -> Cost:
    """Scores and weighted sums of one layer where a token sees up to `seen` others."""
    if m.is_mla and not w.is_prefill:
        per_pair = m.num_heads * (2 * m.kv_lora + m.rope)
    elif m.is_mla:
        per_pair = m.num_heads * (m.nope + m.rope + m.v)
    else:
        per_pair = 2 * m.num_heads * m.head
    # A prompt's token t of c sees t + 1, and at most a window: the mean over the prompt.
    c = w.context
    pairs = w.tokens * (seen * (seen + 1) / 2 + (c - seen) * seen) / c
    cache = w.sequences * seen * m.kv_elements * KV_BYTES[w.kv_dtype]
    if not w.is_prefill:
        pairs = float(w.tokens * seen)
    return Cost(2.0 * pairs * per_pair, cache)


def hit_experts(m: Model, w: Work) -> float:
    """Of a GPU's experts in a layer, those that some token of the group goes to, on average."""
    local = -(-w.physical_experts // w.ep)
    missed = (1 - m.topk / w.physical_experts) ** (w.ep * w.tokens)
    return local * (1 - missed)


def experts_costs(m: Model, w: Work) -> list[tuple[float, Cost]]:
    """Grouped products: gate and up together, then down."""
    rows, hit, dtype = w.tokens * m.topk, hit_experts(m, w), w.weight_dtype
    costs = []
    for inner, outer in ((m.hidden, 2 * m.expert_hidden), (m.expert_hidden, m.hidden)):
        weights = hit * inner * outer * WEIGHT_BYTES[dtype]
        size = weights + BF16 * rows * (inner + outer)
        costs.append((float(m.moe_layers), Cost(2.0 * rows * inner * outer, size, dtype)))
    return costs


def feed_forward(tokens: int, hidden: int, width: int, dtype: str) -> list[Cost]:
    return [product(tokens, hidden, 2 * width, dtype), product(tokens, width, hidden, dtype)]


def parts_of(m: Model, gpu: Gpu, w: Work) -> list[Part]:
    dtype = other_dtype(w.weight_dtype)
    kinds = ((m.moe_layers, m.shared_hidden), (m.dense_layers, m.dense_hidden))
    shared = [
        (float(layers), cost)
        for layers, width in kinds
        if layers and width
        for cost in feed_forward(w.tokens, m.hidden, width, dtype)
    ]
    router = product(w.tokens, m.hidden, m.experts, "bf16")
    # Two norms a layer: residual and addend in, sum and normalised row out.
    norm = Cost(0.0, BF16 * 4 * w.tokens * m.hidden)
    last = w.sequences if w.is_prefill else w.tokens  # rows that become a token
    parts = [
        part_of("attention", gpu, attention_costs(m, w, dtype)),
        part_of("shared experts and dense layers", gpu, shared),
        part_of("routed experts", gpu, experts_costs(m, w)),
        part_of(
            "router and norms", gpu, [(float(m.moe_layers), router), (2.0 * m.num_layers, norm)]
        ),
        part_of("head", gpu, [(1.0, product(last, m.hidden, m.vocabulary, "bf16"))]),
    ]
    return [p for p in parts if p.seconds > 0]
