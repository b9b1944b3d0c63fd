"""Gradient averaging against the brute-force oracle: seeded random cases, every byte.

TREFOIL_ORACLE_CASES changes the number of cases.
"""

from __future__ import annotations

import ctypes as ct
import os

import numpy as np
import pytest

import oracle_grad as oracle
from oracle_grad import A2SGD, QSGD, TOPK, Config
from oracle_numbers import BITS, widen

CASES = int(os.environ.get("TREFOIL_ORACLE_CASES", "60"))
BATCH = 20
DTYPES = {"f32": 7, "f16": 6, "bf16": 9}
METHODS = (oracle.DENSE, A2SGD, TOPK, QSGD)
P = ct.c_void_p


class CConfig(ct.Structure):
    _fields_ = (
        ("method", ct.c_int),
        ("dtype", ct.c_int),
        ("workers", ct.c_int),
        ("tensors", ct.c_int),
        ("sizes", P),
        ("scope", ct.c_int),
        ("period", ct.c_int64),
        ("share", ct.c_int),
        ("bits", ct.c_int),
        ("bucket", ct.c_int64),
        ("seed", ct.c_uint64),
    )


class Reference:
    def __init__(self, c: Config) -> None:
        self.lib = ct.CDLL(os.environ["TREFOIL_LIB"])
        self.lib.trefoilLastError.restype = ct.c_char_p
        self.sizes = np.array(c.sizes, np.int64)
        count, at = len(c.sizes), self.sizes.ctypes.data
        options = (c.whole, c.period, c.share, c.bits, c.bucket, c.seed)
        self.c = CConfig(c.method, DTYPES[c.dtype], c.workers, count, at, *options)

    def call(self, name: str, *args: object) -> None:
        if getattr(self.lib, name)(ct.byref(self.c), *args) != 0:
            raise RuntimeError(self.lib.trefoilLastError().decode())

    @staticmethod
    def pointers(rows: np.ndarray) -> ct.Array:
        return (P * len(rows))(*(row.ctypes.data for row in rows))

    def step(self, number: int, grads: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Updates, written over bytes of 0xA5."""
        out = np.frombuffer(b"\xa5" * grads.nbytes, grads.dtype).reshape(grads.shape).copy()
        lists = [self.pointers(x) for x in (grads, errors, out)]
        given = (P * 3)(*(ct.addressof(x) for x in lists))
        self.call("trefoilGradStep", ct.c_int64(number), given)
        return out


def random_gradients(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    """Numbers near 1 with ties; sometimes one sign, zeros, specials, or anything at all."""
    kind = BITS[dtype]
    anything = rng.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
    steps = rng.integers(-9, 10, shape) * np.exp2(rng.integers(-6, 3, shape))
    near = (steps + rng.choice([0, 1]) * rng.standard_normal(shape)).astype(np.float32)
    near = near * rng.choice([0, 1], p=[0.1, 0.9])
    near = np.abs(near) if rng.random() < 0.1 else near
    near = (near * rng.choice([1, -1])).astype(np.float32)
    exact = oracle.narrow(dtype, np.ascontiguousarray(near)).astype(kind)
    special = oracle.narrow(dtype, np.array([np.nan, np.inf, -np.inf, -0.0], np.float32))
    if rng.random() < 0.2:
        exact[rng.random(shape) < 0.02] = rng.choice(special)
    return anything if rng.random() < 0.1 else exact


def random_config(rng: np.random.Generator, method: int) -> Config:
    choices = [0, 1, 3, 8, 17, rng.integers(0, 90)]
    sizes = [int(rng.choice(choices)) for _ in range(rng.integers(0, 5))]
    c = Config(method, str(rng.choice(list(DTYPES))), int(rng.integers(1, 7)), sizes)
    c.whole, c.seed = int(rng.integers(0, 2)), int(rng.integers(0, 2**63))
    c.share = int(rng.choice([1, 10000, 100000, 333333, 1000000]))
    c.bits, c.bucket = int(rng.integers(2, 9)), int(rng.choice([0, 1, 5, 16, 64]))
    return c


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, {want.dtype}"
    if got.tobytes() != want.tobytes():
        at = tuple(np.argwhere(got != want)[0])
        raise AssertionError(f"{what}: {at} is {got[at]:#x}, not {want[at]:#x}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", range(max(1, CASES // BATCH)))
def test_every_method(method: int, batch: int) -> None:
    """Several steps, so that errors come back; they are compared as well."""
    for case in range(BATCH):
        rng = np.random.default_rng([method, batch, case])
        c = random_config(rng, method)
        shape, start = (c.workers, sum(c.sizes)), int(rng.choice([0, 7, 2**32 - 3]))
        kept, expected = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for number in range(start, start + 3):
            grads = random_gradients(rng, c.dtype, shape)
            got = Reference(c).step(number, grads, kept)
            want = oracle.step(c, number, grads, expected).astype(grads.dtype)
            same(got, want, f"update of step {number}, batch {batch} case {case}, {c}")
            canonical = oracle.narrow("f32", np.ascontiguousarray(expected))
            same(kept.view(np.uint32), canonical, f"errors after step {number}, case {case}, {c}")


@pytest.mark.parametrize("batch", range(max(1, CASES // BATCH)))
def test_two_means(batch: int) -> None:
    rng = np.random.default_rng([77, batch])
    c = random_config(rng, A2SGD)
    grads = random_gradients(rng, c.dtype, (1, sum(c.sizes)))
    means = np.full((len(oracle.groups(c)), 2), 9, np.float32)
    Reference(c).call("trefoilGradTwoMeans", P(grads.ctypes.data), P(means.ctypes.data))
    with np.errstate(all="ignore"):
        parts = [oracle.two_means(widen(c.dtype, grads[0, part])) for part in oracle.groups(c)]
    want = np.array(parts, np.float32).reshape(-1, 2)
    same(means.view(np.uint32), oracle.narrow("f32", want), str(c))


@pytest.mark.parametrize("period", [0, 1, 3])
def test_sync(period: int) -> None:
    rng = np.random.default_rng(period)
    c = Config(A2SGD, "bf16", 3, [5, 40], period=period)
    for number in range(7):
        params = random_gradients(rng, c.dtype, (3, 45))
        due = period > 0 and (number + 1) % period == 0
        dense = oracle.step(Config(oracle.DENSE, "bf16", 3, [45]), 0, params, params)
        want = dense.astype(params.dtype) if due else params.copy()
        Reference(c).call("trefoilGradSync", ct.c_int64(number), Reference.pointers(params))
        same(params, want, f"step {number}")


def test_bytes() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        c = random_config(rng, int(rng.integers(0, 4)))
        c.sizes = [int(2 ** rng.uniform(0, 20)) for _ in c.sizes]
        sizes = (ct.c_int64 * 5)()
        Reference(c).call("trefoilGradSizes", sizes)
        state = 4 * sum(c.sizes) if c.method == TOPK else 0
        assert list(sizes) == [sum(c.sizes), len(oracle.groups(c)), state, oracle.sent_bytes(c), 0]
