"""Prints results as text: `python -m trefoil.summary --check a.json --plan b.json`.

What agrees, bytes per rank pair and tier, times, and the closed-form prediction: the report's facts
for a terminal. Needs only the standard library. Exit code 1 if something differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trefoil.report.results import CheckFile, Plan, ResultError, Run, load_check, load_plan
from trefoil.report.validated import Validation, load_validation
from trefoil.units import format_bytes, format_seconds

MAX_RANKS_SHOWN = 16


def describe_run(run: Run) -> Iterator[str]:
    low, high = min(run.received_rows), max(run.received_rows)
    times = ", ".join(f"{name} {format_seconds(value)}" for name, value in run.seconds.items())
    yield (
        f"{run.mode}: {run.ranks} ranks on {run.nodes} node{'s'[: run.nodes > 1]}, "
        f"{run.tokens:,} tokens a rank, hidden {run.hidden:,}, top-{run.topk} of {run.experts}, "
        f"{run.dtype}"
    )
    verdict = "agrees with the reference" if run.ok else "DIFFERS from the reference"
    yield f"  {verdict}: {format_bytes(run.bytes_compared)} compared on {run.ranks} ranks"
    if run.difference:
        yield f"  {run.difference}"
    yield f"  received {low:,} to {high:,} rows a rank" + (f"; {times}" if times else "")
    for op, matrix in (("dispatch", run.dispatch_bytes), ("combine", run.combine_bytes)):
        tiers = ", ".join(f"{tier} {format_bytes(n)}" for tier, n in run.tier_bytes(op).items())
        yield f"  {op}: {tiers}"
        if run.ranks <= MAX_RANKS_SHOWN:
            yield "    MB from (down) to (across)" + "".join(f"{d:7d}" for d in range(run.ranks))
            for source, row in enumerate(matrix):
                yield f"    {source:26d}" + "".join(f"{n / 1e6:7.2f}" for n in row)


def describe_check(check: CheckFile) -> Iterator[str]:
    if check.cases:
        c = check.cases
        rate = f", {c.cases / c.seconds:,.0f} a second" if c.seconds else ""
        verdict = f"{c.failed:,} DIFFER" if c.failed else "all agree"
        yield f"{c.cases:,} random cases (seed {c.seed}): {verdict}{rate}"
        if c.difference:
            yield c.difference
    for run in check.runs:
        yield from describe_run(run)


def describe_plan(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.mode.upper()} on {plan.cluster}, {plan.moe}, {plan.tokens:,} tokens a GPU"
        f"{', ' + plan.details if plan.details else ''} "
        " (closed form: bytes over measured rates, and fixed times)"
    )
    yield "    GPUs   EP    dispatch  limit            combine  limit"
    for p in plan.points:
        texts = [f"{format_seconds(p.seconds[op]):>10}  {p.limit[op]:<12}" for op in p.seconds]
        yield f"  {p.gpus:6,} {p.ep:4d}  " + "  ".join(texts).rstrip()


def describe_validation(v: Validation) -> Iterator[str]:
    for p in v.parts:
        yield f"{p.name}: {'agree' if p.ok else 'DIFFER'}, {p.cases:,} cases, {p.compared}"
        if p.failure:
            yield p.failure
    for t in v.times:
        stated = "" if t.stated is None else f" (stated {t.stated:.1f} %)"
        form, own = t.fitted_closed_form, "fitted for itself"
        if form is None:
            form, own = t.closed_form, "with the same costs"
        yield (
            f"times, {t.name}: {t.mape:.1f} % off{stated}, p90 {t.p90:.1f} %, closed form {own} "
            f"{form:.1f} %, {t.inside} of {t.rows} rows inside their interval; goal "
            f"{'met' if t.meets_goal else 'not met'}"
        )
        if not t.agrees:
            yield "  NOT AS STATED"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trefoil.summary")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="JSON")
    parser.add_argument("--plan", nargs="+", type=Path, default=[], metavar="JSON")
    parser.add_argument("--validation", nargs="+", type=Path, default=[], metavar="JSON")
    options = parser.parse_args(arguments)
    try:
        checks = [load_check(path) for path in options.check]
        plans = [load_plan(path) for path in options.plan]
        validations = [load_validation(path) for path in options.validation]
    except ResultError as error:
        print(f"summary: {error}", file=sys.stderr)
        return 1
    for check in checks:
        print("\n".join(describe_check(check)))
    for plan in plans:
        print("\n".join(describe_plan(plan)))
    for validation in validations:
        print("\n".join(describe_validation(validation)))
    fine = all(run.ok for c in checks for run in c.runs) and all(v.ok for v in validations)
    return 0 if fine and not any(c.cases and c.cases.failed for c in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
