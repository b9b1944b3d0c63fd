"""docs/results.md and README's table say what validate/data says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

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


def changed(tree: Path, name: str) -> dict[str, Any]:
    return json.loads((tree / "validate/data" / results_page.FILES[name]).read_text())


def test_goals_of_python_follow_the_data(tree: Path) -> None:
    """6 us for both calls together and 1.5 for one, above C: at the goal, and just above it."""
    data = changed(tree, "python_hosts")
    data["c_host_us"] = [{"dispatch": [1, 5, 9], "combine": [1, 4, 9]}]
    data["host_us"] = {
        "at both": {"dispatch": [0, 6.5, 0], "combine": [0, 5.5, 0]},
        "over one": {"dispatch": [0, 6.6, 0], "combine": [0, 4, 0]},
        "over both": {"dispatch": [0, 8, 0], "combine": [0, 7.1, 0]},
        "deep_ep": {"dispatch": [0, 50, 0], "combine": [0, 50, 0]},
    }
    path = tree / "validate/data" / results_page.FILES["python_hosts"]
    path.write_text(json.dumps(data))
    rows = results_page.python_goals(results_page.FILES["python_hosts"]).splitlines()[2:]
    assert rows == [
        "| at both | 3.0 | yes | 1.5 | yes |",
        "| over one | 1.6 | yes | 1.6 | no |",
        "| over both | 6.1 | no | 3.1 | no |",
    ]


def test_the_goal_of_serving_follows_the_data(tree: Path) -> None:
    """Half of the other backend's share is enough in each run, a little more is not."""
    data = changed(tree, "serving_data")
    steps = {row["step"]: row["decode"] for row in data["rows"] if "decode" in row}
    own, waiting = "communication_without_first_ms", "communication_ms"
    for requests in ("32", "128"):
        steps["agrs_bf16"][requests] = {"kernels_ms": 4.0, own: 0.4, waiting: 0.4}
    steps["ll_bf16"]["32"] = {"kernels_ms": 8.0, own: 0.4, waiting: 0.8}
    steps["ll_bf16"]["128"] = {"kernels_ms": 8.0, own: 0.4, waiting: 0.4}
    worse = {"kernels_ms": 8.0, own: 0.41, waiting: 0.41}
    unknown = {"kernels_ms": 8.0, waiting: 0.2}
    data["again"] = [
        {"ll_bf16": {"32": unknown, "128": worse}, "agrs_bf16": steps["agrs_bf16"]},
    ]
    path = tree / "validate/data" / results_page.FILES["serving_data"]
    path.write_text(json.dumps(data))
    rows = results_page.serving_goal(results_page.FILES["serving_data"]).splitlines()[2:]
    assert rows == [
        "| 32 | 5.0% | 10.0% | 0.50 | yes | 1.00, 0.25 | no |",
        "| 128 | 5.0%, 5.1% | 10.0%, 10.0% | 0.50, 0.51 | no | 0.50, 0.51 | no |",
    ]


def test_launches_of_serving(tree: Path) -> None:
    """Medians over the launches of all runs; runs without them count for nothing."""
    data = changed(tree, "serving_data")
    ours, theirs = (
        "void (anonymous namespace)::dispatchKernel<A<fa",
        "ncclDevKernel_X(ncclDevKernelA",
    )
    for row in data["rows"]:
        if row["step"] in ("ll_bf16", "agrs_bf16"):
            kernel = ours if row["step"] == "ll_bf16" else theirs
            row["decode"] = {n: {"launches_us": {kernel: [1.0, 3.0]}} for n in ("1", "32")}
    more = {"1": {"launches_us": {ours: [9.0]}}, "32": {}}
    data["again"] = [{"ll_bf16": more, "agrs_bf16": {"1": {}, "32": {}}}]
    path = tree / "validate/data" / results_page.FILES["serving_data"]
    path.write_text(json.dumps(data))
    assert results_page.serving_launches(path.name).splitlines()[2:] == [
        "| `dispatchKernel` | 3.0 | 2.0 |",
        "| `ncclDevKernel_X` | 2.0 | 2.0 |",
    ]


def test_a_readme_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        results_page.readme("# Trefoil\n")
