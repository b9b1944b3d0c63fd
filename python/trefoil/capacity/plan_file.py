"""A plan as a JSON object, documented in plan.schema.json, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from trefoil.capacity.configuration import Configuration, Memory, Operation, WhatIf
from trefoil.capacity.crossover import Crossover, Sample
from trefoil.capacity.plan import CapacityPlan, Smallest
from trefoil.capacity.question import LOADS, PlanError, Question
from trefoil.capacity.schedule import Timing
from trefoil.capacity.step import Gpu, Part
from trefoil.capacity.terms import Terms
from trefoil.capacity.whole_model import KV_BYTES, WEIGHT_BYTES, Model
from trefoil.inputs import read_json


def to_json(plan: CapacityPlan) -> dict[str, Any]:
    """The plan as a JSON object; sums stand beside their parts."""
    q = plan.question
    configurations = []
    for c in plan.configurations:
        low, high = c.interval or (None, None)
        configurations.append(
            {
                **asdict(c),
                "layer_seconds": c.layer,
                "layer_low_seconds": low,
                "layer_high_seconds": high,
                "layer_interval_covers": bool(c.interval) and not c.outside,
                "layer_bound_seconds": c.bound,
                "communication_seconds": c.communication(q),
                "step_seconds": c.step(q),
                "step_low_seconds": (c.step_interval(q) or (None, None))[0],
                "step_high_seconds": (c.step_interval(q) or (None, None))[1],
                "tokens_per_second": c.tokens_per_second(q),
                "usd_per_million_tokens": c.usd_per_million(q),
                "kwh_per_million_tokens": c.kwh_per_million(q),
                "idle_gpus": q.gpus - c.used(q),
                "share_of_step": c.share(q),
                "exposed_seconds": c.exposed(q),
                "overlap": c.timing.overlap if c.timing else "none",
                "memory_bytes": c.memory.total,
            }
        )
    return {
        "format": "trefoil-plan",
        "version": 1,
        "question": asdict(q),
        "configurations": configurations,
        "samples": [asdict(s) for s in plan.samples],
        "crossovers": [{**asdict(x), "costs": list(x.costs)} for x in plan.crossovers],
        "links": plan.links,
        "pictured": plan.pictured,
        "smallest": asdict(plan.smallest) if plan.smallest else None,
    }


def _configuration(data: dict[str, Any]) -> Configuration:
    known = {name: data[name] for name in ("mode", "ep", "nodes", "replicas", "sms", "costs")}
    return Configuration(
        **known,
        dispatch=Operation(**data["dispatch"]),
        combine=Operation(**data["combine"]),
        memory=Memory(**data["memory"]),
        what_if=[WhatIf(**w) for w in data["what_if"]],
        verdict=data["verdict"],
        reasons=list(data["reasons"]),
        compute=[Part(**p) for p in data.get("compute", ())],
        max_tokens=data.get("max_tokens"),
        physical_experts=data.get("physical_experts", 0),
        timings=[Timing(**t) for t in data.get("timings", ())],
    )


def _question(data: dict[str, Any]) -> Question:
    model, gpu = data.get("model"), data.get("gpu")
    made = {"model": Model(**model) if model else None, "gpu": Gpu(**gpu) if gpu else None}
    terms = Terms(**data.get("terms", {}))  # a plan of before: none
    return Question(**{**data, **made, "terms": terms})


def from_json(data: Any, where: str = "the plan") -> CapacityPlan:
    """The plan of a JSON object, as to_json made it. PlanError names what is wrong."""
    if not isinstance(data, dict) or data.get("format") != "trefoil-plan":
        raise PlanError(f"{where}: not a plan of trefoil plan --json (format 'trefoil-plan')")
    if data.get("version") != 1:
        raise PlanError(f"{where}: version {data.get('version')!r}; this program reads version 1")
    try:
        plan = CapacityPlan(
            question=_question(data["question"]),
            configurations=[_configuration(c) for c in data["configurations"]],
            samples=[Sample(**s) for s in data["samples"]],
            crossovers=[
                Crossover(**{**x, "costs": tuple(x.get("costs", ()))}) for x in data["crossovers"]
            ],
            links=list(data["links"]),
            pictured=data["pictured"],
            smallest=Smallest(**data["smallest"]) if data.get("smallest") else None,
        )
    except KeyError as error:
        raise PlanError(f"{where}: field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from error
    if plan.question.weight_dtype not in WEIGHT_BYTES or plan.question.kv_dtype not in KV_BYTES:
        raise PlanError(f"{where}: weight_dtype or kv_dtype is not known")
    if plan.question.load not in LOADS:
        raise PlanError(f"{where}: load {plan.question.load!r}: expected {', '.join(LOADS)}")
    return plan


def load_capacity(path: Path) -> CapacityPlan:
    return from_json(read_json(path, PlanError), str(path))
