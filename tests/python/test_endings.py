"""How verbs end: whole files or none, a sentence and never a traceback, no process left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trefoil import outputs

PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
SMALL = ("--gpus", "8", "--tokens", "4", "--engine", "queues")
PLAN = ("plan", *SMALL, "--weight-dtype", "fp4", "--no-crossover", "--context", "64")
PLAN += ("--reserve-gb", "0")
needs_program = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")


def run(
    folder: Path, *words: str, before: Callable[[], None] | None = None, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words],
        cwd=folder,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=before,
    )


def one_kilobyte() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


def is_sentence(text: str) -> bool:
    return text.startswith("trefoil") and text.count("\n") == 1 and "Traceback" not in text


WRITERS = {
    "trace": ("trace", "generate", "--ranks", "8", "--tokens", "512", "out"),
    "timeline": ("simulate", *SMALL, "--timeline", "out"),
    "links": ("simulate", *SMALL, "--links", "out"),
    "platform": ("simulate", *SMALL, "--platform", "out"),
    "plan": (*PLAN, "-o", "out"),
    "goal": ("export", "goal", "--gpus", "8", "--tokens", "64", "--op", "dispatch", "-o", "out"),
}


@needs_program
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_too_large_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    if name != "plan":
        (tmp_path / "out").write_text("before")
    done = run(tmp_path, *WRITERS[name], before=one_kilobyte)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert is_sentence(done.stderr), done.stderr
    assert "too large" in done.stderr
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([] if name == "plan" else ["out"])
    if left:
        assert (tmp_path / "out").read_text() == "before"


@needs_program
@pytest.mark.parametrize("name", WRITERS)
def test_where_nothing_can_be_written_nothing_is_computed(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    huge = tuple(w.replace("512", "200000") for w in WRITERS[name][:-1])
    if name == "plan":
        huge = ("plan", "--gpus", "1024", "--tokens", "4096", "-o")
    began = time.monotonic()
    done = run(tmp_path, *huge, "file/out")
    assert done.returncode == 1 and is_sentence(done.stderr), done.stderr
    assert "file" in done.stderr
    assert time.monotonic() - began < 30
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@needs_program
@pytest.mark.parametrize("name", ["timeline", "links", "platform", "goal"])
def test_a_full_disk(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, *WRITERS[name][:-1], "/dev/full")
    assert done.returncode == 1 and is_sentence(done.stderr), done.stderr
    assert "No space left on device" in done.stderr
    assert Path("/dev/full").is_char_device()


@needs_program
def test_a_trace_takes_no_device(tmp_path: Path) -> None:
    done = run(tmp_path, "trace", "generate", "--tokens", "1", "/dev/full")
    assert done.returncode == 1 and "not a regular file" in done.stderr
    assert Path("/dev/full").is_char_device()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@needs_program
def test_a_small_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mount is not allowed here")
    try:
        for name in ("trace", "timeline", "plan"):
            done = run(tmp_path, *WRITERS[name])
            assert done.returncode == 1 and is_sentence(done.stderr), (name, done.stderr)
            assert list(tmp_path.iterdir()) == [], name
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@needs_program
@pytest.mark.parametrize("words", [PLAN, ("simulate", *SMALL)])
def test_stdout_that_is_full_or_closed(words: tuple[str, ...], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(tmp_path, *words, stdout=full.fileno())
    assert done.returncode == 1 and is_sentence(done.stderr), done.stderr
    ends = os.pipe()
    os.close(ends[0])  # the reader has gone
    done = run(tmp_path, *words, stdout=ends[1])
    os.close(ends[1])
    assert done.returncode in (141, -signal.SIGPIPE)
    assert done.stderr == ""


def children_of(pid: int) -> list[int]:
    """All that the process started, and they."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(path.parent.name), *children_of(int(path.parent.name))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LONG = {
    "plan": ("plan", "--gpus", "1024", "--tokens", "4096", "-o", "out"),
    "simulate": (
        *("simulate", "--gpus", "256", "--tokens", "4096", "--mode", "ht", "--engine", "simgrid"),
        *("--timeline", "out"),
    ),
    "trace": ("trace", "generate", "--ranks", "64", "--tokens", "100000", "out"),
}


@needs_program
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("after", [0.0, 1.5])
def test_a_signal_is_one_sentence(
    name: str, number: signal.Signals, after: float, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [PROGRAM, *LONG[name]],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ends = time.monotonic() + 30  # a process that has not begun its work dies of the signal itself
    while time.monotonic() < ends and not ready(process.pid):
        time.sleep(0.01)
    time.sleep(after)
    started = children_of(process.pid)
    process.send_signal(number)  # to it alone, not to what it started
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    what = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert said == f"trefoil {name}: {what}\n"
    while any(alive(pid) for pid in started) and time.monotonic() < ends + 60:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in started)
    assert list(tmp_path.iterdir()) == []


def ready(pid: int) -> bool:
    """SIGINT and SIGTERM are caught or held: the process is past its first instructions."""
    text = Path(f"/proc/{pid}/status").read_text()
    masks = dict(line.split(":\t") for line in text.splitlines() if line.startswith("Sig"))
    held = int(masks["SigCgt"], 16) | int(masks["SigBlk"], 16)
    return all(held >> (n - 1) & 1 for n in (signal.SIGINT, signal.SIGTERM))


@needs_program
def test_a_point_ends_with_the_worker_that_asked_for_it(tmp_path: Path) -> None:
    """As a worker of a process pool or of dask does, when it is killed."""
    point = {"gpus": 256, "tokens": 4096, "mode": "ht", "engine": "simgrid"}
    code = f"from trefoil.sweeping import run_point; run_point({PROGRAM!r}, {point!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path(outputs.__file__).parents[1])}
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    ends = time.monotonic() + 60
    while not (started := children_of(worker.pid)) and time.monotonic() < ends:
        time.sleep(0.05)
    while not all(ready(pid) for pid in started) and time.monotonic() < ends:
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    while any(alive(pid) for pid in started) and time.monotonic() < ends:
        time.sleep(0.05)
    assert started and not any(alive(pid) for pid in started)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), outputs.whole_folder(folder) as staging:
        (staging / "half").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "old").touch()
    with outputs.whole_folder(folder) as staging:
        (staging / "new").touch()
    assert sorted(p.name for p in folder.iterdir()) == ["new", "old"]


def test_a_link_stays_one_and_modes_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    outputs.write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
