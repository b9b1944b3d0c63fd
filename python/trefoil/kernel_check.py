"""Whether another library's dispatch and combine are right: which row is wrong, and whose it is.

    from trefoil import check_dispatch, check_combine

    found = check_dispatch("ll-expert-major", topk_idx, tokens, {0: received}, num_experts=64)
    if not found.ok:
        print(found)

Needs NumPy and libtrefoil.so.0, no GPU; arrays of NumPy and tensors of torch (on any device) alike.
Letters: R ranks, E experts, L = ceil(E / R), B tokens of a rank, N most tokens of a rank, K experts
of a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trefoil.kernel_inputs import (
    Array,
    InputError,
    Layout,
    by_rank,
    float_rows,
    ids_of,
    of_ranks,
    require_mode,
    rounding,
    rows_of,
    tokens_of,
    weights_of,
)
from trefoil.reference import Step

MOST_TOLD = 20


@dataclass(frozen=True)
class Difference:
    """A slot of a rank, or a token, that is not as it should be. slot -1: of a whole expert."""

    rank: int
    slot: int
    expert: int  # of all ranks; -1: the layout has none
    text: str


@dataclass
class Found:
    """What a comparison came to. compared: rows."""

    compared: int = 0
    wrong: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every row is as it should be, and there was one at least."""
        return self.wrong == 0 and self.compared > 0

    def add(self, rank: int, slot: int, expert: int, text: str) -> None:
        self.wrong += 1
        if len(self.differences) < MOST_TOLD:
            self.differences.append(Difference(rank, slot, expert, text))

    def __str__(self) -> str:
        lines = [d.text for d in self.differences]
        if self.wrong > len(lines):
            lines.append(f"and {self.wrong - len(lines)} more")
        return "\n".join([*lines, f"{self.compared} rows compared, {self.wrong} wrong"])


class _Sources:
    """The rows of all ranks, found again by what they hold."""

    def __init__(self, rows: list[tuple[Array, Array]]) -> None:
        self.rows = rows
        self.width = next((raw.shape[1] for _, raw in self.rows if len(raw)), 0)
        self.owners: dict[bytes, list[tuple[int, int]]] = {}
        for rank, (_, raw) in enumerate(self.rows):
            for token, row in enumerate(raw):
                self.owners.setdefault(row.tobytes(), []).append((rank, token))

    def raw(self, rank: int, token: int) -> Array:
        return self.rows[rank][1][token]

    def owner_names(self, found: Array) -> str:
        """The tokens whose row it is; "" of none."""
        owners = self.owners.get(found.tobytes(), [])
        return " or ".join(f"(rank {r}, token {t})" for r, t in owners[:3])

    def describe(self, found: Array, rank: int, token: int, values: Array) -> str:
        """What stands where the row of (rank, token) should be."""
        if names := self.owner_names(found):
            return f"holds the row of {names}"
        if not found.any():
            return "holds zeros"
        expected = self.rows[rank][0][token]
        differ = np.flatnonzero(values != expected)
        if len(differ) == len(expected):
            return "holds no token's row"
        at = int(differ[0]) if len(differ) else 0
        return (
            f"differs in {len(differ)} of {len(expected)} values, first in value {at}: "
            f"found {values[at]}, expected {expected[at]}"
        )


def _place(mode: str, rank: int, slot: int, expert: int, step: Step) -> str:
    """Names a slot as the layout counts it."""
    if mode == "ll-expert-major":
        wide = step.num_ranks * step.max_tokens
        local = slot // wide
        expert = rank * -(-step.num_experts // step.num_ranks) + local
        return f"rank {rank}, local expert {local} (expert {expert}), slot {slot % wide}"
    if mode == "ll-rank-major":
        return f"rank {rank}, source rank {slot // step.max_tokens}, slot {slot % step.max_tokens}"
    of = f" (expert {expert})" if mode == "ht-expert-major" and expert >= 0 else ""
    return f"rank {rank}, slot {slot}{of}"


def check_dispatch(
    mode: str,
    topk_idx: Sequence[Any],
    tokens: Sequence[Any],
    received: Mapping[int, Any],
    *,
    num_experts: int,
    max_tokens: int | None = None,
    alignment: int = 0,
    order_free: bool = False,
    stale: bool = False,
) -> Found:
    """Compares what ranks received with what a dispatch must bring them, byte for byte.

    mode: ll-expert-major, ll-rank-major, ht-flat, ht-expert-major. topk_idx, tokens: [B, K] and
    [B, H] of every rank. received: by rank, [L, R N, H], [R, N, H] or [slots, H], of high
    throughput with as many slots as tokens arrive, or more. max_tokens: N, by default as received
    has it, where that has two dimensions the greatest B. alignment: of HT
    expert-major zones. order_free: rows may come in any order within an expert (ll-rank-major: a
    source rank; ht-flat: the rank). A slot that no token belongs in is wrong if it holds a token's
    row (zeros apart); stale: it may, since the memory was used before.

    Raises trefoil.kernel_inputs.InputError, a ValueError, which names the argument that does not
    fit.
    """
    require_mode(mode)
    ids = ids_of(topk_idx)
    sources = _Sources(tokens_of(ids, tokens))
    given = by_rank("received", received, len(ids))
    arrays = {f"received of rank {rank}": data for rank, data in given}
    layout = Layout(mode, ids, arrays, num_experts, max_tokens, alignment)
    found = Found()
    for (rank, _), (name, data) in zip(given, arrays.items(), strict=True):
        slots = layout.slots(rank)
        values, raw = rows_of(name, data, sources.width or None)
        layout.require_rows(name, values, slots)
        if order_free:
            _compare_sets(found, mode, layout.step, rank, slots, raw, sources)
        else:
            _compare_slots(found, mode, layout.step, rank, slots, values, raw, sources)
        if not stale:
            _find_surplus(found, layout, rank, slots, raw, sources)
    return found


def _find_surplus(
    found: Found, layout: Layout, rank: int, slots: Array, raw: Array, sources: _Sources
) -> None:
    """Rows of tokens in slots where none belongs."""
    free = np.ones(len(raw), bool)
    free[np.flatnonzero(slots["src"] >= 0)] = False
    for slot in np.flatnonzero(free & raw.any(axis=1)):
        if not (names := sources.owner_names(raw[slot])):
            continue
        place = _place(layout.mode, rank, int(slot), -1, layout.step)
        text = f"{place}: holds the row of {names}; no token belongs there"
        found.add(rank, int(slot), -1, text)


def _compare_slots(
    found: Found,
    mode: str,
    step: Step,
    rank: int,
    slots: Array,
    values: Array,
    raw: Array,
    sources: _Sources,
) -> None:
    for slot in np.flatnonzero(slots["src"] >= 0):
        source, token, expert = (int(slots[slot][n]) for n in ("src", "token", "expert"))
        found.compared += 1
        if np.array_equal(raw[slot], sources.raw(source, token)):
            continue
        place = _place(mode, rank, int(slot), expert, step)
        what = sources.describe(raw[slot], source, token, values[slot])
        text = f"{place}: {what}; expected the row of (rank {source}, token {token})"
        found.add(rank, int(slot), expert, text)


def _compare_sets(
    found: Found, mode: str, step: Step, rank: int, slots: Array, raw: Array, sources: _Sources
) -> None:
    """The rows of a block, which fill its first slots, are looked for anywhere in it."""
    by_expert = mode.endswith("expert-major")
    used = slots["src"] >= 0
    blocks = slots["expert"] if by_expert else np.zeros(len(slots), np.int32)
    if mode == "ll-rank-major":
        blocks = slots["src"]
    for block in np.unique(blocks[used]):
        places = np.flatnonzero((blocks == block) & used)
        there: dict[bytes, int] = {}
        for slot in places:
            there[raw[slot].tobytes()] = there.get(raw[slot].tobytes(), 0) + 1
        for slot in places:
            source, token, expert = (int(slots[slot][n]) for n in ("src", "token", "expert"))
            found.compared += 1
            row = sources.raw(source, token).tobytes()
            if there.get(row):
                there[row] -= 1
                continue
            of = f", expert {expert}" if by_expert else ""
            text = f"rank {rank}{of}: the row of (rank {source}, token {token}) is missing"
            found.add(rank, -1, expert if by_expert else -1, text)


def check_combine(
    mode: str,
    topk_idx: Sequence[Any],
    rows: Sequence[Any],
    combined: Mapping[int, Any],
    *,
    num_experts: int,
    topk_weights: Sequence[Any] | None = None,
    max_tokens: int | None = None,
    alignment: int = 0,
    epsilon: float | None = None,
) -> Found:
    """Compares what ranks got back with the sums of their tokens' rows.

    rows: of every rank, what its experts gave, in the layout of the dispatch; float32 or float64
    (others: convert them first). topk_weights: [B, K] of every rank, for ll-expert-major; elsewhere
    the rows are weighted already. combined: by rank, [B, H]. A sum may differ by the rounding of
    its own terms: (terms + 1) epsilon times the sum of their magnitudes. epsilon: by default that
    of float32 (bfloat16: 2**-8, float16: 2**-11).

    Raises trefoil.kernel_inputs.InputError, a ValueError, which names the argument that does not
    fit.
    """
    require_mode(mode)
    if (mode == "ll-expert-major") != (topk_weights is not None):
        raise InputError("topk_weights are for ll-expert-major, and needed there")
    ids = ids_of(topk_idx)
    weights = None if topk_weights is None else weights_of(ids, topk_weights)
    bound, wanted = rounding(epsilon), by_rank("combined", combined, len(ids))
    arrays = {f"rows of rank {rank}": data for rank, data in enumerate(of_ranks("rows", rows))}
    if len(arrays) != len(ids):
        raise InputError(f"rows of {len(arrays)} ranks; topk_idx has {len(ids)}")
    layout = Layout(mode, ids, arrays, num_experts, max_tokens, alignment)
    given: list[Array] = []
    for name, data in arrays.items():
        given.append(float_rows(name, data, given[0].shape[1] if given else None))
        layout.require_rows(name, given[-1], layout.slots(len(given) - 1))
    return _compare_sums(wanted, _Sums(layout, given, weights), bound)


class _Sums:
    """Of every rank's tokens: the sums [B, H] of their rows, those of the magnitudes, and how many
    rows they are."""

    def __init__(self, layout: Layout, rows: list[Array], weights: list[Array] | None) -> None:
        width = rows[0].shape[1]
        self.sums = [np.zeros((len(ids), width)) for ids in layout.step.idx]
        self.sizes = [np.zeros((len(ids), width)) for ids in layout.step.idx]
        self.terms = [np.zeros(len(ids), np.int64) for ids in layout.step.idx]
        for rank, of_rank in enumerate(rows):
            slots = layout.slots(rank)
            for slot in np.flatnonzero(slots["src"] >= 0):
                source, token, k = (int(slots[slot][n]) for n in ("src", "token", "k"))
                weight = 1.0 if weights is None else weights[source][token, k]
                self._add(source, token, of_rank[slot] * weight)

    def _add(self, source: int, token: int, term: Array) -> None:
        self.sums[source][token] += term
        self.sizes[source][token] += np.abs(term)
        self.terms[source][token] += 1


def _compare_sums(combined: list[tuple[int, Any]], expected: _Sums, bound: float) -> Found:
    found = Found()
    for rank, data in combined:
        sums, terms = expected.sums[rank], expected.terms[rank]
        got = float_rows(f"combined of rank {rank}", data)
        if got.shape != sums.shape or np.ndim(data) != 2:
            raise InputError(
                f"combined of rank {rank}: {list(np.shape(data))}; expected {list(sums.shape)}"
            )
        allowed = (terms[:, None] + 1) * bound * expected.sizes[rank]
        with np.errstate(invalid="ignore"):
            near = np.isfinite(sums) & (np.abs(got - sums) <= allowed)
        wrong = ~(near | (got == sums) | (np.isnan(got) & np.isnan(sums)))
        found.compared += len(got)
        for token in np.flatnonzero(wrong.any(axis=1)):
            at = int(np.flatnonzero(wrong[token])[0])
            text = (
                f"rank {rank}, token {token}: {int(wrong[token].sum())} of {len(got[token])} "
                f"values are no sum of its {terms[token]} rows, first value {at}: "
                f"found {got[token, at]:.9g}, expected {sums[token, at]:.9g} "
                f"+- {allowed[token, at]:.1g}"
            )
            found.add(rank, int(token), -1, text)
    return found
