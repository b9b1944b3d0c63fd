"""The command `trefoil` of a wheel: trefoil/_root/bin/trefoil, with this interpreter for Python."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from trefoil.places import WHEEL_ROOT


def main() -> NoReturn:
    program = str(WHEEL_ROOT / "bin" / "trefoil")
    os.environ.setdefault("TREFOIL_PYTHON", sys.executable)
    try:
        os.execv(program, [program, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"trefoil: {program} cannot be run: {error.strerror}")
