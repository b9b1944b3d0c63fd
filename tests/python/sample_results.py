"""Results as `trefoil check --json` and `trefoil plan --closed-form --json` write them, made up.

python3 sample_results.py FOLDER     writes check_ll.json, check_ht.json, plan_ll.json, plan_ht.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODES = ("ll-expert-major", "ll-rank-major", "ht-flat", "ht-expert-major")


def run(mode: str, ranks: int = 8, ranks_per_node: int = 8, tokens: int = 128) -> dict[str, Any]:
    """A run in which rank s sends rank d (3 s + d) mod 7 + 1 rows for every 16 tokens."""
    row_bytes = 7168 * 2
    rows = [
        [((3 * s + d) % 7 + 1) * max(1, tokens // 16) for d in range(ranks)] for s in range(ranks)
    ]
    tiers = [
        [
            "self" if s == d else "nvlink" if s // ranks_per_node == d // ranks_per_node else "net"
            for d in range(ranks)
        ]
        for s in range(ranks)
    ]
    dispatch = [[n * row_bytes for n in row] for row in rows]
    return {
        "mode": mode,
        "algorithm": mode.split("-")[0],
        "layout": mode.split("-", 1)[1],
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens": tokens,
        "hidden": 7168,
        "experts": 256,
        "topk": 8,
        "dtype": "bf16",
        "ok": True,
        "update_s": 0.0002,
        "dispatch_s": tokens * 3.1e-5,
        "combine_s": tokens * 7.4e-5,
        "reference_s": tokens * 4.2e-4,
        "bytes_compared": sum(map(sum, dispatch)),
        "dispatch_bytes": dispatch,
        "combine_bytes": [list(column) for column in zip(*dispatch, strict=True)],
        "tiers": tiers,
        "received_rows": [sum(row[d] for row in rows) for d in range(ranks)],
    }


def check(tokens: int, modes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "runs": [run(mode, tokens=tokens) for mode in modes],
        "environment": {"cpu": "A processor", "cores": 2, "memory_bytes": 25_000_000_000},
    }


def plan(mode: str, tokens: int) -> dict[str, Any]:
    points = []
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        ep = min(gpus, 256)
        ops = {}
        for op, factor in (("dispatch", 1), ("combine", 2)):
            nvlink, nic = factor * tokens * 30_000, factor * tokens * (ep - 8) * 500
            times = {"nvlink-out": nvlink / 350e9, "nic-in": nic / 45e9}
            limit = max(times, key=lambda name: times[name])
            ops[op] = {
                "seconds": 3.4e-6 + times[limit],
                "limit": limit,
                "nvlink_bytes": nvlink,
                "nic_bytes": nic,
            }
        points.append({"gpus": gpus, "ep": ep, "replicas": gpus // ep, **ops})
    return {
        "cluster": "dgx-h100",
        "moe": "deepseek-v3",
        "mode": mode,
        "tokens": tokens,
        "rates": {
            "nvlink_bytes_per_second": 350e9,
            "nic_bytes_per_second": 45e9,
            "net_latency_seconds": 8.4e-6,
            "fixed_seconds": 3.4e-6,
        },
        "points": points,
    }


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (
        ("check_ll", check(128, MODES[:2])),
        ("check_ht", check(4096, MODES[2:])),
        ("plan_ll", plan("ll", 128)),
        ("plan_ht", plan("ht", 4096)),
    ):
        (folder / f"{name}.json").write_text(json.dumps(data))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
