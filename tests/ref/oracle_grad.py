"""Gradient averaging by brute force, from rules A1 to A12 of docs/spec.md alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from oracle_numbers import narrow, widen

DENSE, A2SGD, TOPK, QSGD = range(4)
F32 = np.float32


@dataclass
class Config:
    method: int
    dtype: str
    workers: int
    sizes: list[int]
    whole: int = 0
    period: int = 0
    share: int = 10000
    bits: int = 4
    bucket: int = 0
    seed: int = 0


def groups(c: Config) -> list[slice]:
    ends = np.cumsum([0, *c.sizes]).tolist()
    edges = [(0, ends[-1])] if c.whole else pairwise(ends)
    return [slice(a, b) for a, b in edges]


def mean(terms: np.ndarray) -> np.ndarray:
    """Over axis 0, the workers."""
    total = np.zeros(terms.shape[1:], np.float64)
    for term in terms:
        total = total + term.astype(np.float64)
    return (total / len(terms)).astype(F32)


def summed(terms: np.ndarray) -> np.float32:
    sums = []
    for i in range(0, len(terms), 8):
        run = terms[i]
        for x in terms[i + 1 : i + 8]:
            run = F32(run + x)
        sums.append(run)
    while len(sums) > 1:
        pairs = [F32(a + b) for a, b in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + ([sums[-1]] if len(sums) % 2 else [])
    return sums[0] if sums else F32(0)


def two_means(g: np.ndarray) -> np.ndarray:
    """m+ and m- of one group."""
    sets = [~(g < 0), g < 0]
    sums = [summed(np.where(s, np.abs(g), F32(0)).astype(F32)) for s in sets]
    pairs = zip(sums, sets, strict=True)
    return np.array([F32(x / F32(s.sum())) if s.any() else F32(0) for x, s in pairs], F32)


def a2sgd(g: np.ndarray) -> np.ndarray:
    local = np.array([two_means(x) for x in g], F32)
    moved = (mean(local)[None] - local).astype(F32)
    return np.where(g < 0, g - moved[:, 1:], g + moved[:, :1]).astype(F32)


def topk(c: Config, g: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Of one group; the errors are replaced in place."""
    sent = np.zeros_like(g)
    count = -(-g.shape[1] * c.share // 1000000)
    for w, x in enumerate((g + errors).astype(F32)):
        size = np.where(np.isnan(x), np.inf, np.abs(x).astype(np.float64))
        order = sorted(range(len(x)), key=lambda i: (not np.isnan(x[i]), -size[i], i))
        chosen = np.array(order[:count], int)
        sent[w, chosen] = widen(c.dtype, narrow(c.dtype, x[chosen]))
        errors[w] = x
        with np.errstate(invalid="ignore"):
            rest = (x[chosen] - sent[w, chosen]).astype(F32)
        errors[w, chosen] = np.where(np.isfinite(sent[w, chosen]), rest, F32(0))
    return np.broadcast_to(mean(sent), g.shape)


def philox(key: int, counter: list[int]) -> list[int]:
    k, c = [key & 0xFFFFFFFF, key >> 32], list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draw(c: Config, i: int, step: int, worker: int) -> np.float32:
    four = i // 4
    return F32((philox(c.seed, [four & 0xFFFFFFFF, four >> 32, step, worker])[i % 4] >> 8) * 2**-24)


def qsgd(c: Config, g: np.ndarray, first: int, step: int) -> np.ndarray:
    read, bucket, levels = np.zeros_like(g), c.bucket or 512, F32(2 ** (c.bits - 1) - 1)
    for w, row in enumerate(g):
        for start in range(0, len(row), bucket):
            x = row[start : start + bucket]
            s = np.abs(x).max() if not np.isnan(x).any() else F32(np.nan)
            for i, value in enumerate(x, start):
                at = F32(F32(abs(value) / s) * levels) if s > 0 else F32(0)
                level = np.floor(at)
                level += F32(draw(c, first + i, step, w) < at - level)
                read[w, i] = np.copysign(F32(F32(level / levels) * s), value)
    return np.broadcast_to(mean(read), g.shape)


def step(c: Config, number: int, grads: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """grads: bits [workers, elements]; errors: f32 of the same shape, replaced in place."""
    g = widen(c.dtype, grads)
    out = np.zeros(g.shape, F32)
    with np.errstate(all="ignore"):
        for part in groups(c):
            x = g[:, part]
            if c.method == DENSE:
                out[:, part] = mean(x)
            if c.method == A2SGD and x.shape[1]:
                out[:, part] = a2sgd(x)
            if c.method == TOPK:
                out[:, part] = topk(c, x, errors[:, part])
            if c.method == QSGD:
                out[:, part] = qsgd(c, x, part.start, number)
        return narrow(c.dtype, out)


def sent_bytes(c: Config) -> int:
    element, total = (4 if c.dtype == "f32" else 2), 0
    for part in groups(c):
        n = part.stop - part.start
        if c.method == DENSE:
            total += n * element
        if c.method == A2SGD:
            total += 8
        if c.method == TOPK:
            total += -(-n * c.share // 1000000) * (element + (8 if n > 2**32 else 4))
        if c.method == QSGD:
            bucket = c.bucket or 512
            lengths = [min(bucket, n - start) for start in range(0, n, bucket)]
            total += sum(4 + -(-length * c.bits // 8) for length in lengths)
    return total
