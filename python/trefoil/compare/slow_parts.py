"""Which links or ranks run below what the model says.

Three kinds of evidence, by what a file holds:

- times of whole operations: what is over the model's time is laid on the resource that limits the
  operation, so that each row says at what share of the model's rate that resource ran
- `rank` and times: each rank's own time against the rank's own end in the replay
- `src,dst,gb_per_s`: rates of single pairs, as a point-to-point benchmark prints them, against the
  rate of the port that a pair crosses; a rank whose pairs are all slow has a slow port
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trefoil.fit.cases import Case, TableError, _read_rows, _time, _whole

SLOW = 0.9  # of the model's rate


@dataclass(frozen=True)
class Pair:
    """A measured rate from one rank to another."""

    src: int
    dst: int
    gb_per_s: float


@dataclass(frozen=True)
class Finding:
    """A part that runs below the model; share: of the model's rate."""

    what: str  # "nvlink-out of rank 3", "link 0 -> 5 (net)", "rank 2"
    share: float
    detail: str


def kind_of_table(path: Path) -> str:
    """ "pairs", "ranks" or "operations", by the columns."""
    columns = set(_read_rows(path)[0][1])
    if {"src", "dst", "gb_per_s"} <= columns:
        return "pairs"
    return "ranks" if {"rank", "op", "us"} <= columns else "operations"


def read_pairs(path: Path) -> list[Pair]:
    pairs = []
    for number, row in _read_rows(path)[1:]:
        where = f"{path}, line {number}: "
        src, dst = (_whole(row[c], where + c) for c in ("src", "dst"))
        rate = _time(row["gb_per_s"], f"{where}gb_per_s")
        if src == dst or rate <= 0:
            raise TableError(f"{where}a pair is two ranks and a rate above 0")
        pairs.append(Pair(src, dst, rate))
    if not pairs:
        raise TableError(f"{path}: has a header and no rows")
    return pairs


def slow_pairs(
    pairs: Sequence[Pair], ranks_per_node: int, rates: Mapping[str, float], slow: float = SLOW
) -> list[Finding]:
    """rates: "nvlink" and "net", 10^9 bytes a second of one port, one way.

    A rank all of whose pairs of a tier and direction are slow (two or more of them) is named once,
    as a port; the other slow pairs each.
    """
    shares: dict[tuple[int, int], float] = {}
    for p in pairs:
        tier = "nvlink" if p.src // ranks_per_node == p.dst // ranks_per_node else "net"
        if not rates.get(tier):
            raise TableError(f"ranks {p.src} and {p.dst} are on two nodes, the cluster has no net")
        shares[p.src, p.dst] = p.gb_per_s / rates[tier]
    ports: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for src, dst in shares:
        tier = "nvlink" if src // ranks_per_node == dst // ranks_per_node else "nic"
        ports[f"{tier}-out", src].append((src, dst))
        ports[f"{tier}-in", dst].append((src, dst))
    findings, explained = [], set()
    for (kind, rank), links in sorted(ports.items()):
        bad = [link for link in links if shares[link] < slow]
        others = [share for link, share in shares.items() if link not in links]
        if len(links) < 2 or len(bad) < len(links) or not any(s >= slow for s in others):
            continue
        explained.update(links)
        share = median(shares[link] for link in links)
        findings.append(Finding(f"{kind} of rank {rank}", share, f"all {len(links)} pairs of it"))
    for (src, dst), share in sorted(shares.items()):
        if share < slow and (src, dst) not in explained:
            tier = "nvlink" if src // ranks_per_node == dst // ranks_per_node else "net"
            findings.append(Finding(f"link {src} -> {dst} ({tier})", share, "one pair"))
    return sorted(findings, key=lambda f: f.share)


@dataclass(frozen=True)
class RankTime:
    case: Case
    rank: int


def read_ranks(path: Path, gpus_per_node: int) -> list[RankTime]:
    """Columns rank, op, us, mode (ll, ht) and those of a shape; sms may be left out."""
    times = []
    for number, row in _read_rows(path)[1:]:
        where = f"{path}, line {number}: "
        names = ("node_num", "hidden_size", "num_token", "num_topk", "num_experts", "rank")
        for name in (*names, "mode"):
            if name not in row:
                raise TableError(f"{path}: the column {name} is missing")
        nodes, hidden, tokens, topk, experts, rank = (_whole(row[n], where + n) for n in names)
        op, mode = str(row["op"]), str(row["mode"])
        if op not in ("dispatch", "combine") or mode not in ("ll", "ht"):
            raise TableError(f"{where}op is {op!r}, mode {mode!r}: dispatch or combine, ll or ht")
        us = _time(row["us"], f"{where}us")
        if us <= 0 or min(nodes, hidden, tokens, topk, experts) < 1:
            raise TableError(f"{where}times and shapes must be positive")
        ranks = nodes * gpus_per_node
        if rank >= ranks:
            raise TableError(f"{where}rank {rank} of {ranks}")
        sms = _whole(row["sms"], f"{where}sms") if row.get("sms") else 0
        case = Case(op, mode, nodes, ranks, hidden, tokens, topk, experts, sms, us)
        times.append(RankTime(case, rank))
    if not times:
        raise TableError(f"{path}: has a header and no rows")
    return times


def slow_ranks(
    times: Sequence[RankTime], ends: Sequence[float], slow: float = SLOW
) -> list[Finding]:
    """ends: what the model says of each. A rank is named if over its rows the median of model /
    measured lies below `slow` times the median of all ranks."""
    shares: dict[int, list[float]] = defaultdict(list)
    for time, end in zip(times, ends, strict=True):
        shares[time.rank].append(end / time.case.us)
    medians = {rank: median(values) for rank, values in shares.items()}
    usual = median(medians.values())
    found = [
        Finding(f"rank {rank}", share / usual, f"{len(shares[rank])} times, beside all ranks")
        for rank, share in medians.items()
        if share < slow * usual
    ]
    return sorted(found, key=lambda f: f.share)
