"""The interface of DeepEP's first version (`deep_ep.Buffer`) over this library.

    import trefoil.deep_ep

    trefoil.deep_ep.install()  # `import deep_ep` finds this module from now on

Programs written for DeepEP then run as they are, on host tensors. docs/deep_ep.md has the methods
and what is different.
"""

from __future__ import annotations

import sys

from trefoil.deep_ep import utils
from trefoil.deep_ep.buffer import Buffer, Config
from trefoil.deep_ep.utils import EventHandle, EventOverlap


def install() -> None:
    """Makes `deep_ep` and `deep_ep.utils` this module, in this process. ImportError: another one is
    imported already."""
    own = sys.modules[__name__]
    if sys.modules.setdefault("deep_ep", own) is not own:
        raise ImportError("another deep_ep is imported already", name="deep_ep")
    sys.modules["deep_ep.utils"] = utils


__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "utils"]
