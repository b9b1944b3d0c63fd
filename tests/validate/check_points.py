"""trefoil bench --points on the CPU library: every kind of point agrees with the reference, a
planted fault comes out, a bad line is refused by name, the time limit ends between two points.

    python3 check_points.py TREFOIL [FAULTY_LIBRARY HOST_LIBRARY]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {"tokens": 24, "hidden": 512, "experts": 12, "topk": 3, "iterations": 4}
POINTS: list[dict[str, Any]] = [
    {"mode": mode, "variant": variant, **circumstances}
    for mode, variants in (
        ("ll-expert-major", ("plain", "e4m3", "partial", "fp8")),
        ("ll-rank-major", ("plain", "e4m3", "fp8")),
        ("ht-flat", ("plain", "fp8", "backward")),
        ("ht-expert-major", ("plain", "fp8", "backward")),
    )
    for variant in variants
    for circumstances in (
        {"routing": "uniform", "seed": 3},
        {"routing": "zipf", "skew": 1.2, "ragged": 1.0, "window": True},
        {"routing": "hot-expert", "skew": 100, "empty_ranks": 1, "sms": 8},
        {"routing": "hot-rank", "skew": 30, "topk": 1, "start_skew_us": 5},
    )
]
WRONG = (
    ({"tokens": 1}, "a point needs a mode"),
    ({"mode": "ht", "tokens": 1}, "mode names no single mode"),
    ({"mode": "ht-flat", "tokens": 0}, "tokens and hidden are"),
    ({"mode": "ht-flat", "tokens": 1, "variant": "fp9"}, "variant is not known"),
    ({"mode": "ht-flat", "tokens": 1, "routing": "cold"}, "routing is none of"),
    ({"mode": "ht-flat", "tokens": 1, "topk": 300}, "1 <= topk <= experts"),
    ({"mode": "ht-flat", "tokens": 1, "colour": 1}, "no such name: colour"),
    ({"mode": "ll-rank-major", "tokens": 1, "variant": "backward"}, "low latency has no backward"),
    ({"mode": "ht-flat", "tokens": 1, "variant": "fp8", "hidden": 96}, "a multiple of 128"),
)


def bench(trefoil: str, points: list[dict[str, Any]], *more: str, **environment: str):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.jsonl"
        path.write_text("".join(json.dumps(p) + "\n" for p in points), encoding="utf-8")
        command = [trefoil, "bench", "--points", str(path), "--ranks", "3", "--repeats", "4", *more]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, **environment},
        )


def check_agreement(trefoil: str) -> None:
    points = [{**SHAPE, **p} for p in POINTS]
    done = bench(trefoil, points)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row["point"] for row in rows] == points
    for row in rows:
        assert row["ok"] and row["ranks"] == 3
        assert row["window"] == row["point"].get("window", False)
        assert ("combine" in row["times"]) == (row["variant"] not in ("e4m3", "fp8"))
        for times in row["times"].values():
            wall = times["wall"]
            assert 0 < wall["min_s"] <= wall["p50_s"] <= wall["p99_s"] <= wall["max_s"]


def check_refusals(trefoil: str) -> None:
    for point, sentence in WRONG:
        done = bench(trefoil, [{**SHAPE, **point} if len(point) > 1 else point])
        assert done.returncode != 0 and sentence in done.stderr, (point, done.stderr)
        assert not done.stdout
    limited = bench(trefoil, [{**SHAPE, **p} for p in POINTS * 8], "--minutes", "0.005")
    told = len(limited.stdout.splitlines())
    assert limited.returncode == 0 and 0 < told < 8 * len(POINTS), told


def check_fault(trefoil: str, faulty: str, host: str) -> None:
    cpu = str(Path(os.environ["TREFOIL_CPU"]))
    done = bench(
        trefoil,
        [{**SHAPE, **POINTS[0]}, {**SHAPE, **POINTS[1]}],
        *("--library", faulty, "--nccl", host, "--cuda", host),
        TREFOIL_FAULT="flip",
        TREFOIL_FAULT_ALWAYS="1",
        TREFOIL_FAULT_LIBRARY=cpu,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and len(rows) == 1, done.stderr
    assert not rows[0]["ok"] and rows[0]["difference"] and "times" not in rows[0]


if __name__ == "__main__":
    check_agreement(sys.argv[1])
    check_refusals(sys.argv[1])
    if len(sys.argv) > 2:
        check_fault(*sys.argv[1:4])
    print(f"{len(POINTS)} kinds of points agree")
