"""When rows crossed the network: the stamps of high throughput across NVLink domains, as a table.

    python -m trefoil.ht_stamps PREFIX [--rank R] [--kind dispatch|combine] [--launch N]

PREFIX.RANK are the files that a build with -DTREFOIL_HT_FAR_STAMPS writes while it runs with
TREFOIL_HT_FAR_STAMPS=PREFIX (kernels/ht/ht_far_stamps.cuh). A row is a put: units so far, and at
what time, in us from the launch's first stamp, they had been filled, were put, had left, had landed
at the other end and were read there. Without the other end's file its columns are empty; ranks'
clocks are taken as equal. By default the last launch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trefoil.table import markdown

KINDS = ("dispatch", "combine")
LAUNCHES, RINGS, DUTIES, STAMPS = 128, 7, 4, 255
FILLED, PUT, LEFT, LANDED, READ, RETURNED, REFILLED = range(7)
STAMP = np.dtype([("ns", "<u8"), ("of", "<u4"), ("count", "<u4")])
DUTY = np.dtype(
    [("number", "<u8"), ("stamps", "<u4"), ("reserved", "<u4"), ("at", STAMP, (STAMPS,))]
)
HEAD = ("units", "filled", "put", "left", "landed", "read")


class StampsError(ValueError):
    """A file that has no stamps, or not those asked for; the text is one sentence."""


@dataclass(frozen=True)
class Stamps:
    """Of one rank: [kind][launch mod LAUNCHES][ring][duty]."""

    duties: npt.NDArray[np.void]

    @classmethod
    def read(cls, path: Path) -> Stamps:
        try:
            duties = np.fromfile(path, dtype=DUTY)
        except OSError as error:
            raise StampsError(f"{path}: cannot be read: {error.strerror}") from None
        if duties.size != len(KINDS) * LAUNCHES * RINGS * DUTIES:
            raise StampsError(f"{path}: is no file of stamps")
        return cls(duties.reshape(len(KINDS), LAUNCHES, RINGS, DUTIES))

    def launches(self, kind: int) -> list[int]:
        """Numbers of the launches whose stamps are here, ascending."""
        return sorted({int(n) - 1 for n in self.duties[kind]["number"].flat if n})

    def of(self, kind: int, launch: int, ring: int) -> npt.NDArray[np.void]:
        """The stamps of a launch and a ring, by time."""
        duties = self.duties[kind, launch % LAUNCHES, ring]
        parts = [d["at"][: int(d["stamps"])] for d in duties if int(d["number"]) == launch + 1]
        if not parts:
            return np.empty(0, dtype=STAMP)
        found = np.concatenate(parts)
        return found[np.argsort(found["ns"], kind="stable")]


def _when(stamps: npt.NDArray[np.void], of: int, count: int) -> int | None:
    """When the first stamp says so many or more."""
    found = stamps[(stamps["of"] == of) & (stamps["count"] >= count)]
    return int(found["ns"][0]) if len(found) else None


def _left(stamps: npt.NDArray[np.void], order: int) -> int | None:
    """When the put with this number in the launch had left: the counter of puts to the peer, from
    its first stamp on. Credits are puts, too, so with many of them this is early."""
    puts = stamps[stamps["of"] == LEFT]
    if not len(puts):
        return None
    found = puts[puts["count"] > int(puts["count"][0]) + order]
    return int(found["ns"][0]) if len(found) else None


def table_of(
    own: Stamps, other: Stamps | None, kind: int, launch: int, ring: int, back: int
) -> list[list[str]]:
    """Rows of HEAD. ring: this rank's; back: the other end's ring to this rank."""
    stamps = own.of(kind, launch, ring)
    if not len(stamps):
        raise StampsError(f"no stamps of {KINDS[kind]} {launch} and ring {ring}")
    there = np.empty(0, dtype=STAMP) if other is None else other.of(kind, launch, back)
    start = int(stamps["ns"][0])

    def cell(ns: int | None) -> str:
        return "" if ns is None else f"{(ns - start) / 1000:.1f}"

    rows = []
    for order, put in enumerate(stamps[stamps["of"] == PUT]):
        units = int(put["count"])
        times = (
            _when(stamps, FILLED, units),
            int(put["ns"]),
            _left(stamps, order),
            _when(there, LANDED, units),
            _when(there, READ, units),
        )
        rows.append([str(units), *map(cell, times)])
    return rows


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trefoil.ht_stamps", description=__doc__)
    parser.add_argument("prefix")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--other", type=int, default=1, help="rank at the other end")
    parser.add_argument("--ring", type=int, default=0, help="far node, without the own one")
    parser.add_argument("--back", type=int, default=0, help="the other end's ring to this rank")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--launch", type=int, default=-1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    a = _arguments(arguments)
    kind = KINDS.index(a.kind)
    try:
        own = Stamps.read(Path(f"{a.prefix}.{a.rank}"))
        path = Path(f"{a.prefix}.{a.other}")
        other = Stamps.read(path) if path.exists() else None
        launches = own.launches(kind)
        if not launches:
            raise StampsError(f"{a.prefix}.{a.rank}: has no {a.kind}")
        launch = launches[-1] if a.launch < 0 else a.launch
        rows = table_of(own, other, kind, launch, a.ring, a.back)
    except StampsError as error:
        print(f"trefoil.ht_stamps: {error}", file=sys.stderr)
        return 2
    print(f"{a.kind} {launch}, rank {a.rank} to {a.other}, us\n")
    print("\n".join(markdown([HEAD, *rows], "---")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
