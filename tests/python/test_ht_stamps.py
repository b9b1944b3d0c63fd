"""The report of the stamps of high throughput across domains."""

from pathlib import Path

import numpy as np
import pytest

from trefoil import ht_stamps as stamps


def write(path: Path, launch: int, duties: dict[int, list[tuple[int, int, int]]]) -> None:
    """Stamps of a dispatch's ring 0: by duty (ns, of, count)."""
    shape = (2, stamps.LAUNCHES, stamps.RINGS, stamps.DUTIES)
    out = np.zeros(shape, dtype=stamps.DUTY)
    for duty, events in duties.items():
        to = out[0, launch % stamps.LAUNCHES, 0, duty]
        to["number"], to["stamps"] = launch + 1, len(events)
        for i, event in enumerate(events):
            to["at"][i] = event
    out.tofile(path)


def test_a_row_is_a_put(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s = stamps
    sent = [
        (1000, s.LEFT, 70),
        (1000, s.FILLED, 32),
        (2000, s.PUT, 32),
        (9000, s.FILLED, 64),
        (9500, s.PUT, 64),
        (31000, s.LEFT, 71),
        (42000, s.LEFT, 72),
    ]
    taken = [(33000, s.LANDED, 32), (45500, s.LANDED, 64)]
    write(tmp_path / "s.0", 130, {0: sent})
    write(tmp_path / "s.1", 130, {1: taken, 2: [(47000, s.READ, 64)]})
    assert s.main([str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "dispatch 130, rank 0 to 1, us"
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in out[4:]]
    assert cells == [
        ["32", "0.0", "1.0", "30.0", "32.0", "46.0"],
        ["64", "8.0", "8.5", "41.0", "44.5", "46.0"],
    ]


def test_what_is_not_there_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "s")
    assert stamps.main([prefix]) == 2
    (tmp_path / "s.0").write_bytes(b"none")
    assert stamps.main([prefix]) == 2
    write(tmp_path / "s.0", 3, {0: [(1, stamps.FILLED, 1)]})
    assert stamps.main([prefix, "--kind", "combine"]) == 2
    assert stamps.main([prefix, "--launch", "4"]) == 2
    assert stamps.main([prefix]) == 0
    said = capsys.readouterr().err.splitlines()
    ends = ("No such file or directory", "no file of stamps", "no combine", "and ring 0")
    assert len(said) == 4 and all(line.endswith(end) for line, end in zip(said, ends, strict=True))
