"""A capacity plan: the question, the configurations that were tried, and what was found.

Nothing in this package but the planner runs a simulation, nothing but plan_plots draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trefoil.capacity.configuration import Configuration
from trefoil.capacity.crossover import Crossover, Sample
from trefoil.capacity.question import Question


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
