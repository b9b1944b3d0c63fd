"""Turns results into one HTML file that needs nothing else: `python -m trefoil.report --help`.

The page shows what agrees, what went where (bytes per rank pair and tier), times, capacity plans,
the closed-form prediction, the three legs beside each other, and measured times against goals,
models and plain copies. Pictures are inline
SVG; there is no script and no external resource, so the file can be mailed, printed and kept.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from trefoil import plot
    from trefoil.capacity import plan_plots
    from trefoil.report import pictures
    from trefoil.report import sections as report_measured
except ModuleNotFoundError as missing:
    sys.exit(
        f"trefoil report: Python lacks the module {missing.name}; tools/tour installs it into "
        ".venv, or: pip install matplotlib jinja2"
    )

from trefoil import verb
from trefoil.capacity import plan_text
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.plan_file import load_capacity
from trefoil.capacity.question import PlanError
from trefoil.fit.cases import TableError
from trefoil.outputs import check_file, write_whole
from trefoil.report.figures import Figure, committed_folder, load_figures, merged
from trefoil.report.fitted import FittedTimes, load_fit
from trefoil.report.results import Cases, CheckFile, Plan, ResultError, Run, load_check, load_plan
from trefoil.report.validated import Validation, load_validation
from trefoil.report.validated import verdict as validation_verdict
from trefoil.sentence_parser import SentenceParser
from trefoil.units import format_bytes, format_seconds

OPS = ("dispatch", "combine")
TITLE = "Trefoil: expert-parallel dispatch and combine"


@dataclass(frozen=True)
class Inputs:
    """What a page is made from; figures None: nothing is said of measured times."""

    checks: Sequence[CheckFile] = ()
    plans: Sequence[Plan] = ()
    capacities: Sequence[CapacityPlan] = ()
    validations: Sequence[Validation] = ()
    figures: Sequence[Figure] | None = None
    fits: Sequence[FittedTimes] = ()
    commands: Sequence[str] = ()


def render(given: Inputs) -> str:
    """The page as text. Needs at least one check, plan, capacity plan, validation or figure."""
    checks, plans, validations = given.checks, given.plans, given.validations
    runs = [run for check in checks for run in check.runs]
    cases = [check.cases for check in checks if check.cases]
    environment = _environment(checks)
    ok = all(run.ok for run in runs) and not any(c.failed for c in cases)
    ok = ok and all(v.ok for v in validations)
    numbers = itertools.count(1)

    def own(svg: str) -> str:
        return plot.own_ids(svg, next(numbers))

    measured = _measured(given, own)
    facts = _facts(runs, cases) + _capacity_facts(given.capacities) + _plan_facts(plans)
    if measured and measured["speed"]:
        facts += measured["speed"]["facts"]
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page.filters.update(bytes=format_bytes, seconds=format_seconds)
    return page.get_template("report.html.j2").render(
        title=TITLE if _is_of_a_run(given) else "Trefoil: measured speed of the kernels",
        subtitle=_subtitle(runs, environment),
        verdict=_verdict(runs, cases, validations) if _is_of_a_run(given) else "",
        validations=validations,
        verdict_ok=ok,
        facts=facts,
        measured=measured,
        runs=runs,
        cases=cases,
        tier_rows=[_tier_row(run, op) for run in runs for op in OPS],
        maps=[
            {"title": _name(run), "svgs": [own(pictures.traffic_map(run, op)) for op in OPS]}
            for run in runs
        ],
        times=[own(pictures.time_points(group)) for group in _by_algorithm(runs)],
        plans=plans,
        rates=[_rates(plan) for plan in plans],
        plan_title=_plan_title(plans),
        curves=[own(pictures.prediction_curves(plan)) for plan in plans],
        capacities=[_capacity(plan, own) for plan in given.capacities],
        environment=list(environment.items()),
        commands=given.commands,
    )


def _is_of_a_run(given: Inputs) -> bool:
    """Or of measurements alone."""
    return bool(given.checks or given.plans or given.capacities or given.validations)


def _measured(given: Inputs, own: Callable[[str], str]) -> dict[str, Any] | None:
    """The sections of measured times, or None where nothing was given for them."""
    sets = [t for v in given.validations for t in v.times]
    if given.figures is None and not given.fits and not any(t.points for t in sets):
        return None
    figures = given.figures
    tables = [] if figures is None else report_measured.newest_tables()
    return {
        "speed": None if figures is None else report_measured.speed(figures, own),
        "circumstances": None if figures is None else report_measured.circumstances(figures, own),
        "scatters": report_measured.scatters(sets, given.fits, own),
        "parts": report_measured.where_time_goes(sets, own),
        "scaling": None if figures is None else report_measured.scaling(tables, figures, own),
    }


def _environment(checks: Sequence[CheckFile]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for check in checks:
        merged.update(check.environment)
    if "memory_bytes" in merged:
        merged["memory"] = format_bytes(float(merged.pop("memory_bytes")))
    merged["report made"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    merged["Python"] = platform.python_version()
    return merged


def _subtitle(runs: Sequence[Run], environment: dict[str, str]) -> str:
    shapes = dict.fromkeys(
        f"{r.ranks} ranks, hidden {r.hidden:,}, top-{r.topk} of {r.experts} experts" for r in runs
    )
    return " · ".join([*shapes, environment["report made"]])


def _verdict(
    runs: Sequence[Run], cases: Sequence[Cases], validations: Sequence[Validation] = ()
) -> str:
    wrong = sum(not run.ok for run in runs)
    failed = sum(c.failed for c in cases)
    total = sum(c.cases for c in cases)
    parts = []
    if runs and not wrong:
        parts.append(
            f"All {len(runs)} runs agree with the reference, byte for byte, on every rank."
        )
    elif runs:
        parts.append(f"{wrong} of {len(runs)} runs differ from the reference.")
    if cases:
        parts.append(
            f"{failed:,} of {total:,} random cases differ."
            if failed
            else f"All {total:,} random cases agree."
        )
    if said := validation_verdict(list(validations)):
        parts.append(said)
    return " ".join(parts) or "A prediction only: nothing was run."


def _facts(runs: Sequence[Run], cases: Sequence[Cases]) -> list[tuple[str, str]]:
    facts = []
    if runs:
        facts.append((f"{sum(r.ok for r in runs)} of {len(runs)}", "runs agree"))
        facts.append((format_bytes(sum(r.bytes_compared for r in runs)), "compared"))
        moved = sum(sum(map(sum, m)) for r in runs for m in (r.dispatch_bytes, r.combine_bytes))
        facts.append((format_bytes(moved), "moved by dispatch and combine"))
    if cases:
        facts.append((f"{sum(c.cases for c in cases):,}", "random cases"))
    return facts


def _plan_facts(plans: Sequence[Plan]) -> list[tuple[str, str]]:
    facts = []
    for plan in plans:
        last = plan.points[-1]
        time = format_seconds(last.seconds["dispatch"])
        routing = "routing of a file" if plan.trace else "uniform routing"
        where = f"on {last.gpus:,} GPUs (EP {last.ep}, {routing})"
        facts.append((f"≥ {time}", f"{plan.mode.upper()} dispatch predicted {where}"))
    return facts


def _rates(plan: Plan) -> str:
    """What of the cluster the plan's times come from, or "" where the file lacks it."""
    r = plan.rates
    known = {
        "nvlink_bytes_per_second": lambda v: f"NVLink port {v / 1e9:.4g} GB/s",
        "nic_bytes_per_second": lambda v: f"NIC port {v / 1e9:.4g} GB/s",
        "net_latency_seconds": lambda v: f"network latency {format_seconds(v)}",
        "fixed_seconds": lambda v: f"fixed {format_seconds(v)} an operation",
    }
    return ", ".join(text(r[name]) for name, text in known.items() if r.get(name))


def _capacity_facts(plans: Sequence[CapacityPlan]) -> list[tuple[str, str]]:
    facts = []
    for plan in plans:
        if (c := plan.chosen) is not None:
            q = plan.question
            where = f"{c.mode.upper()}, EP {c.ep}, {q.moe}, {q.tokens:,} tokens a GPU"
            if (rate := c.tokens_per_second(q)) is not None:
                facts.append((f"{rate:,.0f}", f"tokens/s a GPU planned: {where}"))
            facts.append(
                (format_seconds(c.layer), f"a layer's dispatch + combine planned: {where}")
            )
    return facts


def _capacity(plan: CapacityPlan, own: Callable[[str], str]) -> dict[str, object]:
    """A capacity plan as the template takes it: texts, tables and pictures."""
    q = plan.question
    verdict, *reasons = plan_text.verdict_sentences(plan)
    return {
        "title": plan_text.title_of(q),
        "step": [
            plan_text.step_headings(q),
            *(plan_text.step_row(c, q) for c in plan.configurations),
        ]
        if q.is_whole
        else [],
        "explanation": plan_text.explanation_of(q),
        "verdict": verdict,
        "reasons": reasons,
        "headings": plan_text.HEADINGS,
        "rows": [plan_text.row_of(c, q) for c in plan.configurations],
        "what_if": plan_text.what_if_rows(plan),
        "crossovers": [plan_text.crossover_sentence(x) for x in plan.crossovers],
        "notes": plan_text.notes_of(plan),
        "svgs": [own(svg) for svg in plan_plots.as_svgs(plan).values()],
    }


def _tier_row(run: Run, op: str) -> dict[str, object]:
    matrix = run.dispatch_bytes if op == "dispatch" else run.combine_bytes
    pairs = [
        (count, source, target)
        for source, row in enumerate(matrix)
        for target, count in enumerate(row)
        if source != target
    ]
    count, source, target = max(pairs, default=(0, 0, 0))
    busiest = f"{source} → {target}: {format_bytes(count)}" if count else "–"
    return {"run": _name(run), "op": op, "sums": run.tier_bytes(op), "busiest": busiest}


def _name(run: Run) -> str:
    nodes = f", {run.nodes} nodes" if run.nodes > 1 else ""
    return f"{run.mode}, {run.tokens:,} tokens{nodes}"


def _by_algorithm(runs: Sequence[Run]) -> list[list[Run]]:
    """LL runs together and HT runs together: their times differ by orders of magnitude."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.mode.split("-")[0], []).append(run)
    return list(groups.values())


def _plan_title(plans: Sequence[Plan]) -> str:
    if not plans:
        return ""
    low = min(p.points[0].gpus for p in plans)
    high = max(p.points[-1].gpus for p in plans)
    clusters = ", ".join(dict.fromkeys(p.cluster for p in plans))
    return f"{low:,} to {high:,} GPUs, {clusters}"


def _figures(paths: Sequence[Path] | None) -> list[Figure] | None:
    if paths is None:
        return None
    return merged(load_figures(path) for path in paths or [committed_folder()])


FILES = {
    "check": "trefoil check --json",
    "plan": "trefoil plan --closed-form --json",
    "capacity": "trefoil plan --json",
    "validation": "trefoil validate --json",
    "fit": "trefoil fit --json: models beside new measurements",
}


def _add_files(parser: SentenceParser, name: str) -> None:
    many: dict[str, Any] = {"nargs": "+", "type": Path, "default": [], "metavar": "JSON"}
    parser.add_argument(f"--{name}", help=f"from {FILES[name]}", **many)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SentenceParser(prog="trefoil report", description=__doc__.split("\n\n")[0])
    for name in ("check", "plan", "capacity", "validation"):
        _add_files(parser, name)
    parser.add_argument(
        "--measured",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="speed against goals and copies: results of benchmarks or campaigns, files or "
        "folders; later ones replace earlier ones (no path: those that are committed)",
    )
    _add_files(parser, "fit")
    parser.add_argument(
        "--command", action="append", default=[], metavar="TEXT", help="a command line to show"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="HTML", help="the file to write"
    )
    parser.add_argument("--json", action="store_true", help="print the path as a JSON object")
    options = parser.parse_args(arguments)
    files = options.check or options.plan or options.capacity or options.validation or options.fit
    if not files and options.measured is None:
        parser.error("give --check, --plan, --capacity, --validation or --fit files, or --measured")
    try:
        check_file(options.output)
        text = render(
            Inputs(
                checks=[load_check(path) for path in options.check],
                plans=[load_plan(path) for path in options.plan],
                capacities=[load_capacity(path) for path in options.capacity],
                validations=[load_validation(path) for path in options.validation],
                figures=_figures(options.measured),
                fits=[load_fit(path) for path in options.fit],
                commands=options.command,
            )
        )
        write_whole(options.output, text)
    except (ResultError, PlanError, TableError, OSError) as error:
        print(f"trefoil report: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"report": str(options.output)}) if options.json else options.output)
    return 0


if __name__ == "__main__":
    sys.exit(verb.run("report", main))
