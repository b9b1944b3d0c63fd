"""Where data and libraries lie: in the source tree, an installation, or a wheel."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL_ROOT = Path(__file__).resolve().parent / "_root"  # bin, lib, share of a wheel
GPU_LIBRARY = "libnccl_ep.so.0"


def homes(in_tree: str, installed: str) -> list[Path]:
    """The folders of these that are there, the source tree's first."""
    there = (ROOT / in_tree, ROOT / installed, WHEEL_ROOT / "share" / "trefoil" / installed)
    return [p for p in there if p.is_dir()]


def gpu_library() -> str:
    """The wheel's or a build folder's, else its name, for the dynamic loader."""
    builds = (ROOT / "build" / preset / "api" for preset in ("dev", "ci"))
    there = (folder / GPU_LIBRARY for folder in (WHEEL_ROOT / "lib", *builds))
    return next((str(path) for path in there if path.exists()), GPU_LIBRARY)


def measurements() -> list[Path]:
    return homes("validate/data", "data")
