"""Rows by token of trefoil.deep_ep: low latency's and high throughput's. Needs torch; on a GPU with
TREFOIL_TEST_DEVICE=cuda and TREFOIL_EP_LIBRARY=gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ep_needs  # noqa: F401
from test_deep_ep import (
    EXPERTS,
    HIDDEN,
    ON_GPU,
    TOKENS,
    arrivals,
    ids_of,
    on_ranks,
    placed,
    rows_of,
    weights_of,
)
from trefoil import ep
from trefoil.deep_ep import Buffer

REFUSED = ep.InvalidArgumentError


def by_token(rank: int, ranks: int, buffer: Buffer) -> None:
    """Rows by token: each once, with its source's weights and the local ids; two in flight, by
    hooks; sums of what the experts here make of them."""
    local, x, ids, weights = EXPERTS // ranks, rows_of(rank), ids_of(rank), weights_of(rank)
    expected = x.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
    group = buffer.low_latency_tokens(TOKENS, HIDDEN, EXPERTS)
    assert buffer.low_latency_tokens(TOKENS, HIDDEN, EXPERTS) is group
    for later in (False, True):
        made = [group.dispatch_tokens(x * factor, ids, weights, later=later) for factor in (1, 2)]
        for factor, found in enumerate(made, 1):
            if found.hook:
                found.hook()
            assert found.rows.shape == (ranks * TOKENS, HIDDEN)
            own = torch.where(found.local_ids >= 0, found.weights, 0.0).sum(1, keepdim=True)
            used = torch.zeros(len(found.rows), dtype=torch.bool)
            taken = dict.fromkeys(range(ranks), 0)
            for source, token in arrivals(rank, ranks):
                row = source * TOKENS + taken[source]
                taken[source] += 1
                used[row] = True
                assert torch.equal(found.rows[row], factor * rows_of(source)[token])
                assert torch.equal(found.weights[row], weights_of(source)[token])
                here = [i - rank * local for i in ids_of(source)[token].tolist()]
                here = [i if 0 <= i < local else -1 for i in here]
                assert found.local_ids[row].tolist() == here
            assert (found.local_ids[~placed(used)] == -1).all()
            out = torch.empty_like(x)
            done = (found.rows.float() * own).bfloat16()
            hook = found.combine(done, out, later=later)
            assert (hook is not None) == later
            if hook:
                hook()
            torch.testing.assert_close(out.float(), factor * expected, rtol=0.02, atol=0.02)
    with pytest.raises(REFUSED, match="tokens is 0"):
        buffer.low_latency_tokens(0, HIDDEN, EXPERTS)


def routed_by_token(rank: int, ranks: int, buffer: Buffer) -> None:
    """The same by high throughput: as many rows as all ranks have tokens, of which those that came
    are the first; two in flight; again with other routing."""
    local, x, ids, weights = EXPERTS // ranks, rows_of(rank), ids_of(rank), weights_of(rank)
    group = buffer.high_throughput_tokens(TOKENS, HIDDEN, EXPERTS)
    assert buffer.high_throughput_tokens(TOKENS, HIDDEN, EXPERTS) is group
    every = sum(len(ids_of(source)) for source in range(ranks))
    for most in (None, every):
        made = [group.dispatch_tokens(x * factor, ids, weights, most=most) for factor in (1, 2)]
        for factor, found in enumerate(made, 1):
            came = arrivals(rank, ranks)
            assert found.rows.shape == (most or ranks * TOKENS, HIDDEN) and found.hook is None
            for row, (source, token) in enumerate(came):
                assert torch.equal(found.rows[row], factor * rows_of(source)[token])
                pairs = zip(
                    ids_of(source)[token].tolist(), weights_of(source)[token].tolist(), strict=True
                )
                here = sorted((i - rank * local, w) for i, w in pairs if i // local == rank)
                count = len(here)
                assert found.local_ids[row, :count].tolist() == [i for i, _ in here]
                assert found.weights[row, :count].tolist() == [w for _, w in here]
                assert (found.local_ids[row, count:] == -1).all()
            assert (found.local_ids[len(came) :] == -1).all()
            assert (found.weights[len(came) :] == 0).all()
            own = torch.where(found.local_ids >= 0, found.weights, 0.0).sum(1, keepdim=True)
            out = torch.empty_like(x)
            found.combine((found.rows.float() * own).bfloat16(), out)
            expected = x.float() * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), factor * expected, rtol=0.02, atol=0.02)
    more = torch.cat([found.rows, found.rows.new_zeros(ranks * TOKENS, HIDDEN)])
    for other in (more, found.rows[:-1]):
        with pytest.raises(REFUSED, match="the dispatch received"):
            found.combine(other, torch.empty_like(x))
    lists = (x.tolist(), ids, weights), (x, ids.tolist(), weights), (x, ids, weights.tolist())
    for given in lists:
        with pytest.raises(REFUSED, match="found list, expected a tensor"):
            group.dispatch_tokens(*given)
    with pytest.raises(REFUSED, match="found NoneType, expected a tensor"):
        found.combine(found.rows, None)
    stale = group.dispatch_tokens(x, ids, weights)
    for _ in range(2):
        group.dispatch_tokens(x, ids, weights)
    with pytest.raises(ep.InvalidUsageError, match="two later dispatches took the place"):
        stale.combine(stale.rows, torch.empty_like(x))
    with pytest.raises(REFUSED, match="low latency alone receives in a hook"):
        group.dispatch_tokens(x, ids, weights, later=True)
    if not ON_GPU:  # there the kernel asserts
        with pytest.raises(REFUSED, match="most is 0; more rows came"):
            group.dispatch_tokens(x, ids, weights, most=0)
    with pytest.raises(REFUSED, match="most is -1; must be in"):
        group.dispatch_tokens(x, ids, weights, most=-1)
    with pytest.raises(REFUSED, match="a row has 10 bytes"):
        buffer.high_throughput_tokens(TOKENS, 5, EXPERTS)
    with pytest.raises(REFUSED, match="low latency has R N rows"):
        buffer.low_latency_tokens(TOKENS, HIDDEN, EXPERTS).dispatch_tokens(x, ids, weights, most=9)


def captured(rank: int, ranks: int, buffer: Buffer) -> None:
    """Both in a CUDA graph, replayed with other tokens: an expert of each rank, so sums are R x."""
    if not ON_GPU:
        return
    groups = [
        (buffer.low_latency_tokens(TOKENS, HIDDEN, EXPERTS), None),
        (buffer.high_throughput_tokens(TOKENS, HIDDEN, EXPERTS), ranks * TOKENS),
    ]
    for group, most in groups:
        x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = torch.arange(ranks, device="cuda").mul(EXPERTS // ranks).repeat(TOKENS, 1)
        weights = torch.ones(TOKENS, ranks, device="cuda")

        def sums(
            group: Any = group, most: Any = most, x: Any = x, ids: Any = ids, weights: Any = weights
        ) -> torch.Tensor:
            found = group.dispatch_tokens(x, ids, weights, most=most)
            out = torch.empty_like(x)
            found.combine(found.rows, out)
            return out

        for _ in range(2):  # its two handles
            sums()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sums()
        for seed in range(3):
            torch.manual_seed(ranks * seed + rank)
            x.copy_(torch.randint(-8, 8, x.shape, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, ranks * x)


def works(rank: int, ranks: int, buffer: Buffer) -> None:
    for work in (by_token, routed_by_token, captured, by_token):
        work(rank, ranks, buffer)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_token_rows(ranks: int, tmp_path: Path) -> None:
    on_ranks(works, ranks, tmp_path)
