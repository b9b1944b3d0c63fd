"""Tensors: what the C API is given, over memory of NumPy, torch, CuPy or any DLPack producer.

Nothing is copied. The CPU library works on memory that its runtime knows: a tensor of ordinary
host memory makes it known ("pins" it) and keeps it so, and alive, while the tensor or another of
the same memory lives; the end of the last one waits for the queued work of the devices on which
they were made. NumPy refuses to resize the array so long. torch does not: a call refuses a tensor
whose storage was resized since, but queued work still uses the old memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from functools import lru_cache
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, NamedTuple

from trefoil.ep._load import c
from trefoil.ep.enums import DataType

_NAMES = {
    "int8": DataType.INT8,
    "bool": DataType.UINT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
    "float8_e4m3fn": DataType.FLOAT8E4M3,
    "float8_e5m2": DataType.FLOAT8E5M2,
    "float4_e2m1fn_x2": DataType.FLOAT4X2,
}
_KINDS = {"i": "int", "u": "uint", "f": "float"}
_OF_TYPE = {int(datatype): name for name, datatype in reversed(_NAMES.items())}
_ITEM_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1)
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED = 1, 2, 3, 13


class _Memory(NamedTuple):
    """What a buffer says of itself. root: who owns the memory, from `base` on for `extent`."""

    data: int
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    read_only: bool
    root: object
    base: int
    extent: int


class _Pin:
    """Host memory that the runtime knows, until the last tensor over it has gone."""

    def __init__(self, start: int, end: int, roots: list[object], devices: set[int]) -> None:
        c.pin(start, end - start)
        self.start, self.end, self.roots, self.devices = start, end, roots, devices
        self.wider: _Pin | None = None  # the one that has taken this one's place
        self.mark = c.Object(0, 1)
        self._held = [_hold(root) for root in roots]
        self._end = weakref.finalize(self, _unpin, roots, start, devices, self.mark)
        self._end.atexit = False

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.end

    def give_way(self) -> None:
        """The runtime forgets the memory, and queued work goes on: a wider pin keeps the roots."""
        c.unpin(self.start)
        self._end.detach()
        _pins.pop(self.start, None)


def _hold(root: object) -> Any:
    """NumPy resizes no array that is weakly referenced, not even with refcheck=False."""
    try:
        return weakref.ref(root)
    except TypeError:
        return None


def _unpin(roots: list[object], start: int, devices: set[int], mark: Any) -> None:
    """The roots live until here. The mark is of this process and this library, or there is no
    pin."""
    if mark.live:
        for device in devices:
            c.settle(device)
        c.unpin(start)


_pins: weakref.WeakValueDictionary[int, _Pin] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _pinned(memory: _Memory) -> _Pin | None:
    """The pin that a tensor must keep; None where the runtime knows the memory without."""
    if not memory.on_host or not memory.extent:
        return None
    with _lock:
        pin = _pin_of(memory, memory.base, memory.base + memory.extent)
        if pin is not None:
            pin.devices.add(c.get_device())
        return pin


def _pin_of(memory: _Memory, start: int, end: int) -> _Pin | None:
    """Pins do not overlap, so that a tensor lies in one of them, whoever made views of the same
    memory: what reaches past a pin makes it wider."""
    pin = _pins.get(start)
    if pin is not None and pin.mark.live and pin.covers(start, end):
        return pin
    met = [p for p in list(_pins.values()) if p.mark.live and p.start < end and start < p.end]
    if len(met) == 1 and met[0].covers(start, end):
        return met[0]
    if not met and c.known(memory.data):
        return None
    _, _, host_runtime = c.library()
    if not host_runtime:
        raise c.InvalidArgumentError(
            "the tensor lies in host memory, and the library works on a GPU"
        )
    return _widened(memory.root, start, end, met)


def _widened(root: object, start: int, end: int, met: list[_Pin]) -> _Pin:
    roots, devices = [root], {c.get_device()}
    for pin in met:
        roots, devices = [*roots, *pin.roots], devices | pin.devices
        start, end = min(start, pin.start), max(end, pin.end)
        pin.give_way()
    wide = _pins[start] = _Pin(start, end, roots, devices)
    for pin in met:
        pin.wider = wide
    return wide


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int = 1) -> bool:
    expected = item
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _refuse_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: str) -> None:
    raise c.InvalidArgumentError(
        f"the tensor of shape {shape} has strides of {strides} {unit}: it is not C-contiguous; "
        "copy it first (numpy.ascontiguousarray, contiguous() of torch)"
    )


def _count(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def _require_gpu_library() -> None:
    if c.library()[2]:
        raise c.InvalidArgumentError(
            "the tensor lies on a GPU, and the library works on host memory; load the GPU library "
            "(TREFOIL_EP_LIBRARY=gpu)"
        )


def _require_reach(data: int, count: int) -> None:
    """What is said to lie on a GPU is the runtime's of the library on host memory, or refused."""
    if count and not (c.library()[2] and c.known(data)):
        _require_gpu_library()


@lru_cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def odd_kind(t: Any) -> str:
    """What a tensor of torch is that is no plain array; "" for one that is."""
    kinds = {"nested": t.is_nested, "quantised": t.is_quantized}
    kinds[f"of layout {t.layout}"] = str(t.layout) != "torch.strided"
    return next((kind for kind, is_it in kinds.items() if is_it), "")


def _from_torch(t: Any) -> _Memory:
    if t.is_nested or t.is_mkldnn or not t.is_contiguous():
        if kind := odd_kind(t):
            raise c.InvalidArgumentError(f"the tensor is {kind}: a plain one expected")
        _refuse_strides(tuple(t.shape), t.stride(), "elements")
    kind = t.device.type
    if kind not in ("cpu", "cuda"):
        raise c.InvalidArgumentError(
            f"the tensor lies on a device of kind {kind}: cpu or cuda expected"
        )
    if kind == "cuda":
        _require_gpu_library()
    name, shape = _torch_name(t.dtype), tuple(t.shape)
    if kind == "cuda":
        return _Memory(t.data_ptr(), name, shape, False, False, t, 0, 0)
    whole = t.untyped_storage()
    base, extent = whole.data_ptr(), whole.nbytes()
    return _Memory(t.data_ptr(), name, shape, True, False, whole, base, extent)


def _type_name(buffer: Any, typestr: str) -> str:
    kind, size = typestr[1], int(typestr[2:])
    if typestr[0] == ">" and size > 1:
        raise c.InvalidArgumentError(f"the tensor's elements are {typestr}: another byte order")
    if own := str(getattr(buffer, "dtype", "")):
        return own
    return "bool" if (kind, size) == ("b", 1) else f"{_KINDS.get(kind, kind)}{8 * size}"


def _root_of(buffer: Any) -> Any:
    """The array that owns a NumPy view's memory, also where a memoryview lies between."""
    base = getattr(buffer, "base", None)
    while isinstance(base, memoryview):
        base = base.obj
    return _root_of(base) if hasattr(base, "__array_interface__") else buffer


def _from_interface(buffer: Any, about: dict[str, Any], on_host: bool) -> _Memory:
    shape, typestr = tuple(about["shape"]), about["typestr"]
    if not typestr[2:].isdigit():  # objects, times
        raise c.InvalidArgumentError(f"the tensor's elements are {typestr}: no type of NCCL's")
    if about.get("mask") is not None or hasattr(buffer, "hardmask"):  # numpy.ma's
        raise c.InvalidArgumentError("the tensor has a mask; copy what it shows first")
    item = int(typestr[2:])
    strides = about.get("strides")
    if not _contiguous(shape, strides, item):
        _refuse_strides(shape, strides, "bytes")
    data, read_only = about["data"]
    name = _type_name(buffer, typestr)
    if not on_host:
        _require_reach(data, _count(shape))
        return _Memory(data, name, shape, False, read_only, buffer, data, 0)
    root = _root_of(buffer)
    base, extent = data, _count(shape) * item
    if (
        root is not buffer
        and root.nbytes > 0
        and _contiguous(root.shape, root.__array_interface__.get("strides"), root.itemsize)
    ):
        base, extent = root.__array_interface__["data"][0], root.nbytes
    return _Memory(data, name, shape, True, read_only, root, base, extent)


def _from_dlpack(buffer: Any) -> _Memory:
    capsule = buffer.__dlpack__()
    data, device_type, datatype, elements, shape, strides, contiguous = c.read_dlpack(capsule)
    if device_type not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_MANAGED):
        raise c.InvalidArgumentError(
            f"the tensor lies on a device of DLPack's kind {device_type}: CPU or CUDA expected"
        )
    if not contiguous:
        _refuse_strides(shape, strides, "elements")
    if datatype < 0:
        raise c.InvalidArgumentError(
            f"the tensor's elements are DLPack's {elements}: no type of NCCL's"
        )
    extent = _count(shape) * _ITEM_BYTES[datatype]
    on_host = device_type == _DL_CPU
    if device_type == _DL_CUDA:
        _require_reach(data, extent)
    return _Memory(data, _OF_TYPE[datatype], shape, on_host, False, capsule, data, extent)


def _is_scalar(buffer: Any) -> bool:
    """NumPy's scalars have the array interface of a temporary array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(buffer, numpy.generic)


def _memory_of(buffer: Any) -> _Memory:
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "untyped_storage"):
        return _from_torch(buffer)
    if (about := getattr(buffer, "__cuda_array_interface__", None)) is not None:
        return _from_interface(buffer, about, on_host=False)
    about = None if _is_scalar(buffer) else getattr(buffer, "__array_interface__", None)
    if about is not None:
        return _from_interface(buffer, about, on_host=True)
    if hasattr(buffer, "__dlpack__"):
        return _from_dlpack(buffer)
    raise TypeError(f"{type(buffer).__name__} is no tensor: NumPy, torch, CuPy or DLPack expected")


def _data_type(name: str) -> DataType:
    if name not in _NAMES:
        raise c.InvalidArgumentError(f"the tensor's elements are {name}: no type of NCCL's")
    return _NAMES[name]


def _read(
    buffer: Any,
    *,
    dtype: int | None = None,
    shape: tuple[int, ...] | None = None,
    window: Any = None,
    window_offset: int | None = None,
) -> tuple[Any, ...]:
    """What a Tensor of these arguments holds, in the order of the C module."""
    pin, read_only, storage = None, False, None
    if isinstance(buffer, int):
        data = buffer
        if dtype is None or shape is None:
            raise TypeError("a tensor at an address needs dtype and shape")
    else:
        memory = _memory_of(buffer)
        data, read_only = memory.data, memory.read_only
        dtype, shape = _viewed(memory, dtype, shape)
        pin = _pinned(memory)
    if pin is not None and hasattr(buffer, "untyped_storage"):
        storage = buffer.untyped_storage()
    handle = getattr(window, "handle", window) or 0
    if handle and window_offset is None:
        raise TypeError("a tensor in a window needs window_offset")
    place = handle, window_offset or 0
    return data, int(dtype), tuple(shape), *place, read_only, buffer, pin, storage


_read.__qualname__ = "Tensor"  # who made the mistake


class Tensor(c.Tensor):
    """A tensor of the C API over the buffer's memory, C-contiguous, of at most 8 dimensions.

    buffer: a NumPy array, a torch or CuPy tensor, anything with DLPack or the array interfaces,
    or an address with dtype and shape. A stream that the buffer names (CUDA's array interface) is
    not waited for: calls come in the order of the stream that they are given. dtype, shape: another
    view of the same bytes. window: an ncclWindow_t that holds the data from byte window_offset on.
    """

    __slots__ = ()
    __signature__ = signature(_read).replace(return_annotation=Signature.empty)
    buffer: Any
    _pin: _Pin | None

    if TYPE_CHECKING:

        def __new__(
            cls,
            buffer: Any,
            *,
            dtype: int | None = None,
            shape: tuple[int, ...] | None = None,
            window: Any = None,
            window_offset: int | None = None,
        ) -> Tensor: ...


c.tensor_reader(_read)


def _viewed(
    memory: _Memory, dtype: int | None, shape: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...]]:
    """The tensor's type and shape: the buffer's, or others that need no more bytes."""
    own = None if dtype is not None and shape is not None else _data_type(memory.dtype)
    wanted = dtype if dtype is not None else own
    extent = shape if shape is not None else memory.shape
    assert wanted is not None
    if dtype is None and shape is None:
        return wanted, extent
    have = _count(memory.shape) * _item_bytes(memory.dtype)
    if not 0 <= wanted < len(_ITEM_BYTES) or _count(extent) * _ITEM_BYTES[wanted] > have:
        raise c.InvalidArgumentError(
            f"dtype {wanted} and shape {extent} do not fit the buffer's {have} bytes"
        )
    return wanted, extent


def _item_bytes(name: str) -> int:
    return _ITEM_BYTES[_NAMES[name]] if name in _NAMES else 1
