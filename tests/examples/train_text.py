"""Language models on a text, trained by eight workers with each method of gradient averaging.

    apt-get install fortunes fortunes-min
    PYTHONPATH=python python3 tests/examples/train_text.py lstm -o lstm.json
    PYTHONPATH=python python3 tests/examples/train_text.py moe --seeds 1 --steps 50

Words of a text (default: Debian's packages fortunes and fortunes-min) are predicted by an LSTM, or
by a mixture of experts whose experts are shared by all workers. Plain SGD with clipped gradients.
After every few steps: perplexity on held-out words, of the replicas and of their mean, and how far
replicas have drifted apart. "none" exchanges nothing, "local" averages parameters alone. Needs
NumPy and libtrefoil.so.0 (TREFOIL_LIB). The same numbers in every run on one machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from text_models import Lstm, Model, Moe

from trefoil.a2sgd import Averaging
from trefoil.outputs import write_whole

WORKERS, VOCABULARY, WIDTH, BLOCK = 8, 2000, 96, 500
HELD_OUT = 0.05
FORTUNES = "/usr/share/games/fortunes"
# Method, options. Rate, sequences of a worker, words of a sequence: the same for all methods.
CASES = {
    "none": ("none", {}),
    "local, sync 50": ("none", {"sync_period": 50}),
    "dense": ("dense", {}),
    "a2sgd": ("a2sgd", {}),
    "a2sgd, sync 50": ("a2sgd", {"sync_period": 50}),
    "topk 1 %": ("topk", {"share": 0.01}),
    "qsgd 4 bit": ("qsgd", {"bits": 4}),
}
MODELS = {"lstm": (Lstm, 16.0, 8, 20), "moe": (Moe, 4.0, 8, 27)}
CLIP = 1.0


# ---- The text ------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    """A file's text, or all texts of a folder in the order of their names."""
    texts = [path]
    if not path.is_file():
        files = sorted(path.iterdir()) if path.is_dir() else []
        texts = [f for f in files if f.is_file() and not f.is_symlink() and f.suffix == ""]
    if not texts:
        raise OSError(f"{path}: no text there; apt-get install fortunes fortunes-min")
    return "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in texts)


def numbered(text: str) -> np.ndarray:
    """Words as numbers by frequency; 0 stands for those that are too rare."""
    words = re.findall(r"[a-z']+|[.,;:!?]", text.lower())
    common = [w for w, _ in Counter(words).most_common(VOCABULARY - 1)]
    index = {w: i + 1 for i, w in enumerate(common)}
    return np.array([index.get(w, 0) for w in words])


def parts_of(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each worker's words [workers, words], and the words held out: blocks in a seeded order."""
    blocks = words[: len(words) // BLOCK * BLOCK].reshape(-1, BLOCK)
    blocks = blocks[np.random.default_rng(0).permutation(len(blocks))]
    held = max(1, round(HELD_OUT * len(blocks)))
    each = (len(blocks) - held) // WORKERS
    if each < 1:
        raise OSError(f"the text has {len(words)} words: at least {BLOCK * (WORKERS + 1)}")
    return blocks[: each * WORKERS].reshape(WORKERS, -1), blocks[-held:].ravel()


# ---- Training ------------------------------------------------------------------------------------


def clipped(grads: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(grads, axis=1, keepdims=True)
    return grads * np.minimum(1, CLIP / np.maximum(norms, 1e-12))


class Run:
    """A model's replicas under one method."""

    def __init__(self, model: Model, method: str, options: dict, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.model, self.exchanges = model, method != "none"
        self.rows = np.tile(model.start(rng), (WORKERS, 1))
        experts = getattr(model, "shared", None)
        self.shared = () if experts is None else (experts.start(rng)[None],)
        kind = method if self.exchanges else "a2sgd"  # whose sync averages parameters alone
        self.averaging = Averaging(kind, model.sizes, WORKERS, seed=seed, **options)
        self.period = options.get("sync_period", 0)
        self.moved = 0.0  # the last updates from the workers' own gradients, relative to these

    def step(self, tokens: np.ndarray, rate: float) -> float:
        losses, grads, *of_experts = self.model.gradients(self.rows, *self.shared, tokens)
        grads = clipped(grads)
        updates = self.averaging.step(grads) if self.exchanges else grads
        self.averaging.steps += not self.exchanges
        self.moved = float(np.linalg.norm(updates - grads) / np.linalg.norm(grads))
        self.rows -= np.float32(rate) * updates
        self.averaging.sync(self.rows)
        for row, grad in zip(self.shared, of_experts, strict=True):
            row -= np.float32(rate) * clipped(grad)
        return float(losses.mean())

    def sent(self, steps: int) -> int:
        """Bytes of a worker."""
        syncs = steps // self.period if self.period else 0
        each = self.averaging.sent_bytes if self.exchanges else 0
        return steps * each + syncs * self.averaging.sync_bytes

    def perplexity(self, rows: np.ndarray, held: np.ndarray) -> float:
        """Mean over replicas of the perplexity on the words held out."""
        sums = np.zeros(len(rows))
        chunks = np.array_split(held, max(1, len(held) // 16))
        for chunk in chunks:
            sums += self.model.losses(rows, *self.shared, np.tile(chunk, (len(rows), 1, 1)))
        return float(np.exp(sums / len(chunks)).mean())

    def measured(self, held: np.ndarray) -> dict[str, float]:
        mean = self.rows.mean(0, keepdims=True)
        apart = np.sqrt(((self.rows - mean) ** 2).mean())
        return {
            "replicas": self.perplexity(self.rows, held),
            "mean": self.perplexity(mean, held),
            "drift": float(apart / np.sqrt((mean**2).mean())),
            "moved": self.moved,
        }


def windows(words: np.ndarray, count: int, length: int) -> np.ndarray:
    """[count, length + 1] chunks that follow each other."""
    return words[: count * (length + 1)].reshape(count, length + 1)


def batches(words: np.ndarray, seed: int, batch: int, length: int) -> Iterator[np.ndarray]:
    """Random chunks of each worker's own words, the same for all methods."""
    rng = np.random.default_rng([seed, 1])
    while True:
        starts = rng.integers(0, words.shape[1] - length - 1, (WORKERS, batch))
        yield np.stack(
            [w[s[:, None] + np.arange(length + 1)] for w, s in zip(words, starts, strict=True)]
        )


def train(kind: str, case: str, seed: int, words: np.ndarray, options: argparse.Namespace) -> dict:
    """One run: what was measured after so many steps."""
    make, rate, batch, length = MODELS[kind]
    model = make(VOCABULARY, options.width)
    run = Run(model, *CASES[case], seed)
    own, rest = parts_of(words)
    count = min(options.held, len(rest) // (length + 1))
    held = windows(rest, count, length)
    points, begin = [], time.perf_counter()
    for step, tokens in enumerate(batches(own, seed, batch, length)):
        if step % options.every == 0 or step == options.steps:
            points.append({"step": step, "sent_bytes": run.sent(step), **run.measured(held)})
            options.show(f"{case}, seed {seed}, step {step}: {points[-1]['mean']:.1f}")
        if step == options.steps:
            break
        # The second half with a rate that falls to a tenth.
        late = max(0.0, 2 * step / options.steps - 1)
        run.step(tokens, (options.rate or rate) * 0.1**late)
    return {"seed": seed, "seconds": round(time.perf_counter() - begin, 1), "points": points}


# ---- The command ---------------------------------------------------------------------------------


def about(options: argparse.Namespace, kind: str, words: np.ndarray) -> dict:
    def said(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return "unknown"
        return done.stdout.strip() or "unknown"

    make, rate, batch, length = MODELS[kind]
    model = make(VOCABULARY, options.width)
    packages = said("dpkg-query", "-W", "fortunes", "fortunes-min").replace("\t", " ").splitlines()
    return {
        "commit": said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "command": "tests/examples/train_text.py " + " ".join(sys.argv[1:]),
        "text": options.source,
        "packages": options.packages or packages,
        "words": len(words),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "workers": WORKERS,
        "vocabulary": VOCABULARY,
        "width": options.width,
        "elements": sum(model.sizes),
        "tensors": len(model.sizes),
        "expert_elements": sum(model.shared.sizes) if hasattr(model, "shared") else 0,
        "batch": batch,
        "length": length,
        "rate": options.rate or rate,
        "clip": CLIP,
        "steps": options.steps,
    }


def table(cases: dict[str, dict]) -> Iterator[str]:
    yield f"{'method':16}{'replicas':>16}{'their mean':>16}{'drift':>9}{'bytes sent':>14}"
    for name, case in cases.items():
        last = [run["points"][-1] for run in case["runs"]]

        def spread(key: str, last: list[dict] = last) -> str:
            values = [p[key] for p in last]
            return f"{np.mean(values):.1f} +- {np.std(values, ddof=len(values) > 1):.1f}"

        drift = np.mean([p["drift"] for p in last])
        sent = last[0]["sent_bytes"]
        yield f"{name:16}{spread('replicas'):>16}{spread('mean'):>16}{drift:9.4f}{sent:14d}"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("model", choices=MODELS)
    p.add_argument("--text", type=Path, default=Path(FORTUNES), help="file or folder")
    p.add_argument("--source", default="Debian: fortunes, fortunes-min", help="what the text is")
    p.add_argument("--packages", nargs="*", help="with versions (default: what dpkg says)")
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--every", type=int, default=40, help="steps between measurements")
    p.add_argument("--held", type=int, default=96, help="chunks of the text held out")
    p.add_argument("--width", type=int, default=WIDTH)
    p.add_argument("--rate", type=float, help="of SGD (default: the model's)")
    p.add_argument("-o", "--output", type=Path, help="JSON; rewritten after every run")
    return p.parse_args(argv)


def shower() -> Callable[[str], None]:
    def show(text: str) -> None:
        ends = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
        print(ends[0] + text, end=ends[1], file=sys.stderr, flush=True)

    return show


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    options.show = shower()
    try:
        words = numbered(text_of(options.text))
        parts_of(words)
    except OSError as error:
        print(f"train_text.py: {error}", file=sys.stderr)
        return 2
    result = {"about": about(options, options.model, words), "cases": {}}
    for seed in options.seeds:
        for name in options.cases:
            case = result["cases"].setdefault(name, {"options": CASES[name][1], "runs": []})
            case["runs"].append(train(options.model, name, seed, words, options))
            if options.output:
                write_whole(options.output, json.dumps(result, indent=1) + "\n")
    print(*table(result["cases"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
