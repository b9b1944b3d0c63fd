"""The binding of gradient averaging, and the training example: what converges, what drifts."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trefoil.a2sgd import METHODS, Averaging
from trefoil.reference import TrefoilError

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)

EXAMPLE = Path(__file__).parents[1] / "examples/train_a2sgd.py"


def gradients(seed: int, workers: int = 3, elements: int = 50) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, elements)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_dense_is_the_mean(dtype: str) -> None:
    kind = {"f32": np.float32, "f16": np.float16}[dtype]
    grads = gradients(1).astype(kind)
    updates = Averaging("dense", [20, 30], 3, dtype).step(grads)
    want = (grads.astype(np.float64).sum(0) / 3).astype(np.float32).astype(kind)
    assert updates.dtype == kind
    assert np.array_equal(updates, np.tile(want, (3, 1)))


def test_bits_of_bf16() -> None:
    ones = np.full((2, 4), 0x3F80, np.uint16)
    assert np.array_equal(Averaging("a2sgd", [4], 2, "bf16").step(ones), ones)


def test_two_means_are_what_moves_the_updates() -> None:
    grads, averaging = gradients(2), Averaging("a2sgd", [50], 3, whole_model=True)
    means = np.array([averaging.two_means(g)[0] for g in grads])
    moved = means.mean(0) - means
    want = np.where(grads < 0, grads - moved[:, 1:], grads + moved[:, :1])
    assert averaging.sent_bytes == means[0].nbytes
    assert np.allclose(averaging.step(grads), want, atol=1e-6)


def test_errors_and_steps_continue_a_run() -> None:
    for method in ("topk", "qsgd"):
        whole, first, second = (Averaging(method, [50], 3, share=0.1) for _ in range(3))
        want = [whole.step(gradients(t)) for t in range(4)]
        for t in range(2):
            first.step(gradients(t))
        second.errors[:], second.steps = first.errors, first.steps
        assert np.array_equal(second.step(gradients(2)), want[2]), method
        fresh = Averaging(method, [50], 3, share=0.1).step(gradients(2))
        assert not np.array_equal(fresh, want[2]), method


def test_sync_is_due_by_the_period() -> None:
    averaging, params = Averaging("a2sgd", [50], 3, sync_period=2), gradients(3)
    before = params.copy()
    averaging.step(gradients(0))
    averaging.sync(params)
    assert np.array_equal(params, before)
    averaging.step(gradients(1))
    averaging.sync(params)
    assert np.allclose(params, before.mean(0), atol=1e-6)
    assert np.array_equal(params[0], params[2])
    assert averaging.sync_bytes == before[0].nbytes


def test_refusals() -> None:
    for options, word in [
        ({"method": "sparse"}, "sparse"),
        ({"dtype": "f64"}, "f64"),
        ({"share": 0.0}, "share"),
        ({"bits": 9, "method": "qsgd"}, "qsgdBits"),
        ({"num_workers": 0}, "numWorkers"),
        ({"sizes": [3, -1]}, r"sizes\[1\]"),
    ]:
        with pytest.raises(TrefoilError, match=word):
            Averaging(**({"method": "dense", "sizes": [50], "num_workers": 3} | options))
    averaging = Averaging("a2sgd", [50], 3)
    for wrong in (gradients(0).astype(np.float64), gradients(0)[:, :49], gradients(0)[0]):
        with pytest.raises(TrefoilError, match="expected float32"):
            averaging.step(wrong)
    assert averaging.steps == 0
    with pytest.raises(TrefoilError, match="none was made"):
        averaging.sync(gradients(0))
    averaging.step(gradients(0))
    with pytest.raises(TrefoilError, match="contiguous"):
        averaging.sync(np.asfortranarray(gradients(0)))
    with pytest.raises(TrefoilError, match="float32"):
        averaging.two_means(np.zeros(49, np.float32))


def test_empty_model() -> None:
    for method in METHODS:
        assert Averaging(method, [0, 0], 2).step(np.zeros((2, 0), np.float32)).shape == (2, 0)


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_a2sgd", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_converges_with_every_method() -> None:
    example = load_example()
    results = {name: example.train(*case) for name, case in example.CASES.items()}
    for name, ((first, last), _, _) in results.items():
        assert last < first / 10, name
    drift = {name: result[1] for name, result in results.items()}
    drifting = {"none", "a2sgd"}
    assert all((value > 0.01) == (name in drifting) for name, value in drift.items()), drift
    sent = {name: result[2] for name, result in results.items()}
    elements = sum(example.SIZES)
    assert sent["dense"] == example.STEPS * 4 * elements
    assert sent["a2sgd"] == example.STEPS * 8 * len(example.SIZES)
    assert sent["a2sgd, sync 50"] == sent["a2sgd"] + example.STEPS // 50 * 4 * elements
    assert sent["a2sgd"] < sent["topk 1 %"] < sent["qsgd 4 bit"] < sent["dense"]
