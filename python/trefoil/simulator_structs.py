"""The structs of include/trefoil/{models,costs,cost_record,sim}.h for ctypes, field by field."""

from __future__ import annotations

import ctypes as ct

from trefoil.reference import _Routing, _Shape

_NAME = ct.c_char * 64


class ClusterFields(ct.Structure):
    _fields_ = (
        ("name", _NAME),
        ("gpus_per_node", ct.c_int),
        ("max_gpus", ct.c_int),
        ("gpus_per_nic", ct.c_int),
        ("nvlink_gb_per_s", ct.c_double),
        ("nic_gb_per_s", ct.c_double),
        ("net_latency_us", ct.c_double),
        ("ll_fixed_us", ct.c_double),
        ("ht_fixed_us", ct.c_double),
        ("nodes_per_leaf", ct.c_int),
        ("rail_leaves", ct.c_int),
        ("leaf_oversubscription", ct.c_double),
        ("gpu_memory_gb", ct.c_double),
        ("nvlink_line_gb_per_s", ct.c_double),
    )


class MoeFields(ct.Structure):
    _fields_ = (
        ("name", _NAME),
        ("hidden", ct.c_int),
        ("num_experts", ct.c_int),
        ("topk", ct.c_int),
        ("num_moe_layers", ct.c_int),
        ("expert_hidden", ct.c_int),
        ("num_shared", ct.c_int),
    )


class OpCosts(ct.Structure):
    _fields_ = (
        ("launch_us", ct.c_double),
        ("token_ns", ct.c_double),
        ("send_row_ns", ct.c_double),
        ("send_gb_per_s_per_sm", ct.c_double),
        ("receive_row_ns", ct.c_double),
        ("receive_gb_per_s_per_sm", ct.c_double),
        ("forward_share", ct.c_double),
        ("signal_ns", ct.c_double),
        ("net_signal_ns", ct.c_double),
        ("net_start_us", ct.c_double),
        ("node_round_us", ct.c_double),
        ("send_share", ct.c_double),
        ("most_send_sms", ct.c_double),
        ("slot_ns", ct.c_double),
        ("slot_gb_per_s_per_sm", ct.c_double),
        ("hear_us", ct.c_double),
        ("rest_gb_per_s_per_sm", ct.c_double),
        ("missing_us", ct.c_double),
        ("flow_share", ct.c_double),
    )


class CostFields(ct.Structure):
    _fields_ = (
        ("name", _NAME),
        ("num_sms", ct.c_int),
        ("nvlink_gb_per_s", ct.c_double),
        ("nic_gb_per_s", ct.c_double),
        ("nvlink_latency_ns", ct.c_double),
        ("net_latency_ns", ct.c_double),
        ("nvlink_row_ns", ct.c_double),
        ("net_message_ns", ct.c_double),
        ("rows_per_message", ct.c_double),
        ("signals_per_expert", ct.c_int),
        ("nvlink_back_share", ct.c_double),
        ("own_rows_stay", ct.c_int),
        ("product_share", ct.c_double),
        ("op", OpCosts * 2),
    )


class Residuals(ct.Structure):
    _fields_ = (
        ("n", ct.c_int),
        ("low", ct.c_double),
        ("high", ct.c_double),
        ("mape_pct", ct.c_double),
    )


class FitRange(ct.Structure):
    _fields_ = (
        ("nodes", ct.c_int * 2),
        ("ranks", ct.c_int * 2),
        ("hidden", ct.c_int * 2),
        ("experts", ct.c_int * 2),
        ("topk", ct.c_int * 2),
        ("tokens", ct.c_int64 * 2),
        ("sms", ct.c_int * 2),
        ("row_bytes", ct.c_int * 2 * 2),
    )


class Record(ct.Structure):
    _fields_ = (
        ("costs", CostFields),
        ("is_ht", ct.c_int),
        ("variant", ct.c_int),
        ("range", FitRange),
        ("inside", Residuals * 2),
        ("outside", Residuals * 2),
        ("cluster", ct.c_char * 256),
    )


class Point(ct.Structure):
    _fields_ = (
        ("nodes", ct.c_int),
        ("ranks", ct.c_int),
        ("hidden", ct.c_int),
        ("experts", ct.c_int),
        ("topk", ct.c_int),
        ("tokens", ct.c_int64),
        ("sms", ct.c_int),
        ("row_bytes", ct.c_int),
        ("other_ports", ct.c_int),
    )


class IntervalFields(ct.Structure):
    _fields_ = (
        ("low_us", ct.c_double),
        ("high_us", ct.c_double),
        ("is_extrapolated", ct.c_int),
        ("n", ct.c_int),
        ("outside", ct.c_char * 512),
    )


class TraceSpec(ct.Structure):
    _fields_ = (
        ("shape", _Shape),
        ("num_steps", ct.c_int),
        ("seed", ct.c_uint64),
        ("popularity", ct.c_int),
        ("skew", ct.c_double),
        ("hot", ct.c_int),
        ("ragged", ct.c_double),
        ("num_empty_ranks", ct.c_int),
        ("burst_period", ct.c_int),
        ("burst_low", ct.c_double),
        ("unused_fraction", ct.c_double),
        ("with_weights", ct.c_int),
    )


class SimWorkload(ct.Structure):
    _fields_ = (
        ("routing", ct.POINTER(_Routing)),
        ("mode", ct.c_int),
        ("variant", ct.c_int),
        ("combine_partial", ct.c_int),
        ("chunk_tokens", ct.c_int),
        ("dispatch_row_bytes", ct.c_size_t),
        ("combine_row_bytes", ct.c_size_t),
    )


class Change(ct.Structure):
    _fields_ = (("kind", ct.c_int), ("index", ct.c_int), ("factor", ct.c_double))


class Flow(ct.Structure):
    _fields_ = (
        ("source", ct.c_int),
        ("target", ct.c_int),
        ("gb_per_s", ct.c_double),
        ("start_us", ct.c_double),
        ("end_us", ct.c_double),
    )


class SimRun(ct.Structure):
    _fields_ = (
        ("cluster", ct.POINTER(ClusterFields)),
        ("costs", ct.POINTER(CostFields)),
        ("engine", ct.c_int),
        ("num_sms", ct.c_int),
        ("oversubscription", ct.c_double),
        ("start_skew_us", ct.c_double),
        ("seed", ct.c_uint64),
        ("changes", ct.POINTER(Change)),
        ("num_changes", ct.c_int),
        ("flows", ct.POINTER(Flow)),
        ("num_flows", ct.c_int),
        ("has_products", ct.c_int),
        ("max_spans", ct.c_int64),
        ("timeout_s", ct.c_double),
    )


class Bound(ct.Structure):
    _fields_ = (("us", ct.c_double), ("fixed_us", ct.c_double), ("limit", ct.c_int))


class Loads(ct.Structure):
    _fields_ = (
        ("max_bytes", ct.c_uint64 * 5),
        ("busiest", ct.c_int * 5),
        ("total_bytes", ct.c_uint64 * 3),
    )


class Link(ct.Structure):
    _fields_ = (
        ("kind", ct.c_int),
        ("index", ct.c_int),
        ("bytes", ct.c_uint64),
        ("busy_us", ct.c_double),
        ("share", ct.c_double),
    )


class SimOp(ct.Structure):
    _fields_ = (
        ("engine", ct.c_int),
        ("us", ct.c_double),
        ("first_us", ct.c_double),
        ("floor_us", ct.c_double),
        ("floor_kind", ct.c_int),
        ("floor_index", ct.c_int),
        ("closed_form", Bound),
        ("loads", Loads),
        ("chunk_tokens", ct.c_int),
        ("num_transfers", ct.c_int64),
        ("wall_s", ct.c_double),
        ("num_ranks", ct.c_int),
        ("num_links", ct.c_int),
        ("finish_us", ct.POINTER(ct.c_double)),
        ("links", ct.POINTER(Link)),
        ("num_spans", ct.c_int64),
        ("left_out_spans", ct.c_int64),
        ("spans", ct.c_void_p),
    )


class SimResult(ct.Structure):
    _fields_ = (("op", SimOp * 2),)
