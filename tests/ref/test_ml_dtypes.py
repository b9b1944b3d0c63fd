"""The number formats against ml_dtypes (PyPI), where the two mean the same: finite, in range.

Outside that they differ on purpose: ours saturates fp8 and knows one NaN a format.
"""

from __future__ import annotations

import ctypes as ct
import os

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

FORMATS = {
    "bf16": (9, ml_dtypes.bfloat16, np.uint16, 0x7F80),
    "f16": (6, np.float16, np.uint16, 0x7C00),
    "e4m3": (10, ml_dtypes.float8_e4m3fn, np.uint8, 0x7F),
    "e5m2": (11, ml_dtypes.float8_e5m2, np.uint8, 0x7C),
    "e2m1": (12, ml_dtypes.float4_e2m1fn, np.uint8, 0x8),
}


@pytest.fixture(scope="module")
def lib():
    return ct.CDLL(os.environ["TREFOIL_LIB"])


def narrow(lib, dtype, x):
    bits = np.empty(x.size if dtype != 12 else x.size // 2, FORMAT_BITS[dtype])
    assert lib.trefoilNarrow(dtype, P(x.ctypes.data), ct.c_int64(x.size), P(bits.ctypes.data)) == 0
    return bits if dtype != 12 else np.stack([bits & 15, bits >> 4], 1).reshape(-1)


P = ct.c_void_p
FORMAT_BITS = {dtype: bits for dtype, _, bits, _ in FORMATS.values()}


@pytest.mark.parametrize("name", FORMATS)
def test_widening_agrees(lib, name):
    dtype, theirs, bits, num_finite = FORMATS[name]
    codes = np.arange(num_finite, dtype=bits)
    sign = 0x8 if name == "e2m1" else 1 << (8 * codes.itemsize - 1)
    codes = np.concatenate([codes, codes | bits(sign)])
    given = codes if name != "e2m1" else codes[0::2] | codes[1::2] << 4
    got = np.empty(codes.size, np.float32)
    count = ct.c_int64(codes.size)
    assert lib.trefoilWiden(dtype, P(given.ctypes.data), count, P(got.ctypes.data)) == 0
    want = codes.view(theirs).astype(np.float32)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_narrowing_agrees_in_range(lib, name):
    dtype, theirs, bits, num_finite = FORMATS[name]
    rng = np.random.default_rng(1)
    largest = np.array([num_finite - 1], bits).view(theirs).astype(np.float32)[0]
    wide = rng.integers(0, 2**32, 1_000_000, np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.standard_normal(1_000_000) * float(min(largest, 1000)) / 4).astype(np.float32)
    x = np.concatenate([wide, near])
    x = x[np.isfinite(x) & (np.abs(x) <= largest)]
    x = x[: x.size // 2 * 2]
    want = x.astype(theirs).view(bits)
    assert x.size > 500_000
    assert np.array_equal(narrow(lib, dtype, x), want & 15 if name == "e2m1" else want)
