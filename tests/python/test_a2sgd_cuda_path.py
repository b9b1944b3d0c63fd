"""The CUDA path of A2SGD's hook without torch or a GPU: NumPy arrays stand for torch's tensors,
the CPU library for libnccl_ep.so.0, the host runtime's communicator for NCCL's."""

import ctypes as ct
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from trefoil.a2sgd import Averaging
from trefoil.reference import TrefoilError

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_CPU") or not os.environ.get("TREFOIL_LIB"),
    reason="TREFOIL_CPU is not set (ctest sets it)",
)
WORKERS, STEPS, SIZES = 2, 3, [300, 0, 7]
T = TypeVar("T")


class Tensor:
    """What a2sgd_torch asks of a CUDA tensor."""

    is_cuda = True

    def __init__(self, array: np.ndarray, device: str) -> None:
        self.array, self.device, self.dtype = array, device, "float32"

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.array.size

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Future(Generic[T]):
    def __init__(self, devices: Any = None) -> None:
        self.devices, self.result = devices, None

    def set_result(self, result: Any) -> None:
        self.result = result


class Bucket:
    """Of a gradient whose tensors lie one behind the other."""

    def __init__(self, array: np.ndarray, device: str) -> None:
        self.flat = Tensor(array, device)
        ends = np.cumsum(SIZES)[:-1]
        self.parts = [Tensor(part, device) for part in np.split(array, ends)]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.parts


class World:
    """The ranks: threads, each with a communicator and a stream of the host runtime."""

    def __init__(self) -> None:
        self.host = ct.CDLL(os.environ["TREFOIL_HOST"], mode=ct.RTLD_GLOBAL)
        self.here = threading.local()
        self.comms = (ct.c_void_p * WORKERS)()
        assert self.host.ncclCommInitAll(self.comms, WORKERS, None) == 0
        self.reductions = 0
        self.has_nccl = True

    def enter(self, rank: int) -> None:
        self.here.rank, self.here.stream = rank, ct.c_void_p()
        assert self.host.cudaSetDevice(rank) == 0
        assert self.host.cudaStreamCreate(ct.byref(self.here.stream)) == 0

    def backend(self, device: object) -> object:
        comm = self.comms[self.here.rank]
        names = {"_comm_ptr": lambda: comm} if self.has_nccl else {}
        return types.SimpleNamespace(**names)

    def reduce(self, tensor: object, group: object = None) -> None:
        self.reductions += 1

    def synchronize(self) -> None:
        assert self.host.cudaStreamSynchronize(self.here.stream) == 0

    def close(self) -> None:
        for comm in self.comms:
            self.host.ncclCommDestroy(ct.c_void_p(comm))


def stand_in(world: World) -> dict[str, types.ModuleType]:
    """The modules torch and torch.distributed, as far as a2sgd_torch looks at them."""
    torch, dist = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    for name in ("float16", "float32", "bfloat16"):
        setattr(torch, name, name)
    torch.__dict__.update(
        Tensor=Tensor,
        dtype=type("dtype", (), {}),
        device=type("device", (), {}),
        distributed=dist,
        futures=types.SimpleNamespace(Future=Future),
        optim=types.SimpleNamespace(Optimizer=type("Optimizer", (), {})),
        no_grad=lambda: lambda function: function,
        zeros=lambda n, device: Tensor(np.zeros(n, np.float32), device),
        cuda=types.SimpleNamespace(
            current_stream=lambda device: types.SimpleNamespace(cuda_stream=world.here.stream.value)
        ),
    )
    group = types.SimpleNamespace(_get_backend=world.backend)
    dist.__dict__.update(
        ProcessGroup=type("ProcessGroup", (), {}),
        GradBucket=Bucket,
        get_world_size=lambda group: WORKERS,
        get_rank=lambda group: world.here.rank,
        all_reduce=world.reduce,
        distributed_c10d=types.SimpleNamespace(_get_default_group=lambda: group),
    )
    return {"torch": torch, "torch.distributed": dist}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    for name, module in stand_in(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "trefoil.a2sgd_torch", raising=False)
    monkeypatch.setenv("TREFOIL_EP_LIBRARY", os.environ["TREFOIL_CPU"])
    yield made
    sys.modules.pop("trefoil.a2sgd_torch", None)
    made.close()


def on_all_ranks(world: World, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            world.enter(rank)
            work(rank)
        except BaseException as error:  # pytest hears of it below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_the_hook_gives_the_reference_s_bits(world: World) -> None:
    hooks: Any = importlib.import_module("trefoil.a2sgd_torch")
    rng = np.random.default_rng(3)
    grads = rng.standard_normal((STEPS, WORKERS, sum(SIZES))).astype(np.float32)
    have = grads.copy()

    def train(rank: int) -> None:
        workers = hooks.A2SGD()
        for step in range(STEPS):
            future = hooks.ddp_hook(workers, Bucket(have[step, rank], f"cuda:{rank}"))
            assert future.devices == [f"cuda:{rank}"]
            assert future.result.array.ctypes.data == have[step, rank].ctypes.data
        world.synchronize()
        assert len(workers._on_gpu) == 1, "one object of the library for all steps of a bucket"
        workers.close()
        assert not workers._on_gpu

    on_all_ranks(world, train)
    assert world.reductions == WORKERS
    averaging = Averaging("a2sgd", SIZES, WORKERS)
    for step in range(STEPS):
        assert np.array_equal(have[step], averaging.step(grads[step]))


def test_parameters_become_the_mean(world: World) -> None:
    hooks: Any = importlib.import_module("trefoil.a2sgd_torch")
    rng = np.random.default_rng(4)
    params = rng.standard_normal((STEPS, WORKERS, sum(SIZES))).astype(np.float32)
    have = params.copy()

    def train(rank: int) -> None:
        workers = hooks.A2SGD()
        for step in range(STEPS):
            workers.mean_(Tensor(have[step, rank], f"cuda:{rank}"))
        world.synchronize()
        assert len(workers._on_gpu) == 1, "one object of the library for all of them"
        workers.close()

    on_all_ranks(world, train)
    averaging = Averaging("a2sgd", SIZES, WORKERS, sync_period=1)
    averaging.steps = 1
    for step in range(STEPS):
        averaging.sync(params[step])
        assert np.array_equal(have[step], params[step])


def test_what_fails_is_said(world: World) -> None:
    hooks: Any = importlib.import_module("trefoil.a2sgd_torch")
    world.enter(0)
    flat = Tensor(np.zeros(8, np.float32), "cuda:0")
    with pytest.raises(TrefoilError, match="expected 7 contiguous elements, found 8"):
        hooks.A2SGD().average_(flat, [7])
    world.has_nccl = False
    with pytest.raises(TrefoilError, match="no NCCL communicator"):
        hooks.A2SGD().average_(flat, [8])
    world.has_nccl = True
    workers = hooks.A2SGD()
    workers.size = 3  # of a group that is not the communicator's
    with pytest.raises(TrefoilError, match="numWorkers is 3, the communicator has 2 ranks"):
        workers.average_(flat, [8])
