"""The planned matrix of measurements of our kernels, and its order (docs/measure.md).

A point is one shape under one set of circumstances; `trefoil bench --points` runs it. Points are
grouped into stages, the most useful first, so that a campaign that ends early has answered most:
the goals, what the costs are fitted to, then what they are scored on, first of that what no
campaign had before. The parts are fixed here and in validate/data/campaign/*.split.json before they
are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

LL_TOKENS_EVEN = (2, 4, 8, 16, 32, 64, 128)
LL_TOKENS_ODD = (1, 5, 27, 101)
HT_TOKENS_EVEN = (512, 1024, 2048, 4096, 8192)
HT_TOKENS_ODD = (1001, 3001, 6001)
HIDDEN_SIZES = (2048, 4096)  # beside 7168
TOPKS = (1, 2, 4, 16)  # beside 8
SMS = (4, 8, 12, 16, 20, 24, 28)  # beside 32, what high throughput takes unless told otherwise
SKEWED: tuple[dict[str, Any], ...] = (
    {"routing": "zipf", "skew": 1.2},
    {"routing": "hot-rank", "skew": 8.0},
    {"routing": "hot-expert", "skew": 60.0},
    {"ragged": 1.0},
    {"routing": "zipf", "skew": 0.8},
    {"routing": "hot-rank", "skew": 1000.0},
    {"ragged": 0.5, "empty_ranks": 1},
)
PREDICTED_SMS = 24  # of the dated predictions for 8 GPUs
START_SKEWS_US = (5.0, 20.0, 100.0)
UNSEEN: tuple[dict[str, Any], ...] = (  # values that no campaign had when the model was chosen
    {"hidden": 2560},
    {"hidden": 6656},
    {"topk": 3},
    {"topk": 5},
    {"topk": 10},
    {"experts": 64},
    {"routing": "zipf", "skew": 0.3},
    {"routing": "zipf", "skew": 1.4},
    {"routing": "hot-rank", "skew": 5.0},
    {"routing": "hot-rank", "skew": 30.0},
    {"routing": "hot-expert", "skew": 10.0},
    {"ragged": 0.7},
    {"seed": 9},
    {"start_skew_us": 15.0},
    {"start_skew_us": 35.0},
)
UNSEEN_SMS = (5, 9, 13, 18, 22, 26)
ONE_WAY = {"routing": "hot-rank", "skew": 1000.0}  # all rows go to rank 0
LL, HT, HT_EXPERT = "ll-expert-major", "ht-flat", "ht-expert-major"
HT_DEFAULT_SMS = 28
LL_DEFAULT_SMS = 132


@dataclass(frozen=True)
class Point:
    gpus: int
    mode: str
    tokens: int  # of a full rank
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    variant: str = "plain"  # "e4m3", "partial", "fp8", "backward"
    routing: str = "uniform"
    skew: float = 0.0
    ragged: float = 0.0
    empty_ranks: int = 0
    sms: int = 0  # 0: the library's choice
    start_skew_us: float = 0.0
    background: str = "nothing"  # "copies", "copies-from-0", "gemm"
    seed: int = 1
    iterations: int = 200

    @property
    def asked(self) -> dict[str, Any]:
        """What bench reads: all but the number of GPUs, which a process has one of."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gpus"}

    @property
    def key(self) -> str:
        """The same for the same point, whatever stage it came from."""
        return json.dumps({"gpus": self.gpus, **self.asked}, sort_keys=True)


def point_of(gpus: int, asked: dict[str, Any]) -> Point:
    return Point(gpus=gpus, **asked)


@dataclass(frozen=True)
class Stage:
    name: str
    points: tuple[Point, ...]


def _ll(gpus: int, tokens: int, **more: Any) -> Point:
    return Point(gpus, LL, tokens, **more)


def _ht(gpus: int, tokens: int, mode: str = HT, **more: Any) -> Point:
    return Point(gpus, mode, tokens, iterations=60 if tokens <= 4096 else 40, **more)


def _goals(g: int) -> Iterator[Point]:
    """The tables of goals: what is asked of the kernels by name."""
    for tokens in (128, 1, 8, 32, 64):
        yield _ll(g, tokens)
    for mode in (HT, HT_EXPERT):
        yield _ht(g, 4096, mode)
    yield _ht(g, 4096, variant="fp8")
    for tokens in (128, 8):
        yield _ll(g, tokens, variant="e4m3")
        yield _ll(g, tokens, variant="partial")
    yield _ht(g, 8192)
    for mode in (HT, HT_EXPERT):
        yield _ht(g, 4096, mode, variant="backward")


def _sizes(g: int) -> Iterator[Point]:
    for tokens in LL_TOKENS_EVEN:
        yield _ll(g, tokens)
    for tokens in HT_TOKENS_EVEN:
        yield _ht(g, tokens)
    for tokens in HT_TOKENS_EVEN if g >= 8 else ():
        yield _ht(g, tokens, sms=PREDICTED_SMS)
    for tokens in LL_TOKENS_ODD:
        yield _ll(g, tokens)
    for tokens in HT_TOKENS_ODD:
        yield _ht(g, tokens)


def _fitted_shapes(g: int) -> Iterator[Point]:
    """So that the costs of a row, of its bytes and of its places can be told apart."""
    for tokens in (32, 64):
        yield _ll(g, tokens, hidden=2048)
        for topk in (4, 1):
            yield _ll(g, tokens, topk=topk)
    for sms in (8, 16):
        yield _ht(g, 4096, hidden=2048, sms=sms)
        yield _ht(g, 4096, topk=2, sms=sms)


def _unseen(g: int) -> Iterator[Point]:
    for how in UNSEEN:
        yield _ll(g, 128, **how)
        yield _ht(g, 4096, **how)
    for how in UNSEEN[:4]:
        yield _ll(g, 80, **how)
        yield _ht(g, 2560, **how)
    for tokens in (12, 40, 80, 112):
        yield _ll(g, tokens)
    for tokens in (1280, 1536, 2560, 5120, 7168):
        yield _ht(g, tokens)
    for sms in UNSEEN_SMS:
        yield _ht(g, 4096, sms=sms)
    for sms in (48, 112):
        yield _ll(g, 128, sms=sms)
        yield _ll(g, 80, sms=sms)
    yield _ht(g, 4096, routing="zipf", skew=1.4, sms=10)
    yield _ht(g, 5120, hidden=2560, sms=14)
    yield from _unseen_background(g)


def _unseen_background(g: int) -> Iterator[Point]:
    """Copies over ports that rows need and over ports that none needs, and products."""
    for tokens in (40, 112):
        yield _ll(g, tokens, background="copies")
    yield _ll(g, 128, topk=3, background="copies")
    yield _ll(g, 112, background="copies-from-0")
    yield _ll(g, 112, background="copies-from-0", **ONE_WAY)
    yield _ll(g, 112, sms=64, background="gemm")
    yield _ll(g, 80, sms=112, background="gemm")
    yield _ht(g, 2560, background="copies")
    yield _ht(g, 4096, sms=12, background="copies")
    yield _ht(g, 4096, topk=3, background="copies")
    yield _ht(g, 4096, routing="zipf", skew=1.4, background="copies")
    yield _ht(g, 4096, background="copies-from-0")
    yield _ht(g, 4096, background="copies-from-0", **ONE_WAY)
    yield _ht(g, 4096, sms=13, background="gemm")
    yield _ht(g, 2560, sms=16, background="gemm")
    yield _ht(g, 4096, hidden=2560, sms=20, background="gemm")


def _sweep(g: int) -> Iterator[Point]:
    for sms in SMS:
        yield _ht(g, 4096, sms=sms)


def _skewed(g: int) -> Iterator[Point]:
    for how in SKEWED:
        if how.get("empty_ranks", 0) < g:
            yield _ll(g, 128, **how)
            yield _ht(g, 4096, **how)
    for how in SKEWED[:4]:
        yield _ll(g, 32, **how)
        yield _ht(g, 1024, **how)
        yield _ht(g, 4096, HT_EXPERT, **how)


def _shapes(g: int) -> Iterator[Point]:
    for hidden in HIDDEN_SIZES:
        for tokens in (128, 8):
            yield _ll(g, tokens, hidden=hidden)
        for tokens in (4096, 1024):
            yield _ht(g, tokens, hidden=hidden)
    for topk in TOPKS:
        yield _ll(g, 128, topk=topk)
        yield _ht(g, 4096, topk=topk)


def _circumstances(g: int) -> Iterator[Point]:
    for late in START_SKEWS_US if g > 1 else ():
        yield _ll(g, 64, start_skew_us=late)
        yield _ht(g, 2048, start_skew_us=late)
    for sms in (16, 24):
        yield _ht(g, 4096, sms=sms, background="gemm")
    yield _ht(g, 4096, background="copies")
    for tokens in (64, 16):
        yield _ll(g, tokens, background="copies")
    yield _ll(g, 64, sms=64, background="gemm")
    yield _ll(g, 64, sms=64)


def _more(g: int) -> Iterator[Point]:
    """Other layouts, other seeds (spread over routings), the sweep expert-major."""
    for tokens in (128, 8):
        yield Point(g, "ll-rank-major", tokens)
    for seed in (6, 7):
        yield _ll(g, 64, seed=seed)
        yield _ht(g, 4096, seed=seed)
    for sms in (8, 16, 24):
        yield _ht(g, 4096, HT_EXPERT, sms=sms)
        yield _ht(g, 4096, variant="fp8", sms=sms)
    for tokens in (32, 64):
        yield _ll(g, tokens, variant="e4m3")
        yield _ll(g, tokens, variant="partial")


def stages(gpus: Sequence[int]) -> list[Stage]:
    """All of it for these numbers of GPUs. A point stands in the first stage that wants it.

    The largest number is what the goals and the scored rows are about, 2 GPUs what is fitted.
    """
    most = max(gpus)
    several = sorted({g for g in gpus if g > 1}, reverse=True)
    plan: list[tuple[str, list[Point]]] = [(f"goals on {most}", list(_goals(most)))]
    if 2 in gpus:
        plan.append(("fitted rows on 2", [*_sizes(2), *_sweep(2), *_fitted_shapes(2)]))
    plan.append((f"unseen on {most}", list(_unseen(most)) if most > 1 else []))
    plan.append((f"sizes on {most}", list(_sizes(most))))
    plan.append((f"skewed routing on {most}", list(_skewed(most))))
    plan.append((f"SM sweep on {most}", list(_sweep(most))))
    plan.append((f"hidden sizes and top-k on {most}", list(_shapes(most))))
    plan.append((f"start skew and background work on {most}", list(_circumstances(most))))
    for g in several[1:]:
        plan.append((f"sizes on {g}", [*_sizes(g), *_sweep(g)]))
        plan.append((f"skewed routing on {g}", list(_skewed(g))))
    if 1 in gpus:
        plan.append(("sizes on 1", [p for p in _sizes(1) if p.tokens % 2 == 0]))
    for g in several[1:]:
        plan.append((f"hidden sizes and top-k on {g}", list(_shapes(g))))
        plan.append((f"start skew and background work on {g}", list(_circumstances(g))))
    for g in several:
        plan.append((f"other layouts and seeds on {g}", list(_more(g))))
    seen: set[str] = set()
    made = []
    for name, points in plan:
        fresh = []
        for point in points:
            if point.key not in seen:
                seen.add(point.key)
                fresh.append(point)
        if fresh:
            made.append(Stage(name, tuple(fresh)))
    return made


def scaled_down(found: Sequence[Stage]) -> list[Stage]:
    """The same points, tiny, for a rehearsal without GPUs; those that become alike once."""
    small, seen = [], set()
    for stage in found:
        points = []
        for p in stage.points:
            tokens = 1 + p.tokens % 7 if p.mode.startswith("ll") else 1 + p.tokens % 61
            changed = {**p.asked, "tokens": tokens, "hidden": p.hidden // 2048 * 512, "experts": 32}
            point = point_of(p.gpus, {**changed, "background": "nothing", "iterations": 4})
            if point.key not in seen:
                seen.add(point.key)
                points.append(point)
        if points:
            small.append(Stage(stage.name, tuple(points)))
    return small
