"""Registers, stack and spills of the kernels: compiles them again and reads what ptxas says.

    python3 check_spills.py COMPILE_COMMANDS [near | far]

A spill in a kernel's loop costs more than most of what is tuned by hand, and comes and goes with
small changes. A kernel that is not in SPILLS must not spill at all; one that is must not spill
more. Those that post over NCCL's GIN (far) have the code of all its backends in them, proxy, GDAKI
and the others, with descriptors on the stack: FAR is what they may have.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ptxas import Kernel, kernels_of, sources

# Part of the mangled name: bytes of spill stores that are accepted, and why.
SPILLS = {
    "DispatchTraitsILb1E": 100,  # the generic path: eight blocks of entries a lane
    "combineKernelIL4Elem": 128,  # warps of 20 and more need more registers than there are
    "partialKernelIL4Elem": 96,
    "farDispatchKernelI7GinWire": 376,  # the relay has ten steps of a row in flight
    "farCombineKernelI7GinWire": 324,
    "dispatchKernelILb1EL5HtWay1E": 20,  # 20 warps: pushes, pipelines of both ends and weights
    "farHtDispatchKernelI7GinWire": 232,  # 18 warps, with the four duties of the poster
    "farHtCombineKernelI7GinWire": 316,
}
# Of kernels over GIN: registers, which their threads leave room for; bytes of stack.
FAR = {
    "farDispatchKernelI7GinWire": (96, 360),
    "farCombineKernelI7GinWire": (96, 280),
    "farHtDispatchKernelI7GinWire": (96, 568),
    "farHtCombineKernelI7GinWire": (96, 576),
    "updateKernelI10FarDomainsI7GinWire": (160, 320),
}
FAR_SOURCES = ("ll_far.cu", "ht_far.cu")


def faults(name: str, kernel: Kernel, is_far: bool) -> list[str]:
    """What is wrong with one."""
    found = []
    spilled = max((n for part, n in SPILLS.items() if part in name), default=0)
    registers, stack = next((n for part, n in FAR.items() if part in name), (0, 0))
    if kernel.spilled > spilled:
        found.append(f"spills {kernel.spilled} bytes, {spilled} are accepted")
    if is_far and kernel.registers > registers:
        found.append(f"takes {kernel.registers} registers, {registers} are accepted")
    if is_far and kernel.stack > stack:
        found.append(f"has {kernel.stack} bytes of stack, {stack} are accepted")
    return found


def main() -> int:
    which = sys.argv[2] if len(sys.argv) > 2 else ""
    chosen = [
        source
        for source in sources(Path(sys.argv[1]))
        if "kernels" in source.path.parts
        and "tests" not in source.path.parts
        and which in ("", "far" if source.path.name in FAR_SOURCES else "near")
    ]
    if not chosen:
        print("no kernel is compiled in this build: it has other folders than this test knows")
        return 1
    bad = total = 0
    for source in chosen:
        is_far = source.path.name in FAR_SOURCES
        for name, kernel in sorted(kernels_of(source).items()):
            total += 1
            if is_far:
                print(f"{name}: {kernel}")
            for fault in faults(name, kernel, is_far):
                print(f"{source.path.name}: {name} {fault}")
                bad += 1
    if total == 0:
        print("ptxas named no kernel: its output has changed")
        return 1
    print(f"{total} tests, {bad} failed, 0 skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
