"""A batch that a user's policy chose, formed or refused."""

from windtunnel.compiled.jit import inner
from windtunnel.serving.kv.cache import acquire, look_up, share
from windtunnel.serving.kv.tiers import leave_below
from windtunnel.serving.kv.windows import num_blocks_for
from windtunnel.serving.per_request.decode_groups import ENDS, GROUP, MEMBERS, TOKENS, dissolve, ready_row
from windtunnel.serving.per_request.policies import (
    add,
    admit,
    begin_sequence,
    computed_tokens,
    put_first,
    release,
    restart,
)
from windtunnel.serving.schedulers.batch import gained_tokens
from windtunnel.serving.state.records import NONE, Cache, Ints, Requests, Speculation
from windtunnel.serving.state.tables import PoolTables, RunTables

TWICE, NOT_HERE, TOO_MANY_TOKENS, TOO_FEW_TOKENS, TOO_MANY_BLOCKS, TOO_MANY_SEQS, TOO_LONG = range(-7, 0)
"""What `form_custom_batch` returns for a batch that the engine cannot run; the request is in `clock[0].culprit`."""


@inner
def find_cached(pool: PoolTables, cache: Cache, requests: Requests, replica: int, i: int) -> int:
    """Find how much of waiting request `i` is cached; it starts from there.

    Returns how many blocks count as free now and would not if the request took what was found.
    """
    requests[i].target_tokens = pool.sequences[i].prompt_tokens
    unused = look_up(pool.settings, cache, requests, pool.ranks, replica, i)
    pool.sequences[i].processed_tokens = requests[i].computed_tokens
    return unused


@inner
def list_waiting(pool: PoolTables, requests: Requests, replica: int, waiting: Ints) -> None:
    """Write the requests that wait at a replica to `waiting`, in order, and find how much of each is cached: their
    `processed_tokens`, which a policy sees.
    """
    count, i = 0, pool.ranks[replica].first_waiting
    while i != NONE:
        if pool.cache is not None:
            find_cached(pool, pool.cache, requests, replica, i)
        waiting[count] = i
        count += 1
        i = pool.sequences[i].next


@inner
def form_custom_batch(pool: PoolTables, run: RunTables, replica: int, slot: int, now_s: float) -> int:
    """Form the batch of `run.pairs`, request and tokens, that a user's policy chose; 0 tokens restart a request.

    Requests are taken in the order given: waiting ones are admitted, blocks are taken as the tokens need them. Nothing
    is changed where the answer is one of the error codes, except for what the batch already took: the run is over then.

    Returns the size of the batch, or an error code.
    """
    requests, pairs = run.requests, run.pairs
    size, num_tokens, has_decodes, found = 0, 0, False, NONE
    for k in range(pairs.shape[0]):
        i, tokens = pairs[k, 0], pairs[k, 1]
        run.clock[0].culprit = i
        if i < 0 or i >= requests.size:
            return NOT_HERE
        position = take_ready(pool, replica, i, found + 1)
        is_ready = position != NONE
        if is_ready:
            found = position
        if is_ready and tokens == 0:
            restart(pool, requests, replica, i)
            continue
        if not is_ready:
            for earlier in range(size):
                if pool.batches[slot, MEMBERS, earlier] == i:
                    return TWICE
            if not take_waiting(pool, replica, i):
                return NOT_HERE
            put_first(pool, replica, i)
        decodes = pool.sequences[i].is_prefilled
        left = 1 if decodes else pool.sequences[i].prompt_tokens - pool.sequences[i].processed_tokens
        if tokens < 1:
            return TOO_FEW_TOKENS
        if tokens > left:
            return TOO_MANY_TOKENS
        if not is_ready:
            if pool.ranks[replica].num_running >= pool.settings.max_num_seqs:
                return TOO_MANY_SEQS
            admit(pool, requests, replica, 0, now_s)
            if pool.cache is not None:
                tokens = take_cached(pool, pool.cache, requests, replica, slot, i, tokens)
        num_computed = tokens
        if pool.speculation is not None and decodes:
            tokens = gained_by(pool, pool.speculation, slot, i)
            num_computed = pool.speculation.num_queries
        if not take_blocks(pool, replica, i, tokens):
            return TOO_MANY_BLOCKS
        if pool.cache is not None and not decodes:
            num_cached = pool.sequences[i].processed_tokens + tokens
            share(pool.settings, pool.cache, pool.ranks, replica, i, num_cached)
        size = add(pool, slot, size, i, tokens)
        num_tokens += num_computed
        has_decodes = has_decodes or decodes == 1
        if num_tokens > pool.settings.max_num_batched_tokens:
            return TOO_LONG
        if size > pool.settings.max_batch_seqs:
            return TOO_MANY_SEQS
    pool.slots[slot].num_verified += has_decodes
    close_ready(pool, replica)
    return size


@inner
def take_ready(pool: PoolTables, replica: int, i: int, first: int) -> int:
    """Take request `i` off the ready requests, looked for from position `first` on; its place holds NONE then.

    Returns its position, or NONE where it is not ready.
    """
    row, num_ready = ready_row(pool, replica), pool.ranks[replica].num_ready
    for further in range(num_ready):
        position = first + further if first + further < num_ready else first + further - num_ready
        if pool.batches[row, MEMBERS, position] == i:
            pool.batches[row, MEMBERS, position] = NONE
            return position
    return NONE


@inner
def close_ready(pool: PoolTables, replica: int) -> None:
    """Close the places of the ready requests that were taken; the others stay in order."""
    row, kept = ready_row(pool, replica), 0
    for position in range(pool.ranks[replica].num_ready):
        i = pool.batches[row, MEMBERS, position]
        if i != NONE:
            pool.batches[row, MEMBERS, kept] = i
            kept += 1
    pool.ranks[replica].num_ready = kept


@inner
def take_waiting(pool: PoolTables, replica: int, i: int) -> bool:
    """Take request `i` out of the waiting ones; returns whether it waits here."""
    before, waiting = NONE, pool.ranks[replica].first_waiting
    while waiting != NONE and waiting != i:
        before, waiting = waiting, pool.sequences[waiting].next
    if waiting == NONE:
        return False
    if before == NONE:
        pool.ranks[replica].first_waiting = pool.sequences[i].next
    else:
        pool.sequences[before].next = pool.sequences[i].next
    if pool.sequences[i].next == NONE:
        pool.ranks[replica].last_waiting = before
    pool.ranks[replica].num_waiting -= 1
    pool.ranks[replica].waiting_tokens -= pool.sequences[i].prompt_tokens
    return True


@inner
def cancel_sequence(pool: PoolTables, requests: Requests, replica: int, i: int, now_s: float) -> bool:
    """End request `i`, whose client has left: now, or with the batch that it is in.

    Returns whether it has ended.
    """
    is_waiting = take_waiting(pool, replica, i)
    if not is_waiting:
        dissolve(pool, replica)
        if take_ready(pool, replica, i, 0) == NONE:
            shorten(pool, requests, replica, i)
            return False
        close_ready(pool, replica)
        release(pool, replica, i)
    requests[i].finish_s = now_s
    pool.ranks[replica].num_outstanding -= 1
    return True


@inner
def shorten(pool: PoolTables, requests: Requests, replica: int, i: int) -> None:
    """Let request `i` end with the batch that it is in."""
    for slot in range(replica * pool.settings.num_stages, (replica + 1) * pool.settings.num_stages):
        if pool.slots[slot].num_requests == 0:
            continue
        if pool.slots[slot].has_group:
            end = pool.slots[slot].group_steps + pool.slots[slot].num_steps
            for position in range(pool.slots[slot].group_size):
                if pool.batches[slot, GROUP, position] == i:
                    pool.sequences[i].total_tokens -= pool.batches[slot, ENDS, position] - end
                    pool.batches[slot, ENDS, position] = end
                    pool.slots[slot].first_end = min(pool.slots[slot].first_end, end)
        for position in range(pool.slots[slot].num_listed):
            if pool.batches[slot, MEMBERS, position] == i:
                tokens = pool.batches[slot, TOKENS, position] * pool.slots[slot].num_steps
                pool.sequences[i].total_tokens = pool.sequences[i].processed_tokens + tokens
    requests[i].output_tokens = max(pool.sequences[i].total_tokens - requests[i].input_tokens, 1)


@inner
def take_cached(
    pool: PoolTables, cache: Cache, requests: Requests, replica: int, slot: int, i: int, tokens: int
) -> int:
    """Let request `i`, which is admitted with a chunk of `tokens`, share the blocks of its prompt that are cached now.

    What was scheduled since the policy was asked may be among them: it is not computed again. Where they leave too few
    free blocks for the chunk, nothing is shared: the chunk is the first of the whole prompt.

    Returns the tokens of the chunk.
    """
    unused = find_cached(pool, cache, requests, replica, i)
    found = pool.sequences[i].processed_tokens
    chunk = min(tokens, pool.sequences[i].prompt_tokens - found)
    num_blocks = num_blocks_for(found + chunk, pool.settings.block_size) - found // pool.settings.block_size
    if num_blocks + unused > pool.ranks[replica].free_blocks:
        leave_below(pool.settings, cache, requests, i)
        cache.requests[i].deepest = NONE
        cache.requests[i].shared_blocks = 0
        requests[i].computed_tokens, chunk = 0, tokens
    acquire(cache, requests, pool.ranks, replica, slot, i)
    pool.sequences[i].processed_tokens = requests[i].computed_tokens
    pool.sequences[i].num_blocks = requests[i].computed_tokens // pool.settings.block_size
    return chunk


@inner
def gained_by(pool: PoolTables, speculation: Speculation, slot: int, i: int) -> int:
    """Return the tokens that decoding request `i` gains in the slot's next step, with speculative decoding."""
    left = pool.sequences[i].total_tokens - pool.sequences[i].processed_tokens
    return min(gained_tokens(speculation, pool.slots, slot), left)


@inner
def take_blocks(pool: PoolTables, replica: int, i: int, tokens: int) -> bool:
    """Take the blocks that request `i` needs to process `tokens`; returns whether there were enough."""
    held = computed_tokens(pool.sequences, i) + tokens
    num_blocks = num_blocks_for(held, pool.settings.block_size) - pool.sequences[i].num_blocks
    if num_blocks > pool.ranks[replica].free_blocks:
        return False
    if num_blocks > 0:
        pool.sequences[i].num_blocks += num_blocks
        pool.ranks[replica].free_blocks -= num_blocks
    return True


@inner
def join_with_cache(pool: PoolTables, requests: Requests, replica: int, i: int) -> None:
    """Make request `i`, whose KV has come from another replica, ready here.

    It decodes, or computes the last token of its prompt again.
    """
    begin_sequence(pool.sequences, requests, i)
    sequence, computed = pool.sequences[i], requests[i].computed_tokens
    sequence.is_prefilled = 1 if computed == requests[i].target_tokens else 0
    sequence.processed_tokens = computed + sequence.is_prefilled
    sequence.num_blocks = num_blocks_for(computed, pool.settings.block_size)
    sequence.left_stage_s = requests[i].last_token_s
    sequence.last_token_s = requests[i].last_token_s
    pool.batches[ready_row(pool, replica), MEMBERS, pool.ranks[replica].num_ready] = i
    pool.ranks[replica].num_ready += 1
    pool.ranks[replica].num_running += 1
