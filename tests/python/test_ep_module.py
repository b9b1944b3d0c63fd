"""The module trefoil._c: what it brings, what it needs, and that nothing else answers for it."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import MODES, Case, by_reference, through_ep, with_threads
from trefoil import ep

MODULE = Path(os.environ["TREFOIL_MODULE"])
BUILD = MODULE.parents[2]
FOREIGN = """
#include <stdlib.h>
int cudaGetDevice(int *d) { abort(); }
int cudaSetDevice(int d) { abort(); }
int cudaMalloc(void **p, size_t n) { abort(); }
int cudaHostRegister(void *p, size_t n, unsigned f) { abort(); }
int cudaStreamCreate(void **s) { abort(); }
int cudaStreamSynchronize(void *s) { abort(); }
int cudaLaunchHostFunc(void *s, void *f, void *d) { abort(); }
int ncclCommInitRank(void **c, int n, int r) { abort(); }
int ncclGetUniqueId(void *i) { abort(); }
"""
ONE_STEP = """
from functools import partial
from ep_steps import Case, through_ep, with_threads
case = Case("ht-flat", ranks=2)
print(sum(map(len, with_threads(partial(through_ep, case), 2)[0].bytes())))
"""


def run(program: str, **environment: str) -> str:
    """Its output, of an interpreter of its own."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "python")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def symbols(kind: str) -> set[str]:
    command = ["nm", "-D", kind, str(MODULE)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


def test_names_are_hidden() -> None:
    """No CUDA or NCCL name is exported, and none is left for the dynamic loader to find."""
    assert symbols("--defined-only") == {"PyInit__c"}
    needed = symbols("--undefined-only")
    assert not [name for name in needed if name.startswith(("cuda", "nccl", "trefoil"))]
    assert any(name.startswith("Py") for name in needed)


def test_limited_api() -> None:
    """Only names of Python's stable ABI: none is private."""
    assert MODULE.name == "_c.abi3.so"
    private = [name for name in symbols("--undefined-only") if name.startswith("_Py")]
    stable = ("_Py_NoneStruct", "_Py_Dealloc")
    assert [name for name in private if name not in stable and not name.endswith("_SizeT")] == []


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize("when", ["preloaded", "loaded first"])
def test_another_cuda_runtime_does_not_answer(tmp_path: Path, when: str) -> None:
    """With every name of it in the global scope, where torch's would be; each call of it aborts."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcudart.so"
    source.write_text(FOREIGN)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    if when == "preloaded":
        assert int(run(ONE_STEP, LD_PRELOAD=str(library))) > 0
    else:
        load = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
        assert int(run(load + ONE_STEP)) > 0


def test_no_cuda_is_needed() -> None:
    """Neither by the module nor by the package, which does not even import NumPy."""
    needed = subprocess.run(["readelf", "-d", MODULE], capture_output=True, text=True, check=True)
    assert "libc.so" in needed.stdout
    assert not any(name in needed.stdout for name in ("cuda", "nccl", "torch", "python"))
    program = "import sys; from trefoil import ep; print('numpy' in sys.modules, ep.device_count())"
    assert run(program).split() == ["False", "8"]


def test_another_library() -> None:
    """libnccl_ep_cpu by its path gives the same answer; objects of the first one are refused."""
    library = BUILD / "api" / "libnccl_ep_cpu.so.0"
    assert library.exists()
    assert run(ONE_STEP, TREFOIL_EP_LIBRARY=str(library)) == run(ONE_STEP)
    program = f"""
from trefoil import ep
old = ep.Communicator.create(1, 0, ep.get_unique_id())
ep.load({str(library)!r})
try:
    old.num_ranks
except ep.InvalidUsageError:
    print(ep.get_lib_path())
"""
    assert run(program).strip() == str(library)


def test_no_gpu_library() -> None:
    """The loader's reason, and the CPU library stays in use."""
    program = """
from trefoil import ep, places
comm = ep.Communicator.create(1, 0, ep.get_unique_id())
places.GPU_LIBRARY = "libnccl_ep_nowhere.so.0"
try:
    ep.load("gpu")
except OSError as error:
    print(error, comm.num_ranks)
"""
    said = run(program).strip()
    assert "libnccl_ep_nowhere.so.0" in said
    assert said.endswith(" 1")


# Parameters of nccl.ep 0.1.0's functions; a stream has a default here.
SIGNATURES = {
    "Group.create": "comm config",
    "Group.create_handle": "self layout topk_idx layout_info config stream",
    "Group.destroy": "self",
    "Handle.update": "self topk_idx layout_info stream",
    "Handle.dispatch": "self inputs outputs layout_info config stream",
    "Handle.combine": "self inputs outputs config stream",
    "Handle.complete": "self config stream",
    "Handle.destroy": "self",
    "GroupConfig": "algorithm num_experts max_dispatch_tokens_per_rank max_recv_tokens_per_rank "
    "max_token_bytes rdma_buffer_size num_qp_per_rank num_channels max_num_sms alloc enable_mask "
    "timeout_ns zero_copy overflow_policy num_topk",
    "HandleConfig": "dispatch_output_per_expert_alignment",
    "AllocConfig": "alloc_fn free_fn context",
    "LayoutInfo": "expert_counters src_rank_counters expert_offsets recv_total_counter "
    "recv_topk_idx_kind",
    "DispatchInputs": "tokens topk_weights scales",
    "DispatchOutputs": "tokens topk_weights scales topk_idx",
    "CombineInputs": "tokens topk_weights scales",
    "CombineOutputs": "tokens topk_weights",
    "DispatchConfig": "send_only round_scales pass_direction quantization_recipe",
    "CombineConfig": "send_only pass_direction quantization_recipe",
    "Tensor": "buffer dtype shape window window_offset",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    found: object = ep
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    names = list(inspect.signature(found).parameters)
    assert names == SIGNATURES[name].split()


# ---- Tensors ----------------------------------------------------------------------------------


class Dlpack:
    """A producer of DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **arguments: object) -> object:
        return self.array.__dlpack__()


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8"])
def test_numpy_and_dlpack_agree(dtype: str) -> None:
    """No copy: the address is the array's."""
    array = np.zeros((3, 4), dtype)
    for tensor in (ep.Tensor(array), ep.Tensor(Dlpack(array))):
        assert (tensor.data, tensor.sizes, tensor.ndim) == (array.ctypes.data, (3, 4), 2)
        assert tensor.datatype == ep.Tensor(np.zeros(1, dtype)).datatype
    assert ep.Tensor(array).buffer is array


def test_what_is_no_memory() -> None:
    """Objects and times; NumPy's scalars, whose memory lies in a temporary array. An array of no
    dimension is a tensor."""
    with pytest.raises(TypeError, match="float32 is no tensor"):
        ep.Tensor(np.float32(3))
    for dtype in ("O", "M8[s]"):  # whatever is said to lie there
        with pytest.raises(ep.InvalidArgumentError, match="no type of NCCL's"):
            ep.Tensor(np.zeros(4, dtype), dtype=ep.DataType.INT8, shape=(4,))
    array = np.zeros((), np.float32)
    assert (ep.Tensor(array).data, ep.Tensor(array).sizes) == (array.ctypes.data, ())


def test_small_floats() -> None:
    types = pytest.importorskip("ml_dtypes")
    found = {
        name: ep.Tensor(np.zeros(2, getattr(types, name))).datatype
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    }
    assert found == {"bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11}


def test_another_view() -> None:
    """bfloat16 in a uint16-like array: dtype and shape of the same bytes, and no more of them."""
    array = np.zeros((4, 8), np.uint8)
    tensor = ep.Tensor(array, dtype=ep.DataType.BFLOAT16, shape=(4, 4))
    assert (tensor.datatype, tensor.sizes) == (9, (4, 4))
    with pytest.raises(ep.InvalidArgumentError, match="32 bytes"):
        ep.Tensor(array, dtype=ep.DataType.FLOAT32, shape=(4, 4))


def test_memory_is_known_as_long_as_tensors_live() -> None:
    """Views share what their array has; the end of the last tensor ends it."""
    from trefoil.ep._load import c

    array = np.zeros(1000, np.float32)
    address = array.ctypes.data
    assert not c.known(address)
    whole, part = ep.Tensor(array), ep.Tensor(array[10:20])
    assert part.data == address + 40
    del whole
    assert c.known(address)
    del part
    assert not c.known(address)


def test_array_outlives_its_tensor() -> None:
    """A tensor keeps its array alive, so that queued work never meets freed memory."""
    tensor = ep.Tensor(np.full(100_000, 7, np.int32))
    found = ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_int32))
    assert found[99_999] == 7


def test_array_of_a_tensor_is_not_resized() -> None:
    """Not even with refcheck=False, also where a memoryview lies between."""
    array = np.zeros(100_000, np.int32)
    for view in (array, array[5:9], np.frombuffer(array, np.float32)):
        tensor = ep.Tensor(view)
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(10, refcheck=False)
        del tensor
    del view
    array.resize(10, refcheck=False)
    assert len(array) == 10


def at(array: np.ndarray) -> SimpleNamespace:
    """A producer of the array interface alone, which says nothing of the memory's owner."""
    return SimpleNamespace(__array_interface__=array.__array_interface__, array=array)


def test_views_of_several_producers() -> None:
    """Whoever made them: each lies in memory that the library knows, until the last has gone."""
    from trefoil.ep._load import c

    array = np.arange(4000, dtype=np.float32)
    address = array.ctypes.data
    left, right = ep.Tensor(at(array[1000:2000])), ep.Tensor(at(array[3000:3500]))
    across = ep.Tensor(at(array[1900:3100]))
    assert across.data == address + 4 * 1900
    whole, shape = ep.Tensor(array), ep.Tensor(Dlpack(array[500:1500]))
    assert c.known(address) and c.known(address + 4 * 3999)
    assert dispatched_rows(array[1000:3000]) == array[1000:3000].tobytes()
    del whole, across
    assert c.known(left.data) and c.known(right.data) and c.known(shape.data)
    del left, right
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(10, refcheck=False)
    del shape
    assert not c.known(address)


def dispatched_rows(rows: np.ndarray) -> bytes:
    """What one rank's dispatch of a row brings."""
    config = ep.GroupConfig(
        num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=rows.nbytes
    )
    out, ids = np.zeros((1, 1, rows.size), rows.dtype), ep.Tensor(np.zeros((1, 1), np.int64))

    def work(rank: int, comm: ep.Communicator) -> None:
        with (
            ep.Group.create(comm, config) as group,
            group.create_handle(ep.Layout.EXPERT_MAJOR, ids) as handle,
        ):
            inputs = ep.DispatchInputs(tokens=ep.Tensor(at(rows.reshape(1, -1))))
            counts = ep.LayoutInfo(expert_counters=ep.Tensor(np.zeros(1, np.int32)))
            outputs = ep.DispatchOutputs(tokens=ep.Tensor(out))
            handle.dispatch(inputs, outputs, layout_info=counts)
            ep.synchronize()

    with_threads(work, 1)
    return out.tobytes()


@pytest.mark.parametrize("step", [-1, 2])
def test_strides(step: int) -> None:
    """The sentence has them, and what makes a copy."""
    with pytest.raises(ep.InvalidArgumentError, match=rf"strides of \({4 * step},\) bytes.*ascont"):
        ep.Tensor(np.zeros(8, np.float32)[::step])


# ---- Cost -------------------------------------------------------------------------------------


COST = "import call_time, json; print(json.dumps(call_time.warm()))"


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    """A call with three tensors: at most the goal, and little more than one with one tensor."""
    took = json.loads(run(COST))
    with capsys.disabled():
        print(f"\ncalls, us above the C call: {took}")
    assert max(took["dispatch"], took["combine"]) < 1.5
    assert max(took["dispatch"], took["combine"]) < 2.5 * took["update"]
    assert took["dispatch, made"] + took["combine, made"] < 6


ON_GPU = """
import gc, pathlib, tempfile, weakref
import numpy as np
from call_time import empty_library, exchange_type
from trefoil import ep

with tempfile.TemporaryDirectory() as folder:
    library = empty_library(pathlib.Path(folder))
    OnGpu = exchange_type(library)
    about, shape, strides = OnGpu.about, OnGpu.shape, OnGpu.strides

    def refused():
        for object in (OnGpu(), type("More", (OnGpu,), {})()):
            try:
                ep.Tensor(object)
            except TypeError as error:
                assert "is no tensor" in str(error), error
            else:
                raise AssertionError("was taken")

    refused()  # the CPU library is in use
    ep.load(library)
    about.offset = 16
    for object in (OnGpu(), type("More", (OnGpu,), {})()):
        t = ep.Tensor(object)
        assert (t.data, t.sizes, t.ndim, t.datatype) == (80, (8, 64), 2, ep.DataType.FLOAT32)
        assert t.buffer is object and t._pin is None and type(t) is ep.Tensor
    types = {
        (0, 8): "INT8", (0, 32): "INT32", (0, 64): "INT64", (1, 8): "UINT8", (1, 32): "UINT32",
        (1, 64): "UINT64", (2, 16): "FLOAT16", (2, 32): "FLOAT32", (2, 64): "FLOAT64",
        (4, 16): "BFLOAT16", (6, 8): "UINT8", (10, 8): "FLOAT8E4M3", (12, 8): "FLOAT8E5M2",
    }
    for code in range(20):
        for bits in (4, 8, 16, 32, 64, 128):
            about.code, about.bits = code, bits
            if (code, bits) in types:
                assert ep.Tensor(OnGpu()).datatype == ep.DataType[types[code, bits]]
            else:
                refused()
    about.code, about.bits = 2, 32
    for field, bad, good in (
        ("lanes", 2, 1), ("device_type", 1, 2), ("device_type", 13, 2), ("ndim", 9, 2),
    ):
        setattr(about, field, bad)
        refused()
        setattr(about, field, good)
    for given in ((1, 64), (64, 2), (65, 1), (-64, 1)):
        strides[:2] = given
        refused()
    shape[0] = 1  # its stride does not matter
    assert ep.Tensor(OnGpu()).sizes == (1, 64)
    shape[1] = 0
    assert ep.Tensor(OnGpu()).sizes == (1, 0)
    shape[:2], strides[:2], about.ndim = (8, 64), (64, 1), 0
    assert ep.Tensor(OnGpu()).sizes == ()
    about.ndim, OnGpu.refuses.value = 2, 1
    refused()
    OnGpu.refuses.value = 0
    assert [ep.Tensor(64, dtype=0, shape=(2,)).sizes, ep.Tensor(OnGpu()).sizes] == [(2,), (8, 64)]
    about.strides = None  # C-contiguous
    object = OnGpu()
    object.tensor = ep.Tensor(object)
    gone = weakref.ref(object)
    del object
    gc.collect()
    assert gone() is None, "a cycle through a tensor is not collected"
    ep.load("cpu")
    assert ep.Tensor(np.zeros(3, np.int8)).sizes == (3,)
    refused()
print("all")
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_tensors_on_a_gpu_by_the_functions_of_their_type() -> None:
    """DLPack's table: every type, what is refused, the older of two versions, cycles."""
    assert run(ON_GPU) == "all\n"


@pytest.mark.parametrize("mode", MODES)
def test_reference_of_one_rank(mode: str) -> None:
    case = Case(mode, ranks=1, experts=4, seed=3)
    (got,) = with_threads(partial(through_ep, case), 1)
    assert got.bytes() == by_reference(case)[0].bytes()


def test_stub_names_what_is_there() -> None:
    from trefoil.ep._load import c

    stub = (Path(ep.__file__).parents[1] / "_c.pyi").read_text()
    named = set(re.findall(r"^(?:def|class) (\w+)", stub, flags=re.MULTILINE))
    assert named == {name for name in dir(c) if not name.startswith("__")}
