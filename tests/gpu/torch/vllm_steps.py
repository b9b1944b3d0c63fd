#!/usr/bin/env python3
"""vLLM 0.26 serves a mixture of experts on GPUs with expert parallelism: greedy tokens beside one
GPU's, the time of a step, and what of it the GPU spends on communication between ranks.

    python3 tests/gpu/torch/vllm_steps.py [--steps ll_bf16,agrs_bf16] [--nccl DIR] [--out FILE]

A Qwen3-MoE with random weights is made first. A step is a run of vLLM: its name says backend and
datatype; with deep_ep vLLM goes by DeepEP's interface, else natively (TREFOIL_VLLM); steps with dbo
overlap two micro batches and run where --steps names them.

Tokens: 16 prompts, against one GPU in the same datatype. Decode: so many requests a rank, the
median of the engine's steps; then further steps under torch's profiler, which says how long kernels
of communication ran, on each rank, waiting for peers included; a profiled step takes longer. Of
such a kernel's launches in a step, one a layer or more, some wait for a late rank: beside the sum
there is one with each launch at its median over the steps, and the first, in which hosts meet, as
long as the median of the others. Prompts: as many of 512 tokens at once, until the last one's first
token. Times are the slower rank's; the profile is that of the rank whose kernels of communication
ran for the shortest time: it waits least.

Needs vLLM, transformers, a GPU a rank, and the library (docs/use_vllm.md). --nccl: where
libnccl.so.2 is that all processes load first. --tiny: a small model, on vLLM's CPU platform, too,
to try this program out. Ranks may share a GPU, under CUDA's MPS. Exit code 1: a run failed, or
float32 tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import vllm_ranks

COMMUNICATION = re.compile(
    r"\b(far(Ht)?)?(dispatch|combine|partial|update|drain)Kernel\b|\bnccl(Dev|Symk?)?Kernel"
)
GREEDY_PROMPTS, GREEDY_LENGTH, GREEDY_TOKENS = 16, 24, 32
WARM, MEASURED, PROFILED = 6, 120, 20  # steps of decode
LOADS = (1, 32, 128)  # requests a rank


@dataclass(frozen=True)
class Step:
    backend: str | None  # None: one GPU
    dtype: str
    decodes: bool = False
    fills: bool = False  # whole prompts
    dbo: bool = False  # two micro batches, from 32 tokens of decode or 512 of prompts on
    way: str = "native"  # TREFOIL_VLLM


OURS = "deepep_low_latency", "deepep_high_throughput"
STEPS = {
    "single_bf16": Step(None, "bfloat16", True, True),
    "single_fp32": Step(None, "float32"),
    "ll_fp32": Step("deepep_low_latency", "float32"),
    "ht_fp32": Step("deepep_high_throughput", "float32"),
    "ll_bf16": Step("deepep_low_latency", "bfloat16", decodes=True),
    "ht_bf16": Step("deepep_high_throughput", "bfloat16", fills=True),
    "ll_fp32_deep_ep": Step("deepep_low_latency", "float32", way="deep_ep"),
    "ll_bf16_deep_ep": Step("deepep_low_latency", "bfloat16", decodes=True, way="deep_ep"),
    "ht_bf16_deep_ep": Step("deepep_high_throughput", "bfloat16", fills=True, way="deep_ep"),
    "agrs_bf16": Step("allgather_reducescatter", "bfloat16", True, True),
    "agrs_fp32": Step("allgather_reducescatter", "float32"),
    "ll_bf16_dbo": Step("deepep_low_latency", "bfloat16", decodes=True, dbo=True),
    "ht_bf16_dbo": Step("deepep_high_throughput", "bfloat16", fills=True, dbo=True),
}


@dataclass(frozen=True)
class Size:
    """The model and the work; hidden in elements, prompts in tokens."""

    hidden: int
    layers: int
    heads: int
    width: int  # of an expert
    experts: int
    vocabulary: int
    prompt: int
    loads: tuple[int, ...]


WHOLE = Size(7168, 4, 32, 512, 64, 8192, 512, LOADS)
TINY = Size(96, 2, 4, 32, 8, 256, 16, (1, 4))


def make_model(folder: Path, size: Size) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3MoeConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(2, size.heads // 8),
        head_dim=128 if size.heads > 8 else 32,
        intermediate_size=size.width,
        moe_intermediate_size=size.width,
        num_experts=size.experts,
        num_experts_per_tok=min(8, size.experts // 2),
        vocab_size=size.vocabulary,
        max_position_embeddings=1024,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # experts that weigh
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


# ---- A rank -------------------------------------------------------------------------------------


def engine_of(folder: str, step: Step, size: Size, on_gpu: bool, ranks: int) -> Any:
    import torch
    from vllm import LLM

    more: dict[str, Any] = {}
    if step.backend:
        more = {"enable_expert_parallel": True, "all2all_backend": step.backend}
        more["enable_dbo"] = step.dbo
    graphs = on_gpu and step.decodes
    if on_gpu:
        more |= {"attention_backend": "TRITON_ATTN", "disable_custom_all_reduce": True}
        more["gpu_memory_utilization"] = 0.6 * min(1.0, torch.cuda.device_count() / ranks)
    compilation: dict[str, Any] = {"mode": 0}
    if graphs:
        compilation |= {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(size.loads),
        }
    low_latency = step.backend == "deepep_low_latency"
    return LLM(
        model=folder,
        dtype=step.dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(size.loads),
        max_num_batched_tokens=2 * max(size.loads) if low_latency else 8192,
        enforce_eager=not graphs,
        compilation_config=compilation,
        enable_prefix_caching=False,
        seed=0,
        **more,
    )


def prompts_of(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(2, vocabulary, (count, length), generator=draw).tolist()
    return found


def requests(engine: Any, prompts: list[list[int]], tokens: int) -> None:
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt}, how)


def steps(engine: Any) -> Iterator[float]:
    """Runs the requests; yields each step's milliseconds."""
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        engine.step()
        yield (time.perf_counter() - begin) * 1e3


def greedy(llm: Any, rank: int, ranks: int, vocabulary: int) -> list[Any]:
    """Tokens of this rank's prompts, with their log probabilities."""
    from vllm import SamplingParams

    prompts = prompts_of(GREEDY_PROMPTS, GREEDY_LENGTH, vocabulary, 2)[rank::ranks]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(
            max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
        ),
        use_tqdm=False,
    )
    return [
        [
            list(output.outputs[0].token_ids),
            [one.logprob for place in output.outputs[0].logprobs for one in place.values()],
        ]
        for output in outputs
    ]


def begin_profile(worker: Any) -> None:
    """In the process that drives the GPU: with several ranks it is not the engine's."""
    import torch

    torch.cuda.synchronize()
    worker.steps_profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.steps_profile.start()


def end_profile(worker: Any) -> dict[str, list[float]]:
    """Milliseconds of each launch since begin_profile, by kernel."""
    import torch

    torch.cuda.synchronize()
    worker.steps_profile.stop()
    found: dict[str, list[float]] = {}
    for event in worker.steps_profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    return found


def launches_of(launches: dict[str, list[float]], count: int) -> dict[str, list[float]]:
    """By kernel of communication: milliseconds of its launches in a step, in turn, each the median
    over so many steps. Empty where steps had not all as many."""
    found = {name: of for name, of in launches.items() if COMMUNICATION.search(name)}
    if any(len(of) % count for of in found.values()):
        return {}
    return {
        name: [statistics.median(of[i :: len(of) // count]) for i in range(len(of) // count)]
        for name, of in found.items()
    }


def kernels_of(launches: dict[str, list[float]], count: int) -> dict[str, float]:
    """Milliseconds a step by kernel, the longest first."""
    ordered = sorted(launches.items(), key=lambda kernel: -sum(kernel[1]))
    if not ordered:
        raise RuntimeError("the profile has no kernel")
    return {name: sum(of) / count for name, of in ordered}


def decode(llm: Any, load: int, size: Size, on_gpu: bool) -> dict[str, Any]:
    """Of `load` requests: milliseconds of steps; of further ones, what the GPU did."""
    requests(
        llm.llm_engine,
        prompts_of(load, 8, size.vocabulary, 3),
        WARM + MEASURED + PROFILED + 2,
    )
    times: list[float] = []
    launches: dict[str, list[float]] = {}
    for ms in steps(llm.llm_engine):
        times.append(ms)
        if on_gpu and len(times) == WARM + MEASURED:
            llm.collective_rpc(begin_profile)
        if on_gpu and len(times) == WARM + MEASURED + PROFILED:
            launches = llm.collective_rpc(end_profile)[0]
    measured = sorted(times[WARM : WARM + MEASURED])
    tenth = len(measured) // 10
    found: dict[str, Any] = {
        "ms": statistics.median(measured),
        "p10_p90_n": [measured[tenth], measured[-1 - tenth], len(measured)],
    }
    if on_gpu:
        found["kernels_ms"] = kernels_of(launches, PROFILED)
        found["launches_ms"] = launches_of(launches, PROFILED)
    return found


def fill(llm: Any, load: int, size: Size) -> dict[str, Any]:
    """Milliseconds until `load` prompts have their first token."""
    times = []
    for seed in (4, 5, 6):  # the first warms up
        requests(llm.llm_engine, prompts_of(load, size.prompt, size.vocabulary, seed), 1)
        times.append(sum(steps(llm.llm_engine)))
    return {"ms": statistics.median(times[1:])}


def rank_main(options: argparse.Namespace) -> None:
    import torch

    step, size = STEPS[options.step], TINY if options.tiny else WHOLE
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(options.rank % torch.cuda.device_count())
    llm = engine_of(options.folder, step, size, on_gpu, options.ranks)
    found: dict[str, Any] = {"tokens": greedy(llm, options.rank, options.ranks, size.vocabulary)}
    if step.decodes:
        found["decode"] = {n: decode(llm, n, size, on_gpu) for n in size.loads}
    if step.fills:
        found["prefill"] = {n: fill(llm, n, size) for n in size.loads}
    if on_gpu:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["device"] = torch.cuda.get_device_name()
    vllm_ranks.tell(found)


# ---- All ranks ----------------------------------------------------------------------------------


def communication(kernels: dict[str, float]) -> float:
    """Milliseconds."""
    return sum(ms for name, ms in kernels.items() if COMMUNICATION.search(name))


def without_first(launches: dict[str, list[float]]) -> float:
    """Milliseconds of a step's communication if its first launches wait no longer than others."""
    return sum(sum(of[1:]) + statistics.median(of[1:] or of) for of in launches.values())


def time_row(of_ranks: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The slower rank's time, tokens a second of all ranks, and what ran on the GPUs."""
    one = max(of_ranks, key=lambda of: of["ms"])
    row: dict[str, Any] = {
        "ms": round(one["ms"], 3),
        "tokens_per_s": round(tokens / one["ms"] * 1e3),
    }
    if "p10_p90_n" in one:
        row["p10_p90_n"] = [round(v, 3) for v in one["p10_p90_n"]]
    if "kernels_ms" in one:
        least = min(of_ranks, key=lambda of: communication(of["kernels_ms"]))
        kernels = least["kernels_ms"]
        row["communication_ms"] = round(communication(kernels), 3)
        row["communication_of_ranks_ms"] = [
            round(communication(of["kernels_ms"]), 3) for of in of_ranks
        ]
        if launches := least["launches_ms"]:
            row["communication_without_first_ms"] = round(without_first(launches), 3)
            row["launches_us"] = {
                name[:60]: [round(1e3 * ms, 1) for ms in of] for name, of in launches.items()
            }
        row["kernels_ms"] = round(sum(kernels.values()), 3)
        row["longest_ms"] = {name[:80]: round(ms, 3) for name, ms in list(kernels.items())[:8]}
    return row


def compared(tokens: list[Any], alone: list[Any]) -> dict[str, Any]:
    """Greedy tokens beside those of one GPU."""
    pairs = list(zip(tokens, alone, strict=True))
    apart = [abs(a - b) for one, other in pairs for a, b in zip(one[1], other[1], strict=True)]
    before = 0
    for one, other in pairs:
        same = [a == b for a, b in zip(one[0], other[0], strict=True)]
        before += same.index(False) if False in same else len(same)
    return {
        "equal": all(one[0] == other[0] for one, other in pairs),
        "sequences": len(pairs),
        "equal_sequences": sum(one[0] == other[0] for one, other in pairs),
        "tokens_before_difference": before,
        "of": sum(len(one[0]) for one in tokens),
        "logprob_max_difference": round(max(apart), 6),
        "logprob_mean_difference": round(statistics.mean(apart), 6),
    }


def row_of(name: str, ranks: int, found: list[dict[str, Any]], size: Size) -> dict[str, Any]:
    step = STEPS[name]
    row: dict[str, Any] = {"step": name, "ranks": ranks, "backend": step.backend}
    row |= {"dtype": step.dtype, "nccl": found[0].get("nccl")}
    if step.backend in OURS:
        row["way"] = step.way
    for kind, per in (("decode", 1), ("prefill", size.prompt)):
        if kind in found[0]:
            row[kind] = {
                load: time_row([of[kind][load] for of in found], int(load) * per * ranks)
                for load in found[0][kind]
            }
    return row


def run(name: str, options: argparse.Namespace, folder: str) -> tuple[dict[str, Any], list[Any]]:
    """A step's row and its tokens, by prompt."""
    import torch

    step, size = STEPS[name], TINY if options.tiny else WHOLE
    ranks = options.ranks if step.backend else 1
    ours = step.backend in OURS
    on_gpu = torch.cuda.is_available()
    settings = {"TREFOIL_EP_LIBRARY": ("gpu" if on_gpu else "cpu") if ours else ""}
    settings["TREFOIL_VLLM"] = step.way
    if not on_gpu:
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if options.nccl:
        path = str(Path(options.nccl) / "libnccl.so.2")
        settings |= {"LD_PRELOAD": path, "VLLM_NCCL_SO_PATH": path, "NCCL_NVLS_ENABLE": "0"}
    arguments = ["--step", name, *(["--tiny"] if options.tiny else []), folder]
    found = vllm_ranks.run(__file__, arguments, ranks, settings, options.limit)
    tokens: list[Any] = [None] * GREEDY_PROMPTS
    for rank, of_rank in enumerate(found):
        tokens[rank::ranks] = of_rank["tokens"]
    return row_of(name, ranks, found, size), tokens


def all_steps(options: argparse.Namespace, folder: str) -> tuple[list[dict[str, Any]], bool]:
    rows: list[dict[str, Any]] = []
    alone: dict[str, list[Any]] = {}
    failed = False
    for name in options.steps.split(","):
        begin = time.monotonic()
        try:
            row, tokens = run(name, options, folder)
        except vllm_ranks.RankError as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            failed = True
            continue
        dtype = STEPS[name].dtype
        if STEPS[name].backend is None:
            alone[dtype] = tokens
        elif dtype in alone:
            row["tokens"] = compared(tokens, alone[dtype])
            failed = failed or (dtype == "float32" and not row["tokens"]["equal"])
        rows.append(row)
        print(f"{name} {time.monotonic() - begin:.0f} s {json.dumps(row)}", flush=True)
    return rows, failed


def main() -> int:
    about = argparse.ArgumentParser(description="vLLM with expert parallelism on GPUs")
    about.add_argument("--steps", default=",".join(n for n in STEPS if not STEPS[n].dbo))
    about.add_argument("--ranks", type=int, default=2)
    about.add_argument("--limit", type=float, default=240.0, help="seconds of a step")
    about.add_argument("--nccl", help="folder of libnccl.so.2")
    about.add_argument("--out", type=Path, help="JSON file of the rows")
    about.add_argument("--tiny", action="store_true")
    about.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    about.add_argument("--step", help=argparse.SUPPRESS)
    about.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = about.parse_args()
    if options.rank is not None:
        rank_main(options)
        return 0
    unknown = [name for name in options.steps.split(",") if name not in STEPS]
    if unknown:
        about.error(f"no step {unknown[0]}; steps are {', '.join(STEPS)}")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        make_model(Path(folder), TINY if options.tiny else WHOLE)
        print(f"model {time.monotonic() - begin:.0f} s", flush=True)
        rows, failed = all_steps(options, folder)
    if options.out:
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if "--rank" in sys.argv and os.environ.get("TREFOIL_EP_LIBRARY"):  # as the wheel's plugin does
    import trefoil.hosts.vllm

    trefoil.hosts.vllm.register()
if __name__ == "__main__":
    sys.exit(main())
