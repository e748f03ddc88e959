"""Accuracy of predictions: median, 90th percentile and bias of errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    known = np.array([error for error in errors if math.isfinite(error)])
    if not known.size:
        return None
    median, p90 = np.quantile(np.abs(known), (0.5, 0.9)).tolist()
    return Score(known.size, median, p90, float(np.median(known)))
