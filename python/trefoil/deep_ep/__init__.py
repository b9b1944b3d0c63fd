"""The interface of DeepEP's first version (`deep_ep.Buffer`) over this library.

    import trefoil.deep_ep

    trefoil.deep_ep.install()  # `import deep_ep` finds this module from now on

Programs written for DeepEP then run as they are, on host tensors. docs/deep_ep.md has the methods
and what is different.
"""

from __future__ import annotations

import sys

import torch

from trefoil.deep_ep import buffer, utils
from trefoil.deep_ep.buffer import Buffer, Config
from trefoil.deep_ep.utils import EventHandle, EventOverlap

topk_idx_t = torch.int64  # of topk_idx; int32 is taken, too


def install() -> None:
    """Makes `deep_ep` this module, and deep_ep.buffer and deep_ep.utils its own, in this process.
    ImportError: another one is imported already."""
    own = sys.modules[__name__]
    if sys.modules.setdefault("deep_ep", own) is not own:
        raise ImportError("another deep_ep is imported already", name="deep_ep")
    sys.modules.update({"deep_ep.buffer": buffer, "deep_ep.utils": utils})


__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "buffer",
    "install",
    "topk_idx_t",
    "utils",
]
