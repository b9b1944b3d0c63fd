"""Where the data lie: in the source tree, an installation's share/trefoil, or a wheel."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL_ROOT = Path(__file__).resolve().parent / "_root"  # bin, lib, share of a wheel


def homes(in_tree: str, installed: str) -> list[Path]:
    """The folders of these that are there, the source tree's first."""
    there = (ROOT / in_tree, ROOT / installed, WHEEL_ROOT / "share" / "trefoil" / installed)
    return [p for p in there if p.is_dir()]


def measurements() -> list[Path]:
    return homes("validate/data", "data")
