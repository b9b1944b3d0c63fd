"""Routing recorded from a torch model is a trace that the command reads. Needs torch."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ep_needs  # noqa: F401
from trefoil import ep
from trefoil.torch import RoutingRecorder

EXPERTS, TOPK, HIDDEN = 6, 2, 8


class Experts(torch.nn.Module):
    """What a host's experts are given."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states * top_k_weights.sum(1, keepdim=True)


def ids_of(step: int, tokens: int) -> torch.Tensor:
    draw = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(step))
    return draw.argsort(1)[:, :TOPK]


def record(path: Path, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    experts, all_ids = Experts(), []
    with RoutingRecorder(experts, EXPERTS) as recorder:
        for step, tokens in enumerate(sizes):
            ids = ids_of(step, tokens)
            ids[-1, -1] = EXPERTS  # a host's mark for no expert
            weights = torch.full(ids.shape, 0.25 * (step + 1))
            experts(torch.randn(tokens, HIDDEN), ids, top_k_weights=weights)
            all_ids.append(torch.where(ids == EXPERTS, -1, ids))
    experts(torch.randn(1, HIDDEN), ids_of(9, 1), torch.ones(1, TOPK))  # after its end
    recorder.save(path, {"model": "a test"})
    return all_ids


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    ids = record(path, (5, 1, 7))
    with np.load(path) as found:
        assert found["offsets"].tolist() == [[0, 5], [5, 6], [6, 13]]
        assert np.array_equal(found["topk_idx"], torch.cat(ids).numpy())
        assert found["topk_weights"][5].tolist() == [0.5, 0.5]
    program = os.environ.get("TREFOIL_PROGRAM")
    if not program:
        pytest.skip("TREFOIL_PROGRAM is not set (ctest sets it)")
    done = subprocess.run(
        [program, "trace", "describe", str(path)], capture_output=True, text=True, check=True
    )
    assert "1 ranks (1 per node), top-2 of 6 experts; 3 steps, 13 tokens, 1 to 7" in done.stdout


def rank_main(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    record(folder / "of_both.npz", (3 + rank, 2))
    dist.destroy_process_group()


def test_ranks(tmp_path: Path) -> None:
    """A rank of the trace for each rank of the process group."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, tmp_path)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, 0]
    with np.load(tmp_path / "of_both.npz") as found:
        assert found["offsets"].tolist() == [[0, 3, 7], [7, 9, 11]]


def test_bad_use(tmp_path: Path) -> None:
    experts = Experts()
    with RoutingRecorder(experts, EXPERTS) as recorder:
        with pytest.raises(ep.InvalidArgumentError, match="0 tensors of integers"):
            experts(torch.randn(1, HIDDEN), torch.ones(1, TOPK), torch.ones(1, TOPK))
        with pytest.raises(ep.InvalidUsageError, match=r"recorded \[0\] calls"):
            recorder.save(tmp_path / "none.npz")
        experts(torch.randn(2, HIDDEN), ids_of(0, 2), torch.ones(2, TOPK))
        experts(torch.randn(2, HIDDEN), ids_of(0, 2)[:, :1], torch.ones(2, 1))
        with pytest.raises(ep.InvalidUsageError, match=r"have \[1, 2\] experts a token"):
            recorder.save(tmp_path / "none.npz")
    assert list(tmp_path.iterdir()) == []


def test_own_finder(tmp_path: Path) -> None:
    """Two tensors of integers: the caller says which."""
    linear = torch.nn.Identity()
    names = torch.zeros(3, TOPK, dtype=torch.int64)
    with RoutingRecorder(linear, EXPERTS, lambda args, _: (args[1], None)) as recorder:
        with pytest.raises(IndexError):
            linear(names)
        recorder.steps.clear()
        linear.forward = lambda *args: args[0]
        linear(names, ids_of(1, 3))
    recorder.save(tmp_path / "own.npz")
    with np.load(tmp_path / "own.npz") as found:
        assert np.array_equal(found["topk_idx"], ids_of(1, 3).numpy())
        assert "topk_weights" not in found.files
