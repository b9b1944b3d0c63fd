"""trefoil.sim: points, frames and figures, with the program as built ($TREFOIL_PROGRAM)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import trefoil
from texts import overlapping
from trefoil import sim
from trefoil.sweep_plot import label_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")
POINTS = [
    {"gpus": g, "mode": m, "tokens": 64, "costs": "ideal"}
    for g in (8, 16, 64)
    for m in ("ll", "ht")
]

# Stands for pandas where it is not installed: what the page's script does with a frame.
PANDAS = """
class DataFrame(list):
    def __getitem__(self, names):
        return DataFrame({n: row[n] for n in names} for row in self)
"""


@pytest.fixture(scope="module")
def outcomes() -> list[sim.Outcome]:
    return sim.sweep([*POINTS, {"gpus": 0, "mode": "ll"}], together=True)


def run(script: str, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = [str(ROOT / "python"), *([str(path)] if path else [])]
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    if not path:
        told["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=told, cwd=folder, check=False
    )


def lines_of(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """What is drawn, by the legend's names; hollow marks lie over others."""
    return {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.lines
        if line.get_linestyle() != "None"
    }


def test_the_pages_script(tmp_path: Path) -> None:
    page = (ROOT / "docs/sim.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(script.splitlines()) <= 25
    fake = None
    if importlib.util.find_spec("pandas") is None:
        fake = tmp_path / "fake"
        fake.mkdir()
        (fake / "pandas.py").write_text(PANDAS)
    for _ in range(2):  # the second from its results
        done = run(script, tmp_path, fake)
        assert (done.returncode, done.stderr) == (0, "")
        assert "dispatch.limit" in done.stdout and "nvlink-in" in done.stdout
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sweep.jsonl").read_text().count("\n") == 10


def test_sim_is_there_and_loads_no_more() -> None:
    done = run("import trefoil, sys; trefoil.sim; print('matplotlib' in sys.modules)", ROOT)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert trefoil.sim is sim
    assert (sim.sweep, sim.Outcome, sim.SweepError) == (
        trefoil.sweep,
        trefoil.Outcome,
        trefoil.SweepError,
    )


def test_simulate_is_a_point(outcomes: list[sim.Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = sim.simulate(**POINTS[0])
    assert answer["format"] == "trefoil-simulate"
    assert outcomes[0].answer == {**answer, "wall_seconds": outcomes[0].answer["wall_seconds"]}
    same = sim.simulate(gpus=np.int64(8), mode="ll", tokens=np.int32(64), costs=Path("ideal"))
    assert same["seconds"] == answer["seconds"]
    with pytest.raises(ValueError, match="--gpus 0: expected a whole number, 1 or more"):
        sim.simulate(gpus=0)
    with pytest.raises(ValueError, match="--no-such: unknown option"):
        sim.simulate(no_such=1)
    monkeypatch.setenv("TREFOIL_PROGRAM", "/nowhere/trefoil")
    with pytest.raises(sim.SweepError, match="cannot be run"):
        sim.simulate(gpus=8)


def test_rows(outcomes: list[sim.Outcome]) -> None:
    rows = sim.rows(outcomes)
    names = list(rows[0])
    assert names[:4] == list(POINTS[0]) and names[-1] == "refusal"
    assert all(list(r) == names for r in rows)
    for row, o in zip(rows[:-1], outcomes, strict=False):
        assert o.answer is not None and row["refusal"] == ""
        assert row["seconds"] == o.answer["seconds"] > 0
        assert row["dispatch.seconds"] == o.answer["dispatch"]["seconds"]
        assert row["combine.bytes.net"] == o.answer["combine"]["bytes"]["net"]
        assert row["dispatch.links.nvlink-in.links"] == 8 * (o.point["gpus"] // 8)
    assert rows[-1]["gpus"] == 0 and rows[-1]["seconds"] is None
    assert rows[-1]["refusal"] == outcomes[-1].refusal != ""
    (row,) = sim.rows(sim.sweep([{"gpus": 16, "rail-fail": 0}]))
    assert row["rail_fail"] == 0 and row["tokens"] == 128, "the answer's, where a point has none"
    assert sim.rows([]) == []


def test_frame(outcomes: list[sim.Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("pandas") is None:
        monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
        assert sim.frame(outcomes) == sim.rows(outcomes) and sim.frame([]) == []
        return
    frame = sim.frame(outcomes)
    assert list(frame.columns) == list(sim.rows(outcomes)[0]) and len(frame) == len(outcomes)
    assert frame["seconds"].dtype == float and frame["seconds"].isna().sum() == 1
    assert (frame.query("refusal == ''")["seconds"] > 0).all()
    assert len(sim.frame([])) == 0


def test_frame_without_pandas(outcomes: list[sim.Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas \(pip install pandas\); rows\(\) has"):
        sim.frame(outcomes)


def test_figure_draws_the_outcomes(outcomes: list[sim.Outcome]) -> None:
    figure = sim.figure(outcomes, x="gpus", by="mode")
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    for mode in ("ll", "ht"):
        of = [
            (o.point["gpus"], o.answer["seconds"])
            for o in outcomes[:-1]
            if o.answer["mode"] == mode
        ]
        assert lines_of(axes)[mode.upper()] == of
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("GPUs", "time of dispatch and combine")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_title(loc="left") == "deepseek-v3, dgx-h100, 64 tokens a GPU, ideal"
    assert not list(overlapping(figure))
    rising = sim.figure(outcomes[-2::-2], x="gpus", y="combine.nic_port_bytes").axes[0]
    (drawn,) = lines_of(rising).values()
    assert drawn == sorted(drawn) and len(drawn) == 3
    assert rising.get_ylabel() == "combine NIC port bytes"
    assert rising.get_ylim()[0] == 0, "linear from 0: EP 8 has no bytes there"


def test_figure_over_close_values() -> None:
    points = [{"gpus": 16, "tokens": 64, "zipf": z / 2} for z in range(4)]
    (axes,) = sim.figure(sim.sweep([*points, points[0]]), x="zipf", y="dispatch.seconds").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert [x for x, _ in next(iter(lines_of(axes).values()))] == [0, 0.5, 1, 1.5]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow[0].get_xdata()) == 4, "two nodes are outside the fitted ranges"
    assert hollow[1].get_label() == "outside the fitted ranges"


def test_figure_by_several_columns() -> None:
    points = [{**p, "costs": c} for p in POINTS for c in ("ideal", f"trefoil-{p['mode']}-h200")]
    outcomes = sim.sweep(points, together=True)
    figure = sim.figure(outcomes, x="gpus", by=["mode", "costs", "tokens"])
    assert [n for n in lines_of(figure.axes[0]) if n.startswith("LL")] == [
        "LL, ideal, tokens a GPU: 64",
        "LL, trefoil-ll-h200, tokens a GPU: 64",
    ]
    assert not list(overlapping(figure))


def test_bad_figures(outcomes: list[sim.Outcome]) -> None:
    for how, words in (
        ({"x": "gpu"}, "x: no column 'gpu'; near are gpus"),
        ({"x": "gpus", "y": "second"}, "y: no column 'second'; near are seconds"),
        ({"x": "gpus", "by": "modus"}, "by modus: no column 'modus'; near are mode"),
        ({"x": "mode"}, "x: column 'mode' has 'll'; numbers expected"),
        ({"x": "gpus", "y": "dispatch.interval.covers"}, "no column"),
        ({"x": "gpus"}, "gpus 8: two values of seconds; by= tells apart: mode"),
        ({"x": "tokens", "by": "mode"}, "tokens 64, LL: two values of seconds; .*: gpus"),
    ):
        with pytest.raises(ValueError, match=words):
            sim.figure(outcomes, **how)
    with pytest.raises(ValueError, match="no point has an answer: --gpus 0: expected"):
        sim.figure(outcomes[-1:], x="gpus")
    with pytest.raises(ValueError, match="no point has an answer: there is no outcome"):
        sim.figure([], x="gpus")


def test_labels_have_units() -> None:
    assert label_of("skew_us") == "skew (µs)"
    assert label_of("gpu_hbm_gb_per_s") == "GPU HBM (GB/s)"
    assert label_of("dispatch.interval.low_seconds") == "dispatch interval low time"
