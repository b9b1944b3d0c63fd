"""A small network trained by eight workers: loss and bytes of dense, A2SGD, Top-K and QSGD.

    PYTHONPATH=python python3 tests/examples/train_a2sgd.py

Plain SGD on data that a random network made; each worker sees its own part, and
"none" exchanges nothing. Needs NumPy and libtrefoil.so.0 (TREFOIL_LIB). The same numbers in every
run.
"""

from __future__ import annotations

import numpy as np

from trefoil.a2sgd import Averaging

WORKERS, STEPS, RATE, BATCH = 8, 300, 0.1, 32
INPUTS, HIDDEN = 16, 32
SIZES = [INPUTS * HIDDEN, HIDDEN, HIDDEN, 1]
CASES = {
    "none": ("none", {}),
    "dense": ("dense", {}),
    "a2sgd": ("a2sgd", {}),
    "a2sgd, sync 50": ("a2sgd", {"sync_period": 50}),
    "topk 1 %": ("topk", {"share": 0.01}),
    "qsgd 4 bit": ("qsgd", {"bits": 4}),
}


def split(row: np.ndarray) -> list[np.ndarray]:
    """A worker's row as the network's tensors."""
    tensors = np.split(row, np.cumsum(SIZES)[:-1])
    return [tensors[0].reshape(INPUTS, HIDDEN), *tensors[1:]]


def output(row: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights, bias, last, shift = split(row)
    hidden = np.tanh(x @ weights + bias)
    return hidden, hidden @ last + shift


def loss(row: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((output(row, x)[1] - y) ** 2))


def gradient(row: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    hidden, found = output(row, x)
    error = 2 * (found - y) / len(y)
    back = np.outer(error, split(row)[2]) * (1 - hidden**2)
    parts = [x.T @ back, back.sum(0), error @ hidden, error.sum(keepdims=True)]
    return np.concatenate([p.ravel() for p in parts]).astype(np.float32)


def random_row(rng: np.random.Generator) -> np.ndarray:
    scales = np.repeat([INPUTS**-0.5, 0.1, HIDDEN**-0.5, 0.1], SIZES)
    return (rng.standard_normal(sum(SIZES)) * scales).astype(np.float32)


def train(method: str, options: dict) -> tuple[list[float], float, int]:
    """Mean loss of the replicas before and after, their distance, the bytes sent by a worker."""
    rng = np.random.default_rng(0)
    teacher, start = random_row(rng), random_row(rng)
    data = rng.standard_normal((WORKERS, 256, INPUTS)).astype(np.float32)
    answers = np.array([output(teacher, x)[1] for x in data])
    everything, every_answer = data.reshape(-1, INPUTS), answers.ravel()
    averaging = Averaging("dense" if method == "none" else method, SIZES, WORKERS, **options)
    params, sent = np.tile(start, (WORKERS, 1)), 0
    losses = [loss(start, everything, every_answer)]
    for number in range(1, STEPS + 1):
        pick = rng.integers(0, 256, (WORKERS, BATCH))
        batches = [(data[w][pick[w]], answers[w][pick[w]]) for w in range(WORKERS)]
        grads = np.array([gradient(p, *b) for p, b in zip(params, batches, strict=True)])
        params -= np.float32(RATE) * (grads if method == "none" else averaging.step(grads))
        if method == "none":
            continue
        averaging.sync(params)
        due = averaging.sync_bytes and number % options["sync_period"] == 0
        sent += averaging.sent_bytes + (averaging.sync_bytes if due else 0)
    losses.append(float(np.mean([loss(p, everything, every_answer) for p in params])))
    return losses, float(np.abs(params - params.mean(0)).max()), sent


def main() -> None:
    print(f"{'method':16}{'first loss':>12}{'last loss':>12}{'drift':>10}{'bytes sent':>12}")
    for name, (method, options) in CASES.items():
        (first, last), drift, sent = train(method, options)
        print(f"{name:16}{first:12.4f}{last:12.4f}{drift:10.4f}{sent:12d}")


if __name__ == "__main__":
    main()
