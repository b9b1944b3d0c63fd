"""`trefoil plan` with the program as built ($TREFOIL_PROGRAM): answers, files, sentences."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import trefoil
from trefoil.capacity import __main__ as planner
from trefoil.capacity import deployments
from trefoil.capacity.plan_file import from_json, load_capacity
from trefoil.capacity.plan_text import as_text, title_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")
SMALL = ("--gpus", "32", "--tokens", "16", "--costs-ll", "ideal", "--costs-ht", "ideal")
FITS = ("--weight-dtype", "fp4", "--reserve-gb", "0", "--context", "64")  # EP 8 in 80 GB
SMALL += FITS
QUEUES = ("--engine", "queues")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def plan(*args: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert planner.main(["--json", *args]) == 0
    return json.loads(told.getvalue())


def test_plan_is_what_simulate_answers() -> None:
    data = plan(*SMALL, *QUEUES, "--rail-fail", "0", "--zipf", "1.2", "--compute-us", "50")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks schemas")
    schema = Path(planner.__file__).with_name("plan.schema.json")
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(data)
    shapes = [(c["mode"], c["ep"]) for c in data["configurations"]]
    assert shapes == [(mode, ep) for mode in ("ll", "ht") for ep in (8, 16, 32)]
    base = {"costs": "ideal", "engine": "queues"}
    points = [
        {"mode": m, "gpus": ep, "tokens": 16, "grouped": True, **base, **change}
        for m, ep in shapes
        for change in ({}, {"rail_fail": "0"}, {"zipf": 1.2})
    ]
    answers = iter(trefoil.sweep(points, program=PROGRAM))
    for c in data["configurations"]:
        plain, fail, zipf = (next(answers).answer for _ in range(3))
        assert plain and fail and zipf
        assert c["layer_seconds"] == pytest.approx(plain["seconds"], rel=1e-7)
        assert c["layer_seconds"] >= c["layer_bound_seconds"] * (1 - 1e-9)
        assert c["share_of_step"] == pytest.approx(
            plain["seconds"] / (plain["seconds"] + 50e-6), rel=1e-7
        )
        assert [w["factor"] for w in c["what_if"]] == pytest.approx(
            [w["seconds"] / plain["seconds"] for w in (fail, zipf)], rel=1e-7
        )
        if c["nodes"] > 1:
            assert c["what_if"][0]["factor"] > 1.05, "a rail less costs nothing"
    from_json(data)


def test_the_answer_in_the_introduction_is_that_of_today() -> None:
    """docs/use_plan_capacity.md shows it shortened: its lines in their order."""
    question = ["--moe", "deepseek-v3", "--gpus", "96"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert planner.main(question) == 0
    lines = told.getvalue().splitlines()
    page = (ROOT / "docs" / "use_plan_capacity.md").read_text(encoding="utf-8")
    answer = page.split(f"The answer of `trefoil plan {' '.join(question)}`, shortened:")[1]
    shown = [line for line in answer.split("```")[1].splitlines() if line not in ("", "...")]
    rest = iter(lines)
    assert len(shown) > 6 and [line for line in shown if line not in rest] == []


def test_closed_form_is_the_same_in_both_verbs() -> None:
    data = plan(*SMALL, "--engine", "closed-form", "--no-crossover", "--mode", "ll")
    done = run("plan", "--closed-form", "--json", "--gpus", "8..32", "--tokens", "16", "--grouped")
    closed = {p["ep"]: p for p in json.loads(done.stdout)["points"]}
    for c in data["configurations"]:
        for op in ("dispatch", "combine"):
            assert c[op]["seconds"] == pytest.approx(closed[c["ep"]][op]["seconds"], rel=1e-8)
            assert c[op]["nic_port_bytes"] == closed[c["ep"]][op]["nic_bytes"]
    assert data["links"] == []


CLOSED = ("--engine", "closed-form", "--no-crossover")


def test_what_does_not_fit_is_not_the_answer() -> None:
    data = plan("--gpus", "96", *CLOSED)  # deepseek-v3 in fp8, GPUs of 80 GB
    q = data["question"]
    assert (q["gpu_memory_gb"], q["reserve_gb"], q["weight_dtype"]) == (80, 8, "fp8")
    assert [c["ep"] for c in data["configurations"]] == [8, 16, 32, 64, 96] * 2
    for c in data["configurations"]:
        assert (c["verdict"] == "misses") == (c["memory_bytes"] > 72e9) == (c["ep"] < 64)
        if c["ep"] < 64:
            assert "does not fit: needs" in c["reasons"][0]
            assert c["reasons"][0].partition("; ")[0].endswith("over 72 GB")
        assert c["idle_gpus"] == (32 if c["ep"] == 64 else 0)
    assert data["smallest"] is None


def test_where_nothing_fits_what_would_is_named() -> None:
    done = run("plan", "--gpus", "96", "--tokens", "256", *CLOSED)
    assert done.returncode == 1
    assert "No configuration that meets 72 GB a GPU." in done.stdout
    words = " ".join(done.stdout.split())
    tokens = re.search(r"With --tokens (\d+) (..) EP 96 fits", words)
    context = re.search(r"With --context (\d+) (..) EP 96 fits", words)
    assert tokens and context
    for option, found in (("--tokens", tokens), ("--context", context)):
        value, mode = int(found[1]), found[2].lower()
        given = {"--tokens": "256", "--context": "4096", option: str(value)}
        at = [word for pair in given.items() for word in pair]
        same = ("--gpus", "96", "--ep", "96", "--mode", mode, *CLOSED)
        assert plan(*same, *at)["configurations"][0]["verdict"] == "cheapest"
        at[at.index(option) + 1] = str(math.ceil(value * 1.02))
        assert run("plan", *same, *at).returncode == 1, "much more would fit, too"


def test_the_first_sentence_and_the_page_have_the_step_and_its_interval(tmp_path: Path) -> None:
    options = ("--gpus", "64", "--ep", "64", "--mode", "ll", "--no-crossover")
    data = plan(*options)
    (c,) = data["configurations"]
    ends = [f"{c[f'step_{end}_seconds'] * 1e3:.1f} ms" for end in ("low", "high")]
    said = f"{c['step_seconds'] * 1e3:.1f} ms per output token (interval {ends[0]} to {ends[1]})"
    assert said in " ".join(run("plan", *options).stdout.split())
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    path.write_text(json.dumps(data))
    assert run("report", "--capacity", str(path), "-o", str(page)).returncode == 0
    text = page.read_text()
    assert said in text and f"<b>{c['tokens_per_second']:,.0f}</b>" in text
    assert text.index("<th>a step</th>") < text.index("<th>90 % interval</th>"), "the step first"
    roofline = run("plan", *options, "--compute-costs", "roofline").stdout
    assert "at least" in roofline and "interval" not in roofline.partition("\n\nmode")[0]


def test_one_token_is_no_two_batches_but_has_the_interval_of_its_compute() -> None:
    of = ("--gpus", "16", "--ep", "16", "--mode", "ll", "--tokens", "1", "--no-crossover")
    ends = []
    for overlap in ("two-batch", "none"):
        (c,) = plan(*of, "--cluster", "hgx-h200", "--overlap", overlap)["configurations"]
        assert c["overlap"] == "none"
        ends.append((c["step_low_seconds"], c["step_seconds"], c["step_high_seconds"]))
    assert ends[0] == ends[1]


def test_attention_of_several_gpus() -> None:
    of = ("--gpus", "32", "--ep", "32", "--mode", "ht", *CLOSED)

    def one(*more: str) -> dict[str, Any]:
        (c,) = plan(*of, *more)["configurations"]
        return c

    prefill = ("--load", "prefill", "--tokens", "1024", "--context", "8192")
    alone, eight = (one(*prefill, "--attention-tp", n) for n in ("1", "8"))
    assert alone["memory"]["attention"] > 3 * eight["memory"]["attention"]
    ratio = eight["step_seconds"] / alone["step_seconds"]
    assert 1 < ratio < 2, "a step takes longer, but is of the whole prompt"
    limit = ("--max-step-ms", str(1e3 * eight["step_seconds"] * 1.01))
    assert one(*prefill, "--attention-tp", "8", *limit)["verdict"] == "cheapest"
    assert run("plan", *of, *prefill, *limit).returncode == 1
    decode = ("--tokens", "16", "--attention-tp")
    for model, times in (("deepseek-v3", 4), ("qwen3-235b-a22b", 1)):  # MLA; 4 heads of keys
        a, b = (one("--moe", model, *decode, n)["memory"]["kv_cache"] for n in ("1", "4"))
        assert b == times * a, model


@pytest.mark.parametrize(
    ("n", "more", "words"),
    [
        ("3", (), "does not divide the 8 GPUs of a node of dgx-h100"),
        ("8", ("--ep", "4,8", "--gpus", "8"), "does not divide EP 4"),
        ("9", ("--cluster", "gb200-nvl72"), "does not divide the 128 heads of deepseek-v3"),
        ("0", (), "expected a whole number"),
    ],
)
def test_attention_that_cannot_be_shared(n: str, more: tuple[str, ...], words: str) -> None:
    done = run("plan", "--attention-tp", n, *more)
    assert done.returncode == 2 and words in done.stderr


def test_price_and_power_of_a_million_tokens() -> None:
    options = ("--gpus", "96", "--ep", "32,64", "--mode", "ll", "--tokens", "64", *CLOSED)
    done = run("plan", *options, "--gpu-hour", "2.5", "--gpu-watts", "1200", "--json")
    assert done.returncode == 0
    whole, idle = json.loads(done.stdout)["configurations"]
    for c, gpus in ((whole, 1), (idle, 96 / 64)):  # a group of 64 leaves 32 idle
        hours = gpus * 1e6 / c["tokens_per_second"] / 3600
        assert c["usd_per_million_tokens"] == pytest.approx(2.5 * hours)
        assert c["kwh_per_million_tokens"] == pytest.approx(1.2 * hours)
    text = run("plan", *options, "--gpu-hour", "2.5").stdout
    price = f"{whole['usd_per_million_tokens']:.3g}"
    assert f"; {price} USD a million tokens" in " ".join(text.split())
    text = run("plan", *options, "--gpu-hour", "2.5", "--compute-costs", "roofline").stdout
    assert re.search(r"at least [0-9.]+ USD a million tokens", " ".join(text.split()))
    assert "kWh" not in text and "USD" not in run("plan", *options).stdout


def test_where_nothing_fits_the_smallest_that_does_is_named() -> None:
    done = run("plan", "--gpus", "8", *CLOSED)
    assert done.returncode == 1
    assert "The smallest that fits: LL in groups of 64 GPUs" in done.stdout
    done = run("plan", "--gpus", "8", "--reserve-gb", "79", *CLOSED)
    assert done.returncode == 1 and "No EP size of deepseek-v3 keeps fp8" in done.stdout
    done = run("plan", "--gpus", "8", "--reserve-gb", "80", *CLOSED)
    assert done.returncode == 2 and "a GPU has 80 GB" in done.stderr


def test_the_limit_that_binds_and_the_nearest_that_works() -> None:
    options = ("--gpus", "96", "--ep", "96", "--mode", "ll", *CLOSED)
    done = run("plan", *options, "--max-step-ms", "5")
    assert done.returncode == 1
    assert "No configuration that meets 72 GB a GPU and a step in 5 ms" in done.stdout
    value = re.search(r"--max-step-ms ([0-9.]+) alone would let in LL EP 96", done.stdout)
    assert value
    assert run("plan", *options, "--max-step-ms", value[1]).returncode == 0
    less = str(float(value[1]) - 0.02)
    assert run("plan", *options, "--max-step-ms", less).returncode == 1
    done = run("plan", *options, "--tokens", "160", "--max-us", "1")
    assert "alone would" not in done.stdout, "two limits bind"
    done = run("plan", *options, "--tokens", "160")
    value = re.search(r"--reserve-gb ([0-9.]+) alone would let in LL EP 96", done.stdout)
    assert value
    assert run("plan", *options, "--tokens", "160", "--reserve-gb", value[1]).returncode == 0


def test_the_largest_batch_fits_and_one_more_percent_does_not() -> None:
    options = ("--gpus", "64", "--ep", "64", *CLOSED)
    for c in plan(*options)["configurations"]:
        same = (*options, "--mode", c["mode"], "--tokens")
        assert plan(*same, str(c["max_tokens"]))["configurations"][0]["memory_bytes"] <= 72e9
        assert run("plan", *same, str(math.ceil(c["max_tokens"] * 1.02))).returncode == 1


def test_a_step_is_its_parts() -> None:
    more = ("--overlap", "none", "--imbalance", "1", *CLOSED)
    for load in ("decode", "prefill"):
        for c in plan("--gpus", "96", "--ep", "96", "--load", load, *more)["configurations"]:
            compute = sum(p["seconds"] for p in c["compute"])
            assert c["communication_seconds"] == pytest.approx(58 * c["layer_seconds"])
            assert c["step_seconds"] == pytest.approx(compute + c["communication_seconds"])
            tokens = {"decode": 128, "prefill": 4096}[load]
            assert c["tokens_per_second"] == pytest.approx(tokens / c["step_seconds"])
            assert c["share_of_step"] == pytest.approx(
                c["communication_seconds"] / c["step_seconds"]
            )


def test_the_cheapest_takes_the_least_gpu_time_for_a_token() -> None:
    for gpus in ("96", "128"):
        configurations = plan("--gpus", gpus, "--mode", "ll", *CLOSED)["configurations"]
        fitting = [c for c in configurations if c["verdict"] != "misses"]
        assert len(fitting) > 1

        def gpu_time(c: dict[str, Any], gpus: int = int(gpus)) -> float:
            return c["step_seconds"] * gpus / (gpus - c["idle_gpus"])

        best = min(fitting, key=gpu_time)
        assert best["verdict"] == "cheapest"
        for c in fitting:
            if c is not best:
                times = gpu_time(c) / gpu_time(best)
                assert f"{times:.2f} times as much GPU time" in c["reasons"][0]
                assert ("GPUs idle" in c["reasons"][0]) == (c["idle_gpus"] > 0)


def test_a_model_that_is_not_whole(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "linear_attn_config": {},
    }
    path = tmp_path / "new.json"
    path.write_text(json.dumps(config))
    options = ("--moe", str(path), "--gpus", "16", *CLOSED)
    (text, *_) = run("plan", *options).stdout, None
    words = " ".join(text.split())
    assert "does not say enough of the whole model (linear_attn_config)" in words
    assert "memory is of routed experts and buffers alone" in words
    refused = run("plan", *options, "--max-step-ms", "5")
    assert refused.returncode == 2 and "linear_attn_config" in refused.stderr
    assert run("plan", *options, "--max-step-ms", "50", "--compute-us", "100").returncode == 0
    del config["linear_attn_config"]
    path.write_text(json.dumps(config))
    assert "a step" in run("plan", *options).stdout
    path.write_text(json.dumps({**config, "model_type": "jamba"}))
    words = " ".join(run("plan", *options).stdout.split())
    assert "the whole model (model_type jamba is not known)" in words and "a step" not in words


def test_limits_that_bind_together() -> None:
    done = run("plan", "--gpus", "64", "--tokens", "256", "--max-step-ms", "5", *CLOSED)
    words = " ".join(done.stdout.split())
    assert done.returncode == 1 and "--max-step-ms 5: all need more, at least" in words
    assert "memory of 72 GB: all need more, at least" in words
    assert "fits in memory, a step in 5 ms aside." in words
    limits = ("--max-us", "10", "--max-sms", "1", "--engine", "queues")
    done = run("plan", "--gpus", "64", "--ep", "64", *limits)
    words = " ".join(done.stdout.split())
    least = re.search(r"--max-us 10: all need more, at least ([\d.]+) us", words)
    sms = re.search(r"--max-sms 1: all need more, at least (\d+) SMs", words)
    assert done.returncode == 1 and least and sms
    assert float(least[1]) > 10 and int(sms[1]) > 1


def test_a_what_if_says_what_it_does_to_a_step(tmp_path: Path) -> None:
    options = ("--gpus", "16", "--ep", "16", "--mode", "ll", "--tokens", "32", "--engine", "queues")
    trace = tmp_path / "t.npz"
    command = ("trace", "generate", "--moe", "deepseek-v3", "--groups", "8", "--topk-groups", "4")
    assert run(*command, "--ranks", "16", "--tokens", "128", str(trace)).returncode == 0
    both = ("--trace", str(trace), "--rail-fail", "0", "--no-crossover")
    rail, even = plan(*options, *both)["configurations"][0]["what_if"]
    assert even["name"] == "trace t.npz (128 tokens a GPU)"
    assert even["factor"] == pytest.approx(1, abs=0.1), "as uniform as the plan's own routing"
    assert even["step_factor"] == pytest.approx(1, abs=0.1)
    assert 1 < rail["step_factor"] < rail["factor"], "part of a step is compute"


def test_redundant_experts_are_placed_by_load(tmp_path: Path) -> None:
    trace = tmp_path / "skewed.npz"
    command = ("trace", "generate", "--moe", "deepseek-v3", "--popularity", "zipf", "--skew", "1")
    assert run(*command, "--ranks", "16", "--tokens", "128", str(trace)).returncode == 0
    points = [
        {"trace": str(trace), "engine": "closed-form", **more}
        for more in ({}, {"physical_experts": 288})
    ]
    as_is, placed = (o.answer for o in trefoil.sweep(points, program=PROGRAM))
    assert as_is and placed and placed["physical_experts"] == 288
    assert placed["dispatch"]["seconds"] < 0.6 * as_is["dispatch"]["seconds"]


def simulated(**options: object) -> dict[str, Any]:
    (outcome,) = trefoil.sweep(
        [{"cluster": "h800", "mode": "ht", "tokens": 256, "engine": "closed-form", **options}],
        program=PROGRAM,
    )
    assert outcome.answer, outcome.refusal
    return outcome.answer


def test_groups_of_experts_go_to_nodes() -> None:
    """Hierarchical by default where nodes divide the groups: fewer rows over the network, and a
    skewed load is balanced better than by copies in turn."""
    of = {"gpus": 32, "ep": 32, "physical_experts": 288, "grouped": True}
    found = {p: simulated(**of, placement=p) for p in ("in-turn", "global", "auto")}
    assert [found[p]["placement"] for p in found] == ["in-turn", "global", "hierarchical"]
    net = [found[p]["dispatch"]["bytes"]["net"] for p in found]
    assert net[2] < 0.95 * net[0] and net[2] < 0.85 * net[1]
    skewed = [simulated(**of, placement=p, zipf=1) for p in ("in-turn", "hierarchical")]
    assert skewed[1]["dispatch"]["seconds"] < 0.6 * skewed[0]["dispatch"]["seconds"]
    wide = {**of, "gpus": 144, "ep": 144}
    assert simulated(**wide)["placement"] == "in-turn", "18 nodes, 8 groups"
    assert simulated(**wide, zipf=1)["placement"] == "global"
    assert simulated(**{**of, "grouped": False})["placement"] == "in-turn"
    moved = simulated(gpus=32, ep=32, grouped=True, placement="hierarchical", zipf=1)
    assert moved["physical_experts"] == 256, "without copies: experts change places alone"


def test_rows_in_fp4_are_a_half_and_their_scales() -> None:
    of = {"gpus": 16, "ep": 16}
    rows = [simulated(**of, dispatch_dtype=t)["dispatch_row_bytes"] for t in ("bf16", "fp8", "fp4")]
    assert rows == [2 * 7168, 7168 + 4 * 56, 7168 // 2 + 448]
    done = run("simulate", "--dispatch-dtype", "fp5")
    assert done.returncode == 2 and "expected bf16, fp8 or fp4" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus", "24", "--ep", "24", "--moe", "deepseek-v3"), "3 nodes do not divide the 8"),
        (("--gpus", "32", "--ep", "32", "--moe", "qwen3-30b-a3b"), "states no groups of experts"),
    ],
)
def test_placements_that_cannot_be(options: tuple[str, ...], words: str) -> None:
    answer = run("plan", *options, "--placement", "hierarchical", "--mode", "ht", *CLOSED)
    assert answer.returncode == 2 and words in answer.stderr


def test_models_with_groups_send_less_over_the_net() -> None:
    options = ("--gpus", "64", "--ep", "64", "--mode", "ht", *CLOSED)
    grouped, free = plan(*options), plan(*options, "--no-grouped")
    assert "experts of 4 of 8 groups" in grouped["question"]["details"]
    net = [d["configurations"][0]["dispatch"]["net_bytes"] for d in (grouped, free)]
    assert net[0] < 0.75 * net[1]
    none = plan("--moe", "qwen3-30b-a3b", "--gpus", "8", *CLOSED)
    assert "groups" not in none["question"]["details"]


def test_a_cluster_that_states_little(tmp_path: Path) -> None:
    cluster = json.loads((ROOT / "models/clusters/dgx-h100.json").read_text())
    for key in ("gpu_memory_gb", "gpu_hbm_gb_per_s", "gpu_bf16_tflops", "gpu_fp8_tflops"):
        del cluster[key]
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(cluster))
    words = " ".join(run("plan", "--cluster", str(path), "--gpus", "8", *CLOSED).stdout.split())
    assert "does not state gpu_memory_gb: nothing was left out for memory" in words
    assert "GPUs whose memory is not known" in words
    assert "does not state gpu_hbm_gb_per_s and gpu_bf16_tflops" in words
    done = run("plan", "--cluster", str(path), "--gpus", "8", "--max-memory-gb", "20", *CLOSED)
    assert done.returncode == 1 and "20 GB a GPU" in done.stdout


def test_the_first_answer_is_a_screen() -> None:
    done = run("plan", "--moe", "deepseek-v3", "--gpus", "96")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) <= 50
    assert max(map(len, lines)) <= 130
    assert "tokens/s a GPU" in lines[2] and "batch fits" in done.stdout
    assert "compute by deepgemm-h800" in " ".join(lines)
    options = ("--gpus", "8", "--reserve-gb", "0", *CLOSED, "--compute-costs", "roofline")
    assert "real kernels are slower" in " ".join(run("plan", *options).stdout.split())


def first_sentence(*options: str) -> str:
    return " ".join(run("plan", *options, *CLOSED).stdout.split("\n\n")[1].split())


def test_the_first_sentence_says_what_is_not_known(tmp_path: Path) -> None:
    whole = json.loads((ROOT / "models/moe/qwen3-30b-a3b.json").read_text())
    experts = ("name", "about", "source", "hidden_elements", "num_experts", "topk")
    experts += ("num_moe_layers", "expert_hidden_elements", "num_shared_experts")
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({name: whole[name] for name in experts}))
    first = first_sentence("--moe", str(path), "--gpus", "8")
    assert "No tokens/s, and memory is of routed experts and buffers alone" in first
    assert "(num_layers)" in first
    first = first_sentence("--gpus", "96", "--ep", "96")
    rate, total = re.search(r": ([\d,]+) tokens/s a GPU .* ([\d,]+) in all\)", first).groups()
    each, all_gpus = (int(text.replace(",", "")) for text in (rate, total))
    assert all_gpus == pytest.approx(96 * each, rel=1e-3)
    few = run("plan", "--gpus", "8", *CLOSED).stdout
    assert "a GPU; there are 8 GPUs." in " ".join(few.split())


def test_overlap_is_replayed_and_the_fastest_counts() -> None:
    options = ("--gpus", "96", "--ep", "96", "--imbalance", "1", *CLOSED)
    for c in plan(*options)["configurations"]:
        timings = {t["overlap"]: t for t in c["timings"]}
        assert set(timings) == {"none", "shared", "two-batch"}
        assert c["step_seconds"] == min(t["seconds"] for t in timings.values())
        assert timings[c["overlap"]]["seconds"] == c["step_seconds"]
        none, shared, two = (timings[name] for name in ("none", "shared", "two-batch"))
        assert none["seconds"] == pytest.approx(
            none["compute_seconds"] + none["communication_seconds"]
        )
        assert shared["compute_seconds"] == pytest.approx(none["compute_seconds"])
        assert shared["seconds"] <= none["seconds"]
        assert two["compute_seconds"] > none["compute_seconds"], "weights are read twice"
        longest = max(two["compute_seconds"], two["communication_seconds"])
        assert longest <= two["seconds"] <= two["compute_seconds"] + two["communication_seconds"]
    for c in plan("--gpus", "16", "--ep", "16", "--tokens", "16", "--no-crossover", *FITS)[
        "configurations"
    ]:
        assert all(t["low"] <= t["seconds"] <= t["high"] for t in c["timings"])
    done = run("plan", *options, "--overlap", "three-batch")
    assert done.returncode == 2 and "--overlap three-batch: expected none" in done.stderr


def only(*options: str) -> dict[str, Any]:
    (c,) = plan("--ep", "16", "--gpus", "16", "--mode", "ll", *CLOSED, *FITS, *options)[
        "configurations"
    ]
    return c


def test_terms_lengthen_a_step_by_what_they_say() -> None:
    balanced = ("--tokens", "16", "--overlap", "none", "--imbalance", "1")
    c = only(*balanced)
    assert only(*balanced, "--host-ms", "3")["step_seconds"] == pytest.approx(
        c["step_seconds"] + 3e-3
    )
    parts = {p["name"]: p["seconds"] for p in c["compute"]}
    double = {p["name"]: p["seconds"] for p in only(*balanced, "--batch-imbalance", "2")["compute"]}
    assert double.pop("attention") == pytest.approx(2 * parts.pop("attention"))
    assert double == parts
    busy = only(*balanced[:-1], "1.5")
    assert busy["step_seconds"] > c["step_seconds"]
    assert busy["layer_seconds"] == c["layer_seconds"]


def test_prefill_is_slower_while_communication_runs() -> None:
    """Only what overlaps, and only prefill."""
    options = ("--tokens", "1024", "--context", "1024", "--load", "prefill")
    options += ("--gpus", "32", "--ep", "32", "--mode", "ht", *CLOSED, *FITS[:-2])

    def step(*more: str) -> float:
        return float(plan(*options, *more)["configurations"][0]["step_seconds"])

    alone = ("--interference", "1")
    assert step("--overlap", "none") == step("--overlap", "none", *alone)
    slower = step("--overlap", "two-batch") / step("--overlap", "two-batch", *alone)
    assert 1.02 < slower < 1 / 0.77
    decode = ("--tokens", "16", "--overlap", "two-batch")
    assert only(*decode)["step_seconds"] == only(*decode, *alone)["step_seconds"]


def test_prefill_waits_for_unequal_experts() -> None:
    """One of the two terms, and none of a GPU alone."""
    options = (
        "--tokens",
        "1024",
        "--context",
        "1024",
        "--load",
        "prefill",
        "--mode",
        "ht",
        *CLOSED,
    )
    options += ("--moe", "gpt-oss-20b")

    def step(gpus: str, *more: str) -> float:
        data = plan(*options, "--gpus", gpus, "--ep", gpus, *more)
        return float(data["configurations"][0]["step_seconds"])

    equal = step("32", "--imbalance", "1")
    assert 1.1 < step("32") / equal <= 1.18 and step("32", "--prefill-wait", "1") == equal
    assert 1.2 < step("32", "--prefill-wait", "1.3") / equal <= 1.3
    assert step("32", "--imbalance", "1.5") > equal
    assert step("1") == step("1", "--imbalance", "1") == step("1", "--imbalance", "1.5")


def test_cached_prompts_take_fewer_steps_to_the_first_token() -> None:
    options = ("--load", "prefill", "--tokens", "1024", "--context", "4096", "--gpus", "32")
    options += ("--ep", "32", "--mode", "ht", *CLOSED, *FITS[:-2])
    data = [plan(*options, "--cached", x) for x in ("0", "0.75")]
    steps = [d["configurations"][0]["step_seconds"] for d in data]
    assert [d["question"]["cached"] for d in data] == [0, 3072]
    assert steps[1] > steps[0], "each computed token sees more"
    memory = [d["configurations"][0]["memory"]["kv_cache"] for d in data]
    assert memory[1] == memory[0], "a whole prompt in both"
    assert [from_json(d).question.steps_to_first_token for d in data] == [4, 1]


def test_draft_tokens_are_rows_of_a_step() -> None:
    options = ("--tokens", "16", "--overlap", "none", "--acceptance", "0.5")
    one, two = only(*options), only(*options, "--drafts", "2")
    assert two["tokens_per_second"] * two["step_seconds"] == pytest.approx(16 * 1.75)
    assert one["tokens_per_second"] * one["step_seconds"] == pytest.approx(16)
    cached = one["memory"]["kv_cache"] * 62 / 61
    assert two["memory"]["kv_cache"] == pytest.approx(cached), "of sequences, and the draft's layer"
    assert two["step_seconds"] > one["step_seconds"]


def test_single_batch_overlap_hides_more_than_shared() -> None:
    how = {o: only("--tokens", "64", "--overlap", o) for o in ("shared", "single-batch")}
    assert how["single-batch"]["step_seconds"] < how["shared"]["step_seconds"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--drafts", "1", "--load", "prefill"), "--drafts 1: of decode alone, this is prefill"),
        (("--acceptance", "1.5"), "--acceptance 1.5: a share, 0 to 1"),
        (("--imbalance", "0.5"), "--imbalance 0.5: busiest over mean, 1 or more"),
        (("--batch-imbalance", "0"), "--batch-imbalance 0: busiest over mean, 1 or more"),
        (("--fp4-rate", "0"), "--fp4-rate 0: more than 0"),
        (("--prefill-wait", "1.2"), "--prefill-wait 1.2: of prefill, this is decode"),
        (("--interference", "0"), "--interference 0: a speed, above 0 to 1"),
        (("--interference", "1.5"), "--interference 1.5: a speed, above 0 to 1"),
        (("--cached", "0.5"), "--cached 0.5: of prefill alone, this is decode"),
        (("--cached", "1", "--load", "prefill"), "--cached 1: a share of the input"),
    ],
)
def test_terms_that_make_no_sense(options: tuple[str, ...], said: str) -> None:
    done = run("plan", *options)
    assert done.returncode == 2 and said in done.stderr


def test_a_trace_of_another_model_is_named_on_the_first_screen(tmp_path: Path) -> None:
    trace = tmp_path / "other.npz"
    shape = ("--ranks", "16", "--experts", "64", "--topk", "4", "--tokens", "4", "--steps", "1")
    assert run("trace", "generate", *shape, str(trace)).returncode == 0
    options = ("--ep", "16", "--gpus", "16", "--mode", "ll", *CLOSED, *FITS)
    done = run("plan", *options, "--trace", str(trace))
    assert done.returncode == 0 and "a what-if that does not apply: EP 16: " in done.stdout


def test_costs_are_of_one_library() -> None:
    for gpus, library in (("8", "trefoil"), ("16", "deepep")):
        options = ("--gpus", gpus, "--tokens", "4", "--no-crossover", *FITS)
        data = plan(*options)
        assert {c["costs"].split("-")[0] for c in data["configurations"]} == {library}


def test_published_deployments_are_predicted_as_the_page_says() -> None:
    data = deployments.load_rows()
    assert {row["account"] for row in data["rows"]} == set(data["accounts"])
    assert len(data["accounts"]) >= 6
    found = deployments.predict_all(data["rows"], PROGRAM)
    page = (ROOT / "docs/deployments.md").read_text()
    assert page == deployments.page_of(data, found)


# Dispatch and combine, us: the low-latency table of DeepEP's docs/legacy.md, H800 with a 400 Gb/s
# CX7 a GPU, 128 tokens, hidden 7168, top-8, fp8 dispatch.
DEEPEP_LL = {64: (173, 314), 128: (192, 369), 256: (194, 360)}


def test_intervals_beyond_the_fit_hold_deepeps_own_table() -> None:
    options = ("--gpus", "256", "--ep", "64,128,256", "--mode", "ll", "--tokens", "128")
    data = plan("--cluster", "h800", *options, "--dispatch-dtype", "fp8")
    assert [c["ep"] for c in data["configurations"]] == list(DEEPEP_LL)
    for c in data["configurations"]:
        for op, us in zip(("dispatch", "combine"), DEEPEP_LL[c["ep"]], strict=True):
            assert c[op]["low"] <= us * 1e-6 <= c[op]["high"], (c["ep"], op)


def test_a_bound_is_bytes_over_line_rates() -> None:
    for c in plan(*SMALL, *QUEUES, "--no-crossover")["configurations"]:
        for op in (c["dispatch"], c["combine"]):
            ports = op["nvlink_port_bytes"] / 450e9, op["nic_port_bytes"] / 50e9
            assert op["bound"] == pytest.approx(max(ports), rel=1e-6)


def test_ll_against_ht_is_of_one_library() -> None:
    options = ("--ep", "8,16", "--tokens", "4", "--gpus", "16", *FITS)
    data = plan(*options)
    libraries = {x["ep"]: {name.split("-")[0] for name in x["costs"]} for x in data["crossovers"]}
    assert libraries == {8: {"trefoil"}, 16: {"deepep"}}
    assert any("deepep-ll-h100, deepep-ht-h100" in line for line in _text(data))
    mixed = plan(*options[2:], "--ep", "8", "--costs-ht", "deepep-ht-h100")
    assert any("(two libraries: trefoil-ll-h200, deepep-ht-h100)" in line for line in _text(mixed))


def _text(data: dict[str, Any]) -> list[str]:
    return as_text(from_json(data)).split("\n")


def test_more_gpus_than_experts() -> None:
    sizes = ("--ep", "256,512", "--tokens", "1", "--engine", "closed-form", "--no-crossover")
    data = plan("--gpus", "512", "--mode", "ll", *sizes)
    one, two = data["configurations"]
    assert (one["ep"], two["ep"]) == (256, 512)
    assert one["memory"]["weights"] == two["memory"]["weights"], "an expert a GPU, some twice"


def test_files_and_resuming(tmp_path: Path) -> None:
    folder, kept = tmp_path / "out", tmp_path / "points.jsonl"
    command = ("plan", *SMALL, *QUEUES, "--ep", "8,32", "--resume", str(kept))
    command += ("--crossover", "-o", str(folder))
    first = run(*command)
    assert first.returncode == 0, first.stderr
    lines = kept.read_text()
    second = run(*command[:-2])
    told = "".join(line for line in first.stdout.splitlines(True) if str(folder) not in line)
    assert second.stdout == told
    assert kept.read_text() == lines, "a resumed plan computes nothing"
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "plan.csv", "plan.md", "scaling.svg", "scaling.png"} <= names
    assert {"crossover.svg", "memory.png", "links-dispatch.svg", "links-combine.png"} <= names
    for name in names:
        assert f"{folder}/{name}" in first.stdout
    kept_plan = load_capacity(folder / "plan.json")  # as the report reads it
    assert {x.ep for x in kept_plan.crossovers} == {8, 32}
    assert "32 GPUs of dgx-h100" in title_of(kept_plan.question)


def test_without_matplotlib(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')\n")
    (absent / "tqdm.py").write_text("raise ModuleNotFoundError(name='tqdm')\n")
    folder = tmp_path / "out"
    command = ("plan", *SMALL, "--ep", "8", "--no-crossover", "-o", str(folder))
    done = run(*command, PYTHONPATH=str(absent))
    assert done.returncode == 0, done.stderr
    assert "no pictures: Python lacks the module matplotlib" in done.stderr
    assert {path.name for path in folder.iterdir()} == {"plan.json", "plan.csv", "plan.md"}


def test_loads_and_traces(tmp_path: Path) -> None:
    training = plan(*SMALL, "--load", "training", "--ep", "8", "--no-crossover")
    verdicts = {c["mode"]: c["verdict"] for c in training["configurations"]}
    assert verdicts == {"ll": "misses", "ht": "cheapest"}
    ht = training["configurations"][1]
    assert ht["communication_seconds"] == pytest.approx(2 * 58 * ht["layer_seconds"])
    assert ht["step_seconds"] is None, "a backward pass's compute is not modelled"
    trace = tmp_path / "t.npz"
    command = ("trace", "generate", "--ranks", "16", "--tokens", "64", str(trace))
    assert run(*command).returncode == 0
    data = plan(*SMALL, "--trace", str(trace), "--mode", "ll", "--no-crossover")
    for c in data["configurations"]:
        (what,) = c["what_if"]
        assert (what["factor"] is not None) == (c["ep"] == 16)
        assert c["ep"] == 16 or "the trace has 16 ranks" in what["refusal"]
        assert what["name"] == "trace t.npz (64 tokens a GPU)", "one column of the table"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cluster", "laptop"], "known are"),
        (["--moe", "no-such"], "known are"),
        (["--gpus", "8192"], "speaks for 1 to 4096"),
        (["--gpus", "0"], "speaks for 1 to 4096"),
        (["--gpus", "8..64"], "EP sizes go to --ep"),
        (["--ep", "128", "--gpus", "64"], "there are 64 GPUs"),
        (["--context", "0"], "1 or more"),
        (["--grouped", "--moe", "qwen3-30b-a3b"], "states no groups of experts"),
        (["--kv-dtype", "int4"], "int4"),
        (["--load", "training", "--max-step-ms", "9"], "compute is not modelled"),
        (["--load", "training", "--gpu-hour", "2"], "--gpu-hour: a training step's compute"),
        (["--gpu-watts", "-1"], "0 or more"),
        (["--ep", "96", "--gpus", "96", "--physical-experts", "64"], "has 256 experts"),
        (["--ep", "512", "--gpus", "512", "--physical-experts", "256"], "as many as are needed"),
        (["--ep", "64..8"], "not like 8..64"),
        (["--mode", "warp"], "expected ll, ht"),
        (["--mode", "ll,ll-rank-major"], "one layout of each mode"),
        (["--load", "lunch"], "decode"),
        (["--drafts", "99999999999"], "--drafts 99999999999: at most 64"),
        (["--tokens", "0"], "1 or more"),
        (["--max-us", "-1"], "0 or more"),
        (["--max-memory-gb", "lots"], "lots"),
        (["--costs-ll", "no-such-record"], "no-such-record"),
        (["--sms", "500"], "--sms 500: a GPU of cluster dgx-h100 has 132 SMs"),
        (["extra"], "extra"),
    ],
)
def test_sentences(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        planner.main(args)
    said = capsys.readouterr()
    assert said.out == "" and words in said.err


def test_the_verb_ends_with_the_same_sentence() -> None:
    done = run("plan", "--cluster", "laptop")
    assert (done.returncode, done.stdout) == (2, "") and "known are" in done.stderr
    assert done.stderr.startswith("trefoil plan: ") and done.stderr.count("\n") == 1


def test_compute_costs_that_cannot_be_read(tmp_path: Path) -> None:
    options = ("plan", "--gpus", "8", *CLOSED, "--compute-costs")
    for value, words in (
        (
            "x",
            "--compute-costs: no compute record 'x': expected "
            "deepgemm-h800, pytorch-h100, pytorch-h200",
        ),
        (str(tmp_path / "none.json"), "none.json: No such file"),
    ):
        done = run(*options, value)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_domains_are_the_largest_that_so_few_nodes_allow() -> None:
    options = ("--gpus", "12", "--ep", "12", "--mode", "ll", "--no-crossover", *FITS)
    of = (*options, "--costs-ll", "ideal", "--tokens", "16", *QUEUES)
    assert [c["nodes"] for c in plan(*of)["configurations"]] == [2]
    note = "EP 12 on nodes of 8: 2 NVLink domains of 6, the largest that 2 nodes allow"
    assert note in " ".join(run("plan", *of).stdout.split())
    even = run("plan", "--gpus", "16", "--ep", "16", *of[4:]).stdout
    assert "NVLink domains" not in even
