"""Polynomials of the axes, by least squares of relative errors."""

from collections.abc import Callable
from itertools import combinations_with_replacement

import numpy as np

from windtunnel.pricing.table import Floats

RISES = True
SEED = 0


def fit(features: Floats, roofline_s: Floats, seconds: Floats) -> Callable[[Floats, Floats], Floats]:
    """Fit monomials of the axes by least squares of relative errors, of the degree with the least error on folds."""
    degrees = range(1, 4)
    order = np.random.default_rng(SEED).permutation(len(seconds))
    parts = np.array_split(order, min(3, len(seconds)))

    def error(degree: int) -> float:
        errors = []
        for part in parts:
            shown = np.setdiff1d(order, part)
            guess = _polynomial(features[shown], seconds[shown], degree)(features[part])
            errors.append(np.abs(guess / seconds[part] - 1))
        return float(np.concatenate(errors).mean())

    best = _polynomial(features, seconds, min(degrees, key=error))
    floor = float(seconds.min()) / 2

    # A polynomial may dip below zero between its points; no operator takes less than half the least measured time.
    return lambda points, _: np.maximum(best(points), floor)


def _polynomial(features: Floats, seconds: Floats, degree: int) -> Callable[[Floats], Floats]:
    scale = np.maximum(features.max(axis=0), 1.0)

    def monomials(points: Floats) -> Floats:
        x = points / scale
        terms = [np.ones(len(x))]
        for power in range(1, degree + 1):
            terms += [np.prod(x[:, list(c)], axis=1) for c in combinations_with_replacement(range(x.shape[1]), power)]
        return np.column_stack(terms)

    weights, *_ = np.linalg.lstsq(monomials(features) / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return lambda points: np.asarray(monomials(points) @ weights)
