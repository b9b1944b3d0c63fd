"""Sums what tools/test left in build/results: JUnit files of ctest, and .failed or .skipped notes.

A ctest entry that says how many tests it ran ("12 tests, 0 failed, 1 skipped", or pytest's closing
line) counts as that many; any other entry counts as one. Prints the failures, the skips with their
reasons, and as the last line "N passed, N failed[, N skipped]". Exit code 1 if anything failed or
nothing passed.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

OURS = re.compile(r"^(\d+) tests, (\d+) failed, (\d+) skipped$", re.MULTILINE)
PYTEST = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)


@dataclass
class Sum:
    passed: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)


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


def add_case(total: Sum, name: str, case: ElementTree.Element) -> None:
    output = case.findtext("system-out") or ""
    status = case.get("status", "")
    counts = inner_counts(output)
    reasons = skip_reasons(output)
    if case.find("skipped") is not None or status in ("notrun", "disabled"):
        number = max(1, counts[2] if counts else 1)
        last = (output.strip().splitlines() or ["no reason given"])[-1]
        reason = "; ".join(reasons) or last
        total.skips += [f"{name}: {reason}"] * number
        return
    passed, failed, skipped = counts or (1, 0, 0)
    if case.find("failure") is not None or status == "fail":
        if not failed:  # a crash, a timeout, a sanitizer's report: the program's own sum is void
            passed, failed = (passed, 1) if counts else (0, 1)
        total.failures.append(f"{name} ({failed})")
    total.passed += passed
    total.failed += failed
    total.skips += [f"{name}: {r}" for r in reasons[:skipped]]
    total.skips += [f"{name}: no reason given"] * (skipped - len(reasons[:skipped]))


def main() -> int:
    folder = Path(sys.argv[1])
    total = Sum()
    for path in sorted(folder.glob("*.xml")):
        before = (total.passed, total.failed, len(total.skips))
        seconds = 0.0
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            seconds += float(case.get("time") or 0)
            add_case(total, f"{path.stem}/{case.get('name')}", case)
        print(
            f"{path.stem}: {total.passed - before[0]} passed, {total.failed - before[1]} failed, "
            f"{len(total.skips) - before[2]} skipped, {seconds:.0f} s of tests"
        )
    for path in sorted(folder.glob("*.failed")):
        total.failed += 1
        total.failures.append(f"{path.stem}: {path.read_text().strip()}")
    for path in sorted(folder.glob("*.skipped")):
        total.skips.append(f"{path.stem}: {path.read_text().strip()}")
    for text in total.skips:
        print(f"skipped {text}")
    for text in total.failures:
        print(f"FAILED {text}")
    skipped = f", {len(total.skips)} skipped" if total.skips else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
