"""What the benchmark of high throughput measured, against its goals.

    python -m trefoil.ht_rows BENCH.json ... [--api API.json]
        [--keep FILE --measured TEXT --command TEXT]

BENCH.json is ht_bench's --out, one or several on the same GPUs, API.json what `trefoil bench --gpu`
printed with --json or --points. Prints a table in Markdown: each goal, the figure, whether it is
reached. --keep writes all rows with their provenance, as validate/data has it. Needs nothing beside
Python: it runs where the GPUs are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.inputs import read_text
from trefoil.outputs import write_whole
from trefoil.table import markdown

Row = Mapping[str, Any]

TOKENS = 4096  # of a rank, in the goals
OPERATIONS = ("dispatch flat", "combine flat", "dispatch expert-major", "combine expert-major")
WHAT = (
    "Kernel and event time of high-throughput Update, dispatch and combine; slowest rank, medians, "
    "microseconds (docs/kernels_ht.md, tests/kernels/ht_bench.cu)"
)


class RowsError(ValueError):
    """What was read is no output of ht_bench, or of `trefoil bench --gpu --json`."""


@dataclass(frozen=True)
class Goal:
    """An operation's kernel time, us, with at most so many SMs (0: any)."""

    operation: str
    us: float
    sms: int
    share: float = 0.0  # of the rate of the plain copy


@dataclass(frozen=True)
class Goals:
    """What is asked on so many GPUs."""

    times: tuple[Goal, ...]
    fp8_share: float  # of the time of bf16 rows
    skewed_share: float  # of the rate of the plain copy


UPDATES = (Goal("update flat", 25, 0), Goal("update expert-major", 25, 0))
GOALS = {
    2: Goals(
        times=(
            *UPDATES,
            Goal("dispatch flat window", 202, 12),
            Goal("dispatch flat window", 170, 16),
            Goal("dispatch flat", 240, 16),
            Goal("dispatch flat", 190, 24),
            Goal("combine flat window", 235, 10),
            Goal("combine flat window", 200, 12),
            Goal("combine flat window", 186, 16),
            Goal("combine flat", 250, 16),
            Goal("combine flat", 205, 24),
            Goal("dispatch expert-major pulled", 345, 24),
            Goal("dispatch expert-major pulled", 265, 32),
            Goal("dispatch expert-major", 380, 24),
            Goal("dispatch expert-major", 295, 32),
            Goal("combine expert-major", 400, 24),
            Goal("combine expert-major", 370, 28),
            Goal("combine expert-major", 320, 32),
        ),
        fp8_share=0.53,
        skewed_share=0.88,
    ),
    4: Goals(
        times=(
            *UPDATES,
            Goal("dispatch flat window", 465, 12, 0.97),
            Goal("dispatch flat", 480, 24, 0.94),
            Goal("combine flat", 490, 20, 0.93),
            Goal("combine flat", 505, 10),
            Goal("combine flat window", 490, 20, 0.93),
            Goal("combine flat window", 505, 10),
            Goal("dispatch expert-major window", 490, 24),
            Goal("dispatch expert-major", 490, 24),
            Goal("combine expert-major", 500, 28),
        ),
        fp8_share=0.55,
        skewed_share=0.85,
    ),
}
NO_GOALS = Goals(times=(), fp8_share=0.0, skewed_share=0.0)
FP8_SMS = 16
EVENT_OVER_KERNEL_US, HOST_US = 10.0, 6.0
SLOWER = 1.05  # than by the share of SMs: what still counts as the same


def goals_of(rows: Sequence[Row]) -> Goals:
    """Of rows that were measured on one number of GPUs."""
    return GOALS.get(rows[0]["ranks"], NO_GOALS) if rows else NO_GOALS


@dataclass(frozen=True)
class Answer:
    goal: str
    figure: str
    reached: bool | None  # None: not measured, or nothing was asked


def _parse(text: str) -> Any:
    """One JSON value, or one a line."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def read(path: Path, key: str) -> Mapping[str, Any]:
    """A benchmark's JSON whose rows stand under `key`, or are a line each (then under `key`)."""
    try:
        data = _parse(read_text(path))
        if isinstance(data, list) or key not in data:
            rows = data if isinstance(data, list) else [data]
            data = {key: [row for row in rows if "mode" in row]}
            if not data[key]:
                raise KeyError(key)
    except OSError as error:
        raise RowsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RowsError(f"{path}: is no result of a benchmark of ours: {error!r}") from None
    rows = data[key]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RowsError(f"{path}: is no result of a benchmark of ours: {key} holds no rows")
    return data


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of several runs; the rest is the first one's, and each run's rate of the copy."""
    if len({part.get("device") for part in parts}) > 1:
        raise RowsError("these benchmarks ran on different devices")
    rows = [row for part in parts for row in part["rows"]]
    rates = [part["copy_GBps"] for part in parts if "copy_GBps" in part]
    return {**parts[0], "copy_GBps_of_runs": rates, "rows": rows}


def best(rows: Sequence[Row], operation: str, sms: int = 0, tokens: int = TOKENS) -> Row | None:
    """The fastest row of an operation with at most so many SMs (0: any)."""
    found = [
        r
        for r in rows
        if r["operation"] == operation and r["tokens"] == tokens and (not sms or r["sms"] <= sms)
    ]
    return min(found, key=lambda r: r["kernel_us"], default=None)


def _figure(row: Row) -> str:
    text = f"{row['kernel_us']:.1f} us [{row['sms']}]"
    if row["copy_share"] > 0:
        text += f", {100 * row['copy_share']:.0f} % of the copy"
    return text


def _timed(rows: Sequence[Row], goals: Goals) -> Iterator[Answer]:
    for goal in goals.times:
        asked = f"{goal.operation} <= {goal.us:g} us" + (f" [{goal.sms}]" if goal.sms else "")
        if goal.share:
            asked += f", >= {100 * goal.share:.0f} %"
        row = best(rows, goal.operation, goal.sms)
        if row is None:
            yield Answer(asked, "not measured", None)
        else:
            reached = row["kernel_us"] <= goal.us and row["copy_share"] >= goal.share
            yield Answer(asked, _figure(row), reached)


def _fp8(rows: Sequence[Row], goals: Goals) -> Iterator[Answer]:
    for where in ("", " window") if goals.fp8_share else ():
        asked = f"dispatch flat fp8{where} <= {goals.fp8_share} of bf16's [{FP8_SMS}]"
        fp8 = best(rows, f"dispatch flat fp8{where}", FP8_SMS)
        bf16 = best(rows, f"dispatch flat{where}", 24)
        if fp8 is None or bf16 is None:
            yield Answer(asked, "not measured", None)
            continue
        ratio = fp8["kernel_us"] / bf16["kernel_us"]
        yield Answer(
            asked, f"{ratio:.3f}: {_figure(fp8)} to {_figure(bf16)}", ratio <= goals.fp8_share
        )


def _twice(rows: Sequence[Row]) -> Iterator[Answer]:
    for operation in ("update flat", "update expert-major", *OPERATIONS):
        asked = f"{operation}: twice the tokens, at most twice the time"
        large = best(rows, operation, tokens=2 * TOKENS)
        small = [
            r
            for r in rows
            if large
            and r["operation"] == operation
            and r["tokens"] == TOKENS
            and all(r.get(k) == large.get(k) for k in ("sms", "senders", "commit"))
        ]
        if large is None or not small:
            yield Answer(asked, "not measured", None)
            continue
        ratio = large["kernel_us"] / min(r["kernel_us"] for r in small)
        yield Answer(asked, f"{ratio:.2f}: {_figure(large)}", ratio <= 2.0)


def _skewed(rows: Sequence[Row], goals: Goals) -> Iterator[Answer]:
    asked = f"{{}} >= {100 * goals.skewed_share:.0f} % of the bound of the exact port loads"
    skewed = [r for r in rows if r.get("skew", 0) > 0]
    for row in skewed:
        name = asked.format(row["operation"])
        yield Answer(name, _figure(row), row["copy_share"] >= goals.skewed_share)
    if not skewed:
        yield Answer(asked.format("skewed routing"), "not measured", None)


def _background(rows: Sequence[Row]) -> Iterator[Answer]:
    asked = "{} products ({}): neither slower than by its share of SMs"
    loaded = [r for r in rows if r["operation"].endswith(" background")]
    for row in loaded:
        share = row["product_share"]
        figure = (
            f"operation x {row['slower']:.3f} ({row['background_us']:.0f} us [{row['sms']}]), "
            f"product x {row['product_slower']:.3f} of x {share:.3f}"
        )
        reached = row["slower"] <= SLOWER and row["product_slower"] <= SLOWER * share
        yield Answer(asked.format(row["operation"], row["load"]), figure, reached)
    if not loaded:
        yield Answer(asked.format("background", "any"), "not measured", None)


def _called(runs: Sequence[Row]) -> Iterator[Answer]:
    for run in runs:
        if not str(run["mode"]).startswith("ht-") or "times" not in run:
            continue
        for op in ("dispatch", "combine"):
            times = run["times"].get(op)
            if not times:
                continue
            window = " window" if run.get("window") else ""
            name = f"{op} {run['mode']} {run['variant']}{window}, {run['tokens']} tokens"
            host = 1e6 * times["host"]["p50_s"]
            yield Answer(
                f"{name}: host time <= {HOST_US:g} us", f"{host:.1f} us (p50)", host <= HOST_US
            )
            if "event_over_kernel" not in times:
                continue
            over = {k: 1e6 * times["event_over_kernel"][k]["p50_s"] for k in ("called", "replayed")}
            yield Answer(
                f"{name}: event time <= {EVENT_OVER_KERNEL_US:g} us above kernel time",
                f"called {over['called']:.1f} us, replayed {over['replayed']:.1f} us (p50)",
                max(over.values()) <= EVENT_OVER_KERNEL_US,
            )


def answers(bench: Mapping[str, Any], api: Mapping[str, Any] | None = None) -> list[Answer]:
    """Every goal for so many GPUs with its figure, in the order of the goals' table."""
    rows = [r for r in bench["rows"] if r.get("check", "ok") == "ok"]
    try:
        goals = goals_of(rows)
        plain = [r for r in rows if not r["operation"].endswith(" background")]
        found = [*_timed(plain, goals), *_fp8(plain, goals), *_twice(plain)]
        found += [*_skewed(plain, goals), *_background(rows)]
        return found + (list(_called(api["gpu_benchmarks"])) if api else [])
    except (KeyError, TypeError) as error:
        raise RowsError(f"the benchmark's rows lack {error}") from None


def as_markdown(found: Sequence[Answer]) -> str:
    words = {True: "yes", False: "no", None: ""}
    rows = [("goal", "figure", "reached")]
    return "\n".join(markdown(rows + [(a.goal, a.figure, words[a.reached]) for a in found], "---"))


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 and a sentence if what was read is no benchmark."""
    parser = argparse.ArgumentParser(prog="python -m trefoil.ht_rows", description=__doc__)
    parser.add_argument("bench", type=Path, nargs="+")
    parser.add_argument("--api", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--measured", default="")
    parser.add_argument("--command", default="")
    a = parser.parse_args(arguments)
    try:
        bench = merged([read(path, "rows") for path in a.bench])
        found = answers(bench, read(a.api, "gpu_benchmarks") if a.api else None)
    except RowsError as error:
        print(f"trefoil: {error}", file=sys.stderr)
        return 1
    if a.keep:
        whole = {"what": WHAT, "measured": a.measured, "command": a.command, **bench}
        write_whole(a.keep, json.dumps(whole, indent=1) + "\n")
    print(f"{bench.get('device', 'GPUs')}, {bench.get('copy_GBps', '?')} GB/s by the plain copy")
    print(as_markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
