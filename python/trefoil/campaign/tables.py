"""Results of a campaign as tables: every figure with where it comes from, and what a fit reads.

    figures.csv   one row for each operation of each point, all columns
    ll.csv        low latency, expert-major, plain: the columns of docs/fit.md, how tokens were
                  routed, how late the last rank started, and the background work
    ht.csv        the same of high throughput, flat

Only points whose check passed become rows. Times are of the slowest rank, replayed from a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trefoil.campaign.points import HT, HT_DEFAULT_SMS, LL, LL_DEFAULT_SMS
from trefoil.table import write_csv

OPS = ("dispatch", "combine")
FIXED_US = 3.4  # added to the bound in `ratio` (docs/check.md)
SHAPE = ("mode", "variant", "ranks", "tokens", "hidden", "experts", "topk")
CIRCUMSTANCES = (
    "routing",
    "skew",
    "ragged",
    "empty_ranks",
    "seed",
    "sms",
    "start_skew_us",
    "background",
)
FIGURES = (
    *("op", "n", "p50_us", "p99_us", "min_us", "max_us", "called_p50_us", "event_p50_us"),
    *("host_p50_us", "back_to_back_us", "copy_gb_per_s", "busiest_port_bytes", "bound_us"),
    *("ratio_to_copy", "ratio", "background_alone_per_second", "background_per_second"),
)
PROVENANCE = ("gpu", "driver", "nccl", "runtime", "library", "commit", "date", "command")
COLUMNS = (*SHAPE, *CIRCUMSTANCES, *FIGURES, *PROVENANCE)
LABELS = ("framework", "version", "device", "op_name", "kernel_source")
TABLE_SHAPE = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts", "num_gpus")
ROUTING = ("routing", "skew", "ragged", "empty_ranks", "seed")
HOW = ("late_us", "background")
LL_TIMES = ("combine_avg_t_us", "dispatch_avg_t_us", "sms")
HT_TIMES = tuple(f"{op}_{part}" for op in OPS for part in ("sms", "transmit_us", "notify_us"))

Row = dict[str, Any]


def _us(seconds: float | None) -> float | str:
    return "" if seconds is None else round(1e6 * seconds, 4)


def _spread(times: Mapping[str, Any], kind: str, way: str | None) -> Mapping[str, float]:
    found = times.get(kind, {})
    return found.get(way, {}) if way else found


def _extra_s(line: Mapping[str, Any], op: str) -> float:
    """High throughput: what an operation has between its events beside its kernel.

    Beyond what an empty pair of events has: copies of inputs, small kernels. In low latency 0.
    """
    between = _spread(line["times"][op], "event_over_kernel", "replayed").get("p50_s")
    empty = _spread(line["times"].get("empty", {}), "event", "replayed").get("p50_s")
    if not line["mode"].startswith("ht") or between is None or empty is None:
        return 0.0
    return max(0.0, between - empty)


def _figures(line: Mapping[str, Any], op: str) -> Row:
    """wall (no GPU) and event stand in where there are no kernel times."""
    times, extra = line["times"][op], _extra_s(line, op)
    ways = [("kernel", "replayed"), ("event", "replayed"), ("wall", None)]
    kind, found = next((way[0], s) for way in ways if (s := _spread(times, *way)))
    spread = {q: s + extra for q, s in found.items()} if kind == "kernel" else found
    bytes_, rate = times.get("busiest_port_bytes", 0), line.get("copy_bytes_per_second", 0)
    bound = bytes_ / rate if bytes_ and rate else None
    row: Row = {"op": op, "n": line["iterations"]}
    row.update({f"{q}_us": _us(spread.get(f"{q}_s")) for q in ("p50", "p99", "min", "max")})
    row["called_p50_us"] = _us(_spread(times, "kernel", "called").get("p50_s"))
    row["event_p50_us"] = _us(_spread(times, "event", "called").get("p50_s"))
    row["host_p50_us"] = _us(_spread(times, "host", None).get("p50_s"))
    row["back_to_back_us"] = _us(times.get("back_to_back_s"))
    row["copy_gb_per_s"] = round(rate / 1e9, 2) if rate else ""
    row["busiest_port_bytes"] = bytes_ or ""
    row["bound_us"] = _us(bound)
    row["ratio_to_copy"] = round(bound / spread["p50_s"], 4) if bound else ""
    row["ratio"] = round(spread["p50_s"] / (bound + FIXED_US / 1e6), 4) if bound else ""
    for name in ("background_alone_per_second", "background_per_second"):
        row[name] = line.get(name, "")
    return row


def rows_of(lines: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """lines: of results.jsonl; provenance was added by the runner."""
    for line in lines:
        if not line.get("ok") or not line.get("times"):
            continue
        base: Row = {name: line[name] for name in SHAPE}
        base.update({name: line.get(name, "") for name in CIRCUMSTANCES})
        base["start_skew_us"] = round(1e6 * line.get("start_skew_s", 0), 3)
        base.update({name: line.get("provenance", {}).get(name, "") for name in PROVENANCE})
        for op in OPS:
            if op in line["times"]:
                yield {**base, **_figures(line, op)}


def _is_plain(row: Row, mode: str) -> bool:
    return bool(row["mode"] == mode and row["variant"] == "plain")


def fit_rows(rows: Iterable[Row], mode: str) -> list[Row]:
    """Dispatch and combine side by side, in the columns that `trefoil fit` reads."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if not _is_plain(row, mode):
            continue
        key = tuple(row[name] for name in (*SHAPE, *CIRCUMSTANCES))
        one = found.setdefault(
            key,
            {
                **{"framework": "trefoil", "version": row["commit"], "kernel_source": "trefoil"},
                **{"device": f"{row['ranks']} x {row['gpu']}", "num_gpus": row["ranks"]},
                **{"op_name": "ll" if mode == LL else "normal", "node_num": 1},
                **{"hidden_size": row["hidden"], "num_token": row["tokens"]},
                **{"num_topk": row["topk"], "num_experts": row["experts"]},
                **{name: row[name] for name in ROUTING},
                **{"late_us": row["start_skew_us"], "background": row["background"]},
                **{"sms": row["sms"] or LL_DEFAULT_SMS},
            },
        )
        op = row["op"]
        one[f"{op}_avg_t_us"] = one[f"{op}_transmit_us"] = row["p50_us"]
        one[f"{op}_notify_us"], one[f"{op}_sms"] = 0, row["sms"] or HT_DEFAULT_SMS
    return [one for one in found.values() if all(f"{op}_avg_t_us" in one for op in OPS)]


def write_tables(folder: Path, lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Writes the three tables; a fit's only if it has rows. Returns the rows of each."""
    rows = list(rows_of(lines))
    write_csv(folder / "figures.csv", COLUMNS, rows)
    counts = {"figures.csv": len(rows)}
    for name, mode, times in (("ll.csv", LL, LL_TIMES), ("ht.csv", HT, HT_TIMES)):
        chosen = fit_rows(rows, mode)
        if chosen:
            write_csv(folder / name, (*LABELS, *TABLE_SHAPE, *times, *ROUTING, *HOW), chosen)
            counts[name] = len(chosen)
    return counts
