"""Plans capacity: `trefoil plan`.

Asks `trefoil simulate` for each mode and EP size, in parallel, adds the compute of a step and what
a GPU must hold, and answers with tokens a second, latency, memory, the largest batch that fits,
where HT overtakes LL, what failures would cost, and the cheapest configuration that meets the
limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.capacity import fleet, fleet_text, search_text
from trefoil.capacity.batch_search import Search
from trefoil.capacity.options import parser
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.plan_file import to_json
from trefoil.capacity.plan_text import as_csv, as_markdown, as_text
from trefoil.capacity.planner import Planner
from trefoil.capacity.question import PlanError
from trefoil.capacity.serving import command_of
from trefoil.outputs import check_file, check_folder, whole_folder
from trefoil.sweeping import SweepError, find_program
from trefoil.verb import run


def write_files(
    texts: dict[str, str], folder: Path, draw: Callable[[Path], list[Path]]
) -> list[Path]:
    """The texts by name, and where matplotlib is there, the pictures that draw makes."""
    with whole_folder(folder) as staging:
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        written = [staging / name for name in texts]
        try:
            written += draw(staging)
        except ModuleNotFoundError as missing:
            print(
                f"trefoil plan: no pictures: Python lacks the module {missing.name}",
                file=sys.stderr,
            )
        return [folder / path.name for path in written]


def write_plan(plan: CapacityPlan, folder: Path) -> list[Path]:
    def draw(staging: Path) -> list[Path]:
        from trefoil.capacity import plan_plots

        return plan_plots.save_all(plan, staging)

    data = json.dumps(to_json(plan), indent=1) + "\n"
    texts = {"plan.json": data, "plan.csv": as_csv(plan), "plan.md": as_markdown(plan)}
    return write_files(texts, folder, draw)


def write_search(search: Search, folder: Path) -> list[Path]:
    def draw(staging: Path) -> list[Path]:
        from trefoil.capacity import search_plots

        return search_plots.save_all(search, staging)

    data = json.dumps(search_text.to_json(search), indent=1) + "\n"
    texts = {"search.json": data, "search.csv": search_text.as_csv(search)}
    return write_files(texts, folder, draw)


@dataclass(frozen=True)
class Answer:
    """What a run prints."""

    text: str
    data: dict[str, Any]
    found: bool  # something meets the limits
    written: list[Path]


def plan_answer(planner: Planner, options: argparse.Namespace) -> Answer:
    plan = planner.plan()
    text = as_text(plan, details=options.details)
    if plan.chosen and options.commands:
        text += f"\n{command_of(options.commands, plan.chosen, plan.question)}\n"
    written = write_plan(plan, options.output) if options.output else []
    return Answer(text, to_json(plan), plan.chosen is not None, written)


def search_answer(planner: Planner, options: argparse.Namespace) -> Answer:
    search = planner.search()
    text = search_text.as_text(search)
    chosen = [c for c in map(search.best, search.contexts) if c]
    if options.commands:
        for c in chosen:
            text += f"\n{command_of(options.commands, c.configuration, c.question)}\n"
    written = write_search(search, options.output) if options.output else []
    return Answer(text, search_text.to_json(search), bool(chosen), written)


def is_fleet(options: argparse.Namespace) -> bool:
    of = ("requests_per_s", "input_tokens", "output_tokens", "max_ttft_ms", "utilisation")
    return any(getattr(options, name) is not None for name in of)


def fleet_answer(options: argparse.Namespace, program: str) -> Answer:
    found = fleet.plan_fleet(options, lambda o: Planner(o, program))
    text, data = fleet_text.as_text(found), fleet.to_json(found)
    if options.commands and found.is_met:
        for part in found.parts:
            c, longest = part.candidate, found.traffic.longest
            command = command_of(options.commands, c.configuration, c.question, longest)
            text += f"\n# {part.load}: each of {part.groups} groups\n{command}\n"
    written = []
    if options.output:
        texts = {"fleet.json": json.dumps(data, indent=1) + "\n"}
        written = write_files(texts, options.output, lambda _: [])
    return Answer(text, data, found.is_met, written)


def answer_of(options: argparse.Namespace, program: str) -> Answer:
    if is_fleet(options):
        return fleet_answer(options, program)
    planner = Planner(options, program)
    return (search_answer if planner.is_search else plan_answer)(planner, options)


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    try:
        if options.output:
            check_folder(options.output)
        if options.resume:
            check_file(options.resume)
        answer = answer_of(options, find_program())
    except PlanError as error:
        p.error(str(error))
    except (SweepError, OSError) as error:
        print(f"trefoil plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answer.data, indent=1))
    else:
        print(answer.text, end="")
        for path in answer.written:
            print(path)
    return 0 if answer.found else 1


if __name__ == "__main__":
    sys.exit(run("plan", main))
