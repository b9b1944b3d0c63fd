"""A step as tasks on two streams, and how long it takes: overlap is replayed, not a factor.

A MoE layer of a (micro-)batch is attention and what belongs to it (A), dispatch (D), shared experts
(S), routed experts (E) and combine (C). Each stream takes its tasks in their order:

    none       compute A S   E         A ...          shared     compute A S E     A ...
               network     D   C                                 network   D   C
    two-batch  compute A1 S1 A2 S2 E1 E2 | A1' ...    with half the tokens in each of 1 and 2
               network    D1    D2    C1 | C2  ...
    single-batch  as shared, with C beside the down product: rows leave as they are ready

D waits for A, E for D, C for E (single-batch: for the gate and up products, two thirds of E), the
next A for S, E and C. While the network works, compute has the SMs that it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from trefoil.capacity.step import LAYER_PARTS, Part

OVERLAPS = ("none", "shared", "two-batch")  # that are tried where none is asked for
SCHEDULES = (*OVERLAPS, "single-batch")
DOWN = 1 / 3  # of the routed experts' products
COMPUTE, NETWORK = 0, 1
TINY = 1e-15  # seconds: what rounding leaves of a task


@dataclass(frozen=True)
class Batch:
    """What one layer of a (micro-)batch takes, in seconds, and the step's parts outside MoE."""

    before: float  # attention, norms, router: of every layer
    shared: float
    routed: float
    dispatch: float
    combine: float
    dense: float  # of all layers without experts, without their attention
    head: float


@dataclass(frozen=True)
class Task:
    stream: int
    seconds: float
    after: tuple[int, ...] = ()  # tasks of either stream, by their place in the list


@dataclass(frozen=True)
class Timing:
    """Of a step."""

    overlap: str
    seconds: float
    compute_seconds: float
    communication_seconds: float  # of the network, hidden or not
    low: float | None = None  # the same step at the ends of the intervals
    high: float | None = None


def batch_of(
    parts: Iterable[Part], layers: int, moe_layers: int, dispatch: float, combine: float
) -> Batch:
    times = {p.name: p.seconds for p in parts}
    attention, shared, routed, rest = (times.get(name, 0.0) for name in LAYER_PARTS)
    return Batch(
        before=(attention + rest) / layers,
        shared=shared / moe_layers,
        routed=routed / moe_layers,
        dispatch=dispatch,
        combine=combine,
        dense=times.get("dense layers", 0.0),
        head=times.get("head", 0.0),
    )


def replay(tasks: Sequence[Task], left: float = 1.0) -> float:
    """When the last task ends. left: compute's speed while the network works."""
    return _replay(order_of(tasks), [t.seconds for t in tasks], left)


@dataclass(frozen=True)
class Order:
    """Tasks without their times: each stream's, in its order, and what waits for each task."""

    queues: tuple[tuple[int, ...], tuple[int, ...]]
    waits: tuple[int, ...]  # for how many tasks each one waits
    behind: tuple[tuple[int, ...], ...]


def order_of(tasks: Sequence[Task]) -> Order:
    queues = [tuple(i for i, t in enumerate(tasks) if t.stream == s) for s in (COMPUTE, NETWORK)]
    behind: list[list[int]] = [[] for _ in tasks]
    for i, t in enumerate(tasks):
        for before in t.after:
            behind[before].append(i)
    waits = tuple(len(t.after) for t in tasks)
    return Order((queues[0], queues[1]), waits, tuple(map(tuple, behind)))


def _replay(order: Order, seconds: Sequence[float], left: float) -> float:
    """At most one task of each stream runs; the other stream's may wait for it."""
    (compute, network), behind = order.queues, order.behind
    waits = list(order.waits)
    now, at, of = 0.0, 0, 0  # heads of the two queues
    most_at, most_of = len(compute), len(network)
    c: float | None = None  # rest of the task that runs, at full speed
    n: float | None = None
    while at < most_at or of < most_of:
        if c is None and at < most_at and not waits[compute[at]]:
            c = seconds[compute[at]]
        if n is None and of < most_of and not waits[network[of]]:
            n = seconds[network[of]]
        speed = 1.0 if n is None else left
        if c is None:
            if n is None:
                raise ValueError("a task waits for one behind it")
            delta = n
        else:
            delta = c / speed if n is None else min(c / speed, n)
        now += delta
        if c is not None:
            c -= delta * speed
            if c <= TINY:
                for i in behind[compute[at]]:
                    waits[i] -= 1
                c, at = None, at + 1
        if n is not None:
            n -= delta
            if n <= TINY:
                for i in behind[network[of]]:
                    waits[i] -= 1
                n, of = None, of + 1
    return now


# Tasks of a layer by batch, in compute's order; the network's may stand anywhere behind what they
# wait for. What a task waits for within its batch's layer; "A" waits for the layer before.
AFTER = {"D": "A", "S": "A", "E": "D", "W": "E", "C": "E"}  # W: down product, in single-batch


def _layer(n: int, how: str) -> list[tuple[str, int]]:
    if how == "none":
        return [(kind, i) for i in range(n) for kind in "ADECS"]
    first = [(kind, i) for i in range(n) for kind in "ADS"]
    if how == "single-batch":
        return first + [(kind, i) for i in range(n) for kind in "EWC"]
    return first + [(kind, i) for i in range(n) for kind in "EC"]


@cache
def shape_of(n: int, moe_layers: int, how: str) -> tuple[Order, tuple[tuple[str, int], ...]]:
    """The tasks of a step of n (micro-)batches, and of each its kind and batch."""
    kinds = [("first", i) for i in range(n)]
    tasks = [Task(COMPUTE, 0.0) for _ in range(n)]
    ends: list[tuple[int, ...]] = [(i,) for i in range(n)]
    for _ in range(moe_layers):
        begin, layer = len(kinds), _layer(n, how)
        place = {task: begin + k for k, task in enumerate(layer)}
        for kind, i in layer:
            before = "C" if (kind, how) == ("S", "none") else AFTER.get(kind)
            after = ends[i] if before is None else (place[before, i],)
            tasks.append(Task(NETWORK if kind in "DC" else COMPUTE, 0.0, after))
        kinds += layer
        last = "SWC" if how == "single-batch" else "SC"
        ends = [tuple(place[kind, i] for kind in last) for i in range(n)]
    tasks += [Task(COMPUTE, 0.0, end) for end in ends]
    kinds += [("head", i) for i in range(n)]
    return order_of(tasks), tuple(kinds)


def whole_step(
    batches: Sequence[Batch], layers: int, moe_layers: int, how: str, left: float
) -> float:
    """All layers of a step, those without experts first, replayed one by one."""
    order, kinds = shape_of(len(batches), moe_layers, how)
    down = DOWN if how == "single-batch" else 0.0
    times = [
        {
            "first": b.before * (layers - moe_layers) + b.dense,
            "A": b.before,
            "D": b.dispatch,
            "S": b.shared,
            "E": b.routed * (1 - down),
            "W": b.routed * down,
            "C": b.combine,
            "head": b.head,
        }
        for b in batches
    ]
    return _replay(order, [times[i][kind] for kind, i in kinds], left)


def step_seconds(
    batches: Sequence[Batch], layers: int, moe_layers: int, how: str, left: float
) -> float:
    """two-batch takes two batches, the others one: there a layer waits for all of the one before,
    so one is replayed for all."""
    if len(batches) > 1:
        return whole_step(batches, layers, moe_layers, how, left)
    outside = whole_step(batches, layers - moe_layers, 0, how, left)
    layer = whole_step(batches, 1, 1, how, left) - batches[0].dense - batches[0].head
    return outside + moe_layers * layer
