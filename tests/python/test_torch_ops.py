"""trefoil.torch: an MoE layer over several ranks equals the dense layer, forward and backward,
eager and compiled; what is wrong raises. Needs torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ep_needs  # noqa: F401
from ep_steps import with_threads
from trefoil import ep, on_device
from trefoil.torch import (
    EPGroup,
    MoEDispatcher,
    combine,
    dispatch,
    grouped_linear,
    ll_combine,
    ll_dispatch,
    route,
    stream_of,
)

HIDDEN, WIDE = 16, 8
compiles = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11.0 crashes when two threads compile: compile_on_threads.py, without trefoil",
)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer and its ranks; the data follow from the seed."""

    ranks: int = 2
    experts: int = 6
    topk: int = 3
    tokens: int = 5  # at most, a rank
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def local(self) -> int:
        return -(-self.experts // self.ranks)

    def generator(self, *what: int) -> torch.Generator:
        number = 0
        for part in (self.seed, *what):
            number = number * 1009 + part
        return torch.Generator().manual_seed(number)

    def count(self, rank: int) -> int:
        """Tokens of a rank: rank 1 has none with an odd seed."""
        return 0 if rank == 1 and self.seed % 2 else self.tokens - rank % 2

    def x(self, rank: int) -> torch.Tensor:
        rows = torch.randn(self.count(rank), HIDDEN, generator=self.generator(1, rank))
        return rows.to(self.dtype).requires_grad_()

    def ids(self, rank: int) -> torch.Tensor:
        draw = torch.rand(self.count(rank), self.experts, generator=self.generator(2, rank))
        ids = draw.argsort(1)[:, : self.topk]
        unused = torch.rand(ids.shape, generator=self.generator(3, rank)) < 0.15
        return torch.where(unused, -1, ids)

    def weights(self, rank: int) -> torch.Tensor:
        shape = (self.count(rank), self.topk)
        return torch.rand(shape, generator=self.generator(4, rank)).requires_grad_()

    def logits(self, rank: int) -> torch.Tensor:
        shape = (self.count(rank), self.experts)
        return torch.randn(shape, generator=self.generator(5, rank)).requires_grad_()

    def matrix(self) -> torch.Tensor:
        """[E, H, W], of all ranks."""
        shape = (self.experts, HIDDEN, HIDDEN)
        return (torch.randn(shape, generator=self.generator(6)) / 4).to(self.dtype)

    def slice(self, rank: int) -> torch.Tensor:
        """A rank's experts; fewer than `local` at the end are filled up with zeros."""
        mine = self.matrix()[rank * self.local : (rank + 1) * self.local]
        full = torch.zeros(self.local, HIDDEN, HIDDEN, dtype=self.dtype)
        full[: len(mine)] = mine
        return full.requires_grad_()

    def group(self, comm: ep.Communicator, **more: Any) -> EPGroup:
        return EPGroup(
            comm,
            num_experts=self.experts,
            num_topk=self.topk,
            max_tokens=self.tokens,
            hidden=HIDDEN,
            dtype=self.dtype,
            timeout=30,
            **more,
        )


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """The layer without ranks."""
    terms = torch.einsum("bh,bkhj->bkj", x, w[ids.clamp(min=0)])
    return (terms * (weights * (ids >= 0)).unsqueeze(2)).sum(1)


Ranked = Callable[[int, EPGroup], Any]


def run(layer: Layer, body: Ranked, **more: Any) -> list[Any]:
    """body on every rank of a group."""

    def rank_main(rank: int, comm: ep.Communicator) -> Any:
        with layer.group(comm, **more) as group:
            return body(rank, group)

    return with_threads(rank_main, layer.ranks)


LAYERS = [
    Layer(*sizes, seed=seed)
    for seed, sizes in enumerate([(1, 4, 2), (2, 6, 3), (3, 9, 4), (4, 8, 2), (2, 5, 5)])
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layer_and_gradients(layer: Layer) -> None:
    """Outputs and the gradients of rows, weights and experts are the dense layer's."""

    def body(rank: int, group: EPGroup) -> tuple[torch.Tensor, ...]:
        x, weights, w = layer.x(rank), layer.weights(rank), layer.slice(rank)
        out = MoEDispatcher(group)(
            x,
            lambda rows, counts: grouped_linear(rows, counts, w),
            topk_idx=layer.ids(rank),
            topk_weights=weights,
        )
        factor = torch.arange(1.0, HIDDEN + 1)
        (out * factor).sum().backward()
        assert x.grad is not None and weights.grad is not None and w.grad is not None
        return out.detach(), x.grad, weights.grad, w.grad

    found = run(layer, body)
    w = layer.matrix().requires_grad_()
    for rank, (out, grad_x, grad_weights, _) in enumerate(found):
        x, weights = layer.x(rank), layer.weights(rank)
        expected = dense(x, layer.ids(rank), weights, w)
        (expected * torch.arange(1.0, HIDDEN + 1)).sum().backward()
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_x, x.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad_weights, weights.grad, rtol=1e-4, atol=1e-4)
    all_w = torch.cat([grad for *_, grad in found])[: layer.experts]
    torch.testing.assert_close(all_w, w.grad, rtol=1e-4, atol=1e-4)


def test_routing_by_logits() -> None:
    """logits: the K largest, by the softmax of these; and their gradient."""
    layer = Layer(seed=20)

    def body(rank: int, group: EPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        logits, w = layer.logits(rank), layer.slice(rank)
        moe = MoEDispatcher(group)
        out = moe(layer.x(rank), lambda rows, n: grouped_linear(rows, n, w), logits=logits)
        out.square().sum().backward()
        assert logits.grad is not None
        return out.detach(), logits.grad

    for rank, (out, grad) in enumerate(run(layer, body)):
        logits = layer.logits(rank)
        top = logits.topk(layer.topk)
        expected = dense(layer.x(rank), top.indices, top.values.softmax(1), layer.matrix())
        expected.square().sum().backward()
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, logits.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats(dtype: torch.dtype) -> None:
    """Rows of 16 bits: within what their rounding allows."""
    layer = Layer(ranks=3, experts=9, dtype=dtype, seed=4)

    def body(rank: int, group: EPGroup) -> torch.Tensor:
        w = layer.slice(rank)
        moe = MoEDispatcher(group)
        with torch.no_grad():
            return moe(
                layer.x(rank),
                lambda rows, n: grouped_linear(rows, n, w),
                topk_idx=layer.ids(rank),
                topk_weights=layer.weights(rank),
            )

    for rank, out in enumerate(run(layer, body)):
        assert out.dtype == dtype
        rows = layer.x(rank).float(), layer.ids(rank), layer.weights(rank), layer.matrix().float()
        torch.testing.assert_close(out.float(), dense(*rows), rtol=0.03, atol=0.03)


def test_gradcheck_alone() -> None:
    """One rank: gradients against differences, of both operations."""
    layer = Layer(ranks=1, experts=4, topk=2, tokens=3, seed=6)

    def body(rank: int, group: EPGroup) -> bool:
        routing = route(group, layer.ids(rank))

        def layer_of(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, row_weights, _ = dispatch(group, x, weights, routing)
            return combine(group, rows * row_weights.sum(1, keepdim=True), routing)

        inputs = layer.x(rank), layer.weights(rank)
        return torch.autograd.gradcheck(layer_of, inputs, eps=1e-2, atol=1e-2, rtol=1e-2)

    assert run(layer, body) == [True]


def test_gradient_of_a_direction() -> None:
    """Several ranks: the change of all ranks' loss is the sum of their gradients' parts."""
    layer = Layer(ranks=3, experts=9, topk=4, seed=8)
    step = 1e-2

    def direction(rank: int) -> torch.Tensor:
        x = layer.x(rank)
        return torch.randn(x.shape, generator=layer.generator(9, rank))

    def body(rank: int, group: EPGroup) -> tuple[list[float], float]:
        w = layer.slice(rank)

        def loss_at(at: float) -> tuple[torch.Tensor, torch.Tensor]:
            x = (layer.x(rank).detach() + at * direction(rank)).requires_grad_()
            out = MoEDispatcher(group)(
                x,
                lambda rows, n: grouped_linear(rows, n, w).tanh(),
                topk_idx=layer.ids(rank),
                topk_weights=layer.weights(rank),
            )
            return out.square().sum(), x

        sides = [float(loss_at(at)[0].detach()) for at in (-step, step)]
        loss, x = loss_at(0.0)
        loss.backward()
        return sides, float((x.grad * direction(rank)).sum())

    found = run(layer, body)
    slope = sum(sides[1] - sides[0] for sides, _ in found) / (2 * step)
    assert slope == pytest.approx(sum(part for _, part in found), rel=1e-2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sizes", [(16, 32), (5, 7), (16, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_linear_compiled(dtype: torch.dtype, sizes: tuple[int, int], backend: str) -> None:
    """Whole, with the values and gradients of a product an expert, also for a transposed weight."""
    torch.manual_seed(14)
    counts = [4, 0, 5]
    rows = torch.randn(12, sizes[0], dtype=dtype)
    weight = torch.randn(3, sizes[1], sizes[0], dtype=dtype).transpose(1, 2)

    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, torch.tensor(counts), w)[: sum(counts)]

    def by_expert(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = x[: sum(counts)].split(counts)
        return torch.cat([part @ of for part, of in zip(parts, w, strict=True)])

    torch._dynamo.reset()
    found = []
    for run_it in (by_expert, whole, torch.compile(whole, fullgraph=True, backend=backend)):
        x, w = rows.clone().requires_grad_(), weight.detach().requires_grad_()
        out = run_it(x, w)
        of_x, of_w = torch.autograd.grad(out.float().pow(2).sum(), (x, w))
        found.append([out, of_x[: sum(counts)], of_w])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.1}
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], **close)


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """One graph, and the same bits in outputs; gradients within rounding."""
    layer = Layer(ranks=2, experts=6, topk=3, seed=10)

    def body(rank: int, group: EPGroup) -> list[tuple[torch.Tensor, ...]]:
        w = layer.slice(rank)
        moe = MoEDispatcher(group)

        def whole(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return moe(
                x, lambda rows, n: grouped_linear(rows, n, w), topk_idx=ids, topk_weights=weights
            )

        results = []
        for run_it in (whole, torch.compile(whole, fullgraph=True, backend=backend, dynamic=False)):
            x = layer.x(rank)
            out = run_it(x, layer.ids(rank), layer.weights(rank))
            out.sum().backward()
            results.append((out.detach(), x.grad))
        return results

    torch._dynamo.reset()
    for (out, grad), (out_compiled, grad_compiled) in run(layer, body):
        torch.testing.assert_close(out_compiled, out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_compiled, grad, rtol=1e-4, atol=1e-4)


@compiles
def test_compiled_keeps_what_nobody_uses() -> None:
    """An operation whose result is dropped is collective all the same, and keeps its place."""
    layer = Layer(ranks=2, seed=12)

    def body(rank: int, group: EPGroup) -> int:
        def twice(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            route(group, ids)
            routing = route(group, ids.flip(1))
            dispatch(group, x, weights, routing)
            rows, _, _ = dispatch(group, x * 2, weights, routing)
            return combine(group, rows, routing)

        before = int(group.order)
        call = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=False)
        with torch.no_grad():
            call(layer.x(rank), layer.ids(rank), layer.weights(rank))
        return int(group.order) - before

    torch._dynamo.reset()
    assert run(layer, body) == [5, 5]


def test_operators_as_torch_checks_them() -> None:
    """Schemas, fake kernels and autograd keys, by torch's own tests."""
    layer = Layer(ranks=1, experts=4, topk=2, tokens=3, seed=14)

    def body(rank: int, group: EPGroup) -> None:
        ops, at = torch.ops.trefoil, (group.key, group.order)
        routing = route(group, layer.ids(rank))
        rows, _, _ = dispatch(group, layer.x(rank), layer.weights(rank), routing)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        samples = [
            (ops.route, (layer.ids(rank), *at)),
            (ops.dispatch, (layer.x(rank), layer.weights(rank), routing.memory, *at)),
            (ops.combine, (rows.detach().requires_grad_(), routing.memory, routing.tokens, *at)),
        ]
        for op, arguments in samples:
            torch.library.opcheck(op, arguments, test_utils=checks)

    run(layer, body)


def test_refused_low_latency() -> None:
    """A dispatch that is refused takes no place: the two before it can be combined."""
    layer = Layer(ranks=2, seed=20)

    def body(rank: int, group: EPGroup) -> list[torch.Tensor]:
        x, ids, weights = layer.x(rank), layer.ids(rank), layer.weights(rank)
        with torch.no_grad():
            for _ in range(2):
                rows, _, first = ll_dispatch(group, x, ids)
                ll_dispatch(group, x, ids)
                with pytest.raises(ep.InvalidArgumentError):
                    ll_dispatch(group, x.repeat(9, 1), ids.repeat(9, 1))
                out = ll_combine(group, rows, weights, first)
                scale = weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
                torch.testing.assert_close(out, x * scale)
        return []

    run(layer, body, low_latency=True)


@compiles
def test_low_latency() -> None:
    """Expert-major: more operations than handles, routings of the last two, and a compiled one."""
    layer = Layer(ranks=2, seed=16)

    def body(rank: int, group: EPGroup) -> list[torch.Tensor]:
        w = layer.slice(rank)

        def whole(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, _, routing = ll_dispatch(group, x, ids)
            return ll_combine(group, torch.bmm(rows, w), weights, routing)

        inputs = layer.x(rank), layer.ids(rank), layer.weights(rank)
        with torch.no_grad():
            outs = [whole(*inputs) for _ in range(5)]
            rows, _, first = ll_dispatch(group, inputs[0], inputs[1])
            other, _, second = ll_dispatch(group, inputs[0] * 2, inputs[1])
            outs.append(ll_combine(group, torch.bmm(other, w), inputs[2], second) / 2)
            outs.append(ll_combine(group, torch.bmm(rows, w), inputs[2], first))
            ll_dispatch(group, inputs[0], inputs[1])
            with pytest.raises(ep.InvalidUsageError, match="not among its last 2"):
                ll_combine(group, rows, inputs[2], first)
            compiled = torch.compile(whole, fullgraph=True, backend="aot_eager", dynamic=False)
            outs.append(compiled(*inputs))
        return outs

    torch._dynamo.reset()
    for rank, outs in enumerate(run(layer, body, low_latency=True)):
        rows = layer.x(rank), layer.ids(rank), layer.weights(rank), layer.matrix()
        for out in outs:
            torch.testing.assert_close(out, dense(*rows).detach(), rtol=1e-5, atol=1e-5)


def test_several_layers_and_steps() -> None:
    """Training over ranks has the losses of the dense layer: routings outlive those after them."""
    layer = Layer(ranks=2, experts=4, topk=2, tokens=8, seed=18)
    layers, steps, rate = 3, 4, 0.05

    def train(
        x: torch.Tensor,
        mix: Callable[[int, torch.Tensor], torch.Tensor],
        params: list[torch.Tensor],
    ) -> list[float]:
        losses = []
        for _ in range(steps):
            h = x
            for i in range(layers):
                h = h + mix(i, h).tanh()
            loss = h.square().sum()
            losses.append(float(loss.detach()))
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                with torch.no_grad():
                    p -= rate * g
        return losses

    def body(rank: int, group: EPGroup) -> list[float]:
        moe = MoEDispatcher(group)
        ws = [layer.slice(rank) for _ in range(layers)]

        def mix(i: int, h: torch.Tensor) -> torch.Tensor:
            return moe(
                h,
                lambda rows, n: grouped_linear(rows, n, ws[i]),
                topk_idx=layer.ids(rank),
                topk_weights=layer.weights(rank),
            )

        return train(layer.x(rank), mix, ws)

    ws = [layer.matrix().requires_grad_() for _ in range(layers)]
    ids = torch.cat([layer.ids(r) for r in range(layer.ranks)])
    weights = torch.cat([layer.weights(r) for r in range(layer.ranks)])
    x = torch.cat([layer.x(r) for r in range(layer.ranks)])
    expected = train(x, lambda i, h: dense(h, ids, weights, ws[i]), ws)
    found = [sum(parts) for parts in zip(*run(layer, body), strict=True)]
    assert found == pytest.approx(expected, rel=1e-4)


def test_overflow() -> None:
    """Too few slots: the ranks concerned raise and the group goes on; drop keeps the first rows."""
    layer = Layer(ranks=2, experts=4, topk=4, tokens=4, seed=22)

    def body(rank: int, group: EPGroup) -> int:
        ids = torch.arange(4).repeat(layer.count(rank), 1)
        try:
            routing = route(group, ids)
            rows, _, _ = dispatch(group, layer.x(rank), layer.weights(rank), routing)
        except ep.Error:
            return -1
        return int((rows != 0).any(1).sum())

    assert run(layer, body, max_recv=5) == [-1, -1]
    assert run(layer, body, max_recv=5, drop=True) == [5, 5]


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of a matrix that is stored by columns."""
    wide = torch.stack([t, t], 1).flatten(0, 1).t().contiguous().t()
    assert not wide[::2].is_contiguous()
    return wide[::2]


@pytest.mark.parametrize("low_latency", [False, True])
def test_strides(low_latency: bool) -> None:
    """Rows, ids and weights of any strides, as views of others give them."""
    layer = Layer(ranks=2, seed=30)

    def body(rank: int, group: EPGroup) -> torch.Tensor:
        x, ids, weights = (
            strided(t) for t in (layer.x(rank), layer.ids(rank), layer.weights(rank))
        )
        w = layer.slice(rank)
        if low_latency:
            with torch.no_grad():
                rows, _, routing = ll_dispatch(group, x, ids)
                back = strided(torch.bmm(rows, w).flatten(0, 1)).view(*rows.shape)
                return ll_combine(group, back, weights, routing)
        return MoEDispatcher(group)(
            x,
            lambda rows, counts: strided(grouped_linear(rows, counts, w)),
            topk_idx=ids,
            topk_weights=weights,
        ).detach()

    for rank, out in enumerate(run(layer, body, low_latency=low_latency)):
        rows = layer.x(rank), layer.ids(rank), layer.weights(rank), layer.matrix()
        torch.testing.assert_close(out, dense(*rows).detach(), rtol=1e-5, atol=1e-5)


class Exchange(torch.nn.Module):
    """A module that has a dispatcher, as models have them."""

    def __init__(self, group: EPGroup, w: torch.Tensor) -> None:
        super().__init__()
        self.moe, self.w = MoEDispatcher(group), torch.nn.Parameter(w.detach())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return grouped_linear(rows, counts, self.w)

        return self.moe(x, experts, topk_idx=ids, topk_weights=weights)


def test_copies() -> None:
    """A deep copy of a module has its own parameters, and the same group; nothing is pickled."""
    layer = Layer(ranks=2, seed=32)

    def body(rank: int, group: EPGroup) -> tuple[torch.Tensor, ...]:
        module = Exchange(group, layer.slice(rank))
        other = copy.deepcopy(module)
        assert other.w is not module.w
        assert other.moe.group is copy.copy(group) is group
        with torch.no_grad():
            other.w *= 2
        inputs = layer.x(rank), layer.ids(rank), layer.weights(rank)
        outs = module(*inputs), other(*inputs)
        for unique in (group, group.comm):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                pickle.dumps(unique)
        with pytest.raises(TypeError, match="Communicator of trefoil cannot be copied"):
            copy.copy(group.comm)
        return outs

    for rank, (once, twice) in enumerate(run(layer, body)):
        rows = layer.x(rank), layer.ids(rank), layer.weights(rank), layer.matrix()
        torch.testing.assert_close(once, dense(*rows), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(twice, 2 * once, rtol=1e-5, atol=1e-5)


def test_bad_input() -> None:
    """Each with a sentence, on all ranks alike; afterwards the group works."""
    layer = Layer(ranks=2, seed=24)

    def body(rank: int, group: EPGroup) -> torch.Tensor:
        x, ids, weights = layer.x(rank), layer.ids(rank), layer.weights(rank)
        invalid, unused = ep.InvalidArgumentError, ep.InvalidUsageError
        with pytest.raises(invalid, match=r"experts in \[0, 6\), each once"):
            route(group, torch.full_like(ids, 6))
        with pytest.raises(invalid, match="each once"):
            route(group, torch.zeros_like(ids))
        with pytest.raises(invalid, match=r"topk_idx: found float32"):
            route(group, ids.float())
        with pytest.raises(invalid, match=r"expected int64 or int32 \[any, 3\]"):
            route(group, ids[:, :2].contiguous())
        routing = route(group, ids)
        with pytest.raises(invalid, match="x: found float64"):
            dispatch(group, x.double(), weights, routing)
        with pytest.raises(invalid, match="x: found"):
            dispatch(group, x[1:], weights, routing)
        with pytest.raises(invalid, match="topk_weights: found"):
            dispatch(group, x, weights[:, 1:].contiguous(), routing)
        with pytest.raises(invalid, match="rows: found"):
            combine(group, x, routing)
        with pytest.raises(invalid, match="routing: found"):
            combine(group, x, routing._replace(memory=routing.memory[1:]))
        with pytest.raises(unused, match="needs True"):
            ll_dispatch(group, x.detach(), ids)
        other_kinds: list[tuple[str, Callable[[], object]]] = [
            (
                "routing: found NoneType, expected Routing",
                lambda: dispatch(group, x, weights, None),
            ),
            (
                "routing: found Routing, expected LLR",
                lambda: ll_combine(group, x, weights, routing),
            ),
            ("group: found NoneType, expected EPGroup", lambda: route(None, ids)),
            ("topk_idx: found list, expected a tensor", lambda: route(group, ids.tolist())),
            ("x: found list, expected a tensor", lambda: dispatch(group, [], weights, routing)),
            ("rows: found list, expected a tensor", lambda: combine(group, [], routing)),
            ("topk_idx: found NoneType", lambda: ll_dispatch(group, x, None)),
        ]
        for match, call in other_kinds:
            with pytest.raises(invalid, match=match):
                call()
        sentence = "the routing is of group"
        with layer.group(group.comm) as other, pytest.raises(unused, match=sentence):
            dispatch(other, x, weights, routing)
        with pytest.raises(unused, match="was destroyed"):
            route(other, ids)
        with pytest.raises(invalid, match=r"experts: found \[1, 16\]"):
            moe = MoEDispatcher(group)
            moe(x, lambda rows, _: rows[:1], topk_idx=ids, topk_weights=weights)
        rows, _, _ = dispatch(group, x, weights, routing)
        return combine(group, rows, routing).detach()

    for rank, out in enumerate(run(layer, body)):
        used = layer.ids(rank)
        ranks = [set((row[row >= 0] // layer.local).tolist()) for row in used]
        expected = layer.x(rank).detach() * torch.tensor([[float(len(s))] for s in ranks])
        torch.testing.assert_close(out, expected)


def test_groups_without_gradients_refuse_them() -> None:
    """Low latency has no backward pass, and says so."""
    layer = Layer(ranks=1, experts=4, topk=2, seed=26)

    def body(rank: int, group: EPGroup) -> None:
        with pytest.raises(ep.InvalidUsageError, match="no backward pass"):
            ll_dispatch(group, layer.x(rank), layer.ids(rank))
        with pytest.raises(ep.InvalidUsageError, match="needs False"):
            MoEDispatcher(group)

    run(layer, body, low_latency=True)
    with pytest.raises(ep.InvalidArgumentError, match=r"dtype is torch\.float64"):
        run(Layer(ranks=1, dtype=torch.float64), body)


def test_stream_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream as a number, of the tensor's GPU; None, the default stream, in host memory."""
    assert stream_of(torch.ones(1)) is None
    monkeypatch.setattr(on_device, "_raw_stream", lambda device: 100 + device)
    of_gpu: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=3))
    assert stream_of(of_gpu) == 103
