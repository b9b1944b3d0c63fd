"""The simulator from Python: presets, cost records, and the replay of a plan in time.

    from trefoil.simulator import Cluster, Costs, Simulation, Workload
    sim = Simulation(Workload(ranks=16, tokens=128, mode="ll"))
    sim.run(Cluster("dgx-h100"), Costs.record("deepep-ll-h100")).dispatch.us

The structs are those of include/trefoil/{models,costs,cost_record,sim}.h, field by field. Whatever
the library refuses raises TrefoilError with its sentence.
"""

from __future__ import annotations

import copy
import ctypes as ct
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trefoil.reference import TrefoilError, _check, _index, library
from trefoil.structs import (
    Change,
    ClusterFields,
    CostFields,
    Flow,
    IntervalFields,
    MoeFields,
    OpCosts,
    Point,
    Record,
    Routing,
    Shape,
    SimOp,
    SimResult,
    SimRun,
    SimWorkload,
    TraceSpec,
)

MODES = {"ll": 0, "ll-rank-major": 1, "ht": 2, "ht-expert-major": 3}
OPS = ("dispatch", "combine")
VARIANTS = ("ours", "per-expert", "rails")
ENGINES = ("auto", "simgrid", "queues", "fair")
RESOURCES = (
    "send",
    "forward",
    "nvlink-out",
    "nvlink-in",
    "nic-out",
    "leaf-up",
    "leaf-down",
    "nic-in",
    "receive",
)
CHANGES = (
    "nic-rate",
    "rail-rate",
    "nvlink-rate",
    "sm-rate",
    "start-us",
    "nic-fail",
    "rail-fail",
)


class Cluster:
    """A cluster preset by name or path; its fields can be changed."""

    def __init__(self, name_or_path: str) -> None:
        self.fields = ClusterFields()
        _check(library().trefoilClusterLoad(ct.byref(self.fields), name_or_path.encode()))

    @property
    def name(self) -> str:
        return bytes(self.fields.name).decode()


class Moe:
    """A model's MoE shape by name or path (a preset, or Hugging Face's config.json)."""

    def __init__(self, name_or_path: str) -> None:
        self.fields = MoeFields()
        _check(library().trefoilMoeLoad(ct.byref(self.fields), name_or_path.encode()))


class Costs:
    """trefoil_costs_t by names: "nic_gb_per_s", "dispatch.launch_us", ..."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self.fields = CostFields()
        self.fields.num_sms = 1
        self.set(values or {})

    @classmethod
    def record(cls, name_or_path: str) -> Costs:
        return cls.of(CostRecord(name_or_path))

    @classmethod
    def of(cls, record: CostRecord) -> Costs:
        costs = cls()
        costs.fields = copy.copy(record.fields.costs)
        return costs

    @classmethod
    def on(cls, cluster: Cluster, record: CostRecord) -> Costs:
        """The record's costs with the ports of a cluster (trefoilCostRecordOnCluster)."""
        costs = cls()
        function = library().trefoilCostRecordOnCluster
        _check(
            function(
                ct.byref(record.fields), ct.byref(cluster.fields), ct.byref(costs.fields), None
            )
        )
        return costs

    @staticmethod
    def names() -> list[str]:
        common = [n for n, *_ in CostFields._fields_ if n not in ("name", "op")]
        per_op = [n for n, *_ in OpCosts._fields_]
        return common + [f"{op}.{name}" for op in OPS for name in per_op]

    def _place(self, name: str) -> tuple[ct.Structure, str]:
        if name not in self.names():
            raise TrefoilError(f"{name!r} is not a cost; costs are {', '.join(self.names())}")
        op, _, key = name.rpartition(".")
        return (self.fields.op[OPS.index(op)], key) if op else (self.fields, key)

    def set(self, values: Mapping[str, float]) -> Costs:
        for name, value in values.items():
            struct, key = self._place(name)
            is_int = key in ("num_sms", "signals_per_expert", "own_rows_stay")
            setattr(struct, key, round(value) if is_int else float(value))
        return self

    def get(self, name: str) -> float:
        struct, key = self._place(name)
        return float(getattr(struct, key))

    def fixed_us(self, op: str, shape: Shape) -> float:
        """What no row takes (trefoilCostsFixedUs)."""
        function = library().trefoilCostsFixedUs
        function.restype = ct.c_double
        return float(function(ct.byref(self.fields), _index(OPS, op, "op"), ct.byref(shape)))


@dataclass
class Interval:
    low_us: float
    high_us: float
    extrapolated: bool
    n: int
    outside: str
    doublings: float  # how far outside


class CostRecord:
    """A cost record by name or path, or from JSON text: costs, fitted range, residuals."""

    def __init__(self, name_or_path: str, text: str | None = None) -> None:
        self.fields = Record()
        if text is None:
            code = library().trefoilCostRecordLoad(ct.byref(self.fields), name_or_path.encode())
        else:
            data = text.encode()
            code = library().trefoilCostRecordParse(
                ct.byref(self.fields), name_or_path.encode(), data, ct.c_size_t(len(data))
            )
        _check(code)

    @classmethod
    def of_fields(cls, fields: Record) -> CostRecord:
        found = cls.__new__(cls)
        found.fields = fields
        return found

    @staticmethod
    def names() -> list[str]:
        """Of the records that the library has."""
        function = library().trefoilCostRecordName
        function.restype = ct.c_char_p
        names = map(function, itertools.count())
        return [name.decode() for name in itertools.takewhile(bool, names)]

    @staticmethod
    def default(mode: str, variant: str) -> str:
        """The name of the default record of a mode and variant."""
        function = library().trefoilCostRecordDefault
        function.restype = ct.c_char_p
        return bytes(function(MODES[mode], _index(VARIANTS, variant, "variant"))).decode()

    def interval(self, op: str, point: Mapping[str, int], us: float) -> Interval:
        """point: nodes, ranks, hidden, experts, topk, tokens; sms, row_bytes where they differ."""
        where, found = Point(**point), IntervalFields()
        _check(
            library().trefoilCostRecordInterval(
                ct.byref(self.fields),
                _index(OPS, op, "op"),
                ct.byref(where),
                ct.c_double(us),
                ct.byref(found),
            )
        )
        return Interval(
            found.low_us,
            found.high_us,
            bool(found.is_extrapolated),
            found.n,
            bytes(found.outside).decode(),
            found.doublings,
        )


@dataclass(frozen=True)
class Workload:
    """One step of one EP group with seeded routing, uniform unless popularity says otherwise."""

    ranks: int
    tokens: int
    mode: str = "ll"
    ranks_per_node: int = 8
    experts: int = 256
    topk: int = 8
    dispatch_row_bytes: int = 14336
    combine_row_bytes: int = 14336
    variant: str = "ours"
    combine_partial: bool = False
    chunk_tokens: int = 0
    seed: int = 1
    popularity: str = "uniform"  # "zipf", "hot-expert", "hot-rank"
    skew: float = 0.0
    hot: int = 0
    ragged: float = 0.0
    empty_ranks: int = 0
    masked_selections: int = 0  # of each rank: so many random ones are -1

    @property
    def shape(self) -> Shape:
        return Shape(self.ranks, self.ranks_per_node, self.experts, self.topk, self.tokens)


@dataclass
class OpResult:
    us: float
    floor_us: float
    closed_form_us: float
    engine: str
    floor_kind: str
    chunk_tokens: int
    finish_us: npt.NDArray[np.float64]
    max_bytes: dict[str, int] = field(default_factory=dict)  # of the busiest link, by kind
    max_busy_us: dict[str, float] = field(default_factory=dict)
    bytes_of: dict[str, dict[int, int]] = field(default_factory=dict)  # of every link, by kind
    busy_us_of: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def mean_rank_us(self) -> float:
        """Until a rank is done, in the mean over ranks."""
        return float(self.finish_us.mean())


@dataclass
class Result:
    dispatch: OpResult
    combine: OpResult

    def __getitem__(self, op: str) -> OpResult:
        return self.dispatch if op == "dispatch" else self.combine


class Simulation:
    """The plans of both operations of a workload, ready to be replayed again and again.

    topk_idx: one [tokens, K] int32 array a rank instead of the seeded routing.
    """

    def __init__(
        self, workload: Workload, topk_idx: list[npt.NDArray[np.int32]] | None = None
    ) -> None:
        self.workload = workload
        self._sim, self._trace = ct.c_void_p(), ct.c_void_p()
        self._routing = Routing()
        lib = library()
        if topk_idx is None:
            w = workload
            popularity = _index(
                ("uniform", "zipf", "hot-expert", "hot-rank"), w.popularity, "popularity"
            )
            fill = (w.ragged, w.empty_ranks)
            spec = TraceSpec(w.shape, 1, w.seed, popularity, w.skew, w.hot, *fill)
            spec.num_masked = w.masked_selections
            _check(lib.trefoilTraceGenerate(ct.byref(self._trace), ct.byref(spec)))
            _check(lib.trefoilTraceRouting(self._trace, 0, ct.byref(self._routing)))
        else:
            self._idx = [np.ascontiguousarray(a, dtype=np.int32) for a in topk_idx]
            self._tokens = np.array([len(a) for a in self._idx], dtype=np.int64)
            self._rows = (ct.c_void_p * len(self._idx))(*(a.ctypes.data for a in self._idx))
            self._routing = Routing(
                workload.shape, self._tokens.ctypes.data, ct.addressof(self._rows)
            )
        given = SimWorkload(
            ct.pointer(self._routing),
            MODES[workload.mode],
            _index(VARIANTS, workload.variant, "variant"),
            int(workload.combine_partial),
            workload.chunk_tokens,
            workload.dispatch_row_bytes,
            workload.combine_row_bytes,
        )
        _check(lib.trefoilSimCreate(ct.byref(self._sim), ct.byref(given)))

    def traffic(self, op: str, phase: int = -1, tier: int = -1) -> npt.NDArray[np.uint64]:
        """Bytes that were replayed, from each rank (row) to each rank (column)."""
        ranks = self.workload.ranks
        sums = np.zeros((ranks, ranks), dtype=np.uint64)
        pointer = ct.c_void_p(sums.ctypes.data)
        code = library().trefoilSimTraffic(self._sim, _index(OPS, op, "op"), phase, tier, pointer)
        _check(code)
        return sums

    @property
    def routing_pointer(self) -> Any:
        """trefoil_routing_t *, valid while this object lives."""
        return ct.byref(self._routing)

    def __del__(self) -> None:
        if getattr(self, "_sim", None):
            library().trefoilSimDestroy(self._sim)
        if getattr(self, "_trace", None):
            library().trefoilTraceDestroy(self._trace)

    def run(
        self,
        cluster: Cluster,
        costs: Costs | None = None,
        engine: str = "queues",
        *,
        num_sms: int = 0,
        oversubscription: float = 0.0,
        start_skew_us: float = 0.0,
        seed: int = 1,
        changes: list[tuple[str, int, float]] | None = None,
        flows: Sequence[tuple[float, ...]] = (),
        products: bool = False,
    ) -> Result:
        """changes: (kind, index, factor), see CHANGES and trefoil_change_t. flows: (from, to), and
        what of (GB/s, start, end) is not 0, see trefoil_flow_t."""
        listed = [Change(_index(CHANGES, k, "change"), i, f) for k, i, f in changes or []]
        array = (Change * len(listed))(*listed)
        background = (Flow * len(flows))(*(Flow(int(a), int(b), *more) for a, b, *more in flows))
        run = SimRun(
            ct.pointer(cluster.fields),
            ct.pointer(costs.fields) if costs else None,
            _index(ENGINES, engine, "engine"),
            num_sms,
            oversubscription,
            start_skew_us,
            seed,
            array,
            len(listed),
            background,
            len(flows),
            int(products),
        )
        raw = SimResult()
        _check(library().trefoilSimRun(self._sim, ct.byref(run), ct.byref(raw)))
        return Result(*(_read(raw.op[op]) for op in range(2)))


def _read(op: SimOp) -> OpResult:
    finish = np.ctypeslib.as_array(op.finish_us, shape=(op.num_ranks,)).copy()
    result = OpResult(
        op.us,
        op.floor_us,
        op.closed_form.us,
        ENGINES[op.engine],
        RESOURCES[op.floor_kind],
        op.chunk_tokens,
        finish,
    )
    for i in range(op.num_links):
        link = op.links[i]
        kind = RESOURCES[link.kind]
        result.max_bytes[kind] = max(result.max_bytes.get(kind, 0), link.bytes)
        result.max_busy_us[kind] = max(result.max_busy_us.get(kind, 0.0), link.busy_us)
        result.bytes_of.setdefault(kind, {})[link.index] = link.bytes
        result.busy_us_of.setdefault(kind, {})[link.index] = link.busy_us
    return result
