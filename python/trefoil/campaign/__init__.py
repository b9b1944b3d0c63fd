"""Campaigns of measurements: the points, their order, runs and tables."""
