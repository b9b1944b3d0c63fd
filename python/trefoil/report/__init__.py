"""The report: results read, figures, goals, sections and pictures."""
