"""trefoil.deep_ep: every result of DeepEP's methods, from ranks that are processes. Needs torch."""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ep_needs  # noqa: F401
import trefoil.deep_ep
from torch_launch import package_path
from trefoil import ep
from trefoil.deep_ep import Buffer, Config, EventOverlap
from trefoil.deep_ep.exchange import pack, unpack
from trefoil.deep_ep.utils import after
from trefoil.ep import _load
from trefoil.on_device import HostCopy

ON_GPU = os.environ.get("TREFOIL_TEST_DEVICE") == "cuda"  # with TREFOIL_EP_LIBRARY=gpu
EXPERTS, TOPK, TOKENS, HIDDEN = 8, 3, 12, 1024
Work = Callable[[int, int, Buffer], None]
kept = []  # handles that outlive their buffer


# ---- Data, the same on every rank -------------------------------------------------------------


def generator(rank: int, what: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * what + rank)


def placed(t: torch.Tensor) -> torch.Tensor:
    return t.cuda() if ON_GPU else t


def count_of(rank: int) -> int:
    """Rank 1 has no tokens."""
    return 0 if rank == 1 else TOKENS - rank


def rows_of(rank: int) -> torch.Tensor:
    rows = torch.randn(count_of(rank), HIDDEN, generator=generator(rank, 1))
    return placed(rows.bfloat16())


def ids_of(rank: int) -> torch.Tensor:
    draw = torch.rand(count_of(rank), EXPERTS, generator=generator(rank, 2))
    ids = draw.argsort(1)[:, :TOPK]
    ids[torch.rand(ids.shape, generator=generator(rank, 3)) < 0.2] = -1
    return placed(ids)


def weights_of(rank: int) -> torch.Tensor:
    return placed(torch.rand(count_of(rank), TOPK, generator=generator(rank, 4)))


def arrivals(rank: int, ranks: int) -> list[tuple[int, int]]:
    """(source, token) of the rows that a rank receives in high throughput."""
    each = EXPERTS // ranks
    return [
        (source, token)
        for source in range(ranks)
        for token, ids in enumerate(ids_of(source).tolist())
        if any(i >= 0 and i // each == rank for i in ids)
    ]


def of_expert(expert: int, ranks: int) -> list[tuple[int, int]]:
    """(source, token) of an expert's rows."""
    return [
        (source, token)
        for source in range(ranks)
        for token, ids in enumerate(ids_of(source).tolist())
        if expert in ids
    ]


def picked(what: Callable[[int], torch.Tensor], pairs: list[tuple[int, int]]) -> torch.Tensor:
    parts = [what(source)[token] for source, token in pairs]
    return torch.stack(parts) if parts else what(0)[:0]


# ---- What a rank checks -----------------------------------------------------------------------


def layout(rank: int, buffer: Buffer) -> dict[str, Any]:
    per_rank, none, per_expert, in_rank, event = buffer.get_dispatch_layout(ids_of(rank), EXPERTS)
    ids, each = ids_of(rank), EXPERTS // buffer.group_size
    assert none is None and isinstance(event, EventOverlap)
    assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
    assert per_expert.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
    for r in range(buffer.group_size):
        there = ((ids >= 0) & (ids // each == r)).any(1)
        assert torch.equal(in_rank[:, r], there) and per_rank[r] == there.sum()
    return {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }


def received_ids(rank: int, ranks: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
    each = EXPERTS // ranks
    ids = picked(ids_of, pairs)
    mine = (ids >= 0) & (ids // each == rank)
    return torch.where(mine, ids - rank * each, -1)


def normal(rank: int, ranks: int, buffer: Buffer) -> None:
    """dispatch, a cached dispatch, combine; with weights, bias, alignment and spare rows."""
    current = torch.cuda.current_stream if ON_GPU else torch.cpu.current_stream
    assert buffer.get_comm_stream() == current()
    routing = layout(rank, buffer)
    pairs = arrivals(rank, ranks)
    x, topk = rows_of(rank), {"topk_idx": ids_of(rank), "topk_weights": weights_of(rank)}
    got, ids, weights, per_expert, handle, _ = buffer.dispatch(
        x, **routing, **topk, expert_alignment=4, async_finish=True
    )
    assert torch.equal(got, picked(rows_of, pairs))
    expected_ids = received_ids(rank, ranks, pairs)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)
    sent = picked(weights_of, pairs)
    assert torch.equal(weights, torch.where(expected_ids >= 0, sent, 0.0))
    numbers = [int((expected_ids == e).sum()) for e in range(EXPERTS // ranks)]
    assert per_expert == [-(-n // 4) * 4 for n in numbers]
    prefix = handle[0]
    assert [int(n) for n in prefix[:, rank]] == [
        sum(source <= r for source, _ in pairs) for r in range(ranks)
    ]
    assert handle.recv_src_idx.tolist() == [token for _, token in pairs]

    again, *nothing, event = buffer.dispatch(x * 2, handle=handle)
    assert torch.equal(again, got * 2) and nothing == [None] * 4
    assert isinstance(event, EventOverlap)

    visits = routing["is_token_in_rank"].sum(1, keepdim=True)
    kept.append(handle)
    back, none, _ = buffer.combine(got, handle)
    assert none is None and back.dtype == torch.bfloat16
    torch.testing.assert_close(back.float(), x.float() * visits, rtol=0.02, atol=0.02)
    biases = torch.ones_like(x), torch.full_like(x, 0.5)
    alone, _, _ = buffer.combine(got, handle, bias=biases[0] if rank == 0 else None)
    plain, _, _ = buffer.combine(got, handle)
    assert torch.equal(alone, (plain.float() + 1).bfloat16() if rank == 0 else plain)
    back, sums, _ = buffer.combine(got, handle, topk_weights=weights, bias=biases)
    torch.testing.assert_close(back.float(), x.float() * visits + 1.5, rtol=0.02, atol=0.02)
    expected = torch.where(ids_of(rank) >= 0, weights_of(rank), 0.0)
    torch.testing.assert_close(sums, expected)

    spare = sum(count_of(r) for r in range(ranks)) + 3
    got, ids, weights, per_expert, handle, _ = buffer.dispatch(
        x, **routing, **topk, num_worst_tokens=spare
    )
    assert (len(got), len(ids), len(weights), per_expert) == (spare, spare, spare, [])
    assert torch.equal(ids[: len(pairs)], expected_ids) and (ids[len(pairs) :] == -1).all()
    back, _, _ = buffer.combine(got, handle)
    torch.testing.assert_close(back.float(), x.float() * visits, rtol=0.02, atol=0.02)


def other_types(rank: int, ranks: int, buffer: Buffer) -> None:
    """fp8 rows with scales, float32 rows, no experts asked for; more tokens than before."""
    routing, pairs = layout(rank, buffer), arrivals(rank, ranks)
    x = rows_of(rank).float()
    scales = placed(torch.arange(len(x) * 4, dtype=torch.float32).reshape(len(x), 4) + rank)
    fp8 = x.to(torch.float8_e4m3fn)
    (got, got_scales), ids, weights, _, handle, _ = buffer.dispatch((fp8, scales), **routing)
    assert ids is None and weights is None
    expected = picked(lambda r: rows_of(r).float().to(torch.float8_e4m3fn).view(torch.uint8), pairs)
    assert torch.equal(got.view(torch.uint8), expected)

    def scales_of(source: int) -> torch.Tensor:
        n = count_of(source)
        return placed(torch.arange(n * 4, dtype=torch.float32).reshape(n, 4) + source)

    assert torch.equal(got_scales, picked(scales_of, pairs))
    column = scales[:, 1].clone().as_strided((len(x), 1), (1, len(x)))
    (_, got_scales), *_ = buffer.dispatch((fp8, column), **routing)
    assert torch.equal(got_scales, picked(lambda r: scales_of(r)[:, 1:2], pairs))
    got, *_, handle, _ = buffer.dispatch(x, **routing)
    back, _, _ = buffer.combine(got, handle)
    visits = routing["is_token_in_rank"].sum(1, keepdim=True)
    torch.testing.assert_close(back, x * visits)
    many = placed(torch.arange(300 * 16, dtype=torch.float32).reshape(300, 16) + rank)
    everywhere = placed(torch.ones(300, ranks, dtype=torch.bool))
    each = placed(torch.full((ranks,), 300, dtype=torch.int32))
    none = placed(torch.zeros(EXPERTS, dtype=torch.int32))
    got, *_, later, _ = buffer.dispatch(
        many, num_tokens_per_rank=each, is_token_in_rank=everywhere, num_tokens_per_expert=none
    )
    assert len(got) == 300 * ranks and torch.equal(got[300 * rank : 300 * (rank + 1)], many)
    torch.testing.assert_close(buffer.combine(got, later)[0], many * ranks)
    torch.testing.assert_close(buffer.combine(rows_back(x, rank, ranks), handle)[0], x * visits)


def rows_back(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What an older handle's dispatch of x received."""
    return picked(lambda r: rows_of(r).float(), arrivals(rank, ranks))


def low_latency(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rows, counts, sources, E4M3, hooks, zero copy, sums."""
    local = EXPERTS // ranks
    x, ids, weights = rows_of(rank), ids_of(rank), weights_of(rank)
    size = (TOKENS, EXPERTS)
    for later in (False, True):
        stats = placed(torch.ones(local, dtype=torch.int32))
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x,
            ids,
            *size,
            use_fp8=False,
            cumulative_local_expert_recv_stats=stats,
            return_recv_hook=later,
        )
        assert (hook is not None) == later
        if hook:
            hook()
        assert rows.shape == (local, ranks * TOKENS, HIDDEN) and counts.dtype == torch.int32
        assert torch.equal(stats, counts + 1)
        sources, ranges, *sizes = handle
        assert sizes == [TOKENS, HIDDEN, EXPERTS]
        for e in range(local):
            pairs = of_expert(rank * local + e, ranks)
            assert counts[e] == len(pairs)
            assert torch.equal(rows[e, : len(pairs)], picked(rows_of, pairs))
            assert sources[e, : len(pairs)].tolist() == [token for _, token in pairs]
            for source in range(ranks):
                begin, number = int(ranges[e, source] >> 32), int(ranges[e, source] & 0xFFFFFFFF)
                tokens = [token for s, token in pairs if s == source]
                assert sources[e, begin : begin + number].tolist() == tokens
        expected = x.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
            out = torch.empty_like(x)
            back, _, hook = buffer.low_latency_combine(
                rows, ids, weights, handle, zero_copy=zero_copy, return_recv_hook=later, out=out
            )
            if hook:
                hook()
            assert back is out
            torch.testing.assert_close(back.float(), expected, rtol=0.02, atol=0.02)

    for pow2, ue8m0 in ((False, False), (True, False), (True, True)):
        (fp8, scales), counts, _, _, hook = buffer.low_latency_dispatch(
            x, ids, *size, round_scale=pow2, use_ue8m0=ue8m0, return_recv_hook=True
        )
        hook()
        per_row = HIDDEN // (512 if ue8m0 else 128)
        assert fp8.dtype == torch.float8_e4m3fn
        assert scales.shape == (local, ranks * TOKENS, per_row)
        assert scales.transpose(1, 2).is_contiguous()
        factors = scales
        if ue8m0:
            assert scales.dtype == torch.int32
            exponents = scales.contiguous().view(torch.uint8).int()
            factors = (exponents << 23).view(torch.float32)
        for e in range(local):
            if pow2:
                used = factors[e, : int(counts[e])]
                assert torch.equal(used.log2(), used.log2().round())
            pairs = of_expert(rank * local + e, ranks)
            got = fp8[e, : len(pairs)].float().reshape(len(pairs), -1, 128)
            got = (got * factors[e, : len(pairs)].unsqueeze(2)).reshape(len(pairs), HIDDEN)
            torch.testing.assert_close(got, picked(rows_of, pairs).float(), rtol=0.07, atol=0.05)


def bad_ids_in_low_latency(rank: int, ranks: int, buffer: Buffer) -> None:
    """Refused on the rank that has them; the others have its other rows, and all go on. Dense ids
    of any strides are taken."""
    x, ids = rows_of(rank), ids_of(rank)
    wrong = ids.clone()
    if rank == 0:
        wrong[0, 0] = EXPERTS + 5
    told = pytest.raises(ep.InvalidArgumentError, match=f"expert {EXPERTS + 5} is outside")
    with told if rank == 0 else nullcontext():
        buffer.low_latency_dispatch(x, wrong, TOKENS, EXPERTS, use_fp8=False)
    for taken in (ids, ids.T.contiguous().T):
        _, counts, *_ = buffer.low_latency_dispatch(x, taken, TOKENS, EXPERTS, use_fp8=False)
        every = torch.cat([ids_of(r) for r in range(ranks)]).flatten().cpu()
        local = EXPERTS // ranks
        expected = [int((every == rank * local + e).sum()) for e in range(local)]
        assert counts.tolist() == expected


def two_in_flight(rank: int, ranks: int, buffer: Buffer) -> None:
    """Two dispatches before their combines, by hooks; a third one takes the first one's place."""
    x, ids, weights = rows_of(rank), ids_of(rank), weights_of(rank)
    made = []
    for factor in (1, 2):
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x * factor, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        made.append((factor, rows, handle, hook))
    expected = x.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
    for factor, rows, handle, hook in made:
        hook()
        back, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        torch.testing.assert_close(back.float(), factor * expected, rtol=0.02, atol=0.02)
    for _ in range(2):
        buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    with pytest.raises(ep.InvalidUsageError, match="two later dispatches"):
        buffer.low_latency_combine(made[0][1], ids, weights, made[0][2])


def bad_input(rank: int, ranks: int, buffer: Buffer) -> None:
    x, ids = rows_of(rank), ids_of(rank)
    invalid = ep.InvalidArgumentError
    routing = layout(rank, buffer)
    with pytest.raises(invalid, match="are needed without a handle"):
        buffer.dispatch(x)
    if ranks > 1:
        with pytest.raises(invalid, match="must divide evenly"):
            buffer.get_dispatch_layout(ids, ranks * 3 + 1)
    if not ON_GPU:  # there it would take a wait on the host, which dispatch has
        with pytest.raises(invalid, match="names expert 9 of 8"):
            buffer.get_dispatch_layout(placed(torch.full((1, 1), 9)), EXPERTS)
    with pytest.raises(invalid, match="names expert 9 of 8"):
        buffer.dispatch(
            placed(torch.ones(1, HIDDEN)),
            num_tokens_per_rank=placed(torch.zeros(ranks, dtype=torch.int32)),
            is_token_in_rank=placed(torch.zeros(1, ranks, dtype=torch.bool)),
            num_tokens_per_expert=routing["num_tokens_per_expert"],
            topk_idx=placed(torch.full((1, 1), 9)),
        )
    got, *_, handle, _ = buffer.dispatch(x, **routing)
    with pytest.raises(invalid, match="the handle's dispatch had"):
        buffer.dispatch(
            torch.cat([x, x, x[:1] if len(x) else placed(torch.ones(1, HIDDEN))]), handle=handle
        )
    if len(got):
        with pytest.raises(invalid, match="the dispatch received"):
            buffer.combine(got[1:], handle)
    with pytest.raises(invalid, match="use_ue8m0 needs round_scale"):
        buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_ue8m0=True)
    with pytest.raises(invalid, match="a multiple of 512"):
        buffer.low_latency_dispatch(x[:, :64].contiguous(), ids, TOKENS, EXPERTS)
    with pytest.raises(ep.InvalidUsageError, match="masks need enable_shrink=True"):
        buffer.low_latency_query_mask_buffer(placed(torch.zeros(ranks, dtype=torch.int32)))
    rows, _, made, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    if len(ids) and not ON_GPU:  # there it would take a wait on the host
        with pytest.raises(invalid, match="topk_idx differs"):
            buffer.low_latency_combine(rows, ids + 1, weights_of(rank), made)


def masks(rank: int, ranks: int, buffer: Buffer) -> None:
    """1 is masked. The last rank stays away: the others go on without it."""
    x, ids, weights = rows_of(rank), ids_of(rank), weights_of(rank)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(rows, ids, weights, handle)
    status = placed(torch.full((ranks,), 7, dtype=torch.int32))
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * ranks
    if rank < ranks - 1:
        buffer.low_latency_update_mask_buffer(ranks - 1, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * (ranks - 1) + [1]
        _, counts, _, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        local = EXPERTS // ranks
        for e in range(local):
            pairs = of_expert(rank * local + e, ranks)
            assert counts[e] == sum(source < ranks - 1 for source, _ in pairs)
        buffer.low_latency_update_mask_buffer(ranks - 1)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * ranks


# ---- Ranks ------------------------------------------------------------------------------------


def rank_main(work: Work, ranks: int, rank: int, path: str, shrink: bool, results: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(45)  # where a rank that does not end is
    if ON_GPU:
        torch.cuda.set_device(rank)
        Buffer.sources = True
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
        buffer = Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=shrink)
        work(rank, ranks, buffer)
        if not shrink:
            buffer.destroy()
            for handle in kept:
                with pytest.raises(ep.InvalidUsageError, match="destroyed"):
                    buffer.combine(placed(torch.zeros(handle.route.received, HIDDEN)), handle)
        results.put((rank, None))
    except BaseException as error:
        results.put((rank, f"rank {rank}: {error!r}"))
    dist.barrier()


def on_ranks(work: Work, ranks: int, tmp_path: Path, shrink: bool = False) -> None:
    if ON_GPU and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    path = str(tmp_path / "store")
    processes = [
        context.Process(target=rank_main, args=(work, ranks, r, path, shrink, results), daemon=True)
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in range(ranks)]
    for process in processes:
        process.join(40)
    assert [text for _, text in found if text] == []
    assert [process.exitcode for process in processes] == [0] * ranks  # None: it has not ended


def everything(rank: int, ranks: int, buffer: Buffer) -> None:
    works = [normal, other_types, low_latency, two_in_flight, bad_input, normal]
    if not ON_GPU:  # there a later call is told
        works.insert(3, bad_ids_in_low_latency)
    for work in works:
        work(rank, ranks, buffer)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_methods(ranks: int, tmp_path: Path) -> None:
    on_ranks(everything, ranks, tmp_path)


COLLECTIVES = """allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced
    allreduce alltoall alltoall_base barrier broadcast gather recv reduce reduce_scatter scatter
    send"""


def without_collectives(rank: int, ranks: int, buffer: Buffer) -> None:
    """What a process group does between its ranks raises."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of torch.distributed")

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES.split():
            patch.setattr(dist.ProcessGroup, name, refused)
        for collective in (lambda: dist.all_gather_object([None] * ranks, 1), dist.barrier):
            with pytest.raises(AssertionError, match="a collective"):
                collective()
        normal(rank, ranks, buffer)
        other_types(rank, ranks, buffer)


def test_dispatch_calls_no_collective_of_torch(tmp_path: Path) -> None:
    on_ranks(without_collectives, 2, tmp_path)


def dispatched(rank: int, ranks: int, buffer: Buffer, experts: int) -> list[int]:
    """A token from each rank to each expert; rows of the experts here."""
    ids = placed(torch.arange(experts).unsqueeze(0))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    x = placed(torch.full((1, 16), float(rank)))
    rows, _, _, counts, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
    assert rows[:, 0].tolist() == list(range(ranks))
    assert handle[0].tolist() == [[r + 1] * ranks for r in range(ranks)]
    return counts


def expert_counts(rank: int, ranks: int, buffer: Buffer) -> None:
    """More experts than before, fewer, and not as many on all ranks."""
    for experts in (2, 58, 60, 200, 2):
        assert dispatched(rank, ranks, buffer, experts) == [ranks] * (experts // ranks)
    with pytest.raises(ep.InvalidArgumentError, match=r"ranks have \[2, 4\] experts"):
        dispatched(rank, ranks, buffer, 2 + 2 * rank)
    assert dispatched(rank, ranks, buffer, 4) == [ranks, ranks]


def test_counts_of_experts(tmp_path: Path) -> None:
    on_ranks(expert_counts, 2, tmp_path)


def to_all(buffer: Buffer, rank: int, tokens: int) -> dict[str, Any]:
    """Of a dispatch of so many tokens, each to one expert of each of two ranks."""
    ids = placed(torch.arange(2).repeat(tokens, 1))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
    return {
        "x": placed(torch.arange(tokens * 16.0).reshape(tokens, 16) + 1000 * rank),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
    }


def one_has_more(rank: int, ranks: int, buffer: Buffer) -> None:
    """Tokens of one rank that its group does not take yet, while the other's would fit."""
    for counts in ((3, 4), (200, 5), (5, 0), (7, 1100), (1, 1)):
        rows, *_, handle, _ = buffer.dispatch(**to_all(buffer, rank, counts[rank]))
        sent = [to_all(buffer, r, count)["x"] for r, count in enumerate(counts)]
        assert torch.equal(rows, torch.cat(sent))
        assert handle.recv_src_idx.tolist() == [t for count in counts for t in range(count)]
        assert torch.equal(buffer.combine(rows, handle)[0], 2 * sent[rank])


def test_one_rank_has_more_tokens(tmp_path: Path) -> None:
    on_ranks(one_has_more, 2, tmp_path)


def refused_by_one(rank: int, ranks: int, buffer: Buffer) -> None:
    """What a rank is told wrongly it refuses, and the other hears of it; then they go on."""
    for bad in range(ranks):
        for name, change, match in (
            ("num_tokens_per_rank", 1, r"num_tokens_per_rank is \[4, 4\]; is_token.* has \[3, 3\]"),
            ("topk_idx", 2, "topk_idx names expert 3 of 2"),
        ):
            given = to_all(buffer, rank, 3)
            error, text = ep.RemoteError, f"rank {bad} refused"
            if rank == bad:
                given[name] = given[name] + change
                error, text = ep.InvalidArgumentError, match
            with pytest.raises(error, match=text):
                buffer.dispatch(**given)
    assert dispatched(rank, ranks, buffer, 4) == [ranks, ranks]


def test_one_rank_refuses(tmp_path: Path) -> None:
    on_ranks(refused_by_one, 2, tmp_path)


def unlike(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rows of other sizes or types on one rank: all are told which, and go on."""
    for name, change, match in (
        ("x", lambda x: x[:, :-8].contiguous(), r"x \[B, 8\]"),
        ("x", lambda x: x.double(), "torch.float64"),
        ("x", lambda x: (x, x[:, 0].contiguous()), r"scales \[B, 1\] torch"),
        ("topk_idx", lambda ids: torch.cat([ids, -torch.ones_like(ids)], 1), "top-"),
        ("topk_idx", lambda ids: None, "no topk_idx"),
        ("num_tokens_per_expert", lambda n: torch.cat([n, n]), "num_tokens_per_expert: ranks have"),
    ):
        given = to_all(buffer, rank, 3 * (1 - rank))
        if rank:
            given[name] = change(given[name])
        with pytest.raises(ep.InvalidArgumentError, match=match):
            buffer.dispatch(**given)
    assert dispatched(rank, ranks, buffer, 4) == [ranks, ranks]


def test_ranks_that_are_not_alike(tmp_path: Path) -> None:
    on_ranks(unlike, 2, tmp_path)


# ---- What a warm step costs the host ----------------------------------------------------------

# On a GPU the host would wait in these: sizes depend on values, or values come from it or go to it.
WAITS = {"bincount", "equal", "index", "lift_fresh", "_local_scalar_dense", "nonzero", "_unique2"}
METHODS = ["cpu", "item", "tolist", "__bool__", "__index__", "__int__", "__float__"]


class Costs(TorchDispatchMode):
    """Operations of torch that are kernels on a GPU; waits of the host; groups and handles made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.waits: list[str] = []
        self.made: list[str] = []
        for name in METHODS:
            self._note(patch, torch.Tensor, name, self.waits)
        self._note(patch, HostCopy, "wait", self.waits)
        for name in ("group_create", "create_handle", "init_handle"):
            self._note(patch, _load.c, name, self.made)

    def _note(self, patch: pytest.MonkeyPatch, owner: Any, name: str, notes: list[str]) -> None:
        method = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            notes.append(name)
            return method(*args, **kwargs)

        patch.setattr(owner, name, noted)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in WAITS:
            self.waits.append(name)
        if not op.is_view and not name.endswith(("empty", "empty_like")):
            self.kernels.append(name)
        return op(*args, **(kwargs or {}))


def costs_of(work: Callable[..., Any], *args: Any, **named: Any) -> tuple[Any, Costs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trefoil.deep_ep.buffer, "require_known", lambda *_: None)  # on the CPU alone
        with Costs(patch) as seen:
            return work(*args, **named), seen


def warm_steps(rank: int, ranks: int, buffer: Buffer) -> None:
    """A dispatch with a new routing waits for the counts, once; nothing else waits. No call makes
    a group or a handle."""
    topk = {"topk_idx": ids_of(rank), "topk_weights": weights_of(rank)}
    x = rows_of(rank)

    for step in range(4):
        layout, found = costs_of(buffer.get_dispatch_layout, topk["topk_idx"], EXPERTS)
        assert found.waits == [] and len(found.kernels) <= 10, (found.waits, found.kernels)
        per_rank, _, per_expert, in_rank, _ = layout
        routing = per_rank, None, in_rank, per_expert
        (rows, *_, handle, _), found = costs_of(buffer.dispatch, x, None, *routing, **topk)
        if step < 2:  # groups, and a handle for each of two routes at a time
            continue
        assert found.made == [] and found.waits == ["wait"], (found.made, found.waits)
        most = 17 + ON_GPU  # one makes the ids contiguous, one copies the counts to the host
        assert len(found.kernels) <= most, found.kernels
        for method, given in ((buffer.dispatch, x), (buffer.combine, rows)):
            _, found = costs_of(method, given, handle)
            assert found.made == found.waits == found.kernels == []


def test_what_a_warm_step_costs(tmp_path: Path) -> None:
    on_ranks(warm_steps, 2, tmp_path)


def late(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rank 1 does not dispatch: the others' wait ends at the library's limit, and names it."""
    dispatched(rank, ranks, buffer, 2)
    if rank == 0:
        with pytest.raises(ep.RemoteError, match=r"rank 1 did not (come|answer) within 0\.5"):
            dispatched(rank, ranks, buffer, 2)
    dist.barrier()


def test_a_late_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "500")
    on_ranks(late, 2, tmp_path)


def late_combine(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rank 1 does not combine: the call that waits for it fails, not the next one."""
    x, ids = placed(torch.ones(1, HIDDEN, dtype=torch.bfloat16)), placed(torch.arange(ranks)[None])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, ranks)
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
    low, _, of_low, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, ranks, use_fp8=False)
    weights = placed(torch.ones(1, ranks))
    if rank == 0:
        for combine in (
            lambda: buffer.combine(rows, handle),
            lambda: buffer.low_latency_combine(low, ids, weights, of_low),
        ):
            with pytest.raises(ep.RemoteError, match=r"rank 1 did not come within"):
                combine()
    dist.barrier()


def test_a_late_combine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        pytest.skip("there a queued operation's failure comes with the next call")
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "500")
    on_ranks(late_combine, 2, tmp_path)


def refused(rank: int, ranks: int, buffer: Buffer) -> None:
    """A dispatch that is refused takes no place: the one before can still be combined."""
    x, ids = placed(torch.ones(1, HIDDEN, dtype=torch.bfloat16)), placed(torch.arange(ranks)[None])
    sizes = {"num_max_dispatch_tokens_per_rank": TOKENS, "num_experts": ranks, "use_fp8": False}
    many = TOKENS + 1

    def too_many(topk: int) -> None:
        with pytest.raises(ep.InvalidArgumentError):
            buffer.low_latency_dispatch(x.expand(many, -1), ids[:, :topk].expand(many, -1), **sizes)

    too_many(1)
    first, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, **sizes)
    too_many(ranks)
    buffer.low_latency_dispatch(x, ids, **sizes)
    too_many(1)
    out, _, _ = buffer.low_latency_combine(first, ids, placed(torch.ones(1, ranks)), handle)
    assert out.tolist() == [[float(ranks)] * HIDDEN]
    given = to_all(buffer, rank, 3)
    *_, routed, _ = buffer.dispatch(**given)
    for copied in (routed, routed.route):
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(copied) if copied is routed.route else copy.deepcopy(copied)
    quantised = torch.quantize_per_tensor(given["x"].cpu(), 0.1, 0, torch.qint8)
    bad = {"x": (quantised, "is quantised"), "topk_idx": (given["topk_idx"][:, :0], "no columns")}
    for name, (value, match) in bad.items():
        with pytest.raises(ep.InvalidArgumentError, match=match):
            buffer.dispatch(**(given | {name: value}))


def test_refused(tmp_path: Path) -> None:
    on_ranks(refused, 2, tmp_path)


def test_masks(tmp_path: Path) -> None:
    on_ranks(masks, min(4, torch.cuda.device_count()) if ON_GPU else 4, tmp_path, shrink=True)


def test_over_mpi() -> None:
    """comm: an mpi4py communicator, without torch.distributed."""
    pytest.importorskip("mpi4py")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    start = [shutil.which("mpirun") or pytest.skip("needs mpirun"), "-n", "2", "--oversubscribe"]
    done = subprocess.run(
        [*start, sys.executable, str(Path(__file__).with_name("deep_ep_mpi.py"))],
        env={**os.environ, **as_root, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[0] == "2 ranks agree"


def test_static_methods() -> None:
    assert Buffer.num_sms == 20 and Buffer.is_sm90_compiled()
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == 24
    Buffer.set_num_sms(20)
    with pytest.raises(ep.InvalidArgumentError, match="must be even"):
        Buffer.set_num_sms(21)
    with pytest.raises(ep.InvalidArgumentError, match=r"new_num_sms is .24."):
        Buffer.set_num_sms("24")  # type: ignore[arg-type]
    with pytest.raises(ep.InvalidArgumentError, match="previous_event is of type int"):
        after(3)  # type: ignore[arg-type]
    assert Config(24, 8, 256).get_nvl_buffer_size_hint(14336, 8) == 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 0
    with Buffer.capture() as event:
        event.current_stream_wait()
    with pytest.raises(ep.InvalidArgumentError, match="group and comm are None"):
        Buffer(None)


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import deep_ep` finds it; another one is not replaced."""
    for name in ("deep_ep", "deep_ep.buffer", "deep_ep.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    trefoil.deep_ep.install()
    import importlib.util

    import deep_ep
    from deep_ep.buffer import Buffer as SameBuffer
    from deep_ep.utils import EventHandle

    assert deep_ep.Buffer is Buffer and importlib.util.find_spec("deep_ep") is not None
    assert SameBuffer is Buffer and EventHandle is trefoil.deep_ep.EventHandle
    assert deep_ep.topk_idx_t is torch.int64
    trefoil.deep_ep.install()
    monkeypatch.setitem(sys.modules, "deep_ep", sys)
    with pytest.raises(ImportError, match="another deep_ep"):
        trefoil.deep_ep.install()


AT_EXIT = """
import sys

import torch
import torch.distributed as dist
from trefoil.deep_ep import Buffer

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
buffer = Buffer(dist.group.WORLD)
ids = torch.tensor([[0]])
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 1)
handle = buffer.dispatch(
    torch.ones(1, 8),
    num_tokens_per_rank=per_rank,
    is_token_in_rank=in_rank,
    num_tokens_per_expert=per_expert,
)[4]
print(handle.route.received)
"""


def test_a_handle_at_exit(tmp_path: Path) -> None:
    """A program that ends with a handle and its buffer says nothing of it."""
    (tmp_path / "exit.py").write_text(AT_EXIT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "exit.py"), f"file://{tmp_path}/store"],
        env={**os.environ, "PYTHONPATH": package_path()},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == "1\n" and "ignored" not in done.stderr, done.stderr


def test_rows_of_any_stride() -> None:
    """Strides of a dimension of one element mean nothing."""
    row = torch.arange(1024, dtype=torch.uint8).as_strided((1, 1024), (1, 1))
    assert pack([row])[0].view(torch.uint8).tolist() == row.tolist()
    column = torch.arange(6.0).as_strided((6, 1), (1, 6))
    assert unpack(pack([column]), [column])[0].tolist() == column.tolist()
