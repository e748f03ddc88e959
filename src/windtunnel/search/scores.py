"""Objectives of a search, and the score of a point in one of them."""

import math
from collections.abc import Mapping, Sequence

from windtunnel.search.confidence import lower_bound
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space

LATENCIES = tuple(
    f"{metric}_{statistic}" for metric in ("ttft", "tpot", "itl", "e2e") for statistic in ("mean", "p50", "p90", "p99")
)
MORE_IS_BETTER = (
    "requests_per_usd",
    "requests_per_s",
    "output_tokens_per_s",
    "output_tokens_per_s_per_device",
    "output_tokens_per_s_per_user",
)
LESS_IS_BETTER = ("usd_per_million_output_tokens", "usd_per_hour", "devices", "output_token_j", "mean_w", *LATENCIES)
OBJECTIVES = (*MORE_IS_BETTER, *LESS_IS_BETTER)
MORE_OF_JOBS = ("tokens_per_s_per_device", "tokens_per_s", "tokens_per_usd", "mfu")
LESS_OF_JOBS = ("step_s", "run_s", "run_usd", "run_j", "token_j", "usd_per_hour", "devices", "memory_bytes")


def objectives_of(space: Space) -> tuple[str, ...]:
    """Return the names of the objectives that a space can be searched for."""
    return (*MORE_OF_JOBS, *LESS_OF_JOBS) if space.is_training else OBJECTIVES


def is_more_better(objective: str) -> bool:
    """Whether a greater value of an objective is better."""
    return objective in MORE_IS_BETTER or objective in MORE_OF_JOBS


def score(evaluation: Evaluation, objective: str) -> float:
    """Return the score that a search maximises; -inf for a point that does not hold the limits or lacks the figure."""
    value = evaluation.figures.get(objective)
    if value is None or not evaluation.holds:
        return -math.inf
    return value if is_more_better(objective) else -value


def ranked(evaluations: Mapping[int, Evaluation], objective: str) -> list[int]:
    """Return the points that hold the limits, best first; of equal ones the first."""
    scores = {index: score(evaluation, objective) for index, evaluation in evaluations.items()}
    return sorted((index for index in scores if scores[index] > -math.inf), key=lambda index: (-scores[index], index))


def sure_score(evaluations: Sequence[Evaluation], objective: str) -> float:
    """Return the lower bound of a score over streams of requests; for a single stream the score itself."""
    scores = [score(evaluation, objective) for evaluation in evaluations]
    if not all(map(math.isfinite, scores)):
        return -math.inf
    bound = lower_bound(scores)
    return scores[0] if bound is None else bound
