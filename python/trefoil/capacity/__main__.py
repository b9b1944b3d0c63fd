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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trefoil.capacity.plan import (
    DEFAULT_CONTEXT,
    LOADS,
    CapacityPlan,
    Configuration,
    PlanError,
    Question,
    Smallest,
    WhatIf,
    configuration_of,
    crossover_of,
    fits,
    judge,
    sample_of,
    to_json,
    why_no_step,
)
from trefoil.capacity.plan_text import as_csv, as_markdown, as_text
from trefoil.capacity.step import Gpu
from trefoil.capacity.whole_model import DTYPE_OF_BITS, KV_BYTES, WEIGHT_BYTES, model_of
from trefoil.outputs import check_file, check_folder, whole_folder
from trefoil.sentence_parser import SentenceParser
from trefoil.sweeping import Outcome, Point, SweepError, find_program, link_loads, run_point, sweep
from trefoil.verb import run

# Options of simulate that are passed on as they are, and those that are what-ifs.
PASSED = ("dispatch_dtype", "combine", "variant", "seed", "physical_experts", "engine", "sms")
WHAT_IFS = (
    ("rail_fail", "I,...", "these rails are down on every node"),
    ("slow_rail", "I[:F],...", "rail I at F times its rate (default 0.5)"),
    ("nic_fail", "I,...", "network port I is down"),
    ("slow_nic", "I[:F],...", "network port I at F times its rate"),
    ("slow_nvlink", "I[:F],...", "NVLink of rank I at F times its rate"),
    ("straggler", "I[:F],...", "SMs of rank I at F times their rate"),
    ("late", "I[:US],...", "rank I starts US microseconds late"),
    ("beside", "I-J[:GBS],...", "others copy from rank I to J; products: on the SMs left"),
    ("skew_us", "X", "each rank starts within X microseconds"),
    ("oversubscribe", "X", "leaf switches have X times less to the spines"),
    ("zipf", "S", "experts popular by Zipf's law with exponent S"),
    ("trace", "FILE", "routing of a file, where its ranks are the EP group"),
)
CROSSOVER_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
OTHERS_TOKENS = 1024
RESERVE = 0.1  # of a GPU's memory, as serving engines leave by default
# LL and HT by the costs of one library: ours within a node, where it runs, DeepEP's across nodes.
OF_ONE_LIBRARY = {
    True: {"ll": {"costs": "trefoil-ll-h200"}, "ht": {"costs": "trefoil-ht-h200"}},
    False: {
        "ll": {"costs": "deepep-ll-h100", "variant": "per-expert"},
        "ht": {"costs": "deepep-ht-h100"},
    },
}


def parser() -> argparse.ArgumentParser:
    p = SentenceParser(
        prog="trefoil plan",
        description="Plans capacity for an MoE model on a cluster that need not be at hand: for "
        "each mode and EP size tokens a second, time of a step, the share of dispatch and combine "
        "in it, memory of a GPU and the largest batch that fits; where HT overtakes LL; what "
        "failures would cost; and the cheapest configuration that meets the limits, and why the "
        "others do not.",
        epilog="trefoil plan --closed-form takes port loads alone, without Python and without a "
        "simulation: see trefoil plan --closed-form --help. docs/plan.md explains the table.",
    )
    p.add_argument("--cluster", default="dgx-h100", metavar="NAME", help="preset or file")
    p.add_argument("--moe", default="deepseek-v3", metavar="NAME", help="preset or file")
    p.add_argument(
        "--load", choices=LOADS, default="decode", help="what a step does (default decode)"
    )
    p.add_argument("--tokens", type=_positive, metavar="N", help="of a GPU (default: the load's)")
    p.add_argument(
        "--context",
        type=_positive,
        default=DEFAULT_CONTEXT,
        metavar="N",
        help="tokens of a sequence, prompt and output (prefill: of a prompt; default 4096)",
    )
    p.add_argument("--gpus", metavar="G", help="that there are (default: as many as experts)")
    p.add_argument(
        "--ep",
        metavar="LIST",
        help="EP sizes: A..B doubles, or a list A,B; with redundant copies where they do not "
        "divide the experts; GPUs outside the last whole group are idle",
    )
    p.add_argument(
        "--mode", default="ll,ht", metavar="LIST", help="ll, ht, or with layouts (default ll,ht)"
    )
    need = p.add_argument_group("limits and what the caller knows")
    need.add_argument("--max-us", type=_number, metavar="US", help="most that a layer may take")
    need.add_argument(
        "--max-step-ms",
        type=_number,
        metavar="MS",
        help="most time per output token, or in prefill to the first one",
    )
    need.add_argument("--max-sms", type=_positive, metavar="N", help="that an operation may take")
    need.add_argument(
        "--max-memory-gb",
        type=_number,
        metavar="GB",
        help="of a GPU, all in all (default: what its memory less the reserve is)",
    )
    need.add_argument(
        "--compute-us",
        type=_number,
        metavar="US",
        help="a layer's other work in one pass (default: the roofline's)",
    )
    need.add_argument(
        "--gpu-hour",
        type=_number,
        metavar="USD",
        help="price of a GPU for an hour: adds USD a million tokens",
    )
    need.add_argument(
        "--gpu-watts",
        type=_number,
        metavar="W",
        help="power of a GPU with its share of host, network and cooling: adds kWh",
    )
    need.add_argument(
        "--weight-dtype",
        choices=WEIGHT_BYTES,
        help="of products' weights, fp4 of routed experts alone (default: as published)",
    )
    need.add_argument(
        "--kv-dtype", choices=KV_BYTES, default="bf16", help="of the KV cache (default bf16)"
    )
    need.add_argument(
        "--reserve-gb",
        type=_number,
        metavar="GB",
        help="of a GPU's memory that stays free (default: a tenth)",
    )
    need.add_argument(
        "--other-gb", type=_number, default=0.0, metavar="GB", help="what else a GPU holds"
    )
    what = p.add_argument_group("what if (each is tried alone, beside the plan)")
    for name, metavar, text in WHAT_IFS:
        what.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=text)
    how = p.add_argument_group("how")
    how.add_argument("--dispatch-dtype", metavar="T", help="bf16 (default) or fp8")
    how.add_argument("--combine", metavar="HOW", help="ll: exact (default) or partial")
    how.add_argument("--variant", metavar="V", help="ours (default) or per-expert")
    how.add_argument("--physical-experts", type=_positive, metavar="E", help="redundant copies")
    how.add_argument(
        "--grouped",
        action=argparse.BooleanOptionalAction,
        help="a token's experts of so many groups, as the model has it (default: if it has groups)",
    )
    how.add_argument("--seed", type=_whole, metavar="S", help="of the generated routing")
    how.add_argument("--sms", type=_positive, metavar="N", help="of an operation")
    how.add_argument("--engine", metavar="NAME", help="auto, simgrid, queues or closed-form")
    how.add_argument("--costs-ll", metavar="NAME", help="cost record of LL")
    how.add_argument("--costs-ht", metavar="NAME", help="cost record of HT")
    how.add_argument(
        "--crossover",
        action=argparse.BooleanOptionalAction,
        help="LL against HT at 1 to 4096 tokens (default: with -o and --json)",
    )
    how.add_argument(
        "--details", action="store_true", help="also times of a layer, ports, SMs and notes"
    )
    how.add_argument("--jobs", type=_positive, metavar="J", help="at once (default: the cores)")
    how.add_argument("--resume", type=Path, metavar="FILE", help="keep points here, go on from it")
    how.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="plan.{json,csv,md} and pictures"
    )
    how.add_argument("--closed-form", action="store_true", help="see below")
    how.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 1 or more")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 0 or more")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text}: expected a number, 0 or more and at most 1e12")
    return value


def parse_sizes(text: str) -> list[int]:
    """ "8..64" doubles from 8 to 64; "8,24" is itself."""
    first, dots, last = text.partition("..")
    try:
        if not dots:
            sizes = [int(word) for word in text.split(",")]
        else:
            sizes, size = [], int(first)
            while 0 < size <= int(last):
                sizes.append(size)
                size *= 2
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise PlanError(f"--ep {text} is not like 8..64 or 8,24")
    return list(dict.fromkeys(sizes))


def _without_what_ifs(point: Point) -> dict[str, Any]:
    return {k: v for k, v in point.items() if k not in {name for name, _, _ in WHAT_IFS}}


class Planner:
    """One run: the question, and the points that it asks simulate about."""

    def __init__(self, options: argparse.Namespace, program: str) -> None:
        self.options = options
        self.program = program
        self.base: dict[str, Any] = {"cluster": options.cluster, "moe": options.moe}
        for name in PASSED:
            value = getattr(options, name)
            if value is not None:
                self.base[name] = value
        if options.grouped:
            self.base["grouped"] = True
        self.costs = {"ll": options.costs_ll, "ht": options.costs_ht}
        self.question = self._question()

    def _probe(self) -> dict[str, Any]:
        """What the presets say: one tiny point in closed form."""
        point = {**self.base, "gpus": 1, "tokens": 1, "engine": "closed-form"}
        text, refusal = run_point(self.program, point)
        if refusal:
            raise PlanError(refusal)
        return json.loads(text)

    def _question(self) -> Question:
        o, facts = self.options, self._probe()
        self.physical = facts["physical_experts"]
        self.gpus_per_node, self.most_gpus = facts["gpus_per_node"], facts["max_gpus"]
        most = min(self.physical, facts["max_gpus"])
        try:
            gpus = int(o.gpus) if o.gpus else most
        except ValueError:
            raise PlanError(
                f"--gpus {o.gpus}: expected one number, the GPUs that there are; "
                "EP sizes go to --ep"
            ) from None
        if not 1 <= gpus <= facts["max_gpus"]:
            raise PlanError(
                f"--gpus {gpus}: cluster {facts['cluster']} speaks for 1 to {facts['max_gpus']}"
            )
        modes = o.mode.split(",")
        if len({mode[:2] for mode in modes}) < len(modes):
            raise PlanError(
                f"--mode {o.mode}: one layout of each mode, as in ll-rank-major,ht-flat"
            )
        groups, chosen = facts["model"]["num_groups"], facts["model"]["topk_groups"]
        if groups and o.grouped is not False:
            self.base["grouped"] = True
        details = [f"experts of {chosen} of {groups} groups"] if "grouped" in self.base else []
        details += [f"{k.replace('_', '-')} {v}" for k, v in self.base.items() if k in PASSED]
        model, missing = model_of(facts)
        q = Question(
            cluster=facts["cluster"],
            moe=facts["moe"],
            load=o.load,
            tokens=o.tokens or LOADS[o.load][0],
            gpus=gpus,
            modes=modes,
            ep_sizes=self._ep_sizes(gpus, facts),
            moe_layers=facts["moe_layers"],
            compute_us=o.compute_us,
            max_us=o.max_us,
            max_memory_gb=o.max_memory_gb,
            max_sms=o.max_sms,
            weight_dtype=o.weight_dtype or DTYPE_OF_BITS.get(facts["model"]["weight_bits"], "bf16"),
            other_gb=o.other_gb,
            details=", ".join(details),
            gpu_memory_gb=facts["gpu_memory_gb"],
            reserve_gb=self._reserve(facts["gpu_memory_gb"]),
            gpus_per_node=facts["gpus_per_node"],
            context=o.context,
            kv_dtype=o.kv_dtype,
            max_step_ms=o.max_step_ms,
            model=model,
            missing=missing,
            gpu=self._gpu(facts),
            gpu_hour_usd=o.gpu_hour,
            gpu_watts=o.gpu_watts,
        )
        of_a_step = {"--max-step-ms": o.max_step_ms, "--gpu-hour": o.gpu_hour}
        for option, value in {**of_a_step, "--gpu-watts": o.gpu_watts}.items():
            if value is not None and not q.is_whole:
                raise PlanError(f"{option}: {why_no_step(q)}; --compute-us would say it")
        return q

    @staticmethod
    def _gpu(facts: dict[str, Any]) -> Gpu | None:
        hbm, bf16 = facts["gpu_hbm_gb_per_s"], facts["gpu_bf16_tflops"]
        return Gpu(hbm, bf16, facts["gpu_fp8_tflops"]) if hbm and bf16 else None

    def _reserve(self, memory_gb: float | None) -> float:
        said = self.options.reserve_gb
        if memory_gb is None:
            if said is not None:
                raise PlanError("--reserve-gb: the cluster does not state gpu_memory_gb")
            return 0.0
        if said is not None and said >= memory_gb:
            raise PlanError(f"--reserve-gb {said:g}: a GPU has {memory_gb:g} GB")
        return round(memory_gb * RESERVE, 1) if said is None else said

    def _ep_sizes(self, gpus: int, facts: dict[str, Any]) -> list[int]:
        """As asked for; else doubling from a node up, as far as experts and GPUs go."""
        said = "physical_experts" in self.base
        most = min(self.physical, gpus)
        if self.options.ep:
            sizes = parse_sizes(self.options.ep)
            for size in sizes:
                if size > gpus:
                    raise PlanError(f"--ep {size}: there are {gpus} GPUs")
                if size > self.physical and said:
                    raise PlanError(
                        f"--ep {size}: an EP size is at most the {self.physical} physical experts; "
                        "without --physical-experts there are as many as are needed"
                    )
            return sizes
        size = min(facts["gpus_per_node"], most)
        sizes = []
        while size <= most:
            sizes.append(size)
            size *= 2
        return sizes if most in sizes else [*sizes, most]

    def point(self, mode: str, ep: int, tokens: int, **more: Any) -> Point:
        costs = self.costs["ht" if mode.startswith("ht") else "ll"]
        point = {**self.base, "mode": mode, "gpus": ep, "ep": ep, "tokens": tokens, **more}
        if costs:
            point["costs"] = costs
        if "physical_experts" not in self.base and self.physical % ep:
            # Redundant copies, as few as let every GPU have as many experts.
            point["physical_experts"] = -(-self.physical // ep) * ep
        if "trace" in point:
            del point["tokens"]
            point.pop("grouped", None)  # a trace has its own
        if mode.startswith("ht"):
            point.pop("combine", None)  # HT has one way to combine
        return point

    def sweep(self, points: Iterable[Point], label: str) -> list[Outcome]:
        return sweep(
            points,
            results=self.options.resume,
            program=self.program,
            jobs=self.options.jobs,
            label=label,
        )

    # ---- The parts of a plan ----

    def plan(self) -> CapacityPlan:
        q = self.question
        pairs = [(mode, ep) for mode in q.modes for ep in q.ep_sizes]
        outcomes = self.sweep([self.point(m, e, q.tokens) for m, e in pairs], "configurations")
        for o in outcomes:
            if o.refusal:
                raise PlanError(o.refusal)
        plan = CapacityPlan(q, [configuration_of(o.answer, q) for o in outcomes])
        self._what_if(plan, pairs)
        self._largest(plan, pairs)
        judge(plan)
        if not any(fits(c, q) for c in plan.configurations):
            plan.smallest = self._smallest(q)
        elif self._wants_crossover():
            self._crossovers(plan)
        if plan.pictured is not None and self._is_kept() and self.options.engine != "closed-form":
            mode, ep = pairs[plan.pictured]
            plan.links = link_loads(self.point(mode, ep, q.tokens), self.program)
        return plan

    def _is_kept(self) -> bool:
        """The plan goes to files or programs: whole, whatever the time."""
        return bool(self.options.output or self.options.json)

    def _wants_crossover(self) -> bool:
        said = self.options.crossover
        return self._is_kept() if said is None else said

    def _largest(self, plan: CapacityPlan, pairs: Sequence[tuple[str, int]]) -> None:
        """The most tokens a GPU that fit: a line through what is known, asked again until the
        sizing functions agree. Counted where a batch is KV cache."""
        q = plan.question
        if q.model is None or q.usable_gb is None or q.load != "decode":
            return
        known = [[(q.tokens, c.memory.total)] for c in plan.configurations]
        for turn in range(4):
            guesses = [
                None if c.memory.refused else next_guess(points, q.usable_gb * 1e9, fixed_of(c))
                for c, points in zip(plan.configurations, known, strict=True)
            ]
            asked = [(i, n) for i, n in enumerate(guesses) if n is not None]
            if not asked or turn == 3:
                break
            answers = self.sweep(
                [{**self.point(*pairs[i], n), "engine": "closed-form"} for i, n in asked],
                "largest batch",
            )
            for (i, n), outcome in zip(asked, answers, strict=True):
                c = configuration_of(outcome.answer, q) if outcome.answer else None
                refused = c is None or c.memory.refused
                known[i].append((n, REFUSED if refused else c.memory.total))
        for c, points in zip(plan.configurations, known, strict=True):
            fitting = [n for n, total in points if total <= q.usable_gb * 1e9]
            c.max_tokens = None if c.memory.refused else max(fitting, default=0)

    def _smallest(self, q: Question) -> Smallest:
        """The EP sizes beyond those that were asked for, doubling, until one fits: by the closed
        form, which knows memory as the replay does."""
        ep = 2 * max(q.ep_sizes)
        while ep <= min(self.most_gpus, self.physical):
            for mode in q.modes:
                point = {**self.point(mode, ep, q.tokens), "engine": "closed-form"}
                text, refusal = run_point(self.program, _without_what_ifs(point))
                if refusal:
                    continue
                c = configuration_of(json.loads(text), q)
                if not c.memory.refused and fits(c, q):
                    return Smallest(c.mode, ep, c.memory.total)
            ep *= 2
        return Smallest("", 0, 0)

    def _what_if(self, plan: CapacityPlan, pairs: Sequence[tuple[str, int]]) -> None:
        given = [(n, getattr(self.options, n)) for n, _, _ in WHAT_IFS if getattr(self.options, n)]
        tokens = self.question.tokens
        cases = [
            (c, name, value, self.point(mode, ep, tokens, **{name: value}))
            for c, (mode, ep) in zip(plan.configurations, pairs, strict=True)
            for name, value in given
        ]
        outcomes = self.sweep([case[3] for case in cases], "what if")
        for (c, name, value, _), outcome in zip(cases, outcomes, strict=True):
            shown = f"{name.replace('_', '-')} {Path(value).name if name == 'trace' else value}"
            answer = outcome.answer
            if answer is None:
                c.what_if.append(WhatIf(shown, None, None, f"EP {c.ep}: {outcome.refusal}"))
            else:
                seconds = answer["seconds"]
                c.what_if.append(WhatIf(shown, seconds, seconds / c.layer))

    def _crossovers(self, plan: CapacityPlan) -> None:
        """LL and HT at more and more tokens: for the pictured EP size all of them, for the others
        until HT is faster or OTHERS_TOKENS is reached."""
        q = plan.question
        ll = next((m for m in q.modes if m.startswith("ll")), None)
        ht = next((m for m in q.modes if m.startswith("ht")), None)
        if not ll or not ht or plan.pictured is None:
            return
        shown = plan.configurations[plan.pictured].ep
        open_sizes = [
            ep for ep in q.ep_sizes if ep in {c.ep for c in plan.configurations if fits(c, q)}
        ]
        for tokens in sorted({*CROSSOVER_TOKENS, q.tokens}):
            if tokens > max(OTHERS_TOKENS, q.tokens):
                open_sizes = [shown]
            points = [self._compared(m, ep, tokens) for ep in open_sizes for m in (ll, ht)]
            outcomes = self.sweep(points, f"LL or HT at {tokens} tokens")
            plan.samples += [sample_of(o.answer) for o in outcomes if o.answer]
            open_sizes = [ep for ep in open_sizes if ep == shown or not self._crossed(plan, ep)]
        found = (crossover_of(plan.samples, ep) for ep in q.ep_sizes)
        plan.crossovers = [x for x in found if x is not None]

    def _compared(self, mode: str, ep: int, tokens: int) -> Point:
        """A point of LL against HT: by one library, unless costs or rows were said."""
        point = self.point(mode, ep, tokens)
        if any(self.costs.values()) or "variant" in point or point.get("engine") == "closed-form":
            return point
        return {**point, **OF_ONE_LIBRARY[ep <= self.gpus_per_node][mode[:2]]}

    @staticmethod
    def _crossed(plan: CapacityPlan, ep: int) -> bool:
        x = crossover_of(plan.samples, ep)
        return x is not None and (x.tokens is not None or x.faster == "ht")


REFUSED = 1 << 62


def fixed_of(c: Configuration) -> int:
    """Memory that does not grow with the batch."""
    m = c.memory
    return m.weights + m.attention + m.shared + m.embeddings + m.other


def next_guess(points: Sequence[tuple[int, int]], usable: float, fixed: int) -> int | None:
    """The number of tokens to ask about next; None: the largest that fits is known well enough (to
    1 %), or nothing fits. Points are (tokens, memory in all)."""
    fitting = max((p for p in points if p[1] <= usable), default=(0, fixed))
    over = min((p for p in points if p[1] > usable), default=None)
    if fixed >= usable:
        return None
    if over is not None and over[0] <= max(fitting[0] * 1.01, fitting[0] + 1):
        return None
    if over is not None and over[1] < REFUSED:
        slope = (over[1] - fitting[1]) / (over[0] - fitting[0])
    elif fitting[0]:
        slope = (fitting[1] - fixed) / fitting[0]
    else:
        return None if over is None else over[0] // 2 or None
    guess = fitting[0] + int((usable - fitting[1]) / slope)
    if over is not None:
        guess = min(guess, over[0] - 1)
    return guess if guess > fitting[0] else None


def write_files(plan: CapacityPlan, folder: Path) -> list[Path]:
    """plan.json, plan.csv, plan.md, and the pictures as SVG and PNG where matplotlib is there."""
    with whole_folder(folder) as staging:
        return [folder / path.name for path in _write_into(plan, staging)]


def _write_into(plan: CapacityPlan, folder: Path) -> list[Path]:
    texts = {
        "plan.json": json.dumps(to_json(plan), indent=1) + "\n",
        "plan.csv": as_csv(plan),
        "plan.md": as_markdown(plan),
    }
    written = []
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    try:
        from trefoil.capacity import plan_plots as capacity_plots
    except ModuleNotFoundError as missing:
        print(f"trefoil plan: no pictures: Python lacks the module {missing.name}", file=sys.stderr)
        return written
    return written + capacity_plots.save_all(plan, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    try:
        if options.output:
            check_folder(options.output)
        if options.resume:
            check_file(options.resume)
        plan = Planner(options, find_program()).plan()
        written = write_files(plan, options.output) if options.output else []
    except PlanError as error:
        p.error(str(error))
    except (SweepError, OSError) as error:
        print(f"trefoil plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(to_json(plan), indent=1))
    else:
        print(as_text(plan, details=options.details), end="")
        for path in written:
            print(path)
    return 0 if plan.chosen else 1


if __name__ == "__main__":
    sys.exit(run("plan", main))
