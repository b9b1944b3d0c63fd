"""The reference against the brute-force oracle: seeded random cases, every byte of every buffer.

Buffers are filled with random bytes before both sides write, so that a byte that must stay as it is
shows as well as one that must change. TREFOIL_ORACLE_CASES changes the number of cases of a mode.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import oracle
from oracle import CALLER, E4M3, HT_EXPERT, HT_FLAT, LL_EXPERT, LL_RANK, NONE, NVFP4, Case
from ref_binding import Reference

CASES = int(os.environ.get("TREFOIL_ORACLE_CASES", "300"))
BATCH = 10


def random_routing(rng, R, E, N, K):
    """Ragged, with empty ranks, unused entries, and now and then a hot expert."""
    topk = []
    for _ in range(R):
        B = int(rng.choice([0, rng.integers(0, N + 1), N]))
        rows = np.full((B, K), -1, np.int64)
        for row in rows:
            used = rng.permutation(K)[: rng.integers(0, min(K, E) + 1)]
            pool = rng.permutation(E) if rng.random() < 0.7 else np.arange(E)
            row[used] = pool[: len(used)]
        topk.append(rows)
    return topk


def random_case(rng, mode):
    R = int(rng.choice([1, 2, 3, 4, 6]))
    G = int(rng.choice([g for g in range(1, R + 1) if R % g == 0]))
    E, K, N = int(rng.integers(1, 13)), int(rng.integers(1, 6)), int(rng.integers(1, 6))
    c = Case(R, G, E, N, K, random_routing(rng, R, E, N, K), mode, int(rng.integers(1, 20)))
    c.dtype = str(rng.choice(["f32", "f16", "bf16"]))
    c.global_ids = int(rng.integers(0, 2))
    if mode in (LL_EXPERT, LL_RANK):
        c.partial = int(rng.integers(0, 2))
        if rng.random() < 0.3:
            c.active = (rng.random((R, R)) < 0.8).astype(np.uint8)
        if rng.random() < 0.2:
            c.active_combine = (rng.random((R, R)) < 0.8).astype(np.uint8)
    else:
        c.backward = int(rng.integers(0, 2))
        c.alignment = int(rng.choice([0, 1, 2, 4, 8]))
        c.max_recv = int(rng.choice([0, rng.integers(1, 2 * N + 2), N * R * K * 8]))
        c.drop = int(rng.random() < 0.7)
        c.zero_copy_on = int(rng.integers(0, 2))
    return c


def random_bits(rng, shape, dtype):
    """Mostly numbers near 1, which round and cancel; sometimes anything at all, NaN included."""
    kind = oracle.BITS[dtype]
    anything = rng.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
    if dtype == "bytes":
        return anything
    steps = rng.integers(-64, 65, shape).astype(np.float32)
    near = (steps * np.exp2(rng.integers(-12, 4, shape))).astype(np.float32)
    exact = {
        "f32": near.view(np.uint32),
        "f16": near.astype(np.float16).view(np.uint16),
        "bf16": (near.view(np.uint32) >> 16).astype(np.uint16),
    }[dtype]
    return np.where(rng.random(shape) < rng.choice([0, 0, 0.1, 1]), anything, exact).astype(kind)


def same(got, want, what):
    got, want = got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8)
    if not np.array_equal(got, want):
        at = int(np.flatnonzero(got != want)[0])
        raise AssertionError(f"{what}: byte {at} is {got[at]:#x}, not {want[at]:#x}")


def poisoned(rng, shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def check_slots(c, ref, d):
    where, count, counters = oracle.place(c, d)
    expert_major = c.mode in (LL_EXPERT, HT_EXPERT)
    want = {}
    for (s, t, k), slot in where.items():
        want[slot] = (s, t, k, c.topk[s][t][k] % c.L) if expert_major else (s, t, -1, -1)
    got = ref.slots(d)
    assert len(got) == count
    for i, slot in enumerate(got):
        assert slot == want.get(i, (-1, -1, -1, slot[3] if expert_major else -1)), f"slot {i}"
    for name, values in ref.counters(d, -99).items():
        expected = counters.get(name, [-99] * len(values))
        assert list(values) == list(np.atleast_1d(expected)), name


def check_dispatch(c, d, rng):
    c = replace(c)
    if c.mode in (LL_EXPERT, LL_RANK):
        quant = int(rng.choice([NONE, CALLER, E4M3]))
    else:
        quant = int(rng.choice([NONE, CALLER]))
    c.quant, c.round_scales, c.scale_bytes = quant, int(rng.integers(0, 2)), int(rng.integers(1, 9))
    scale = (c.scale_bytes, np.uint8)
    if quant == CALLER:
        c.dtype = str(rng.choice([c.dtype, "bytes"]))
    if quant == E4M3:
        c.dtype, c.width = "bf16", 128 * int(rng.integers(1, 3))
        scale = (c.width // 128, np.float32)
    ref = Reference(c)
    sources = [
        {
            "tokens": random_bits(rng, (len(t), c.width), c.dtype),
            "scales": poisoned(rng, (len(t), c.scale_bytes), np.uint8),
            "weights": poisoned(rng, (len(t), c.K), np.uint32),
        }
        for t in c.topk
    ]
    _, count, _ = oracle.place(c, d)
    rows = count + int(rng.integers(0, 4))
    topk_shape = (rows,) if c.mode == HT_EXPERT else (rows, c.K)
    out_bits = np.uint8 if quant == E4M3 else oracle.BITS[c.dtype]
    want = {
        "tokens": poisoned(rng, (rows, c.width), out_bits),
        "scales": poisoned(rng, (rows, scale[0]), scale[1]),
        "weights": poisoned(rng, topk_shape, np.uint32),
        "ids": poisoned(rng, topk_shape, np.int32 if c.mode == LL_RANK else np.int64),
    }
    if c.mode == LL_RANK:  # its tensors have no rows beyond R*N
        want = {name: x[:count].copy() for name, x in want.items()}
    got = {name: x.copy() for name, x in want.items()}
    ref.dispatch(d, sources, got, rows)
    with np.errstate(all="ignore"):
        oracle.dispatch(c, d, sources, want)
    for name in want:
        same(got[name], want[name], f"dispatch {name}")


def check_combine(c, r, rng):
    c = replace(c)
    if c.mode in (LL_EXPERT, LL_RANK) and rng.random() < 0.2:
        c.quant, c.dtype, c.width = NVFP4, "bf16", 16 * int(rng.integers(1, 3))
    counts = [oracle.place(c, d)[1] for d in range(c.R)]
    rows = [random_bits(rng, (n, c.width), c.dtype) for n in counts]
    shape = (lambda n: (n,)) if c.mode == HT_EXPERT else (lambda n: (n, c.K))
    row_weights = [poisoned(rng, shape(n), np.uint32) for n in counts]
    scales = [
        np.exp2(rng.integers(-3, 12, n)).astype(np.float32)
        * rng.choice([0, 1, 1.25, 1.25], n).astype(np.float32)
        for n in counts
    ]
    weights = random_bits(rng, (len(c.topk[r]), c.K), "f32").view(np.float32)
    out = poisoned(rng, (len(c.topk[r]), c.width), oracle.BITS[c.dtype])
    back = poisoned(rng, (len(c.topk[r]), c.K), np.uint32)
    unwritten = back.copy()
    Reference(c).combine(r, rows, row_weights, scales, weights, out, back)
    with np.errstate(all="ignore"):
        want, want_back = oracle.combine(c, r, rows, row_weights, scales, weights)
    same(out, want, "combine")
    same(back, want_back if c.backward else unwritten, "combine weights")


@pytest.mark.parametrize("batch", range(-(-CASES // BATCH)))
@pytest.mark.parametrize("mode", [LL_EXPERT, LL_RANK, HT_FLAT, HT_EXPERT])
def test_reference_equals_oracle(mode, batch):
    for number in range(batch * BATCH, (batch + 1) * BATCH):
        rng = np.random.default_rng([mode, number])
        c = random_case(rng, mode)
        try:
            for d in range(c.R):
                check_slots(c, Reference(c), d)
                check_dispatch(c, d, rng)
            for r in range(c.R):
                check_combine(c, r, rng)
        except AssertionError as error:
            raise AssertionError(f"mode {mode} case {number}: {error}\n{c}") from None
