"""A configuration as command lines of vLLM and SGLang, one a node.

Names and meanings of options: vLLM's page on expert-parallel deployment (docs.vllm.ai, v0.12) and
SGLang's on expert parallelism and PD disaggregation (docs.sglang.io), autumn 2026. A model that is
no preset is $MODEL.
"""

from __future__ import annotations

import json

from trefoil.capacity.configuration import Configuration
from trefoil.capacity.question import Question

# Hugging Face names of the presets (models/moe/*.json, source).
MODELS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm-4.5": "zai-org/GLM-4.5",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "llama4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
IN_FP8 = ("deepseek-v3", "kimi-k2", "minimax-m2")  # of these, published in fp8
ENGINES = ("vllm", "sglang")
DEEPEP_TOKENS = 128  # of a GPU that SGLang has buffers for in LL, unless told
OVERLAPS = {
    "two-batch": "--enable-two-batch-overlap",
    "single-batch": "--enable-single-batch-overlap",
}


def command_of(engine: str, c: Configuration, q: Question, longest: int | None = None) -> str:
    """Of every node of one EP group; $NODE counts from 0, $HEAD is the first node's address.
    longest: of a fleet, tokens of the longest sequence; else the question's context."""
    words = (_vllm if engine == "vllm" else _sglang)(c, q, longest or q.context)
    if q.weight_dtype == "fp8" and q.moe in MODELS and q.moe not in IN_FP8:
        words.append("--quantization fp8")
    if engine == "vllm" and longest is not None:
        moved = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        words.append(f"--kv-transfer-config {_json(moved)}")
    return " \\\n  ".join(words)


def _json(value: dict[str, object]) -> str:
    """As one word of a shell."""
    return "'" + json.dumps(value, separators=(",", ":")) + "'"


def _share_of_memory(q: Question) -> str:
    if not q.gpu_memory_gb or not q.usable_gb:
        return "0.9"
    return f"{q.usable_gb / q.gpu_memory_gb:.2f}"


def _redundant(c: Configuration, q: Question) -> int:
    experts = q.model.experts if q.model else 0
    return c.physical_experts - experts if experts else 0


def _vllm(c: Configuration, q: Question, longest: int) -> list[str]:
    local = c.ep // c.nodes
    backend = "deepep_low_latency" if c.mode == "ll" else "deepep_high_throughput"
    words = [
        f"vllm serve {MODELS.get(q.moe, '$MODEL')}",
        "--tensor-parallel-size 1 --enable-expert-parallel",
        f"--data-parallel-size {c.ep} --data-parallel-size-local {local}",
        f"--all2all-backend {backend}",
    ]
    if c.nodes > 1:
        rank = f"--data-parallel-start-rank $((NODE * {local}))"
        words.append(f"--data-parallel-address $HEAD --data-parallel-rpc-port 13345 {rank}")
        words.append("$([ $NODE = 0 ] || echo --headless)")
    if c.timing and c.timing.overlap == "two-batch":
        words.append("--enable-dbo")
    if redundant := _redundant(c, q):
        words.append(f"--enable-eplb --eplb-config {_json({'num_redundant_experts': redundant})}")
    if q.load == "decode":
        words.append(f"--max-num-seqs {q.tokens} --max-model-len {longest}")
        if q.rows > 1:
            drafts = {"method": "mtp", "num_speculative_tokens": q.rows - 1}
            words.append(f"--speculative-config {_json(drafts)}")
    else:
        words.append(f"--max-num-batched-tokens {q.tokens} --max-model-len {longest}")
    kv = " --kv-cache-dtype fp8" if q.kv_dtype == "fp8" else ""
    words.append(f"--gpu-memory-utilization {_share_of_memory(q)}{kv}")
    return words


def _sglang(c: Configuration, q: Question, longest: int) -> list[str]:
    mode = "low_latency" if c.mode == "ll" else "normal"
    # Dense layers and the head are whole on every GPU, as the plan counts them.
    words = [
        f"sglang serve --model-path {MODELS.get(q.moe, '$MODEL')}",
        f"--tp-size {c.ep} --dp-size {c.ep} --ep-size {c.ep} --enable-dp-attention",
        "--moe-dense-tp-size 1 --enable-dp-lm-head",
        f"--moe-a2a-backend deepep --deepep-mode {mode}",
    ]
    if c.nodes > 1:
        words.append(f"--nnodes {c.nodes} --node-rank $NODE --dist-init-addr $HEAD:5000")
    if c.timing and c.timing.overlap in OVERLAPS:
        words.append(OVERLAPS[c.timing.overlap])
    if redundant := _redundant(c, q):
        words.append(f"--enable-eplb --ep-num-redundant-experts {redundant}")
    if q.load == "decode":
        most = f"--cuda-graph-max-bs-decode {q.tokens} --max-running-requests {q.tokens * c.ep}"
        words.append(f"--disaggregation-mode decode {most}")
        if q.rows > 1:
            drafts = f"--speculative-num-steps {q.rows - 1} --speculative-num-draft-tokens {q.rows}"
            words.append(f"--speculative-algorithm NEXTN --speculative-eagle-topk 1 {drafts}")
    else:
        words.append(f"--disaggregation-mode prefill --chunked-prefill-size {q.tokens * c.ep}")
    kv = " --kv-cache-dtype fp8_e4m3" if q.kv_dtype == "fp8" else ""
    words.append(f"--context-length {longest} --mem-fraction-static {_share_of_memory(q)}{kv}")
    if c.mode == "ll" and q.tokens * q.rows > DEEPEP_TOKENS:
        most = q.tokens * q.rows
        words.insert(0, f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={most}")
    return words
