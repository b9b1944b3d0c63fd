"""Ranks of a program under torch's launcher, and the checks that they make together."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "python"))
SKIPPED = 77


def parser(about: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--json", help="writes what was found")
    return made


class Ranks:
    """This rank, its device, and what was found. Each check is collective."""

    def __init__(self, options: argparse.Namespace, backend: str = "") -> None:
        self.json = options.json
        self.device = torch.device(options.device)
        if options.device == "cuda":
            if not torch.cuda.is_available():
                print("skipped: needs a GPU")
                sys.exit(SKIPPED)
            self.device = torch.device(
                "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
            )
            torch.cuda.set_device(self.device)
        both = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend or both, timeout=timedelta(seconds=60))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        self.found: dict[str, Any] = {}
        self.failed = 0

    def check(self, name: str, work: Callable[[], Any]) -> None:
        """work raises, or returns what is kept; the check passes if it does on every rank."""
        told, result = "", None
        try:
            result = work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            told = f"rank {self.rank}: {type(error).__name__}: {error}"
            print(f"-- {name}, rank {self.rank}\n{traceback.format_exc()}", file=sys.stderr)
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, told, group=self.gloo)
        failures = [text for text in box if text]
        self.failed += bool(failures)
        if self.rank == 0:
            shown = "" if result is None else f"  {json.dumps(result)}"
            print(f"FAIL {name}: {failures[0]}" if failures else f"PASS {name}{shown}", flush=True)
        self.found[name] = {"failures": failures} if failures else {"result": result}

    def finish(self, about: dict[str, Any] | None = None) -> int:
        """Writes what was found; the exit code."""
        if self.json and self.rank == 0:
            more = {"ranks": self.size, "device": name_of(self.device), "torch": torch.__version__}
            whole = {**more, **(about or {}), "checks": self.found}
            Path(self.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        dist.barrier(group=self.gloo)
        dist.destroy_process_group()
        return 1 if self.failed else 0


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def to_torch(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """bfloat16 is no type of NumPy's: its bits are copied."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array.copy()).to(device)
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)


def bytes_of(t: torch.Tensor | None) -> bytes:
    if t is None or not t.numel():
        return b""
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def wait(device: torch.device) -> None:
    """Until what was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        from trefoil import ep

        ep.synchronize()


def require_close(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float) -> float:
    """The largest difference over (1 + |want|) rtol; raises above 1."""
    got, want = got.detach().float().cpu(), want.detach().float().cpu()
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not got.numel():
        return 0.0
    worst = float(((got - want).abs() / ((1 + want.abs()) * rtol)).nan_to_num(nan=1e30).max())
    if not worst <= 1:
        raise AssertionError(f"{name}: differs by {worst:.3g} times what is allowed")
    return round(worst, 4)
