"""Verbs in Python run nobody else's code: not the current directory's, not another user's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")
VERBS = ("compare", "export", "fit", "gradients", "plan", "report", "validate")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="TREFOIL_PROGRAM does not name the program")


def run(program: Path | str, *arguments: str, cwd: Path, **environment: str):
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "TREFOIL_PYTHON")}
    return subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env=base | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def plant(path: Path, folder: Path) -> Path:
    """A Python module that says that it ran; returns the file that is there if it did."""
    path.write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    return folder / "ran"


@pytest.mark.parametrize("verb", VERBS)
def test_no_module_of_the_current_directory_runs(tmp_path: Path, verb: str) -> None:
    for name in ("json", "argparse", "runpy", "trefoil", "numpy", "__future__"):
        ran = plant(tmp_path / f"{name}.py", tmp_path)
    python = os.environ.get("TREFOIL_PYTHON", "python3")
    plain = run(python, "-m", "json.tool", "--help", cwd=tmp_path)
    assert plain.returncode
    assert ran.exists(), "what was planted does not run even where it could"
    ran.unlink()
    done = run(PROGRAM, verb, "--help", cwd=tmp_path, TREFOIL_PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert not ran.exists()


@pytest.mark.parametrize("path", ("/nowhere:", ":/nowhere", "/nowhere::/elsewhere"))
def test_an_empty_element_of_the_module_path_is_no_folder(tmp_path: Path, path: str) -> None:
    ran = plant(tmp_path / "json.py", tmp_path)
    python = os.environ.get("TREFOIL_PYTHON", "python3")
    done = run(PROGRAM, "plan", "--help", cwd=tmp_path, TREFOIL_PYTHON=python, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert not ran.exists()


def copy_of_the_program(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The program as in a source tree whose private environment says that it ran."""
    program = tmp_path / "build/dev/cli/trefoil"
    program.parent.mkdir(parents=True)
    shutil.copy(PROGRAM, program)
    scripts = tmp_path / ".venv/bin"
    scripts.mkdir(parents=True)
    (tmp_path / ".venv/pyvenv.cfg").write_text("")
    for folder in (tmp_path / ".venv", scripts):
        folder.chmod(0o755)
    python = scripts / "python3"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    python.chmod(0o755)
    return program, tmp_path / ".venv", tmp_path / "ran"


def test_ones_own_environment_is_used(tmp_path: Path) -> None:
    program, _, ran = copy_of_the_program(tmp_path)
    run(program, "report", cwd=tmp_path)
    assert ran.exists()


def test_an_environment_that_others_can_write_to_is_not(tmp_path: Path) -> None:
    program, environment, ran = copy_of_the_program(tmp_path)
    (environment / "bin").chmod(0o777)
    run(program, "report", cwd=tmp_path)
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_users_environment_is_not(tmp_path: Path) -> None:
    program, environment, ran = copy_of_the_program(tmp_path)
    os.chown(environment, 54321, 54321)
    run(program, "report", cwd=tmp_path)
    assert not ran.exists()


def test_no_interpreter_of_the_current_directory_runs(tmp_path: Path) -> None:
    program = tmp_path / "a/b/c/trefoil"  # no environment beside it
    program.parent.mkdir(parents=True)
    shutil.copy(PROGRAM, program)
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    python.chmod(0o755)
    for path in ("", ".", ":/nowhere", "/nowhere:.", f"/nowhere:{tmp_path.name}/.."):
        run(program, "report", cwd=tmp_path, PATH=path)
        assert not (tmp_path / "ran").exists(), f"PATH={path}"
