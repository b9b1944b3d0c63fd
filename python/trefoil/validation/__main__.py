"""trefoil validate: do all legs agree, in results, in bytes, in time?

    trefoil validate                      # thousands of cases, all committed measurements: seconds
    trefoil validate --cases 100000 --seed 7
    trefoil validate --bytes --seed 1 --case 17     # who sends how much to whom, one case

results: the library under test against the reference, byte for byte, and the bytes that it counts
as sent against the plan (trefoil check --count-bytes).
bytes: routing, reference, plan and both engines of the simulator, per source, destination, tier and
phase, and per link, on the same cases. times: the committed measurements against the models, the
closed form beside (docs/check.md). Exit code 1: something disagrees, and the text says how to
see it again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from trefoil.program import SignalError, run_json
from trefoil.reference import TrefoilError
from trefoil.sentence_parser import SentenceParser
from trefoil.verb import run, show_progress

OK, FAILED, USAGE = 0, 1, 2
PARTS = ("results", "bytes", "times")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = SentenceParser(
        prog="trefoil validate",
        description="Do reference, library, plan, simulator and measurements agree? Results byte "
        "for byte, bytes on every link, times within the stated errors (docs/check.md).",
    )
    parser.add_argument("-n", "--cases", type=int, default=5000, help="random cases (default 5000)")
    parser.add_argument("-s", "--seed", type=int, default=1, help="what fixes them (default 1)")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="of the results (default 1)")
    parser.add_argument("--modes", help="as in trefoil check")
    parser.add_argument("--ranks", help="as in trefoil check")
    parser.add_argument("--library", help="the library under test (default: without a GPU)")
    parser.add_argument("--nccl", help="NCCL for it")
    parser.add_argument("--cuda", help="CUDA runtime for it")
    parser.add_argument("--gpu", action="store_true", help="the library is for GPUs")
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="bytes alone, without Python; also takes --case I and --simgrid-every N",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser.parse_args(argv)


def _results(a: argparse.Namespace) -> dict[str, Any]:
    arguments = ["check", "--cases", str(a.cases), "--seed", str(a.seed), "--jobs", str(a.jobs)]
    arguments.append("--count-bytes")
    for name in ("modes", "ranks", "library", "nccl", "cuda"):
        if getattr(a, name):
            arguments += [f"--{name}", getattr(a, name)]
    return run_json([*arguments, *(["--gpu"] if a.gpu else [])], may_fail=True)


def _bytes(a: argparse.Namespace) -> dict[str, Any]:
    arguments = ["validate", "--bytes", "--cases", str(a.cases), "--seed", str(a.seed)]
    for name in ("modes", "ranks"):
        if getattr(a, name):
            arguments += [f"--{name}", getattr(a, name)]
    return run_json(arguments, may_fail=True)


def _times() -> dict[str, Any]:
    from trefoil.validation.validated_times import GOAL_MAPE, GOAL_P90, all_times, json_of

    start = time.monotonic()
    sets = [json_of(t) for t in all_times()]
    return {
        "ok": all(s["agrees"] for s in sets),
        "sets": sets,
        "goal": {"mape_percent": GOAL_MAPE, "p90_percent": GOAL_P90},
        "seconds": round(time.monotonic() - start, 3),
    }


def validate(a: argparse.Namespace) -> dict[str, Any]:
    """What --json prints; a part that was not asked for is null."""
    answer: dict[str, Any] = {"format": "trefoil-validate", "version": 1, "ok": True}
    for part in PARTS:
        show_progress(f"{part} ...")
        if part not in a.only:
            answer[part] = None
            continue
        try:
            found = {"results": lambda: _results(a), "bytes": lambda: _bytes(a), "times": _times}[
                part
            ]()
        except SignalError as stopped:
            answer.update({p: None for p in PARTS if p not in answer})
            answer.update({part: stopped.so_far, "ok": False, "interrupted": str(stopped)})
            break
        answer[part] = found
        answer["ok"] = answer["ok"] and bool(found["ok"]) and _is_whole(part, found, a)
    show_progress()
    return answer


def _is_whole(part: str, found: dict[str, Any], a: argparse.Namespace) -> bool:
    """Green is only what was run: cases done against cases asked for."""
    if part == "times" or found.get("failure") or found["cases"] == a.cases:
        return True
    found["ok"] = False
    found["failure"] = f"{found['cases']:,} of {a.cases:,} cases were done"
    return False


def _stop(number: int, _: object) -> None:
    raise SignalError(number)


# ---- As text ------------------------------------------------------------------------------------


def describe(answer: dict[str, Any]) -> Iterator[str]:
    """What `trefoil validate` prints."""
    if results := answer.get("results"):
        yield f"results   {_verdict(results)}  {results['cases']:,} random cases through the C API"
        yield f"          {results['bytes_compared']:,} bytes compared, seed {results['seed']}"
        yield f"          {counted_sentence(results)}"
        yield from _failure(results)
    if traffic := answer.get("bytes"):
        tables = ", ".join(f"{name} {count:,}" for name, count in traffic["tables"].items())
        yield f"bytes     {_verdict(traffic)}  {traffic['cases']:,} cases, by leg: {tables}"
        yield f"          {traffic['numbers_compared']:,} numbers by pair, tier, phase and link"
        yield from _failure(traffic)
    if times := answer.get("times"):
        yield from _describe_times(times)
    if interrupted := answer.get("interrupted"):
        yield f"interrupted ({interrupted}): what is above is all that was compared"
    elif answer["ok"]:
        yield "all that was asked agrees"
    else:
        yield "something DISAGREES: see above"


def counted_sentence(results: dict[str, Any]) -> str:
    """What the library said of its own bytes."""
    counted = int(results.get("bytes_counted", 0))
    if not counted:
        return "no bytes counted by the library itself (ncclEpCountBytes)"
    return f"{counted:,} bytes counted by the library itself as sent, by pair as in the plan"


def _verdict(part: dict[str, Any]) -> str:
    """An interrupted part agrees as far as it came."""
    return "agree" if part["ok"] or not (part.get("failed") or part.get("failure")) else "DIFFER"


def _failure(part: dict[str, Any]) -> Iterator[str]:
    if part.get("failure"):
        yield str(part["failure"])


def _describe_times(times: dict[str, Any]) -> Iterator[str]:
    goal = times["goal"]
    yield f"times     {_verdict(times)}  with the errors that the records state"
    yield (
        f"  {'':<24}{'rows':>5}{'error':>9}{'stated':>9}{'p90':>9}{'worst':>9}"
        f"{'closed form':>13}{'same costs':>12}{'in interval':>13}  goal"
    )
    for s in times["sets"]:
        stated = "" if s["stated_mape_percent"] is None else f"{s['stated_mape_percent']:.1f} %"
        inside = f"{s['inside_interval']} of {s['rows']}"
        own = s["fitted_closed_form_mape_percent"]
        closed = "" if own is None else f"{own:.1f} %"
        mark = "" if s["agrees"] else "  NOT AS STATED"
        yield (
            f"  {s['name']:<24}{s['rows']:>5}{s['mape_percent']:>7.1f} %{stated:>9}"
            f"{s['p90_percent']:>7.1f} %{s['worst_percent']:>7.1f} %"
            f"{closed:>13}{s['closed_form_mape_percent']:>10.1f} %{inside:>13}"
            f"  {'met' if s['meets_goal'] else 'not met'}{mark}"
        )
    yield (
        f"  error: mean of |predicted / measured - 1| on rows that were not fitted; goal: at most "
        f"{goal['mape_percent']:g} %, p90 {goal['p90_percent']:g} %"
    )
    yield (
        "  closed form: fitted for itself to the same rows; same costs: with those of the replay"
    )
    for s in times["sets"]:
        yield f"  worst of {s['name']}: {s['worst_row']}"


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(sys.argv[1:] if argv is None else argv)
    if a.cases < 1:
        print(f"trefoil validate: --cases {a.cases}: must be 1 or more", file=sys.stderr)
        return USAGE
    old = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        answer = validate(a)
    except ModuleNotFoundError as missing:
        print(
            f"trefoil validate: Python lacks the module {missing.name}; tools/tour installs it "
            "into .venv; --bytes needs none",
            file=sys.stderr,
        )
        return FAILED
    except (TrefoilError, ValueError, OSError) as error:
        show_progress()
        print(f"trefoil validate: {error}", file=sys.stderr)
        return FAILED
    except SignalError as stopped:
        show_progress()
        print(f"trefoil validate: interrupted ({stopped})", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if a.json:
        print(json.dumps(answer, indent=1))
    else:
        print("\n".join(describe(answer)))
    if interrupted := answer.get("interrupted"):
        return 128 + signal.Signals[interrupted]
    return OK if answer["ok"] else FAILED


if __name__ == "__main__":
    sys.exit(run("validate", main))
