"""Expert-parallel dispatch and combine: the names and signatures of nccl.ep, and masks,
init_handle and preflight.

    import numpy as np
    from trefoil import ep

    comm = ep.Communicator.create(num_ranks, rank, unique_id)
    group = ep.Group.create(comm, ep.GroupConfig(num_experts=8, ...))
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(topk_idx))
    handle.dispatch(ep.DispatchInputs(tokens=ep.Tensor(x)), ...)
    ep.synchronize()

The library is the CPU library inside the package, unless load() names another one. What it refuses
raises Error with its sentence, as InvalidArgumentError, InvalidUsageError, RemoteError or
SystemFailureError; waits for other ranks end with Ctrl-C. docs/python.md has a whole script.
"""

from pathlib import Path

from packaging.version import Version

from trefoil.ep._load import c as _c
from trefoil.ep._load import load
from trefoil.ep.comm import (
    Communicator,
    Stream,
    device_count,
    get_device,
    get_unique_id,
    set_device,
    synchronize,
)
from trefoil.ep.configs import (
    AllocConfig,
    AllocFn,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    FreeFn,
    GroupConfig,
    HandleConfig,
    LayoutInfo,
    Preflight,
)
from trefoil.ep.enums import (
    Algorithm,
    CombineQuantizationRecipe,
    DataType,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    Layout,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from trefoil.ep.group import Group, Handle, preflight
from trefoil.ep.tensor import Tensor

Error = _c.Error
InvalidArgumentError = _c.InvalidArgumentError
InvalidUsageError = _c.InvalidUsageError
RemoteError = _c.RemoteError
SystemFailureError = _c.SystemFailureError


def get_lib_path() -> Path:
    """The file of the library in use."""
    return Path(_c.library()[0])


def get_lib_version() -> Version:
    """The version of the C API that the library has."""
    code = _c.library()[1]
    return Version(f"{code // 10000}.{code // 100 % 100}.{code % 100}")


__all__ = [
    "Algorithm",
    "AllocConfig",
    "AllocFn",
    "CombineConfig",
    "CombineInputs",
    "CombineOutputs",
    "CombineQuantizationRecipe",
    "Communicator",
    "DataType",
    "DispatchConfig",
    "DispatchInputs",
    "DispatchOutputs",
    "DispatchQuantizationRecipe",
    "Error",
    "ExpertIdKind",
    "FreeFn",
    "Group",
    "GroupConfig",
    "Handle",
    "HandleConfig",
    "InvalidArgumentError",
    "InvalidUsageError",
    "Layout",
    "LayoutInfo",
    "OverflowPolicy",
    "PassDir",
    "Preflight",
    "RemoteError",
    "Stream",
    "SystemFailureError",
    "Tensor",
    "ZeroCopyMode",
    "device_count",
    "get_device",
    "get_lib_path",
    "get_lib_version",
    "get_unique_id",
    "load",
    "preflight",
    "set_device",
    "synchronize",
]
