"""Collectives as stages: rounds of messages that each worker sends over NVLink or the network.

Workers sit on M nodes of G GPUs. A stage takes rounds x latency + bytes / rate; its bytes are what
one worker sends, and receives. The alternatives of a collective are all worked out, and the fastest
is taken.

    all-reduce of b bytes     ring      NVLink: reduce-scatter; network: ring over the M GPUs of a
                                        rail, b/G each; NVLink: all-gather
                              tree      the same with a tree over the network
                              exchange  every GPU sends all b to the others of its node, then nodes
                                        exchange it in ceil(log2 M) rounds
    sum of contributions of   gather    all-gather of all contributions; every worker sums
    c bytes to b bytes        scatter   all-to-all of parts of the contributions; a worker sums its
                                        part; all-gather of the sums, b/P each
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trefoil.simulator import Cluster

NVLINK, NETWORK = "nvlink", "network"
NVLINK_LATENCY_US = 0.7  # as the cost records of this library have it: a store until it is seen


@dataclass(frozen=True)
class Stage:
    tier: str
    rounds: int
    sent: float  # bytes of a worker


@dataclass(frozen=True)
class Links:
    """What a worker's links do, and how the workers lie on them."""

    nodes: int
    per_node: int
    rates: dict[str, float]  # bytes a second of a worker, by tier
    latencies: dict[str, float]  # seconds
    launch: float  # of a collective

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    def seconds(self, stages: Iterable[Stage]) -> float:
        """Of stages one after the other."""
        parts = (s.rounds * self.latencies[s.tier] + s.sent / self.rates[s.tier] for s in stages)
        return self.launch + sum(parts)


def links_of(cluster: Cluster, workers: int, per_node: int) -> Links:
    """A network port that several GPUs share gives each its part."""
    c = cluster.fields
    nodes = workers // per_node
    sharing = min(c.gpus_per_nic, per_node)
    rates = {NVLINK: c.nvlink_gb_per_s * 1e9, NETWORK: c.nic_gb_per_s * 1e9 / sharing}
    latencies = {NVLINK: NVLINK_LATENCY_US * 1e-6, NETWORK: c.net_latency_us * 1e-6}
    return Links(nodes, per_node, rates, latencies, c.ll_fixed_us * 1e-6)


def _stages(*stages: Stage) -> list[Stage]:
    """Those that send anything."""
    return [s for s in stages if s.rounds > 0]


def _doublings(nodes: int) -> int:
    return math.ceil(math.log2(nodes))


def _gather(links: Links, part: float) -> list[Stage]:
    """Each worker's part to all: among nodes by doubling, then inside."""
    nodes, per_node = links.nodes, links.per_node
    return _stages(
        Stage(NETWORK, _doublings(nodes), (nodes - 1) * part),
        Stage(NVLINK, per_node - 1, (per_node - 1) * nodes * part),
    )


def _scatter(links: Links, total: float) -> list[Stage]:
    """Each worker's part of `total` bytes to every other."""
    part = total / links.workers
    far, near = links.workers - links.per_node, links.per_node - 1
    return _stages(
        Stage(NETWORK, min(far, 1), far * part), Stage(NVLINK, min(near, 1), near * part)
    )


def all_reduces(links: Links, size: float) -> dict[str, list[Stage]]:
    nodes, per_node = links.nodes, links.per_node
    inside = Stage(NVLINK, per_node - 1, size * (per_node - 1) / per_node)
    part, doublings = size / per_node, _doublings(nodes)
    across = {
        "ring": Stage(NETWORK, 2 * (nodes - 1), 2 * (nodes - 1) / nodes * part),
        "tree": Stage(NETWORK, 2 * doublings, 2 * part),
    }
    found = {name: _stages(inside, stage, inside) for name, stage in across.items()}
    found["exchange"] = _stages(
        Stage(NVLINK, min(per_node - 1, 1), (per_node - 1) * size),
        Stage(NETWORK, doublings, doublings * size),
    )
    return found


def sums(links: Links, contribution: float, size: float) -> dict[str, list[Stage]]:
    return {
        "gather": _gather(links, contribution),
        "scatter": _scatter(links, contribution) + _gather(links, size / links.workers),
    }


def collective(links: Links, sent: float, size: float, summed: bool) -> dict[str, list[Stage]]:
    """The alternatives: of an all-reduce where links can sum, else of contributions that only a
    worker can."""
    return all_reduces(links, sent) if summed else sums(links, sent, size)
