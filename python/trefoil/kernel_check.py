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
import numpy.typing as npt

from trefoil.reference import Step, TrefoilError

Array = npt.NDArray[Any]
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


def _array(data: Any) -> Array:
    """On the host."""
    return np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)


def _pair(data: Any) -> tuple[Array, Array]:
    """Values to show, and the same as they lie in memory: NumPy lacks torch's bfloat16 and fp8."""
    if not hasattr(data, "detach"):
        values = np.ascontiguousarray(data)
        return values, values
    data = data.detach().cpu().contiguous()
    import torch

    if data.is_floating_point() and data.dtype not in (torch.float64, torch.float32):
        kind = torch.int16 if data.itemsize == 2 else torch.uint8
        return data.float().numpy(), data.view(kind).numpy()
    return data.numpy(), data.numpy()


def _rows(name: str, data: Any, width: int | None = None) -> tuple[Array, Array]:
    """[rows, H] values, and their bytes [rows, bytes]."""
    values, raw = _pair(data)
    if values.ndim < 2:
        raise TrefoilError(f"{name}: {values.ndim} dimensions; rows of H values expected")
    values = values.reshape(-1, values.shape[-1])
    raw = raw.reshape(values.shape)
    raw = raw.view(np.uint8).reshape(len(values), values.shape[1] * raw.itemsize)
    if width is not None and raw.shape[1] != width:
        raise TrefoilError(f"{name}: rows of {raw.shape[1]} bytes, the tokens have {width}")
    return values, raw


def _most_tokens(
    mode: str, ranks: int, given: Mapping[str, Any], max_tokens: int | None
) -> int | None:
    """N, as the arrays of low latency with three dimensions have it."""
    for name, data in given.items():
        shape = getattr(data, "shape", ())
        if len(shape) != 3 or not mode.startswith("ll-"):
            continue
        of_expert = ranks if mode == "ll-expert-major" else 1
        if shape[1] % of_expert or max_tokens not in (None, shape[1] // of_expert):
            raise TrefoilError(
                f"{name}: {shape[1]} slots in dimension 1; N is {max_tokens or 'not known'}, "
                f"{of_expert} N expected"
            )
        max_tokens = shape[1] // of_expert
    return max_tokens


def _require_tokens(name: str, rows: Sequence[Any], topk_idx: Sequence[Any]) -> None:
    found, expected = [len(r) for r in rows], [len(ids) for ids in topk_idx]
    if found != expected:
        raise TrefoilError(f"{name}: {found} by rank; topk_idx has {expected} tokens")


class _Sources:
    """The rows of all ranks, found again by what they hold."""

    def __init__(self, tokens: Sequence[Any]) -> None:
        self.rows = [_rows(f"tokens of rank {r}", data) for r, data in enumerate(tokens)]
        self.width = next((raw.shape[1] for _, raw in self.rows if len(raw)), 0)
        self.owners: dict[bytes, list[tuple[int, int]]] = {}
        for rank, (_, raw) in enumerate(self.rows):
            for token, row in enumerate(raw):
                self.owners.setdefault(row.tobytes(), []).append((rank, token))

    def raw(self, rank: int, token: int) -> Array:
        return self.rows[rank][1][token]

    def describe(self, found: Array, rank: int, token: int, values: Array) -> str:
        """What stands where the row of (rank, token) should be."""
        owners = self.owners.get(found.tobytes(), [])
        if owners:
            names = " or ".join(f"(rank {r}, token {t})" for r, t in owners[:3])
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
        return f"rank {rank}, local expert {slot // wide} (expert {expert}), slot {slot % wide}"
    if mode == "ll-rank-major":
        return f"rank {rank}, source rank {slot // step.max_tokens}, slot {slot % step.max_tokens}"
    of = f" (expert {expert})" if mode == "ht-expert-major" else ""
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
) -> Found:
    """Compares what ranks received with what a dispatch must bring them, byte for byte.

    mode: ll-expert-major, ll-rank-major, ht-flat, ht-expert-major. topk_idx, tokens: [B, K] and
    [B, H] of every rank. received: by rank, [L, R N, H], [R, N, H] or [slots, H]; slots that hold
    no token are not looked at. max_tokens: N, by default as received has it, where that has two
    dimensions the greatest B. alignment: of HT
    expert-major zones. order_free: rows may come in any order within an expert (ll-rank-major: a
    source rank; ht-flat: the rank).

    Raises TrefoilError with the reason where shapes, ids or the mode do not fit.
    """
    _require_tokens("rows of tokens", tokens, topk_idx)
    arrays = {f"received of rank {rank}": data for rank, data in received.items()}
    most = _most_tokens(mode, len(topk_idx), arrays, max_tokens)
    step = Step([_array(ids) for ids in topk_idx], num_experts, max_tokens=most)
    sources = _Sources(tokens)
    found = Found()
    for rank, data in sorted(received.items()):
        slots = step.slots(mode, rank, alignment=alignment)
        values, raw = _rows(f"received of rank {rank}", data, sources.width or None)
        used = np.flatnonzero(slots["src"] >= 0)
        if len(used) and len(raw) <= used[-1]:
            raise TrefoilError(
                f"received of rank {rank}: {len(raw)} rows; slot {used[-1]} holds a token"
            )
        if order_free:
            _compare_sets(found, mode, step, rank, slots, raw, sources)
        else:
            _compare_slots(found, mode, step, rank, slots, values, raw, sources)
    return found


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

    Raises TrefoilError with the reason where shapes, ids or the mode do not fit.
    """
    if (mode == "ll-expert-major") != (topk_weights is not None):
        raise TrefoilError("topk_weights are for ll-expert-major, and needed there")
    if topk_weights is not None:
        _require_tokens("topk_weights", topk_weights, topk_idx)
    arrays = {f"rows of rank {rank}": data for rank, data in enumerate(rows)}
    most = _most_tokens(mode, len(topk_idx), arrays, max_tokens)
    step = Step([_array(ids) for ids in topk_idx], num_experts, max_tokens=most)
    given = [_rows(f"rows of rank {r}", data)[0].astype(np.float64) for r, data in enumerate(rows)]
    if len(given) != step.num_ranks:
        raise TrefoilError(f"rows of {len(given)} ranks; topk_idx has {step.num_ranks}")
    width = given[0].shape[1]
    bound = float(np.finfo(np.float32).eps) if epsilon is None else epsilon
    weights = None if topk_weights is None else [_array(w) for w in topk_weights]
    sums = [np.zeros((len(ids), width)) for ids in step.idx]
    sizes = [np.zeros((len(ids), width)) for ids in step.idx]
    terms = [np.zeros(len(ids), np.int64) for ids in step.idx]
    for rank, of_rank in enumerate(given):
        slots = step.slots(mode, rank, alignment=alignment)
        for slot in np.flatnonzero(slots["src"] >= 0):
            source, token, k = (int(slots[slot][n]) for n in ("src", "token", "k"))
            term = of_rank[slot] if weights is None else of_rank[slot] * weights[source][token, k]
            sums[source][token] += term
            sizes[source][token] += np.abs(term)
            terms[source][token] += 1
    found = Found()
    for rank, data in sorted(combined.items()):
        got = _rows(f"combined of rank {rank}", data)[0].astype(np.float64)
        if got.shape != sums[rank].shape:
            raise TrefoilError(
                f"combined of rank {rank}: {list(got.shape)}; expected {list(sums[rank].shape)}"
            )
        allowed = (terms[rank][:, None] + 1) * bound * sizes[rank]
        wrong = ~(np.abs(got - sums[rank]) <= allowed)
        found.compared += len(got)
        for token in np.flatnonzero(wrong.any(axis=1)):
            at = int(np.flatnonzero(wrong[token])[0])
            text = (
                f"rank {rank}, token {token}: {int(wrong[token].sum())} of {width} values are no "
                f"sum of its {terms[rank][token]} rows, first value {at}: "
                f"found {got[token, at]:.9g}, expected {sums[rank][token, at]:.9g} "
                f"+- {allowed[token, at]:.1g}"
            )
            found.add(rank, int(token), -1, text)
    return found
