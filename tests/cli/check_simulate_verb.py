"""`trefoil simulate` as a user meets it: answers that fit their schema and add up, what-ifs that
cost time, timelines that load, and sentences for what makes no sense.

python3 check_simulate_verb.py TREFOIL SCHEMA_FOLDER
"""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

failures = 0


def check(ok: bool, what: str) -> None:
    global failures
    if not ok:
        failures += 1
        print(f"failed: {what}")


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.argv[1], *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def simulate(*args: object) -> dict[str, Any]:
    done = run("simulate", "--json", *args)
    check(done.returncode == 0, f"simulate {args}: {done.stderr}")
    return json.loads(done.stdout)


def seconds(*args: object) -> float:
    return simulate("--costs", "ideal", *args)["seconds"]


def check_answers(schema: dict[str, Any]) -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema)
    small = ("--tokens", 16, "--costs", "ideal")
    cases = [
        (),
        ("--mode", "ht", "--gpus", 32),
        ("--mode", "ll-rank-major", "--gpus", 16, "--combine", "partial", "--zipf", 1.2),
        ("--mode", "ht-expert-major", "--gpus", 16, "--rail-fail", "0,3", "--skew-us", 2),
        ("--engine", "closed-form", "--gpus", 1024),
        ("--engine", "queues", "--gpus", 32, "--ep", 16, "--dispatch-dtype", "fp8"),
        ("--gpus", 320, "--physical-experts", 320, "--variant", "per-expert"),
        ("--gpus", 16, "--variant", "rails"),
        ("--cluster", "h100-single-rail", "--gpus", 16, "--slow-nic", "1:0.25"),
        ("--gpus", 8, "--background", "0-1:100,2-3"),
        ("--gpus", 16, "--masked-selections", 5, "--grouped"),
    ]
    for case in cases:
        answer = simulate(*small, *case)
        for error in validator.iter_errors(answer):
            check(False, f"{case}: {error.json_path}: {error.message}")
        total = answer["dispatch"]["seconds"] + answer["combine"]["seconds"]
        check(abs(answer["seconds"] - total) < 1e-12, f"{case}: the sum")
        check(answer["replicas"] * answer["ep"] == answer["gpus"], f"{case}: replicas")
        for op in ("dispatch", "combine"):
            o = answer[op]
            check(o["seconds"] >= o["bound_seconds"] * (1 - 1e-9), f"{case}: {op} beats its bound")
            ends = [o[f"{rank}seconds"] for rank in ("first_rank_", "mean_rank_", "")]
            check(ends == sorted(ends), f"{case}: {op}: first, mean and last rank {ends}")
    uneven = (*small, "--gpus", 12)
    check(simulate(*uneven)["ranks_per_node"] == 6, "two nodes of 6")
    text = run("simulate", *uneven).stdout
    check("EP 12 on nodes of 8: 2 NVLink domains of 6" in text, text)
    # The same routing gives the same bytes, whoever adds them up; exact combine: a row an entry.
    queues, closed = (
        simulate(*small, "--gpus", 32, "--engine", e) for e in ("queues", "closed-form")
    )
    for op in ("dispatch", "combine"):
        check(queues[op]["bytes"] == closed[op]["bytes"], f"{op}: bytes of both engines")
    exact = sum(queues["combine"]["bytes"].values())
    check(exact == 32 * 16 * 8 * 14336, f"exact combine sends every entry: {exact}")
    if run("simulate", "--engine", "simgrid", "--costs", "ideal").returncode == 0:
        both = simulate(*small, "--gpus", 16, "--compare")
        for error in validator.iter_errors(both):
            check(False, f"--compare: {error.json_path}: {error.message}")
        for op in ("dispatch", "combine"):
            other = both[op]["other_engine"]
            check(other["engine"] != both[op]["engine"], f"--compare: {op}: the same engine")
            apart = abs(other["seconds"] / both[op]["seconds"] - 1)
            check(apart < 0.15, f"--compare: {op}: the engines are {100 * apart:.0f} % apart")
    first, second = (simulate(*small, "--gpus", 32, "--seed", 3) for _ in range(2))
    for answer in (first, second):
        del answer["wall_seconds"]
    check(first == second, "the same seed, another answer")


def check_masked_selections(folder: Path) -> None:
    """Rows of each rank that a public table of DeepEP gives, top-8, by tokens and -1 selections."""
    rows = ((2, 8, 8), (4, 8, 24), (8, 10, 54), (12, 10, 86), (16, 10, 118), (2, 16, 0))
    steps = []
    for tokens, masked, count in rows:
        base = ("--gpus", 16, "--variant", "per-expert", "--tokens", tokens)
        base += ("--costs", "ideal", "--masked-selections", masked, "--json")
        steps.append([str(word) for word in base])
        answer = simulate(*base)
        check(answer["routing"]["masked_selections"] == masked, f"{tokens} tokens: the number")
        for op in ("dispatch", "combine"):
            sent = sum(answer[op]["bytes"].values())
            check(sent == 16 * count * 14336, f"{tokens} tokens: {op} has {sent} bytes")
    file = folder / "steps.jsonl"
    file.write_text("".join(json.dumps(words) + "\n" for words in steps))
    lines = run("simulate", "--each", file).stdout.splitlines()
    for line, (tokens, _, count) in zip(lines, rows, strict=True):
        sent = json.loads(json.loads(line)["out"])["dispatch"]["bytes"].values()
        check(sum(sent) == 16 * count * 14336, f"--each: {tokens} tokens")
    text = run("simulate", "--tokens", 4, "--masked-selections", 8).stdout
    check("8 selections of each rank are -1" in text, text)
    refuse(["--tokens", 2, "--masked-selections", 17], "a rank has 16, top-8 of 2 tokens")
    refuse(["--masked-selections", -1], "0 or more")
    refuse(["--trace", folder / "t.npz", "--masked-selections", 1], "a trace has its own")


def check_limits() -> None:
    """Few SMs bind before any port, a token alone is latency, and text and JSON name the same."""
    for args, limits in (
        (("--mode", "ht", "--tokens", 4096, "--sms", 4), ["send", "receive"]),
        (("--mode", "ll", "--gpus", 16, "--tokens", 1), ["latency", "latency"]),
        (("--mode", "ht", "--gpus", 32, "--tokens", 1024), ["nic-in", "nic-out"]),
    ):
        found = simulate("--engine", "queues", *args)
        named = [found[op]["limit"] for op in ("dispatch", "combine")]
        check(named == limits, f"{args}: {named}")
        rows = run("simulate", "--engine", "queues", *args).stdout.splitlines()
        rows = [row for row in rows if row.startswith(("dispatch ", "combine "))][:2]
        told = [limit in row.split() for row, limit in zip(rows, limits, strict=True)]
        check(told == [True, True], "\n".join(rows))


def check_what_ifs() -> None:
    base = ("--gpus", 32, "--tokens", 64, "--engine", "queues")
    whole = seconds(*base)
    for option, value in (
        ("--rail-fail", "0"),
        ("--slow-rail", "2"),
        ("--nic-fail", "5"),
        ("--slow-nic", "5:0.1"),
        ("--slow-nvlink", "3:0.02"),
        ("--late", "7:500"),
        ("--skew-us", 300),
        ("--zipf", 1.5),
    ):
        check(seconds(*base, option, value) > 1.02 * whole, f"{option} {value} costs nothing")
    wide = ("--cluster", "dgx-h100-2to1", "--gpus", 256, "--tokens", 16)
    blocked = seconds(*wide, "--oversubscribe", 8)
    check(blocked > 1.5 * seconds(*wide), "8:1 is not slower than 2:1")
    # A rank that starts 500 us late ends the operation at least that late.
    late = simulate("--costs", "ideal", *base, "--late", "7:500")
    check(late["dispatch"]["seconds"] > 500e-6, "dispatch ends before its last rank starts")


def check_costs() -> None:
    """Measured costs on clusters with other ports, and what an interval may hold."""
    for cluster in ("h800", "gb200-nvl72", "dgx-h100"):
        for mode in ("ll", "ht"):
            answer = simulate("--cluster", cluster, "--gpus", 8, "--mode", mode, "--tokens", 512)
            for op in ("dispatch", "combine"):
                o = answer[op]
                fast = o["seconds"] < 0.99 * o["closed_form_seconds"]
                check(not fast, f"{cluster}, {mode}: {op} is faster than the cluster's ports")
                other = "NVLink of other rates" in o["interval"]["outside"]
                check(other == (cluster != "dgx-h100"), f"{cluster}: {o['interval']}")
    wide = simulate("--gpus", 64, "--tokens", 128)
    for op in ("dispatch", "combine"):
        least = wide[op]["nic_port_bytes"] / 50e9
        check(wide[op]["interval"]["low_seconds"] >= least * (1 - 1e-9), f"{op}: beyond the line")
    base = ("--gpus", 16, "--mode", "ht", "--tokens", 256)
    slow, fast = simulate(*base, "--straggler", "5:0.1"), simulate(*base)
    check(slow["seconds"] > 2 * fast["seconds"], "a straggler costs nothing")
    check(fast["dispatch"]["interval"]["outside"].endswith("(fitted: 7392)"), "bf16 rows")
    few = simulate(*base, "--dispatch-dtype", "fp8")
    check(few["dispatch"]["interval"]["kind"] == "interpolated", "fp8 rows were measured")
    many = simulate(*base, "--dispatch-dtype", "fp8", "--sms", 64)
    check("64 SMs" in many["combine"]["interval"]["outside"], "64 SMs were not measured")
    ll = ("--gpus", 8, "--tokens", 8, "--costs", "deepep-ll-h100-1node", "--cluster")
    check(simulate(*ll, "dgx-h100")["sms"] == 128, "the record's SMs")
    check(simulate(*ll, "hgx-h20")["sms"] == 78, "all that the GPU has, fewer than the record's")


def check_trace(folder: Path) -> None:
    trace = folder / "t.npz"
    done = run("trace", "generate", "--tokens", 32, "--steps", 2, "--ranks", 16, "--seed", 1, trace)
    check(done.returncode == 0, done.stderr)
    traced = simulate("--costs", "ideal", "--trace", trace)
    drawn = simulate("--costs", "ideal", "--tokens", 32, "--gpus", 16)
    for op in ("dispatch", "combine"):
        check(traced[op] == drawn[op], f"{op}: step 0 is the same routing")
    other = simulate("--costs", "ideal", "--trace", trace, "--step", 1)
    check(other["dispatch"]["bytes"] != traced["dispatch"]["bytes"], "step 1 is another routing")
    refuse(["--trace", trace, "--step", 2], "the steps 0 to 1")
    refuse(["--trace", trace, "--ep", 8], "the trace has 16 ranks")
    refuse(["--trace", trace, "--gpus", 24], "a multiple of that")
    refuse(["--trace", trace, "--moe", "gpt-oss-20b"], "top-8")
    refuse(["--trace", trace, "--moe", "qwen3-235b-a22b"], "256 experts")
    refuse(["--trace", trace, "--cluster", "h200-x8"], "at most 8 GPUs")
    refuse(["--trace", trace, "--zipf", 1], "give one")
    done = run("simulate", "--costs", "ideal", "--trace", folder / "none.npz")
    check(done.returncode == 1 and "none.npz" in done.stderr, done.stderr)


def check_timeline(folder: Path, *args: object) -> None:
    timeline, links = folder / "t.json", folder / "l.csv"
    answer = simulate(
        "--costs", "ideal", "--tokens", 64, *args, "--timeline", timeline, "--links", links
    )
    events = json.loads(timeline.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ends = answer["dispatch"]["seconds"] * 1e6, answer["seconds"] * 1e6
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            check((e["pid"], e["tid"]) in named, f"a slice on a track without a name: {e}")
            low, high = (0, ends[0]) if e["pid"] == 1 else ends
            inside = low - 1e-3 <= e["ts"] <= e["ts"] + e["dur"] <= high + 1e-3
            check(inside, f"a slice outside its operation: {e}")
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for track, slices in tracks.items():
        slices.sort()
        for (_, end), (start, _) in pairwise(slices):
            check(start >= end - 1e-3, f"slices of track {track} overlap at {start}")
    ranks = answer["ep"]
    whole = [e for e in events if e["ph"] == "X" and e["name"] in ("dispatch", "combine")]
    check(len(whole) == 2 * ranks, f"{len(whole)} whole operations of {ranks} ranks")
    check(abs(max(e["ts"] + e["dur"] for e in whole) - ends[1]) < 1e-3, "the last rank's end")
    check_counters(events, links)
    with links.open(newline="") as file:
        for row in csv.DictReader(file):
            share = float(row["busy_seconds"]) / answer[row["op"]]["seconds"]
            check(abs(float(row["share"]) - share) < 1e-4, f"{row}: the share is {share}")
            check(share <= 1 + 1e-9, f"{row}: busier than the operation is long")


def check_counters(events: list[dict[str, Any]], links: Path) -> None:
    """Each port's rate over time is at most 400 GB/s, and its integral is what the port carried."""
    counters: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            counters[e["pid"], e["name"]].append((e["ts"], e["args"]["GB/s"]))
    with links.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["kind"][:3] in ("nvl", "nic")]
    check(len(rows) == len(counters) > 0, f"{len(counters)} counters of {len(rows)} links")
    for row in rows:
        points = counters[2 if row["op"] == "dispatch" else 4, f"{row['kind']} {row['index']}"]
        carried = sum(rate * (after - at) * 1e3 for (at, rate), (after, _) in pairwise(points))
        wanted = int(row["bytes"])
        check(abs(carried - wanted) <= 2e-3 * wanted, f"{row}: the counter holds {carried:.0f}")
        check(max(rate for _, rate in points) <= 400, f"{row}: faster than the port")


def refuse(args: list[object], words: str) -> None:
    done = run("simulate", "--costs", "ideal", *args)
    check(done.returncode == 2, f"{args}: exit code {done.returncode}")
    check(not done.stdout, f"{args}: prints on stdout")
    check(words in done.stderr, f"{args}: '{words}' is not in '{done.stderr.strip()}'")
    check(done.stderr.count("\n") == 1, f"{args}: not one sentence: {done.stderr}")


def check_refusals() -> None:
    for args, words in (
        (["--cluster", "laptop"], "known are dgx-a100"),
        (["--moe", "no-such-model"], "known are"),
        (["--mode", "fast"], "expected ll, ht"),
        (["--engine", "warp"], "simgrid, fair, queues or closed-form"),
        (["--tokens", "0"], "--tokens 0"),
        (["--tokens", "many"], "numeric"),
        (["--gpus", "5000"], "at most 4096"),
        (["--gpus", "8", "--ep", "16"], "more than the 8 GPUs"),
        (["--gpus", "64", "--ep", "24"], "must divide"),
        (["--gpus", "512", "--ep", "512"], "--physical-experts 512 would do"),
        (["--physical-experts", "8"], "has 256 experts"),
        (["--rail-fail", "8"], "8 rails, 0 to 7"),
        (["--rail-fail", "x"], "an index"),
        (["--rail-fail", "0", "--cluster", "h200-x8"], "there are no rails"),
        (["--straggler", "8"], "8 ranks, 0 to 7"),
        (["--straggler", "1:0"], "above 0"),
        (["--straggler", "1", "--costs", "ideal"], "have no time of SMs"),
        (["--sms", "133"], "a GPU of cluster dgx-h100 has 132 SMs"),
        (["--sms", "79", "--cluster", "hgx-h20"], "a GPU of cluster hgx-h20 has 78 SMs"),
        (["--mode", "ht", "--combine", "partial"], "is of ll"),
        (["--slow-nic", "1:2GB"], "I:FACTOR"),
        (["--late", "1:-5"], "0 or more"),
        (["--background", "0-8"], "8 ranks, 0 to 7"),
        (["--background", "0:1"], "expected I-J[:GBS[:START[:END]]]"),
        (["--background", "0-1:many"], "expected I-J"),
        (["--background", "1-1"], "must be two ranks"),
        (["--background", "0-1:0:5:2"], "a flow from 5 us to 2 us"),
        (["--background", "products"], "do not know what background matrix products take"),
        (["--background", "0-1", "--engine", "closed-form"], "closed form knows neither"),
        (["--oversubscribe", "0"], "above 0"),
        (["--skew-us", "nan"], "0 or more"),
        (["--engine", "closed-form", "--rail-fail", "0"], "closed form knows neither"),
        (["--engine", "closed-form", "--timeline", "x.json"], "no timeline"),
        (["--step", "1"], "give --trace"),
        (["--costs", "no-such-record"], "no-such-record"),
        (["extra"], "no operands"),
    ):
        refuse(args, words)
    for option in ("--timeline", "--links"):
        done = run("simulate", "--costs", "ideal", option, "/nonexistent/x")
        check(done.returncode == 1 and "/nonexistent/x" in done.stderr, done.stderr)


def check_each(folder: Path) -> None:
    """Answers, refusals and failures of many steps, each as it would be alone."""
    lists = [["--json", "--gpus", "8", "--tokens", "4"], ["--gpus", "99999"], ["--each", "-"]]
    lists += [["--json", "--gpus", "16", "--mode", "ht", "--tokens", "4", "--engine", "queues"]]
    file = folder / "each.txt"
    file.write_text("".join(json.dumps(words) + "\n" for words in lists))
    done = run("simulate", "--each", file)
    check(done.returncode == 0 and not done.stderr, f"--each: {done.stderr}")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    check([t["code"] for t in told] == [0, 2, 2, 0], f"--each: codes {told}")
    for words, t in zip(lists, told, strict=True):
        alone = run("simulate", *words) if words[0] != "--each" else None
        if alone and t["code"]:
            check((t["out"], t["err"]) == (alone.stdout, alone.stderr), f"{words}: {t['err']}")
        elif alone:
            both = [json.loads(text) for text in (alone.stdout, t["out"])]
            for answer in both:
                del answer["wall_seconds"]
            check(both[0] == both[1], f"{words}: another answer than alone")
    check("--each stands alone" in told[2]["err"], f"--each in --each: {told[2]}")
    beside = run("simulate", "--each=-", "--json")
    check("--each stands alone" in beside.stderr, f"--json beside --each: {beside.stderr}")
    file.write_text('["--json", "--gpus", "8"]\n[3]\n')
    done = run("simulate", "--each", file)
    check(done.returncode == 2 and "line 2 is no list of words" in done.stderr, done.stderr)
    check(len(done.stdout.splitlines()) == 1, "what was answered before a bad line is lost")
    check("cannot be opened" in run("simulate", "--each", folder / "none").stderr, "no file")


def main() -> int:
    if importlib.util.find_spec("jsonschema") is None:
        print("skipped: Python lacks jsonschema (tools/test brings it)")
        return 77
    schema = json.loads((Path(sys.argv[2]) / "simulate.schema.json").read_text())
    check_answers(schema)
    check_limits()
    check_what_ifs()
    check_costs()
    with tempfile.TemporaryDirectory() as folder:
        check_trace(Path(folder))
        check_masked_selections(Path(folder))
        check_each(Path(folder))
        check_timeline(Path(folder), "--gpus", 16)
        check_timeline(Path(folder), "--gpus", 32, "--mode", "ht", "--slow-nvlink", "3:0.1")
        check_timeline(Path(folder), "--gpus", 64, "--engine", "queues", "--rail-fail", "3")
    check_refusals()
    print("all agree" if not failures else f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
