"""Weights, KV cache and the roofline of a step, against published sizes and by hand."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from trefoil.capacity.compute_costs import ComputeRecord, KindCosts
from trefoil.capacity.step import (
    Cost,
    Gpu,
    Machine,
    Part,
    Work,
    attention_core,
    attention_costs,
    exchange_seconds,
    hit_experts,
    part_of,
    parts_of,
    product,
)
from trefoil.capacity.terms import Terms
from trefoil.capacity.whole_model import Model, model_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TREFOIL_PROGRAM", "")

# Parameters, 10^9: what each model's own card or paper says.
PUBLISHED = {
    "deepseek-v3": 671,  # DeepSeek-V3, README_WEIGHTS.md: main model
    "glm-4.5": 355,  # GLM-4.5's card
    "gpt-oss-120b": 116.8,  # gpt-oss model card, table 1
    "gpt-oss-20b": 20.9,  # the same
    "kimi-k2": 1026,  # "1T": the files hold 1.03 T with scales
    "llama4-maverick": 400,  # Llama 4's card
    "minimax-m2": 230,  # MiniMax-M2's card
    "mixtral-8x7b": 46.7,  # Mixtral of experts, 2024
    "qwen3-235b-a22b": 235,  # Qwen3's card
    "qwen3-30b-a3b": 30.5,  # the same
}

TOY = Model(
    hidden=64, experts=8, topk=2, moe_layers=3, expert_hidden=16, num_layers=4, dense_hidden=128,
    shared_hidden=16, vocabulary=1000, tied_embeddings=0, num_heads=4, num_kv_heads=2, head=16,
    q_lora=0, kv_lora=0, nope=0, rope=0, v=0, window_tokens=0, window_layers=0,
)  # fmt: skip
# A byte a nanosecond, a thousand operations of bf16 and two thousand of fp8.
GPU = Gpu(hbm_gb_per_s=1.0, bf16_tflops=1.0, fp8_tflops=2.0)
ROOFLINE = Machine(GPU)


def preset(name: str) -> Model:
    if not PROGRAM:
        pytest.skip("TREFOIL_PROGRAM does not name the program")
    options = ["--moe", name, "--gpus", "1", "--tokens", "1", "--engine", "closed-form", "--json"]
    done = subprocess.run(
        [PROGRAM, "simulate", *options], capture_output=True, text=True, check=True
    )
    model, missing = model_of(json.loads(done.stdout))
    assert model is not None, missing
    return model


def test_heads_that_are_shared() -> None:
    half, quarter = TOY.shard(2), TOY.shard(4)
    assert (half.num_heads, half.num_kv_heads, TOY.shard(1)) == (2, 1, TOY)
    assert (quarter.num_heads, quarter.num_kv_heads) == (1, 1), "two GPUs have the same keys"
    assert 2 * half.attention == TOY.attention and 4 * quarter.attention > TOY.attention
    w = Work(10, 100, False, 4, 8, "bf16", "bf16")
    shared = replace(w, attention_tp=2).attention
    assert (shared.tokens, shared.sequences) == (20, 20)
    one, two = attention_core(TOY, w, 100), attention_core(half, shared, 100)
    assert (two.flops, two.bytes) == (one.flops, one.bytes), "twice the tokens, half the heads"
    mla = replace(TOY, kv_lora=32, q_lora=16, rope=8, nope=16, v=16)
    one, two = attention_core(mla, w, 100), attention_core(mla.shard(2), shared, 100)
    assert (two.flops, two.bytes) == (one.flops, 2 * one.bytes), "compressed keys are on both"


def test_sharing_attention_exchanges_rows() -> None:
    gpu = Gpu(1.0, 1.0, nvlink_gb_per_s=2.0, exchange_us=3.0)
    w = Work(10, 100, False, 4, 8, "bf16", "bf16")
    assert exchange_seconds(TOY, gpu, w) == 0
    each = 2 * 3 * 10 * 64 / 2e9 + 3e-6  # bf16 rows of three others
    assert exchange_seconds(TOY, gpu, replace(w, attention_tp=4)) == pytest.approx(2 * 4 * each)
    alone, four = (
        next(
            p
            for p in parts_of(TOY, Machine(gpu), replace(w, attention_tp=n))
            if p.name == "attention"
        )
        for n in (1, 4)
    )
    least = 2 * 4 * each
    assert four.seconds > least and four.low > least and four.high > least
    assert (
        alone.seconds == part_of("attention", Machine(gpu), attention_costs(TOY, w, "bf16")).seconds
    )


def test_every_preset_has_a_published_size() -> None:
    assert {path.stem for path in (ROOT / "models/moe").glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert preset(name).parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


def test_kv_cache_is_the_published_one() -> None:
    # DeepSeek, "Insights into DeepSeek-V3", 2025, table 1: 70.272 kB a token in bf16.
    assert preset("deepseek-v3").kv_bytes(1, "bf16") == 70272
    assert preset("deepseek-v3").kv_bytes(1000, "fp8") == 70272 * 500
    # 36 layers, keys and values of 8 heads of 64; every second layer keeps 128 tokens.
    of = preset("gpt-oss-120b")
    assert of.kv_bytes(1000, "bf16") == 18 * (1000 + 128) * 2 * 8 * 64 * 2


def test_weights_by_hand() -> None:
    assert TOY.attention == 4 * (64 * (4 + 2 + 2) * 16 + 4 * 16 * 64)
    assert TOY.shared == 3 * 64 * (3 * 16 + 1 * 128)
    assert TOY.router == 3 * 64 * 8
    assert TOY.embeddings == 2 * 64 * 1000
    assert TOY.routed(8) == 3 * 64 * 16 * 8 * 3


def test_activations_are_the_widest_moment() -> None:
    # 10 tokens: residual and norm, with experts (2 x (128 + 48)), a dense layer (3 x 128 + 64) ...
    assert TOY.activation_bytes(10, 0) == 2 * 10 * (2 * 64 + 3 * 128 + 64)
    # ... or the logits of all in float.
    assert TOY.activation_bytes(10, 10) == 2 * 10 * 2 * 64 + 4 * 10 * 1000


def test_a_product_takes_the_longer_of_two() -> None:
    few, many = product(1, 100, 200, "bf16"), product(10**6, 100, 200, "bf16")
    assert few == Cost(2 * 100 * 200, 2 * 100 * 200 + 2 * 300, "bf16")
    assert part_of("a", ROOFLINE, [(3.0, few)]) == Part(
        "a", pytest.approx(3 * 40600e-9), "memory", "roofline", *[pytest.approx(3 * 40600e-9)] * 2
    )
    wide = Gpu(1e6, 1.0)
    assert part_of("a", Machine(wide), [(1.0, many)]).limit == "math"
    assert part_of("a", Machine(wide), [(1.0, many)]).seconds == pytest.approx(4e10 / 1e12)
    assert product(1, 100, 200, "fp8").peaks(GPU)[0] == pytest.approx(2 * 100 * 200 / 2e12)
    assert Gpu(1.0, 1.0).tflops("fp8") == 1.0, "no fp8: at the rate of bf16"


def work(tokens: int, context: int, **more: object) -> Work:
    said = {"is_prefill": False, "ep": 4, "physical_experts": 8, "weight_dtype": "bf16"}
    return Work(tokens=tokens, context=context, kv_dtype="bf16", **{**said, **more})


def test_decode_by_hand() -> None:
    parts = {p.name: p for p in parts_of(TOY, ROOFLINE, work(4, 100))}
    # The memory binds everywhere. Weights, rows in and out of both products, keys and values.
    rows = 4 * (64 + 128 + 64 + 64)
    bytes_ = 4 * 2 * (64 * 128 + 64 * 64 + rows) + 4 * 4 * 100 * 64 * 2
    assert parts["attention"].seconds == pytest.approx(bytes_ * 1e-9)
    # Of two experts a GPU all but (1 - 2/8)^16 are hit; 8 rows through gate, up and down.
    hit = 2 * (1 - 0.75**16)
    assert hit_experts(TOY, work(4, 100)) == pytest.approx(hit)
    bytes_ = 3 * 2 * (hit * 3 * 64 * 16 + 8 * (64 + 32 + 16 + 64))
    assert parts["routed experts"].seconds == pytest.approx(bytes_ * 1e-9)
    assert parts["head"].seconds == pytest.approx(2 * (64 * 1000 + 4 * 1064) * 1e-9)
    shared, dense = (
        3 * (64 * 32 + 4 * 96 + 16 * 64 + 4 * 80),
        64 * 256 + 4 * 320 + 128 * 64 + 4 * 192,
    )
    assert parts["shared experts"].seconds == pytest.approx(2 * shared * 1e-9)
    assert parts["dense layers"].seconds == pytest.approx(2 * dense * 1e-9)
    # Router, two norms a layer, and the activations of 8 rows of routed, 4 of shared and of dense.
    bytes_ = 3 * 2 * (64 * 8 + 4 * 72) + 2 * 4 * 2 * 4 * 4 * 64
    bytes_ += 6 * (3 * 8 * 16 + 3 * 4 * 16 + 4 * 128)
    # Positions of queries and new keys and values in and out, scores of eight experts in float.
    bytes_ += 4 * 2 * 2 * 4 * (4 * 16 + 64) + 3 * 4 * 4 * 8
    assert parts["router, norms, activations"].seconds == pytest.approx(bytes_ * 1e-9)
    assert {p.limit for p in parts.values()} == {"memory"}


def test_longer_contexts_read_more() -> None:
    at = [
        {p.name: p.seconds for p in parts_of(TOY, ROOFLINE, work(4, context))}
        for context in (100, 200)
    ]
    assert at[1]["attention"] - at[0]["attention"] == pytest.approx(4 * 4 * 100 * 64 * 2 * 1e-9)
    assert at[1]["routed experts"] == at[0]["routed experts"]


def test_prefill_counts_pairs() -> None:
    fast = Gpu(1e9, 1.0)  # memory does not bind
    parts = {p.name: p for p in parts_of(TOY, Machine(fast), work(200, 100, is_prefill=True))}
    # Two prompts of 100: products, and each token with itself and those before it.
    flops = 4 * (2 * 200 * (64 * 128 + 64 * 64) + 2 * (2 * 100 * 101 / 2) * 2 * 4 * 16)
    assert parts["attention"].seconds == pytest.approx(flops / 1e12)
    assert parts["attention"].limit == "math"
    assert parts["head"].seconds == pytest.approx(2 * 2 * 64 * 1000 / 1e12), "a row a prompt"


def test_cached_tokens_are_seen_but_not_computed() -> None:
    fast = Gpu(1e9, 1.0)  # memory does not bind
    of = {"is_prefill": True, "cached": 60}
    parts = {p.name: p for p in parts_of(TOY, Machine(fast), work(200, 100, **of))}
    # Five prompts, 40 tokens of each computed: the i-th of them sees 60 + i.
    pairs = 5 * sum(range(61, 101))
    flops = 4 * (2 * 200 * (64 * 128 + 64 * 64) + 2 * pairs * 2 * 4 * 16)
    assert parts["attention"].seconds == pytest.approx(flops / 1e12)
    assert parts["head"].seconds == pytest.approx(2 * 5 * 64 * 1000 / 1e12), "a row a prompt"
    windowed = replace(TOY, window_tokens=80, window_layers=4)
    parts = {p.name: p for p in parts_of(windowed, Machine(fast), work(200, 100, **of))}
    pairs = 5 * sum(min(i, 80) for i in range(61, 101))
    flops = 4 * (2 * 200 * (64 * 128 + 64 * 64) + 2 * pairs * 2 * 4 * 16)
    assert parts["attention"].seconds == pytest.approx(flops / 1e12)
    # MLA makes keys and values of the cached tokens, too: kv_b of all 100, not of 40.
    m = preset("deepseek-v3")
    long, short = (
        parts_of(m, Machine(fast), work(40, 100, physical_experts=256, is_prefill=True, cached=n))
        for n in (60, 0)
    )
    more = 61 * 2 * 60 * m.kv_lora * m.num_heads * (m.nope + m.v)
    seen = 61 * 2 * (sum(range(61, 101)) - 40 * 101 / 2) * m.num_heads * (m.nope + m.rope + m.v)
    gap = long[0].seconds - short[0].seconds
    assert gap == pytest.approx((more + seen) / 1e12)


def test_products_in_fp4_take_rows_in_fp4() -> None:
    slow = Gpu(1e-3, 1e6, 1e6, 2e6)  # memory binds
    assert slow.fp4_rate == 2
    terms = [Terms(), Terms(fp4_rate=slow.fp4_rate)]
    at = [
        {p.name: p for p in parts_of(TOY, Machine(slow), work(4, 100, weight_dtype="fp4", terms=t))}
        for t in terms
    ]
    less = 3 * 8 * (64 + 16) * (2 - (0.5 + 1 / 32))
    gap = at[0]["routed experts"].seconds - at[1]["routed experts"].seconds
    assert gap == pytest.approx(less * 1e-6)


def test_mla_reads_compressed_keys() -> None:
    m = preset("deepseek-v3")
    memory = Gpu(1000.0, 1e9)
    at = [
        next(p for p in parts_of(m, Machine(memory), work(1, c, physical_experts=256))).seconds
        for c in (1000, 2000)
    ]
    assert at[1] - at[0] == pytest.approx(70272 * 1000 / 1e12)


def test_fp8_takes_casts_and_a_byte_an_element() -> None:
    at = {p.name: p for p in parts_of(TOY, ROOFLINE, work(4, 100, weight_dtype="fp8"))}
    small = 1 + 4 / 128**2
    shared = 3 * (small * (64 * 32 + 16 * 64) + 4 * (64 + 2 * 32 + 16 + 2 * 64))
    assert at["shared experts"].seconds == pytest.approx(shared * 1e-9)
    # Rows of 64 go into qkv and out in all layers, into shared experts in three, dense in one.
    bf16 = {p.name: p for p in parts_of(TOY, ROOFLINE, work(4, 100))}
    name = "router, norms, activations"
    casts = 3 * 4 * 64 * (4 + 3 + 1)
    less = 3 * 8 * 16 + 3 * 4 * 16 + 4 * 128  # activations are written in fp8
    assert at[name].seconds - bf16[name].seconds == pytest.approx((casts - less) * 1e-9)


def test_the_busiest_gpu_counts() -> None:
    mean, busy = (
        {p.name: p for p in parts_of(TOY, ROOFLINE, work(4, 100, busiest=b))} for b in (1.0, 1.5)
    )
    rows = 3 * 2 * 8 * 0.5 * (64 + 32 + 16 + 64)
    gap = busy["routed experts"].seconds - mean["routed experts"].seconds
    assert gap == pytest.approx(rows * 1e-9)
    assert busy["attention"] == mean["attention"]


def test_rows_of_an_expert_come_in_tiles() -> None:
    costs = KindCosts(0.0, 1.0, 1.0, 8.0)
    record = ComputeRecord("r", "g", "", 64, {("grouped", "bf16"): costs})
    fast = Gpu(1e9, 1.0)  # memory does not bind
    tiled = {p.name: p for p in parts_of(TOY, Machine(fast, record), work(4, 100))}
    hit = 2 * (1 - 0.75**16)  # 8 rows for two experts: a tile each
    flops = 3 * 2 * 64 * hit * 3 * 64 * 16
    assert tiled["routed experts"].seconds == pytest.approx(flops / 1e12)
    assert (tiled["routed experts"].costs, tiled["head"].costs) == ("fitted", "roofline")
