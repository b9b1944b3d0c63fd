"""What the methods of Buffer refuse before they send anything."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from trefoil import ep
from trefoil.deep_ep.counts import Numbers
from trefoil.on_device import require

Tensor = torch.Tensor
IDS = (torch.int64, torch.int32)
COUNTS = (torch.int32, torch.int64)
FLAGS = (torch.bool, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TYPES = sorted({str(of) for of in vars(torch).values() if isinstance(of, torch.dtype)})


def require_count(name: str, value: Any, least: int) -> None:
    if not hasattr(value, "__index__") or value < least:
        raise ep.InvalidArgumentError(f"{name} is {value!r}; must be an integer from {least} on")


def require_experts(num_experts: int, ranks: int) -> None:
    require_count("num_experts", num_experts, 1)
    if num_experts % ranks:
        raise ep.InvalidArgumentError(f"{num_experts} experts on {ranks} ranks; must divide evenly")


def require_handle(handle: Any, kinds: type | tuple[type, ...]) -> None:
    if not isinstance(handle, kinds):
        raise ep.InvalidArgumentError(
            f"handle is of type {type(handle).__name__}; the handle of a dispatch is needed"
        )


def fields_of(x: Any, device: torch.device) -> list[Tensor]:
    """Rows [B, H], and their scales [B, S] or [B] if x is a pair."""
    parts = list(x) if isinstance(x, tuple) else [x]
    if isinstance(x, tuple) and len(parts) != 2:
        raise ep.InvalidArgumentError(f"x is a tuple of {len(parts)}; must be rows and scales")
    require("x", parts[0], (), -1, -1, device=device)
    if not parts[0].shape[1]:
        raise ep.InvalidArgumentError("x: rows have no elements")
    for scales in parts[1:]:
        wide = getattr(scales, "ndim", 2) != 1
        require("scales of x", scales, (), len(parts[0]), *[-1] * wide, device=device)
    return parts


def require_topk(
    topk_idx: Tensor | None, topk_weights: Tensor | None, tokens: int, device: torch.device
) -> None:
    """Ids [B, K] and, if there are any, weights of the same shape."""
    if topk_idx is None:
        if topk_weights is not None:
            raise ep.InvalidArgumentError("topk_weights need topk_idx")
        return
    require("topk_idx", topk_idx, IDS, tokens, -1, device=device)
    if not topk_idx.shape[1]:
        raise ep.InvalidArgumentError("topk_idx has no columns; without experts give None")
    if topk_weights is not None:
        shape = tokens, topk_idx.shape[1]
        require("topk_weights", topk_weights, FLOATS, *shape, device=device)


def counts_of(
    per_rank: Tensor, in_rank: Tensor, per_expert: Tensor, tokens: int, ranks: int
) -> list[Tensor]:
    """int32: tokens for each rank as dispatch was told, and as in_rank has it; for each expert."""
    device = in_rank.device if isinstance(in_rank, Tensor) else torch.device("cpu")
    require("is_token_in_rank", in_rank, FLAGS, tokens, ranks, device=device)
    require("num_tokens_per_rank", per_rank, COUNTS, ranks, device=device)
    require("num_tokens_per_expert", per_expert, COUNTS, -1, device=device)
    require_experts(per_expert.numel(), ranks)
    return [per_rank.int(), in_rank.bool().sum(0, dtype=torch.int32), per_expert.int()]


def kind_of(parts: list[Tensor], topk_idx: Tensor | None) -> list[int]:
    """What is alike on all ranks: elements and type of x, of its scales (0, 0: there are none), and
    K (-1: no topk_idx)."""
    of_parts = [[prod(one.shape[1:]), TYPES.index(str(one.dtype))] for one in parts]
    scales = of_parts[1] if len(of_parts) > 1 else [0, 0]
    return [*of_parts[0], *scales, -1 if topk_idx is None else topk_idx.shape[1]]


def _in_words(kind: list[int]) -> str:
    elements, dtype, scales, of_scales, topk = kind
    with_scales = f", scales [B, {scales}] {TYPES[of_scales]}" if scales else ""
    with_topk = "no topk_idx" if topk < 0 else f"top-{topk}"
    return f"x [B, {elements}] {TYPES[dtype]}{with_scales}, {with_topk}"


def require_alike(kinds: Numbers, rank: int) -> None:
    """kinds: what kind_of gave on each rank, [R, 5]."""
    differs = (kinds != kinds[rank]).any(1)
    if differs.any():
        other = int(differs.argmax())
        theirs, mine = (_in_words(kinds[r].tolist()) for r in (other, rank))
        raise ep.InvalidArgumentError(
            f"dispatch: rank {other} has {theirs}; rank {rank} {mine}; must be alike"
        )


def require_agreement(told: Numbers, rank: int, topk_idx: Tensor | None) -> None:
    """told: of each rank, [R, 2 R + E + 1], what counts_of gave and how many ids of its topk_idx
    name no expert. The rank itself is told what is wrong, the others which rank it is."""
    ranks = len(told)
    per_rank, found, strays = told[:, :ranks], told[:, ranks : 2 * ranks], told[:, -1]
    differs = (per_rank != found).any(1)
    wrong = differs | (strays > 0)
    if not wrong.any():
        return
    if differs[rank]:
        raise ep.InvalidArgumentError(
            f"num_tokens_per_rank is {per_rank[rank].tolist()}; "
            f"is_token_in_rank has {found[rank].tolist()}"
        )
    if topk_idx is not None and strays[rank]:
        require_known(topk_idx, told.shape[1] - 2 * ranks - 1)
    raise ep.RemoteError(f"dispatch: rank {int(wrong.argmax())} refused what it was given")


def require_known(topk_idx: Tensor, num_experts: int) -> None:
    """Waits for the device."""
    most = int(topk_idx.max()) if topk_idx.numel() else -1
    if most >= num_experts:
        raise ep.InvalidArgumentError(f"topk_idx names expert {most} of {num_experts}")


def biases_of(bias: Any, sent: int, hidden: int, device: torch.device) -> list[Tensor]:
    """None, one, or up to two of [B, H]."""
    if bias is None:
        return []
    biases = list(bias) if isinstance(bias, (tuple, list)) else [bias]
    biases = [one for one in biases if one is not None]
    if len(biases) > 2:
        raise ep.InvalidArgumentError(f"bias has {len(biases)} tensors; at most 2")
    for one in biases:
        require("bias", one, FLOATS, sent, hidden, device=device)
    return biases
