"""A rank of test_nccl_ep.py: the steps through nccl.ep, on libraries that were preloaded, then
through trefoil.ep in the same process.

    nccl_ep_rank.py RANK RANKS FOLDER
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import nccl.core as nccl
import numpy as np
from nccl import ep as theirs

from ep_steps import Case, Outputs, expert, through_ep
from trefoil import ep as ours

CASES = [
    Case(mode, ranks=0, dtype=dtype)
    for mode in ("ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major")
    for dtype in ("float32", "float16")
]
WAIT = 60.0
TYPES = {
    "float32": nccl.FLOAT32,
    "float16": nccl.FLOAT16,
    "int32": nccl.INT32,
    "int64": nccl.INT64,
}


def pinned(array: np.ndarray) -> np.ndarray:
    """A copy in memory that stays until the process ends."""
    at = ctypes.c_void_p()
    status = ctypes.CDLL(None).cudaMallocHost(ctypes.byref(at), ctypes.c_size_t(array.nbytes + 1))
    assert status == 0
    memory = (ctypes.c_char * array.nbytes).from_address(at.value or 0)
    copy = np.frombuffer(memory, array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensor(array: np.ndarray | None) -> Any:
    """Of pinned memory: NVIDIA's package takes NumPy's arrays by address alone."""
    if array is None:
        return None
    return theirs.Tensor(array.ctypes.data, dtype=TYPES[array.dtype.name], shape=array.shape)


def through_nccl_ep(case: Case, rank: int, comm: Any) -> Outputs:
    """As ep_steps.through_ep, by their names of the same things."""
    poisoned = vars(Outputs.poisoned(case, rank)).items()
    out = Outputs(**{name: None if of is None else pinned(of) for name, of in poisoned})
    asked = case.group_config()
    config = theirs.GroupConfig(
        algorithm=theirs.Algorithm(int(asked.algorithm)),
        num_experts=asked.num_experts,
        max_dispatch_tokens_per_rank=asked.max_dispatch_tokens_per_rank,
        max_recv_tokens_per_rank=asked.max_recv_tokens_per_rank,
        max_token_bytes=asked.max_token_bytes,
    )
    by_expert = case.mode == "ll-expert-major"
    idx, rows, weights = (pinned(of(rank)) for of in (case.routing, case.rows, case.weights))
    counts = pinned(np.zeros(case.local, np.int32))
    info = theirs.LayoutInfo(expert_counters=tensor(counts)) if by_expert else None
    weighs = tensor(weights)
    group = theirs.Group.create(comm, config)
    layout = theirs.Layout(int(case.layout()))
    handle = group.create_handle(layout, tensor(idx), stream=None)
    handle.dispatch(
        theirs.DispatchInputs(tokens=tensor(rows), topk_weights=None if by_expert else weighs),
        theirs.DispatchOutputs(
            tokens=tensor(out.tokens), topk_weights=tensor(out.weights), topk_idx=tensor(out.ids)
        ),
        layout_info=info,
        stream=None,
    )
    assert ctypes.CDLL(None).cudaDeviceSynchronize() == 0
    processed = pinned(expert(out.tokens))
    handle.combine(
        theirs.CombineInputs(tokens=tensor(processed)),
        theirs.CombineOutputs(
            tokens=tensor(out.combined), topk_weights=weighs if by_expert else None
        ),
        stream=None,
    )
    handle.complete(stream=None)
    assert ctypes.CDLL(None).cudaDeviceSynchronize() == 0
    handle.destroy()
    group.destroy()
    return out


def shared(path: Path, mine: bytes | None) -> bytes:
    """Rank 0's bytes, through a file."""
    if mine is not None:
        path.with_suffix(".new").write_bytes(mine)
        path.with_suffix(".new").rename(path)
    end = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return path.read_bytes()


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    assert ctypes.CDLL(None).cudaSetDevice(rank) == 0
    mine = bytes(nccl.get_unique_id().as_bytes) if rank == 0 else None
    unique_id = nccl.UniqueId.from_bytes(shared(folder / "theirs", mine))
    with_theirs = nccl.Communicator.init(ranks, rank, unique_id)
    our_id = shared(folder / "ours", ours.get_unique_id() if rank == 0 else None)
    ours.set_device(rank)
    with ours.Communicator.create(ranks, rank, our_id) as with_ours:
        for i, of in enumerate(CASES):
            case = Case(of.mode, ranks, dtype=of.dtype, seed=i)
            found = through_nccl_ep(case, rank, with_theirs)
            beside = through_ep(case, rank, with_ours)
            np.savez(
                folder / f"{i}_{rank}.npz",
                nccl_ep=np.array(found.bytes(), object),
                trefoil_ep=np.array(beside.bytes(), object),
            )
    with_theirs.destroy()
    print(theirs.get_lib_version(), theirs.get_lib_path())


if __name__ == "__main__":
    main()
