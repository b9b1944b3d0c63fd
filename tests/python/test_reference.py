"""The binding: slots and traffic against counting by hand, refusals as exceptions."""

import ctypes as ct
import os
from pathlib import Path

import numpy as np
import pytest

from trefoil import reference
from trefoil.reference import MODES, SLOT, Step, TrefoilError

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)

RANKS, EXPERTS, TOPK, ROW = 4, 12, 3, 100
LOCAL = EXPERTS // RANKS


def make_step(seed: int, ranks_per_node: int = RANKS) -> Step:
    rng = np.random.default_rng(seed)
    idx = []
    for rank in range(RANKS):
        rows = [rng.permutation(EXPERTS)[:TOPK] for _ in range(5 * rank)]
        array = np.array(rows, dtype=np.int64).reshape(-1, TOPK)
        array[rng.random(array.shape) < 0.2] = -1
        idx.append(array)
    return Step(idx, EXPERTS, ranks_per_node)


def targets(row: np.ndarray) -> set[int]:
    return {int(e) // LOCAL for e in row if e >= 0}


def test_library_is_looked_for_in_installs_and_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside an install of any layout, in build/dev of a tree that may lie right under the root."""
    monkeypatch.delenv("TREFOIL_LIB")
    places = {
        "prefix/share/trefoil/python": "prefix/lib/x86_64-linux-gnu",
        "other/share/trefoil/python": "other/lib",
        "tree/python": "tree/build/dev",
    }
    for package, folder in places.items():
        (tmp_path / folder).mkdir(parents=True)
        expected = tmp_path / folder / "libtrefoil.so.0"
        expected.touch()
        monkeypatch.setattr(reference, "__file__", str(tmp_path / package / "trefoil/reference.py"))
        assert str(expected) in reference._candidates()
    monkeypatch.setattr(reference, "__file__", "/src/python/trefoil/reference.py")
    assert reference._candidates()[0] == "/src/build/dev/libtrefoil.so.0"


def test_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file that TREFOIL_LIB names is the only one, and the loader's reason is passed on."""
    monkeypatch.setenv("TREFOIL_LIB", str(tmp_path / "lib.so"))
    with pytest.raises(TrefoilError, match="was not found"):
        reference._load()
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(TrefoilError, match=r"lib\.so cannot be loaded: .*lib\.so: "):
        reference._load()


def test_numbers_that_c_cannot_hold() -> None:
    """Their low bits would be another case."""
    with pytest.raises(OverflowError, match=r"num_experts is 4294967300; its field in C holds 4"):
        Step([[[0, 1]]], num_experts=2**32 + 4)
    step = Step([[[0, 1]]], num_experts=4)
    with pytest.raises(OverflowError, match="row_bytes is -1"):
        step.traffic("ht-flat", "dispatch", row_bytes=-1)
    with pytest.raises(TrefoilError, match="rank 4294967296: expected 0 to 0"):
        step.slots("ht-flat", rank=2**32)


def test_slot_struct_is_c() -> None:
    assert SLOT.itemsize == 24
    assert SLOT.fields is not None
    assert [SLOT.fields[n][1] for n in SLOT.names or ()] == [0, 8, 16, 20]
    assert ct.sizeof(ct.c_int64) == 8


@pytest.mark.parametrize("seed", range(5))
def test_flat_slots_ascend(seed: int) -> None:
    step = make_step(seed)
    for rank in range(RANKS):
        wanted = [
            (src, token)
            for src in range(RANKS)
            for token, row in enumerate(step.idx[src])
            if rank in targets(row)
        ]
        slots = step.slots("ht-flat", rank)
        assert [(int(s["src"]), int(s["token"])) for s in slots] == wanted


def test_expert_major_zones() -> None:
    step = make_step(7)
    for rank in range(RANKS):
        slots = step.slots("ht-expert-major", rank, alignment=4)
        wanted: list[tuple[int, int]] = []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            zone = [
                (src, token)
                for src in range(RANKS)
                for token, row in enumerate(step.idx[src])
                if expert in row
            ]
            wanted += zone + [(-1, -1)] * (-len(zone) % 4)
        assert [(int(s["src"]), int(s["token"])) for s in slots] == wanted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_traffic_on_one_node(mode: str, op: str) -> None:
    step = make_step(3)
    per_entry = mode == "ll-expert-major" and op == "combine"
    wanted = np.zeros((RANKS, RANKS), dtype=np.uint64)
    for src in range(RANKS):
        for row in step.idx[src]:
            for target in targets(row):
                used = [e for e in row if e >= 0 and e // LOCAL == target]
                wanted[src, target] += ROW * (len(used) if per_entry else 1)
    if op == "combine":
        wanted = wanted.T
    assert np.array_equal(step.traffic(mode, op, ROW), wanted)


def test_two_nodes_go_over_the_rail() -> None:
    # Rank 0's one token wants ranks 2 and 3, both on node 1: one row to rank 2 (its rail), which
    # keeps it and forwards one to rank 3.
    idx = [np.array([[2 * LOCAL, 3 * LOCAL, -1]]), *[np.zeros((0, TOPK), dtype=int)] * 3]
    step = Step(idx, EXPERTS, ranks_per_node=2)
    wanted = np.zeros((RANKS, RANKS), dtype=np.uint64)
    wanted[0, 2] = wanted[2, 2] = wanted[2, 3] = ROW
    assert np.array_equal(step.traffic("ht-flat", "dispatch", ROW), wanted)
    assert np.array_equal(step.traffic("ht-flat", "combine", ROW), wanted.T)


def test_refusals() -> None:
    row = np.zeros((1, TOPK), dtype=int)
    with pytest.raises(TrefoilError, match=r"duplicate|twice|more than once"):
        Step([row, row], EXPERTS)
    with pytest.raises(TrefoilError, match=r"ids in \[0, 12\)"):
        Step([row + EXPERTS], EXPERTS)
    with pytest.raises(TrefoilError, match="same K"):
        Step([np.zeros((1, 2), int), np.zeros((1, 3), int)], EXPERTS)
    with pytest.raises(TrefoilError):
        Step([np.zeros((0, TOPK))] * 4, EXPERTS, ranks_per_node=3)
    with pytest.raises(TrefoilError, match="topk_idx of rank 1: elements are float64; integers"):
        Step([row, row + 0.5], EXPERTS)
    with pytest.raises(TrefoilError, match="topk_idx of rank 0: no array of numbers"):
        Step([[[0, 1], [2]]], EXPERTS)
    step = make_step(1)
    with pytest.raises(TrefoilError, match="expected ll-expert-major"):
        step.slots("flat", 0)
    with pytest.raises(TrefoilError, match="rank 9"):
        step.slots("ht-flat", 9)
    with pytest.raises(TrefoilError, match="align"):
        step.slots("ht-expert-major", 0, alignment=3)
