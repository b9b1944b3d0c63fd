"""Where the package's data lie: in the source tree, or in an installation's share/trefoil."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def homes(in_tree: str, installed: str) -> list[Path]:
    """The folders of these that are there, the source tree's first."""
    return [p for p in (ROOT / in_tree, ROOT / installed) if p.is_dir()]


def measurements() -> list[Path]:
    return homes("validate/data", "data")
