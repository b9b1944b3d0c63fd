"""trefoil.deep_ep as programs written for DeepEP call it: high throughput on one node and on
several, low latency with ranks that fail, and what is refused. Needs torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_needs  # noqa: F401
import trefoil.deep_ep
from test_deep_ep import on_ranks
from trefoil import ep
from trefoil.deep_ep import Buffer

Tensor = torch.Tensor
EXPERTS, TOPK, TOKENS, HIDDEN = 16, 4, 24, 1024
REFUSED, UNUSABLE = ep.InvalidArgumentError, ep.InvalidUsageError


def difference(a: Tensor, b: Tensor) -> float:
    """1 less the cosine of a + 1 and b + 1, near enough."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with scales in column-major order."""
    blocks = x.float().view(len(x), -1, 128)
    most = blocks.abs().amax(2).clamp(1e-4)
    rows = (blocks * (448 / most.unsqueeze(2))).to(torch.float8_e4m3fn).view(x.shape)
    return rows, (most / 448).T.contiguous().T


def from_fp8(rows: Tensor, scales: Tensor) -> Tensor:
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    blocks = rows.float().view(*rows.shape[:-1], -1, 128) * scales.unsqueeze(-1)
    return blocks.view(rows.shape).bfloat16()


def bf16_of(x: Any) -> Tensor:
    return from_fp8(*x) if isinstance(x, tuple) else x


def routing(rank: int) -> tuple[Tensor, Tensor]:
    """Ids, some of them -1, and weights."""
    torch.manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS).topk(TOPK, sorted=False)[1].to(trefoil.deep_ep.topk_idx_t)
    ids[torch.rand(ids.shape) < 0.1] = -1
    return ids, torch.randn(TOKENS, TOPK).abs()


def gathered(t: Tensor, ranks: int) -> Tensor:
    parts = [torch.empty_like(t) for _ in range(ranks)]
    dist.all_gather(parts, t)
    return torch.stack(parts)


# ---- High throughput --------------------------------------------------------------------------


def high_throughput(rank: int, ranks: int, buffer: Buffer) -> None:
    """Every way to call, with events before and after; the rows of rank r are r everywhere."""
    ids, weights = routing(rank)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    all_ranks, all_experts = gathered(per_rank, ranks), gathered(per_expert, ranks)
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "config": trefoil.deep_ep.Config(24, 8, 256),
    }
    ends = all_ranks[:, rank].cumsum(0).tolist()
    same = torch.full((TOKENS, HIDDEN), float(rank)).bfloat16()
    any_rows = torch.randn(TOKENS, HIDDEN).bfloat16()
    local = EXPERTS // ranks
    expected = all_experts.sum(0)[rank * local : (rank + 1) * local].tolist()
    visits = in_rank.sum(1, keepdim=True).clamp(min=1)
    used = (in_rank.any(1)).unsqueeze(1)
    for x in (any_rows, same, to_fp8(same)):
        for events in (False, True):
            before = {"previous_event": Buffer.capture()} if events else {}
            flow = {**before, "async_finish": events}
            got, idx, received_weights, numbers, handle, event = buffer.dispatch(
                x, **layout, **flow, topk_idx=ids, topk_weights=weights
            )
            assert (event.event is not None) == events
            event.current_stream_wait()
            rows = bf16_of(got)
            assert (len(rows), numbers) == (ends[-1], expected)
            assert ((idx == -1) | ((idx >= 0) & (idx < local))).all()
            assert [int((idx == e).sum()) for e in range(local)] == numbers
            assert not received_weights[idx == -1].any()
            sums = handle[0][:, rank] if len(handle) == 6 else handle[-4]
            assert sums.tolist() == ends
            if x is not any_rows:
                for r, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    assert (rows[begin:end] == r).all()
            again, *nothing, _ = buffer.dispatch(x, handle=handle, **flow)
            assert torch.equal(bf16_of(again), rows) and nothing == [None] * 4
            bias = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
            for biases, added in ((None, 0), (bias[0], bias[0]), (bias, bias[0] + bias[1])):
                back, back_weights, _ = buffer.combine(
                    rows, handle, topk_weights=received_weights, bias=biases, **flow
                )
                mean = torch.where(used, (back.float() - added) / visits, 0)
                assert difference(mean, torch.where(used, bf16_of(x), 0)) < 1e-4
                assert difference(back_weights, torch.where(ids == -1, 0, weights)) < 1e-9
            room = TOKENS * ranks
            more = buffer.dispatch(
                x, **layout, topk_idx=ids, topk_weights=weights, num_worst_tokens=room
            )
            assert [len(bf16_of(more[0])), *map(len, more[1:4])] == [room, room, room, 0]
            assert (more[1][len(rows) :] == -1).all() and torch.equal(more[1][: len(rows)], idx)
            assert len(bf16_of(buffer.dispatch(x, handle=more[4])[0])) == room
            back, _, _ = buffer.combine(bf16_of(more[0]), more[4])
            mean = torch.where(used, back.float() / visits, 0)
            assert difference(mean, torch.where(used, bf16_of(x), 0)) < 1e-4


def one_node(rank: int, ranks: int, buffer: Buffer) -> None:
    assert buffer.get_dispatch_layout(routing(rank)[0], EXPERTS)[1] is None
    high_throughput(rank, ranks, buffer)


def nodes_of_two(rank: int, ranks: int, buffer: Buffer) -> None:
    buffer.ranks_per_node = 2
    ids = routing(rank)[0]
    _, per_node, _, _, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    nodes = torch.where(ids < 0, -1, ids // (2 * EXPERTS // ranks))
    assert per_node.dtype == torch.int32
    assert per_node.tolist() == [int((nodes == n).any(1).sum()) for n in range(ranks // 2)]
    high_throughput(rank, ranks, buffer)


def test_one_node(tmp_path: Path) -> None:
    on_ranks(one_node, 2, tmp_path)


def test_several_nodes(tmp_path: Path) -> None:
    on_ranks(nodes_of_two, 4, tmp_path)


# ---- Low latency ------------------------------------------------------------------------------


def low_latency(rank: int, ranks: int, buffer: Buffer) -> None:
    """On 4 ranks: rank 1 stays away from the first dispatch, rank 3 from the first combine. The
    entries of lost experts become -1 between two combines of a dispatch."""
    lost: set[int] = set()
    ids, weights = routing(rank)
    all_ids = gathered(ids, ranks)
    status = torch.zeros(ranks, dtype=torch.int32)
    x = torch.full((TOKENS, HIDDEN), rank - 128.0).bfloat16()
    x[:, -128:] = torch.arange(TOKENS).bfloat16().unsqueeze(1)
    local = EXPERTS // ranks
    buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)

    def leaves(who: int) -> bool:
        lost.add(who)
        return rank == who

    def require_lost() -> None:
        buffer.low_latency_query_mask_buffer(status)
        assert set(status.nonzero().flatten().tolist()) == lost

    for hook in (False, True):
        for fp8, pow2, ue8m0 in ((0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
            if leaves(1):
                return
            got, counts, handle, event, later = buffer.low_latency_dispatch(
                x,
                ids,
                TOKENS,
                EXPERTS,
                use_fp8=bool(fp8),
                round_scale=bool(pow2),
                use_ue8m0=bool(ue8m0),
                async_finish=not hook,
                return_recv_hook=hook,
            )
            later() if later else event.current_stream_wait()
            require_lost()
            rows = bf16_of(got)
            for e in range(local):
                here = (all_ids == rank * local + e).any(2) & (status == 0).unsqueeze(1)
                assert counts[e] == here.sum() == (handle[1][e] & 0xFFFFFFFF).sum()
                source, token = here.nonzero(as_tuple=True)
                assert handle[0][e, : len(token)].tolist() == token.tolist()
                sent = torch.stack([source - 128, token], 1)
                found = rows[e, : len(token)][:, [0, -1]]
                torch.testing.assert_close(found.float(), sent.float(), rtol=0.07 * fp8, atol=0)
            if leaves(3):
                return
            for zero_copy in (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
                out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
                back, event, later = buffer.low_latency_combine(
                    rows,
                    ids,
                    weights,
                    handle,
                    zero_copy=zero_copy,
                    async_finish=not hook,
                    return_recv_hook=hook,
                    out=out,
                )
                later() if later else event.current_stream_wait()
                require_lost()
                owners = torch.where(ids < 0, 0, ids // local)
                ids[(ids >= 0) & (status[owners] == 1)] = -1
                expected = x * torch.where(ids < 0, 0, weights).sum(1, keepdim=True)
                assert back is out and difference(expected, back) < 3e-3
    buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    require_lost()


def test_ranks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "6000")
    on_ranks(low_latency, 4, tmp_path, shrink=True)


def masked_before(rank: int, ranks: int, buffer: Buffer) -> None:
    """A mask that is set before the first dispatch holds in all later ones."""
    ids, _ = routing(rank)
    x, status = torch.ones(TOKENS, 64).bfloat16(), torch.zeros(ranks, dtype=torch.int32)
    buffer.low_latency_update_mask_buffer(1 - rank, True)
    for most in (TOKENS, 2 * TOKENS):
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [rank, 1 - rank]
        _, counts, *_ = buffer.low_latency_dispatch(x, ids, most, EXPERTS, use_fp8=False)
        local = EXPERTS // ranks
        assert counts.tolist() == [int((ids == rank * local + e).sum()) for e in range(local)]
    for wrong in (-1, ranks, "1", rank):
        with pytest.raises(REFUSED, match="rank_to_mask is"):
            buffer.low_latency_update_mask_buffer(wrong, True)
    for status in (torch.zeros(ranks), torch.zeros(ranks + 1, dtype=torch.int32)):
        with pytest.raises(REFUSED, match="mask_status: found"):
            buffer.low_latency_query_mask_buffer(status)
    dist.barrier()


def test_masked_before(tmp_path: Path) -> None:
    on_ranks(masked_before, 2, tmp_path, shrink=True)


def hooks(rank: int, ranks: int, buffer: Buffer) -> None:
    """Called twice, in another order, late or never; what was given may be gone by then."""
    ids, weights = routing(rank)
    expected = 3 * torch.where(ids < 0, 0, weights).sum(1, keepdim=True).expand(TOKENS, 64)

    def sent() -> Any:
        x = torch.full((TOKENS, 64), 3.0).bfloat16()
        return buffer.low_latency_dispatch(
            x, ids.clone(), TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )

    def require_sums(dispatched: Any) -> None:
        back, _, hook = buffer.low_latency_combine(
            dispatched[0].clone(), ids, weights.clone(), dispatched[2], return_recv_hook=True
        )
        torch.full((4, TOKENS, 64), 9.0)  # where the copies were, if nobody kept them
        hook()
        hook()
        torch.testing.assert_close(back.float(), expected, rtol=0.02, atol=0.02)

    first, second = sent(), sent()
    second[4]()
    first[4]()
    require_sums(first)
    require_sums(second)
    first = sent()
    for _ in range(3):  # the hooks of two are never called
        last = sent()
    first[4]()
    last[4]()
    require_sums(last)


def hidden_sizes(rank: int, ranks: int, buffer: Buffer) -> None:
    ids, weights = routing(rank)
    weights = torch.where(ids < 0, 0, weights)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    for hidden in (1, 3, 7, 100, 129):
        x = torch.randn(TOKENS, hidden).bfloat16()
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        back, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert difference(back, x * weights.sum(1, keepdim=True)) < 1e-4
        layout = (per_rank, None, in_rank, per_expert)
        rows, *_, handle, _ = buffer.dispatch(x, None, *layout)
        back, _, _ = buffer.combine(rows, handle)
        assert difference(back, x * in_rank.sum(1, keepdim=True)) < 1e-4


def routings(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rank 0 keeps its handles, so it makes new ones where the others use theirs again."""
    kept, ids = [], routing(rank)[0]
    for step in range(4):
        ids = (ids + 1) % EXPERTS
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        x = torch.full((TOKENS, HIDDEN), rank + 2.0 * step).bfloat16()
        layout = (per_rank, None, in_rank, per_expert)
        rows, *_, handle, _ = buffer.dispatch(x, None, *layout)
        back, _, _ = buffer.combine(rows, handle)
        assert torch.equal(back, x * in_rank.sum(1, keepdim=True))
        kept += [handle] if rank == 0 else []
        del handle
    free = [len(pool.free) for pool in buffer._exchange.pools]
    assert free[-1] == (0 if rank == 0 else 1)
    dist.barrier()


def unaligned(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rows that begin an element behind a multiple of 16 bytes."""
    ids = routing(rank)[0]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        room = torch.full((TOKENS * HIDDEN + 1,), float(rank + 1)).to(dtype)
        x, scales = room[1:].view(TOKENS, HIDDEN), torch.ones(TOKENS, HIDDEN // 128)
        given = x if dtype == torch.bfloat16 else (x, scales)
        got, *_ = buffer.dispatch(given, None, per_rank, None, in_rank, per_expert)
        rows = bf16_of(got)
        ends = gathered(per_rank, ranks)[:, rank].cumsum(0).tolist()
        for r, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            assert (rows[begin:end] == r + 1).all()


# ---- What is refused --------------------------------------------------------------------------


def refuse(
    what: Callable[..., Any], good: dict[str, Any], cases: list[tuple[str, Any, str]]
) -> None:
    """Each case spoils one argument of a good call."""
    for name, value, match in cases:
        with pytest.raises(REFUSED, match=match):
            what(**{**good, name: value})


def bad_high_throughput(rank: int, ranks: int, buffer: Buffer) -> None:
    ids, weights = routing(rank)
    x = torch.randn(TOKENS, 64).bfloat16()
    layout = {"topk_idx": ids, "num_experts": EXPERTS}
    found = "topk_idx: found"
    wrong = [None, ids.numpy(), ids.float(), ids.bool(), ids[:, 0], ids.to("meta")]
    refuse(buffer.get_dispatch_layout, layout, [("topk_idx", value, found) for value in wrong])
    wrong = [0, -ranks, float(EXPERTS), None]
    refuse(
        buffer.get_dispatch_layout,
        layout,
        [("num_experts", value, "must be an integer from 1 on") for value in wrong],
    )
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(**layout)
    good = {
        "x": x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    fp8 = x.to(torch.float8_e4m3fn)
    cases: list[tuple[str, Any, str]] = [
        ("x", None, "x: found NoneType"),
        ("x", [x, x], "x: found list"),
        ("x", x[0], "x: found bfloat16"),
        ("x", x.to("meta"), "on meta"),
        ("x", x[:, :0], "rows have no elements"),
        ("x", (x,), "a tuple of 1"),
        ("x", (fp8, torch.ones(3, 1)), "scales of x: found"),
        ("x", x[:3], "topk_idx: found"),
        ("topk_idx", ids.float(), "topk_idx: found"),
        ("topk_idx", ids[:3], "topk_idx: found"),
        ("topk_idx", None, "topk_weights need topk_idx"),
        ("topk_weights", weights[:, :1], "topk_weights: found"),
        ("expert_alignment", 0, "expert_alignment is 0"),
        ("num_worst_tokens", -1, "num_worst_tokens is -1"),
        ("num_tokens_per_rank", per_rank + 1, "is_token_in_rank has"),
        ("num_tokens_per_rank", per_rank.float(), "num_tokens_per_rank: found"),
        ("is_token_in_rank", in_rank[:3], "is_token_in_rank: found"),
        ("num_tokens_per_expert", per_expert[:1], "must divide evenly"),
        ("handle", 5, "do not go with a handle"),
    ]
    refuse(buffer.dispatch, good, cases)
    refuse(buffer.dispatch, {"x": x}, [("handle", (1, 2), "handle is of type tuple")])
    rows, _, row_weights, _, handle, _ = buffer.dispatch(**good)
    wide = torch.ones(TOKENS, 64)
    cases = [
        ("x", None, "x: found"),
        ("x", rows.double(), "x: found float64"),
        ("x", rows[:, 0], "x: found"),
        ("handle", None, "handle is of type NoneType"),
        ("topk_weights", row_weights[:1], "topk_weights: found"),
        ("bias", wide[0], "bias: found"),
        ("bias", wide[:1], "bias: found"),
        ("bias", (wide,) * 3, "bias has 3 tensors"),
    ]
    refuse(buffer.combine, {"x": rows, "handle": handle}, cases)
    (scales,) = {tuple(buffer.dispatch(**{**good, "x": (fp8, wide[:, 0])})[0][1].shape)}
    assert scales == (len(rows),)


def bad_low_latency(rank: int, ranks: int, buffer: Buffer) -> None:
    ids, weights = routing(rank)
    x = torch.randn(TOKENS, 128).bfloat16()
    good = {
        "x": x,
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": TOKENS,
        "num_experts": EXPERTS,
        "use_fp8": False,
    }
    stats = "cumulative_local_expert_recv_stats"
    cases: list[tuple[str, Any, str]] = [
        ("x", None, "x: found"),
        ("x", x.long(), "x: found int64"),
        ("x", x[0], "x: found"),
        ("topk_idx", ids[:3], "topk_idx: found"),
        ("topk_idx", ids.float(), "topk_idx: found"),
        ("num_experts", 0, "num_experts is 0"),
        ("num_max_dispatch_tokens_per_rank", -1, "num_max_dispatch_tokens_per_rank is -1"),
        (stats, torch.zeros(EXPERTS // ranks), f"{stats}: found float32"),
        (stats, torch.zeros(1, dtype=torch.int32), f"{stats}: found int32"),
    ]
    refuse(buffer.low_latency_dispatch, good, cases)
    refuse(
        buffer.low_latency_dispatch,
        {**good, "use_fp8": True},
        [("x", x.float(), "x: found float32")],
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(**good)
    good = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": handle}
    cases = [
        ("x", rows[0], "x: found"),
        ("x", rows[:, :3], "x: found"),
        ("topk_idx", None, "topk_idx: found"),
        ("topk_idx", torch.where(ids < 0, 0, ids), "topk_idx differs"),
        ("topk_weights", None, "topk_weights: found"),
        ("topk_weights", weights.long(), "topk_weights: found int64"),
        ("handle", tuple(handle), "handle is of type tuple"),
        ("out", torch.empty(TOKENS, 128), "out: found float32"),
        ("out", torch.empty(3, 128).bfloat16(), "out: found"),
    ]
    refuse(buffer.low_latency_combine, good, cases)
    back, _, _ = buffer.low_latency_combine(**good)
    expected = x * torch.where(ids < 0, 0, weights).sum(1, keepdim=True)
    assert difference(back, expected) < 1e-4


def forked(rank: int, ranks: int, buffer: Buffer) -> None:
    """In a child every call is refused at once; the parent's goes on."""
    ids, _ = routing(rank)
    x = torch.ones(TOKENS, 64).bfloat16()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = (None, per_rank, None, in_rank, per_expert)
    rows, *_, handle, _ = buffer.dispatch(x, *layout)
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], Any]] = [
            lambda: buffer.dispatch(x, *layout),
            lambda: buffer.dispatch(x, handle),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False),
        ]
        refused = 0
        for call in calls:
            try:
                call()
            except UNUSABLE as error:
                refused += "made before a fork" in str(error)
        os._exit(refused)
    began = time.monotonic()
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < began + 20:
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(done[1]) == 4
    buffer.combine(rows, handle)


def calls(rank: int, ranks: int, buffer: Buffer) -> None:
    works = routings, unaligned, hooks, hidden_sizes, bad_high_throughput, bad_low_latency, forked
    for work in works:
        work(rank, ranks, buffer)


def test_calls(tmp_path: Path) -> None:
    on_ranks(calls, 2, tmp_path)


def test_groups() -> None:
    for group in ("world", 3, -100):  # -100: of torch, where a rank is no member
        with pytest.raises(REFUSED, match="group is"):
            Buffer(group)
