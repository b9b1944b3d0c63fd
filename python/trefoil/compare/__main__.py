"""trefoil compare: measurements beside predictions.

    trefoil compare bench.json                  # of `trefoil bench --gpu --json`
    trefoil compare times.csv                   # columns as under validate/data
    trefoil compare pairs.csv --gpus 8          # src,dst,gb_per_s of single pairs

Each row: error, inside or outside its interval, and the rate at which the limiting link would have
run. Sizes that were predicted before anybody measured them are compared with that dated table, the
others with the model as it stands. Then the links and ranks that run below what the model says
(docs/check.md). Exit code 1: more rows lie outside than a 90 % interval lets expect, or a part
is slow.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trefoil.compare.compare_rows import (
    Model,
    Row,
    compare,
    default_record,
    kernels_of_table,
    slow_kinds,
)
from trefoil.compare.slow_parts import (
    SLOW,
    Finding,
    kind_of_table,
    read_pairs,
    read_ranks,
    slow_pairs,
    slow_ranks,
)
from trefoil.export.interchange import cases_of_bench
from trefoil.export.predicted import prediction_files, read_predictions
from trefoil.fit.cases import Case, TableError, read_table
from trefoil.fit.split import SplitError, load_split, split_of_table
from trefoil.inputs import read_text
from trefoil.reference import TrefoilError
from trefoil.sentence_parser import SentenceParser
from trefoil.verb import run

OK, FAILED, USAGE = 0, 1, 2


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = SentenceParser(
        prog="trefoil compare",
        description="Sets a file of measurements beside predictions: errors, intervals, and the "
        "links and ranks that run below what the model says (docs/check.md).",
    )
    parser.add_argument("file", type=Path, help="JSON of trefoil bench --gpu, or a CSV table")
    parser.add_argument("--record", help="cost record (default: the one for the file's kernels)")
    parser.add_argument("--kernels", choices=("trefoil", "deepep"), help="whose times these are")
    parser.add_argument("--cluster", help="preset or file (default: the record's)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="in CSV tables")
    parser.add_argument("--mode", choices=("ll", "ht"), default="ll", help="of rates of pairs")
    parser.add_argument("--gpus", type=int, metavar="N", help="of rates of pairs")
    parser.add_argument(
        "--slow",
        type=float,
        default=SLOW,
        metavar="X",
        help=f"below this share of the model's rate a part is slow (default {SLOW})",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        nargs="*",
        metavar="CSV",
        help="dated tables (default: the committed ones)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser.parse_args(argv)


def _model(
    a: argparse.Namespace, mode: str, nodes: int = 1, *, copies_inputs: bool = True
) -> Model:
    kernels, device = a.kernels, ""
    if a.file.suffix != ".json":
        found, device = kernels_of_table(a.file)
        kernels = kernels or found
    record = a.record or default_record(mode, kernels or "trefoil", device, nodes)
    per_node = a.gpus_per_node
    return Model(record, cluster=a.cluster, gpus_per_node=per_node, copies_inputs=copies_inputs)


def _left_out(data: Mapping[str, Any]) -> int:
    """Rows of a benchmark whose check failed: no figures."""
    rows = data.get("gpu_benchmarks", data.get("rows", []))
    return sum(row.get("ok") is False or row.get("check", "ok") != "ok" for row in rows)


def _operations(a: argparse.Namespace) -> tuple[Model, list[Row], int]:
    if a.file.suffix == ".json":
        cases: list[Case] = cases_of_bench(a.file)
        data = json.loads(read_text(a.file))
        left_out, is_api = _left_out(data), "gpu_benchmarks" in data
    else:
        mode = read_table(a.file)[0].mode
        like = load_split(_model(a, mode).name)  # how the record's own table was read
        per_node = a.gpus_per_node or like.setting.gpus_per_node
        cases = read_table(a.file, like.text.get("time", "transmit"), per_node)
        own = split_of_table(a.file)
        cases = own.with_masks(cases) if own else cases
        left_out, is_api = 0, True
    if len({case.mode for case in cases}) > 1:
        raise TableError(f"{a.file}: holds LL and HT: give one file for each")
    nodes = max(case.nodes for case in cases)
    model = _model(a, cases[0].mode, nodes, copies_inputs=is_api)
    files = prediction_files() if a.predictions is None else a.predictions
    tables = [] if a.record or a.cluster else [read_predictions(path) for path in files]
    return model, compare(cases, model, tables), left_out


def _pairs(a: argparse.Namespace) -> tuple[Model, list[Finding], int]:
    pairs = read_pairs(a.file)
    ranks = a.gpus or 1 + max(max(p.src, p.dst) for p in pairs)
    model = _model(a, a.mode)
    per_node = a.gpus_per_node or min(ranks, 8)
    nodes = max(1, ranks // per_node)
    case = Case("dispatch", a.mode, nodes, ranks, 1, 1, 1, ranks, 0, 1.0)
    rates = model.rates(case)
    return model, slow_pairs(pairs, per_node, rates, a.slow), len(pairs)


def _ranks(a: argparse.Namespace) -> tuple[Model, list[Finding], int]:
    times = read_ranks(a.file, a.gpus_per_node or 8)
    mode = times[0].case.mode
    model = _model(a, mode, max(t.case.nodes for t in times))
    ends = [float(model.replay(t.case).finish_us[t.rank]) for t in times]
    return model, slow_ranks(times, ends, a.slow), len(times)


# ---- What is printed ----------------------------------------------------------------------------


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    errors = sorted(abs(row.error_percent) for row in rows)
    outside = sum(not row.is_inside for row in rows)
    return {
        "rows": len(rows),
        "inside": len(rows) - outside,
        "outside": outside,
        "mape_percent": round(sum(errors) / len(errors), 2),
        "worst_percent": round(errors[-1], 2),
        # one in ten lies outside of a 90 % interval
        "too_many_outside": outside > math.ceil(len(rows) / 10),
    }


def row_json(row: Row) -> dict[str, Any]:
    c = row.case
    return {
        **{k: getattr(c, k) for k in ("op", "mode", "nodes", "ranks", "hidden", "tokens")},
        **{k: getattr(c, k) for k in ("topk", "experts", "sms")},
        "measured_us": c.us,
        "predicted_us": round(row.us, 4),
        "error_percent": round(row.error_percent, 2),
        "interval_us": [round(row.low_us, 4), round(row.high_us, 4)],
        "inside": row.is_inside,
        "rows_behind": row.rows_behind,
        "extrapolated": row.extrapolated,
        "closed_form_us": round(row.closed_form_us, 4),
        "source": row.source,
        "limit": row.limit,
        "limit_share": None if math.isnan(row.limit_share) else round(row.limit_share, 4),
    }


def _print_rows(model: Model, rows: Sequence[Row], left_out: int) -> None:
    sources = dict.fromkeys(row.source for row in rows)
    counts = ", ".join(f"{s}: {sum(r.source == s for r in rows)} rows" for s in sources)
    print(f"against {model.name} ({counts})\n")
    print(
        f"{'':<9}{'GPUs':>5}{'tokens':>7}{'hidden':>7}{'SMs':>5}{'measured':>11}{'predicted':>11}"
        f"{'error':>8}  {'interval, us':<18}{'':<9}{'limit, at what share of its rate'}"
    )
    for r in rows:
        c = r.case
        place = "inside" if r.is_inside else "ABOVE" if c.us > r.high_us else "BELOW"
        share = "" if math.isnan(r.limit_share) else f" {r.limit_share:.2f}"
        sms = f"{c.sms:>5}" if c.sms else f"{'':>5}"
        interval = f"{r.low_us:.1f} - {r.high_us:.1f}{' *' if r.extrapolated else ''}"
        print(
            f"{c.op:<9}{c.ranks:>5}{c.tokens:>7}{c.hidden:>7}{sms}{c.us:>8.1f} us{r.us:>8.1f} us"
            f"{r.error_percent:>+7.1f}%  {interval:<18}{place:<9}{r.limit}{share}"
        )
    if any(r.extrapolated for r in rows):
        print("* outside what the costs were fitted to")
    s = summary_of(rows)
    print(
        f"\n{s['rows']} rows, {s['inside']} inside their interval; mean error "
        f"{s['mape_percent']} %, worst {s['worst_percent']} %"
    )
    few = min(r.rows_behind for r in rows)
    if few < 10:
        print(f"intervals come from as few as {few} measured rows: their range, no 90 %")
    if left_out:
        print(f"{left_out} rows were left out: their check failed, so they are no figures")


def _print_findings(findings: Sequence[Finding], what: str) -> None:
    if not findings:
        print(f"no {what} runs below what the model says")
        return
    print(f"below what the model says ({what}s):")
    for f in findings:
        print(f"  {f.what}: {f.share:.2f} of the model's rate ({f.detail})")


def _run(a: argparse.Namespace) -> int:
    kind = "operations" if a.file.suffix == ".json" else kind_of_table(a.file)
    answer: dict[str, Any] = {"file": str(a.file), "kind": kind}
    bad = False
    if kind == "operations":
        model, rows, left_out = _operations(a)
        findings = slow_kinds(rows)
        summary = summary_of(rows)
        bad = bool(summary["too_many_outside"]) or left_out > 0
        answer |= {"summary": summary, "left_out": left_out, "rows": [row_json(r) for r in rows]}
        if not a.json:
            _print_rows(model, rows, left_out)
    else:
        model, findings, count = _pairs(a) if kind == "pairs" else _ranks(a)
        answer |= {"summary": {"rows": count}}
        if not a.json:
            print(f"against {model.name}: {count} {'rates' if kind == 'pairs' else 'times'}")
    answer |= {"record": model.name, "slow": [asdict(f) for f in findings]}
    answer["ok"] = not (bad or findings)
    if a.json:
        print(json.dumps(answer, indent=1))
    else:
        _print_findings(findings, {"operations": "link", "pairs": "link"}.get(kind, "rank"))
    return OK if answer["ok"] else FAILED


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _run(a)
    except (SplitError, TableError, TrefoilError, OSError, UnicodeDecodeError) as error:
        print(f"trefoil compare: {error}", file=sys.stderr)
        return USAGE if isinstance(error, SplitError | TableError) else FAILED


if __name__ == "__main__":
    sys.exit(run("compare", main))
