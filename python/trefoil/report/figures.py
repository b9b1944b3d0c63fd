"""Measured times of our kernels, from every file that holds some, in one form for the report.

    load_figures(path)   a file, or a folder with all its files: JSON of the kernels' benchmarks and
                         of `trefoil bench --gpu --json`, figures.csv of tools/measure

Of the same operation, shape and circumstances the last figure read counts: later files replace
earlier ones, and in a folder what goes through the C API comes first, kernels by themselves next,
a campaign last; of a folder's campaigns on as many GPUs only the last by name counts. Times are in
microseconds, of the slowest rank. Rehearsals without GPUs have none.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil import places
from trefoil.campaign.points import HT_DEFAULT_SMS
from trefoil.report.results import ResultError


@dataclass(frozen=True)
class Figure:
    """One operation of one shape under one set of circumstances."""

    op: str  # "update", "dispatch", "combine"
    mode: str  # "ll", "ht"
    layout: str  # "expert-major", "rank-major", "flat"
    variant: str  # "plain", "e4m3", "partial", "fp8", "backward", "window"
    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    sms: int  # 0: the library's choice
    us: float  # median
    low_us: float  # of the spread; the median where nothing is known
    high_us: float
    spread: str  # what low and high are: "p50 to p99", "min to max"
    copy_gb_per_s: float  # of a plain copy in the same run, through a port; 0: not known
    port_bytes: int  # of the busiest port, by the plan
    source: str  # the file
    how: str  # "kernel", "through the API", "campaign"
    routing: str = "uniform"
    skew: float = 0.0
    ragged: float = 0.0
    empty_ranks: int = 0
    seed: int = 1
    start_skew_us: float = 0.0
    background: str = "nothing"
    background_share: float = 0.0  # of its rate alone, that background work kept; 0: not known
    gpu: str = ""
    commit: str = ""

    @property
    def bound_us(self) -> float:
        """Its bytes at the copy's rate; 0: not known."""
        return self.port_bytes / self.copy_gb_per_s / 1e3 if self.copy_gb_per_s else 0.0

    @property
    def is_plain(self) -> bool:
        """Balanced, all ranks in step, nothing beside."""
        even = self.routing == "uniform" and not self.ragged and not self.empty_ranks
        return even and not self.start_skew_us and self.background == "nothing"

    @property
    def name(self) -> str:
        words = [self.op, self.layout] + ([] if self.variant == "plain" else [self.variant])
        return " ".join(words)

    @property
    def key(self) -> tuple[object, ...]:
        what = (self.op, self.mode, self.layout, self.variant)
        shape = (self.ranks, self.tokens, self.hidden, self.experts, self.topk, self.sms)
        how = (self.routing, self.skew, self.ragged, self.empty_ranks, self.seed)
        return (*what, *shape, *how, self.start_skew_us, self.background)


# ---- The kernels' own benchmarks ----------------------------------------------------------------


ROUTINGS = ("zipf", "hot-expert", "hot-rank")


def _routing(words: list[str], skew: float) -> dict[str, Any]:
    """Takes the routing out of an operation's words: "zipf 1.2", "hot-rank"."""
    kind = next((w for w in words if w in ROUTINGS), None)
    if kind is None:
        return {}
    at = words.index(kind)
    del words[at : at + (2 if kind == "zipf" else 1)]
    return {"routing": kind, "skew": skew}


def _kernel_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Time and spread of a row of either benchmark; {}: a row of something else."""
    if "lockstep_us" in row:
        us, low, high = (row[k] for k in ("lockstep_us", "lockstep_us", "p99_us"))
        spread = "p50 to p99"
    elif "kernel_us" in row:
        us, low = row["kernel_us"], row["kernel_min_us"]
        high = row.get("kernel_p99_us", row["kernel_max_us"])
        spread = "min to p99" if "kernel_p99_us" in row else "min to max"
    elif "background_us" in row:
        us = low = high = row["background_us"]
        spread = "one figure"
    else:
        return {}
    high = max(high, us)
    return {"us": float(us), "low_us": float(low), "high_us": float(high), "spread": spread}


def _of_kernels(data: Mapping[str, Any], source: str) -> Iterator[Figure]:
    gpu = str(data.get("device", "")).split(" x ")[-1]
    is_ll = "copy_rate_GBps" in data
    for row in data["rows"]:
        times = _kernel_times(row)
        if row.get("check", "ok") != "ok" or not times:
            continue
        op, layout, *rest = row["operation"].split()
        background: dict[str, Any] = {}
        if "background_us" in row:
            rest.remove("background")
            share = row["product_alone_us"] / row["product_background_us"]
            background = {"background": row["load"], "background_share": share}
        yield Figure(
            op=op,
            mode="ll" if is_ll else "ht",
            layout=layout,
            **_routing(rest, float(row.get("skew", 0))),
            **background,
            variant=" ".join(w for w in rest if w != "exact") or "plain",
            **{k: int(row[k]) for k in ("ranks", "tokens", "hidden", "experts", "topk")},
            sms=int(row.get("sms", 0)),
            **times,
            copy_gb_per_s=float(data["copy_rate_GBps" if is_ll else "copy_GBps"]),
            port_bytes=int(row.get("busiest_port_bytes" if is_ll else "port_bytes", 0)),
            source=source,
            how="kernel",
            gpu=gpu,
            commit=str(row.get("commit", data.get("commit", ""))),
        )


def _of_api(data: Mapping[str, Any], source: str) -> Iterator[Figure]:
    for row in data["gpu_benchmarks"]:
        if not row["ok"] or "times" not in row:
            continue
        mode, _, layout = row["mode"].partition("-")
        for op in ("dispatch", "combine"):
            times = row["times"].get(op, {})
            if "kernel" not in times or (op == "dispatch" and row["variant"] == "partial"):
                continue
            p50, p99 = (1e6 * times["kernel"]["replayed"][q] for q in ("p50_s", "p99_s"))
            yield Figure(
                op=op,
                mode=mode,
                layout=layout,
                variant=row["variant"] if op == "dispatch" or row["variant"] != "e4m3" else "plain",
                **{k: int(row[k]) for k in ("ranks", "tokens", "hidden", "experts", "topk")},
                sms=int(row.get("sms", 0)),
                us=round(p50, 4),
                low_us=round(p50, 4),
                high_us=round(p99, 4),
                spread="p50 to p99",
                copy_gb_per_s=row["copy_bytes_per_second"] / 1e9,
                port_bytes=int(times.get("busiest_port_bytes", 0)),
                source=source,
                how="through the API",
                gpu=str(data.get("gpu", {}).get("name", "")),
                commit=str(data.get("commit", "")),
            )


# ---- Campaigns ----------------------------------------------------------------------------------


def _number(text: str | None) -> float:
    return float(text) if text else 0.0


def _of_campaign(rows: Iterable[Mapping[str, str]], source: str) -> Iterator[Figure]:
    for row in rows:
        mode, _, layout = row["mode"].partition("-")
        alone, loaded = (
            _number(row[k]) for k in ("background_alone_per_second", "background_per_second")
        )
        if row["op"] == "dispatch" and row["variant"] == "partial":
            continue  # it is the plain one's
        if row["gpu"] in ("", "none"):
            continue  # a rehearsal: times of the CPU
        yield Figure(
            op=row["op"],
            mode=mode,
            layout=layout,
            variant=row["variant"],
            **{k: int(row[k]) for k in ("ranks", "tokens", "hidden", "experts", "topk")},
            sms=int(row["sms"] or 0) or (HT_DEFAULT_SMS if mode == "ht" else 0),
            us=float(row["p50_us"]),
            low_us=_number(row["min_us"]) or float(row["p50_us"]),
            high_us=_number(row["p99_us"]) or float(row["p50_us"]),
            spread="min to p99",
            copy_gb_per_s=_number(row["copy_gb_per_s"]),
            port_bytes=int(_number(row["busiest_port_bytes"])),
            source=source,
            how="campaign",
            routing=row["routing"],
            **{k: _number(row[k]) for k in ("skew", "ragged", "start_skew_us")},
            empty_ranks=int(_number(row["empty_ranks"])),
            seed=int(_number(row["seed"])),
            background=row["background"],
            background_share=loaded / alone if alone else 0.0,
            gpu=row["gpu"],
            commit=row["commit"],
        )


# ---- Files --------------------------------------------------------------------------------------

ORDER = {"through the API": 0, "kernel": 1, "campaign": 2}


def _of_json(path: Path) -> list[Figure]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        return []
    if "gpu_benchmarks" in data:
        return list(_of_api(data, path.name))
    is_kernels = "copy_rate_GBps" in data or "copy_GBps" in data
    return list(_of_kernels(data, path.name)) if is_kernels else []


def _fastest(figures: Iterable[Figure]) -> list[Figure]:
    """Of each key the fastest: benchmarks also vary what a user does not choose."""
    found: dict[tuple[object, ...], Figure] = {}
    for figure in figures:
        if figure.key not in found or figure.us < found[figure.key].us:
            found[figure.key] = figure
    return list(found.values())


def _of_file(path: Path) -> list[Figure]:
    try:
        if path.suffix == ".json":
            return _fastest(_of_json(path))
        with path.open(newline="", encoding="utf-8") as file:
            return list(_of_campaign(csv.DictReader(file), f"{path.parent.name}/{path.name}"))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{path}: holds no measured times of ours: {error!r}") from error


def committed_folder() -> Path:
    """Where the committed measurements are: in the source tree, or in the installation."""
    return next(iter(places.measurements()), places.ROOT)


def load_figures(path: Path) -> list[Figure]:
    """All figures of a file, or of a folder's files by their order; ResultError with a sentence."""
    if not path.is_dir():
        found = _of_file(path)
        if not found:
            raise ResultError(f"{path}: holds no times of ours that were measured on GPUs")
        return found
    files = [*path.rglob("*.json"), *path.rglob("figures.csv")]
    parts = [_of_file(file) for file in sorted(files) if file.name.count(".") == 1]
    parts = _newest_campaigns([part for part in parts if part])
    parts.sort(key=lambda part: ORDER[part[0].how])
    return [figure for part in parts for figure in part]


def _newest_campaigns(parts: list[list[Figure]]) -> list[list[Figure]]:
    """Of several campaigns on as many GPUs the last alone: they measured different kernels, and one
    picture shows those of one. Other files stay."""
    known: set[int] = set()
    kept = []
    for part in reversed(parts):
        if part[0].how == "campaign":
            part = [figure for figure in part if figure.ranks not in known]
            known |= {figure.ranks for figure in part}
        kept.append(part)
    return [part for part in reversed(kept) if part]


def of_one_kind(figures: Iterable[Figure], by: str = "us") -> list[Figure]:
    """Kinds are not mixed in a curve: those of the kind with most values of `by`, of several the
    latest (ORDER)."""
    kinds: dict[str, list[Figure]] = {}
    for figure in figures:
        kinds.setdefault(figure.how, []).append(figure)

    def rank(how: str) -> tuple[int, int]:
        return len({getattr(f, by) for f in kinds[how]}), ORDER[how]

    return kinds[max(kinds, key=rank)] if kinds else []


def merged(parts: Iterable[Iterable[Figure]]) -> list[Figure]:
    """The last figure of each key."""
    found = {figure.key: figure for part in parts for figure in part}
    return list(found.values())
