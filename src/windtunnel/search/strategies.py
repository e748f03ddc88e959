"""Which points of a space are asked: all, those that do well on a part of the requests, or those that a model of former
answers suggests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from windtunnel.errors import MissingExtraError
from windtunnel.search.capacity import LEAP
from windtunnel.search.evaluate import Evaluation, Question
from windtunnel.search.scores import score

if TYPE_CHECKING:
    from windtunnel.search.optimize import Asker

Strategy = Callable[["Asker", str | None], dict[int, Evaluation]]

FIRST_RUNG, SECOND_RUNG = (1 / 8, 0.1), (1 / 2, 0.03)
"""Share of the requests, and distance of neighbouring loads."""
LEAST_REQUESTS = 100
"""Of a rung; percentiles of fewer say little."""
KEPT_FRACTIONS = 1 / 32, 1 / 4
"""Of the points that halving asks on the first rung, how many go on to the second; and of these to the whole stream."""
LEAST_KEPT = 10

SAMPLE_FRACTION = 1 / 32
"""Of the points, those that halving asks first."""
BATCHES = 1 / 8, 3 / 8, 1.0
"""Of the others, how many are asked before the mark is moved again."""
GOLDEN_RATIO = 0.6180339887498949

TRIAL_FRACTION = 0.04
"""Of the points that the Bayesian strategy asks."""
TRIALS_KEPT = 1 / 8
"""Of these, how many go on."""
LEAST_TRIALS = 40
BATCH = 8
"""Trials that are suggested before the answers of the first of them are known: a constant, so that the answers do not
depend on the number of workers."""


def exhaustive(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point, with all requests."""
    return asker.ask(workload, range(asker.space.num_points), Question())


@dataclass(eq=False)
class Race:
    """Points that are asked some at a time. Once as many as may go on have answered, the score of the last of them is
    the mark: another point is tried at the load that this takes, and where it fails no more is asked of it.
    """

    asker: Asker
    workload: str | None
    question: Question
    num_kept: int
    answers: dict[int, Evaluation] = field(default_factory=dict)

    @property
    def best(self) -> list[int]:
        """The points that go on, best first."""
        scored = {index: self.score(index) for index in self.answers}
        holding = [index for index in scored if scored[index] > -math.inf]
        return sorted(holding, key=lambda index: (-scored[index], index))[: self.num_kept]

    @property
    def refused(self) -> dict[int, Evaluation]:
        return {index: one for index, one in self.answers.items() if one.refused}

    def score(self, index: int) -> float:
        return score(self.answers[index], self.asker.space.objective)

    def ask(self, indices: Sequence[int], near: dict[int, float] | None = None) -> float | None:
        """Ask points; gives the mark that they met, None for none."""
        best = self.best
        mark = self.score(best[-1]) if len(best) == self.num_kept else None
        question = msgspec.structs.replace(self.question, worth=mark)
        self.answers |= self.asker.ask(self.workload, indices, question, near or {})
        return mark


def halving(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point with the first requests, roughly; those that do well with more of them, and the best with all.

    Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS
    2016), with the length of the stream as the resource, and points given up as soon as enough others are better. A
    point that goes out keeps the answer of its last rung out of the ranking: it is not among the answers.
    """
    points = asker.space.num_points
    first = Race(asker, workload, _rung(asker, workload, FIRST_RUNG), points)
    sample = _spread(points, max(math.ceil(points * SAMPLE_FRACTION), LEAST_TRIALS))
    first.ask(sample)
    possible = 1 - len(first.refused) / len(sample)
    first.num_kept = max(math.ceil(points * possible * KEPT_FRACTIONS[0]), LEAST_KEPT)
    for batch in _batches(first):
        first.ask(batch)
    return _promoted(first)


def _spread(num_points: int, num_taken: int) -> list[int]:
    """Positions that leave no long gap, whatever the sizes of the space's axes."""
    if num_taken >= num_points:
        return list(range(num_points))
    stride = round(num_points * GOLDEN_RATIO)
    while math.gcd(stride, num_points) > 1:
        stride += 1
    return sorted(position * stride % num_points for position in range(num_taken))


def _batches(race: Race) -> Iterator[list[int]]:
    """The points that were not asked, those first that differ only in knobs from one that did well."""
    family = race.asker.evaluator.family
    families: dict[bytes, float] = {}
    for index in race.answers:
        families[family(index)] = max(families.get(family(index), -math.inf), race.score(index))
    rest = [index for index in range(race.asker.space.num_points) if index not in race.answers]
    rest.sort(key=lambda index: (-families.get(family(index), -math.inf), index))
    ends = [0, *(round(len(rest) * share) for share in BATCHES)]
    return (rest[begin:end] for begin, end in pairwise(ends) if end > begin)


def _rung(asker: Asker, workload: str | None, rung: tuple[float, float]) -> Question:
    share, tolerance = rung
    size = asker.evaluator.num_requests(workload)
    return Question(num_requests=min(max(math.ceil(size * share), LEAST_REQUESTS), size), tolerance=tolerance)


def _promoted(first: Race) -> dict[int, Evaluation]:
    """The best points of the first rung with more requests, and the best of these with all."""
    asker, workload = first.asker, first.workload
    num_kept = max(math.ceil(len(first.best) * KEPT_FRACTIONS[1]), LEAST_KEPT)
    second = Race(asker, workload, _rung(asker, workload, SECOND_RUNG), num_kept)
    points = first.best
    for batch in (points[:num_kept], points[num_kept:]):
        second.ask(batch, {index: first.answers[index].load for index in batch})
    near = {index: second.answers[index].load for index in second.best}
    return first.refused | second.refused | asker.ask(workload, sorted(near), Question(), near)


def tpe(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Points that Optuna's tree-structured Parzen estimator suggests, some at a time, with the first requests; the best
    of them with more, and the best of these with all. Training jobs meet no requests: each is asked once.

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
    question = Question() if space.is_training else _rung(asker, workload, FIRST_RUNG)
    race = Race(asker, workload, question, max(math.ceil(num_trials * TRIALS_KEPT), LEAST_KEPT))
    marks: dict[int, float | None] = {}
    for first in range(0, num_trials, BATCH):
        trials = [study.ask() for _ in range(min(BATCH, num_trials - first))]
        suggested = [_index(trial, sizes) for trial in trials]
        new = [index for index in dict.fromkeys(suggested) if index not in race.answers]
        marks |= dict.fromkeys(new, race.ask(new))
        known = [value for value in map(race.score, race.answers) if math.isfinite(value)]
        worst = min(known, default=0.0)
        for trial, index in zip(trials, suggested, strict=True):
            study.tell(trial, _told(race, index, marks[index], worst))
    return race.answers if space.is_training else _promoted(race)


def _told(race: Race, index: int, mark: float | None, worst: float) -> float:
    """The score that the model learns from: of a point that was given up what it may be, by how far it was beyond its
    limit; of one that cannot be less than any."""
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
