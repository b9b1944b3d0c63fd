"""Measurements beside predictions."""
