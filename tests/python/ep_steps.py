"""A step of an MoE layer through trefoil.ep, and the reference's answer to the same step."""

from __future__ import annotations

import ctypes as ct
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np

from trefoil import ep, reference
from trefoil.structs import Case as RefCase

MODES = reference.MODES
WAIT = 60.0


@dataclass(frozen=True)
class Case:
    """Sizes of a step; the data follow from the seed."""

    mode: str
    ranks: int = 4
    experts: int = 8
    topk: int = 3
    tokens: int = 6  # at most, a rank
    hidden: int = 32
    seed: int = 0
    dtype: str = "float32"  # or float16, bfloat16

    @property
    def numpy_type(self) -> np.dtype:
        if self.dtype != "bfloat16":
            return np.dtype(self.dtype)
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def is_ht(self) -> bool:
        return self.mode.startswith("ht")

    def routing(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, rank, 1))
        count = self.tokens - rank % 3
        chosen = [rng.permutation(self.experts)[: self.topk] for _ in range(count)]
        idx = np.array(chosen, np.int64).reshape(count, self.topk)
        idx[rng.random(idx.shape) < 0.1] = -1
        return idx

    def rows(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, rank, 2))
        return rng.standard_normal((len(self.routing(rank)), self.hidden)).astype(self.numpy_type)

    def weights(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, rank, 3))
        return rng.random(self.routing(rank).shape).astype(np.float32)

    def group_config(self) -> ep.GroupConfig:
        algorithm = ep.Algorithm.HIGH_THROUGHPUT if self.is_ht else ep.Algorithm.LOW_LATENCY
        return ep.GroupConfig(
            algorithm=algorithm,
            num_experts=self.experts,
            max_dispatch_tokens_per_rank=self.tokens,
            max_recv_tokens_per_rank=self.max_recv() if self.is_ht else 0,
            max_token_bytes=4 * self.hidden,
        )

    def max_recv(self) -> int:
        return self.ranks * self.tokens * self.topk

    def shape(self) -> tuple[int, ...]:
        """Of the dispatch output, less the hidden size."""
        wide = self.ranks * self.tokens
        shapes = {"ll-expert-major": (self.local, wide), "ll-rank-major": (self.ranks, self.tokens)}
        return shapes.get(self.mode, (self.max_recv(),))

    def layout(self) -> ep.Layout:
        return ep.Layout[self.mode[3:].replace("-", "_").upper()]


@dataclass
class Outputs:
    """What a rank got: poisoned where nothing was written."""

    tokens: np.ndarray
    combined: np.ndarray
    weights: np.ndarray | None = None
    ids: np.ndarray | None = None

    @classmethod
    def poisoned(cls, case: Case, rank: int) -> Outputs:
        shape = case.shape()
        out = cls(
            np.full((*shape, case.hidden), np.nan, case.numpy_type),
            np.full_like(case.rows(rank), np.nan),
        )
        if case.mode in ("ll-rank-major", "ht-flat"):
            id_type = np.int64 if case.is_ht else np.int32
            out.ids = np.full((*shape, case.topk), -7, id_type)
            out.weights = np.full((*shape, case.topk), np.nan, np.float32)
        elif case.mode == "ht-expert-major":
            out.weights = np.full(shape, np.nan, np.float32)
        return out

    def bytes(self) -> list[bytes]:
        arrays = (self.tokens, self.combined, self.weights, self.ids)
        return [b"" if a is None else a.tobytes() for a in arrays]


def expert(rows: np.ndarray) -> np.ndarray:
    """What the experts do with their rows."""
    return rows * rows.dtype.type(1.5)


def tensor(array: np.ndarray | None) -> ep.Tensor | None:
    return None if array is None else ep.Tensor(array)


def through_ep(case: Case, rank: int, comm: ep.Communicator) -> Outputs:
    """Dispatch, the experts, combine; by this rank."""
    out = Outputs.poisoned(case, rank)
    weights = None if case.mode == "ll-expert-major" else tensor(case.weights(rank))
    counts = ep.Tensor(np.zeros(case.local, np.int32))
    info = ep.LayoutInfo(expert_counters=counts) if case.mode == "ll-expert-major" else None
    with ep.Group.create(comm, case.group_config()) as group, ep.Stream() as stream:
        idx = ep.Tensor(case.routing(rank))
        with group.create_handle(case.layout(), idx, stream=stream) as handle:
            inputs = ep.DispatchInputs(tokens=tensor(case.rows(rank)), topk_weights=weights)
            outputs = ep.DispatchOutputs(
                tokens=tensor(out.tokens),
                topk_weights=tensor(out.weights),
                topk_idx=tensor(out.ids),
            )
            handle.dispatch(inputs, outputs, layout_info=info, stream=stream)
            stream.synchronize()
            rows = ep.Tensor(expert(out.tokens))
            read = tensor(case.weights(rank)) if case.mode == "ll-expert-major" else None
            sums = ep.CombineOutputs(tokens=tensor(out.combined), topk_weights=read)
            handle.combine(ep.CombineInputs(tokens=rows), sums, stream=stream)
            handle.complete(stream=stream)
            stream.synchronize()
    return out


# ---- The reference ----------------------------------------------------------------------------


class _Source(ct.Structure):
    _fields_ = (("tokens", ct.c_void_p), ("scales", ct.c_void_p), ("weights", ct.c_void_p))


class _Received(ct.Structure):
    _fields_ = (
        ("tokens", ct.c_void_p),
        ("scales", ct.c_void_p),
        ("weights", ct.c_void_p),
        ("ids", ct.c_void_p),
        ("topk_rows", ct.c_int64),
    )


class _Experts(ct.Structure):
    _fields_ = (("tokens", ct.c_void_p), ("weights", ct.c_void_p), ("scales", ct.c_void_p))


def _at(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def by_reference(case: Case) -> list[Outputs]:
    """Of all ranks."""
    ranks = range(case.ranks)
    step = reference.Step([case.routing(r) for r in ranks], case.experts, max_tokens=case.tokens)
    datatype = int(ep.DataType[case.dtype.upper()])
    about = RefCase(step._routing, MODES.index(case.mode), case.hidden, datatype)
    about.max_recv = case.max_recv() if case.is_ht else 0
    rows, weights = [case.rows(r) for r in ranks], [case.weights(r) for r in ranks]
    no_weights = case.mode == "ll-expert-major"
    pairs = zip(rows, weights, strict=True)
    sent = [_Source(_at(x), None, None if no_weights else _at(w)) for x, w in pairs]
    outs = [Outputs.poisoned(case, r) for r in ranks]
    sources = (_Source * case.ranks)(*sent)
    for r in ranks:
        o = outs[r]
        got = _Received(_at(o.tokens), None, _at(o.weights), _at(o.ids), case.max_recv())
        reference._check(
            reference.library().trefoilRefDispatch(ct.byref(about), r, sources, ct.byref(got))
        )
    results = [expert(o.tokens) for o in outs]
    experts = (_Experts * case.ranks)(*(_Experts(_at(x), None, None) for x in results))
    for r in ranks:
        used = ct.c_void_p(_at(weights[r]) if no_weights else None)
        sums = ct.c_void_p(_at(outs[r].combined))
        reference._check(
            reference.library().trefoilRefCombine(
                ct.byref(about), r, experts, used, sums, ct.c_void_p(None)
            )
        )
    return outs


# ---- Ranks ------------------------------------------------------------------------------------

Work = Callable[[int, ep.Communicator], Any]


def _one_rank(work: Work, ranks: int, rank: int, unique_id: bytes, results: Any) -> None:
    ep.set_device(rank)
    try:
        with ep.Communicator.create(ranks, rank, unique_id) as comm:
            results.put((rank, work(rank, comm)))
    except Exception as error:
        results.put((rank, error))


def _gather(results: Any, ranks: int) -> list[Any]:
    found = dict(results.get(timeout=WAIT) for _ in range(ranks))
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[rank] for rank in range(ranks)]


def with_threads(work: Work, ranks: int) -> list[Any]:
    """What work(rank, comm) returned on each rank, the ranks being threads."""
    results: Queue[Any] = Queue()
    shared = (work, ranks)
    unique_id = ep.get_unique_id()
    threads = [
        threading.Thread(target=_one_rank, args=(*shared, r, unique_id, results), daemon=True)
        for r in range(ranks)
    ]
    for thread in threads:
        thread.start()
    found = _gather(results, ranks)
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    return found


def with_processes(work: Work, ranks: int) -> list[Any]:
    """The same, the ranks being processes; work must be a function of a module."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    unique_id = ep.get_unique_id()
    processes = [
        context.Process(target=_one_rank, args=(work, ranks, r, unique_id, results), daemon=True)
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    found = _gather(results, ranks)
    for process in processes:
        process.join(WAIT)
    assert [process.exitcode for process in processes] == [0] * ranks  # None: it has not ended
    return found
