"""trefoil compare: measurements made of known times come out as what they are."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from trefoil.compare import __main__ as verb
from trefoil.compare.compare_rows import Model, compare, default_record, slow_kinds
from trefoil.compare.slow_parts import Pair, read_pairs, slow_pairs
from trefoil.export import __main__ as export
from trefoil.export.predicted import (
    HT_TOKENS,
    LL_TOKENS,
    SETS,
    find_prediction,
    make_predictions,
    prediction_files,
    read_predictions,
    write_predictions,
)
from trefoil.fit.cases import Case, TableError, write_table
from trefoil.fit.split import split_files
from trefoil.reference import TrefoilError

LABELS = {"framework": "trefoil", "version": "1", "device": "8 x H200", "kernel_source": "trefoil"}
FOLDER = split_files()["trefoil-ll-h200"].parent


def cases(tokens: tuple[int, ...] = (16, 64, 128), nodes: int = 1) -> list[Case]:
    return [
        Case(op, "ll", nodes, 8 * nodes, 7168, t, 8, 256, 0, 1.0)
        for t in tokens
        for op in ("dispatch", "combine")
    ]


def table_of(path: Path, factor: dict[str, float], nodes: int = 1) -> Path:
    """Times by the dated prediction, times a factor for each operation."""
    tables = [read_predictions(p) for p in prediction_files()]
    rows = []
    for case in cases(nodes=nodes):
        known = find_prediction(tables, case, "trefoil", "bf16")
        assert known is not None
        rows.append(replace(case, us=known[1].us * factor[case.op]))
    write_table(path, rows, LABELS, False)
    return path


def answer_of(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict]:
    code = verb.main([*map(str, args), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_was_predicted_is_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table_of(tmp_path / "t.csv", {"dispatch": 1.0, "combine": 1.0})
    code, answer = answer_of(capsys, path, "--gpus-per-node", 8)
    assert code == 0 and answer["ok"] and answer["slow"] == []
    assert answer["summary"]["inside"] == answer["summary"]["rows"] == 6
    for row in answer["rows"]:
        assert row["source"].startswith("predicted 20") and abs(row["error_percent"]) < 0.01


def test_slow_links_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything takes twice as long over two nodes: the network cards."""
    path = table_of(tmp_path / "t.csv", {"dispatch": 2.0, "combine": 2.0}, nodes=2)
    code, answer = answer_of(capsys, path, "--gpus-per-node", 8)
    assert code == 1 and answer["summary"]["outside"] == 6
    assert all(row["measured_us"] > row["interval_us"][1] for row in answer["rows"])
    assert {f["what"] for f in answer["slow"]} <= {"nic-out", "nic-in"}
    assert answer["slow"] and all(0.4 < f["share"] < 0.6 for f in answer["slow"])
    assert verb.main([str(path), "--gpus-per-node", "8"]) == 1
    text = capsys.readouterr().out
    assert "ABOVE" in text and "of the model's rate" in text


def test_one_bad_row_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table_of(tmp_path / "t.csv", {"dispatch": 1.0, "combine": 1.0})
    rows = list(csv.DictReader(path.open()))
    rows[1]["combine_avg_t_us"] = repr(3 * float(rows[1]["combine_avg_t_us"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    _, answer = answer_of(capsys, path, "--gpus-per-node", 8)
    outside = [(r["op"], r["tokens"]) for r in answer["rows"] if not r["inside"]]
    assert outside == [("combine", int(rows[1]["num_token"]))]
    rows[1]["combine_avg_t_us"] = "fast"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert verb.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert "line 3: combine_avg_t_us is 'fast'" in said and said.count("\n") == 1


def test_our_benchmarks_and_the_public_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = answer_of(capsys, FOLDER / "ll_api_h200x4.json")
    assert answer["record"] == "trefoil-ll-h200" and answer["summary"]["mape_percent"] < 3
    assert answer["summary"]["inside"] == len(answer["rows"]) == 10
    _, answer = answer_of(capsys, FOLDER / "ht_kernels_h200x4.json")  # expert-major rows too
    assert answer["record"] == "trefoil-ht-h200" and answer["summary"]["mape_percent"] < 4
    assert answer["summary"]["inside"] >= 28 and len(answer["rows"]) == 34
    code, answer = answer_of(capsys, FOLDER / "public/h100_deepep_ll_1to4nodes.csv")
    assert answer["record"] == "deepep-ll-h100" and answer["summary"]["mape_percent"] < 6
    assert code == 0 and {r["ranks"] for r in answer["rows"]} == {8, 16, 32}


def test_rows_whose_check_failed_are_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((FOLDER / "ll_api_h200x4.json").read_text())
    plain = [r for r in data["gpu_benchmarks"] if r["variant"] == "plain"]
    plain[0]["ok"] = False
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**data, "gpu_benchmarks": plain}))
    code, answer = answer_of(capsys, path)
    assert code == 1 and answer["left_out"] == 1 and not answer["ok"]


def test_records_are_chosen_by_kernels_and_device() -> None:
    assert default_record("ht", "trefoil") == "trefoil-ht-h200"
    assert default_record("ll", "deepep", "NVIDIA H200", 1) == "deepep-ll-h200-1node"
    assert default_record("ll", "deepep", "NVIDIA H100", 2) == "deepep-ll-h100"
    assert default_record("ht", "deepep", "NVIDIA H200", 1) == "deepep-ht-h100"


def test_a_cluster_that_was_named_must_fit() -> None:
    case = cases((16,), nodes=2)[0]
    assert Model("trefoil-ll-h200").cluster_of(case).name == "hgx-h200"
    with pytest.raises(TrefoilError, match="h200-x8 has no 2 nodes"):
        Model("trefoil-ll-h200", cluster="h200-x8").cluster_of(case)


def test_a_slow_kind_needs_most_of_its_rows() -> None:
    model = Model("trefoil-ll-h200")
    rows = compare([replace(c, ranks=4) for c in cases((128,))], model, [])
    slow = [replace(r, case=replace(r.case, us=2 * r.us), limit_share=0.5) for r in rows]
    assert {f.what for f in slow_kinds(slow)} == {r.limit for r in slow}
    fine = [replace(r, case=replace(r.case, us=r.us), limit_share=1.0) for r in rows]
    assert slow_kinds(fine) == []


# ---- Links and ranks ----------------------------------------------------------------------------

RATES = {"nvlink": 350.0, "net": 50.0}


def pairs(ranks: int, per_node: int) -> dict[tuple[int, int], float]:
    return {
        (a, b): 345.0 if a // per_node == b // per_node else 49.0
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    }


def findings(rates: dict[tuple[int, int], float], per_node: int) -> list[tuple[str, float]]:
    found = slow_pairs([Pair(a, b, r) for (a, b), r in rates.items()], per_node, RATES)
    return [(f.what, round(f.share, 2)) for f in found]


def test_a_port_a_link_and_nothing() -> None:
    rates = pairs(16, 8)
    assert findings(rates, 8) == []
    assert findings({**rates, (2, 11): 20.0}, 8) == [("link 2 -> 11 (net)", 0.4)]
    port = {key: 25.0 if key[0] == 3 and key[1] >= 8 else rate for key, rate in rates.items()}
    assert findings(port, 8) == [("nic-out of rank 3", 0.5)]
    near = {key: 175.0 if key[1] == 9 and key[0] >= 8 else rate for key, rate in rates.items()}
    assert findings(near, 8) == [("nvlink-in of rank 9", 0.5)]


def test_rates_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.csv"
    rows = {**pairs(4, 4), (1, 2): 100.0}
    path.write_text("src,dst,gb_per_s\n" + "".join(f"{a},{b},{r}\n" for (a, b), r in rows.items()))
    code, answer = answer_of(capsys, path, "--gpus", 4)
    assert code == 1 and [f["what"] for f in answer["slow"]] == ["link 1 -> 2 (nvlink)"]
    path.write_text("src,dst,gb_per_s\n1,1,5\n")
    with pytest.raises(TableError, match="line 2: a pair is two ranks"):
        read_pairs(path)


def test_a_late_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "rank,op,mode,us,node_num,hidden_size,num_token,num_topk,num_experts\n"
    lines = [
        f"{r},{op},ll,{60.0 if r == 5 else 30.0},1,7168,128,8,256\n"
        for r in range(8)
        for op in ("dispatch", "combine")
    ]
    path = tmp_path / "r.csv"
    path.write_text(head + "".join(lines))
    code, answer = answer_of(capsys, path)
    assert code == 1 and [f["what"] for f in answer["slow"]] == ["rank 5"]
    assert answer["slow"][0]["share"] == pytest.approx(0.5, abs=0.05)
    path.write_text(head + lines[0].replace("0,dispatch", "9,dispatch"))
    assert verb.main([str(path)]) == 2
    assert "rank 9 of 8" in capsys.readouterr().err


# ---- Tables of predictions ----------------------------------------------------------------------


def test_every_size_that_nobody_ran_is_predicted() -> None:
    tables = [read_predictions(path) for path in prediction_files()]
    for table in tables:
        assert {"date", "commit", "costs", "command"} <= set(table.about)
        assert table.path.name.startswith(table.about["date"])
        for row in table.rows:
            assert row.record == table.about["costs"] == row.command.split("--costs ")[1].split()[0]
            assert row.us >= row.bound_us * (1 - 1e-6) and row.rows_behind > 0
    for gpus, nodes in ((8, 1), (16, 2), (64, 8), (1024, 128)):
        for mode, tokens in (("ll", LL_TOKENS), ("ht", HT_TOKENS)):
            for op in ("dispatch", "combine"):
                before = 0.0
                for n in tokens:
                    case = Case(op, mode, nodes, gpus, 7168, n, 8, 256, 0, 1.0)
                    known = find_prediction(tables, case, "trefoil", "bf16")
                    assert known is not None, case
                    assert known[1].us > before  # more tokens take longer
                    before = known[1].us


def test_a_size_of_other_kernels_is_not_taken() -> None:
    tables = [read_predictions(path) for path in prediction_files()]
    case = cases((16,))[0]
    assert find_prediction(tables, case, "trefoil", "bf16") is not None
    assert find_prediction(tables, case, "deepep", "bf16") is None
    assert find_prediction(tables, case, "trefoil", "fp8") is None
    assert find_prediction(tables, replace(case, tokens=17), "trefoil", "bf16") is None
    assert find_prediction(tables, replace(case, nodes=2), "trefoil", "bf16") is None


@pytest.mark.skipif("TREFOIL_PROGRAM" not in os.environ, reason="no command")
def test_predictions_go_round_and_are_not_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(SETS[0], gpus=(8,))
    rows = list(make_predictions(small))
    assert len(rows) == 2 * len(LL_TOKENS)
    write_predictions(tmp_path / "p.csv", rows, {"date": "2026-01-01"})
    assert read_predictions(tmp_path / "p.csv").rows == rows
    monkeypatch.setattr(export, "SETS", (small,))
    out = str(tmp_path / "made")
    assert export.main(["predictions", "-o", out, "--commit", "abc"]) == 0
    (made,) = Path(out).glob("*.csv")
    assert read_predictions(made).rows == rows
    assert read_predictions(made).about["commit"] == "abc"
    assert export.main(["predictions", "-o", out]) == 1
    assert export.main(["predictions", "-o", out, "--revision", "b"]) == 0
    second = Path(out) / made.name.replace(f"-{small.name}", f"b-{small.name}")
    assert max(made.name, second.name) == second.name  # compare asks the newest
    assert read_predictions(second).about["date"] in second.name
    assert "is there already" in capsys.readouterr().err
    again = ["predictions", "-o", out, "--revision", "c", "--costs"]
    assert export.main([*again, "trefoil-ht-h200"]) == 1
    assert "none of these sets is" in capsys.readouterr().err
    assert export.main([*again, "deepep-ll-h200-1node"]) == 0
    third = read_predictions(Path(out) / made.name.replace(f"-{small.name}", f"c-{small.name}"))
    assert {row.record for row in third.rows} == {"deepep-ll-h200-1node"}
    assert "--costs deepep-ll-h200-1node" in third.about["command"]
    assert [row.us for row in third.rows] != [row.us for row in rows]


def test_bad_tables_of_predictions(tmp_path: Path) -> None:
    good = prediction_files()[0].read_text().splitlines()
    path = tmp_path / "p.csv"
    cells = good[5].split(",")
    cells[16] = repr(2 * float(cells[15]))  # low_us above us
    for text, sentence in (
        ("a,b\n", "has not the columns"),
        ("\n".join([*good[:5], ",".join(cells)]), "lies outside its own interval"),
        ("\n".join([*good[:5], good[5] + ",x"]), "fields, not"),
        ("\n".join([*good[:5], good[5].replace(cells[15], "soon", 1)]), "must be a number"),
    ):
        path.write_text(text)
        with pytest.raises(TableError, match=sentence):
            read_predictions(path)
