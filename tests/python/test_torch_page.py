"""The script of docs/use_in_torch.md trains, by torch's own launcher. Needs torch."""

from __future__ import annotations

import re
from pathlib import Path

from torch_launch import ROOT, torchrun


def test_script(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "use_in_torch.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    told = torchrun(tmp_path / "train.py", 2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", told)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
