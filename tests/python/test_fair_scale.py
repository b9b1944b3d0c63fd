"""Max-min shares where planning begins: time and memory of the built program ($TREFOIL_PROGRAM)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")
GROUPS = [  # mode, GPUs, tokens, seconds of one core, GiB
    ("ll", 256, 128, 60, 2),
    ("ht", 64, 4096, 20, 2),
]


@pytest.mark.parametrize(("mode", "gpus", "tokens", "seconds", "gib"), GROUPS)
def test_large_groups_end_in_time(
    tmp_path: Path, mode: str, gpus: int, tokens: int, seconds: int, gib: int
) -> None:
    """CPU time, which other programs on the machine do not lengthen by waiting. 1024 GPUs take
    minutes: docs/sim.md has them."""
    command = [PROGRAM, "simulate", "--engine", "fair", "--cluster", "dgx-h100", "--json"]
    command += ["--moe", "deepseek-v3", "--mode", mode]
    command += ["--gpus", str(gpus), "--tokens", str(tokens), "--timeout", "300"]
    with (tmp_path / "out").open("w+") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, f"exit code {child.returncode}"
        out.seek(0)
        answer = json.load(out)
    took = used.ru_utime + used.ru_stime
    print(f"{mode} of {gpus}: {took:.1f} s, {used.ru_maxrss / 2**20:.2f} GiB")
    assert took < seconds and used.ru_maxrss < gib * 2**20
    for op in ("dispatch", "combine"):
        flows = answer[op]["fair"]
        assert answer[op]["engine"] == "fair"
        assert 0 < flows["unlike_flows"] <= flows["flows"]  # those that could not be merged
