"""Predictions of measured runs by fits that did not see them, whole configurations left out at a time."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.fit import CANDIDATES, Fit, LocalFit, PricedServer, by_configuration, predict, refit
from windtunnel.calibration.settings_inference import Trials, infer, with_learnt

NUM_FOLDS = 5
LEAST_CONFIGURATIONS = 5
"""Fewest configurations that a spread is taken from; with fewer, the engine's runs on all devices stand in."""


def folds(
    runs: Sequence[PricedServer],
    key: Callable[[PricedServer], str] = by_configuration,
    count: int | None = NUM_FOLDS,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return the fold of every run; runs of equal `key` share one, and with `count` None every key has its own."""
    keys = sorted({key(priced) for priced in runs})
    order = np.random.default_rng(seed).permutation(len(keys))
    fold = {name: int(order[index]) % (count or len(keys)) for index, name in enumerate(keys)}
    return np.array([fold[key(priced)] for priced in runs])


def averaged_fit(runs: Sequence[PricedServer], around: LocalFit, kept: NDArray[np.bool_]) -> Fit:
    """Return the mean of the fits to the runs that are `kept` under all candidate priors, effect by effect.

    No prior is chosen: which one predicts runs left out best changes with the drawing of the folds.
    """
    fits = [refit(runs, around, kept, priors) for priors in CANDIDATES]
    return Fit({effect: float(np.mean([fit.effects[effect] for fit in fits])) for effect in fits[0].effects})


def held_out(
    runs: Sequence[PricedServer], around: LocalFit, fold: NDArray[np.int64], trials: Trials | None = None
) -> list[dict[str, float]]:
    """Predict every run by a fit, and with settings, that were learnt from runs of other folds alone.

    Args:
        around: their predictions, as linear around a fit to all.
        trials: of `runs`; given again, nothing is simulated twice.
    """
    predictions: list[dict[str, float]] = [{} for _ in runs]
    trials = trials or Trials(runs)
    for left_out in np.unique(fold):
        kept = fold != left_out
        fit = averaged_fit(runs, around, kept)
        learnt = infer(trials, around, fit, kept)
        for index in np.flatnonzero(~kept).tolist():
            predictions[index] = predict(with_learnt([runs[index]], learnt)[0], fit)
    return predictions
