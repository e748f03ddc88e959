"""The strategy that follows a model of former answers: Optuna's tree-structured Parzen estimator."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from windtunnel.errors import import_extra
from windtunnel.search.asker import LEAST_TRIALS, ROUGH_TOLERANCE, Asker, Race, spread_points
from windtunnel.search.capacity.capacity import LEAP
from windtunnel.search.evaluation.schema import Evaluation, Question

IS_EXHAUSTIVE = False
TRIAL_FRACTIONS, USUAL_TRIALS = (0.05, 0.1), 96
"""Smallest and largest share of the points that are evaluated, and the number evaluated between these."""
SPREAD_FRACTION, MODEL_FRACTION = 1 / 3, 1 / 3
"""Shares of the trials that are spread over the space, and that the model suggests. The model soon finds a good region
and seldom the best point there: the other trials are the best points' neighbours."""
BATCH = 8
"""Trials suggested before the first one's answer is known: constant, so that answers do not depend on the workers."""


def evaluate(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Evaluate batches of points that Optuna's tree-structured Parzen estimator suggests, then neighbours of the best.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization (NIPS 2011), section 4. MissingExtraError where
    Optuna is not installed.
    """
    space = asker.space
    smallest, largest = (math.floor(share * space.num_points) for share in TRIAL_FRACTIONS)
    num_points = min(max(smallest, min(USUAL_TRIALS, largest), LEAST_TRIALS), space.num_points)
    race = Race(asker, workload, Question() if space.is_training else Question(tolerance=ROUGH_TOLERANCE))
    sizes = {name: len(values) for name, values in space.vary.items()}
    spread = spread_points(space.num_points, math.ceil(num_points * SPREAD_FRACTION))
    _ask_suggested(race, sizes, spread, math.ceil(num_points * MODEL_FRACTION))
    while left := num_points - len(race.answers):
        near_by = dict.fromkeys(other for index in race.best for other in _one_setting_away(index, sizes))
        new = [index for index in near_by if index not in race.answers]
        if not new:
            break
        race.ask(new[: min(left, BATCH)])
    return race.answers if space.is_training else race.exactly()


def _ask_suggested(race: Race, sizes: dict[str, int], spread: list[int], num_trials: int) -> None:
    """Evaluate the points in `spread`, then `num_trials` points that Optuna suggests from all answers so far."""
    optuna = import_extra("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=_sampler(optuna, race.asker.space.seed))
    shape = tuple(sizes.values())
    for index in spread:
        study.enqueue_trial(dict(zip(sizes, map(int, np.unravel_index(index, shape)), strict=True)))
    marks: dict[int, float | None] = {}
    num_trials += len(spread)
    for first in range(0, num_trials, BATCH):
        trials = [study.ask() for _ in range(min(BATCH, num_trials - first))]
        suggested = [
            int(np.ravel_multi_index([trial.suggest_categorical(name, range(sizes[name])) for name in sizes], shape))
            for trial in trials
        ]
        new = [index for index in dict.fromkeys(suggested) if index not in race.answers]
        marks |= dict.fromkeys(new, race.ask(new))
        known = [value for value in map(race.score, race.answers) if math.isfinite(value)]
        worst = min(known, default=0.0)
        for trial, index in zip(trials, suggested, strict=True):
            study.tell(trial, _trial_value(race, index, marks[index], worst))


def _one_setting_away(index: int, sizes: dict[str, int]) -> Iterator[int]:
    """Yield the points that differ from `index` in a single setting, the last name's first."""
    stride = 1
    for size in reversed(sizes.values()):
        position = index // stride % size
        yield from (index + (other - position) * stride for other in range(size) if other != position)
        stride *= size


def _trial_value(race: Race, index: int, mark: float | None, worst: float) -> float:
    """Return the score that the model learns. A point that was dropped gets its possible score, from how far it was
    beyond its limit; a point that cannot be deployed gets less than any other.
    """
    value, beaten_by = race.score(index), race.answers[index].beaten_by
    if math.isfinite(value):
        return value
    if mark is None or not beaten_by:
        return worst - abs(worst)
    return mark - abs(mark) * -math.expm1(-LEAP * beaten_by)


def _sampler(optuna: Any, seed: int) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)
