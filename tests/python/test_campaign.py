"""The measurement campaign: its plan, its resuming, its tables, and the fit that reads them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trefoil.campaign.__main__ import main
from trefoil.campaign.points import HT, HT_DEFAULT_SMS, LL, Point, point_of, scaled_down, stages
from trefoil.campaign.tables import fit_rows, rows_of, write_tables
from trefoil.fit.cases import TableError, read_table
from trefoil.fit.model import ClosedForm, Plans, Replay, Setting
from trefoil.fit.split import load_split
from trefoil.simulator import Costs

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ROOT / "validate/data/campaign"
FAKE = """#!/bin/sh
# {label}
points=; ranks=
while [ $# -gt 0 ]; do case $1 in --points) points=$2;; --ranks) ranks=$2;; esac; shift; done
{body}
"""


def all_points(*gpus: int) -> list[Point]:
    return [point for stage in stages(gpus) for point in stage.points]


def test_the_plan_covers_what_was_asked() -> None:
    points = all_points(1, 2, 4)
    assert len({p.key for p in points}) == len(points)
    at_4 = [p for p in points if p.gpus == 4]
    assert {1, 2, 128} <= {p.tokens for p in at_4 if p.mode == LL}
    assert {512, 4096, 8192} <= {p.tokens for p in at_4 if p.mode == HT}
    assert {p.hidden for p in at_4} == {2048, 2560, 4096, 6656, 7168}
    assert {p.topk for p in at_4} == {1, 2, 3, 4, 5, 8, 10, 16}
    assert {p.routing for p in at_4} == {"uniform", "zipf", "hot-rank", "hot-expert"}
    assert {p.background for p in at_4} == {"nothing", "copies", "copies-from-0", "gemm"}
    assert {p.variant for p in at_4} == {"plain", "e4m3", "partial", "fp8", "backward"}
    assert any(p.ragged for p in at_4) and any(p.start_skew_us for p in at_4)
    assert len({p.sms for p in at_4 if p.mode == HT}) >= 8
    assert {p.gpus for p in points} == {1, 2, 4}
    assert {p.gpus for p in all_points(8)} == {8}
    assert all(point_of(p.gpus, p.asked) == p for p in points)


def test_the_most_useful_stages_come_first() -> None:
    names = [stage.name for stage in stages([1, 2, 4])]
    assert names[0] == "goals on 4" and names[1] == "fitted rows on 2"
    assert names.index("skewed routing on 4") < names.index("sizes on 1")


def line_of(p: Point, us: float, **more: Any) -> dict[str, Any]:
    spread = {"p50_s": us / 1e6, "p99_s": us / 5e5, "min_s": us / 2e6, "max_s": us / 4e5}
    pair = {"called": spread, "replayed": spread}
    one = {"kernel": pair, "event": pair, "host": spread, "back_to_back_s": us / 1e6}
    one["busiest_port_bytes"] = 3_500_000
    times = {"dispatch": one}
    if p.variant not in ("fp8", "e4m3"):
        times["combine"] = one
    provenance = {
        "gpus": p.gpus,
        "gpu": "NVIDIA H200",
        "commit": "abc",
        "date": "d",
        "command": "c",
    }
    line = {"point": p.asked, "ok": True, "iterations": 200, "copy_bytes_per_second": 350e9}
    line |= {"ranks": p.gpus, "start_skew_s": p.start_skew_us / 1e6, "times": times, **p.asked}
    return {**line, "provenance": provenance, **more}


def test_a_row_tells_the_bound_and_the_copy() -> None:
    point = Point(4, HT, 4096, variant="fp8", sms=16)
    (row,) = rows_of([line_of(point, 20.0), line_of(point, 9.0, ok=False)])
    assert row["bound_us"] == pytest.approx(10.0) and row["ratio_to_copy"] == pytest.approx(0.5)
    assert row["ratio"] == pytest.approx(20 / 13.4, rel=1e-3)
    assert (row["p50_us"], row["p99_us"], row["min_us"], row["max_us"]) == (20, 40, 10, 50)
    assert (row["op"], row["sms"], row["gpu"], row["commit"]) == (
        "dispatch",
        16,
        "NVIDIA H200",
        "abc",
    )


def test_copies_before_a_kernel_count_in_high_throughput() -> None:
    def row_of(mode: str, between_us: float, *, empty_us: float | None = 4.0) -> dict[str, Any]:
        line = line_of(Point(2, mode, 64, sms=16), 20.0)
        for op in ("dispatch", "combine"):
            line["times"][op]["event_over_kernel"] = {"replayed": {"p50_s": between_us / 1e6}}
        if empty_us is not None:
            line["times"]["empty"] = {"event": {"replayed": {"p50_s": empty_us / 1e6}}}
        return next(iter(rows_of([line])))

    row = row_of(HT, 34.0)
    assert (row["p50_us"], row["p99_us"], row["min_us"], row["max_us"]) == (50, 70, 40, 80)
    assert row_of(HT, 3.0)["p50_us"] == row_of(HT, 34.0, empty_us=None)["p50_us"] == 20
    assert row_of(LL, 34.0)["p50_us"] == 20


def test_a_fit_reads_only_plain_rows_with_their_routing(tmp_path: Path) -> None:
    lines = [
        line_of(p, 30.0)
        for p in all_points(2, 4)
        if p.mode in (LL, HT)  # others have no table
    ]
    counts = write_tables(tmp_path, lines)
    plain = [line for line in lines if line["variant"] == "plain"]
    assert counts["ll.csv"] + counts["ht.csv"] == len(plain) < len(lines)
    assert not fit_rows(rows_of([line_of(Point(4, LL, 64, variant="e4m3"), 1.0)]), LL)
    cases = read_table(tmp_path / "ll.csv")
    assert {c.ranks for c in cases} == {2, 4}
    assert {c.sms for c in cases} >= {132, 64} and {c.late_us for c in cases} >= {0, 5, 20, 100}
    balanced = {(c.routing, c.ragged, c.empty_ranks, c.late_us) for c in cases if c.is_balanced}
    assert balanced == {("uniform", 0.0, 0, 0.0)} and not all(c.is_balanced for c in cases)
    assert {c.routing for c in cases} == {"uniform", "zipf", "hot-rank", "hot-expert"}
    assert {c.seed for c in cases} == {1, 6, 7, 9} and 1.0 in {c.ragged for c in cases}
    assert {c.sms for c in read_table(tmp_path / "ht.csv")} >= {8, 16, HT_DEFAULT_SMS}


def test_the_default_sms_are_the_librarys() -> None:
    (line,) = (
        x for x in (ROOT / "api/gpu/gpu.h").read_text().splitlines() if "EP_GPU_HT_SMS " in x
    )
    assert int(line.split()[2]) == HT_DEFAULT_SMS


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_the_split_parts_the_plan(tmp_path: Path, mode: str) -> None:
    write_tables(tmp_path, [line_of(p, 30.0) for p in all_points(1, 2, 4)])
    split = load_split(str(SPLITS / f"campaign-{mode}.split.json"))
    cases = read_table(tmp_path / f"{mode}.csv")
    inside, outside = split.choose("fit", cases), split.choose("score", cases)
    assert not set(inside) & set(outside) and len(inside) >= 14
    rest = [c for c in cases if c not in set(inside) | set(outside)]
    assert all(c.ranks == 1 or (mode == "ll" and c.topk > 8) for c in rest)
    assert all(c.ranks in (2, 4) and c.tokens % 2 == 0 and c.seed == 1 for c in inside)
    even = [c for c in inside if c.background == "nothing"]
    assert all(c.is_balanced for c in even) and len(inside) - len(even) in (8, 12)
    assert {c.ranks for c in even} == {2, 4}
    assert {c.background for c in inside} == {"nothing", "copies", "gemm"}
    assert {c.background for c in outside} == {"nothing", "copies", "copies-from-0", "gemm"}
    assert {c.hidden for c in inside} == {7168, 2048}
    assert {c.ranks for c in outside} == {2, 4} and any(c.tokens % 2 for c in outside)
    assert {c.hidden for c in outside} >= {2560, 4096, 6656, 7168}
    assert {c.late_us for c in outside} >= {0, 5, 15, 20, 35, 100}
    assert {c.routing for c in outside} == {"uniform", "zipf", "hot-rank", "hot-expert"}


def test_background_work_is_replayed(tmp_path: Path) -> None:
    kinds = ("nothing", "copies", "copies-from-0", "gemm")
    write_tables(tmp_path, [line_of(Point(4, HT, 256, background=kind), 30.0) for kind in kinds])
    cases = read_table(tmp_path / "ht.csv")
    ring, first = [(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 1)]
    assert [c.flows for c in cases if c.op == "combine"] == [[], ring, first, []]
    assert [c.circumstances["products"] for c in cases[::2]] == [False, False, False, True]
    assert [c.is_balanced for c in cases[::2]] == [True, False, False, False]
    plans = Plans(Setting("ht", "ours", "h200-x4", 4, "bf16"))
    values = {"num_sms": 32, "nvlink_gb_per_s": 350, "product_share": 0.2}
    values |= {"dispatch.flow_share": 0.6, "combine.send_row_ns": 12000}  # ports, SMs
    costs = Costs(values)
    times = Replay(plans, cases).predict(costs).reshape(4, 2)
    assert times[1, 0] == pytest.approx(times[0, 0] / 0.4, rel=0.02)
    assert times[3, 1] == pytest.approx(times[0, 1] / 0.8, rel=0.02)
    assert times[3, 0] == times[0, 0] and times[0, 0] < times[2, 0] < times[1, 0]
    near = ClosedForm(plans, cases).predict(costs).reshape(4, 2)
    assert near == pytest.approx(times, rel=0.05)


def test_a_strange_routing_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path, [line_of(Point(2, LL, 8), 30.0)])
    table = tmp_path / "ll.csv"
    table.write_text(table.read_text().replace("uniform", "cold"))
    with pytest.raises(TableError, match="line 2: routing is 'cold'"):
        read_table(table)
    table.write_text(table.read_text().replace("cold", "uniform").replace("nothing", "music"))
    with pytest.raises(TableError, match="line 2: background is 'music'"):
        read_table(table)


# ---- The runner --------------------------------------------------------------------------------


def fake(path: Path, body: str) -> str:
    path.write_text(FAKE.format(label=path.name, body=body))
    path.chmod(0o755)
    return str(path)


def run(out: Path, program: str, *more: str) -> int:
    arguments = ["--rehearse", "--out", str(out), "--trefoil", program, "--gpus", "2,4"]
    return main([*arguments, "--stages", "SM sweep on 4", *more])


ANSWER = """while read -r p; do
echo '{"ok":true,"ranks":4,"iterations":4,"mode":"ht-flat","variant":"plain","tokens":10,
"hidden":1536,"experts":32,"topk":8,"times":{"dispatch":{"wall":{"p50_s":1e-6,"p99_s":1e-6,
"min_s":1e-6,"max_s":1e-6}}},"point":'"$p"'}' | tr -d '\\n'
echo
STOP
done < "$points"
"""


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    total = len(next(s for s in scaled_down(stages([2, 4])) if "SM sweep on 4" in s.name).points)
    dies = ANSWER.replace("STOP", "n=$((n+1)); if [ $n = 3 ]; then kill -9 $$; fi")
    assert run(tmp_path, fake(tmp_path / "dies", dies)) == 1  # points 4 and 8 were lost
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == total and [ln["ok"] for ln in lines].count(False) == (total - 1) // 4
    assert "exit code -9" in next(ln["difference"] for ln in lines if not ln["ok"])
    works = fake(tmp_path / "works", ANSWER.replace("STOP", ""))
    assert run(tmp_path, works) == 1  # failed before, and not asked again
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == total
    assert run(tmp_path, works, "--again") == 0
    with (tmp_path / "figures.csv").open() as file:
        assert len(list(csv.DictReader(file))) == total


def test_a_library_that_always_fails_stops_it(tmp_path: Path) -> None:
    assert run(tmp_path, fake(tmp_path / "no", "echo no such library >&2; exit 1")) == 1
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 5 and {ln["difference"] for ln in lines} == {"no such library"}


def test_without_gpus_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there are GPUs here")
    assert main(["--out", str(tmp_path), "--gpus", "64"]) == 77
    assert "0 GPUs here" in capsys.readouterr().err


def test_a_rehearsal_on_the_cpu_library(tmp_path: Path) -> None:
    program = os.environ.get("TREFOIL_PROGRAM")
    if not program:
        pytest.skip("TREFOIL_PROGRAM does not name the command")
    arguments = ["--rehearse", "--out", str(tmp_path), "--trefoil", program, "--gpus", "2,4"]
    assert main(arguments) == 0
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) > 150 and all(line["ok"] for line in lines)
    assert len(read_table(tmp_path / "ll.csv")) > 50 and len(read_table(tmp_path / "ht.csv")) > 50
