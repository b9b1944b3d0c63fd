"""A fleet as text."""

from __future__ import annotations

from trefoil.capacity.fleet import Fleet, Part
from trefoil.capacity.plan_text import assumed, compute_notes, unknown_memory, wrapped
from trefoil.table import aligned
from trefoil.units import format_bytes, format_seconds

HEADINGS = (
    *("for", "GPUs", "groups", "mode", "EP", "tokens a GPU", "schedule", "tokens/s a GPU"),
    *("used", "at most", "memory"),
)
LATENCY = {"prefill": "to the first token", "decode": "per output token"}


def row_of(p: Part) -> list[str]:
    q, c = p.candidate.question, p.candidate.configuration
    return [
        p.load,
        str(p.gpus),
        str(p.groups),
        c.mode.upper(),
        str(c.ep),
        f"{q.tokens:,}",
        c.timing.overlap if c.timing else "none",
        f"{c.tokens_per_second(q) or 0:,.0f}",
        f"{p.utilisation:.0%}",
        f"{format_seconds(p.latency)}{'*' * bool(c.outside)} {LATENCY[p.load]}",
        format_bytes(c.memory.total),
    ]


def answer_of(fleet: Fleet) -> str:
    q, nodes = fleet.question, max(1, fleet.question.gpus_per_node)
    by_load = " and ".join(f"{p.gpus} for {p.load}" for p in fleet.parts)
    usd = fleet.usd_per_hour
    price = f", {usd:,.4g} USD an hour" if usd is not None else ""
    count = -(-fleet.gpus // nodes)
    return f"{fleet.gpus:,} GPUs of {q.cluster} ({count} nodes), {by_load}{price}."


def transfer_sentence(fleet: Fleet) -> str:
    t, q = fleet.traffic, fleet.question
    if q.model is None:
        return ""
    size = q.model.kv_bytes(t.input_tokens, q.kv_dtype)
    return (
        f"keys and values of a prompt, {format_bytes(size)}, move from prefill to decode: "
        f"{size * t.requests_per_s / 1e9:.3g} GB/s in all, not in the times"
    )


def as_text(fleet: Fleet) -> str:
    t, q = fleet.traffic, fleet.question
    cached = f", {t.cached:.0%} of it cached" if t.cached else ""
    lines = [
        f"{q.moe}: {t.requests_per_s:g} requests/s of {t.input_tokens:,} tokens in{cached}, "
        f"{t.output_tokens:,} out",
        "",
    ]
    if len(fleet.parts) == 2:
        lines += [*wrapped(answer_of(fleet), ""), ""]
    if fleet.parts:
        lines += [*aligned([HEADINGS, *(row_of(p) for p in fleet.parts)]), ""]
    for text in fleet.misses:
        lines += wrapped(text + ".", "")
    notes = [
        f"groups are used at most {t.utilisation:.0%} (--utilisation); a prompt waits for half a "
        "step, then for its own; latencies are the upper ends of intervals",
        transfer_sentence(fleet),
        *compute_notes(fleet.searches["decode"].plans[0]),
        *(f"{load}: {x}" for load, s in fleet.searches.items() for x in assumed(s.question)),
        *unknown_memory(q),
    ]
    if any(p.candidate.configuration.outside for p in fleet.parts):
        notes.append("* communication beyond what its costs were fitted to")
    return "\n".join([*lines, *(x for n in notes if n for x in wrapped(n, ""))]) + "\n"
