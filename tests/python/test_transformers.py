"""transformers trains over trefoil with FSDP2: losses are those of one process. Needs torch and
transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ep_needs  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "examples" / "train_transformers.py"


def losses(ranks: int, text: Path) -> list[float]:
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(SCRIPT), "--text", str(text)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_training() -> None:
    text = ROOT / "docs" / "spec.md"
    alone = losses(1, text)
    assert len(alone) == 12 and alone[-1] < alone[0]
    for ranks in (2, 4):
        assert losses(ranks, text) == pytest.approx(alone, abs=5e-5)
