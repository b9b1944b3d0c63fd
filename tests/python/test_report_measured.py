"""The report's measured part: figures of every kind of file, goals, what is missing, a campaign."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import sample_campaign
from trefoil import places
from trefoil.campaign.points import HT, LL, Point, stages
from trefoil.fit import __main__ as fit
from trefoil.report import __main__ as report
from trefoil.report import goals
from trefoil.report import sections as report_measured
from trefoil.report.figures import Figure, committed_folder, load_figures, merged, of_one_kind
from trefoil.report.results import ResultError
from trefoil.report.validated import TimedPoint, ValidatedTimes

FOLDER = committed_folder()
KERNELS = "ll_kernels_h200x4.json"


def own(svg: str) -> str:
    return svg


def sample(tmp_path: Path, *points: Point) -> list[Figure]:
    sample_campaign.write(tmp_path / "campaign", points)
    return load_figures(tmp_path / "campaign")


def page(tmp_path: Path, *arguments: object) -> str:
    output = tmp_path / "r.html"
    assert report.main([*map(str, arguments), "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


# ---- Figures ------------------------------------------------------------------------------------


def test_committed_files_hold_what_they_say() -> None:
    rows = json.loads((FOLDER / KERNELS).read_text())["rows"]
    found = load_figures(FOLDER / KERNELS)
    assert len(found) == len(rows)
    first = next(f for f in found if f.name == "combine expert-major" and f.tokens == 64)
    asked = next(
        r for r in rows if (r["operation"], r["tokens"]) == ("combine expert-major exact", 64)
    )
    assert (first.us, first.high_us) == (asked["lockstep_us"], asked["p99_us"])
    assert first.us / (first.bound_us + 3.4) == pytest.approx(asked["ratio"], rel=2e-3)
    ht = load_figures(FOLDER / "ht_kernels_h200x4.json")
    assert {f.mode for f in ht} == {"ht"} and all(f.low_us <= f.us <= f.high_us for f in ht)
    api = load_figures(FOLDER / "ll_api_h200x4.json")
    assert {f.how for f in api} == {"through the API"}


def test_rows_of_the_benchmark_of_high_throughput(tmp_path: Path) -> None:
    """Skew, windows, senders, work beside: as ht_bench writes them."""
    shape = {"ranks": 4, "tokens": 4096, "topk": 8, "experts": 256, "hidden": 7168, "sms": 24}
    times = {"kernel_p99_us": 540, "kernel_min_us": 490, "kernel_max_us": 600, "event_us": 510}
    row = {"check": "ok", **shape, **times, "skew": 0, "port_bytes": 1e8, "kernel_us": 500}
    rows = [
        {**row, "operation": "dispatch flat", "senders": 8},
        {**row, "operation": "dispatch flat", "senders": 10, "kernel_us": 495},
        {**row, "operation": "dispatch flat", "senders": 12, "kernel_us": 497},
        {**row, "operation": "dispatch flat window", "senders": 10},
        {**row, "operation": "combine flat zipf 1.2", "skew": 1.2, "kernel_us": 700},
        {**row, "operation": "combine flat hot-rank", "skew": 8, "check": "failed"},
        {
            **shape,
            "operation": "dispatch flat background",
            "load": "cublas",
            "background_us": 520,
            "alone_us": 500,
            "product_alone_us": 90,
            "product_background_us": 100,
        },
    ]
    path = tmp_path / "ht.json"
    path.write_text(json.dumps({"device": "4 x Sample", "copy_GBps": 350, "rows": rows}))
    found = load_figures(path)
    assert [(f.name, f.us) for f in found] == [
        ("dispatch flat", 495),
        ("dispatch flat window", 500),
        ("combine flat", 700),
        ("dispatch flat", 520),
    ]
    assert (found[0].spread, found[0].high_us) == ("min to p99", 540)
    assert (found[2].routing, found[2].skew, found[2].is_plain) == ("zipf", 1.2, False)
    assert (found[3].background, found[3].background_share) == ("cublas", pytest.approx(0.9))
    told = report_measured.circumstances(found, own)
    assert len(told["svgs"]) == 1 and "background cublas on 24 SMs, kept 90 %" in told["svgs"][0]


def test_later_figures_replace_earlier_ones(tmp_path: Path) -> None:
    all_of = merged([load_figures(FOLDER)])
    assert len({f.key for f in all_of}) == len(all_of)
    plain = [f for f in all_of if (f.name, f.tokens, f.ranks) == ("dispatch expert-major", 8, 4)]
    assert {f.source for f in plain} == {"2026-11-27-h200x4/figures.csv"}  # not the API's
    new = sample(tmp_path, Point(4, LL, 8))
    both = merged([all_of, new])
    found = [f for f in both if f.key == new[0].key]
    assert found == [new[0]] and len(both) == len(all_of)


def test_of_a_folders_campaigns_the_newest_counts(tmp_path: Path) -> None:
    """Rows that only the older one has are of older kernels; on other GPUs they stay."""
    sample_campaign.write(
        tmp_path / "2026-01-01-a", [Point(2, LL, 8), Point(2, LL, 16), Point(4, LL, 8)]
    )
    sample_campaign.write(tmp_path / "2026-01-01-b", [Point(2, LL, 8)])
    found = {(f.ranks, f.tokens, f.source.split("/")[0][-1]) for f in load_figures(tmp_path)}
    assert found == {(2, 8, "b"), (4, 8, "a")}
    committed = {f.source for f in load_figures(FOLDER) if f.how == "campaign"}
    assert committed == {"2026-11-27-h200x4/figures.csv", "2026-11-29-h200x2/figures.csv"}


def test_kinds_are_not_mixed_in_a_curve(tmp_path: Path) -> None:
    kernels = [f for f in load_figures(FOLDER / KERNELS) if f.name == "dispatch rank-major"]
    two = [replace(f, how="campaign") for f in kernels[:2]]
    assert of_one_kind([*kernels, *two], "tokens") == kernels
    all_five = [replace(f, how="campaign") for f in kernels]
    assert of_one_kind([*kernels, *all_five], "tokens") == all_five
    assert of_one_kind([], "tokens") == []


def test_a_rehearsal_has_no_figures(tmp_path: Path) -> None:
    sample(tmp_path, Point(4, LL, 8))
    path = tmp_path / "campaign/figures.csv"
    path.write_text(path.read_text().replace("Sample GPU", "none"))
    assert load_figures(path.parent) == []
    with pytest.raises(ResultError, match="measured on GPUs"):
        load_figures(path)


@pytest.mark.parametrize(
    "text", ["[1]", '{"rows": []}', "{", '{"copy_GBps": 1, "rows": [{"operation": 5}]}']
)
def test_files_without_figures_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=r"x\.json"):
        load_figures(path)


# ---- Goals --------------------------------------------------------------------------------------


def test_goals_are_judged_by_time_and_sms(tmp_path: Path) -> None:
    found = load_figures(FOLDER / "ht_kernels_h200x4.json")
    flat = [a for a in goals.answers(found) if (a.mode, a.name) == ("ht", "combine flat")]
    assert [(a.max_sms, a.reached) for a in flat] == [(20, True), (10, False)]
    fast = [replace(f, us=f.us / 2) for f in found]
    flat = [a for a in goals.answers(fast) if (a.mode, a.name) == ("ht", "combine flat")]
    assert [(a.max_sms, a.reached) for a in flat] == [(20, True), (10, True)]
    other = [replace(f, ranks=2) for f in fast]
    assert all(a.reached is None for a in goals.answers(other))
    skewed = [replace(f, routing="zipf", skew=1.2) for f in fast]
    assert all(a.reached is None for a in goals.answers(skewed))


def test_the_committed_figures_against_the_goals() -> None:
    found = report_measured.speed(merged([load_figures(FOLDER)]), own)
    assert len(found["curves"]) >= 6 and not found["missing"]
    titles = [re.search(r'aria-label="HT (.*), 4 GPUs', svg) for svg in found["sweeps"]]
    variants = [t.group(1) for t in titles if t]
    assert len(variants) == len(set(variants)) == len(found["sweeps"])
    for layout in ("flat", "expert-major"):
        plain = {f"dispatch {layout}", f"combine {layout}"}
        assert plain | {f"dispatch {layout} window"} <= set(variants)
    row = next(r for r in found["ll"] if r["name"] == "combine expert-major")
    assert [c["mark"][0] for c in row["cells"]] == ["✓", "✓", "✓", "✗", "✗"]


def test_a_time_just_above_its_goal_is_told_apart() -> None:
    found = report_measured.speed(load_figures(FOLDER / "ll_kernels_h200x4.json"), own)
    row = next(r for r in found["ll"] if r["name"] == "combine expert-major")
    assert (row["cells"][3]["measured"], row["cells"][3]["mark"][0]) == ("21.57", "✗")  # goal 21.5


# ---- What was not measured ----------------------------------------------------------------------


def test_what_is_missing_is_said_with_its_command(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    shutil.copy(FOLDER / "ll_kernels_h200x4.json", kernels)
    data = json.loads((FOLDER / "ht_kernels_h200x4.json").read_text())
    data["rows"] = [row for row in data["rows"] if not row.get("skew")]
    (kernels / "ht.json").write_text(json.dumps(data))
    text = page(tmp_path, "--measured", kernels)
    for what, command in (
        ("skewed routing", "tools/measure --stages &#39;skewed routing&#39;"),
        ("a late rank", "tools/measure --stages &#39;start skew&#39;"),
        ("other hidden sizes and top-k", "tools/measure --stages &#39;hidden sizes&#39;"),
    ):
        assert what in text and command in text
    assert text.count("Not measured yet") == 2  # those, and no models beside measurements
    empty = tmp_path / "empty"
    empty.mkdir()
    text = page(tmp_path, "--measured", empty)
    assert text.count("Not measured yet") == 4 and "the speed of the kernels" in text
    part = text[text.index('id="speed"') : text.index('id="circumstances"')]
    assert "None of 41 goals" in part and 'class="good"' not in part and "<b>" not in part


def test_stages_of_commands_exist() -> None:
    names = [stage.name for stage in stages([1, 2, 4])]
    for _, stage, _ in report_measured.KINDS:
        assert any(stage in name for name in names)
    assert any("hidden sizes" in name for name in names) and any("SM sweep" in n for n in names)


# ---- A campaign ---------------------------------------------------------------------------------


def test_circumstances_are_relative_to_the_undisturbed_run(tmp_path: Path) -> None:
    found = sample(
        tmp_path,
        Point(4, HT, 4096),
        Point(4, HT, 4096, routing="hot-rank", skew=8.0),
        Point(4, HT, 4096, start_skew_us=100.0),
        Point(4, HT, 4096, background="copies"),
        Point(4, LL, 64, routing="zipf", skew=1.2),  # nothing to compare with
    )
    told = report_measured.circumstances(found, own)
    assert len(told["svgs"]) == 3
    (skew,) = [svg for svg in told["svgs"] if "Skewed routing" in svg]
    assert "hot-rank 8" in skew and "zipf" not in skew
    ratio = sample_campaign.seconds(Point(4, HT, 4096, routing="hot-rank"), "dispatch")
    ratio /= sample_campaign.seconds(Point(4, HT, 4096), "dispatch")
    assert f"{ratio:.2f}" in skew
    (picture,) = [svg for svg in told["svgs"] if "Background work" in svg]
    assert "kept 88 %" in picture
    assert [what for what, _ in told["missing"]] == ["other hidden sizes and top-k"]


def test_a_campaign_flows_into_fit_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    folder = tmp_path / "campaign"
    chosen = (p for s in stages([2, 4])[:5] for p in s.points if p.mode == LL and p.topk == 8)
    sample_campaign.write(folder, chosen)
    split = FOLDER / "campaign/campaign-ll.split.json"
    capsys.readouterr()
    assert (
        fit.main([str(split), "--table", str(folder / "ll.csv"), "--engine", "queues", "--json"])
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    with (folder / "ll.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = answer["forms"]["queues"]["points"]
    assert len(points) == 2 * len(rows)
    errors = [
        abs(p["predicted_us"] / p["measured_us"] - 1) for p in points if p["part"] == "held out"
    ]
    stated = answer["forms"]["queues"]["outside"]["both"]["mape_percent"]
    assert 100 * sum(errors) / len(errors) == pytest.approx(stated, abs=0.01)
    (tmp_path / "fit.json").write_text(json.dumps(answer))
    text = page(tmp_path, "--measured", folder, "--fit", tmp_path / "fit.json")
    assert "campaign-ll" in text and f"<b>{stated:.1f} %</b>" in text
    assert "campaign/figures.csv" in text and "Sample GPU" in text
    assert "Skewed routing, LL" in text
    assert "src=" not in text and "<script" not in text


def test_a_fit_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"forms": {}}')
    assert report.main(["--fit", str(path), "-o", str(tmp_path / "r.html")]) == 1
    assert "is not the output of trefoil fit --json" in capsys.readouterr().err


# ---- Models and scaling -------------------------------------------------------------------------


def times_with(points: list[TimedPoint]) -> ValidatedTimes:
    return ValidatedTimes(
        "sample", "held out", 1, 5.0, 5.0, 5.0, 5.0, "", 5.0, None, 1, True, False, points
    )


def test_pictures_of_models_hold_every_part() -> None:
    point = TimedPoint(
        "dispatch", "held out", 1, 4, 7168, 8, 8, 0, 5.0, 4.8, 3.0, 1.0, "nvlink-out"
    )
    points = [point, replace(point, op="combine", part="fitted", tokens=64)]
    told = report_measured.scatters([times_with(points)], [], own)
    assert len(told["svgs"]) == 1 and not told["missing"]
    assert (
        "dispatch, not fitted (1)" in told["svgs"][0] and "combine, fitted (1)" in told["svgs"][0]
    )
    (parts,) = report_measured.where_time_goes([times_with(points)], own)
    assert "8 tok.: 5.0 µs" in parts and "latency, filling" in parts
    assert report_measured.where_time_goes([times_with([])], own) == []


def test_scaling_shows_the_newest_table_of_each_set() -> None:
    tables = report_measured.newest_tables()
    dates = {t.path.name: t.about["date"] for t in tables}
    assert len(tables) == 6 and "2026-11-28-trefoil-ll.csv" in dates
    figures_of_8 = [replace(f, ranks=8) for f in load_figures(FOLDER / KERNELS)]
    told = report_measured.scaling(tables, figures_of_8, own)
    assert "measured" in told["svgs"][0] + told["svgs"][1]
    assert {r["gpus"] for r in told["rows"]} == {"8", "16", "32", "64", "1,024"}
    row = next(r for r in told["rows"] if r["gpus"] == "1,024" and r["set"] == "LL ours")
    low, high = (float(v.replace(",", "")) for v in row["interval"].split(" – "))
    assert low <= float(row["us"].replace(",", "")) <= high and row["beyond"] == "yes"


def test_installed_data_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "share/trefoil/data").mkdir(parents=True)
    monkeypatch.setattr(places, "ROOT", tmp_path / "share/trefoil")
    assert committed_folder() == tmp_path / "share/trefoil/data"
