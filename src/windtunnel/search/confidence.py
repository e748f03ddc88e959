"""Confidence of comparisons: Student's distribution, for the few seeds that a search can afford."""

import math
import statistics
from collections.abc import Sequence

MOST_SEEDS = 1000
"""Streams of requests that may be asked for: more say nothing new and take hours."""
CONFIDENCE = 0.95
"""One-sided confidence of lower bounds."""


def margin(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Return the one-sided half-width of the confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, confidence)) * statistics.stdev(values) / math.sqrt(len(values))


def lower_bound(values: Sequence[float]) -> float | None:
    """Return the lower confidence bound of the mean of `values`; None for fewer than two values."""
    off = margin(values)
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
    from scipy.special import stdtr

    return float(stdtr(len(differences) - 1, mean / spread * math.sqrt(len(differences))))
