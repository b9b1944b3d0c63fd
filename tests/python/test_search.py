"""Searches, fleets and serving commands with the program as built ($TREFOIL_PROGRAM)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import trefoil
from trefoil.capacity import __main__ as verb
from trefoil.capacity import fleet
from trefoil.capacity.batch_search import Search
from trefoil.capacity.configuration import Configuration
from trefoil.capacity.planner import Planner
from trefoil.capacity.question import PlanError, Question
from trefoil.capacity.serving import IN_FP8, IN_MXFP4, MODELS, command_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")
CLOSED = {"engine": "closed-form"}
WORDS = ["--engine", "closed-form"]


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Points that several tests ask for, fleets' above all, are computed once."""
    path = str(tmp_path_factory.mktemp("kept") / "points.jsonl")
    CLOSED["resume"] = path
    WORDS[2:] = ["--resume", path]


@pytest.fixture(scope="module")
def found(kept: None) -> Search:
    return trefoil.plan(gpus=128, ep="32,64,96", tokens="8..128", context="1024,8192", **CLOSED)


def told(*args: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = verb.main([*WORDS, *args])
    return code, text.getvalue()


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        verb.main([*WORDS, *args])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_search_holds_every_combination(found: Search) -> None:
    rows = found.rows()
    assert len(rows) == 2 * 5 * 2 * 3
    keys = {(r["context"], r["tokens"], r["mode"], r["ep"]) for r in rows}
    assert len(keys) == len(rows)
    assert {r["idle_gpus"] for r in rows if r["ep"] == 96} == {32}
    for r in rows:
        assert r["tokens_per_second"] == pytest.approx(r["tokens"] / r["step_seconds"])
        assert r["meets"] == r["fits"], "memory is the only limit"


def test_a_row_is_what_a_plan_says(found: Search) -> None:
    row = next(r for r in found.rows() if (r["context"], r["tokens"]) == (8192, 32))
    alone = trefoil.plan(gpus=128, ep="32,64,96", tokens=32, context=8192, **CLOSED).rows()[0]
    assert {**alone, "on_frontier": 0} == {**row, "on_frontier": 0}


def test_nothing_beats_the_frontier(found: Search) -> None:
    for context in found.contexts:
        frontier = found.frontier(context)
        meeting = [c for c in found.candidates(context) if c.meets]
        best = found.best(context)
        assert best is not None and frontier
        assert best.throughput == pytest.approx(frontier[-1].throughput)
        for f in frontier:
            assert not any(c.latency <= f.latency and c.throughput > f.throughput for c in meeting)
        latencies = [f.latency for f in frontier]
        assert latencies == sorted(latencies)


def test_limits_keep_out_and_the_nearest_is_named() -> None:
    options = ("--gpus", "64", "--ep", "64", "--tokens", "8..64")
    code, text = told(*options, "--max-step-ms", "30")
    assert code == 0 and "within 72 GB a GPU and a step in 30 ms" in " ".join(text.split())
    code, text = told(*options, "--max-step-ms", "1")
    words = " ".join(text.split())
    assert code == 1 and "Nothing at context 4,096 meets" in words
    value = words.split("--max-step-ms ")[1].split()[0]
    assert told(*options, "--max-step-ms", str(float(value) * 1.01))[0] == 0
    assert told(*options, "--max-step-ms", str(float(value) * 0.99))[0] == 1


def test_files_and_the_picture(tmp_path: Path, found: Search) -> None:
    pytest.importorskip("matplotlib")
    code, text = told("--gpus", "64", "--ep", "64", "--tokens", "8,16", "-o", str(tmp_path / "s"))
    names = {p.name for p in (tmp_path / "s").iterdir()}
    assert code == 0 and names == {"search.json", "search.csv", "pareto.svg", "pareto.png"}
    assert all(str(tmp_path / "s" / name) in text for name in names)
    data = json.loads((tmp_path / "s" / "search.json").read_text())
    assert data["format"] == "trefoil-search" and len(data["rows"]) == 4
    lines = (tmp_path / "s" / "search.csv").read_text().splitlines()
    assert lines[0].split(",") == list(data["rows"][0]) and len(lines) == 5
    panels = found.figure().axes
    assert len(panels) == 2
    for axes, context in zip(panels, found.contexts, strict=True):
        assert f"context {context:,}" in axes.get_title(loc="left")
        drawn = sum(len(line.get_xdata()) for line in axes.lines)
        known = list(found.candidates(context))
        assert drawn == len(known) + len(found.frontier(context))


def test_a_data_frame(monkeypatch: pytest.MonkeyPatch, found: Search) -> None:
    fake = types.SimpleNamespace(DataFrame=lambda rows: ("frame", rows))
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert found.frame() == ("frame", found.rows())


WITHOUT_PANDAS = """
import sys
asked = []
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import trefoil, trefoil.simulator
from trefoil.capacity import __main__ as verb
found = trefoil.plan(gpus=64, ep="64", tokens="8,16", engine="closed-form")
point = {"gpus": 8, "tokens": 8, "costs": "ideal"}
print(len(found.rows()), [bool(o.answer) for o in trefoil.sweep([point])])
print(verb.main(["--engine", "closed-form", "--gpus", "64", "--ep", "64", "--tokens", "8,16"]))
print(asked)
try:
    found.frame()
except ImportError as error:
    print(error)
print(asked)
"""


def test_only_a_data_frame_needs_pandas() -> None:
    """Blocked by a finder: whatever asks for pandas, however deep, is seen."""
    command = [sys.executable, "-c", WITHOUT_PANDAS]
    told = {**os.environ, "PYTHONPATH": str(Path(trefoil.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=told)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "4 [True]"  # LL and HT of two batches; a point of a sweep
    assert lines[-4:-2] == ["0", "[]"]  # the verb's table is above
    assert lines[-2].startswith("a data frame needs pandas") and lines[-1] == "['pandas']"


def test_bad_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tokens x is not like 8..64" in refusal(capsys, "--tokens", "x")
    assert "--context 0 is not like" in refusal(capsys, "--context", "0")
    assert "at most 16,777,216" in refusal(capsys, "--context", "99999999")
    training = refusal(capsys, "--load", "training", "--tokens", "8,16")
    assert "a search ranks steps: a training step's compute is not modelled" in training
    with pytest.raises(PlanError, match="mode"):
        trefoil.plan(mode="x", gpus=8, **CLOSED)
    with pytest.raises(PlanError, match="no-such"):
        trefoil.plan(no_such=3)


# ---- Fleets ----


def traffic(**changes: Any) -> fleet.Traffic:
    said = {"requests_per_s": 20.0, "input_tokens": 4000, "output_tokens": 1000}
    limits = {"max_ttft_ms": None, "max_step_ms": None, "utilisation": 0.8, "cached": 0.0}
    return fleet.Traffic(**{**said, **limits, **changes})


FLEET = ("--requests-per-s", "20", "--input-tokens", "4000", "--output-tokens", "1000")
FLEET += ("--ep", "32,64")


def test_a_fleet_does_its_traffic() -> None:
    code, text = told(*FLEET, "--gpu-hour", "2", "--json")
    data = json.loads(text)
    assert code == 0 and [p["load"] for p in data["parts"]] == ["prefill", "decode"]
    for part, tokens in zip(data["parts"], (4000, 1000), strict=True):
        c = part["configuration"]
        assert part["gpus"] == part["groups"] * c["ep"] and c["fits"]
        rate = part["gpus"] * c["tokens_per_second"]
        assert part["utilisation"] == pytest.approx(20 * tokens / rate)
        assert part["utilisation"] <= 0.85
    assert data["gpus"] == sum(p["gpus"] for p in data["parts"])
    assert data["usd_per_hour"] == 2 * data["gpus"]
    assert data["parts"][1]["configuration"]["context"] == 4500
    assert data["parts"][0]["configuration"]["mode"] == "ht"


def test_more_traffic_takes_more_and_cached_input_less() -> None:
    def gpus(*more: str) -> list[int]:
        return [p["gpus"] for p in json.loads(told(*FLEET, *more, "--json")[1])["parts"]]

    base = gpus()
    ten = gpus("--requests-per-s", "200")
    assert all(a < b <= 10 * a + 64 for a, b in zip(base, ten, strict=True))
    cached = gpus("--requests-per-s", "200", "--cached", "0.75")
    assert cached[0] < ten[0] and cached[1] == ten[1]
    assert cached[0] > ten[0] / 4, "what is computed sees what is cached"


def test_groups_that_cannot_win_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[int]] = {"prefill": set(), "decode": set()}
    sweep = Planner.sweep

    def counted(self: Planner, points: Any, label: str) -> Any:
        points = list(points)
        asked[self.load] |= {p["ep"] for p in points}
        return sweep(self, points, label)

    monkeypatch.setattr(Planner, "sweep", counted)
    few = json.loads(told(*FLEET[:-2], "--json")[1])
    for part in few["parts"]:
        enough = {8, 16, 32, 64, 128, 256} & set(range(part["gpus"] + 1))
        assert asked[part["load"]] == enough, "each that is no larger than what does it"
    monkeypatch.setattr(fleet, "takes_fewest", lambda *_: False)
    assert json.loads(told(*FLEET[:-2], "--json")[1]) == few
    assert all(sizes == {8, 16, 32, 64, 128, 256} for sizes in asked.values())


def test_limits_of_a_fleet_say_which_binds() -> None:
    code, text = told(*FLEET, "--max-ttft-ms", "20", "--max-step-ms", "5")
    assert code == 1 and "prefill: --max-ttft-ms 20 binds: " in text
    assert "decode: --max-step-ms 5 binds: " in text
    limits = [line.split("binds: ")[1].split()[0] for line in text.splitlines() if "binds" in line]
    code, _ = told(*FLEET, "--max-ttft-ms", limits[0], "--max-step-ms", limits[1])
    assert code == 0, "the nearest works"
    code, text = told(*FLEET, "--requests-per-s", "2000", "--gpus", "128")
    words = " ".join(text.split())
    assert code == 1 and "--gpus 128 binds: " in words
    rate = words.split("128 do about ")[1].split()[0]
    for part, (share, met) in {"fewer": (0.95, 0), "more": (1.05, 1)}.items():
        asked = ("--requests-per-s", str(float(rate) * share), "--gpus", "128")
        assert told(*FLEET, *asked)[0] == met, f"{part} requests than 128 GPUs do"


def test_larger_groups_than_the_gpus_may_be_what_does_it() -> None:
    free = json.loads(told(*FLEET[:-2], "--json")[1])
    for gpus, why in (("16", "16 hold no group of each load"), ("8", "8 hold no group of each")):
        code, text = told(*FLEET[:-2], "--gpus", gpus)
        words = " ".join(text.split())
        assert code == 1 and f"--gpus {gpus} binds: {free['gpus']} GPUs do it" in words
        assert why in words and "nothing fits" not in words


def test_what_is_assumed_stands_below() -> None:
    text = " ".join(told(*FLEET, "--attention-tp", "2")[1].split())
    assert "decode: the busiest GPU's experts have 1.11 of the mean (--imbalance)" in text
    assert "prefill: waits for unequal experts make a step 1.18 times" in text
    assert text.count("2 GPUs share a sequence's attention (--attention-tp)") == 2
    text = " ".join(told("--gpus", "64", "--ep", "64", "--tokens", "8,16")[1].split())
    assert "the busiest GPU's experts have 1.11 of the mean (--imbalance)" in text


def test_short_prompts_take_small_steps() -> None:
    short = ("--input-tokens", "500", "--max-ttft-ms")
    (prefill, _) = json.loads(told(*FLEET, *short, "400", "--json")[1])["parts"]
    assert prefill["configuration"]["tokens"] < 4096
    text = told(*FLEET, *short, "1")[1]
    nearest = text.split("--max-ttft-ms 1 binds: ")[1].split()[0]
    assert int(nearest) < 400, "of the smallest step"


def test_a_budget_is_a_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    paid = ("--gpu-hour", "2.5", "--budget-hour")
    text = told("--tokens", "8,16", "--mode", "ll", *paid, "163")[1]
    assert "65 GPUs of dgx-h100" in text.splitlines()[0]
    text = told("--tokens", "8,16", "--mode", "ll", "--gpus", "64", *paid, "9999")[1]
    assert "64 GPUs of dgx-h100" in text.splitlines()[0]
    code, text = told(*FLEET, "--requests-per-s", "2000", *paid, "320")
    words = " ".join(text.split())
    assert code == 1 and "--budget-hour 320 binds: " in words and "128 do about" in words
    assert "one GPU costs 2.5" in refusal(capsys, *paid, "2")
    assert "--budget-hour: the price of a GPU is not known" in refusal(capsys, *paid[2:], "9")


def test_bad_fleets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--output-tokens is missing" in refusal(capsys, *FLEET[:4])
    assert "--tokens is not of a fleet" in refusal(capsys, *FLEET, "--tokens", "8")
    assert "no traffic needs no fleet" in refusal(capsys, *FLEET, "--requests-per-s", "0")
    assert "a fleet needs a traffic" in refusal(capsys, "--utilisation", "0.5")
    assert "--utilisation 2: more than 0" in refusal(capsys, *FLEET, "--utilisation", "2")
    assert "--cached 1: a share" in refusal(capsys, *FLEET, "--cached", "1")


# ---- Commands ----


def configuration(mode: str, overlap: str) -> tuple[Configuration, Question]:
    searched = trefoil.plan(
        gpus=96, ep=96, mode=mode, tokens=32, kv_dtype="fp8", overlap=overlap, **CLOSED
    )
    (candidate,) = searched.candidates()
    return candidate.configuration, candidate.question


def test_commands_say_what_was_planned() -> None:
    text = command_of("vllm", *configuration("ll", "two-batch"))
    for words in (
        "vllm serve deepseek-ai/DeepSeek-V3",
        "--data-parallel-size 96 --data-parallel-size-local 8",
        "--all2all-backend deepep_low_latency",
        "--enable-dbo",
        '{"num_redundant_experts":32}',
        "--max-num-seqs 32 --max-model-len 4096",
        "--kv-cache-dtype fp8",
    ):
        assert words in text
    text = command_of("sglang", *configuration("ht", "none"), longest=9000)
    for words in (
        "--model-path deepseek-ai/DeepSeek-V3",
        "--tp-size 96 --attn-dp-size 96 --ep-size 96",
        "--deepep-mode normal",
        "--nnodes 12 --node-rank $NODE",
        "--ep-num-redundant-experts 32",
        "--context-length 9000",
    ):
        assert words in text
    assert "two-batch" not in text and "speculative" not in text
    assert "--moe-dense-tp-size 1 --enable-dp-lm-head" in text
    assert set(MODELS) == {path.stem for path in (ROOT / "models/moe").glob("*.json")}
    for name, model in MODELS.items():
        preset = json.loads((ROOT / f"models/moe/{name}.json").read_text())
        assert f"huggingface.co/{model}/" in preset["source"]
        assert (name in IN_FP8) == (preset["weight_bits"] == 8)
        assert (name in IN_MXFP4) == (preset["weight_bits"] == 4)


def test_commands_share_attention() -> None:
    options = {"gpus": 32, "ep": 32, "tokens": 32, "attention_tp": 4, "overlap": "none", **CLOSED}
    (c,) = trefoil.plan(mode="ll", **options).candidates()
    text = command_of("vllm", c.configuration, c.question)
    for words in (
        "--tensor-parallel-size 4",
        "--data-parallel-size 8 --data-parallel-size-local 2",
        "--data-parallel-start-rank $((NODE * 2))",
        "--max-num-seqs 128",
    ):
        assert words in text
    text = command_of("sglang", c.configuration, c.question)
    assert "--tp-size 32 --attn-dp-size 8 --ep-size 32" in text
    assert "--cuda-graph-max-bs-decode 128 --max-running-requests 1024" in text
    options |= {"cluster": "gb200-nvl72", "gpus": 64, "ep": 64, "attention_tp": 8}
    (c,) = trefoil.plan(mode="ll", **options).candidates()
    refused = command_of("vllm", c.configuration, c.question)
    assert refused == "# no vLLM command: --attention-tp 8: a host has 4 GPUs of a group"


def test_commands_say_weights_in_another_dtype() -> None:
    options = {"gpus": 8, "ep": 8, "mode": "ll", "tokens": 8, "weight_dtype": "fp8", **CLOSED}
    for moe, is_told in (("qwen3-30b-a3b", True), ("minimax-m2", False)):
        (c,) = trefoil.plan(moe=moe, **options).candidates()
        for engine in ("vllm", "sglang"):
            text = command_of(engine, c.configuration, c.question)
            assert ("--quantization fp8" in text) == is_told


def fp4_command(engine: str, **more: Any) -> str:
    options = {"gpus": 16, "ep": 16, "tokens": 64, "weight_dtype": "fp4", "overlap": "none", **more}
    options = {"cluster": "gb200-nvl72", "moe": "deepseek-v3", **options, **CLOSED}
    (c,) = trefoil.plan(**options).candidates()
    return command_of(engine, c.configuration, c.question)


def test_commands_of_nvfp4_weights() -> None:
    """A model that its publisher offers in fp8, in a rack of hosts of 4 GPUs."""
    text = fp4_command("sglang", mode="ll")
    assert text.startswith("# MODEL: deepseek-v3 with weights in nvfp4\nsglang serve")
    assert "--model-path $MODEL" in text and "--nnodes 4" in text
    assert "--moe-a2a-backend deepep --deepep-mode low_latency" in text
    assert "--quantization modelopt_fp4 --moe-runner-backend flashinfer_cutedsl" in text
    text = fp4_command("vllm", mode="ll")
    assert "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL=1 vllm serve $MODEL" in text
    assert "--all2all-backend deepep_low_latency --moe-backend flashinfer_cutedsl" in text
    assert "--data-parallel-size 16 --data-parallel-size-local 4" in text
    prefill = {"mode": "ht", "load": "prefill"}
    text = fp4_command("sglang", **prefill)
    assert "--moe-a2a-backend flashinfer --flashinfer-a2a-dispatch-type bf16" in text
    assert "--moe-runner-backend flashinfer_cutlass" in text and "deepep" not in text
    text = fp4_command("vllm", dispatch_dtype="fp4", **prefill)
    assert "--all2all-backend flashinfer_nvlink_one_sided --moe-backend flashinfer_trtllm" in text
    text = fp4_command("sglang", dispatch_dtype="fp4", **prefill)
    assert "--flashinfer-a2a-dispatch-type nvfp4" in text
    text = fp4_command("vllm", dispatch_dtype="fp4", mode="ll")
    assert "VLLM_DEEPEPLL_NVFP4_DISPATCH=1 vllm serve" in text
    text = fp4_command("sglang", dispatch_dtype="fp4", mode="ll")
    assert "SGLANG_MOE_NVFP4_DISPATCH=1 " in text
    text = fp4_command("vllm", cluster="dgx-b200", **prefill)
    assert "--all2all-backend deepep_high_throughput --moe-backend flashinfer_trtllm" in text


@pytest.mark.parametrize(
    ("engine", "more", "words"),
    [
        ("vllm", {"cluster": "dgx-h100", "mode": "ll"}, "dgx-h100 does not state gpu_fp4_tflops"),
        ("sglang", {"cluster": "h800", "mode": "ht"}, "h800 does not state gpu_fp4_tflops"),
        ("sglang", {"cluster": "dgx-b200", "mode": "ht"}, "one NVLink domain, EP 16 takes 2"),
        ("sglang", {"mode": "ht", "overlap": "two-batch"}, "--overlap none,shared"),
        (
            "vllm",
            {"mode": "ht", "overlap": "two-batch", "dispatch_dtype": "fp4"},
            "does not run with --enable-dbo",
        ),
        ("sglang", {"mode": "ll", "drafts": 1}, "--drafts 0"),
        ("vllm", {"mode": "ll", "dispatch_dtype": "fp8"}, "--dispatch-dtype bf16 or fp4"),
        ("vllm", {"mode": "ht", "load": "prefill"}, "--dispatch-dtype fp4"),
        (
            "vllm",
            {"cluster": "dgx-b200", "mode": "ht", "dispatch_dtype": "fp4"},
            "--dispatch-dtype bf16",
        ),
        ("sglang", {"moe": "gpt-oss-120b", "mode": "ll"}, "mxfp4 experts do not run over DeepEP"),
        ("vllm", {"mode": "ll", "gpus": 6, "ep": 6}, "EP 6 does not fill hosts of 4 GPUs"),
    ],
)
def test_what_an_engine_has_no_command_for(engine: str, more: dict[str, Any], words: str) -> None:
    text = fp4_command(engine, **more)
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    assert text.startswith(f"# no {name} command: ") and words in text and "\n" not in text


def test_commands_of_weights_that_are_published() -> None:
    text = fp4_command("vllm", moe="gpt-oss-120b", cluster="dgx-h100", gpus=8, ep=8, mode="ll")
    assert "vllm serve openai/gpt-oss-120b" in text and "--quantization" not in text
    text = fp4_command("vllm", mode="ll", cluster="dgx-h100", gpus=96, ep=96, weight_dtype="bf16")
    assert text.startswith("# MODEL: deepseek-v3 with weights in bf16\nvllm serve $MODEL")


def test_a_model_file_does_not_say_which_fp4(tmp_path: Path) -> None:
    model = json.loads((ROOT / "models/moe/gpt-oss-20b.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**model, "name": "mine"}))
    text = fp4_command("vllm", moe=str(path), gpus=8, ep=8, mode="ll")
    assert "whether the fp4 weights of mine are nvfp4 or mxfp4 is not known" in text


def test_fp4_products_are_as_fast_as_the_cluster_says() -> None:
    options = {"gpus": 8, "mode": "ht", "load": "prefill", "weight_dtype": "fp4"}
    (b200,) = trefoil.plan(cluster="dgx-b200", tokens="4096", **options, **CLOSED).candidates()
    assert b200.question.terms.fp4_rate == 2 and b200.question.gpu.fp4_tflops == 9000
    (h100,) = trefoil.plan(cluster="hgx-h200", tokens="4096", **options, **CLOSED).candidates()
    assert h100.question.terms.fp4_rate == 1


def test_the_verb_prints_commands() -> None:
    code, text = told("--gpus", "64", "--ep", "64", "--no-crossover", "--commands", "vllm")
    assert code == 0 and "\nvllm serve deepseek-ai/DeepSeek-V3" in text
    code, text = told(*FLEET, "--commands", "sglang")
    assert text.count("sglang serve") == 2 and "--context-length 5000" in text
    code, text = told(*FLEET, "--commands", "vllm")
    assert text.count("--kv-transfer-config") == 2, "keys and values move from prefill to decode"


def test_commands_say_drafts_overlap_and_tokens() -> None:
    options = ("--gpus", "64", "--ep", "64", "--mode", "ll", "--tokens", "96", "--drafts", "2")
    options += ("--context", "2048", "--overlap", "single-batch", "--no-crossover", "--commands")
    text = told(*options, "sglang")[1]
    assert "--speculative-num-steps 2 --speculative-num-draft-tokens 3" in text
    assert "--enable-single-batch-overlap" in text
    assert "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=288" in text, "96 sequences of 3 rows"
    text = told(*options, "vllm")[1]
    assert '{"method":"mtp","num_speculative_tokens":2}' in text


def test_latency_with_drafts_is_of_an_output_token() -> None:
    options = {"gpus": 64, "ep": 64, "mode": "ll", "tokens": "32,64", "drafts": 1, **CLOSED}
    for row in trefoil.plan(**options).rows():
        assert row["latency_seconds"] == pytest.approx(row["tokens"] / row["tokens_per_second"])
    plain = trefoil.plan(**{**options, "drafts": 0}).rows()
    drafted = trefoil.plan(**options).rows()
    for a, b in zip(plain, drafted, strict=True):
        # A layer more of 61: its experts, attention, shared experts, projection, keys and values.
        assert b["memory_bytes"] - a["memory_bytes"] > 0.4e9
    words = ("--gpus", "64", "--ep", "64", "--mode", "ll", "--tokens", "64", "--drafts", "1")
    said = told(*words, "--no-crossover")[1]
    rate = float(said.split(" tokens/s a GPU")[0].split()[-1].replace(",", ""))
    latency = float(said.split(" ms per output token")[0].split()[-1])
    assert latency == pytest.approx(64 / rate * 1e3, rel=0.01)
    part = json.loads(told(*FLEET, "--drafts", "1", "--json")[1])["parts"][1]
    c = part["configuration"]
    of_a_step = c["latency_seconds"] / c["step_seconds"]
    step = c["step_high_seconds"] or c["step_seconds"]
    assert of_a_step < 1 and part["latency_seconds"] == pytest.approx(step * of_a_step)


def test_a_search_that_finds_nothing_says_what_binds() -> None:
    code, text = told("--gpus", "8", "--tokens", "64,128")
    words = " ".join(text.split())
    assert code == 1 and "memory of 72 GB: all need more, at least" in words
    code, text = told("--gpus", "64", "--tokens", "256,512", "--max-step-ms", "5")
    words = " ".join(text.split())
    assert code == 1 and "--max-step-ms 5: all need more, at least" in words


def test_what_is_not_of_a_search_or_fleet_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--rail-fail: a what-if is of one plan"
    assert words in refusal(capsys, "--tokens", "8,16", "--rail-fail", "0")
    assert words in refusal(capsys, *FLEET, "--rail-fail", "0")
    assert "--gpus abc: expected one number" in refusal(capsys, *FLEET, "--gpus", "abc")
    with pytest.raises(PlanError, match="requests_per_s: of the command alone"):
        trefoil.plan(requests_per_s=4.0, **CLOSED)
    with pytest.raises(PlanError, match="output: of the command alone"):
        trefoil.plan(gpus=8, output="x", **CLOSED)
