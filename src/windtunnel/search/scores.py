"""What a search can make as great, or as small, as it can."""

import math
from collections.abc import Sequence

from windtunnel.search.confidence import lower_bound
from windtunnel.search.evaluate import Evaluation

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


def score(evaluation: Evaluation, objective: str) -> float:
    """What a search makes as great as it can; -inf for a point that does not hold the limits or lacks the figure."""
    value = evaluation.figures.get(objective)
    if value is None or not evaluation.holds:
        return -math.inf
    return value if objective in MORE_IS_BETTER else -value


def surely(evaluations: Sequence[Evaluation], objective: str) -> float:
    """The lower bound of a score over streams of requests; the score itself of a single one."""
    scores = [score(one, objective) for one in evaluations]
    if not all(map(math.isfinite, scores)):
        return -math.inf
    bound = lower_bound(scores)
    return scores[0] if bound is None else bound
