"""The command while something ends early: signals, a library that exits, a library that prints.

    python3 check_ends.py TREFOIL FAULTY_LIBRARY CPU_LIBRARY HOST_RUNTIME

Nothing stays running, what agreed so far is told, and nothing is green that was not run.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TREFOIL, FAULTY, CPU, HOST = sys.argv[1:5]
MARK = f"TREFOIL_ENDS_TEST={os.getpid()}"
LAUNCHED = Path(__file__).with_name("launched.sh")
LIBRARY = ["--library", FAULTY, "--nccl", HOST, "--cuda", HOST]
failures = 0


def check(holds: bool, what: str) -> None:
    global failures
    if not holds:
        failures += 1
        print(f"FAILED {what}", file=sys.stderr)


def marked() -> list[int]:
    """Our processes, by a variable of their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def environment(**more: str) -> dict[str, str]:
    name, value = MARK.split("=")
    python = {"TREFOIL_PYTHON": sys.executable}
    return {**os.environ, name: value, **python, **more}


def nothing_left(what: str) -> None:
    end = time.monotonic() + 10
    while marked() and time.monotonic() < end:
        time.sleep(0.02)
    check(not marked(), f"{what}: {len(marked())} processes are left")


def interrupted(arguments: list[str], number: int, processes: int) -> tuple[int, str]:
    """Runs until so many processes are at work, sends the signal to the first alone."""
    what = " ".join(arguments)
    with subprocess.Popen(
        [TREFOIL, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        end = time.monotonic() + 60
        while len(marked()) < processes and run.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.7)
        check(run.poll() is None, f"{what}: it was over before the signal")
        run.send_signal(number)
        try:
            out, err = run.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
            check(False, f"{what}: it did not end")
            return 0, ""
    nothing_left(what)
    check("Traceback" not in err, f"{what}: {err}")
    return run.returncode, out


def signals() -> None:
    many = ["--cases", "100000000"]
    for arguments, processes in (
        (["check", *many, "--jobs", "2"], 3),
        (["check", *many, "--processes", "--ranks", "2"], 4),
    ):
        code, out = interrupted([*arguments, "--json"], signal.SIGTERM, processes)
        said = json.loads(out)
        check(code == -signal.SIGTERM, f"{arguments}: exit code {code}")
        check(said["interrupted"] is True and said["ok"] is False, out)
        check(said["failed"] == 0 and said["asked"] == 100000000, out)
        check(0 < said["cases"] < said["asked"], out)
    code, out = interrupted(["check", *many], signal.SIGINT, 2)
    check(code == -signal.SIGINT and "interrupted (SIGINT); so far:" in out, f"{code}: {out}")
    check("cases agree of 100000000 asked for" in out, out)
    shape = ["--hidden", "4096", "--experts", "16", "--topk", "8", "--ranks", "4"]
    code, out = interrupted(["check", *shape, "--tokens", "3000"], signal.SIGTERM, 2)
    check(code == -signal.SIGTERM and "interrupted (SIGTERM)" in out, f"{code}: {out}")
    long = [*shape, "--tokens", "200", "--repeats", "100", "--seconds", "100"]
    code, out = interrupted(["bench", *long], signal.SIGTERM, 2)
    check(code == -signal.SIGTERM and "interrupted" in out, f"{code}: {out}")
    code, out = interrupted(["validate", "--bytes", *many], signal.SIGINT, 1)
    check(code == -signal.SIGINT and "interrupted (SIGINT) after" in out, f"{code}: {out}")
    code, out = interrupted(["validate", *many], signal.SIGTERM, 3)
    check(code == 128 + signal.SIGTERM and "interrupted (SIGTERM)" in out, f"{code}: {out}")
    check("results   agree" in out, out)
    interrupted(["check", *many, "--jobs", "2"], signal.SIGKILL, 3)


def faulty(fault: str, arguments: list[str], program: list[str] | None = None) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        more = {"TREFOIL_FAULT": fault, "TREFOIL_FAULT_LIBRARY": CPU, "TREFOIL_FAULT_SOON": "1"}
        more["TREFOIL_FAULT_LOG"] = f"{folder}/log"
        done = subprocess.run(
            [*(program or [TREFOIL]), *arguments, *LIBRARY],
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    nothing_left(f"{fault}, {arguments}")
    return done.returncode, done.stdout


def exits() -> None:
    """A library that calls exit(0) in the middle is never green."""
    cases = ["check", "--cases", "500", "--ranks", "2-3", "--timeout-ms", "3000", "--json"]
    for how in ([], ["--jobs", "2"], ["--processes"]):
        code, out = faulty("exit0:ncclEpDispatch", [*cases, *how])
        said = json.loads(out)
        check(code == 1 and said["ok"] is False, f"{how}: {code}: {out}")
        check(said["asked"] == 500 and said["cases"] == 499, f"{how}: {out}")
        finding = said["findings"][0]
        check(finding["outcome"] == "aborts" and finding["rank"] == 1, f"{how}: {out}")
        check("exit code 0 in the middle" in said["failure"], f"{how}: {out}")
    shape = ["--hidden", "128", "--experts", "4", "--topk", "2", "--ranks", "2", "--tokens", "8"]
    limits = ["--timeout-ms", "3000"]
    code, out = faulty("exit0:ncclEpCombine", ["check", *shape, *limits, "--json"])
    runs = json.loads(out)["runs"]
    check(code == 1 and [r["ok"] for r in runs] == [False, True, True, True], f"{code}: {out}")
    check("dispatch_s" in runs[1] and "dispatch_s" not in runs[0], out)
    code, out = faulty("exit0:ncclEpCombine", ["bench", *shape, *limits, "--seconds", "0.2"])
    check(code == 1 and "not timed, it fails its check" in out, f"{code}: {out}")
    code, out = faulty("exit0:ncclEpDispatch", ["validate", "--only", "results", "--cases", "200"])
    check(code == 1 and "results   DIFFER" in out, f"{code}: {out}")
    for rank in ("0", "1"):
        os.environ["TREFOIL_FAULT_RANK"] = rank
        launched = ["check", "--cases", "200", "--timeout-ms", "3000"]
        for fault in ("exit0:ncclEpDispatch", "hang:ncclEpCombine"):
            more = ["--limit", "4"]
            code, out = faulty(fault, [*launched, *more], ["bash", str(LAUNCHED), TREFOIL, "2"])
            check(code == 1, f"launched, {fault} on rank {rank}: {code}: {out}")
            check("cases agree, " not in out, f"launched, {fault} on rank {rank}: {out}")
    del os.environ["TREFOIL_FAULT_RANK"]


def prints() -> None:
    """What a library prints is no part of the JSON."""
    shape = ["--hidden", "128", "--experts", "4", "--topk", "2", "--ranks", "2", "--tokens", "8"]
    for arguments in (["--cases", "100"], ["--cases", "100", "--processes"], shape):
        code, out = faulty("print:ncclEpDispatch", ["check", *arguments, "--json"])
        check(code == 0 and json.loads(out)["ok"] is True, f"{arguments}: {code}: {out[:300]}")
    code, out = faulty(
        "print:ncclEpDispatch",
        ["check", "--cases", "100", "--json"],
        ["bash", str(LAUNCHED), TREFOIL, "2"],
    )
    check(code == 0 and json.loads(out)["cases"] == 100, f"launched: {code}: {out[:300]}")


if __name__ == "__main__":
    signals()
    exits()
    prints()
    sys.exit(failures > 0)
