"""Measured rows beside what was predicted for them: from a dated table, else from the model now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trefoil.compare.slow_parts import Finding
from trefoil.export.predicted import Predictions, find_prediction
from trefoil.fit.cases import Case
from trefoil.fit.model import Setting
from trefoil.fit.split import load_split
from trefoil.inputs import read_text
from trefoil.reference import TrefoilError
from trefoil.simulator import Cluster, CostRecord, Costs, OpResult, Simulation

ROUNDED = 5e-4  # records keep four digits of what their intervals come from
FABRIC = "hgx-h200"  # for sizes that a record's own cluster does not have


@dataclass(frozen=True)
class Row:
    """One measured time and what was said of it; times in microseconds."""

    case: Case
    us: float
    low_us: float
    high_us: float
    rows_behind: int
    extrapolated: bool
    closed_form_us: float
    source: str  # "predicted 2026-11-21", "model"
    limit: str  # the resource that needs longest
    limit_gb_per_s: float  # its rate in the model
    limit_share: float  # of that rate, if all excess lies there; 1 = as the model says

    @property
    def error_percent(self) -> float:
        return 100 * (self.us / self.case.us - 1)

    @property
    def is_inside(self) -> bool:
        low, high = self.low_us * (1 - ROUNDED), self.high_us * (1 + ROUNDED)
        return low <= self.case.us <= high


class Model:
    """A cost record and the setting that its kernels were measured in."""

    def __init__(
        self,
        record: str,
        *,
        cluster: str | None = None,
        gpus_per_node: int | None = None,
        copies_inputs: bool = True,
    ) -> None:
        """copies_inputs: as the library; kernels alone take inputs in no window by FIFOs."""
        self.name, self.copies_inputs = record, copies_inputs
        self.record = CostRecord(record)
        setting = load_split(record).setting
        self._own = cluster or setting.cluster
        self._fixed = cluster is not None
        self.setting = replace(
            setting,
            cluster=self._own,
            gpus_per_node=gpus_per_node or setting.gpus_per_node,
        )
        self._made: dict[tuple[str, object], Simulation] = {}

    @property
    def dispatch_dtype(self) -> str:
        return "bf16" if self.setting.dispatch_row == "bf16" else "fp8"

    @property
    def kernels(self) -> str:
        return self.name.split("-")[0]

    def cluster_of(self, case: Case) -> Cluster:
        """The record's, unless it has fewer GPUs or no network."""
        cluster = Cluster(self._own)
        fields = cluster.fields
        too_small = case.ranks > fields.max_gpus or (case.nodes > 1 and fields.nic_gb_per_s <= 0)
        if not too_small:
            return cluster
        if self._fixed:
            raise TrefoilError(f"cluster {self._own} has no {case.nodes} nodes, {case.ranks} GPUs")
        return Cluster(FABRIC)

    def costs_of(self, case: Case) -> Costs:
        costs = Costs.on(self.cluster_of(case), self.record)
        if not self.copies_inputs:
            costs.set({"dispatch.pull_sms": 0, "dispatch.pull_sms_of_two": 0})
        return costs

    def _setting_of(self, case: Case) -> Setting:
        return replace(self.setting, gpus_per_node=max(1, case.ranks // case.nodes))

    def replay(self, case: Case) -> OpResult:
        setting, cluster = self._setting_of(case), self.cluster_of(case)
        workload = setting.workload(case)
        key = (cluster.name, workload)
        if key not in self._made:
            self._made[key] = Simulation(workload)
        costs, how = self.costs_of(case), case.circumstances
        how["products"] &= costs.get("product_share") > 0  # others do not know what they take
        return self._made[key].run(cluster, costs, **how)[case.op]

    def rates(self, case: Case) -> dict[str, float]:
        """10^9 bytes a second of a port: "nvlink", "net" (0: there is none)."""
        fields, get = self.cluster_of(case).fields, self.costs_of(case).get
        return {
            "nvlink": get("nvlink_gb_per_s") or fields.nvlink_gb_per_s,
            "net": get("nic_gb_per_s") or fields.nic_gb_per_s,
        }


def compare(cases: Sequence[Case], model: Model, tables: Sequence[Predictions]) -> list[Row]:
    return [_row(case, model, tables) for case in cases]


def _row(case: Case, model: Model, tables: Sequence[Predictions]) -> Row:
    replayed = model.replay(case)
    known = find_prediction(tables, case, model.kernels, model.dispatch_dtype)
    if known is not None:
        table, p = known
        us, low, high, n = p.us, p.low_us, p.high_us, p.rows_behind
        beyond, closed = bool(p.extrapolated), p.closed_form_us
        source = f"predicted {table.about.get('date', table.path.name)}"
    else:
        us = model.setting.time_of(replayed)
        interval = model.record.interval(case.op, {**case.point, "sms": case.sms}, us)
        low, high, n = interval.low_us, interval.high_us, interval.n
        beyond, closed, source = interval.extrapolated, replayed.closed_form_us, "model"
    limit = max(replayed.max_busy_us, key=lambda k: replayed.max_busy_us[k], default="")
    busy = replayed.max_busy_us.get(limit, 0.0)
    rate = replayed.max_bytes.get(limit, 0) / busy / 1e3 if busy > 0 else 0.0
    rest = replayed.us - busy
    # Only where the limit is most of the time does the rest say little.
    share = busy / (case.us - rest) if busy > 0.5 * replayed.us and case.us > rest else math.nan
    return Row(case, us, low, high, n, beyond, closed, source, limit, rate, share)


def slow_kinds(rows: Sequence[Row]) -> list[Finding]:
    """Kinds of resource most of whose rows are above their interval."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if not math.isnan(row.limit_share):
            kinds.setdefault(row.limit, []).append(row)
    found = []
    for kind, own in kinds.items():
        above = sum(row.case.us > row.high_us for row in own)
        if 2 * above > len(own):
            share = median(row.limit_share for row in own)
            rate = median(row.limit_gb_per_s for row in own)
            text = f"{above} of {len(own)} rows above their interval; the model has {rate:.0f} GB/s"
            found.append(Finding(kind, share, text))
    return sorted(found, key=lambda f: f.share)


def default_record(mode: str, kernels: str, device: str = "", nodes: int = 1) -> str:
    """The committed record that was measured nearest."""
    if kernels == "trefoil":
        return f"trefoil-{mode}-h200"
    if mode == "ll" and nodes == 1 and "H200" in device:
        return "deepep-ll-h200-1node"
    return f"deepep-{mode}-h100"


def kernels_of_table(path: Path) -> tuple[str, str]:
    """(kernels, device) by the columns kernel_source, framework and device of the first row."""
    lines = read_text(path).splitlines()
    body = [line for line in lines if line and not line.startswith("#")]
    row = dict(zip(body[0].split(","), body[1].split(","), strict=False)) if len(body) > 1 else {}
    source = f"{row.get('kernel_source', '')} {row.get('framework', '')}".lower()
    return ("deepep" if "deepep" in source else "trefoil"), row.get("device", "")
