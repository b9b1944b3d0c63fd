"""Trefoil from Python.

reference, simulator   the library's reference, plans and simulator (structs: as in C)
sweeping               many points of `trefoil simulate`: trefoil.sweep
fit, campaign, capacity, compare, export, report, validation
                       packages, most of them a verb of the command: `python -m trefoil.PACKAGE`
bench_plot, ht_plot, ht_rows, summary
                       what the benchmarks' tools start
plot, table, units     the one way to draw, to make tables, to write numbers
verb, sentence_parser, outputs, program, places
                       what verbs share: signals, options, files, the command, the data
"""

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
