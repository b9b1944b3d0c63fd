"""The structs of include/trefoil/*.h for ctypes, field by field, declared as C does."""

from __future__ import annotations

import ctypes as ct
import re
from typing import Any

_TYPES: dict[str, Any] = {
    "char": ct.c_char,
    "int": ct.c_int,
    "int64": ct.c_int64,
    "uint64": ct.c_uint64,
    "size": ct.c_size_t,
    "double": ct.c_double,
    "pointer": ct.c_void_p,
}


def _type_of(name: str) -> Any:
    """ "int", "char[64]", "int[2][2]", "Routing*"; structs by the names they were declared with."""
    base, pointer, sizes = re.fullmatch(r"(\w+)(\*?)((?:\[\d+\])*)", name).groups()
    kind = ct.POINTER(_TYPES[base]) if pointer else _TYPES[base]
    for size in re.findall(r"\d+", sizes):
        kind = kind * int(size)
    return kind


class Fields(ct.Structure):
    """ctypes keeps the low bits of a number that a field does not hold; this refuses it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        kept = getattr(self, name)
        if isinstance(value, int) and isinstance(kept, int) and kept != value:
            raise OverflowError(f"{name} is {value}; its field in C holds {kept} of that")


def _struct(name: str, declarations: str) -> Any:
    """A struct of declarations like "int a, b; double c"."""
    fields = []
    for declaration in declarations.split(";"):
        kind, names = declaration.split(maxsplit=1)
        fields += [(each.strip(), _type_of(kind)) for each in names.split(",")]
    _TYPES[name] = type(name, (Fields,), {"_fields_": fields})
    return _TYPES[name]


Shape = _struct("Shape", "int num_ranks, ranks_per_node, num_experts, topk; int64 max_tokens")
Routing = _struct("Routing", "Shape shape; pointer num_tokens, topk_idx")
Case = _struct(
    "Case",
    """
    Routing routing;
    int mode;
    int64 width;
    int dtype, quant, round_scales;
    size scale_bytes;
    int backward;
    size alignment;
    int global_ids;
    int64 max_recv;
    int drop, zero_copy_on, combine_partial, rails;
    pointer active, active_combine
    """,
)
PlanConfig = _struct(
    "PlanConfig",
    """
    int mode, op, variant, combine_partial, chunk_tokens;
    size row_bytes
    """,
)
ClusterFields = _struct(
    "ClusterFields",
    """
    char[64] name;
    int gpus_per_node, max_gpus, gpus_per_nic;
    double nvlink_gb_per_s, nic_gb_per_s, net_latency_us, ll_fixed_us, ht_fixed_us;
    int nodes_per_leaf, rail_leaves;
    double leaf_oversubscription, gpu_memory_gb, nvlink_line_gb_per_s;
    double gpu_hbm_gb_per_s, gpu_bf16_tflops, gpu_fp8_tflops, gpu_fp4_tflops;
    int gpus_per_host, gpu_sms
    """,
)
MoeFields = _struct(
    "MoeFields",
    """
    char[64] name;
    int hidden, num_experts, topk, num_moe_layers, expert_hidden, num_shared;
    int num_layers, dense_hidden, shared_hidden, vocab, tied_embeddings, num_heads;
    int num_kv_heads, head_dim, q_lora, kv_lora, nope_dim, rope_dim, v_dim;
    int window_tokens, window_layers, num_groups, topk_groups, weight_bits;
    char[64] missing
    """,
)
OpCosts = _struct(
    "OpCosts",
    """
    double launch_us, token_ns, send_row_ns, send_gb_per_s_per_sm, receive_row_ns,
    receive_gb_per_s_per_sm, forward_share, signal_ns, net_signal_ns, net_start_us,
    node_round_us, send_share, most_send_sms, whole_sms_from, slot_ns,
    slot_gb_per_s_per_sm, announce_us, rest_gb_per_s_per_sm, missing_us, flow_share,
    peers_flow_share, row_head_bytes, batch_sources, batch_gb_per_s_per_sm,
    slot_gb_per_s, round_us, round_bytes, few_tokens, few_round_bytes, rank_round_us,
    flow_wait_us, pull_sms, pull_sms_of_two, pull_row_ns, pull_gb_per_s_per_sm, pull_port_share,
    stage_gb_per_s
    """,
)
CostFields = _struct(
    "CostFields",
    """
    char[64] name;
    int num_sms;
    double nvlink_gb_per_s, nic_gb_per_s, nvlink_latency_ns, net_latency_ns, nvlink_row_ns,
    net_message_ns, rows_per_message;
    int signals_per_expert;
    double nvlink_back_share;
    int own_rows_stay;
    double product_share;
    OpCosts[2] op
    """,
)
Residuals = _struct("Residuals", "int n; double low, high, mape_pct")
Growth = _struct("Growth", "int n; double value")
FitRange = _struct(
    "FitRange",
    """
    int[2] nodes, ranks, hidden, experts, topk;
    int64[2] tokens;
    int[2] sms;
    int[2][2] row_bytes
    """,
)
Record = _struct(
    "Record",
    """
    CostFields costs;
    int is_ht, variant;
    FitRange range;
    Residuals[2] inside, outside, within;
    char[256] cluster;
    Growth[2] per_doubling, per_scale, across_nodes
    """,
)
Point = _struct(
    "Point",
    """
    int nodes, ranks, hidden, experts, topk;
    int64 tokens;
    int sms, row_bytes, other_ports
    """,
)
IntervalFields = _struct(
    "IntervalFields",
    """
    double low_us, high_us;
    int is_extrapolated, n;
    char[512] outside;
    double doublings
    """,
)
TraceSpec = _struct(
    "TraceSpec",
    """
    Shape shape;
    int num_steps;
    uint64 seed;
    int popularity;
    double skew;
    int hot;
    double ragged;
    int num_empty_ranks, burst_period;
    double burst_low, unused_fraction;
    int with_weights, num_groups, topk_groups;
    int64 num_masked
    """,
)
SimWorkload = _struct(
    "SimWorkload",
    """
    Routing* routing;
    int mode, variant, combine_partial, chunk_tokens;
    size dispatch_row_bytes, combine_row_bytes
    """,
)
Change = _struct("Change", "int kind, index; double factor")
Flow = _struct("Flow", "int source, target; double gb_per_s, start_us, end_us")
SimRun = _struct(
    "SimRun",
    """
    ClusterFields* cluster;
    CostFields* costs;
    int engine, num_sms;
    double oversubscription, start_skew_us;
    uint64 seed;
    Change* changes;
    int num_changes;
    Flow* flows;
    int num_flows, has_products;
    int64 max_spans;
    double timeout_s
    """,
)
Bound = _struct("Bound", "double us, fixed_us; int limit")
Loads = _struct("Loads", "uint64[5] max_bytes; int[5] busiest; uint64[3] total_bytes")
Link = _struct("Link", "int kind, index; uint64 bytes; double busy_us, share")
SimOp = _struct(
    "SimOp",
    """
    int engine;
    double us, first_us, floor_us;
    int floor_kind, floor_index;
    Bound closed_form;
    Loads loads;
    int chunk_tokens;
    int64 num_transfers, num_flows, num_unlike;
    double wall_s;
    int num_ranks, num_links;
    double* finish_us;
    Link* links;
    int64 num_spans, left_out_spans;
    pointer spans
    """,
)
SimResult = _struct("SimResult", "SimOp[2] op")
After = _struct("After", "int phase, chunk, origin, src, dst")
Transfer = _struct(
    "Transfer",
    """
    int phase, chunk, origin, src, dst, tier;
    int64 rows;
    size row_bytes;
    int num_after;
    After[1] after
    """,
)
