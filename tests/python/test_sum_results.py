"""The sum at the end of tools/test: counts what programs count, hides no failure and no skip."""

from pathlib import Path

import pytest

import sum_results

RUN = '<testcase name="{}" time="0.1" status="run"><system-out>{}</system-out></testcase>'
FAIL = (
    '<testcase name="{}" time="0.1" status="fail"><failure message=""/>'
    "<system-out>{}</system-out></testcase>"
)
SKIP = (
    '<testcase name="{}" time="0.1" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>'
    "<system-out>{}</system-out></testcase>"
)


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *cases: str, **notes: str):
    (tmp_path / "ci.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    for name, text in notes.items():
        (tmp_path / f"asan.{name}").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sum_results.py", str(tmp_path)])
        code = sum_results.main()
    lines = capsys.readouterr().out.splitlines()
    return code, lines


def test_programs_count_for_themselves(tmp_path, capsys) -> None:
    code, lines = run(
        tmp_path,
        capsys,
        RUN.format("ours", "skipped: no MPI here\n12 tests, 0 failed, 1 skipped\n"),
        RUN.format("pytest", ".....\nSKIPPED [1] a.py:3: no GPU\n4 passed, 1 skipped in 0.3s\n"),
        RUN.format("plain", "fine\n"),
    )
    assert code == 0
    assert lines[-1] == "16 passed, 0 failed, 2 skipped"
    assert "skipped ci/ours: no MPI here" in lines
    assert "skipped ci/pytest: a.py:3: no GPU" in lines


def test_failures_count_and_are_named(tmp_path, capsys) -> None:
    code, lines = run(
        tmp_path,
        capsys,
        FAIL.format("two", "FAILED a\nFAILED b\n9 tests, 2 failed, 0 skipped\n"),
        FAIL.format("crash", "Segmentation fault\n"),
        FAIL.format("leak", "5 tests, 0 failed, 0 skipped\nLeakSanitizer: detected\n"),
        RUN.format("good", ""),
    )
    assert code == 1
    assert lines[-1] == "13 passed, 4 failed"
    assert {"FAILED ci/two (2)", "FAILED ci/crash (1)", "FAILED ci/leak (1)"} <= set(lines)


def test_skips_and_broken_builds(tmp_path, capsys) -> None:
    code, lines = run(
        tmp_path,
        capsys,
        SKIP.format("whole", "skipped: no clang\n1 tests, 0 failed, 1 skipped\n"),
        SKIP.format("silent", ""),
        RUN.format("good", ""),
        failed="the asan preset does not build",
        skipped="cannot run here",
    )
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 3 skipped"
    assert "skipped ci/silent: no reason given" in lines
    assert "FAILED asan: the asan preset does not build" in lines


def test_nothing_run_is_a_failure(tmp_path, capsys) -> None:
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert lines[-1] == "0 passed, 0 failed"
