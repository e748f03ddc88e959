"""What every policy does with requests: count their blocks, admit, give a chunk, take a decode step, preempt."""

import numpy as np

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import Records, int64, is_unset
from windtunnel.serving.codes import FAIR_SHARE, SGLANG, TRTLLM
from windtunnel.serving.kv.cache import acquire, caches_when_scheduled, free, look_up, release, share
from windtunnel.serving.kv.encoder_cache import release_images
from windtunnel.serving.kv.windows import (
    begin_to_slide,
    blocks_passed_in_step,
    give_back,
    next_change,
    num_blocks_for,
    passed_blocks,
    pool_blocks,
    push_finish,
    stop_sliding,
    take_blocks,
    window_blocks,
)
from windtunnel.serving.schedulers.adapters import begin_use, end_use
from windtunnel.serving.schedulers.queue_orders import enqueue
from windtunnel.serving.state.records import (
    BATCH,
    BATCH_ENDS,
    BATCH_TOKENS,
    NONE,
    PHASES,
    PREFILLING,
    Ints,
    KernelSettings,
    Rank,
    Requests,
    Slot,
    Speculation,
)
from windtunnel.serving.state.tables import PoolTables


@inner
def gained_tokens(speculation: Speculation, slots: Records[Slot], slot: int) -> int:
    """Return the tokens that each decoding request gains in the slot's next decode step.

    With speculation step v gains floor((v + 1) E) - floor(v E): whole numbers whose mean is E and that are as even as
    they can be, the same for all requests of the slot.
    """
    before = np.floor(slots[slot].num_verified * speculation.tokens_per_step)
    return int64(np.floor((slots[slot].num_verified + 1) * speculation.tokens_per_step) - before)


@inner
def blocks_of_step(
    settings: KernelSettings, speculation: Speculation, slots: Records[Slot], lists: Ints, slot: int
) -> int:
    """Return the blocks that the slot's decoding requests need for its next decode step, with speculation."""
    num_blocks = 0
    for token in range(gained_tokens(speculation, slots, slot)):
        num_blocks += lists[slot, PHASES, (slots[slot].steps + token) % settings.block_size]
    return num_blocks


@inner
def decode_step_blocks(
    settings: KernelSettings, speculation: Speculation | None, slots: Records[Slot], lists: Ints, slot: int
) -> int:
    """Return the blocks of tokens that the slot's decoding requests need for its next decode step."""
    if speculation is not None:
        return blocks_of_step(settings, speculation, slots, lists, slot)
    return lists[slot, PHASES, slots[slot].steps % settings.block_size]


@inner
def take_decode_step(pool: PoolTables, rank: int, slot: int, num_blocks: int) -> None:
    """Take the `num_blocks` of `decode_step_blocks`; what fell out of windows goes back."""
    take_blocks(pool.settings, pool.windows, pool.ranks, rank, num_blocks)
    if pool.windows is not None:
        passed = passed_of_step(pool.settings, pool.speculation, pool.slots, pool.lists, slot)
        give_back(pool.settings, pool.ranks, rank, passed)


@inner
def passed_of_step(
    settings: KernelSettings, speculation: Speculation | None, slots: Records[Slot], lists: Ints, slot: int
) -> int:
    """Return the blocks of a window group that go back in the slot's next decode step."""
    num_gained = 1
    if speculation is not None:
        num_gained = gained_tokens(speculation, slots, slot)
    return blocks_passed_in_step(settings, lists, slot, slots[slot].steps, num_gained)


@inner
def held_blocks(settings: KernelSettings, windows: int | None, requests: Requests, slots: Records[Slot], i: int) -> int:
    """Return the blocks of its rank's pool that running request `i` holds."""
    num_tokens = requests[i].computed_tokens + requests[i].step_tokens
    if settings.scheduler == TRTLLM:
        num_tokens = requests[i].input_tokens + requests[i].output_tokens
    elif requests[i].is_decoding:
        num_tokens += slots[requests[i].slot].steps - requests[i].joined - requests[i].computed_tokens
    num_blocks = num_blocks_for(num_tokens, settings.block_size)
    if windows is not None:
        num_blocks = pool_blocks(settings, num_blocks, window_blocks(settings, requests, i, num_tokens))
    return num_blocks + settings.blocks_per_request


@inner
def held_window_blocks(settings: KernelSettings, requests: Requests, slots: Records[Slot], i: int) -> int:
    """Return the blocks of the windows' own pool that running request `i` holds."""
    num_tokens = requests[i].computed_tokens + requests[i].step_tokens
    if requests[i].is_decoding:
        num_tokens += slots[requests[i].slot].steps - requests[i].joined - requests[i].computed_tokens
    return settings.window_pool * window_blocks(settings, requests, i, num_tokens)


@inner
def blocks_to_start(
    settings: KernelSettings, windows: int | None, requests: Requests, i: int, num_tokens: int
) -> tuple[int, int]:
    """Return the blocks to admit waiting request `i`, of which what is cached is found, with a chunk of `num_tokens`:
    (of the rank's pool, of the windows' own).

    What is found holds blocks of the groups without a window already; `passed_blocks` of those with one are not needed.
    """
    found = requests[i].computed_tokens
    end = found + num_tokens
    if settings.scheduler == TRTLLM:
        end = requests[i].input_tokens + requests[i].output_tokens
    num_blocks = num_blocks_for(end, settings.block_size) - found // settings.block_size
    num_window_blocks = int64(0)
    if windows is not None:
        num_window_blocks = window_blocks(settings, requests, i, end)
        num_blocks = pool_blocks(settings, num_blocks, num_window_blocks)
    return num_blocks + settings.blocks_per_request, settings.window_pool * num_window_blocks


@inner
def look_up_waiting(pool: PoolTables, requests: Requests, rank: int, i: int) -> int:
    """Find what is cached of waiting request `i`, and what its windows have passed by then.

    Returns how many blocks would no longer count as free if it took what was found.
    """
    unused = 0
    if pool.cache is not None:
        unused = look_up(pool.settings, pool.cache, requests, pool.ranks, rank, i)
    if pool.windows is not None:
        requests[i].passed_blocks = passed_blocks(pool.settings, requests[i].computed_tokens)
    return unused


@inner
def start(
    pool: PoolTables, requests: Requests, rank: int, slot: int, i: int, chunk: int, unused: int, now_s: float
) -> bool:
    """Admit waiting request `i` with `chunk` tokens of its prompt, if blocks are free for them beside the `unused` ones
    of `look_up_waiting`; returns whether they were.
    """
    ranks = pool.ranks
    num_needed, num_window_blocks = blocks_to_start(pool.settings, pool.windows, requests, i, chunk)
    if num_needed + unused > ranks[rank].free_blocks or num_window_blocks > ranks[rank].free_window_blocks:
        return False
    if pool.cache is not None:
        acquire(pool.cache, requests, ranks, rank, slot, i)
    admit(pool.settings, requests, ranks, pool.lists, rank, i, now_s)
    if pool.adapters is not None:
        begin_use(pool.adapters, pool.settings.first_rank + rank, i)
    ranks[rank].free_blocks -= num_needed
    ranks[rank].free_window_blocks -= num_window_blocks
    add_chunk(pool, requests, rank, slot, i, chunk)
    return True


@inner
def admit(
    settings: KernelSettings, requests: Requests, ranks: Records[Rank], lists: Ints, rank: int, i: int, now_s: float
) -> None:
    """Move the first waiting request, `i`, to the end of the running list."""
    if settings.queue_order == FAIR_SHARE:
        ranks[rank].fair_tag = max(ranks[rank].fair_tag, requests[i].queue_key)
    ranks[rank].waiting = meld(requests.order, requests.left, requests.right, requests[i].left, requests[i].right)
    ranks[rank].num_waiting -= 1
    ranks[rank].waiting_tokens -= requests[i].target_tokens
    link(requests, ranks, rank, i)
    lists[rank * settings.num_stages, PREFILLING, ranks[rank].num_prefilling] = i
    ranks[rank].num_prefilling += 1
    ranks[rank].remaining_tokens += remaining_output(requests, i)
    if is_unset(requests[i].scheduled_s):
        requests[i].scheduled_s = now_s


@inner
def remaining_output(requests: Requests, i: int) -> int:
    """Return the output tokens that request `i`, not decoding, has yet to produce."""
    return requests[i].output_tokens - (requests[i].target_tokens - requests[i].input_tokens)


@inner
def link(requests: Requests, ranks: Records[Rank], rank: int, i: int) -> None:
    """Put request `i` at the end of the running list."""
    append(requests, ranks[rank], i)
    ranks[rank].num_running += 1


@inner
def unlink(requests: Requests, ranks: Records[Rank], rank: int, i: int) -> None:
    """Take request `i` out of the running list."""
    remove(requests, ranks[rank], i)
    ranks[rank].num_running -= 1


@inner
def begin_decoding(pool: PoolTables, requests: Requests, rank: int, slot: int, i: int) -> None:
    """Let request `i`, whose prompt is computed and whose latest token came at `last_token_s`, decode in the slot's
    next step.
    """
    slots, joined = pool.slots, pool.slots[slot].steps - requests[i].computed_tokens
    requests[i].is_decoding = 1
    requests[i].slot = slot
    requests[i].joined = joined
    requests[i].skipped_at = NONE
    slots[slot].num_decoding += 1
    slots[slot].num_joined += 1
    slots[slot].joined_since_s += requests[i].last_token_s
    slots[slot].context_tokens += requests[i].computed_tokens
    slots[slot].joined_squares += joined * joined
    pool.lists[slot, PHASES, joined % pool.settings.block_size] += 1
    if pool.adapters is not None and pool.adapters.of_request[i] != NONE:
        pool.adapters.ranks[pool.settings.first_rank + rank].decoding += 1
    change = joined + requests[i].input_tokens + requests[i].output_tokens - 1
    if pool.windows is not None:
        begin_to_slide(pool, requests, rank, i)
        change = next_change(pool.settings, requests, i)
    push_finish(pool, slot, change, i)


@inner
def stop_decoding(pool: PoolTables, requests: Requests, i: int) -> None:
    """Take request `i` out of its slot's decoding sums; its computed tokens become explicit."""
    slots, slot = pool.slots, requests[i].slot
    requests[i].computed_tokens = slots[slot].steps - requests[i].joined
    requests[i].is_decoding = 0
    slots[slot].num_decoding -= 1
    slots[slot].context_tokens -= requests[i].computed_tokens
    slots[slot].joined_squares -= requests[i].joined * requests[i].joined
    pool.lists[slot, PHASES, requests[i].joined % pool.settings.block_size] -= 1
    if pool.windows is not None:
        stop_sliding(pool.settings, requests, pool.lists, i)
    if pool.adapters is not None and pool.adapters.of_request[i] != NONE:
        pool.adapters.ranks[pool.settings.first_rank + slot].decoding -= 1


@inner
def is_in_flight(requests: Requests, slots: Records[Slot], slot: int, i: int) -> bool:
    """Whether a batch that is still under way, of another slot than the idle `slot`, holds request `i`."""
    if requests[i].is_decoding:
        return requests[i].slot != slot and slots[requests[i].slot].batch_decodes > 0
    return requests[i].chunks_in_flight > 0


@inner
def leave_latest(requests: Requests, slots: Records[Slot], i: int, computed_tokens: int) -> None:
    """Leave request `i`, which decodes with so many tokens computed, out of its slot's next decode step: keep the time
    of its latest token, which the slot has where that step was all it waited for.
    """
    slot = requests[i].slot
    was_left_out = requests[i].skipped_at != NONE and requests[i].skipped_at == slots[slot].num_verified - 1
    if computed_tokens == requests[i].target_tokens or was_left_out:
        slots[slot].num_joined -= 1
        slots[slot].joined_since_s -= requests[i].last_token_s
    else:
        requests[i].last_token_s = slots[slot].last_decode_s


@inner
def preempt(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Free all of running request `i` and put it back in the queue, to be computed again from its first token, or from
    what is cached of it then.

    Its outputs so far become part of what must be prefilled (vLLM V1 `Scheduler._preempt_request`, SGLang
    `retract_decode`). vLLM caches what it had computed, SGLang drops it.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    held, decoded = held_blocks(settings, pool.windows, requests, slots, i), requests[i].is_decoding
    if pool.windows is not None:
        ranks[rank].free_window_blocks += held_window_blocks(settings, requests, slots, i)
    if pool.cache is None:
        ranks[rank].free_blocks += held
    if decoded:
        stop_decoding(pool, requests, i)
    if pool.cache is not None:
        kept = 0 if settings.scheduler == SGLANG else requests[i].computed_tokens
        release(settings, pool.cache, ranks, rank, i, held, kept)
    if decoded:
        leave_latest(requests, slots, i, requests[i].computed_tokens)
        requests[i].target_tokens = requests[i].computed_tokens + 1
    ranks[rank].remaining_tokens -= remaining_output(requests, i)
    if pool.encoder is not None:
        release_images(pool, rank, i, requests[i].target_tokens)
    requests[i].computed_tokens = 0
    requests[i].step_tokens = 0
    requests[i].passed_blocks = 0
    requests[i].num_preemptions += 1
    unlink(requests, ranks, rank, i)
    if pool.adapters is not None:
        end_use(pool.adapters, settings.first_rank + rank, i)
    enqueue(settings, requests, ranks, rank, i)


@inner
def leave(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Free what running request `i` holds, which does not decode and does not come back."""
    settings, ranks = pool.settings, pool.ranks
    held = held_blocks(settings, pool.windows, requests, pool.slots, i)
    if pool.windows is not None:
        ranks[rank].free_window_blocks += held_window_blocks(settings, requests, pool.slots, i)
    free(settings, pool.cache, ranks, rank, i, held, requests[i].computed_tokens)
    unlink(requests, ranks, rank, i)
    if pool.adapters is not None:
        end_use(pool.adapters, settings.first_rank + rank, i)
    ranks[rank].num_outstanding -= 1


@inner
def rebuild_rank(pool: PoolTables, requests: Requests, rank: int) -> None:
    """Rebuild the lists that a slow pass invalidates: who is prefilling, and the heaps of finishing steps."""
    settings, ranks = pool.settings, pool.ranks
    first_slot = rank * settings.num_stages
    for slot in range(first_slot, first_slot + settings.num_stages):
        pool.slots[slot].finish_size = 0
    num_prefilling = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding:
            end = requests[i].joined + requests[i].input_tokens + requests[i].output_tokens - 1
            if pool.windows is not None:
                end = next_change(settings, requests, i)
            push_finish(pool, requests[i].slot, end, i)
        elif requests[i].computed_tokens < requests[i].target_tokens:
            pool.lists[first_slot, PREFILLING, num_prefilling] = i
            num_prefilling += 1
        i = requests[i].after
    ranks[rank].num_prefilling = num_prefilling


@inner
def wanted_tokens(settings: KernelSettings, requests: Requests, i: int) -> int:
    """Return the prompt tokens that request `i` would compute in a step with tokens to spare."""
    num_tokens = requests[i].target_tokens - requests[i].computed_tokens
    threshold = settings.long_prefill_token_threshold
    return threshold if 0 < threshold < num_tokens else num_tokens


@inner
def add_chunk(pool: PoolTables, requests: Requests, rank: int, slot: int, i: int, num_tokens: int) -> None:
    """Put the next `num_tokens` prompt tokens of request `i` into the slot's batch."""
    lists, position = pool.lists, pool.slots[slot].batch_size
    requests[i].computed_tokens += num_tokens
    requests[i].chunks_in_flight += 1
    lists[slot, BATCH, position] = i
    lists[slot, BATCH_TOKENS, position] = num_tokens
    lists[slot, BATCH_ENDS, position] = requests[i].computed_tokens == requests[i].target_tokens
    pool.slots[slot].batch_size = position + 1
    if pool.cache is not None and caches_when_scheduled(pool.settings):
        share(pool.settings, pool.cache, pool.ranks, rank, i, requests[i].computed_tokens)


@inner
def begin_batch(slots: Records[Slot], slot: int, cutoff_s: float) -> None:
    """Start from an empty batch; requests that arrived after `cutoff_s` cannot be in it."""
    slots[slot].cutoff_s = cutoff_s
    slots[slot].batch_size = 0
    slots[slot].gave_up = 0
    slots[slot].looks_again = 0


@inner
def end_batch(pool: PoolTables, requests: Requests, rank: int, slot: int, num_decodes: int) -> int:
    """Settle the batch that a policy formed with `num_decodes` decoding requests; returns 1, or 0 if it is empty.

    Among the prefilling requests only those with tokens left to schedule are kept.
    """
    slots, ranks, first_slot = pool.slots, pool.ranks, rank * pool.settings.num_stages
    if slots[slot].batch_size > 0:
        kept = 0
        for position in range(ranks[rank].num_prefilling):
            i = pool.lists[first_slot, PREFILLING, position]
            if requests[i].computed_tokens < requests[i].target_tokens:
                pool.lists[first_slot, PREFILLING, kept] = i
                kept += 1
        ranks[rank].num_prefilling = kept
    slots[slot].batch_decodes = 1 if num_decodes > 0 else 0
    return 1 if num_decodes + slots[slot].batch_size > 0 else 0
