"""The structs of tensors: dataclasses whose fields lie where a call reads them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest

import ep_needs  # noqa: F401
from trefoil import ep

KINDS = (
    ep.LayoutInfo,
    ep.DispatchInputs,
    ep.DispatchOutputs,
    ep.CombineInputs,
    ep.CombineOutputs,
)


@pytest.mark.parametrize("kind", KINDS)
def test_dataclass(kind: type) -> None:
    """Keyword-only, with defaults, equality, a text, copies; no other attribute."""
    names = [f.name for f in fields(kind)]
    made = kind(**{name: number for number, name in enumerate(names)})
    assert [getattr(made, name) for name in names] == list(range(len(names)))
    assert all(vars(kind.__mro__[1])[name].__objclass__ is kind.__mro__[1] for name in names)
    assert not set(names) & set(vars(kind))
    assert copy.copy(made) == pickle.loads(pickle.dumps(made)) == made != kind()
    assert replace(made, **{names[0]: 7}) == kind(
        **{n: getattr(made, n) for n in names[1:]}, **{names[0]: 7}
    )
    assert f"{names[1]}=1" in repr(made)
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(AttributeError):
        made.other = 1
    delattr(made, names[0])
    with pytest.raises(AttributeError, match=names[0]):
        getattr(made, names[0])


def test_collected() -> None:
    """What a struct holds goes with it, also where it is held by what it holds."""
    array = np.zeros(4, np.float32)
    tensor = ep.Tensor(array)
    end = weakref.ref(array)
    inputs = ep.DispatchInputs(tokens=tensor)
    inputs.scales = [inputs]  # type: ignore[assignment]
    del array, tensor, inputs
    gc.collect()
    assert end() is None
