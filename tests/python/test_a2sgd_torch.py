"""A2SGD in torch over two gloo processes: hook and optimizer equal the reference, bit for bit."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trefoil import a2sgd_torch
from trefoil.a2sgd import Averaging
from trefoil.a2sgd_torch import A2SGD, AveragingOptimizer, ddp_hook
from trefoil.reference import TrefoilError

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)
WORKERS, RATE = 2, 0.125


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(5)
    layers = torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    return torch.nn.Sequential(*layers).to(dtype)


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(100 + 10 * step + rank)
    x = torch.randn(4, 7).to(next(net.parameters()).dtype)
    net(x).square().mean().backward()


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1)
    return (
        flat.view(torch.int16).numpy().view(np.uint16) if flat.element_size() == 2 else flat.numpy()
    )


def updates_of(nets: list[torch.nn.Module]) -> list[list[np.ndarray]]:
    """The reference's updates of each worker, tensor by tensor, from their gradients."""
    sizes = [p.numel() for p in nets[0].parameters()]
    rows = [np.concatenate([bits(p.grad) for p in net.parameters()]) for net in nets]
    dtype = "f32" if rows[0].dtype == np.float32 else "bf16"
    updates = Averaging("a2sgd", sizes, len(nets), dtype).step(np.stack(rows))
    return [np.split(row, np.cumsum(sizes)[:-1]) for row in updates]


def expect(have: list[torch.Tensor], want: list[np.ndarray]) -> None:
    for tensor, row in zip(have, want, strict=True):
        assert np.array_equal(bits(tensor), row)


def with_hook(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(network())
    model.register_comm_hook(A2SGD(), ddp_hook)
    for step in range(3):
        nets = [network() for _ in range(WORKERS)]
        for r, net in enumerate(nets):
            backward(net, r, step)
        model.zero_grad()
        backward(model, rank, step)
        expect([p.grad for p in model.parameters()], updates_of(nets)[rank])


def with_optimizer(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        net, nets = network(dtype), [network(dtype) for _ in range(WORKERS)]
        optimizer = AveragingOptimizer(torch.optim.SGD(net.parameters(), RATE), A2SGD(), 2)
        for step in range(4):
            optimizer.zero_grad()
            backward(net, rank, step)
            optimizer.step()
            by_hand(nets, step)
            expect(list(net.parameters()), [bits(p) for p in nets[rank].parameters()])
        assert np.array_equal(*(bits(next(n.parameters())) for n in nets))


@torch.no_grad()
def by_hand(nets: list[torch.nn.Module], step: int) -> None:
    for r, net in enumerate(nets):
        net.zero_grad()
        with torch.enable_grad():
            backward(net, r, step)
    for net, row in zip(nets, updates_of(nets), strict=True):
        for p, update in zip(net.parameters(), row, strict=True):
            grad = torch.from_numpy(update.copy())
            grad = grad.view(torch.bfloat16) if p.element_size() == 2 else grad
            p.grad = grad.view_as(p)
        torch.optim.SGD(net.parameters(), RATE).step()
    if step % 2 == 1:
        for alike in zip(*(net.parameters() for net in nets), strict=True):
            mean = (sum(p.double() for p in alike) / WORKERS).float()
            for p in alike:
                p.copy_(mean)


def with_refusals(rank: int) -> None:
    del rank
    workers = A2SGD(whole=True)
    for flat, sizes, word in [
        (torch.zeros(3, dtype=torch.float64), [3], "float64"),
        (torch.zeros(3), [4], "expected 4"),
        (torch.zeros(4, 2)[:, 0], [4], "contiguous"),
    ]:
        with pytest.raises(TrefoilError, match=word):
            workers.average_(flat, sizes)
    with pytest.raises(TrefoilError, match="parameters: expected 4 contiguous"):
        workers.mean_(torch.zeros(4, 2)[:, 0])
    with pytest.raises(TrefoilError, match="sync_period"):
        AveragingOptimizer(torch.optim.SGD(network().parameters(), RATE), workers, -1)
    workers.average_(empty := torch.zeros(0), [0, 0])
    assert empty.numel() == 0
    same = torch.tensor([1.0, -2.0, 3.0])
    workers.average_(same, [1, 2])
    assert same.tolist() == [1.0, -2.0, 3.0]


def worker(rank: int, work: Callable[[int], None], folder: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORKERS)
    work(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("work", [with_hook, with_optimizer, with_refusals])
def test_two_workers(work: Callable[[int], None], tmp_path: Path) -> None:
    mp.spawn(worker, args=(work, str(tmp_path)), nprocs=WORKERS)


def test_no_gpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic loader's reason."""
    monkeypatch.setenv("TREFOIL_EP_LIBRARY", "libnccl_ep_nowhere.so.0")
    with pytest.raises(TrefoilError, match=r"cannot be loaded: libnccl_ep_nowhere\.so\.0"):
        a2sgd_torch._gpu_library()
