"""`trefoil plan --closed-form`: the table's rules, the JSON's fields, and wrong command lines.

python3 check_plan_verb.py TREFOIL
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
failures = 0


def check(ok: bool, what: str) -> None:
    global failures
    if not ok:
        failures += 1
        print(f"failed: {what}")


def check_floors(plan: Callable[..., dict[str, Any]]) -> None:
    """Dispatch of 128 tokens a GPU on 2, 4, 8 nodes of 8: us of bytes at the cards' line rate."""
    for variant, floors in (("ours", (120, 200, 247)), ("rails", (37, 99, 170))):
        points = plan("--mode", "ll", "--gpus", "16,32,64", "--variant", variant)["points"]
        for p, floor in zip(points, floors, strict=True):
            dispatch = p["dispatch"]
            us = 1e6 * dispatch["total_net_bytes"] / p["gpus"] / 50e9
            check(abs(us - floor) < 0.01 * floor + 0.5, f"{variant}, {p['gpus']}: {us} us")
            busiest = 1e6 * dispatch["nic_bytes"] / 50e9
            check(us <= busiest < 1.1 * us, f"{variant}, {p['gpus']}: {busiest} us of a card")
            if variant == "rails":
                check(dispatch["total_nvlink_bytes"] > dispatch["total_net_bytes"], "forwarded")


def main() -> int:
    program = sys.argv[1]

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *map(str, args)], capture_output=True, text=True, timeout=60, check=False
        )

    def plan(*args: object) -> dict[str, object]:
        done = run("plan", "--closed-form", "--json", *args)
        check(done.returncode == 0, f"plan {args}: {done.stderr}")
        return json.loads(done.stdout)

    ll = plan("--mode", "ll", "--tokens", 32)
    gpus = [p["gpus"] for p in ll["points"]]
    check(gpus == [8, 16, 32, 64, 128, 256, 512, 1024], f"GPUs {gpus}")
    for p in ll["points"]:
        check(p["ep"] == min(p["gpus"], 256), f"EP {p['ep']} of {p['gpus']}")
        check(p["replicas"] * p["ep"] == p["gpus"], "replicas")
        for op in ("dispatch", "combine"):
            o = p[op]
            rate = 350e9 if o["limit"].startswith("nvlink") else 50e9
            port = o["nvlink_bytes"] if rate == 350e9 else o["nic_bytes"]
            check(abs(o["seconds"] - o["fixed_seconds"] - port / rate) < 1e-12, f"{p['gpus']} {op}")
            other = o["nic_bytes"] / 50e9 if rate == 350e9 else o["nvlink_bytes"] / 350e9
            check(other <= port / rate, f"{p['gpus']} {op}: the other port takes longer")
        # exact combine sends each of 8 entries, dispatch a row for each distinct rank
        check(p["combine"]["seconds"] >= p["dispatch"]["seconds"], f"{p['gpus']}: combine")
    check(ll["points"][6]["dispatch"] == ll["points"][5]["dispatch"], "replicas change nothing")
    check(ll == plan("--mode", "ll", "--tokens", 32), "the same seed, another answer")
    fp8 = plan("--mode", "ll", "--tokens", 32, "--dispatch-dtype", "fp8", "--gpus", 8)
    first, narrow = ll["points"][0]["dispatch"], fp8["points"][0]["dispatch"]
    check(narrow["nvlink_bytes"] * 14336 == first["nvlink_bytes"] * 7392, "fp8 rows")
    partial = plan("--mode", "ll", "--tokens", 32, "--combine", "partial", "--gpus", 8)
    check(
        partial["points"][0]["combine"]["total_nvlink_bytes"] == first["total_nvlink_bytes"],
        "partial combine mirrors dispatch",
    )
    each = plan("--mode", "ll", "--tokens", 32, "--variant", "per-expert", "--gpus", 8)
    check(
        each["points"][0]["dispatch"]["total_nvlink_bytes"]
        == ll["points"][0]["combine"]["total_nvlink_bytes"],
        "a row an expert mirrors exact combine",
    )
    check_floors(plan)
    ht = plan("--mode", "ht", "--tokens", 64, "--gpus", "16,64")
    check(ht["points"][1]["dispatch"]["limit"].startswith("nic"), "HT on 64 GPUs is net-bound")
    wide = plan("--mode", "ll", "--tokens", 8, "--gpus", 512, "--physical-experts", 512)
    check(wide["points"][0]["ep"] == 512, "physical experts allow a larger EP group")
    rail = plan("--cluster", "h100-single-rail", "--tokens", 32, "--gpus", 32)
    check(
        rail["points"][0]["dispatch"]["nic_bytes"] > 7 * ll["points"][2]["dispatch"]["nic_bytes"],
        "eight GPUs share a port",
    )
    rack = plan("--cluster", "gb200-nvl72", "--tokens", 32, "--gpus", "64,128")
    check(rack["points"][0]["dispatch"]["nic_bytes"] == 0, "64 GPUs stay in a rack")
    check(rack["points"][1]["dispatch"]["nic_bytes"] > 0, "128 do not")
    uneven = ("--tokens", 8, "--gpus", "8,12")
    check([p["ranks_per_node"] for p in plan(*uneven)["points"]] == [8, 6], "two nodes of 6")
    text = run("plan", "--closed-form", *uneven).stdout
    check(text.count("EP 12 on nodes of 8: 2 NVLink domains of 6") == 1, text)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "t.npz"
        done = run("trace", "generate", "--tokens", 32, "--steps", 2, "--seed", 1, trace)
        check(done.returncode == 0, done.stderr)
        traced = plan("--trace", trace)
        check(len(traced["points"]) == 2 and traced["points"][1]["step"] == 1, "steps of a trace")
        check(traced["points"][0]["dispatch"] == first, "step 0 is the same routing")
    learned = ROOT / "validate" / "data" / "traces" / "trained_moe.npz"
    described = json.loads(run("trace", "describe", "--json", learned).stdout)
    check(described["tokens"] == 8 * 4 * 96, f"the trace of a trained model: {described}")
    check(described["max_over_mean_experts"] > 2, "a trained router prefers some experts")
    options = ("--moe", "qwen3-30b-a3b", "--tokens", 96, "--mode", "ht", "--gpus", 8)
    even = plan(*options)["points"][0]["dispatch"]["nvlink_bytes"]
    steps = plan(*options[:2], "--mode", "ht", "--trace", learned)["points"]
    busiest = [step["dispatch"]["nvlink_bytes"] for step in steps]
    check(len(steps) == 4 and min(busiest) > even, f"busiest ports: {busiest}, {even} if even")
    for wrong in (
        ["plan", "--closed-form", "--mode", "fast"],
        ["plan", "--closed-form", "--cluster", "laptop"],
        ["plan", "--closed-form", "--variant", "mesh"],
        ["plan", "--closed-form", "--gpus", "16..8"],
        ["plan", "--closed-form", "--gpus", "8,"],
        ["plan", "--closed-form", "--gpus", "8192"],
        ["plan", "--closed-form", "--ep", "512", "--gpus", "1024"],
        ["plan", "--closed-form", "extra"],
        ["trace", "shrink"],
        ["trace", "generate", "--skew", "nan", "--popularity", "zipf", "/tmp/x.npz"],
    ):
        done = run(*wrong)
        check(done.returncode == 2 and done.stderr, f"{wrong}: exit code {done.returncode}")
        check(not done.stdout, f"{wrong}: prints on stdout")
    print("all agree" if not failures else f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
