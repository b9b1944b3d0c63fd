"""libtrefoil's reference through ctypes: the structs of include/trefoil/ref.h, field by field."""
# ruff: noqa: RUF012

from __future__ import annotations

import ctypes as ct
import os

import numpy as np

from oracle import Case

P = ct.c_void_p
DTYPES = {"f32": 7, "f16": 6, "bf16": 9, "bytes": 10}


class Shape(ct.Structure):
    _fields_ = [
        ("R", ct.c_int),
        ("G", ct.c_int),
        ("E", ct.c_int),
        ("K", ct.c_int),
        ("N", ct.c_int64),
    ]


class Routing(ct.Structure):
    _fields_ = [("shape", Shape), ("numTokens", P), ("topkIdx", P)]


class RefCase(ct.Structure):
    _fields_ = [
        ("routing", Routing),
        ("mode", ct.c_int),
        ("width", ct.c_int64),
        ("dtype", ct.c_int),
        ("quant", ct.c_int),
        ("roundScales", ct.c_int),
        ("scaleBytes", ct.c_size_t),
        ("backward", ct.c_int),
        ("alignment", ct.c_size_t),
        ("globalIds", ct.c_int),
        ("maxRecv", ct.c_int64),
        ("drop", ct.c_int),
        ("zeroCopyOn", ct.c_int),
        ("combinePartial", ct.c_int),
        ("active", P),
        ("activeCombine", P),
    ]


class Slot(ct.Structure):
    _fields_ = [("src", ct.c_int), ("token", ct.c_int64), ("k", ct.c_int), ("expert", ct.c_int)]


class Counters(ct.Structure):
    _fields_ = [("experts", P), ("offsets", P), ("total", P), ("sources", P)]


class Source(ct.Structure):
    _fields_ = [("tokens", P), ("scales", P), ("weights", P)]


class Received(ct.Structure):
    _fields_ = [("tokens", P), ("scales", P), ("weights", P), ("ids", P), ("topkRows", ct.c_int64)]


class ExpertRows(ct.Structure):
    _fields_ = [("tokens", P), ("weights", P), ("scales", P)]


def address(array: np.ndarray | None) -> int | None:
    return None if array is None or array.size == 0 else array.ctypes.data


class Reference:
    """One case in C's eyes. Failures raise with the library's sentence."""

    def __init__(self, c: Case) -> None:
        self.lib = ct.CDLL(os.environ["TREFOIL_LIB"])
        self.lib.trefoilLastError.restype = ct.c_char_p
        self.lib.trefoilRefNumSlots.restype = ct.c_int64
        self.rows = [np.ascontiguousarray(r, np.int32) for r in c.topk]
        self.counts = np.array([len(r) for r in c.topk], np.int64)
        self.pointers = (P * c.R)(*[address(r) for r in self.rows])
        self.masks = [
            None if m is None else np.ascontiguousarray(m, np.uint8)
            for m in (c.active, c.active_combine)
        ]
        routing = Routing(
            Shape(c.R, c.G, c.E, c.K, c.N), address(self.counts), ct.addressof(self.pointers)
        )
        self.c = c
        self.case = RefCase(
            routing,
            c.mode,
            c.width,
            DTYPES[c.dtype],
            c.quant,
            c.round_scales,
            c.scale_bytes,
            c.backward,
            c.alignment,
            c.global_ids,
            c.max_recv,
            c.drop,
            c.zero_copy_on,
            c.partial,
            *map(address, self.masks),
        )

    def call(self, name: str, *args: object) -> None:
        if getattr(self.lib, name)(ct.byref(self.case), *args) != 0:
            raise RuntimeError(self.lib.trefoilLastError().decode())

    def slots(self, rank: int) -> list[tuple[int, int, int, int]]:
        count = self.lib.trefoilRefNumSlots(ct.byref(self.case), rank)
        slots = (Slot * max(count, 1))()
        self.call("trefoilRefSlots", rank, slots)
        return [(s.src, s.token, s.k, s.expert) for s in slots[:count]]

    def counters(self, rank: int, poison: int) -> dict[str, np.ndarray]:
        sizes = {"experts": self.c.L, "offsets": self.c.L, "total": 1, "sources": self.c.R}
        out = {name: np.full(n, poison, np.int64) for name, n in sizes.items()}
        self.call(
            "trefoilRefCounters",
            rank,
            ct.byref(Counters(**{k: address(v) for k, v in out.items()})),
        )
        return out

    def dispatch(self, rank: int, sources: list[dict], out: dict, topk_rows: int) -> None:
        given = (Source * self.c.R)(*[Source(*map(address, s.values())) for s in sources])
        names = ("tokens", "scales", "weights", "ids")
        received = Received(*[address(out[n]) for n in names], topk_rows)
        self.call("trefoilRefDispatch", rank, given, ct.byref(received))

    def combine(
        self,
        rank: int,
        rows: list,
        row_weights: list,
        scales: list,
        weights: np.ndarray,
        out: np.ndarray,
        back: np.ndarray,
    ) -> None:
        given = (ExpertRows * self.c.R)(
            *[ExpertRows(*map(address, x)) for x in zip(rows, row_weights, scales, strict=True)]
        )
        self.call(
            "trefoilRefCombine", rank, given, P(address(weights)), P(address(out)), P(address(back))
        )
