"""The strategy that evaluates every point with all requests."""

from windtunnel.search.asker import Asker
from windtunnel.search.evaluation.schema import Evaluation, Question

IS_EXHAUSTIVE = True


def evaluate(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Evaluate every point with all requests."""
    return asker.ask(workload, range(asker.space.num_points), Question())
