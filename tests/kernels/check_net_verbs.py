"""Registers and stack of the GIN verbs, all backends, as ptxas reports them.

    python3 check_net_verbs.py COMPILE_COMMANDS

Compiles net_verbs.cu again. A kernel that posts has a descriptor on its stack; one that only reads
a signal has none. More than LIMITS means that a newer NCCL, or a change of ours, costs the warps of
kernels registers. Exit code 77 without nvcc or NCCL's headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ptxas import kernels_of, sources

# Part of the mangled name: (registers, bytes of stack).
LIMITS = {
    "netWorkKernel": (128, 160),
    "putKernel": (72, 160),
    "strongKernel": (72, 160),
    "readKernel": (32, 0),
}


def main() -> int:
    found = [s for s in sources(Path(sys.argv[1])) if s.path.name == "net_verbs.cu"]
    if not found:
        print("skipped: net_verbs.cu is not compiled in this build")
        return 77
    kernels = kernels_of(found[0])
    bad = 0
    for part, (registers, stack) in LIMITS.items():
        got = next((kernel for name, kernel in kernels.items() if part in name), None)
        if got is None:
            print(f"ptxas named no {part}")
            bad += 1
        elif got.registers > registers or got.stack > stack or got.spilled:
            print(
                f"{part}: {got.registers} registers, {got.stack} bytes of stack, {got.spilled}"
                f" spilled; {registers}, {stack} and 0 are accepted"
            )
            bad += 1
        else:
            print(f"{part}: {got.registers} registers, {got.stack} bytes of stack")
    print(f"{len(LIMITS)} tests, {bad} failed, 0 skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
