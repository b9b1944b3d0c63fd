"""What tests/tree/check_binaries.py refuses in a run path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tree"))
import check_binaries


def test_elements_without_a_fixed_folder(tmp_path: Path) -> None:
    assert "current directory" in (check_binaries.findings("", tmp_path) or "")
    assert "current directory" in (check_binaries.findings("lib", tmp_path) or "")
    assert check_binaries.findings("$ORIGIN/../lib", tmp_path) is None


def test_folders_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o757)
    assert "everybody may write" in (check_binaries.findings("$ORIGIN", tmp_path) or "")
    assert "everybody" in (check_binaries.findings("$ORIGIN/not/there", tmp_path) or "")
    tmp_path.chmod(0o775)  # a group of one's own, as many systems make them
    assert check_binaries.findings("$ORIGIN", tmp_path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_folders_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    os.chown(tmp_path, -1, 65534)
    assert "group 65534 may write" in (check_binaries.findings("$ORIGIN", tmp_path) or "")
    os.chown(tmp_path, 65534, 0)
    tmp_path.chmod(0o755)
    assert "belongs to another user" in (check_binaries.findings("$ORIGIN", tmp_path) or "")
