"""trefoil fit: costs from measured tables, by a split that was fixed before.

    trefoil fit deepep-ll-h100 [--out RECORD.json] [--json]
    trefoil fit my.split.json --table my.csv --engine closed-form

The split (docs/fit.md) names the table, the rows that are fitted, the rows that are scored, the
costs that are given and the physical bounds of those that are fitted. The closed form and the
engine are fitted to the same rows; each is scored once on the rows held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trefoil.fit.cases import TableError
from trefoil.fit.growth import growth_of
from trefoil.fit.job import Outcome, compare_with_simgrid, make_job, run_form
from trefoil.fit.record import json_of, print_text, record_of
from trefoil.fit.split import SplitError, load_split
from trefoil.outputs import write_whole
from trefoil.reference import TrefoilError
from trefoil.sentence_parser import SentenceParser
from trefoil.verb import run

OK, FAILED, USAGE = 0, 1, 2
FORMS = ("closed-form", "queues")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = SentenceParser(
        prog="trefoil fit",
        description="Fits a cost record to a measured table by a split that was fixed before, "
        "within physical bounds, and scores it once on the rows held out (docs/fit.md).",
    )
    parser.add_argument("split", help="name of a committed split, or a path")
    parser.add_argument("--table", type=Path, help="another table than the split names")
    parser.add_argument(
        "--engine",
        choices=("closed-form", "queues", "both"),
        default="both",
        help="what is fitted (default: both, the record is the queues')",
    )
    parser.add_argument("--out", type=Path, metavar="RECORD.json", help="write the cost record")
    parser.add_argument(
        "--simgrid", type=int, metavar="N", default=0, help="compare with SimGrid on N cases"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise SplitError(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    job = make_job(load_split(arguments.split), arguments.table)
    forms = FORMS if arguments.engine == "both" else (arguments.engine,)
    outcomes: list[Outcome] = []
    for form in forms:  # the engine also starts where the closed form ended
        outcomes.append(run_form(job, form, [o.fitted.values for o in outcomes]))
    simgrid = None
    if arguments.simgrid > 0:
        simgrid = compare_with_simgrid(job, outcomes[-1], arguments.simgrid)
    record = {}
    if arguments.out or arguments.json:
        record = record_of(job, outcomes[-1], outcomes, growth_of(job, outcomes[-1]))
    if arguments.out:
        write_whole(arguments.out, json.dumps(record, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(json_of(job, outcomes, simgrid, record), indent=2))
    else:
        print_text(job, outcomes, simgrid)
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        print("trefoil fit: SciPy is missing (pip install scipy)", file=sys.stderr)
        return FAILED
    try:
        return _run(arguments)
    except (SplitError, TableError, TrefoilError, OSError) as error:
        print(f"trefoil fit: {error}", file=sys.stderr)
        return USAGE if isinstance(error, SplitError | TableError) else FAILED


if __name__ == "__main__":
    sys.exit(run("fit", main))
