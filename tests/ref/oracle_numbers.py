"""The oracle's arithmetic: rounding through double, fused multiply-add through rounding to odd."""

from __future__ import annotations

import numpy as np

BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "bytes": np.uint8}
F32 = np.float32


def widen(dtype, bits):
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(F32)
    return bits.view(F32) if dtype == "f32" else bits.view(np.float16).astype(F32)


def nearest(x, man, emin):
    """x rounded to nearest even at `man` mantissa bits and exponents from emin, in double."""
    x = x.astype(np.float64)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, emin) - man)
    return np.where(np.isfinite(x), np.rint(x / step) * step, x)


def narrow(dtype, x):
    nan = np.isnan(x)
    if dtype == "f32":
        return np.where(nan, np.uint32(0x7FFFFFFF), x.view(np.uint32))
    if dtype == "f16":
        return np.where(nan, 0x7FFF, nearest(x, 10, -14).astype(np.float16).view(np.uint16))
    high = nearest(x, 7, -126).astype(F32).view(np.uint32) >> 16
    return np.where(nan, 0x7FFF, high).astype(np.uint16)


E4M3_VALUES = np.array(
    [2.0**-9 * (m if e == 0 else (8 + m) * 2.0 ** (e - 1)) for e in range(16) for m in range(8)][
        :127
    ]
)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def small(x, values, man, emin, sign, nan):
    """Codes of a saturating format given by its values without sign."""
    limited = np.minimum(np.abs(nearest(np.where(np.isnan(x), F32(0), x), man, emin)), values[-1])
    code = np.searchsorted(values, limited) | np.where(np.signbit(x), sign, 0)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def to_e4m3(x):
    return small(x, E4M3_VALUES, 3, -6, 0x80, 0x7F)


def quantise(bits, round_scales):
    x = widen("bf16", bits).reshape(-1, 128)
    a = np.maximum(np.fmax.reduce(np.abs(x), axis=1, initial=F32(0)), F32(1e-4))
    scale, times = a * (F32(1) / F32(448)), F32(448) / a
    if round_scales:
        e = np.ceil(np.log2(scale.astype(np.float64)))
        scale, times = np.exp2(e).astype(F32), np.exp2(-e).astype(F32)
    return to_e4m3(x * times[:, None]).reshape(-1), scale


def through_nvfp4(bits, g):
    x = widen("bf16", bits).reshape(-1, 16)
    m = np.fmax.reduce(np.abs(x), axis=1, initial=F32(0))
    code = to_e4m3(g * m / F32(6))
    s = np.append(E4M3_VALUES, np.nan)[code & 127].astype(F32)[:, None]
    s = np.where(code[:, None] & 128, -s, s)
    c = small(x * g / s, E2M1_VALUES, 1, 0, 8, 7)
    value = np.where(c & 8, -1, 1).astype(F32) * E2M1_VALUES[c & 7].astype(F32)
    return np.where((s == 0) | (g == 0), F32(0), value * s / g).astype(F32).reshape(-1)


def fma(x, y, z):
    """x * y + z with one rounding: the exact sum in two doubles, rounded to odd, then to float."""
    p, z = x.astype(np.float64) * np.float64(y), z.astype(np.float64)
    s = p + z
    back = s - p
    error = (p - (s - back)) + (z - back)
    fix = np.isfinite(s) & (error != 0) & (s.view(np.int64) & 1 == 0)
    return np.where(fix, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s).astype(F32)


def add_up(dtype, rows, weights=None):
    """The sum of rows of bits, or of floats, in the order given, rounded once."""
    if weights is None and len(rows) == 1 and rows[0].dtype != F32:
        return rows[0]
    x = [r if r.dtype == F32 else widen(dtype, r) for r in rows]
    acc = x[0] if weights is None else x[0] * weights[0]
    for i in range(1, len(x)):
        acc = acc + x[i] if weights is None else fma(x[i], weights[i], acc)
    return narrow(dtype, acc)
