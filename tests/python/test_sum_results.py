"""The sum at the end of tools/test: counts what programs count, hides no failure and no skip."""

import json
import os
import re
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


def leave(folder: Path, preset: str, *cases: str, asked: list[str] | None = None) -> None:
    """What tools/test leaves of a preset; `asked` is what was to run, if not what ran."""
    if asked is None:
        asked = re.findall(r'testcase name="(.*?)"', "".join(cases))
    expected = {"tests": [{"name": name} for name in asked]}
    (folder / f"{preset}.expected.json").write_text(json.dumps(expected))
    (folder / f"{preset}.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    failed = any('status="fail"' in case for case in cases)
    (folder / f"{preset}.code").write_text("8\n" if failed else "0\n")


class Ended:
    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def read(folder: Path, capsys: pytest.CaptureFixture[str], gpus: int = 0, isolate: bool = False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sum_results.py", str(folder)])
        patch.setattr(sum_results, "number_of_gpus", lambda: gpus)
        patch.setattr(sum_results, "may_isolate", lambda: isolate)
        code = sum_results.main()
    lines = capsys.readouterr().out.splitlines()
    return code, lines


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *cases: str, **notes: str):
    leave(tmp_path, "ci", *cases)
    for name, text in notes.items():
        (tmp_path / f"asan.{name}").write_text(text)
    return read(tmp_path, capsys)


def test_programs_count_for_themselves(tmp_path, capsys) -> None:
    code, lines = run(
        tmp_path,
        capsys,
        RUN.format("ours", "skipped: needs a GPU\n12 tests, 0 failed, 1 skipped\n"),
        RUN.format("pytest", ".....\nSKIPPED [1] a.py:3: no GPU\n4 passed, 1 skipped in 0.3s\n"),
        RUN.format("plain", "fine\n"),
    )
    assert code == 0
    assert lines[-1] == "16 passed, 0 failed, 2 skipped"
    assert "skipped ci/ours: needs a GPU" in lines
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


def test_what_was_not_run_is_a_failure(tmp_path, capsys) -> None:
    code, lines = run(
        tmp_path,
        capsys,
        SKIP.format("whole", "skipped: no clang\n1 tests, 0 failed, 1 skipped\n"),
        SKIP.format("silent", ""),
        RUN.format("part", "skipped: no MPI here\n3 tests, 0 failed, 1 skipped\n"),
        RUN.format("unpublished", "skipped: no tmpfs here\n"),
        RUN.format("good", ""),
        failed="the asan preset does not build",
    )
    assert code == 1
    assert lines[-1] == "4 passed, 5 failed"
    assert "FAILED ci/unpublished: not run: no tmpfs here" in lines
    assert "FAILED ci/whole: not run: no clang" in lines
    assert "FAILED ci/silent: not run: no reason given" in lines
    assert "FAILED ci/part: not run: no MPI here" in lines
    assert "FAILED asan: the asan preset does not build" in lines


def test_gpus_that_are_not_here_are_a_reason(tmp_path, capsys) -> None:
    leave(
        tmp_path,
        "ci",
        SKIP.format("one", "skipped: needs a GPU\n"),
        SKIP.format("two", "skipped: needs two GPUs\n"),
        RUN.format("good", ""),
    )
    assert read(tmp_path, capsys)[1][-1] == "1 passed, 0 failed, 2 skipped"
    code, lines = read(tmp_path, capsys, gpus=1)
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert "FAILED ci/one: not run: needs a GPU" in lines


def test_root_that_is_here_is_no_reason(tmp_path, capsys) -> None:
    leave(tmp_path, "ci", SKIP.format("one", "skipped: needs root\n"), RUN.format("good", ""))
    assert read(tmp_path, capsys)[0] == 0
    code, lines = read(tmp_path, capsys, isolate=True)
    assert (code, lines[-1]) == (1, "1 passed, 1 failed")


def test_root_without_the_right_to_namespaces_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(sum_results.subprocess, "run", lambda *_, **__: Ended(1))
    assert not sum_results.may_isolate.__wrapped__()
    monkeypatch.setattr(sum_results.subprocess, "run", lambda *_, **__: Ended(0))
    assert sum_results.may_isolate.__wrapped__()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert not sum_results.may_isolate.__wrapped__()


def test_a_sanitizer_may_skip_what_ran_without_it(tmp_path, capsys) -> None:
    leave(tmp_path, "ci", RUN.format("fork", ""))
    leave(
        tmp_path,
        "tsan",
        SKIP.format("fork", "skipped: not after a fork\n"),
        SKIP.format("other", "skipped: not after a fork\n"),
    )
    code, lines = read(tmp_path, capsys)
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert "FAILED tsan/other: not run: not after a fork" in lines


def test_a_run_that_was_cut_short_fails(tmp_path, capsys) -> None:
    leave(tmp_path, "ci", RUN.format("a", ""), asked=["a", "b"])
    code, lines = read(tmp_path, capsys)
    assert (code, lines[-1]) == (1, "1 passed, 1 failed")
    assert "FAILED ci/b: was to run and has no result" in lines

    (tmp_path / "ci.xml").write_text("<testsuite><testcase name=")
    code, lines = read(tmp_path, capsys)
    assert code == 1
    assert "FAILED ci: ctest left no results of 2 tests" in lines

    (tmp_path / "ci.xml").unlink()
    assert "FAILED ci: ctest left no results of 2 tests" in read(tmp_path, capsys)[1]


def test_results_must_be_of_this_run_and_agree_with_ctest(tmp_path, capsys) -> None:
    leave(tmp_path, "ci", RUN.format("a", ""))
    assert read(tmp_path, capsys)[0] == 0

    os.utime(tmp_path / "ci.xml", (1, 1))
    assert "FAILED ci: the results are from before this run" in read(tmp_path, capsys)[1]

    leave(tmp_path, "ci", RUN.format("a", ""))
    (tmp_path / "ci.code").write_text("143\n")
    code, lines = read(tmp_path, capsys)
    assert code == 1
    assert "FAILED ci: ctest ended 143, and no result says why" in lines

    (tmp_path / "ci.expected.json").unlink()
    (tmp_path / "ci.code").write_text("0\n")
    assert "FAILED ci: there is no list of the tests that were to run" in read(tmp_path, capsys)[1]


def test_nothing_run_is_a_failure(tmp_path, capsys) -> None:
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert lines[-1] == "0 passed, 1 failed"
