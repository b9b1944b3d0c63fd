"""Waits for other ranks: the interpreter runs on, and Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ep_needs  # noqa: F401
from ep_steps import Case, with_threads
from trefoil import ep

HERE = Path(__file__).resolve().parent
PROGRAM = f"""
import sys, threading, time
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parents[1] / "python")!r}]
import numpy as np
from trefoil import ep
from ep_steps import Case

def create(unique_id):
    ep.set_device(1)
    comms[1] = ep.Communicator.create(2, 1, unique_id)

def ready():
    print("waiting", flush=True)

comms = [None, None]
unique_id = ep.get_unique_id()
"""
RENDEZVOUS = """
other = threading.Thread(target=create, args=(unique_id,))
other.start()
comm = comms[0] = ep.Communicator.create(2, 0, unique_id)
other.join()
"""
GROUP = """
groups = [None, None]
def make():
    ep.set_device(1)
    groups[1] = ep.Group.create(comms[1], Case("ht-flat", ranks=2).group_config())
other = threading.Thread(target=make)
other.start()
group = ep.Group.create(comm, Case("ht-flat", ranks=2).group_config())
other.join()
stream = ep.Stream()
idx = ep.Tensor(np.zeros((1, 1), np.int64))
"""
WAITS = {
    "communicator": "ready(); ep.Communicator.create(2, 0, unique_id)",
    "group": RENDEZVOUS + 'ready(); ep.Group.create(comm, Case("ht-flat", ranks=2).group_config())',
    "handle": RENDEZVOUS + GROUP + "ready(); group.init_handle(ep.Layout.FLAT, 1)",
    "destroy": RENDEZVOUS + GROUP + "ready(); group.destroy()",
}
ENDING = """
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if comms[0]:
        print(comms[0].live, flush=True)
"""


def program(wait: str) -> str:
    body = "\n".join("    " + line for line in WAITS[wait].splitlines())
    return f"{PROGRAM}\ntry:\n{body}{ENDING}"


@pytest.mark.parametrize("wait", WAITS)
def test_interrupt(wait: str) -> None:
    """The other rank never comes; the timeout is 100 s."""
    command = [sys.executable, "-c", program(wait)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        said = process.stdout.read().split()
        process.wait(timeout=30)
        assert said[0] == "interrupted"
        assert said[1:] in ([], ["False"])  # the communicator is refused
        assert process.returncode == 0
        assert time.monotonic() - start < 10


def test_interrupt_of_a_stream() -> None:
    """The wait ends, the work goes on: when the other rank has come the result is there."""
    unique_id = ep.get_unique_id()
    case = Case("ht-flat", ranks=2)
    late = threading.Event()
    totals = [np.zeros(1, np.int32), np.zeros(1, np.int32)]

    def rank(r: int) -> None:
        ep.set_device(r)
        with (
            ep.Communicator.create(2, r, unique_id) as comm,
            ep.Group.create(comm, case.group_config()) as group,
            group.init_handle(ep.Layout.FLAT, case.topk) as handle,
            ep.Stream() as stream,
        ):
            if r == 1:
                assert late.wait(30)
            info = ep.LayoutInfo(recv_total_counter=ep.Tensor(totals[r]))
            handle.update(ep.Tensor(case.routing(r)), layout_info=info, stream=stream)
            if r == 0:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    stream.synchronize()
                late.set()
            stream.synchronize()

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join(30)
    assert totals[0][0] > 0
    assert totals[1][0] > 0


def test_interpreter_runs_on() -> None:
    """A thread that waits for a rank does not stop the others."""
    unique_id = ep.get_unique_id()
    first = threading.Thread(target=ep.Communicator.create, args=(2, 0, unique_id))
    first.start()
    start = time.monotonic()
    while time.monotonic() - start < 0.2:
        assert first.is_alive()
    ep.set_device(1)
    ep.Communicator.create(2, 1, unique_id).destroy()
    ep.set_device(0)
    first.join(30)
    assert not first.is_alive()


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """RemoteError names it, within the group's timeout."""
    case = Case("ll-rank-major", ranks=2)

    def work(rank: int, comm: ep.Communicator) -> str:
        config = case.group_config()
        config.timeout_ns = 200_000_000
        if rank == 1:
            time.sleep(0.6)
            return ""
        with pytest.raises(ep.RemoteError, match="rank 1") as found:
            ep.Group.create(comm, config)
        assert found.value.code == 6
        return str(found.value)

    assert with_threads(work, 2)[0]
