"""What `trefoil fit --json` says, as typed records for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trefoil.report.results import ResultError, _Fields, _load
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


def load_fit(path: Path) -> FittedTimes:
    top = _load(path)
    forms = top.get("forms", dict)
    if not forms:
        raise ResultError(f"{path}: is not the output of trefoil fit --json")
    scores, points = [], []
    for name, data in forms.items():
        fields = _Fields(data, f"{path}: forms.{name}")
        inside, outside = (
            _Fields(
                _Fields(fields.get(part, dict), f"{fields.where}.{part}").get("both", dict), part
            )
            for part in ("inside", "outside")
        )
        scores.append(
            FormScore(
                form=name,
                fitted_rows=inside.get("n", int),
                fitted_mape=inside.number("mape_percent"),
                rows=outside.get("n", int),
                mape=outside.number("mape_percent"),
                p90=outside.number("p90_percent"),
                worst=outside.number("worst_percent"),
            )
        )
        points = [
            _point(_Fields(row, f"{fields.where}.points[{n}]"))
            for n, row in enumerate(fields.get("points", list, default=[]))
        ]
    name = str(top.data.get("record", {}).get("name", path.stem))
    return FittedTimes(name, top.get("table", str), scores, points)


def _point(fields: _Fields) -> TimedPoint:
    numbers = ("nodes", "ranks", "hidden", "tokens", "topk", "sms")
    return TimedPoint(
        op=fields.get("op", str),
        part=fields.get("part", str),
        **{name: fields.get(name, int) for name in numbers},
        measured_us=fields.number("measured_us"),
        predicted_us=fields.number("predicted_us"),
        fixed_us=0.0,
        busy_us=0.0,
        limit="",
    )
