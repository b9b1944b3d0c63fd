"""The picture of two libraries: which time is drawn, what was not timed, wrong input."""

import io
import json

import pytest

from trefoil import against_plot, bench_plot
from trefoil.bench_plot import BenchError


def spread(p50):
    return {"p50_s": p50, "p99_s": p50 * 1.5, "min_s": p50 / 2, "max_s": p50 * 2}


def row(tokens, mode="ll-expert-major", names=("event", "kernel_span"), ok=True):
    of = {
        "libraries": [{n: spread(1e-6 * tokens) for n in names}] * 2,
        "against_over_library": {n: {"p50": 1.5, "min": 1.4, "max": 1.7} for n in names},
    }
    shape = {"mode": mode, "ranks": 2, "tokens": tokens, "hidden": 64, "experts": 8, "topk": 2}
    if not ok:
        return shape | {"ok": False, "difference": "rank 0"}
    return shape | {"ok": True, "dispatch": of, "combine": of}


def bench(*rows):
    gpu = {"count": 2, "name": "H200"}
    return {
        "against_benchmarks": list(rows),
        "library": "/a/x.so",
        "against": "/b/y.so",
        "gpu": gpu,
    }


def test_a_panel_for_each_mode_and_operation():
    data = bench(row(8), row(1), row(8, "ht-flat"), row(2, ok=False))
    panels = against_plot.panels_of(data)
    assert [p.title for p in panels] == [
        "Dispatch LL expert-major",
        "Combine LL expert-major",
        "Dispatch HT flat",
        "Combine HT flat",
    ]
    assert panels[0].tokens == [1, 8]
    assert panels[0].times[1] == [(1e-6, 1.5e-6), (8e-6, 12e-6)]
    assert panels[0].ratios == [(1.5, 1.4, 1.7)] * 2


def test_one_kind_of_time_for_all():
    assert against_plot.figure_of(bench(row(1))) == "kernel_span"
    assert against_plot.figure_of(bench(row(1), row(2, names=("event",)))) == "event"
    with pytest.raises(BenchError, match="no time in common"):
        against_plot.figure_of(bench(row(1, names=("host",))))
    with pytest.raises(BenchError, match="nothing was timed"):
        against_plot.figure_of(bench(row(1, ok=False)))


def test_written_and_refused(tmp_path, monkeypatch, capsys):
    for name in ("a.svg", "a.png"):
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(bench(row(1), row(64)))))
        assert bench_plot.main(["bench_plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    for wrong in ("{}", "[]", '{"against_benchmarks": [{"ok": true}]}', "x"):
        monkeypatch.setattr("sys.stdin", io.StringIO(wrong))
        assert bench_plot.main(["bench_plot", str(tmp_path / "b.svg")]) == 1
        assert "no picture" in capsys.readouterr().err
    assert bench_plot.main(["bench_plot", "b.txt"]) == 2
