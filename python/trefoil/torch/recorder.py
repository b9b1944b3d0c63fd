"""Records the routing of a MoE layer of any torch model, as a trace (docs/trace.md)."""

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
Finder = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, Tensor | None]]


class Step(NamedTuple):
    """Of one call: [B, K] ids, and weights or None."""

    ids: np.ndarray
    weights: np.ndarray | None


def find_routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The one [B, K] tensor of integers among the arguments, and the one of floats of its shape."""
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() == 2]
    ids = [t for t in given if t.dtype in (torch.int64, torch.int32)]
    if len(ids) != 1:
        raise ep.InvalidArgumentError(
            f"{len(ids)} tensors of integers [B, K] among the module's arguments; "
            "say by find which one is the routing"
        )
    weights = [t for t in given if t.is_floating_point() and t.shape == ids[0].shape]
    return ids[0], weights[0] if len(weights) == 1 else None


class RoutingRecorder:
    """Every forward call of `module` is a step of the trace.

    module: one that is given the ids of its tokens' experts, [B, K] (in transformers: the experts
    of a layer). find(args, kwargs): the ids and the weights or None, where there is a choice.
    num_experts: E. Ids below 0 or from E on are unused entries.
    """

    def __init__(
        self, module: torch.nn.Module, num_experts: int, find: Finder = find_routing
    ) -> None:
        self.num_experts, self.find = num_experts, find
        self.steps: list[Step] = []
        self._hook = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        ids, weights = self.find(args, kwargs)
        ids = ids.detach().cpu()
        ids = torch.where((ids < 0) | (ids >= self.num_experts), -1, ids)
        rows = None if weights is None else weights.detach().float().cpu().numpy().copy()
        self.steps.append(Step(ids.to(torch.int32).numpy().copy(), rows))

    def close(self) -> None:
        """Records no more."""
        self._hook.remove()

    def save(
        self, path: str | Path, provenance: dict[str, Any] | None = None, group: Any = None
    ) -> None:
        """Writes the trace, an .npz. Where torch.distributed is initialised it has a rank for each
        rank of the group: collective, rank 0 writes; else one rank."""
        ranks = [self.steps]
        if dist.is_initialized():
            box: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(box, self.steps, group=group)
            ranks = box
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            _write(Path(path), ranks, self.num_experts, provenance or {"recorded": "torch"})

    def __enter__(self) -> RoutingRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _write(path: Path, ranks: list[list[Step]], experts: int, provenance: dict[str, Any]) -> None:
    steps = {len(of_rank) for of_rank in ranks}
    if len(steps) != 1 or not steps.copy().pop():
        raise ep.InvalidUsageError(
            f"the ranks recorded {sorted(steps)} calls; a trace needs the same number, above 0"
        )
    calls = [step for number in zip(*ranks, strict=True) for step in number]
    widths = {step.ids.shape[1] for step in calls}
    if len(widths) != 1:
        raise ep.InvalidUsageError(f"the calls have {sorted(widths)} experts a token, not one K")
    counts = np.array([len(step.ids) for step in calls]).reshape(steps.pop(), len(ranks))
    ends = counts.cumsum().reshape(counts.shape)
    offsets = np.concatenate([(ends - counts)[:, :1], ends], axis=1).astype(np.int64)
    metadata = {
        "format": "trefoil-trace",
        "version": 1,
        "num_ranks": len(ranks),
        "ranks_per_node": len(ranks),
        "num_experts": experts,
        "topk": widths.pop(),
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
