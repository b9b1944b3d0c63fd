#!/usr/bin/env python3
"""Trains a small mixture of experts of transformers on the bytes of a text, on the CPU, and prints
the loss of each step.

    python3 tests/examples/train_transformers.py                         # one process
    torchrun --nproc-per-node 2 tests/examples/train_transformers.py     # FSDP2 and EP of trefoil

Every rank has a part of each step's batch, which is the same for any number of ranks that divides
it. Needs torch, accelerate and transformers 5.22 or newer. --text: by default a license that
Debian installs.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import trefoil.hosts.transformers
from trefoil.torch import RoutingRecorder

BATCH, LENGTH = 8, 48


def save_model(folder: Path, experts: int, topk: int) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=topk,
        norm_topk_prob=True,
        max_position_embeddings=LENGTH,
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
            model(input_ids=text[start : start + 2 * LENGTH].view(2, LENGTH))
    told = f"{options.steps} steps of training on {options.text}, {options.experts} experts"
    recorder.save(options.record, {"model": "tests/examples/train_transformers.py", "after": told})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--record", help="writes the last layer's routing after training: a trace")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    folder = (
        Path(tempfile.gettempdir()) / f"trefoil-model-{os.environ.get('MASTER_PORT', os.getpid())}"
    )
    more = {}
    if ranks > 1:
        dist.init_process_group("gloo")
        trefoil.hosts.transformers.register()
        more["distributed_config"] = DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation="trefoil"
        )
    if rank == 0:
        save_model(folder, options.experts, options.topk)
    if ranks > 1:
        dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
        **more,
    )
    model.train()
    text = torch.tensor(list(Path(options.text).read_bytes()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draw)
        batch = torch.stack([text[s : s + LENGTH] for s in starts]).chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        total = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {float(total):.5f}", flush=True)
    if options.record:
        record(model, text, options)
    if ranks > 1:
        trefoil.hosts.transformers.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
