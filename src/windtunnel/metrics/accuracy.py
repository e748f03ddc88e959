"""Accuracy of predictions: median, 90th percentile and bias of errors, and agreement of rankings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Errors of a group of runs in one metric; an error is predicted / measured - 1."""

    num_runs: int
    median: float
    """Median of the absolute error."""
    p90: float
    """90th percentile of the absolute error."""
    bias: float
    """Median of the signed error."""


def score(errors: Sequence[float]) -> Score | None:
    """Return the score of the finite errors; None where there is none."""
    known = [error for error in errors if math.isfinite(error)]
    if not known:
        return None
    sizes = [abs(error) for error in known]
    return Score(len(known), quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(known, 0.5))


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile by linear interpolation between order statistics (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Kendall's tau-b of two rankings (Kendall, 1945): 1 where all pairs agree, NaN where one is constant."""
    pairs = [(_sign(left[i] - left[j]), _sign(right[i] - right[j])) for i in range(len(left)) for j in range(i)]
    scale = math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))
    return sum(a * b for a, b in pairs) / scale if scale else math.nan


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
