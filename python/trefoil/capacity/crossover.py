"""From how many tokens of a GPU on HT is faster than LL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trefoil.capacity.configuration import libraries_of, operation_of


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
