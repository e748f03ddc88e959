"""What a step of the per-request loop costs: by Vidur's look-up tables, or by a `StepCost`."""

import math

from windtunnel.compiled.jit import inner
from windtunnel.serving.schedulers.step_cost import decode_attention_s, prefill_attention_s
from windtunnel.serving.state.per_request import StageTables
from windtunnel.serving.state.records import Speculation, StepCost


@inner
def ceil_to(value: int, step: int) -> int:
    """Round `value` up to a multiple of `step`."""
    return (value + step - 1) // step * step


@inner
def table_stage_s(
    tables: StageTables,
    num_decodes: int,
    context_tokens: int,
    num_prompts: int,
    prompt_tokens: int,
    squares: int,
    cached: int,
    size: int,
) -> float:
    """Price one pipeline stage by Vidur's tables, without `send_recv`; -1.0 outside the tables.

    `vidur/execution_time_predictor/sklearn_execution_time_predictor.py`: decode attention is looked up at the mean
    context, prefill attention as one prompt with the root of the squared chunks and all cached tokens.
    """
    num_tokens = num_decodes + prompt_tokens
    rounded = ceil_to(num_tokens, 8)
    if rounded >= tables.token_s.size or num_tokens >= tables.kv_save_s.size:
        return -1.0
    stage_s = tables.token_s[rounded] + tables.kv_save_s[num_tokens]
    if num_decodes > 0:
        mean = int(context_tokens / num_decodes)
        cell = (mean + tables.granularity - 1) // tables.granularity
        if num_decodes >= tables.decode_s.shape[0] or cell >= tables.decode_s.shape[1]:
            return -1.0
        factor = tables.decode_factor if num_decodes > 1 else 1.0
        stage_s += tables.decode_s[num_decodes, cell] * factor
    if num_prompts > 0:
        chunk = int(round(math.sqrt(squares)))  # noqa: RUF046  numba's round gives a float
        cell = cached // tables.granularity
        if cell >= tables.prefill_s.shape[0] or chunk >= tables.prefill_s.shape[1]:
            return -1.0
        factor = tables.prefill_factor if num_prompts > 1 else 1.0
        stage_s += tables.prefill_s[cell, chunk] * factor
    if tables.host_s.size > 0:
        if size >= tables.host_s.size:
            return -1.0
        stage_s += tables.host_s[size]
    return stage_s


@inner
def model_step_s(
    cost: StepCost,
    speculation: Speculation | None,
    num_decodes: int,
    context_tokens: int,
    prompt_tokens: int,
    deviation_tokens: float,
    pairs: float,
    sampled: int,
) -> float:
    """Price a step on the device by a `StepCost`; `context_tokens` counts the new tokens too, and `deviation_tokens` is
    the standard deviation of the contexts."""
    attention_s = decode_attention_s(cost, num_decodes, context_tokens, prompt_tokens, deviation_tokens)
    if prompt_tokens == 0:
        return cost.decode_token_s[num_decodes] + attention_s
    attention_s += prefill_attention_s(cost, prompt_tokens, pairs)
    num_tokens, draft_s = num_decodes + prompt_tokens, 0.0
    if speculation is not None:
        num_tokens = num_decodes * speculation.num_queries + prompt_tokens
        draft_s = cost.draft_s[num_decodes]
    device_s = cost.mixed_token_s[num_tokens] + cost.sample_s[sampled] + attention_s + draft_s
    return max(device_s, cost.launch_s[min(num_tokens, cost.launch_s.size - 1)])
