"""What `trefoil fit --json` says, as typed records for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trefoil.report.results import Fields, ResultError, load
from trefoil.report.validated import TimedPoint


@dataclass(frozen=True)
class FormScore:
    """One form of the model: errors in percent, on the rows fitted and on those held out."""

    form: str
    fitted_rows: int
    fitted_mape: float
    rows: int
    mape: float
    p90: float
    worst: float


@dataclass(frozen=True)
class FittedTimes:
    """A fit of measurements: both forms' scores, and the last form's rows."""

    name: str
    table: str
    forms: list[FormScore]
    points: list[TimedPoint]


IN_JSON = {"rows": "n", **{name: f"{name}_percent" for name in ("mape", "p90", "worst")}}
UNKNOWN: dict[str, Any] = {"fixed_us": 0.0, "busy_us": 0.0, "limit": ""}  # a fit does not say it


def load_fit(path: Path) -> FittedTimes:
    top = load(path)
    forms = top.get("forms", dict)
    if not forms:
        raise ResultError(f"{path}: is not the output of trefoil fit --json")
    scores, points = [], []
    for name, data in forms.items():
        fields = Fields(data, f"{path}: forms.{name}")
        inside, outside = (
            Fields(Fields(fields.get(part, dict), f"{fields.where}.{part}").get("both", dict), part)
            for part in ("inside", "outside")
        )
        rows, mape = inside.get("n", int), inside.number("mape_percent")
        scores.append(
            outside.record(FormScore, IN_JSON, form=name, fitted_rows=rows, fitted_mape=mape)
        )
        points = [
            Fields(row, f"{fields.where}.points[{n}]").record(TimedPoint, **UNKNOWN)
            for n, row in enumerate(fields.get("points", list, default=[]))
        ]
    name = str(top.data.get("record", {}).get("name", path.stem))
    return FittedTimes(name, top.get("table", str), scores, points)
