"""How engines whose batches may be any subset of a replica's requests form the next one.

A policy takes the ready decode group, if there is one, fills MEMBERS and TOKENS of a slot, takes the blocks that the
step needs, and returns how many requests it listed. `ready` requests hold blocks and are in no batch. Each policy forms
the batches of Vidur 7d47513 (`vidur/scheduler/replica_scheduler`), restarts and conservative block checks included.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, is_unset
from windtunnel.serving.kv.cache import free
from windtunnel.serving.per_request.decode_groups import MEMBERS, SCRATCH, TOKENS, dissolve, ready_row, take_group
from windtunnel.serving.state.per_request import SequenceState
from windtunnel.serving.state.records import NONE, Rank, Requests
from windtunnel.serving.state.tables import PoolTables


@inner
def next_prompt_blocks(pool: PoolTables, i: int) -> int:
    """Return the blocks for all that request `i` must compute before its next token."""
    return (pool.sequences[i].prompt_tokens + pool.settings.block_size - 1) // pool.settings.block_size


@inner
def begin_sequence(sequences: Records[SequenceState], requests: Requests, i: int) -> None:
    """Let request `i` begin at a replica: its prompt and what it has produced so far are to be computed there."""
    sequences[i].prompt_tokens = requests[i].target_tokens
    sequences[i].last_token_s = requests[i].last_token_s
    sequences[i].total_tokens = requests[i].input_tokens + requests[i].output_tokens
    sequences[i].processed_tokens = 0
    sequences[i].is_prefilled = 0
    sequences[i].num_blocks = 0
    sequences[i].group = 0


@inner
def computed_tokens(sequences: Records[SequenceState], i: int) -> int:
    """Return the tokens of request `i` whose KV is in the cache."""
    return sequences[i].processed_tokens - sequences[i].is_prefilled


@inner
def put_first(pool: PoolTables, replica: int, i: int) -> None:
    """Put request `i` in front of the waiting ones."""
    pool.sequences[i].next = pool.ranks[replica].first_waiting
    pool.ranks[replica].first_waiting = i
    if pool.ranks[replica].last_waiting == NONE:
        pool.ranks[replica].last_waiting = i
    pool.ranks[replica].num_waiting += 1
    pool.ranks[replica].waiting_tokens += pool.sequences[i].prompt_tokens


@inner
def put_last(sequences: Records[SequenceState], ranks: Records[Rank], rank: int, i: int) -> None:
    """Put request `i` behind the ones that wait at `rank`."""
    sequences[i].next = NONE
    last = ranks[rank].last_waiting
    if last == NONE:
        ranks[rank].first_waiting = i
    else:
        sequences[last].next = i
    ranks[rank].last_waiting = i
    ranks[rank].num_waiting += 1
    ranks[rank].waiting_tokens += sequences[i].prompt_tokens


@inner
def admit(pool: PoolTables, requests: Requests, replica: int, num_blocks: int, now_s: float) -> int:
    """Give the first waiting request `num_blocks` blocks and return it."""
    i = pool.ranks[replica].first_waiting
    pool.ranks[replica].first_waiting = pool.sequences[i].next
    if pool.sequences[i].next == NONE:
        pool.ranks[replica].last_waiting = NONE
    pool.ranks[replica].num_waiting -= 1
    pool.ranks[replica].waiting_tokens -= pool.sequences[i].prompt_tokens
    pool.ranks[replica].free_blocks -= num_blocks
    pool.ranks[replica].num_running += 1
    pool.sequences[i].num_blocks = num_blocks
    if is_unset(requests[i].scheduled_s):
        requests[i].scheduled_s = now_s
    return i


@inner
def release(pool: PoolTables, replica: int, i: int) -> None:
    """Free the blocks of request `i`; what it computed stays in the prefix cache as long as there is room."""
    held, computed = pool.sequences[i].num_blocks, computed_tokens(pool.sequences, i)
    free(pool.settings, pool.cache, pool.ranks, replica, i, held, computed)
    pool.ranks[replica].num_running -= 1
    pool.sequences[i].num_blocks = 0


@inner
def restart(pool: PoolTables, requests: Requests, replica: int, i: int) -> None:
    """Free all of request `i` and put it in front of the waiting ones, to be computed again with its outputs so far."""
    release(pool, replica, i)
    if pool.sequences[i].is_prefilled:
        pool.sequences[i].last_token_s = pool.sequences[i].left_stage_s
    if pool.sequences[i].is_prefilled or pool.settings.loses_prompts:
        pool.sequences[i].prompt_tokens = pool.sequences[i].processed_tokens
    pool.sequences[i].processed_tokens = 0
    pool.sequences[i].is_prefilled = 0
    requests[i].target_tokens = pool.sequences[i].prompt_tokens
    requests[i].num_preemptions += 1
    pool.ranks[replica].has_restarted = 1
    put_first(pool, replica, i)


@inner
def take_block(pool: PoolTables, replica: int, i: int) -> None:
    """Give decoding request `i` another block if its last one is full."""
    if pool.sequences[i].processed_tokens > pool.sequences[i].num_blocks * pool.settings.block_size:
        pool.sequences[i].num_blocks += 1
        pool.ranks[replica].free_blocks -= 1


@inner
def sort_ready(pool: PoolTables, requests: Requests, replica: int) -> None:
    """Order the ready requests by arrival at the replica; equal ones stay as they were."""
    row = ready_row(pool, replica)
    for position in range(1, pool.ranks[replica].num_ready):
        i = pool.batches[row, MEMBERS, position]
        arrival_s = requests[i].arrival_s
        before = position - 1
        while before >= 0 and requests[pool.batches[row, MEMBERS, before]].arrival_s > arrival_s:
            pool.batches[row, MEMBERS, before + 1] = pool.batches[row, MEMBERS, before]
            before -= 1
        pool.batches[row, MEMBERS, before + 1] = i


@inner
def drop_ready(pool: PoolTables, replica: int, first: int, end: int) -> None:
    """Keep the ready requests at positions `first` to `end`."""
    row = ready_row(pool, replica)
    for position in range(first, end):
        pool.batches[row, MEMBERS, position - first] = pool.batches[row, MEMBERS, position]
    pool.ranks[replica].num_ready = end - first


@inner
def add(pool: PoolTables, slot: int, size: int, i: int, num_tokens: int) -> int:
    """Put `num_tokens` of request `i` into the batch; returns its new size."""
    pool.batches[slot, MEMBERS, size] = i
    pool.batches[slot, TOKENS, size] = num_tokens
    return size + 1


@inner
def make_room(pool: PoolTables, requests: Requests, replica: int, i: int, position: int, end: int) -> int:
    """See that a block is free for decoding request `i`, as vLLM V0's `_can_append_slots` asks whether it needs one or
    not: restart the last of the ready requests at positions `position` to `end`, and `i` itself when there is none.

    Returns the new `end`, or NONE if `i` was restarted.
    """
    row = ready_row(pool, replica)
    while pool.ranks[replica].free_blocks < 1:
        if position >= end:
            restart(pool, requests, replica, i)
            return NONE
        end -= 1
        restart(pool, requests, replica, pool.batches[row, MEMBERS, end])
    return end


@inner
def decode_ready(pool: PoolTables, requests: Requests, replica: int, slot: int, room: int) -> tuple[int, int, int, int]:
    """Put the ready requests that decode into the batch in their order, as long as it has `room`, and give them blocks.

    Requests in the middle of their prompts are listed in the replica's scratch list. Returns how many requests the
    batch has, how many are listed, and the positions of the ready requests that are left: the first and the end.
    """
    row, size, begun, position, end = ready_row(pool, replica), 0, 0, 0, pool.ranks[replica].num_ready
    while position < end and size < room:
        i = pool.batches[row, MEMBERS, position]
        position += 1
        if not pool.sequences[i].is_prefilled:
            pool.batches[row, SCRATCH, begun] = i
            begun += 1
            continue
        left = make_room(pool, requests, replica, i, position, end)
        if left != NONE:
            end = left
            take_block(pool, replica, i)
            size = add(pool, slot, size, i, 1)
        else:
            end = position
    return size, begun, position, end


@inner
def form_batch_vllm_v0(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """vLLM V0 `Scheduler._schedule` (0.2 to 0.7, without chunked prefill): waiting prompts on their own, else a decode
    step of all that are ready, in order of arrival.

    A prompt is admitted whole, while blocks above the watermark are free and the batch, padded to its longest prompt,
    stays within `max_num_batched_tokens`. When no block is free, the latest request is restarted.
    """
    size, longest = 0, 0
    while pool.ranks[replica].first_waiting != NONE:
        i = pool.ranks[replica].first_waiting
        longest = max(longest, pool.sequences[i].prompt_tokens)
        num_blocks = next_prompt_blocks(pool, i)
        if (
            pool.ranks[replica].free_blocks - num_blocks < pool.settings.watermark_blocks
            or (size + 1) * longest > pool.settings.max_num_batched_tokens
            or pool.ranks[replica].num_running == pool.settings.max_num_seqs
            or size == pool.settings.max_batch_seqs
        ):
            break
        admit(pool, requests, replica, num_blocks, now_s)
        size = add(pool, slot, size, i, pool.sequences[i].prompt_tokens)
    if size > 0:
        return size
    room = pool.settings.max_batch_seqs - take_group(pool, replica, slot)
    sort_ready(pool, requests, replica)
    size, _, position, end = decode_ready(pool, requests, replica, slot, room)
    drop_ready(pool, replica, position, end)
    return size


@inner
def form_batch_sarathi(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """Sarathi-Serve's `SarathiScheduler` (Agrawal et al., OSDI 2024): decoding requests, then the rest of begun
    prompts, then new ones, the prompts cut so that a step has `max_num_batched_tokens` tokens.

    Decoding requests are not limited by the budget, but use it up. Blocks of a whole prompt are taken at admission,
    above the watermark. When no block is free, the latest ready request is restarted.
    """
    num_tokens = take_group(pool, replica, slot)
    room = pool.settings.max_batch_seqs - num_tokens
    row = ready_row(pool, replica)
    size, begun, position, end = decode_ready(pool, requests, replica, slot, room)
    num_tokens += size
    skipped = 0
    for k in range(begun):
        i = pool.batches[row, SCRATCH, k]
        chunk = min(
            pool.sequences[i].prompt_tokens - pool.sequences[i].processed_tokens,
            pool.settings.max_num_batched_tokens - num_tokens,
        )
        if chunk > 0:
            size = add(pool, slot, size, i, chunk)
            num_tokens += chunk
        else:
            pool.batches[row, SCRATCH, skipped] = i
            skipped += 1
    for k in range(position, end):
        pool.batches[row, SCRATCH, skipped] = pool.batches[row, MEMBERS, k]
        skipped += 1
    for k in range(skipped):
        pool.batches[row, MEMBERS, k] = pool.batches[row, SCRATCH, k]
    pool.ranks[replica].num_ready = skipped
    sort_ready(pool, requests, replica)

    while pool.ranks[replica].first_waiting != NONE:
        i = pool.ranks[replica].first_waiting
        num_blocks = next_prompt_blocks(pool, i)
        chunk = min(pool.sequences[i].prompt_tokens, pool.settings.max_num_batched_tokens - num_tokens)
        if (
            pool.ranks[replica].num_running == pool.settings.max_num_seqs
            or size == room
            or pool.ranks[replica].free_blocks - num_blocks < pool.settings.watermark_blocks
            or chunk <= 0
        ):
            break
        admit(pool, requests, replica, num_blocks, now_s)
        size = add(pool, slot, size, i, chunk)
        num_tokens += chunk
    return size


@inner
def admit_reserved(
    pool: PoolTables, requests: Requests, replica: int, slot: int, size: int, room: int, now_s: float
) -> int:
    """Fill the batch with whole prompts up to `room`, each given `reserved_blocks` for good."""
    while (
        pool.ranks[replica].first_waiting != NONE
        and size < room
        and pool.ranks[replica].free_blocks >= pool.settings.reserved_blocks
    ):
        i = admit(pool, requests, replica, pool.settings.reserved_blocks, now_s)
        size = add(pool, slot, size, i, pool.sequences[i].prompt_tokens)
    return size


@inner
def form_batch_orca(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """Orca's iteration-level scheduling (Yu et al., OSDI 2022, algorithm 1): everything that is ready, then waiting
    requests, prompts whole; a request is admitted with blocks for the longest sequence that the engine serves.
    """
    room = pool.settings.max_batch_seqs - take_group(pool, replica, slot)
    row = ready_row(pool, replica)
    size = min(pool.ranks[replica].num_ready, room)
    for position in range(size):
        add(pool, slot, position, pool.batches[row, MEMBERS, position], 1)
    drop_ready(pool, replica, size, pool.ranks[replica].num_ready)
    return admit_reserved(pool, requests, replica, slot, size, room, now_s)


@inner
def form_batch_faster_transformer(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """FasterTransformer's request-level batching: a batch runs until all its requests have finished, then the next is
    formed; as Orca's, admission reserves the longest sequence.
    """
    row = ready_row(pool, replica)
    size = 0
    while size < pool.ranks[replica].num_ready:
        i = pool.batches[row, MEMBERS, size]
        if pool.sequences[i].group != pool.sequences[pool.batches[row, MEMBERS, 0]].group:
            break
        add(pool, slot, size, i, 1)
        size += 1
    if size > 0:
        drop_ready(pool, replica, size, pool.ranks[replica].num_ready)
        return size
    room = pool.settings.max_batch_seqs
    size = admit_reserved(pool, requests, replica, slot, 0, room, now_s)
    pool.ranks[replica].num_groups += 1
    for position in range(size):
        pool.sequences[pool.batches[slot, MEMBERS, position]].group = pool.ranks[replica].num_groups
    return size


@inner
def form_batch_lightllm(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """LightLLM's token-level router (`ReqQueue`, 1.0): decode steps of everything; waiting prompts are looked at when
    nothing runs or after `max_waiting_steps` decode steps, and run on their own.

    A prompt is admitted if the most blocks that all running requests will ever hold together, knowing their outputs,
    stays below the pool. The block size is one token.
    """
    is_empty = pool.ranks[replica].num_ready == 0 and pool.ranks[replica].ready_group == NONE
    size = 0
    if is_empty or pool.ranks[replica].waited_steps >= pool.settings.max_waiting_steps:
        if pool.ranks[replica].first_waiting != NONE:
            dissolve(pool, replica)
            size = admit_by_peak(pool, requests, replica, slot, now_s)
        if size > 0 or not is_empty:
            pool.ranks[replica].waited_steps = 0
        if size > 0:
            return size
    if is_empty:
        return 0
    pool.ranks[replica].waited_steps += 1
    take_group(pool, replica, slot)
    row = ready_row(pool, replica)
    num_ready = pool.ranks[replica].num_ready
    for position in range(min(num_ready, pool.ranks[replica].free_blocks)):
        i = pool.batches[row, MEMBERS, position]
        take_block(pool, replica, i)
        size = add(pool, slot, size, i, 1)
    drop_ready(pool, replica, size, num_ready)
    return size


@inner
def admit_by_peak(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """Admit the prompts that LightLLM's peak test lets in."""
    row = ready_row(pool, replica)
    considered = 0
    for position in range(pool.ranks[replica].num_ready):
        i = pool.batches[row, MEMBERS, position]
        considered = consider(pool, row, considered, i, pool.sequences[i].processed_tokens)
    size, num_tokens = 0, 0
    while pool.ranks[replica].first_waiting != NONE:
        i = pool.ranks[replica].first_waiting
        prompt = pool.sequences[i].prompt_tokens
        if (
            num_tokens + prompt > pool.settings.max_num_batched_tokens
            or pool.ranks[replica].num_running == pool.settings.max_num_seqs
            or size == pool.settings.max_batch_seqs
        ):
            break
        considered = consider(pool, row, considered, i, prompt + 1)
        if peak_blocks(pool, row, considered) >= pool.settings.num_blocks:
            break
        num_blocks = next_prompt_blocks(pool, i)
        admit(pool, requests, replica, num_blocks, now_s)
        size = add(pool, slot, size, i, prompt)
        num_tokens += prompt
    return size


@inner
def consider(pool: PoolTables, row: int, size: int, i: int, held_tokens: int) -> int:
    """Insert (steps left, tokens held) of request `i` into the scratch lists, the most steps first."""
    left = max(pool.sequences[i].total_tokens - held_tokens - 1, 0)
    position = size
    while position > 0 and pool.batches[row, SCRATCH, position - 1] < left:
        pool.batches[row, SCRATCH, position] = pool.batches[row, SCRATCH, position - 1]
        pool.batches[row, SCRATCH + 1, position] = pool.batches[row, SCRATCH + 1, position - 1]
        position -= 1
    pool.batches[row, SCRATCH, position] = left
    pool.batches[row, SCRATCH + 1, position] = held_tokens
    return size + 1


@inner
def peak_blocks(pool: PoolTables, row: int, size: int) -> int:
    """Return the most tokens that the requests of the scratch lists will hold together: when the k-th longest ends, k
    of them are left, each with its tokens of then.
    """
    peak, held = 0, 0
    for position in range(size):
        held += pool.batches[row, SCRATCH + 1, position]
        peak = max(peak, pool.batches[row, SCRATCH, position] * (position + 1) + held)
    return peak
