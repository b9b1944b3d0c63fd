"""The scripts of the pages that need torch, by torch's own launcher. Needs torch."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from torch_launch import ROOT, torchrun
from trefoil.sweeping import SweepError, find_program


def script_of(page: str) -> str:
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return script


@pytest.mark.parametrize("compiled", [False, True])
def test_training(compiled: bool, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "use_in_torch.md").read_text(encoding="utf-8")
    script, made = script_of(page), "model = MoE(group)\n"
    assert script.count(made) == 1
    if compiled:
        indent = re.search(rf"^( *){re.escape(made)}", script, flags=re.MULTILINE)[1]
        whole = 'model.compile(fullgraph=True, backend="aot_eager")\n'
        script = script.replace(made, made + indent + whole)
    (tmp_path / "train.py").write_text(script)
    told = torchrun(tmp_path / "train.py", 2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", told)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script writes a trace, and the page's commands read it."""
    page = (ROOT / "docs" / "use_record_routing.md").read_text(encoding="utf-8")
    (shell,) = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    launch, describe, plan = (shlex.split(line) for line in shell.splitlines())
    assert launch[:2] == ["torchrun", "--nproc-per-node"]
    ranks, script = int(launch[2]), launch[3]
    monkeypatch.chdir(tmp_path)  # the script writes where it runs
    Path(script).write_text(script_of(page))
    told = torchrun(Path(script), ranks)
    found = re.fullmatch(r"(\d+) steps, (\d+) tokens; entries of each expert: \[(.*)\]\n", told)
    assert found, told
    steps, tokens, load = int(found[1]), int(found[2]), [int(n) for n in found[3].split(",")]
    assert ranks == 2 and steps == 4 and len(load) == 8 and sum(load) == 2 * tokens
    try:
        program = find_program()
    except SweepError as error:
        pytest.skip(str(error))
    described = answer(program, describe)
    assert f"2 ranks (2 per node), top-2 of 8 experts; 4 steps, {tokens} tokens" in described
    busiest = max(load)
    assert f"max/mean {busiest / (sum(load) / 8):.3f} (expert {load.index(busiest)})" in described
    rows = re.findall(r"^ +(\d+) +2 +1 \| +[\d.]+ ", answer(program, plan), flags=re.MULTILINE)
    assert rows == [str(step) for step in range(steps)]
    (kept,) = re.findall(r"^    (trefoil plan .*)$", page, flags=re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert "routing of validate/data/traces/trained_moe.npz" in answer(program, shlex.split(kept))


def answer(program: str, command: list[str]) -> str:
    assert command[0] == "trefoil"
    done = subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
