"""Bad input to trefoil trace and plan: one sentence that names what is wrong, and no file.

python3 check_trace_refusals.py TREFOIL
"""

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SKIPPED = 77
failures = 0
NOTE = {
    "format": "trefoil-trace", "version": 1, "num_ranks": 8, "ranks_per_node": 8, "num_experts": 8,
    "topk": 2, "max_tokens": 64, "steps": 1, "provenance": {},
}  # fmt: skip

# Arguments of trace generate and import, and what the sentence says.
WRONG = (
    ("generate --experts 4 --topk 8", "top-8 of 4 experts"),
    ("generate --seed -1", "--seed -1"),
    ("generate --seed x", "x: invalid numeric value"),
    ("generate --seed 99999999999999999999", "number too large"),
    ("generate --tokens 0", "0 tokens"),
    ("generate --ranks -2", "--ranks -2"),
    ("generate --steps 2000000000", "steps 2000000000"),
    ("generate --tokens 4294967296 --steps 16777216", "but this machine has"),
    ("generate --popularity cold", "expected uniform, zipf, hot-expert or hot-rank"),
    ("generate --skew 2", "--skew is of"),
    ("generate --hot 3", "--hot is of"),
    ("generate --burst-low 0.5", "--burst-low is of"),
    ("generate --unused nan", "--unused nan"),
    ("generate --ragged 2", "ragged 2"),
    ("generate --moe nope", "known are deepseek-v3"),
    ("import --ranks 7 --experts 8 ids.npy", "512 rows cannot be cut alike over 7 ranks; 1, 2, 4"),
    ("import --ranks 8 --experts 8 nan.npz", "topk_weights: item 3 is NaN"),
    ("import --ranks 8 --experts 8 infinite.npz", "topk_weights: item 3 is NaN, infinite"),
    ("import --ranks 8 --experts 8 large.npz", "too large for float32"),
    ("import --ranks 8 --experts 8 whole.npz", "topk_weights: float32 or float64"),
    ("import --ranks 8 --experts 8 --array no more.npz", "its arrays are topk_idx, more"),
    ("import --ranks 8 --experts 8 none.npy", "neither .npz nor .npy"),
    ("import --ranks 8 --experts 8 rows.npy", "topk_idx has no rows"),
    ("import --ranks 8 --experts 8 .", "is not a regular file"),
    ("import --ranks 8 --experts 8 pipe", "is not a regular file"),
    ("import --ranks 8 --experts 8 twice.npz", "has member topk_idx.npy twice"),
    ("import --ranks 8 --experts 8 --tokens-per-rank 7 ids.npy", "8 ranks with 7 tokens"),
    ("import key.npz", "the key rank is not known; known are format, version, num_ranks"),
    ("import steps.npz", "its metadata states 3 steps, its arrays have 1"),
    ("import duplicate.npz", "duplicate object key"),
    ("import version.npz", "not of version 1"),
    ("import list.npz", "is not an object"),
    ("import ranks.npz", "ranks: must be in"),
    ("import json.npz", "must be at most 1 MiB"),
    ("import shape.npz", "differ in shape"),
)  # fmt: skip
MEMORY = 160 << 20  # of address space, for all of them


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def check(ok: bool, what: str) -> None:
    global failures
    if not ok:
        failures += 1
        print(f"failed: {what}")


def array(np, value) -> bytes:  # type: ignore[no-untyped-def]
    text = io.BytesIO()
    np.save(text, value)
    return text.getvalue()


def write(path: Path, **members: bytes | str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name.replace("_dot_", "."), data)


def make_files(np, folder: Path) -> None:  # type: ignore[no-untyped-def]
    rows = np.arange(512)
    ids = np.stack([rows % 8, (rows + 1) % 8], 1).astype("i4")
    weights = np.full((512, 2), 0.5)
    bad = {"nan": np.nan, "infinite": np.inf, "large": 1e300}
    np.save(folder / "ids.npy", ids)
    np.save(folder / "rows.npy", ids[:0])
    (folder / "none.npy").touch()
    os.mkfifo(folder / "pipe")
    for name, value in bad.items():
        changed = weights.copy()
        changed[1, 1] = value
        np.savez(folder / f"{name}.npz", topk_idx=ids, topk_weights=changed)
    np.savez(folder / "whole.npz", topk_idx=ids, topk_weights=ids)
    np.savez(folder / "more.npz", topk_idx=ids, more=rows)
    idx = array(np, ids)
    metadata = {
        "key": json.dumps({**NOTE, "rank": 8}),
        "steps": json.dumps({**NOTE, "steps": 3}),
        "duplicate": '{"format": "trefoil-trace", "format": "trefoil-trace", "version": 1}',
        "version": json.dumps({**NOTE, "version": 2}),
        "list": "[]",
        "ranks": json.dumps({**NOTE, "num_ranks": 2**62}),
        "json": json.dumps(NOTE) + " " * (1 << 27),  # 128 kB of file, 128 MiB of text
        "good": json.dumps(NOTE),
    }
    for name, text in metadata.items():
        write(folder / f"{name}.npz", topk_idx_dot_npy=idx, trefoil_dot_json=text)
    with zipfile.ZipFile(folder / "twice.npz", "w") as file:
        file.writestr("topk_idx.npy", idx)
        file.writestr("topk_idx.npz", idx)
    raw = (folder / "twice.npz").read_bytes()  # the writer warns of duplicates: rename afterwards
    (folder / "twice.npz").write_bytes(raw.replace(b"topk_idx.npz", b"topk_idx.npy"))
    # 128 MiB of ids in 128 kB: another shape than the weights, seen before the data is read
    with zipfile.ZipFile(folder / "shape.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("topk_weights.npy", array(np, weights))
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "|i1", "fortran_order": False, "shape": (1 << 27, 1)}
        )
        with file.open("topk_idx.npy", "w", force_zip64=True) as member:
            member.write(head.getvalue())
            for _ in range(1 << 7):
                member.write(bytes(1 << 20))


def main() -> int:
    try:
        import numpy as np
    except ImportError:
        print("skipped: numpy is not installed (pip install numpy)")
        return SKIPPED
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(np, folder)
        before = sorted(folder.iterdir())

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [program, *words], cwd=folder, capture_output=True, text=True, check=False,
                timeout=60, preexec_fn=limit,
            )  # fmt: skip

        for text, sentence in WRONG:
            done = run("trace", *text.split(), "out.npz")
            check(done.returncode in (1, 2), f"{text}: exit code {done.returncode}")
            said = done.stderr
            check(sentence in said and said.count("\n") == 1, f"{text}: {said}")
            check(sorted(folder.iterdir()) == before, f"{text}: left a file behind")
        for text in ("generate ", "generate a b"):
            done = run("trace", *text.split(" "))
            check(done.returncode == 2 and "name one file" in done.stderr, f"{text}: {done.stderr}")
        for verb in (("plan", "--closed-form"), ("simulate",)):
            done = run(*verb, "--gpus", "8", "--seed", "-1")
            check(done.returncode == 2 and "--seed -1" in done.stderr, f"{verb}: {done.stderr}")
        done = run("trace", "describe", "--row-bytes", "1000000000000000000", "good.npz")
        check(done.returncode == 2 and "[1, 2^30]" in done.stderr, f"row bytes: {done.stderr}")
        cluster = {"name": "x", "about": "x", "gpu_memory": {"value": 80, "source": "x"}}
        (folder / "c.json").write_text(json.dumps(cluster))
        done = run("plan", "--closed-form", "--cluster", "c.json")
        said = "c.json: the key gpu_memory is not known; known are name, about, gpus_per_node"
        check(done.returncode == 2 and said in done.stderr, f"a key: {done.stderr}")
        done = run("trace", "import", "good.npz", "out.npz")
        check(done.returncode == 0, f"good.npz: {done.stderr}")
    print("all agree" if not failures else f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
