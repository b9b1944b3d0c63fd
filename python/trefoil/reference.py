"""The reference and the plan from Python: which token lies in which slot, which bytes go where.

    from trefoil.reference import Step
    step = Step([idx0, idx1], num_experts=256)      # one [tokens, K] array a rank, -1 = unused
    step.slots("ht-flat", rank=1)                   # src, token, k and expert of each slot
    step.traffic("ll-expert-major", "dispatch", row_bytes=14336)   # [R, R] bytes

Needs NumPy and libtrefoil.so.0: $TREFOIL_LIB, else the one beside an installed package, in the
build folders of the source tree (build/dev first), or that the dynamic loader finds. Whatever the
library refuses raises TrefoilError with its sentence.
"""

from __future__ import annotations

import ctypes as ct
import os
from collections.abc import Sequence
from functools import lru_cache
from operator import index
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trefoil.places import WHEEL_ROOT
from trefoil.structs import Case, PlanConfig, Routing, Shape

MODES = ("ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major")
OPS = ("dispatch", "combine")
BF16 = 9
SLOT = np.dtype(
    [("src", np.int32), ("token", np.int64), ("k", np.int32), ("expert", np.int32)], align=True
)


class TrefoilError(RuntimeError):
    """A refusal of libtrefoil; the text is its sentence."""


def _candidates() -> list[str]:
    """Where the library may be, the likeliest first."""
    if named := os.environ.get("TREFOIL_LIB"):
        return [named]
    name, here = "libtrefoil.so.0", Path(__file__).resolve()
    found = []
    up = list(here.parents)  # PREFIX/share/trefoil/python/trefoil, or TREE/python/trefoil
    if len(up) > 4:
        found += [str(up[4] / lib / name) for lib in ("lib", "lib64")]
        found += sorted(map(str, up[4].glob(f"lib/*/{name}")))
    wheel = (WHEEL_ROOT / lib / name for lib in ("lib", "lib64"))
    found += [str(path) for path in wheel if path.exists()]
    build = up[2] / "build"
    found += [str(build / preset / name) for preset in ("dev", "ci")]
    return [*found, name]


def _load() -> ct.CDLL:
    failed: list[tuple[str, OSError]] = []
    for candidate in _candidates():
        try:
            return ct.CDLL(candidate)
        except OSError as error:
            if Path(candidate).exists():  # a library that it needs is missing, or it is none
                failed.append((candidate, error))
    if failed:
        raise TrefoilError(f"{failed[0][0]} cannot be loaded: {failed[0][1]}")
    raise TrefoilError("libtrefoil.so.0 was not found; TREFOIL_LIB names another path")


@lru_cache(maxsize=1)
def library() -> ct.CDLL:
    """libtrefoil.so.0, loaded once."""
    lib = _load()
    lib.trefoilLastError.restype = ct.c_char_p
    lib.trefoilRefNumSlots.restype = ct.c_int64
    return lib


def _check(code: int) -> None:
    if code != 0:
        raise TrefoilError(library().trefoilLastError().decode())


def _index(names: Sequence[str], name: str, what: str) -> int:
    if name not in names:
        raise TrefoilError(f"{what} {name!r}: expected {', '.join(names)}")
    return names.index(name)


def _integers(name: str, data: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """Rounding would be another routing. An array without tokens may have any type."""
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise TrefoilError(f"{name}: no array of numbers: {error}") from error
    if array.size and array.dtype.kind not in "iu":
        raise TrefoilError(f"{name}: elements are {array.dtype}; integers expected")
    return array


class Step:
    """The routing of one step: topk_idx is one [tokens, K] integer array a rank.

    ranks_per_node None: all ranks on one node. max_tokens None: the most that a rank has.
    """

    def __init__(
        self,
        topk_idx: Sequence[npt.ArrayLike],
        num_experts: int,
        ranks_per_node: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        arrays = [_integers(f"topk_idx of rank {r}", a) for r, a in enumerate(topk_idx)]
        if not arrays or any(a.ndim != 2 or a.shape[1] != arrays[0].shape[1] for a in arrays):
            raise TrefoilError("topk_idx: expected one [tokens, K] array a rank, with the same K")
        if any(a.size and (a.min() < -1 or a.max() >= num_experts) for a in arrays):
            raise TrefoilError(f"topk_idx: expected ids in [0, {num_experts}), or -1")
        self.idx = [np.ascontiguousarray(a, dtype=np.int32) for a in arrays]
        self.num_ranks, self.num_experts = len(arrays), num_experts
        self._tokens = np.array([len(a) for a in arrays], dtype=np.int64)
        self._pointers = (ct.c_void_p * self.num_ranks)(*(a.ctypes.data for a in self.idx))
        most = int(self._tokens.max(initial=1))
        self.max_tokens = max(1, most) if max_tokens is None else max_tokens
        shape = Shape(
            self.num_ranks,
            self.num_ranks if ranks_per_node is None else ranks_per_node,
            num_experts,
            arrays[0].shape[1],
            self.max_tokens,
        )
        self._routing = Routing(shape, self._tokens.ctypes.data, ct.addressof(self._pointers))
        _check(library().trefoilRoutingCheck(ct.byref(self._routing)))

    def slots(
        self, mode: str, rank: int, alignment: int = 0, max_recv: int = 0, drop: bool = False
    ) -> npt.NDArray[np.void]:
        """What each slot of the rank holds: src, token, k, expert; src -1 where nothing came."""
        if not 0 <= index(rank) < self.num_ranks:
            raise TrefoilError(f"rank {rank}: expected 0 to {self.num_ranks - 1}")
        case = Case(self._routing, _index(MODES, mode, "mode"), 16, BF16)
        case.alignment, case.max_recv, case.drop = alignment, max_recv, int(drop)
        _check(library().trefoilCaseCheck(ct.byref(case)))
        count = library().trefoilRefNumSlots(ct.byref(case), rank)
        slots = np.zeros(count, dtype=SLOT)
        pointer = ct.c_void_p(slots.ctypes.data)
        _check(library().trefoilRefSlots(ct.byref(case), rank, pointer))
        return slots

    def traffic(self, mode: str, op: str, row_bytes: int) -> npt.NDArray[np.uint64]:
        """Bytes from each rank (row) to each rank (column) by the plan, over all its phases."""
        config = PlanConfig(_index(MODES, mode, "mode"), _index(OPS, op, "op"))
        config.row_bytes = row_bytes
        lib, plan = library(), ct.c_void_p()
        _check(lib.trefoilPlanCreate(ct.byref(plan), ct.byref(self._routing), ct.byref(config)))
        try:
            sums = np.zeros((self.num_ranks, self.num_ranks), dtype=np.uint64)
            _check(lib.trefoilPlanTraffic(plan, -1, ct.c_void_p(sums.ctypes.data)))
        finally:
            lib.trefoilPlanDestroy(plan)
        return sums
