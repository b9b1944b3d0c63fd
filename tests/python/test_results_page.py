"""docs/results.md and README's table say what validate/data says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from trefoil import results_page
from trefoil.report import figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with what the page needs, in which the page's data may change."""
    for name in ("validate/data", "models/costs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(results_page, "committed_folder", lambda: tmp_path / "validate/data")
    return tmp_path


def test_the_committed_pages_are_the_datas() -> None:
    assert figures.committed_folder() == ROOT / "validate/data"
    assert results_page.main(["--check"]) == 0


def test_readme_has_the_default_number_of_sms() -> None:
    header = (ROOT / "api/gpu/gpu.h").read_text(encoding="utf-8")
    assert re.search(rf"#define EP_GPU_HT_SMS_WINDOW +{results_page.HT_SMS} ", header)


def test_a_stale_page_is_told_and_made_anew(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tree / "validate/data" / results_page.FILES["kernels_ll"]
    data = json.loads(path.read_text())
    row = next(
        r for r in data["rows"] if (r["operation"], r["tokens"]) == ("dispatch expert-major", 1)
    )
    row["lockstep_us"] = 7.25
    path.write_text(json.dumps(data))
    assert results_page.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "results.md: stale" in told and "README.md: stale" in told
    assert results_page.main([]) == 0 and results_page.main(["--check"]) == 0
    assert "| dispatch expert-major | 7.2 (" in (tree / "docs/results.md").read_text()
    assert "dispatch 7.2 /" in (tree / "README.md").read_text()


def test_a_row_that_failed_its_check_has_no_figure(tree: Path) -> None:
    path = tree / "validate/data" / results_page.FILES["kernels_ll"]
    data = json.loads(path.read_text())
    for row in data["rows"]:
        if (row["operation"], row["tokens"]) == ("combine rank-major", 8):
            row["check"] = "failed"
    path.write_text(json.dumps(data))
    row = next(r for r in results_page.page().splitlines() if r.startswith("| combine rank-major"))
    assert row.split(" | ")[2] == "–"


def test_a_readme_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        results_page.readme("# Trefoil\n")
