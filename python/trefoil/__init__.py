"""Trefoil from Python."""

from trefoil.sweeping import Outcome, SweepError, sweep

__all__ = ["Outcome", "SweepError", "sweep"]
