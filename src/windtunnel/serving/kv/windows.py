"""KV blocks of layers with a sliding window: what a request gives back as its window moves on.

A block of tokens takes `num_groups` blocks of a rank's pool, one for each group of layers; `num_window_groups` of them
hold layers with a window, and are given back once the next token cannot see them. With `window_pool` those layers have
a pool of their own instead, where a block of tokens takes one. `window_tokens` 0 is a model without any.

Blocks that fell out of the window go back when their request is scheduled next, before it takes new ones (vLLM V1
`SlidingWindowManager.remove_skipped_blocks`, 0.9.1 to 0.24). A request whose window has begun to move while it decodes
`slides`: it is counted in `SLIDING` by the step in which it gives a block back, as in `PHASES` by that in which it
takes one. TensorRT-LLM's GUARANTEED_NO_EVICT reserves to the end and gives nothing back before.
"""

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.codes import TRTLLM
from windtunnel.serving.state.records import FINISH_KEY, FINISH_VALUE, SLIDING, Ints, KernelSettings, Rank, Requests
from windtunnel.serving.state.tables import PoolTables


@inner
def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold `num_tokens`."""
    return (num_tokens + block_size - 1) // block_size


@inner
def gives_back(settings: KernelSettings) -> bool:
    """Whether blocks go back before their request ends."""
    return settings.window_tokens > 0 and settings.scheduler != TRTLLM


@inner
def passed_blocks(settings: KernelSettings, num_tokens: int) -> int:
    """Return the blocks of a window group that the token after `num_tokens` cannot see."""
    if not gives_back(settings) or num_tokens < settings.window_tokens:
        return 0
    return (num_tokens - settings.window_tokens + 1) // settings.block_size


@inner
def most_window_blocks(settings: KernelSettings, num_tokens: int) -> int:
    """Return the blocks of a window group that a request of `num_tokens` holds at most: the window and a step, and
    where they begin inside a block one more (vLLM V1 `SlidingWindowSpec.max_memory_usage_bytes`; TensorRT-LLM reserves
    as many).
    """
    num_blocks = num_blocks_for(num_tokens, settings.block_size)
    if settings.window_tokens == 0:
        return num_blocks
    reach = settings.window_tokens - 1 + settings.max_num_batched_tokens
    return min(num_blocks, num_blocks_for(reach, settings.block_size) + 1)


@inner
def window_blocks(settings: KernelSettings, requests: Requests, i: int, num_tokens: int) -> int:
    """Return the blocks that request `i`, with `num_tokens` computed or scheduled, holds of a group with a window."""
    if settings.scheduler == TRTLLM:
        return most_window_blocks(settings, requests[i].input_tokens + requests[i].output_tokens)
    passed = requests[i].passed_blocks
    if requests[i].slides:
        passed = passed_blocks(settings, num_tokens - 1)
    return num_blocks_for(num_tokens, settings.block_size) - passed


@inner
def pool_blocks(settings: KernelSettings, num_blocks: int, num_window_blocks: int) -> int:
    """Return the blocks of the rank's pool for `num_blocks` of each group, of those with a window
    `num_window_blocks`."""
    full_groups = settings.num_groups - settings.num_window_groups
    return full_groups * num_blocks + settings.num_window_groups * num_window_blocks


@inner
def has_blocks(settings: KernelSettings, windows: int | None, ranks: Records[Rank], rank: int, num_blocks: int) -> bool:
    """Whether `num_blocks` blocks of tokens are free in each group."""
    if windows is not None:
        fits = settings.num_groups * num_blocks <= ranks[rank].free_blocks
        return fits and settings.window_pool * num_blocks <= ranks[rank].free_window_blocks
    return num_blocks <= ranks[rank].free_blocks


@inner
def take_blocks(
    settings: KernelSettings, windows: int | None, ranks: Records[Rank], rank: int, num_blocks: int
) -> None:
    """Take `num_blocks` blocks of tokens in each group."""
    if windows is not None:
        ranks[rank].free_window_blocks -= settings.window_pool * num_blocks
        num_blocks *= settings.num_groups
    ranks[rank].free_blocks -= num_blocks


@inner
def give_back(settings: KernelSettings, ranks: Records[Rank], rank: int, num_blocks: int) -> None:
    """Give `num_blocks` blocks of every window group back."""
    ranks[rank].free_blocks += settings.num_window_groups * num_blocks
    ranks[rank].free_window_blocks += settings.window_pool * num_blocks


@inner
def pass_blocks(
    settings: KernelSettings, requests: Requests, ranks: Records[Rank], rank: int, i: int, num_tokens: int
) -> None:
    """Give back what request `i`, scheduled with `num_tokens` computed and not counted as sliding, cannot see."""
    passed = passed_blocks(settings, num_tokens)
    if passed > requests[i].passed_blocks:
        give_back(settings, ranks, rank, passed - requests[i].passed_blocks)
        requests[i].passed_blocks = passed


@inner
def newly_passed_blocks(settings: KernelSettings, requests: Requests, i: int, computed: int, num_tokens: int) -> int:
    """Return the blocks of a window group that running request `i` gives back as its next `num_tokens` are
    scheduled."""
    if not gives_back(settings):
        return 0
    if not requests[i].is_decoding:
        return passed_blocks(settings, computed) - requests[i].passed_blocks
    if requests[i].slides:
        return passed_blocks(settings, computed + num_tokens - 1) - passed_blocks(settings, computed - 1)
    return 0


@inner
def blocks_passed_in_step(settings: KernelSettings, lists: Ints, slot: int, steps: int, num_gained: int) -> int:
    """Return the blocks of a window group that the slot's sliding requests give back in a decode step of `num_gained`
    tokens."""
    num_blocks = 0
    if not gives_back(settings):
        return num_blocks
    for token in range(num_gained):
        num_blocks += lists[slot, SLIDING, (steps + token - settings.window_tokens + 1) % settings.block_size]
    return num_blocks


@inner
def next_change(settings: KernelSettings, requests: Requests, i: int) -> int:
    """Return the step count of its slot at which decoding request `i` ends, or before that begins to slide."""
    end = requests[i].joined + requests[i].input_tokens + requests[i].output_tokens - 1
    begins = requests[i].joined + settings.window_tokens
    if gives_back(settings) and not requests[i].slides and begins < end:
        return begins
    return end


@inner
def slide(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Count decoding request `i`, which has filled its window, among those that give blocks back."""
    slot = requests[i].slot
    requests[i].slides = 1
    pool.lists[slot, SLIDING, requests[i].joined % pool.settings.block_size] += 1
    pass_blocks(pool.settings, requests, pool.ranks, rank, i, pool.slots[slot].steps - requests[i].joined - 1)


@inner
def fills_window(pool: PoolTables, requests: Requests, rank: int, i: int) -> bool:
    """Let request `i`, taken off its slot's heap, slide if it has only filled its window; returns whether it has."""
    if not gives_back(pool.settings) or requests[i].slides:
        return False
    end = requests[i].input_tokens + requests[i].output_tokens - 1
    if pool.settings.window_tokens >= end:
        return False
    slide(pool, requests, rank, i)
    push_finish(pool, requests[i].slot, requests[i].joined + end, i)
    return True


@inner
def push_finish(pool: PoolTables, slot: int, steps: int, i: int) -> None:
    """Put request `i` on its slot's heap: at the count of `steps` it ends, or before that fills its window."""
    keys, values = pool.lists[slot, FINISH_KEY], pool.lists[slot, FINISH_VALUE]
    pool.slots[slot].finish_size = push(keys, values, pool.slots[slot].finish_size, steps, i)


@inner
def begin_to_slide(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Begin to decode request `i`, its window full or not; what is behind the window goes back."""
    requests[i].slides = 0
    if gives_back(pool.settings):
        computed = pool.slots[requests[i].slot].steps - requests[i].joined
        pass_blocks(pool.settings, requests, pool.ranks, rank, i, computed - 1)
        if computed >= pool.settings.window_tokens:
            slide(pool, requests, rank, i)


@inner
def stop_sliding(settings: KernelSettings, requests: Requests, lists: Ints, i: int) -> None:
    """Take request `i`, whose computed tokens are explicit again, out of its slot's counts."""
    if requests[i].slides:
        lists[requests[i].slot, SLIDING, requests[i].joined % settings.block_size] -= 1
        requests[i].passed_blocks = passed_blocks(settings, requests[i].computed_tokens - 1)
        requests[i].slides = 0
