"""Megatron-core trains over trefoil.deep_ep. Needs torch and megatron-core."""

from __future__ import annotations

from torch_launch import ROOT, torchrun


def test_flex_dispatcher() -> None:
    told = torchrun(ROOT / "tests" / "examples" / "megatron_flex.py", 2)
    assert told.count("largest difference") == 6
