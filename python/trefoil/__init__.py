"""Trefoil from Python.

reference, simulator   the library's reference, plans and simulator (structs: as in C)
sim                    the simulator's points, sweeps, data frames and figures
sweeping               many points of `trefoil simulate`: trefoil.sweep
capacity.batch_search  plans of many batches, ranked, as a data frame: trefoil.plan
kernel_check           another library's results: trefoil.check_dispatch, trefoil.check_combine
ep, torch, deep_ep, hosts
                       dispatch and combine themselves, and inside programs of others
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
    from trefoil import sim
    from trefoil.capacity.batch_search import plan
    from trefoil.kernel_check import check_combine, check_dispatch
    from trefoil.sweeping import Outcome, SweepError, sweep

_MODULES = {
    "Outcome": "sweeping",
    "SweepError": "sweeping",
    "check_combine": "kernel_check",
    "check_dispatch": "kernel_check",
    "plan": "capacity.batch_search",
    "sweep": "sweeping",
}
__all__ = ["Outcome", "SweepError", "check_combine", "check_dispatch", "plan", "sim", "sweep"]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: a verb installs its handlers before anything large is imported."""
    from importlib import import_module

    if name == "sim":
        return import_module("trefoil.sim")
    if name in _MODULES:
        return getattr(import_module(f"trefoil.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trefoil' has no attribute {name!r}")
