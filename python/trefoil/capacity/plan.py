"""Capacity planning: from answers of `trefoil simulate` to configurations, verdicts and crossovers.

Nothing here runs a simulation (trefoil.planner does) or draws (trefoil.capacity_plots). A plan is a
JSON object, documented in docs/plan.md; times are seconds, sizes bytes, of one GPU where
nothing else is said. A layer's time is dispatch + combine of one MoE layer in one pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OPS = ("dispatch", "combine")
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
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
    reserve_gb: float = 0.0  # of that, kept free: CUDA's context, NCCL, activations

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
    weights: int  # of the experts of all layers
    other: int
    refused: str = ""  # why the sizing table has no answer
    library: str = "gpu"  # whose buffers: the CPU library's where the GPU library lacks the shape

    @property
    def total(self) -> int:
        return self.buffers + self.outputs + self.weights + self.other


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

    def step(self, q: Question) -> float:
        return self.layer * q.passes * q.moe_layers

    def share(self, q: Question) -> float | None:
        """Of a step, were nothing overlapped."""
        if q.compute_us is None:
            return None
        return self.layer / (self.layer + q.compute_us * 1e-6)

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
    return Memory(
        buffers=sum(table.get(f"{kind}_bytes", 0) for kind in kinds),
        outputs=table["output_bytes"],
        weights=int(parameters * WEIGHT_BYTES[q.weight_dtype]),
        other=int(q.other_gb * 1e9),
        refused=table.get("refused", ""),
        library=table.get("library", "cpu"),
    )


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
    )


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


# ---- Verdicts ----


def _misses(c: Configuration, q: Question) -> list[str]:
    """Why a configuration does not do, a sentence a reason."""
    reasons = []
    if q.load == "training" and c.mode == "ll":
        reasons.append("LL has no backward pass")
    if q.max_us is not None and c.high * 1e6 > q.max_us:
        if c.layer * 1e6 > q.max_us:
            reasons.append(f"takes {c.layer * 1e6:.0f} us, over the limit of {q.max_us:g} us")
        else:
            reasons.append(
                f"takes {c.layer * 1e6:.0f} us, but its interval reaches {c.high * 1e6:.0f} us, "
                f"over the limit of {q.max_us:g} us"
            )
    if q.max_sms is not None and c.sms is not None and c.sms > q.max_sms:
        reasons.append(f"takes {c.sms} SMs, over the limit of {q.max_sms}")
    if c.memory.refused:
        reasons.append(f"the sizing table refuses it: {c.memory.refused}")
    elif not fits(c, q):
        m = c.memory
        reasons.append(
            f"does not fit: needs {m.total / 1e9:.1f} GB a GPU ({m.weights / 1e9:.1f} weights, "
            f"{(m.buffers + m.outputs) / 1e9:.1f} buffers and outputs"
            f"{f', {m.other / 1e9:.1f} other' if m.other else ''}), over {memory_limit(q)}"
        )
    return reasons


def fits(c: Configuration, q: Question) -> bool:
    return q.usable_gb is None or c.memory.total <= q.usable_gb * 1e9


def memory_limit(q: Question) -> str:
    if q.max_memory_gb is not None and q.usable_gb == q.max_memory_gb:
        return f"the limit of {q.max_memory_gb:g} GB"
    return f"{q.usable_gb:g} GB: {q.gpu_memory_gb:g} GB less {q.reserve_gb:g} GB of reserve"


def _price(c: Configuration) -> tuple[float, ...]:
    """Cheapest first: GPUs of a group, then time, then SMs taken from compute."""
    return c.ep, c.layer, c.sms or 0


def _dearer(c: Configuration, best: Configuration) -> str:
    if c.ep > best.ep:
        return f"takes groups of {c.ep} GPUs where {best.ep} do"
    text = f"takes {c.layer / best.layer:.2f} times as long on as many GPUs"
    if len(libraries_of((c.costs, best.costs))) > 1:
        text += f" (two libraries: {c.costs} against {best.costs})"
    return text


def judge(plan: CapacityPlan) -> None:
    """Sets verdicts, reasons, and which configuration the pictures of links show."""
    q = plan.question
    fitting = []
    for c in plan.configurations:
        c.reasons = _misses(c, q)
        c.verdict = "misses" if c.reasons else "meets"
        if not c.reasons:
            fitting.append(c)
    best = min(fitting, key=_price, default=None)
    for c in fitting:
        if c is best:
            c.verdict = "cheapest"
        elif best is not None:
            c.reasons = [_dearer(c, best)]
    shown = best or min(plan.configurations, key=lambda c: (not fits(c, q), c.layer), default=None)
    plan.pictured = plan.configurations.index(shown) if shown is not None else None


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
                "step_seconds": c.step(q),
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
    )


def from_json(data: Any, where: str = "the plan") -> CapacityPlan:
    """The plan of a JSON object, as to_json made it. PlanError names what is wrong."""
    if not isinstance(data, dict) or data.get("format") != "trefoil-plan":
        raise PlanError(f"{where}: not a plan of trefoil plan --json (format 'trefoil-plan')")
    if data.get("version") != 1:
        raise PlanError(f"{where}: version {data.get('version')!r}; this program reads version 1")
    try:
        plan = CapacityPlan(
            question=Question(**data["question"]),
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
    if plan.question.load not in LOADS:
        raise PlanError(f"{where}: load {plan.question.load!r}: expected {', '.join(LOADS)}")
    return plan


def load_capacity(path: Path) -> CapacityPlan:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path}: not JSON: {error}") from error
