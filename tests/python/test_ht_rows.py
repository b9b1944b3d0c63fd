"""The goals of high throughput beside rows of ht_bench: what is asked, what counts as reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trefoil import ht_rows

FOLDER = Path(__file__).resolve().parents[2] / "validate" / "data"


def row(operation: str, sms: int, us: float, **more: Any) -> dict[str, Any]:
    return {
        "operation": operation, "check": "ok", "sms": sms, "senders": sms // 2, "ranks": 4,
        "tokens": 4096, "topk": 8, "experts": 256, "hidden": 7168, "skew": 0, "kernel_us": us,
        "kernel_p99_us": us + 5, "kernel_max_us": us + 9, "event_us": us + 4,
        "port_bytes": 160e6, "bound_us": 450.0, "copy_share": 450.0 / us, **more,
    }  # fmt: skip


def bench() -> dict[str, Any]:
    rows = [
        row("dispatch flat", 24, 475.0),
        row("dispatch flat", 16, 600.0),
        row("dispatch flat", 32, 450.0),
        row("dispatch flat window", 12, 470.0),
        row("combine flat", 20, 495.0),
        row("combine flat window", 10, 500.0),
        row("dispatch flat fp8", 16, 250.0),
        row("dispatch flat fp8", 24, 240.0),
        row("dispatch flat", 24, 960.0, tokens=8192),
        row("combine flat", 20, 980.0, tokens=8192),
        row("dispatch flat zipf 1.2", 24, 500.0, skew=1.2),
        row("combine flat hot-rank", 20, 600.0, skew=8),
        row("update flat", 132, 24.0, copy_share=0.0),
    ]
    rows += [
        {"operation": "dispatch flat background", "check": "ok", "sms": 24, "load": load,
         "slower": slower, "background_us": 480.0,
         "product_slower": product, "product_share": share}
        for load, slower, product, share in (
            ("own", 1.01, 1.015, 1.0),
            ("cublas all", 1.0, 1.3, 132 / 108),
        )
    ]  # fmt: skip
    return {"device": "4 x GPU", "copy_GBps": 353.0, "rows": rows}


def found(data: dict[str, Any], api: dict[str, Any] | None = None) -> dict[str, ht_rows.Answer]:
    return {a.goal: a for a in ht_rows.answers(data, api)}


def test_goals_are_those_of_the_number_of_gpus() -> None:
    data = bench()
    for row in data["rows"]:
        row["ranks"] = 2
    a = found(data)
    assert a["dispatch flat <= 190 us [24]"].reached is False
    assert a["dispatch flat zipf 1.2 >= 88 % of the bound of the exact port loads"].reached is True
    for row in data["rows"]:
        row["ranks"] = 3
    assert not any("us [" in goal for goal in found(data))


def test_each_goal_takes_the_fastest_row_with_few_enough_sms() -> None:
    a = found(bench())
    assert a["dispatch flat <= 480 us [24], >= 94 %"].reached is True
    assert a["dispatch flat <= 480 us [24], >= 94 %"].figure.startswith("475.0 us [24]")
    assert a["dispatch flat window <= 465 us [12], >= 97 %"].reached is False
    assert a["combine flat <= 490 us [20], >= 93 %"].reached is False
    assert a["combine flat window <= 505 us [10]"].reached is True
    assert a["combine flat window <= 490 us [20], >= 93 %"].reached is False
    assert a["combine flat <= 505 us [10]"] == ht_rows.Answer(
        "combine flat <= 505 us [10]", "not measured", None
    )
    assert a["update flat <= 25 us"].reached is True


def test_the_rate_counts_like_the_time() -> None:
    data = bench()
    data["rows"] = [row("dispatch flat", 24, 475.0, copy_share=0.93)]
    assert found(data)["dispatch flat <= 480 us [24], >= 94 %"].reached is False


def test_fp8_and_twice_the_tokens_are_ratios() -> None:
    a = found(bench())
    fp8 = a["dispatch flat fp8 <= 0.55 of bf16's [16]"]
    assert fp8.reached is True and fp8.figure.startswith("0.526:")
    assert a["dispatch flat fp8 window <= 0.55 of bf16's [16]"].reached is None
    assert a["dispatch flat: twice the tokens, at most twice the time"].reached is False
    assert a["combine flat: twice the tokens, at most twice the time"].reached is True
    assert a["update flat: twice the tokens, at most twice the time"].reached is None


def test_skewed_and_background() -> None:
    a = found(bench())
    bound = ">= 85 % of the bound of the exact port loads"
    assert a[f"dispatch flat zipf 1.2 {bound}"].reached is True
    assert a[f"combine flat hot-rank {bound}"].reached is False
    asked = "dispatch flat background products ({}): neither slower than by its share of SMs"
    assert a[asked.format("own")].reached is True
    assert a[asked.format("cublas all")].reached is False
    data = bench()
    data["rows"] = data["rows"][:3]
    assert found(data)[f"skewed routing {bound}"].reached is None


def test_calls_are_judged_by_event_and_host_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spread(us: float) -> dict[str, float]:
        return {"p50_s": 1e-6 * us}

    times = {
        "host": spread(5.5),
        "event_over_kernel": {"called": spread(9.0), "replayed": spread(11.0)},
    }
    run = {"mode": "ht-flat", "variant": "plain", "tokens": 4096, "times": {"dispatch": times}}
    low = {**run, "mode": "ll-expert-major"}
    a = found(bench(), {"gpu_benchmarks": [run, low, {"mode": "ht-flat"}]})
    name = "dispatch ht-flat plain, 4096 tokens: "
    assert a[name + "host time <= 6 us"].reached is True
    assert a[name + "event time <= 10 us above kernel time"].reached is False
    assert not any("ll-expert" in goal for goal in a)
    again = found(bench(), {"gpu_benchmarks": [{**run, "window": True}]})
    assert "dispatch ht-flat plain window, 4096 tokens: host time <= 6 us" in again
    path, calls = tmp_path / "bench.json", tmp_path / "calls.json"
    path.write_text(json.dumps(bench()))
    for text in (json.dumps(run), json.dumps(run) + "\n" + json.dumps(low)):  # a line a point
        calls.write_text(text)
        assert ht_rows.main([str(path), "--api", str(calls)]) == 0
        assert f"| {name}host time <= 6 us | 5.5 us (p50) | yes |" in capsys.readouterr().out


def test_rows_that_failed_their_check_count_for_nothing() -> None:
    data = bench()
    data["rows"][0]["check"] = "failed"
    assert found(data)["dispatch flat <= 480 us [24], >= 94 %"].figure.startswith("600.0 us [16]")


def test_command_prints_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = tmp_path / "bench.json", tmp_path / "kept.json"
    path.write_text(json.dumps(bench()))
    arguments = [str(path), "--keep", str(kept), "--measured", "here", "--command", "ht_bench"]
    assert ht_rows.main(arguments) == 0
    out = capsys.readouterr().out
    assert "| combine flat <= 490 us [20], >= 93 % | 495.0 us [20], 91 % of the copy | no |" in out
    data = json.loads(kept.read_text())
    assert (data["measured"], data["command"]) == ("here", "ht_bench")
    assert data["rows"] == bench()["rows"]


def test_runs_on_the_same_device_are_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps({**bench(), "rows": bench()["rows"][:4]}))
    paths[1].write_text(json.dumps({**bench(), "copy_GBps": 350.0, "rows": bench()["rows"][4:]}))
    kept = tmp_path / "kept.json"
    assert ht_rows.main([str(p) for p in paths] + ["--keep", str(kept)]) == 0
    data = json.loads(kept.read_text())
    assert data["rows"] == bench()["rows"] and data["copy_GBps_of_runs"] == [353.0, 350.0]
    paths[1].write_text(json.dumps({**bench(), "device": "8 x GPU"}))
    assert ht_rows.main([str(p) for p in paths]) == 1
    assert "different devices" in capsys.readouterr().err


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    for text in ("{}", "[]", "{", '{"rows": 1}', '{"rows": [{}]}'):
        path.write_text(text)
        assert ht_rows.main([str(path)]) == 1
    assert ht_rows.main([str(tmp_path / "none.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_kept_figures_can_be_read() -> None:
    data = ht_rows.read(FOLDER / "ht_kernels_h200x4.json", "rows")
    assert {a.reached for a in ht_rows.answers(data)} == {True, False, None}
