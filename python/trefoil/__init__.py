"""Trefoil from Python."""
