"""Predictions, measurements and plans in the forms of other tools."""
