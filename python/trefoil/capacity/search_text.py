"""A search as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

from trefoil.capacity.batch_search import Candidate, Search
from trefoil.capacity.plan_text import (
    assumed,
    binding_sentences,
    compute_notes,
    gpus_text,
    interval_text,
    limits_of,
    unknown_memory,
    wrapped,
)
from trefoil.capacity.question import Question
from trefoil.capacity.verdict import nearest_of
from trefoil.table import aligned
from trefoil.units import format_bytes, format_seconds

MOST_ROWS = 12  # of a frontier
HEADINGS = (
    *("tokens a GPU", "mode", "EP", "groups", "schedule", "tokens/s a GPU", "a node"),
    *("latency", "communication", "memory"),
)
LATENCY = {"decode": "per output token", "prefill": "to the first token"}


def _span(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"


def title_of(s: Search) -> str:
    q = s.question
    return (
        f"{q.moe}, {q.load}, {_span(s.batches)} tokens a GPU, context {_span(s.contexts)}, "
        f"{gpus_text(q.gpus)} of {q.cluster}"
    )


def row_of(candidate: Candidate) -> list[str]:
    q, c = candidate.question, candidate.configuration
    rate, share, idle = c.tokens_per_second(q) or 0.0, c.share(q) or 0.0, q.gpus - c.used(q)
    return [
        f"{q.tokens:,}",
        c.mode.upper(),
        str(c.ep),
        f"{c.replicas}{f' ({idle} idle)' if idle else ''}",
        c.timing.overlap if c.timing else "none",
        f"{rate:,.0f}",
        f"{rate * q.gpus_per_node:,.0f}",
        format_seconds(candidate.latency) + "*" * bool(c.outside),
        f"{share:.0%}",
        format_bytes(c.memory.total),
    ]


def best_sentence(candidate: Candidate, q: Question) -> str:
    c, of = candidate.configuration, candidate.question
    limits = " and ".join(limits_of(q))
    what = LATENCY.get(q.load, "a step")
    usd = c.usd_per_million(of)
    price = f", {usd:.3g} USD a million tokens" if usd is not None else ""
    return (
        f"Most tokens at context {of.context:,}{f' within {limits}' if limits else ''}: "
        f"{c.mode.upper()} in {c.replicas} group{'s'[: c.replicas > 1]} of {gpus_text(c.ep)}, "
        f"{of.tokens:,} tokens a GPU: {c.tokens_per_second(of) or 0:,.0f} tokens/s a GPU, "
        f"{format_seconds(candidate.latency)} {what}{interval_text(c, of)}{price}."
    )


def nothing_sentence(s: Search, context: int) -> str:
    """Why nothing meets the limits, and the nearest value that lets something in."""
    limits = " and ".join(limits_of(s.question))
    text = f"Nothing at context {context:,} meets {limits}."
    nearest: dict[str, Any] = {}
    for plan in s.plans:
        if plan.question.context != context:
            continue
        for n in nearest_of(plan):
            old = nearest.get(n.option)
            if old is None or (n.value < old[0].value) != (n.option == "--reserve-gb"):
                nearest[n.option] = (n, plan.question.tokens)
    for n, tokens in nearest.values():
        c = n.configuration
        text += (
            f" {n.option} {n.value:.4g} alone would let in {c.mode.upper()} EP {c.ep} with "
            f"{tokens:,} tokens a GPU."
        )
    if not nearest:
        known = [(p.question, c) for p in s.plans for c in p.configurations]
        found = binding_sentences([(q, c) for q, c in known if q.context == context])
        text = " ".join([text, *found])
    return text


def thinned(found: list[Candidate]) -> list[Candidate]:
    """At most MOST_ROWS, the ends among them."""
    if len(found) <= MOST_ROWS:
        return found
    at = [round(i * (len(found) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)]
    return [found[i] for i in at]


def as_text(s: Search) -> str:
    lines = [title_of(s)]
    for context in s.contexts:
        best, found = s.best(context), s.frontier(context)
        lines.append("")
        if best is None:
            lines += wrapped(nothing_sentence(s, context), "")
            continue
        lines += [*wrapped(best_sentence(best, s.question), ""), ""]
        lines += aligned([HEADINGS, *(row_of(c) for c in thinned(found))])
        if len(found) > MOST_ROWS:
            lines.append(f"({len(found)} in all: --json, -o)")
    total = sum(1 for _ in s.candidates())
    notes = [
        f"shown of {total} configurations: the frontier, where more tokens cost latency; nothing "
        "that meets the limits is better in both",
        *compute_notes(s.plans[0]),
        *assumed(s.question),
        *unknown_memory(s.question),
    ]
    if any(c.configuration.outside for c in s.candidates()):
        notes.append("* communication beyond what its costs were fitted to")
    notes += [f"left out: {text}" for text in dict.fromkeys(s.refused)]
    return "\n".join([*lines, "", *(x for text in notes for x in wrapped(text, ""))]) + "\n"


def as_csv(s: Search) -> str:
    text, rows = io.StringIO(), s.rows()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def to_json(s: Search) -> dict[str, Any]:
    return {
        "format": "trefoil-search",
        "version": 1,
        "rows": s.rows(),
        "refused": list(dict.fromkeys(s.refused)),
    }
