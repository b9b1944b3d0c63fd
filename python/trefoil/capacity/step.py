"""The compute of one step on one GPU: operations and bytes of each kernel, and its time.

By a compute record (compute_costs.py) or, where that knows nothing, by the roofline: the larger of
operations over the tensor cores' peak rate and bytes over the memory's. No kernel is faster.

Weights are read once a pass and layer, those of an expert only if a row of the group goes to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trefoil.capacity.compute_costs import ComputeRecord
from trefoil.capacity.terms import NEUTRAL, Terms
from trefoil.capacity.whole_model import BF16, KV_BYTES, WEIGHT_BYTES, Model, other_dtype

LAYER_PARTS = ("attention", "shared experts", "routed experts", "router, norms, activations")


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, its SMs, and its NVLink."""

    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None  # None: fp8 products at the rate of bf16
    fp4_tflops: float | None = None  # None: fp4 products at the rate of fp8
    sms: int | None = None  # None: the cluster's file does not say
    nvlink_gb_per_s: float = 0.0  # 0: a plan of before
    exchange_us: float = 0.0  # of GPUs of a node, without bytes

    @property
    def fp4_rate(self) -> float:
        """Of products in fp4 over those in fp8."""
        return self.fp4_tflops / self.tflops("fp8") if self.fp4_tflops else 1.0

    def tflops(self, dtype: str) -> float:
        return self.bf16_tflops if dtype == "bf16" else self.fp8_tflops or self.bf16_tflops


@dataclass(frozen=True)
class Work:
    """What one step does on a GPU."""

    tokens: int  # of a GPU: in decode sequences times rows, prompt tokens in prefill
    context: int  # tokens that each of them sees; in prefill a prompt's length, cached ones too
    is_prefill: bool
    ep: int
    physical_experts: int
    weight_dtype: str
    kv_dtype: str
    busiest: float = 1.0  # rows of the busiest GPU's experts over the mean
    is_flat: bool = False  # dispatch leaves rows by source, not by expert: HT flat, LL rank-major
    terms: Terms = NEUTRAL
    cached: int = 0  # of a prompt's tokens: their keys and values are there already
    attention_tp: int = 1  # GPUs that compute a sequence's attention together

    @property
    def attention(self) -> Work:
        """Of attention: tokens of all GPUs that share it, a part of the heads each."""
        return replace(self, tokens=self.tokens * self.attention_tp, attention_tp=1)

    @property
    def sequences(self) -> int:
        each = self.context - self.cached if self.is_prefill else self.terms.rows
        return -(-self.tokens // each)

    @property
    def keys(self) -> float:
        """In prefill: tokens whose keys and values MLA makes of the compressed ones, cached too."""
        return self.tokens * self.context / (self.context - self.cached)


@dataclass(frozen=True)
class Part:
    """Of a step, all layers together."""

    name: str
    seconds: float
    limit: str  # "memory" or "math"
    costs: str = "roofline"  # "fitted" or "published": how much of it does not come from a roofline
    low: float | None = None  # where the record's rows say it
    high: float | None = None


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of one kernel."""

    flops: float
    bytes: float
    dtype: str = "bf16"
    kind: str = "product"  # of compute_costs.KINDS

    def peaks(self, gpu: Gpu) -> tuple[float, float]:
        """Seconds at the peaks of the tensor cores, and of the memory."""
        return self.flops / (gpu.tflops(self.dtype) * 1e12), self.bytes / (gpu.hbm_gb_per_s * 1e9)


@dataclass(frozen=True)
class Machine:
    """A GPU and what kernels reach of its peaks; no record: a roofline."""

    gpu: Gpu
    record: ComputeRecord | None = None

    @property
    def row_tile(self) -> int:
        return self.record.row_tile if self.record else 1

    def edge(self, kind: str) -> float:
        """Keys that a query of such a kernel costs beyond those that it sees."""
        known = self.record.of(kind, "bf16") if self.record else None
        return known.edge_keys if known else 0.0

    def seconds(self, cost: Cost) -> tuple[float, float, float, str]:
        """Of a kernel, the interval's ends, and where the costs come from."""
        math, memory = cost.peaks(self.gpu)
        known = self.record.of(cost.kind, cost.dtype) if self.record else None
        if known is None:
            t = max(math, memory)
            return t, t, t, "roofline"
        t = known.seconds(math, memory)
        return t, t * min(1, known.low), t * max(1, known.high), known.origin


def input_bytes(dtype: str, terms: Terms = NEUTRAL) -> float:
    """Of an element that goes into a product with such weights; products in fp4 take fp4."""
    if dtype == "fp4" and terms.fp4_rate > 1:
        return WEIGHT_BYTES["fp4"]
    return 1.0 if dtype == "fp8" else BF16


def product(rows: float, inner: int, outer: int, dtype: str) -> Cost:
    """rows x inner times inner x outer; rows in as the weights are, out in bf16."""
    weights = inner * outer * WEIGHT_BYTES[dtype]
    size = weights + rows * (input_bytes(dtype) * inner + BF16 * outer)
    return Cost(2.0 * rows * inner * outer, size, dtype)


def cast(rows: float, elements: int, dtype: str) -> list[Cost]:
    """To what a product takes: read in bf16, written."""
    if dtype != "fp8":
        return []
    return [Cost(0.0, rows * elements * (BF16 + 1), kind="elementwise")]


def activation(rows: float, width: int, dtype: str, terms: Terms = NEUTRAL) -> Cost:
    """Gate and up in, their product out as the next product takes it."""
    return Cost(0.0, rows * width * (2 * BF16 + input_bytes(dtype, terms)), kind="elementwise")


def part_of(
    name: str, machine: Machine, costs: Iterable[tuple[float, Cost]], factor: float = 1.0
) -> Part:
    """Costs one after the other, each so many times; factor: of the busiest GPU over the mean."""
    math = memory = total = low = high = 0.0
    origins = {}
    for one, cost in costs:
        times = factor * one
        m, b = cost.peaks(machine.gpu)
        t, least, most, origin = machine.seconds(cost)
        math, memory, total = math + times * m, memory + times * b, total + times * t
        low, high = low + times * least, high + times * most
        origins[origin] = origins.get(origin, 0.0) + times * t
    longest = max(origins, key=lambda o: origins[o], default="roofline")
    return Part(name, total, "math" if math > memory else "memory", longest, low, high)


def attention_costs(m: Model, w: Work, dtype: str, edge: float = 0.0) -> list[tuple[float, Cost]]:
    """Products of all layers, and attention itself. In decode MLA works on the compressed keys and
    values: kv_b is applied to queries and results, a head at a time. edge: Machine.edge."""
    costs = [
        (float(m.num_layers), product(w.keys if name == "kv_b" else w.tokens, a, b, dtype))
        for name, a, b in m.attention_products()
        if name != "kv_b" or w.is_prefill
    ]
    if m.is_mla and not w.is_prefill:
        latent = m.num_heads * m.kv_lora * (m.nope + m.v)
        rows = m.num_heads * (m.nope + m.v + 2 * m.kv_lora)
        # In bf16: engines keep the absorbed halves of kv_b in it.
        absorbed = Cost(2.0 * w.tokens * latent, BF16 * (latent + w.tokens * rows), kind="grouped")
        costs.append((float(m.num_layers), absorbed))
    for layers, seen in m.windows(w.context):
        costs.append((float(layers), attention_core(m, w, seen, edge)))
    return costs


def attention_core(m: Model, w: Work, seen: int, edge: float = 0.0) -> Cost:
    """Scores and weighted sums of one layer where a token sees up to `seen` others."""
    if m.is_mla and not w.is_prefill:
        per_pair = m.num_heads * (2 * m.kv_lora + m.rope)
    elif m.is_mla:
        per_pair = m.num_heads * (m.nope + m.rope + m.v)
    else:
        per_pair = 2 * m.num_heads * m.head
    # The i-th token of a prompt sees i, and at most a window: the mean over those not cached.
    both = _seen_by(w.context, seen) - _seen_by(w.cached, seen)
    pairs = w.tokens * (both / (w.context - w.cached) + edge)
    cache = w.sequences * seen * m.kv_elements * KV_BYTES[w.kv_dtype]
    kind = "mla-decode" if m.is_mla else "attention-decode"
    if w.is_prefill:
        kind = "attention-prefill"
    if not w.is_prefill:
        pairs = float(w.tokens * seen)
    # fp8 keys and values are multiplied in bf16 after they are read, unless the terms say fp8.
    dtype = "bf16" if w.is_prefill else w.terms.attention_dtype
    return Cost(2.0 * pairs * per_pair, cache, dtype, kind)


def _seen_by(tokens: int, window: int) -> float:
    """By the first tokens of a prompt together."""
    short = min(tokens, window)
    return short * (short + 1) / 2 + (tokens - short) * window


def hit_experts(m: Model, w: Work) -> float:
    """Of a GPU's experts in a layer, those that some token of the group goes to, on average."""
    local = -(-w.physical_experts // w.ep)
    missed = (1 - m.topk / w.physical_experts) ** (w.ep * w.tokens)
    return local * (1 - missed)


def experts_costs(m: Model, w: Work, row_tile: int) -> list[tuple[float, Cost]]:
    """Grouped products of the busiest GPU: gate and up together, then down. The tensor cores take
    an expert's rows in whole tiles: on average half a tile more than there are, at least one."""
    rows, hit, dtype = w.tokens * m.topk * w.busiest, hit_experts(m, w), w.weight_dtype
    tiles = max(1.0, rows / hit / row_tile + 0.5) if row_tile > 1 else rows / hit
    padded = hit * tiles * row_tile / (w.terms.fp4_rate if dtype == "fp4" else 1.0)
    costs = []
    for inner, outer in ((m.hidden, 2 * m.expert_hidden), (m.expert_hidden, m.hidden)):
        weights = hit * inner * outer * WEIGHT_BYTES[dtype]
        size = weights + rows * (input_bytes(dtype, w.terms) * inner + BF16 * outer)
        cost = Cost(2.0 * padded * inner * outer, size, dtype, "grouped")
        costs.append((float(m.moe_layers), cost))
    return costs


def feed_forward(tokens: int, hidden: int, width: int, dtype: str) -> list[Cost]:
    return [product(tokens, hidden, 2 * width, dtype), product(tokens, width, hidden, dtype)]


def permutation_costs(m: Model, w: Work) -> list[Cost]:
    """Flat rows to the experts' order, a copy for each of a row's experts, and their weighted sums
    back, with the largest number of rows: each of a token's experts on a GPU of its own."""
    rows = w.tokens * m.topk * w.busiest * m.hidden
    copied = 2 * input_bytes(w.weight_dtype, w.terms) * rows
    return [Cost(0.0, size, kind="elementwise") for size in (copied, 2 * BF16 * rows)]


def elementwise_costs(m: Model, w: Work, dtype: str) -> list[tuple[float, Cost]]:
    """Norms, activations, and casts to fp8, each in one pass over memory."""
    # Two norms a layer: residual and addend in, sum and normalised row out. Rotary positions of
    # queries, and the cache's new rows: in and out. The router's choice: scores in.
    norm = Cost(0.0, BF16 * 4 * w.tokens * m.hidden, kind="elementwise")
    s, a = m.shard(w.attention_tp), w.attention
    turned = s.num_heads * (m.rope if m.is_mla else m.head) + s.kv_elements
    positions = Cost(0.0, BF16 * 2 * a.tokens * turned, kind="elementwise")
    choice = Cost(0.0, 4.0 * w.tokens * m.experts, kind="elementwise")
    costs = [(2.0 * m.num_layers, norm), (1.0 * m.num_layers, positions)]
    costs.append((float(m.moe_layers), choice))
    if m.is_mla and w.is_prefill:  # keys: the part without positions and the other put together
        keys = Cost(0.0, BF16 * 2 * a.keys * s.num_heads * (m.nope + m.rope), kind="elementwise")
        costs.append((float(m.num_layers), keys))
    if w.is_flat:
        costs += [(float(m.moe_layers), cost) for cost in permutation_costs(m, w)]
    widths = {inner for _, inner, _ in s.attention_products()}
    costs += [(float(m.num_layers), c) for width in widths for c in cast(a.tokens, width, dtype)]
    rows = w.tokens * m.topk * w.busiest
    of_experts = activation(rows, m.expert_hidden, w.weight_dtype, w.terms)
    costs.append((float(m.moe_layers), of_experts))
    for layers, width in ((m.moe_layers, m.shared_hidden), (m.dense_layers, m.dense_hidden)):
        if layers and width:
            each = [activation(w.tokens, width, dtype), *cast(w.tokens, m.hidden, dtype)]
            costs += [(float(layers), cost) for cost in each]
    return costs


def exchange_seconds(m: Model, gpu: Gpu, w: Work) -> float:
    """Of all layers: rows of the GPUs that share attention are gathered before it, and its parts
    summed and scattered after it, each over NVLink in bf16."""
    if w.attention_tp == 1:
        return 0.0
    size = BF16 * (w.attention_tp - 1) * w.tokens * m.hidden
    each = size / (gpu.nvlink_gb_per_s * 1e9) + gpu.exchange_us * 1e-6
    return 2 * m.num_layers * each


def attention_part(m: Model, machine: Machine, w: Work, dtype: str) -> Part:
    shard, edge = m.shard(w.attention_tp), machine.edge("attention-prefill")
    costs = attention_costs(shard, w.attention, dtype, edge)
    p = part_of(LAYER_PARTS[0], machine, costs, w.terms.batch_imbalance)
    more = exchange_seconds(m, machine.gpu, w)
    low, high = (p.seconds if end is None else end for end in (p.low, p.high))
    return replace(p, seconds=p.seconds + more, low=low + more, high=high + more)


def parts_of(m: Model, machine: Machine, w: Work) -> list[Part]:
    """All of a step. LAYER_PARTS are those of MoE layers and what belongs to every layer."""
    dtype = other_dtype(w.weight_dtype)
    shared, dense = (
        [(float(layers), cost) for cost in feed_forward(w.tokens, m.hidden, width, dtype)]
        if layers and width
        else []
        for layers, width in ((m.moe_layers, m.shared_hidden), (m.dense_layers, m.dense_hidden))
    )
    router = (float(m.moe_layers), product(w.tokens, m.hidden, m.experts, "bf16"))
    last = w.sequences if w.is_prefill else w.tokens  # rows that become a token
    head = [(1.0, product(last, m.hidden, m.vocabulary, "bf16"))]
    parts = [
        attention_part(m, machine, w, dtype),
        part_of(LAYER_PARTS[1], machine, shared),
        part_of(LAYER_PARTS[2], machine, experts_costs(m, w, machine.row_tile)),
        part_of(LAYER_PARTS[3], machine, [router, *elementwise_costs(m, w, dtype)]),
        part_of("dense layers", machine, dense),
        part_of("head", machine, head),
    ]
    return [p for p in parts if p.seconds > 0]
