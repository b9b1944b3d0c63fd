"""Puts the package, the tools and this folder on the path, so that pytest runs from anywhere."""

import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path[:0] = [str(here.parents[1] / "python"), str(here.parents[1] / "tools"), str(here)]
