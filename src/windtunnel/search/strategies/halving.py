"""The strategy that tries every point with the first requests, and the best of them with all requests."""

import math
from itertools import pairwise

from windtunnel.search.asker import LEAST_TRIALS, NUM_BEST, ROUGH_TOLERANCE, Asker, Race, spread_points
from windtunnel.search.evaluation.schema import Evaluation, Question

IS_EXHAUSTIVE = False
FIRST_FRACTION, FIRST_TOLERANCE = 1 / 10, 0.1
"""First rung: share of the requests, and relative distance of neighbouring loads."""
LEAST_REQUESTS = 100
"""Smallest number of requests of a rung; percentiles of fewer say little."""
KEPT_FRACTION = 1 / 16
"""Share of the points that meet all requests. A short stream is taken in as a burst: with an eighth of 1,000 requests
about 200 of 12,544 points did better than the one that is best with all."""
LEAST_KEPT = 50
SAMPLE_FRACTION = 1 / 32
"""Share of the points that are evaluated first."""
BATCHES = 1 / 8, 3 / 8, 1.0
"""Shares of the other points that are evaluated before the mark is moved again."""


def evaluate(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Evaluate every point roughly with the first requests, then the best of them with all requests.

    Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS
    2016), with the length of the stream as the resource, and points dropped as soon as enough others are better; then
    further rungs between the two would cost more than they save.
    """
    num_points, num_requests = asker.space.num_points, asker.evaluator.num_requests(workload)
    short = min(max(math.ceil(num_requests * FIRST_FRACTION), LEAST_REQUESTS), num_requests)
    first = Race(asker, workload, Question(num_requests=short, tolerance=FIRST_TOLERANCE), 2 * KEPT_FRACTION)
    first.ask(spread_points(num_points, max(math.ceil(num_points * SAMPLE_FRACTION), LEAST_TRIALS)))
    family = first.asker.evaluator.family
    families: dict[bytes, float] = {}
    for index in first.answers:
        families[family(index)] = max(families.get(family(index), -math.inf), first.score(index))
    rest = [index for index in range(first.asker.space.num_points) if index not in first.answers]
    rest.sort(key=lambda index: (-families.get(family(index), -math.inf), index))
    ends = [0, *(round(len(rest) * share) for share in BATCHES)]
    for batch in (rest[begin:end] for begin, end in pairwise(ends) if end > begin):
        first.ask(batch)
    best = first.best[: max(math.ceil(first.num_possible * KEPT_FRACTION), LEAST_KEPT)]
    second = Race(asker, workload, Question(tolerance=ROUGH_TOLERANCE))
    for begin in range(0, len(best), NUM_BEST):
        batch = best[begin : begin + NUM_BEST]
        second.ask(batch, {index: first.answers[index].load for index in batch})
    return first.refused() | second.exactly()
