"""The search for costs: least squares of logarithms within physical bounds, and its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trefoil.fit.cases import OPS, Case
from trefoil.fit.model import Array
from trefoil.simulator import Costs


@dataclass(frozen=True)
class Range:
    """A parameter: where the search starts, and the physical bounds that it must keep."""

    start: float
    low: float
    high: float

    @property
    def _is_log(self) -> bool:
        return self.low > 0 and self.high >= 10 * self.low

    def value(self, unit: float) -> float:
        """From [0, 1]; where the bounds lie a factor of ten apart or more, by their logarithms."""
        if unit in (0, 1):
            return self.high if unit else self.low
        if self._is_log:
            return self.low * (self.high / self.low) ** unit
        return self.low + (self.high - self.low) * unit

    def unit(self, value: float) -> float:
        if self._is_log:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def slope(self, unit: float) -> float:
        """d value / d unit."""
        if self._is_log:
            return float(self.value(unit) * np.log(self.high / self.low))
        return self.high - self.low


@dataclass
class Fitted:
    values: dict[str, float]
    states: dict[str, str]  # "fitted", "at-low", "at-high", "unidentified"
    deviations: dict[str, float]  # one standard deviation, from the curvature at the optimum
    evaluations: int


Predict = Callable[[Costs], Array]


def fit(
    predict: Predict,
    measured: Array,
    costs: Costs,
    ranges: Mapping[str, Range],
    *,
    also: Sequence[Mapping[str, float]] = (),
    starts: int = 1,
    seed: int = 1,
    step: float = 1e-3,
    tolerance: float = 1e-7,
    report: Callable[[int], None] = lambda evaluations: None,
) -> Fitted:
    """Least squares of log(predicted / measured), robust against outliers, within the bounds.

    The search runs from the given start, from the points in `also`, and from starts - 1 seeded
    random points; the best end counts. step: relative width of finite differences; engines count in
    femtoseconds, so it must not be tiny. Afterwards a parameter is "at-low" or "at-high" if it lies
    within 0.1 % of the range's width of that bound, else "unidentified" if the data leave it a
    standard deviation of more than half that width (of logarithms, see Range.value), or as large as
    its value.
    """
    from scipy.optimize import least_squares

    names = list(ranges)
    count = 0

    def values_at(unit: Array) -> dict[str, float]:
        return {n: ranges[n].value(float(u)) for n, u in zip(names, unit, strict=True)}

    def residuals(unit: Array) -> Array:
        nonlocal count
        count += 1
        report(count)
        costs.set(values_at(unit))
        return np.log(predict(costs) / measured)

    rng = np.random.default_rng(seed)
    given = [{n: ranges[n].start for n in names}, *also]
    points = [np.array([ranges[n].unit(p[n]) for n in names]) for p in given]
    points += list(rng.random((starts - 1, len(names))))
    best = None
    for point in points:
        found = least_squares(
            residuals,
            np.clip(point, 1e-6, 1 - 1e-6),
            bounds=(0, 1),
            loss="soft_l1",
            f_scale=0.05,
            diff_step=step,
            xtol=tolerance,
            ftol=tolerance,
            max_nfev=60,
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    unit = np.where(best.x < 1e-3, 0.0, np.where(best.x > 1 - 1e-3, 1.0, best.x))
    deviation = _deviations(best.jac, best.fun)
    values = values_at(unit)
    costs.set(values)
    slopes = [ranges[n].slope(float(u)) for n, u in zip(names, unit, strict=True)]
    deviations = dict(zip(names, (deviation * slopes).tolist(), strict=True))
    states = {
        n: _state(u, s, deviations[n] >= abs(values[n]))
        for n, u, s in zip(names, unit, deviation, strict=True)
    }
    return Fitted(values, states, deviations, count)


def _state(unit: float, deviation: float, is_as_large: bool) -> str:
    """is_as_large: the standard deviation, as the value."""
    if unit in (0, 1):
        return "at-high" if unit else "at-low"
    return "unidentified" if deviation > 0.5 or is_as_large else "fitted"


def _deviations(jacobian: Array, residual: Array) -> Array:
    """Standard deviations in units of the ranges, inf where nothing depends on a parameter."""
    rows, columns = jacobian.shape
    _, singular, v = np.linalg.svd(jacobian, full_matrices=False)
    variance = float(residual @ residual) / max(1, rows - columns)
    weak = singular < 1e-9 * max(1.0, singular[0])
    inverse = np.where(weak, 0, 1 / np.where(weak, 1, singular) ** 2)
    deviations = np.sqrt(variance * (v.T**2 @ inverse))
    loose = (v.T**2)[:, weak].sum(axis=1) > 1e-6 if weak.any() else np.zeros(columns, bool)
    return np.where(loose, np.inf, deviations)


# ---- Scoring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    n: int
    mape_percent: float
    p90_percent: float
    worst_percent: float
    low: float  # of measured / predicted: beyond either end lies a twentieth, in whole rows
    high: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Score:
        if len(measured) == 0:
            return cls(0, 0.0, 0.0, 0.0, 1.0, 1.0)
        error = 100 * np.abs(predicted / measured - 1)
        ratio = np.sort(measured / predicted)
        beyond = (len(ratio) + 9) // 20  # rounded, halves down
        return cls(
            len(measured),
            float(error.mean()),
            float(np.quantile(error, 0.9)),
            float(error.max()),
            float(ratio[beyond]),
            float(ratio[-1 - beyond]),
        )


def scores(cases: Sequence[Case], predicted: Array) -> dict[str, Score]:
    """By operation, and "both"."""
    measured = np.array([case.us for case in cases])
    found = {"both": Score.of(predicted, measured)}
    for op in OPS:
        chosen = np.array([case.op == op for case in cases], dtype=bool)
        found[op] = Score.of(predicted[chosen], measured[chosen])
    return found
