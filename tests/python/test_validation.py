"""trefoil validate: what agrees is said to agree, what is planted is found, parts add up."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from trefoil import places, summary
from trefoil.export.interchange import OTHER_OPERATIONS, other_cases_of_bench
from trefoil.fit.split import split_files
from trefoil.report import __main__ as report
from trefoil.report.results import ResultError
from trefoil.report.validated import load_validation
from trefoil.validation import __main__ as validation
from trefoil.validation import validated_times

needs_program = pytest.mark.skipif(
    "TREFOIL_PROGRAM" not in os.environ, reason="TREFOIL_PROGRAM is not set: no command"
)


@needs_program
def test_all_parts_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the splits all but the largest; test_fit scores every record, that one's too."""
    files = {name: path for name, path in split_files().items() if name != "deepep-ht-h100"}
    monkeypatch.setattr(validated_times, "split_files", lambda: files)
    assert validation.main(["--cases", "256", "--seed", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["results"]["cases"] == answer["bytes"]["cases"] == 256
    assert answer["results"]["bytes_compared"] > 0
    tables = answer["bytes"]["tables"]
    assert {"routing", "reference", "plan", "queues"} <= set(tables)
    assert tables["routing"] == tables["plan"] == tables["queues"] > 256
    names = {s["name"] for s in answer["times"]["sets"]}
    nothing_held_out = {"trefoil-ht-domains-h100x2"}
    assert set(files) - names == nothing_held_out
    assert all(s["agrees"] and s["rows"] > 0 for s in answer["times"]["sets"])
    text = "\n".join(validation.describe(answer))
    assert "all that was asked agrees" in text and "trefoil-ll-h200, others" in text


@needs_program
def test_one_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert validation.main(["--only", "bytes", "--cases", "64"]) == 0
    text = capsys.readouterr().out
    assert "bytes     agree" in text and "results" not in text and "stated" not in text


def faulty(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A run whose part `part` found a difference, as the program would print it."""
    verb = "check" if part == "results" else "validate"

    def run(arguments: list[str], may_fail: bool = False) -> dict[str, object]:
        assert may_fail
        said = {"ok": True, "cases": 64, "bytes_compared": 1, "seed": 1, "numbers_compared": 1}
        said |= {"tables": {"plan": 64}}
        if arguments[0] == verb:
            said |= {"ok": False, "failure": f"case 17: ... replay: trefoil {verb} --case 17"}
        return said

    monkeypatch.setattr(validation, "run_json", run)


@pytest.mark.parametrize("part", ["results", "bytes"])
def test_a_difference_is_told_with_its_replay(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(monkeypatch, part)
    assert validation.main(["--only", "results", "bytes"]) == 1
    text = capsys.readouterr().out
    assert f"{part:<10}DIFFER" in text and "--case 17" in text and "DISAGREES" in text


def test_what_was_not_run_is_not_green(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(monkeypatch, "bytes")  # the results are fine, of 64 cases
    assert validation.main(["--only", "results", "--cases", "64"]) == 0
    assert validation.main(["--only", "results", "--cases", "500"]) == 1
    text = capsys.readouterr().out
    assert "results   DIFFER" in text and "64 of 500 cases were done" in text


def test_a_record_that_no_longer_scores_what_it_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = validated_times.times_of_split("trefoil-ll-h200")
    assert good.agrees and good.rows == 220
    assert good.fitted_mape is not None and good.fitted_mape < good.mape
    stale = replace(good, mape=good.mape + 2 * validated_times.STATED_WITHIN)
    assert not stale.agrees
    monkeypatch.setattr(validated_times, "all_times", lambda: iter([stale]))
    assert validation.main(["--only", "times"]) == 1
    assert "NOT AS STATED" in capsys.readouterr().out


def test_changed_measurements_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same split on a table in which one held-out time is ten times as long."""
    known = split_files()["trefoil-ll-h200"]
    text = json.loads(known.read_text())
    lines = (known.parent / text["table"]).read_text().splitlines()
    old, new = ",12.416,7.008,", ",12.416,70.08,"
    assert sum(old in s for s in lines) == 1
    (tmp_path / "t.csv").write_text("\n".join(s.replace(old, new) for s in lines) + "\n")
    (tmp_path / known.name).write_text(json.dumps({**text, "table": "t.csv"}))
    real = validated_times.load_split
    monkeypatch.setattr(
        validated_times, "load_split", lambda name: real(str(tmp_path / f"{name}.split.json"))
    )
    found = validated_times.times_of_split("trefoil-ll-h200")
    assert not found.agrees and "27 tokens" in found.worst_row and "70.1 us" in found.worst_row


def test_other_operations_are_compared_at_the_same_costs() -> None:
    """Rank-major, partial sums and e4m3: five numbers of tokens each, one row fewer bytes."""
    folder = split_files()["trefoil-ll-h200"].parent
    cases = other_cases_of_bench(folder / validated_times.OTHERS)
    assert set(cases) == set(OTHER_OPERATIONS) and {len(own) for own in cases.values()} == {5}
    found = validated_times.times_of_others(folder / validated_times.OTHERS)
    assert found.rows == 20 and found.stated_mape is None and found.agrees
    assert found.mape <= found.p90 <= found.worst and found.inside <= found.rows


def test_the_closed_form_that_was_fitted_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    times = validated_times.times_of_split("trefoil-ht-h200")
    assert times.fitted_closed_form_mape == pytest.approx(4.3, abs=0.2)
    assert times.fitted_closed_form_mape != times.closed_form_mape
    monkeypatch.setattr(places, "ROOT", Path("/nonexistent"))
    assert validated_times._fitted_closed_form("trefoil-ht-h200") is None


def test_goals_are_judged_by_both_figures() -> None:
    good = validated_times.times_of_split("trefoil-ht-h200")
    assert replace(good, mape=3.9, p90=7.9).meets_goal
    assert not replace(good, mape=4.1, p90=7.9).meets_goal
    assert not replace(good, mape=3.9, p90=8.1).meets_goal


def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert validation.main(["--cases", "0"]) == 2
    assert "--cases 0" in capsys.readouterr().err
    monkeypatch.setenv("TREFOIL_PROGRAM", "/nonexistent/trefoil")
    assert validation.main(["--only", "bytes"]) == 1
    assert "/nonexistent/trefoil cannot be run" in capsys.readouterr().err


# ---- On the page --------------------------------------------------------------------------------


def sample(ok: bool = True) -> dict:
    """What --json prints; if not ok, with one difference in bytes, and times that miss a goal."""
    own = validated_times.times_of_split("trefoil-ht-h200")
    times = [validated_times.json_of(own if ok else replace(own, p90=8.1))]
    traffic = {"ok": ok, "cases": 321, "numbers_compared": 98765, "tables": {"plan": 640}}
    if not ok:
        traffic["failure"] = "case 17: ht-flat: combine, rank 1 to rank 0 <net>: 64 bytes"
    return {
        "format": "trefoil-validate",
        "version": 1,
        "ok": ok,
        "results": {"ok": True, "cases": 4321, "bytes_compared": 1234567, "seed": 1},
        "bytes": traffic,
        "times": {"ok": True, "sets": times, "goal": {"mape_percent": 4.0, "p90_percent": 8.0}},
    }


@pytest.mark.parametrize("ok", [True, False])
def test_the_page_shows_what_agrees_and_what_does_not(
    ok: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "v.json", tmp_path / "r.html"
    path.write_text(json.dumps(sample(ok)))
    assert report.main(["--validation", str(path), "-o", str(output)]) == 0
    page = output.read_text()
    assert "4,321" in page and "1,234,567 bytes" in page and "98,765 numbers" in page
    assert "<td>trefoil-ht-h200</td><td>256</td><td><b>3.2 %</b></td><td>3.2 %</td>" in page
    assert ("✓ met" in page) is ok and ("✗ not met" in page) is not ok
    assert "at most 4 % on average" in page
    assert ("✗ differ" in page) is not ok
    assert ("All legs agree; times are off by what the records state, 1 of 1" in page) is ok
    assert ("The legs disagree in bytes." in page) is not ok
    assert ("rank 1 to rank 0 &lt;net&gt;" in page) is not ok
    capsys.readouterr()
    assert summary.main(["--validation", str(path)]) == (0 if ok else 1)
    text = capsys.readouterr().out
    assert "results: agree, 4,321 cases" in text and "3.2 % off (stated 3.2 %)" in text
    assert ("bytes: DIFFER" in text) is not ok


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    for change, sentence in (
        ({"format": "trefoil-plan"}, "is not the output of trefoil validate"),
        ({"bytes": {"ok": True}}, "bytes: field 'tables'"),
        ({"times": {"sets": [{}], "goal": {}}}, r"times.sets\[0\]: field"),
    ):
        path.write_text(json.dumps({**sample(), **change}))
        with pytest.raises(ResultError, match=sentence):
            load_validation(path)
