"""The closed form against a public table of a real cluster: a lower bound, near where bytes rule.

For every row the predicted time must not exceed the measured one. Where links are busy (LL: two or
more nodes, 128 tokens or more; HT: all rows here) it must reach a good part of it: far less would
mean that the bytes are counted wrongly.

python3 check_public_table.py TREFOIL FOLDER (validate/data/public)
"""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NEAR = {"ll": 0.75, "ht": 0.5}
GPUS_PER_NODE = 8


def read(path: Path) -> Iterator[dict[str, str]]:
    """Rows in DeepSeek-V3's shape."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["num_experts"] == "256":
                yield row


def measured(folder: Path) -> list[dict[str, str]]:
    """LL up to 256 tokens; HT from 1024 to 8192, the best transmit time over numbers of SMs."""
    rows, best = [], {}
    for row in read(folder / "h100_deepep_ll_1to4nodes.csv"):
        if int(row["num_token"]) <= 256:
            key = {"mode": "ll", "nodes": row["node_num"], "tokens": row["num_token"]}
            rows.append(key | {f"{op}_us": row[f"{op}_avg_t_us"] for op in ("dispatch", "combine")})
    for row in read(folder / "h100_deepep_ht_1to4nodes.csv"):
        if 1024 <= int(row["num_token"]) <= 8192:
            key = (row["node_num"], row["num_token"])
            one = best.setdefault(key, {"mode": "ht", "nodes": key[0], "tokens": key[1]})
            for op in ("dispatch", "combine"):
                us = min(float(row[f"{op}_transmit_us"]), float(one.get(f"{op}_us", "inf")))
                one[f"{op}_us"] = str(us)
    return rows + list(best.values())


def main() -> int:
    program, folder = sys.argv[1], Path(sys.argv[2])
    failures = 0
    shares: dict[str, list[float]] = {"ll": [], "ht": []}
    for row in measured(folder):
        gpus = str(GPUS_PER_NODE * int(row["nodes"]))
        done = subprocess.run(
            [program, "plan", "--closed-form", "--json", "--cluster", "dgx-h100",
             "--dispatch-dtype", "fp8", "--mode", row["mode"], "--tokens", row["tokens"],
             "--variant", "per-expert" if row["mode"] == "ll" else "ours", "--gpus", gpus],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        point = json.loads(done.stdout)["points"][0]
        for op in ("dispatch", "combine"):
            share = point[op]["seconds"] * 1e6 / float(row[f"{op}_us"])
            many = int(gpus) > 8 and int(row["tokens"]) >= 128
            busy = many or row["mode"] == "ht"
            if busy:
                shares[row["mode"]].append(share)
            if share > 1 or (busy and share < NEAR[row["mode"]]):
                failures += 1
                print(f"{gpus} GPUs, {row['tokens']} tokens, {op}: {share:.2f} of the measured")
    for mode, values in shares.items():
        assert values, f"the table has no busy rows of {mode}"
        print(f"{mode}: busy rows {min(values):.2f} to {max(values):.2f} of the measured time")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
