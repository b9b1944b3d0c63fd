"""trefoil export: predictions, measured figures and plans in the forms of other tools.

    trefoil export table --gpus 8,16,32 --tokens 1,8,64,128 -o predicted.csv
    trefoil export bench validate/data/ll_kernels_h200x4.json -o measured.csv
    trefoil export goal --gpus 16 --mode ht --op dispatch -o dispatch.goal

table: the EP columns of aiconfigurator, filled with predictions. bench: the same from measured
kernel times of this project, so that `trefoil fit` reads them. goal: the plan as a GOAL schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trefoil.calibrate import Setting, row_bytes
from trefoil.interchange import cases_of_bench, predicted_cases, transfers, write_goal
from trefoil.measured import OPS, TableError, write_table
from trefoil.reference import TrefoilError, library
from trefoil.simulator import Cluster, CostRecord, Costs, Moe, Workload

OK, FAILED, USAGE = 0, 1, 2


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 32 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers from 1, as in 8,16,32")
    return [int(part) for part in text.split(",")]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trefoil export", description=__doc__.split("\n\n")[0])
    forms = parser.add_subparsers(dest="form", required=True)
    table = forms.add_parser("table", help="predictions in the EP columns of aiconfigurator")
    bench = forms.add_parser("bench", help="measured kernel times in the same columns")
    goal = forms.add_parser("goal", help="the plan of one operation as a GOAL schedule")
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


def _table(a: argparse.Namespace) -> int:
    cluster, moe = Cluster(a.cluster), Moe(a.moe)
    name = a.costs or CostRecord.default(a.mode, a.variant)
    cases = predicted_cases(_setting(a, cluster), Costs.record(name), moe, a.gpus, a.tokens, a.sms)
    labels = {"framework": "trefoil", "version": "0.1.0", "device": a.cluster}
    labels["kernel_source"] = f"predicted with {name}"
    return write_table(a.output, cases, labels, a.dispatch_dtype == "fp8")


def _bench(a: argparse.Namespace) -> int:
    cases = cases_of_bench(a.results)
    said = json.loads(a.results.read_text(encoding="utf-8"))
    device = said.get("device") or said.get("measured", "").split(" of ")[0]
    labels = {"framework": "trefoil", "version": "0.1.0", "device": device}
    return write_table(a.output, cases, {**labels, "kernel_source": "trefoil"}, False)


def _goal(a: argparse.Namespace) -> int:
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
    with a.output.open("w", encoding="utf-8") as file:
        return write_goal(file, a.gpus, plan)


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        count = {"table": _table, "bench": _bench, "goal": _goal}[a.form](a)
    except (TableError, TrefoilError, OSError) as error:
        print(f"trefoil export: {error}", file=sys.stderr)
        return FAILED
    what = "messages" if a.form == "goal" else "rows"
    answer = {"output": str(a.output), what: count}
    print(json.dumps(answer) if a.json else f"{a.output}: {count} {what}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
