"""Measured tables of expert-parallel dispatch and combine: the CSV columns of aiconfigurator.

Two forms, told apart by their columns; times in microseconds, one row a case:

    LL  ..., dispatch_avg_t_us, combine_avg_t_us
    HT  ..., dispatch_sms, dispatch_transmit_us, dispatch_notify_us, combine_sms, ...

both with node_num, hidden_size, num_token (of a rank), num_topk, num_experts. Bandwidth columns are
not read: they follow from the times. Lines that start with # are comments. A table of ours
(docs/measure.md) may also have num_gpus, in place of a fixed number a node, and say how tokens were
routed, so that the very same routing can be replayed: routing, skew, ragged, empty_ranks, seed. In
late_us it says how much later than the others the last rank started, in LL in sms how many SMs
worked, and in background what ran meanwhile.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.inputs import read_text
from trefoil.table import write_csv

OPS = ("dispatch", "combine")
SHAPE_COLUMNS = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts")
LL_COLUMNS = ("dispatch_avg_t_us", "combine_avg_t_us")
HT_COLUMNS = tuple(f"{op}_{part}" for op in OPS for part in ("sms", "transmit_us", "notify_us"))
LABELS = ("framework", "version", "device", "op_name", "kernel_source")
GPUS_PER_NODE = 8
BACKGROUNDS = ("nothing", "copies", "copies-from-0", "gemm")
ROUTINGS = ("uniform", "zipf", "hot-expert", "hot-rank")


class TableError(ValueError):
    """A table that cannot be used; the text is one sentence that names file, line and column."""


@dataclass(frozen=True)
class Case:
    """One measured time."""

    op: str
    mode: str  # "ll", "ht"
    nodes: int
    ranks: int
    hidden: int
    tokens: int
    topk: int
    experts: int
    sms: int  # that worked on it; 0: the table does not say
    us: float
    routing: str = "uniform"  # with the next four: what makes it (trefoil/trace.h)
    skew: float = 0.0
    ragged: float = 0.0
    empty_ranks: int = 0
    seed: int = 1
    late_us: float = 0.0  # the last rank's start after the others'
    background: str = "nothing"  # what ran meanwhile (docs/measure.md), one of BACKGROUNDS
    masked_selections: int = 0  # of each rank, which are -1

    @property
    def is_balanced(self) -> bool:
        even = self.routing == "uniform" and self.ragged == 0 and self.empty_ranks == 0
        return even and self.late_us == 0 and self.background == "nothing"

    @property
    def flows(self) -> list[tuple[int, int]]:
        """From rank to rank, what copy engines carried in the background."""
        senders = {"copies": self.ranks, "copies-from-0": 1}.get(self.background, 0)
        return [(r, (r + 1) % self.ranks) for r in range(senders) if self.ranks > 1]

    @property
    def circumstances(self) -> dict[str, Any]:
        """What differs from ranks in step and by themselves, as Simulation.run takes it."""
        late = [("start-us", self.ranks - 1, self.late_us)] if self.late_us > 0 else []
        found = {"num_sms": self.sms, "changes": late, "flows": self.flows}
        return {**found, "products": self.background == "gemm"}

    @property
    def run_key(self) -> tuple[object, ...]:
        """The same where one run of the simulator answers."""
        return (self.sms, self.late_us, self.background)

    @property
    def point(self) -> dict[str, int]:
        names = ("nodes", "ranks", "hidden", "experts", "topk", "tokens")
        return {name: getattr(self, name) for name in names}


def _whole(text: str | None, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        raise TableError(f"{where} is {text!r}: must be a whole number") from None
    if not 0 <= value <= 1 << 32:
        raise TableError(f"{where} is {value}: must be in [0, 2^32]")
    return value


def _number(text: str | None, where: str, what: str = "a number") -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise TableError(f"{where} is {text!r}: must be {what}") from None
    if not (math.isfinite(value) and 0 <= value <= 1e12):
        raise TableError(f"{where} is {text}: must be finite and not negative")
    return value


def _time(text: str | None, where: str) -> float:
    return _number(text, where, "a time in microseconds")


def _routing_of(row: dict[str, str | None], where: str) -> dict[str, Any]:
    """The columns that say routing and background work, where the table has them."""
    found: dict[str, Any] = {}
    for column, known in (("routing", ROUTINGS), ("background", BACKGROUNDS)):
        if column in row:
            found[column] = row[column]
            if row[column] not in known:
                raise TableError(
                    f"{where}{column} is {row[column]!r}: known are {', '.join(known)}"
                )
    for column in ("skew", "ragged", "late_us"):
        if column in row:
            found[column] = _number(row[column], where + column)
    for column in ("empty_ranks", "seed"):
        if column in row:
            found[column] = _whole(row[column], where + column)
    return found


def _mode_of(columns: Iterable[str], path: Path) -> str:
    found = set(columns)
    missing = [c for c in SHAPE_COLUMNS if c not in found]
    if missing:
        raise TableError(f"{path}: the column {missing[0]} is missing")
    for mode, needed in (("ll", LL_COLUMNS), ("ht", HT_COLUMNS)):
        if all(c in found for c in needed):
            return mode
    raise TableError(
        f"{path}: has neither the columns of LL ({', '.join(LL_COLUMNS)}) nor those of HT "
        f"({', '.join(HT_COLUMNS)})"
    )


def _read_rows(path: Path) -> list[tuple[int, dict[str, str | None]]]:
    try:
        text = read_text(path)
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TableError(f"{path}: is not text") from None
    lines = [(n, s) for n, s in enumerate(text.splitlines(), 1) if s and not s.startswith("#")]
    if not lines:
        raise TableError(f"{path}: is empty")
    try:
        rows = list(csv.reader([s for _, s in lines], strict=True))
    except csv.Error as error:
        raise TableError(f"{path}: {error}") from None
    header = rows[0]
    if len(rows) != len(lines):
        raise TableError(f"{path}: a field runs over several lines")
    for (number, _), row in zip(lines[1:], rows[1:], strict=True):
        if len(row) != len(header):
            raise TableError(
                f"{path}, line {number}: {len(row)} fields, the header has {len(header)}"
            )
    return [
        (number, dict(zip(header, row, strict=True)))
        for (number, _), row in zip(lines, rows, strict=True)
    ]


def read_table(
    path: Path, time: str = "transmit", gpus_per_node: int = GPUS_PER_NODE
) -> list[Case]:
    """All cases of a table, two a row. time, HT: "transmit", or "total" with the notify part."""
    rows = _read_rows(path)
    mode = _mode_of(rows[0][1], path)
    cases = []
    for number, row in rows[1:]:
        where = f"{path}, line {number}: "
        nodes, hidden, tokens, topk, experts = (_whole(row[c], where + c) for c in SHAPE_COLUMNS)
        if min(nodes, hidden, topk, experts, tokens) < 1:
            raise TableError(f"{where}nodes, hidden, tokens, top-k and experts must be positive")
        for op in OPS:
            sms = 0
            if mode == "ll":
                us = _time(row[f"{op}_avg_t_us"], f"{where}{op}_avg_t_us")
                sms = _whole(row["sms"], where + "sms") if "sms" in row else 0
            else:
                sms = _whole(row[f"{op}_sms"], f"{where}{op}_sms")
                us = _time(row[f"{op}_transmit_us"], f"{where}{op}_transmit_us")
                notify = _time(row[f"{op}_notify_us"], f"{where}{op}_notify_us")
                us += notify if time == "total" else 0.0
            if us <= 0:
                raise TableError(f"{where}the time of {op} is {us}: must be positive")
            ranks = nodes * gpus_per_node
            if "num_gpus" in row:
                ranks = _whole(row["num_gpus"], where + "num_gpus")
            shape = (hidden, tokens, topk, experts)
            how = _routing_of(row, where)
            cases.append(Case(op, mode, nodes, ranks, *shape, sms, us, **how))
    if not cases:
        raise TableError(f"{path}: has a header and no rows")
    return cases


def _pair_up(path: Path, cases: Iterable[Case]) -> dict[tuple[object, ...], dict[str, Case]]:
    """Dispatch and combine of each shape and number of SMs; what is left over of a shape in HT is
    paired in its order, since a row has a number of SMs for each."""
    pairs: dict[tuple[object, ...], dict[str, Case]] = {}
    for c in cases:
        key = (c.mode, c.nodes, c.hidden, c.tokens, c.topk, c.experts, c.sms)
        pairs.setdefault(key, {})[c.op] = c
    halves = [key for key, pair in pairs.items() if len(pair) == 1]
    for key in halves:
        for other in halves:
            if key in pairs and other in pairs and key[:-1] == other[:-1] and key[0] == "ht":
                both = {**pairs[key], **pairs[other]}
                if len(both) == 2:
                    pairs[key] = both
                    del pairs[other]
    if any(len(pair) == 1 for pair in pairs.values()):
        raise TableError(f"{path}: every shape needs both dispatch and combine")
    return pairs


def write_table(
    path: Path, cases: Iterable[Case], labels: dict[str, str], dispatch_is_fp8: bool = True
) -> int:
    """Writes cases as a table that read_table and aiconfigurator read; returns the rows.

    labels: framework, version, device, kernel_source. Dispatch and combine of one shape make a row;
    bandwidth (LL) is bytes of (token, expert) rows over the time, as that project counts it. Nodes
    are those of the cases; a reader has to know how many GPUs a node has.
    """
    pairs = _pair_up(path, cases)
    modes = {key[0] for key in pairs}
    if len(modes) != 1:
        raise TableError(f"{path}: one table holds LL or HT, not both, and not nothing")
    mode = modes.pop()
    if mode == "ll":
        tail = ["combine_avg_t_us", "combine_bandwidth_gbps"]
        tail += ["dispatch_avg_t_us", "dispatch_bandwidth_gbps"]
    else:
        tail = list(HT_COLUMNS)
    all_labels = {"op_name": "ll" if mode == "ll" else "normal", **labels}
    rows = (_row(pair, all_labels, dispatch_is_fp8) for pair in pairs.values())
    write_csv(path, [*LABELS, *SHAPE_COLUMNS, *tail], rows)
    return len(pairs)


def _row(pair: dict[str, Case], labels: dict[str, str], fp8: bool) -> dict[str, object]:
    c = pair["dispatch"]  # of both, all but the number of SMs is the same
    row: dict[str, object] = {name: labels.get(name, "") for name in LABELS}
    row.update(
        node_num=c.nodes,
        hidden_size=c.hidden,
        num_token=c.tokens,
        num_topk=c.topk,
        num_experts=c.experts,
    )
    for op, case in pair.items():
        if c.mode == "ll":
            is_fp8 = fp8 and op == "dispatch"
            bytes_of_row = c.hidden + c.hidden // 32 if is_fp8 else c.hidden * 2
            row[f"{op}_avg_t_us"] = repr(case.us)
            rate = c.tokens * c.topk * bytes_of_row / case.us / 1e3
            row[f"{op}_bandwidth_gbps"] = round(rate, 4)
        else:
            row[f"{op}_sms"] = case.sms
            row[f"{op}_transmit_us"] = repr(case.us)
            row[f"{op}_notify_us"] = 0
    return row
