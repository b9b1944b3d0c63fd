"""Commands in the documents exist: verbs and options of trefoil, tools and theirs, ctest names.

    python3 check_commands.py ROOT BUILD_DIR [TREFOIL]

Reads README.md and docs/*.md. A line of a code block that starts with `trefoil VERB` must name a
verb, and every --option on it must be in that verb's --help; the same for `tools/NAME`. Every
`ctest ... -R NAME` or `-L LABEL`, wherever it stands, must select at least one test.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside:
            yield number, line.strip().removeprefix("$ ")


@cache
def help_of(*command: str) -> str | None:
    """What the command prints for --help, or None if it does not know itself."""
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def check_line(line: str, root: Path, trefoil: str) -> Iterator[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    if not words:
        return
    if words[0].rpartition("/")[2] == "trefoil" and len(words) > 1 and trefoil:
        depth = 1
        sub = words[2] if len(words) > 2 and re.fullmatch(r"[a-z]+", words[2]) else ""
        if sub and words[1] == "trace":
            depth = 2
        command = [trefoil, *words[1 : depth + 1]]
    elif words[0].startswith("tools/") and (root / words[0]).name in ("test", "tour"):
        command = [str(root / words[0])]
    else:
        return
    if words[1:2] in (["--help"], ["--version"]):
        return
    text = help_of(*command)
    if text is None:
        yield f"{' '.join(command[1:]) or words[0]} is not a command"
        return
    for word in words[1:]:
        option = word.split("=")[0]
        if re.match(r"--[a-z]", option) and not re.search(re.escape(option) + r"\b", text):
            yield f"{' '.join(words[:2])} has no option {option}"


def check_ctest(text: str, build: Path) -> Iterator[str]:
    for flag, name in re.findall(r"ctest[^`\n]* (-[RL]) ([\w.|^$-]+)", text):
        command = ["ctest", "--test-dir", str(build), "-N", flag, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Total Tests: 0" in done.stdout or done.returncode:
            yield f"ctest {flag} {name} selects no test"


def main() -> int:
    root, build = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    trefoil = sys.argv[3] if len(sys.argv) > 3 else ""
    findings = []
    checked = 0
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        name = path.relative_to(root)
        for number, line in code_lines(path):
            checked += line.startswith(("trefoil", "tools/"))
            findings += [f"{name}:{number}: {what}" for what in check_line(line, root, trefoil)]
        findings += [f"{name}: {what}" for what in check_ctest(path.read_text(), build)]
    print("\n".join(findings) or f"{checked} commands, all of them known")
    return 1 if findings or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
