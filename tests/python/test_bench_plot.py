"""The picture of GPU times: what it shows is what the JSON says, and other JSON is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trefoil import bench_plot


def spread(p50: float) -> dict[str, Any]:
    one = {"p50_s": p50, "p99_s": 1.25 * p50}
    return {"called": one, "replayed": one}


def operation(us: float, port: int) -> dict[str, Any]:
    return {
        "kernel": spread(1e-6 * us),
        "event": spread(1e-6 * (us + 4)),
        "busiest_port_bytes": port,
    }


def row(mode: str, variant: str, tokens: int) -> dict[str, Any]:
    times = {
        "empty": {"event": spread(4e-6)},
        "dispatch": operation(5 + tokens / 8, 40000 * tokens),
        "combine": operation(4 + tokens / 4, 110000 * tokens),
    }
    if variant == "e4m3":
        del times["combine"]
    return {
        "mode": mode, "variant": variant, "ranks": 4, "tokens": tokens, "hidden": 7168,
        "experts": 256, "topk": 8, "ok": True, "iterations": 200,
        "copy_bytes_per_second": 350e9, "times": times,
    }  # fmt: skip


def bench() -> dict[str, Any]:
    kinds = [("ll-expert-major", v) for v in ("plain", "partial", "e4m3")]
    kinds += [("ll-rank-major", "plain")]
    rows = [row(mode, variant, tokens) for mode, variant in kinds for tokens in (128, 1, 8)]
    return {"gpu_benchmarks": rows, "gpu": {"name": "GPU", "count": 4}}


def test_curves_are_what_was_measured() -> None:
    curves = {c.title: c for c in bench_plot.curves_of(bench())}
    assert list(curves) == [
        "Dispatch LL expert-major",
        "Combine LL expert-major",
        "Combine LL expert-major, partial sums",
        "Dispatch LL expert-major, to E4M3",
        "Dispatch LL rank-major",
        "Combine LL rank-major",
    ]
    c = curves["Combine LL expert-major"]
    assert c.tokens == [1, 8, 128]
    assert c.kernel is not None
    assert c.kernel[2] == pytest.approx((36e-6, 45e-6))
    assert c.floor[2] == pytest.approx(110000 * 128 / 350e9 + 3.4e-6)


def test_failed_checks_are_left_out() -> None:
    data = bench()
    del data["gpu_benchmarks"][0]["times"]
    assert bench_plot.curves_of(data)[0].tokens == [1, 8]
    for r in data["gpu_benchmarks"]:
        r.pop("times", None)
    with pytest.raises(bench_plot.BenchError, match="nothing was timed"):
        bench_plot.picture(data)


def test_measured_data_is_whole() -> None:
    path = Path(__file__).resolve().parents[2] / "validate" / "data" / "ll_api_h200x4.json"
    data = json.loads(path.read_text())
    assert all(data[key] for key in ("what", "measured", "commit", "command", "gpu"))
    assert all(r["ok"] and r["iterations"] >= 200 for r in data["gpu_benchmarks"])
    curves = bench_plot.curves_of(data)
    assert len(curves) == 7
    assert all(c.tokens == [1, 8, 32, 64, 128] and c.kernel is not None for c in curves)
    for c in curves:  # an event pair holds the kernel
        assert c.kernel is not None
        assert all(e[0] > k[0] for e, k in zip(c.event, c.kernel, strict=True))


def test_other_files_are_refused() -> None:
    for data in ({}, [], {"gpu_benchmarks": [{"times": {}}]}, {"benchmarks": []}):
        with pytest.raises(bench_plot.BenchError):
            bench_plot.picture(data)


def test_picture_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bench.svg"
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(bench()))
    with source.open() as f:
        monkeypatch.setattr("sys.stdin", f)
        assert bench_plot.main(["bench_plot", str(out)]) == 0
    text = out.read_text()
    assert "Dispatch LL rank-major" in text
    assert "tokens a rank" in text
    assert "bytes and 3.4" in text
    assert bench_plot.main(["bench_plot", "bench.txt"]) == 2
