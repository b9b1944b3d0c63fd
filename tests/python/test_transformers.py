"""transformers trains over trefoil with FSDP2: losses are those of one process. Needs torch and
transformers."""

from __future__ import annotations

import re

import pytest

from torch_launch import ROOT, torchrun


def losses(ranks: int) -> list[float]:
    text = str(ROOT / "docs" / "spec.md")
    told = torchrun(ROOT / "tests" / "examples" / "train_transformers.py", ranks, "--text", text)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]


def test_training() -> None:
    alone = losses(1)
    assert len(alone) == 12 and alone[-1] < alone[0]
    for ranks in (2, 4):
        assert losses(ranks) == pytest.approx(alone, abs=5e-5)
