"""What an engine and its traffic add to the kernels of a step, each with a published default.

terms.json has each default with its source and date; an option of trefoil plan sets it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trefoil.inputs import read_text

FILE = Path(__file__).resolve().parent / "terms.json"
ATTENTION_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True)
class Terms:
    """Without values: kernels alone, balanced, one token a sequence and step."""

    drafts: int = 0  # tokens that multi-token prediction adds to a sequence's step
    acceptance: float = 1.0  # chance that a draft token is taken if those before it were
    attention_dtype: str = "bf16"  # of the products of attention in decode
    fp4_rate: float = 1.0  # of products with fp4 weights over fp8's
    imbalance: float = 1.0  # rows of the busiest GPU's experts over the mean, at least
    prefill_wait: float = 1.0  # of prefill: a step's time over that with equal experts
    batch_imbalance: float = 1.0  # attention of the busiest GPU over the mean
    interference: float = 1.0  # of prefill's compute: speed beside communication, its SMs aside
    host_ms: float = 0.0  # of a step in which the GPU waits for the engine

    @property
    def rows(self) -> int:
        """Of a sequence in a step of decode."""
        return 1 + self.drafts

    @property
    def tokens_out(self) -> float:
        """Of a sequence and step, on average: draft tokens count until the first that is wrong."""
        return sum(self.acceptance**i for i in range(self.rows))


NEUTRAL = Terms()


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Of each term: value, source, date."""
    return json.loads(read_text(FILE))["terms"]


def preset(name: str) -> Any:
    return presets()[name]["value"]
