"""A configuration: one mode in groups of one EP size, with its time, compute and memory.

Made from an answer of `trefoil simulate`. Times are seconds, sizes bytes, of one GPU where nothing
else is said. A layer's time is dispatch + combine of one MoE layer in one pass; a step is all of
them and the compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from trefoil.capacity.compute_costs import load as load_record
from trefoil.capacity.question import Question
from trefoil.capacity.schedule import Timing, batch_of, step_seconds
from trefoil.capacity.step import Machine, Part, Work, parts_of
from trefoil.capacity.whole_model import BF16, WEIGHT_BYTES, Model, other_dtype

OPS = ("dispatch", "combine")
SMS = 132  # of H100, H200, H800: where the cluster's file does not say


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
    library: str = "gpu"  # whose buffers; "gpu-formula", "cpu": the GPU library lacks the shape
    gpu_refuses: str = ""  # with "cpu": why
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
    step_factor: float | None = None  # of a step's time; None: no step is known


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
    compute: list[Part] = field(default_factory=list)  # of a step; []: not known
    max_tokens: int | None = None  # of a GPU, the most that fit; None: not asked
    physical_experts: int = 0  # of the group, redundant copies included; 0: a plan of before
    timings: list[Timing] = field(default_factory=list)  # of the schedules that were replayed

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
        """What lies outside what the costs were fitted to: the interval is wider for it."""
        return self.dispatch.extrapolated or self.combine.extrapolated

    @property
    def high(self) -> float:
        """The upper end of the interval, or the time itself where there is none."""
        return self.interval[1] if self.interval else self.layer

    def communication(self, q: Question) -> float:
        """Of a step."""
        return self.layer * q.passes * q.moe_layers

    @property
    def timing(self) -> Timing | None:
        """Of the fastest schedule; None: none was replayed."""
        return min(self.timings, key=lambda t: t.seconds, default=None)

    def compute_seconds(self, q: Question) -> float | None:
        """Of a step: as the caller says, by the fastest schedule, or by the record or roofline."""
        if not q.is_whole:
            return None
        if q.compute_us is not None:
            return q.compute_us * 1e-6 * q.passes * q.moe_layers
        if self.timing is not None:
            return self.timing.compute_seconds
        return sum(p.seconds for p in self.compute) if self.compute else None

    def step(self, q: Question) -> float | None:
        """By the fastest schedule; without one compute, then communication."""
        if self.timing is not None:
            return self.timing.seconds
        compute = self.compute_seconds(q)
        return None if compute is None else compute + self.communication(q)

    def step_interval(self, q: Question) -> tuple[float, float] | None:
        """By the intervals of communication and of compute."""
        if self.timing is not None and self.timing.low is not None:
            return self.timing.low, self.timing.high or self.timing.seconds
        compute, interval = self.compute_seconds(q), self.interval
        if compute is None or interval is None:
            return None
        low, high = (compute + t * q.passes * q.moe_layers for t in interval)
        return low, high

    def latency(self, q: Question) -> float | None:
        """Per output token of a sequence, or to the first one: at the upper end of the interval."""
        interval, step = self.step_interval(q), self.step(q)
        high = interval[1] if interval else step
        if high is None:
            return None
        return high * q.steps_of_latency

    def tokens_per_second(self, q: Question) -> float | None:
        """Of one GPU that works."""
        step = self.step(q)
        return None if not step else q.tokens_out / step

    def gpu_seconds_per_token(self, q: Question) -> float | None:
        """Idle GPUs included."""
        step = self.step(q)
        return None if step is None else step * q.gpus / max(1, self.used(q)) / q.tokens_out

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
        """Of a step, the part in which compute waits for communication."""
        if q.compute_us is not None:
            return self.layer / (self.layer + q.compute_us * 1e-6)
        step, compute = self.step(q), self.compute_seconds(q)
        return None if not step or compute is None else max(0.0, 1 - compute / step)

    def exposed(self, q: Question) -> float | None:
        """What a perfect overlap with the caller's compute leaves of the layer's time."""
        return None if q.compute_us is None else max(0.0, self.layer - q.compute_us * 1e-6)


def libraries_of(costs: Iterable[str]) -> list[str]:
    """Whose kernels the cost records speak for: their names begin with it."""
    return list(dict.fromkeys(name.partition("-")[0] for name in costs if name and name != "ideal"))


# ---- From answers ----


def sms_share(operation: dict[str, Any]) -> float:
    """Of an operation's time, that in which the busiest rank's SMs send or receive."""
    links = operation.get("links", {})
    return sum(links.get(name, {}).get("busiest_share", 0.0) for name in ("send", "receive"))


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
    layers = q.moe_layers + q.draft_layers
    parameters = 3 * answer["hidden"] * answer["expert_hidden"] * experts * layers
    rest = _rest_of(q.model, q, answer["tokens"]) if q.model else {}
    return Memory(
        buffers=sum(table.get(f"{kind}_bytes", 0) for kind in kinds),
        outputs=table["output_bytes"],
        weights=int(parameters * WEIGHT_BYTES[q.weight_dtype]),
        other=int(q.other_gb * 1e9),
        refused=table.get("refused", ""),
        library=table.get("library", "cpu"),
        gpu_refuses=table.get("gpu_refuses", ""),
        **rest,
    )


def _rest_of(m: Model, q: Question, tokens: int) -> dict[str, int]:
    """Memory outside the routed experts and the library, with so many tokens a GPU."""
    size = WEIGHT_BYTES[other_dtype(q.weight_dtype)]
    more = 1 + q.draft_layers / m.num_layers
    # A draft's projection takes the row and the token's embedding, side by side.
    draft = q.draft_layers * (3 * m.hidden * m.shared_hidden * size + 2 * BF16 * m.hidden**2)
    rest = {
        "attention": int(m.shard(q.attention_tp).attention * size * more),
        "shared": int(m.shared * size + m.router * BF16 + draft),
        "embeddings": int(m.embeddings * BF16),
    }
    if q.load != "training":
        w = work_of(q, tokens=tokens)
        rest["kv_cache"] = math.ceil(w.attention.sequences * q.kv_bytes_of_gpu(q.context) * more)
        rest["activations"] = m.activation_bytes(tokens, w.sequences * q.rows, q.attention_tp)
    return rest


def work_of(
    q: Question,
    tokens: int,
    ep: int = 1,
    physical_experts: int = 1,
    busiest: float = 1.0,
    is_flat: bool = False,
) -> Work:
    return Work(
        tokens=tokens,
        context=q.context,
        cached=q.cached,
        attention_tp=q.attention_tp,
        is_prefill=q.load == "prefill",
        ep=ep,
        physical_experts=physical_experts,
        weight_dtype=q.weight_dtype,
        kv_dtype=q.kv_dtype,
        busiest=busiest,
        is_flat=is_flat,
        terms=q.terms,
    )


def configuration_of(
    answer: dict[str, Any], q: Question, half: dict[str, Any] | None = None
) -> Configuration:
    """half: the same with half the tokens, which two-batch overlap needs."""
    c = Configuration(
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
        physical_experts=answer["physical_experts"],
    )
    if c.compute:
        c.timings = [_timing_of(how, c, answer, half, q) for how in q.overlaps]
        c.timings = [t for t in c.timings if t is not None]
    if c.compute and q.overlaps and not c.timings:  # one token is no two batches
        c.timings = [t for t in [_timing_of("none", c, answer, None, q)] if t is not None]
    return c


def busiest_of(answer: dict[str, Any]) -> float:
    """Rows that the busiest rank takes over the mean: as unequal is the work of the experts."""
    link = answer["dispatch"].get("links", {}).get("receive")
    return max(1.0, link["busiest_bytes"] / link["mean_bytes"]) if link else 1.0


def imbalance_of(answer: dict[str, Any], q: Question) -> float:
    """At least so unequal are experts' rows; a GPU alone waits for none."""
    return q.terms.imbalance if answer["ep"] > 1 else 1.0


def _compute_of(answer: dict[str, Any], q: Question) -> list[Part]:
    """Nothing for training: a backward pass is another matter."""
    if q.model is None or q.gpu is None or q.load == "training" or q.compute_us is not None:
        return []
    sizes = answer["tokens"], answer["ep"], answer["physical_experts"]
    is_flat = answer["layout"] in ("ht-flat", "ll-rank-major")
    machine = Machine(q.gpu, load_record(q.compute_costs))
    busiest = max(busiest_of(answer), imbalance_of(answer, q))
    return parts_of(q.model, machine, work_of(q, *sizes, busiest, is_flat))


def _timing_of(
    how: str, c: Configuration, answer: dict[str, Any], half: dict[str, Any] | None, q: Question
) -> Timing | None:
    """None: two batches without an answer for half the tokens."""
    if how == "two-batch" and (half is None or q.model is None):
        return None
    of = half if half is not None and how == "two-batch" else answer
    parts = c.compute if of is answer else _compute_of(of, q)
    ops = operation_of(of["dispatch"]), operation_of(of["combine"])
    # Rows that the busiest rank has beyond those of the replayed routing, at line rate.
    waits = max(0.0, imbalance_of(of, q) / busiest_of(of) - 1)
    longer = max(1.0, q.terms.prefill_wait / busiest_of(of)) if of["ep"] > 1 else 1.0
    n, layers = (2 if how == "two-batch" else 1), q.model.num_layers
    left = left_of(c, of, q) * (q.terms.interference if q.load == "prefill" else 1.0)

    def step(end: str) -> float:
        """The step where everything takes its most likely time, or its low or high end."""
        ends = [p if end == "seconds" else replace(p, seconds=getattr(p, end)) for p in parts]
        d, r = (getattr(o, end) + waits * o.bound for o in ops)
        batch = batch_of(ends, q.model.num_layers, q.model.moe_layers, d, r)
        batches = [batch] * n
        seconds = step_seconds(batches, layers, q.model.moe_layers, how, left)
        # A draft token's model is a layer and a head.
        drafts = q.rows - 1
        seconds += drafts * ((seconds - n * batch.head) / layers + n * batch.head)
        return seconds * longer + q.terms.host_ms * 1e-3

    is_known = all(o.low is not None for o in ops) and all(p.low is not None for p in parts)
    return Timing(
        overlap=how,
        seconds=step("seconds"),
        compute_seconds=n * sum(p.seconds for p in parts),
        communication_seconds=n * q.model.moe_layers * sum(o.seconds for o in ops),
        low=step("low") if is_known else None,
        high=step("high") if is_known else None,
    )


def left_of(c: Configuration, answer: dict[str, Any], q: Question) -> float:
    """The share of the SMs that the operations leave. DeepEP's low-latency kernels give all of them
    back between sending and receiving (its README: receiving hook): what they take is the time in
    which the busiest rank's SMs send or receive."""
    if c.sms is None:
        return 1.0
    if c.mode == "ll" and libraries_of([c.costs]) == ["deepep"]:
        ops = [answer[name] for name in OPS]
        busy = sum(o["seconds"] * sms_share(o) for o in ops)
        return max(0.05, 1 - busy / sum(o["seconds"] for o in ops))
    sms = q.gpu.sms if q.gpu else None
    return max(0.05, 1 - c.sms / (sms or SMS))
