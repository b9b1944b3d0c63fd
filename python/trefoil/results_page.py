"""Writes docs/results.md and README.md's table of figures: validate/data, as tables.

    python -m trefoil.results_page [--check]

--check writes nothing and exits with 1 where a page is not what the data say. The words stand in
results.md.j2; every figure comes from a data file: times and goals of the kernels, times through
the API, another library beside ours, errors of the models, conformance, and checks.json, one row a
claim that is no time of a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from trefoil import ht_rows
from trefoil.export.predicted import find_prediction, prediction_files, read_predictions
from trefoil.fit.cases import OPS, Case
from trefoil.fit.network import network_terms
from trefoil.report.figures import Figure, committed_folder, load_figures
from trefoil.report.goals import LL_GOALS, LL_TOKENS
from trefoil.table import markdown

PACKAGE_TIMES = ("dispatch_us", "combine_us", "graph_us")
UPDATE_TOKENS = 4096
RATE_SHARE = 0.85  # of the network's rate: high throughput's goal where it alone is the limit
BASE_US = 3.4  # what an operation of low latency takes beside its bytes
FILES: dict[str, Any] = {
    "kernels_ll": "ll_kernels_h200x4.json",
    "kernels_ll_h100": "ll_kernels_h100x4.json",
    "api_ll": "ll_api_h200x4.json",
    "calls": "gpu_calls_h200x2.json",
    "kernels_ht": [
        ("ht_kernels_h200x4.json", "Four GPUs"),
        ("ht_kernels_h200x2.json", "Two GPUs"),
    ],
    "against": "against_nccl_ep_h200x2.json",
    "package": "nccl_ep_package_h200x2.json",
    "domains": "domains_h100x2.json",
    "domains_fitted": "domains_fitted_h100x2.json",
    "domains_four": [
        ("domains_h200x4_2x2.json", "two domains of two"),
        ("domains_h200x4_4x1.json", "four domains of one"),
    ],
    "shared": "domains_shared_h200x2.json",
    "domains_predicted": "domains_predicted_h100x2.csv",
    "gradients": [
        ("a2sgd_kernels_h200x4.json", "Four H200"),
        ("a2sgd_kernels_h100x2.json", "H100"),
    ],
    "serving_data": "vllm_h200x2.json",
    "python_hosts": "python_calls_h200x2.json",
    "python": "python_h100x2.json",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(markdown([head, *rows], "---")) + "\n"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((committed_folder() / name).read_text(encoding="utf-8"))
    return found


def source(name: str) -> str:
    """Where a table comes from: the file, what it was measured on, and the command."""
    data = _read(name)
    rate = f" Plain copy: {data['copy_GBps']:.1f} GB/s." if "copy_GBps" in data else ""
    return f"[{name}](../validate/data/{name}): {data['measured']}. `{data['command']}`.{rate}"


# ---- Low latency --------------------------------------------------------------------------------


def _bold(text: str, good: bool) -> str:
    return f"**{text}**" if good else text


def _ll_cell(figures: Sequence[Figure], name: str, tokens: int, goal: float) -> str:
    found = [f for f in figures if (f.name, f.tokens) == (name, tokens) and f.is_plain]
    if not found:
        return "–"
    best = min(found, key=lambda f: f.us)
    digits = 2 if goal < best.us < goal + 0.05 else 1  # as many as tell it from its goal
    text = _bold(f"{best.us:.{digits}f}", 0 < best.us <= goal)
    return f"{text} ({best.us / (best.bound_us + BASE_US):.2f})" + (f" {goal:g}" if goal else "")


def low_latency(name: str) -> str:
    """A row an operation, those with goals first."""
    figures = load_figures(committed_folder() / name)
    goals = {
        " ".join([op, layout] + ([] if variant == "plain" else [variant])): us
        for (op, layout, variant), us in LL_GOALS.items()
    }
    others = sorted({f.name for f in figures} - set(goals))
    rows = []
    for operation in [*goals, *others]:
        asked = zip(LL_TOKENS, goals.get(operation, [0.0] * len(LL_TOKENS)), strict=True)
        rows.append([operation, *(_ll_cell(figures, operation, t, goal) for t, goal in asked)])
    return table(["tokens", *map(str, LL_TOKENS)], rows)


HOST_GOAL_US = 4.0


def host_time(name: str) -> str:
    """Calls of C, and in how many runs the goal is reached."""
    runs = _read(name)["runs"]
    medians = {op: [run["one_stream"][op][1] for run in runs] for op in ("dispatch", "combine")}
    medians |= {op: [run["one_stream"][op][1] for run in runs] for op in ("update", "complete")}
    medians["the smallest launch"] = [run["smallest_launch"][1] for run in runs]
    rows = [
        [
            op,
            f"{min(us):.2f} to {max(us):.2f}",
            f"in {sum(u <= HOST_GOAL_US for u in us)} of {len(us)}",
        ]
        for op, us in medians.items()
    ]
    return table(["call", "us", f"runs with at most {HOST_GOAL_US:g}"], rows)


# ---- High throughput ----------------------------------------------------------------------------

ROUTINGS = ("zipf 0.8", "zipf 1.2", "hot-expert", "hot-rank")


def _products(data: Mapping[str, Any]) -> dict[str, dict[str, ht_rows.Row]]:
    """Rows beside matrix products: operation -> load -> row."""
    found: dict[str, dict[str, ht_rows.Row]] = {}
    for row in data["rows"]:
        if row["operation"].endswith(" background"):
            found.setdefault(row["operation"].removesuffix(" background"), {})[row["load"]] = row
    return found


def _plain(data: Mapping[str, Any]) -> list[ht_rows.Row]:
    """Rows of even routing, alone on the GPU."""
    return [r for r in data["rows"] if not r.get("skew") and " background" not in r["operation"]]


def high_throughput(name: str) -> str:
    data = _read(name)
    found = ht_rows.answers({**data, "rows": _plain(data)})
    return ht_rows.as_markdown([a for a in found if a.figure != "not measured"]) + "\n"


SMS = (8, 12, 16, 18, 20, 22, 24, 28, 32, 40, 64, 132)


def over_sms(name: str) -> str:
    """Time by the number of SMs; bold: the fewest within 3 % of the best, if more were measured."""
    of: dict[str, dict[int, float]] = {}
    data = _read(name)
    for row in _plain(data):
        if row["tokens"] != ht_rows.TOKENS or row.get("senders"):
            continue
        times = of.setdefault(row["operation"], {})
        times[row["sms"]] = min(row["kernel_us"], times.get(row["sms"], row["kernel_us"]))
    rows = []
    for operation, times in sorted(of.items()):
        if len(times) < 6:
            continue
        fewest = min(sms for sms, us in times.items() if us <= 1.03 * min(times.values()))
        cells = [
            _bold(f"{times[n]:.0f}", n == fewest < max(times)) if n in times else "–" for n in SMS
        ]
        rows.append([operation, *cells])
    return table(["SMs", *map(str, SMS)], rows)


def skewed(name: str) -> str:
    """Share of the bound by exact port loads; bold: the goal is reached."""
    found: dict[str, dict[str, ht_rows.Row]] = {}
    measured = _read(name)["rows"]
    goal = ht_rows.goals_of(measured).skewed_share
    for row in measured:
        for routing in ROUTINGS:
            if row["operation"].endswith(" " + routing):
                operation = f"{row['operation'].removesuffix(' ' + routing)} [{row['sms']}]"
                found.setdefault(operation, {})[routing] = row
    rows = []
    for operation, of in found.items():
        shares = [float(of[routing]["copy_share"]) for routing in ROUTINGS]
        rows.append([operation, *(_bold(f"{s:.0%}", s >= goal) for s in shares)])
    return table([f"share of the bound, goal {goal:.0%}", *ROUTINGS], rows)


def has_products(name: str) -> bool:
    return bool(_products(_read(name)))


def products(name: str) -> str:
    """What an operation and the products take, over their times alone."""
    found = _products(_read(name))
    loads = list(dict.fromkeys(load for of in found.values() for load in of))
    rows = []
    for operation, of in found.items():
        cells = [f"{of[n]['slower']:.2f}, {of[n]['product_slower']:.2f}" for n in loads]
        rows.append([f"{operation} [{of[loads[0]]['sms']}]", *cells])
    return table(["over the time alone: operation, products", *loads], rows)


# ---- Another library, models, conformance, checks -----------------------------------------------


def two_libraries(name: str) -> str:
    rows = []
    for b in _read(name)["against_benchmarks"]:
        if not b["ok"] or "dispatch" not in b:
            continue
        row = [b["mode"], str(b["tokens"])]
        for op in ("dispatch", "combine"):
            row += [f"{1e6 * side['kernel_sum']['p50_s']:.1f}" for side in b[op]["libraries"]]
            r = b[op]["against_over_library"]["kernel_sum"]
            row.append(f"**{r['p50']:.2f}** ({r['min']:.2f} to {r['max']:.2f})")
        rows.append(row)
    each = ["theirs", "ratio"]
    return table(["mode", "tokens", "dispatch: ours", *each, "combine: ours", *each], rows)


def _errors(score: Mapping[str, Any] | None) -> str:
    if not score or not score.get("n"):
        return "–"
    return f"{score['mape_percent']:.1f} %, p90 {score['p90_percent']:.1f} % (n = {score['n']})"


def records() -> str:
    rows = []
    for path in sorted((committed_folder().parents[1] / "models/costs").glob("*.json")):
        fit = json.loads(path.read_text(encoding="utf-8")).get("fit")
        if fit:
            closed = fit.get("forms", {}).get("closed-form", {}).get("outside")
            scores = (fit["inside"]["both"], fit.get("outside", {}).get("both"), closed)
            rows.append([f"`{fit['command']}`", *map(_errors, scores)])
    return table(["record", "fitted", "held out", "closed form, held out"], rows)


def across_nodes() -> str:
    tables = [read_predictions(path) for path in prediction_files()]
    rows = []
    ways = [(mode, op, False) for mode in ("ll", "ht") for op in OPS]
    ways.insert(1, ("ll", "dispatch", True))
    for mode, op, by_rails in ways:
        tokens = 128 if mode == "ll" else 4096
        cells = []
        for gpus in (16, 32, 64):
            case = Case(op, mode, gpus // 8, gpus, 7168, tokens, 8, 256, 0, 0.0)
            found = find_prediction(tables, case, "trefoil", "bf16", by_rails)
            if found is None:
                raise KeyError((mode, op, gpus, by_rails))
            p = found[1]
            cells.append(f"{p.us:.0f} ({p.low_us:.0f} to {p.high_us:.0f}; {p.bound_us:.0f})")
        way = " by rails" if by_rails else ""
        rows.append([f"{mode.upper()} {op}{way}, {tokens} tokens", *cells])
    return table(["operation", "2 nodes", "4 nodes", "8 nodes"], rows)


def conformance() -> str:
    rows = []
    for path in sorted((committed_folder() / "conformance").glob("*.json")):
        totals = json.loads(path.read_text(encoding="utf-8"))["totals"]
        for where, counts in totals.items():
            text = ", ".join(f"{n} {what}" for what, n in counts.items())
            rows += [[path.stem, f"{where} its profile", text]] if text else []
    return table(["library, machine", "cases", "found"], rows)


def checks() -> str:
    data = _read("checks.json")
    keys = ("claim", "figure", "command", "where")
    rows = [[check[key] for key in keys] for check in data["checks"]]
    return f"{data['about']}\n\n{table(['claim', 'figure', 'command', 'where, commit'], rows)}"


# ---- README's table -----------------------------------------------------------------------------

HT_SMS = 16  # flat, windows, in a group that names none (EP_GPU_HT_SMS_WINDOW, api/gpu/gpu.h)
BEGIN, END = "<!-- figures: python -m trefoil.results_page -->\n", "<!-- end of figures -->"


def _ll_us(operation: str) -> str:
    figures = [f for f in load_figures(committed_folder() / FILES["kernels_ll"]) if f.is_plain]
    found = {f.tokens: f.us for f in figures if f.name == operation}
    return " / ".join(f"{found[tokens]:.1f}" for tokens in (1, 32, 128))


def _ht_us(operation: str) -> str:
    rows = _read(FILES["kernels_ht"][0][0])["rows"]
    row = ht_rows.best([r for r in rows if r["sms"] == HT_SMS], operation)
    if row is None:
        raise KeyError(operation)
    return f"{row['kernel_us']:.0f} us ({row['copy_share']:.0%} of a copy's rate)"


def _times_ours(mode: str, op: str) -> str:
    """The other library's kernel time over ours in modes that begin so: least and most."""
    blocks = [b for b in _read(FILES["against"])["against_benchmarks"] if b["ok"] and op in b]
    ratios = [
        b[op]["against_over_library"]["kernel_sum"]["p50"]
        for b in blocks
        if b["mode"].startswith(mode)
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _held_out(record: str) -> str:
    path = committed_folder().parents[1] / f"models/costs/{record}.json"
    score = json.loads(path.read_text(encoding="utf-8"))["fit"]["outside"]["both"]
    return f"{score['mape_percent']:.1f} % (mean of {score['n']} rows)"


def summary() -> str:
    """Five rows: what was measured, and the command that measures it."""
    ll = _ll_us("dispatch expert-major"), _ll_us("combine expert-major")
    rows = [
        [
            "low latency, 4 H200, 1 / 32 / 128 tokens",
            f"dispatch {ll[0]} us, exact combine {ll[1]} us",
            "`ll_bench --ranks 4`",
        ],
        [
            f"high throughput in NCCL windows, 4 H200, 4096 tokens, {HT_SMS} SMs (default)",
            f"flat dispatch {_ht_us('dispatch flat window')}, "
            f"combine {_ht_us('combine flat window')}",
            "`tools/gpu_ht --gpus 4`",
        ],
        [
            "NVIDIA's library over ours, 2 H200",
            f"low latency: dispatch takes {_times_ours('ll', 'dispatch')} times as long, combine "
            f"{_times_ours('ll', 'combine')} times; high throughput: "
            f"{_times_ours('ht', 'dispatch')} and {_times_ours('ht', 'combine')} times",
            "`trefoil bench --gpu --against libnccl_ep.so --level order-free`",
        ],
        [
            "simulated times against measured ones, held out",
            f"low latency off by {_held_out('trefoil-ll-h200')}, high throughput by "
            f"{_held_out('trefoil-ht-h200')}",
            "`trefoil validate --only times`",
        ],
    ]
    first = _read("checks.json")["checks"][0]
    rows.append([first[key] for key in ("claim", "figure", "command")])
    return table(["what", "figure", "command"], rows)


def readme(text: str) -> str:
    """README.md with its table made anew. ValueError: it has no place for one."""
    begin = text.index(BEGIN) + len(BEGIN)
    return text[:begin] + summary() + text[text.index(END, begin) :]


def two_packages(name: str) -> str:
    """NVIDIA's Python package on two libraries: times of calls, and whether results are equal."""
    ours, theirs = (of["rows"] for of in _read(name)["libraries"])
    rows = []
    for a, b in zip(ours, theirs, strict=True):
        same = all(a[key] == b[key] and a["ok"] and b["ok"] for key in ("result", "graph_result"))
        times = [f"{row[key]:.0f}" for key in PACKAGE_TIMES for row in (a, b)]
        rows.append([a["mode"], str(a["tokens"]), *times, "equal" if same else "different"])
    head = [
        f"{key.removesuffix('_us')}: {who}" for key in PACKAGE_TIMES for who in ("ours", "theirs")
    ]
    return table(["mode", "tokens", *head, "results, bit for bit"], rows)


# ---- Across domains, gradients, Python ----------------------------------------------------------


def domains_ll(name: str) -> str:
    """Low latency across domains: us, in brackets over 3.4 us + a + c per further far rank
    + bytes / r, by tokens."""
    data = _read(name)
    rows = [row for row in data["rows"] if row["mode"].startswith("ll-")]
    tokens = sorted({row["tokens"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        us = statistics.median(row["runs_us"])
        least = BASE_US + data["latency_us"] + row["bytes"] / data["rate_GBps"] / 1000
        least += data.get("put_us", 0.0) * (data.get("far_peers", 1) - 1)
        variant = "" if row["variant"] == "plain" else f" {row['variant']}"
        what = f"{row['operation']} {row['mode'].removeprefix('ll-')}{variant}"
        cells.setdefault(what, {})[row["tokens"]] = _bold(
            f"{us:.0f} ({us / least:.2f})", us <= 1.2 * least
        )
    head = ["tokens", *map(str, tokens)]
    return table(head, [[what, *(of[t] for t in tokens)] for what, of in cells.items()])


PAIRS_GOALS = {"dispatch flat": 560.0, "combine flat": 580.0}  # us, two domains of two GPUs


def domains_ht(name: str) -> str:
    """High throughput across domains: us, its goal if flat, and what of the network's rate its
    bytes reach."""
    data = _read(name)
    rows = []
    for row in data["rows"]:
        if not row["mode"].startswith("ht-"):
            continue
        us = statistics.median(row["runs_us"])
        share = row["bytes"] / us / 1000 / data["rate_GBps"]
        what = f"{row['operation']} {row['mode'].removeprefix('ht-')}"
        at_rate = us * share / RATE_SHARE
        goal = PAIRS_GOALS.get(what, 0.0) if data["ranks_per_domain"] > 1 else at_rate
        asked = f"{goal:.0f}" if what.endswith(" flat") else ""
        rows.append([what, _bold(f"{us:.0f}", us <= goal), asked, f"{share:.0%}"])
    return table(["operation", "us", "goal", "of the rate"], rows)


def domains_shared(name: str) -> str:
    """Two ways of the same operations, us of each run, and the ratio of their medians."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in _read(name)["rows"]:
        what = f"{row['operation']} {row['mode']}, {row['ranks_per_domain']} in a domain"
        found.setdefault((what, row["tokens"]), {})[row["way"]] = row["runs_us"]
    rows = []
    for (what, tokens), ways in found.items():
        first, second = ways.values()
        ratio = statistics.median(second) / statistics.median(first)
        cells = [f"{way} {', '.join(f'{us:.0f}' for us in us_of)}" for way, us_of in ways.items()]
        rows.append([what, str(tokens), *cells, f"{ratio:.2f}"])
    return table(["operation", "tokens", "", "", "ratio"], rows)


def one_put(name: str) -> str:
    """What a flat dispatch's rows take as one put to each far rank, beside the goal."""
    data = _read(name)
    bytes_ = next(row["bytes"] for row in data["rows"] if row["mode"] == "ht-flat")
    wire_us = bytes_ / data["rate_GBps"] / 1000
    return f"{data['latency_us'] + wire_us:.0f} us (goal {wire_us / RATE_SHARE:.0f})"


def network(name: str) -> str:
    """One sentence: latency and rate of the network alone."""
    data = _read(name)
    return f"a = {data['latency_us']:.1f} us, r = {data['rate_GBps']:.0f} GB/s"


def network_fit(name: str) -> str:
    """One sentence: the network's terms, fitted to half of its rows."""
    terms = network_terms(_read(name)["exchanges"])
    return (
        f"a = {terms.latency_us:.1f} us, c = {terms.put_us:.1f} us, "
        f"r = {terms.rate_gb_per_s:.0f} GB/s (fitted {_errors(asdict(terms.inside))}; "
        f"held out {_errors(asdict(terms.outside))})"
    )


def simulated_domains(name: str) -> str:
    """Simulated times across domains beside the measured ones, us."""
    lines = (committed_folder() / name).read_text(encoding="utf-8").splitlines()
    rows = [
        [
            f"{row['mode'].upper()} {row['op']}",
            row["tokens"],
            row["part"],
            f"{float(row['measured_us']):.0f}",
            f"{float(row['predicted_us']):.0f}",
            f"{float(row['predicted_us']) / float(row['measured_us']) - 1:+.0%}",
        ]
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]
    return table(["operation", "tokens", "row", "measured", "simulated", "off by"], rows)


def update_across(name: str) -> str:
    """An Update's time across domains, which was not measured: the time in a domain, a, and the
    message over r."""
    terms = network_terms(_read(name)["exchanges"])
    near = next(
        row["kernel_us"]
        for row in _read(FILES["kernels_ht"][1][0])["rows"]
        if row["operation"] == "update flat" and row["tokens"] == UPDATE_TOKENS
    )
    message = 16 + 2 * 8 * UPDATE_TOKENS  # two words hold a token's eight ids of 16 bits
    us = near + terms.latency_us + message / terms.rate_gb_per_s / 1000
    return f"{us:.0f} us ({near:.0f} us in a domain)"


def gradient_passes(name: str) -> str:
    """The passes of an A2SGD step: us, and the plain pass's time over it."""
    rows = []
    for row in _read(name)["rows"]:
        ratio = row["plain_us"] / row["p50_us"]
        rows.append(
            [
                f"{row['pass']}, {row['dtype']}",
                f"{row['mebi_elements']} Mi",
                f"{row['p50_us']:.0f}",
                _bold(f"{ratio:.2f}", ratio >= 0.9),
            ]
        )
    return table(["pass", "elements", "us", "plain / ours"], rows)


def exchange(name: str) -> str:
    rows = [
        [
            f"{row['ranks']} on {row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}",
            f"{row['last_us']:.2f}",
            f"{row['first_us']:.2f}",
        ]
        for row in _read(name)["exchange"]
    ]
    return table(["ranks", "rank that was sent last, us", "first"], rows)


PYTHON_CALLS = "dispatch", "combine"
MEDIAN = 1  # of the 10 % quantile, the median and the 99 % quantile


def python_calls(name: str) -> str:
    """Host times of calls from Python beside those of C, us, medians."""
    data = _read(name)
    rows = [
        [f"`trefoil.ep`, {what}" if what != "deep_ep" else "`trefoil.deep_ep`"]
        + [f"{of[call][MEDIAN]:.1f}" for call in ("dispatch", "combine")]
        for what, of in data["host_us"].items()
    ]
    for of in data["c_host_us"]:
        rows.append(["C", *(f"{of[call][MEDIAN]:.1f}" for call in ("dispatch", "combine"))])
    return table(["call", "dispatch", "combine"], rows)


BOTH_GOAL_US, CALL_GOAL_US = 6.0, 1.5


def _above(us: float, goal: float) -> list[str]:
    return [f"{us:.1f}", "yes" if us <= goal else "no"]


def python_goals(name: str) -> str:
    """What trefoil.ep adds to C, us, medians, and whether that is within the goals."""
    data, rows = _read(name), []
    plain = {call: min(of[call][MEDIAN] for of in data["c_host_us"]) for call in PYTHON_CALLS}
    for what, of in data["host_us"].items():
        if what == "deep_ep":
            continue
        added = [of[call][MEDIAN] - plain[call] for call in PYTHON_CALLS]
        both = _above(sum(added), BOTH_GOAL_US)
        rows.append([what, *both, *_above(max(added), CALL_GOAL_US)])
    head = [
        f"both (goal {BOTH_GOAL_US:g})",
        "reached",
        f"a call (goal {CALL_GOAL_US:g})",
        "reached",
    ]
    return table(["`trefoil.ep` above C, us", *head], rows)


def training(name: str) -> str:
    """A training step, ms, each run."""
    steps = _read(name)["train_step_ms"]
    rows = [[f"`{what}`", ", ".join(f"{ms:.1f}" for ms in of)] for what, of in steps.items()]
    return table(["expert parallelism", "step, ms"], rows)


def _step_ms(step: dict[str, float]) -> str:
    talk = step.get("communication_ms")
    return f"{step['ms']:.1f}" + ("" if talk is None else f" ({talk / step['kernels_ms']:.0%})")


def serving(name: str) -> str:
    """vLLM's steps by backend: equal sequences, the largest difference of a log probability, ms of
    a decode step (in brackets what of it kernels of communication run, of all kernels) and of
    prompts, by requests."""
    rows = []
    for row in _read(name)["rows"]:
        tokens = row.get("tokens") or {}
        equal, apart = "–", "–"
        if tokens:
            equal = f"{tokens['equal_sequences']} of {tokens['sequences']}"
            apart = f"{tokens['logprob_max_difference']:.2g}"
        times = [row.get(kind) or {} for kind in ("decode", "prefill")]
        by = [" / ".join(_step_ms(of[n]) for n in sorted(of, key=int)) or "–" for of in times]
        backend = row["backend"] or "one GPU"
        if "way" in row:
            backend += f", {row['way']}"
        if row["step"].endswith("_dbo"):
            backend += ", two micro batches"
        if row.get("ranks_on_one_gpu"):
            backend += ", ranks on one GPU"
        rows.append([backend, row["dtype"], equal, apart, *by])
    head = ["backend", "datatype", "equal sequences", "largest difference"]
    return table([*head, "decode step", "prompts"], rows)


SHARE_GOAL = 0.5  # of allgather_reducescatter's
GOAL_REQUESTS = "32", "128"


def _share(step: Mapping[str, float], which: str) -> float | None:
    return step[which] / step["kernels_ms"] if which in step else None


def _decode_runs(name: str) -> list[dict[str, Any]]:
    """The decode steps of each run, by backend, then requests."""
    data = _read(name)
    return [{row["step"]: row.get("decode") for row in data["rows"]}, *data["again"]]


def serving_launches(name: str) -> str:
    """Microseconds of a launch of communication in a decode step, by requests: the median of its
    launches, each a median over steps, of all runs."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in _decode_runs(name):
        for step in ("ll_bf16", "agrs_bf16"):
            for requests, of in run[step].items():
                for kernel, us in of.get("launches_us", {}).items():
                    (short,) = re.findall(r"\w*Kernel\w*", kernel.partition("(ncclDev")[0])
                    found.setdefault(short, {}).setdefault(requests, []).extend(us)
    rows = [
        [f"`{kernel}`", *(f"{statistics.median(by[n]):.1f}" for n in sorted(by, key=int))]
        for kernel, by in found.items()
    ]
    counts = sorted(next(iter(found.values())), key=int)
    return table(["a launch, us, by requests a rank", *counts], rows)


def serving_goal(name: str) -> str:
    """What of a decode step is communication, ours over allgather_reducescatter's, each run: by the
    medians of launches, and with all waits."""
    runs = _decode_runs(name)
    rows = []
    for requests in GOAL_REQUESTS:
        shares: dict[str, list[tuple[float, float]]] = {}
        for which in ("communication_without_first_ms", "communication_ms"):
            both = [
                [_share(run[step][requests], which) for step in ("ll_bf16", "agrs_bf16")]
                for run in runs
            ]
            shares[which] = [(one, other) for one, other in both if one and other]
        own = next(iter(shares.values()))
        cells = [", ".join(f"{share:.1%}" for share in of) for of in zip(*own, strict=True)]
        for of_runs in shares.values():
            ratios = [one / other for one, other in of_runs]
            reached = "yes" if max(ratios) <= SHARE_GOAL else "no"
            cells += [", ".join(f"{ratio:.2f}" for ratio in ratios), reached]
        rows.append([requests, *cells])
    head = ["requests a rank", "deepep_low_latency", "allgather_reducescatter"]
    head += [f"ratio by medians (goal {SHARE_GOAL:g})", "reached", "ratio with waits", "reached"]
    return table(head, rows)


# ---- Pages --------------------------------------------------------------------------------------

TABLES = (
    *(source, low_latency, host_time, high_throughput, over_sms, skewed, has_products, products),
    *(two_libraries, two_packages, records, across_nodes, conformance, checks),
    *(
        domains_ll,
        domains_ht,
        domains_shared,
        one_put,
        network,
        network_fit,
        simulated_domains,
        update_across,
    ),
    *(gradient_passes, exchange, python_calls, python_goals, training, serving, serving_goal),
    serving_launches,
)


def page() -> str:
    """The page's text. KeyError, OSError: a data file lacks what the page shows."""
    loader = jinja2.PackageLoader("trefoil", ".")
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    tables = {function.__name__: function for function in TABLES}
    template = environment.get_template("results.md.j2")
    return template.render(**tables, **FILES, base_us=BASE_US).rstrip("\n") + "\n"


def pages() -> dict[Path, str]:
    root = committed_folder().parents[1]
    text = (root / "README.md").read_text(encoding="utf-8")
    return {root / "docs/results.md": page(), root / "README.md": readme(text)}


def main(arguments: Sequence[str]) -> int:
    """0; with --check 1 and a sentence where a committed page is not the data's."""
    parser = argparse.ArgumentParser(prog="python -m trefoil.results_page", description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    stale = []
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    for path in stale if check else []:
        print(f"{path}: stale; run python -m trefoil.results_page", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
