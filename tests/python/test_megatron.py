"""Megatron-core trains over trefoil.deep_ep. Needs torch and megatron-core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ep_needs  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def test_flex_dispatcher() -> None:
    script = ROOT / "tests" / "examples" / "megatron_flex.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*launcher, "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest difference") == 6
