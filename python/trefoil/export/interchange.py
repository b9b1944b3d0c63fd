"""Tables and schedules that other planners read, and measured figures of ours as such tables.

    cases_of_bench   the JSON of `trefoil bench` or of the kernels' benchmark -> measured cases
    predicted_cases  predictions over numbers of GPUs and tokens -> cases
    write_goal       the plan of one operation as a GOAL schedule

Cases become a table in the columns of aiconfigurator with trefoil.fit.cases.write_table.

GOAL ("group operation assembly language", read by LogGOPSim and ATLAHS) is text: a block for each
rank with sends, receives and what they wait for, so unlike a collective's name it keeps the plan's
bytes pair by pair. Rows that stay within a rank are left out: they cross nothing.
"""

from __future__ import annotations

import ctypes as ct
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from trefoil import structs
from trefoil.fit.cases import OPS, Case, TableError
from trefoil.fit.model import Plans, Setting
from trefoil.inputs import read_text
from trefoil.reference import _check, library
from trefoil.simulator import MODES, VARIANTS, Costs, Moe, Simulation, Workload

SELF_TIER = 0
NET_OUT, FORWARD, RETURN, NET_BACK = 1, 2, 3, 4


# ---- Measured figures of ours -------------------------------------------------------------------


OWN_OPERATIONS = ("dispatch expert-major", "combine expert-major exact")
OTHER_OPERATIONS: dict[str, tuple[str, dict[str, Any]]] = {  # what differs in their plan
    "dispatch rank-major": ("dispatch", {}),
    "dispatch expert-major e4m3": ("dispatch", {"dispatch_row": "fp8-128"}),
    "combine rank-major": ("combine", {"combine_partial": True}),
    "combine expert-major partial": ("combine", {"combine_partial": True}),
}


def cases_of_bench(path: Path) -> list[Case]:
    """Cases of measurements of ours whose check passed: LL expert-major, exact, or HT flat; bf16.

    path: JSON of the kernels' benchmarks (LL: lockstep times, HT: kernel times), or of `trefoil
    bench --gpu --json` (kernel times of plain calls, p50).
    """
    try:
        data = json.loads(read_text(path))
        api = "gpu_benchmarks" in data
        cases = _fastest(_of_api(data["gpu_benchmarks"]) if api else _of_kernels(data["rows"]))
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path}: is no result of a benchmark of ours: {error!r}") from None
    if not cases:
        raise TableError(f"{path}: has no checked rows of {' and '.join(OWN_OPERATIONS)}")
    return cases


def other_cases_of_bench(path: Path) -> dict[str, list[Case]]:
    """By name of OTHER_OPERATIONS: what the low-latency kernels' benchmark measured beside
    OWN_OPERATIONS, which no cost record was fitted to."""
    rows = json.loads(read_text(path))["rows"]
    return {
        name: [
            _case(op, row, row["lockstep_us"])
            for row in rows
            if row["operation"] == name and row.get("check") == "ok"
        ]
        for name, (op, _) in OTHER_OPERATIONS.items()
    }


def _fastest(cases: Iterator[Case]) -> list[Case]:
    """Of each operation, shape and SMs: benchmarks also vary what a user does not choose."""
    found: dict[Case, Case] = {}
    for case in cases:
        key = replace(case, us=0.0)
        if key not in found or case.us < found[key].us:
            found[key] = case
    return list(found.values())


def _case(op: str, row: Mapping[str, Any], us: float) -> Case:
    numbers = (int(row[key]) for key in ("ranks", "hidden", "tokens", "topk", "experts"))
    return Case(op, "ll", 1, *numbers, 0, us)


def _is_ll(row: Mapping[str, Any]) -> bool:
    """The kernels of high throughput have operations of the same name."""
    return "kernel_us" not in row


def _of_kernels(rows: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    for row in rows:
        op, _, layout = row["operation"].partition(" ")
        if layout == "flat" and op in OPS and row.get("check", "ok") == "ok":
            yield replace(_case(op, row, row["kernel_us"]), mode="ht", sms=int(row["sms"]))
        elif row["operation"] in OWN_OPERATIONS and _is_ll(row) and row.get("check") == "ok":
            yield _case(OPS[OWN_OPERATIONS.index(row["operation"])], row, row["lockstep_us"])


def _of_api(rows: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    for row in rows:
        if row["mode"] == "ll-expert-major" and row["variant"] == "plain" and row["ok"]:
            for op in OPS:
                yield _case(op, row, round(1e6 * row["times"][op]["kernel"]["called"]["p50_s"], 4))


# ---- Predictions --------------------------------------------------------------------------------


def predicted_cases(
    setting: Setting,
    costs: Costs,
    moe: Moe,
    gpus: Sequence[int],
    tokens: Sequence[int],
    sms: Sequence[int] = (0,),
) -> Iterator[Case]:
    """Both operations of every combination, by the engine of queues."""
    for ranks in gpus:
        for count in tokens:
            nodes = max(1, ranks // setting.gpus_per_node)
            shape = (moe.fields.hidden, count, moe.fields.topk, moe.fields.num_experts)
            asked = Case("dispatch", setting.mode, nodes, ranks, *shape, 0, 0.0)
            plans = Plans(setting)  # one combination at a time: plans of many ranks are large
            simulation = plans.of(asked)
            for number in sms:
                result = simulation.run(plans.cluster, costs, num_sms=number)
                for op in OPS:
                    used = number or round(costs.get("num_sms"))
                    yield Case(op, setting.mode, nodes, ranks, *shape, used, result[op].us)


# ---- GOAL ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    phase: int
    chunk: int
    origin: int
    src: int
    dst: int
    tier: int
    bytes: int


def transfers(workload: Workload, op: str) -> list[Transfer]:
    """The plan of one operation, in its own order."""
    simulation = Simulation(workload)  # makes and checks the routing
    size = workload.dispatch_row_bytes if op == "dispatch" else workload.combine_row_bytes
    config = structs.PlanConfig(
        MODES[workload.mode],
        OPS.index(op),
        VARIANTS.index(workload.variant),
        int(workload.combine_partial),
        workload.chunk_tokens,
        size,
    )
    lib, plan, raw, found = library(), ct.c_void_p(), structs.Transfer(), []
    _check(lib.trefoilPlanCreate(ct.byref(plan), simulation.routing_pointer, ct.byref(config)))
    try:
        while lib.trefoilPlanNext(plan, ct.byref(raw)):
            key = (raw.phase, raw.chunk, raw.origin, raw.src, raw.dst, raw.tier)
            found.append(Transfer(*key, raw.rows * raw.row_bytes))
    finally:
        lib.trefoilPlanDestroy(plan)
    return found


def write_goal(file: TextIO, num_ranks: int, plan: Sequence[Transfer]) -> int:
    """Writes the schedule; returns the messages. Dispatch and combine are files of their own.

    A message has the tag of its place in the plan. A FORWARD requires the receive of the NET_OUT of
    its (origin, chunk); a NET_BACK requires the receives of the RETURNs of its own.
    """
    lines: list[list[str]] = [[] for _ in range(num_ranks)]
    received: dict[tuple[int, int, int, int], list[str]] = {}  # (phase, origin, chunk, at)
    count = 0
    for tag, t in enumerate(plan):
        if t.tier == SELF_TIER:
            continue
        count += 1
        send, take = f"s{tag}", f"r{tag}"
        lines[t.src].append(f"{send}: send {t.bytes}b to {t.dst} tag {tag}")
        lines[t.dst].append(f"{take}: recv {t.bytes}b from {t.src} tag {tag}")
        received.setdefault((t.phase, t.origin, t.chunk, t.dst), []).append(take)
        before = {FORWARD: NET_OUT, NET_BACK: RETURN}.get(t.phase)
        if before is not None:
            waits = received.get((before, t.origin, t.chunk, t.src), [])
            lines[t.src] += [f"{send} requires {label}" for label in waits]
    file.write(f"num_ranks {num_ranks}\n")
    for rank, block in enumerate(lines):
        file.write(f"\nrank {rank} {{\n")
        file.writelines(line + "\n" for line in block)
        file.write("}\n")
    return count
