"""Sweeps: many points of `trefoil simulate`, on all cores or many machines, resumed at need.

    import trefoil
    points = [{"gpus": g, "mode": "ll", "tokens": 128} for g in (8, 16, 32, 64)]
    for outcome in trefoil.sweep(points, results="sweep.jsonl"):
        print(outcome.point["gpus"], outcome.answer["seconds"])

A point is a dictionary of the verb's options, "physical_experts" for --physical-experts. Each runs
as a process of its own, so any concurrent.futures executor will do: threads here, MPIPoolExecutor
of mpi4py.futures or Client.get_executor() of dask.distributed on many machines
(docs/plan.md).

The results file has one JSON object a line, appended with a single write under a lock. A sweep that
was killed goes on where it was: what is in the file is not computed again, a torn last line is
ignored. A line's key is a hash of the point, of the contents of the files it names, and of the
program, so a changed cluster file or a new build is computed anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    as_completed,
)
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trefoil.verb import when_interrupted

Value = str | int | float | bool
Point = Mapping[str, Value]


class SweepError(RuntimeError):
    """The sweep cannot run, or a point failed; the text says what and why."""


@dataclass(frozen=True)
class Outcome:
    """What became of a point: the verb's answer, or its refusal."""

    point: dict[str, Value]
    key: str
    answer: dict[str, Any] | None  # what `trefoil simulate --json` printed
    refusal: str = ""  # its sentence, where the point makes no sense (exit code 2)
    fresh: bool = True  # computed now, not read from the results file


def find_program() -> str:
    """The command `trefoil`: $TREFOIL_PROGRAM, else beside this package, else on the PATH."""
    if said := os.environ.get("TREFOIL_PROGRAM"):
        return said
    up = Path(__file__).resolve().parents
    candidates = [up[2] / "build" / preset / "cli/trefoil" for preset in ("dev", "ci")]
    if len(up) > 4:
        candidates.insert(0, up[4] / "bin/trefoil")
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    if found := shutil.which("trefoil"):
        return found
    raise SweepError("the command trefoil was not found; TREFOIL_PROGRAM names it")


def _plain(value: Any) -> Value:
    """NumPy's numbers and paths as Python's own, which JSON and command lines take."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def arguments_of(point: Point) -> list[str]:
    """The point as the verb's command line."""
    return ["simulate", *_options_of(point)]


def _options_of(point: Point) -> list[str]:
    words = ["--json"]
    for name, value in point.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, str(value)]
    return words


def run_point(program: str, point: Point, timeout: float | None = None) -> tuple[str, str]:
    """Runs one point: (answer, "") or ("", refusal). Picklable, and needs only the program.

    Raises SweepError where the program fails rather than refuses: that may pass, and is not kept.
    """
    command = [program, *arguments_of(point)]
    try:
        process = _start(command)
    except OSError as error:
        raise SweepError(f"{program} cannot be run: {error.strerror}") from error
    try:
        answer, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise SweepError(f"{' '.join(command)}: no answer in {timeout:g} s") from error
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        _running.discard(process)
    return _answer_of(process.returncode, answer, said, command)


def _answer_of(code: int, answer: str, said: str, command: list[str]) -> tuple[str, str]:
    if code == 0:
        return answer, ""
    said = said.strip().removesuffix("; see trefoil simulate --help")
    said = said.removeprefix("trefoil simulate: ")
    if code == 2:
        return "", said
    raise SweepError(said or f"{' '.join(command)}: exit code {code}")


Answer = tuple[str, str]  # of a point: what the program printed, or its refusal


def run_points(
    program: str, points: Sequence[Point], timeout: float | None = None
) -> list[Answer | SweepError]:
    """run_point for each; picklable, too. A failure is the last of the answers."""
    answers: list[Answer | SweepError] = []
    try:
        for point in points:
            answers.append(run_point(program, point, timeout))
    except SweepError as error:
        answers.append(error)
    return answers


def run_each(program: str, points: Sequence[Point]) -> list[Answer | SweepError]:
    """The same as processes of one that has the libraries loaded (simulate --each)."""
    command = [program, "simulate", "--each", "-"]
    answers: list[Answer | SweepError] = []
    try:
        process = _start(command, stdin=subprocess.PIPE)
    except OSError as error:
        return [SweepError(f"{program} cannot be run: {error.strerror}")]
    try:
        lines = "".join(json.dumps(_options_of(point)) + "\n" for point in points)
        told, said = process.communicate(lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        _running.discard(process)
    try:
        for line in told.splitlines():
            of = json.loads(line)
            answers.append(_answer_of(of["code"], of["out"], of["err"], command))
        if len(answers) < len(points):
            code = process.returncode
            raise SweepError(said.strip() or f"{' '.join(command)}: exit code {code}")
    except SweepError as error:
        answers.append(error)
    except (ValueError, KeyError, TypeError):
        answers.append(SweepError(f"{' '.join(command)}: an answer that cannot be read"))
    return answers


# What runs now, in whichever thread.
_running: set[subprocess.Popen[str]] = set()
_ended = False


def _start(command: list[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """A process that ends with this one, however this one ends."""
    if _ended:
        raise SweepError("the sweep was interrupted")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=stdin,
        text=True,
        env={**os.environ, "TREFOIL_END_WITH_PARENT": "1"},
    )
    _running.add(process)
    if _ended:  # by a handler meanwhile
        process.terminate()
    return process


def end_all() -> None:
    """Ends what runs; nothing starts any more. In a signal handler, so it takes no lock."""
    global _ended
    _ended = True
    for process in list(_running):
        with contextlib.suppress(OSError):
            process.terminate()


when_interrupted(end_all)


@cache
def _file_hash(path: str, changed: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _content(value: Value) -> str:
    """The hash of the file that a value names, or ""."""
    if isinstance(value, str) and ("/" in value or value.endswith((".json", ".npz", ".npy"))):
        path = Path(value)
        if path.is_file():
            return _file_hash(str(path.resolve()), path.stat().st_mtime_ns)
    return ""


def key_of(point: Point, program: str) -> str:
    """Equal for equal points, contents of the files that they name, and program."""
    path = Path(shutil.which(program) or program)
    build = _file_hash(str(path), path.stat().st_mtime_ns) if path.is_file() else program
    said = {name: [value, _content(value)] for name, value in point.items()}
    text = json.dumps([build, said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class ResultsFile:
    """Outcomes by key, kept in a file of JSON lines (None: in memory alone)."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = Path(path) if path else None
        self.known: dict[str, dict[str, Any]] = {}
        if self.path and self.path.exists():
            try:
                text = self.path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                raise SweepError(f"{self.path}: {error.strerror}") from error
            for line in text.split("\n"):
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
            self.known[record["key"]] = {"answer": record["answer"], "refusal": record["refusal"]}
        except (ValueError, KeyError, TypeError):
            return  # torn, or not ours: computed again

    def add(self, key: str, point: Point, answer: Any, refusal: str) -> None:
        self.known[key] = {"answer": answer, "refusal": refusal}
        if not self.path:
            return
        record = {"key": key, "point": dict(point), "answer": answer, "refusal": refusal}
        line = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = "\n" + line  # after a line that was torn
                if os.write(descriptor, line.encode()) != len(line.encode()):
                    raise SweepError(f"{self.path}: the disk is full")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SweepError(f"{self.path}: {error.strerror}") from error


def _bar(total: int, label: str, shown: bool | None) -> Any:
    """A progress bar, where somebody watches and tqdm is there; else None."""
    if shown is False or (shown is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(total=total, desc=label, unit="point", file=sys.stderr, leave=False)


def _collect(
    futures: dict[Future[Any], list[tuple[str, Point]]], file: ResultsFile, bar: Any
) -> None:
    """Keeps what comes in. After a failure nothing new is started, but what runs is kept too."""
    failure: Exception | None = None
    for future in as_completed(futures):
        try:
            for (key, point), said in zip(futures[future], future.result(), strict=False):
                if isinstance(said, SweepError):
                    raise said
                text, refusal = said
                file.add(key, point, json.loads(text) if text else None, refusal)
                if bar is not None:
                    bar.update()
        except CancelledError:
            continue
        except Exception as error:
            failure = failure or error
            for other in futures:
                other.cancel()
    if failure is not None:
        raise failure


MOST_TOGETHER = 16  # points of a process


def _together(count: int, threads: int) -> int:
    """Points of a process: few loads of the libraries, and work for every thread to the end."""
    return max(1, min(MOST_TOGETHER, count // (4 * threads)))


def sweep(
    points: Iterable[Point],
    *,
    executor: Executor | None = None,
    results: str | os.PathLike[str] | None = None,
    program: str | None = None,
    jobs: int | None = None,
    timeout: float | None = None,
    progress: bool | None = None,
    label: str = "simulate",
    together: bool = False,
) -> list[Outcome]:
    """Computes the points that `results` does not hold yet; outcomes come in the points' order.

    executor None: threads on this machine, `jobs` of them (default: one a core). progress None: a
    bar if stderr is a terminal. together: with these threads, and without a timeout, a process
    takes several points, which are kept when it ends. Raises SweepError at the first point that
    fails; what was computed until then is in the results file.
    """
    program = program or find_program()
    plain = [{name: _plain(value) for name, value in point.items()} for point in points]
    wanted = [(key_of(point, program), point) for point in plain]
    file = ResultsFile(results)
    missing = {key: point for key, point in wanted if key not in file.known}
    with ExitStack() as stack:
        take = 1
        if executor is None and missing:
            threads = max(1, jobs or len(os.sched_getaffinity(0)))
            executor = stack.enter_context(ThreadPoolExecutor(threads))
            if together and timeout is None:
                take = _together(len(missing), threads)
        bar = _bar(len(missing), label, progress) if missing else None
        if bar is not None:
            stack.callback(bar.close)
        futures: dict[Future[Any], list[tuple[str, Point]]] = {}
        try:
            items = list(missing.items())
            for of in (items[i : i + take] for i in range(0, len(items), take)):
                points = [point for _, point in of]
                if take > 1:
                    futures[executor.submit(run_each, program, points)] = of
                else:
                    futures[executor.submit(run_points, program, points, timeout)] = of
            _collect(futures, file, bar)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return [Outcome(point, key, **file.known[key], fresh=key in missing) for key, point in wanted]


def link_loads(point: Point, program: str | None = None) -> list[dict[str, Any]]:
    """The load of every link of a point: op, kind, index, bytes, busy_seconds, share."""
    import csv

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.csv"
        _, refusal = run_point(program or find_program(), {**point, "links": str(path)})
        if refusal:
            raise SweepError(refusal)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    whole, real = ("index", "bytes"), ("busy_seconds", "share")
    return [
        {
            **row,
            **{name: int(row[name]) for name in whole},
            **{name: float(row[name]) for name in real},
        }
        for row in rows
    ]


def refusals(outcomes: Sequence[Outcome]) -> list[str]:
    """The sentences of points that make no sense, each once."""
    return list(dict.fromkeys(o.refusal for o in outcomes if o.refusal))
