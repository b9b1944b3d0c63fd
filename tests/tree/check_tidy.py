"""clang-tidy finds nothing (.clang-tidy) in the sources of some folders.

    python3 check_tidy.py ROOT BUILD [--no-paths] FOLDER...

Compiles as BUILD/compile_commands.json says, on all cores. --no-paths leaves out clang-analyzer-*,
which follows paths through functions and takes twenty times as long. It fails where clang-tidy of
version 18 is missing, a folder has no source, or a source was not read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSION = "18.1.8"  # tools/requirements.in pins it: others find other things
TIME_LIMIT = 300  # seconds a file


def program() -> str | None:
    """clang-tidy of .venv, which may not be in PATH, or of the system."""
    for name in (str(Path(sys.executable).parent / "clang-tidy"), "clang-tidy", "clang-tidy-18"):
        if tool := shutil.which(name):
            done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
            if f"version {VERSION}" in done.stdout:
                return tool
    return None


def sources(root: Path, build: Path, folders: list[str]) -> dict[str, list[str]]:
    """The compiled C and C++ sources of each folder."""
    entries = json.loads((build / "compile_commands.json").read_text())
    files = {os.path.relpath(Path(e["directory"], e["file"]), root) for e in entries}
    files = {f for f in files if f.endswith((".c", ".cpp"))}
    return {name: sorted(f for f in files if f.startswith(f"{name}/")) for name in folders}


def findings(tool: str, root: Path, build: Path, checks: list[str], file: str) -> list[str]:
    command = [tool, "-p", str(build), "--quiet", "--warnings-as-errors=*", *checks]
    command += ["--extra-arg=-w", file]  # the build's own warnings, errors in CI, are gcc's
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"{file}:1: not read within {TIME_LIMIT} s"]
    found = re.findall(r"^(\S+:\d+):\d+: (?:error|warning): (.*)$", done.stdout, re.MULTILINE)
    lines = [f"{os.path.relpath(where, root)}: {what}" for where, what in found]
    if (done.returncode or ".clang-tidy:" in done.stderr) and not lines:
        lines = [f"{file}:1: not read: {(done.stdout + done.stderr).strip()[-500:]}"]
    return lines


def main() -> int:
    root, build = (Path(a).resolve() for a in sys.argv[1:3])
    checks = ["--checks=-clang-analyzer-*"] if "--no-paths" in sys.argv else []
    folders = [a for a in sys.argv[3:] if a != "--no-paths"]
    if not (tool := program()):
        print(f"clang-tidy {VERSION} is not on this machine (tools/test brings it)")
        return 1
    files = sources(root, build, folders)
    found = [f"{name}/: none of its sources is compiled" for name in folders if not files[name]]
    every = [f for name in folders for f in files[name]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines in pool.map(lambda f: findings(tool, root, build, checks, f), every):
            found += lines
    print("\n".join(sorted(set(found))) or f"{len(every)} files: nothing found")
    return 1 if found or not every else 0


if __name__ == "__main__":
    sys.exit(main())
