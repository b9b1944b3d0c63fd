"""trefoil gradients: bytes and time of averaging gradients, alone and beside dispatch and combine.

    trefoil gradients --cluster dgx-h100 --moe deepseek-v3 --gpus 8..1024
    trefoil gradients --elements 66034000 --gpus 8 --gpus-per-node 1

The first replays a training step: averaging shares the links with dispatch and combine of the
model's experts. The second has a gradient of so many elements and nothing beside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trefoil.capacity.compute_costs import ComputeError
from trefoil.capacity.options import parse_sizes
from trefoil.capacity.question import PlanError
from trefoil.gradients.collectives import NETWORK, NVLINK
from trefoil.gradients.methods import (
    Averaged,
    Method,
    averaging,
    measured,
    methods_of,
    origins,
)
from trefoil.gradients.training_step import Step, StepSetting, simulate_steps
from trefoil.outputs import check_file
from trefoil.reference import TrefoilError
from trefoil.sentence_parser import SentenceParser
from trefoil.simulator import ENGINES, Cluster
from trefoil.table import aligned
from trefoil.units import format_bytes, format_seconds
from trefoil.verb import run, show_progress

OK, FAILED, USAGE = 0, 1, 2
SUFFIXES = (".svg", ".png", ".pdf")


# ---- The command line ----------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 to 2^40")
    return int(text)


def _times(text: str) -> dict[str, float]:
    """ "a2sgd=120,topk=900" """
    try:
        pairs = (part.split("=") for part in text.split(","))
        found = {name: float(us) for name, us in pairs}
    except ValueError:
        found = {}
    if not found or not all(0 <= us <= 1e9 for us in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be METHOD=US, or a list of these")
    return found


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    p = SentenceParser(prog="trefoil gradients", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--cluster", default="dgx-h100", metavar="NAME", help="preset or file")
    p.add_argument(
        "--gpus", default="8..1024", metavar="LIST", help="A..B doubles, or A,B (default 8..1024)"
    )
    step = p.add_argument_group("a step with experts")
    step.add_argument("--moe", default="deepseek-v3", metavar="NAME", help="preset or file")
    step.add_argument("--mode", choices=("ll", "ht"), default="ht", help="(default ht)")
    step.add_argument("--tokens", type=_positive, default=4096, metavar="N", help="of a GPU")
    step.add_argument("--ep", type=_positive, metavar="N", help="GPUs of a group (default: most)")
    step.add_argument("--costs", default="", metavar="NAME", help="record, file, or ideal")
    step.add_argument("--engine", choices=ENGINES, default="queues", help="(default queues)")
    step.add_argument(
        "--compute-us", type=float, metavar="US", help="a layer's forward (default: products)"
    )
    step.add_argument(
        "--no-overlap", action="store_true", help="average when the whole backward is through"
    )
    alone = p.add_argument_group("a gradient with nothing beside")
    alone.add_argument("--elements", type=_positive, metavar="N", help="of the gradient")
    alone.add_argument("--tensors", type=_positive, default=1, metavar="N", help="that it has")
    alone.add_argument("--gpus-per-node", type=_positive, metavar="N", help="(default: all)")
    how = p.add_argument_group("methods")
    how.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f32")
    how.add_argument("--share", type=float, default=0.01, help="of Top-K (default 0.01)")
    how.add_argument("--bits", type=int, default=4, help="of QSGD (default 4)")
    how.add_argument(
        "--sync-period", type=_positive, default=100, metavar="K", help="of A2SGD (default 100)"
    )
    how.add_argument(
        "--selection", choices=("radix", "sort"), default="radix", help="how Top-K selects"
    )
    how.add_argument(
        "--measured",
        type=_times,
        default={},
        metavar="METHOD=US,...",
        help="time of all passes over memory, measured, instead of the model's; with --elements",
    )
    p.add_argument("--json", action="store_true", help="print the answer as JSON")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"picture: {SUFFIXES}")
    a = p.parse_args(argv)
    if a.measured and not a.elements:
        p.error("--measured: times are those of one gradient, so give its --elements")
    if a.output and a.output.suffix not in SUFFIXES:
        p.error(f"-o {a.output}: expected a name that ends in one of {', '.join(SUFFIXES)}")
    return a


def _methods(a: argparse.Namespace) -> list[Method]:
    how = {"share": a.share, "bits": a.bits, "dtype": a.dtype, "selection": a.selection}
    return measured(methods_of(a.sync_period, **how), a.measured)


def _sizes(a: argparse.Namespace, cluster: Cluster) -> list[int]:
    found = parse_sizes(a.gpus, "--gpus")
    most = cluster.fields.max_gpus
    if cluster.fields.nic_gb_per_s <= 0:
        most = min(most, cluster.fields.gpus_per_node)
    for gpus in found:
        if not 1 < gpus <= most:
            raise TrefoilError(f"--gpus {gpus}: cluster {cluster.name} has 2 to {most}")
    return found


# ---- Answers -------------------------------------------------------------------------------------


def _alone_row(gpus: int, a: Averaged) -> dict[str, Any]:
    return {
        "gpus": gpus,
        "method": a.method.label,
        "algorithm": a.algorithm,
        "contribution_bytes": a.contribution,
        "nvlink_bytes": a.sent[NVLINK],
        "network_bytes": a.sent[NETWORK],
        "pass_seconds": a.pass_seconds,
        "alone_seconds": a.seconds,
    }


def _step_row(s: Step) -> dict[str, Any]:
    return {
        "gpus": s.gpus,
        "ep": s.ep,
        "method": s.method.label,
        "algorithm": "/".join(s.algorithms),
        "contribution_bytes": s.contribution,
        "nvlink_bytes": s.sent[NVLINK],
        "network_bytes": s.sent[NETWORK],
        "ep_nvlink_bytes": s.ep_sent[NVLINK],
        "ep_network_bytes": s.ep_sent[NETWORK],
        "pass_seconds": s.pass_seconds,
        "alone_seconds": s.alone_seconds,
        "operation_seconds": s.operation_seconds,
        "compute_seconds": s.compute_seconds,
        "step_seconds": s.step_seconds,
        "exposed_seconds": s.exposed_seconds,
    }


TITLES = {
    "contribution_bytes": "sends",
    "nvlink_bytes": "NVLink",
    "network_bytes": "network",
    "pass_seconds": "passes",
    "alone_seconds": "alone",
    "operation_seconds": "dispatch, combine",
    "step_seconds": "step",
    "exposed_seconds": "adds",
}


def text_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table; columns that are named in TITLES, and what is no number."""
    keys = ["method", "gpus", "algorithm", *(k for k in TITLES if k in rows[0])]

    def cell(key: str, value: Any) -> str:
        if key.endswith("_bytes"):
            return format_bytes(value)
        return format_seconds(value) if key.endswith("_seconds") else str(value)

    yield from aligned(
        [[TITLES.get(k, k) for k in keys], *([cell(k, r[k]) for k in keys] for r in rows)]
    )


def _rows(a: argparse.Namespace) -> list[dict[str, Any]]:
    cluster, methods = Cluster(a.cluster), _methods(a)
    sizes = _sizes(a, cluster)
    if a.elements:
        each, more = divmod(a.elements, a.tensors)
        tensors = [each + (i < more) for i in range(a.tensors)]
        if a.gpus_per_node and a.gpus_per_node > cluster.fields.gpus_per_node:
            raise TrefoilError(
                f"--gpus-per-node {a.gpus_per_node}: cluster {cluster.name} has at most "
                f"{cluster.fields.gpus_per_node}"
            )
        return [
            _alone_row(g, averaging(cluster, g, tensors, m, a.gpus_per_node or 0))
            for g in sizes
            for m in methods
        ]
    setting = StepSetting(
        cluster=a.cluster,
        moe=a.moe,
        mode=a.mode,
        tokens=a.tokens,
        ep=a.ep or 0,
        costs=a.costs,
        engine=a.engine,
        compute_us=a.compute_us,
        overlap=not a.no_overlap,
    )
    return [_step_row(s) for g in _shown(sizes) for s in simulate_steps(setting, g, methods)]


def _origins(a: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Where each method's costs are from."""
    cluster = Cluster(a.cluster)
    per_node, sizes = a.gpus_per_node or cluster.fields.gpus_per_node, _sizes(a, cluster)
    inside, across = min(sizes) <= per_node != 1, max(sizes) > per_node
    return {m.label: origins(m, inside, across) for m in _methods(a)}


def _origins_text(found: dict[str, dict[str, str]]) -> Iterator[str]:
    """A line for what several methods have alike."""
    for part in ("passes", "links"):
        alike: dict[str, list[str]] = {}
        for label, parts in found.items():
            alike.setdefault(parts[part], []).append(label)
        yield from (f"{part} of {' and '.join(labels)}: {w}" for w, labels in alike.items())


def _shown(sizes: Iterable[int]) -> Iterator[int]:
    """The sizes, each told on a terminal as its turn comes."""
    for gpus in sizes:
        show_progress(f"{gpus} GPUs")
        yield gpus
    show_progress()


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        if a.output:
            check_file(a.output)
        rows = _rows(a)
        if a.output:
            from trefoil.gradients.gradient_plots import write_times

            write_times(a.output, rows)
    except (TrefoilError, PlanError, ComputeError) as error:
        print(f"trefoil gradients: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"trefoil gradients: {error}", file=sys.stderr)
        return FAILED
    about = {"cluster": a.cluster, "dtype": a.dtype, "elements": a.elements}
    if not a.elements:
        about |= {"moe": a.moe, "mode": a.mode, "tokens": a.tokens, "overlap": not a.no_overlap}
    found = _origins(a)
    if a.json:
        print(json.dumps({**about, "costs": found, "rows": rows}, indent=1))
    else:
        print("\n".join([*text_of(rows), "", *_origins_text(found)]))
    return OK


if __name__ == "__main__":
    sys.exit(run("gradients", main))
