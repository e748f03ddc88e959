"""Which points of a space are asked: all, those that do well on a part of the requests, or those that a model of former
answers suggests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windtunnel.errors import MissingExtraError
from windtunnel.search.evaluate import Evaluation, Question
from windtunnel.search.scores import score

if TYPE_CHECKING:
    from windtunnel.search.optimize import Asker

Strategy = Callable[["Asker", str | None], dict[int, Evaluation]]

RUNGS = ((1 / 8, 0.1, 1 / 12), (1 / 2, 0.03, 1 / 3))
"""Of successive halving: share of the requests, distance of neighbouring loads, share of the points that go on."""
LEAST_REQUESTS = 100
"""Of a rung; percentiles of fewer say little."""
LEAST_KEPT = 10

TRIAL_FRACTION = 0.04
"""Of the points that the Bayesian strategy asks."""
LEAST_TRIALS = 40
BATCH = 8
"""Trials that are suggested before the answers of the first of them are known: a constant, so that the answers do not
depend on the number of workers."""


def exhaustive(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point, with all requests."""
    return asker.ask(workload, range(asker.space.num_points), Question())


def halving(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point with the first requests, roughly; those that do well with more of them, and the best with all.

    Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS
    2016), with the length of the stream as the resource. A point that goes out keeps the answer of its last rung out of
    the ranking: it is not among the answers.
    """
    space = asker.space
    points, refused = list(range(space.num_points)), dict[int, Evaluation]()
    for share, tolerance, kept in RUNGS:
        size = asker.evaluator.num_requests(workload)
        if size * share < LEAST_REQUESTS:
            share = min(LEAST_REQUESTS / size, 1.0)
        question = Question(num_requests=math.ceil(size * share), tolerance=tolerance)
        answers = asker.ask(workload, points, question)
        refused |= {index: one for index, one in answers.items() if one.refused}
        points = [index for index in points if not answers[index].refused]
        points.sort(key=lambda index: (-score(answers[index], space.objective), index))
        points = points[: max(math.ceil(len(points) * kept), LEAST_KEPT)]
    return refused | asker.ask(workload, sorted(points), Question())


def tpe(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Points that Optuna's tree-structured Parzen estimator suggests, some at a time.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization (NIPS 2011), section 4.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = asker.space
    sizes = {name: len(values) for name, values in space.vary.items()}
    study = optuna.create_study(direction="maximize", sampler=_sampler(optuna, space.seed))
    num_trials = min(max(LEAST_TRIALS, math.ceil(TRIAL_FRACTION * space.num_points)), space.num_points)
    answers: dict[int, Evaluation] = {}
    for first in range(0, num_trials, BATCH):
        trials = [study.ask() for _ in range(min(BATCH, num_trials - first))]
        suggested = [_index(trial, sizes) for trial in trials]
        new = [index for index in dict.fromkeys(suggested) if index not in answers]
        answers |= asker.ask(workload, new, Question())
        scores = [score(one, space.objective) for one in answers.values()]
        worst = min([value for value in scores if math.isfinite(value)], default=0.0)
        for trial, index in zip(trials, suggested, strict=True):
            value = score(answers[index], space.objective)
            study.tell(trial, value if math.isfinite(value) else worst - abs(worst))
    return answers


def _sampler(optuna: Any, seed: int) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=LEAST_TRIALS // 2
        )


def _index(trial: Any, sizes: dict[str, int]) -> int:
    """The point that a trial suggests; the last name changes fastest."""
    index = 0
    for name, size in sizes.items():
        index = index * size + int(trial.suggest_categorical(name, list(range(size))))
    return index


STRATEGIES: dict[str, Strategy] = {"exhaustive": exhaustive, "halving": halving, "tpe": tpe}
