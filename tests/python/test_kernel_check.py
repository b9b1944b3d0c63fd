"""check_dispatch and check_combine accept the reference's results and name planted faults."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_bad_input() -> None:
    case = Case("ht-flat", ranks=2, seed=1)
    outputs = by_reference(case)
    ids, rows = [case.routing(r) for r in range(2)], [case.rows(r) for r in range(2)]
    with pytest.raises(TrefoilError, match="mode 'flat': expected"):
        check_dispatch("flat", ids, rows, {0: outputs[0].tokens}, num_experts=8)
    with pytest.raises(TrefoilError, match="rows of 64 bytes, the tokens have 128"):
        narrow = {0: outputs[0].tokens[:, :16]}
        check_dispatch("ht-flat", ids, rows, narrow, num_experts=8)
    with pytest.raises(TrefoilError, match=r"1 rows; slot \d+ holds a token"):
        check_dispatch("ht-flat", ids, rows, {0: outputs[0].tokens[:1]}, num_experts=8)
    with pytest.raises(TrefoilError, match="1 dimensions; rows of H values expected"):
        check_dispatch("ht-flat", ids, rows, {0: outputs[0].tokens[0]}, num_experts=8)
    with pytest.raises(TrefoilError, match="and needed there"):
        check_combine("ll-expert-major", ids, rows, {}, num_experts=8)
    with pytest.raises(TrefoilError, match="rows of 1 ranks; topk_idx has 2"):
        check_combine("ht-flat", ids, rows[:1], {}, num_experts=8)
    with pytest.raises(TrefoilError, match=r"combined of rank 0: \[1, 32\]; expected"):
        gave = [out.tokens for out in outputs]
        check_combine("ht-flat", ids, gave, {0: rows[0][:1]}, num_experts=8)


def test_page() -> None:
    """The script of docs/check_kernel.md finds the fault that it plants."""
    page = (ROOT / "docs" / "check_kernel.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(script, "check_kernel.md", "exec"), names)
    found = names["found"]
    assert isinstance(found, Found) and found.wrong == 1
    assert str(found).splitlines()[0] in page
