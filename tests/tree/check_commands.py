"""Commands in the documents exist: verbs and options of trefoil, tools and theirs, ctest names.

    python3 check_commands.py ROOT BUILD_DIR [TREFOIL]
    python3 check_commands.py --run ROOT BUILD_DIR SCRATCH_DIR

Reads README.md and docs/*.md. A line of a code block that starts with `trefoil VERB` must name a
verb, and every --option on it must be in that verb's --help; the same for `tools/NAME`. Every
`ctest ... -R NAME` or `-L LABEL`, wherever it stands, must select at least one test.

--run runs every `sh` block of README.md and of some docs as it stands, in a scratch folder that
looks like the tree with BUILD_DIR as its build/dev; each document's blocks share one shell. Only
the block of tools/tour and tools/test is left out: they would run this test.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
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
    """What the command prints for --help, or None if it does not know itself; "" where that needs
    Python modules that are not here."""
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    if done.returncode and "Python lacks the module" in done.stderr:
        return ""
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
        if sub and words[1] in ("trace", "export"):
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
    for word in words[1:] if text else ():
        option = word.split("=")[0]
        if re.match(r"--[a-z]", option) and not re.search(re.escape(option) + r"\b", text):
            yield f"{' '.join(words[:2])} has no option {option}"


def check_ctest(text: str, build: Path) -> Iterator[str]:
    for flag, name in re.findall(r"ctest[^`\n]* (-[RL]) ([\w.|^$-]+)", text):
        if name == "gpu" and not (build / "api/libnccl_ep.so.0").exists():
            continue  # left out of this build
        command = ["ctest", "--test-dir", str(build), "-N", flag, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Total Tests: 0" in done.stdout or done.returncode:
            yield f"ctest {flag} {name} selects no test"


def sh_blocks(path: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [block for block in blocks if not re.search(r"^tools/", block, re.M)]


def run_documents(root: Path, build: Path, scratch: Path) -> int:
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "build").mkdir(parents=True)
    (scratch / "out").mkdir()
    (scratch / "build/dev").symlink_to(build)
    for entry in root.iterdir():
        if entry.name not in ("build", "out", ".git"):
            (scratch / entry.name).symlink_to(entry)
    here = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{build}/cli:{here}:{os.environ['PATH']}",
        "TREFOIL_LIB": str(build / "libtrefoil.so.0"),
        "TREFOIL_PROGRAM": str(build / "cli/trefoil"),
    }
    failed = count = 0
    for name in (
        "README.md",
        "docs/trace.md",
        "docs/plan.md",
        "docs/sim.md",
        "docs/check.md",
        "docs/use_check_without_gpus.md",
        "docs/use_validate_cluster.md",
        "docs/use_plan_capacity.md",
        "docs/troubleshooting.md",
    ):
        blocks = sh_blocks(root / name)
        count += len(blocks)
        if not blocks:
            failed += 1
            print(f"{name}: no sh block")
            continue
        script = "set -euo pipefail\n" + "\n".join(blocks)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            failed += 1
            print(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{count} blocks run, {failed} documents failed")
    return 1 if failed else 0


def main() -> int:
    if sys.argv[1] == "--run":
        needed = ("numpy", "matplotlib", "jinja2")
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            print(
                f"skipped: the documents' Python needs {', '.join(missing)} (tools/tour brings it)"
            )
            return 77
        root, build, scratch = (Path(a).resolve() for a in sys.argv[2:5])
        return run_documents(root, build, scratch)
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
