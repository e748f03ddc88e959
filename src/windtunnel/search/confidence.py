"""Confidence of comparisons: Student's distribution, for the few seeds that a search can afford."""

import math
import statistics
from collections.abc import Sequence
from functools import cache

CONFIDENCE = 0.95
"""One-sided confidence of lower bounds."""


def student_cdf(t: float, dof: int) -> float:
    """Return the probability that Student's t with `dof` degrees of freedom is at most `t`.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    theta = math.atan(abs(t) / math.sqrt(dof))
    cosine, sine = math.cos(theta), math.sin(theta)
    term, total = (cosine, 0.0) if dof % 2 else (1.0, 0.0)
    for k in range(1 if dof % 2 else 0, dof - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (theta + sine * total) if dof % 2 else sine * total
    return 0.5 + math.copysign(inside, t) / 2


@cache
def student_quantile(confidence: float, dof: int) -> float:
    """Return the inverse of `student_cdf` for a confidence above one half."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, dof) < confidence else (low, middle)
    return high


def margin(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Return the one-sided half-width of the confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return student_quantile(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def lower_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Return the lower confidence bound of the mean of `values`; None for fewer than two values."""
    off = margin(values, confidence)
    return None if off is None else statistics.fmean(values) - off


def confidence_above(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the confidence that the mean of `first` exceeds that of `second`; None for fewer than two pairs.

    A one-sided paired t-test: common random numbers leave only what differs between the two.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    if spread == 0:
        return 0.5 if mean == 0 else float(mean > 0)
    return student_cdf(mean / spread * math.sqrt(len(differences)), len(differences) - 1)
