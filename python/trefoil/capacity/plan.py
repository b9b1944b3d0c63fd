"""Capacity planning: from answers of `trefoil simulate` to configurations, verdicts and crossovers.

Nothing here runs a simulation or draws (plan_plots does). A plan is a JSON object, documented in
docs/plan.md; times are seconds, sizes bytes, of one GPU where nothing else is said. A layer's time
is dispatch + combine of one MoE layer in one pass; a step is all of them and the compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trefoil.capacity.step import Gpu, Part, Work, parts_of
from trefoil.capacity.whole_model import BF16, KV_BYTES, WEIGHT_BYTES, Model, other_dtype
from trefoil.inputs import read_text

OPS = ("dispatch", "combine")
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
    tokens: int  # of a GPU
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
    context: int = DEFAULT_CONTEXT  # tokens of a sequence
    kv_dtype: str = "bf16"
    max_step_ms: float | None = None  # limit of a step: time per output token, or to the first one
    model: Model | None = None  # all of it; None: `missing` says which key its file lacks
    missing: str = ""
    gpu: Gpu | None = None  # None: the cluster's file does not state its rates
    gpu_hour_usd: float | None = None  # the caller's: price of a GPU for an hour
    gpu_watts: float | None = None  # the caller's: power of a GPU with its share of all the rest

    @property
    def is_whole(self) -> bool:
        """A step is known: its compute, by the caller's word or the roofline."""
        return not why_no_step(self)

    @property
    def steps_to_first_token(self) -> int:
        """Prefill: a prompt longer than a step's tokens takes several."""
        return -(-self.context // self.tokens) if self.load == "prefill" else 1

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


@dataclass(frozen=True)
class Operation:
    seconds: float
    low: float | None  # about 90 % lie between; None: no interval is known
    high: float | None
    bound: float  # bytes of the busiest port over its line rate: nothing is faster
    closed_form: float
    engine: str
    limit: str
    extrapolated: str  # what lies outside the fitted range, or ""
    self_bytes: int  # of the whole EP group
    nvlink_bytes: int
    net_bytes: int
    nvlink_port_bytes: int  # of the busiest port, one way
    nic_port_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    buffers: int  # group and handle, by the sizing table
    outputs: int  # of one dispatch
    weights: int  # of the routed experts of all layers
    other: int  # the caller's
    refused: str = ""  # why the sizing table has no answer
    library: str = "gpu"  # whose buffers: the CPU library's where the GPU library lacks the shape
    attention: int = 0  # weights, as the next two
    shared: int = 0  # shared experts, layers without experts, routers
    embeddings: int = 0  # and the head
    kv_cache: int = 0
    activations: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """What takes how much, in the words of texts and pictures."""
        return {
            "routed experts": self.weights,
            "attention": self.attention,
            "shared and dense": self.shared,
            "embeddings and head": self.embeddings,
            "KV cache": self.kv_cache,
            "EP buffers": self.buffers + self.outputs,
            "activations": self.activations,
            "other": self.other,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class WhatIf:
    """The layer's time under a change of the cluster or the routing."""

    name: str  # "rail-fail 0"
    seconds: float | None  # None: it does not apply
    factor: float | None  # of the time without the change
    refusal: str = ""


@dataclass
class Configuration:
    mode: str
    ep: int
    nodes: int
    replicas: int
    sms: int | None  # None: the costs do not know SMs
    costs: str
    dispatch: Operation
    combine: Operation
    memory: Memory
    what_if: list[WhatIf] = field(default_factory=list)
    verdict: str = ""  # "cheapest", "meets", "misses"; "" without limits to meet
    reasons: list[str] = field(default_factory=list)
    compute: list[Part] = field(default_factory=list)  # of a step, by the roofline; []: not known
    max_tokens: int | None = None  # of a GPU, the most that fit; None: not asked

    @property
    def layer(self) -> float:
        return self.dispatch.seconds + self.combine.seconds

    @property
    def bound(self) -> float:
        return self.dispatch.bound + self.combine.bound

    @property
    def interval(self) -> tuple[float, float] | None:
        d, c = self.dispatch, self.combine
        if d.low is None or c.low is None or d.high is None or c.high is None:
            return None
        return d.low + c.low, d.high + c.high

    @property
    def outside(self) -> str:
        """What lies outside what the costs were fitted to: the interval does not cover it."""
        return self.dispatch.extrapolated or self.combine.extrapolated

    @property
    def high(self) -> float:
        """The upper end of the interval, or the time itself where there is none."""
        return self.interval[1] if self.interval else self.layer

    def communication(self, q: Question) -> float:
        """Of a step."""
        return self.layer * q.passes * q.moe_layers

    def compute_seconds(self, q: Question) -> float | None:
        """Of a step: as the caller says, or by the roofline."""
        if not q.is_whole:
            return None
        if q.compute_us is not None:
            return q.compute_us * 1e-6 * q.passes * q.moe_layers
        return sum(p.seconds for p in self.compute) if self.compute else None

    def step(self, q: Question) -> float | None:
        """Compute, then communication: nothing overlaps."""
        compute = self.compute_seconds(q)
        return None if compute is None else compute + self.communication(q)

    def step_interval(self, q: Question) -> tuple[float, float] | None:
        """By the interval of communication."""
        compute, interval = self.compute_seconds(q), self.interval
        if compute is None or interval is None:
            return None
        low, high = (compute + t * q.passes * q.moe_layers for t in interval)
        return low, high

    def latency(self, q: Question) -> float | None:
        """Per output token, or to the first one: at the upper end of the interval."""
        interval, step = self.step_interval(q), self.step(q)
        high = interval[1] if interval else step
        return None if high is None else high * q.steps_to_first_token

    def tokens_per_second(self, q: Question) -> float | None:
        """Of one GPU that works."""
        step = self.step(q)
        return None if not step else q.tokens / step

    def gpu_seconds_per_token(self, q: Question) -> float | None:
        """Idle GPUs included."""
        step = self.step(q)
        return None if step is None else step * q.gpus / max(1, self.used(q)) / q.tokens

    def usd_per_million(self, q: Question) -> float | None:
        """Tokens, at the caller's price."""
        seconds = self.gpu_seconds_per_token(q)
        if seconds is None or q.gpu_hour_usd is None:
            return None
        return 1e6 * seconds * q.gpu_hour_usd / 3600

    def kwh_per_million(self, q: Question) -> float | None:
        """Tokens, at the caller's power."""
        seconds = self.gpu_seconds_per_token(q)
        return None if seconds is None or q.gpu_watts is None else seconds * q.gpu_watts / 3.6

    def used(self, q: Question) -> int:
        """GPUs of q.gpus that are in a group."""
        return self.replicas * self.ep

    def share(self, q: Question) -> float | None:
        """Of communication in a step, were nothing overlapped."""
        if q.compute_us is not None:
            return self.layer / (self.layer + q.compute_us * 1e-6)
        step = self.step(q)
        return None if not step else self.communication(q) / step

    def exposed(self, q: Question) -> float | None:
        """What a perfect overlap with the caller's compute leaves of the layer's time."""
        return None if q.compute_us is None else max(0.0, self.layer - q.compute_us * 1e-6)


@dataclass(frozen=True)
class Sample:
    """The layer's time at some number of tokens, for the crossover."""

    mode: str
    ep: int
    tokens: int
    seconds: float
    low: float | None
    high: float | None
    costs: str = ""
    covers: bool = True  # False: outside what the costs were fitted to


@dataclass(frozen=True)
class Crossover:
    """From how many tokens of a GPU on HT is faster than LL, in groups of ep."""

    ep: int
    tokens: float | None  # None: not within the range that was looked at
    faster: str  # "ll" or "ht": throughout, where there is no crossover
    least: int  # the range
    most: int
    costs: tuple[str, ...] = ()  # of LL and of HT

    @property
    def libraries(self) -> list[str]:
        return libraries_of(self.costs)


@dataclass(frozen=True)
class Smallest:
    """Where no configuration fits: the smallest EP size that would, of those that the model has."""

    mode: str  # "": none does
    ep: int
    memory_bytes: int


@dataclass
class CapacityPlan:
    question: Question
    configurations: list[Configuration]
    samples: list[Sample] = field(default_factory=list)
    crossovers: list[Crossover] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)  # of `pictured`
    pictured: int | None = None  # index: the cheapest configuration, or else the fastest
    smallest: Smallest | None = None  # where nothing fits

    @property
    def chosen(self) -> Configuration | None:
        return next((c for c in self.configurations if c.verdict == "cheapest"), None)


def libraries_of(costs: Iterable[str]) -> list[str]:
    """Whose kernels the cost records speak for: their names begin with it."""
    return list(dict.fromkeys(name.partition("-")[0] for name in costs if name and name != "ideal"))


# ---- From answers ----


def operation_of(answer: dict[str, Any]) -> Operation:
    """One operation of an answer of simulate."""
    interval = answer.get("interval") or {}
    return Operation(
        seconds=answer["seconds"],
        low=interval.get("low_seconds"),
        high=interval.get("high_seconds"),
        bound=answer["bound_seconds"],
        closed_form=answer["closed_form_seconds"],
        engine=answer["engine"],
        limit=answer["limit"],
        extrapolated=interval.get("outside", ""),
        self_bytes=answer["bytes"]["self"],
        nvlink_bytes=answer["bytes"]["nvlink"],
        net_bytes=answer["bytes"]["net"],
        nvlink_port_bytes=answer["nvlink_port_bytes"],
        nic_port_bytes=answer["nic_port_bytes"],
    )


def memory_of(answer: dict[str, Any], q: Question) -> Memory:
    table = answer["memory"]
    kinds = ("group_device", "group_shared", "handle_device", "handle_shared")
    experts = -(-answer["physical_experts"] // answer["ep"])
    # An expert has three matrices of hidden x expert_hidden: gate, up, down.
    parameters = 3 * answer["hidden"] * answer["expert_hidden"] * experts * q.moe_layers
    rest = _rest_of(q.model, q, answer["tokens"]) if q.model else {}
    return Memory(
        buffers=sum(table.get(f"{kind}_bytes", 0) for kind in kinds),
        outputs=table["output_bytes"],
        weights=int(parameters * WEIGHT_BYTES[q.weight_dtype]),
        other=int(q.other_gb * 1e9),
        refused=table.get("refused", ""),
        library=table.get("library", "cpu"),
        **rest,
    )


def _rest_of(m: Model, q: Question, tokens: int) -> dict[str, int]:
    """Memory outside the routed experts and the library, with so many tokens a GPU."""
    size = WEIGHT_BYTES[other_dtype(q.weight_dtype)]
    rest = {
        "attention": int(m.attention * size),
        "shared": int(m.shared * size + m.router * BF16),
        "embeddings": int(m.embeddings * BF16),
    }
    if q.load != "training":
        w = work_of(q, tokens=tokens)
        rest["kv_cache"] = w.sequences * m.kv_bytes(q.context, q.kv_dtype)
        rest["activations"] = m.activation_bytes(tokens, w.sequences)
    return rest


def work_of(q: Question, tokens: int, ep: int = 1, physical_experts: int = 1) -> Work:
    is_prefill = q.load == "prefill"
    return Work(tokens, q.context, is_prefill, ep, physical_experts, q.weight_dtype, q.kv_dtype)


def configuration_of(answer: dict[str, Any], q: Question) -> Configuration:
    return Configuration(
        mode=answer["mode"],
        ep=answer["ep"],
        nodes=answer["ep"] // answer["ranks_per_node"],
        replicas=q.gpus // answer["ep"],
        sms=answer["sms"],
        costs=answer["costs"],
        dispatch=operation_of(answer["dispatch"]),
        combine=operation_of(answer["combine"]),
        memory=memory_of(answer, q),
        compute=_compute_of(answer, q),
    )


def _compute_of(answer: dict[str, Any], q: Question) -> list[Part]:
    """Nothing for training: a backward pass is another matter."""
    if q.model is None or q.gpu is None or q.load == "training" or q.compute_us is not None:
        return []
    return parts_of(q.model, q.gpu, work_of(q, q.tokens, answer["ep"], answer["physical_experts"]))


def sample_of(answer: dict[str, Any]) -> Sample:
    d, c = operation_of(answer["dispatch"]), operation_of(answer["combine"])
    known = d.low is not None and c.low is not None
    return Sample(
        mode=answer["mode"],
        ep=answer["ep"],
        tokens=answer["tokens"],
        seconds=d.seconds + c.seconds,
        low=d.low + c.low if known else None,
        high=d.high + c.high if known else None,
        costs=answer["costs"],
        covers=not (d.extrapolated or c.extrapolated),
    )


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


# ---- Verdicts ----


@dataclass(frozen=True)
class Miss:
    """A limit that a configuration is over."""

    option: str  # that sets the limit, "" where none can
    reason: str
    needed: float = 0.0  # the limit that it would meet, in the option's unit


def misses_of(c: Configuration, q: Question) -> list[Miss]:
    misses = []
    if q.load == "training" and c.mode == "ll":
        misses.append(Miss("", "LL has no backward pass"))
    if q.max_us is not None and c.high * 1e6 > q.max_us:
        reached = ""
        if c.layer * 1e6 <= q.max_us:
            reached = f", but its interval reaches {c.high * 1e6:.0f} us"
        reason = f"takes {c.layer * 1e6:.0f} us{reached}, over the limit of {q.max_us:g} us"
        misses.append(Miss("--max-us", reason, c.high * 1e6))
    latency = c.latency(q)
    if q.max_step_ms is not None and latency is not None and latency * 1e3 > q.max_step_ms:
        what = "to the first token" if q.load == "prefill" else "a step"
        reason = (
            f"takes up to {latency * 1e3:.3g} ms {what}, over the limit of {q.max_step_ms:g} ms"
        )
        misses.append(Miss("--max-step-ms", reason, latency * 1e3))
    if q.max_sms is not None and c.sms is not None and c.sms > q.max_sms:
        reason = f"takes {c.sms} SMs, over the limit of {q.max_sms}"
        misses.append(Miss("--max-sms", reason, c.sms))
    if c.memory.refused:
        misses.append(Miss("", f"the sizing table refuses it: {c.memory.refused}"))
    elif not fits(c, q):
        misses.append(_does_not_fit(c, q))
    return misses


def _does_not_fit(c: Configuration, q: Question) -> Miss:
    parts = sorted(c.memory.parts.items(), key=lambda part: -part[1])
    rest = sum(size for _, size in parts[2:])
    named = [f"{size / 1e9:.1f} {name}" for name, size in parts[:2]]
    if rest >= 0.05e9:
        named.append(f"{rest / 1e9:.1f} the rest")
    reason = (
        f"does not fit: needs {c.memory.total / 1e9:.1f} GB a GPU ({', '.join(named)}), over "
        f"{memory_limit(q)}"
    )
    if c.max_tokens:
        reason += f"; {c.max_tokens:,} tokens a GPU would fit"
    option = "--max-memory-gb" if q.gpu_memory_gb is None else ""
    if q.gpu_memory_gb and c.memory.total <= q.gpu_memory_gb * 1e9:
        option = "--max-memory-gb" if q.usable_gb == q.max_memory_gb else "--reserve-gb"
    needed = c.memory.total / 1e9
    if option == "--reserve-gb":
        needed = (q.gpu_memory_gb or 0) - needed
    return Miss(option, reason, needed)


def fits(c: Configuration, q: Question) -> bool:
    return q.usable_gb is None or c.memory.total <= q.usable_gb * 1e9


def context_that_fits(c: Configuration, q: Question) -> int:
    """The longest context with which as many sequences fit; 0: none, or it is not known."""
    if q.model is None or q.usable_gb is None or q.load != "decode" or c.memory.refused:
        return 0
    room = q.usable_gb * 1e9 - (c.memory.total - c.memory.kv_cache)
    low, high = 0, q.context
    while low < high:
        middle = (low + high + 1) // 2
        if q.tokens * q.model.kv_bytes(middle, q.kv_dtype) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def memory_limit(q: Question) -> str:
    if q.max_memory_gb is not None and q.usable_gb == q.max_memory_gb:
        return f"the limit of {q.max_memory_gb:g} GB"
    return f"{q.usable_gb:g} GB: {q.gpu_memory_gb:g} GB less {q.reserve_gb:g} GB of reserve"


def _price(c: Configuration, q: Question) -> tuple[float, ...]:
    """Cheapest first: GPU time of a token, idle GPUs included; where a step is not known, GPUs of a
    group, then a layer's time. Last, SMs taken from compute."""
    seconds = c.gpu_seconds_per_token(q)
    if seconds is None:
        return c.ep, c.layer, c.sms or 0
    return seconds, c.ep, c.sms or 0


def _dearer(c: Configuration, best: Configuration, q: Question) -> str:
    step, least = c.step(q), best.step(q)
    if step is not None and least is not None:
        times = _price(c, q)[0] / _price(best, q)[0]
        text = f"a token takes {times:.2f} times as much GPU time"
        if c.used(q) < q.gpus and c.used(q) < best.used(q):
            text += f" ({q.gpus - c.used(q)} GPUs idle)"
    elif c.ep > best.ep:
        return f"takes groups of {c.ep} GPUs where {best.ep} do"
    else:
        text = f"takes {c.layer / best.layer:.2f} times as long on as many GPUs"
    if len(libraries_of((c.costs, best.costs))) > 1:
        text += f" (two libraries: {c.costs} against {best.costs})"
    return text


def judge(plan: CapacityPlan) -> None:
    """Sets verdicts, reasons, and which configuration the pictures of links show."""
    q = plan.question
    fitting = []
    for c in plan.configurations:
        c.reasons = [miss.reason for miss in misses_of(c, q)]
        c.verdict = "misses" if c.reasons else "meets"
        if not c.reasons:
            fitting.append(c)
    best = min(fitting, key=lambda c: _price(c, q), default=None)
    for c in fitting:
        if c is best:
            c.verdict = "cheapest"
        elif best is not None:
            c.reasons = [_dearer(c, best, q)]
    shown = best or min(plan.configurations, key=lambda c: (not fits(c, q), c.layer), default=None)
    plan.pictured = plan.configurations.index(shown) if shown is not None else None


@dataclass(frozen=True)
class Nearest:
    """Where nothing meets the limits: one limit that, changed alone, lets a configuration in."""

    option: str
    value: float
    configuration: Configuration


def nearest_of(plan: CapacityPlan) -> list[Nearest]:
    """For each limit that alone keeps configurations out, the mildest value that lets one in."""
    q = plan.question
    found: dict[str, Nearest] = {}
    for c in plan.configurations:
        misses = misses_of(c, q)
        if len(misses) != 1 or not misses[0].option:
            continue
        miss = misses[0]
        sign = -1 if miss.option == "--reserve-gb" else 1
        old = found.get(miss.option)
        if old is None or sign * miss.needed < sign * old.value:
            found[miss.option] = Nearest(miss.option, miss.needed, c)
    return list(found.values())


# ---- Crossovers ----


def crossover_of(samples: Sequence[Sample], ep: int) -> Crossover | None:
    """Where LL's and HT's times cross, between samples straight in the logarithms of both."""
    times: dict[str, dict[int, float]] = {"ll": {}, "ht": {}}
    for s in samples:
        if s.ep == ep:
            times[s.mode][s.tokens] = s.seconds
    tokens = sorted(times["ll"].keys() & times["ht"].keys())
    if not tokens:
        return None
    gaps = [math.log(times["ll"][t] / times["ht"][t]) for t in tokens]  # > 0: HT is faster
    faster = "ht" if gaps[0] > 0 else "ll"
    costs = tuple(dict.fromkeys(s.costs for s in samples if s.ep == ep and s.costs))
    for (t0, g0), (t1, g1) in zip(
        zip(tokens, gaps, strict=True), list(zip(tokens, gaps, strict=True))[1:], strict=False
    ):
        if g0 <= 0 < g1:
            where = math.exp(math.log(t0) + (math.log(t1) - math.log(t0)) * -g0 / (g1 - g0))
            return Crossover(ep, where, "", tokens[0], tokens[-1], costs)
    return Crossover(ep, None, faster, tokens[0], tokens[-1], costs)


# ---- Files ----


def to_json(plan: CapacityPlan) -> dict[str, Any]:
    """The plan as a JSON object; sums stand beside their parts."""
    q = plan.question
    configurations = []
    for c in plan.configurations:
        low, high = c.interval or (None, None)
        configurations.append(
            {
                **asdict(c),
                "layer_seconds": c.layer,
                "layer_low_seconds": low,
                "layer_high_seconds": high,
                "layer_interval_covers": bool(c.interval) and not c.outside,
                "layer_bound_seconds": c.bound,
                "communication_seconds": c.communication(q),
                "step_seconds": c.step(q),
                "step_low_seconds": (c.step_interval(q) or (None, None))[0],
                "step_high_seconds": (c.step_interval(q) or (None, None))[1],
                "tokens_per_second": c.tokens_per_second(q),
                "usd_per_million_tokens": c.usd_per_million(q),
                "kwh_per_million_tokens": c.kwh_per_million(q),
                "idle_gpus": q.gpus - c.used(q),
                "share_of_step": c.share(q),
                "exposed_seconds": c.exposed(q),
                "memory_bytes": c.memory.total,
            }
        )
    return {
        "format": "trefoil-plan",
        "version": 1,
        "question": asdict(q),
        "configurations": configurations,
        "samples": [asdict(s) for s in plan.samples],
        "crossovers": [{**asdict(x), "costs": list(x.costs)} for x in plan.crossovers],
        "links": plan.links,
        "pictured": plan.pictured,
        "smallest": asdict(plan.smallest) if plan.smallest else None,
    }


def _configuration(data: dict[str, Any]) -> Configuration:
    known = {name: data[name] for name in ("mode", "ep", "nodes", "replicas", "sms", "costs")}
    return Configuration(
        **known,
        dispatch=Operation(**data["dispatch"]),
        combine=Operation(**data["combine"]),
        memory=Memory(**data["memory"]),
        what_if=[WhatIf(**w) for w in data["what_if"]],
        verdict=data["verdict"],
        reasons=list(data["reasons"]),
        compute=[Part(**p) for p in data.get("compute", ())],
        max_tokens=data.get("max_tokens"),
    )


def _question(data: dict[str, Any]) -> Question:
    model, gpu = data.get("model"), data.get("gpu")
    return Question(
        **{**data, "model": Model(**model) if model else None, "gpu": Gpu(**gpu) if gpu else None}
    )


def from_json(data: Any, where: str = "the plan") -> CapacityPlan:
    """The plan of a JSON object, as to_json made it. PlanError names what is wrong."""
    if not isinstance(data, dict) or data.get("format") != "trefoil-plan":
        raise PlanError(f"{where}: not a plan of trefoil plan --json (format 'trefoil-plan')")
    if data.get("version") != 1:
        raise PlanError(f"{where}: version {data.get('version')!r}; this program reads version 1")
    try:
        plan = CapacityPlan(
            question=_question(data["question"]),
            configurations=[_configuration(c) for c in data["configurations"]],
            samples=[Sample(**s) for s in data["samples"]],
            crossovers=[
                Crossover(**{**x, "costs": tuple(x.get("costs", ()))}) for x in data["crossovers"]
            ],
            links=list(data["links"]),
            pictured=data["pictured"],
            smallest=Smallest(**data["smallest"]) if data.get("smallest") else None,
        )
    except KeyError as error:
        raise PlanError(f"{where}: field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from error
    if plan.question.weight_dtype not in WEIGHT_BYTES or plan.question.kv_dtype not in KV_BYTES:
        raise PlanError(f"{where}: weight_dtype or kv_dtype is not known")
    if plan.question.load not in LOADS:
        raise PlanError(f"{where}: load {plan.question.load!r}: expected {', '.join(LOADS)}")
    return plan


def load_capacity(path: Path) -> CapacityPlan:
    try:
        return from_json(json.loads(read_text(path)), str(path))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path}: not JSON: {error}") from error
