"""The scripts of the Python pages on an installed wheel, away from the tree.

    python3 wheel_pages.py [--torch] PYTHON

PYTHON is the interpreter of the environment with the wheel. Also refused: a library of the machine,
beside the C and C++ runtimes, that the wheel's libraries load. --torch: the pages that need torch,
which is this interpreter's; exit code 77 where it has none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIMES = r"libc|libm|libz|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*"
FINE = rf"/site-packages/trefoil|/lib-dynload/|/({RUNTIMES})[.-][^/]*$"
LOADED = """
import ctypes, sys
import numpy


def mapped():
    lines = open("/proc/self/maps").read().split("\\n")
    return {line.split(maxsplit=5)[5] for line in lines if ".so" in line}


before = mapped()
from trefoil import ep, reference
reference.library()
print(*sorted(mapped() - before), sep="\\n")
"""
WITHOUT = ("TREFOIL_LIB", "TREFOIL_MODULE", "TREFOIL_PROGRAM", "TREFOIL_PYTHON", "PYTHONPATH")


class Away:
    """An empty folder to run scripts in."""

    def __init__(self, python: str, torch: Path | None) -> None:
        self.python = str(Path(python).absolute()) if "/" in python else python
        self.folder = tempfile.TemporaryDirectory()
        self.environment = {k: v for k, v in os.environ.items() if k not in WITHOUT}
        self.environment["OMP_NUM_THREADS"] = "1"
        if torch:
            self.environment["PYTHONPATH"] = str(torch)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder.name,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def page(self, name: str, *launcher: str) -> str:
        """What the first script of a page prints."""
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        script = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[0]
        (Path(self.folder.name) / f"{name}.py").write_text(script)
        return self.run(*launcher, f"{name}.py")


def require_own_libraries(away: Away) -> None:
    loaded = away.run("-c", LOADED).split()
    others = [p for p in loaded if not re.search(FINE, p)]
    if others or not any("libtrefoil.so.0" in p for p in loaded):
        sys.exit(f"of {len(loaded)} libraries not in the wheel: {others}")


def main() -> int:
    with_torch, python = "--torch" in sys.argv[1:], sys.argv[-1]
    if not with_torch:
        away = Away(python, None)
        require_own_libraries(away)
        print(away.page("python"), away.page("check_kernel"), sep="", end="")
        return 0
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        print("skipped: Python lacks torch")
        return 77
    away = Away(python, Path(found.origin).parents[1])
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    away.page("deep_ep")
    print(away.page("use_in_torch", *two), away.page("use_record_routing", *two), sep="", end="")
    hook = ROOT / "tests" / "gpu" / "torch" / "a2sgd_ddp.py"
    print(away.run(*two, str(hook), "--device", "cpu"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
