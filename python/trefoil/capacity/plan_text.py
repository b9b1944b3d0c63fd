"""A capacity plan as text for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io

from trefoil.capacity.plan import (
    CapacityPlan,
    Configuration,
    Crossover,
    Question,
    fits,
    memory_limit,
)
from trefoil.table import aligned, markdown
from trefoil.units import format_bytes, format_seconds

HEADINGS = (
    "mode",
    "EP",
    "",
    "layer",
    "90 % interval",
    "bound",
    "dispatch",
    "combine",
    "step",
    "share",
    "NVLink port",
    "NIC port",
    "SMs",
    "buffers",
    "memory",
)
MARKS = {"cheapest": "cheapest", "meets": "meets", "misses": "misses"}


def limits_of(q: Question) -> list[str]:
    limits = [f"a layer in {q.max_us:g} us"] if q.max_us is not None else []
    if q.usable_gb is not None:
        limits.append(f"{q.usable_gb:g} GB a GPU")
    if q.max_sms is not None:
        limits.append(f"{q.max_sms} SMs")
    return limits


def title_of(q: Question) -> str:
    return f"{q.moe}, {q.load}, {q.tokens:,} tokens a GPU, {q.gpus:,} GPUs of {q.cluster}"


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
        format_seconds(c.step(q)),
        "-" if share is None else f"{100 * share:.0f} %",
        format_bytes(sum(o.nvlink_port_bytes for o in both)),
        format_bytes(sum(o.nic_port_bytes for o in both)),
        "-" if c.sms is None else str(c.sms),
        _buffers(c),
        format_bytes(c.memory.total),
    ]


def _buffers(c: Configuration) -> str:
    if c.memory.refused:
        return "refused"
    mark = " c" if c.memory.library == "cpu" else ""
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
    """A heading, then a row a configuration: how many times as long a layer takes."""
    names = list(dict.fromkeys(w.name for c in plan.configurations for w in c.what_if))
    if not names:
        return []
    rows = [["mode", "EP", "layer", *names]]
    for c in plan.configurations:
        by_name = {w.name: w for w in c.what_if}
        cells = [by_name[n].factor if n in by_name else None for n in names]
        rows.append(
            [c.mode.upper(), str(c.ep), format_seconds(c.layer)]
            + ["-" if f is None else f"x {f:.2f}" for f in cells]
        )
    return rows


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
            "* extrapolated beyond what the costs were fitted to; the interval does not cover it: "
            + "; ".join(outside)
        )
    notes.append("bound: bytes of the busiest port over its line rate; nothing is faster")
    if q.gpu_memory_gb is None:
        notes.append(
            f"cluster {q.cluster} does not state gpu_memory_gb: "
            + ("nothing was left out for memory" if q.max_memory_gb is None else "the limit rules")
        )
    else:
        notes.append(
            f"memory: {q.gpu_memory_gb:g} GB a GPU, {q.reserve_gb:g} GB of them in reserve "
            "(--reserve-gb) for CUDA's context, NCCL and activations; attention and KV cache are "
            "what --other-gb says"
        )
    if any(c.memory.library == "cpu" for c in configurations):
        notes.append(
            "c: buffers of the CPU library; the GPU library's kernels do not take that shape yet"
        )
    refusals = dict.fromkeys(w.refusal for c in configurations for w in c.what_if if w.refusal)
    notes += [f"a what-if that does not apply: {text}" for text in refusals]
    return notes


def verdict_sentences(plan: CapacityPlan) -> list[str]:
    """Which configuration is the cheapest, and why each other one is not."""
    limits = " and ".join(limits_of(plan.question))
    within = f" that meets {limits}" if limits else ""
    chosen = plan.chosen
    if chosen is None:
        lines = [f"No configuration{within or ' does'}.", *_nothing_fits(plan)]
    else:
        lines = [
            f"The cheapest configuration{within}: {chosen.mode.upper()} in groups of {chosen.ep} "
            f"GPUs, {format_seconds(chosen.layer)} a layer, "
            f"{f'{chosen.sms} SMs, ' if chosen.sms else ''}"
            f"{format_bytes(chosen.memory.total)} a GPU."
        ]
    return lines + [
        f"{c.mode.upper()} EP {c.ep}: {'; '.join(c.reasons)}"
        for c in plan.configurations
        if c.reasons
    ]


def _nothing_fits(plan: CapacityPlan) -> list[str]:
    q, smallest = plan.question, plan.smallest
    if smallest is None or any(fits(c, q) for c in plan.configurations):
        return []
    if not smallest.mode:
        return [f"No EP size of {q.moe} keeps {q.weight_dtype} weights within {memory_limit(q)}."]
    return [
        f"The smallest that fits: {smallest.mode.upper()} in groups of {smallest.ep} GPUs, "
        f"{format_bytes(smallest.memory_bytes)} a GPU; there are {q.gpus} GPUs."
    ]


def as_text(plan: CapacityPlan) -> str:
    q = plan.question
    lines = [title_of(q), explanation_of(q), ""]
    lines += aligned([HEADINGS, *(row_of(c, q) for c in plan.configurations)])
    if rows := what_if_rows(plan):
        lines += ["", "What if: how many times as long a layer takes", *aligned(rows)]
    if plan.crossovers:
        lines += ["", "LL or HT", *(f"  {crossover_sentence(x)}" for x in plan.crossovers)]
    first, *others = verdict_sentences(plan)
    lines += ["", first, *(f"  {text}" for text in others), ""]
    lines += notes_of(plan)
    return "\n".join(lines) + "\n"


def as_markdown(plan: CapacityPlan) -> str:
    q = plan.question
    lines = [f"# {title_of(q)}", "", explanation_of(q) + ".", ""]
    lines += markdown([HEADINGS, *(row_of(c, q) for c in plan.configurations)])
    first, *others = verdict_sentences(plan)
    lines += ["", f"**{first}**", "", *(f"- {text}" for text in others)]
    if rows := what_if_rows(plan):
        lines += ["", "## What if", "", "How many times as long a layer takes.", ""]
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
    *("step_seconds", "share_of_step", "exposed_seconds"),
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
            c.step(q),
            c.share(q),
            c.exposed(q),
            c.memory.total,
            c.memory.buffers,
        ]
        cells += [c.memory.outputs, c.memory.weights, c.verdict]
        cells += [getattr(o, name) for o in (c.dispatch, c.combine) for name in CSV_OP_FIELDS]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()
