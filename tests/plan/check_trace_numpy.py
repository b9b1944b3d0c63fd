"""Traces and NumPy: each reads what the other writes.

Malformed files are refused with a sentence and exit code 1.

python3 check_trace_numpy.py TREFOIL
"""

import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SKIPPED = 77
failures = 0


def check(ok: bool, what: str) -> None:
    global failures
    if not ok:
        failures += 1
        print(f"failed: {what}")


def main() -> int:
    try:
        import numpy as np
    except ImportError:
        print("skipped: numpy is not installed (pip install numpy)")
        return SKIPPED
    program = sys.argv[1]

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *map(str, args)], capture_output=True, text=True, timeout=60, check=False
        )

    def describe(path: Path) -> dict[str, object]:
        done = run("trace", "describe", "--json", path)
        check(done.returncode == 0, f"describe {path.name}: {done.stderr}")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = folder / "ours.npz"
        done = run(
            "trace", "generate", "--ranks", 4, "--ranks-per-node", 2, "--experts", 10, "--topk", 3,
            "--tokens", 20, "--steps", 5, "--ragged", 0.5, "--weights", "--seed", 9, ours,
        )  # fmt: skip
        check(done.returncode == 0, f"generate: {done.stderr}")
        with np.load(ours) as z:
            idx, offsets, weights = z["topk_idx"], z["offsets"], z["topk_weights"]
            metadata = json.loads(z["trefoil.json"])
        check(idx.dtype == np.int16 and offsets.dtype == np.int64, "dtypes of our arrays")
        check(weights.dtype == np.float32 and weights.shape == idx.shape, "weights")
        check(offsets.shape == (5, 5) and offsets[-1, -1] == len(idx), "offsets")
        check(np.allclose(weights.sum(axis=1), 1, atol=1e-6), "weights of a row sum to 1")
        check(metadata["num_experts"] == 10 and metadata["provenance"]["seed"] == 9, "the metadata")
        found = describe(ours)
        load = np.bincount(idx[idx >= 0], minlength=10)
        gini = np.abs(load[:, None] - load[None, :]).sum() / (2 * 10 * load.sum())
        check(abs(found["gini_experts"] - gini) < 1e-8, f"Gini {found['gini_experts']} != {gini}")
        check(abs(found["max_over_mean_experts"] - load.max() / load.mean()) < 1e-7, "max/mean")
        ranks = [len({e // 3 for e in row if e >= 0}) for row in idx]  # L = ceil(10 / 4) = 3
        check(abs(found["ranks_per_token"] - np.mean(ranks)) < 1e-7, "ranks per token")

        theirs = folder / "theirs.npz"
        for save in (np.savez, np.savez_compressed):
            for dtype in (np.int16, np.int32, np.int64, np.int8):
                save(theirs, topk_idx=idx.astype(dtype), offsets=offsets, topk_weights=weights)
                again = folder / "again.npz"
                done = run(
                    "trace", "import", "--experts", 10, "--ranks-per-node", 2, "--max-tokens", 20,
                    theirs, again,
                )  # fmt: skip
                check(done.returncode == 0, f"import {dtype}: {done.stderr}")
                with np.load(again) as z:
                    check(np.array_equal(z["topk_idx"], idx), f"ids by way of {dtype}")
                    check(np.array_equal(z["offsets"], offsets), "offsets")
                    check(np.array_equal(z["topk_weights"], weights), "weights")

        block = np.arange(2 * 4 * 3 * 2).reshape(2, 4, 3, 2) % 10
        for version in ((1, 0), (2, 0), (3, 0)):
            with (folder / "block.npy").open("wb") as file:
                np.lib.format.write_array(file, block, version=version)
            done = run("trace", "import", "--experts", 10, folder / "block.npy", theirs)
            check(done.returncode == 0, f".npy {version}: {done.stderr}")
            check(describe(theirs)["steps"] == 2, "steps of a 4-D array")

        def refused(what: str, sentence: str, **arrays: object) -> None:
            np.savez(theirs, **arrays)
            done = run("trace", "import", "--experts", 10, theirs, folder / "no.npz")
            check(done.returncode == 1, f"{what}: exit code {done.returncode}")
            check(sentence in done.stderr, f"{what}: {done.stderr}")
            check(not (folder / "no.npz").exists(), f"{what}: a file was written")

        good = {"topk_idx": idx, "offsets": offsets}
        refused("big-endian", "'>i4'", **{**good, "topk_idx": idx.astype(">i4")})
        refused("floats", "floats", **{**good, "topk_idx": idx.astype(np.float32)})
        refused("Fortran order", "Fortran", **{**good, "topk_idx": np.asfortranarray(idx)})
        refused("out of range", "expert 10", **{**good, "topk_idx": np.where(idx == 9, 10, idx)})
        refused("duplicates", "named twice", **{**good, "topk_idx": np.zeros_like(idx)})
        refused("descending", "descend", **{**good, "offsets": _descending(offsets)})
        refused("short", "end at", **{**good, "offsets": offsets[:-1]})
        refused("no ids", "has no array topk_idx", offsets=offsets)
        refused("weights of another shape", "shape", **good, topk_weights=weights[:, :2])
        raw = bytearray(theirs.read_bytes())
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("topk_idx.npy", bytes(200_000_000))
        (folder / "bomb.npz").write_bytes(buffer.getvalue())
        bare = folder / "bare.npz"  # the arrays alone: the number of experts must be said
        np.savez(bare, topk_idx=idx, offsets=offsets)
        done = run("trace", "describe", bare)
        check(done.returncode == 1 and "--experts" in done.stderr, f"bare: {done.stderr}")
        done = run("plan", "--closed-form", "--trace", bare)
        check(done.returncode == 1 and "--physical-experts" in done.stderr, f"bare: {done.stderr}")
        said = ("--experts", 10, "--ranks-per-node", 2, "--row-bytes", 100)
        done = run("trace", "describe", "--json", *said, bare)
        links = np.array(json.loads(done.stdout)["dispatch_bytes_ll"]["links"])
        owner = np.where(idx < 0, -1, idx // 3)  # 10 experts on 4 ranks: 3, 3, 3, 1
        expected = np.zeros((4, 4), dtype=int)
        for step in range(5):
            for rank in range(4):
                for row in owner[offsets[step, rank] : offsets[step, rank + 1]]:
                    for target in {int(t) for t in row if t >= 0}:
                        expected[rank, target] += 100
        check(np.array_equal(links, expected), f"bytes per pair: {links} {expected}")

        done = run("trace", "describe", folder / "bomb.npz")
        check(done.returncode == 1 and "not an .npy" in done.stderr, f"a bomb: {done.stderr}")
        (folder / "cut.npz").write_bytes(raw[: len(raw) // 2])
        done = run("trace", "describe", folder / "cut.npz")
        check(done.returncode == 1 and "cut.npz" in done.stderr, f"a cut file: {done.stderr}")
    print("all agree" if not failures else f"{failures} failed")
    return 1 if failures else 0


def _descending(offsets):  # type: ignore[no-untyped-def]
    changed = offsets.copy()
    changed[2, 2] = changed[2, 1] - 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
