"""Compute records: the form of a cost, the fit, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trefoil.capacity import compute_costs, compute_fit, compute_measure, step
from trefoil.capacity.compute_costs import (
    FOLDER,
    ComputeError,
    KindCosts,
    load,
    names,
    peak_seconds,
    record_of,
)

GPU = {"name": "g", "hbm_gb_per_s": 1000, "bf16_tflops": 100, "fp8_tflops": 200}
TRUTH = KindCosts(3.0, 0.6, 0.8, 2.0)


def measured(noise: float = 0.0) -> list[dict]:
    """Rows that the form explains, every fourth one held out and `noise` times longer."""
    rows = []
    for i in range(24):
        row = {"kind": "product", "dtype": "bf16", "shape": str(i), "held_out": i % 4 == 3}
        row |= {"flops": 1e9 * 2 ** (i % 8), "bytes": 1e6 * 3 ** (i // 4)}
        us = 1e6 * TRUTH.seconds(*peak_seconds(row, GPU))
        rows.append({**row, "us": us * (1 + noise if row["held_out"] else 1)})
    return rows


def raw(**changes: object) -> dict:
    data = {"format": "trefoil-compute", "version": 1, "name": "x", "about": "a", "gpu": GPU}
    return {**data, "row_tile": 64, "kinds": [], "rows": measured(), **changes}


def test_the_form_at_its_ends() -> None:
    assert KindCosts(2.0, 0.5, 1.0, 8.0).seconds(0.0, 0.0) == pytest.approx(2e-6)
    assert KindCosts(0.0, 0.5, 0.8, 8.0).seconds(1.0, 0.0) == pytest.approx(2.0)
    assert KindCosts(0.0, 0.5, 0.8, 8.0).seconds(0.0, 1.0) == pytest.approx(1.25)
    assert KindCosts(0.0, 1.0, 1.0, 1.0).seconds(1.0, 2.0) == pytest.approx(3.0), "one by one"
    assert KindCosts(0.0, 1.0, 1.0, 8.0).seconds(1.0, 2.0) == pytest.approx(2.0, rel=1e-3)


def test_a_fit_finds_the_costs_and_scores_what_was_held_out() -> None:
    record = compute_fit.fit(raw(rows=measured(noise=0.1)))
    (kind,) = record["kinds"]
    for name in ("launch_us", "math_share", "memory_share", "sharpness"):
        assert kind[name]["value"] == pytest.approx(getattr(TRUTH, name), rel=0.01), name
        assert kind[name]["state"] == "fitted"
    assert kind["fitted"]["mean"] < 1e-3 and kind["fitted"]["n"] == 18
    assert kind["held_out"]["mean"] == pytest.approx(1 - 1 / 1.1, abs=2e-3)
    assert kind["ratio"]["high"] == pytest.approx(1.1, abs=0.01)
    costs = record_of(record).of("product", "fp8")
    assert costs is not None and costs.origin == "fitted", "another dtype stands in"
    assert record_of(record).of("attention-decode", "bf16") is None


def test_a_cost_at_its_bound_says_so() -> None:
    rows = [{**row, "us": row["us"] * 50} for row in measured()]
    (kind,) = compute_fit.fit(raw(rows=rows))["kinds"]
    states = {kind[name]["state"] for name in ("launch_us", "math_share", "memory_share")}
    assert states & {"at-high", "at-low"}
    with pytest.raises(ComputeError, match="3 rows to fit 4 costs"):
        compute_fit.fit(raw(rows=measured()[:3]))


@pytest.mark.parametrize("name", names())
def test_records_in_the_tree_are_their_fits(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    assert data["name"] == name
    again = compute_fit.fit(data)
    for old, new in zip(data["kinds"], again["kinds"], strict=True):
        for cost in ("launch_us", "math_share", "memory_share", "sharpness"):
            assert new[cost]["value"] == pytest.approx(old[cost]["value"], rel=2e-2), (name, cost)
        assert new["held_out"] == pytest.approx(old["held_out"], rel=0.05)
    for row in data["rows"]:
        gpu = data["gpu"]
        assert row["us"] * 1e-6 > max(peak_seconds(row, gpu)), "nothing is faster than the peaks"
    assert load(name) is not None


def test_a_file_is_fitted_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw()))
    assert compute_fit.main([str(path)]) == 0
    assert "product bf16: 3 us, 60% of the math, 80% of the memory" in capsys.readouterr().out
    compute_costs.load.cache_clear()
    record = load(str(path))
    assert record is not None and record.kinds["product", "bf16"].math_share == 0.6
    with pytest.raises(SystemExit):
        compute_fit.main([str(tmp_path / "none.json")])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "format 'x'"),
        ({}, "rows but no costs"),
        ({"kinds": [{"kind": "x", "dtype": "bf16"}]}, "kind 'x'"),
        ({"gpu": {}, "kinds": [{"kind": "product", "dtype": "bf16"}]}, "'launch_us' is missing"),
        ({"name": None, "kinds": 3}, "not iterable"),
    ],
)
def test_what_is_wrong_with_a_record(tmp_path: Path, change: dict, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(raw(**change)))
    compute_costs.load.cache_clear()
    with pytest.raises(ComputeError, match=words):
        load(str(path))


def test_names_and_files() -> None:
    assert load("roofline") is None
    with pytest.raises(ComputeError, match=r"no compute record 'x': expected .*deepgemm-h800"):
        load("x")
    with pytest.raises(ComputeError, match="No such file"):
        load("nowhere.json")


def test_what_is_measured_is_what_a_step_counts(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = list(compute_measure.shapes())
    assert {s.kind for s in shapes} == set(compute_costs.KINDS) - {"mla-decode"}
    one = next(s for s in shapes if (s.kind, s.dtype) == ("product", "bf16"))
    _, rows, inner, outer = one.sizes
    assert step.product(rows, inner, outer, "bf16") == step.Cost(one.flops, one.bytes)
    assert compute_measure.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(shapes) == len({*shapes})
    held = [compute_measure.is_held_out(i) for i in range(8)]
    assert sum(held) == 2 and not held[0]
    with pytest.raises(SystemExit):
        compute_measure.main([])


class FakeTorch:
    """Enough of PyTorch for the loop: kernels take the time that TRUTH says."""

    __version__ = "0"

    class version:  # noqa: N801
        cuda = "0"

    class cuda:  # noqa: N801
        @staticmethod
        def get_device_name(_: int) -> str:
            return "NVIDIA H200"

        @staticmethod
        def empty_cache() -> None:
            pass


def test_a_measured_record_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = dict(
        zip(
            ("hbm_gb_per_s", "bf16_tflops", "fp8_tflops"),
            compute_measure.PEAKS["H200"],
            strict=True,
        )
    )

    def measure(_: object, s: compute_measure.Shape) -> float:
        if (s.kind, s.dtype) == ("grouped", "fp8"):
            raise RuntimeError("no such kernel\nand more")
        return 1e6 * TRUTH.seconds(*peak_seconds(s.__dict__, peaks))

    monkeypatch.setattr(compute_measure, "measure", measure)
    data = compute_fit.fit(compute_measure.record_of(FakeTorch, "x"))
    assert {(r["kind"], r["why"]) for r in data["refused"]} == {("grouped", "no such kernel")}
    record = record_of(data)
    assert ("grouped", "fp8") not in record.kinds and record.gpu == "NVIDIA H200"
    assert record.kinds["product", "fp8"].math_share == pytest.approx(0.6, rel=0.01)
    assert not record.kinds["mla-decode", "bf16"].is_fitted
    by_kind = {(k["kind"], k["dtype"]): k for k in data["kinds"]}
    assert by_kind["product", "bf16"]["held_out"]["mean"] < 1e-3
