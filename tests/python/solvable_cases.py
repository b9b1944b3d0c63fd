"""Cases whose time can be worked out by hand, and what the closed form and the engines say of them.

    python3 tests/python/solvable_cases.py      # prints them as a table

Rows have 50,000 bytes, so a row takes 1 us of a 400 Gb/s card and 1/7 us of an NVLink port of 350
GB/s. Costs are ideal, nothing but ports, the cluster's latency and its fixed time, and in the last
cases a cost of the kernels. "exact" is the time of max-min fair flows, derived in each case's
comment; "closed form" in the last cases is that of fit/model.py, which knows these costs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from trefoil.fit.cases import Case as Measured
from trefoil.fit.model import ClosedForm, Plans, Setting
from trefoil.simulator import Cluster, Costs, Simulation, Workload

ROW = 50_000
LL_FIXED = (
    3.4 + 8.4
)  # of dgx-h100: a low-latency operation with no bytes, and the network's latency
HT_FIXED = 10.9 + 8.4
NEAR_FIXED = 3.0 + 0.5  # launch and NVLink's latency of the cases with costs of kernels
PORT = 1 / 7  # us of a row
SM = 0.5  # GB/s at which an SM takes 100 us for a row


KERNEL_COSTS = {
    "num_sms": 1,
    "nvlink_latency_ns": 500,
    "dispatch.launch_us": 3,
    "combine.launch_us": 3,
}


@dataclass(frozen=True)
class Case:
    name: str
    exact_us: float
    sends: dict[int, list[tuple[int, ...]]]  # rank -> the ranks that each of its tokens goes to
    ranks: int = 16
    mode: str = "ll"
    cluster: str = "dgx-h100"
    changes: list[tuple[str, int, float]] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)  # more than ports; of one node
    op: str = "dispatch"
    experts: int = 0  # 0: one a rank
    flows: tuple[tuple[float, ...], ...] = ()  # of others beside, see Simulation.run

    def times(self, engine: str) -> tuple[float, float]:
        """(by the engine, by the closed form) of the operation."""
        topk = max(len(token) for tokens in self.sends.values() for token in tokens)
        idx = [
            np.array(
                [[*token, *[-1] * (topk - len(token))] for token in self.sends.get(rank, [])],
                dtype=np.int32,
            ).reshape(-1, topk)
            for rank in range(self.ranks)
        ]
        most = max(len(a) for a in idx)
        workload = Workload(
            ranks=self.ranks,
            tokens=most,
            mode=self.mode,
            ranks_per_node=min(8, self.ranks),
            experts=self.experts or self.ranks,  # one a rank: expert e lives on rank e
            topk=topk,
            dispatch_row_bytes=ROW,
            combine_row_bytes=ROW,
        )
        simulation, cluster = Simulation(workload, idx), Cluster(self.cluster)
        costs = Costs({**KERNEL_COSTS, **self.costs}) if self.costs else None
        how = {"changes": self.changes, "flows": self.flows}
        result = simulation.run(cluster, costs, engine, **how)[self.op]
        if costs is None:
            return result.us, result.closed_form_us
        return result.us, self._closed_form(simulation, costs)

    def _closed_form(self, simulation: Simulation, costs: Costs) -> float:
        w = simulation.workload
        shape = (w.ranks, ROW // 2, w.tokens, w.topk, w.experts, round(costs.get("num_sms")))
        counts = [len(self.sends.get(r, [])) for r in range(self.ranks)]
        ragged = float(any(0 < count < w.tokens for count in counts))
        background = "copies-from-0" if self.flows == ((0, 1),) else "nothing"  # steady ones alone
        measured = Measured(
            *(self.op, self.mode, 1, *shape, 1.0),
            ragged=ragged,
            empty_ranks=counts.count(0),
            background=background,
        )
        plans = Plans(Setting(self.mode, "ours", self.cluster))
        plans.of = lambda case: simulation  # type: ignore[method-assign]
        return float(ClosedForm(plans, [measured]).predict(costs)[0])


def _pairs(ranks: int, tokens: int) -> dict[int, list[tuple[int, ...]]]:
    """Every rank sends all its tokens to the rank half way round: one flow a card each way."""
    return {r: [((r + ranks // 2) % ranks,)] * tokens for r in range(ranks)}


def _kernel(
    name: str,
    us: float,
    sends: dict[int, list[tuple[int, ...]]],
    op: str = "dispatch",
    experts: int = 0,
    flows: tuple[tuple[float, ...], ...] = (),
    **costs: float,
) -> Case:
    """Two ranks of a node and a cost of their kernels."""
    exact = NEAR_FIXED + us
    more = {"op": op, "experts": experts, "flows": flows}
    return Case(name, exact, sends, ranks=2, costs=costs, **more)


CASES = (
    # Each card carries 100 rows out and 100 in.
    Case("balanced: a partner each", LL_FIXED + 100, _pairs(16, 100)),
    # Card 8 takes 8 x 100 rows, nothing else is busy as long.
    Case("incast: eight into one", LL_FIXED + 800, {r: [(8,)] * 100 for r in range(8)}),
    # Rank 0 sends 300 rows to 8 and to 9; ranks 1, 2, 3 send 100 to 8 and 4, 5, 6 send 100 to 9.
    # Cards 8 and 9 are shared by four flows each, a quarter of a card a flow, until after 400 us
    # the short flows are done and rank 0 has sent 100 + 100. Its other 400 rows leave its card at
    # full rate: 800 us, though no port carries more than 600 rows.
    Case(
        "a busy sender into two incasts",
        LL_FIXED + 800,
        {0: [(8, 9)] * 300}
        | {r: [(8,)] * 100 for r in (1, 2, 3)}
        | {r: [(9,)] * 100 for r in (4, 5, 6)},
    ),
    # 32 ranks of one leaf send to 32 of the other; the leaf's uplinks carry a quarter of 32 cards.
    Case(
        "leaf-spine, 4:1 oversubscribed",
        LL_FIXED + 400,
        _pairs(64, 100),
        ranks=64,
        cluster="dgx-h100-4to1",
    ),
    # The slow card needs 2 us a row.
    Case(
        "a card at half its rate",
        LL_FIXED + 200,
        _pairs(16, 100),
        changes=[("nic-rate", 0, 0.5)],
    ),
    # Card 1 carries the rows of ranks 0 and 1.
    Case("a card down", LL_FIXED + 200, _pairs(16, 100), changes=[("nic-fail", 0, 1.0)]),
    # Everybody else is done by then.
    Case(
        "a rank 250 us late",
        LL_FIXED + 250 + 100,
        _pairs(16, 100),
        changes=[("start-us", 3, 250.0)],
    ),
    # Two chunks of 64 rows over card 0 to rank 8, which forwards each to rank 9 when it is there:
    # the second is there after 128 us and takes 64 / 7 us more.
    Case("HT: the last chunk is forwarded", HT_FIXED + 128 + 64 / 7, {0: [(9,)] * 128}, mode="ht"),
    # Two ranks send each other 70 and 35 rows: the busier port carries 70 and a fifth of 35.
    _kernel(
        "rows of the other direction",
        77 * PORT,
        {0: [(1,)] * 70, 1: [(0,)] * 35},
        nvlink_back_share=0.2,
    ),
    # A row takes an SM 100 us to send: of 40 rows 30 stay, ten SMs send the other ten.
    _kernel(
        "own rows are not sent",
        10 * 100 / 10,
        {0: [(0,)] * 30 + [(1,)] * 10},
        own_rows_stay=1,
        num_sms=10,
        **{"dispatch.send_gb_per_s_per_sm": SM},
    ),
    # Half of 20 SMs, but at most four, send 20 rows of 100 us each.
    _kernel(
        "at most four SMs send",
        20 * 100 / 4,
        {0: [(1,)] * 20},
        num_sms=20,
        **{
            "dispatch.send_gb_per_s_per_sm": SM,
            "dispatch.send_share": 0.5,
            "dispatch.most_send_sms": 4,
        },
    ),
    # Half of five SMs are two, which send 20 rows, 100 us each; those that receive wait for them.
    _kernel(
        "two of five SMs send",
        20 * 100 / 2,
        {0: [(1,)] * 20},
        num_sms=5,
        **{
            "dispatch.send_gb_per_s_per_sm": SM,
            "dispatch.receive_gb_per_s_per_sm": SM,
            "dispatch.send_share": 0.5,
            "dispatch.whole_sms_from": 1,
        },
    ),
    # Three of five send for 667 us, and take rows then with the others: 4000 us of SMs.
    _kernel(
        "senders receive when they are done",
        40 * 100 / 5,
        {0: [(1,)] * 20},
        num_sms=5,
        **{
            "dispatch.send_gb_per_s_per_sm": SM,
            "dispatch.receive_gb_per_s_per_sm": SM,
            "dispatch.send_share": 0.5,
            "dispatch.whole_sms_from": 0.5,
        },
    ),
    # 20 tokens go to rank 1 once and lie there at two experts: 40 places of 100 us on ten SMs.
    _kernel(
        "two places of each row",
        40 * 100 / 10,
        {0: [(2, 3)] * 20},
        experts=4,
        num_sms=10,
        **{"dispatch.slot_gb_per_s_per_sm": SM},
    ),
    # Seven rows take 1 us of a port, but the word of each rank only comes after 25.
    _kernel("announced after 25 us", 25, {0: [(1,)] * 7}, **{"dispatch.announce_us": 25}),
    # 70 rows come in 10 us; then ten SMs write the rank's 70 tokens, 100 us each.
    _kernel(
        "what is not hidden",
        70 * PORT + 70 * 100 / 10,
        {0: [(1,)] * 70},
        op="combine",
        num_sms=10,
        **{"combine.rest_gb_per_s_per_sm": SM},
    ),
    # Of the port that 70 rows need for 10 us a copy takes six tenths.
    _kernel(
        "a copy over the busiest port",
        70 * PORT / 0.4,
        {0: [(1,)] * 70},
        flows=((0, 1),),
        **{"dispatch.flow_share": 0.6},
    ),
    # The same copy, and rows the other way.
    _kernel(
        "a copy over an idle port",
        70 * PORT,
        {1: [(0,)] * 70},
        flows=((0, 1),),
        **{"dispatch.flow_share": 0.6},
    ),
    # Rows leave at 3 us; until 15.5 they have four tenths of the port, so half of them is through.
    _kernel(
        "a copy that ends halfway",
        12.5 + 35 * PORT,
        {0: [(1,)] * 70},
        flows=((0, 1, 0, 0, 15.5),),
        **{"dispatch.flow_share": 0.6},
    ),
    # Half of the rows are through when it begins, at 8 us.
    _kernel(
        "a copy that begins halfway",
        5 + 35 * PORT / 0.4,
        {0: [(1,)] * 70},
        flows=((0, 1, 0, 8),),
        **{"dispatch.flow_share": 0.6},
    ),
    # The other rank has one token, and looks for those that it did not expect.
    _kernel(
        "missing tokens",
        70 * PORT + 30,
        {0: [(1,)] * 70, 1: [(0,)]},
        **{"dispatch.missing_us": 30},
    ),
    # Ten SMs take 70 batches, 100 us each.
    _kernel(
        "batches",
        70 * 100 / 10,
        {0: [(1,)] * 70},
        num_sms=10,
        **{"dispatch.batch_sources": 4, "dispatch.batch_gb_per_s_per_sm": SM},
    ),
    # 140 places of 50 000 bytes at 100 GB/s, however many SMs.
    _kernel(
        "places by memory",
        140 * 0.5,
        {0: [(2, 3)] * 70},
        experts=4,
        num_sms=10,
        **{"dispatch.slot_gb_per_s": 100},
    ),
    # Ten SMs sum 70 tokens, one each a round: seven rounds, six after the first.
    _kernel(
        "whole rounds",
        70 * PORT + 6 * 5,
        {0: [(1,)] * 70},
        op="combine",
        num_sms=10,
        **{"combine.round_us": 5, "combine.round_bytes": ROW},
    ),
    # With fewer than 80 tokens two SMs sum one together.
    _kernel(
        "whole rounds of small blocks",
        70 * PORT + 13 * 5,
        {0: [(1,)] * 70},
        op="combine",
        num_sms=10,
        **{
            "combine.round_us": 5,
            "combine.round_bytes": ROW,
            "combine.few_tokens": 80,
            "combine.few_round_bytes": ROW / 2,
        },
    ),
    # The one word of the other rank waits 20 us.
    _kernel(
        "a word behind a copy",
        70 * PORT / 0.4 + 20,
        {0: [(1,)] * 70},
        flows=((0, 1),),
        **{"dispatch.flow_share": 0.6, "dispatch.flow_wait_us": 20},
    ),
)


def _cell(us: float, exact_us: float) -> str:
    off = 100 * (us / exact_us - 1)
    return f"{us:.1f} us" + (f" ({off:+.1f} %)" if abs(off) >= 0.05 else "")


def table() -> list[str]:
    lines = [
        "| case | exact | closed form | SimGrid | queues |",
        "|---|---|---|---|---|",
    ]
    for case in CASES:
        simgrid, closed = case.times("simgrid")
        queues, _ = case.times("queues")
        cells = (_cell(us, case.exact_us) for us in (closed, simgrid, queues))
        lines.append(f"| {case.name} | {case.exact_us:.1f} us | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
