"""Ask points of a space, each question once (first the store, then the workers), and race them in batches."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from windtunnel.errors import InputError
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.executors import PointChunk, Progress, RunChunks, evaluator_of
from windtunnel.search.scores import ranked, score
from windtunnel.search.space.space import Space
from windtunnel.search.store import Store
from windtunnel.units import format_count

CHUNK_POINTS = (16, 256)
"""Smallest and largest chunk. Chunks of whole families skipped twice as many duplicate points as chunks of 64 did."""

LEAST_CHUNKS = 8
"""Fewest chunks of a search, so that several workers have something to do even in a small one."""


@dataclass(eq=False)
class Count:
    """Counters of a search's work."""

    num_known: int = 0
    """Answers from a former search, or from another point with an equal deployment."""
    num_duplicates: int = 0
    """Answers taken over from a neighbour that serves every request the same way."""
    num_runs: int = 0
    num_requests: int = 0
    """Requests simulated in all runs."""


@dataclass(eq=False)
class Asker:
    """Evaluates points of a space, each question once: the store answers first, then the workers."""

    space: Space
    store: Store
    run_chunks: RunChunks
    progress: Progress | None = None
    count: Count = field(default_factory=Count)
    first_streams: dict[str | None, dict[int, Evaluation]] = field(default_factory=dict)
    """Workload -> the answers so far, of points with their first stream of requests."""

    def __post_init__(self) -> None:
        self.evaluator = evaluator_of(self.space)

    def check_some(self, workload: str | None, answers: dict[int, Evaluation]) -> None:
        """Raise InputError where every point was refused, with the first one's reason."""
        if not all(answer.refused for answer in answers.values()):
            return
        reasons, hint = Counter(answer.refused for answer in answers.values()), None
        first = next(iter(reasons))
        try:
            self.evaluator.check(next(iter(answers)), workload)
        except InputError as error:
            hint = error.hint
        others = len(reasons) - 1
        also = f" ({format_count(others, 'other reason')} for {len(answers) - reasons[first]} more)" if others else ""
        raise InputError(f"every point is refused: {first}{also}", hint)

    def ask(
        self, workload: str | None, indices: Sequence[int], question: Question, near: Mapping[int, float] = {}
    ) -> dict[int, Evaluation]:
        """Return the answers of points; answers that the store has are not computed again.

        Args:
            workload: name of a workload; None is the scenario's own.
            near: point -> a load to begin at.
        """
        answers: dict[int, Evaluation] = {}
        by_key: dict[str, list[int]] = {}
        for index in indices:
            try:
                by_key.setdefault(self.evaluator.key(index, workload, question), []).append(index)
            except InputError as error:
                answers[index] = Evaluation(refused=error.message)
        keys = {same[0]: key for key, same in by_key.items()}
        known = self.store.find(list(by_key))
        missing = [index for index, key in keys.items() if key not in known]
        self.count.num_known += len(indices) - len(answers) - len(missing)
        chunks = self._chunks(workload, missing, question, near)
        if question.seed == 0:
            met = self.first_streams.setdefault(workload, {})
            met |= answers | {index: known[key] for index, key in keys.items() if key in known}
        known |= self._run(chunks, keys, len(indices), len(indices) - len(missing))
        for key, same in by_key.items():
            answers |= dict.fromkeys(same, known[key])
        return {index: answers[index] for index in indices}

    def _run(
        self, chunks: list[PointChunk], keys: dict[int, str], num_points: int, num_known: int
    ) -> dict[str, Evaluation]:
        by_key: dict[str, Evaluation] = {}
        for answers in self.run_chunks(chunks, self.evaluator):
            indices = chunks[answers.chunk].indices
            kept = {keys[index]: answer for index, answer in zip(indices, answers.evaluations, strict=True)}
            self.store.add(kept)
            by_key |= kept
            if chunks[answers.chunk].question.seed == 0:
                self.first_streams[chunks[answers.chunk].workload] |= dict(
                    zip(indices, answers.evaluations, strict=True)
                )
            for answer in answers.evaluations:
                self.count.num_runs += answer.num_runs
                self.count.num_requests += answer.num_requests
                self.count.num_duplicates += not (answer.num_runs or answer.refused)
            if self.progress is not None:
                self.progress(num_known + len(by_key), num_points)
        return by_key

    def _chunks(
        self, workload: str | None, indices: list[int], question: Question, near: Mapping[int, float]
    ) -> list[PointChunk]:
        """Split points into chunks by family; the split does not depend on the executor."""
        families: dict[bytes, list[int]] = {}
        for index in indices:
            families.setdefault(self.evaluator.family(index), []).append(index)
        size = min(max(len(indices) // LEAST_CHUNKS, CHUNK_POINTS[0]), CHUNK_POINTS[1])
        parts = [family[first : first + size] for family in families.values() for first in range(0, len(family), size)]
        return [
            PointChunk(workload=workload, indices=tuple(part), question=question, near=tuple(map(near.get, part)))
            for part in parts
        ]


ROUGH_TOLERANCE = 0.03
"""Relative distance of neighbouring loads with all requests, until the best points are known."""
MARK_RANK = 3
"""Lowest rank that makes the mark: a point is dropped once it cannot be among so many best."""
NUM_BEST = 10
"""Best points whose answers are found as exactly as an exhaustive search finds them."""
LEAST_TRIALS = 40
"""Smallest number of points that a strategy evaluates before it relies on their scores."""
GOLDEN_RATIO = 0.6180339887498949


@dataclass(eq=False)
class Race:
    """Points that are evaluated in batches. The score of one of the best so far is the mark: a new point is tried at
    the load that reaches the mark, and dropped if it fails there.
    """

    asker: Asker
    workload: str | None
    question: Question
    mark_fraction: float = 0.0
    """Rank of the point that makes the mark, as a fraction of the evaluated points; at least `MARK_RANK`."""
    answers: dict[int, Evaluation] = field(default_factory=dict)

    @property
    def best(self) -> list[int]:
        """The points that hold the limits and were not dropped, best first."""
        return ranked(self.answers, self.asker.space.objective)

    @property
    def num_possible(self) -> int:
        return sum(not answer.refused for answer in self.answers.values())

    def score(self, index: int) -> float:
        return score(self.answers[index], self.asker.space.objective)

    def ask(self, indices: Sequence[int], near: dict[int, float] | None = None) -> float | None:
        """Evaluate points; return the mark that they had to reach, None for none."""
        best, rank = self.best, max(math.ceil(self.num_possible * self.mark_fraction), MARK_RANK)
        mark = self.score(best[rank - 1]) if len(best) >= rank else None
        question = msgspec.structs.replace(self.question, worth=mark)
        self.answers |= self.asker.ask(self.workload, indices, question, near or {})
        return mark

    def refused(self) -> dict[int, Evaluation]:
        """Return the answers of points that cannot be deployed."""
        return {index: answer for index, answer in self.answers.items() if answer.refused}

    def exactly(self) -> dict[int, Evaluation]:
        """Evaluate the best points again, at full precision and with lengthened streams; return their answers and the
        refusals."""
        near = {index: self.answers[index].load for index in self.best[: max(NUM_BEST, self.asker.space.finalists)]}
        return self.refused() | self.asker.ask(self.workload, sorted(near), Question(lengthens=True), near)


def spread_points(num_points: int, num_taken: int) -> list[int]:
    """Return positions that leave no long gap, whatever the sizes of the space's axes."""
    if num_taken >= num_points:
        return list(range(num_points))
    stride = round(num_points * GOLDEN_RATIO)
    while math.gcd(stride, num_points) > 1:
        stride += 1
    return sorted(position * stride % num_points for position in range(num_taken))
