"""Predictions of measured runs by fits that did not see them, whole configurations left out at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.engine.calibrate import (
    CANDIDATES,
    NOISE,
    PRIORS,
    Bench,
    Local,
    Priors,
    by_configuration,
    predict,
    refit,
)

NUM_FOLDS = 5
LEAST_CONFIGURATIONS = 5
"""Fewer say little: of priors, and of a spread, for which that of the engine's runs on all devices stands in."""


def folds(
    runs: Sequence[Bench], key: Callable[[Bench], str] = by_configuration, count: int | None = NUM_FOLDS, seed: int = 0
) -> NDArray[np.int64]:
    """The fold of every run; runs of equal `key` share one; with `count` None every key is a fold of its own."""
    keys = sorted({key(bench) for bench in runs})
    order = np.random.default_rng(seed).permutation(len(keys))
    fold = {name: int(order[index]) % (count or len(keys)) for index, name in enumerate(keys)}
    return np.array([fold[key(bench)] for bench in runs])


NUM_INNER_FOLDS = 5


def chosen_priors(runs: Sequence[Bench], around: Local, kept: NDArray[np.bool_]) -> Priors:
    """Of the candidates those with which configurations left out of the `kept` runs are predicted best.

    Predictions are linear around the fit to all runs, and scored are runs of full weight, by their mean error in units
    of the noise, at most `MOST_MISFIT` each. Fewer than five configurations teach nothing: the default stands.
    """
    seen = np.flatnonzero(kept).tolist()
    if len({by_configuration(runs[index]) for index in seen}) < LEAST_CONFIGURATIONS:
        return PRIORS
    inner = np.full(len(runs), -1)
    inner[seen] = folds([runs[index] for index in seen], count=NUM_INNER_FOLDS)
    return min(CANDIDATES, key=lambda priors: _held_out_misfit(runs, around, inner, priors))


MOST_MISFIT = 3.0
"""Choices by the median of the misfits changed with the drawing of the folds, and cost 0.5 points of TPOT."""


def _held_out_misfit(runs: Sequence[Bench], around: Local, fold: NDArray[np.int64], priors: Priors) -> float:
    """Of every fold's runs by fits to the other folds; runs of fold -1 are not looked at."""
    full = max(runs[index].weight for index in np.flatnonzero(fold >= 0).tolist())
    found: list[float] = []
    for one in range(NUM_INNER_FOLDS):
        fit = refit(runs, around, (fold >= 0) & (fold != one), priors)
        for index in np.flatnonzero(fold == one).tolist():
            measured = runs[index].measurement.measured if runs[index].weight == full else {}
            for metric, value in around.predict(index, runs[index], fit).items():
                if metric in measured:
                    found.append(min(abs(math.log(value / measured[metric])) / NOISE[metric], MOST_MISFIT))
    return float(np.mean(found))


def held_out(runs: Sequence[Bench], whole: Local, fold: NDArray[np.int64]) -> list[dict[str, float]]:
    """Every run's prediction by a fit that saw none of its fold, with priors that were chosen without it too."""
    found: list[dict[str, float]] = [{} for _ in runs]
    for one in np.unique(fold):
        fit = refit(runs, whole, fold != one, chosen_priors(runs, whole, fold != one))
        for index in np.flatnonzero(fold == one).tolist():
            found[index] = predict(runs[index], fit)
    return found
