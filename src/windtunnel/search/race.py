"""A race between points: evaluate them in batches, and drop a point as soon as enough others are better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from windtunnel.search.asker import Asker
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.scores import ranked, score

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
