"""The script of docs/python.md runs, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ep_needs  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def test_script(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    counts = [int(n) for n in re.findall(r"rank \d: (\d+) rows", done.stdout)]
    assert sum(counts) == 2 * 16 * 2


def test_page_is_short() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert len(prose.split()) <= 600
