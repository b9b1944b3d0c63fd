#!/usr/bin/env python3
"""Starts a program of this folder, a rank on each GPU; 77 where torch or a GPU is missing.

python3 launch.py PROGRAM [ARGUMENTS]
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    if importlib.util.find_spec("torch") is None or not Path("/dev/nvidia0").exists():
        print("skipped: needs torch and a GPU")
        return 77
    import torch

    ranks = str(torch.cuda.device_count())
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    path = str(HERE.parents[2] / "python")
    told = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    program, *arguments = sys.argv[1:]
    command = [*start, ranks, str(HERE / program), *arguments]
    return 1 if subprocess.run(command, env=told, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
