"""What `trefoil check --json` and `trefoil plan --closed-form --json` say, as typed records.

docs/check.md and docs/plan.md describe the files. Everything is checked on the way in: a file that
does not fit raises ResultError with a sentence that names the file and the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trefoil.inputs import read_json

TIERS = ("self", "nvlink", "net")


class ResultError(ValueError):
    """A results file cannot be read; the text says which one and why."""


@dataclass(frozen=True)
class Run:
    """One operation shape that was run through the C API and compared with the reference."""

    mode: str  # "ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major"
    ranks: int
    ranks_per_node: int
    tokens: int  # per rank
    hidden: int  # elements of a token
    experts: int
    topk: int
    dtype: str
    ok: bool
    seconds: dict[str, float]  # "update", "dispatch", "combine", "reference"
    bytes_compared: int
    dispatch_bytes: list[list[int]]  # [source][destination]
    combine_bytes: list[list[int]]
    tiers: list[list[str]]  # of each pair
    received_rows: list[int]  # per rank
    difference: str = ""  # the first one, if not ok

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    def tier_bytes(self, op: str) -> dict[str, int]:
        """Bytes of "dispatch" or "combine" by tier."""
        matrix = self.dispatch_bytes if op == "dispatch" else self.combine_bytes
        sums = dict.fromkeys(TIERS, 0)
        for row, tiers in zip(matrix, self.tiers, strict=True):
            for count, tier in zip(row, tiers, strict=True):
                sums[tier] += count
        return sums


@dataclass(frozen=True)
class Cases:
    """A run of seeded random cases."""

    cases: int
    failed: int
    seconds: float
    seed: str
    difference: str = ""  # what differed first, and how to see it again


@dataclass(frozen=True)
class Prediction:
    """The closed form for one number of GPUs."""

    gpus: int
    ep: int  # GPUs that one expert-parallel group spans
    seconds: dict[str, float]  # "dispatch", "combine"
    limit: dict[str, str]  # the port that limits, per operation
    nvlink_bytes: dict[str, int]  # of the busiest NVLink port, per operation
    nic_bytes: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """The closed form of one mode over many numbers of GPUs."""

    mode: str  # "ll" or "ht"
    cluster: str
    moe: str
    tokens: int
    points: list[Prediction]
    details: str = ""  # what else fixes the numbers: row types, kind of combine
    trace: bool = False  # routing of a file; else uniform
    rates: dict[str, float] = field(default_factory=dict)  # of a port, and fixed times


@dataclass(frozen=True)
class CheckFile:
    runs: list[Run]
    cases: Cases | None
    environment: dict[str, str]


T = TypeVar("T")
PLAIN: dict[str, type] = {"int": int, "str": str, "bool": bool}
NO_NAMES: Mapping[str, str] = {}


class Fields:
    """Typed access to a JSON object that says where something is missing."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ResultError(f"{where} is not a JSON object")
        self.data: dict[str, Any] = data
        self.where = where

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.data.get(name, default)
        wrong_bool = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or wrong_bool:
            raise ResultError(f"{self.where}: field {name!r} is missing or of the wrong type")
        return value

    def number(self, name: str) -> float:
        value = float(self.get(name, (int, float)))
        if not 0 <= value < float("inf"):
            raise ResultError(f"{self.where}: field {name!r} is not a finite number >= 0")
        return value

    def matrix(self, name: str, size: int, kind: type) -> list[list[Any]]:
        rows = self.get(name, list)
        fits = len(rows) == size and all(
            isinstance(row, list) and len(row) == size and all(isinstance(v, kind) for v in row)
            for row in rows
        )
        if not fits:
            raise ResultError(f"{self.where}: field {name!r} is not a {size} by {size} matrix")
        return rows

    def record(self, kind: type[T], names: Mapping[str, str] = NO_NAMES, **given: Any) -> T:
        """A dataclass of the fields that are called as its own are, or as `names` says."""
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            name = names.get(f.name, f.name)
            if f.name not in given and str(f.type) in PLAIN:
                given[f.name] = self.get(name, PLAIN[str(f.type)])
            elif f.name not in given and str(f.type) == "float":
                given[f.name] = self.number(name)
            elif f.name not in given and str(f.type) == "float | None":
                given[f.name] = None if self.data.get(name) is None else self.number(name)
        return kind(**given)


def load(path: Path) -> Fields:
    return Fields(read_json(path, ResultError), str(path))


def _run(data: Any, where: str) -> Run:
    fields = Fields(data, where)
    ranks = fields.get("ranks", int)
    if not 1 <= ranks <= 4096:
        raise ResultError(f"{where}: field 'ranks' is {ranks}")
    tiers = fields.matrix("tiers", ranks, str)
    if any(tier not in TIERS for row in tiers for tier in row):
        raise ResultError(f"{where}: field 'tiers' holds something else than {', '.join(TIERS)}")
    received = fields.get("received_rows", list)
    if len(received) != ranks or not all(isinstance(n, int) for n in received):
        raise ResultError(f"{where}: field 'received_rows' is not {ranks} numbers")
    return fields.record(
        Run,
        ranks_per_node=max(1, fields.get("ranks_per_node", int)),
        seconds={
            name: fields.number(f"{name}_s")
            for name in ("update", "dispatch", "combine", "reference")
            if fields.get("ok", bool)  # what is wrong has no times
        },
        dispatch_bytes=fields.matrix("dispatch_bytes", ranks, int),
        combine_bytes=fields.matrix("combine_bytes", ranks, int),
        tiers=tiers,
        received_rows=received,
        difference=str(fields.data.get("difference") or ""),
    )


def load_check(path: Path) -> CheckFile:
    """Reads a file that `trefoil check --json` wrote: real shapes, random cases, or both."""
    top = load(path)
    runs = [
        _run(data, f"{path}: runs[{n}]") for n, data in enumerate(top.get("runs", list, default=[]))
    ]
    cases = None
    if "cases" in top.data:
        cases = top.record(
            Cases,
            failed=top.get("failed", int, default=0),
            seed=str(top.data.get("seed", "")),
            difference=str(top.data.get("failure") or ""),
        )
    if not runs and cases is None:
        raise ResultError(f"{path}: holds neither 'runs' nor 'cases'")
    environment = top.get("environment", dict, default={})
    return CheckFile(runs, cases, {str(k): str(v) for k, v in environment.items()})


def _prediction(data: Any, where: str) -> Prediction:
    fields = Fields(data, where)
    ops = {op: Fields(fields.get(op, dict), f"{where}.{op}") for op in ("dispatch", "combine")}
    return fields.record(
        Prediction,
        seconds={op: f.number("seconds") for op, f in ops.items()},
        limit={op: f.get("limit", str) for op, f in ops.items()},
        nvlink_bytes={op: f.get("nvlink_bytes", int) for op, f in ops.items()},
        nic_bytes={op: f.get("nic_bytes", int) for op, f in ops.items()},
    )


def load_plan(path: Path) -> Plan:
    """Reads a file that `trefoil plan --closed-form --json` wrote."""
    top = load(path)
    points = [
        _prediction(data, f"{path}: points[{n}]") for n, data in enumerate(top.get("points", list))
    ]
    if not points:
        raise ResultError(f"{path}: 'points' is empty")
    details = {
        "dispatch_dtype": "dispatch in {}",
        "combine": "{} combine",
        "trace": "routing of {}",
    }
    if top.data.get("mode") == "ht":
        del details["combine"]  # exact and partial are LL's
    said = [text.format(top.data[key]) for key, text in details.items() if top.data.get(key)]
    rates = Fields(top.get("rates", dict, default={}), f"{path}: rates")
    return top.record(
        Plan,
        trace=bool(top.data.get("trace")),
        rates={name: rates.number(name) for name in rates.data},
        details=", ".join(said),
        points=points,
    )
