"""What a step costs: look-ups in the arrays of a `StepCost`, the host, the pipeline's stages, blocks from below."""

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.serving.state.records import Cache, Floats, KernelSettings, StepCost

SAME_DURATION = 1.01
"""A run of steps becomes one row while its steps stay within 1% of the first one's duration."""


@inner
def grid_cell(nodes: Floats, value: float) -> int:
    """Return the index j of the grid cell with nodes[j] <= value < nodes[j + 1], clamped to the grid."""
    low, high = 0, nodes.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if nodes[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def interpolate_row(nodes: Floats, row: Floats, value: float) -> float:
    """Interpolate linearly between nodes, extended by the slope of the end cells."""
    j = grid_cell(nodes, value)
    return row[j] + (row[j + 1] - row[j]) * ((value - nodes[j]) / (nodes[j + 1] - nodes[j]))


@inner
def decode_attention_s(
    cost: StepCost, num_decodes: int, context_tokens: int, prompt_tokens: int, deviation_tokens: float
) -> float:
    """Price the attention of `num_decodes` single-token queries over `context_tokens` keys in all, beside
    `prompt_tokens`; the contexts have a standard deviation of `deviation_tokens`.

    A kernel that gives every request as many blocks ends with its longest one, whose blocks read alone at last. The
    longest of n contexts exceeds the mean by sqrt(2 ln n) deviations (the Gumbel limit of normal maxima; David and
    Nagaraja, Order Statistics, 10.5); a share `longest_share` of the device would read at the memory's full rate.
    """
    if num_decodes == 0:
        return 0.0
    grid, mean_tokens = cost.decode_attention_s, context_tokens / num_decodes
    if prompt_tokens > 0 and cost.mixed_decode_attention_s.size > 0:
        grid = cost.mixed_decode_attention_s
    attention_s = interpolate_row(cost.context_nodes, grid[num_decodes], mean_tokens)
    if deviation_tokens > 0.0:
        longest_tokens = mean_tokens + deviation_tokens * np.sqrt(2.0 * np.log(num_decodes))
        factor = cost.longest_share * longest_tokens / mean_tokens
        if factor > 1.0:
            row = cost.waiting_attention_s[num_decodes]
            attention_s += (factor - 1.0) * interpolate_row(cost.context_nodes, row, mean_tokens)
    return attention_s


@inner
def prefill_attention_s(cost: StepCost, num_tokens: int, num_pairs: float) -> float:
    """Price the attention of prefill chunks of `num_tokens` in all that see `num_pairs` query-key pairs; bilinear."""
    if num_tokens == 0:
        return 0.0
    nodes = cost.chunk_nodes
    j = grid_cell(nodes, float(num_tokens))
    length = 2.0 * num_pairs / num_tokens
    low = interpolate_row(cost.length_nodes, cost.prefill_attention_s[j], length)
    high = interpolate_row(cost.length_nodes, cost.prefill_attention_s[j + 1], length)
    return low + (high - low) * ((num_tokens - nodes[j]) / (nodes[j + 1] - nodes[j]))


@inner
def with_host(cost: StepCost, device_s: float, num_running: int) -> float:
    """Return a step's duration: the host works beside the device, or before it."""
    host_s = cost.host_step_s + cost.host_request_s * num_running
    return max(device_s, host_s) if cost.host_overlaps else device_s + host_s


@inner
def through_stages(
    settings: KernelSettings,
    cost: StepCost,
    stages: Floats,
    replica: int,
    now_s: float,
    device_s: float,
    num_running: int,
) -> float:
    """Take the pipeline stages for a batch that starts now; returns when it leaves the last one."""
    if settings.num_stages == 1:
        return now_s + with_host(cost, device_s, num_running)
    host_s = cost.host_step_s + cost.host_request_s * num_running
    time_s = now_s if cost.host_overlaps else now_s + host_s
    for stage in range(settings.num_stages):
        time_s = max(time_s, stages[replica, stage]) + device_s / settings.num_stages
        stages[replica, stage] = time_s
    return max(time_s, now_s + host_s) if cost.host_overlaps else time_s


@inner
def with_loading(settings: KernelSettings, cache: Cache, first: int, end: int, stage: int, device_s: float) -> float:
    """Add the time to load KV blocks from lower tiers to a step's time on the device, or let both overlap."""
    load_s = 0.0
    for rank in range(first, end):
        slot = rank * settings.num_stages + stage
        load_s = max(load_s, cache.load_s[slot])
        cache.load_s[slot] = 0.0
    return max(device_s, load_s) if cache.load_overlaps else device_s + load_s
