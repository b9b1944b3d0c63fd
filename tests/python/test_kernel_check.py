"""check_dispatch and check_combine accept the reference's results and name planted faults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import MODES, Case, Outputs, by_reference, expert
from trefoil import check_combine, check_dispatch
from trefoil.kernel_check import Found
from trefoil.reference import Step, TrefoilError

ROOT = Path(__file__).resolve().parents[2]


def dispatched(case: Case, outputs: list[Outputs], **more: object) -> Found:
    ranks = range(case.ranks)
    return check_dispatch(
        case.mode,
        [case.routing(r) for r in ranks],
        [case.rows(r) for r in ranks],
        {r: outputs[r].tokens for r in ranks},
        num_experts=case.experts,
        max_tokens=case.tokens,
        **more,
    )


def combined(case: Case, outputs: list[Outputs], **more: object) -> Found:
    ranks = range(case.ranks)
    weights = [case.weights(r) for r in ranks] if case.mode == "ll-expert-major" else None
    return check_combine(
        case.mode,
        [case.routing(r) for r in ranks],
        [expert(outputs[r].tokens) for r in ranks],
        {r: outputs[r].combined for r in ranks},
        num_experts=case.experts,
        topk_weights=weights,
        max_tokens=case.tokens,
        **more,
    )


def used_slots(case: Case, rank: int) -> np.ndarray:
    step = Step([case.routing(r) for r in range(case.ranks)], case.experts, max_tokens=case.tokens)
    slots = step.slots(case.mode, rank)
    return slots, np.flatnonzero(slots["src"] >= 0)


@pytest.mark.parametrize("mode", MODES)
def test_right_results(mode: str) -> None:
    """Both comparisons, strict and order-free; on one rank alone, too."""
    case = Case(mode, seed=3)
    outputs = by_reference(case)
    for order_free in (False, True):
        found = dispatched(case, outputs, order_free=order_free)
        assert found.ok, found
        arrived = sum(len(used_slots(case, r)[1]) for r in range(case.ranks))
        assert found.compared == arrived
    found = combined(case, outputs)
    assert found.ok, found
    assert found.compared == sum(len(case.routing(r)) for r in range(case.ranks))


@pytest.mark.parametrize("mode", MODES)
def test_faults_of_a_dispatch(mode: str) -> None:
    """A row twice, a lost row, a changed value, rows of another place: each is named."""
    case = Case(mode, seed=5)
    slots, used = used_slots(case, 1)
    hidden = case.hidden
    outputs = by_reference(case)
    rows = outputs[1].tokens.reshape(-1, hidden)
    right = rows.copy()
    first, last = int(used[0]), int(used[-1])
    owner = tuple(int(slots[first][n]) for n in ("src", "token"))
    other = tuple(int(slots[last][n]) for n in ("src", "token"))

    rows[first] = right[last]
    found = dispatched(case, outputs)
    assert found.wrong == 1 and not found.ok
    (difference,) = found.differences
    assert (difference.rank, difference.slot) == (1, first)
    assert f"holds the row of (rank {other[0]}, token {other[1]})" in difference.text
    assert f"expected the row of (rank {owner[0]}, token {owner[1]})" in difference.text
    assert "1 wrong" in str(found)

    rows[first] = 0
    assert "holds zeros" in str(dispatched(case, outputs))
    rows[first] = -123.5
    assert "holds no token's row" in str(dispatched(case, outputs))
    rows[first] = right[first]
    rows[first, 7] += 1
    expected = f"differs in 1 of {hidden} values, first in value 7: found"
    assert expected in str(dispatched(case, outputs))
    free = dispatched(case, outputs, order_free=True)
    assert free.wrong == 1
    assert f"the row of (rank {owner[0]}, token {owner[1]}) is missing" in str(free)


def test_order() -> None:
    """Two rows of an expert changed places: wrong, unless the order is open."""
    case = Case("ll-expert-major", tokens=12, seed=7)
    _, used = used_slots(case, 0)
    wide = case.ranks * case.tokens
    zones = used // wide
    expert_zone = next(z for z in np.unique(zones) if (zones == z).sum() > 1)
    a, b = used[zones == expert_zone][:2]
    outputs = by_reference(case)
    rows = outputs[0].tokens.reshape(-1, case.hidden)
    rows[[a, b]] = rows[[b, a]]
    assert dispatched(case, outputs).wrong == 2
    assert dispatched(case, outputs, order_free=True).ok


@pytest.mark.parametrize("mode", MODES)
def test_faults_of_a_combine(mode: str) -> None:
    """A value off by more than the terms' rounding, NaN, and a token's sum at another token."""
    case = Case(mode, seed=9)
    outputs = by_reference(case)
    got = outputs[2].combined
    token = int(np.abs(got).max(axis=1).argmax())
    right = got.copy()
    got[token, 3] *= 1.0001
    found = combined(case, outputs)
    assert found.wrong == 1 and found.differences[0].slot == token
    assert f"rank 2, token {token}: 1 of {case.hidden} values are no sum of its" in str(found)
    assert combined(case, outputs, epsilon=2.0**-8).ok
    got[:] = right
    got[token] = np.nan
    assert f"token {token}: {case.hidden} of {case.hidden} values" in str(combined(case, outputs))
    got[:] = np.roll(right, 1, axis=0)
    assert combined(case, outputs).wrong > 1


def test_many_differences() -> None:
    """The first twenty are told, all are counted."""
    case = Case("ht-flat", tokens=40, seed=1)
    outputs = by_reference(case)
    for out in outputs:
        out.tokens[:] = 0
    found = dispatched(case, outputs)
    assert len(found.differences) == 20 and found.wrong == found.compared > 40
    assert f"and {found.wrong - 20} more" in str(found)


def test_nothing_compared_is_not_ok() -> None:
    ids, rows = [np.full((2, 2), -1)], [np.zeros((2, 4), np.float32)]
    found = check_dispatch("ht-flat", ids, rows, {0: rows[0]}, num_experts=4)
    assert found.compared == 0 and not found.ok


@pytest.mark.parametrize("mode", ["ll-expert-major", "ll-rank-major"])
def test_most_tokens(mode: str) -> None:
    """N is above every rank's tokens, and the arrays' shapes say so."""
    sparse = Case(mode, seed=5)
    ranks = range(sparse.ranks)
    ids = [sparse.routing(r)[:4] for r in ranks]
    rows = [sparse.rows(r)[:4] for r in ranks]
    step = Step(ids, sparse.experts, max_tokens=sparse.tokens)
    received = {}
    for r in ranks:
        slots = step.slots(mode, r)
        out = np.zeros((len(slots), sparse.hidden), rows[0].dtype)
        for slot in np.flatnonzero(slots["src"] >= 0):
            out[slot] = rows[slots["src"][slot]][slots["token"][slot]]
        shape = (sparse.local, -1) if mode == "ll-expert-major" else (sparse.ranks, -1)
        received[r] = out.reshape(*shape, sparse.hidden)
    found = check_dispatch(mode, ids, rows, received, num_experts=sparse.experts)
    assert found.ok, found
    with pytest.raises(TrefoilError, match="slots in dimension 1; N is 5"):
        check_dispatch(mode, ids, rows, received, num_experts=sparse.experts, max_tokens=5)
    with pytest.raises(TrefoilError, match=r"rows of tokens: .* by rank; topk_idx has"):
        check_dispatch(mode, ids, rows[:2], received, num_experts=sparse.experts)


@pytest.mark.parametrize("mode", MODES)
def test_surplus_rows(mode: str) -> None:
    """A token's row where none belongs is named, unless the memory is known to be old."""
    case = Case(mode, seed=3)
    outputs = by_reference(case)
    slots, used = used_slots(case, 2)
    rows = outputs[2].tokens.reshape(-1, case.hidden)
    free = next(s for s in range(len(rows)) if s not in used and s > used[-1])
    owner = tuple(int(slots[int(used[0])][n]) for n in ("src", "token"))
    rows[free] = rows[used[0]]
    for order_free in (False, True):
        found = dispatched(case, outputs, order_free=order_free)
        assert found.wrong == 1 and found.differences[0].slot == free
        told = f"holds the row of (rank {owner[0]}, token {owner[1]}); no token belongs there"
        assert told in str(found)
        assert "rank 2, " in str(found)
        assert dispatched(case, outputs, order_free=order_free, stale=True).ok
    rows[free] = 0
    assert dispatched(case, outputs).ok


def test_numbers_without_end() -> None:
    """A sum that is infinite or NaN must be so; a finite one in its place is wrong."""
    case = Case("ht-flat", seed=9)
    outputs = by_reference(case)
    slots, used = used_slots(case, 0)
    for value in (np.inf, np.nan):
        outputs[0].tokens[used[0]] = value
        source, token = (int(slots[used[0]][n]) for n in ("src", "token"))
        kept = outputs[source].combined[token].copy()
        assert combined(case, outputs).wrong == 1
        outputs[source].combined[token] = value
        assert combined(case, outputs).ok
        outputs[source].combined[token] = kept


def job(mode: str) -> dict[str, Any]:
    """The arguments of both comparisons, all right."""
    case = Case(mode, seed=3)
    outputs, ranks = by_reference(case), range(case.ranks)
    return {
        "mode": mode,
        "topk_idx": [case.routing(r) for r in ranks],
        "tokens": [case.rows(r) for r in ranks],
        "received": {r: outputs[r].tokens for r in ranks},
        "rows": [expert(outputs[r].tokens) for r in ranks],
        "combined": {r: outputs[r].combined for r in ranks},
        "topk_weights": [case.weights(r) for r in ranks],
        "num_experts": case.experts,
        "max_tokens": case.tokens,
    }


def changed(arrays: Any, rank: int, array: object) -> Any:
    """The same, but for one rank's array."""
    copy = arrays.copy()
    copy[rank] = array
    return copy


WIDE = np.zeros((2, 64), np.float32)
# What breaks which argument, and what the sentence says.
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "mode": ("mode", lambda a: "flat", "mode 'flat': expected"),
    "no mode": ("mode", lambda a: None, "mode None: expected"),
    "no ids": ("topk_idx", lambda a: None, "topk_idx: found NoneType"),
    "one rank's ids": ("topk_idx", lambda a: a["topk_idx"][0], "topk_idx: found ndarray"),
    "no rank": ("topk_idx", lambda a: [], "topk_idx: of no rank"),
    "type of ids": (
        "topk_idx",
        lambda a: changed(a["topk_idx"], 1, np.zeros((5, 3))),
        r"topk_idx of rank 1: float64 \[5, 3\]; integers",
    ),
    "shape of ids": (
        "topk_idx",
        lambda a: changed(a["topk_idx"], 1, np.zeros(3, int)),
        r"topk_idx of rank 1: int64 \[3\]; integers",
    ),
    "an id": (
        "topk_idx",
        lambda a: changed(a["topk_idx"], 1, np.full((5, 3), 8)),
        r"topk_idx: expected ids in \[0, 8\)",
    ),
    "twice": (
        "topk_idx",
        lambda a: changed(a["topk_idx"], 1, np.full((5, 3), 7)),
        "rank 1, token 0: expert 7 is named twice",
    ),
    "K": (
        "topk_idx",
        lambda a: changed(a["topk_idx"], 1, np.full((5, 2), -1)),
        "topk_idx of rank 1: K is 2, that of rank 0 3",
    ),
    "experts": ("num_experts", lambda a: 0, "num_experts: 0; 1 to"),
    "experts' type": ("num_experts", lambda a: "8", "num_experts: '8'; an integer"),
    "N": ("max_tokens", lambda a: 1, "N is 1|rank 0 has 6 tokens"),
    "N's type": ("max_tokens", lambda a: 6.0, "max_tokens: 6.0; an integer"),
    "alignment": ("alignment", lambda a: -1, "alignment: -1; 0 to"),
}
OF_DISPATCH: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "no tokens": ("tokens", lambda a: None, "tokens: found NoneType"),
    "few tokens": (
        "tokens",
        lambda a: changed(a["tokens"], 0, a["tokens"][0][:1]),
        r"rows of tokens: \[1, 5, 4, 6\] by rank; topk_idx has \[6, 5, 4, 6\]",
    ),
    "width of tokens": (
        "tokens",
        lambda a: changed(a["tokens"], 1, a["tokens"][1][:, :4]),
        "tokens of rank 1: rows of 16 bytes, other ranks' have 128",
    ),
    "empty rows": (
        "tokens",
        lambda a: changed(a["tokens"], 1, a["tokens"][1][:, :0]),
        "tokens of rank 1: .* rows without a value",
    ),
    "list": ("received", lambda a: [a["received"][0]], "received: found list; {rank: array}"),
    "rank": ("received", lambda a: {9: WIDE}, "received: rank 9; 0 to 3 expected"),
    "rank's type": ("received", lambda a: {"0": WIDE}, "received: rank '0'; 0 to 3 expected"),
    "width": ("received", lambda a: {0: WIDE}, "received of rank 0: rows of 256 bytes"),
    "dimensions": (
        "received",
        lambda a: {0: a["received"][0][None, None]},
        "received of rank 0: [45] dimensions",
    ),
    "one row": (
        "received",
        lambda a: {0: a["received"][0].reshape(-1, 32)[:1]},
        r"received of rank 0: 1 rows; slot \d+ holds a token",
    ),
    "ragged": ("received", lambda a: {0: [[1, 2], [3]]}, "received of rank 0: no array of numbers"),
    "strings": ("received", lambda a: {0: [["a"]]}, "received of rank 0: elements are <U1"),
}
OF_COMBINE: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "rows of fewer ranks": ("rows", lambda a: a["rows"][:1], "rows of 1 ranks; topk_idx has 4"),
    "rows in a mapping": ("rows", lambda a: dict(enumerate(a["rows"])), "rows: found dict"),
    "few rows": (
        "rows",
        lambda a: changed(a["rows"], 2, a["rows"][2].reshape(-1, 32)[:1]),
        r"rows of rank 2: 1 rows; slot \d+ holds a token",
    ),
    "width of rows": (
        "rows",
        lambda a: changed(a["rows"], 2, a["rows"][2][..., :1]),
        "rows of rank 2: rows of 1 values, those of rank 0 have 32",
    ),
    "complex rows": (
        "rows",
        lambda a: changed(a["rows"], 2, a["rows"][2].astype(complex)),
        "rows of rank 2: elements are complex128",
    ),
    "list": ("combined", lambda a: [a["combined"][0]], "combined: found list; {rank: array}"),
    "rank 9": ("combined", lambda a: {9: WIDE}, "combined: rank 9; 0 to 3 expected"),
    "rank -1": ("combined", lambda a: {-1: WIDE}, "combined: rank -1; 0 to 3 expected"),
    "few sums": (
        "combined",
        lambda a: {0: a["combined"][0][:1]},
        r"combined of rank 0: \[1, 32\]; expected \[6, 32\]",
    ),
    "epsilon": ("epsilon", lambda a: float("nan"), "epsilon: nan; a number"),
    "epsilon's type": ("epsilon", lambda a: "1e-7", "epsilon: '1e-7'; a number"),
}
OF_WEIGHTS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "none": ("topk_weights", lambda a: None, "and needed there"),
    "fewer tokens": (
        "topk_weights",
        lambda a: changed(a["topk_weights"], 3, a["topk_weights"][3][:1]),
        r"topk_weights: \[6, 5, 4, 1\] by rank; topk_idx has",
    ),
    "narrow": (
        "topk_weights",
        lambda a: changed(a["topk_weights"], 3, a["topk_weights"][3][:, :1]),
        r"topk_weights of rank 3: \[6, 1\]; \[6, 3\] expected",
    ),
    "flat": (
        "topk_weights",
        lambda a: changed(a["topk_weights"], 3, a["topk_weights"][3][:, 0]),
        r"topk_weights of rank 3: \[6\]; \[6, 3\] expected",
    ),
}


def refuse(
    check: Callable[..., Found],
    case: tuple[str, Callable[[dict[str, Any]], object], str],
    mode: str,
) -> None:
    """The one argument is refused, by a ValueError with its name; without it all is right."""
    name, change, match = case
    known = inspect.signature(check).parameters
    arguments = {key: value for key, value in job(mode).items() if key in known}
    if mode != "ll-expert-major":
        arguments.pop("topk_weights", None)
    assert check(**arguments).ok
    arguments[name] = change(job(mode))
    with pytest.raises(ValueError, match=match) as caught:
        check(**arguments)
    assert isinstance(caught.value, TrefoilError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*WRONG, *OF_DISPATCH])
def test_bad_input_of_a_dispatch(name: str, mode: str) -> None:
    refuse(check_dispatch, {**WRONG, **OF_DISPATCH}[name], mode)


@pytest.mark.parametrize("mode", ["ll-expert-major", "ht-flat"])
@pytest.mark.parametrize("name", [*WRONG, *OF_COMBINE])
def test_bad_input_of_a_combine(name: str, mode: str) -> None:
    refuse(check_combine, {**WRONG, **OF_COMBINE}[name], mode)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_bad_weights(name: str) -> None:
    refuse(check_combine, OF_WEIGHTS[name], "ll-expert-major")
    arguments = {key: value for key, value in job("ht-flat").items() if key != "tokens"}
    del arguments["received"]
    with pytest.raises(ValueError, match="topk_weights are for ll-expert-major"):
        check_combine(**arguments)


@pytest.mark.parametrize("mode", ["ll-expert-major", "ll-rank-major"])
def test_low_latency_has_a_row_for_each_slot(mode: str) -> None:
    arguments = job(mode)
    rows = arguments["received"][0].reshape(-1, 32)
    arguments["received"] = {0: np.concatenate([rows, rows[:3]])}
    del arguments["rows"], arguments["combined"], arguments["topk_weights"]
    with pytest.raises(ValueError, match=r"received of rank 0: (51|27) rows; the layout has"):
        check_dispatch(**arguments)


def test_page() -> None:
    """The script of docs/check_kernel.md finds the fault that it plants."""
    page = (ROOT / "docs" / "check_kernel.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(script, "check_kernel.md", "exec"), names)
    found = names["found"]
    assert isinstance(found, Found) and found.wrong == 1
    assert str(found).splitlines()[0] in page
