"""Answers of a finished search: the frontier, the worth of each setting, the cost of another workload's optimum, and
the full runs of the best points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from windtunnel.metrics.limits import limits_from, slo_of
from windtunnel.search.asker import Asker
from windtunnel.search.capacity.capacity import TOLERANCE
from windtunnel.search.capacity.load import at_load, own_load
from windtunnel.search.confidence import confidence_above, margin
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.executors import start_workers
from windtunnel.search.recommend import AS_IT_IS
from windtunnel.search.scores import best_by_value, label_of, score, undominated
from windtunnel.search.space.space import CHANGE, Space, point_at
from windtunnel.search.store import Store
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.simulate import simulate
from windtunnel.training.job import TrainingJob
from windtunnel.training.step import TrainingResult, simulate_training

if TYPE_CHECKING:
    import pyarrow as pa


def frontier(outcome: SearchOutcome, objectives: Sequence[str]) -> list[int]:
    """Return the points that no other beats in all objectives, best in the first objective first; of equals the first.

    Where points met several streams of requests, only those points count, by their means. A point without one of the
    figures is not returned.
    """
    means = {index: outcome.mean(index) for index in outcome.seeds if outcome.num_streams > 1}
    answers = means or {index: outcome.evaluations[index] for index in outcome.ranking}
    return undominated({index: tuple(score(answer, name) for name in objectives) for index, answer in answers.items()})


def best_by_objective(outcome: SearchOutcome, objectives: Sequence[str]) -> dict[str, int]:
    """Objective -> the best point in it; objectives without a figure are left out."""
    best = {}
    for name in objectives:
        known = outcome.comparable
        scored = [(score(known[index], name), -index) for index in outcome.ranking if index in known]
        if scored and max(scored)[0] > -math.inf:
            best[name] = -max(scored)[1]
    return best


@dataclass(frozen=True)
class Worth:
    """The worth of one value of a setting."""

    share: float
    """Score of the best point with the value over the best score of all, at most 1; 0: none holds the limits. For an
    objective that is better when smaller, the best of all over the best with the value."""
    margin: float | None
    """Half-width of the 95% confidence interval of the mean over all streams; None for a single stream."""


def worths(space: Space, outcome: SearchOutcome) -> dict[str, dict[str, Worth]]:
    """Name in `vary` -> value -> its worth, names with the costliest worst value first.

    Worths count the streams that all of these best points met, for values that some evaluated point has.
    """
    if not outcome.ranking:
        return {}
    scores = {index: score(outcome.mean(index), space.objective) for index in outcome.seeds if outcome.num_streams > 1}
    first = dict.fromkeys(outcome.evaluations, -math.inf)
    first |= {index: score(evaluation, space.objective) for index, evaluation in outcome.comparable.items()}
    best_points = best_by_value(space, first)
    known = best_by_value(space, scores) if scores else best_points
    best = max(scores or first, key=lambda index: (scores or first)[index])
    table = {
        name: {
            value: _worth(outcome, space.objective, known.get(name, {}).get(value, index), best)
            for value, index in values.items()
        }
        for name, values in best_points.items()
    }
    return dict(sorted(table.items(), key=lambda item: min(worth.share for worth in item[1].values())))


def _worth(outcome: SearchOutcome, objective: str, index: int, best: int) -> Worth:
    """Compare two points stream by stream, as far as both met the same streams."""
    pairs = zip(outcome.runs(index), outcome.runs(best), strict=False)
    shares = [ratio(score(run, objective), score(other, objective)) for run, other in pairs]
    return Worth(min(fmean(shares), 1.0), margin(shares))


def ratio(value: float, best: float) -> float:
    """Return a score as a share of the best one: at most 1, and 0 where there is none."""
    if not math.isfinite(value):
        return 0.0
    if best == 0:
        return 1.0
    return value / best if best > 0 else best / value


def confidence(outcome: SearchOutcome, objective: str, rank: int = 0) -> float | None:
    """Return the confidence that a point of the ranking beats the next; None without enough streams or a next point."""
    if outcome.num_finalists < rank + 2:
        return None
    return confidence_between(outcome, objective, *outcome.ranking[rank : rank + 2])


def confidence_between(outcome: SearchOutcome, objective: str, first: int, second: int) -> float | None:
    """Return the confidence that one point beats another; None where they did not meet the same several streams."""
    scores = [[score(run, objective) for run in outcome.runs(index)] for index in (first, second)]
    if len(scores[0]) != len(scores[1]) or not all(math.isfinite(value) for runs in scores for value in runs):
        return None
    return confidence_above(*scores)


def misconfiguration(study: Study, store: Store) -> list[list[float]]:
    """Score `[i][j]` of workload i's best point under j, as a share of j's best; 0: it breaks the limits there.

    Among points that are equally good for i, the best one under j counts: a setting without effect on i costs nothing.
    """
    space = study.space
    rows = []
    with start_workers(space) as run_chunks:
        asker = Asker(space, store, run_chunks)
        best = [each.evaluations[each.ranking[0]] for each in study.outcomes]
        for outcome in study.outcomes:
            equal = equally_good(study, outcome)
            row = []
            for other, theirs in zip(study.outcomes, best, strict=True):
                known = other.comparable
                missing = [index for index in equal if index not in known]
                question = Question(lengthens=theirs.is_lengthened)
                answers = known | (asker.ask(other.workload, missing, question) if missing else {})
                reached = max(score(answers[index], space.objective) for index in equal)
                row.append(min(ratio(reached, score(theirs, space.objective)), 1.0))
            rows.append(row)
    return rows


def equally_good(study: Study, outcome: SearchOutcome) -> list[int]:
    """Return the points with the best score under the first stream of requests."""
    best = score(outcome.evaluations[outcome.ranking[0]], study.space.objective)
    return [index for index in outcome.ranking if score(outcome.evaluations[index], study.space.objective) == best]


def scenario_of(study: Study, outcome: SearchOutcome, index: int) -> Scenario:
    """Return the scenario of a point at its load, its SLO the limits; simulated alone it gives the same figures."""
    scenario = Evaluator(study.space).deployed(study.point(index), outcome.workload).scenario
    if study.space.limits:
        scenario = msgspec.structs.replace(scenario, slo=slo_of(limits_from(study.space.limits)))
    if study.space.load == "given":
        return scenario
    answer, usual_load = outcome.evaluations[index], own_load(scenario.workload, study.space.seed)
    workload = at_load(scenario.workload, answer.load, usual_load)
    if workload.num_requests is not None:
        workload = msgspec.structs.replace(workload, num_requests=answer.stream_requests or workload.num_requests)
    return msgspec.structs.replace(scenario, workload=workload, seed=study.space.seed)


def job_of(study: Study, index: int) -> TrainingJob:
    """Return the training job of a point; simulated alone it gives the same figures."""
    return TrainingEvaluator(study.space).job(index)


def why(study: Study, outcome: SearchOutcome, points: Sequence[int]) -> list[tuple[int, Result | TrainingResult]]:
    """Run points in full: their bounds, where their time goes, and how certain they are."""
    if study.space.is_training:
        return [(index, simulate_training(job_of(study, index))) for index in points]
    return [(index, simulate(scenario_of(study, outcome, index))) for index in points]


def gains_of(study: Study, outcome: SearchOutcome) -> dict[int, float]:
    """Return point -> gain in the objective over the deployment as it is; empty where no changes are tried."""
    present = next((i for i in outcome.ranking if study.point(i).choice.get(CHANGE) == AS_IT_IS), None)
    if present is None:
        return {}
    scores = {index: score(outcome.mean(index), study.space.objective) for index in outcome.ranking}
    return {index: value / scores[present] - 1 for index, value in scores.items()}


def present_unless_gain(study: Study, outcome: SearchOutcome) -> int | None:
    """Return the deployment as it is where no change gains more than half the distance of neighbouring loads; else
    None."""
    gains = gains_of(study, outcome)
    if not gains or gains[outcome.ranking[0]] > TOLERANCE / 2:
        return None
    return next(index for index in gains if study.point(index).choice[CHANGE] == AS_IT_IS)


def idle_changes(study: Study, outcome: SearchOutcome) -> list[int]:
    """Return the changes to a deployment that gain and lose nothing."""
    gains = gains_of(study, outcome)
    return [index for index, gain in gains.items() if not gain and study.point(index).choice[CHANGE] != AS_IT_IS]


def points_table(study: Study) -> "pa.Table":
    """Return one row per point, workload and stream that the point met: its choice, its answer, its figures."""
    import pyarrow as pa

    rows = [
        (outcome, index, stream, evaluation)
        for outcome in study.outcomes
        for index in outcome.evaluations
        for stream, evaluation in enumerate(outcome.runs(index))
    ]
    columns: dict[str, Any] = {
        "workload": [outcome.workload for outcome, *_ in rows],
        "point": [index for _, index, *_ in rows],
        "stream": [stream for *_, stream, _ in rows],
    }
    return pa.table(columns | answer_columns(study.space, [(index, evaluation) for _, index, _, evaluation in rows]))


def answer_columns(space: Space, rows: Sequence[tuple[int, Evaluation]]) -> dict[str, Any]:
    """Return a point's choice (as text), its answer and its figures in each row, as columns."""
    columns: dict[str, Any] = {}
    choices = [point_at(space, index).choice for index, _ in rows]
    for name in space.vary:
        columns[f"vary.{name}"] = [label_of(choice[name]) for choice in choices]
    of_runs = ("beaten_by", "num_runs", "num_requests", "stream_requests", "is_lengthened", "drift")
    for column in ("holds", "load", "limited_by", "refused", *of_runs):
        columns[column] = [getattr(evaluation, column) for _, evaluation in rows]
    for name in sorted({name for _, evaluation in rows for name in evaluation.figures}):
        columns[name] = np.array([evaluation.figures.get(name, np.nan) for _, evaluation in rows])
    return columns
