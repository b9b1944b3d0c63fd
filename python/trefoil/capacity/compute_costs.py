"""Compute records: which share of a GPU's peaks kernels reach, from times that were measured.

A record (compute/*.json) holds rows (operations, bytes, time of a kernel), and
for each kind of kernel and dtype four costs, fitted to the rows that were not held out:

    time = launch + ((operations / (math_share peak))^s + (bytes / (memory_share peak))^s)^(1/s)

s is the sharpness: 1, tensor cores and memory work one after the other; large, the longer one alone
counts. Shares are carried over to GPUs other than the record's. A kind that no record knows is a
roofline: no launch, shares of 1, s without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trefoil.inputs import read_json

FOLDER = Path(__file__).resolve().parent / "compute"
DEFAULT = "deepgemm-h800"
ROOFLINE = "roofline"
KINDS = (
    *("product", "grouped", "elementwise"),
    *("attention-prefill", "attention-decode", "mla-decode"),
)
GRADIENT_KINDS = ("a2sgd-means", "a2sgd-move", "a2sgd-exchange", "sort")  # trefoil.gradients.costs


class ComputeError(ValueError):
    """A compute record cannot be read or made; the text says why."""


@dataclass(frozen=True)
class KindCosts:
    """Of one kind of kernel and one dtype."""

    launch_us: float
    math_share: float
    memory_share: float
    sharpness: float
    low: float = 1.0  # about 90 % of measured / predicted lie between
    high: float = 1.0
    is_fitted: bool = True  # False: published peaks, taken over
    edge_keys: float = 0.0  # attention in prefill: keys that a query costs beyond those it sees

    @property
    def origin(self) -> str:
        return "fitted" if self.is_fitted else "published"

    def seconds(self, math: float, memory: float) -> float:
        """Of a kernel that takes so long at the peaks of the tensor cores and of the memory."""
        a, b = math / self.math_share, memory / self.memory_share
        longer, shorter = max(a, b), min(a, b)
        if longer <= 0:
            return self.launch_us * 1e-6
        s = self.sharpness
        return self.launch_us * 1e-6 + longer * (1 + (shorter / longer) ** s) ** (1 / s)


@dataclass(frozen=True)
class ComputeRecord:
    name: str
    gpu: str  # that was measured
    about: str
    row_tile: int  # rows of an expert are rounded up to it in a grouped product
    kinds: dict[tuple[str, str], KindCosts]

    def of(self, kind: str, dtype: str) -> KindCosts | None:
        """None: the record knows nothing of the kind. The shares of another dtype stand in."""
        found = self.kinds.get((kind, dtype))
        if found is None:
            found = next((c for (k, _), c in self.kinds.items() if k == kind), None)
        return found


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(name: str) -> ComputeRecord | None:
    """A record by its name or file; None for the roofline. ComputeError says what is wrong."""
    if name == ROOFLINE:
        return None
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    if path.suffix != ".json":
        raise ComputeError(
            f"no compute record {name!r}: expected {', '.join([*names(), ROOFLINE])} or a file"
        )
    data = read_json(path, ComputeError)
    try:
        return record_of(data)
    except KeyError as error:
        raise ComputeError(f"{path}: field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ComputeError(f"{path}: {error}") from error


def record_of(data: dict[str, Any]) -> ComputeRecord:
    if data["format"] != "trefoil-compute":
        raise ComputeError(f"format {data['format']!r}: expected 'trefoil-compute'")
    kinds = {(k["kind"], k["dtype"]): _costs_of(k) for k in data["kinds"]}
    if not kinds:
        raise ComputeError("it has rows but no costs: python -m trefoil.capacity.compute_fit FILE")
    tile = int(data["row_tile"])
    return ComputeRecord(data["name"], data["gpu"]["name"], data["about"], tile, kinds)


def _costs_of(kind: dict[str, Any]) -> KindCosts:
    if kind["kind"] not in (*KINDS, *GRADIENT_KINDS):
        raise ComputeError(f"kind {kind['kind']!r}: expected {', '.join(KINDS)}")
    fields = ("launch_us", "math_share", "memory_share", "sharpness")
    values = {name: float(kind[name]["value"]) for name in fields}
    if values["launch_us"] < 0 or min(values["math_share"], values["memory_share"]) <= 0:
        raise ComputeError(f"{kind['kind']}: shares must be positive, a launch not negative")
    if values["sharpness"] < 1:
        raise ComputeError(f"{kind['kind']}: sharpness {values['sharpness']:g} is below 1")
    ratio = kind.get("ratio") or {"low": 1.0, "high": 1.0}
    edge = float(kind.get("edge_keys", {"value": 0.0})["value"])
    if edge < 0:
        raise ComputeError(f"{kind['kind']}: edge_keys must not be negative")
    return KindCosts(**values, **ratio, is_fitted=bool(kind["fitted"]), edge_keys=edge)


def peak_seconds(row: dict[str, Any], gpu: dict[str, Any]) -> tuple[float, float]:
    """Of a measured row, at the peaks of the tensor cores and of the memory of the record's GPU."""
    rate = gpu["fp8_tflops"] if row["dtype"] == "fp8" else gpu["bf16_tflops"]
    return row["flops"] / (rate * 1e12), row["bytes"] / (gpu["hbm_gb_per_s"] * 1e9)


def ratios(rows: Sequence[dict[str, Any]], gpu: dict[str, Any], costs: KindCosts) -> list[float]:
    """Measured over predicted time of each row."""
    return [row["us"] * 1e-6 / costs.seconds(*peak_seconds(row, gpu)) for row in rows]
