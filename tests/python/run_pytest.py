"""Runs pytest; exit code 77 and the reason where a requirement is missing, or all tests skip.

python3 run_pytest.py [--needs=numpy,...] PYTEST-ARGUMENTS
"""

import importlib.util
import os
import sys


class Outcomes:
    """Whether any test ran to its end."""

    ran = False

    def pytest_runtest_logreport(self, report):
        self.ran = self.ran or (report.when == "call" and not report.skipped)


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

    outcomes = Outcomes()
    code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *arguments], plugins=[outcomes])
    return 77 if code == 0 and not outcomes.ran else code


if __name__ == "__main__":
    sys.exit(main())
