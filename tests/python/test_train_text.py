"""The language models' gradients, and short runs of the training script on the tree's own pages."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/examples"))

import text_models  # noqa: E402
import train_text  # noqa: E402
from text_models import Lstm, Moe  # noqa: E402

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)


def rows_of(model: text_models.Model, rng: np.random.Generator, count: int = 2) -> np.ndarray:
    return 2 * np.stack([model.start(rng) for _ in range(count)]).astype(np.float64)


def slope(losses, rows: np.ndarray, at: tuple[int, int]) -> float:
    """Of the sum of losses by one element."""
    moved = [rows.copy(), rows.copy()]
    for array, step in zip(moved, (1e-4, -1e-4), strict=True):
        array[at] += step
    high, low = (losses(array).sum() for array in moved)
    return (high - low) / 2e-4


def places(model: text_models.Model, rng: np.random.Generator) -> np.ndarray:
    """Three elements of every tensor."""
    ends = np.cumsum([0, *model.sizes])
    return np.concatenate([rng.integers(a, b, 3) for a, b in pairwise(ends)])


def test_gradient_of_the_lstm() -> None:
    rng, model = np.random.default_rng(1), Lstm(9, 6)
    rows, tokens = rows_of(model, rng), rng.integers(0, 9, (2, 3, 7))
    losses, grads = model.gradients(rows, tokens)
    assert np.allclose(losses, model.losses(rows, tokens))
    for i in places(model, rng):
        want = slope(lambda r: model.losses(r, tokens), rows, (1, i))
        assert grads[1, i] == pytest.approx(want, abs=1e-6)


def test_gradient_of_the_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moe, "BALANCE", 0.0)
    rng, model = np.random.default_rng(1), Moe(9, 16, experts=4)
    rows, experts = rows_of(model, rng), rows_of(model.shared, rng, 1)
    tokens = rng.integers(0, 9, (2, 3, 14))
    losses, grads, of_experts = model.gradients(rows, experts, tokens)
    assert np.allclose(losses, model.losses(rows, experts, tokens))
    for i in places(model, rng):
        want = slope(lambda r: model.losses(r, experts, tokens), rows, (1, i))
        assert grads[1, i] == pytest.approx(want, abs=1e-6)
    for i in places(model.shared, rng):
        want = slope(lambda e: model.losses(rows, e, tokens), experts, (0, i)) / 2
        assert of_experts[0, i] == pytest.approx(want, abs=1e-6)


def test_workers_share_no_word_with_those_held_out() -> None:
    words = np.arange(20_500)
    own, held = train_text.parts_of(words)
    assert own.shape[0] == train_text.WORKERS
    seen = np.concatenate([own.ravel(), held])
    assert len(np.unique(seen)) == len(seen) >= 0.8 * len(words)
    assert len(held) == 1000


SHORT = ["--width", "16", "--steps", "6", "--every", "3", "--held", "8", "--rate", "2"]
PAGES = ["--text", str(ROOT / "docs/spec.md"), "--source", "this tree"]


@pytest.mark.parametrize("model", train_text.MODELS)
def test_short_runs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    assert train_text.main([model, *PAGES, *SHORT, "--seeds", "1", "2", "-o", str(path)]) == 0
    data = json.loads(path.read_text())
    assert list(data["cases"]) == list(train_text.CASES)
    assert data["about"]["elements"] > 1000
    elements = data["about"]["elements"]
    last = {n: [r["points"][-1] for r in c["runs"]] for n, c in data["cases"].items()}
    first = data["cases"]["dense"]["runs"][0]["points"][0]
    for name, points in last.items():
        drifts = name in ("none", "local, sync 50", "a2sgd", "a2sgd, sync 50")
        for p in points:
            assert (p["drift"] > 1e-4) == drifts, name
            assert p["step"] == 6
            assert p["mean"] < 0.9 * first["mean"], name
        assert points[0]["mean"] != points[1]["mean"], name
    sent = {name: points[0]["sent_bytes"] for name, points in last.items()}
    assert sent["dense"] == 6 * 4 * elements
    assert sent["a2sgd"] == 6 * 8 * data["about"]["tensors"]
    assert sent["none"] == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(train_text.CASES)


@pytest.mark.parametrize("method", ["a2sgd", "none", "qsgd"])
def test_runs_are_repeatable_and_synchronised(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = train_text.numbered(train_text.text_of(ROOT / "docs/spec.md"))
    synced = {} if method == "qsgd" else {"sync_period": 4}
    monkeypatch.setitem(train_text.CASES, "tried", (method, synced))
    options = train_text.arguments(["lstm", *PAGES, *SHORT, "--steps", "4"])
    options.show = lambda _: None
    one, two = (train_text.train("lstm", "tried", 3, words, options) for _ in range(2))
    assert one["points"] == two["points"]
    if synced:
        assert one["points"][-1]["drift"] < 1e-6 < one["points"][-2]["drift"]


def test_a_text_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_text.main(["lstm", "--text", str(tmp_path)]) == 2
    assert "no text there; apt-get install fortunes" in capsys.readouterr().err
    (tmp_path / "short").write_text("a few words")
    assert train_text.main(["lstm", "--text", str(tmp_path)]) == 2
    assert "at least 4500" in capsys.readouterr().err
