"""Finds the module trefoil._c and chooses the library behind it.

The module lies beside the package, or in a build folder of the source tree (build/dev first);
TREFOIL_MODULE names another file. The library is the CPU library inside the module, unless
TREFOIL_EP_LIBRARY or load() names another one: "cpu", "gpu", or the path of a library.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trefoil.places import gpu_library

__all__ = ["c", "load"]

NAME = "trefoil._c"


def _candidates() -> list[Path]:
    if named := os.environ.get("TREFOIL_MODULE"):
        return [Path(named)]
    package = Path(__file__).resolve().parents[1]
    build = package.parents[1] / "build"
    folders = [package, *(build / preset / "python" / "trefoil" for preset in ("dev", "ci"))]
    return [folder / "_c.abi3.so" for folder in folders]


def find_module() -> ModuleType:
    if NAME in sys.modules:
        return sys.modules[NAME]
    for path in _candidates():
        if path.exists():
            return _module_at(path)
    tried = ", ".join(map(str, _candidates()))
    raise ImportError(f"trefoil._c was not built: none of {tried}", name=NAME)


def _module_at(path: Path) -> ModuleType:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    vars(importlib.import_module("trefoil"))["_c"] = module
    return module


if TYPE_CHECKING:
    from trefoil import _c as c
else:
    c = find_module()


def load(library: str | os.PathLike[str] = "cpu") -> None:
    """Chooses the library for all that is made from now on; what was made before is refused then.

    "cpu": the one inside the package. "gpu": libnccl_ep.so.0 of the package, where it has one, or
    as the dynamic loader finds it. Else the path of a library with the C API. OSError with the
    reason if it cannot be loaded.
    """
    name = os.fspath(library)
    c.load(None if name == "cpu" else gpu_library() if name == "gpu" else name)


if os.environ.get("TREFOIL_EP_LIBRARY"):
    load(os.environ["TREFOIL_EP_LIBRARY"])
