"""vLLM's own limits on its settings."""

from collections.abc import Mapping
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.serving.deployment import EngineSettings
from windtunnel.units import version_key

ASYNCHRONOUS_SINCE: Mapping[str, str] = {"mtp": "0.14", "eagle": "0.14", "draft_model": "0.28", "ngram": "0.33"}
"""Method of drafting -> the version that schedules asynchronously with it (vllm/config/vllm.py)."""
GRAPHS_FOR_REQUESTS = 2
"""Graphs are captured up to so many tokens for each request that may run, and for each of its drafts."""


def within_budget(given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Limit running requests to the tokens of a step, which vLLM demands: it lowers its own default.

    Its other defaults follow: graphs for twice the running requests, scheduling that waits for the step where drafts
    need it, and no fused all-reduce in a model that is not compiled.

    Source: vllm/engine/arg_utils.py, `_set_default_args`, and vllm/config/scheduler.py, `verify_max_model_len`, at
    commit 01230b40; vllm/config/vllm.py, `_set_cudagraph_sizes` and `__post_init__` (0.9 to 0.33). InputError where
    more requests were asked for.
    """
    seqs, budget = resolved.max_num_seqs, resolved.max_num_batched_tokens
    if seqs is None or budget is None:
        return resolved
    if seqs > budget and given.max_num_seqs is not None:
        raise InputError(
            f"max_num_seqs is {seqs:,}, more than max_num_batched_tokens, which is {budget:,}; vLLM refuses that",
            "a step must have a token for every running request: lower the one or raise the other",
        )
    seqs = min(seqs, budget)
    limited: dict[str, Any] = {"max_num_seqs": seqs}
    drafts, largest = resolved.speculative, resolved.max_cudagraph_capture_size
    if drafts is not None and given.async_scheduling is None and resolved.async_scheduling:
        since = version_key(ASYNCHRONOUS_SINCE[drafts.method])
        limited["async_scheduling"] = version_key(str(resolved.version)) >= since
    if given.max_cudagraph_capture_size is None and largest is not None:
        num_queries = 1 + (0 if drafts is None else drafts.num_draft_tokens)
        limited["max_cudagraph_capture_size"] = min(largest, GRAPHS_FOR_REQUESTS * seqs * num_queries, budget)
    if given.fused_all_reduce is None and largest == 0:
        limited["fused_all_reduce"] = False
    return msgspec.structs.replace(resolved, **limited)
