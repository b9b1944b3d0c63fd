"""Averaging on a cluster: bytes, closed forms on one link, and a step with dispatch and combine."""

import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from trefoil.a2sgd import Averaging
from trefoil.capacity import compute_fit
from trefoil.gradients import Method, StepSetting, averaging, costs, methods_of, simulate_steps
from trefoil.gradients.__main__ import main
from trefoil.gradients.collectives import NETWORK, NVLINK, NVLINK_LATENCY_US, Links, Stage, sums
from trefoil.gradients.methods import Averaged, measured, origins
from trefoil.gradients.training_step import (
    Bucket,
    Group,
    Operation,
    dense_tensors,
    forward_seconds,
    model_of,
    replay,
)
from trefoil.reference import TrefoilError
from trefoil.simulator import Cluster, Moe

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREFOIL_LIB"), reason="TREFOIL_LIB is not set (ctest sets it)"
)

SIZES = [1000, 234_567, 10]
ELEMENTS = sum(SIZES)
DGX, ROOT = "dgx-h100", Path(__file__).parents[2]
FAST = StepSetting(moe="qwen3-30b-a3b", tokens=64, costs="ideal")


@pytest.mark.parametrize("method", methods_of(50))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_contribution_is_what_the_reference_counts(method: Method, dtype: str) -> None:
    found = averaging(Cluster(DGX), 16, SIZES, replace(method, dtype=dtype))
    want = Averaging(method.name, SIZES, 16, dtype).sent_bytes
    assert found.contribution == want
    assert found.elements == ELEMENTS


def test_a_ring_over_the_network() -> None:
    size, workers = 4 * 10**8, 8
    found = averaging(Cluster(DGX), workers, [10**8], Method("dense"), per_node=1)
    c = Cluster(DGX).fields
    sent = 2 * (workers - 1) / workers * size
    want = c.ll_fixed_us * 1e-6 + 14 * c.net_latency_us * 1e-6 + sent / (c.nic_gb_per_s * 1e9)
    assert (found.algorithm, found.sent[NVLINK]) == ("ring", 0)
    assert found.sent[NETWORK] == sent
    assert found.seconds == pytest.approx(want, rel=1e-12)


def test_a_ring_over_nvlink() -> None:
    size, workers = 4 * 10**8, 8
    found = averaging(Cluster(DGX), workers, [10**8], Method("dense"))
    c = Cluster(DGX).fields
    sent = 2 * (workers - 1) / workers * size
    rounds = 2 * (workers - 1) * NVLINK_LATENCY_US
    want = (c.ll_fixed_us + rounds) * 1e-6 + sent / (c.nvlink_gb_per_s * 1e9)
    assert found.sent == {NVLINK: sent, NETWORK: 0}
    assert found.seconds == pytest.approx(want, rel=1e-12)


def test_two_means_take_rounds_alone() -> None:
    cluster = Cluster(DGX)
    for workers, rounds in ((16, 1), (64, 3), (1024, 7)):
        short, long = (averaging(cluster, workers, [n], Method("a2sgd")) for n in (10**3, 10**9))
        assert short.sent == long.sent == {NVLINK: 7 * 8, NETWORK: 8 * rounds}
        links = (rounds * cluster.fields.net_latency_us + NVLINK_LATENCY_US) * 1e-6
        assert long.link_seconds == pytest.approx(
            links + cluster.fields.ll_fixed_us * 1e-6, rel=1e-2
        )


def test_gather_and_scatter_send_what_others_lack() -> None:
    links = Links(4, 8, {NVLINK: 1.0, NETWORK: 1.0}, {NVLINK: 0.0, NETWORK: 0.0}, 0.0)
    found = sums(links, 320.0, 3200.0)
    sent = {name: sum(s.sent for s in stages) for name, stages in found.items()}
    assert sent["gather"] == 31 * 320
    assert sent["scatter"] == pytest.approx(31 * (320 + 3200) / 32)


def test_network_ports_that_gpus_share() -> None:
    one, eight = (
        averaging(Cluster(c), 16, [10**8], Method("dense")) for c in (DGX, "h100-single-rail")
    )
    assert one.links.rates[NETWORK] == 8 * eight.links.rates[NETWORK]


def test_more_takes_longer() -> None:
    cluster = Cluster(DGX)
    for method in methods_of(10):
        by_size = [averaging(cluster, 64, [n], method).seconds for n in (10**4, 10**6, 10**8)]
        assert all(a < b for a, b in pairwise(by_size)), method
        by_gpus = [averaging(cluster, g, [10**8], method).sent[NETWORK] for g in (8, 16, 64, 1024)]
        assert all(a < b for a, b in pairwise(by_gpus)), method
    alone, synced = (averaging(cluster, 8, SIZES, Method("a2sgd", p)).seconds for p in (0, 10))
    dense = averaging(cluster, 8, SIZES, Method("dense")).seconds
    assert synced == pytest.approx(alone + dense / 10)


def test_passes() -> None:
    cluster = Cluster(DGX)
    found = averaging(cluster, 8, [10**8], Method("a2sgd"))
    rate = cluster.fields.gpu_hbm_gb_per_s * 1e9
    means = 20.78e-6 + 4e8 / (0.8892 * rate)  # of our kernels, measured
    move = 7.564e-6 + 8e8 / (0.8336 * rate)
    assert found.pass_seconds == pytest.approx(means + move, rel=1e-6)
    radix, sort = (
        averaging(cluster, 8, [10**8], Method("topk", selection=s)).pass_seconds
        for s in ("radix", "sort")
    )
    assert radix < sort
    given = measured([Method("topk"), Method("qsgd")], {"topk": 123.0})
    made = [averaging(cluster, 8, [10**8], m).pass_seconds for m in given]
    assert made[0] == pytest.approx(123e-6)
    assert made[1] != made[0]
    assert averaging(cluster, 8, [10**8], Method("dense")).pass_seconds == 0


# ---- Costs of A2SGD's kernels --------------------------------------------------------------------


def test_the_record_holds_what_was_measured() -> None:
    measured_rows = json.loads((ROOT / "validate/data/a2sgd_kernels_h100x2.json").read_text())
    record = json.loads(costs.RECORD.read_text())
    sizes = {"f32": 4, "f16": 2, "bf16": 2}
    want = [
        (
            f"a2sgd-{row['pass']}",
            row["mebi_elements"] * 2**20 * sizes[row["dtype"]] * (1 + (row["pass"] == "move")),
            row["p50_us"],
        )
        for row in measured_rows["rows"]
    ]
    assert [(r["kind"], r["bytes"], r["us"]) for r in record["rows"]] == want
    exchange = next(e for e in measured_rows["exchange"] if e["gpus"] == 2)
    assert costs.kinds()["a2sgd-exchange"].launch_us == exchange["last_us"]


def test_the_record_is_its_fit() -> None:
    record = json.loads(costs.RECORD.read_text())
    again = {k["kind"]: k for k in compute_fit.fit(record)["kinds"]}
    for old in record["kinds"]:
        new = again[old["kind"]]
        for cost in ("launch_us", "memory_share"):
            assert new[cost]["value"] == pytest.approx(old[cost]["value"], rel=1e-2)
        if old["fitted"]:
            assert old["math_share"]["state"] == "unidentified"
            assert new["held_out"] == pytest.approx(old["held_out"], abs=2e-4)
            assert old["held_out"]["n"] == 3 and old["held_out"]["mean"] < 0.02


def test_times_below_what_was_measured() -> None:
    rate = 3350e9
    least = 2.0 * 64 * 2**20
    launch = costs.kinds()["elementwise"].launch_us * 1e-6
    below, at = (costs.seconds("a2sgd-means", b, rate) for b in (least * (1 - 1e-9), least))
    assert below == pytest.approx(at, rel=1e-6)
    assert costs.seconds("a2sgd-means", 0, rate) == launch
    assert costs.seconds("a2sgd-means", least / 2, rate) == pytest.approx((launch + at) / 2)


def test_inside_a_node_the_kernels_exchange() -> None:
    inside = averaging(Cluster(DGX), 8, [10**8], Method("a2sgd"))
    assert inside.link_seconds == pytest.approx(1.47e-6, rel=1e-3)
    across = averaging(Cluster(DGX), 16, [10**8], Method("a2sgd"))
    assert across.link_seconds > Cluster(DGX).fields.ll_fixed_us * 1e-6


def test_costs_say_where_they_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--elements", "1000000", "--gpus", "8,16"]
    assert main([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["costs"]
    assert list(found) == [m.label for m in methods_of()]
    assert "a2sgd-move: a2sgd-h100, fitted to 4 measured rows" in found["a2sgd"]["passes"]
    assert found["a2sgd"]["links"].startswith("a2sgd-exchange: a2sgd-h100, given: a2sgd_bench")
    assert "several nodes: cluster" in found["a2sgd"]["links"]
    assert found["qsgd 4 bit"]["passes"].startswith("elementwise: pytorch-h100, fitted to")
    assert main([*small, "--measured", "topk=5", "--selection", "sort"]) == 0
    out = capsys.readouterr().out
    assert "passes of topk 1 %: given: 5 us (--measured)" in out
    sort = origins(Method("topk", selection="sort"), True, False)["passes"]
    assert "sort: a2sgd-h100, given: Onesweep (arXiv 2206.01784)" in sort


# ---- Steps ---------------------------------------------------------------------------------------


def bucket(ready: int, sent: float) -> Bucket:
    """Over NVLink at 1 byte a second, without latency."""
    links = Links(1, 2, {NVLINK: 1.0, NETWORK: 1.0}, {NVLINK: 0.0, NETWORK: 0.0}, 0.0)
    stages = [Stage(NVLINK, 1, sent)]
    return Bucket(ready, Averaged(Method("dense"), 0, 0, "ring", stages, links, 0.0))


def group(loaded: float, rate: float) -> Group:
    op = Operation(4.0, {NVLINK: loaded, NETWORK: 4.0}, {}, {NVLINK: rate, NETWORK: 1.0})
    return Group(2, {"dispatch": op, "combine": op})


def test_replay_of_two_tracks() -> None:
    track = ["dispatch", "compute", "combine"], [4.0, 3.0, 4.0]
    at = group(8.0, 0.5)
    assert replay(*track, [], at) == 11
    assert replay(*track, [bucket(3, 5)], at) == 16  # behind all
    assert replay(*track, [bucket(1, 3)], at) == 11  # hidden by compute
    # Half of dispatch takes 4 s instead of 2; then the flow's 2 bytes are through.
    assert replay(*track, [bucket(0, 2)], at) == 13
    # All of dispatch at half its speed: 4 bytes; 3 beside compute; 2 of 4 s of combine as 4 s.
    assert replay(*track, [bucket(0, 4 + 3 + 2)], at) == 8 + 3 + 4 + 2
    assert replay(*track, [bucket(1, 3), bucket(2, 2)], at) == 13


def test_flows_during_dispatch_take_their_share() -> None:
    """Two GPUs at ideal costs: bytes over the port's rate, of which a flow takes half."""
    from trefoil.gradients.training_step import simulate_group

    found = simulate_group(replace(FAST, tokens=4096), 2)
    fixed = Cluster(DGX).fields.ht_fixed_us * 1e-6
    for op in found.ops.values():
        assert op.seconds == pytest.approx(fixed + op.sent[NVLINK] / 350e9, rel=1e-2)
        assert op.under_load[NVLINK] - fixed == pytest.approx(2 * (op.seconds - fixed), rel=1e-2)
        assert op.under_load[NETWORK] == op.seconds
        assert op.rates == {NVLINK: 175e9, NETWORK: 50e9}


def test_tensors_are_all_but_the_experts() -> None:
    for name in ("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b"):
        model = model_of(Moe(name))
        tensors = dense_tensors(model)
        want = model.parameters - model.routed(model.experts)
        assert sum(map(sum, tensors)) == want, name


def test_steps_of_8_to_1024_gpus() -> None:
    begin, methods = time.perf_counter(), methods_of()
    for gpus in (8, 64, 1024):
        steps = {s.method.label: s for s in simulate_steps(FAST, gpus, methods)}
        for s in steps.values():
            assert s.step_seconds >= s.floor_seconds + s.pass_seconds - 1e-9
            assert s.exposed_seconds <= s.alone_seconds * 2
            assert (s.gpus, s.ep) == (gpus, min(gpus, 128))
        assert steps["a2sgd"].sent[NVLINK] < 1e-3 * steps["dense"].sent[NVLINK]
        late = simulate_steps(replace(FAST, overlap=False), gpus, methods[:1])[0]
        assert late.step_seconds >= steps["dense"].step_seconds
        floor = late.floor_seconds + late.alone_seconds
        assert late.step_seconds == pytest.approx(floor, rel=1e-9)
    assert time.perf_counter() - begin < 60


def test_refusals() -> None:
    with pytest.raises(TrefoilError, match="need a network"):
        averaging(Cluster("h200-x8"), 16, SIZES, Method("dense"))
    with pytest.raises(TrefoilError, match="not a method"):
        measured([Method("topk")], {"sparse": 1.0})
    with pytest.raises(TrefoilError, match="not of ht"):
        simulate_steps(replace(FAST, costs="trefoil-ll-h200"), 8, methods_of())


def test_what_files_lack(tmp_path: Path) -> None:
    told = json.loads((ROOT / "models/moe/qwen3-30b-a3b.json").read_text())
    routed = ("name", "about", "source", "hidden_elements", "num_experts", "topk", "num_moe_layers")
    kept = (*routed, "expert_hidden_elements", "num_shared_experts")
    (tmp_path / "routed.json").write_text(json.dumps({k: told[k] for k in kept}))
    with pytest.raises(TrefoilError, match="outside of the experts is not stated: no num_layers"):
        simulate_steps(replace(FAST, moe=str(tmp_path / "routed.json")), 8, methods_of())
    cluster = Cluster(DGX)
    cluster.fields.gpu_hbm_gb_per_s = 0
    with pytest.raises(TrefoilError, match="gpu_hbm_gb_per_s is missing"):
        averaging(cluster, 8, SIZES, Method("a2sgd"))
    cluster.fields.gpu_bf16_tflops = 0
    with pytest.raises(TrefoilError, match="gpu_bf16_tflops is missing"):
        forward_seconds(model_of(Moe("deepseek-v3")), cluster, 64)


# ---- The verb ------------------------------------------------------------------------------------


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--elements", "66034000", "--tensors", "8", "--gpus", "8,16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["gpus"] for r in rows] == [8] * 5 + [16] * 5
    assert rows[1]["contribution_bytes"] == 8 * 8
    picture = tmp_path / "times.svg"
    options = ["--moe", "qwen3-30b-a3b", "--tokens", "64", "--costs", "ideal", "--gpus", "8..16"]
    assert main([*options, "-o", str(picture)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told.index("") == 11
    assert [line.split()[0] for line in told[12:]] == ["passes"] * 3 + ["links"] * 2
    assert told[0].split()[:3] == ["method", "gpus", "algorithm"]
    assert "a2sgd, sync 100" in picture.read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus", "1"], "has 2 to 4096"),
        (["--gpus", "x"], "--gpus x"),
        (["--moe", "none"], "no model is called none"),
        (["--cluster", "h200-x8", "--gpus", "16"], "has 2 to 8"),
        (["--elements", "9", "--gpus", "8", "--bits", "9"], "qsgdBits"),
        (["--elements", "9", "--gpus", "8", "--gpus-per-node", "9"], "at most 8"),
        (["--costs", "trefoil-ll-h200", "--gpus", "8"], "not of ht"),
    ],
)
def test_what_is_wrong(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--measured", "a2sgd"], ["--measured", "topk=1"], ["-o", "x.y"]])
def test_a_wrong_command_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("trefoil gradients: ")
