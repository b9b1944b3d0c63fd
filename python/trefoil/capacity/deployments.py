"""Published deployments against what the planner predicts for them: validate/data/deployments.json.

python -m trefoil.capacity.deployments [--write docs/deployments.md]

Predicted with presets, uniform routing, DeepEP's costs and the default compute record; nothing is
fitted to these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.capacity.configuration import Configuration
from trefoil.capacity.options import parser
from trefoil.capacity.planner import Planner
from trefoil.inputs import read_text
from trefoil.places import measurements
from trefoil.sentence_parser import SentenceParser
from trefoil.sweeping import find_program
from trefoil.table import markdown

MODES = {"decode": "ll", "prefill": "ht"}
WORST = 0.25  # errors beyond it have their reasons named


@dataclass(frozen=True)
class Predicted:
    row: dict[str, Any]
    configuration: Configuration
    tokens_per_second: float
    low: float  # of the step's interval
    high: float

    @property
    def error(self) -> float:
        return self.tokens_per_second / self.row["tokens_per_second"] - 1


def load_rows() -> dict[str, Any]:
    return json.loads(read_text(measurements()[0] / "deployments.json"))


def arguments_of(row: dict[str, Any]) -> list[str]:
    """The row as options of trefoil plan."""
    fields = ("moe", "cluster", "load", "ep", "tokens", "context", "weight_dtype", "kv_dtype")
    words = [f"--{name.replace('_', '-')}={row[name]}" for name in fields]
    words += [f"--gpus={row['ep']}", f"--mode={MODES[row['load']]}", "--no-crossover"]
    words += [f"--physical-experts={row['physical_experts']}", "--dispatch-dtype=fp8"]
    costs = {"ll": ["--costs-ll=deepep-ll-h100", "--variant=per-expert"]}
    return words + costs.get(MODES[row["load"]], ["--costs-ht=deepep-ht-h100"])


def predict(row: dict[str, Any], program: str) -> Predicted:
    planner = Planner(parser().parse_args(arguments_of(row)), program)
    q = planner.question
    (c,) = planner.configurations(q)
    rate, interval = c.tokens_per_second(q), c.step_interval(q)
    if rate is None:
        raise ValueError(f"{row['account']}: no step is known")
    low, high = (row["tokens"] / t for t in reversed(interval)) if interval else (rate, rate)
    return Predicted(row, c, rate, low, high)


def mean_error(found: Sequence[Predicted]) -> float:
    return sum(abs(p.error) for p in found) / len(found)


def cells_of(p: Predicted) -> list[str]:
    r = p.row
    inside = "" if p.low <= r["tokens_per_second"] <= p.high else ", outside"
    return [
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


HEADINGS = (
    *("account", "model", "load", "machine", "tokens a GPU", "context"),
    *("published tokens/s a GPU", "predicted", "error"),
)


def reasons_of(p: Predicted) -> str:
    r = p.row
    timing = p.configuration.timing
    said = [*r["not_modelled"], *(f"assumed: {text}" for text in r["assumed"])]
    share = f"{timing.overlap}, {1 - timing.compute_seconds / timing.seconds:.0%} waiting"
    return f"{'; '.join(said) or 'none known'} (schedule: {share})"


def page_of(data: dict[str, Any], found: Sequence[Predicted]) -> str:
    lines = [
        "# Published deployments against predictions",
        "",
        "Generated from `validate/data/deployments.json` by "
        "`python -m trefoil.capacity.deployments`; a test compares.",
        "Nothing in the planner is fitted to these rows: presets, uniform routing, DeepEP's costs, "
        "the compute record `deepgemm-h800`.",
        "",
        f"Mean error {mean_error(found):.0%} of {len(found)} rows; goal: 15 %.",
        "",
        *markdown([HEADINGS, *(cells_of(p) for p in found)]),
        "",
        "In brackets: 90 % of rows that costs were fitted to. Not modelled in rows that are off "
        f"by more than {WORST:.0%}:",
        "",
    ]
    off = sorted((p for p in found if abs(p.error) > WORST), key=lambda p: -abs(p.error))
    for p in off:
        r = p.row
        what = f"{r['account']}, {r['load']}, EP {r['ep']}, context {r['context']:,}"
        lines.append(f"- {what} ({p.error:+.0%}): {reasons_of(p)}")
    lines += ["", "## Accounts", ""]
    for name, a in data["accounts"].items():
        read = f"; {a['read']}" if "read" in a else ""
        lines.append(f"- `{name}`: {a['title']}, {a['url']}{read}")
    lines += ["", "Left out:", ""]
    lines += [f"- {x['account']}: {x['why']}" for x in data["left_out"]]
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
    page = page_of(data, [predict(row, program) for row in data["rows"]])
    if path is None:
        print(page, end="")
    else:
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
