"""Which configurations meet the limits, which is the cheapest, and what would let others in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trefoil.capacity.configuration import Configuration, libraries_of
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.question import Question


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
        more = 1 + q.draft_layers / q.model.num_layers
        if q.tokens * q.attention_tp * q.kv_bytes_of_gpu(middle) * more <= room:
            low = middle
        else:
            high = middle - 1
    return low


def memory_limit(q: Question) -> str:
    if q.max_memory_gb is not None and q.usable_gb == q.max_memory_gb:
        return f"the limit of {q.max_memory_gb:g} GB"
    return f"{q.usable_gb:g} GB"


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
class Least:
    """Of what a limit is on: the least that was found, and it is over."""

    limit: str  # "--max-us 10"
    value: float
    unit: str
    question: Question
    configuration: Configuration


def least_of(found: Sequence[tuple[Question, Configuration]]) -> list[Least]:
    """Of the limits that all are over; of those alone that fit the memory, where there are some."""
    q = found[0][0]
    found = [(q, c) for q, c in found if fits(c, q)] or found
    limits = {
        "--max-us": (q.max_us, "us", lambda q, c: c.high * 1e6),
        "--max-step-ms": (q.max_step_ms, "ms", lambda q, c: (c.latency(q) or math.inf) * 1e3),
        "--max-sms": (q.max_sms, "SMs", lambda q, c: c.sms or math.inf),
        "memory": (q.usable_gb, "GB a GPU", lambda q, c: _least_gb(c)),
    }
    over = []
    for name, (limit, unit, value_of) in limits.items():
        if limit is None:
            continue
        value, at = min((value_of(*pair), i) for i, pair in enumerate(found))
        if limit < value < math.inf:
            text = f"{name} of {limit:g} GB" if name == "memory" else f"{name} {limit:g}"
            over.append(Least(text, value, unit, *found[at]))
    return over


def _least_gb(c: Configuration) -> float:
    return math.inf if c.memory.refused else c.memory.total / 1e9


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
