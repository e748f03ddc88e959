"""What a step costs: look-ups in the arrays of a `StepCost`, the host, the pipeline's stages, blocks from below."""

from typing import NamedTuple

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.serving.schedulers.step_batch import Batch
from windtunnel.serving.state.records import Floats, StepCost
from windtunnel.serving.state.tables import PoolTables, RunTables

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
    cost: StepCost,
    num_decodes: int,
    context_tokens: int,
    prompt_tokens: int,
    deviation_tokens: float,
    repeated_tokens: int,
) -> float:
    """Price the attention of `num_decodes` single-token queries over `context_tokens` keys in all, beside
    `prompt_tokens`; the contexts have a standard deviation of `deviation_tokens`, and `repeated_tokens` of the keys are
    those of other requests too, in shared prompts.

    Memory is read once for what requests share, the L2 cache for every request: the slower of the two counts.

    A kernel that gives every request as many blocks ends with its longest one, whose blocks read alone at last: it
    takes a share `longest_share` of the time of equal requests of that length, as many as the CUDA graph was captured
    for, since the graph's size decides how many blocks each gets. The longest of n contexts exceeds the mean by
    sqrt(2 ln n) deviations (the Gumbel limit of normal maxima; David and Nagaraja, Order Statistics, 10.5), and by
    sqrt(n - 1) at most (Samuelson, How Deviant Can You Be?, 1968).
    """
    if num_decodes == 0:
        return 0.0
    grid, mean_tokens = cost.decode_attention_s, context_tokens / num_decodes
    if prompt_tokens > 0 and cost.mixed_decode_attention_s.size > 0:
        grid = cost.mixed_decode_attention_s
    read_tokens = mean_tokens
    if repeated_tokens > 0 and cost.repeated_share < 1.0:
        read_tokens *= max(1.0 - repeated_tokens / context_tokens, cost.repeated_share)
    attention_s = interpolate_row(cost.context_nodes, grid[num_decodes], read_tokens)
    if deviation_tokens > 0.0:
        above_mean = min(np.sqrt(2.0 * np.log(num_decodes)), np.sqrt(num_decodes - 1.0))
        longest_tokens = read_tokens * (1.0 + above_mean * deviation_tokens / mean_tokens)
        num_equal = cost.padded_requests[num_decodes] if prompt_tokens == 0 else num_decodes
        last_s = cost.longest_share * interpolate_row(
            cost.context_nodes, cost.waiting_attention_s[num_equal], longest_tokens
        )
        waiting_s = interpolate_row(cost.context_nodes, cost.waiting_attention_s[num_decodes], read_tokens)
        attention_s += max(last_s - waiting_s, 0.0)
    return attention_s


@inner
def repeated_tokens(pool: PoolTables, rank: int) -> int:
    """Return the tokens of shared prompts, once for every running request of a rank that uses one beside the first; of
    a slot of a pipeline its share.
    """
    if pool.cache is None:
        return int64(0)
    return pool.cache.ranks[rank].repeated_blocks * pool.settings.block_size // pool.settings.num_stages


@inner
def deviation(num: int, total: int, squares: int) -> float:
    """Return the standard deviation of `num` whole numbers with this sum and this sum of squares.

    Its square times `num` squared is a whole number, exact even where sums of squares pass 64 bits and it does not.
    """
    return np.sqrt(max(num * squares - total * total, 0)) / num


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
def launched_s(device_s: float, launch_s: float) -> float:
    """Return the duration of a step that takes the device `device_s` and the host `launch_s` to launch.

    The device is slower than the host in some parts of the step and waits for it in others, so that the sum over parts
    exceeds either: the eighth root of the sum of eighth powers (`docs/decisions.md`). A step that one CUDA graph holds
    has a `launch_s` of 0.
    """
    if launch_s <= 0.0:
        return device_s
    longer, share = max(device_s, launch_s), min(device_s, launch_s) / max(device_s, launch_s)
    # Square roots, which compiled and interpreted loops round the same way; powers of different libraries differ.
    square = share * share
    fourth = square * square
    return longer * np.sqrt(np.sqrt(np.sqrt(1.0 + fourth * fourth)))


@inner
def decode_step_s(cost: StepCost, num_decodes: int, attention_s: float) -> float:
    """Price a step of decodes alone on the device, which waits for the host where no graph holds the step."""
    launch_s = cost.decode_launch_s[min(num_decodes, cost.decode_launch_s.size - 1)]
    return launched_s(cost.decode_token_s[num_decodes] + attention_s, launch_s) + cost.unhidden_step_s


@inner
def device_step_s(
    cost: StepCost,
    attention_s: float,
    prefill_tokens: int,
    most_decodes: int,
    most_tokens: int,
    most_sampled: int,
    group_tokens: int,
) -> float:
    """Price a step on the device by the terms of `serving.state.records.StepCost`; seconds.

    `attention_s` is the slowest rank's; `most_decodes`, `most_tokens` and `most_sampled` are the largest numbers of a
    rank; `prefill_tokens` and `group_tokens` are of all ranks, which compute experts together (0 where there is one).
    """
    if prefill_tokens == 0:
        return decode_step_s(cost, most_decodes, attention_s)
    device_s = cost.mixed_token_s[most_tokens] + cost.sample_s[most_sampled] + attention_s
    device_s += cost.draft_s[min(most_decodes, cost.draft_s.size - 1)]
    device_s += cost.group_token_s[min(group_tokens, cost.group_token_s.size - 1)]
    return launched_s(device_s, cost.launch_s[min(most_tokens, cost.launch_s.size - 1)]) + cost.unhidden_step_s


@inner
def price_batch(pool: PoolTables, cost: StepCost, run: RunTables, batch: Batch, replica: int, stage: int) -> float:
    """Price a batch on the device, by the recorded durations where there are any.

    Writes how long the step waits for KV blocks from lower tiers to its row: their loading comes before it, or beside
    it.
    """
    if cost.recorded_step_s.size > 0:
        run.clock[0].recorded += 1
        return cost.recorded_step_s[run.clock[0].recorded - 1]
    group_tokens = batch.query_tokens + batch.prefill_tokens if pool.settings.ranks_per_replica > 1 else 0
    most_decodes, most_tokens, most_sampled = batch.most_decodes, batch.most_tokens, batch.most_sampled
    device_s = device_step_s(
        cost, batch.attention_s, batch.prefill_tokens, most_decodes, most_tokens, most_sampled, group_tokens
    )
    if pool.cache is not None:
        load_s, first = 0.0, replica * pool.settings.ranks_per_replica
        for rank in range(first, first + pool.settings.ranks_per_replica):
            slot = rank * pool.settings.num_stages + stage
            load_s = max(load_s, pool.cache.load_s[slot])
            pool.cache.load_s[slot] = 0.0
        loaded_s = max(device_s, load_s) if pool.cache.load_overlaps else device_s + load_s
        run.steps[run.clock[0].rows].load_s = loaded_s - device_s
        device_s = loaded_s
    return device_s


class Passage(NamedTuple):
    """A batch's way through the pipeline stages; seconds."""

    start_s: float
    end_s: float
    between_s: float  # waits between stages


@inner
def with_stages(
    pool: PoolTables, cost: StepCost, run: RunTables, replica: int, now_s: float, device_s: float, num_running: int
) -> Passage:
    """Take the host and the pipeline stages for a batch that starts now and needs `device_s` in all of them."""
    if pool.settings.num_stages == 1:
        return Passage(now_s, now_s + with_host(cost, device_s, num_running), 0.0)
    host_s = cost.host_step_s + cost.host_request_s * num_running
    ready_s = now_s if cost.host_overlaps else now_s + host_s
    passage = through_stages(pool, run, replica, ready_s, device_s / pool.settings.num_stages, 0.0)
    if cost.host_overlaps:
        return Passage(passage.start_s, max(passage.end_s, now_s + host_s), passage.between_s)
    return passage


@inner
def through_stages(
    pool: PoolTables, run: RunTables, replica: int, ready_s: float, stage_s: float, send_s: float
) -> Passage:
    """Take a batch that is ready at `ready_s` through the replica's stages: `stage_s` in each, `send_s` to the next."""
    start_s, end_s, between_s = ready_s, ready_s, 0.0
    for stage in range(pool.settings.num_stages):
        begin_s = max(end_s, pool.stages[replica, stage])
        if stage == 0:
            start_s = begin_s
        else:
            between_s += begin_s - end_s
        spent_s = stage_s
        if stage < pool.settings.num_stages - 1:
            spent_s += send_s
        end_s = begin_s + spent_s
        pool.stages[replica, stage] = end_s
        if run.trail is not None:
            run.trail.stage_s[run.clock[0].rows, stage, 0] = begin_s
            run.trail.stage_s[run.clock[0].rows, stage, 1] = end_s
    return Passage(start_s, end_s, between_s)
