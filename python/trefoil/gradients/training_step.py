"""A training step: dispatch and combine of every layer, and the averaging of gradients beside them.

What is simulated, by the engines of `trefoil simulate`, is one dispatch and one combine of an EP
group: alone, and with flows of the averaging on its NVLink or network ports. A flow gets flow_share
(peers_flow_share) of a port while the operation works (docs/sim.md), and all of it otherwise. The
step is then replayed as two tracks:

    operations   forward: layers x (compute, dispatch, combine); backward: the same, compute twice
    averaging    a bucket a layer, ready when its backward is through; buckets one after the other

Passes over memory are compute: they come after the backward of their layer. Experts' gradients are
not averaged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from trefoil.capacity.compute_costs import ComputeRecord, load
from trefoil.capacity.whole_model import Model
from trefoil.fit.model import row_bytes
from trefoil.gradients.collectives import NETWORK, NVLINK, Stage
from trefoil.gradients.costs import KERNELS
from trefoil.gradients.methods import Averaged, Method, averaging
from trefoil.reference import TrefoilError, library
from trefoil.simulator import Cluster, CostRecord, Costs, Moe, OpResult, Simulation, Workload

OPS = ("dispatch", "combine")
PORTS = {NVLINK: "nvlink-out", NETWORK: "nic-out"}
DEFAULT_SHARE = 0.5  # as sim/flows.c has it where the costs do not say
EPSILON = 1e-12


@dataclass(frozen=True)
class StepSetting:
    """What is asked, of any number of GPUs."""

    cluster: str = "dgx-h100"
    moe: str = "deepseek-v3"
    mode: str = "ht"
    tokens: int = 4096
    ep: int = 0  # 0: as large as can be
    costs: str = ""  # "": the default record of the mode
    engine: str = "queues"
    compute_us: float | None = None  # of a layer's forward; None: by the model and the peak rate
    overlap: bool = True  # the averaging begins with the first layer that is through
    seed: int = 1


# ---- The model -----------------------------------------------------------------------------------


def model_of(moe: Moe) -> Model:
    f = moe.fields
    if not f.num_layers:
        key = bytes(f.missing).decode() or "num_layers"
        name = bytes(f.name).decode()
        raise TrefoilError(f"{name}: what is outside of the experts is not stated: no {key}")
    return Model(
        hidden=f.hidden,
        experts=f.num_experts,
        topk=f.topk,
        moe_layers=f.num_moe_layers,
        expert_hidden=f.expert_hidden,
        num_layers=f.num_layers,
        dense_hidden=f.dense_hidden,
        shared_hidden=f.shared_hidden,
        vocabulary=f.vocab,
        tied_embeddings=f.tied_embeddings,
        num_heads=f.num_heads,
        num_kv_heads=f.num_kv_heads,
        head=f.head_dim,
        q_lora=f.q_lora,
        kv_lora=f.kv_lora,
        nope=f.nope_dim,
        rope=f.rope_dim,
        v=f.v_dim,
        window_tokens=f.window_tokens,
        window_layers=f.window_layers,
    )


def dense_tensors(m: Model) -> list[list[int]]:
    """Elements of the tensors outside of the routed experts, a list a layer from the last to the
    first, as the backward goes; the head before, the embeddings behind."""
    attention = [a * b for _, a, b in m.attention_products()]
    moe = [*attention, *([m.hidden * m.shared_hidden] * 3 if m.shared_hidden else [])]
    moe.append(m.hidden * m.experts)
    dense = [*attention, *[m.hidden * m.dense_hidden] * 3]
    words = m.vocabulary * m.hidden
    head = [] if m.tied_embeddings else [[words]]
    return [*head, *[moe] * m.moe_layers, *[dense] * m.dense_layers, [words]]


def forward_seconds(m: Model, cluster: Cluster, tokens: int) -> float:
    """Products of an MoE layer for a GPU's tokens, attention scores left out, at the share of the
    peak that measured kernels reach."""
    costs = cast(ComputeRecord, load(KERNELS)).kinds["product", "bf16"]
    peak = cluster.fields.gpu_bf16_tflops * 1e12
    if peak <= 0:
        raise TrefoilError(f"cluster {cluster.name}: gpu_bf16_tflops is missing")
    attention = sum(a * b for _, a, b in m.attention_products())
    inner = m.shared_hidden + m.topk * m.expert_hidden
    return costs.seconds(2 * tokens * (attention + 3 * m.hidden * inner) / peak, 0)


# ---- Dispatch and combine ------------------------------------------------------------------------


@dataclass
class Operation:
    """Dispatch or combine of the EP group."""

    seconds: float  # alone
    under_load: dict[str, float]  # with a flow of each worker on a tier
    sent: dict[str, float]  # bytes of a worker, the mean
    rates: dict[str, float]  # bytes a second that a worker's flow gets meanwhile


@dataclass
class Group:
    """An EP group's two operations."""

    ep: int
    ops: dict[str, Operation]


def _flows(ranks: int, per_node: int, tier: str) -> list[tuple[int, int]]:
    """A ring in every node, or over the nodes a ring of each rail: every port out and in once."""
    if tier == NETWORK:
        return [(r, (r + per_node) % ranks) for r in range(ranks) if ranks > per_node]
    return [
        (r, r // per_node * per_node + (r + 1) % per_node) for r in range(ranks) if per_node > 1
    ]


def _costs(s: StepSetting, cluster: Cluster) -> Costs | None:
    if s.costs == "ideal":
        return None
    record = CostRecord(s.costs or CostRecord.default(s.mode, "ours"))
    if bool(record.fields.is_ht) != s.mode.startswith("ht"):
        raise TrefoilError(f"--costs {s.costs}: they are not of {s.mode}")
    return Costs.on(cluster, record)


def _rate(cluster: Cluster, costs: Costs | None, tier: str) -> float:
    """Of a port, bytes a second."""
    key = "nvlink_gb_per_s" if tier == NVLINK else "nic_gb_per_s"
    own = costs.get(key) if costs else 0
    return 1e9 * (own or getattr(cluster.fields, key))


def _flow_share(costs: Costs | None, op: str, per_node: int) -> float:
    """Of a port that rows want, too."""
    if costs is None:
        return DEFAULT_SHARE
    peers = costs.get(f"{op}.peers_flow_share") if per_node > 2 else 0
    return peers or costs.get(f"{op}.flow_share") or DEFAULT_SHARE


def _operation(
    alone: OpResult,
    under_load: dict[str, OpResult],
    s: StepSetting,
    cluster: Cluster,
    ranks: int,
    op: str,
) -> Operation:
    costs = _costs(s, cluster)
    per_node = library().trefoilRanksPerNode(ranks, cluster.fields.gpus_per_node)
    share = _flow_share(costs, op, per_node)
    sharing = {NVLINK: 1, NETWORK: min(cluster.fields.gpus_per_nic, per_node)}
    ported = {tier: alone.bytes_of.get(port, {}) for tier, port in PORTS.items()}
    rates = {
        tier: _rate(cluster, costs, tier) * (share if ported[tier] else 1) / sharing[tier]
        for tier in PORTS
    }
    return Operation(
        alone.us * 1e-6,
        {tier: result.us * 1e-6 for tier, result in under_load.items()},
        {tier: sum(found.values()) / ranks for tier, found in ported.items()},
        rates,
    )


@cache
def simulate_group(s: StepSetting, ep: int) -> Group:
    """Three replays: alone, with flows over NVLink, with flows over the network."""
    cluster, moe = Cluster(s.cluster), Moe(s.moe).fields
    per_node = library().trefoilRanksPerNode(ep, cluster.fields.gpus_per_node)
    row = row_bytes("bf16", moe.hidden)
    workload = Workload(
        ranks=ep,
        tokens=s.tokens,
        mode=s.mode,
        ranks_per_node=per_node,
        experts=moe.num_experts,
        topk=moe.topk,
        dispatch_row_bytes=row,
        combine_row_bytes=row,
        seed=s.seed,
    )
    sim, costs = Simulation(workload), _costs(s, cluster)
    alone = sim.run(cluster, costs, s.engine)
    results = {}
    for tier in PORTS:
        flows = _flows(ep, per_node, tier)
        results[tier] = sim.run(cluster, costs, s.engine, flows=flows) if flows else alone
    ops = {
        op: _operation(alone[op], {t: r[op] for t, r in results.items()}, s, cluster, ep, op)
        for op in OPS
    }
    return Group(ep, ops)


# ---- The two tracks ------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Gradients that are averaged together, after so many segments of the operations' track."""

    ready: int
    averaged: Averaged


@dataclass
class Step:
    method: Method
    gpus: int
    ep: int
    elements: int
    contribution: int  # bytes that a worker sends in, in an averaging
    algorithms: list[str]
    sent: dict[str, float]  # bytes of a worker for the averaging, by tier
    ep_sent: dict[str, float]  # for dispatch and combine, forward and backward
    alone_seconds: float  # averaging without anything beside
    pass_seconds: float  # of that, memory passes
    operation_seconds: float  # dispatch and combine alone
    compute_seconds: float
    step_seconds: float
    floor_seconds: float = field(default=0.0)  # the step without averaging

    @property
    def exposed_seconds(self) -> float:
        """What averaging adds to the step."""
        return self.step_seconds - self.floor_seconds


@dataclass
class _Part:
    """Of the averaging's track: time without bytes, then bytes."""

    ready: int
    tier: str
    wait: float
    left: float


def _parts(buckets: Sequence[Bucket]) -> Iterator[_Part]:
    for b in buckets:
        links, stages = b.averaged.links, b.averaged.stages
        for i, stage in enumerate(stages):
            wait = stage.rounds * links.latencies[stage.tier] + (links.launch if i == 0 else 0)
            yield _Part(b.ready, stage.tier, wait, stage.sent)


def _rest(part: _Part, rate: float) -> float:
    return part.wait if part.wait > 0 else part.left / rate


def _advance(part: _Part, seconds: float, rate: float) -> None:
    if part.wait > 0:
        part.wait = part.wait - seconds if part.wait - seconds > EPSILON else 0.0
    else:
        part.left = part.left - seconds * rate if part.left / rate - seconds > EPSILON else 0.0


def replay(
    segments: Sequence[str], seconds: Sequence[float], buckets: Sequence[Bucket], group: Group
) -> float:
    """The end of both tracks. segments: "compute", "dispatch" or "combine", each alone so long."""
    now, at, done = 0.0, 0, 0.0  # done: of segment `at`, in [0, 1]
    parts = list(_parts(buckets))
    full = {s: r for b in buckets[:1] for s, r in b.averaged.links.rates.items()}
    while at < len(segments) or parts:
        part = parts[0] if parts and parts[0].ready <= at else None
        op = group.ops.get(segments[at]) if at < len(segments) else None
        moves = part is not None and part.wait <= 0
        rate = 1.0
        if part is not None:
            rate = op.rates[part.tier] if op else full[part.tier]
        length = seconds[at] if at < len(segments) else math.inf
        if op and moves and part is not None:
            length = op.under_load[part.tier]
        rest = (1 - done) * length
        step = min(rest, _rest(part, rate) if part else math.inf)
        now += step
        if part is not None:
            _advance(part, step, rate)
            if part.wait <= 0 and part.left <= 0:
                parts.pop(0)
        if at < len(segments):
            done += step / length if length > 0 else 1
            if rest - step <= EPSILON:
                at, done = at + 1, 0.0
    return now


def _track(layers: int, compute: float, group: Group) -> tuple[list[str], list[float]]:
    """The operations of all MoE layers: forward, then backward."""
    names, times = [], []
    for factor in (1, 2):
        names += ["compute", *OPS] * layers
        times += [factor * compute, *(group.ops[op].seconds for op in OPS)] * layers
    return names, times


def _buckets(made: Sequence[Averaged], moe_layers: int, tied: bool, overlap: bool) -> list[Bucket]:
    """The i-th bucket is ready when as many layers are through backward; the rest at the end."""
    forward, head = 3 * moe_layers, 0 if tied else 1
    ready = [forward + 3 * min(max(i + 1 - head, 0), moe_layers) for i in range(len(made))]
    end = 6 * moe_layers
    return [Bucket(r if overlap else end, a) for r, a in zip(ready, made, strict=True)]


def _step(
    s: StepSetting, gpus: int, method: Method, group: Group, layers: Sequence[Sequence[int]]
) -> Step:
    cluster, moe = Cluster(s.cluster), Moe(s.moe)
    model = model_of(moe)
    compute = s.compute_us * 1e-6 if s.compute_us is not None else None
    if compute is None:
        compute = forward_seconds(model, cluster, s.tokens)
    of = {sizes: averaging(cluster, gpus, sizes, method) for sizes in set(map(tuple, layers))}
    made = [of[tuple(sizes)] for sizes in layers]
    names, times = _track(model.moe_layers, compute, group)
    buckets = _buckets(made, model.moe_layers, bool(model.tied_embeddings), s.overlap)
    later = sum(a.pass_seconds + a.sync_seconds for a in made)
    tiers = (NVLINK, NETWORK)
    operations = 2 * model.moe_layers * sum(group.ops[op].seconds for op in OPS)
    return Step(
        method=method,
        gpus=gpus,
        ep=group.ep,
        elements=sum(a.elements for a in made),
        contribution=sum(a.contribution for a in made),
        algorithms=sorted({a.algorithm for a in made}),
        sent={t: sum(a.sent[t] for a in made) for t in tiers},
        ep_sent={t: 2 * model.moe_layers * sum(group.ops[op].sent[t] for op in OPS) for t in tiers},
        alone_seconds=sum(a.seconds for a in made),
        pass_seconds=sum(a.pass_seconds for a in made),
        operation_seconds=operations,
        compute_seconds=3 * model.moe_layers * compute,
        step_seconds=replay(names, times, buckets, group) + later,
        floor_seconds=sum(times),
    )


def simulate_steps(s: StepSetting, gpus: int, methods: Sequence[Method]) -> list[Step]:
    """A step with each method; the EP group's operations are simulated once."""
    moe = Moe(s.moe)
    ep = library().trefoilEpSize(gpus, moe.fields.num_experts, s.ep)
    group, layers = simulate_group(s, ep), dense_tensors(model_of(moe))
    return [_step(s, gpus, method, group, layers) for method in methods]


__all__ = [
    "Bucket",
    "Group",
    "Operation",
    "Stage",
    "Step",
    "StepSetting",
    "dense_tensors",
    "replay",
    "simulate_group",
    "simulate_steps",
]
