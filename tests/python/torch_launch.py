"""Starts scripts by torch's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ep_needs  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def package_path() -> str:
    """This package, and what was on the path."""
    return os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])


def torchrun(script: Path, ranks: int, *arguments: str, timeout: float = 250) -> str:
    """What the script's ranks print, started as processes; ranks 1: it alone."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
