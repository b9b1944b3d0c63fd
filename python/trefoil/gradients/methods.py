"""The four methods on a cluster: bytes, passes over memory, and the time of an averaging.

A method's passes are bytes of memory traffic at the rate that its kernels reach, by the records of
trefoil.gradients.costs. What they are is ours, from the rules of docs/spec.md, section A;
docs/a2sgd.md has the sources. Dense has none: links and collectives sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trefoil.a2sgd import Averaging
from trefoil.gradients import costs
from trefoil.gradients.collectives import (
    NETWORK,
    NVLINK,
    NVLINK_LATENCY_US,
    Links,
    Stage,
    collective,
    links_of,
)
from trefoil.reference import TrefoilError, library
from trefoil.simulator import Cluster

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# Passes of a radix over keys of 32 bits, 8 bits at a time, and what a sort of keys with their
# indices reads and writes: a histogram, then both twice a pass.
DIGITS = 4
SORT_BYTES = 4 + DIGITS * 16


@dataclass(frozen=True)
class Method:
    """A method with what its rules leave open, as trefoil.a2sgd.Averaging has it."""

    name: str
    sync_period: int = 0
    share: float = 0.01
    bits: int = 4
    dtype: str = "f32"
    whole_model: bool = False
    selection: str = "radix"  # of Top-K: "radix" or "sort"
    measured_us: float | None = None  # of all passes, instead of the model

    @property
    def label(self) -> str:
        if self.name == "a2sgd":
            return f"a2sgd, sync {self.sync_period}" if self.sync_period else "a2sgd"
        if self.name == "topk":
            return f"topk {100 * self.share:g} %"
        return f"qsgd {self.bits} bit" if self.name == "qsgd" else self.name


def methods_of(sync_period: int = 100, **options: object) -> list[Method]:
    """The four, and A2SGD with a dense average of parameters now and then."""
    names = (("dense", 0), ("a2sgd", 0), ("a2sgd", sync_period), ("topk", 0), ("qsgd", 0))
    return [Method(name, period, **options) for name, period in names]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pass:
    """A kernel that goes over memory once."""

    moved: float  # bytes
    kind: str = "elementwise"  # of costs.kinds()


@dataclass
class Averaged:
    """One averaging of a gradient, and what it takes alone."""

    method: Method
    elements: int
    contribution: int  # bytes that a worker sends in, whatever carries them
    algorithm: str
    stages: list[Stage]
    links: Links
    pass_seconds: float
    sync_seconds: float = 0.0  # of the parameters, in the mean of all steps
    sync_bytes: dict[str, float] = field(default_factory=dict)  # the same

    @property
    def sent(self) -> dict[str, float]:
        """Bytes of a worker by tier, in the mean of all steps."""
        found = {NVLINK: 0.0, NETWORK: 0.0} | self.sync_bytes
        for stage in self.stages:
            found[stage.tier] += stage.sent
        return found

    @property
    def link_seconds(self) -> float:
        return self.links.seconds(self.stages) if self.stages else 0.0

    @property
    def seconds(self) -> float:
        return self.link_seconds + self.pass_seconds + self.sync_seconds


def _passes(method: Method, elements: int, contribution: int, workers: int, how: str) -> list[Pass]:
    """Of one worker; size is an element's bytes. An average that links make has none."""
    size = ELEMENT_BYTES[method.dtype] * elements
    if method.name == "a2sgd":  # two sums; then each element is read and moved
        return [Pass(size, "a2sgd-means"), Pass(2 * size, "a2sgd-move")]
    everyone = workers if how == "gather" else 1  # whose contributions a worker reads, in all
    if method.name == "topk":
        keys = 4 * elements
        summed = Pass(keys + size)  # gradient and error, read; with the pass below, written
        chosen = [Pass(keys)] * DIGITS
        if method.selection == "sort":
            chosen = [Pass(SORT_BYTES * elements, "sort")]
        taken = Pass(2 * keys + contribution)  # what is sent leaves the error
        # Each entry read, and a sector of 32 bytes read and written where it is added.
        entry = size / elements + 4
        added = Pass(size / workers * everyone + everyone * contribution * (1 + 64 / entry))
        return [summed, Pass(keys), *chosen, taken, added]
    if method.name == "qsgd":
        decoded = everyone * contribution + (size if how == "gather" else size / workers)
        return [Pass(size + contribution), Pass(decoded)]
    return []


def _seconds_of(passes: Sequence[Pass], cluster: Cluster) -> float:
    rate = cluster.fields.gpu_hbm_gb_per_s * 1e9
    return sum(costs.seconds(p.kind, p.moved, rate) for p in passes)


def _pass_seconds(
    method: Method, cluster: Cluster, elements: int, contribution: int, workers: int, how: str
) -> float:
    if method.measured_us is not None:
        return method.measured_us * 1e-6
    passes = _passes(method, elements, contribution, workers, how) if elements else []
    if passes and cluster.fields.gpu_hbm_gb_per_s <= 0:
        raise TrefoilError(f"cluster {cluster.name}: gpu_hbm_gb_per_s is missing")
    return _seconds_of(passes, cluster)


def _fastest(
    method: Method, cluster: Cluster, links: Links, counts: tuple[int, int, int]
) -> tuple[str, list[Stage], float]:
    """Algorithm, stages and passes: whatever is quickest together."""
    elements, sent, size = counts
    sums = method.name in ("dense", "a2sgd")
    found = []
    for name, stages in collective(links, sent, size, sums).items():
        passes = _pass_seconds(method, cluster, elements, sent, links.workers, name)
        found.append((links.seconds(stages) + passes, name, stages, passes))
    _, name, stages, passes = min(found, key=lambda f: f[0])
    return name, stages, passes


def _own_exchange(links: Links) -> Links:
    """Inside an NVLink domain the first kernel exchanges the means: no collective is launched."""
    latency = costs.kinds()["a2sgd-exchange"].launch_us * 1e-6
    return replace(links, launch=0.0, latencies=links.latencies | {NVLINK: latency})


def origins(method: Method, one_node: bool, several: bool) -> dict[str, str]:
    """Where costs of a method's passes and links are from, of workers on one node, on several, or
    both. Parameters that are averaged now and then take what dense averaging takes."""
    used = dict.fromkeys(p.kind for p in _passes(method, 1, 1, 2, "gather"))
    passes = "; ".join(costs.origin(kind) for kind in used) or "none: links and collectives sum"
    if method.measured_us is not None:
        passes = f"given: {method.measured_us:g} us (--measured)"
    links = f"cluster: rates, net_latency_us, ll_fixed_us; NVLink {NVLINK_LATENCY_US:g} us, given"
    if method.name != "a2sgd" or not one_node:
        return {"passes": passes, "links": links}
    own = costs.origin("a2sgd-exchange")
    return {"passes": passes, "links": f"{own}; several nodes: {links}" if several else own}


def averaging(
    cluster: Cluster,
    workers: int,
    sizes: Sequence[int],
    method: Method,
    per_node: int = 0,
) -> Averaged:
    """Of a gradient with so many elements a tensor. per_node: workers of a node; 0: its GPUs."""
    most = per_node or cluster.fields.gpus_per_node
    links = links_of(cluster, workers, library().trefoilRanksPerNode(workers, most))
    if links.nodes > 1 and cluster.fields.nic_gb_per_s <= 0:
        raise TrefoilError(f"cluster {cluster.name}: {workers} workers need a network")
    counted = Averaging(
        method.name,
        sizes,
        workers,
        method.dtype,
        whole_model=method.whole_model,
        sync_period=method.sync_period,
        share=method.share,
        bits=method.bits,
    )
    elements = counted.shape[1]
    size = ELEMENT_BYTES[method.dtype] * elements
    if workers == 1:
        return Averaged(method, elements, counted.sent_bytes, "none", [], links, 0.0)
    if method.name == "a2sgd" and links.nodes == 1:
        links = _own_exchange(links)
    counts = (elements, counted.sent_bytes, size)
    how, stages, passes = _fastest(method, cluster, links, counts)
    made = Averaged(method, elements, counted.sent_bytes, how, stages, links, passes)
    if method.sync_period:
        whole = averaging(cluster, workers, sizes, Method("dense", dtype=method.dtype), per_node)
        made.sync_seconds = whole.seconds / method.sync_period
        made.sync_bytes = {tier: n / method.sync_period for tier, n in whole.sent.items()}
    return made


def measured(methods: Sequence[Method], given: Mapping[str, float]) -> list[Method]:
    """The methods with measured times of their passes: us by the method's name."""
    unknown = sorted(set(given) - {m.name for m in methods})
    if unknown:
        raise TrefoilError(f"{unknown[0]!r} is not a method: expected dense, a2sgd, topk or qsgd")
    return [replace(m, measured_us=given.get(m.name, m.measured_us)) for m in methods]
