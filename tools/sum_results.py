"""Sums what tools/test left in build/results. Green means that everything asked for was run.

For each preset: PRESET.expected.json (what ctest was to run), PRESET.xml (JUnit, what it ran) and
PRESET.code (how it ended), or PRESET.failed (why there are none). A ctest entry that says how many
tests it ran ("12 tests, 0 failed, 1 skipped", or pytest's closing line) counts as that many; any
other entry counts as one. These are failures, too:

- a test that was to run and has no result; results from before;
- ctest's exit code, where its results show no failure;
- a skip (of an entry, or one that its output tells by a line "skipped: REASON"), unless it needs
  a GPU (or more GPUs) and they are not here, it needs root or namespaces and this process is not
  root or may make none (a container without CAP_SYS_ADMIN), or it is a sanitizer's and the same
  test ran whole without one (preset ci).

Prints the failures, the skips with their reasons, and as the last line "N passed, N failed
[, N skipped]". Exit code 1 if anything failed or nothing passed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

OURS = re.compile(r"^(\d+) tests, (\d+) failed, (\d+) skipped$", re.MULTILINE)
PYTEST = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)


NEEDS_ROOT = re.compile(r"\b(root|namespaces?|unshare|setpriv)\b")


def number_of_gpus() -> int:
    return sum(re.fullmatch(r"nvidia\d+", p.name) is not None for p in Path("/dev").iterdir())


@cache
def may_isolate() -> bool:
    """This process is root, and may make namespaces."""
    command = ["unshare", "--mount", "--pid", "--fork", "true"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@dataclass
class Sum:
    passed: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)  # ctest entries that ran without a skip
    gpus: int = 0

    def fail(self, text: str) -> None:
        self.failed += 1
        self.failures.append(text)

    def skip(self, preset: str, name: str, reason: str) -> None:
        allowed = (
            self.lacks_gpus(reason)
            or (NEEDS_ROOT.search(reason) and not may_isolate())
            or (preset != "ci" and name in self.whole)
        )
        if allowed:
            self.skips.append(f"{preset}/{name}: {reason}")
        else:
            self.fail(f"{preset}/{name}: not run: {reason}")

    def lacks_gpus(self, reason: str) -> bool:
        """A reason that names GPUs, and more than are here."""
        if not re.search(r"\bGPUs?\b", reason):
            return False
        return self.gpus == 0 or not re.search(
            r"needs a GPU$|\b(found 0|0 GPUs here|no GPU)", reason
        )


def inner_counts(output: str) -> tuple[int, int, int] | None:
    """Tests (passed, failed, skipped) that the program itself reports, or None."""
    if found := OURS.findall(output):
        ran, failed, skipped = (sum(int(f[i]) for f in found) for i in range(3))
        return ran - failed - skipped, failed, skipped
    if found := PYTEST.findall(output):
        words = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", found[-1])}
        failed = words.get("failed", 0) + words.get("error", 0) + words.get("errors", 0)
        return words.get("passed", 0), failed, words.get("skipped", 0)
    return None


def skip_reasons(output: str) -> list[str]:
    reasons = re.findall(r"^skipped: (.+)$", output, re.MULTILINE)
    reasons += re.findall(r"^SKIPPED \[\d+\] (.+)$", output, re.MULTILINE)
    return reasons


def add_case(total: Sum, preset: str, case: ElementTree.Element) -> None:
    name = case.get("name") or ""
    output = case.findtext("system-out") or ""
    status = case.get("status", "")
    counts = inner_counts(output)
    reasons = skip_reasons(output)
    if case.find("skipped") is not None or status in ("notrun", "disabled"):
        last = (output.strip().splitlines() or ["no reason given"])[-1]
        for _ in range(max(1, counts[2] if counts else 1)):
            total.skip(preset, name, "; ".join(reasons) or last)
        return
    passed, failed, skipped = counts or (1, 0, 0)
    if case.find("failure") is not None or status == "fail":
        if not failed:  # a crash, a timeout, a sanitizer's report: the program's own sum is void
            passed, failed = (passed, 1) if counts else (0, 1)
        total.failures.append(f"{preset}/{name} ({failed})")
    total.passed += passed
    total.failed += failed
    for reason in reasons + ["no reason given"] * (skipped - len(reasons)):
        total.skip(preset, name, reason)
    if not failed and not skipped and not reasons:
        total.whole.add(name)


def read_cases(total: Sum, folder: Path, preset: str) -> list[ElementTree.Element]:
    """The results of a preset; that they are not all, or not of this run, is a failure."""
    expected, xml = folder / f"{preset}.expected.json", folder / f"{preset}.xml"
    try:
        asked = {test["name"] for test in json.loads(expected.read_text())["tests"]}
    except (OSError, ValueError, KeyError, TypeError):
        total.fail(f"{preset}: there is no list of the tests that were to run")
        return []
    try:
        cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        total.fail(f"{preset}: ctest left no results of {len(asked)} tests")
        return []
    if xml.stat().st_mtime < expected.stat().st_mtime:
        total.fail(f"{preset}: the results are from before this run")
    for name in sorted(asked - {case.get("name") for case in cases}):
        total.fail(f"{preset}/{name}: was to run and has no result")
    if not asked:
        total.fail(f"{preset}: no test was to run")
    return cases


def add_preset(total: Sum, folder: Path, preset: str) -> None:
    before = (total.passed, total.failed, len(total.skips))
    seconds = 0.0
    for case in read_cases(total, folder, preset):
        seconds += float(case.get("time") or 0)
        add_case(total, preset, case)
    code = folder / f"{preset}.code"
    ended = code.read_text().strip() if code.exists() else "with no exit code"
    if ended != "0" and total.failed == before[1]:
        total.fail(f"{preset}: ctest ended {ended}, and no result says why")
    print(
        f"{preset}: {total.passed - before[0]} passed, {total.failed - before[1]} failed, "
        f"{len(total.skips) - before[2]} skipped, {seconds:.0f} s of tests"
    )


def main() -> int:
    folder = Path(sys.argv[1])
    total = Sum(gpus=number_of_gpus())
    left = {
        p.name.partition(".")[0]
        for p in folder.glob("*.*")
        if p.name.endswith((".xml", ".expected.json"))
    }
    for preset in sorted(left, key=lambda name: (name != "ci", name)):
        add_preset(total, folder, preset)
    for path in sorted(folder.glob("*.failed")):
        total.fail(f"{path.stem}: {path.read_text().strip()}")
    for text in total.skips:
        print(f"skipped {text}")
    for text in total.failures:
        print(f"FAILED {text}")
    skipped = f", {len(total.skips)} skipped" if total.skips else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
