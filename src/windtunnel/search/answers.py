"""What a finished search says: the frontier, what each setting is worth, what another workload's optimum costs, how
many devices a load takes, and why a point is as good as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from windtunnel.engine.run import simulate
from windtunnel.engine.serving import Result
from windtunnel.engine.training import TrainingResult, simulate_training
from windtunnel.search.confidence import confidence_above
from windtunnel.search.evaluate import Evaluator, Question
from windtunnel.search.executors import Workers
from windtunnel.search.load import at_load, own_load
from windtunnel.search.optimize import Asker, Found, Study
from windtunnel.search.scores import score
from windtunnel.search.space import Space, point_at
from windtunnel.search.store import Store
from windtunnel.search.training import TrainingEvaluator
from windtunnel.spec.scenario import Scenario
from windtunnel.spec.training import TrainingJob


def frontier(found: Found, objectives: Sequence[str]) -> list[int]:
    """The points that no other one beats in all objectives, best in the first one first; of equal ones the first.

    A point without one of the figures is not on it.
    """
    scores = {index: tuple(score(found.evaluations[index], name) for name in objectives) for index in found.ranking}
    known = {index: of for index, of in scores.items() if all(map(math.isfinite, of))}
    kept: list[int] = []
    for index in sorted(known, key=lambda at: (*(-value for value in known[at]), at)):
        if not any(all(a >= b for a, b in zip(known[other], known[index], strict=True)) for other in kept):
            kept.append(index)
    return kept


def best_by_objective(found: Found, objectives: Sequence[str]) -> dict[str, int]:
    """Objective -> the point that is best in it; objectives that no point has a figure for are left out."""
    best = {}
    for name in objectives:
        scored = [(score(found.evaluations[index], name), -index) for index in found.ranking]
        if scored and max(scored)[0] > -math.inf:
            best[name] = -max(scored)[1]
    return best


def sensitivity(space: Space, found: Found) -> dict[str, dict[str, float]]:
    """Name in `vary` -> value -> the best score that any point with that value has, over the best of all; 0 where none
    holds the limits. Names by how much their worst value costs.

    Of an objective that is better when smaller it is the best of all over the best with that value.
    """
    if not found.ranking:
        return {}
    scores = {index: score(one, space.objective) for index, one in found.evaluations.items()}
    whole = max(scores.values())
    table: dict[str, dict[str, float]] = {}
    for name, values in space.vary.items():
        if len(values) < 2:
            continue
        reached = dict.fromkeys((label_of(value) for value in values), -math.inf)
        for index, value in scores.items():
            label = label_of(point_at(space, index).choice[name])
            reached[label] = max(reached[label], value)
        table[name] = {label: ratio(value, whole) for label, value in reached.items()}
    return dict(sorted(table.items(), key=lambda item: min(item[1].values())))


def ratio(value: float, best: float) -> float:
    """A score as a share of the best one: at most 1, and 0 where there is none."""
    if not math.isfinite(value):
        return 0.0
    if best == 0:
        return 1.0
    return value / best if best > 0 else best / value


def label_of(value: object) -> str:
    """A value of `vary` as one word or a few."""
    if isinstance(value, str):
        return value
    return "default" if value is None else msgspec.json.encode(value).decode()


def confidence(found: Found, objective: str, rank: int = 0) -> float | None:
    """The confidence that a point of the ranking is better than the next; None without streams enough or a next one."""
    if len(found.ranking) < rank + 2:
        return None
    first, second = (found.seeds.get(index, []) for index in found.ranking[rank : rank + 2])
    scores = [[score(one, objective) for one in runs] for runs in (first, second)]
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
        best = [one.evaluations[one.ranking[0]] for one in study.found]
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
    wanted = score(found.evaluations[found.ranking[0]], study.space.objective)
    return [index for index in found.ranking if score(found.evaluations[index], study.space.objective) == wanted]


@dataclass(frozen=True)
class Fleet:
    """Copies of a deployment that together take a load."""

    index: int
    copies: int
    devices: int
    usd_per_hour: float | None
    headroom_fraction: float
    """Of their load together, what is left."""


def fleets(found: Found, load: float, most: int) -> list[Fleet]:
    """The cheapest ways to take `load` with copies of one point each, the least money (or the fewest devices) first.

    Copies share the load evenly, each at no more than it sustains alone. Requests that are dealt out in turn arrive
    more evenly at each copy than a stream of their own would, so that the number is on the safe side.
    """
    options = []
    for index in found.ranking:
        one = found.evaluations[index]
        copies = math.ceil(load / one.load * (1 - 1e-9))
        figures = one.figures
        price = figures.get("usd_per_hour")
        devices = round(figures["devices"])
        cost = None if price is None else price * copies
        options.append(Fleet(index, copies, devices * copies, cost, 1 - load / (copies * one.load)))
    options.sort(key=lambda fleet: (math.inf if fleet.usd_per_hour is None else fleet.usd_per_hour, fleet.devices))
    return options[:most]


def scenario_of(study: Study, found: Found, index: int) -> Scenario:
    """The scenario that a point was found with, at its load: simulated alone it gives the same figures."""
    point = point_at(study.space, index)
    scenario = Evaluator(study.space).deployed(point, found.workload).scenario
    if study.space.load == "given":
        return scenario
    own = own_load(scenario.workload, study.space.seed)
    workload = at_load(scenario.workload, found.evaluations[index].load, own)
    return msgspec.structs.replace(scenario, workload=workload, seed=study.space.seed)


def job_of(study: Study, index: int) -> TrainingJob:
    """The training job of a point: simulated alone it gives the same figures."""
    return TrainingEvaluator(study.space).job(index)


def why(study: Study, found: Found, most: int) -> list[tuple[int, Result | TrainingResult]]:
    """The best points' runs in full: what bounds them, where their time goes, how sure it is."""
    if study.space.is_training:
        return [(index, simulate_training(job_of(study, index))) for index in found.ranking[:most]]
    return [(index, simulate(scenario_of(study, found, index))) for index in found.ranking[:most]]
