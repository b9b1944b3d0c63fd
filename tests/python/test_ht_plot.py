"""The picture of the SM sweep: it shows what ht_bench's JSON says, and refuses other JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trefoil import ht_plot
from trefoil.ht_rows import RowsError

FOLDER = Path(__file__).resolve().parents[2] / "validate" / "data"


def data():
    rows = [
        {"operation": name, "sms": sms, "senders": senders, "tokens": 4096, "topk": 8,
         "experts": 256, "hidden": 7168, "ranks": 4, "kernel_us": 9600.0 / sms + senders,
         "kernel_p99_us": 9700.0 / sms + senders, "kernel_max_us": 9800.0 / sms + senders,
         "port_bytes": 1.6e8, "copy_share": 0.5}
        for name in ("dispatch flat", "dispatch flat window", "combine expert-major", "update flat")
        for sms in (24, 8, 16, 132)
        for senders in (4, 2)
    ]  # fmt: skip
    return {"device": "4 x GPU", "rows": rows}


def test_a_curve_takes_the_fastest_of_each_number() -> None:
    rows = ht_plot.curve(data()["rows"], "dispatch flat")
    assert [(r["sms"], r["senders"]) for r in rows] == [(8, 2), (16, 2), (24, 2)]
    only = [r for r in data()["rows"] if r["sms"] == 132]
    assert [r["sms"] for r in ht_plot.curve(only, "dispatch flat")] == [132]


def test_panels_lines_and_goals() -> None:
    figure = ht_plot.picture(data())
    shown = [a for a in figure.axes if a.get_title()]
    assert [a.get_title() for a in shown] == ["dispatch flat", "combine expert-major"]
    first = {t: h for h, t in zip(*shown[0].get_legend_handles_labels(), strict=True)}
    assert set(first) == {
        "output in a window", "kernel, p50 to p99", "its bytes by the plain copy", "goal",
    }  # fmt: skip
    x, y = first["kernel, p50 to p99"].lines[0].get_data()
    assert list(x) == [8, 16, 24] and list(y) == [1202.0, 602.0, 402.0]
    second = shown[1].get_legend_handles_labels()[1]
    assert "output in a window" not in second


def test_picture_is_written(tmp_path: Path) -> None:
    path, out = tmp_path / "bench.json", tmp_path / "sweep.svg"
    path.write_text(json.dumps(data()))
    assert ht_plot.main([str(path), str(out)]) == 0
    assert "dispatch flat" in out.read_text()
    assert ht_plot.main([str(FOLDER / "ht_kernels_h200x4.json"), str(out)]) == 0


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    assert ht_plot.main([str(path), str(tmp_path / "x.svg")]) == 1
    assert "nothing was timed" in capsys.readouterr().err
    assert ht_plot.main([str(path), "x.txt"]) == 2
    with pytest.raises(RowsError):
        ht_plot.picture({"rows": []})
