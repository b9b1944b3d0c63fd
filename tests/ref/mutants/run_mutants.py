"""Plants bugs in a copy of ref/, one at a time, and sees that the tests of ref/ notice each.

    python3 run_mutants.py ROOT LIBTREFOIL.a [--write FILE] [--only NAME] [--first]

Each mutant is compiled, linked with what else the archive holds, and put before the C tests of
tests/ref and, where Python has NumPy, the oracle. Prints a table; exits 1 if a mutant survives or
does not apply. --write leaves the table in a file. --first asks
the oracle only about mutants that the C tests do not notice.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAGS = ["-std=gnu11", "-O1", "-fPIC", "-ffp-contract=off", "-D_GNU_SOURCE", "-w"]
C_TESTS = ["test_ref_dispatch", "test_ref_combine", "test_numerics", "test_grad"]
ORACLE_CASES = "60"
ORACLES = ["test_oracle.py", "test_a2sgd_oracle.py"]


@dataclass
class Mutant:
    name: str
    file: str
    what: str
    old: str
    new: str


def oracle_of(m: Mutant) -> str:
    """The oracle of what the file computes."""
    return ORACLES[m.file.startswith("grad")]


def read_mutants(path: Path) -> list[Mutant]:
    text = "\n".join(x for x in path.read_text().splitlines() if not x.startswith("#"))
    mutants = []
    for block in filter(str.strip, re.split(r"\n\s*\n", text)):
        head, old, new = block.strip().splitlines()
        mutants.append(Mutant(*(x.strip() for x in head.split("|")), old[2:], new[2:]))
    return mutants


class Bench:
    """A scratch folder with the objects of ref/ and of the tests, compiled once."""

    def __init__(self, root: Path, archive: Path, scratch: Path) -> None:
        self.root, self.archive, self.scratch = root, archive, scratch
        self.tests = root / "tests/ref"
        shutil.copytree(root / "ref", scratch / "ref")
        self.sources = sorted(p.name for p in (scratch / "ref").glob("*.c"))
        self.objects = {name: self.compile(scratch / "ref" / name) for name in self.sources}
        self.programs = {name: self.compile(self.tests / f"{name}.c") for name in C_TESTS}
        self.plain = self.compile(self.tests / "row_plain.c")
        needed = ("numpy", "pytest")
        self.has_oracle = all(importlib.util.find_spec(name) for name in needed)

    def compile(self, source: Path) -> Path:
        out = Path(tempfile.mkstemp(suffix=".o", dir=self.scratch)[1])
        include = [self.scratch, self.root, self.root / "include", self.root / "tests", self.tests]
        paths = [f"-I{p}" for p in include]
        subprocess.run(["cc", *FLAGS, *paths, "-c", source, "-o", out], check=True)
        return out

    def plant(self, m: Mutant) -> dict[str, Path]:
        """The objects with a bug in; a header's bug goes into all of them."""
        path = self.scratch / "ref" / m.file
        good = path.read_text()
        if good.count(m.old) != 1:
            raise ValueError(f"{m.name}: its text stands {good.count(m.old)} times in {m.file}")
        path.write_text(good.replace(m.old, m.new))
        try:
            touched = [m.file] if m.file.endswith(".c") else self.sources
            return self.objects | {n: self.compile(self.scratch / "ref" / n) for n in touched}
        finally:
            path.write_text(good)

    def link(self, out: Path, parts: list, *flags: str) -> None:
        command = ["cc", *flags, *parts, self.archive, "-o", out, "-lm", "-lpthread"]
        subprocess.run(command, check=True)

    def noticed(self, objects: dict[str, Path], oracle: str, first: bool = False) -> list[str]:
        """The tests that fail with these objects; with first, the oracle only if no other does."""
        parts, failed = list(objects.values()), []
        for name, program in self.programs.items():
            out = self.scratch / name
            self.link(out, [program, *parts, *([self.plain] if name == "test_numerics" else [])])
            done = subprocess.run([out], capture_output=True, text=True, timeout=60, check=False)
            failed += re.findall(r"^FAILED (\w+)$", done.stderr, re.MULTILINE)
            if done.returncode < 0:
                failed.append(f"{name} (signal {-done.returncode})")
        if self.has_oracle and not (first and failed) and self.oracle_fails(parts, oracle):
            failed.append("oracle")
        return failed

    def oracle_fails(self, parts: list, oracle: str) -> bool:
        lib = self.scratch / "libtrefoil_mutant.so"
        keep = [f"-Wl,-u,{name}" for name in ("trefoilLastError",)]
        self.link(lib, parts, "-shared", *keep)
        env = os.environ | {"TREFOIL_LIB": str(lib), "TREFOIL_ORACLE_CASES": ORACLE_CASES}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, self.tests / oracle],
            env=env,
            timeout=300,
            capture_output=True,
            check=False,
        )
        return done.returncode != 0


def table(rows: list[tuple[Mutant, list[str]]], has_oracle: bool) -> str:
    lines = ["| planted in | what is wrong | noticed by |", "|---|---|---|"]
    for m, failed in rows:
        by_hand = [x for x in failed if x != "oracle"]
        shown = by_hand[:3] + ([f"{len(by_hand) - 3} more"] if len(by_hand) > 3 else [])
        shown += ["the oracle"] if "oracle" in failed else []
        lines.append(f"| {m.file}: {m.name} | {m.what} | {', '.join(shown) or '**nothing**'} |")
    caught = sum(bool(failed) for _, failed in rows)
    oracle = sum("oracle" in failed for _, failed in rows)
    by_hand = sum(any(x != "oracle" for x in failed) for _, failed in rows)
    sums = f"{len(rows)} planted, {caught} noticed: {by_hand} by the C tests"
    sums += f", {oracle} by the oracle" if has_oracle else "; the oracle was not asked about all"
    return "\n".join([*lines, "", sums + "."]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="plants bugs in ref/")
    parser.add_argument("root", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--first", action="store_true")
    args = parser.parse_args()
    if args.write and args.first:
        parser.error("--write needs what every test notices: not with --first")
    rows, broken = [], []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.root.resolve(), args.archive.resolve(), Path(scratch))
        if failed := [x for name in ORACLES for x in bench.noticed(bench.objects, name)]:
            print(f"the tests fail without any mutant: {', '.join(failed)}")
            return 1
        for m in read_mutants(Path(__file__).parent / "mutants.txt"):
            if args.only not in m.name:
                continue
            try:
                rows.append((m, bench.noticed(bench.plant(m), oracle_of(m), args.first)))
                print(f"{m.name}: {', '.join(rows[-1][1][:4]) or 'SURVIVED'}", flush=True)
            except (ValueError, subprocess.SubprocessError) as error:
                broken.append(f"{m.name}: {error}")
    text = table(rows, bench.has_oracle and not args.first)
    print("\n" + text + "\n".join(broken))
    if args.write:
        args.write.write_text(text)
    return 1 if broken or not rows or not all(failed for _, failed in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
