"""How far predictions are off: median, 90th percentile and bias of errors, coverage of intervals, order of rankings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Errors of a group of runs in one metric; an error is predicted over measured, less one."""

    num_runs: int
    median: float
    """Of the absolute error."""
    p90: float
    """Of the absolute error."""
    bias: float
    """Median of the signed error."""


def score(errors: Sequence[float]) -> Score | None:
    """The score of `errors`, those that are not finite left out; None where there is none."""
    known = [error for error in errors if math.isfinite(error)]
    if not known:
        return None
    sizes = [abs(error) for error in known]
    return Score(len(known), quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(known, 0.5))


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation between order statistics (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings (Kendall, 1945): 1 where every pair agrees; NaN where either is constant."""
    agree, ties_one, ties_other, pairs = 0, 0, 0, 0
    for i in range(len(one)):
        for j in range(i):
            a, b = _sign(one[i] - one[j]), _sign(other[i] - other[j])
            pairs += 1
            agree += a * b
            ties_one += a == 0
            ties_other += b == 0
    scale = math.sqrt((pairs - ties_one) * (pairs - ties_other))
    return agree / scale if scale else math.nan


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
