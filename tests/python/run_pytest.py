"""Runs pytest on a folder; exit code 77 and the reason where a requirement is missing."""

import importlib.util
import sys


def main() -> int:
    needed = ("pytest", "numpy", "matplotlib", "jinja2")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"skipped: Python lacks {', '.join(missing)} (tools/test brings them)")
        return 77
    import pytest

    return pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
