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
    told = describe(path)
    assert "1 ranks (1 per node), top-2 of 6 experts; 3 steps, 13 tokens, 1 to 7" in told


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


def describe(path: Path) -> str:
    program = os.environ.get("TREFOIL_PROGRAM")
    if not program:
        pytest.skip("TREFOIL_PROGRAM is not set (ctest sets it)")
    command = [program, "trace", "describe", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_types_of_ids(tmp_path: Path, dtype: str) -> None:
    module, ids = torch.nn.Identity(), ids_of(1, 3)
    with RoutingRecorder(module, EXPERTS) as recorder:
        module(ids.to(getattr(torch, dtype)))
    recorder.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as found:
        assert np.array_equal(found["topk_idx"], ids.numpy())


def test_calls_without_tokens(tmp_path: Path) -> None:
    """Steps like others; a trace of nothing else is refused."""
    module, none = torch.nn.Identity(), torch.zeros(0, TOPK, dtype=torch.int64)
    with RoutingRecorder(module, EXPERTS) as recorder:
        module(none)
        with pytest.raises(ep.InvalidUsageError, match="the 1 calls had no token"):
            recorder.save(tmp_path / "trace.npz")
        assert not (tmp_path / "trace.npz").exists()
        module(ids_of(1, 3))
        module(none)
    recorder.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as found:
        assert found["offsets"].tolist() == [[0, 0], [0, 3], [3, 3]]
    assert "3 steps, 3 tokens, 0 to 3 a rank and step, none 2 times" in describe(
        tmp_path / "trace.npz"
    )


NAN, INF = float("nan"), float("inf")
IDS = torch.tensor([[0, 1], [2, 3]])
REFUSED: dict[str, tuple[object, str]] = {
    "twice": ((torch.tensor([[0, 1], [3, 3]]), None), r"call 1, token 1: the experts are \[3, 3\]"),
    "nan": ((IDS, torch.tensor([[1, 1], [NAN, 1]])), r"call 1, token 1: the weights are \[nan, 1"),
    "inf": ((IDS, torch.full((2, 2), -INF)), r"call 1, token 0: the weights are \[-inf, -inf"),
    "too large": (
        (IDS, torch.full((2, 2), 1e300, dtype=torch.float64)),
        "call 1, token 0: the weights",
    ),
    "K = 0": ((IDS[:, :0], None), "K is 0, expected 1 to 1024"),
    "no pair": (IDS, "find: expected a pair"),
    "nothing": (None, "find: expected a pair"),
    "list": (([[0, 1]], None), "ids: found list"),
    "floats": ((IDS.float(), None), r"ids: found float32 \[2, 2\], expected integers"),
    "one dimension": ((IDS[0], None), r"ids: found int64 \[2\]"),
    "three dimensions": ((IDS[None], None), r"ids: found int64 \[1, 2, 2\]"),
    "weights": ((IDS, torch.ones(3)), r"weights: found float32 \[3\], expected \[2, 2\]"),
    "list of weights": ((IDS, [1.0]), "weights: found list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_trace(tmp_path: Path, name: str) -> None:
    """What no trace holds is refused where it is recorded; the calls before and after are one."""
    gives, match = REFUSED[name]
    module = torch.nn.Identity()
    with RoutingRecorder(module, EXPERTS, lambda args, _: args[0]) as recorder:
        module((IDS, None))
        with pytest.raises(ep.InvalidArgumentError, match=match):
            module(gives)
        module((IDS, None))
    recorder.save(tmp_path / "trace.npz")
    assert "2 steps, 4 tokens" in describe(tmp_path / "trace.npz")


@pytest.mark.parametrize("experts", [0, -1, (1 << 20) + 1, "6", 6.0])
def test_number_of_experts(experts: object) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"num_experts is .*, expected 1 to 1048576"):
        RoutingRecorder(torch.nn.Identity(), experts)  # type: ignore[arg-type]


def test_a_function_is_no_module() -> None:
    with pytest.raises(
        ep.InvalidArgumentError, match=r"found builtin_f.*, expected a torch\.nn\.M"
    ):
        RoutingRecorder(print, EXPERTS)  # type: ignore[arg-type]


def test_provenance(tmp_path: Path) -> None:
    recorder = RoutingRecorder(torch.nn.Identity(), EXPERTS)
    with pytest.raises(ep.InvalidArgumentError, match="provenance: found list"):
        recorder.save(tmp_path / "trace.npz", ["a"])  # type: ignore[arg-type]


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
