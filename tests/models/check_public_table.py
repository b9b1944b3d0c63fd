"""The closed form against a public table of a real cluster: a lower bound, near where bytes rule.

For every row the predicted time must not exceed the measured one. Where links are busy (LL: two or
more nodes, 128 tokens or more; HT: all rows here) it must reach a good part of it: far less would
mean that the bytes are counted wrongly.

python3 check_public_table.py TREFOIL TABLE.csv
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

NEAR = {"ll": 0.75, "ht": 0.5}


def main() -> int:
    program, table = sys.argv[1], Path(sys.argv[2])
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    failures = 0
    shares: dict[str, list[float]] = {"ll": [], "ht": []}
    for row in csv.DictReader(lines):
        done = subprocess.run(
            [program, "plan", "--closed-form", "--json", "--cluster", "dgx-h100",
             "--dispatch-dtype", "fp8", "--mode", row["mode"], "--tokens", row["tokens"],
             "--variant", "per-expert" if row["mode"] == "ll" else "ours", "--gpus", row["gpus"]],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        point = json.loads(done.stdout)["points"][0]
        for op in ("dispatch", "combine"):
            share = point[op]["seconds"] * 1e6 / float(row[f"{op}_us"])
            many = int(row["gpus"]) > 8 and int(row["tokens"]) >= 128
            busy = many or row["mode"] == "ht"
            if busy:
                shares[row["mode"]].append(share)
            if share > 1 or (busy and share < NEAR[row["mode"]]):
                failures += 1
                print(
                    f"{row['gpus']} GPUs, {row['tokens']} tokens, {op}: {share:.2f} of the measured"
                )
    for mode, values in shares.items():
        assert values, f"the table has no busy rows of {mode}"
        print(f"{mode}: busy rows {min(values):.2f} to {max(values):.2f} of the measured time")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
