"""What tools/mutate_gpu.py packs is what it runs, and its verdicts are right: with shell scripts in
place of the programs, and no GPU."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import mutate_gpu

PASSES, FAILS, CRASHES = "exit 0", "echo 'FAILED: case 3'; sleep 30", "exit 3"
HANGS, SKIPS = "sleep 60", "exit 77"


def entry(name: str, program: str, *more: str) -> dict:
    return {"id": name, "title": name, "commands": [[f"{name}/{program}", "--ranks", "4", *more]]}


class Packed(unittest.TestCase):
    def setUp(self) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name) / "packed"
        self.package = mutate_gpu.Package(self.folder)

    def tearDown(self) -> None:
        self.scratch.cleanup()

    def add(self, name: str, body: str, mutant: dict | None = None) -> None:
        script = Path(self.scratch.name) / "script"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)

        def copy(command: list[str], check: bool) -> None:
            Path(command[2]).write_bytes(Path(command[3]).read_bytes())
            Path(command[2]).chmod(0o755)

        with mock.patch.object(mutate_gpu.subprocess, "run", copy):  # a script cannot be stripped
            self.package.add(script, name, mutant or {})

    def run_all(self, factor: float = 1.0) -> dict[str, dict]:
        self.package.write("abc")
        results = Path(self.scratch.name) / "results.json"
        with mock.patch("builtins.print"):
            mutate_gpu.run_packed(self.folder, results, 4, factor, 100)
        document = json.loads(results.read_text())
        self.assertEqual(document["commit"], "abc")
        return document["results"]

    def test_verdicts(self) -> None:
        self.add("good/a", PASSES)
        for name, body in (("passes", PASSES), ("fails", FAILS), ("crashes", CRASHES)):
            self.add(f"{name}/a", body, entry(name, "a"))
        self.add("faults/a", FAILS, entry("faults", "a", "--faults"))
        self.add("hangs/a", HANGS, entry("hangs", "a"))
        states = {name: r["state"] for name, r in self.run_all().items()}
        killed = dict.fromkeys(("fails", "crashes", "faults", "hangs"), "killed")
        self.assertEqual(states, {"passes": "survived"} | killed)

    def test_the_second_command_notices(self) -> None:
        self.add("good/a", PASSES)
        self.add("good/b", PASSES)
        mutant = entry("m", "a")
        mutant["commands"].append(["m/b"])
        self.add("m/a", PASSES, mutant)
        self.add("m/b", CRASHES)
        result = self.run_all()["m"]
        self.assertEqual((result["state"], result["by"]), ("killed", ["b"]))
        self.assertEqual(result["ran"], ["a --ranks 4", "b"])

    def test_nothing_counts_where_the_good_program_fails(self) -> None:
        for program, body in (("a", CRASHES), ("b", SKIPS)):
            self.add(f"good/{program}", body)
            self.add(f"m{program}/{program}", CRASHES, entry(f"m{program}", program))
        states = {r["state"] for r in self.run_all().values()}
        self.assertEqual(states, {"not run"})

    def test_nothing_counts_where_the_good_program_fails_among_the_others(self) -> None:
        flag = Path(self.scratch.name) / "flag"
        self.add("good/a", f"test ! -e {flag} || exit 1; touch {flag}")
        self.add("m/a", CRASHES, entry("m", "a"))
        self.assertEqual(self.run_all()["m"]["state"], "not run")

    def test_halved(self) -> None:
        self.assertEqual(mutate_gpu.halved(["--cases", "75", "--big"]), ["--cases", "37", "--big"])

    def test_pick(self) -> None:
        mutants = [SimpleNamespace(file=f, n=n) for n, f in enumerate("aaabbc")]
        chosen = mutate_gpu.pick(mutants, 4, lambda m: 0 if m.n == 2 else 1)
        self.assertEqual([m.n for m in chosen], [2, 0, 3, 5])


if __name__ == "__main__":
    unittest.main()
