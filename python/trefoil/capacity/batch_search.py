"""A search: the plans of many batches and contexts, ranked, with the frontier of throughput
against latency. From Python:

    import trefoil
    found = trefoil.plan(moe="deepseek-v3", gpus=96, tokens="1..512", max_step_ms=50)
    found.frame().query("on_frontier")          # pandas; found.rows() are dictionaries
    found.figure().savefig("search.png")        # matplotlib
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trefoil.capacity.configuration import Configuration
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.question import Question
from trefoil.capacity.verdict import fits
from trefoil.table import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Candidate:
    question: Question
    configuration: Configuration

    @property
    def meets(self) -> bool:
        return self.configuration.verdict != "misses"

    @property
    def latency(self) -> float:
        """Seconds of an output token, or to the first one; the most likely."""
        step = self.configuration.step(self.question)
        return float("inf") if step is None else step * self.question.steps_of_latency

    @property
    def throughput(self) -> float:
        """Tokens a second of every GPU that there is, idle ones included."""
        seconds = self.configuration.gpu_seconds_per_token(self.question)
        return 0.0 if not seconds else 1 / seconds


@dataclass
class Search:
    """Plans of one model, cluster and load; they differ in tokens of a GPU and in context."""

    plans: list[CapacityPlan]
    refused: list[str] = field(default_factory=list)  # sentences of points that make no sense

    @property
    def question(self) -> Question:
        return self.plans[0].question

    @property
    def contexts(self) -> list[int]:
        return list(dict.fromkeys(p.question.context for p in self.plans))

    @property
    def batches(self) -> list[int]:
        return list(dict.fromkeys(p.question.tokens for p in self.plans))

    def candidates(self, context: int | None = None) -> Iterator[Candidate]:
        for plan in self.plans:
            if context is None or plan.question.context == context:
                for c in plan.configurations:
                    yield Candidate(plan.question, c)

    def best(self, context: int) -> Candidate | None:
        """The highest throughput of those that meet all limits."""
        meeting = [c for c in self.candidates(context) if c.meets]
        return max(meeting, key=lambda c: c.throughput, default=None)

    def frontier(self, context: int) -> list[Candidate]:
        """Of those that meet all limits: nothing is both faster for a user and gives more tokens.
        The lowest latency first."""
        found: list[Candidate] = []
        meeting = [c for c in self.candidates(context) if c.meets]
        for c in sorted(meeting, key=lambda c: (c.latency, -c.throughput)):
            if not found or c.throughput > found[-1].throughput:
                found.append(c)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One a candidate; seconds, bytes, tokens a second of a working GPU."""
        on_frontier = {id(c.configuration) for x in self.contexts for c in self.frontier(x)}
        return [row_of(c, id(c.configuration) in on_frontier) for c in self.candidates()]

    def frame(self) -> Any:
        """The rows as a pandas data frame. ImportError: without pandas."""
        return data_frame(self.rows())

    def figure(self) -> Figure:
        """Tokens a second of a GPU against latency, with the frontier; a panel a context."""
        from trefoil.capacity.search_plots import pareto

        return pareto(self)


def row_of(candidate: Candidate, on_frontier: bool) -> dict[str, Any]:
    q, c = candidate.question, candidate.configuration
    low, high = c.step_interval(q) or (None, None)
    rate = c.tokens_per_second(q)
    return {
        "cluster": q.cluster,
        "moe": q.moe,
        "load": q.load,
        "context": q.context,
        "tokens": q.tokens,
        "mode": c.mode,
        "ep": c.ep,
        "groups": c.replicas,
        "idle_gpus": q.gpus - c.used(q),
        "overlap": c.timing.overlap if c.timing else "none",
        "step_seconds": c.step(q),
        "step_low_seconds": low,
        "step_high_seconds": high,
        "latency_seconds": None if c.step(q) is None else candidate.latency,
        "tokens_per_second": rate,
        "tokens_per_second_node": None if rate is None else rate * q.gpus_per_node,
        "share_of_step": c.share(q),
        "memory_bytes": c.memory.total,
        "fits": fits(c, q),
        "meets": candidate.meets,
        "reasons": "; ".join(c.reasons) if not candidate.meets else "",
        "on_frontier": on_frontier,
        "usd_per_million_tokens": c.usd_per_million(q),
        "kwh_per_million_tokens": c.kwh_per_million(q),
        "costs": c.costs,
        "outside": c.outside,
    }


# Options that a search from Python would leave aside.
OF_THE_COMMAND = ("requests_per_s", "input_tokens", "output_tokens", "max_ttft_ms", "utilisation")
OF_THE_COMMAND += ("output", "json", "commands", "details", "crossover", "closed_form")


def plan(**options: Any) -> Search:
    """As `trefoil plan` with these options: max_step_ms=50 for --max-step-ms 50, a flag is True or
    False. Raises PlanError or SweepError with the command's sentence."""
    from trefoil.capacity.options import parser
    from trefoil.capacity.planner import Planner
    from trefoil.capacity.question import PlanError
    from trefoil.sweeping import find_program

    def refuse(text: str) -> None:
        raise PlanError(text)

    p = parser()
    p.error = refuse  # type: ignore[method-assign,assignment]
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is False:
            words.append("--no-" + option[2:])
        elif value is not None:
            words.append(f"{option}={value}")
    said = p.parse_args(words)
    for name in OF_THE_COMMAND:
        if getattr(said, name) not in (None, False):
            raise PlanError(f"{name}: of the command alone, plan() searches")
    return Planner(said, find_program()).search()
