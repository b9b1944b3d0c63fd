#!/usr/bin/env python3
"""Trains a small mixture of experts of transformers on the bytes of a text and prints the loss of
each step.

    python3 tests/examples/train_transformers.py                         # one process
    torchrun --nproc-per-node 2 tests/examples/train_transformers.py     # FSDP2 and EP of trefoil
    TREFOIL_EP_LIBRARY=gpu torchrun --nproc-per-node 2 tests/examples/train_transformers.py \
        --device cuda                                                    # on GPUs
    torchrun --nproc-per-node 2 tests/examples/train_transformers.py --ep all_to_all  # its own EP

Every rank has a part of each step's batch, which is the same for any number of ranks that divides
it. Needs torch, accelerate and transformers 5.22 or newer. --text: by default a license that
Debian installs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import trefoil.hosts.transformers
from trefoil.torch import RoutingRecorder

BATCH, LENGTH = 8, 48


def save_model(folder: Path, experts: int, topk: int, wide: int) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64 * wide,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 * wide,
        intermediate_size=128 * wide,
        moe_intermediate_size=32 * wide,
        num_experts=experts,
        num_experts_per_tok=topk,
        norm_topk_prob=True,
        max_position_embeddings=4096,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


def record(model: torch.nn.Module, text: torch.Tensor, options: argparse.Namespace) -> None:
    """Four steps of two pieces of text that follow each other, in each rank's part of the text."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    layer = model.model.layers[-1].mlp.experts
    model.eval()
    with torch.no_grad(), RoutingRecorder(layer, options.experts) as recorder:
        for step in range(4):
            start = len(text) // ranks * rank + 2 * step * LENGTH
            model(input_ids=text[start : start + 2 * LENGTH].view(2, LENGTH).to(options.device))
    told = f"{options.steps} steps of training on {options.text}, {options.experts} experts"
    recorder.save(options.record, {"model": "tests/examples/train_transformers.py", "after": told})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--record", help="writes the last layer's routing after training: a trace")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ep", default="trefoil", help="or one of transformers: all_to_all")
    parser.add_argument("--batch", type=int, default=BATCH, help="of all ranks")
    parser.add_argument("--length", type=int, default=LENGTH, help="bytes of a piece of text")
    parser.add_argument("--wide", type=int, default=1, help="hidden sizes are so many times 64")
    parser.add_argument("--bf16", action="store_true", help="parameters and rows in bfloat16")
    parser.add_argument("--json", help="writes losses and the time of each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    if cuda:
        if not torch.cuda.is_available():
            print("skipped: needs a GPU")
            return 77
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    folder = (
        Path(tempfile.gettempdir()) / f"trefoil-model-{os.environ.get('MASTER_PORT', os.getpid())}"
    )
    more = {}
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        trefoil.hosts.transformers.register()
        more["distributed_config"] = DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation=options.ep
        )
    if rank == 0:
        save_model(folder, options.experts, options.topk, options.wide)
    if ranks > 1:
        dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if options.bf16 else torch.float32,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
        **more,
    )
    model.to(options.device).train()
    text = torch.tensor(list(Path(options.text).read_bytes()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / options.wide)
    losses, seconds = [], []
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - options.length, (options.batch,), generator=draw)
        pieces = torch.stack([text[s : s + options.length] for s in starts])
        batch = pieces.chunk(ranks)[rank].to(options.device)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().float() / ranks
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total))
        seconds.append(time.perf_counter() - begin)
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.5f}", flush=True)
    if options.json and rank == 0:
        found = {"options": vars(options), "ranks": ranks, "losses": losses, "seconds": seconds}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.record:
        record(model, text, options)
    if ranks > 1:
        trefoil.hosts.transformers.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
