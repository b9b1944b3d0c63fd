"""Answers of `trefoil simulate --json`, made up: times by a formula that tests can solve.

LL takes 10 us + 2 us a token, HT 50 us + 1 us a token, both times (1 + ep / 64); half of it is
dispatch. So LL and HT cross at 40 tokens for every EP size.
"""

from __future__ import annotations

from typing import Any

from trefoil.capacity.configuration import WhatIf, configuration_of
from trefoil.capacity.crossover import sample_of
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.question import Question


def layer_seconds(mode: str, ep: int, tokens: int) -> float:
    us = 10 + 2 * tokens if mode == "ll" else 50 + tokens
    return us * 1e-6 * (1 + ep / 64)


def answer(mode: str, ep: int, tokens: int = 128, spread: float = 0.1) -> dict[str, Any]:
    half = layer_seconds(mode, ep, tokens) / 2
    interval = {
        "low_seconds": half * (1 - spread),
        "high_seconds": half * (1 + spread),
        "kind": "extrapolated" if ep > 16 else "interpolated",
        "n": 40,
        "outside": f"{ep} ranks (fitted: 8 to 16)" if ep > 16 else "",
    }
    op = {
        "engine": "queues",
        "seconds": half,
        "first_rank_seconds": half * 0.9,
        "bound_seconds": half * 0.8,
        "closed_form_seconds": half * 0.7,
        "limit": "nic-in" if ep > 8 else "nvlink-in",
        "bytes": {"self": 1000, "nvlink": 2000 * tokens, "net": 3000 * tokens if ep > 8 else 0},
        "nvlink_port_bytes": 20 * tokens,
        "nic_port_bytes": 30 * tokens if ep > 8 else 0,
        "interval": interval,
    }
    return {
        "mode": mode,
        "gpus": ep,
        "ep": ep,
        "ranks_per_node": 8,
        "tokens": tokens,
        "hidden": 7168,
        "experts": 256,
        "physical_experts": 256,
        "topk": 8,
        "moe_layers": 58,
        "expert_hidden": 2048,
        "costs": f"made-up-{mode}",
        "sms": 20 if mode == "ht" else 8,
        "dispatch": op,
        "combine": op,
        "seconds": 2 * half,
        "memory": {
            "library": "gpu" if ep == 8 else "cpu",
            **({} if ep == 8 else {"gpu_refuses": "made-up reason"}),
            "output_bytes": 10**8 if mode == "ll" else 10**6,
            "group_device_bytes": 10**6,
            "group_shared_bytes": 2 * 10**6 * tokens,
            "group_host_bytes": 10**9,
            "handle_device_bytes": 10**5,
            "handle_shared_bytes": 0,
            "handle_host_bytes": 0,
        },
    }


def question(**changes: Any) -> Question:
    said: dict[str, Any] = {
        "cluster": "dgx-h100",
        "moe": "deepseek-v3",
        "load": "decode",
        "tokens": 128,
        "gpus": 64,
        "modes": ["ll", "ht"],
        "ep_sizes": [8, 16, 32, 64],
        "moe_layers": 58,
    }
    return Question(**{**said, **changes})


def links(nodes: int, share: float) -> list[dict[str, Any]]:
    """Of every port; port i of node n works share * (n + 1) / nodes of the time."""
    return [
        {
            "op": op,
            "kind": kind,
            "index": node * 8 + column,
            "bytes": 1000 * (node + 1),
            "busy_seconds": 1e-5,
            "share": share * (node + 1) / nodes,
        }
        for op in ("dispatch", "combine")
        for kind in ("nvlink-out", "nvlink-in", "nic-out", "nic-in", "send")
        for node in range(nodes)
        for column in range(8)
    ]


def plan(**changes: Any) -> CapacityPlan:
    """All configurations, samples from 1 to 1024 tokens, one what-if; not judged yet."""
    q = question(**changes)
    pairs = [(mode, ep) for mode in q.modes for ep in q.ep_sizes]
    made = CapacityPlan(q, [configuration_of(answer(m, ep, q.tokens), q) for m, ep in pairs])
    for c in made.configurations:
        c.what_if = [
            WhatIf("rail-fail 0", c.layer * 1.5, 1.5)
            if c.nodes > 1
            else WhatIf("rail-fail 0", None, None, "EP 8: there are no rails"),
            WhatIf("zipf 1", c.layer * c.ep / 4, c.ep / 4),
        ]
    made.samples = [
        sample_of(answer(m, ep, tokens)) for m, ep in pairs for tokens in (1, 4, 16, 64, 256, 1024)
    ]
    return made
