"""torchtitan's MoE layer with DeepEP over trefoil.deep_ep. Needs torch and torchtitan."""

from __future__ import annotations

from hosts import needs_host
from torch_launch import ROOT, torchrun

pytestmark = needs_host("torchtitan", "torchtitan")


def test_layer() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "torchtitan_moe.py", 2)
    assert told.count("largest difference") == 8
