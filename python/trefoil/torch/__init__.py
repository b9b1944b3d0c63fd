"""Expert parallelism as operations of torch: differentiable, and whole under torch.compile.

    from trefoil import ep
    from trefoil.torch import EPGroup, MoEDispatcher

    group = EPGroup(comm, num_experts=8, num_topk=2, max_tokens=16, hidden=64)
    moe = MoEDispatcher(group)
    out = moe(x, experts, logits=router(x))

High throughput (flat layout): route, dispatch, combine. Low latency (expert-major, no backward
pass): ll_dispatch, ll_combine. stream_of(tensor) is torch's current stream for calls of trefoil.ep,
faster than torch.cuda.current_stream. RoutingRecorder writes what a model routes as a trace.
docs/use_in_torch.md and docs/use_record_routing.md have whole scripts.
"""

from trefoil.on_device import stream_of
from trefoil.torch.ep_group import EPGroup
from trefoil.torch.moe import MoEDispatcher, grouped_linear
from trefoil.torch.ops import (
    LLRouting,
    Routing,
    combine,
    dispatch,
    ll_combine,
    ll_dispatch,
    route,
)
from trefoil.torch.recorder import RoutingRecorder

__all__ = [
    "EPGroup",
    "LLRouting",
    "MoEDispatcher",
    "Routing",
    "RoutingRecorder",
    "combine",
    "dispatch",
    "grouped_linear",
    "ll_combine",
    "ll_dispatch",
    "route",
    "stream_of",
]
