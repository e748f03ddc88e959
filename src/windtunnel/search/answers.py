"""Answers of a finished search: the frontier, the worth of each setting, the cost of another workload's optimum, the
devices that a load takes, and the full runs of the best points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from windtunnel.search.asker import Asker
from windtunnel.search.capacity.load import at_load, own_load
from windtunnel.search.confidence import confidence_above, margin
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Question
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.executors import Workers
from windtunnel.search.finalists import best_by_value, undominated
from windtunnel.search.scores import score
from windtunnel.search.space.space import Space, point_at
from windtunnel.search.store import Store
from windtunnel.search.study import Found, Study
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.simulate import simulate
from windtunnel.training.job import TrainingJob
from windtunnel.training.step import TrainingResult, simulate_training


def frontier(found: Found, objectives: Sequence[str]) -> list[int]:
    """The points that no other one beats in all objectives, best in the first one first; of equal ones the first.

    Where points met more streams of requests than one, it is of those, by their means; a point without one of the
    figures is not on it.
    """
    means = {index: found.mean(index) for index in found.seeds if found.num_streams > 1}
    answers = means or {index: found.evaluations[index] for index in found.ranking}
    return undominated(
        {index: tuple(score(evaluation, name) for name in objectives) for index, evaluation in answers.items()}
    )


def best_by_objective(found: Found, objectives: Sequence[str]) -> dict[str, int]:
    """Objective -> the point that is best in it; objectives that no point has a figure for are left out."""
    best = {}
    for name in objectives:
        scored = [(score(found.evaluations[index], name), -index) for index in found.ranking]
        if scored and max(scored)[0] > -math.inf:
            best[name] = -max(scored)[1]
    return best


@dataclass(frozen=True)
class Worth:
    """The worth of one value of a setting."""

    share: float
    """The score of the best point with it over the best of all, at most 1; 0: none holds the limits. Of an objective
    that is better when smaller it is the best of all over the best with that value."""
    margin: float | None
    """Half-width of the 95% confidence interval of the mean over all streams; None for a single stream."""


def sensitivity(space: Space, found: Found) -> dict[str, dict[str, float]]:
    """Name in `vary` -> value -> the share of the best score that it is worth; see `worths`."""
    return {
        name: {value: worth.share for value, worth in values.items()} for name, values in worths(space, found).items()
    }


def worths(space: Space, found: Found) -> dict[str, dict[str, Worth]]:
    """Name in `vary` -> value -> what it is worth; names by how much their worst value costs.

    Over the streams that all of these best points met; of values that some point that was asked has.
    """
    if not found.ranking:
        return {}
    scores = {index: score(found.mean(index), space.objective) for index in found.seeds if found.num_streams > 1}
    first = {index: score(evaluation, space.objective) for index, evaluation in found.evaluations.items()}
    asked = best_by_value(space, first)
    known = best_by_value(space, scores) if scores else asked
    best = max(scores or first, key=lambda index: (scores or first)[index])
    table = {
        name: {
            value: _worth(found, space.objective, known.get(name, {}).get(value, index), best)
            for value, index in values.items()
        }
        for name, values in asked.items()
    }
    return dict(sorted(table.items(), key=lambda item: min(worth.share for worth in item[1].values())))


def _worth(found: Found, objective: str, index: int, best: int) -> Worth:
    """Stream by stream, as far as both met the same ones."""
    pairs = zip(found.runs(index), found.runs(best), strict=False)
    shares = [ratio(score(run, objective), score(other, objective)) for run, other in pairs]
    return Worth(min(fmean(shares), 1.0), margin(shares))


def ratio(value: float, best: float) -> float:
    """A score as a share of the best one: at most 1, and 0 where there is none."""
    if not math.isfinite(value):
        return 0.0
    if best == 0:
        return 1.0
    return value / best if best > 0 else best / value


def confidence(found: Found, objective: str, rank: int = 0) -> float | None:
    """The confidence that a point of the ranking is better than the next; None without streams enough or a next one."""
    if found.num_finalists < rank + 2:
        return None
    first, second = (found.seeds[index] for index in found.ranking[rank : rank + 2])
    scores = [[score(run, objective) for run in runs] for runs in (first, second)]
    if len(scores[0]) != len(scores[1]) or not all(math.isfinite(value) for runs in scores for value in runs):
        return None
    return confidence_above(*scores)


def misconfiguration(study: Study, store: Store) -> list[list[float]]:
    """`[i][j]` what the best point of workload i is worth under workload j, as a share of that one's best; 0: there it
    does not hold the limits.

    Of points that are equally good for i, the one that is best under j: a setting that i never feels costs nothing.
    """
    space = study.space
    rows = []
    with Workers(space) as workers:
        asker = Asker(space, store, workers)
        best = [other.evaluations[other.ranking[0]] for other in study.found]
        for found in study.found:
            equal = equally_good(study, found)
            row = []
            for other, theirs in zip(study.found, best, strict=True):
                missing = [index for index in equal if index not in other.evaluations]
                answers = other.evaluations | (asker.ask(other.workload, missing, Question()) if missing else {})
                reached = max(score(answers[index], space.objective) for index in equal)
                row.append(min(ratio(reached, score(theirs, space.objective)), 1.0))
            rows.append(row)
    return rows


def equally_good(study: Study, found: Found) -> list[int]:
    """The points that score as the best one does with the first stream of requests, it among them."""
    best = score(found.evaluations[found.ranking[0]], study.space.objective)
    return [index for index in found.ranking if score(found.evaluations[index], study.space.objective) == best]


@dataclass(frozen=True)
class FleetSize:
    """Copies of a deployment that together take a load."""

    index: int
    copies: int
    devices: int
    usd_per_hour: float | None
    headroom_fraction: float
    """Fraction of the copies' total load that is left."""


def fleets(found: Found, load: float, limit: int) -> list[FleetSize]:
    """The cheapest ways to take `load` with copies of one point each, the least money (or the fewest devices) first.

    Copies share the load evenly, each at no more than it sustains alone. Requests that are dealt out in turn arrive
    more evenly at each copy than a stream of their own would, so that the number is on the safe side. What a point
    sustains is the mean over the streams of requests that it met.
    """
    options = []
    for index in found.ranking:
        mean = found.mean(index)
        copies = math.ceil(load / mean.load * (1 - 1e-9))
        figures = mean.figures
        price = figures.get("usd_per_hour")
        devices = round(figures["devices"])
        cost = None if price is None else price * copies
        options.append(FleetSize(index, copies, devices * copies, cost, 1 - load / (copies * mean.load)))
    options.sort(key=lambda fleet: (math.inf if fleet.usd_per_hour is None else fleet.usd_per_hour, fleet.devices))
    return options[:limit]


def scenario_of(study: Study, found: Found, index: int) -> Scenario:
    """The scenario that a point was found with, at its load: simulated alone it gives the same figures."""
    point = point_at(study.space, index)
    scenario = Evaluator(study.space).deployed(point, found.workload).scenario
    if study.space.load == "given":
        return scenario
    usual_load = own_load(scenario.workload, study.space.seed)
    workload = at_load(scenario.workload, found.evaluations[index].load, usual_load)
    return msgspec.structs.replace(scenario, workload=workload, seed=study.space.seed)


def job_of(study: Study, index: int) -> TrainingJob:
    """The training job of a point: simulated alone it gives the same figures."""
    return TrainingEvaluator(study.space).job(index)


def why(study: Study, found: Found, limit: int) -> list[tuple[int, Result | TrainingResult]]:
    """The best points' runs in full: what bounds them, where their time goes, how sure it is."""
    if study.space.is_training:
        return [(index, simulate_training(job_of(study, index))) for index in found.ranking[:limit]]
    return [(index, simulate(scenario_of(study, found, index))) for index in found.ranking[:limit]]
