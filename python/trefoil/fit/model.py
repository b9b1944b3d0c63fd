"""Two models of the same costs.

ClosedForm sums the costs over exact loads; Replay runs the plan through an engine of the simulator.
Both predict the times of the same cases from the same cost record, so that one fit serves both and
their errors can be set side by side.

The closed form of one operation:

    fixed + latency + max(busy) + (sum(busy) - max(busy)) * min(1, chunk / tokens) + rest

and at least fixed + NVLink's latency + announce_us + receive + rest. busy is what the rows of the
busiest instance of each resource need (SMs that send, forward and receive, NVLink and network
ports); the term behind it, only with several nodes in HT, is the time that the first chunk needs to
get through the stages of the pipeline before they all work; rest is what receivers do after the
last row. Background copies take flow_share of the NVLink ports that they cross, from start to end.
Where times are of the mean rank, busy is of a rank's own resources, and the mean over ranks counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trefoil.fit.cases import OPS, Case
from trefoil.reference import library
from trefoil.simulator import Cluster, Costs, OpResult, Result, Simulation, Workload

Array = npt.NDArray[np.float64]
ROW_KINDS = ("send", "forward", "nvlink-out", "nvlink-in", "nic-out", "nic-in", "receive")
RECEIVE = 1  # of the busy times
RANK_COUNTS = (*ROW_KINDS, "leaving", "slots")
NEAR_PORTS = ("nvlink-out", "nvlink-in")
FAR_PORTS = ("nic-out", "nic-in")
DIRECT, SELF = 0, 0  # a phase and a tier
OBSERVABLES = ("last-rank", "mean-rank")  # until the last is done; until one is, in the mean
DEFAULT_CHUNK = 64


def row_bytes(kind: str, hidden: int) -> int:
    """Bytes of a row: 2 an element, or 1 and a 4-byte scale for every 128."""
    return 2 * hidden if kind == "bf16" else hidden + 4 * -(-hidden // 128)


@dataclass(frozen=True)
class Setting:
    """What the cases of a table have in common."""

    mode: str
    variant: str
    cluster: str
    gpus_per_node: int = 8
    dispatch_row: str = "fp8-128"
    combine_row: str = "bf16"
    combine_partial: bool = False
    observable: str = "last-rank"  # what a time is of, one of OBSERVABLES

    def workload(self, case: Case) -> Workload:
        return Workload(
            ranks=case.ranks,
            tokens=case.tokens,
            mode=self.mode,
            ranks_per_node=library().trefoilRanksPerNode(case.ranks, self.gpus_per_node),
            experts=case.experts,
            topk=case.topk,
            dispatch_row_bytes=row_bytes(self.dispatch_row, case.hidden),
            combine_row_bytes=row_bytes(self.combine_row, case.hidden),
            variant=self.variant,
            combine_partial=self.combine_partial,
            seed=case.seed,
            popularity=case.routing,
            skew=case.skew,
            ragged=case.ragged,
            empty_ranks=case.empty_ranks,
            masked_selections=case.masked_selections,
        )

    @property
    def is_mean(self) -> bool:
        return self.observable == "mean-rank"

    def time_of(self, result: OpResult) -> float:
        """What a measured time is compared with, us."""
        return result.mean_rank_us if self.is_mean else result.us


class Plans:
    """Simulations of a setting's cases, each workload's made once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cluster = Cluster(setting.cluster)
        self._made: dict[Workload, Simulation] = {}

    def of(self, case: Case) -> Simulation:
        workload = self.setting.workload(case)
        if workload not in self._made:
            self._made[workload] = Simulation(workload)
        return self._made[workload]


class Replay:
    """Times by an engine of the simulator."""

    def __init__(self, plans: Plans, cases: Sequence[Case], engine: str = "queues") -> None:
        self.plans, self.cases, self.engine = plans, list(cases), engine
        self._runs: dict[tuple[object, ...], list[int]] = {}  # both operations from one run
        for i, case in enumerate(self.cases):
            self._runs.setdefault((id(plans.of(case)), *case.run_key), []).append(i)

    def predict(self, costs: Costs) -> Array:
        times = np.empty(len(self.cases))
        for indices in self._runs.values():
            first = self.cases[indices[0]]
            result = self.plans.of(first).run(
                self.plans.cluster, costs, self.engine, **first.circumstances
            )
            for i in indices:
                times[i] = self.plans.setting.time_of(result[self.cases[i].op])
        return times


MOST_WORDS = 3  # four ranks were measured: more words are taken to come beside those


class ClosedForm:
    """Times by the formula above. Loads are counted once, from the same transfers."""

    def __init__(self, plans: Plans, cases: Sequence[Case]) -> None:
        self.cases, cluster = list(cases), plans.cluster
        self.is_mean = plans.setting.is_mean
        self.numbers = np.array([case.ranks for case in self.cases], dtype=float)
        self.cluster_rates = (cluster.fields.nvlink_gb_per_s, cluster.fields.nic_gb_per_s)
        self.net_latency_ns = 1e3 * cluster.fields.net_latency_us
        counting = Costs({"num_sms": 1, "nvlink_gb_per_s": 1, "nic_gb_per_s": 1})
        for op in OPS:  # every resource must limit, or its rows are not counted
            counting.set({f"{op}.send_row_ns": 1, f"{op}.receive_row_ns": 1})
        # SMs are busy at 1 us a slot and with nothing else: their times are the slots of a rank.
        slots = Costs({"num_sms": 1, **{f"{op}.slot_ns": 1000 for op in OPS}})
        most = max((case.ranks for case in self.cases), default=1)
        self.ranks = {kind: np.zeros((len(self.cases), most)) for kind in RANK_COUNTS}
        self.row_bytes = np.empty(len(self.cases))
        self.contested = {kind: np.zeros((len(self.cases), most)) for kind in NEAR_PORTS}
        counted: dict[int, tuple[Result, ...]] = {}  # both operations, for any number of SMs
        for i, case in enumerate(self.cases):
            simulation = plans.of(case)
            if id(simulation) not in counted:
                counted[id(simulation)] = tuple(
                    simulation.run(cluster, costs) for costs in (counting, slots)
                )
            of, placed = (result[case.op] for result in counted[id(simulation)])
            workload = simulation.workload
            size = workload.dispatch_row_bytes
            if case.op == "combine":
                size = workload.combine_row_bytes
            self.row_bytes[i] = size
            for kind in ROW_KINDS:
                gpus = cluster.fields.gpus_per_nic if kind in FAR_PORTS else 1
                for index, count in of.bytes_of.get(kind, {}).items():
                    self.ranks[kind][i, _ranks_of(index, gpus, workload)] = count / size
            own = np.diagonal(simulation.traffic(case.op, DIRECT, SELF)) // size
            self.ranks["leaving"][i, : case.ranks] = self.ranks["send"][i, : case.ranks] - own
            kind = "receive" if case.op == "dispatch" else "send"
            for rank, us in placed.busy_us_of.get(kind, {}).items():
                self.ranks["slots"][i, rank] = round(us)
            for kind, ends in zip(NEAR_PORTS, zip(*case.flows, strict=True), strict=False):
                self.contested[kind][i, list(ends)] = 1
        self.shapes = [plans.setting.workload(case).shape for case in self.cases]
        self.is_dispatch = np.array([case.op == "dispatch" for case in self.cases])
        self.tokens = np.array([case.tokens for case in self.cases], dtype=float)
        self.sms = np.array([case.sms for case in self.cases], dtype=float)
        self.has_net = self.ranks["nic-out"].any(axis=1)
        self.has_products = np.array([case.background == "gemm" for case in self.cases])
        self.is_ragged = np.array([_has_short_ranks(case) for case in self.cases])
        per_node = [plans.setting.workload(case).ranks_per_node for case in self.cases]
        self.words = np.array(
            [
                _most_words(
                    *(self.contested[kind][i, : case.ranks] > 0 for kind in NEAR_PORTS), per_node[i]
                )
                for i, case in enumerate(self.cases)
            ],
            dtype=float,
        )
        self.has_peers = np.array(per_node) > 2
        several = np.array([case.nodes > 1 for case in self.cases])
        self.is_staged = several & (plans.setting.mode in ("ht", "ht-expert-major"))
        self.may_pull = self.is_dispatch & ~several & (plans.setting.mode == "ht")

    def part(self, chosen: npt.NDArray[np.int64]) -> ClosedForm:
        """Of some of the cases, without counting again."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(found, name, value[chosen])
            elif isinstance(value, dict):
                setattr(found, name, {kind: rows[chosen] for kind, rows in value.items()})
            elif isinstance(value, list):
                setattr(found, name, [value[i] for i in chosen])
        return found

    def _over_ranks(self, work: Array) -> Array:
        """Of each case's ranks, the last axis: the most, or the mean."""
        found: Array = work.sum(axis=-1) / self.numbers if self.is_mean else work.max(axis=-1)
        return found

    def _of_op(self, costs: Costs, name: str) -> Array:
        return np.where(
            self.is_dispatch, costs.get(f"dispatch.{name}"), costs.get(f"combine.{name}")
        )

    def _is_pulled(self, costs: Costs, sms: Array) -> npt.NDArray[np.bool_]:
        """Of each case: whether ranks read rows where they lie at the others."""
        most, of_two = (costs.get(f"dispatch.{name}") for name in ("pull_sms", "pull_sms_of_two"))
        found: npt.NDArray[np.bool_] = self.may_pull & (
            sms <= np.where((self.numbers <= 2) & (of_two > 0), of_two, most)
        )
        return found

    def _staged_us(self, costs: Costs) -> Array:
        """Of the tokens that a rank copies before it starts, to where the others read them."""
        sms = np.where(self.sms > 0, self.sms, costs.get("num_sms"))
        rate = np.where(
            self._is_pulled(costs, sms), costs.get("dispatch.stage_gb_per_s"), np.zeros_like(sms)
        )
        found: Array = 1e-3 * self.tokens * _time(self.row_bytes, rate)
        return found

    def _busy_us(self, costs: Costs) -> Array:
        """By kind of resource, case and rank."""
        size = self.row_bytes + self._of_op(costs, "row_head_bytes")
        ranks = self.ranks
        nvlink, nic = self.cluster_rates
        nvlink, nic = costs.get("nvlink_gb_per_s") or nvlink, costs.get("nic_gb_per_s") or nic
        sms = np.where(self.sms > 0, self.sms, costs.get("num_sms"))
        share = self._of_op(costs, "forward_share")
        share = np.where(share > 0, share, 0.5)
        send = self._of_op(costs, "send_row_ns") + _time(
            size, self._of_op(costs, "send_gb_per_s_per_sm")
        )
        take = self._of_op(costs, "receive_row_ns") + _time(
            size, self._of_op(costs, "receive_gb_per_s_per_sm")
        )
        pulled = self._is_pulled(costs, sms)
        pull = costs.get("dispatch.pull_row_ns") + _time(
            size, np.where(pulled, costs.get("dispatch.pull_gb_per_s_per_sm"), 0)
        )
        send, take = np.where(pulled, 0, send), np.where(pulled, pull, take)
        place = self._of_op(costs, "slot_ns") + _time(
            self.row_bytes, self._of_op(costs, "slot_gb_per_s_per_sm")
        )
        memory = _time(self.row_bytes, self._of_op(costs, "slot_gb_per_s"))
        place = np.maximum(place, np.where(self.is_staged, sms * (1 - share), sms) * memory)
        places = ranks["slots"] * place[:, None]
        token = (self.tokens * np.where(pulled, 0, self._of_op(costs, "token_ns")))[:, None]
        is_dispatch = self.is_dispatch[:, None]
        sent = ranks["leaving"] if costs.get("own_rows_stay") else ranks["send"]
        back = costs.get("nvlink_back_share")
        sending = _work(sent, send, np.where(is_dispatch, token, places))
        batches = self._batch_ns(costs, np.where(self.is_staged, sms * (1 - share), sms))
        side = np.where(is_dispatch, places + batches, token)
        taking = _work(ranks["receive"], take, side)
        works = self._over_ranks(sending), self._over_ranks(taking)
        sends, takes = self._split(
            costs, np.where(self.is_staged, sms * (1 - share), sms), pulled, *works
        )
        speed = np.where(self.has_products, 1 - costs.get("product_share"), 1)
        self.takes, self.rounds_us = takes * speed, self._rounds_us(costs, takes) / speed
        messages = costs.get("net_message_ns") / (costs.get("rows_per_message") or 1)
        busy_ns = {
            "send": sending / (sends * speed)[:, None],
            "receive": taking / (takes * speed)[:, None],
            "forward": ranks["forward"]
            * np.where(self.is_dispatch, send, take)[:, None]
            / (sms * share * speed)[:, None],
        }
        taken, peers = (self._of_op(costs, name) for name in ("flow_share", "peers_flow_share"))
        taken = np.where(self.has_peers & (peers > 0), peers, np.where(taken > 0, taken, 0.5))
        reading = np.where(pulled, costs.get("dispatch.pull_port_share") or 1, 1)
        port = size / (nvlink * reading) + costs.get("nvlink_row_ns")
        for kind, other in (("nvlink-out", "nvlink-in"), ("nvlink-in", "nvlink-out")):
            work = _work(ranks[kind], port, back * ranks[other] * port[:, None])
            left = 1 - taken[:, None] * self.contested[kind]
            busy_ns[kind] = work / left
        if nic > 0:
            for kind in FAR_PORTS:
                busy_ns[kind] = ranks[kind] * (size / nic + messages)[:, None]
        return np.array(list(busy_ns.values())) * 1e-3

    def predict(self, costs: Costs) -> Array:
        each = self._busy_us(costs)
        longest, busy = self._over_ranks(each.max(axis=0)), self._over_ranks(each)
        # Out and in of a link are the two ends of one stage.
        stages = busy[:3].sum(axis=0) + busy[3:5].max(axis=0)
        if len(busy) > 5:
            stages += busy[5:7].max(axis=0)
        filling = np.where(self.is_staged, np.minimum(1, DEFAULT_CHUNK / self.tokens), 0.0)
        net = costs.get("net_latency_ns")
        net = self.net_latency_ns if net < 0 else net
        latency = np.where(self.has_net, net, 0.0)
        near = costs.get("nvlink_latency_ns")
        latency = np.where(self.is_staged, latency + near, np.maximum(latency, near))
        launches = [
            costs.fixed_us(case.op, shape)
            for case, shape in zip(self.cases, self.shapes, strict=True)
        ]
        fixed = np.array(launches) + self._staged_us(costs)
        end = fixed + 1e-3 * latency + longest + (stages - longest) * filling
        announced = fixed + 1e-3 * near + self._of_op(costs, "announce_us")
        return np.maximum(end, announced + busy[RECEIVE]) + self._rest_us(costs)

    def _split(
        self,
        costs: Costs,
        sms: Array,
        pulled: npt.NDArray[np.bool_],
        sent: Array,
        taken: Array,
    ) -> tuple[Array, Array]:
        """SMs that send, and that receive; where no share is given, by the work of either side."""
        share, most = self._of_op(costs, "send_share"), self._of_op(costs, "most_send_sms")
        is_split = ((share > 0) | (most > 0)) & ~pulled
        least, works = np.where(sms > 2, 1 / sms, 0.5), sent + taken
        fair = np.divide(sent, works, out=np.zeros_like(works), where=works > 0)
        share = np.where(share > 0, share, np.clip(fair, least, 1 - least))
        sends = np.minimum(sms * share, np.where(most > 0, most, sms))
        start = self._of_op(costs, "whole_sms_from")
        is_whole = (start > 0) & (sms > 1)
        whole = np.clip(np.floor(sends + 1 - start + 1e-9), 1, np.maximum(sms - 1, 1))
        sends = np.where(is_whole, whole, sends)
        takes = np.maximum(sms - sends, np.where(start > 0, sms * (1 - fair), 0))
        return np.where(is_split, sends, sms), np.where(is_split, takes, sms)

    def _batch_ns(self, costs: Costs, sms: Array) -> Array:
        """SM time of each rank's batches that have rows, where most are on an SM (docs/sim.md)."""
        sources = self._of_op(costs, "batch_sources")
        groups = np.ceil(self.numbers / np.where(sources > 0, sources, np.inf))
        filled = self.ranks["receive"] / (self.tokens * self.numbers)[:, None]
        size = np.divide(self.numbers, groups, out=np.zeros_like(groups), where=groups > 0)
        each = _time(self.row_bytes, self._of_op(costs, "batch_gb_per_s_per_sm"))
        part = 1 - (1 - np.minimum(filled, 1)) ** size[:, None]
        of_sm = (self.tokens * groups / sms)[:, None]
        most = np.minimum(of_sm, of_sm * part + 2 * np.sqrt(of_sm * part * (1 - part)))
        found: Array = most * (sms * each)[:, None]
        return found

    def _rounds_us(self, costs: Costs, sms: Array) -> Array:
        """The rounds after the first in which SMs sum their rank's own tokens."""
        few = self.tokens < self._of_op(costs, "few_tokens")
        size = np.where(
            few, self._of_op(costs, "few_round_bytes"), self._of_op(costs, "round_bytes")
        )
        size = np.where(self.is_dispatch, 0, size)
        parts = np.divide(self.row_bytes, size, out=np.zeros_like(size), where=size > 0)
        rounds = np.ceil(self.tokens * parts / sms)
        found: Array = np.maximum(rounds - 1, 0) * self._of_op(costs, "round_us")
        return found

    def _wait_us(self, costs: Costs) -> Array:
        """Of other ranks' last words that cross a port with copies: of the rank with most."""
        found: Array = self.words * self._of_op(costs, "flow_wait_us")
        return found

    def _rest_us(self, costs: Costs) -> Array:
        row = _time(self.row_bytes, self._of_op(costs, "rest_gb_per_s_per_sm"))
        rows = np.where(self.is_dispatch, self._over_ranks(self.ranks["receive"]), self.tokens)
        missing = np.where(self.is_ragged, self._of_op(costs, "missing_us"), 0.0)
        return 1e-3 * rows * row / self.takes + self.rounds_us + missing + self._wait_us(costs)


def _most_words(out: Array, into: Array, per_node: int) -> int:
    """Last words from a rank's node that cross a port with copies: of the rank with most, at most
    MOST_WORDS."""
    out, into = out.reshape(-1, per_node), into.reshape(-1, per_node)
    others = out.sum(axis=1, keepdims=True) - out
    return min(int(np.where(into, per_node - 1, others).max()), MOST_WORDS)


def _has_short_ranks(case: Case) -> bool:
    """Whether a rank has tokens, but fewer than another."""
    return case.ragged > 0 and case.ranks - case.empty_ranks > 1


def _ranks_of(index: int, gpus: int, workload: Workload) -> slice:
    """The ranks of a resource that so many GPUs of a node share."""
    per_node = workload.ranks_per_node
    node, port = divmod(index, -(-per_node // gpus))
    first = node * per_node + port * gpus
    return slice(first, min(first + gpus, (node + 1) * per_node))


def _work(rows: Array, each: Array, side: Array) -> Array:
    """Of every rank: rows, and beside them what is spread over rows."""
    work: Array = rows * each[:, None] + np.where(rows > 0, side, 0)
    return work


def _time(size: Array, gb_per_s: Array) -> Array:
    """ns of so many bytes; a rate of 0 does not limit."""
    return np.divide(size, gb_per_s, out=np.zeros_like(size), where=gb_per_s > 0)
