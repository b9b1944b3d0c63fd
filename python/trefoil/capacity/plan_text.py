"""A capacity plan as text for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trefoil.capacity.configuration import Configuration, WhatIf
from trefoil.capacity.crossover import Crossover
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.question import Question, why_no_step
from trefoil.capacity.verdict import (
    Nearest,
    context_that_fits,
    fits,
    least_of,
    memory_limit,
    nearest_of,
)
from trefoil.table import aligned, markdown
from trefoil.units import format_bytes, format_seconds

WIDTH = 120  # of texts; tables are as wide as they are
HEADINGS = (
    "mode",
    "EP",
    "",
    "layer",
    "90 % interval",
    "bound",
    "dispatch",
    "combine",
    "all layers",
    "share",
    "NVLink port",
    "NIC port",
    "SMs",
    "buffers",
    "memory",
)
STEP_HEADINGS = (
    "mode",
    "EP",
    "groups",
    "",
    "tokens/s",
    "a step",
    "schedule",
    "attention",
    "experts",
    "other",
    "communication",
    "memory",
    "batch fits",
)
PRICE_HEADING = "USD a million"
MARKS = {"cheapest": "cheapest", "meets": "meets", "misses": "misses"}


def step_headings(q: Question) -> tuple[str, ...]:
    return STEP_HEADINGS + ((PRICE_HEADING,) if q.gpu_hour_usd is not None else ())


def limits_of(q: Question) -> list[str]:
    limits = [f"a layer in {q.max_us:g} us"] if q.max_us is not None else []
    if q.usable_gb is not None:
        limits.append(f"{q.usable_gb:g} GB a GPU")
    if q.max_step_ms is not None:
        what = "the first token" if q.load == "prefill" else "a step"
        limits.append(f"{what} in {q.max_step_ms:g} ms")
    if q.max_sms is not None:
        limits.append(f"{q.max_sms} SMs")
    return limits


def title_of(q: Question) -> str:
    of = f"{q.moe}, {q.load}, {q.tokens:,} tokens a GPU"
    if q.model is not None and q.load != "training":
        of += f", context {q.context:,}"
        of += f" ({q.cached:,} cached)" if q.cached else ""
    return f"{of}, {gpus_text(q.gpus)} of {q.cluster}"


def gpus_text(count: int) -> str:
    return f"{count:,} GPU{'s'[: count > 1]}"


def _are(count: int) -> str:
    return f"{'are' if count > 1 else 'is'} {gpus_text(count)}"


def terms_of(q: Question) -> list[str]:
    """What is added to the kernels, one sentence; [] where nothing is."""
    t, said = q.terms, []
    if q.rows > 1:
        said.append(f"{q.tokens_out / q.tokens:.2f} tokens of {q.rows} in a step (--drafts)")
    if t.imbalance > 1:
        said.append(f"the busiest GPU's experts have {t.imbalance:g} of the mean (--imbalance)")
    if t.prefill_wait > 1:
        said.append(
            f"waits for unequal experts make a step {t.prefill_wait:g} times (--prefill-wait)"
        )
    if t.batch_imbalance > 1:
        said.append(f"its attention {t.batch_imbalance:g} of the mean (--batch-imbalance)")
    if t.interference < 1 and q.load == "prefill":
        said.append(f"compute beside communication at {t.interference:g} (--interference)")
    if t.host_ms > 0:
        said.append(f"GPUs wait {t.host_ms:g} ms a step for the engine (--host-ms)")
    return ["; ".join(said)] if said else []


def explanation_of(q: Question) -> str:
    passes = "once" if q.passes == 1 else "forward and backward"
    text = (
        f"{q.moe_layers} MoE layers, each {passes}; a layer is dispatch + combine of one pass, "
        "ports are the busiest one's bytes of both"
    )
    if q.compute_us is not None:
        text += f"; share is of a step with {q.compute_us:g} us of other work a layer, no overlap"
    return text + (f"; {q.details}" if q.details else "")


def row_of(c: Configuration, q: Question) -> list[str]:
    """The cells under HEADINGS."""
    interval, share = c.interval, c.share(q)
    both = (c.dispatch, c.combine)
    within = "-"
    if interval:
        within = " - ".join(map(format_seconds, interval)) + "*" * bool(c.outside)
    return [
        c.mode.upper(),
        str(c.ep),
        MARKS.get(c.verdict, "") if limits_of(q) or c.verdict != "meets" else "",
        format_seconds(c.layer),
        within,
        format_seconds(c.bound),
        format_seconds(c.dispatch.seconds),
        format_seconds(c.combine.seconds),
        format_seconds(c.communication(q)),
        "-" if share is None else f"{100 * share:.0f} %",
        format_bytes(sum(o.nvlink_port_bytes for o in both)),
        format_bytes(sum(o.nic_port_bytes for o in both)),
        "-" if c.sms is None else str(c.sms),
        _buffers(c),
        format_bytes(c.memory.total),
    ]


def step_row(c: Configuration, q: Question) -> list[str]:
    """The cells under step_headings."""
    compute = {p.name: p.seconds for p in c.compute}
    named = [compute.pop(name, 0.0) for name in ("attention", "routed experts")]
    parts = [*map(format_seconds, (*named, sum(compute.values())))] if c.compute else ["-"] * 3
    step, rate, share = c.step(q), c.tokens_per_second(q), c.share(q)
    idle = q.gpus - c.used(q)
    shared = "" if share is None else f" ({100 * share:.0f} %)"
    usd = c.usd_per_million(q)
    price = [] if q.gpu_hour_usd is None else ["-" if usd is None else f"{usd:.3g}"]
    return [
        c.mode.upper(),
        str(c.ep),
        f"{c.replicas}{f' ({idle} idle)' if idle else ''}",
        MARKS.get(c.verdict, ""),
        "-" if rate is None else f"{rate:,.0f}",
        "-" if step is None else format_seconds(step) + "*" * bool(c.outside),
        c.timing.overlap if c.timing else "none",
        *parts,
        format_seconds(c.communication(q)) + shared,
        "refused" if c.memory.refused else format_bytes(c.memory.total),
        "-" if c.max_tokens is None else f"{c.max_tokens:,}",
        *price,
    ]


def _buffers(c: Configuration) -> str:
    if c.memory.refused:
        return "refused"
    mark = {"gpu": "", "gpu-formula": " g", "cpu": " c"}[c.memory.library]
    return format_bytes(c.memory.buffers + c.memory.outputs) + mark


def crossover_sentence(x: Crossover) -> str:
    of = ""
    if x.costs:
        two = "two libraries: " if len(x.libraries) > 1 else ""
        of = f" ({two}{', '.join(x.costs)})"
    if x.tokens is not None:
        return f"EP {x.ep}: HT is faster from about {round(x.tokens):,} tokens a GPU on{of}"
    if x.faster == "ht":
        return f"EP {x.ep}: HT is faster from {x.least:,} token{'s'[: x.least > 1]} a GPU on{of}"
    return f"EP {x.ep}: LL is faster up to {x.most:,} tokens a GPU, the most that was tried{of}"


def what_if_rows(plan: CapacityPlan) -> list[list[str]]:
    """A heading, then a row a configuration: how many times as long a layer takes, and a step."""
    names = list(dict.fromkeys(w.name for c in plan.configurations for w in c.what_if))
    if not names:
        return []
    rows = [["mode", "EP", "layer", *names]]
    for c in plan.configurations:
        by_name = {w.name: w for w in c.what_if}
        cells = [_changed(by_name.get(n)) for n in names]
        rows.append([c.mode.upper(), str(c.ep), format_seconds(c.layer), *cells])
    return rows


def _changed(w: WhatIf | None) -> str:
    if w is None or w.factor is None:
        return "-"
    return f"x {w.factor:.2f}" + ("" if w.step_factor is None else f" (x {w.step_factor:.2f})")


WHAT_IF = "how many times as long a layer takes, and in brackets a step"


def step_notes(plan: CapacityPlan) -> list[str]:
    """What a reader must know to trust a step's time and memory."""
    q, of = plan.question, plan.configurations
    refusals = dict.fromkeys(w.refusal for c in of for w in c.what_if if w.refusal)
    notes = [f"a what-if that does not apply: {text}" for text in refusals]
    notes += uneven_nodes(plan)
    notes += compute_notes(plan)
    if any(c.timings for c in of):
        notes.append(
            "tokens/s of a GPU that works; "
            f"schedule: the fastest of {', '.join(q.overlaps)} (--overlap); in brackets what of a "
            "step waits for communication; attention, experts and other are of one whole batch"
        )
        notes += terms_of(q)
        sequences = "; tokens a GPU are sequences" if q.load == "decode" else ""
        notes.append(f"LL and HT: low-latency, high-throughput dispatch and combine{sequences}")
    elif q.is_whole:
        notes.append("nothing overlaps: a step is its compute, then its communication")
    outside = list(dict.fromkeys(c.mode.upper() for c in of if c.outside))
    if outside:
        notes.append(
            f"* communication beyond what its costs were fitted to ({', '.join(outside)}): "
            "--details says how far"
        )
    if q.model is not None:
        kv = "" if q.load == "training" else f", KV cache in {q.kv_dtype}"
        notes.append(f"weights in {q.weight_dtype}{kv}; {held_text(q)}")
    else:
        notes.append(
            f"memory is of routed experts and buffers alone: {_not_whole(q)}; --other-gb adds to it"
        )
    if q.load == "training":
        notes.append("memory leaves out gradients, optimizer states and activations: --other-gb")
    notes += unknown_memory(q)
    if q.gpu_memory_gb is not None:
        notes.append(
            f"memory: {q.gpu_memory_gb:g} GB a GPU, {q.reserve_gb:g} GB of them in reserve "
            "(--reserve-gb) for CUDA's context, NCCL and workspaces"
        )
    return notes


def assumed(q: Question) -> list[str]:
    """Of a search or a fleet: what an operator could say otherwise."""
    return terms_of(q) + ([held_text(q)] if q.attention_tp > 1 else [])


def held_text(q: Question) -> str:
    n = q.attention_tp
    if n == 1:
        return (
            "every GPU holds all of attention, shared experts and embeddings (data-parallel "
            "attention)"
        )
    return (
        f"{n} GPUs share a sequence's attention (--attention-tp), their exchange of rows counted "
        "in it at the cluster's NVLink rate; every GPU holds all of shared experts and embeddings"
    )


def unknown_memory(q: Question) -> list[str]:
    if q.gpu_memory_gb is not None:
        return []
    rules = "nothing was left out for memory" if q.max_memory_gb is None else "the limit rules"
    return [f"cluster {q.cluster} does not state gpu_memory_gb: {rules}"]


def is_roofline(c: Configuration) -> bool:
    """Its compute is no more than a bound."""
    return bool(c.compute) and all(p.costs == "roofline" for p in c.compute)


def compute_notes(plan: CapacityPlan) -> list[str]:
    """Where the time of compute comes from."""
    q = plan.question
    parts = [p for c in plan.configurations for p in c.compute]
    if not parts:
        return []
    bound = list(dict.fromkeys(p.name for p in parts if p.costs == "roofline"))
    if not q.compute_gpu:
        return [
            "compute is a roofline at the GPU's peak rates, not measured: real kernels are slower, "
            "so tokens/s are at most and times at least what stands here"
        ]
    name = Path(q.compute_costs).name
    text = f"compute by {name}: shares of the peaks that kernels reach on {q.compute_gpu}"
    if bound:
        text += f"; a roofline, so at least: {', '.join(bound)}"
    return [text]


def _not_whole(q: Question) -> str:
    return f"the file of {q.moe} does not say enough of the whole model ({q.missing})"


def uneven_nodes(plan: CapacityPlan) -> list[str]:
    """NVLink domains of EP groups that leave GPUs of their nodes idle."""
    most = plan.question.gpus_per_node or 0
    of = {c.ep: c.nodes for c in plan.configurations if c.ep > most > 0 and c.ep // c.nodes != most}
    return [
        f"EP {ep} on nodes of {most}: {n} NVLink domains of {ep // n}, the largest that "
        f"{-(-ep // most)} nodes allow"
        for ep, n in of.items()
    ]


def notes_of(plan: CapacityPlan) -> list[str]:
    """What a reader must know to trust the table."""
    configurations = plan.configurations
    ops = [o for c in configurations for o in (c.dispatch, c.combine)]
    engines = dict.fromkeys(o.engine for o in ops)
    q = plan.question
    costs = dict.fromkeys(f"{c.mode.upper()} {c.costs}" for c in configurations)
    notes = [f"engines: {', '.join(engines)}; costs: {', '.join(costs)}"]
    outside = dict.fromkeys(
        f"{c.mode.upper()} EP {c.ep}: {c.outside}" for c in configurations if c.outside
    )
    if outside:
        notes.append(
            "* extrapolated beyond what the costs were fitted to, by a wider interval: "
            + "; ".join(outside)
        )
    notes.append("bound: bytes of the busiest port over its line rate; nothing is faster")
    if why := why_no_step(q):
        notes.append(f"no step and no tokens/s: {why}")
    libraries = {c.memory.library for c in configurations}
    if "gpu-formula" in libraries:
        notes.append("g: buffers by the GPU library's formula; it takes at most 64 ranks")
    if "cpu" in libraries:
        why = sorted({c.memory.gpu_refuses for c in configurations} - {""})
        notes.append("c: buffers of the CPU library" + (f": {'; '.join(why[:2])}" if why else ""))
    return [*notes, *step_notes(plan)]


def verdict_sentences(plan: CapacityPlan) -> list[str]:
    """Which configuration is the cheapest, and why each other one is not."""
    limits = " and ".join(limits_of(plan.question))
    within = f" that meets {limits}" if limits else ""
    chosen = plan.chosen
    if chosen is None:
        lines = [f"No configuration{within or ' does'}.", *_nothing_fits(plan)]
        alone = [_nearest(n, plan.question) for n in nearest_of(plan)]
        lines += alone or binding_sentences([(plan.question, c) for c in plan.configurations])
    else:
        lines = [f"The cheapest configuration{within}: {_answer(chosen, plan.question)}"]
    return lines + [
        f"{c.mode.upper()} EP {c.ep}: {'; '.join(c.reasons)}"
        for c in plan.configurations
        if c.reasons
    ]


def _answer(c: Configuration, q: Question) -> str:
    step, rate, share = c.step(q), c.tokens_per_second(q), c.share(q)
    memory = f"{format_bytes(c.memory.total)} a GPU"
    if q.usable_gb is None:
        memory += ", of GPUs whose memory is not known"
    if step is None or rate is None or share is None:
        sms = f"{c.sms} SMs, " if c.sms else ""
        layer = format_seconds(c.layer)
        of = f"{c.mode.upper()} in groups of {gpus_text(c.ep)}, {layer} a layer, {sms}{memory}."
        return f"{of} {_unknown(q)}"
    most, least = ("at most ", "at least ") if is_roofline(c) else ("", "")
    groups = f"{c.replicas} group{'s'[: c.replicas > 1]} of {gpus_text(c.ep)}"
    idle = q.gpus - c.used(q)
    node = f"{rate * q.gpus_per_node:,.0f} a node of {q.gpus_per_node}, " if q.gpus_per_node else ""
    node = f" ({node}{rate * c.used(q):,.0f} in all)"
    what = {"decode": "per output token", "prefill": "to the first token"}[q.load]
    text = (
        f"{c.mode.upper()} in {groups}{f', {idle} GPUs idle' if idle else ''}: "
        f"{most}{rate:,.0f} tokens/s a GPU{node}, {least}"
        f"{format_seconds(step * q.steps_of_latency)} {what}{interval_text(c, q)}, "
        f"{_waits(c, share)}; {memory}"
    )
    if c.max_tokens and c.max_tokens > q.tokens:
        text += f", {c.max_tokens:,} tokens a GPU would fit"
    return text + f"{_price(c, q)}."


def interval_text(c: Configuration, q: Question) -> str:
    """Of the latency, in brackets; "" where none is known."""
    ends = None if is_roofline(c) else c.step_interval(q)
    if ends is None:
        return ""
    low, high = (format_seconds(t * q.steps_of_latency) for t in ends)
    return f" (interval {low} to {high})"


def _unknown(q: Question) -> str:
    """What the answer lacks without a step."""
    if q.model is None:
        return f"No tokens/s, and memory is of routed experts and buffers alone: {_not_whole(q)}."
    return f"No tokens/s: {why_no_step(q)}."


def _waits(c: Configuration, share: float) -> str:
    overlapped = c.timing is not None and c.timing.overlap != "none"
    how = f" with {c.timing.overlap} overlap" if overlapped and c.timing else ""
    return f"{100 * share:.0f} % of it communication{how}"


def _price(c: Configuration, q: Question) -> str:
    """Of a million tokens, as the caller's price and power of a GPU make it."""
    usd, kwh = c.usd_per_million(q), c.kwh_per_million(q)
    found = [f"{usd:.3g} USD"] if usd is not None else []
    found += [f"{kwh:.3g} kWh"] if kwh is not None else []
    least = "at least " if is_roofline(c) else ""
    return f"; {least}{' and '.join(found)} a million tokens" if found else ""


def _nearest(n: Nearest, q: Question) -> str:
    # Rounded to the side that lets it in.
    value = math.floor(n.value * 100) / 100 if n.option == "--reserve-gb" else n.value
    if n.option != "--reserve-gb":
        value = math.ceil(n.value * 100) / 100
    c = n.configuration
    return f"{n.option} {value:g} alone would let in {c.mode.upper()} EP {c.ep}."


def binding_sentences(found: Sequence[tuple[Question, Configuration]]) -> list[str]:
    """Where no limit alone keeps things out: which are over for all, and the least of each."""
    lines = []
    for least in least_of(found):
        q, c = least.question, least.configuration
        at = f"{c.mode.upper()} EP {c.ep} with {q.tokens:,} tokens a GPU"
        value = f"{math.ceil(least.value * 100) / 100:g}"
        lines.append(f"{least.limit}: all need more, at least {value} {least.unit}, of {at}.")
    return lines


def _nothing_fits(plan: CapacityPlan) -> list[str]:
    q, smallest = plan.question, plan.smallest
    if smallest is None or any(fits(c, q) for c in plan.configurations):
        return []
    lines = []
    others = limits_of(replace(q, gpu_memory_gb=None, max_memory_gb=None))
    also = f" in memory, {' and '.join(others)} aside" if others else ""
    if smallest.mode:
        lines.append(
            f"The smallest that fits: {smallest.mode.upper()} in groups of {smallest.ep} GPUs, "
            f"{format_bytes(smallest.memory_bytes)} a GPU; there {_are(q.gpus)}."
        )
    most = max(plan.configurations, key=lambda c: c.max_tokens or 0)
    if most.max_tokens:
        where = f"{most.mode.upper()} EP {most.ep}"
        lines.append(f"With --tokens {most.max_tokens} {where} fits{also}.")
    by_context = [(context_that_fits(c, q), c) for c in plan.configurations]
    context, c = max(by_context, key=lambda pair: pair[0])
    if context:
        lines.append(f"With --context {context} {c.mode.upper()} EP {c.ep} fits{also}.")
    if not lines:
        lines.append(
            f"No EP size of {q.moe} keeps {q.weight_dtype} weights within {memory_limit(q)}."
        )
    return lines


def as_text(plan: CapacityPlan, details: bool = True) -> str:
    """The answer first. Without details, where a step is known, it fits a screen."""
    q = plan.question
    of = plan.configurations
    first, *others = verdict_sentences(plan)
    lines = [title_of(q), "", *wrapped(first, "")]
    if q.is_whole:
        lines += ["", *aligned([step_headings(q), *(step_row(c, q) for c in of)])]
    lines += ["", *(line for text in others for line in wrapped(text, "  "))]
    if details or not q.is_whole:
        lines += ["", "Communication: " + explanation_of(q), ""]
        lines += aligned([HEADINGS, *(row_of(c, q) for c in of)])
    if rows := what_if_rows(plan):
        lines += ["", f"What if: {WHAT_IF}", *aligned(rows)]
    if plan.crossovers:
        lines += ["", "LL or HT", *(f"  {crossover_sentence(x)}" for x in plan.crossovers)]
    notes = notes_of(plan) if details or not q.is_whole else step_notes(plan)
    lines += ["", *(line for text in notes for line in wrapped(text, ""))]
    return "\n".join(lines) + "\n"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_markdown(plan: CapacityPlan) -> str:
    q = plan.question
    first, *others = verdict_sentences(plan)
    lines = [f"# {title_of(q)}", "", f"**{first}**", ""]
    if q.is_whole:
        lines += [*markdown([step_headings(q), *(step_row(c, q) for c in plan.configurations)]), ""]
    lines += [
        *(f"- {text}" for text in others),
        "",
        "## Communication",
        "",
        explanation_of(q) + ".",
    ]
    lines += ["", *markdown([HEADINGS, *(row_of(c, q) for c in plan.configurations)])]
    if rows := what_if_rows(plan):
        lines += ["", "## What if", "", f"{WHAT_IF.capitalize()}.", ""]
        lines += markdown(rows)
    if plan.crossovers:
        lines += ["", "## LL or HT", "", *(f"- {crossover_sentence(x)}" for x in plan.crossovers)]
    for note in notes_of(plan):
        lines += ["", note]
    return "\n".join(lines) + "\n"


CSV_FIELDS = (
    *("mode", "ep", "nodes", "replicas", "sms", "costs", "tokens"),
    *("layer_seconds", "layer_low_seconds", "layer_high_seconds", "layer_interval_covers"),
    "layer_bound_seconds",
    *("communication_seconds", "step_seconds", "tokens_per_second", "max_tokens"),
    *("usd_per_million_tokens", "kwh_per_million_tokens"),
    *("share_of_step", "exposed_seconds"),
    *("memory_bytes", "buffer_bytes", "output_bytes", "weight_bytes", "verdict"),
)
CSV_OP_FIELDS = (
    *("seconds", "low", "high", "bound", "closed_form", "engine", "limit"),
    *("self_bytes", "nvlink_bytes", "net_bytes", "nvlink_port_bytes", "nic_port_bytes"),
)


def as_csv(plan: CapacityPlan) -> str:
    """A line a configuration; seconds and bytes without units in the cells."""
    q = plan.question
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ops = ("dispatch", "combine")
    writer.writerow([*CSV_FIELDS, *(f"{op}_{name}" for op in ops for name in CSV_OP_FIELDS)])
    for c in plan.configurations:
        low, high = c.interval or (None, None)
        cells = [c.mode, c.ep, c.nodes, c.replicas, c.sms, c.costs, q.tokens, c.layer, low, high]
        cells += [
            bool(c.interval) and not c.outside,
            c.bound,
            c.communication(q),
            c.step(q),
            c.tokens_per_second(q),
            c.max_tokens,
            c.usd_per_million(q),
            c.kwh_per_million(q),
            c.share(q),
            c.exposed(q),
            c.memory.total,
            c.memory.buffers,
        ]
        cells += [c.memory.outputs, c.memory.weights, c.verdict]
        cells += [getattr(o, name) for o in (c.dispatch, c.combine) for name in CSV_OP_FIELDS]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()
