"""trefoil export: predictions, measured figures and plans in the forms of other tools.

    trefoil export table --gpus 8,16,32 --tokens 1,8,64,128 -o predicted.csv
    trefoil export bench validate/data/ll_kernels_h200x4.json -o measured.csv
    trefoil export goal --gpus 16 --mode ht --op dispatch -o dispatch.goal
    trefoil export predictions -o validate/data/predictions

table: the EP columns of aiconfigurator, filled with predictions. bench: the same from measured
kernel times of this project, so that `trefoil fit` reads them. goal: the plan as a GOAL schedule.
predictions: times with intervals of sizes that nobody has measured, dated (docs/check.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from trefoil.export.interchange import cases_of_bench, predicted_cases, transfers, write_goal
from trefoil.export.predicted import SETS, make_predictions, write_predictions
from trefoil.fit.cases import OPS, TableError, write_table
from trefoil.fit.model import Setting, row_bytes
from trefoil.inputs import read_text
from trefoil.outputs import check_file, check_folder, open_whole
from trefoil.reference import TrefoilError, library
from trefoil.sentence_parser import SentenceParser
from trefoil.simulator import Cluster, CostRecord, Costs, Moe, Workload
from trefoil.verb import run, show_progress

OK, FAILED, USAGE = 0, 1, 2


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 32 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers from 1, as in 8,16,32")
    return [int(part) for part in text.split(",")]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = SentenceParser(prog="trefoil export", description=__doc__.split("\n\n")[0])
    forms = parser.add_subparsers(dest="form", required=True)
    table = forms.add_parser("table", help="predictions in the EP columns of aiconfigurator")
    bench = forms.add_parser("bench", help="measured kernel times in the same columns")
    goal = forms.add_parser("goal", help="the plan of one operation as a GOAL schedule")
    predictions = forms.add_parser(
        "predictions", help="dated tables of times with intervals, for sizes not yet measured"
    )
    names = [s.name for s in SETS]
    predictions.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SET", help=", ".join(names)
    )
    predictions.add_argument("--costs", help="another cost record, for sets of its mode")
    predictions.add_argument("--commit", help="of this tree (default: what git says)")
    predictions.add_argument(
        "--revision",
        choices=tuple("bcdefghijkl"),
        default="",
        metavar="LETTER",
        help="b for the day's second tables, c for its third: for costs that changed on the day",
    )
    predictions.add_argument("--json", action="store_true", help="print what was written as JSON")
    predictions.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    for one in (table, goal):
        one.add_argument("--cluster", default="dgx-h100", help="preset or file")
        one.add_argument("--moe", default="deepseek-v3", help="preset, file, or config.json")
        one.add_argument("--mode", choices=("ll", "ht"), default="ll")
        one.add_argument("--variant", choices=("ours", "per-expert"), default="ours")
        one.add_argument("--dispatch-dtype", choices=("bf16", "fp8"), default="bf16")
        one.add_argument("--json", action="store_true", help="print what was written as JSON")
        one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    bench.add_argument("results", type=Path, help="JSON of the kernels' benchmark")
    bench.add_argument("--json", action="store_true", help="print what was written as JSON")
    bench.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    table.add_argument("--gpus", type=_numbers, default=[8, 16, 32], metavar="A,B,...")
    table.add_argument("--tokens", type=_numbers, default=[1, 8, 32, 64, 128], metavar="A,B,...")
    table.add_argument(
        "--sms", type=_numbers, default=[0], metavar="A,B,...", help="ht (default: the costs')"
    )
    table.add_argument("--costs", help="cost record (default: the one for mode and variant)")
    goal.add_argument("--gpus", type=int, default=16)
    goal.add_argument("--tokens", type=int, default=128)
    goal.add_argument("--op", choices=OPS, default="dispatch")
    goal.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def _setting(a: argparse.Namespace, cluster: Cluster) -> Setting:
    dtype = "fp8-128" if a.dispatch_dtype == "fp8" else "bf16"
    return Setting(a.mode, a.variant, a.cluster, cluster.fields.gpus_per_node, dtype, "bf16")


def _check_gpus(gpus: int, cluster: Cluster, moe: Moe) -> None:
    """Is there an EP group of so many?"""
    most, has_net = cluster.fields.max_gpus, cluster.fields.nic_gb_per_s > 0
    if gpus > (most if has_net else min(most, cluster.fields.gpus_per_node)):
        raise TableError(f"--gpus {gpus}: cluster {cluster.name} has not as many")
    if gpus > moe.fields.num_experts:
        raise TableError(
            f"--gpus {gpus}: an EP group has at most as many GPUs as experts, "
            f"{moe.fields.num_experts}"
        )


def _table(a: argparse.Namespace) -> int:
    cluster, moe = Cluster(a.cluster), Moe(a.moe)
    name = a.costs or CostRecord.default(a.mode, a.variant)
    record = CostRecord(name)
    if bool(record.fields.is_ht) != (a.mode == "ht"):
        raise TableError(f"--costs {name}: they are not of {a.mode}")
    for gpus in a.gpus:
        _check_gpus(gpus, cluster, moe)
        if gpus % cluster.fields.gpus_per_node:
            raise TableError(
                f"--gpus {gpus}: a table counts nodes, which have {cluster.fields.gpus_per_node} "
                f"GPUs in {a.cluster}"
            )
    costs = Costs.on(cluster, record)
    cases = predicted_cases(_setting(a, cluster), costs, moe, a.gpus, a.tokens, a.sms)
    labels = {"framework": "trefoil", "version": "0.2.0", "device": a.cluster}
    labels["kernel_source"] = f"predicted with {name}"
    return write_table(a.output, cases, labels, a.dispatch_dtype == "fp8")


def _bench(a: argparse.Namespace) -> int:
    cases = cases_of_bench(a.results)
    said = json.loads(read_text(a.results))
    device = said.get("device") or said.get("measured", "").split(" of ")[0]
    labels = {"framework": "trefoil", "version": "0.2.0", "device": device}
    return write_table(a.output, cases, {**labels, "kernel_source": "trefoil"}, False)


def _goal(a: argparse.Namespace) -> int:
    _check_gpus(a.gpus, Cluster(a.cluster), Moe(a.moe))
    cluster, moe = Cluster(a.cluster).fields, Moe(a.moe).fields
    per_node = library().trefoilRanksPerNode(a.gpus, cluster.gpus_per_node)
    workload = Workload(
        ranks=a.gpus,
        tokens=a.tokens,
        mode=a.mode,
        ranks_per_node=per_node,
        experts=moe.num_experts,
        topk=moe.topk,
        dispatch_row_bytes=row_bytes(
            "fp8-128" if a.dispatch_dtype == "fp8" else "bf16", moe.hidden
        ),
        combine_row_bytes=row_bytes("bf16", moe.hidden),
        variant=a.variant,
        seed=a.seed,
    )
    plan = transfers(workload, a.op)
    with open_whole(a.output) as file:
        return write_goal(file, a.gpus, plan)


def _commit() -> str:
    """The tree's, or "unknown" outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _predictions(a: argparse.Namespace) -> int:
    """A file a set, named by the day. What stands there is never overwritten."""
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}{a.revision}"
    chosen = [(s, a.output / f"{day}-{s.name}.csv") for s in SETS if s.name in a.only]
    if a.costs:
        mode = "ht" if CostRecord(a.costs).fields.is_ht else "ll"
        chosen = [(replace(s, record=a.costs), path) for s, path in chosen if s.mode == mode]
        if not chosen:
            raise TableError(f"--costs {a.costs}: they are of {mode}, none of these sets is")
    for _, path in chosen:
        if path.exists():
            raise TableError(f"{path}: is there already, and predictions are not made anew")

    count = 0
    for what, path in chosen:
        about = {"date": day, "commit": a.commit or _commit(), "costs": what.record}
        revision = f" --revision {a.revision}" if a.revision else ""
        costs = f" --costs {a.costs}" if a.costs else ""
        about["command"] = (
            f"trefoil export predictions --only {what.name}{costs}{revision} -o {a.output}"
        )
        count += write_predictions(path, list(make_predictions(what, report=show_progress)), about)
    show_progress()
    return count


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        forms = {"table": _table, "bench": _bench, "goal": _goal, "predictions": _predictions}
        (check_folder if a.form == "predictions" else check_file)(a.output)
        count = forms[a.form](a)
    except (TableError, TrefoilError, OSError) as error:
        print(f"trefoil export: {error}", file=sys.stderr)
        return FAILED
    what = "messages" if a.form == "goal" else "rows"
    answer = {"output": str(a.output), what: count}
    print(json.dumps(answer) if a.json else f"{a.output}: {count} {what}")
    return OK


if __name__ == "__main__":
    sys.exit(run("export", main))
