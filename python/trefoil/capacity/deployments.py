"""Published deployments against what the planner predicts for them: validate/data/deployments.json.

python -m trefoil.capacity.deployments [--write docs/deployments.md]

Predicted with presets, uniform routing, DeepEP's costs, the default compute record and the terms
of terms.json; nothing is fitted to these rows, one term is the ratio of two of them. A row may
state terms of its own account. Load "mixed" is of GPUs that do both in one step: a step of decode
is longer by a prompt where any GPU of the group has one, since all wait for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.capacity.configuration import Configuration
from trefoil.capacity.options import parser
from trefoil.capacity.planner import Planner
from trefoil.capacity.schedule import OVERLAPS
from trefoil.capacity.terms import presets
from trefoil.inputs import read_text
from trefoil.places import measurements
from trefoil.sentence_parser import SentenceParser
from trefoil.sweeping import find_program
from trefoil.table import markdown

MODES = {"decode": "ll", "prefill": "ht"}
WORST = 0.15  # errors beyond it have their reasons named
MIXED_PREFILL = 8192  # tokens a GPU of a prefill step in mixed rows: DeepEP's normal kernels' range


# Terms in the order in which they are added to the kernels: what the page calls them, and the
# fields of a row or options that they are, with their value in kernels alone.
TERMS: dict[str, dict[str, Any]] = {
    "draft tokens": {"drafts": 0, "acceptance": None},
    "schedule": {"overlap": ",".join(OVERLAPS)},
    "attention in fp8": {"attention_dtype": "bf16"},
    "products in fp4": {"fp4_rate": 1},
    "dispatch in fp4": {"dispatch_dtype": "fp8"},
    "interference": {"interference": 1},
    "experts' imbalance": {"imbalance": 1, "prefill_wait": None},
    "lengths' imbalance": {"batch_imbalance": 1},
    "engine": {"host_ms": 0},
}


@dataclass(frozen=True)
class Predicted:
    row: dict[str, Any]
    number: int  # of the row on the page, from 1
    kernels: float  # tokens a second without terms
    effects: dict[str, float]  # of each term on top of those before it: factor of the rate less 1
    configuration: Configuration
    tokens_per_second: float
    low: float  # of the step's interval
    high: float

    @property
    def error(self) -> float:
        return self.tokens_per_second / self.row["tokens_per_second"] - 1


def load_rows() -> dict[str, Any]:
    return json.loads(read_text(measurements()[0] / "deployments.json"))


def arguments_of(row: dict[str, Any], terms: Sequence[str] = tuple(TERMS)) -> list[str]:
    """The row with these terms as options of trefoil plan."""
    fields = ("moe", "cluster", "load", "ep", "tokens", "context", "weight_dtype", "kv_dtype")
    words = [f"--{name.replace('_', '-')}={row[name]}" for name in fields]
    words += [f"--gpus={row['ep']}", f"--mode={MODES[row['load']]}", "--no-crossover"]
    words.append(f"--physical-experts={row['physical_experts']}")
    words += [f"--cached={row['cached']}"] if "cached" in row else []
    row = {"dispatch_dtype": "fp8", **row}
    for name, fields in TERMS.items():
        for field, without in fields.items():
            value = row.get(field) if name in terms else without
            words += [] if value is None else [f"--{field.replace('_', '-')}={value}"]
    costs = {"ll": ["--costs-ll=deepep-ll-h100", "--variant=per-expert"]}
    return words + costs.get(MODES[row["load"]], ["--costs-ht=deepep-ht-h100"])


def loads_of(row: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """The row as rows of one load, each with its tokens for one of the row's."""
    if row["load"] != "mixed":
        return [(1.0, row)]
    of_prefill = {"load": "prefill", "tokens": MIXED_PREFILL, "context": row["input_tokens"]}
    own = min(1.0, row["tokens"] / row["output_tokens"])  # a GPU's chance of a prompt in a step
    share = (1 - (1 - own) ** row["ep"]) * row["input_tokens"] / row["tokens"]
    return [(1.0, {**row, "load": "decode"}), (share, {**row, **of_prefill, "drafts": 0})]


@dataclass(frozen=True)
class Rate:
    """Tokens a second of a GPU, of one load."""

    configuration: Configuration
    likely: float
    low: float  # of the step's interval
    high: float


def rate_of(account: str, words: Sequence[str], program: str, resume: Path) -> Rate:
    planner = Planner(parser().parse_args([*words, f"--resume={resume}"]), program)
    q = planner.question
    c = planner.configurations(q)[0]
    rate = c.tokens_per_second(q)
    if rate is None:
        raise ValueError(f"{account}: no step is known")
    low, high = (q.tokens_out / t for t in reversed(c.step_interval(q) or (c.step(q),) * 2))
    return Rate(c, rate, low, high)


def predict(row: dict[str, Any], number: int, program: str, resume: Path) -> Predicted:
    """resume: a file that keeps the points of all rows."""
    names, loads = list(TERMS), loads_of(row)
    known: dict[tuple[str, ...], Rate] = {}  # terms that a row does not have change nothing

    def rate(one: dict[str, Any], terms: Sequence[str]) -> Rate:
        words = arguments_of(one, terms)
        if (key := tuple(words)) not in known:
            known[key] = rate_of(row["account"], words, program, resume)
        return known[key]

    def together(rates: Sequence[Rate], end: str) -> float:
        return 1 / sum(n / getattr(r, end) for (n, _), r in zip(loads, rates, strict=True))

    steps = [[rate(one, names[:n]) for _, one in loads] for n in range(len(names) + 1)]
    rates = [together(step, "likely") for step in steps]
    effects = {name: rates[n + 1] / rates[n] - 1 for n, name in enumerate(names)}
    low, high = (together(steps[-1], end) for end in ("low", "high"))
    c = steps[-1][0].configuration
    return Predicted(row, number, rates[0], effects, c, rates[-1], low, high)


def predict_all(rows: Sequence[dict[str, Any]], program: str) -> list[Predicted]:
    with tempfile.TemporaryDirectory() as folder:
        points = Path(folder) / "points.jsonl"
        return [predict(row, n, program, points) for n, row in enumerate(rows, start=1)]


def mean_error(found: Sequence[Predicted]) -> float:
    return sum(abs(p.error) for p in found) / len(found)


def by_load(found: Sequence[Predicted]) -> str:
    """ "decode 9.0%, prefill 30.0%" """
    loads = sorted({p.row["load"] for p in found})
    of = {load: [p for p in found if p.row["load"] == load] for load in loads}
    return ", ".join(f"{load} {mean_error(rows):.1%}" for load, rows in of.items())


def mean_error_of_kernels(found: Sequence[Predicted]) -> float:
    return sum(abs(p.kernels / p.row["tokens_per_second"] - 1) for p in found) / len(found)


def cells_of(p: Predicted) -> list[str]:
    r = p.row
    inside = "" if p.low <= r["tokens_per_second"] <= p.high else ", outside"
    return [
        str(p.number),
        r["account"],
        r["moe"],
        r["load"],
        f"{r['cluster']}, EP {r['ep']}",
        f"{r['tokens']:,}",
        f"{r['context']:,}",
        f"{r['tokens_per_second']:,.0f}",
        f"{p.tokens_per_second:,.0f} ({p.low:,.0f} to {p.high:,.0f}{inside})",
        f"{p.error:+.0%}",
    ]


EFFECT_HEADINGS = ("row", "kernels alone", "each term's effect on the rate")
HEADINGS = (
    *("row", "account", "model", "load", "machine", "tokens a GPU", "context"),
    *("published tokens/s a GPU", "predicted", "error"),
)
UNSEEN_HEADINGS = (*HEADINGS, "first predicted", "error")


def first_error(p: Predicted) -> float:
    """Of the prediction before anything was changed."""
    return p.row["first_predicted"] / p.row["tokens_per_second"] - 1


def unseen_cells_of(p: Predicted) -> list[str]:
    return [*cells_of(p), f"{p.row['first_predicted']:,.0f}", f"{first_error(p):+.0%}"]


def effects_of(p: Predicted) -> list[str]:
    """Cells of the table of terms."""
    effects = [f"{name} {e:+.0%}" for name, e in p.effects.items() if abs(e) >= 0.0005]
    error = p.kernels / p.row["tokens_per_second"] - 1
    return [str(p.number), f"{p.kernels:,.0f} ({error:+.0%})", ", ".join(effects)]


def term_lines() -> list[str]:
    """Each preset with its source."""
    lines = []
    for name, of in presets().items():
        option = "--" + name.replace("_", "-")
        lines.append(f"- `{option}` {of['value']}: {of['source']} ({of['date']})")
    return lines


def reasons_of(p: Predicted) -> str:
    r = p.row
    timing = p.configuration.timing
    said = [*r["not_modelled"], *(f"assumed: {text}" for text in r["assumed"])]
    share = f"{timing.overlap}, {1 - timing.compute_seconds / timing.seconds:.0%} waiting"
    return f"{'; '.join(said) or 'none known'} (schedule: {share})"


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Of each text the names that have it, in the order of the pairs."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(text, []).append(name)
    return found


def reason_lines(found: Sequence[Predicted]) -> list[str]:
    """Of rows that are far off, the worst first; rows with the same reasons are one line."""
    off = sorted((p for p in found if abs(p.error) > WORST), key=lambda p: -abs(p.error))
    rows = grouped((f"row {p.number} ({p.error:+.0%})", reasons_of(p)) for p in off)
    return [f"- {', '.join(names)}: {text}" for text, names in rows.items()]


OWN = "sglang-h100"
UNSEEN_REASONS = (
    "What they say of the errors:",
    "",
    "- **Prefill**: kernels agree with DeepSeek's profile to 4 %, with SGLang's to 10 %, where "
    "experts are equal; the rest is how unequal they are, which a batch's own prompts decide, and "
    "how good an engine's kernels are. Neither is known of an account beforehand.",
    "- **Few tokens** (2 a GPU): a layer takes half as long again as its kernels at their rates. "
    "The next row, with 12 sequences of 3 tokens (`ant-h20`), is 11 % off.",
    "- **Blackwell's kernels**: shares of the peaks are Hopper's; accounts of one machine, batch "
    "and dtype differ by 20 % within three months.",
)


def is_own(row: dict[str, Any]) -> bool:
    """The source of --prefill-wait is this account, in prefill with unequal experts."""
    return row["account"] == OWN and row["load"] == "prefill" and "imbalance" not in row


def page_of(data: dict[str, Any], found: Sequence[Predicted]) -> str:
    seen = [p for p in found if not p.row.get("held_out")]
    unseen = [p for p in found if p.row.get("held_out")]
    others = [p for p in seen if not is_own(p.row)]
    lines = [
        "# Published deployments against predictions",
        "",
        "Generated from `validate/data/deployments.json` by "
        "`python -m trefoil.capacity.deployments`; a test compares.",
        "Presets, uniform routing, DeepEP's costs, the compute record `deepgemm-h800`, published "
        "terms; nothing in the planner is fitted to these rows.",
        "",
        f"Mean error {mean_error(seen):.1%} of {len(seen)} rows (goal: 15 %): {by_load(seen)}.",
        "The terms were looked for with these rows at hand; each has a source and a value of its "
        f"own, but `--prefill-wait` is the ratio of two rates of `{OWN}`, whose three rows of "
        f"prefill with its own distribution do not test it. Without them: {by_load(others)}.",
        "",
        *markdown([HEADINGS, *(cells_of(p) for p in seen)]),
        "",
        "## Rows found afterwards",
        "",
        f"Mean error {mean_error(unseen):.1%} of {len(unseen)} rows: {by_load(unseen)}. "
        "Predicted before anything was changed, all were too fast: "
        f"{sum(abs(first_error(p)) for p in unseen) / len(unseen):.1%} (last columns). What has "
        "changed since has no value from these rows: `--prefill-wait`; in `mixed`, of GPUs that do "
        "both loads in one step (rates are of output tokens), that all wait where one has a "
        "prompt, each with the chance tokens a GPU over output tokens; and an engine's own "
        "milliseconds, which two accounts state.",
        "",
        *markdown([UNSEEN_HEADINGS, *(unseen_cells_of(p) for p in unseen)]),
        "",
        *UNSEEN_REASONS,
        "",
        "## Terms",
        "",
        "From the kernels alone (balanced, the fastest schedule, a token a step) to the "
        f"prediction; mean error of kernels alone {mean_error_of_kernels(found):.0%}.",
        "",
        *markdown([EFFECT_HEADINGS, *(effects_of(p) for p in found)]),
        "",
        "Defaults (`python/trefoil/capacity/terms.json`); a row's account may state its own:",
        "",
        *term_lines(),
        "",
        "## Reasons",
        "",
        "In brackets: 90 % of rows that costs were fitted to. Not modelled in rows that are off "
        f"by more than {WORST:.0%}:",
        "",
        *reason_lines(found),
    ]
    lines += ["", "## Accounts", ""]
    for name, a in data["accounts"].items():
        read = f"; {a['read']}" if "read" in a else ""
        lines.append(f"- `{name}`: {a['title']}, {a['url']}{read}")
    lines += [
        "",
        f"Left out, with reasons: {len(data['left_out'])} entries (`left_out` in the data file).",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    p = SentenceParser(
        prog="python -m trefoil.capacity.deployments",
        description="Published deployments against what the planner predicts for them.",
        formatter_class=argparse.HelpFormatter,
    )
    p.add_argument("--write", type=Path, metavar="FILE", help="to this file instead of stdout")
    path = p.parse_args(arguments).write
    data = load_rows()
    program = find_program()
    page = page_of(data, predict_all(data["rows"], program))
    if path is None:
        print(page, end="")
    else:
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
