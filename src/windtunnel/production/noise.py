"""The noise of repeated runs: how much slower a run must be before chance no longer explains it."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from windtunnel.schema import read_yaml

PRIOR = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Metric -> standard deviation of the logarithm of a run's mean, and `worth_runs`."""
FALSE_ALARMS = 0.001
"""Share of comparisons of equal servers that are taken for a change, metric by metric."""
LEAST_FOR_MEDIAN = 3
"""Repeats from which their median is compared and not their mean: one run in ten is an outlier."""
MEDIAN_PENALTY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of many normal values."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal value over the median of its absolute deviations."""


def centre(values: Sequence[float]) -> float:
    """Return the value that stands for repeated runs: the median, or the mean of one or two."""
    return median(values) if len(values) >= LEAST_FOR_MEDIAN else fmean(values)


def least_change(metric: str, before: Sequence[float], after: Sequence[float]) -> float:
    """Return the smallest change, as a share, that chance explains in no more than `FALSE_ALARMS` of comparisons.

    The variance of the logarithms is pooled from the repeats on both sides, of three or more from the median absolute
    deviation, as one repeat in ten is an outlier; and from what is known of repeated runs of other servers, which
    counts as so many repeats more. The change is Student's t times its standard error.

    Args:
        metric: one of `tpot`, `ttft`, `e2e`, `throughput`.
        before, after: means of the repeats on each side, at least one.
    """
    from scipy.stats import t

    freedom, squares = float(PRIOR["worth_runs"]), PRIOR["worth_runs"] * PRIOR[metric] ** 2
    variance = 0.0
    for values in (before, after):
        logs = [math.log(value) for value in values]
        middle = centre(logs)
        if len(logs) >= LEAST_FOR_MEDIAN:
            squares += (len(logs) - 1) * (NORMAL_MAD * median(abs(value - middle) for value in logs)) ** 2
        else:
            squares += sum((value - middle) ** 2 for value in logs)
        freedom += len(logs) - 1
        variance += (MEDIAN_PENALTY**2 if len(logs) >= LEAST_FOR_MEDIAN else 1.0) / len(logs)
    quantile = float(t.ppf(1 - FALSE_ALARMS, freedom))
    return math.expm1(quantile * math.sqrt(squares / freedom * variance))
