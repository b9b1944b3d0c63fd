"""A2SGD in torch: a communication hook of DistributedDataParallel, and a wrapper of optimizers.

    from trefoil.a2sgd_torch import A2SGD, AveragingOptimizer, ddp_hook
    model = DistributedDataParallel(net)
    model.register_comm_hook(A2SGD(), ddp_hook)          # each tensor of a bucket is a group

    optimizer = AveragingOptimizer(SGD(net.parameters(), lr=0.1), A2SGD(), sync_period=100)

Workers send two means a tensor, 8 bytes; their models drift apart (docs/a2sgd.md). On the CPU any
process group, and libtrefoil.so.0; on CUDA tensors the group's NCCL communicator, and
libnccl_ep.so.0 of the package or as the dynamic loader finds it (TREFOIL_EP_LIBRARY names another
path). Refusals raise TrefoilError.
"""

import ctypes as ct
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trefoil.a2sgd import METHODS, Config
from trefoil.places import gpu_library
from trefoil.reference import TrefoilError, library

MEAN_ELEMENTS = 1 << 22  # of parameters that are gathered at a time
CODES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class A2SGD:
    """The workers of a process group; averages flat gradients and parameters in place.

    whole: the tensors of a gradient are one group. All workers make the same calls in the same
    order.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, whole: bool = False) -> None:
        self.group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.whole = whole
        self._on_gpu: dict[tuple[torch.dtype, tuple[int, ...], int], ct.c_void_p] = {}

    def average_(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        """Turns a gradient, tensors of `sizes` elements one behind the other, into the update."""
        _check_flat(flat, sum(sizes), "gradient")
        if flat.is_cuda:
            lib, made = self._object(flat, sizes, 0)
            at = ct.c_void_p(flat.data_ptr())
            _check_gpu(lib.trefoilGradGpuStep(made, at, at, _stream(flat)), lib)
        else:
            self._step(flat, sizes)

    def mean_(self, flat: torch.Tensor) -> None:
        """Turns parameters into the workers' mean (rule A7)."""
        _check_flat(flat, flat.numel(), "parameters")
        if flat.is_cuda:
            lib, made = self._object(flat, [flat.numel()], 1)
            at = ct.c_void_p(flat.data_ptr())
            _check_gpu(lib.trefoilGradGpuSync(made, ct.c_int64(0), at, _stream(flat)), lib)
        else:
            self._mean(flat)

    def _config(self, dtype: torch.dtype, counts: np.ndarray, sync_period: int = 0) -> Config:
        return Config(
            method=METHODS.index("a2sgd"),
            dtype=CODES[dtype],
            num_workers=self.size,
            num_tensors=len(counts),
            sizes=counts.ctypes.data,
            scope=int(self.whole),
            sync_period=sync_period,
        )

    def _step(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        counts = np.array(sizes, dtype=np.int64)
        config, lib = self._config(flat.dtype, counts), library()
        own = torch.zeros(1 if self.whole else len(counts), 2)
        at = ct.c_void_p(flat.data_ptr())
        _check(lib.trefoilGradTwoMeans(ct.byref(config), at, ct.c_void_p(own.data_ptr())), lib)
        means = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(means, own, group=self.group)
        all_means = ct.c_void_p((rows := torch.stack(means)).data_ptr())
        code = lib.trefoilGradFromMeans(ct.byref(config), self.rank, all_means, at, at)
        del rows  # all_means is its memory
        _check(code, lib)

    def _mean(self, flat: torch.Tensor) -> None:
        """Terms in f64 from worker 0 on, rounded to f32, then to the format."""
        for part in flat.split(MEAN_ELEMENTS):
            rows = [torch.empty_like(part) for _ in range(self.size)]
            dist.all_gather(rows, part, group=self.group)
            total = torch.zeros_like(part, dtype=torch.float64)
            for row in rows:
                total += row.double()
            part.copy_((total / self.size).float().to(part.dtype))

    def _object(
        self, flat: torch.Tensor, sizes: Sequence[int], sync_period: int
    ) -> tuple[ct.CDLL, ct.c_void_p]:
        """What the GPU library keeps of arrays like this one, made when it is first needed."""
        lib = _gpu_library()
        key = (flat.dtype, tuple(sizes), sync_period)
        if key not in self._on_gpu:
            counts = np.array(sizes, dtype=np.int64)
            config, made = self._config(flat.dtype, counts, sync_period), ct.c_void_p()
            comm = ct.c_void_p(self._communicator(flat.device))
            code = lib.trefoilGradGpuCreate(ct.byref(config), None, comm, ct.byref(made))
            _check_gpu(code, lib)
            self._on_gpu[key] = made
        return lib, self._on_gpu[key]

    def _communicator(self, device: torch.device) -> int:
        """The ncclComm_t of the process group, which exists after its first collective."""
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        group = self.group or dist.distributed_c10d._get_default_group()
        backend: Any = group._get_backend(device)
        if not hasattr(backend, "_comm_ptr"):
            raise TrefoilError("the process group has no NCCL communicator (torch 2.5 or newer)")
        return int(backend._comm_ptr())

    def close(self) -> None:
        """Frees what the GPU library holds; collective."""
        for made in self._on_gpu.values():
            _check_gpu(_gpu_library().trefoilGradGpuDestroy(made), _gpu_library())
        self._on_gpu.clear()


def _check_flat(flat: torch.Tensor, elements: int, what: str) -> None:
    if flat.dtype not in CODES:
        raise TrefoilError(f"dtype {flat.dtype}: expected float16, float32 or bfloat16")
    if not flat.is_contiguous() or flat.numel() != elements:
        raise TrefoilError(f"{what}: expected {elements} contiguous elements, found {flat.numel()}")


def _stream(flat: torch.Tensor) -> ct.c_void_p:
    return ct.c_void_p(torch.cuda.current_stream(flat.device).cuda_stream)


def _check(code: int, lib: ct.CDLL) -> None:
    if code != 0:
        raise TrefoilError(lib.trefoilLastError().decode())


def _check_gpu(code: int, lib: ct.CDLL) -> None:
    if code != 0:
        raise TrefoilError(lib.ncclEpGetLastError().decode())


def _gpu_library() -> ct.CDLL:
    return _opened(os.environ.get("TREFOIL_EP_LIBRARY", "gpu"))


@cache
def _opened(named: str) -> ct.CDLL:
    try:
        lib = ct.CDLL(gpu_library() if named in ("cpu", "gpu") else named)
    except OSError as error:
        raise TrefoilError(f"the GPU library cannot be loaded: {error}") from None
    lib.ncclEpGetLastError.restype = ct.c_char_p
    return lib


def ddp_hook(state: A2SGD, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For register_comm_hook: the bucket's update takes the place of its gradient."""
    flat = bucket.buffer()
    state.average_(flat, [g.numel() for g in bucket.gradients()])
    done: torch.futures.Future[torch.Tensor] = (
        torch.futures.Future(devices=[flat.device]) if flat.is_cuda else torch.futures.Future()
    )
    done.set_result(flat)
    return done


class AveragingOptimizer:
    """An optimizer whose step first averages the gradients over the workers.

    sync_period: after every so many steps the parameters become the workers' mean; 0 = never. The
    gradients of all parameters of one device and dtype travel together; a parameter without a
    gradient counts as zeros if another worker may have one, so every worker sends the same groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, workers: A2SGD, sync_period: int = 0
    ) -> None:
        if sync_period < 0:
            raise TrefoilError(f"sync_period is {sync_period}, must be >= 0 (0 = never)")
        self.optimizer, self.workers, self.sync_period = optimizer, workers, sync_period
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def _parameters(self) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    alike.setdefault((p.device, p.dtype), []).append(p)
        return alike

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Averages, applies, and averages the parameters where the period says so."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for params in self._parameters().values():
            self._average(params)
        self.optimizer.step()
        self.steps += 1
        if self.sync_period and self.steps % self.sync_period == 0:
            for params in self._parameters().values():
                self._sync(params)
        return loss

    def _average(self, params: list[torch.Tensor]) -> None:
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self.workers.average_(flat, [g.numel() for g in grads])
        _copy_parts(flat, grads)

    def _sync(self, params: list[torch.Tensor]) -> None:
        flat = torch.cat([p.reshape(-1) for p in params])
        self.workers.mean_(flat)
        _copy_parts(flat, params)


def _copy_parts(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
