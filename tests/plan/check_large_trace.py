"""A member of more than 4 GiB is read as any other: 640 million ids of 8 bytes.

python3 check_large_trace.py TREFOIL
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SKIPPED = 77
ROWS, TOPK, PIECE = 80_000_000, 8, 1_000_000  # rows that are all unused entries, but the last
NEED_GB = 8


def main() -> int:
    try:
        import numpy as np
    except ImportError:
        print("skipped: numpy is not installed (pip install numpy)")
        return SKIPPED
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 1e9
    if there < NEED_GB:
        print(f"skipped: {there:.1f} GB of memory are free, {NEED_GB} are needed")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "large.npz"
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "<i8", "fortran_order": False, "shape": (ROWS, TOPK)}
        )
        rows = np.full((PIECE, TOPK), -1, "<i8")
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
            file.open("topk_idx.npy", "w", force_zip64=True) as member,
        ):
            member.write(head.getvalue())
            for i in range(ROWS // PIECE):
                if i == ROWS // PIECE - 1:
                    rows[-1] = np.arange(TOPK)
                member.write(rows.tobytes())
        done = subprocess.run(
            [sys.argv[1], "trace", "describe", "--json", "--ranks", "1", "--experts", "8", path],
            capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        print(done.stderr, end="")
        if done.returncode != 0:
            return 1
        found = json.loads(done.stdout)
        ok = found["tokens"] == ROWS and found["entries"] == TOPK
        print("all agree" if ok else f"failed: {found}")
        return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
