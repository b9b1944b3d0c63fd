"""Measures a compute record's rows on one GPU with PyTorch: tools/measure_compute.

Products by cuBLAS and PyTorch's grouped kernels in the shapes of DeepSeek-V3 and Qwen3, attention
by scaled_dot_product_attention, sums as elementwise kernels. A row is a CUDA graph of calls over
operands that together exceed the L2 cache, replayed for a while before it counts, so that the
clocks are those of sustained load. A row that PyTorch refuses is named, not left out in silence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trefoil.capacity.compute_costs import DEFAULT, FOLDER
from trefoil.outputs import check_file
from trefoil.sentence_parser import SentenceParser

DENSE = ((7168, 2112), (1536, 24576), (16384, 7168), (7168, 4096), (2048, 7168), (4096, 9216))
EXPERTS = ((7168, 4096), (2048, 7168), (4096, 3072))
L2_BYTES = 256e6  # operands of a graph together: several times any GPU's L2
WARM_S, COUNTED_S, REPEATS = 0.06, 0.06, 3
# Peaks by the name that PyTorch gives: as in models/clusters/*.json, from the datasheets.
PEAKS = {
    "H100": (3350.0, 989.5, 1979.0),
    "H800": (3350.0, 989.5, 1979.0),
    "H200": (4800.0, 989.5, 1979.0),
    "H20": (4000.0, 148.0, 296.0),
}


@dataclass(frozen=True)
class Shape:
    """A kernel to measure: what compute_costs.Cost says of it, and how to make it."""

    kind: str
    dtype: str
    shape: str
    flops: float
    bytes: float
    sizes: tuple[int, ...]


def _product(groups: int, rows: int, inner: int, outer: int, dtype: str) -> Shape:
    size = 1 if dtype == "fp8" else 2
    moved = groups * (rows * inner * size + inner * outer * size + 2 * rows * outer)
    kind = "grouped" if groups > 1 else "product"
    text = f"{groups} x {rows} x {inner} x {outer}" if groups > 1 else f"{rows} x {inner} x {outer}"
    flops = 2.0 * groups * rows * inner * outer
    return Shape(kind, dtype, text, flops, moved, (groups, rows, inner, outer))


def shapes() -> Iterator[Shape]:
    for dtype in ("bf16", "fp8"):
        for rows in (16, 64, 128, 256, 512, 2048, 8192):
            for inner, outer in DENSE:
                yield _product(1, rows, inner, outer, dtype)
        for groups in (2, 4, 8, 32):
            for rows in (16, 64, 256, 1024, 4096):
                for inner, outer in EXPERTS:
                    if groups * rows <= 32768:
                        yield _product(groups, rows, inner, outer, dtype)
    for tokens in (1024, 2048, 4096, 8192):
        for batch, heads in ((1, 128), (4, 32), (8, 64)):
            flops = 4.0 * batch * heads * 128 * tokens * (tokens + 1) / 2
            moved = 2.0 * 4 * batch * heads * tokens * 128
            sizes = (batch, heads, heads, tokens, tokens)
            text = f"{batch} x {heads} heads of 128 x {tokens} tokens, causal"
            yield Shape("attention-prefill", "bf16", text, flops, moved, sizes)
    for context in (1024, 4096, 16384):
        for batch in (16, 64, 256):
            if batch * context > 1 << 20:
                continue
            heads, kv = 64, 8
            flops = 4.0 * batch * heads * 128 * context
            moved = 2.0 * 2 * batch * kv * context * 128
            text = f"{batch} x {heads} heads of 128, {kv} of keys, {context} tokens"
            sizes = (batch, heads, kv, 1, context)
            yield Shape("attention-decode", "bf16", text, flops, moved, sizes)
    for mega in (0.25, 1, 4, 16, 64, 256, 1024):
        n = int(mega * (1 << 20))
        yield Shape("elementwise", "bf16", f"{n} elements, a sum of two", 0.0, 6.0 * n, (n,))


def is_held_out(index: int) -> bool:
    """Of a kind's rows in their order: every fourth."""
    return index % 4 == 2


# ---- On a GPU ----


def _fp8(torch: Any, *size: int) -> Any:
    return torch.randn(*size, device="cuda").to(torch.float8_e4m3fn)


def _product_call(torch: Any, s: Shape) -> Callable[[], Any]:
    _, rows, inner, outer = s.sizes
    if s.dtype == "bf16":
        a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16).t()
        return lambda: torch.mm(a, b)
    a, b = _fp8(torch, rows, inner), _fp8(torch, outer, inner).t()
    of_a = torch.ones(rows, 1, device="cuda")
    of_b = torch.ones(1, outer, device="cuda")
    return lambda: torch._scaled_mm(
        a, b, scale_a=of_a, scale_b=of_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _grouped_call(torch: Any, s: Shape) -> Callable[[], Any]:
    groups, rows, inner, outer = s.sizes
    ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * rows
    if s.dtype == "bf16":
        a = torch.randn(groups * rows, inner, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(groups, outer, inner, device="cuda", dtype=torch.bfloat16)
        return lambda: torch._grouped_mm(a, b.transpose(-2, -1), offs=ends)
    a, b = _fp8(torch, groups * rows, inner), _fp8(torch, groups, outer, inner)
    of_a = torch.ones(groups * rows, device="cuda")
    of_b = torch.ones(groups, outer, device="cuda")
    return lambda: torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), of_a, of_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _attention_call(torch: Any, s: Shape) -> Callable[[], Any]:
    batch, heads, kv_heads, tokens, context = s.sizes
    q = torch.randn(batch, heads, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(batch, kv_heads, context, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    causal = s.kind == "attention-prefill"
    return lambda: attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)


def _elementwise_call(torch: Any, s: Shape) -> Callable[[], Any]:
    a, b, c = (torch.ones(s.sizes[0], device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


CALLS = {
    "product": _product_call,
    "grouped": _grouped_call,
    "attention-prefill": _attention_call,
    "attention-decode": _attention_call,
    "elementwise": _elementwise_call,
}


def measure(torch: Any, s: Shape) -> float:
    """Microseconds of a call: the median of REPEATS."""
    copies = max(1, min(64, int(L2_BYTES / s.bytes) + 1))
    calls = [CALLS[s.kind](torch, s) for _ in range(copies)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def seconds(times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    once = max(seconds(3) / 3, 1e-6)
    seconds(int(WARM_S / once) + 1)
    times = int(COUNTED_S / once) + 1
    return statistics.median(seconds(times) for _ in range(REPEATS)) / times / copies * 1e6


def measured_rows(torch: Any) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows, and what PyTorch refused."""
    rows, refused = [], []
    counts: dict[tuple[str, str], int] = {}
    for s in shapes():
        try:
            us = measure(torch, s)
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            text = str(error).strip().split("\n")[0][:200]
            refused.append({"kind": s.kind, "dtype": s.dtype, "shape": s.shape, "why": text})
            torch.cuda.empty_cache()
            continue
        index = counts[s.kind, s.dtype] = counts.get((s.kind, s.dtype), -1) + 1
        row = {k: v for k, v in asdict(s).items() if k != "sizes"}
        rows.append({**row, "us": round(us, 3), "held_out": is_held_out(index)})
        print(f"{s.kind} {s.dtype} {s.shape}: {us:.1f} us", flush=True)
    return rows, refused


def record_of(torch: Any, name: str) -> dict[str, Any]:
    device = torch.cuda.get_device_name(0)
    peaks = next((p for key, p in sorted(PEAKS.items(), reverse=True) if key in device), None)
    if peaks is None:
        raise RuntimeError(f"{device}: its peak rates are not known; known: {', '.join(PEAKS)}")
    rows, refused = measured_rows(torch)
    published = json.loads((FOLDER / f"{DEFAULT}.json").read_text(encoding="utf-8"))["kinds"]
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    return {
        "format": "trefoil-compute",
        "version": 1,
        "name": name,
        "about": f"products, attention and sums by PyTorch's and cuBLAS's kernels on {device}; "
        f"decoding with compressed keys as published ({DEFAULT}): PyTorch has no kernel of it",
        "source": f"tools/measure_compute, {versions}, a graph of calls over operands beyond L2, "
        f"sustained load, median of {REPEATS}; fp8 with a scale a row",
        "date": datetime.date.today().isoformat(),
        "gpu": {
            "name": device,
            **dict(zip(("hbm_gb_per_s", "bf16_tflops", "fp8_tflops"), peaks, strict=True)),
            "source": "datasheet, as in models/clusters",
        },
        "row_tile": 64,
        "kinds": [k for k in published if k["kind"] == "mla-decode"],
        "rows": rows,
        "refused": refused,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    p = SentenceParser(
        prog="tools/measure_compute",
        description="Measures the kernels of a step on one GPU with PyTorch, and writes a compute "
        "record's rows. Then: python -m trefoil.capacity.compute_fit FILE.",
        formatter_class=argparse.HelpFormatter,
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="the record; its name is the file's")
    p.add_argument("--list", action="store_true", help="the shapes alone, without a GPU")
    options = p.parse_args(arguments)
    if options.list:
        for s in shapes():
            print(f"{s.kind} {s.dtype} {s.shape}: {s.flops:.3g} operations, {s.bytes:.3g} bytes")
        return 0
    if options.out is None:
        p.error("name a file: --out FILE")
    check_file(options.out)
    try:
        import torch
    except ModuleNotFoundError as missing:
        p.error(f"Python lacks the module {missing.name}")
    if not torch.cuda.is_available():
        p.error("PyTorch sees no GPU")
    record = record_of(torch, options.out.stem)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(record['rows'])} rows, {len(record['refused'])} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
