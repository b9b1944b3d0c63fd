"""Capacity plans: questions, configurations, verdicts, texts and pictures."""
