"""What ptxas says of kernels: compiles their sources again, as the build does, and reads it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass
class Kernel:
    """The most of all architectures, in bytes."""

    registers: int = 0
    stack: int = 0
    spilled: int = 0


@dataclass
class Source:
    path: Path
    words: list[str]  # the command up to the output
    folder: str


def sources(compile_commands: Path) -> list[Source]:
    """Every CUDA file that nvcc compiles here; tests/emulator compiles them for the CPU."""
    found = []
    for entry in json.loads(compile_commands.read_text()):
        words = shlex.split(entry["command"])
        first = next((i for i, word in enumerate(words) if Path(word).name == "nvcc"), None)
        if Path(entry["file"]).suffix != ".cu" or first is None:
            continue
        words = words[first:]
        del words[words.index("-o") : words.index("-o") + 2]
        found.append(Source(Path(entry["file"]), words, entry["directory"]))
    return found


def _report(source: Source) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        command = [*source.words, "-Xptxas", "-v", "-o", f"{scratch}/out.o"]
        done = subprocess.run(
            command, cwd=source.folder, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(f"{source.path.name}: {done.stderr[-2000:]}")
    return done.stderr + done.stdout


def kernels_of(source: Source) -> dict[str, Kernel]:
    """By mangled name."""
    found: dict[str, Kernel] = {}
    kernel = Kernel()
    for line in _report(source).splitlines():
        if match := ENTRY.search(line):
            kernel = found.setdefault(match[1], Kernel())
        elif match := STACK.search(line):
            kernel.stack = max(kernel.stack, int(match[1]))
            kernel.spilled = max(kernel.spilled, int(match[2]))
        elif match := REGISTERS.search(line):
            kernel.registers = max(kernel.registers, int(match[1]))
    return found
