"""What a fit puts out: the cost record, text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trefoil.fit.cases import OPS, Case
from trefoil.fit.job import Job, Outcome
from trefoil.fit.model import row_bytes
from trefoil.fit.search import Score, scores
from trefoil.simulator import CostRecord, Costs
from trefoil.structs import Record


def _number(job: Job, name: str, outcome: Outcome) -> dict[str, Any]:
    text = job.split.text
    if name in text["fitted"]:
        p = text["fitted"][name]
        value = float(f"{outcome.fitted.values[name]:.5g}")
        return {
            "value": min(max(value, p["low"]), p["high"]),
            "low": p["low"],
            "high": p["high"],
            "source": f"fitted to {text['table']}; bounds: {p['source']}",
            "state": outcome.fitted.states[name],
        }
    if name in text["given"]:
        p = text["given"][name]
        state = p.get("state", "given")
        return {**{k: p[k] for k in ("value", "low", "high", "source")}, "state": state}
    return {"value": 0, "low": 0, "high": 0, "source": "not part of this model", "state": "given"}


def _score(score: Score) -> dict[str, Any]:
    """An interval's ends are rounded outwards, so that the rows at its ends stay inside."""
    found = {k: v if isinstance(v, int) else round(v, 4) for k, v in asdict(score).items()}
    ends = {"low": math.floor(1e4 * score.low) / 1e4, "high": math.ceil(1e4 * score.high) / 1e4}
    return {**found, **ends}


def _span(cases: Sequence[Case], name: str) -> list[int]:
    values = [getattr(case, name) for case in cases]
    return [min(values), max(values)]


def fitted_rows(job: Job) -> dict[str, list[int]]:
    """From least to most: SMs, where the table does not say those that are given, and the bytes of
    a row of each operation."""
    setting = job.split.setting
    given = round(job.split.given().get("num_sms"))
    spans = {"sms": [case.sms or given for case in job.inside]}
    for op, row in (("dispatch", setting.dispatch_row), ("combine", setting.combine_row)):
        hidden = _span(job.inside, "hidden")
        spans[f"{op}_row_bytes"] = [row_bytes(row, size) for size in hidden]
    return {name: [min(values), max(values)] for name, values in spans.items()}


def range_of(job: Job) -> dict[str, list[int]]:
    """What was fitted, from least to most."""
    columns = ("nodes", "ranks", "hidden", "experts", "topk", "tokens")
    return {**{column: _span(job.inside, column) for column in columns}, **fitted_rows(job)}


def point_of(case: Case) -> dict[str, int]:
    return {**case.point, "sms": case.sms}


def range_record(job: Job) -> CostRecord:
    """With the range of what was fitted, and nothing else."""
    fields = Record()
    for name, ends in range_of(job).items():
        op, _, rest = name.partition("_")
        is_row = rest == "row_bytes"
        place = fields.range.row_bytes[OPS.index(op)] if is_row else getattr(fields.range, name)
        place[:] = ends
    return CostRecord.of_fields(fields)


def _within(job: Job, outcome: Outcome) -> dict[str, Score]:
    """Of the rows held out, those inside the range."""
    record = range_record(job)
    places = [
        i
        for i, case in enumerate(job.outside)
        if record.interval(case.op, point_of(case), 1.0).doublings == 0
    ]
    return scores([job.outside[i] for i in places], np.array(outcome.outside_us)[places])


def record_of(
    job: Job, outcome: Outcome, all_outcomes: list[Outcome], growth: dict[str, Any]
) -> dict[str, Any]:
    """The cost record as JSON (models/cost.schema.json)."""
    text, names = job.split.text, Costs.names()
    record: dict[str, Any] = {
        key: text[key] for key in ("name", "about", "mode", "variant", "cluster")
    }
    record["engine"] = outcome.form
    for name in names:
        if "." not in name:
            record[name] = _number(job, name, outcome)
    for op in OPS:
        own = (name for name in names if name.startswith(op + "."))
        record[op] = {n.partition(".")[2]: _number(job, n, outcome) for n in own}
    record["fit"] = {
        "command": f"trefoil fit {text['name']}",
        "table": text["table"],
        "observable": job.split.setting.observable,
        "masked_selections": text.get("masked_selections", {}).get("from_tokens", {}),
        **range_of(job),
        "inside": {k: _score(s) for k, s in outcome.inside.items()},
        "outside": {k: _score(s) for k, s in outcome.outside.items()},
        "within": {k: _score(s) for k, s in _within(job, outcome).items()},
        "forms": {
            o.form: {"inside": _score(o.inside["both"]), "outside": _score(o.outside["both"])}
            for o in all_outcomes
        },
        "growth": growth,
    }
    CostRecord(text["name"], json.dumps(record))  # the library must take it
    return record


def _verdict(closed: float, queues: float) -> str:
    if abs(closed - queues) <= 0.05 * min(closed, queues):
        return "the closed form and the engine tie"
    return f"the {'closed form' if closed < queues else 'engine'} is the better one"


def print_text(job: Job, outcomes: list[Outcome], simgrid: dict[str, float] | None) -> None:
    text = job.split.text
    counts = f"{len(job.inside)} times fitted, {len(job.outside)} held out"
    print(f"{text['name']}: {counts}, {text['table']}")
    print(f"\n{'cost':<34}" + "".join(f"{o.form:>30}" for o in outcomes) + "   bounds")
    for name, p in text["fitted"].items():
        cells = ""
        for o in outcomes:
            state = o.fitted.states[name]
            mark = "" if state == "fitted" else f" {state}"
            cells += f"{o.fitted.values[name]:>12.4g} +- {o.fitted.deviations[name]:<7.2g}{mark:>7}"
        print(f"{name:<34}{cells}   [{p['low']:g}, {p['high']:g}]")
    print(f"\n{'error against the measured time':<34}{'n':>6}{'mean':>9}{'p90':>9}{'worst':>9}")
    for part in ("inside", "outside"):
        for o in outcomes:
            for key in ("both", *OPS):
                s: Score = getattr(o, part)[key]
                rows = "fitted" if part == "inside" else "held out"
                label = f"{rows}, {o.form}, {key}"
                print(
                    f"{label:<34}{s.n:>6}{s.mape_percent:>8.2f}%{s.p90_percent:>8.2f}%"
                    f"{s.worst_percent:>8.2f}%"
                )
    if len(outcomes) == 2 and job.outside:
        closed, queues = (o.outside["both"].mape_percent for o in outcomes)
        print(f"\non the rows held out {_verdict(closed, queues)}")
    if simgrid:
        print(
            f"SimGrid with these costs: {simgrid['mean_percent']} % from the queues on average, "
            f"{simgrid['worst_percent']} % at worst, {simgrid['n']} cases"
        )


def _points(part: str, cases: list[Case], predicted: list[float]) -> list[dict[str, Any]]:
    """Rows for a picture: measured and predicted."""
    return [
        {
            "op": case.op,
            **case.point,
            "sms": case.sms,
            "routing": case.routing,
            "part": part,
            "measured_us": round(case.us, 4),
            "predicted_us": round(us, 3),
        }
        for case, us in zip(cases, predicted, strict=True)
    ]


def json_of(
    job: Job,
    outcomes: list[Outcome],
    simgrid: dict[str, float] | None,
    record: dict[str, Any],
) -> dict[str, Any]:
    return {
        "split": str(job.split.path),
        "table": str(job.split.text["table"]),
        "forms": {
            o.form: {
                "values": o.fitted.values,
                "states": o.fitted.states,
                "deviations": {
                    k: v if np.isfinite(v) else None for k, v in o.fitted.deviations.items()
                },
                "inside": {k: _score(s) for k, s in o.inside.items()},
                "outside": {k: _score(s) for k, s in o.outside.items()},
                "points": [
                    *_points("fitted", job.inside, o.inside_us),
                    *_points("held out", job.outside, o.outside_us),
                ],
            }
            for o in outcomes
        },
        "simgrid": simgrid,
        "record": record,
    }
