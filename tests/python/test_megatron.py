"""Megatron-core trains over trefoil.deep_ep. Needs torch and megatron-core."""

from __future__ import annotations

from hosts import needs_host
from torch_launch import ROOT, torchrun

pytestmark = needs_host("megatron", "megatron-core")


def test_flex_dispatcher() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "megatron_flex.py", 2)
    assert told.count("largest difference") == 6
