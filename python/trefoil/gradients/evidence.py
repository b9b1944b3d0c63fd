"""What docs/a2sgd.md shows of training runs and of simulated times: pictures and tables.

    python -m trefoil.gradients.evidence        # writes the pictures and the tables of the page

Reads validate/data/a2sgd_lstm.json and a2sgd_moe.json, which tests/examples/train_text.py wrote,
and a2sgd_steps.json, which `trefoil gradients --json` wrote.
A step of these runs on eight nodes with a GPU each is compute, by the launches and products of its
kernels, and averaging; with experts also dispatch and combine, forward and backward.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.figure import Figure

from trefoil.capacity.compute_costs import ComputeRecord, load
from trefoil.gradients.costs import KERNELS
from trefoil.gradients.gradient_plots import curve, times, training
from trefoil.gradients.methods import Method, averaging, methods_of
from trefoil.inputs import read_text
from trefoil.outputs import write_whole
from trefoil.plot import as_svg
from trefoil.simulator import Cluster, Simulation, Workload
from trefoil.table import markdown
from trefoil.units import format_seconds

ROOT = Path(__file__).parents[3]
DATA, DOCS = ROOT / "validate/data", ROOT / "docs"
RUNS, SHOWN_GPUS = ("lstm", "moe"), (8, 64, 1024)
CLUSTER = "dgx-h100"
SLOW_GB_PER_S = 1.25  # 10 Gb/s
NETWORKS = {"400 Gb/s": 0.0, "10 Gb/s": SLOW_GB_PER_S}
METHODS = {
    "none": None,
    "local, sync 50": Method("dense"),
    "dense": Method("dense"),
    "a2sgd": Method("a2sgd"),
    "a2sgd, sync 50": Method("a2sgd", 50),
    "topk 1 %": Method("topk"),
    "qsgd 4 bit": Method("qsgd"),
}
PTB_ELEMENTS = (
    66_034_000  # of the large LSTM of Zaremba et al. (arXiv 1409.2329), vocabulary 10,000
)
PTB_TENSORS = 11


def cluster_of(network: str) -> Cluster:
    cluster = Cluster(CLUSTER)
    cluster.fields.nic_gb_per_s = NETWORKS[network] or cluster.fields.nic_gb_per_s
    return cluster


# ---- Time of a step of the training runs ---------------------------------------------------------


def _kernels(about: Mapping[str, Any], cluster: Cluster, lstm: bool) -> float:
    """Forward once, backward twice as much: products and as many elementwise kernels."""
    kinds = cast(ComputeRecord, load(KERNELS)).kinds
    product, elementwise = kinds["product", "bf16"], kinds["elementwise", "bf16"]
    peak = cluster.fields.gpu_bf16_tflops * 1e12
    rows, width = about["batch"] * about["length"], about["width"]
    out = product.seconds(2 * rows * width * about["vocabulary"] / peak, 0)
    inner = about["length"] if lstm else 4
    each = product.seconds(2 * rows * 4 * width * width / peak / inner, 0)
    return 3 * (out + inner * each + (inner + 1) * elementwise.launch_us * 1e-6)


def _operations(about: Mapping[str, Any], cluster: Cluster) -> float:
    """Dispatch and combine of the mixture, forward and backward, at the cluster's own costs."""
    row = 2 * about["width"]
    workload = Workload(
        ranks=about["workers"],
        tokens=about["batch"] * about["length"],
        ranks_per_node=1,
        experts=8,
        topk=2,
        dispatch_row_bytes=row,
        combine_row_bytes=row,
    )
    result = Simulation(workload).run(cluster, engine="queues")
    return 2e-6 * (result.dispatch.us + result.combine.us)


def step_seconds(about: Mapping[str, Any], cluster: Cluster) -> dict[str, float]:
    """Of each case: compute, dispatch and combine where there are experts, averaging."""
    lstm = not about["expert_elements"]
    rest = _kernels(about, cluster, lstm) + (0 if lstm else _operations(about, cluster))
    each, more = divmod(about["elements"], about["tensors"])
    sizes = [each + (i < more) for i in range(about["tensors"])]
    found = {}
    for case, method in METHODS.items():
        spent = averaging(cluster, about["workers"], sizes, method, 1).seconds if method else 0.0
        found[case] = rest + spent / (50 if case.startswith("local") else 1)
    return found


# ---- Tables --------------------------------------------------------------------------------------


def _last(case: Mapping[str, Any], key: str) -> str:
    values = [run["points"][-1][key] for run in case["runs"]]
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def goal_of(data: Mapping[str, Any]) -> int:
    """A perplexity of the replicas that every method reaches in the mean of its runs."""
    curves = (curve(case, "replicas")[1] for case in data["cases"].values())
    return math.ceil(max(mean[-1] for mean in curves))


def steps_to(case: Mapping[str, Any], goal: float) -> float:
    """After which the mean of the runs is first at the goal; between measurements by a line."""
    steps, mean, _ = curve(case, "replicas")
    at = int(np.argmax(mean <= goal))
    if at == 0:
        return float(steps[0])
    return float(np.interp(-goal, -mean[at - 1 : at + 1], steps[at - 1 : at + 1]))


def runs_table(data: Mapping[str, Any]) -> Iterator[str]:
    """Perplexity after the last step, mean and sample standard deviation, and what it took."""
    goal, cases = goal_of(data), data["cases"]
    times_of = [step_seconds(data["about"], cluster_of(network)) for network in NETWORKS]
    heads = ["method", "replicas", "their mean", "drift", "bytes a step", f"steps to {goal}"]
    rows = [[*heads, *(f"time to it, {network}" for network in NETWORKS)]]
    for name, case in cases.items():
        last = case["runs"][0]["points"][-1]
        drift = max(p["drift"] for run in case["runs"] for p in run["points"])
        steps = steps_to(case, goal)
        cells = [_last(case, "replicas"), _last(case, "mean"), f"{drift:.2f}"]
        cells += [f"{last['sent_bytes'] / last['step']:,.0f}", f"{steps:.0f}"]
        rows.append([name, *cells, *(format_seconds(steps * of[name]) for of in times_of)])
    return markdown(rows)


def ptb_rows(network: str, selection: str) -> dict[str, float]:
    """Seconds of an averaging of LSTM-PTB's gradient on eight nodes with a GPU each."""
    each, more = divmod(PTB_ELEMENTS, PTB_TENSORS)
    sizes = [each + (i < more) for i in range(PTB_TENSORS)]
    methods = methods_of(100, selection=selection)
    return {m.label: averaging(cluster_of(network), 8, sizes, m, 1).seconds for m in methods}


def ptb_table() -> Iterator[str]:
    columns = [(n, "radix") for n in NETWORKS] + [("10 Gb/s", "sort")]
    found = [ptb_rows(*column) for column in columns]
    heads = [n if how == "radix" else f"{n}, Top-K by sorting" for n, how in columns]
    rows = [["LSTM-PTB, eight nodes", *heads]]
    rows += [[name, *(format_seconds(f[name]) for f in found)] for name in found[0]]
    return markdown(rows)


def steps_table(rows: Sequence[Mapping[str, Any]], gpus: Sequence[int]) -> Iterator[str]:
    """Averaging alone and what it adds to a step, by the number of GPUs."""
    of = {(r["method"], r["gpus"]): r for r in rows}
    names = list(dict.fromkeys(r["method"] for r in rows))
    table = [["alone / adds to the step", *(f"{g:,} GPUs" for g in gpus)]]
    for name in names:
        pairs = ((of[name, g]["alone_seconds"], of[name, g]["exposed_seconds"]) for g in gpus)
        table.append([name, *(f"{format_seconds(a)} / {format_seconds(b)}" for a, b in pairs)])
    steps = [of[names[0], g] for g in gpus]
    floors = [s["step_seconds"] - s["exposed_seconds"] for s in steps]
    return markdown([*table, ["the step without averaging", *map(format_seconds, floors)]])


def load_runs(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(read_text(DATA / f"a2sgd_{name}.json")))


def load_steps() -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", json.loads(read_text(DATA / "a2sgd_steps.json"))["rows"])


# ---- The page ------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """By the name of the mark that they stand under."""
    found = {name: runs_table(load_runs(name)) for name in RUNS}
    found |= {"steps": steps_table(load_steps(), SHOWN_GPUS), "ptb": ptb_table()}
    return {name: "\n".join(lines) for name, lines in found.items()}


def filled(page: str) -> str:
    """The page with fresh tables between its marks."""
    for name, table in tables().items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = marked.sub(lambda m, t=table: f"{m[1]}{t}\n{m[2]}", page)
    return page


def _write_picture(name: str, figure: Figure, title: str) -> None:
    lines = as_svg(figure, title).splitlines()
    write_whole(DOCS / f"a2sgd_{name}.svg", "".join(f"{line.rstrip()}\n" for line in lines))


def main() -> int:
    for name in RUNS:
        data = load_runs(name)
        seconds = step_seconds(data["about"], cluster_of("10 Gb/s"))
        _write_picture(name, training(data, seconds, "10 Gb/s"), f"perplexity, {name}")
    _write_picture("steps", times(load_steps()), "times of averaging")
    write_whole(DOCS / "a2sgd.md", filled(read_text(DOCS / "a2sgd.md")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
