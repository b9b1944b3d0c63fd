"""Records the routing of a MoE layer of any torch model as a trace: docs/use_record_routing.md."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from trefoil import ep
from trefoil.outputs import open_whole

Tensor = torch.Tensor
MAX_EXPERTS, MAX_TOPK = 1 << 20, 1 << 10  # include/trefoil/shape.h
Finder = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, Tensor | None]]


class Step(NamedTuple):
    """Of one call: [B, K] ids, and weights or None."""

    ids: np.ndarray
    weights: np.ndarray | None


def _holds_integers(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def find_routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The one [B, K] tensor of integers among the arguments, and the one of floats of its shape."""
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() == 2]
    ids = [t for t in given if _holds_integers(t)]
    if len(ids) != 1:
        raise ep.InvalidArgumentError(
            f"{len(ids)} tensors of integers [B, K] among the module's arguments; "
            "say by find which one is the routing"
        )
    weights = [t for t in given if t.is_floating_point() and t.shape == ids[0].shape]
    return ids[0], weights[0] if len(weights) == 1 else None


def _looks(found: object) -> str:
    """A tensor's type and shape, in words."""
    if not isinstance(found, Tensor):
        return f"found {type(found).__name__}"
    return f"found {str(found.dtype).removeprefix('torch.')} {list(found.shape)}"


def _require_pair(found: Any) -> tuple[Tensor, Tensor | None]:
    """What a finder gave: ids [B, K], and weights of their shape or None."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ep.InvalidArgumentError("find: expected a pair, of the ids and the weights or None")
    ids, weights = found
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not _holds_integers(ids):
        raise ep.InvalidArgumentError(f"ids: {_looks(ids)}, expected integers [B, K]")
    if not 1 <= ids.shape[1] <= MAX_TOPK:
        raise ep.InvalidArgumentError(f"ids: K is {ids.shape[1]}, expected 1 to {MAX_TOPK}")
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != ids.shape):
        raise ep.InvalidArgumentError(
            f"weights: {_looks(weights)}, expected {list(ids.shape)}, as the ids have"
        )
    return ids, weights


def _require_once(ids: Tensor, call: int) -> None:
    sorted_ids = ids.sort(1).values
    twice = ((sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] >= 0)).any(1)
    if twice.any():
        token = int(twice.nonzero()[0])
        raise ep.InvalidArgumentError(
            f"call {call}, token {token}: the experts are {ids[token].tolist()}; a trace has each "
            "once in a row"
        )


def _require_finite(weights: Tensor, call: int) -> None:
    bad = (~weights.isfinite()).any(1)
    if bad.any():
        token = int(bad.nonzero()[0])
        raise ep.InvalidArgumentError(
            f"call {call}, token {token}: the weights are {weights[token].tolist()}; a trace has "
            "finite ones of float32"
        )


class RoutingRecorder:
    """Every forward call of `module` is a step of the trace, also one without tokens.

    module: one that is given the ids of its tokens' experts, [B, K] (in transformers: the experts
    of a layer). find(args, kwargs): the ids and the weights or None, where there is a choice.
    num_experts: E. Ids below 0 or from E on are unused entries.

    A call whose routing is no trace's raises ep.InvalidArgumentError before the module runs: an
    expert twice in a row, weights that are not finite, K = 0.
    """

    def __init__(
        self, module: torch.nn.Module, num_experts: int, find: Finder = find_routing
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ep.InvalidArgumentError(
                f"module: found {type(module).__name__}, expected a torch.nn.Module"
            )
        if not isinstance(num_experts, int) or not 1 <= num_experts <= MAX_EXPERTS:
            raise ep.InvalidArgumentError(
                f"num_experts is {num_experts!r}, expected 1 to {MAX_EXPERTS}"
            )
        self.num_experts, self.find = num_experts, find
        self.steps: list[Step] = []
        self._hook = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        ids, weights = _require_pair(self.find(args, kwargs))
        call = len(self.steps)
        ids = ids.detach().to(torch.int64).cpu()
        ids = torch.where((ids < 0) | (ids >= self.num_experts), -1, ids)
        _require_once(ids, call)
        rows = None if weights is None else weights.detach().float().cpu()
        if rows is not None:
            _require_finite(rows, call)
        kept = None if rows is None else rows.numpy().copy()
        self.steps.append(Step(ids.to(torch.int32).numpy(), kept))

    def close(self) -> None:
        """Records no more."""
        self._hook.remove()

    def save(
        self, path: str | Path, provenance: dict[str, Any] | None = None, group: Any = None
    ) -> None:
        """Writes the trace, an .npz. Where torch.distributed is initialised it has a rank for each
        rank of the group: collective, rank 0 writes; else one rank.

        Raises ep.InvalidUsageError where the calls make no trace: none, or another number of them
        on other ranks, no token, or not the same K.
        """
        if provenance is not None and not isinstance(provenance, dict):
            raise ep.InvalidArgumentError(
                f"provenance: found {type(provenance).__name__}, expected a dict"
            )
        ranks = [self.steps]
        if dist.is_initialized():
            box: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(box, self.steps, group=group)
            ranks = box
        _require_trace(ranks)
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            _write(Path(path), ranks, self.num_experts, provenance or {"recorded": "torch"})

    def __enter__(self) -> RoutingRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _require_trace(ranks: list[list[Step]]) -> None:
    steps = {len(of_rank) for of_rank in ranks}
    if len(steps) != 1 or 0 in steps:
        raise ep.InvalidUsageError(
            f"the ranks recorded {sorted(steps)} calls; a trace needs the same number, above 0"
        )
    calls = [step for of_rank in ranks for step in of_rank]
    widths = {step.ids.shape[1] for step in calls}
    if len(widths) != 1:
        raise ep.InvalidUsageError(f"the calls have {sorted(widths)} experts a token, not one K")
    if not any(len(step.ids) for step in calls):
        raise ep.InvalidUsageError(f"the {len(calls)} calls had no token; a trace needs one")


def _write(path: Path, ranks: list[list[Step]], experts: int, provenance: dict[str, Any]) -> None:
    calls = [step for number in zip(*ranks, strict=True) for step in number]
    counts = np.array([len(step.ids) for step in calls]).reshape(-1, len(ranks))
    ends = counts.cumsum().reshape(counts.shape)
    offsets = np.concatenate([(ends - counts)[:, :1], ends], axis=1).astype(np.int64)
    metadata = {
        "format": "trefoil-trace",
        "version": 1,
        "num_ranks": len(ranks),
        "ranks_per_node": len(ranks),
        "num_experts": experts,
        "topk": calls[0].ids.shape[1],
        "max_tokens": int(counts.max()),
        "steps": len(counts),
        "provenance": provenance,
    }
    arrays: dict[str, Any] = {
        "topk_idx": np.concatenate([step.ids for step in calls]),
        "offsets": offsets,
    }
    weights = [step.weights for step in calls if step.weights is not None]
    if len(weights) == len(calls):
        arrays["topk_weights"] = np.concatenate(weights)
    whole = io.BytesIO()
    np.savez_compressed(whole, **arrays)
    with zipfile.ZipFile(whole, "a") as members:
        members.writestr("trefoil.json", json.dumps(metadata))
    with open_whole(path, "wb") as file:
        file.write(whole.getvalue())
