"""Data parallel ranks of vLLM, each a process with its engine in it, and what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what vLLM compiles beside the model takes half a minute
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc takes a function
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class RankError(RuntimeError):
    """A rank ended without what it should find; the text is the end of what it printed."""


def tell(found: Any) -> None:
    """Of a rank: what it found."""
    print(f"FOUND {json.dumps(found)}", flush=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def _end(log: IO[str]) -> str:
    """Of what a rank printed."""
    log.seek(0)
    return log.read()[-4000:]


def _found(text: str) -> Any:
    lines = [line for line in text.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise RankError(text[-4000:])
    return json.loads(lines[-1].removeprefix("FOUND "))


def run(
    program: str, arguments: Sequence[str], ranks: int, settings: Mapping[str, str], limit: float
) -> list[Any]:
    """What each of the program's ranks finds; they get --rank and --ranks, and `limit` seconds.

    Raises RankError where a rank finds nothing or takes longer."""
    port = _free_port()
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            place = ["--ranks", str(ranks), "--rank", str(rank)]
            process = subprocess.Popen(
                [sys.executable, program, *place, *arguments],
                env={**os.environ, **SETTINGS, **settings, **_place(rank, ranks, port)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.kill)
            processes.append(process)
        end = time.monotonic() + limit
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RankError(
                f"the ranks did not end within {limit:.0f} s; the first one said: {_end(logs[0])}"
            ) from None
        for log in logs:
            log.seek(0)
        return [_found(log.read()) for log in logs]
