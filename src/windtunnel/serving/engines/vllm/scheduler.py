"""vLLM V1's policy, and by the same loop TensorRT-LLM's two: one budget of tokens, running requests first."""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.serving.codes import PRIORITY, TRTLLM
from windtunnel.serving.kv.encoder_cache import begin_encoding, encodable, encode
from windtunnel.serving.kv.windows import (
    give_back,
    has_blocks,
    most_window_blocks,
    newly_passed_blocks,
    num_blocks_for,
    pass_blocks,
    pool_blocks,
    take_blocks,
)
from windtunnel.serving.schedulers.adapters import may_run, put_back, set_aside
from windtunnel.serving.schedulers.batch import (
    add_chunk,
    decode_step_blocks,
    gained_tokens,
    is_in_flight,
    leave_latest,
    look_up_waiting,
    preempt,
    rebuild_rank,
    start,
    take_decode_step,
    wanted_tokens,
)
from windtunnel.serving.state.records import (
    NONE,
    PHASES,
    PREFILLING,
    SLIDING,
    Ints,
    KernelSettings,
    Rank,
    Requests,
    Slot,
)
from windtunnel.serving.state.tables import PoolTables


@inner
def form_batch_vllm_v1(pool: PoolTables, requests: Requests, rank: int, slot: int, now_s: float) -> int:
    """Form a batch by vLLM V1's `Scheduler.schedule` (0.8 to 0.33): running requests first in their order, then waiting
    ones, one token budget.

    A decoding request takes one token, a prompt the rest of it, cut by the budget and `long_prefill_token_threshold`.
    When no block is free the last running request is preempted (under priority the least important). Waiting requests
    are admitted only if nothing was preempted, in order, without skipping ahead, from 0.19 on only if their whole
    prompt fits (`reserves_prompt`). The usual step, where tokens and blocks suffice, costs O(prefilling requests);
    others visit every running request.

    With `scheduler` TRTLLM this is TensorRT-LLM's GUARANTEED_NO_EVICT (1.0 to 1.3): generation first, context requests
    while `max_num_tokens` and `max_batch_size` allow, admitted only if blocks for prompt and all outputs are free.
    With TRTLLM_MAX_UTILIZATION it is that engine's MAX_UTILIZATION (`MaxUtilizationScheduler`, capacityScheduler.cpp,
    1.0 to 1.3): admission looks at the next step only, and on shortage the request that started last is paused, its
    outputs becoming part of its prompt. TensorRT-LLM gives a prompt that it cuts into chunks all its blocks with the
    first one, where here each chunk takes its own; without chunked context, the default, that is the same.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    if pool.encoder is not None:
        begin_encoding(pool, rank)
    num_decodes, budget, any_preempted = schedule_running(pool, requests, rank, slot)
    if settings.balance_steps > 0 and ranks[rank].waiting != NONE:
        slots[slot].looks_again = 1
    if slots[slot].holds_back or waits_for_a_fuller_batch(settings, ranks, slots, rank, slot, num_decodes):
        return num_decodes
    if not any_preempted:
        admit_waiting(pool, requests, rank, slot, budget, now_s)
    if pool.windows is not None:
        if ranks[rank].waiting != NONE:
            slots[slot].looks_again = 1
    return num_decodes


@inner
def schedule_running(pool: PoolTables, requests: Requests, rank: int, slot: int) -> tuple[int, int, bool]:
    """Schedule the requests that run: at once where tokens and blocks suffice, else one by one.

    Returns (decoding requests scheduled, token budget left, whether anything was preempted).
    """
    settings, windows, speculation = pool.settings, pool.windows, pool.speculation
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    first_slot = rank * settings.num_stages
    num_decodes = slots[slot].num_decoding
    budget = settings.max_num_batched_tokens - num_decodes
    if speculation is not None:
        budget = settings.max_num_batched_tokens - num_decodes * speculation.num_queries
    num_prefilling = ranks[rank].num_prefilling
    demand, num_needed = demand_of_running(pool, requests, rank, slot, budget)
    fits = 0 <= demand <= budget and has_blocks(settings, windows, ranks, rank, num_needed)
    if pool.encoder is not None:
        fits = fits and (num_prefilling == 0 or settings.encoder_cache_tokens == 0)
    if fits and (demand > 0) == (num_prefilling > 0):
        take_decode_step(pool, rank, slot, num_needed)
        if windows is not None:  # of all of them, before what is cached is looked at
            for position in range(num_prefilling):
                i = lists[first_slot, PREFILLING, position]
                pass_blocks(settings, requests, ranks, rank, i, requests[i].computed_tokens)
        for position in range(num_prefilling):
            i = lists[first_slot, PREFILLING, position]
            chunk = min(wanted_tokens(settings, requests, i), demand)
            add_chunk(pool, requests, rank, slot, i, chunk)
        return num_decodes, budget - demand, False
    num_scheduled, any_preempted = 0, False
    while num_scheduled == 0:  # an empty step: the engine schedules again at once
        num_decodes, budget, any_preempted = extend_running(pool, requests, rank, slot)
        num_scheduled = num_decodes + slots[slot].batch_size
        if not any_preempted or ranks[rank].num_running == 0:
            break
    slots[slot].gave_up = any_preempted and num_scheduled == 0
    return num_decodes, budget, any_preempted


@inner
def demand_of_running(pool: PoolTables, requests: Requests, rank: int, slot: int, budget: int) -> tuple[int, int]:
    """Return the prompt tokens that running requests would compute in a step, and the blocks that all would take."""
    settings, ranks, lists = pool.settings, pool.ranks, pool.lists
    block_size = settings.block_size
    reserves = settings.scheduler == TRTLLM
    num_needed = 0 if reserves else decode_step_blocks(settings, pool.speculation, pool.slots, lists, slot)
    num_prefilling = ranks[rank].num_prefilling
    demand = 0
    for position in range(num_prefilling):
        i = lists[rank * settings.num_stages, PREFILLING, position]
        chunk = wanted_tokens(settings, requests, i)
        if num_prefilling == 1 and ranks[rank].last == i:
            chunk = min(chunk, budget)
        demand += chunk
        if not reserves:
            computed = requests[i].computed_tokens
            num_needed += num_blocks_for(computed + chunk, block_size) - num_blocks_for(computed, block_size)
    return demand, num_needed


@inner
def admit_waiting(pool: PoolTables, requests: Requests, rank: int, slot: int, budget: int, now_s: float) -> None:
    """Admit waiting requests in their order while there are tokens, blocks and places for them."""
    settings, ranks, slots, skipped = pool.settings, pool.ranks, pool.slots, NONE
    while budget > 0 and ranks[rank].waiting != NONE:
        if ranks[rank].num_running >= settings.max_num_seqs:
            break
        i = ranks[rank].waiting
        if requests[i].arrival_s > slots[slot].cutoff_s:
            slots[slot].looks_again = 1
            break
        if pool.adapters is not None:
            if not may_run(pool.adapters, settings.first_rank + rank, i):
                skipped = set_aside(requests, ranks, rank, i, skipped)
                continue
        unused = look_up_waiting(pool, requests, rank, i)
        chunk = wanted_tokens(settings, requests, i)
        if chunk > budget:
            if not settings.chunked_prefill:
                break
            chunk = budget
        if pool.encoder is not None:
            chunk = encodable(pool, requests, rank, i, chunk)
            if chunk == 0:
                slots[slot].looks_again = 1
                break
        if settings.reserves_prompt and not fits_whole(settings, pool.windows, requests, ranks, rank, i, unused):
            break
        begin = requests[i].computed_tokens
        if not start(pool, requests, rank, slot, i, chunk, unused, now_s):
            break
        if pool.encoder is not None:
            encode(pool, rank, i, begin, chunk)
        budget -= chunk
    if pool.adapters is not None:
        put_back(requests, ranks, rank, skipped)


@inner
def fits_whole(
    settings: KernelSettings,
    windows: int | None,
    requests: Requests,
    ranks: Records[Rank],
    rank: int,
    i: int,
    unused: int,
) -> bool:
    """Whether blocks are free for all known tokens of waiting request `i`, beside `unused` ones of its cached prefix.

    vLLM's `KVCacheManager.can_fit_full_sequence` (0.19), `allocate_slots` with `full_sequence_must_fit` (0.21 on, where
    a group with a window counts what it holds at most; 0.19 and 0.20 counted every block).
    """
    num_tokens = requests[i].target_tokens
    num_needed = num_blocks_for(num_tokens, settings.block_size) - requests[i].computed_tokens // settings.block_size
    num_window_blocks = int64(0)
    if windows is not None:
        num_window_blocks = max(most_window_blocks(settings, num_tokens) - requests[i].passed_blocks, 0)
        num_needed = pool_blocks(settings, num_needed, num_window_blocks)
    fits = num_needed + settings.blocks_per_request + unused <= ranks[rank].free_blocks
    return fits and settings.window_pool * num_window_blocks <= ranks[rank].free_window_blocks


@inner
def extend_running(pool: PoolTables, requests: Requests, rank: int, slot: int) -> tuple[int, int, bool]:
    """Give tokens and blocks to running requests one at a time: vLLM V1's pass, for steps in which either is short.

    Requests in a batch under way have nothing to schedule and are not preempted. Returns (decoding requests scheduled,
    token budget left, whether anything was preempted).
    """
    settings, windows, speculation = pool.settings, pool.windows, pool.speculation
    ranks, slots = pool.ranks, pool.slots
    block_size = settings.block_size
    budget = settings.max_num_batched_tokens
    num_queries = 1 if speculation is None else speculation.num_queries
    num_gained = 1
    if speculation is not None:
        num_gained = gained_tokens(speculation, slots, slot)
    any_preempted = False
    if pool.encoder is not None:
        begin_encoding(pool, rank)
    i = ranks[rank].first
    while i != NONE and budget > 0:
        if requests[i].is_decoding:
            if budget < num_queries:
                break
            num_tokens = num_gained if requests[i].slot == slot else 0
            computed = slots[requests[i].slot].steps - requests[i].joined
        else:
            computed = requests[i].computed_tokens
            num_tokens = min(wanted_tokens(settings, requests, i), budget)
            if pool.encoder is not None:
                num_tokens = encodable(pool, requests, rank, i, num_tokens)
        num_needed = 0
        if settings.scheduler != TRTLLM:
            num_needed = num_blocks_for(computed + num_tokens, block_size) - num_blocks_for(computed, block_size)
        passed = 0
        if windows is not None and num_tokens > 0:
            passed = newly_passed_blocks(settings, requests, i, computed, num_tokens)
            give_back(settings, ranks, rank, passed)
        gave_up = False
        while num_tokens > 0 and not has_blocks(settings, windows, ranks, rank, num_needed) and not gave_up:
            victim = find_victim(settings, requests, ranks, slots, rank, slot)
            gave_up = victim in (NONE, i)
            if windows is not None and gave_up:
                give_back(settings, ranks, rank, -passed)
            if victim != NONE:
                given_back = requests[victim].step_tokens
                if requests[victim].is_decoding and given_back > 0:
                    given_back = num_queries
                budget += given_back
                preempt(pool, requests, rank, victim)
                any_preempted = True
        if gave_up:
            break
        take_blocks(settings, windows, ranks, rank, num_needed)
        if not requests[i].is_decoding:
            requests[i].passed_blocks += passed
            if pool.encoder is not None:
                encode(pool, rank, i, requests[i].computed_tokens, num_tokens)
        requests[i].step_tokens = num_tokens
        budget -= num_queries if requests[i].is_decoding and num_tokens > 0 else num_tokens
        i = requests[i].after
    return settle_running(pool, requests, rank, slot, num_gained), budget, any_preempted


@inner
def settle_running(pool: PoolTables, requests: Requests, rank: int, slot: int, num_gained: int) -> int:
    """Put what `extend_running` gave into the slot's batch; decoding requests that got nothing are left out.

    Returns the number of decoding requests in the step.
    """
    settings, ranks, slots, lists = pool.settings, pool.ranks, pool.slots, pool.lists
    num_decodes = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].step_tokens > 0:
            if requests[i].is_decoding:
                num_decodes += 1
            else:
                add_chunk(pool, requests, rank, slot, i, requests[i].step_tokens)
        i = requests[i].after
    if num_decodes > 0:
        slots[slot].num_skipped = slots[slot].num_decoding - num_decodes
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding and requests[i].slot == slot and requests[i].step_tokens == 0 and num_decodes > 0:
            skip_decode(settings, requests, slots, lists, i, num_gained)
            if pool.adapters is not None and pool.adapters.of_request[i] != NONE:
                pool.adapters.ranks[settings.first_rank + rank].skipped += 1
        requests[i].step_tokens = 0
        i = requests[i].after
    slots[slot].looks_again = 1
    rebuild_rank(pool, requests, rank)
    return num_decodes


@inner
def skip_decode(
    settings: KernelSettings, requests: Requests, slots: Records[Slot], lists: Ints, i: int, num_gained: int
) -> None:
    """Leave decoding request `i` out of its slot's step: it needs its next block `num_gained` steps later."""
    slot, block_size = requests[i].slot, settings.block_size
    lists[slot, PHASES, requests[i].joined % block_size] -= 1
    lists[slot, SLIDING, requests[i].joined % block_size] -= requests[i].slides
    leave_latest(requests, slots, i, slots[slot].steps - requests[i].joined)
    slots[slot].skipped_since_s += requests[i].last_token_s
    slots[slot].skipped_context_tokens += slots[slot].steps - requests[i].joined
    slots[slot].joined_squares -= requests[i].joined * requests[i].joined
    requests[i].joined += num_gained
    slots[slot].joined_squares += requests[i].joined * requests[i].joined
    slots[slot].skipped_squares += requests[i].joined * requests[i].joined
    requests[i].skipped_at = slots[slot].num_verified
    lists[slot, PHASES, requests[i].joined % block_size] += 1
    lists[slot, SLIDING, requests[i].joined % block_size] += requests[i].slides


@inner
def find_victim(
    settings: KernelSettings, requests: Requests, ranks: Records[Rank], slots: Records[Slot], rank: int, slot: int
) -> int:
    """Find the running request that is given up first: the last, or under priority the greatest (priority, arrival)."""
    victim = NONE
    i = ranks[rank].last
    while i != NONE:
        if not is_in_flight(requests, slots, slot, i):
            if settings.queue_order != PRIORITY:
                return i
            if (
                victim == NONE
                or requests[i].priority > requests[victim].priority
                or (
                    requests[i].priority == requests[victim].priority
                    and requests[i].sequence > requests[victim].sequence
                )
            ):
                victim = i
        i = requests[i].before
    return victim


@inner
def waits_for_a_fuller_batch(
    settings: KernelSettings, ranks: Records[Rank], slots: Records[Slot], rank: int, slot: int, num_decodes: int
) -> bool:
    """Hold prompts back by TensorRT-LLM's batch wait (`PyExecutor._waiting_requests`, 1.1 to 1.3), for fewer mixed
    steps.

    While requests decode, waiting prompts are held back until tokens for `batch_wait_max_tokens_ratio` of
    `max_num_tokens` would be scheduled, or `batch_wait_timeout_iters` steps have passed.
    """
    if settings.batch_wait_steps == 0 or ranks[rank].num_waiting == 0 or num_decodes == 0:
        return False
    fills = num_decodes + ranks[rank].waiting_tokens >= settings.batch_wait_tokens
    if not fills:
        slots[slot].looks_again = 1
    if fills or ranks[rank].waited_steps >= settings.batch_wait_steps:
        ranks[rank].waited_steps = 0
        return False
    ranks[rank].waited_steps += 1
    return True
