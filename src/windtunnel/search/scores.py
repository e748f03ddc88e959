"""What a search can make as great, or as small, as it can."""

import math
from collections.abc import Sequence

from windtunnel.search.confidence import lower_bound
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.space.space import Space

LATENCIES = tuple(f"{metric}_{at}" for metric in ("ttft", "tpot", "itl", "e2e") for at in ("mean", "p50", "p90", "p99"))
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
    """What can be sought in a space."""
    return (*MORE_OF_JOBS, *LESS_OF_JOBS) if space.is_training else OBJECTIVES


def is_more_better(objective: str) -> bool:
    """Whether an objective is sought to be great, not small."""
    return objective in MORE_IS_BETTER or objective in MORE_OF_JOBS


def score(evaluation: Evaluation, objective: str) -> float:
    """What a search makes as great as it can; -inf for a point that does not hold the limits or lacks the figure."""
    value = evaluation.figures.get(objective)
    if value is None or not evaluation.holds:
        return -math.inf
    return value if is_more_better(objective) else -value


def surely(evaluations: Sequence[Evaluation], objective: str) -> float:
    """The lower bound of a score over streams of requests; the score itself of a single one."""
    scores = [score(one, objective) for one in evaluations]
    if not all(map(math.isfinite, scores)):
        return -math.inf
    bound = lower_bound(scores)
    return scores[0] if bound is None else bound
