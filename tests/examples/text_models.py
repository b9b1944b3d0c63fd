"""Two small language models with their gradients, many replicas at a time, in NumPy alone.

Parameters are one row a replica, [replicas, elements], its tensors one behind the other in the
order of `shapes`. A batch is [replicas, sequences, tokens + 1]: each token but the first is to be
predicted from those before it.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def softmax_loss(logits: Array, wanted: Array) -> tuple[Array, Array]:
    """Mean loss of each replica, and its gradient by the logits [replicas, tokens, words]."""
    shifted = logits - logits.max(-1, keepdims=True)
    grad = np.exp(shifted)
    total = grad.sum(-1, keepdims=True)
    picked = np.take_along_axis(shifted - np.log(total), wanted[..., None], -1)
    grad /= total
    np.put_along_axis(
        grad, wanted[..., None], np.take_along_axis(grad, wanted[..., None], -1) - 1, -1
    )
    return -picked.mean((1, 2)), grad / wanted.shape[1]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


class Model:
    """What a row of parameters is."""

    shapes: dict[str, tuple[int, ...]]

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes.values()]

    def start(self, rng: np.random.Generator) -> Array:
        """A replica's parameters: normal, by the number of inputs; vectors are zero."""
        parts = []
        for name, shape in self.shapes.items():
            scale = 0 if len(shape) == 1 else 0.1 if name == "embed" else shape[-2] ** -0.5
            parts.append(rng.standard_normal(math.prod(shape)) * scale)
        return np.concatenate(parts).astype(np.float32)

    def split(self, rows: Array) -> dict[str, Array]:
        parts = np.split(rows, np.cumsum(self.sizes)[:-1], axis=-1)
        shapes = self.shapes.items()
        return {n: p.reshape(len(rows), *s) for (n, s), p in zip(shapes, parts, strict=True)}

    def join(self, grads: dict[str, Array]) -> Array:
        return np.concatenate([grads[n].reshape(len(grads[n]), -1) for n in self.shapes], axis=1)

    def embed_grad(self, tokens: Array, grad: Array) -> Array:
        """Sums the gradients of the rows of the embedding that were read."""
        found = np.zeros((len(tokens), *self.shapes["embed"]), grad.dtype)
        for w in range(len(tokens)):
            np.add.at(found[w], tokens[w].ravel(), grad[w].reshape(-1, grad.shape[-1]))
        return found


class Lstm(Model):
    """Embedding, one LSTM layer, output; the state begins at zero in each sequence."""

    def __init__(self, words: int, width: int) -> None:
        self.width = width
        self.shapes = {
            "embed": (words, width),
            "inputs": (width, 4 * width),
            "states": (width, 4 * width),
            "bias": (4 * width,),
            "out": (width, words),
            "shift": (words,),
        }

    def forward(self, p: dict[str, Array], tokens: Array) -> dict[str, Array]:
        """The gates i, f, o and candidate g of every step, cells and states."""
        n = self.width
        x = np.stack([embed[t] for embed, t in zip(p["embed"], tokens, strict=True)])
        count, batch, steps, _ = x.shape
        given = x.reshape(count, batch * steps, n) @ p["inputs"] + p["bias"][:, None]
        given = given.reshape(count, batch, steps, 4 * n)
        gates = np.empty_like(given)
        cells = np.zeros((count, batch, steps + 1, n), given.dtype)
        states = np.zeros_like(cells)
        for t in range(steps):
            z = given[:, :, t] + states[:, :, t] @ p["states"]
            gates[:, :, t, : 3 * n] = sigmoid(z[..., : 3 * n])
            gates[:, :, t, 3 * n :] = np.tanh(z[..., 3 * n :])
            i, f, o, g = np.split(gates[:, :, t], 4, axis=-1)
            cells[:, :, t + 1] = f * cells[:, :, t] + i * g
            states[:, :, t + 1] = o * np.tanh(cells[:, :, t + 1])
        return {"x": x, "gates": gates, "cells": cells, "states": states}

    def output(self, p: dict[str, Array], kept: dict[str, Array]) -> tuple[Array, Array]:
        states = kept["states"][:, :, 1:].reshape(len(p["out"]), -1, self.width)
        return states, states @ p["out"] + p["shift"][:, None]

    def losses(self, rows: Array, tokens: Array) -> Array:
        p = self.split(rows)
        logits = self.output(p, self.forward(p, tokens[..., :-1]))[1]
        return softmax_loss(logits, tokens[..., 1:].reshape(len(rows), -1))[0]

    def back(self, p: dict[str, Array], kept: dict[str, Array], by_state: Array) -> Array:
        """The gradient by the gates' sums, from that by the states."""
        gates, cells = kept["gates"], kept["cells"]
        by_sum = np.empty_like(gates)
        by_cell = np.zeros_like(cells[:, :, 0])
        later = np.zeros_like(by_cell)
        for t in reversed(range(gates.shape[2])):
            i, f, o, g = np.split(gates[:, :, t], 4, axis=-1)
            bent = np.tanh(cells[:, :, t + 1])
            here = by_state[:, :, t] + later
            by_cell = by_cell + here * o * (1 - bent**2)
            parts = [by_cell * g * i * (1 - i), by_cell * cells[:, :, t] * f * (1 - f)]
            parts += [here * bent * o * (1 - o), by_cell * i * (1 - g**2)]
            by_sum[:, :, t] = np.concatenate(parts, axis=-1)
            by_cell = by_cell * f
            later = by_sum[:, :, t] @ transposed(p["states"])
        return by_sum

    def gradients(self, rows: Array, tokens: Array) -> tuple[Array, Array]:
        """Loss and gradient of each replica on its batch."""
        p, seen, count = self.split(rows), tokens[..., :-1], len(rows)
        kept = self.forward(p, seen)
        states, logits = self.output(p, kept)
        losses, by_logit = softmax_loss(logits, tokens[..., 1:].reshape(count, -1))
        by_state = (by_logit @ transposed(p["out"])).reshape(kept["x"].shape)
        by_sum = self.back(p, kept, by_state)
        flat = by_sum.reshape(count, -1, 4 * self.width)
        before = kept["states"][:, :, :-1].reshape(count, -1, self.width)
        x = kept["x"].reshape(count, -1, self.width)
        grads = {
            "embed": self.embed_grad(seen, flat @ transposed(p["inputs"])),
            "inputs": transposed(x) @ flat,
            "states": transposed(before) @ flat,
            "bias": flat.sum(1),
            "out": transposed(states) @ by_logit,
            "shift": by_logit.sum(1),
        }
        return losses, self.join(grads)


class Experts(Model):
    """The experts' weights, [experts] copies of two matrices: one row, without replicas."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        self.shapes = {"up": (experts, width, inner), "down": (experts, inner, width)}


class Moe(Model):
    """A window of words, a dense layer, a layer of experts (top-2), output.

    The row is what is outside of the experts. Experts are one set for all replicas, as expert
    parallelism has them: their gradient is the mean over the batches of all replicas.
    """

    WINDOW, TOPK, BALANCE = 8, 2, 0.01

    def __init__(self, words: int, width: int, experts: int = 8) -> None:
        self.width, self.experts, self.part = width, experts, width // 4
        self.shapes = {
            "embed": (words, self.part),
            "first": (self.WINDOW * self.part, width),
            "bias": (width,),
            "router": (width, experts),
            "out": (width, words),
            "shift": (words,),
        }
        self.shared = Experts(experts, width, width)

    def windows(self, tokens: Array) -> tuple[Array, Array]:
        """[replicas, positions, WINDOW] words, and the word after each."""
        seen = np.lib.stride_tricks.sliding_window_view(tokens, self.WINDOW + 1, axis=-1)
        seen = seen.reshape(len(tokens), -1, self.WINDOW + 1)
        return seen[..., :-1], seen[..., -1]

    def forward(self, p: dict[str, Array], seen: Array) -> dict[str, Array]:
        count = len(seen)
        x = np.stack([e[s] for e, s in zip(p["embed"], seen, strict=True)])
        x = x.reshape(count, -1, self.WINDOW * self.part)
        hidden = np.tanh(x @ p["first"] + p["bias"][:, None])
        scores = hidden @ p["router"]
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        chosen = np.argpartition(-share, self.TOPK - 1, axis=-1)[..., : self.TOPK]
        return {"x": x, "hidden": hidden, "share": share, "chosen": chosen}

    def apply(self, shared: dict[str, Array], kept: dict[str, Array]) -> Array:
        """hidden + sum of share * expert; keeps each expert's rows and activations."""
        hidden = kept["hidden"].reshape(-1, self.width)
        share = kept["share"].reshape(-1, self.experts)
        chosen = kept["chosen"].reshape(-1, self.TOPK)
        total, kept["rows"] = hidden.copy(), []
        for e in range(self.experts):
            rows = np.flatnonzero((chosen == e).any(1))
            inner = np.maximum(hidden[rows] @ shared["up"][0, e], 0)
            found = inner @ shared["down"][0, e]
            total[rows] += share[rows, e, None] * found
            kept["rows"].append((rows, inner, found))
        return total.reshape(kept["hidden"].shape)

    def losses(self, rows: Array, experts: Array, tokens: Array) -> Array:
        p, (seen, wanted) = self.split(rows), self.windows(tokens)
        mixed = self.apply(self.shared.split(experts), self.forward(p, seen))
        return softmax_loss(mixed @ p["out"] + p["shift"][:, None], wanted)[0]

    def experts_back(self, shared: dict, kept: dict, by_mixed: Array) -> tuple[Array, Array, dict]:
        """Gradients by hidden, by share, and of the experts, from that by the layer's output."""
        flat = by_mixed.reshape(-1, self.width)
        hidden = kept["hidden"].reshape(-1, self.width)
        by_hidden, by_share = flat.copy(), np.zeros((len(flat), self.experts), flat.dtype)
        grads = {name: np.zeros_like(value) for name, value in shared.items()}
        share = kept["share"].reshape(-1, self.experts)
        for e, (rows, inner, found) in enumerate(kept["rows"]):
            by_share[rows, e] = (flat[rows] * found).sum(1)
            by_found = flat[rows] * share[rows, e, None]
            by_inner = (by_found @ shared["down"][0, e].T) * (inner > 0)
            grads["down"][0, e] = inner.T @ by_found
            grads["up"][0, e] = hidden[rows].T @ by_inner
            by_hidden[rows] += by_inner @ shared["up"][0, e].T
        return by_hidden.reshape(by_mixed.shape), by_share.reshape(kept["share"].shape), grads

    def balance(self, kept: dict[str, Array]) -> Array:
        """Gradient by share of BALANCE * experts * sum of (part of the entries) * (mean share)."""
        counts = (kept["chosen"][..., None] == np.arange(self.experts)).mean((1, 2))
        tokens = kept["share"].shape[1]
        return (self.BALANCE * self.experts / tokens * counts)[:, None].astype(np.float32)

    def gradients(self, rows: Array, experts: Array, tokens: Array) -> tuple[Array, Array, Array]:
        """Loss and gradient of each replica on its batch, and the experts' mean over all."""
        p, shared = self.split(rows), self.shared.split(experts)
        seen, wanted = self.windows(tokens)
        kept = self.forward(p, seen)
        mixed = self.apply(shared, kept)
        losses, by_logit = softmax_loss(mixed @ p["out"] + p["shift"][:, None], wanted)
        by_hidden, by_share, of_experts = self.experts_back(
            shared, kept, by_logit @ transposed(p["out"])
        )
        by_share = by_share + self.balance(kept)
        share = kept["share"]
        by_score = share * (by_share - (share * by_share).sum(-1, keepdims=True))
        by_hidden = by_hidden + by_score @ transposed(p["router"])
        by_sum = by_hidden * (1 - kept["hidden"] ** 2)
        by_x = (by_sum @ transposed(p["first"])).reshape(*seen.shape, self.part)
        grads = {
            "embed": self.embed_grad(seen, by_x),
            "first": transposed(kept["x"]) @ by_sum,
            "bias": by_sum.sum(1),
            "router": transposed(kept["hidden"]) @ by_score,
            "out": transposed(mixed) @ by_logit,
            "shift": by_logit.sum(1),
        }
        return losses, self.join(grads), self.shared.join(of_experts) / len(rows)
