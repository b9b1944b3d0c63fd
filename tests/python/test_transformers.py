"""transformers trains over trefoil with FSDP2: losses are those of one process. Needs torch and
transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_launch import ROOT, torchrun

pytest.importorskip("transformers", minversion="5.22")


def losses(ranks: int) -> list[float]:
    text = str(ROOT / "docs" / "spec.md")
    told = torchrun(ROOT / "tests" / "examples" / "train_transformers.py", ranks, "--text", text)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]


def test_training() -> None:
    alone = losses(1)
    assert len(alone) == 12 and alone[-1] < alone[0]
    for ranks in (2, 4):
        assert losses(ranks) == pytest.approx(alone, abs=5e-5)


EMPTY = """
import sys

import torch

import trefoil.hosts.transformers as host

whole = host.TrefoilEP.__call__


def to_the_first(self, x, ids, weights):
    return whole(self, x, torch.arange(2).expand(ids.shape).contiguous(), weights)


host.TrefoilEP.__call__ = to_the_first
sys.path.insert(0, sys.argv.pop(1))
import train_transformers

sys.exit(train_transformers.main())
"""


def test_a_rank_without_rows(tmp_path: Path) -> None:
    """All tokens go to the first rank's experts: the other one takes part in every step."""
    (tmp_path / "empty.py").write_text(EMPTY)
    text, folder = str(ROOT / "docs" / "spec.md"), str(ROOT / "tests" / "examples")
    told = torchrun(tmp_path / "empty.py", 2, folder, "--steps", "4", "--text", text)
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]
    assert len(found) == 4 and found[-1] < found[0]
