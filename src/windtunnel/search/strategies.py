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
from windtunnel.search.capacity.capacity import LEAP
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.scores import score

if TYPE_CHECKING:
    from windtunnel.search.asker import Asker

Strategy = Callable[["Asker", str | None], dict[int, Evaluation]]

FIRST_FRACTION, FIRST_TOLERANCE = 1 / 10, 0.1
"""Of halving's first rung: share of the requests, and distance of neighbouring loads."""
LEAST_REQUESTS = 100
"""Of a rung; percentiles of fewer say little."""
KEPT_FRACTION = 1 / 16
"""Of the points, how many meet all requests. A short stream is taken in as a burst: with an eighth of 1,000 requests
about 200 of 12,544 points did better than the one that is best with all."""
LEAST_KEPT = 50
ROUGH_TOLERANCE = 0.03
"""Distance of neighbouring loads with all requests, until the best points are known."""
MARK_RANK = 3
"""With all requests, a point is given up once it cannot be among so many best."""
NUM_BEST = 10
"""Points whose answers are found as exactly as an exhaustive search does."""

SAMPLE_FRACTION = 1 / 32
"""Of the points, those that halving asks first."""
BATCHES = 1 / 8, 3 / 8, 1.0
"""Of the others, how many are asked before the mark is moved again."""
GOLDEN_RATIO = 0.6180339887498949

TRIAL_FRACTIONS, USUAL_TRIALS = (0.05, 0.1), 96
"""Of the points, least and most that the Bayesian strategy asks; and what it asks between these."""
SPREAD_FRACTION, MODEL_FRACTION = 1 / 3, 1 / 3
"""Of these, those that are spread over the space, and those that the model suggests. It soon finds a good region and
seldom the best point there: the others are the best points' neighbours."""
LEAST_TRIALS = 40
BATCH = 8
"""Trials that are suggested before the answers of the first of them are known: a constant, so that the answers do not
depend on the number of workers."""


def exhaustive(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point, with all requests."""
    return asker.ask(workload, range(asker.space.num_points), Question())


@dataclass(eq=False)
class Race:
    """Points that are asked some at a time. The score of one of the best so far is the mark: another point is tried at
    the load that this takes, and where it fails no more is asked of it.
    """

    asker: Asker
    workload: str | None
    question: Question
    mark_fraction: float = 0.0
    """Of the points that were asked, the rank of the one that makes the mark; at least `MARK_RANK`."""
    answers: dict[int, Evaluation] = field(default_factory=dict)

    @property
    def best(self) -> list[int]:
        """The points that hold the limits and were not given up, best first."""
        scored = {index: self.score(index) for index in self.answers}
        return sorted((at for at in scored if scored[at] > -math.inf), key=lambda at: (-scored[at], at))

    @property
    def num_possible(self) -> int:
        return sum(not one.refused for one in self.answers.values())

    def score(self, index: int) -> float:
        return score(self.answers[index], self.asker.space.objective)

    def ask(self, indices: Sequence[int], near: dict[int, float] | None = None) -> float | None:
        """Ask points; gives the mark that they met, None for none."""
        best, rank = self.best, max(math.ceil(self.num_possible * self.mark_fraction), MARK_RANK)
        mark = self.score(best[rank - 1]) if len(best) >= rank else None
        question = msgspec.structs.replace(self.question, worth=mark)
        self.answers |= self.asker.ask(self.workload, indices, question, near or {})
        return mark


def halving(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point with the first requests, roughly; those that do well with all of them.

    Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS
    2016), with the length of the stream as the resource, and points given up as soon as enough others are better; that
    makes rungs between the two dearer than they are worth.
    """
    num_points, size = asker.space.num_points, asker.evaluator.num_requests(workload)
    short = min(max(math.ceil(size * FIRST_FRACTION), LEAST_REQUESTS), size)
    question = Question(num_requests=short, tolerance=FIRST_TOLERANCE)
    first = Race(asker, workload, question, 2 * KEPT_FRACTION)
    first.ask(_spread(num_points, max(math.ceil(num_points * SAMPLE_FRACTION), LEAST_TRIALS)))
    for batch in _batches(first):
        first.ask(batch)
    best = first.best[: max(math.ceil(first.num_possible * KEPT_FRACTION), LEAST_KEPT)]
    whole = Race(asker, workload, Question(tolerance=ROUGH_TOLERANCE))
    for begin in range(0, len(best), NUM_BEST):
        batch = best[begin : begin + NUM_BEST]
        whole.ask(batch, {index: first.answers[index].load for index in batch})
    return {index: one for index, one in first.answers.items() if one.refused} | _exactly(whole)


def _exactly(race: Race) -> dict[int, Evaluation]:
    """The answers of the best points, and refusals."""
    near = {index: race.answers[index].load for index in race.best[: max(NUM_BEST, race.asker.space.finalists)]}
    refused = {index: one for index, one in race.answers.items() if one.refused}
    return refused | race.asker.ask(race.workload, sorted(near), Question(), near)


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


def tpe(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Points that Optuna's tree-structured Parzen estimator suggests, some at a time, and then neighbours of the best.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization (NIPS 2011), section 4.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    space = asker.space
    least, most = (math.floor(share * space.num_points) for share in TRIAL_FRACTIONS)
    num_points = min(max(least, min(USUAL_TRIALS, most), LEAST_TRIALS), space.num_points)
    race = Race(asker, workload, Question() if space.is_training else Question(tolerance=ROUGH_TOLERANCE))
    sizes = {name: len(values) for name, values in space.vary.items()}
    spread = _spread(space.num_points, math.ceil(num_points * SPREAD_FRACTION))
    _ask_suggested(race, sizes, spread, math.ceil(num_points * MODEL_FRACTION))
    while left := num_points - len(race.answers):
        near_by = dict.fromkeys(other for index in race.best for other in _one_setting_away(index, sizes))
        new = [index for index in near_by if index not in race.answers]
        if not new:
            break
        race.ask(new[: min(left, BATCH)])
    return race.answers if space.is_training else _exactly(race)


def _ask_suggested(race: Race, sizes: dict[str, int], spread: list[int], num_trials: int) -> None:
    """Ask points that are spread out, and then what Optuna suggests from their answers and its own trials'."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=_sampler(optuna, race.asker.space.seed))
    for index in spread:
        study.enqueue_trial(_positions(index, sizes))
    marks: dict[int, float | None] = {}
    num_trials += len(spread)
    for first in range(0, num_trials, BATCH):
        trials = [study.ask() for _ in range(min(BATCH, num_trials - first))]
        suggested = [_index(trial, sizes) for trial in trials]
        new = [index for index in dict.fromkeys(suggested) if index not in race.answers]
        marks |= dict.fromkeys(new, race.ask(new))
        known = [value for value in map(race.score, race.answers) if math.isfinite(value)]
        worst = min(known, default=0.0)
        for trial, index in zip(trials, suggested, strict=True):
            study.tell(trial, _told(race, index, marks[index], worst))


def _one_setting_away(index: int, sizes: dict[str, int]) -> Iterator[int]:
    """The points that differ from one in a single setting, the last name's first."""
    stride = 1
    for size in reversed(sizes.values()):
        own = index // stride % size
        yield from (index + (other - own) * stride for other in range(size) if other != own)
        stride *= size


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
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)


def _positions(index: int, sizes: dict[str, int]) -> dict[str, int]:
    """The inverse of `_index`."""
    found = {}
    for name, size in reversed(sizes.items()):
        index, found[name] = divmod(index, size)
    return found


def _index(trial: Any, sizes: dict[str, int]) -> int:
    """The point that a trial suggests; the last name changes fastest."""
    index = 0
    for name, size in sizes.items():
        index = index * size + int(trial.suggest_categorical(name, list(range(size))))
    return index


STRATEGIES: dict[str, Strategy] = {"exhaustive": exhaustive, "halving": halving, "tpe": tpe}
