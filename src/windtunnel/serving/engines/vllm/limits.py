"""vLLM's own limits on its settings."""

import msgspec

from windtunnel.errors import InputError
from windtunnel.serving.deployment import EngineSettings


def within_budget(given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Limit running requests to the tokens of a step, which vLLM demands: it lowers its own default.

    Source: vllm/engine/arg_utils.py, `_set_default_args`, and vllm/config/scheduler.py, `verify_max_model_len`, at
    commit 01230b40.

    Raises:
        InputError: more requests were asked for.
    """
    seqs, budget = resolved.max_num_seqs, resolved.max_num_batched_tokens
    if seqs is None or budget is None or seqs <= budget:
        return resolved
    if given.max_num_seqs is not None:
        raise InputError(
            f"max_num_seqs is {seqs:,}, more than max_num_batched_tokens, which is {budget:,}; vLLM refuses that",
            "a step must have a token for every running request: lower the one or raise the other",
        )
    return msgspec.structs.replace(resolved, max_num_seqs=budget)
