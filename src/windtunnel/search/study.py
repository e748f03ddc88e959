"""A search from its space to what was found: which points are asked what, in which order, and what is kept."""

import hashlib
import math
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from windtunnel.errors import InputError, did_you_mean
from windtunnel.search.asker import Asker, Count, Progress
from windtunnel.search.confidence import confidence_above, margin
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.executors import ExecutorName, Workers
from windtunnel.search.finalists import most_promising
from windtunnel.search.scores import objectives_of, score, surely
from windtunnel.search.space.space import Point, Space, point_at, workload_names
from windtunnel.search.store import Store
from windtunnel.search.strategies import STRATEGIES

SURE = 0.95
"""Confidence that the best point beats the next at which no further seeds are run."""


@dataclass(frozen=True)
class Means:
    """How a search is run; its answers do not depend on it."""

    executor: ExecutorName = "here"
    num_workers: int = 1
    address: str | None = None
    progress: Progress | None = None

    def reporting(self, progress: Progress | None) -> "Means":
        """The same, telling `progress` how far it is."""
        return replace(self, progress=progress)


HERE = Means()


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found under one workload."""

    workload: str | None
    evaluations: dict[int, Evaluation]
    """Point -> what it came to with the whole first stream; the points that were asked, refused ones among them."""
    seeds: dict[int, list[Evaluation]]
    """Point -> the same for every stream, of those that met more than the first: finalists, and of an exhaustive search
    those on the frontier and the best with each setting."""
    ranking: list[int]
    """The points that hold the limits, best first: finalists by the lower bound of the objective, then the others."""
    num_finalists: int = 0

    @property
    def num_streams(self) -> int:
        return max((len(runs) for runs in self.seeds.values()), default=1)

    def runs(self, index: int) -> list[Evaluation]:
        """A point's answers, one for each stream that it met."""
        return self.seeds.get(index, [self.evaluations[index]])

    def mean(self, index: int) -> Evaluation:
        """A point's answer with the means of its figures over the streams that it met."""
        runs = self.runs(index)
        shared = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
        figures = {name: fmean(run.figures[name] for run in runs) for name in shared}
        holds = all(run.holds for run in runs)
        return msgspec.structs.replace(runs[0], figures=figures, load=fmean(run.load for run in runs), holds=holds)

    def margin(self, index: int, name: str) -> float | None:
        """How far the mean of a figure over all streams there could be may lie from this one, on either side with 95%
        confidence; None of a point that met a single stream.
        """
        values = [run.figures[name] for run in self.runs(index) if name in run.figures]
        return margin(values) if len(values) == len(self.runs(index)) else None

    @property
    def refusals(self) -> dict[str, list[int]]:
        """Why points cannot be -> which."""
        found: dict[str, list[int]] = {}
        for index, evaluation in self.evaluations.items():
            if evaluation.refused:
                found.setdefault(evaluation.refused, []).append(index)
        return found


@dataclass(frozen=True, eq=False)
class Study:
    """A finished search."""

    space: Space
    found: list[Found]
    """One for each workload."""
    count: "Count"

    def point(self, index: int) -> Point:
        """The point at a position."""
        return point_at(self.space, index)


def search(space: Space, store: Store, means: Means = HERE) -> Study:
    """Search `space`.

    Args:
        space: what, and how.
        store: answers are looked up there and kept there.
        means: where it runs.

    Raises:
        InputError: the objective is unknown, or no point can be.
    """
    known = objectives_of(space)
    if space.objective not in known:
        hint = did_you_mean(space.objective, known, f"known: {', '.join(known)}")
        raise InputError(f"there is no objective {space.objective!r}", hint)
    name = hashlib.sha256(msgspec.json.encode(space)).hexdigest()
    likely_known = store.is_finished(name)
    store.begin(name, msgspec.json.encode(space).decode())
    with Workers(space, means.executor, means.num_workers, means.address, at_once=not likely_known) as workers:
        asker = Asker(space, store, workers, means.progress)
        try:
            found = [_search_one(asker, workload) for workload in workload_names(space)]
        except InputError:
            store.drop(name)
            raise
    store.finish(name)
    return Study(space, found, asker.count)


def _search_one(asker: "Asker", workload: str | None) -> Found:
    space = asker.space
    evaluations = STRATEGIES[space.strategy](asker, workload)
    asker.check_some(workload, evaluations)
    scored = {index: score(one, space.objective) for index, one in evaluations.items()}
    ranking = sorted((index for index in scored if scored[index] > -math.inf), key=lambda at: (-scored[at], at))
    finalists = ranking[: space.finalists]
    seeds = _finalists(asker, workload, finalists, evaluations)
    sure = {index: surely(seeds[index], space.objective) for index in finalists}
    first = sorted(finalists, key=lambda index: (-sure[index], index))
    num_streams = len(seeds[first[0]]) if first else 1
    if space.strategy == "exhaustive" and num_streams > 1:
        others = [index for index in most_promising(space, evaluations) if index not in seeds]
        seeds |= {index: [evaluations[index]] for index in others}
        for seed in range(1, num_streams):
            _meet(asker, workload, seeds, others, seed)
    return Found(workload, evaluations, seeds, [*first, *ranking[len(first) :]], len(first))


def _finalists(
    asker: "Asker", workload: str | None, finalists: list[int], evaluations: dict[int, Evaluation]
) -> dict[int, list[Evaluation]]:
    """The finalists with further streams of requests, until the best is surely better than the next."""
    space = asker.space
    seeds = {index: [evaluations[index]] for index in finalists}
    for seed in range(1, space.finalist_seeds):
        _meet(asker, workload, seeds, finalists, seed)
        if seed >= 2 and len(finalists) > 1 and _is_sure(seeds, space.objective):
            break
    return seeds


def _meet(
    asker: "Asker", workload: str | None, seeds: dict[int, list[Evaluation]], points: list[int], seed: int
) -> None:
    """Let points meet one more stream."""
    near = {index: seeds[index][0].load for index in points}
    answers = asker.ask(workload, points, Question(seed=seed), near)
    for index in points:
        seeds[index].append(answers[index])


def _is_sure(seeds: dict[int, list[Evaluation]], objective: str) -> bool:
    first, second, *_ = sorted(seeds, key=lambda index: (-surely(seeds[index], objective), index))
    sure = confidence_above(*([score(one, objective) for one in seeds[at]] for at in (first, second)))
    return sure is not None and sure >= SURE
