"""Numbers as people read them: three significant digits and an SI unit."""

from __future__ import annotations


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    factor, unit = steps[-1]
    return f"{_digits(value / factor)} {unit}"


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def format_bytes(value: float) -> str:
    """Decimal units, as link rates are given: 1.23 MB is 1,230,000 bytes."""
    if value == 0:
        return "0"
    return _scaled(value, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def format_seconds(value: float) -> str:
    if value == 0:
        return "0"
    return _scaled(value, [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])
