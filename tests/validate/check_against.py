"""`trefoil bench --against`: two libraries in one run, without GPUs.

    python3 check_against.py TREFOIL CPU_LIBRARY FAULTY_LIBRARY REORDERING_LIBRARY HOST

What fails its check has no figure, whichever library it is, and the other shapes go on; what leaves
order open passes with --level order-free alone; one that ends the process ends its shape.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TREFOIL, CPU, FAULTY, REORDERING, HOST = sys.argv[1:6]
SHAPE = ["--hidden", "256", "--experts", "8", "--topk", "2", "--ranks", "2"]
ALONE = {"TREFOIL_FAULT_LIBRARY": CPU, "TREFOIL_FAULT_ALWAYS": "1"}


def run(*arguments, **environment):
    with tempfile.NamedTemporaryFile() as log:
        return subprocess.run(
            [TREFOIL, "bench", *SHAPE, *arguments],
            env={**os.environ, **ALONE, "TREFOIL_FAULT_LOG": log.name, **environment},
            capture_output=True,
            text=True,
        )


def bench(*arguments, **environment):
    done = run("--json", *arguments, **environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def figures(row):
    return [op for op in ("dispatch", "combine") if op in row]


def same_library_both_times():
    with tempfile.TemporaryDirectory() as folder:
        plot = Path(folder) / "both.svg"
        rc, out = bench("--against", CPU, "--tokens", "3,16", "--plot", str(plot))
        assert rc == 0 and out["ok"] and plot.stat().st_size > 5000, out
    rows = out["against_benchmarks"]
    assert [(r["mode"], r["tokens"]) for r in rows] == [
        (m, t)
        for m in ("ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major")
        for t in (3, 16)
    ]
    for row in rows:
        for op in ("dispatch", "combine"):
            first, second = (of["wall"] for of in row[op]["libraries"])
            ratio = row[op]["against_over_library"]["wall"]
            assert 0 < first["min_s"] <= first["p50_s"] <= first["p99_s"] <= first["max_s"]
            assert second["p50_s"] > 0 and 0 < ratio["min"] <= ratio["p50"] <= ratio["max"]
        assert row["iterations"] == 160 and row["order_used"] == [False, False]


def a_failed_check_is_no_figure():
    rc, out = bench("--against", FAULTY, "--mode", "ll", "--tokens", "8", TREFOIL_FAULT="flip")
    assert rc == 1 and not out["ok"]
    for row in out["against_benchmarks"]:
        assert not row["ok"] and row["failed_library"] == 1 and not figures(row), row
        assert "expected the row of" in row["difference"]
    assert len(out["against_benchmarks"]) == 2, "the second shape goes on"
    rc, out = bench(
        "--library", FAULTY, "--nccl", HOST, "--cuda", HOST, "--against", CPU,
        "--mode", "ht-flat", "--tokens", "8", TREFOIL_FAULT="flip",
    )  # fmt: skip
    row = out["against_benchmarks"][0]
    assert rc == 1 and row["failed_library"] == 0 and not figures(row), row


def order_is_open_when_asked():
    shape = ("--against", REORDERING, "--mode", "ll", "--tokens", "8")
    rc, out = bench(*shape)
    assert rc == 1 and not any(figures(r) for r in out["against_benchmarks"])
    rc, out = bench(*shape, "--level", "order-free")
    assert rc == 0 and out["against_level"] == "order-free", out
    assert all(r["order_used"] == [False, True] for r in out["against_benchmarks"]), out
    rc, out = bench(*shape, "--level", "order-free", TREFOIL_REORDER="sums")
    assert rc == 1 and not figures(out["against_benchmarks"][0]), "a sum outside its bound"


def an_abort_ends_its_shape():
    rc, out = bench(
        "--against", REORDERING, "--mode", "ll", "--tokens", "4,8", "--level", "order-free",
        TREFOIL_REORDER="abort",
    )  # fmt: skip
    rows = out["against_benchmarks"]
    assert rc == 1 and len(rows) == 4, rows
    assert all("signal 6" in r["difference"] and not figures(r) for r in rows), rows


def options_that_do_not_go_together():
    for arguments, word in (
        (["--level", "order-free"], "--level is of the check of --against"),
        (["--against", CPU, "--variant", "e4m3"], "--variant does not go with --against"),
        (["--against", CPU, "--tokens", "x"], "--tokens x: expected numbers"),
        (["--against", CPU, "--level", "x"], "--level x: expected strict or order-free"),
        (["--against", "/nonexistent.so", "--mode", "ll"], "cannot load /nonexistent.so"),
    ):
        done = run(*arguments)
        assert done.returncode and word in done.stderr, (arguments, done.stderr)


same_library_both_times()
a_failed_check_is_no_figure()
order_is_open_when_asked()
an_abort_ends_its_shape()
options_that_do_not_go_together()
