#!/usr/bin/env python3
"""Time of a call of trefoil.ep above the C call: into a library whose functions are empty.

python3 tests/python/call_time.py     # PYTHONPATH=python, TREFOIL_MODULE

Tensors and structs are made once. Warm: the fastest of many short batches, since what else runs on
the machine makes the others slower. Cold: caches are emptied before each call, as a driver and a
model's own work do between calls; 10 % quantile. Prints JSON, us.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trefoil import ep

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, CALLS = 400, 50
MEMORY, OTHER = bytearray(1 << 22), bytes(1 << 22)  # more than these caches


def empty_library(folder: Path) -> Path:
    """The functions that trefoil._c looks for, each `return 0`."""
    wanted = re.findall(r"X\((\w+)\)", (ROOT / "python/src/loader.h").read_text(encoding="utf-8"))
    source, library = folder / "empty.c", folder / "empty.so"
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in wanted))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def tensor(*shape: int) -> ep.Tensor:
    return ep.Tensor(64, dtype=ep.DataType.FLOAT32, shape=shape)


def calls() -> dict[str, Callable[[], None]]:
    """Of a low-latency step, and none; dispatch and combine have three tensors."""
    handle, stream = ep.Handle(16), 32
    idx, rows, received, counts = tensor(8, 2), tensor(8, 64), tensor(4, 16, 64), tensor(4)
    inputs, outputs = ep.DispatchInputs(tokens=rows), ep.DispatchOutputs(tokens=received)
    info = ep.LayoutInfo(expert_counters=counts)
    back = ep.CombineInputs(tokens=received)
    sums = ep.CombineOutputs(tokens=rows, topk_weights=idx)
    return {
        "nothing": lambda: None,
        "update": lambda: handle.update(idx, stream=stream),
        "dispatch": lambda: handle.dispatch(inputs, outputs, layout_info=info, stream=stream),
        "combine": lambda: handle.combine(back, sums, stream=stream),
        "complete": lambda: handle.complete(stream=stream),
    }


def batch_us(call: Callable[[], None]) -> float:
    """Of one call of a batch."""
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begin) / CALLS / 1000


def cold_us(call: Callable[[], None]) -> float:
    """Of one call after other work has taken the first two levels of caches."""
    MEMORY[:] = OTHER
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1000


def measure(of: Callable[[Callable[[], None]], float], tenths: int) -> dict[str, float]:
    """us of each call, that quantile. The calls take turns. The library is the empty one from then
    on, until load()."""
    with tempfile.TemporaryDirectory() as folder:
        ep.load(empty_library(Path(folder)))
        of_call = calls()
        rounds = [[of(call) for call in of_call.values()] for _ in range(ROUNDS)]
    sorted_times = map(sorted, zip(*rounds, strict=True))
    quantiles = [round(times[len(times) * tenths // 10], 3) for times in sorted_times]
    return dict(zip(of_call, quantiles, strict=True))


def warm() -> dict[str, float]:
    return measure(batch_us, 0)


if __name__ == "__main__":
    print(json.dumps({"warm": warm(), "cold": measure(cold_us, 1)}))
