"""The closed form against a public table of a real cluster: a lower bound, near where bytes rule.

For every row the predicted time must not exceed the measured one. Where the network is busy (two
or more nodes, 128 tokens or more) it must reach three quarters of it: far less would mean that the
bytes are counted wrongly.

python3 check_public_table.py TREFOIL TABLE.csv
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

NEAR = 0.75


def main() -> int:
    program, table = sys.argv[1], Path(sys.argv[2])
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    failures = 0
    shares = []
    for row in csv.DictReader(lines):
        done = subprocess.run(
            [program, "plan", "--closed-form", "--json", "--cluster", "dgx-h100", "--mode", "ll",
             "--variant", "per-expert", "--dispatch-dtype", "fp8", "--tokens", row["tokens"],
             "--gpus", row["gpus"]],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        point = json.loads(done.stdout)["points"][0]
        for op in ("dispatch", "combine"):
            share = point[op]["seconds"] * 1e6 / float(row[f"{op}_us"])
            busy = int(row["gpus"]) > 8 and int(row["tokens"]) >= 128
            if busy:
                shares.append(share)
            if share > 1 or (busy and share < NEAR):
                failures += 1
                print(
                    f"{row['gpus']} GPUs, {row['tokens']} tokens, {op}: {share:.2f} of the measured"
                )
    assert shares, "the table has no busy rows"
    print(
        f"busy rows: {min(shares):.2f} to {max(shares):.2f} of the measured time; {failures} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
