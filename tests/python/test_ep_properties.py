"""Whatever trefoil.ep is given: what fits works, all else raises with a sentence. Random examples,
the same in every run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ep_needs  # noqa: F401

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ep_steps import MODES, Case, Outputs, by_reference, through_ep, with_threads
from trefoil import check_dispatch, ep
from trefoil.ep._load import c
from trefoil.ep.enums import DataType
from trefoil.reference import Step

slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=slow)
many = settings(few, max_examples=200)
KNOWN = ["bool", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
TYPES = [*KNOWN, "i2", "u2", "c8", ">f4", ">i8", "S3", "U2", "O", "M8[s]"]


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Of an array: cut, stepped, reversed, transposed, spread; or empty, or of no dimension."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    array = np.zeros(shape, dtype)
    cuts = []
    for size in shape:
        first, end = draw(st.integers(0, size)), draw(st.integers(0, size))
        step = draw(st.sampled_from([1, 1, 2, -1]))
        cuts.append(slice(first, end, step) if draw(st.booleans()) else slice(None))
    array = array[(*cuts, ...)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    return np.broadcast_to(array, (2, *array.shape)) if draw(st.booleans()) else array


@many
@given(views())
def test_tensors_of_any_view(array: np.ndarray) -> None:
    """Taken where it lies if it is C-contiguous and of a type of the API; else refused."""
    known = array.dtype in [np.dtype(name) for name in KNOWN]
    try:
        tensor = ep.Tensor(array)
    except ep.InvalidArgumentError as error:
        assert not known or not array.flags.c_contiguous, error
        assert str(error).startswith("the tensor")
        return
    assert known and (array.flags.c_contiguous or not array.size)
    assert (tensor.sizes, tensor.ndim) == (array.shape, array.ndim)
    assert not array.size or tensor.data == array.ctypes.data


@many
@given(
    st.integers(0, 64),
    st.sampled_from(DataType),
    st.lists(st.one_of(st.integers(-1, 9), st.just(1 << 62)), max_size=4).map(tuple),
)
def test_other_types_and_shapes(size: int, dtype: DataType, shape: tuple[int, ...]) -> None:
    """Of the same bytes: no more than there are."""
    array = np.zeros(size, np.uint8)
    item = {"1": 1, "2": 2, "4": 4, "8": 8}
    bits = "".join(filter(str.isdigit, dtype.name.split("E")[0].replace("X2", "8")))
    assume(dtype.name.startswith(("INT", "UINT", "FLOAT", "BFLOAT")) and dtype != DataType.FLOAT4X2)
    width = item[str(int(bits) // 8)]
    count = 1
    for extent in shape:
        count *= extent
    fits = all(extent >= 0 for extent in shape) and count * width <= size
    if fits:
        tensor = ep.Tensor(array, dtype=dtype, shape=shape)
        assert (tensor.datatype, tensor.sizes) == (dtype, shape)
    else:
        with pytest.raises((ValueError, OverflowError)):
            ep.Tensor(array, dtype=dtype, shape=shape)


@many
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 100), st.booleans()), max_size=12))
def test_overlapping_views(parts: list[tuple[int, int, bool]]) -> None:
    """Made and dropped in any order, by producers that do not know of one another: the library
    knows each as long as it lives, and nothing afterwards."""
    array = np.zeros(1000, np.float32)
    alive: list[tuple[np.ndarray, ep.Tensor]] = []
    for first, size, drop in parts:
        part = array[first : first + size]
        foreign = SimpleNamespace(__array_interface__=part.__array_interface__, keeps=part)
        alive.append((part, ep.Tensor(foreign)))
        if drop:
            alive.pop((first + size) % len(alive))
        for view, tensor in alive:
            assert tensor.data == view.ctypes.data
            assert c.known(tensor.data) and c.known(tensor.data + view.nbytes - 1)
    alive.clear()
    tensor = None
    assert not any(c.known(array.ctypes.data + byte) for byte in range(0, array.nbytes, 4))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, local = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Case(
        draw(st.sampled_from(MODES)),
        ranks=ranks,
        experts=ranks * local,
        topk=draw(st.integers(1, ranks * local)),
        tokens=draw(st.integers(3, 9)),
        hidden=8 * draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 1 << 20)),
    )


@few
@given(cases())
def test_steps_equal_the_reference(case: Case) -> None:
    found = with_threads(lambda rank, comm: through_ep(case, rank, comm), case.ranks)
    expected = by_reference(case)
    assert [one.bytes() for one in found] == [one.bytes() for one in expected]


ALONE = Case("ht-flat", ranks=1, experts=4)
FIELDS = ("tokens", "topk_weights", "scales", "topk_idx")


@st.composite
def operands(draw: st.DrawFn) -> Any:
    """What a field of a call may be given."""
    count = len(ALONE.routing(0))
    shapes = [(count, 32), (count, 3), (ALONE.max_recv(), 32), (ALONE.max_recv(), 3), (), (0, 3)]
    shape = draw(st.sampled_from(shapes))
    array = np.zeros(shape, draw(st.sampled_from(["f4", "f2", "i8", "i4", "u1"])))
    array.flags.writeable = draw(st.integers(0, 4)) > 0
    return draw(st.sampled_from([None, ep.Tensor(array), ep.Tensor(array), array, "rows"]))


@settings(few, max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS), operands()), st.data())
def test_any_operands(changed: dict[str, Any], data: st.DataObject) -> None:
    """A dispatch of anything: it works or is refused, and afterwards a right one works."""
    side = data.draw(st.sampled_from(["inputs", "outputs"]))

    def work(rank: int, comm: ep.Communicator) -> None:
        rows, weights = ALONE.rows(0), ALONE.weights(0)
        with (
            ep.Group.create(comm, ALONE.group_config()) as group,
            group.create_handle(ep.Layout.FLAT, ep.Tensor(ALONE.routing(0))) as handle,
        ):
            for fields in (changed, {}):
                out = Outputs.poisoned(ALONE, 0)
                tensors = {"tokens": out.tokens, "topk_weights": out.weights, "topk_idx": out.ids}
                written = {name: ep.Tensor(array) for name, array in tensors.items()}
                read = {"tokens": ep.Tensor(rows), "topk_weights": ep.Tensor(weights)}
                part = read if side == "inputs" else written
                part.update(
                    {k: v for k, v in fields.items() if side == "outputs" or k != FIELDS[3]}
                )
                try:
                    handle.dispatch(ep.DispatchInputs(**read), ep.DispatchOutputs(**written))
                except (ep.Error, TypeError, ValueError) as error:
                    assert fields and str(error)
                ep.synchronize()
            used = (ALONE.routing(0) >= 0).any(1)
            assert np.array_equal(out.tokens[: used.sum()], rows[used])

    with_threads(work, 1)


@many
@given(cases(), st.data())
def test_a_planted_fault_is_named(case: Case, data: st.DataObject) -> None:
    """A value of one slot is changed: check_dispatch says which slot it is, and no other."""
    ranks = range(case.ranks)
    ids, rows = [case.routing(r) for r in ranks], [case.rows(r) for r in ranks]
    rank = data.draw(st.sampled_from(ranks))
    step = Step(ids, case.experts, max_tokens=case.tokens)
    used = np.flatnonzero(step.slots(case.mode, rank)["src"] >= 0)
    assume(len(used))
    received = by_reference(case)[rank].tokens
    sizes = {"num_experts": case.experts, "max_tokens": case.tokens}
    assert check_dispatch(case.mode, ids, rows, {rank: received}, **sizes).ok
    slot = int(data.draw(st.sampled_from(used.tolist())))
    received.reshape(-1, case.hidden)[slot, data.draw(st.integers(0, case.hidden - 1))] += 1
    found = check_dispatch(case.mode, ids, rows, {rank: received}, **sizes)
    assert [(d.rank, d.slot) for d in found.differences] == [(rank, slot)]
