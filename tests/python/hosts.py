"""Programs of others that the library runs in: tools/requirements-host-*.in pins them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def needs_host(name: str, distribution: str) -> pytest.MarkDecorator:
    """Skips tests where the pinned version of the host is not installed."""
    listed = (TOOLS / f"requirements-host-{name}.in").read_text(encoding="utf-8")
    pinned = re.search(rf"^{distribution}==(\S+)$", listed, re.M)
    assert pinned, f"{distribution} is not in requirements-host-{name}.in"
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        found = "none"
    reason = f"{distribution}: found {found}, expected {pinned[1]}"
    install = f"pip install --no-deps -r tools/requirements-host-{name}.txt"
    return pytest.mark.skipif(found != pinned[1], reason=f"{reason} ({install})")
