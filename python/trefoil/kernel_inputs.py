"""The arguments of trefoil.check_dispatch and check_combine: arrays of NumPy or torch, on the host,
or a refusal that names the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from trefoil.reference import MODES, Step, TrefoilError

Array = npt.NDArray[Any]
MOST = (1 << 31) - 1
NUMBERS = "biufV"  # V: small floats of ml_dtypes


class InputError(TrefoilError, ValueError):
    """An argument that does not fit; the sentence names it."""


def on_host(name: str, data: Any) -> Array:
    """As NumPy has it."""
    try:
        array = np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: no array of numbers: {error}") from error
    if array.dtype.kind not in NUMBERS:
        raise InputError(f"{name}: elements are {array.dtype}; numbers expected")
    return array


def _pair(name: str, data: Any) -> tuple[Array, Array]:
    """Values to show, and the same as they lie in memory: NumPy lacks torch's bfloat16 and fp8."""
    if not hasattr(data, "detach"):
        values = np.ascontiguousarray(on_host(name, data))
        return values, values
    data = data.detach().cpu().contiguous()
    import torch

    if data.is_floating_point() and data.dtype not in (torch.float64, torch.float32):
        kind = torch.int16 if data.itemsize == 2 else torch.uint8
        return data.float().numpy(), data.view(kind).numpy()
    values = on_host(name, data)
    return values, values


def rows_of(name: str, data: Any, width: int | None = None) -> tuple[Array, Array]:
    """[rows, H] values of [rows, H] or [any, rows, H], and their bytes [rows, bytes]; width: the
    bytes that a row must have."""
    values, raw = _pair(name, data)
    if values.ndim not in (2, 3):
        raise InputError(f"{name}: {values.ndim} dimensions; rows of H values expected")
    if not values.shape[-1]:
        raise InputError(f"{name}: {list(values.shape)}: rows without a value")
    values = values.reshape(-1, values.shape[-1])
    raw = raw.reshape(values.shape)
    raw = raw.view(np.uint8).reshape(len(values), values.shape[1] * raw.itemsize)
    if width is not None and raw.shape[1] != width:
        raise InputError(f"{name}: rows of {raw.shape[1]} bytes, the tokens have {width}")
    return values, raw


def float_rows(name: str, data: Any, width: int | None = None) -> Array:
    """[rows, H] in float64; width: the H that it must have."""
    values = rows_of(name, data)[0].astype(np.float64)
    if width is not None and values.shape[1] != width:
        raise InputError(f"{name}: rows of {values.shape[1]} values, those of rank 0 have {width}")
    return values


def of_ranks(name: str, data: Any) -> list[Any]:
    """One array a rank."""
    arrays = hasattr(data, "shape") and len(data.shape) == 3
    if not arrays and (not isinstance(data, Sequence) or isinstance(data, (str, bytes))):
        raise InputError(
            f"{name}: found {type(data).__name__}; a list of one array a rank expected"
        )
    if not len(data):
        raise InputError(f"{name}: of no rank")
    return list(data)


def by_rank(name: str, data: Any, ranks: int) -> list[tuple[int, Any]]:
    """Some ranks' arrays, by rank."""
    if not isinstance(data, Mapping):
        raise InputError(f"{name}: found {type(data).__name__}; {{rank: array}} expected")
    for rank in data:
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < ranks:
            raise InputError(f"{name}: rank {rank!r}; 0 to {ranks - 1} expected, as topk_idx has")
    return sorted((int(rank), array) for rank, array in data.items())


def ids_of(topk_idx: Any) -> list[Array]:
    """[B, K] of every rank, integers."""
    found = []
    for rank, data in enumerate(of_ranks("topk_idx", topk_idx)):
        name = f"topk_idx of rank {rank}"
        ids = on_host(name, data)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise InputError(f"{name}: {ids.dtype} {list(ids.shape)}; integers [B, K] expected")
        if found and ids.shape[1] != found[0].shape[1]:
            raise InputError(f"{name}: K is {ids.shape[1]}, that of rank 0 {found[0].shape[1]}")
        found.append(ids)
    return found


def tokens_of(topk_idx: list[Array], tokens: Any) -> list[tuple[Array, Array]]:
    """Values and bytes of every rank's rows [B, H]: one a token, all of one size."""
    given = of_ranks("tokens", tokens)
    rows = [rows_of(f"tokens of rank {r}", data) for r, data in enumerate(given)]
    require_tokens("rows of tokens", [values for values, _ in rows], topk_idx)
    width = next((raw.shape[1] for _, raw in rows if len(raw)), 0)
    for rank, (_, raw) in enumerate(rows):
        if len(raw) and raw.shape[1] != width:
            raise InputError(
                f"tokens of rank {rank}: rows of {raw.shape[1]} bytes, other ranks' have {width}"
            )
    return rows


def weights_of(topk_idx: list[Array], topk_weights: Any) -> list[Array]:
    """[B, K] of every rank, in float64."""
    given = of_ranks("topk_weights", topk_weights)
    weights = [on_host(f"topk_weights of rank {r}", data) for r, data in enumerate(given)]
    require_tokens("topk_weights", [np.atleast_1d(w) for w in weights], topk_idx)
    for rank, (of_rank, ids) in enumerate(zip(weights, topk_idx, strict=True)):
        if of_rank.shape != ids.shape:
            raise InputError(
                f"topk_weights of rank {rank}: {list(of_rank.shape)}; "
                f"{list(ids.shape)} expected, as topk_idx has"
            )
    return [of_rank.astype(np.float64) for of_rank in weights]


def require_tokens(name: str, rows: Sequence[Any], topk_idx: Sequence[Any]) -> None:
    found, expected = [len(r) for r in rows], [len(ids) for ids in topk_idx]
    if found != expected:
        raise InputError(f"{name}: {found} by rank; topk_idx has {expected} tokens")


def whole(name: str, value: Any, least: int) -> int:
    """An integer of at least `least`."""
    try:
        number = index(value)
    except TypeError as error:
        raise InputError(f"{name}: {value!r}; an integer expected") from error
    if not least <= number <= MOST:
        raise InputError(f"{name}: {number}; {least} to {MOST} expected")
    return number


def rounding(epsilon: Any) -> float:
    """epsilon, or float32's."""
    if epsilon is None:
        return float(np.finfo(np.float32).eps)
    if not isinstance(epsilon, (int, float, np.number)) or not 0 <= epsilon < math.inf:
        raise InputError(f"epsilon: {epsilon!r}; a number from 0 on expected")
    return float(epsilon)


def _most_tokens(mode: str, ranks: int, given: Mapping[str, Any], most: int | None) -> int | None:
    """N, as the arrays of low latency with three dimensions have it."""
    for name, data in given.items():
        shape = getattr(data, "shape", ())
        if len(shape) != 3 or not mode.startswith("ll-"):
            continue
        of_expert = ranks if mode == "ll-expert-major" else 1
        if shape[1] % of_expert or most not in (None, shape[1] // of_expert):
            raise InputError(
                f"{name}: {shape[1]} slots in dimension 1; N is {most or 'not known'}, "
                f"{of_expert} N expected"
            )
        most = shape[1] // of_expert
    return most


class Layout:
    """The slots of all ranks, by the reference. arrays: by name, those that may tell N."""

    def __init__(
        self,
        mode: Any,
        ids: list[Array],
        arrays: Mapping[str, Any],
        num_experts: Any,
        max_tokens: Any,
        alignment: Any,
    ) -> None:
        experts = whole("num_experts", num_experts, 1)
        most = None if max_tokens is None else whole("max_tokens", max_tokens, 1)
        self.mode, self.alignment = mode, whole("alignment", alignment, 0)
        try:
            most = _most_tokens(mode, len(ids), arrays, most)
            self.step = Step(ids, experts, max_tokens=most)
            self.slots(0)
        except InputError:
            raise
        except TrefoilError as error:
            raise InputError(str(error)) from error

    def slots(self, rank: int) -> Array:
        return self.step.slots(self.mode, rank, alignment=self.alignment)

    def require_rows(self, name: str, rows: Array, slots: Array) -> None:
        """Low latency: a row for each slot. High throughput: as many as arrive, or more."""
        used = np.flatnonzero(slots["src"] >= 0)
        if len(used) and len(rows) <= used[-1]:
            raise InputError(f"{name}: {len(rows)} rows; slot {used[-1]} holds a token")
        if self.mode.startswith("ll-") and len(rows) != len(slots):
            raise InputError(
                f"{name}: {len(rows)} rows; the layout has {len(slots)} slots, with "
                f"N = {self.step.max_tokens}"
            )


def require_mode(mode: Any) -> None:
    if mode not in MODES:
        raise InputError(f"mode {mode!r}: expected {', '.join(MODES)}")
