"""Files that a user names: what is endless, or has no writer, is refused at once."""

import os
import subprocess
from pathlib import Path

import pytest

from trefoil.inputs import read_text


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("é\n", encoding="utf-8")
    assert read_text(tmp_path / "a") == "é\n"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_nothing_else_is(tmp_path: Path, kind: str) -> None:
    path = {"fifo": tmp_path / "f", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        read_text(path)


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, (1 << 20) + 1)
    with pytest.raises(OSError, match="it is larger than 1 MiB"):
        read_text(path, 1 << 20)


@pytest.mark.parametrize("verb", ["compare", "report", "fit"])
def test_verbs_refuse_a_fifo(tmp_path: Path, verb: str) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    arguments = {
        "compare": [str(fifo)],
        "report": ["--check", str(fifo), "-o", str(tmp_path / "r.html")],
        "fit": [str(fifo)],
    }[verb]
    program = os.environ.get("TREFOIL_PROGRAM", "trefoil")
    done = subprocess.run(
        [program, verb, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (1, 2)
    assert "it is not a regular file" in done.stderr
