"""The fit of costs to measured tables."""
