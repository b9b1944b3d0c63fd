"""The command `trefoil`: where it is, and what a verb of it prints as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from trefoil.places import WHEEL_ROOT
from trefoil.reference import TrefoilError


def program() -> str:
    """The command `trefoil` that asked, that of this wheel, or the one on the path."""
    wheel = WHEEL_ROOT / "bin" / "trefoil"
    return os.environ.get("TREFOIL_PROGRAM") or (str(wheel) if wheel.exists() else "trefoil")


class SignalError(Exception):
    """A signal came; so_far: what the command that was running printed at its end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.so_far: dict[str, Any] | None = None


def run_json(arguments: Sequence[str], may_fail: bool = False) -> dict[str, Any]:
    """What `trefoil ARGUMENTS --json` prints. may_fail: also where it found a disagreement (1)."""
    command = [program(), *arguments, "--json"]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise TrefoilError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        out, err = process.communicate()
    except BaseException as stopped:  # nothing is left running
        process.terminate()
        out, err = process.communicate()
        if isinstance(stopped, SignalError) and out.strip():
            stopped.so_far = json.loads(out)
        raise
    if process.returncode not in ((0, 1) if may_fail else (0,)) or not out.strip():
        said = err.strip() or f"exit code {process.returncode}"
        raise TrefoilError(f"trefoil {' '.join(arguments)}: {said}")
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer
