"""Imported before trefoil.ep: skips the tests of a module where what they need was not built."""

import os

import pytest

for name in ("TREFOIL_MODULE", "TREFOIL_LIB"):
    if not os.environ.get(name):
        pytest.skip(f"{name} is not set (ctest sets it)", allow_module_level=True)
