"""Planted bugs of the kernels on GPUs, where the machine that has them cannot build: packed here,
run there. A part of tools/mutate (--gpu-build, --gpu-run).

A packed folder holds programs.tar.xz, one program of tests/kernels for each mutant and the ones
without any, and mutants.json: what each is, and its commands. The programs differ little, so they
are compressed as one stream, with a window as long as several of them.

On the GPU machine each command is a process of its own, ended at its first FAILED or at its time
limit: as many times as long as the program without a mutant took, since several share a GPU; who
took longer runs once more with a GPU to itself. Those without a mutant run first and, once more,
among the others; where one of these fails, what its mutants did says nothing and is left out. Needs
Python 3.11 and nothing else.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SLOW = "took longer than"
SHORTER = 2  # commands are those of ctest with half of their cases
ALONE = {"--faults", "--masks"}  # time limits of the device: nothing else runs meanwhile


def halved(words: list[str]) -> list[str]:
    """The arguments of a test with half of the cases."""
    words = list(words)
    if "--cases" in words:
        at = words.index("--cases") + 1
        words[at] = str(max(1, int(words[at]) // SHORTER))
    return words


@dataclass
class Package:
    """What is packed: programs by name, and what is run with them."""

    folder: Path
    programs: dict[str, Path] = field(default_factory=dict)
    mutants: list[dict] = field(default_factory=list)

    def add(self, program: Path, name: str, entry: dict) -> None:
        target = self.folder / "programs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", str(target), str(program)], check=True)
        self.programs[name] = target
        if entry:
            self.mutants.append(entry)

    def write(self, commit: str) -> int:
        """Writes mutants.json and programs.tar.xz; the latter's bytes."""
        packed = self.folder / "programs.tar.xz"
        largest = max(p.stat().st_size for p in self.programs.values())
        window = 1 << max(16, (4 * largest).bit_length())
        chain = [{"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": window}]
        with (
            lzma.open(packed, "wb", filters=chain) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for name, path in sorted(self.programs.items(), key=lambda p: p[1].name):
                tar.add(path, name)  # those of one program one after the other
        shutil.rmtree(self.folder / "programs")
        about = {"commit": commit, "mutants": self.mutants}
        (self.folder / "mutants.json").write_text(json.dumps(about, indent=1) + "\n")
        return packed.stat().st_size


@dataclass
class Runner:
    """Runs commands of packed programs, on GPU i mod n."""

    programs: Path
    gpus: int
    deadline: float
    at: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def environment(self) -> dict[str, str]:
        with self.lock:
            gpu, self.at = self.at % max(self.gpus, 1), self.at + 1
        return os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}

    def run(self, command: list[str], limit: float) -> dict:
        """state: passed, killed, skipped, or late: the deadline came before its limit."""
        began = time.monotonic()
        left = self.deadline - began
        if left < 1:
            return {"state": "late", "said": "", "seconds": 0}
        with subprocess.Popen(
            [str(self.programs / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self.environment(),
            start_new_session=True,
        ) as process:
            over = threading.Event()

            def end() -> None:
                over.set()
                os.killpg(process.pid, signal.SIGKILL)

            timer = threading.Timer(min(limit, left), end)
            timer.start()
            failed = said = ""
            for line in process.stdout or ():
                said = line.strip() or said
                if line.startswith("FAILED"):
                    failed = said
                    os.killpg(process.pid, signal.SIGKILL)
                    break
            code = process.wait()
            timer.cancel()
        state = "killed" if failed or code else "passed"
        if over.is_set():
            said = f"{SLOW} {limit:.0f} s"
            state = "killed" if limit <= left else "late"
        elif code == 77:
            state = "skipped"
        seconds = round(time.monotonic() - began, 1)
        return {"state": state, "said": failed or said or f"exit code {code}", "seconds": seconds}


def unpack(folder: Path, to: Path) -> dict:
    with (
        lzma.open(folder / "programs.tar.xz") as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        # Python 3.11.2 (Debian 12) has no filters yet.
        tar.extractall(to, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return json.loads((folder / "mutants.json").read_text())


def count_gpus() -> int:
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in said.splitlines())


def good_command(command: list[str]) -> list[str]:
    """The same with the program that has no mutant."""
    return ["good/" + command[0].rpartition("/")[2], *command[1:]]


def judge(runner: Runner, entry: dict, limits: dict[str, float]) -> dict:
    """Its commands one after the other until one notices it."""
    began, ran = time.monotonic(), []
    result = {"title": entry["title"], "state": "survived", "by": [], "said": ""}
    for command in entry["commands"]:
        words = " ".join(good_command(command))
        if words not in limits:
            continue
        found = runner.run(command, limits[words])
        if found["state"] in ("late", "skipped"):
            result["state"] = "not run"
            break
        ran.append(words.removeprefix("good/"))
        if found["state"] == "killed":
            result |= {"state": "killed", "by": [ran[-1]], "said": found["said"]}
            break
    if not ran:
        result["state"] = "not run"
    return result | {"ran": ran, "seconds": round(time.monotonic() - began, 1)}


def run_good(runner: Runner, commands: list[list[str]], together: int, factor: float) -> dict:
    """Time limits of the commands that pass without a mutant."""
    limits = {}
    shared = [c for c in commands if not ALONE & set(c)]
    alone = [c for c in commands if ALONE & set(c)]

    def one(command: list[str]) -> tuple[list[str], dict]:
        return command, runner.run(command, 120)

    with ThreadPoolExecutor(together) as pool:
        found = list(pool.map(one, shared))
    found += [one(c) for c in alone]
    for command, result in found:
        words = " ".join(command)
        print(f"without a mutant: {words}: {result['state']}, {result['seconds']} s", flush=True)
        if result["state"] == "passed":
            limits[words] = max(10.0, factor * result["seconds"])
        else:
            print(f"  {result['said']}; its mutants are not judged by it", flush=True)
    return limits


def run_packed(
    folder: Path, results: Path, together: int, factor: float, seconds: float
) -> tuple[int, int]:
    """Runs a packed folder; how many were judged, and killed. Results are kept after each."""
    gpus = count_gpus()
    kept: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        about = unpack(folder, Path(scratch))
        runner = Runner(Path(scratch), gpus, time.monotonic() + seconds)
        entries = about["mutants"]
        names = {" ".join(good_command(c)): good_command(c) for m in entries for c in m["commands"]}
        limits = run_good(runner, list(names.values()), together, factor)

        def record(entry: dict) -> dict:
            found = judge(runner, entry, limits)
            with runner.lock:
                kept[entry["id"]] = found
                document = {"commit": about["commit"], "gpus": gpus, "results": kept}
                results.write_text(json.dumps(document, indent=1) + "\n")
                said = f": {found['said'][:120]}" if found["said"] else ""
                print(f"{entry['title']}: {found['state']}, {found['seconds']} s{said}", flush=True)
            return found

        shared = [m for m in entries if not any(ALONE & set(c) for c in m["commands"])]
        again = [names[w] for w in limits if not ALONE & set(names[w])]
        with ThreadPoolExecutor(together) as pool:
            first = [pool.submit(record, m) for m in shared[: len(shared) // 2]]
            among = [pool.submit(runner.run, c, 2 * limits[" ".join(c)]) for c in again]
            rest = [pool.submit(record, m) for m in shared[len(shared) // 2 :]]
            for future in [*first, *rest]:
                future.result()
            for command, future in zip(again, among, strict=True):
                found = future.result()
                print(f"without a mutant, once more: {' '.join(command)}: {found['state']}")
                if found["state"] == "killed":
                    drop_judged_by(kept, " ".join(command).removeprefix("good/"))
        with ThreadPoolExecutor(max(1, gpus)) as pool:  # nobody else made these slow
            list(pool.map(record, [m for m in shared if SLOW in kept[m["id"]]["said"]]))
        for m in entries:
            if m not in shared:
                record(m)
        document = {"commit": about["commit"], "gpus": gpus, "results": kept}
        results.write_text(json.dumps(document, indent=1) + "\n")
    states = [r["state"] for r in kept.values()]
    return states.count("killed") + states.count("survived"), states.count("killed")


def drop_judged_by(kept: dict[str, dict], words: str) -> None:
    for result in kept.values():
        if result["state"] == "killed" and result["by"] == [words]:
            result |= {"state": "not run", "said": "the program without a mutant failed, too"}


def pick(mutants: list, most: int, urgent: Callable[[object], int]) -> list:
    """The most urgent (0 first) and then, of each urgency, evenly over the files."""
    chosen: list = []
    for level in sorted({urgent(m) for m in mutants}):
        files: dict[str, list] = {}
        for m in mutants:
            if urgent(m) == level:
                files.setdefault(m.file, []).append(m)
        while files and len(chosen) < most:
            for name in list(files):
                if len(chosen) < most:
                    chosen.append(files[name].pop(0))
                if not files[name]:
                    del files[name]
    return chosen
