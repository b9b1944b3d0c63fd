"""Trefoil from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trefoil.sweeping import Outcome, SweepError, sweep

__all__ = ["Outcome", "SweepError", "sweep"]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: a verb installs its handlers before anything large is imported."""
    if name in __all__:
        from trefoil import sweeping

        return getattr(sweeping, name)
    raise AttributeError(f"module 'trefoil' has no attribute {name!r}")
