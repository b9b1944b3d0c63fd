"""SGLang's dispatcher over trefoil.deep_ep. Needs torch and sglang."""

from __future__ import annotations

from hosts import needs_host
from torch_launch import ROOT, torchrun

pytestmark = needs_host("sglang", "sglang")


def test_dispatcher() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "sglang_dispatcher.py", 2)
    for mode, lines in (("normal mode", 6), ("latency, bf16", 12), ("latency, fp8", 12)):
        assert told.count(mode) == lines
