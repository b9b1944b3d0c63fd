"""Registers and stack of the GIN verbs, all backends, as ptxas reports them.

    python3 check_net_verbs.py COMPILE_COMMANDS

Compiles net_verbs.cu again. A kernel that posts has a descriptor on its stack; one that only reads
a signal has none. More than LIMITS means that a newer NCCL, or a change of ours, costs the warps of
kernels registers. Exit code 77 without nvcc or NCCL's headers.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

# Part of the mangled name: (registers, bytes of stack).
LIMITS = {
    "netWorkKernel": (128, 160),
    "putKernel": (72, 160),
    "strongKernel": (72, 160),
    "readKernel": (32, 0),
}
ENTRY = re.compile(r"Compiling entry function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
REGISTERS = re.compile(r"Used (\d+) registers")


def command_of(path: Path) -> tuple[list[str], str] | None:
    for entry in json.loads(path.read_text()):
        if Path(entry["file"]).name != "net_verbs.cu":
            continue
        words = shlex.split(entry["command"])
        first = next((i for i, word in enumerate(words) if Path(word).name == "nvcc"), None)
        if first is None:
            return None
        words = words[first:]
        del words[words.index("-o") : words.index("-o") + 2]
        return words, entry["directory"]
    return None


def report_of(words: list[str], folder: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        command = [*words, "-Xptxas", "-v", "-o", f"{scratch}/out.o"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"net_verbs.cu: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def kernels_of(report: str) -> dict[str, list[int]]:
    """Kernel: registers, stack, spilled bytes; the most of all architectures."""
    found: dict[str, list[int]] = {}
    entry = ""
    for line in report.splitlines():
        if match := ENTRY.search(line):
            entry = match[1]
            found.setdefault(entry, [0, 0, 0])
        elif (match := STACK.search(line)) and entry:
            found[entry][1] = max(found[entry][1], int(match[1]))
            found[entry][2] = max(found[entry][2], int(match[2]))
        elif (match := REGISTERS.search(line)) and entry:
            found[entry][0] = max(found[entry][0], int(match[1]))
    return found


def main() -> int:
    command = command_of(Path(sys.argv[1]))
    if command is None:
        print("skipped: net_verbs.cu is not compiled in this build")
        return 77
    kernels = kernels_of(report_of(*command))
    bad = 0
    for part, (registers, stack) in LIMITS.items():
        got = next((numbers for name, numbers in kernels.items() if part in name), None)
        if got is None:
            print(f"ptxas named no {part}")
            bad += 1
        elif got[0] > registers or got[1] > stack or got[2]:
            print(
                f"{part}: {got[0]} registers, {got[1]} bytes of stack, {got[2]} spilled;"
                f" {registers}, {stack} and 0 are accepted"
            )
            bad += 1
        else:
            print(f"{part}: {got[0]} registers, {got[1]} bytes of stack")
    print(f"{len(LIMITS)} tests, {bad} failed, 0 skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
