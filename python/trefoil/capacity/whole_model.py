"""A whole model on one GPU: weights by part, KV cache, activations. Bytes, computed from shapes.

Attention, shared experts and embeddings are on every GPU (data-parallel attention), routed experts
are cut over the EP group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Bytes of an element with its scales: fp8 has a float for each 128 x 128 block, fp4 (MXFP4) a byte
# for each 32.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "fp4": 0.5 + 1 / 32}
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
DTYPE_OF_BITS = {16: "bf16", 8: "fp8", 4: "fp4"}
BF16 = 2.0


@dataclass(frozen=True)
class Model:
    """What models/moe/*.json or a config.json says, as simulate passes it on."""

    hidden: int
    experts: int
    topk: int
    moe_layers: int
    expert_hidden: int
    num_layers: int
    dense_hidden: int
    shared_hidden: int
    vocabulary: int
    tied_embeddings: int
    num_heads: int
    num_kv_heads: int
    head: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    window_tokens: int
    window_layers: int

    @property
    def is_mla(self) -> bool:
        return self.kv_lora > 0

    @property
    def dense_layers(self) -> int:
        return self.num_layers - self.moe_layers

    # ---- Elements of weights ----

    def attention_products(self) -> list[tuple[str, int, int]]:
        """A layer's matrices: name, elements in, elements out."""
        h, heads = self.hidden, self.num_heads
        if not self.is_mla:
            qkv = (heads + 2 * self.num_kv_heads) * self.head
            return [("qkv", h, qkv), ("out", heads * self.head, h)]
        query = heads * (self.nope + self.rope)
        q = [("q_a", h, self.q_lora), ("q_b", self.q_lora, query)]
        return [
            *(q if self.q_lora else [("q", h, query)]),
            ("kv_a", h, self.kv_lora + self.rope),
            ("kv_b", self.kv_lora, heads * (self.nope + self.v)),
            ("out", heads * self.v, h),
        ]

    @property
    def attention(self) -> int:
        return self.num_layers * sum(a * b for _, a, b in self.attention_products())

    @property
    def shared(self) -> int:
        """Gate, up and down of shared experts and of layers without experts."""
        shared = self.moe_layers * self.shared_hidden + self.dense_layers * self.dense_hidden
        return 3 * self.hidden * shared

    @property
    def router(self) -> int:
        return self.moe_layers * self.hidden * self.experts

    @property
    def embeddings(self) -> int:
        """Embeddings and head."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    def routed(self, experts: int) -> int:
        """Of so many experts in every MoE layer."""
        return 3 * self.hidden * self.expert_hidden * experts * self.moe_layers

    @property
    def parameters(self) -> int:
        """All, without norms and biases."""
        rest = self.attention + self.shared + self.router + self.embeddings
        return rest + self.routed(self.experts)

    def shard(self, gpus: int) -> Model:
        """Attention of one of so many GPUs that share its heads; kv_a and its cache are whole on
        each, and keys and values that are fewer than the GPUs are on several."""
        heads, kv_heads = self.num_heads // gpus, -(-self.num_kv_heads // gpus)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)

    # ---- KV cache ----

    @property
    def kv_elements(self) -> int:
        """Of a token in a layer."""
        if self.is_mla:
            return self.kv_lora + self.rope
        return 2 * self.num_kv_heads * self.head

    def windows(self, context: int) -> Iterator[tuple[int, int]]:
        """(layers, tokens that they see) of a sequence of `context` tokens."""
        full = self.num_layers - self.window_layers
        if full:
            yield full, context
        if self.window_layers:
            yield self.window_layers, min(context, self.window_tokens)

    def kv_bytes(self, context: int, dtype: str) -> int:
        """Of one sequence."""
        tokens = sum(layers * seen for layers, seen in self.windows(context))
        return math.ceil(tokens * self.kv_elements * KV_BYTES[dtype])

    # ---- Activations ----

    def activation_bytes(self, tokens: int, logits: int, attention_tp: int = 1) -> int:
        """The most that is alive at a time in one pass: the residual and its norm, with either the
        widest product of a layer (inputs and outputs of attention, or rows, gate, up, product and
        output of the experts) or the logits in float of `logits` tokens."""
        attention = attention_tp * sum(
            b for _, _, b in self.shard(attention_tp).attention_products()
        )
        experts = self.topk * (2 * self.hidden + 3 * self.expert_hidden)
        dense = 3 * max(self.dense_hidden, self.shared_hidden) + self.hidden
        widest = BF16 * tokens * max(attention, experts, dense)
        kept = BF16 * tokens * 2 * self.hidden
        return math.ceil(kept + max(widest, 4.0 * logits * self.vocabulary))


def other_dtype(weight_dtype: str) -> str:
    """Of attention, shared experts and dense layers: fp4 is for routed experts alone."""
    return "bf16" if weight_dtype == "fp4" else weight_dtype


def model_of(answer: dict[str, Any]) -> tuple[Model | None, str]:
    """The model in an answer of simulate; None: its file does not state it, and for which key."""
    told = dict(answer.get("model") or {})
    if not told.get("num_layers"):
        return None, told.get("missing", "num_layers")
    names = ("hidden", "experts", "topk", "moe_layers", "expert_hidden")
    shape = {name: answer[name] for name in names}
    return Model(**shape, **{k: told[k] for k in Model.__annotations__ if k not in shape}), ""
