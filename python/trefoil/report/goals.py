"""What was asked of the kernels' times, and what was measured beside it.

Goals are for 4 GPUs of one NVLink domain, hidden 7168, top-8 of 256 experts, bf16 unless the
variant says otherwise; low latency by tokens of a rank, high throughput with 4096 and at most so
many SMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trefoil.ht_rows import GOALS as HT_GOALS
from trefoil.ht_rows import TOKENS as HT_TOKENS
from trefoil.report.figures import Figure, of_one_kind

RANKS, HIDDEN, EXPERTS, TOPK = 4, 7168, 256, 8
LL_TOKENS = (1, 8, 32, 64, 128)
_FAST, _SLOW = (5.5, 6.0, 8.0, 12.0, 20.0), (4.5, 6.0, 8.5, 13.0, 23.0)
LL_GOALS: dict[tuple[str, str, str], tuple[float, ...]] = {  # (op, layout, variant) -> us by tokens
    ("dispatch", "expert-major", "plain"): _FAST,
    ("dispatch", "rank-major", "plain"): _FAST,
    ("dispatch", "expert-major", "e4m3"): (5.5, 6.0, 7.0, 9.0, 13.0),
    ("combine", "expert-major", "plain"): (4.5, 6.0, 13.0, 21.5, 38.0),
    ("combine", "expert-major", "partial"): _SLOW,
    ("combine", "rank-major", "plain"): _SLOW,
}


@dataclass(frozen=True)
class Answer:
    """One goal, and the fastest figure of the latest kind that keeps its conditions."""

    mode: str
    op: str
    layout: str
    variant: str
    tokens: int
    max_sms: int  # 0: any
    goal_us: float
    figure: Figure | None

    @property
    def reached(self) -> bool | None:
        return None if self.figure is None else self.figure.us <= self.goal_us

    @property
    def name(self) -> str:
        words = [self.op, self.layout] + ([] if self.variant == "plain" else [self.variant])
        return " ".join(words)


def of_goal_shape(figure: Figure) -> bool:
    """On any number of GPUs."""
    shape = (figure.hidden, figure.experts, figure.topk)
    return figure.is_plain and shape == (HIDDEN, EXPERTS, TOPK)


def _fastest(figures: Sequence[Figure], wanted: Answer) -> Figure | None:
    what = (wanted.mode, wanted.op, wanted.layout, wanted.variant, wanted.tokens)
    found = [
        f
        for f in figures
        if of_goal_shape(f)
        and f.ranks == RANKS
        and (f.mode, f.op, f.layout, f.variant, f.tokens) == what
        and f.seed == 1
        and (not wanted.max_sms or f.sms <= wanted.max_sms)
    ]
    return min(of_one_kind(found, "op"), key=lambda f: f.us, default=None)


def answers(figures: Sequence[Figure]) -> list[Answer]:
    """Every goal in its order, low latency first."""
    wanted = [
        Answer("ll", op, layout, variant, tokens, 0, us, None)
        for (op, layout, variant), goals in LL_GOALS.items()
        for tokens, us in zip(LL_TOKENS, goals, strict=True)
    ]
    for goal in HT_GOALS[RANKS].times:
        op, layout, *rest = goal.operation.split()
        variant = " ".join(rest) or "plain"
        wanted.append(Answer("ht", op, layout, variant, HT_TOKENS, goal.sms, goal.us, None))
    return [
        Answer(**{**w.__dict__, "figure": _fastest(figures, w)})  # the same, answered
        for w in wanted
    ]
