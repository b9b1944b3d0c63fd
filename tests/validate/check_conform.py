"""trefoil conform and trefoil check --level order-free, with a library that reorders, spoils,
refuses and aborts (reordering_library.c): outcomes, counts, replay lines, page, kept results,
profiles.

python3 check_conform.py TREFOIL REORDERING_LIBRARY HOST CPU_LIBRARY ROOT [--long]
"""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

trefoil, reordering, host, cpu, root = sys.argv[1:6]
WRONG = ("zones", "extra", "twice", "side-data", "sums", "arrived")
failures: list[str] = []


def expect(condition: bool, what: str) -> None:
    if not condition:
        failures.append(what)


def run(*args: str, reorder: str = "") -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, TREFOIL_FAULT_LIBRARY=cpu, TREFOIL_REORDER=reorder)
    paths = ("--library", reordering, "--nccl", host, "--cuda", host)
    return subprocess.run(
        [trefoil, *args, *paths], env=env, capture_output=True, text=True, timeout=900, check=False
    )


def conform(*args: str, reorder: str = "") -> tuple[int, dict[str, Any]]:
    done = run("conform", "--json", *args, reorder=reorder)
    return done.returncode, json.loads(done.stdout)


def small_profile(folder: pathlib.Path) -> str:
    """NCCL EP's profile with small shapes: the same features in a tenth of the time."""
    profile = json.loads((pathlib.Path(root) / "validate/profiles/nccl-ep-0.1.json").read_text())
    for name in ("low_latency", "high_throughput"):
        block = profile[name]
        block["hidden"]["value"] = [512, 1024]
        block["tokens"]["value"] = {"least": 8, "most": 8}
        block["shapes"] = [
            {"hidden": 512, "topk": 4, "local_experts": 4, "tokens": 8},
            {"hidden": 1024, "topk": 6, "local_experts": 4, "tokens": 8},
        ]
        block["outside"]["tokens"] = 5
    path = folder / "small.json"
    path.write_text(json.dumps(profile))
    return str(path)


def check_profiles(folder: pathlib.Path, path: str) -> None:
    done = run("conform", "--profile", "nonsense")
    expect(done.returncode == 2 and "nccl-ep-0.1, trefoil" in done.stderr, f"names: {done.stderr}")
    good = json.loads(pathlib.Path(path).read_text())
    spoilt: list[tuple[list[Any], Any, str]] = [
        (["hiden"], 1, "has no key hiden"),
        (["features", "value"], ["graphs"], '"graphs" is not a feature'),
        (["modes", "value"], ["ll"], '"ll" is not a mode'),
        (["features", "source"], "", "features must be"),
        (["low_latency", "shapes", 0, "topk"], 10, "topk 10 is not within its limit"),
        (["low_latency", "outside", "topk"], 9, "topk 9 is within its limit"),
        (["high_throughput", "tokens"], 8, "tokens must be an object"),
        (["ranks", "value"], [0], "numbers from 1 to 16"),
    ]
    for keys, value, word in spoilt:
        bad = copy.deepcopy(good)
        at = bad
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        file = folder / "bad.json"
        file.write_text(json.dumps(bad))
        done = run("conform", "--profile", str(file))
        expect(done.returncode == 2 and word in done.stderr, f"{keys}: {done.stderr}")


def check_agreement(folder: pathlib.Path, path: str) -> None:
    """A library that reorders within what is open: no false alarm, and the level says so."""
    page, kept = folder / "page.html", folder / "kept.json"
    args = ("--profile", path, "--ranks", "2", "--cases", "400", "--outside", "1")
    rc, result = conform(*args, "--html", str(page))
    kept.write_text(json.dumps(result))
    inside = result["totals"]["inside"]
    expect(rc == 0 and result["ok"], f"false alarm: {json.dumps(result['totals'])}")
    expect(set(inside) == {"agrees", "order open"}, f"inside: {inside}")
    expect(sum(inside.values()) >= 380, f"inside: {inside}")
    expect(inside.get("order open", 0) > 100, f"hardly reordered: {inside}")
    cells = {(c["feature"], c["mode"]): c for c in result["cells"]}
    expect(len(cells) > 90, f"{len(cells)} cells")
    staged = cells["staged", "ll-expert-major"]
    expect(staged["inside"] and "order open" in staged["counts"], f"staged: {staged}")
    expect(not cells["trap", "ht-flat"]["inside"], "trap is inside")
    text = page.read_text()
    expect(text.startswith("<!doctype html>") and text.endswith("</html>\n"), "page is not whole")
    expect("masks" in text and "order open" in text and "<script" not in text, "page has no table")
    again = folder / "again.html"
    done = run("conform", "--from", str(kept), "--html", str(again))
    expect(done.returncode == 0 and "within the profile" in done.stdout, f"--from: {done.stderr}")
    expect(again.read_text() == text, "the page of a kept result is another one")
    done = run("conform", *args, "--html", "/nowhere/page.html")
    expect(
        done.returncode == 1 and "/nowhere/page.html cannot be written" in done.stderr,
        f"page nowhere: {done.stderr}",
    )


def check_outside(path: str) -> None:
    """Outside of the profile alone: told feature by feature, and no verdict on the profile."""
    args = ("--profile", path, "--ranks", "2", "--cases", "0")
    rc, result = conform(*args, "--outside", "1")
    totals = result["totals"]
    expect(rc == 1 and not result["ok"] and not totals["inside"], f"--cases 0: {totals}")
    expect(sum(totals["outside"].values()) > 30, f"--cases 0: {totals}")
    done = run("conform", *args, "--outside", "1")
    expect("NO VERDICT: no case of its profile was run" in done.stdout, done.stdout)
    done = run("conform", *args, "--outside", "0")
    expect(done.returncode == 2 and "leave nothing to run" in done.stderr, done.stderr)
    done = run("conform", "--profile", "trefoil", "--cases", "0")
    expect(done.returncode == 2 and "nothing lies outside" in done.stderr, done.stderr)


def check_outcomes(path: str) -> None:
    """What is wrong is found in every kind; a refusal and an abort end nothing."""
    args = ("--profile", path, "--ranks", "2", "--cases", "72", "--outside", "0")
    for reorder in WRONG:
        rc, result = conform(*args, reorder=reorder)
        inside = result["totals"]["inside"]
        expect(rc == 1 and inside.get("different", 0) > 5, f"{reorder} not found: {inside}")
        expect("not run" not in inside, f"{reorder}: {inside}")
        expect("aborts" not in inside and "hangs" not in inside, f"{reorder}: {inside}")
    for reorder, outcome in (("abort", "aborts"), ("refuse", "refused")):
        rc, result = conform(*args, reorder=reorder)
        inside = result["totals"]["inside"]
        expect(rc == 1 and inside.get(outcome, 0) > 3, f"{reorder}: {inside}")
        expect(inside.get("agrees", 0) + inside.get("order open", 0) > 20, f"{reorder}: {inside}")
        expect(set(inside) <= {"agrees", "order open", outcome}, f"{reorder}: {inside}")
        findings = [c["finding"] for c in result["cells"] if "finding" in c]
        expect(
            all(f["outcome"] == outcome and " --case " in f["replay"] for f in findings),
            f"{reorder}: {findings}",
        )


def check_replay(path: str) -> None:
    """The replay line of a finding shows it again, on this rank or the other."""
    args = ("--profile", path, "--ranks", "2", "--cases", "72", "--outside", "0")
    _, result = conform(*args, reorder="sums")
    f = next(c["finding"] for c in result["cells"] if "finding" in c)
    expect(f"--profile {path} --ranks 2 " in f["replay"], f["replay"])
    words = f["replay"].split()
    env = dict(os.environ, TREFOIL_FAULT_LIBRARY=cpu, TREFOIL_REORDER="sums")
    done = subprocess.run(
        [trefoil, *words[1:]], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    told = f"case {f['case']}: rank " in done.stdout and "(Combine), token" in done.stdout
    expect(done.returncode == 1 and told, f"{f['what']}\n{done.stdout}")


def check_real_shapes() -> None:
    """A real shape with order open, and what is wrong in one."""
    shape = (
        "check",
        "--hidden",
        "256",
        "--experts",
        "8",
        "--topk",
        "3",
        "--tokens",
        "32",
        "--ranks",
        "3",
        "--mode",
        "ll",
        "--level",
        "order-free",
    )
    done = run(*shape, "--json")
    runs = json.loads(done.stdout)["runs"]
    expect(
        done.returncode == 0 and all(r["ok"] and r["rows_in_other_order"] for r in runs),
        f"real shape: {done.stdout}",
    )
    expect("agrees with order open" in run(*shape).stdout, "the level is not said")
    expect(run(*shape[:-2]).returncode == 1, "strict does not see the order")
    past = (*shape[:-3], "ht-flat", *shape[-2:])
    done = run(*past, "--json")
    expect(json.loads(done.stdout)["runs"][0]["ok"], f"real shape, what is past: {done.stdout}")
    expect(run(*past[:-2]).returncode == 1, "strict does not see what is past")
    for reorder in WRONG:
        done = run(*(past if reorder == "arrived" else shape), reorder=reorder)
        expect(done.returncode == 1 and "DIFFERENT" in done.stdout, f"real shape, {reorder}")


def check_level() -> None:
    """Random cases outside of any profile."""
    done = run("check", "--level", "order-free", "--cases", "320", "--json")
    result = json.loads(done.stdout)
    expect(done.returncode == 0 and result["order_open"] > 50, f"order-free: {done.stdout}")
    for reorder in WRONG:
        done = run(
            "check", "--level", "order-free", "--cases", "320", "--findings", "1", reorder=reorder
        )
        expect(done.returncode == 1 and "DIFFERENT" in done.stdout, f"order-free, {reorder}")


def check_many() -> None:
    """Two thousand cases in NVIDIA's profile without a false alarm."""
    rc, result = conform(
        "--profile", "nccl-ep-0.1", "--ranks", "2", "--outside", "1", "--cases", "2100"
    )
    inside = result["totals"]["inside"]
    expect(
        rc == 0 and set(inside) == {"agrees", "order open"} and sum(inside.values()) >= 2000,
        f"many: {inside}",
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = small_profile(folder)
        if "--long" in sys.argv:
            check_many()
        else:
            check_profiles(folder, path)
            check_agreement(folder, path)
            check_outside(path)
            check_outcomes(path)
            check_replay(path)
            check_real_shapes()
            check_level()
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
