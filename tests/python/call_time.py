#!/usr/bin/env python3
"""Time of a call of trefoil.ep above the C call: into a library whose functions are empty.

python3 tests/python/call_time.py     # PYTHONPATH=python, TREFOIL_MODULE

Tensors and structs are made once, or in each call of objects whose type has DLPack's table of
functions, as torch's tensors on a GPU. Warm: the fastest of many short batches, since what else
runs on the machine makes the others slower. Cold: caches are emptied before each call, as a driver
and a model's own work do between calls; 10 % quantile. Prints JSON, us.
"""

from __future__ import annotations

import ctypes
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


EXCHANGE = """
#include <stdint.h>
typedef struct {
  void *data;
  int32_t device_type, device, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
} tensor_t;
tensor_t tensor;
int64_t shape[8], strides[8];
int refuses;
static int read_tensor(void *object, tensor_t *out) { return *out = tensor, refuses ? -1 : 0; }
struct table {
  uint32_t major, minor;
  struct table *older;
  void *unused[3];
  int (*read)(void *, tensor_t *);
  void *stream;
} first = {1, 3, 0, {0}, read_tensor, 0}, table = {2, 0, &first, {0}, 0, 0};
"""


class Described(ctypes.Structure):
    """DLPack's DLTensor, which every object of exchange_type shows."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


def exchange_type(library: Path) -> type:
    """A type with the table of functions in the library; about: of its objects, a float32 tensor
    [8, 64] of a GPU unless changed; shape, strides: of eight; refuses: whether it has none."""
    lib = ctypes.CDLL(str(library))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    name = ctypes.c_char_p(b"dlpack_exchange_api")
    table = capsule(ctypes.addressof(ctypes.c_char.in_dll(lib, "table")), name, None)
    about = Described.in_dll(lib, "tensor")
    shape, strides = ((ctypes.c_int64 * 8).in_dll(lib, name) for name in ("shape", "strides"))
    shape[:2], strides[:2] = (8, 64), (64, 1)
    addresses = ctypes.addressof(shape), ctypes.addressof(strides)
    for field, value in zip(
        Described._fields_, (64, 2, 0, 2, 2, 32, 1, *addresses, 0), strict=True
    ):
        setattr(about, field[0], value)
    refuses = ctypes.c_int.in_dll(lib, "refuses")
    held = {"name": name, "about": about, "shape": shape, "strides": strides, "refuses": refuses}
    return type("OnGpu", (), {"__dlpack_c_exchange_api__": table, **held})


def empty_library(folder: Path) -> Path:
    """The functions that trefoil._c looks for, each `return 0`."""
    wanted = re.findall(r"X\((\w+)\)", (ROOT / "python/src/loader.h").read_text(encoding="utf-8"))
    source, library = folder / "empty.c", folder / "empty.so"
    source.write_text(EXCHANGE + "".join(f"int {name}() {{ return 0; }}\n" for name in wanted))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def tensor(*shape: int) -> ep.Tensor:
    return ep.Tensor(64, dtype=ep.DataType.FLOAT32, shape=shape)


def made(of: type, handle: ep.Handle, stream: int) -> dict[str, Callable[[], None]]:
    """Calls that make their tensors and structs."""
    rows, received, counts, back = of(), of(), of(), of()
    return {
        "dispatch, made": lambda: handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(rows)),
            ep.DispatchOutputs(tokens=ep.Tensor(received)),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
            stream=stream,
        ),
        "combine, made": lambda: handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(received)),
            ep.CombineOutputs(tokens=ep.Tensor(back), topk_weights=ep.Tensor(counts)),
            stream=stream,
        ),
    }


def calls(of: type) -> dict[str, Callable[[], None]]:
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
        **made(of, handle, stream),
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
        library = empty_library(Path(folder))
        ep.load(library)
        of_call = calls(exchange_type(library))
        rounds = [[of(call) for call in of_call.values()] for _ in range(ROUNDS)]
    sorted_times = map(sorted, zip(*rounds, strict=True))
    quantiles = [round(times[len(times) * tenths // 10], 3) for times in sorted_times]
    return dict(zip(of_call, quantiles, strict=True))


def warm() -> dict[str, float]:
    return measure(batch_us, 0)


if __name__ == "__main__":
    print(json.dumps({"warm": warm(), "cold": measure(cold_us, 1)}))
