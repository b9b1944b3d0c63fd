"""Costs of A2SGD's kernels and of what else averaging takes: a record, fitted to measured rows.

The record (a2sgd-h100.json) has the form of a compute record and is fitted as they are
(trefoil.capacity.compute_fit): rows of the two kernels, measured by a2sgd_bench, some of them held
out; their costs; and given ones, with sources. Passes of other methods are elementwise kernels of
`pytorch-h100`. Below the smallest measured row a kernel's time is a line from an elementwise
kernel's launch to that row.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import cast

from trefoil.capacity.compute_costs import FOLDER, ComputeRecord, KindCosts, load
from trefoil.inputs import read_text

KERNELS = "pytorch-h100"
RECORD = Path(__file__).resolve().parent / "a2sgd-h100.json"


@cache
def kinds() -> dict[str, KindCosts]:
    """Costs by kind of kernel: elementwise, sort, a2sgd-means, a2sgd-move, a2sgd-exchange."""
    own = cast(ComputeRecord, load(str(RECORD)))
    general = cast(ComputeRecord, load(KERNELS)).kinds["elementwise", "bf16"]
    return {"elementwise": general} | {kind: costs for (kind, _), costs in own.kinds.items()}


@cache
def _least() -> dict[str, float]:
    """Bytes of the smallest measured row of a kind."""
    found: dict[str, float] = {}
    for row in json.loads(read_text(RECORD))["rows"]:
        found[row["kind"]] = min(row["bytes"], found.get(row["kind"], row["bytes"]))
    return found


def seconds(kind: str, moved: float, rate: float) -> float:
    """Of a kernel that moves so many bytes, on a memory of `rate` bytes a second."""
    costs, least = kinds()[kind], _least().get(kind, 0.0)
    if moved >= least:
        return costs.seconds(0, moved / rate)
    launch = kinds()["elementwise"].launch_us * 1e-6
    return launch + (costs.seconds(0, least / rate) - launch) * moved / least


@cache
def origin(kind: str) -> str:
    """Where a kind's costs are from, in words."""
    path = FOLDER / f"{KERNELS}.json" if kind == "elementwise" else RECORD
    data = json.loads(read_text(path))
    found = next(k for k in data["kinds"] if k["kind"] == kind)
    if not found["fitted"]:
        return f"{kind}: {data['name']}, given: {found['memory_share']['source']}"
    inside, outside = found["fitted"], found["held_out"]
    return (
        f"{kind}: {data['name']}, fitted to {inside['n']} measured rows, mean error "
        f"{inside['mean']:.1%}; {outside['n']} held out, {outside['mean']:.1%}"
    )
