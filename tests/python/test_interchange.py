"""Tables and schedules for other tools come back as they went out."""

import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trefoil.export import __main__ as export
from trefoil.export.interchange import cases_of_bench, predicted_cases, transfers, write_goal
from trefoil.fit.cases import TableError, read_table, write_table
from trefoil.fit.model import Setting
from trefoil.fit.split import split_files
from trefoil.reference import Step
from trefoil.simulator import Costs, Moe, Simulation, Workload

LABELS = {"framework": "f", "version": "1", "device": "d", "kernel_source": "k"}
PUBLIC = split_files()["deepep-ll-h100"].parent


@pytest.mark.parametrize("table", ["h100_deepep_ll_1to4nodes.csv", "h100_deepep_ht_1to4nodes.csv"])
def test_a_table_goes_round(tmp_path: Path, table: str) -> None:
    cases = read_table(PUBLIC / table)
    rows = write_table(tmp_path / "t.csv", cases, LABELS)
    assert rows * 2 == len(cases)
    assert read_table(tmp_path / "t.csv") == cases


def test_the_columns_are_those_of_the_public_tables(tmp_path: Path) -> None:
    for table in ("h100_deepep_ll_1to4nodes.csv", "h100_deepep_ht_1to4nodes.csv"):
        write_table(tmp_path / "t.csv", read_table(PUBLIC / table), LABELS)
        ours = (tmp_path / "t.csv").read_text().split("\n")[0].split(",")
        theirs = (PUBLIC / table).read_text().split("\n")[0].split(",")
        assert sorted(ours) == sorted(theirs)


def test_halves_and_mixtures_are_refused(tmp_path: Path) -> None:
    ll = read_table(PUBLIC / "h100_deepep_ll_1to4nodes.csv")
    ht = read_table(PUBLIC / "h100_deepep_ht_1to4nodes.csv")
    for cases, sentence in ((ll[:1], "needs both"), (ll[:2] + ht[:2], "LL or HT"), ([], "nothing")):
        with pytest.raises(TableError, match=sentence):
            write_table(tmp_path / "t.csv", cases, LABELS)


def test_predictions_become_a_table(tmp_path: Path) -> None:
    setting = Setting("ll", "per-expert", "dgx-h100")
    costs = Costs.record("deepep-ll-h100")
    cases = list(predicted_cases(setting, costs, Moe("deepseek-v3"), [8, 16], [1, 64]))
    assert len(cases) == 8 and all(case.us > 0 for case in cases)
    write_table(tmp_path / "t.csv", cases, LABELS)
    back = read_table(tmp_path / "t.csv")
    assert [replace(c, sms=0) for c in cases] == back


def test_our_own_figures_become_cases(tmp_path: Path) -> None:
    folder = split_files()["trefoil-ll-h200"].parent
    for name in ("ll_kernels_h200x4.json", "ll_api_h200x4.json"):
        cases = cases_of_bench(folder / name)
        assert {case.ranks for case in cases} == {4} and len(cases) % 2 == 0
        assert all(1 < case.us < 100 for case in cases if case.tokens <= 128)
    ht = cases_of_bench(folder / "ht_kernels_h200x4.json")
    assert {case.mode for case in ht} == {"ht"} and all(case.sms > 0 for case in ht)
    write_table(tmp_path / "t.csv", ht, LABELS)  # numbers of SMs differ between the operations
    assert sorted(read_table(tmp_path / "t.csv"), key=str) == sorted(
        (replace(case, ranks=8) for case in ht), key=str
    )
    shape = {"ranks": 4, "hidden": 64, "tokens": 9, "topk": 2, "experts": 8, "sms": 5}
    rows = [
        {**shape, "operation": name, "kernel_us": us}
        for name, us in (("dispatch flat", 7.5), ("dispatch flat", 6.5), ("dispatch flat", 8.5))
    ]
    rows += [{**rows[0], "operation": "dispatch flat fp8"}, {**rows[1], "check": "failed"}]
    (tmp_path / "b.json").write_text(json.dumps({"rows": rows}))
    assert [case.us for case in cases_of_bench(tmp_path / "b.json")] == [6.5]
    (tmp_path / "b.json").write_text('{"rows": [{"operation": "x"}]}')
    with pytest.raises(TableError, match="has no checked rows"):
        cases_of_bench(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(TableError, match="is no result"):
        cases_of_bench(tmp_path / "b.json")


# ---- GOAL ---------------------------------------------------------------------------------------

MESSAGE = re.compile(r"([sr]\d+): (send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)")


def parse_goal(text: str):
    """(sends, receives, requires): {(src, dst, tag): bytes} twice, and pairs of (rank, label)."""
    sends, receives, requires, rank = {}, {}, [], -1
    labels = defaultdict(set)
    lines = text.splitlines()
    assert re.fullmatch(r"num_ranks \d+", lines[0])
    for line in lines[1:]:
        if match := re.fullmatch(r"rank (\d+) \{", line):
            rank = int(match[1])
        elif match := MESSAGE.fullmatch(line):
            label, kind, size, peer, tag = match.groups()
            pair = (rank, int(peer)) if kind == "send" else (int(peer), rank)
            (sends if kind == "send" else receives)[(*pair, int(tag))] = int(size)
            labels[rank].add(label)
        elif match := re.fullmatch(r"(\w+) requires (\w+)", line):
            assert {match[1], match[2]} <= labels[rank], line
            requires.append((rank, match[1], match[2]))
        else:
            assert line in ("", "}"), line
    return sends, receives, requires


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_goal_schedule_carries_the_plan(mode: str, op: str) -> None:
    workload = Workload(ranks=16, tokens=96, mode=mode, experts=32, topk=4)
    plan, file = transfers(workload, op), io.StringIO()
    count = write_goal(file, 16, plan)
    sends, receives, requires = parse_goal(file.getvalue())
    assert sends == receives and len(sends) == count > 0
    bytes_sent = np.zeros((16, 16), dtype=np.uint64)
    for (src, dst, _), size in sends.items():
        bytes_sent[src, dst] += np.uint64(size)
    expected = Simulation(workload).traffic(op)
    np.fill_diagonal(expected, 0)
    assert (bytes_sent == expected).all()
    assert bool(requires) == (mode == "ht")
    for _, send, take in requires:  # a stage waits only for the stage before it
        assert send[0] == "s" and take[0] == "r" and int(take[1:]) < int(send[1:])


def test_a_forward_waits_for_its_own_row_over_the_network() -> None:
    """Rank 0's one token goes to rank 3 on the other node of 2: 0 -> 2 -> 3."""
    step = Step([[[3]], [[0]], [[0]], [[0]]], num_experts=4, ranks_per_node=2)
    assert step.num_ranks == 4
    workload = Workload(ranks=4, ranks_per_node=2, tokens=1, mode="ht", experts=4, topk=1)
    plan = [t for t in transfers(workload, "dispatch") if t.tier]
    file = io.StringIO()
    write_goal(file, 4, plan)
    _, _, requires = parse_goal(file.getvalue())
    for rank, send, take in requires:
        forward, net = plan[int(send[1:])], plan[int(take[1:])]
        assert forward.src == rank == net.dst and forward.origin == net.origin


def test_the_verb_writes_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "o")
    assert export.main(["goal", "--gpus", "4", "--tokens", "2", "-o", out]) == 0
    assert (tmp_path / "o").read_text().startswith("num_ranks 4\n")
    table = ["table", "--gpus", "8", "--tokens", "4", "--variant", "per-expert", "--json"]
    assert export.main([*table, "-o", out]) == 0
    assert '"rows": 1' in capsys.readouterr().out
    assert len(read_table(tmp_path / "o")) == 2
    for wrong in ("0", "8,", "8;16", "-1"):
        with pytest.raises(SystemExit):
            export.main(["table", f"--gpus={wrong}", "-o", out])
        said = capsys.readouterr().err
        assert "must be whole numbers from 1" in said and said.count("\n") == 1, said
    assert export.main(["goal", "--moe", "gpt-2", "-o", out]) == 1
    assert "no model is called gpt-2" in capsys.readouterr().err
    for refused, sentence in (
        (["table", "--costs", "deepep-ht-h100"], "they are not of ll"),
        (["table", "--gpus", "12"], "a table counts nodes, which have 8 GPUs"),
        (["table", "--gpus", "512"], "at most as many GPUs as experts, 256"),
        (["goal", "--gpus", "16", "--cluster", "h200-x8"], "cluster h200-x8 has not as many"),
    ):
        assert export.main([*refused, "-o", out]) == 1
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1, said
