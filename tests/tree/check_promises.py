"""Each promise of SECURITY.md is shown by tests that exist.

    python3 check_promises.py ROOT BUILD_DIR

The last column of its table names, in backticks, a ctest entry (`fuzz_*` is at least one) or a
file; after a colon may follow test cases of that entry's program, which its --list must print.
"""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def entries(build: Path) -> dict[str, list[str]]:
    """The command of each ctest entry."""
    command = ["ctest", "--test-dir", str(build), "--show-only=json-v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {t["name"]: t.get("command", []) for t in json.loads(done.stdout)["tests"]}


def rows(text: str) -> Iterator[tuple[str, str]]:
    """What a promise is against, and its column of tests."""
    table = text.partition("## What is promised")[2].partition("\n\nTests that")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) >= 3 and cells[0] != "against":
            yield cells[0], cells[-1]


def check_cases(command: list[str], cases: str) -> Iterator[str]:
    wanted = re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", cases)
    if not wanted:
        return
    done = subprocess.run([command[0], "--list"], capture_output=True, text=True, check=False)
    there = set(done.stdout.split())
    yield from (f"has no case {case}" for case in wanted if case not in there)


def check_tests(column: str, root: Path, known: dict[str, list[str]]) -> Iterator[str]:
    named = re.findall(r"`([^`]+)`([^`]*)", column)
    if not named:
        yield "no test is named"
    for name, after in named:
        if "/" in name:
            if not (root / name).exists():
                yield f"{name} is not there"
            continue
        found = fnmatch.filter(known, name)
        if not found:
            yield f"there is no test {name}"
        elif after.lstrip().startswith(":"):
            yield from (f"{name} {what}" for what in check_cases(known[found[0]], after))


def main() -> int:
    root, build = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    known = entries(build)
    promises = list(rows((root / "SECURITY.md").read_text(encoding="utf-8")))
    findings = [
        f"SECURITY.md, against {against}: {what}"
        for against, column in promises
        for what in check_tests(column, root, known)
    ]
    print("\n".join(findings) or f"{len(promises)} promises, each with tests that exist")
    return 1 if findings or len(promises) < 10 else 0


if __name__ == "__main__":
    sys.exit(main())
