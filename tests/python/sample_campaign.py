"""Results as tools/measure writes them, with times of a formula: for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trefoil.campaign.points import Point
from trefoil.campaign.tables import write_tables

RATE = 350e9
PROVENANCE = {"gpu": "Sample GPU", "commit": "abc1234", "library": "libsample.so.0"}


def port_bytes(p: Point, op: str) -> int:
    """Of the busiest port: a row a (token, rank) out, a row a (token, k) back in low latency."""
    away = (p.gpus - 1) / p.gpus
    exact = p.mode.startswith("ll") and op == "combine" and p.variant != "partial"
    rows = p.tokens * (p.topk if exact else min(p.topk, p.gpus))
    skewed = {"zipf": 1.3, "hot-rank": 1.8, "hot-expert": 1.5}.get(p.routing, 1.0)
    return int(rows * away * skewed * (1 - p.ragged / 2) * p.hidden * 2)


def seconds(p: Point, op: str) -> float:
    """Launch, then the port or the SMs, whichever takes longer."""
    slow = 1.1 if p.background != "nothing" else 1.0
    sms = p.sms or (32 if p.mode.startswith("ht") else 132)
    rate = min(RATE, sms * 19e9)
    fixed = 4.4e-6 if op == "dispatch" else 3.3e-6
    return (fixed + slow * port_bytes(p, op) / rate) + 1e-6 * p.start_skew_us


def line(p: Point) -> dict[str, Any]:
    times: dict[str, Any] = {}
    for op in ("dispatch", "combine"):
        s = seconds(p, op)
        spread = {"p50_s": s, "p99_s": 1.06 * s, "min_s": 0.98 * s, "max_s": 1.2 * s}
        times[op] = {"kernel": {"called": spread, "replayed": spread}, "host": spread}
        times[op]["event"] = {"called": spread, "replayed": spread}
        times[op].update(back_to_back_s=s, busiest_port_bytes=port_bytes(p, op))
    asked = {**p.asked, "ranks": p.gpus, "start_skew_s": p.start_skew_us / 1e6}
    background = {"background_alone_per_second": 100.0, "background_per_second": 88.0}
    return {
        **asked,
        **(background if p.background != "nothing" else {}),
        "ok": True,
        "copy_bytes_per_second": RATE,
        "times": times,
        "provenance": PROVENANCE,
    }


def write(folder: Path, points: Iterable[Point]) -> None:
    """results.jsonl and the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line(p) for p in points]
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    write_tables(folder, lines)
