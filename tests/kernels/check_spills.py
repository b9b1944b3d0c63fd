"""Which kernels spill registers to local memory: compiles them again and reads what ptxas says.

    python3 check_spills.py COMPILE_COMMANDS

A spill in a kernel's loop costs more than most of what is tuned by hand, and comes and goes with
small changes. A kernel that is not in ALLOWED must not spill at all; one that is must not spill
more.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

# Part of the mangled name: bytes of spill stores that are accepted, and why.
ALLOWED = {
    "DispatchTraitsILb1E": 96,  # the generic path: eight blocks of entries a lane
    "combineKernelIL4Elem": 128,  # warps of 20 and more need more registers than there are
    "partialKernelIL4Elem": 96,
    "farHtCombineKernelI7GinWire": 160,  # 18 warps, with the poster in it
}
ENTRY = re.compile(r"Compiling entry function '(\S+)'")
SPILL = re.compile(r"(\d+) bytes spill stores")


def commands(path: Path) -> list[tuple[Path, list[str], str]]:
    """(source, command up to the output, folder) of every CUDA file below kernels/."""
    found = []
    for entry in json.loads(path.read_text()):
        source = Path(entry["file"])
        if source.suffix != ".cu" or "kernels" not in source.parts or "tests" in source.parts:
            continue
        words = shlex.split(entry["command"])
        first = next((i for i, word in enumerate(words) if Path(word).name == "nvcc"), None)
        if first is None:
            continue  # compiled for the CPU (tests/emulator)
        words = words[first:]
        del words[words.index("-o") : words.index("-o") + 2]
        found.append((source, words, entry["directory"]))
    return found


def spills(source: Path, words: list[str], folder: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        command = [*words, "-Xptxas", "-v", "-o", f"{scratch}/out.o"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{source.name}: {done.stderr[-2000:]}")
    result: dict[str, int] = {}
    entry = ""
    for line in done.stderr.splitlines() + done.stdout.splitlines():
        if match := ENTRY.search(line):
            entry = match[1]
            result[entry] = 0
        elif (match := SPILL.search(line)) and entry:
            result[entry] = max(result[entry], int(match[1]))
    return result


def main() -> int:
    found = commands(Path(sys.argv[1]))
    if not found:
        print("no kernel is compiled in this build: it has other folders than this test knows")
        return 1
    bad = total = 0
    for source, words, folder in found:
        kernels = spills(source, words, folder)
        total += len(kernels)
        for name, stored in sorted(kernels.items()):
            allowed = max((n for part, n in ALLOWED.items() if part in name), default=0)
            if stored > allowed:
                print(f"{source.name}: {name} spills {stored} bytes, {allowed} are accepted")
                bad += 1
    if total == 0:
        print("ptxas named no kernel: its output has changed")
        return 1
    print(f"{total} tests, {bad} failed, 0 skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
