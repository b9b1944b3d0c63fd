"""A fleet for a traffic: GPUs for prefill and for decode, each with the configuration that takes
the fewest.

Demand is an average: requests arrive at random, so groups are kept below a utilisation. A prompt
waits on average for half of the step that runs when it comes, then for its own. Sequences that
decode are spread over the output's length: on average they see the input and half of the output.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trefoil.capacity.batch_search import Candidate, Search, row_of
from trefoil.capacity.options import UTILISATION, gpus_of
from trefoil.capacity.planner import Planner
from trefoil.capacity.question import PlanError, Question
from trefoil.capacity.verdict import fits

DECODE_BATCHES = "1..512"
PREFILL_BATCHES = "256,1024,4096,16384"


@dataclass(frozen=True)
class Traffic:
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    max_ttft_ms: float | None
    max_step_ms: float | None
    utilisation: float  # most that groups may be used
    cached: float  # share of input tokens whose keys and values are there already

    @property
    def decode_context(self) -> int:
        return self.input_tokens + max(1, self.output_tokens // 2)

    @property
    def longest(self) -> int:
        """Tokens of a sequence when it ends."""
        return self.input_tokens + self.output_tokens

    @property
    def computed_tokens(self) -> int:
        """Of a prompt."""
        return self.input_tokens - min(
            self.input_tokens - 1, round(self.input_tokens * self.cached)
        )

    def demand(self, load: str) -> float:
        """Tokens a second."""
        of = self.computed_tokens if load == "prefill" else self.output_tokens
        return self.requests_per_s * of


@dataclass(frozen=True)
class Part:
    """The GPUs of one load."""

    load: str
    candidate: Candidate
    groups: int
    latency: float  # seconds: to the first token, or per output token; the interval's upper end
    utilisation: float

    @property
    def gpus(self) -> int:
        return self.groups * self.candidate.configuration.ep


@dataclass
class Fleet:
    traffic: Traffic
    parts: list[Part]  # prefill, decode; [] of what cannot be met
    searches: dict[str, Search]
    misses: list[str]  # sentences

    @property
    def question(self) -> Question:
        return self.searches["decode"].question

    @property
    def is_met(self) -> bool:
        return len(self.parts) == 2 and not self.misses

    @property
    def gpus(self) -> int:
        return sum(p.gpus for p in self.parts)

    @property
    def usd_per_hour(self) -> float | None:
        price = self.question.gpu_hour_usd
        return None if price is None else price * self.gpus


def traffic_of(o: argparse.Namespace) -> Traffic:
    """PlanError says which option is missing or out of place."""
    needed = ("requests_per_s", "input_tokens", "output_tokens")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(o, n) is None]
    if missing:
        raise PlanError(f"a fleet needs a traffic: {', '.join(missing)} is missing")
    if o.requests_per_s <= 0:
        raise PlanError("--requests-per-s 0: no traffic needs no fleet")
    for name in ("tokens", "context", "load", "max_us"):
        if getattr(o, name) is not None:
            raise PlanError(f"--{name.replace('_', '-')} is not of a fleet: the traffic says it")
    utilisation = UTILISATION if o.utilisation is None else o.utilisation
    if not 0 < utilisation <= 1:
        raise PlanError(f"--utilisation {utilisation:g}: more than 0, at most 1")
    return Traffic(
        requests_per_s=o.requests_per_s,
        input_tokens=o.input_tokens,
        output_tokens=o.output_tokens,
        max_ttft_ms=o.max_ttft_ms,
        max_step_ms=o.max_step_ms,
        utilisation=utilisation,
        cached=o.cached,
    )


def options_of(o: argparse.Namespace, traffic: Traffic, load: str) -> argparse.Namespace:
    """Of the search for one load's configuration."""
    prefill = load == "prefill"
    changes = {
        "load": load,
        "tokens": PREFILL_BATCHES if prefill else DECODE_BATCHES,
        "context": str(traffic.input_tokens if prefill else traffic.decode_context),
        "cached": o.cached if prefill else 0.0,
        "max_step_ms": None if prefill else traffic.max_step_ms,
        "mode": throughput_modes(o.mode) if prefill else o.mode,
        "drafts": None if prefill else o.drafts,
        "requests_per_s": None,
    }
    return argparse.Namespace(**{**vars(o), **changes})


def throughput_modes(modes: str) -> str:
    """Of a list, HT's: LL sends every prompt token by itself. LL's where there is no other."""
    return ",".join(m for m in modes.split(",") if m.startswith("ht")) or modes


def latency_of(c: Candidate) -> float:
    """To the first token with the wait, or of an output token: at the interval's upper end."""
    q, of = c.question, c.configuration
    interval = of.step_interval(q)
    step = interval[1] if interval else of.step(q) or math.inf
    return step * (q.steps_of_latency + (0.5 if q.load == "prefill" else 0.0))


def limit_of(load: str, traffic: Traffic) -> float | None:
    return traffic.max_ttft_ms if load == "prefill" else traffic.max_step_ms


def in_time(candidates: list[Candidate], limit_ms: float | None) -> list[Candidate]:
    return [c for c in candidates if limit_ms is None or latency_of(c) * 1e3 <= limit_ms]


def fitting(search: Search) -> list[Candidate]:
    known = (c for c in search.candidates() if c.throughput > 0)
    return [c for c in known if fits(c.configuration, c.question)]


def group_rate(c: Candidate) -> float:
    """Tokens a second of a group."""
    return (c.configuration.tokens_per_second(c.question) or 0.0) * c.configuration.ep


def part_of(search: Search, traffic: Traffic) -> Part | str:
    """The fewest GPUs; or why nothing does it, with the nearest limit that works."""
    load = search.question.load
    limit_ms = limit_of(load, traffic)
    held = fitting(search)
    if not held:
        needs = min(c.configuration.memory.total for c in search.candidates()) / 1e9
        return f"{load}: nothing fits: the least is {needs:.1f} GB a GPU"
    usable = in_time(held, limit_ms)
    if not usable:
        nearest = min(held, key=latency_of)
        of = nearest.configuration
        option = "--max-ttft-ms" if load == "prefill" else "--max-step-ms"
        return (
            f"{load}: {option} {limit_ms:g} binds: {math.ceil(latency_of(nearest) * 1e3)} works, "
            f"with {of.mode.upper()} EP {of.ep}, {nearest.question.tokens:,} tokens a GPU"
        )
    demand = traffic.demand(load)
    parts = []
    for c in usable:
        rate = group_rate(c)
        groups = max(1, math.ceil(demand / (rate * traffic.utilisation)))
        parts.append(Part(load, c, groups, latency_of(c), demand / (rate * groups)))
    return min(parts, key=lambda p: (p.gpus, p.latency))


def most_requests(searches: dict[str, Search], traffic: Traffic, gpus: int) -> float:
    """A second, that so many GPUs do in whole groups of each load; 0: not a group of each."""

    def of_groups(load: str) -> dict[int, float]:
        """Requests a second of the best group of an EP size."""
        most: dict[int, float] = {}
        for c in in_time(fitting(searches[load]), limit_of(load, traffic)):
            tokens = traffic.demand(load) / traffic.requests_per_s
            rate, ep = group_rate(c) * traffic.utilisation / tokens, c.configuration.ep
            most[ep] = max(rate, most.get(ep, 0.0))
        return most

    def rate_of(groups: dict[int, float], n: int) -> float:
        return max((n // ep * rate for ep, rate in groups.items()), default=0.0)

    prefill, decode = of_groups("prefill"), of_groups("decode")
    splits = ((rate_of(prefill, n), rate_of(decode, gpus - n)) for n in range(gpus + 1))
    return max(min(rates) for rates in splits)


def takes_fewest(search: Search, traffic: Traffic, next_ep: int) -> bool:
    """Whether what was found does the traffic with fewer GPUs than one group of the next size."""
    if not any(plan.configurations for plan in search.plans):
        return False
    part = part_of(search, traffic)
    return isinstance(part, Part) and part.gpus < next_ep


def fleet_of(traffic: Traffic, searches: dict[str, Search]) -> Fleet:
    found = [part_of(searches[load], traffic) for load in ("prefill", "decode")]
    parts = [p for p in found if isinstance(p, Part)]
    return Fleet(traffic, parts, searches, [p for p in found if isinstance(p, str)])


def too_few(fleet: Fleet, gpus: int, limit: str) -> str:
    """Why these GPUs do not do it, as the option `limit` says them."""
    rate = most_requests(fleet.searches, fleet.traffic, gpus)
    instead = f"{gpus} do about {rate:.3g} requests/s"
    if not rate:
        instead = f"{gpus} hold no group of each load"
    return f"{limit} binds: {fleet.gpus} GPUs do it; {instead}"


def plan_fleet(o: argparse.Namespace, planner: Callable[[argparse.Namespace], Planner]) -> Fleet:
    traffic = traffic_of(o)
    gpus = gpus_of(o)

    def plan(o: argparse.Namespace) -> Fleet:
        def search(load: str) -> Search:
            of = planner(options_of(o, traffic, load))
            return of.search(lambda found, next_ep: takes_fewest(found, traffic, next_ep))

        return fleet_of(traffic, {load: search(load) for load in ("prefill", "decode")})

    fleet = plan(o)
    if gpus is None or (fleet.is_met and fleet.gpus <= gpus):
        return fleet
    # Larger groups than these GPUs may do it with the fewest.
    beyond = plan(argparse.Namespace(**{**vars(o), "gpus": None, "budget_hour": None}))
    if beyond.is_met and (not fleet.is_met or beyond.gpus < fleet.gpus):
        fleet = beyond
    if fleet.is_met:
        limit = f"--gpus {gpus}"
        if o.budget_hour is not None and not (o.gpus and int(o.gpus) == gpus):
            limit = f"--budget-hour {o.budget_hour:g}"
        fleet.misses.append(too_few(fleet, gpus, limit))
    return fleet


def to_json(fleet: Fleet) -> dict[str, Any]:
    parts = [
        {
            "load": p.load,
            "gpus": p.gpus,
            "groups": p.groups,
            "latency_seconds": p.latency,
            "utilisation": p.utilisation,
            "configuration": row_of(p.candidate, True),
        }
        for p in fleet.parts
    ]
    return {
        "format": "trefoil-fleet",
        "version": 1,
        "traffic": vars(fleet.traffic),
        "parts": parts,
        "gpus": fleet.gpus if fleet.is_met else None,
        "usd_per_hour": fleet.usd_per_hour if fleet.is_met else None,
        "misses": fleet.misses,
    }
