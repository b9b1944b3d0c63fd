"""The meaning of dispatch and combine once more, by brute force, from the rules of docs/spec.md.

Nothing here is shared with ref/: slots are positions in sorted lists, and arithmetic is that of
oracle_numbers.py. Rows are NumPy arrays of raw bits. Letters as everywhere: R, G, E, L, N, K.
"""
# ruff: noqa: E741, N802, N806

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracle_numbers import BITS, add_up, quantise, through_nvfp4

LL_EXPERT, LL_RANK, HT_FLAT, HT_EXPERT = range(4)
NONE, CALLER, E4M3, NVFP4 = range(4)


@dataclass
class Case:
    """R ranks, G a node, E experts, N tokens at most; topk[r] is [B_r, K]; the rest as in ref.h."""

    R: int
    G: int
    E: int
    N: int
    K: int
    topk: list
    mode: int
    width: int
    dtype: str = "f32"
    quant: int = NONE
    round_scales: int = 0
    scale_bytes: int = 0
    backward: int = 0
    alignment: int = 0
    global_ids: int = 0
    max_recv: int = 0
    drop: int = 0
    zero_copy_on: int = 0
    partial: int = 0
    active: np.ndarray | None = None
    active_combine: np.ndarray | None = None

    @property
    def L(self):
        return -(-self.E // self.R)


def linked(mask, a, b):
    return mask is None or bool(mask[a][b] and mask[b][a])


def place(c, d):
    """What rank d keeps as {(source, token, k): slot}, the slots it has, and its counters."""
    L = c.L
    got = [
        (s, t, k)
        for s in range(c.R)
        if linked(c.active, s, d)
        for t in range(len(c.topk[s]))
        for k in range(c.K)
        if c.topk[s][t][k] // L == d
    ]
    tokens = sorted({(s, t) for s, t, _ in got})
    zones = [[x for x in got if c.topk[x[0]][x[1]][x[2]] % L == l] for l in range(L)]
    of_source = [[x for x in tokens if x[0] == s] for s in range(c.R)]
    counters = {"experts": [len(z) for z in zones]}
    if c.mode == LL_EXPERT:
        where = {x: l * c.R * c.N + i for l, z in enumerate(zones) for i, x in enumerate(z)}
        return where, L * c.R * c.N, counters
    if c.mode == LL_RANK:
        where = {(s, t, k): s * c.N + of_source[s].index((s, t)) for s, t, k in got}
        return where, c.R * c.N, {"sources": [len(x) for x in of_source]}
    a, end = max(c.alignment, 1), len(tokens)
    where = {(s, t, k): tokens.index((s, t)) for s, t, k in got}
    if c.mode == HT_EXPERT:
        padded = [-(-len(z) // a) * a for z in zones]
        base = [sum(padded[:l]) for l in range(L)]
        where = {x: base[l] + i for l, z in enumerate(zones) for i, x in enumerate(z)}
        counters, end = {"experts": padded, "offsets": base}, sum(padded)
    counters["total"] = end
    if not c.max_recv or end <= c.max_recv:
        return where, end, counters
    if not c.drop:
        return {}, 0, counters
    by_token = c.mode == HT_FLAT or not c.zero_copy_on
    stay = set(tokens[: c.max_recv] if by_token else tokens)
    where = {x: i for x, i in where.items() if i < c.max_recv and x[:2] in stay}
    if c.mode == HT_FLAT:
        counters["experts"] = [sum(x in where for x in z) for z in zones]
    else:
        counters["offsets"] = [min(b, c.max_recv) for b in base]
        counters["experts"] = [
            min(p, c.max_recv - o) for p, o in zip(padded, counters["offsets"], strict=True)
        ]
    return where, c.max_recv, counters


def dispatch(c, d, sources, out):
    """Writes rank d's tensors in `out`; sources[s] and out have tokens, scales, weights, ids."""
    where, slots, counters = place(c, d)
    forward_ht = c.mode >= HT_FLAT and not c.backward
    if c.mode == LL_RANK:
        out["ids"][:] = -1
    if c.mode == HT_EXPERT:
        carried = {"tokens": True, "scales": c.quant == CALLER, "weights": forward_ht}
        for name in (name for name, used in carried.items() if used):
            out[name][:slots] = 0
    if forward_ht and (slots or counters["total"] == 0):  # no slots, but a total: it traps
        out["weights"][slots : c.max_recv or None] = 0
        if c.mode == HT_FLAT:
            out["ids"][slots : c.max_recv or None] = -1
    for (s, t, k), slot in where.items():
        source, row = sources[s], c.topk[s][t]
        if c.quant == E4M3:
            out["tokens"][slot], out["scales"][slot] = quantise(source["tokens"][t], c.round_scales)
        else:
            out["tokens"][slot] = source["tokens"][t]
            if c.quant == CALLER:
                out["scales"][slot] = source["scales"][t]
        shift = 0 if c.global_ids else d * c.L
        if c.mode == LL_RANK:
            out["weights"][slot] = source["weights"][t]
            out["ids"][slot] = [e - shift if e // c.L == d else -1 for e in row]
        if c.mode == HT_FLAT and not c.backward:
            here = sorted((e - shift, i) for i, e in enumerate(row) if e // c.L == d)
            rest = c.K - len(here)
            out["ids"][slot] = [e for e, _ in here] + [-1] * rest
            out["weights"][slot] = [source["weights"][t][i] for _, i in here] + [0] * rest
        if c.mode == HT_EXPERT and not c.backward:
            out["weights"][slot] = source["weights"][t][k]


def combine(c, r, rows, row_weights, scales, weights):
    """Rank r's result and, backward, its weights; rows[d], row_weights[d], scales[d] by slot."""
    result = np.zeros((len(c.topk[r]), c.width), BITS[c.dtype])
    back = np.zeros((len(c.topk[r]), c.K), np.uint32)
    places = [place(c, d)[0] for d in range(c.R)]
    for t, row in enumerate(c.topk[r]):
        terms, named = [], set()
        for k, e in enumerate(row):
            d = e // c.L
            if e < 0 or (r, t, k) not in places[d] or not linked(c.active_combine, r, d):
                continue
            slot = places[d][r, t, k]
            if c.backward:
                rank_ids = sorted(x for x in row if x // c.L == d)
                at = slot if c.mode == HT_EXPERT else (slot, rank_ids.index(e))
                back[t, k] = row_weights[d][at]
            if c.mode in (LL_RANK, HT_FLAT) and d in named:
                continue
            named.add(d)
            y = rows[d][slot]
            terms.append((d, through_nvfp4(y, scales[d][slot]) if c.quant == NVFP4 else y, k))
        if not terms:
            continue
        weighted = c.mode == LL_EXPERT
        if c.mode == LL_RANK or (weighted and (not c.partial or c.quant == NVFP4)):
            w = [weights[t][k] for _, _, k in terms] if weighted else None
            result[t] = add_up(c.dtype, [y for _, y, _ in terms], w)
            continue
        ranks = []
        for d in sorted(d for d, _, _ in terms):
            if d not in [x for x, _ in ranks]:
                mine = [(y, weights[t][k]) for x, y, k in terms if x == d]
                w = [w for _, w in mine] if weighted else None
                ranks.append((d, add_up(c.dtype, [y for y, _ in mine], w)))
        node = [0 if weighted else d // c.G for d, _ in ranks]
        nodes = [
            add_up(c.dtype, [y for (_, y), m in zip(ranks, node, strict=True) if m == n])
            for n in sorted(set(node))
        ]
        result[t] = add_up(c.dtype, nodes)
    return result, back
