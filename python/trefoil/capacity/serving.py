"""A configuration as command lines of vLLM and SGLang, one a host.

Names and meanings of options: the parsers of vLLM 0.33 and SGLang 0.5.23 (wheels of November 2026)
and their pages on expert parallelism and quantisation. A model that is no preset, or weights that
its publisher does not offer, is $MODEL. What an engine refuses, or does not document, is a sentence
instead of a command.
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
# Of these, published in other weights than bf16.
IN_FP8 = ("deepseek-v3", "kimi-k2", "minimax-m2")
IN_MXFP4 = ("gpt-oss-120b", "gpt-oss-20b")
ENGINES = ("vllm", "sglang")
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
DEEPEP_TOKENS = 128  # of a GPU that SGLang has buffers for in LL, unless told
OVERLAPS = {
    "two-batch": "--enable-two-batch-overlap",
    "single-batch": "--enable-single-batch-overlap",
}


class NoCommandError(ValueError):
    """The engine has no such configuration; the text says why."""


def command_of(engine: str, c: Configuration, q: Question, longest: int | None = None) -> str:
    """Of every host of one EP group; $NODE counts from 0, $HEAD is the first host's address.
    longest: of a fleet, tokens of the longest sequence; else the question's context."""
    try:
        words = (_vllm if engine == "vllm" else _sglang)(c, q, longest or q.context)
    except NoCommandError as error:
        return f"# no {NAMES[engine]} command: {error}"
    if q.weight_dtype == "fp8" and _published(q) == "bf16":
        words.append("--quantization fp8")
    if engine == "vllm" and longest is not None:
        moved = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        words.append(f"--kv-transfer-config {_json(moved)}")
    notes = [f"# MODEL: {q.moe} with weights in {_format(q)}\n"] if _is_other(q) else []
    return "".join([*notes, " \\\n  ".join(words)])


def _json(value: dict[str, object]) -> str:
    """As one word of a shell."""
    return "'" + json.dumps(value, separators=(",", ":")) + "'"


# ---- What is asked for ----


def _published(q: Question) -> str:
    """The weights that a preset's publisher offers; "" for a model that is no preset."""
    if q.moe not in MODELS:
        return ""
    return "mxfp4" if q.moe in IN_MXFP4 else "fp8" if q.moe in IN_FP8 else "bf16"


def _format(q: Question) -> str:
    """Of the experts' weights: nvfp4 where the publisher has no fp4."""
    if q.weight_dtype != "fp4":
        return q.weight_dtype
    if q.moe not in MODELS:
        raise NoCommandError(f"whether the fp4 weights of {q.moe} are nvfp4 or mxfp4 is not known")
    return "mxfp4" if q.moe in IN_MXFP4 else "nvfp4"


def _is_other(q: Question) -> bool:
    """A checkpoint that the publisher does not offer; bf16 is cast to fp8 while it is loaded."""
    published = _published(q)
    return published not in ("", _format(q)) and (published, _format(q)) != ("bf16", "fp8")


def _model(q: Question) -> str:
    return "$MODEL" if _is_other(q) else MODELS.get(q.moe, "$MODEL")


def _hosts(c: Configuration, q: Question) -> tuple[int, int]:
    """Hosts of a group, and GPUs of each: an NVLink domain may have several."""
    of_domain = c.ep // c.nodes
    local = min(q.gpus_per_host or of_domain, of_domain)
    if of_domain % local:
        raise NoCommandError(f"EP {c.ep} does not fill hosts of {local} GPUs")
    return c.ep // local, local


def _is_wide(c: Configuration, q: Question) -> bool:
    """One NVLink domain over several hosts, as in a rack of GB200."""
    return c.nodes == 1 and _hosts(c, q)[0] > 1


def _overlap(c: Configuration) -> str:
    return c.timing.overlap if c.timing else ""


def _check_fp4(q: Question) -> None:
    if _format(q) != "nvfp4":
        return
    if q.gpu is None or q.gpu.fp4_tflops is None:
        raise NoCommandError(
            f"its nvfp4 experts over DeepEP need GPUs with products in fp4; {q.cluster} does not "
            "state gpu_fp4_tflops"
        )
    if q.dispatch_dtype == "fp8":
        raise NoCommandError(
            "rows of nvfp4 experts travel in bf16 or nvfp4: --dispatch-dtype bf16 or fp4"
        )


def _share_of_memory(q: Question) -> str:
    if not q.gpu_memory_gb or not q.usable_gb:
        return "0.9"
    return f"{q.usable_gb / q.gpu_memory_gb:.2f}"


def _redundant(c: Configuration, q: Question) -> int:
    experts = q.model.experts if q.model else 0
    return c.physical_experts - experts if experts else 0


# ---- vLLM ----


def _vllm_kernels(c: Configuration, q: Question) -> tuple[str, list[str]]:
    """Environment, and options of communication and experts."""
    is_ll, is_nvfp4 = c.mode == "ll", _format(q) == "nvfp4"
    if is_ll:
        experts = " --moe-backend flashinfer_cutedsl" if is_nvfp4 else ""
        settings = ["VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL=1"] if _is_wide(c, q) else []
        if q.dispatch_dtype == "fp4":
            settings.append("VLLM_DEEPEPLL_NVFP4_DISPATCH=1")
        environment = "".join(f"{s} " for s in settings)
        return environment, [f"--all2all-backend deepep_low_latency{experts}"]
    experts = " --moe-backend flashinfer_trtllm" if is_nvfp4 else ""
    if is_nvfp4 and (q.dispatch_dtype == "fp4") != _is_wide(c, q):
        travel = "nvfp4 by FlashInfer's" if _is_wide(c, q) else "bf16 by DeepEP's"
        needed = "fp4" if _is_wide(c, q) else "bf16"
        raise NoCommandError(f"rows travel in {travel} all-to-all: --dispatch-dtype {needed}")
    if not _is_wide(c, q):
        return "", [f"--all2all-backend deepep_high_throughput{experts}"]
    # DeepEP's HT kernels exchange CUDA's IPC handles, which are a host's.
    if _overlap(c) == "two-batch":
        raise NoCommandError(
            "FlashInfer's all-to-all, which HT over several hosts of an NVLink domain takes, does "
            "not run with --enable-dbo: --overlap none,shared"
        )
    return "", [f"--all2all-backend flashinfer_nvlink_one_sided{experts}"]


def _vllm(c: Configuration, q: Question, longest: int) -> list[str]:
    _check_fp4(q)
    (hosts, local), tp = _hosts(c, q), q.attention_tp
    if local % tp:
        raise NoCommandError(f"--attention-tp {tp}: a host has {local} GPUs of a group")
    environment, kernels = _vllm_kernels(c, q)
    words = [
        f"{environment}vllm serve {_model(q)}",
        f"--tensor-parallel-size {tp} --enable-expert-parallel",
        f"--data-parallel-size {c.ep // tp} --data-parallel-size-local {local // tp}",
        *kernels,
    ]
    if hosts > 1:
        rank = f"--data-parallel-start-rank $((NODE * {local // tp}))"
        words.append(f"--data-parallel-address $HEAD --data-parallel-rpc-port 13345 {rank}")
        words.append("$([ $NODE = 0 ] || echo --headless)")
    if _overlap(c) == "two-batch":
        words.append("--enable-dbo")
    if redundant := _redundant(c, q):
        words.append(f"--enable-eplb --eplb-config {_json({'num_redundant_experts': redundant})}")
    if q.load == "decode":
        words.append(f"--max-num-seqs {q.tokens * tp} --max-model-len {longest}")
        if q.rows > 1:
            drafts = {"method": "mtp", "num_speculative_tokens": q.rows - 1}
            words.append(f"--speculative-config {_json(drafts)}")
    else:
        words.append(f"--max-num-batched-tokens {q.tokens * tp} --max-model-len {longest}")
    kv = " --kv-cache-dtype fp8" if q.kv_dtype == "fp8" else ""
    words.append(f"--gpu-memory-utilization {_share_of_memory(q)}{kv}")
    return words


# ---- SGLang ----


def _sglang_kernels(c: Configuration, q: Question) -> list[str]:
    """Options of communication and experts."""
    mode = "low_latency" if c.mode == "ll" else "normal"
    deepep = f"--moe-a2a-backend deepep --deepep-mode {mode}"
    form = _format(q)
    if form == "mxfp4":
        raise NoCommandError("its mxfp4 experts do not run over DeepEP")
    if form != "nvfp4":
        return [deepep]
    if q.rows > 1:
        raise NoCommandError(
            "drafts beside nvfp4 experts over DeepEP are not documented: --drafts 0"
        )
    if c.mode == "ll":
        return [deepep, "--quantization modelopt_fp4 --moe-runner-backend flashinfer_cutedsl"]
    travel = "nvfp4" if q.dispatch_dtype == "fp4" else "bf16"
    if c.nodes > 1:
        raise NoCommandError(
            "nvfp4 experts have no kernels for DeepEP's normal mode, and FlashInfer's all-to-all "
            f"is for one NVLink domain, EP {c.ep} takes {c.nodes}"
        )
    if _overlap(c) in OVERLAPS:
        raise NoCommandError(
            f"--overlap {_overlap(c)} with FlashInfer's all-to-all, which nvfp4 experts take in "
            "HT, is not documented: --overlap none,shared"
        )
    return [
        f"--moe-a2a-backend flashinfer --flashinfer-a2a-dispatch-type {travel}",
        "--quantization modelopt_fp4 --moe-runner-backend flashinfer_cutlass",
    ]


def _sglang(c: Configuration, q: Question, longest: int) -> list[str]:
    _check_fp4(q)
    hosts, _ = _hosts(c, q)
    # Dense layers and the head are whole on every GPU, as the plan counts them.
    words = [
        f"sglang serve --model-path {_model(q)}",
        f"--tp-size {c.ep} --attn-dp-size {c.ep // q.attention_tp} --ep-size {c.ep}",
        "--moe-dense-tp-size 1 --enable-dp-lm-head",
        *_sglang_kernels(c, q),
    ]
    if hosts > 1:
        words.append(f"--nnodes {hosts} --node-rank $NODE --dist-init-addr $HEAD:5000")
    if _overlap(c) in OVERLAPS:
        words.append(OVERLAPS[_overlap(c)])
    if redundant := _redundant(c, q):
        words.append(f"--enable-eplb --ep-num-redundant-experts {redundant}")
    if q.load == "decode":
        most = f"--max-running-requests {q.tokens * c.ep}"
        graphs = f"--cuda-graph-max-bs-decode {q.tokens * q.attention_tp}"
        words.append(f"--disaggregation-mode decode {graphs} {most}")
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
    if c.mode == "ll" and q.dispatch_dtype == "fp4":
        words.insert(0, "SGLANG_MOE_NVFP4_DISPATCH=1")
    return words
