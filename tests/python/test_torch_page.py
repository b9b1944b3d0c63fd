"""The script of docs/use_in_torch.md trains, by torch's own launcher. Needs torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ep_needs  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def test_script(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "use_in_torch.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*launcher, "2", "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
