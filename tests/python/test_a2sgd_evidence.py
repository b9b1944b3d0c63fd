"""The page of gradient averaging shows what its data files hold, and these are whole and fresh."""

import os
from pathlib import Path

import pytest

from trefoil.gradients import StepSetting, methods_of, simulate_steps
from trefoil.gradients.__main__ import _step_row as row_of
from trefoil.gradients.evidence import (
    METHODS,
    PTB_ELEMENTS,
    RUNS,
    filled,
    goal_of,
    load_runs,
    load_steps,
    ptb_rows,
    steps_to,
)

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)
PAGE = Path(__file__).parents[2] / "docs/a2sgd.md"


def test_the_page_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text
    assert all(f"<!-- {name} -->" in text for name in (*RUNS, "steps", "ptb"))


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_whole(name: str) -> None:
    data = load_runs(name)
    assert list(data["cases"]) == list(METHODS)
    for case in data["cases"].values():
        assert [run["seed"] for run in case["runs"]] == [1, 2, 3]
        assert all(run["points"][-1]["step"] == data["about"]["steps"] for run in case["runs"])
    assert data["about"]["commit"] != "unknown"


def test_steps_are_fresh() -> None:
    kept = [row for row in load_steps() if row["gpus"] == 8]
    made = [row_of(step) for step in simulate_steps(StepSetting(), 8, methods_of())]
    for old, new in zip(kept, made, strict=True):
        assert old == pytest.approx(new, rel=1e-9)


def test_size_of_the_large_lstm() -> None:
    words, width = 10_000, 1500
    layer = 4 * width * 2 * width + 2 * 4 * width
    assert words * width + 2 * layer + width * words + words == PTB_ELEMENTS
    fast, slow = (ptb_rows(network, "radix") for network in ("400 Gb/s", "10 Gb/s"))
    assert list(fast) == list(slow)
    assert all(slow[name] >= fast[name] for name in fast)


def test_steps_to_a_goal() -> None:
    points = [{"step": s, "replicas": p} for s, p in ((0, 100.0), (10, 60.0), (20, 40.0))]
    case = {"runs": [{"points": points}]}
    assert steps_to(case, 50) == 15
    assert steps_to(case, 100) == pytest.approx(0)
    assert goal_of({"cases": {"one": case}}) == 40
