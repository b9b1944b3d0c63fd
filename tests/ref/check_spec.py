"""Checks docs/spec.md: rules are numbered in order, and each names tests that exist.

    python3 check_spec.py ROOT

A rule starts with **X1** behind its anchor; behind the arrow stand files of tests/ in backquotes,
each followed by names of its tests, or `ctest` and names of whole tests. Prints one line a finding
and exits 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RULE = re.compile(r'^<a id="([a-z]+\d+)"></a>\*\*([A-Z]+)(\d+)\*\* ', re.MULTILINE)
SHOWN = re.compile(r"→((?:\s*`[\w.]+`[\s\w,]*)+)")


def tests_of(text: str) -> set[str]:
    """Names of a test file: TEST(x) in C, def test_x in Python, and sections of a shell script."""
    names = re.findall(r"\bTEST\((\w+)\)|^def (test_\w+)|^# test: (\w+)", text, re.MULTILINE)
    return {name for found in names for name in found if name}


def ctest_names(root: Path) -> set[str]:
    """Words of the lists of tests: a name that a loop puts together is not among them."""
    tests = root / "tests"
    lists = [*tests.rglob("CMakeLists.txt"), *tests.rglob("*.cmake")]
    return {word for path in lists for word in re.findall(r"\w+", path.read_text())}


def check_ctest(root: Path, names: list[str]) -> list[str]:
    known = ctest_names(root)
    files = {p.stem for p in (root / "tests/examples").glob("*.c")}
    made = {f"example_{stem}" for stem in files}
    return [f"there is no test {x}" for x in sorted(set(names) - known - made)]


def check_shown(root: Path, block: str) -> list[str]:
    if not (shown := SHOWN.search(block)):
        return ["names no test"]
    findings = []
    for name, listed in re.findall(r"`([\w.]+)`([\s\w,]*)", shown.group(1)):
        names = [x.strip() for x in listed.split(",") if x.strip()]
        if name == "ctest":
            findings += check_ctest(root, names)
            continue
        files = [p for p in (root / "tests").rglob(name) if p.is_file()]
        if len(files) != 1:
            findings.append(f"tests/ has {len(files)} files {name}")
            continue
        missing = sorted(set(names) - tests_of(files[0].read_text()))
        findings += [f"{name} has no test {x}" for x in missing]
        if not names:
            findings.append(f"names no test of {name}")
    return findings


def main() -> int:
    root = Path(sys.argv[1])
    text = (root / "docs/spec.md").read_text()
    rules = list(RULE.finditer(text))
    findings, last = [], {}
    for i, rule in enumerate(rules):
        anchor, section, number = rule.group(1), rule.group(2), int(rule.group(3))
        where = f"docs/spec.md:{text.count(chr(10), 0, rule.start()) + 1}: {section}{number}"
        if anchor != f"{section}{number}".lower():
            findings.append(f"{where} has the anchor {anchor}")
        if number != last.get(section, 0) + 1:
            findings.append(f"{where} follows {section}{last.get(section, 0)}")
        last[section] = number
        end = rules[i + 1].start() if i + 1 < len(rules) else len(text)
        block = re.split(r"^## ", text[rule.start() : end], flags=re.MULTILINE)[0]
        findings += [f"{where} {finding}" for finding in check_shown(root, block)]
    anchors = {rule.group(1) for rule in rules}
    for target in sorted(set(re.findall(r"\]\(#([a-z]+\d+)\)", text)) - anchors):
        findings.append(f"docs/spec.md:1: no rule has the anchor {target}")
    if len(rules) < 50:
        findings.append(f"docs/spec.md:1: only {len(rules)} rules were found")
    print("\n".join(findings) or f"{len(rules)} rules, all shown by tests")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
