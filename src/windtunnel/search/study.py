"""Run a search: evaluate points by the space's strategy, finalists with further streams; watch one by its store."""

import hashlib
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from windtunnel.errors import InputError, check_known
from windtunnel.limits import check_size
from windtunnel.search.asker import NUM_BEST, Asker, Count
from windtunnel.search.capacity.load import burst_of, is_drawn
from windtunnel.search.confidence import confidence_above, lower_bound, margin
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.executors import HERE, Means, start_workers
from windtunnel.search.scores import most_promising, objectives_of, ranked, score, sure_score
from windtunnel.search.space.space import STRATEGIES, Point, Space, point_at, scenario_at, workload_names
from windtunnel.search.store import Store
from windtunnel.units import format_count

SURE = 0.95
"""Confidence that the best point beats the next; no further seeds are run from there on."""


def _mean(values: Sequence[float]) -> float:
    """Return the mean, which is no more than the largest value: the quotient of three prices of 2.95 alone is."""
    return min(max(fmean(values), min(values)), max(values))


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """The answers of a search under one workload."""

    workload: str | None
    evaluations: dict[int, Evaluation]
    """Point -> its answer with the whole first stream, lengthened for the best points; refusals included."""
    seeds: dict[int, list[Evaluation]]
    """Point -> its answers, one per stream, for points that met several streams: the finalists and, in an exhaustive
    search, points on the frontier and the best point with each setting."""
    ranking: list[int]
    """Points that hold the limits, best first: finalists by the lower bound of the objective, then the others by it."""
    num_finalists: int = 0

    @property
    def comparable(self) -> dict[int, Evaluation]:
        """The answers with lengthened streams, where there are some, else all: loads of short streams are too high."""
        longer = {index: answer for index, answer in self.evaluations.items() if answer.is_lengthened}
        return longer or self.evaluations

    @property
    def num_streams(self) -> int:
        return max((len(runs) for runs in self.seeds.values()), default=1)

    def runs(self, index: int) -> list[Evaluation]:
        """Return a point's answers, one for each stream that it met."""
        return self.seeds.get(index, [self.evaluations[index]])

    def mean(self, index: int) -> Evaluation:
        """Return a point's answer with the means of its figures over the streams that it met."""
        runs = self.runs(index)
        shared = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
        figures = {name: _mean([run.figures[name] for run in runs]) for name in shared}
        holds = all(run.holds for run in runs)
        return msgspec.structs.replace(runs[0], figures=figures, load=_mean([run.load for run in runs]), holds=holds)

    def margin(self, index: int, name: str) -> float | None:
        """Half-width of the interval, with 95% confidence on either side, around the mean of a figure over all streams;
        None for a point that met a single stream.
        """
        values = [run.figures[name] for run in self.runs(index) if name in run.figures]
        return margin(values) if len(values) == len(self.runs(index)) else None

    def burst(self, index: int) -> tuple[int, int] | None:
        """What `burst_of` returns for the first of a point's streams that is over too soon."""
        spans = ((run.stream_requests, run.figures.get("stream_over_e2e", math.inf)) for run in self.runs(index))
        return next(filter(None, (burst_of(*span) for span in spans)), None)

    def at_least(self, index: int) -> float | None:
        """Lower bound of a point's load over all streams; None for a single one, and for a burst."""
        return None if self.burst(index) else lower_bound([run.load for run in self.runs(index)])

    @property
    def refusals(self) -> dict[str, list[int]]:
        """Reason of a refusal -> the points that were refused for it."""
        reasons: dict[str, list[int]] = {}
        for index, evaluation in self.evaluations.items():
            if evaluation.refused:
                reasons.setdefault(evaluation.refused, []).append(index)
        return reasons


@dataclass(frozen=True, eq=False)
class Study:
    """A finished search."""

    space: Space
    outcomes: list[SearchOutcome]
    """The outcome under each workload."""
    count: "Count"

    def point(self, index: int) -> Point:
        return point_at(self.space, index)


class InterruptedSearchError(KeyboardInterrupt):
    """Ctrl-C in a search; `study` has the answers so far."""

    def __init__(self, study: Study) -> None:
        self.study = study


def search(space: Space, store: Store, means: Means = HERE) -> Study:
    """Search `space` by its strategy.

    Raises:
        InputError: the objective is unknown, or every point is refused.
        InterruptedSearchError: Ctrl-C.
    """
    check_known(space.objective, objectives_of(space), f"there is no objective {space.objective!r}")
    check_size(points=space.num_points)
    name = hashlib.sha256(msgspec.json.encode(space)).hexdigest()
    likely_known = store.is_finished(name)
    store.begin(name, msgspec.json.encode(space).decode())
    with start_workers(space, means, at_once=not likely_known) as run_chunks:
        asker = Asker(space, store, run_chunks, means.progress)
        try:
            outcomes = [_search_workload(asker, workload) for workload in workload_names(space)]
        except InputError:
            store.drop(name)
            raise
        except KeyboardInterrupt:
            outcomes = [outcome_of(space, workload, met, {}) for workload, met in asker.first_streams.items()]
            raise InterruptedSearchError(Study(space, outcomes, asker.count)) from None
    store.finish(name)
    return Study(space, outcomes, asker.count)


def _search_workload(asker: Asker, workload: str | None) -> SearchOutcome:
    """Evaluate the points under one workload, then the finalists with further streams."""
    space, strategy = asker.space, STRATEGIES.get(asker.space.strategy)
    evaluations: dict[int, Evaluation] = STRATEGIES.call(space.strategy, "evaluate", dict, asker, workload)
    if not evaluations:
        raise InputError(f"the search strategy {space.strategy!r} evaluated no point", "return at least one")
    asker.check_some(workload, evaluations)
    if strategy.IS_EXHAUSTIVE and not space.is_training and space.load == "capacity":
        evaluations |= _lengthened(asker, workload, evaluations)
    finalists = best_first(evaluations, space.objective)[: space.finalists]
    seeds = _finalists(asker, workload, finalists, evaluations)
    outcome = outcome_of(space, workload, evaluations, seeds)
    if not strategy.IS_EXHAUSTIVE or outcome.num_streams == 1:
        return outcome
    others = [index for index in most_promising(space, outcome.comparable) if index not in seeds]
    seeds |= {index: [evaluations[index]] for index in others}
    for seed in range(1, outcome.num_streams):
        _meet(asker, workload, seeds, others, seed)
    return outcome_of(space, workload, evaluations, seeds)


def _lengthened(asker: Asker, workload: str | None, evaluations: dict[int, Evaluation]) -> dict[int, Evaluation]:
    """Return new answers, with lengthened streams, of the points that count: the best and all as good as the first,
    those on the frontier and the best with each value of a setting. Of requests that are not drawn there are no more:
    no answers."""
    space = asker.space
    scores = {index: score(evaluations[index], space.objective) for index in ranked(evaluations, space.objective)}
    best = [index for index in scores if scores[index] == max(scores.values())]
    best += list(scores)[: max(NUM_BEST, space.finalists)]
    points = list(dict.fromkeys([*best, *most_promising(space, evaluations)]))
    if not points or not is_drawn(scenario_at(space, point_at(space, points[0]).settings, workload).workload):
        return {}
    near = {index: evaluations[index].load for index in points}
    return asker.ask(workload, points, Question(lengthens=True), near)


def best_first(evaluations: dict[int, Evaluation], objective: str) -> list[int]:
    """Return the points that hold the limits: those with lengthened streams first; each part best first."""
    ranking = ranked(evaluations, objective)
    return sorted(ranking, key=lambda index: not evaluations[index].is_lengthened)


def outcome_of(
    space: Space, workload: str | None, evaluations: dict[int, Evaluation], seeds: dict[int, list[Evaluation]]
) -> SearchOutcome:
    """Rank points by what they answered: the finalists first, each by the lower bound of the objective."""
    ranking = best_first(evaluations, space.objective)
    sure = {index: sure_score(seeds.get(index, [evaluations[index]]), space.objective) for index in ranking}
    finalists, others = ranking[: space.finalists], ranking[space.finalists :]
    order = sorted(finalists, key=lambda index: (-sure[index], index))
    order += sorted(others, key=lambda index: (not evaluations[index].is_lengthened, -sure[index], index))
    return SearchOutcome(workload, evaluations, seeds, order, len(finalists))


def _finalists(
    asker: Asker, workload: str | None, finalists: list[int], evaluations: dict[int, Evaluation]
) -> dict[int, list[Evaluation]]:
    """Evaluate the finalists with further streams of requests, until the best is surely better than the next.

    A workload of which nothing is drawn, such as a replayed trace, has one stream.
    """
    space = asker.space
    seeds = {index: [evaluations[index]] for index in finalists}
    for seed in range(1, space.finalist_seeds):
        _meet(asker, workload, seeds, finalists, seed)
        if seed == 1 and all(first.figures == second.figures for first, second in seeds.values()):
            return {index: [first] for index, (first, _) in seeds.items()}
        if seed >= 2 and len(finalists) > 1 and _is_sure(seeds, space.objective):
            break
    return seeds


def _meet(asker: Asker, workload: str | None, seeds: dict[int, list[Evaluation]], points: list[int], seed: int) -> None:
    """Evaluate points with one more stream, as long as each one's first is, and add the answers to `seeds`."""
    near = {index: seeds[index][0].load for index in points}
    for length in sorted({seeds[index][0].stream_requests for index in points}):
        group = [index for index in points if seeds[index][0].stream_requests == length]
        for index, answer in asker.ask(workload, group, Question(seed=seed, num_requests=length or None), near).items():
            seeds[index].append(answer)


def _is_sure(seeds: dict[int, list[Evaluation]], objective: str) -> bool:
    """Whether the best finalist beats the second with confidence `SURE`."""
    first, second, *_ = sorted(seeds, key=lambda index: (-sure_score(seeds[index], objective), index))
    sure = confidence_above(*([score(run, objective) for run in seeds[index]] for index in (first, second)))
    return sure is not None and sure >= SURE


MOST_POINTS = 20_000
"""Largest space that is watched; a key takes a fraction of a millisecond."""


@dataclass(frozen=True)
class Kept:
    """A search as its store records it."""

    name: str
    """Digest of the space."""
    space: Space
    is_done: bool
    number: int
    """Position among the searches of the store in the order in which they began, from 1."""


def kept_searches(path: Path) -> list[Kept]:
    """Read the searches of a store, the last that began first; InputError where it is none, or cannot be read."""
    try:
        with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0) as connection:
            query = "select name, space, is_done, number from searches order by number desc"
            rows = connection.execute(query).fetchall()
        connection.close()
    except sqlite3.Error as error:
        raise InputError(f"{path.name} is no store of searches ({error})") from None
    searches = []
    for name, text, is_done, number in rows:
        try:
            searches.append(Kept(str(name), msgspec.json.decode(text, type=Space), bool(is_done), int(number)))
        except msgspec.MsgspecError:
            continue  # written by another version of windtunnel; this one cannot resume it either
    return searches


class Watched:
    """A space with its answers' keys, to read a store repeatedly; InputError for more than `MOST_POINTS` points."""

    def __init__(self, space: Space) -> None:
        if space.num_points > MOST_POINTS:
            raise InputError(f"the space has {format_count(space.num_points, 'point')}; {MOST_POINTS:,} can be watched")
        self.space = space
        self.refused: dict[str | None, dict[int, Evaluation]] = {}
        self.keys: dict[str | None, dict[int, list[str]]] = {}
        """Workload -> point -> keys of its answers, the one that counts first: with lengthened streams."""
        evaluator = Evaluator(space)
        for workload in workload_names(space):
            refused, keys = self.refused.setdefault(workload, {}), self.keys.setdefault(workload, {})
            for index in range(space.num_points):
                try:
                    questions = Question(lengthens=True), Question(), Question(drops=True)
                    keys[index] = [evaluator.key(index, workload, question) for question in questions]
                except InputError as error:
                    refused[index] = Evaluation(refused=error.message)

    def study(self, path: Path) -> Study:
        """Read the answers that the store at `path` has by now, without the finalists' further streams."""
        store = Store(path, lambda _: None, is_read_only=True)
        try:
            wanted = (key for keys in self.keys.values() for both in keys.values() for key in both)
            return self.study_of(store.find(list(dict.fromkeys(wanted))))
        finally:
            store.close()

    def study_of(self, known: Mapping[str, Evaluation]) -> Study:
        """Return the study of the answers that are known by now, by key."""
        outcomes = []
        for workload, keys in self.keys.items():
            best = {index: next((key for key in both if key in known), None) for index, both in keys.items()}
            answers = self.refused[workload] | {index: known[key] for index, key in best.items() if key is not None}
            outcomes.append(SearchOutcome(workload, answers, {}, best_first(answers, self.space.objective)))
        return Study(self.space, outcomes, Count())
