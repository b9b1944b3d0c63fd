"""The command line of `trefoil plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from trefoil.capacity.compute_costs import DEFAULT, ROOFLINE
from trefoil.capacity.question import LOADS, PlanError
from trefoil.capacity.schedule import OVERLAPS, SCHEDULES
from trefoil.capacity.serving import ENGINES
from trefoil.capacity.terms import ATTENTION_DTYPES, preset
from trefoil.capacity.whole_model import KV_BYTES, WEIGHT_BYTES
from trefoil.sentence_parser import SentenceParser

# Options of simulate that are passed on as they are, and those that are what-ifs.
PASSED = (
    *("dispatch_dtype", "combine", "variant", "seed", "physical_experts", "placement"),
    *("engine", "sms"),
)
PLACEMENTS = ("auto", "in-turn", "global", "hierarchical")
WHAT_IFS = (
    ("rail_fail", "I,...", "these rails are down on every node"),
    ("slow_rail", "I[:F],...", "rail I at F times its rate (default 0.5)"),
    ("nic_fail", "I,...", "network port I is down"),
    ("slow_nic", "I[:F],...", "network port I at F times its rate"),
    ("slow_nvlink", "I[:F],...", "NVLink of rank I at F times its rate"),
    ("straggler", "I[:F],...", "SMs of rank I at F times their rate"),
    ("late", "I[:US],...", "rank I starts US microseconds late"),
    ("background", "I-J[:GBS],...", "others copy from rank I to J; products: on the SMs left"),
    ("skew_us", "X", "each rank starts within X microseconds"),
    ("oversubscribe", "X", "leaf switches have X times less to the spines"),
    ("zipf", "S", "experts popular by Zipf's law with exponent S"),
    ("trace", "FILE", "routing of a file, where its ranks are the EP group"),
)

UTILISATION = 0.85  # room for what arrives at random


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
    p.add_argument("--load", choices=LOADS, help="what a step does (default decode)")
    p.add_argument(
        "--tokens",
        metavar="N",
        help="of a GPU (default: the load's); several, as in 1..512 or 64,96, are a search",
    )
    p.add_argument(
        "--context",
        metavar="N",
        help="tokens of a sequence, prompt and output (prefill: of a prompt; default 4096); "
        "several are a search",
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
        help="a layer's other work in one pass (default: by --compute-costs)",
    )
    need.add_argument(
        "--compute-costs",
        default=DEFAULT,
        metavar="NAME",
        help=f"compute record, a file of tools/measure_compute, or {ROOFLINE} (default {DEFAULT})",
    )
    need.add_argument(
        "--overlap",
        default=",".join(OVERLAPS),
        metavar="LIST",
        help=f"schedules of a step to replay, the fastest counts: {', '.join(SCHEDULES)} "
        f"(default: {', '.join(OVERLAPS)})",
    )
    need.add_argument(
        "--gpu-hour",
        type=_number,
        metavar="USD",
        help="price of a GPU for an hour: adds USD a million tokens",
    )
    need.add_argument(
        "--budget-hour",
        type=_number,
        metavar="USD",
        help="that the GPUs may cost in an hour, at --gpu-hour: as --gpus",
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
        "--cached",
        type=_number,
        default=0.0,
        metavar="X",
        help="prefill: share of a prompt whose keys and values are there already (default 0)",
    )
    need.add_argument(
        "--drafts",
        type=_whole,
        metavar="N",
        help="tokens that multi-token prediction drafts for a sequence in a step (default "
        f"{preset('drafts')})",
    )
    need.add_argument(
        "--acceptance",
        type=_number,
        metavar="X",
        help=f"share of draft tokens that are taken (default {preset('acceptance'):g})",
    )
    need.add_argument(
        "--attention-dtype",
        choices=ATTENTION_DTYPES,
        help=f"of attention's products in decode (default {preset('attention_dtype')})",
    )
    need.add_argument(
        "--attention-tp",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs of a node that compute a sequence's attention together, a part of the heads "
        "each (default 1: data-parallel attention)",
    )
    need.add_argument(
        "--fp4-rate",
        type=_number,
        metavar="X",
        help=f"rate of products with fp4 weights over fp8's (default: as the cluster's "
        f"GPUs, {preset('fp4_rate'):g} where they have none in fp4)",
    )
    need.add_argument(
        "--imbalance",
        type=_number,
        metavar="X",
        help="rows of the busiest GPU's experts over the mean (default of decode "
        f"{preset('imbalance'):g}, with EPLB; 1: balanced)",
    )
    need.add_argument(
        "--prefill-wait",
        type=_number,
        metavar="X",
        help="a prefill step's time over that with equal experts (default "
        f"{preset('prefill_wait'):g}, with EPLB; 1 where --imbalance or a routing is said)",
    )
    need.add_argument(
        "--batch-imbalance",
        type=_number,
        metavar="X",
        help=f"attention of the busiest GPU over the mean (default {preset('batch_imbalance'):g})",
    )
    need.add_argument(
        "--interference",
        type=_number,
        metavar="X",
        help="speed of prefill's compute while communication runs beside it, SMs aside (default "
        f"{preset('interference'):g}; 1: as alone)",
    )
    need.add_argument(
        "--host-ms",
        type=_number,
        metavar="MS",
        help=f"of a step in which GPUs wait for the engine (default {preset('host_ms'):g})",
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
    fleet = p.add_argument_group("a fleet for a traffic: GPUs for prefill and for decode")
    fleet.add_argument("--requests-per-s", type=_number, metavar="R", help="that arrive")
    fleet.add_argument("--input-tokens", type=_positive, metavar="N", help="of a request")
    fleet.add_argument("--output-tokens", type=_positive, metavar="N", help="of a request")
    fleet.add_argument(
        "--max-ttft-ms", type=_number, metavar="MS", help="most time to the first token"
    )
    fleet.add_argument(
        "--utilisation",
        type=_number,
        metavar="X",
        help=f"most that groups may be used (default {UTILISATION:g})",
    )
    what = p.add_argument_group("what if (each is tried alone, beside the plan)")
    for name, metavar, text in WHAT_IFS:
        what.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=text)
    how = p.add_argument_group("how")
    how.add_argument(
        "--dispatch-dtype",
        metavar="T",
        help="bf16, fp8 or fp4 (default: fp8 as the weights, else bf16)",
    )
    how.add_argument("--combine", metavar="HOW", help="ll: exact (default) or partial")
    how.add_argument("--variant", metavar="V", help="ours (default), per-expert or rails")
    how.add_argument("--physical-experts", type=_positive, metavar="E", help="redundant copies")
    how.add_argument(
        "--placement",
        choices=PLACEMENTS,
        help="of experts and their copies: EPLB's global or hierarchical policy, or in turn "
        "(default auto: hierarchical where nodes divide the model's groups of experts)",
    )
    how.add_argument(
        "--grouped",
        action=argparse.BooleanOptionalAction,
        help="a token's experts of so many groups, as the model has it (default: if it has groups)",
    )
    how.add_argument("--seed", type=_whole, metavar="S", help="of the generated routing")
    how.add_argument("--sms", type=_positive, metavar="N", help="of an operation")
    how.add_argument("--engine", metavar="NAME", help="auto, simgrid, fair, queues or closed-form")
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
    how.add_argument(
        "--commands", choices=ENGINES, help="also the command line of the chosen configuration"
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


def gpus_of(o: argparse.Namespace) -> int | None:
    """That there are, or that the budget pays; None: nothing says it."""
    try:
        said = int(o.gpus) if o.gpus else None
    except ValueError:
        raise PlanError(
            f"--gpus {o.gpus}: expected one number, the GPUs that there are; EP sizes go to --ep"
        ) from None
    if o.budget_hour is None:
        return said
    if not o.gpu_hour:
        raise PlanError("--budget-hour: the price of a GPU is not known: --gpu-hour")
    paid = int(o.budget_hour / o.gpu_hour)
    if paid < 1:
        raise PlanError(f"--budget-hour {o.budget_hour:g}: one GPU costs {o.gpu_hour:g}")
    return paid if said is None else min(said, paid)


def parse_sizes(text: str, option: str = "--ep") -> list[int]:
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
        raise PlanError(f"{option} {text} is not like 8..64 or 8,24: whole numbers, 1 or more")
    return list(dict.fromkeys(sizes))
