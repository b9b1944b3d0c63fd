"""Sweeps: each point once, resumed after a kill, on any executor; the program is made up."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import trefoil
from trefoil.sweeping import SweepError, arguments_of, key_of

PACKAGE = str(Path(trefoil.__file__).parents[1])

# Answers with its arguments, logs each call, refuses 13 GPUs and fails at 99.
PROGRAM = """#!/bin/sh
echo "$@" >>"{log}"
sleep {pause}
case " $* " in
  *" --gpus 13 "*)
    echo "trefoil simulate: 13 is no number of GPUs; see trefoil simulate --help" >&2
    exit 2 ;;
  *" --gpus 99 "*)
    echo "trefoil simulate: the machine is on fire" >&2
    exit 1 ;;
esac
printf '{{"seconds": 1.5, "said": "%s"}}' "$*"
"""


def make_program(folder: Path, pause: float = 0) -> tuple[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    log, program = folder / "calls.log", folder / "trefoil"
    program.write_text(PROGRAM.format(log=log, pause=pause))
    program.chmod(0o755)
    return str(program), log


def calls(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


POINTS = [{"gpus": g, "mode": m} for g in (8, 16, 32) for m in ("ll", "ht")]


def test_arguments() -> None:
    point = {"gpus": 8, "physical_experts": 9, "zipf": 1.5, "flag": True, "no": False}
    words = arguments_of(point)
    assert " ".join(words) == ("simulate --json --gpus 8 --physical-experts 9 --zipf 1.5 --flag")


def test_each_point_once_and_in_order(tmp_path: Path) -> None:
    program, log = make_program(tmp_path)
    outcomes = trefoil.sweep([*POINTS, POINTS[0], {"gpus": 13}], program=program)
    assert [o.point for o in outcomes] == [*POINTS, POINTS[0], {"gpus": 13}]
    for o in outcomes[:-1]:
        assert o.answer is not None
        assert (
            o.answer["said"] == f"simulate --json --gpus {o.point['gpus']} --mode {o.point['mode']}"
        )
    assert outcomes[-1].answer is None
    assert outcomes[-1].refusal == "13 is no number of GPUs"
    assert len(calls(log)) == len(POINTS) + 1


EACH = """#!/usr/bin/env python3
import json, sys
assert sys.argv[1:] == ["simulate", "--each", "-"], sys.argv
for line in sys.stdin:
    words = json.loads(line)
    if "13" in words:
        said = {"code": 2, "out": "", "err": "trefoil simulate: 13 is no number of GPUs"}
    elif "99" in words:
        said = {"code": 1, "out": "", "err": "trefoil simulate: the machine is on fire"}
    elif "77" in words:
        sys.exit("trefoil simulate: a step has no process")
    else:
        said = {"code": 0, "out": json.dumps({"said": " ".join(words)}), "err": ""}
    print(json.dumps(said), flush=True)
"""


def test_points_of_one_process(tmp_path: Path) -> None:
    program, file = tmp_path / "trefoil", tmp_path / "kept.jsonl"
    program.write_text(EACH)
    program.chmod(0o755)
    points = [{"gpus": g} for g in (8, 13, *range(20, 40))]
    how = {"program": str(program), "jobs": 1, "together": True}
    outcomes = trefoil.sweep(points, **how)
    assert [o.point for o in outcomes] == points
    assert outcomes[1].refusal == "13 is no number of GPUs" and outcomes[1].answer is None
    assert outcomes[0].answer == {"said": "--json --gpus 8"}
    for bad, words in ((99, "on fire"), (77, "a step has no process")):
        with pytest.raises(SweepError, match=words):
            trefoil.sweep([*points[2:6], {"gpus": bad}, *points[6:]], results=file, **how)
        kept = [json.loads(line)["point"] for line in file.read_text().splitlines()]
        assert {"gpus": 20} in kept and {"gpus": bad} not in kept
        file.unlink()
    with pytest.raises(SweepError, match="cannot be run"):
        trefoil.sweep(points, **{**how, "program": str(tmp_path / "nothing")})
    older = tmp_path / "older"
    older.write_text("#!/bin/sh\necho 'trefoil simulate: --each: unknown option' >&2\nexit 2\n")
    older.chmod(0o755)
    with pytest.raises(SweepError, match="--each: unknown option"):
        trefoil.sweep(points, **{**how, "program": str(older)})


def test_results_are_kept(tmp_path: Path) -> None:
    program, log = make_program(tmp_path)
    file = tmp_path / "deep" / "sweep.jsonl"
    first = trefoil.sweep([*POINTS, {"gpus": 13}], program=program, results=file)
    assert all(o.fresh for o in first)
    done = len(calls(log))
    # A torn last line, as a kill in the middle of a write would leave it, and a line of others.
    whole = file.read_bytes()
    torn = whole[:-1].rfind(b"\n") + 20
    file.write_bytes(whole[:torn])
    again = trefoil.sweep([*POINTS, {"gpus": 13}], program=program, results=file)
    assert sum(o.fresh for o in again) == 1
    assert len(calls(log)) == done + 1
    assert [(o.point, o.answer, o.refusal) for o in again] == [
        (o.point, o.answer, o.refusal) for o in first
    ]
    third = trefoil.sweep(POINTS, program=program, results=file)
    assert not any(o.fresh for o in third)


def test_changed_files_and_programs_are_computed_anew(tmp_path: Path) -> None:
    program, _ = make_program(tmp_path)
    cluster = tmp_path / "mine.json"
    cluster.write_text("{}")
    point = {"cluster": str(cluster)}
    keys = {key_of(point, program), key_of({"cluster": "mine"}, program)}
    cluster.write_text('{"gpus_per_node": 4}')
    os.utime(cluster, ns=(1, 1))
    keys.add(key_of(point, program))
    other, _ = make_program(tmp_path / "other")
    keys.add(key_of(point, other))
    assert len(keys) == 4
    assert key_of({"a": 1, "b": 2}, program) == key_of({"b": 2, "a": 1}, program)


def test_failures_stop_the_sweep_and_keep_the_rest(tmp_path: Path) -> None:
    program, log = make_program(tmp_path)
    file = tmp_path / "sweep.jsonl"
    points = [*POINTS, {"gpus": 99}]
    with pytest.raises(SweepError, match="on fire"):
        trefoil.sweep(points, program=program, results=file, jobs=1)
    kept = [json.loads(line)["point"] for line in file.read_text().splitlines()]
    assert kept and {"gpus": 99} not in kept
    before = len(calls(log))
    with pytest.raises(SweepError):
        trefoil.sweep(points, program=program, results=file, jobs=1)
    assert len(calls(log)) == before + len(points) - len(kept)
    with pytest.raises(SweepError, match="cannot be run"):
        trefoil.sweep(POINTS, program=str(tmp_path / "nothing"))


def test_resumes_after_a_kill(tmp_path: Path) -> None:
    program, log = make_program(tmp_path, pause=0.05)
    file = tmp_path / "sweep.jsonl"
    script = (
        "import sys, trefoil\n"
        "points = [{'gpus': g} for g in range(100, 140)]\n"
        f"trefoil.sweep(points, program={program!r}, results={str(file)!r}, jobs=2)\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and victim.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.005)
    os.killpg(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "the sweep ended before it could be killed"
    kept = file.read_bytes().count(b"\n")
    assert 5 <= kept < 40
    log.write_text("")
    outcomes = trefoil.sweep([{"gpus": g} for g in range(100, 140)], program=program, results=file)
    assert len(calls(log)) == 40 - kept
    assert [o.answer["said"] for o in outcomes if o.answer] == [
        f"simulate --json --gpus {g}" for g in range(100, 140)
    ]


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm draws the bar (tools/tour brings it)")
    program, _ = make_program(tmp_path, pause=0.2)
    trefoil.sweep(POINTS, program=program, progress=True, label="six points", jobs=1)
    error = capsys.readouterr().err
    assert "six points" in error and "3/6" in error
    trefoil.sweep(POINTS, program=program)
    assert capsys.readouterr().err == ""


def test_process_pool(tmp_path: Path) -> None:
    program, _ = make_program(tmp_path)
    with ProcessPoolExecutor(2) as executor:
        outcomes = trefoil.sweep(POINTS, executor=executor, program=program)
    assert [o.answer for o in outcomes] == [
        o.answer for o in trefoil.sweep(POINTS, program=program)
    ]


def test_dask(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    program, log = make_program(tmp_path)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        outcomes = trefoil.sweep(
            [*POINTS, {"gpus": 13}], executor=client.get_executor(), program=program
        )
        assert len(calls(log)) == len(POINTS) + 1
        with pytest.raises(SweepError, match="on fire"):
            trefoil.sweep([{"gpus": 99}], executor=client.get_executor(), program=program)
    assert [o.answer for o in outcomes[:-1]] == [
        o.answer for o in trefoil.sweep(POINTS, program=program)
    ]
    assert outcomes[-1].refusal == "13 is no number of GPUs"


MPI_SCRIPT = """
import json, sys
from mpi4py.futures import MPIPoolExecutor
import trefoil

if __name__ == "__main__":
    points = [{"gpus": g, "mode": m} for g in (8, 16, 32) for m in ("ll", "ht")]
    with MPIPoolExecutor() as executor:
        outcomes = trefoil.sweep(points, executor=executor, program=sys.argv[1])
        workers = set(executor.map(rank, range(8)))
    print(json.dumps({"answers": [o.answer for o in outcomes], "workers": sorted(workers)}))
"""


def test_mpi(tmp_path: Path) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on this machine")
    program, log = make_program(tmp_path)
    script = tmp_path / "many_machines.py"
    worker = (
        "def rank(_):\n    import time\n    from mpi4py import MPI\n    time.sleep(0.1)\n"
        "    return MPI.COMM_WORLD.Get_rank()\n"
    )
    script.write_text(worker + MPI_SCRIPT)
    command = ["mpirun", "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*command, str(script), program],
        env={**os.environ, **root, "PYTHONPATH": PACKAGE, "OMPI_MCA_rmaps_base_oversubscribe": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answers"] == [o.answer for o in trefoil.sweep(POINTS, program=program)]
    assert said["workers"] == [1, 2], "both workers took part"
    assert len(calls(log)) == 2 * len(POINTS)
