"""vLLM 0.26: its backends deepep_low_latency and deepep_high_throughput over this library.

    TREFOIL_EP_LIBRARY=gpu vllm serve ... --enable-expert-parallel \
        --all2all-backend deepep_low_latency

The wheel names register() as a plugin (vllm.general_plugins), which vLLM calls in each of its
processes. It does nothing unless TREFOIL_EP_LIBRARY is set; "cpu" serves on vLLM's CPU platform.

Layers without quantisation use the library's own layouts. Low latency's experts take rows by token,
which vLLM's kernels for bfloat16 are faster on; high throughput's host does not wait for the number
of rows. TREFOIL_VLLM=deep_ep: as DeepEP has it; native, the default.
"""

from __future__ import annotations

import os
from typing import Any

import trefoil.deep_ep


class AnyHidden(list[int]):
    """In the place of the hidden sizes that DeepEP is compiled for."""

    def __contains__(self, hidden: object) -> bool:
        return True


def is_native() -> bool:
    """What TREFOIL_VLLM asks for."""
    way = os.environ.get("TREFOIL_VLLM", "native")
    if way not in ("native", "deep_ep"):
        raise ValueError(f"TREFOIL_VLLM is '{way}', must be native or deep_ep")
    return way == "native"


def register() -> None:
    """Lets vLLM find this library as deep_ep; hidden sizes stay as they are."""
    if not os.environ.get("TREFOIL_EP_LIBRARY"):
        return
    trefoil.deep_ep.install()
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll
    from vllm.platforms import current_platform

    any_hidden: Any = staticmethod(lambda hidden, *dtype: hidden)
    low_latency: Any = deepep_ll.DeepEPLLPrepareAndFinalize
    low_latency.SUPPORTED_HIDDEN_SIZES = AnyHidden()
    low_latency.maybe_roundup_layer_hidden_size = any_hidden
    high_throughput: Any = deepep_ht.DeepEPHTPrepareAndFinalize
    high_throughput.maybe_roundup_layer_hidden_size = any_hidden
    if current_platform.is_cpu():
        from trefoil.hosts import vllm_cpu

        vllm_cpu.register()
    elif is_native():
        from trefoil.hosts import vllm_native

        vllm_native.register()
