"""The terms of a network: what a put takes, fitted to times of the network alone.

    us = a + c (puts - 1) + bytes / r        bytes: of all puts of a round

a is the latency of a put with its signal, c the cost of one more put, r the rate. Half of the rows
are fitted (every other one), the rest are scored. Least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trefoil.fit.search import Score


@dataclass(frozen=True)
class NetworkTerms:
    """Microseconds and GB/s; errors on the rows that were fitted, and on those held out."""

    latency_us: float
    put_us: float
    rate_gb_per_s: float
    inside: Score
    outside: Score


def network_terms(exchanges: Sequence[Mapping[str, Any]]) -> NetworkTerms:
    """exchanges: rows of {"puts", "bytes" of a put, "runs_us"}; of the runs the fastest counts, as
    single ones are disturbed. ValueError: fewer than eight rows."""
    if len(exchanges) < 8:
        raise ValueError(f"{len(exchanges)} rows are too few for three terms and as many held out")
    us = np.array([min(row["runs_us"]) for row in exchanges])
    puts = np.array([row["puts"] for row in exchanges], dtype=float)
    size = puts * np.array([row["bytes"] for row in exchanges], dtype=float)
    of = np.column_stack([np.ones_like(us), puts - 1, size]) / us[:, None]
    fitted = np.arange(len(us)) % 2 == 0
    terms, _, rank, _ = np.linalg.lstsq(of[fitted], np.ones(int(fitted.sum())), rcond=None)
    if rank < 3:
        raise ValueError("the rows do not tell latency, puts and bytes apart")
    predicted = (of @ terms) * us
    inside, outside = (Score.of(predicted[part], us[part]) for part in (fitted, ~fitted))
    latency, put, byte = (float(term) for term in terms)
    return NetworkTerms(latency, put, 1e-3 / byte, inside, outside)
