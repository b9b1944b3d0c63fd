"""Runs a campaign: stage by stage, resuming where it stopped, within a limit of minutes.

    tools/measure --minutes 9                  # as far as nine minutes go; the same again goes on
    tools/measure --gpus 8 --minutes 25
    tools/measure --list                       # the plan, without measuring
    tools/measure --rehearse --out out/dry     # all points, tiny, on the CPU library

Each group of points runs in one process of `trefoil bench --points`; each line it prints is added
to results.jsonl at once. A point that is there is not run again; one that failed is there, too,
with its sentence, and `--again` runs those. The tables are written anew after every stage.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.campaign.points import Point, Stage, point_of, scaled_down, stages
from trefoil.campaign.tables import write_tables
from trefoil.places import ROOT

OK, FAILED, USAGE, NO_GPU = 0, 1, 2, 77
MOST_FAILURES = 5  # one after the other: then the machine is at fault, not a point
SECONDS_A_POINT = 90  # a process that prints nothing for so long is ended
GRACE_SECONDS = 30  # for the point that runs when time is up


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of GPUs, as in 1,2,4")
    return [int(part) for part in text.split(",")]


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/measure",
        description="Measures the kernels by a plan fixed before (docs/measure.md): the most "
        "useful points first, each checked against the reference, resuming where it stopped.",
    )
    parser.add_argument(
        "--minutes", type=float, default=0, help="end after that (default: no limit)"
    )
    parser.add_argument(
        "--gpus", type=_numbers, help="numbers of GPUs (default: 1, 2, 4, 8 as here)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out/measure", metavar="FOLDER")
    parser.add_argument("--stages", help="only stages whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the plan and what is done")
    parser.add_argument("--again", action="store_true", help="also run points that failed before")
    parser.add_argument("--tables", action="store_true", help="only write the tables anew")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU library, no GPU")
    parser.add_argument("--trefoil", help="the program (default: build/dev/cli/trefoil)")
    for name in ("library", "nccl", "cuda"):
        parser.add_argument(f"--{name}", help="passed on to trefoil bench")
    return parser.parse_args(argv)


@dataclass
class Campaign:
    options: argparse.Namespace
    program: str
    lines: list[dict[str, Any]]  # of results.jsonl
    ends: float  # of time.monotonic(); inf: no limit

    @property
    def results(self) -> Path:
        return Path(self.options.out) / "results.jsonl"

    def done(self) -> set[str]:
        return {
            point_of(line["provenance"]["gpus"], line["point"]).key
            for line in self.lines
            if line.get("ok") or not self.options.again
        }

    def keep(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# ---- What is there -------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """A line that an interruption cut short is dropped."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def gpus_here() -> int:
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdecimal()])


def _commit() -> str:
    """Of the tree, with a + if it has changes; a tree without git says it in TREFOIL_COMMIT."""
    if "TREFOIL_COMMIT" in os.environ:
        return os.environ["TREFOIL_COMMIT"]
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


# ---- Running -------------------------------------------------------------------------------------


def _command(c: Campaign, gpus: int, path: str, minutes: float) -> list[str]:
    command = [c.program, "bench", "--points", path, "--ranks", str(gpus)]
    if c.options.rehearse:
        command += ["--repeats", "4"]
    else:
        command += ["--gpu", "--timeout-ms", "8000"]
    for name in ("library", "nccl", "cuda"):
        if getattr(c.options, name):
            command += [f"--{name}", getattr(c.options, name)]
    return [*command, "--minutes", f"{minutes:.3f}"] if minutes > 0 else command


def _provenance(line: dict[str, Any], gpus: int, command: Sequence[str], commit: str) -> Any:
    gpu = line.get("gpu", {})
    words = ["POINTS" if word.endswith(".points.jsonl") else word for word in command]
    library = words[words.index("--library") + 1] if "--library" in words else "default"
    return {
        "gpus": gpus,
        "gpu": gpu.get("name", "none"),
        "driver": gpu.get("driver", ""),
        "nccl": gpu.get("nccl", ""),
        "runtime": gpu.get("runtime", ""),
        "library": Path(library).name,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "command": shlex.join(["trefoil", *words[1:]]),
    }


def _lines_of(process: subprocess.Popen[str], ends: float) -> Iterator[str]:
    """Its lines; the process is ended when it is silent too long, or time is up."""
    heard = [time.monotonic()]

    def watch() -> None:
        while process.poll() is None:
            now = time.monotonic()
            if now - heard[0] > SECONDS_A_POINT or now > ends + GRACE_SECONDS:
                process.kill()
            time.sleep(0.2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert process.stdout
    for text in process.stdout:
        heard[0] = time.monotonic()
        yield text
    process.wait()
    watcher.join()


def run_group(c: Campaign, points: Sequence[Point]) -> int:
    """Points of one number of GPUs in one process; returns how many have an answer."""
    gpus, told, commit = points[0].gpus, 0, _commit()
    left = (c.ends - time.monotonic()) / 60
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "group.points.jsonl"
        path.write_text("".join(json.dumps(p.asked) + "\n" for p in points), encoding="utf-8")
        command = _command(c, gpus, str(path), left if left < float("inf") else 0)
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            for text in _lines_of(process, c.ends):
                line = json.loads(text)
                line["provenance"] = _provenance(line, gpus, command, commit)
                c.keep(line)
                told += 1
            errors.seek(0)
            why = errors.read().strip().splitlines()[-1:]
    time_is_up = time.monotonic() > c.ends
    if told < len(points) and process.returncode != 0 and not time_is_up:
        last_failed = told > 0 and not c.lines[-1]["ok"]
        if not last_failed:  # it ended inside a point
            failed = {"point": points[told].asked, "ok": False, "difference": " ".join(why)}
            failed["difference"] = failed["difference"] or f"exit code {process.returncode}"
            c.keep({**failed, "provenance": _provenance({}, gpus, command, commit)})
            told += 1
    return told


def run_stage(c: Campaign, stage: Stage) -> bool:
    """False: no time is left, or too much fails."""
    done = c.done()
    left = [point for point in stage.points if point.key not in done]
    failures = 0
    for _, group in itertools.groupby(left, key=lambda point: point.gpus):
        waiting = list(group)
        while waiting:
            if time.monotonic() >= c.ends:
                return False
            before = len(c.lines)
            told = run_group(c, waiting)
            if told == 0:
                return False
            waiting = waiting[told:]
            new = c.lines[before:]
            failures = 0 if any(line["ok"] for line in new) else failures + 1
            for line in new:
                if not line["ok"]:
                    print(f"  FAILED {json.dumps(line['point'])}: {line['difference']}", flush=True)
            if failures >= MOST_FAILURES:
                print(f"  {failures} failures one after the other: stopped", flush=True)
                return False
    return True


def _plan(options: argparse.Namespace) -> list[Stage]:
    here = 4 if options.rehearse else gpus_here()
    gpus = options.gpus or [n for n in (1, 2, 4, 8) if n <= here] or [1, 2, 4]
    plan = stages(gpus)
    if options.rehearse:
        plan = scaled_down(plan)
    return [s for s in plan if not options.stages or options.stages in s.name]


def _show(c: Campaign, plan: Sequence[Stage]) -> None:
    done = c.done()
    for stage in plan:
        finished = sum(point.key in done for point in stage.points)
        print(f"{finished:4d} of {len(stage.points):3d}  {stage.name}")
    print(f"{sum(len(s.points) for s in plan)} points; results: {c.results}")


def _measure(c: Campaign, plan: Sequence[Stage]) -> int:
    for stage in plan:
        start, before = time.monotonic(), len(c.lines)
        goes_on = run_stage(c, stage)
        new = len(c.lines) - before
        if new:
            print(f"{stage.name}: {new} points in {time.monotonic() - start:.0f} s", flush=True)
            write_tables(c.options.out, c.lines)
        if not goes_on:
            break
    counts = write_tables(c.options.out, c.lines)
    _show(c, plan)
    print(", ".join(f"{name}: {count} rows" for name, count in counts.items()))
    keys = {point.key for stage in plan for point in stage.points}
    latest = {point_of(ln["provenance"]["gpus"], ln["point"]).key: ln["ok"] for ln in c.lines}
    return FAILED if any(not ok for key, ok in latest.items() if key in keys) else OK


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(sys.argv[1:] if argv is None else argv)
    program = options.trefoil or str(ROOT / "build/dev/cli/trefoil")
    ends = time.monotonic() + 60 * options.minutes if options.minutes > 0 else float("inf")
    options.out.mkdir(parents=True, exist_ok=True)
    c = Campaign(options, program, [], ends)
    c.lines = read_results(c.results)
    plan = _plan(options)
    if not plan:
        print(f"tools/measure: no stage has {options.stages!r} in its name", file=sys.stderr)
        return USAGE
    if options.list:
        _show(c, plan)
        return OK
    if options.tables:
        print(json.dumps(write_tables(options.out, c.lines)))
        return OK
    if not options.rehearse and gpus_here() < max(p.gpus for s in plan for p in s.points):
        print(f"tools/measure: {gpus_here()} GPUs here; --rehearse runs without", file=sys.stderr)
        return NO_GPU
    if not Path(program).exists():
        print(f"tools/measure: {program} is not there: build it, or --trefoil", file=sys.stderr)
        return USAGE
    return _measure(c, plan)


if __name__ == "__main__":
    sys.exit(main())
