"""Gradient averaging from Python: dense, A2SGD, Top-K and QSGD on NumPy arrays (docs/a2sgd.md).

    from trefoil.a2sgd import Averaging
    averaging = Averaging("a2sgd", sizes=[1000, 10], num_workers=8, sync_period=100)
    updates = averaging.step(grads)      # [workers, elements] in, the same shape out
    params -= 0.1 * updates              # any optimizer, one row a worker
    averaging.sync(params)               # in place, where the period says so

The reference's results: every worker's row in one process. bf16 are arrays of uint16 bits. Needs
NumPy and libtrefoil.so.0, which trefoil.reference finds; refusals raise TrefoilError.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trefoil.reference import TrefoilError, library
from trefoil.structs import Fields

METHODS = ("dense", "a2sgd", "topk", "qsgd")
DTYPES = {"f16": (6, np.float16), "f32": (7, np.float32), "bf16": (9, np.uint16)}


class Config(Fields):
    _fields_ = (
        ("method", ct.c_int),
        ("dtype", ct.c_int),
        ("num_workers", ct.c_int),
        ("num_tensors", ct.c_int),
        ("sizes", ct.c_void_p),
        ("scope", ct.c_int),
        ("sync_period", ct.c_int64),
        ("topk_per_million", ct.c_int),
        ("qsgd_bits", ct.c_int),
        ("qsgd_bucket", ct.c_int64),
        ("seed", ct.c_uint64),
    )


class _Sizes(Fields):
    _fields_ = tuple(
        (name, ct.c_int64)
        for name in ("elements", "groups", "state_bytes", "sent_bytes", "sync_bytes")
    )


class _Workers(Fields):
    _fields_ = (("grads", ct.c_void_p), ("states", ct.c_void_p), ("updates", ct.c_void_p))


def _pointers(rows: npt.NDArray[np.generic]) -> ct.Array[ct.c_void_p]:
    return (ct.c_void_p * len(rows))(*(row.ctypes.data for row in rows))


class Averaging:
    """The gradients of num_workers replicas, averaged step by step.

    sizes: elements of each tensor, which lie one behind the other in a row. share: of the elements,
    for Top-K. bits and bucket: of QSGD. steps and errors are all that changes from step to step:
    saved and restored, they continue a run.
    """

    def __init__(
        self,
        method: str,
        sizes: Sequence[int],
        num_workers: int,
        dtype: str = "f32",
        *,
        whole_model: bool = False,
        sync_period: int = 0,
        share: float = 0.01,
        bits: int = 4,
        bucket: int = 0,
        seed: int = 0,
    ) -> None:
        if method not in METHODS:
            raise TrefoilError(f"method {method!r}: expected {', '.join(METHODS)}")
        if dtype not in DTYPES:
            raise TrefoilError(f"dtype {dtype!r}: expected {', '.join(DTYPES)}")
        if not 0 < share <= 1:
            raise TrefoilError(f"share is {share}, must be more than 0 and at most 1")
        code, self.dtype = DTYPES[dtype]
        self._sizes = np.array(sizes, dtype=np.int64)
        self._config = Config(
            METHODS.index(method),
            code,
            num_workers,
            len(sizes),
            self._sizes.ctypes.data,
            int(whole_model),
            sync_period,
            max(1, round(share * 1e6)),
            bits,
            bucket,
            seed,
        )
        counts = _Sizes()
        self._call("trefoilGradSizes", ct.byref(counts))
        self.groups, self.sent_bytes = counts.groups, counts.sent_bytes
        self.sync_bytes = counts.sync_bytes
        self.shape = (num_workers, counts.elements)
        self._kept = self.shape if counts.state_bytes else (num_workers, 0)
        self.steps = 0

    @cached_property
    def errors(self) -> npt.NDArray[np.float32]:
        """What workers keep from step to step, made when it is first needed."""
        return np.zeros(self._kept, dtype=np.float32)

    def _call(self, name: str, *args: object) -> None:
        lib = library()
        if getattr(lib, name)(ct.byref(self._config), *args) != 0:
            raise TrefoilError(lib.trefoilLastError().decode())

    def _check(
        self, array: npt.NDArray[np.generic], what: str, shape: tuple[int, ...] | None = None
    ) -> None:
        shape = self.shape if shape is None else shape
        if array.shape != shape or array.dtype != self.dtype:
            raise TrefoilError(
                f"{what}: expected {np.dtype(self.dtype)} of shape {shape},"
                f" found {array.dtype} of {array.shape}"
            )

    def step(self, grads: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """The updates of the workers, one row each; counts the step."""
        given = np.ascontiguousarray(grads)
        self._check(given, "gradients")
        updates = np.empty_like(given)
        lists = [_pointers(x) for x in (given, self.errors, updates)]
        workers = _Workers(*(ct.addressof(x) for x in lists))
        self._call("trefoilGradStep", ct.c_int64(self.steps), ct.byref(workers))
        self.steps += 1
        return updates

    def sync(self, params: npt.NDArray[np.generic]) -> None:
        """After a step's updates were applied: averages the parameters in place if that is due."""
        self._check(params, "parameters")
        if not params.flags.c_contiguous or not params.flags.writeable:
            raise TrefoilError("parameters: expected a contiguous array that can be written")
        if self.steps == 0:
            raise TrefoilError("parameters are averaged after a step, and none was made")
        self._call("trefoilGradSync", ct.c_int64(self.steps - 1), _pointers(params))

    def two_means(self, grad: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """What a worker of A2SGD sends: [groups, 2], the means of both signs' magnitudes."""
        given = np.ascontiguousarray(grad)
        self._check(given, "gradient", self.shape[1:])
        means = np.empty((self.groups, 2), dtype=np.float32)
        address = ct.c_void_p(means.ctypes.data)
        self._call("trefoilGradTwoMeans", ct.c_void_p(given.ctypes.data), address)
        return means
