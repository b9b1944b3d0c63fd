"""Fits the costs of a compute record to its rows: python -m trefoil.capacity.compute_fit FILE.

Writes the file again, with costs, errors on the rows fitted and on those held out. Needs SciPy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trefoil.capacity.compute_costs import ComputeError, KindCosts, peak_seconds, ratios
from trefoil.inputs import read_text
from trefoil.sentence_parser import SentenceParser

# Start, low and high, and what the bounds are.
BOUNDS = {
    "launch_us": (2.0, 0.5, 30.0, "an empty kernel in a graph takes 1 us; grouped: three kernels"),
    "math_share": (0.7, 0.05, 1.0, "the peak"),
    "memory_share": (0.8, 0.05, 0.95, "copies of gigabytes reach 0.9"),
    "sharpness": (2.0, 1.0, 8.0, "1: one after the other; 8: within 1 % of the longer one"),
}


def _identified(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Costs that rows tell: without operations nothing of the tensor cores."""
    return [
        n for n in BOUNDS if any(r["flops"] for r in rows) or n in ("launch_us", "memory_share")
    ]


def fit_rows(rows: Sequence[dict[str, Any]], gpu: dict[str, Any]) -> KindCosts:
    """Least squares of log(predicted / measured), soft beyond 10 %."""
    from scipy.optimize import least_squares

    free = _identified(rows)
    if len(rows) < len(free):
        raise ComputeError(f"{len(rows)} rows to fit {len(free)} costs to")
    measured = np.log([row["us"] * 1e-6 for row in rows])
    peaks = [peak_seconds(row, gpu) for row in rows]

    def costs_of(x: np.ndarray) -> KindCosts:
        given = {name: b[0] for name, b in BOUNDS.items()}
        return KindCosts(**given | {n: float(v) for n, v in zip(free, x, strict=True)})

    def misses(x: np.ndarray) -> np.ndarray:
        costs = costs_of(x)
        return np.log([costs.seconds(*p) for p in peaks]) - measured

    start, low, high = zip(*(BOUNDS[name][:3] for name in free), strict=True)
    found = least_squares(misses, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return costs_of(np.array([float(f"{v:.4g}") for v in found.x]))


def score(rows: Sequence[dict[str, Any]], gpu: dict[str, Any], costs: KindCosts) -> Any:
    """Mean and 90th percentile of the absolute error; None without rows."""
    if not rows:
        return None
    errors = [abs(1 / r - 1) for r in ratios(rows, gpu, costs)]
    p90 = float(np.quantile(errors, 0.9))
    return {"n": len(rows), "mean": round(float(np.mean(errors)), 4), "p90": round(p90, 4)}


def _state(name: str, value: float) -> str:
    _, low, high, _ = BOUNDS[name]
    if value <= low * 1.001:
        return "at-low"
    return "at-high" if value >= high * 0.999 else "fitted"


def kind_of(kind: str, dtype: str, rows: Sequence[dict[str, Any]], gpu: Any) -> dict[str, Any]:
    """One entry of `kinds`."""
    inside = [row for row in rows if not row["held_out"]]
    outside = [row for row in rows if row["held_out"]]
    costs = fit_rows(inside, gpu)
    entry: dict[str, Any] = {"kind": kind, "dtype": dtype}
    free = _identified(inside)
    for name, (_, low, high, why) in BOUNDS.items():
        value, state = getattr(costs, name), _state(name, getattr(costs, name))
        value = {"at-low": low, "at-high": high}.get(state, value)
        state = state if name in free else "unidentified"
        entry[name] = {"value": value, "low": low, "high": high, "source": why, "state": state}
    low, high = np.quantile(ratios(rows, gpu, costs), (0.05, 0.95))
    entry["ratio"] = {"low": round(float(low), 4), "high": round(float(high), 4)}
    entry["fitted"], entry["held_out"] = score(inside, gpu, costs), score(outside, gpu, costs)
    return entry


def fit(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its costs fitted anew; kinds without rows (published peaks) stay."""
    rows = record["rows"]
    kinds = dict.fromkeys((row["kind"], row["dtype"]) for row in rows)
    fitted = [
        kind_of(k, d, [r for r in rows if (r["kind"], r["dtype"]) == (k, d)], record["gpu"])
        for k, d in kinds
    ]
    given = [k for k in record["kinds"] if not k["fitted"]]
    return {**record, "kinds": fitted + given}


def main(arguments: Sequence[str] | None = None) -> int:
    p = SentenceParser(
        prog="python -m trefoil.capacity.compute_fit",
        description="Fits the costs of a compute record to its rows, and writes it again.",
        formatter_class=argparse.HelpFormatter,
    )
    p.add_argument("file", type=Path, metavar="FILE", help="of tools/measure_compute")
    path = p.parse_args(arguments).file
    try:
        record = fit(json.loads(read_text(path)))
    except (OSError, KeyError, json.JSONDecodeError, ComputeError) as error:
        p.error(f"{path}: {error}")
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for k in record["kinds"]:
        if k["fitted"]:
            held = k["held_out"]
            of = f", {held['mean']:.1%} of {held['n']} held out" if held else ""
            has_math = k["math_share"]["state"] != "unidentified"
            math = f"{k['math_share']['value']:.0%} of the math, " if has_math else ""
            print(
                f"{k['kind']} {k['dtype']}: {k['launch_us']['value']:g} us, "
                f"{math}{k['memory_share']['value']:.0%} of "
                f"the memory; mean error {k['fitted']['mean']:.1%} of {k['fitted']['n']}{of}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
