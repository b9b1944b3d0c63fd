"""Runs pytest; exit code 77 and the reason where a requirement is missing.

python3 run_pytest.py [--needs=numpy,...] PYTEST-ARGUMENTS
"""

import importlib.util
import os
import sys


def main() -> int:
    arguments = sys.argv[1:]
    needed = ["numpy", "matplotlib", "jinja2"]
    if arguments and arguments[0].startswith("--needs="):
        needed = arguments.pop(0).removeprefix("--needs=").split(",")
    needed.append("pytest")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"skipped: Python lacks {', '.join(missing)} (tools/test brings them)")
        return 77
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: threads would wait
    import pytest

    return pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    sys.exit(main())
