"""The summary on the terminal says what the files say, and fails when they do."""

import json
from pathlib import Path

import pytest

import sample_results
from trefoil import summary


def test_runs_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample_results.write_all(tmp_path)
    checks = [str(tmp_path / f"check_{mode}.json") for mode in ("ll", "ht")]
    plan = str(tmp_path / "plan_ht.json")
    assert summary.main(["--check", *checks, "--plan", plan]) == 0
    text = capsys.readouterr().out
    assert text.count("agrees with the reference") == 4
    # Rank 7 sends rank 6 ((21 + 6) mod 7 + 1) = 7 rows for each 16 of 4096 tokens: 25.69 MB.
    assert f"{7 * 256 * 14336 / 1e6:.2f}" in text
    assert "1,024  256" in text
    assert "nic-in" in text


def test_a_difference_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sample_results.check(128, sample_results.MODES[:1])
    data["runs"][0] |= {"ok": False, "difference": "rank 3, slot 17"}
    for name in ("update_s", "dispatch_s", "combine_s", "reference_s"):
        del data["runs"][0][name]  # what is wrong has no times
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    assert summary.main(["--check", str(path)]) == 1
    assert "DIFFERS" in (text := capsys.readouterr().out)
    assert "rank 3, slot 17" in text
    path.write_text(json.dumps({"cases": 10, "failed": 1, "seconds": 1, "seed": 5}))
    assert summary.main(["--check", str(path)]) == 1
    assert "1 DIFFER" in capsys.readouterr().out
