"""How an engine forms the next batch. Each policy names the engine and version that it mirrors.

A policy fills the lists BATCH and BATCH_TOKENS of its lane with `batch_size` prefill chunks, takes the blocks that the
step needs, and returns how many requests decode in it. Without pipeline parallelism a rank has one lane.
"""

from collections.abc import Iterable

import numpy as np

from windtunnel.kernels.heap import meld, push
from windtunnel.kernels.jit import inner
from windtunnel.kernels.kvcache import acquire, caches_when_scheduled, entry_of, evict, look_up, release, share
from windtunnel.kernels.state import (
    BATCH,
    BATCH_ENDS,
    BATCH_TOKENS,
    DEADLINE,
    FAIR_SHARE,
    FAIR_TOKENS,
    FCFS,
    FINISH_KEY,
    FINISH_VALUE,
    LEAST_KV,
    LEAST_WAITING,
    MODULUS,
    MOST_REQUESTS,
    MULTIPLIER,
    NONE,
    PHASES,
    POWER_OF_TWO,
    PREFILLING,
    PREFIX_AFFINITY,
    PRIORITY,
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
    SGLANG,
    SHORTEST,
    SLIDING,
    TRTLLM,
    UP,
)
from windtunnel.kernels.windows import (
    blocks_passed_in_step,
    give_back,
    has_blocks,
    newly_passed_blocks,
    next_change,
    num_blocks_for,
    pass_blocks,
    passed_blocks,
    pool_blocks,
    stop_sliding,
    take_blocks,
    window_blocks,
)


def in_use(schedulers: Iterable[int]) -> tuple[int | None, int | None]:
    """Whether any of these replicas forms its batches by `form_batch_vllm_v1`, and by `form_batch_sglang`: 1 or None.

    Numba leaves out what stands under `if x is not None` where x is None before it types it, so that a run compiles
    only the policies that it uses: SGLang's are a seventh of the loop.
    """
    are_sglang = [scheduler == SGLANG for scheduler in schedulers]
    return None if all(are_sglang) else 1, 1 if any(are_sglang) else None


@inner
def gained_tokens(speculation, lanes, lane):
    """Tokens that each decoding request gains in the lane's next decode step.

    With speculation step v gains floor((v + 1) E) - floor(v E): whole numbers whose mean is E and that are as even as
    they can be, the same for all requests of the lane.
    """
    before = np.floor(lanes[lane].num_verified * speculation.tokens_per_step)
    return np.int64(np.floor((lanes[lane].num_verified + 1) * speculation.tokens_per_step) - before)


@inner
def blocks_of_step(settings, speculation, lanes, lists, lane):
    """Blocks that the lane's decoding requests need for its next decode step, with speculation."""
    num_blocks = 0
    for token in range(gained_tokens(speculation, lanes, lane)):
        num_blocks += lists[lane, PHASES, (lanes[lane].steps + token) % settings.block_size]
    return num_blocks


@inner
def decode_step_blocks(settings, speculation, lanes, lists, lane):
    """Blocks of tokens that the lane's decoding requests need for its next decode step."""
    if speculation is not None:
        return blocks_of_step(settings, speculation, lanes, lists, lane)
    return lists[lane, PHASES, lanes[lane].steps % settings.block_size]


@inner
def take_decode_step(settings, windows, speculation, ranks, lanes, lists, rank, lane, num_blocks):
    """Take the `num_blocks` of `decode_step_blocks`; what fell out of windows goes back."""
    take_blocks(settings, windows, ranks, rank, num_blocks)
    if windows is not None:
        give_back(settings, ranks, rank, passed_of_step(settings, speculation, lanes, lists, lane))


@inner
def passed_of_step(settings, speculation, lanes, lists, lane):
    """Blocks of a window group that go back in the lane's next decode step."""
    num_gained = 1
    if speculation is not None:
        num_gained = gained_tokens(speculation, lanes, lane)
    return blocks_passed_in_step(settings, lists, lane, lanes[lane].steps, num_gained)


@inner
def held_blocks(settings, windows, requests, lanes, i):
    """Blocks of its rank's pool that running request `i` holds."""
    num_tokens = requests[i].computed_tokens + requests[i].step_tokens
    if settings.scheduler == TRTLLM:
        num_tokens = requests[i].input_tokens + requests[i].output_tokens
    elif requests[i].is_decoding:
        num_tokens += lanes[requests[i].lane].steps - requests[i].joined - requests[i].computed_tokens
    num_blocks = num_blocks_for(num_tokens, settings.block_size)
    if windows is not None:
        num_blocks = pool_blocks(settings, num_blocks, window_blocks(settings, requests, i, num_tokens))
    return num_blocks + settings.blocks_per_request


@inner
def held_window_blocks(settings, requests, lanes, i):
    """Blocks of the windows' own pool that running request `i` holds."""
    num_tokens = requests[i].computed_tokens + requests[i].step_tokens
    if requests[i].is_decoding:
        num_tokens += lanes[requests[i].lane].steps - requests[i].joined - requests[i].computed_tokens
    return settings.window_pool * window_blocks(settings, requests, i, num_tokens)


@inner
def blocks_to_start(settings, windows, requests, i, num_tokens):
    """Blocks to admit waiting request `i`, of which what is cached is found, with a chunk of `num_tokens`: (of the
    rank's pool, of the windows' own).

    What is found holds blocks of the groups without a window already; `passed_blocks` of those with one are not needed.
    """
    found = requests[i].computed_tokens
    end = found + num_tokens
    if settings.scheduler == TRTLLM:
        end = requests[i].input_tokens + requests[i].output_tokens
    num_blocks = num_blocks_for(end, settings.block_size) - found // settings.block_size
    num_window_blocks = np.int64(0)
    if windows is not None:
        num_window_blocks = window_blocks(settings, requests, i, end)
        num_blocks = pool_blocks(settings, num_blocks, num_window_blocks)
    return num_blocks + settings.blocks_per_request, settings.window_pool * num_window_blocks


@inner
def enqueue(settings, requests, ranks, rank, i):
    """Put request `i` on the waiting heap: first come first served, or by `queue_key` and then arrival.

    Under first come first served a preempted request belongs in front; it was sent before any that waits, which puts
    it there.
    """
    requests[i].left = NONE
    requests[i].right = NONE
    requests[i].order = requests[i].sequence
    if settings.queue_order != FCFS:
        requests[i].order += requests[i].queue_key * MOST_REQUESTS
    ranks[rank].waiting = meld(requests.order, requests.left, requests.right, ranks[rank].waiting, i)
    ranks[rank].num_waiting += 1
    ranks[rank].waiting_tokens += requests[i].target_tokens


@inner
def set_queue_key(settings, requests, ranks, rank, i, prompt_tokens):
    """What request `i` is ordered by while it waits, on a rank that computes `prompt_tokens` of its prompt.

    `deadline` in milliseconds. `fair_share` is start-time fair queueing (Goyal, Vin and Cheng, 1996) with the weights
    of the virtual token counter (Sheng et al., OSDI 2024): a tenant's requests start at the service that it has had, at
    least at that of the latest admitted one; a prompt token counts once when the request is sent, an output token twice
    when it ends.
    """
    if settings.queue_order == PRIORITY:
        requests[i].queue_key = requests[i].priority
    elif settings.queue_order == SHORTEST:
        requests[i].queue_key = requests[i].input_tokens
    elif settings.queue_order == DEADLINE:
        requests[i].queue_key = np.int64(
            min((requests[i].arrival_s + requests[i].ttft_limit_s) * 1e3, 1.0 * MOST_REQUESTS)
        )
    elif settings.queue_order == FAIR_SHARE:
        tenant = requests[i].tenant
        requests[i].queue_key = max(requests[tenant].tenant_tag, ranks[rank].fair_tag)
        requests[tenant].tenant_tag = requests[i].queue_key + num_blocks_for(prompt_tokens, FAIR_TOKENS)


@inner
def admit(settings, requests, ranks, lists, rank, i, now_s):
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
    if requests[i].scheduled_s != requests[i].scheduled_s:
        requests[i].scheduled_s = now_s


@inner
def remaining_output(requests, i):
    """Output tokens that request `i`, not decoding, has yet to produce."""
    return requests[i].output_tokens - (requests[i].target_tokens - requests[i].input_tokens)


@inner
def link(requests, ranks, rank, i):
    """Put request `i` at the end of the running list."""
    last = ranks[rank].last
    requests[i].before = last
    requests[i].after = NONE
    if last == NONE:
        ranks[rank].first = i
    else:
        requests[last].after = i
    ranks[rank].last = i
    ranks[rank].num_running += 1


@inner
def unlink(requests, ranks, rank, i):
    """Take request `i` out of the running list."""
    before, after = requests[i].before, requests[i].after
    if before == NONE:
        ranks[rank].first = after
    else:
        requests[before].after = after
    if after == NONE:
        ranks[rank].last = before
    else:
        requests[after].before = before
    ranks[rank].num_running -= 1


@inner
def stop_decoding(settings, windows, requests, lanes, lists, i):
    """Take request `i` out of its lane's decoding sums; its computed tokens become explicit."""
    lane = requests[i].lane
    requests[i].computed_tokens = lanes[lane].steps - requests[i].joined
    requests[i].is_decoding = 0
    lanes[lane].num_decoding -= 1
    lanes[lane].context_tokens -= requests[i].computed_tokens
    lists[lane, PHASES, requests[i].joined % settings.block_size] -= 1
    if windows is not None:
        stop_sliding(settings, requests, lists, i)


@inner
def is_in_flight(requests, lanes, lane, i):
    """Whether a batch that is still under way, of another lane than the idle `lane`, holds request `i`."""
    if requests[i].is_decoding:
        return requests[i].lane != lane and lanes[requests[i].lane].batch_decodes
    return requests[i].chunks_in_flight > 0


@inner
def leave_latest(requests, lanes, i, computed_tokens):
    """Request `i`, which decodes with so many tokens computed, is not in its lane's next decode step: keep the time of
    its latest token, which the lane has where that step was all it waited for.
    """
    lane = requests[i].lane
    was_left_out = requests[i].skipped_at != NONE and requests[i].skipped_at == lanes[lane].num_verified - 1
    if computed_tokens == requests[i].target_tokens or was_left_out:
        lanes[lane].num_joined -= 1
        lanes[lane].joined_since_s -= requests[i].last_token_s
    else:
        requests[i].last_token_s = lanes[lane].last_decode_s


@inner
def preempt(settings, windows, cache, requests, ranks, lanes, lists, rank, i):
    """Free all of running request `i` and put it back in the queue, to be computed again from its first token, or from
    what is cached of it then.

    Its outputs so far become part of what must be prefilled (vLLM V1 `Scheduler._preempt_request`, SGLang
    `retract_decode`). vLLM caches what it had computed, SGLang drops it.
    """
    held = held_blocks(settings, windows, requests, lanes, i)
    if windows is not None:
        ranks[rank].free_window_blocks += held_window_blocks(settings, requests, lanes, i)
    if cache is None:
        ranks[rank].free_blocks += held
    decoded = requests[i].is_decoding
    if decoded:
        stop_decoding(settings, windows, requests, lanes, lists, i)
    if cache is not None:
        kept = 0 if settings.scheduler == SGLANG else requests[i].computed_tokens
        release(settings, cache, ranks, rank, i, held, kept)
    if decoded:
        leave_latest(requests, lanes, i, requests[i].computed_tokens)
        requests[i].target_tokens = requests[i].computed_tokens + 1
    ranks[rank].remaining_tokens -= remaining_output(requests, i)
    requests[i].computed_tokens = 0
    requests[i].step_tokens = 0
    requests[i].passed_blocks = 0
    requests[i].num_preemptions += 1
    unlink(requests, ranks, rank, i)
    enqueue(settings, requests, ranks, rank, i)


@inner
def rebuild_rank(settings, windows, requests, ranks, lanes, lists, rank):
    """Rebuild the lists that a slow pass invalidates: who is prefilling, and the heaps of finishing steps."""
    first_lane = rank * settings.num_stages
    for lane in range(first_lane, first_lane + settings.num_stages):
        lanes[lane].finish_size = 0
    num_prefilling = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding:
            lane = requests[i].lane
            end = requests[i].joined + requests[i].input_tokens + requests[i].output_tokens - 1
            if windows is not None:
                end = next_change(settings, requests, i)
            lanes[lane].finish_size = push(
                lists[lane, FINISH_KEY], lists[lane, FINISH_VALUE], lanes[lane].finish_size, end, i
            )
        elif requests[i].computed_tokens < requests[i].target_tokens:
            lists[first_lane, PREFILLING, num_prefilling] = i
            num_prefilling += 1
        i = requests[i].after
    ranks[rank].num_prefilling = num_prefilling


@inner
def wanted_tokens(settings, requests, i):
    """Prompt tokens that request `i` would compute in a step with tokens to spare."""
    num_tokens = requests[i].target_tokens - requests[i].computed_tokens
    threshold = settings.long_prefill_token_threshold
    return threshold if 0 < threshold < num_tokens else num_tokens


@inner
def add_chunk(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, num_tokens):
    """Put the next `num_tokens` prompt tokens of request `i` into the lane's batch."""
    position = lanes[lane].batch_size
    if windows is not None:
        pass_blocks(settings, requests, ranks, rank, i, requests[i].computed_tokens)
    requests[i].computed_tokens += num_tokens
    requests[i].chunks_in_flight += 1
    lists[lane, BATCH, position] = i
    lists[lane, BATCH_TOKENS, position] = num_tokens
    lists[lane, BATCH_ENDS, position] = requests[i].computed_tokens == requests[i].target_tokens
    lanes[lane].batch_size = position + 1
    if cache is not None and caches_when_scheduled(settings):
        share(settings, cache, ranks, rank, i, requests[i].computed_tokens)


@inner
def drop_scheduled(settings, requests, ranks, lists, rank):
    """Keep among the prefilling only those with tokens left to schedule."""
    first_lane = rank * settings.num_stages
    kept = 0
    for position in range(ranks[rank].num_prefilling):
        i = lists[first_lane, PREFILLING, position]
        if requests[i].computed_tokens < requests[i].target_tokens:
            lists[first_lane, PREFILLING, kept] = i
            kept += 1
    ranks[rank].num_prefilling = kept


@inner
def walk_running(settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane):
    """vLLM V1's pass over the running list, one request at a time, for steps in which tokens or blocks are short.

    Requests in a batch under way have nothing to schedule and are not preempted. Returns (decoding requests scheduled,
    token budget left, whether anything was preempted).
    """
    block_size = settings.block_size
    budget = settings.max_num_batched_tokens
    num_queries = 1 if speculation is None else speculation.num_queries
    num_gained = 1
    if speculation is not None:
        num_gained = gained_tokens(speculation, lanes, lane)
    any_preempted = False
    i = ranks[rank].first
    while i != NONE and budget > 0:
        if requests[i].is_decoding:
            if budget < num_queries:
                break
            num_tokens = num_gained if requests[i].lane == lane else 0
            computed = lanes[requests[i].lane].steps - requests[i].joined
        else:
            computed = requests[i].computed_tokens
            num_tokens = min(wanted_tokens(settings, requests, i), budget)
        num_needed = 0
        if settings.scheduler != TRTLLM:
            num_needed = num_blocks_for(computed + num_tokens, block_size) - num_blocks_for(computed, block_size)
        passed = 0
        if windows is not None and num_tokens > 0:
            passed = newly_passed_blocks(settings, requests, i, computed, num_tokens)
            give_back(settings, ranks, rank, passed)
        gave_up = False
        while num_tokens > 0 and not has_blocks(settings, windows, ranks, rank, num_needed) and not gave_up:
            victim = find_victim(settings, requests, ranks, lanes, rank, lane)
            gave_up = victim in (NONE, i)
            if windows is not None and gave_up:
                give_back(settings, ranks, rank, -passed)
            if victim != NONE:
                given_back = requests[victim].step_tokens
                if requests[victim].is_decoding and given_back > 0:
                    given_back = num_queries
                budget += given_back
                preempt(settings, windows, cache, requests, ranks, lanes, lists, rank, victim)
                any_preempted = True
        if gave_up:
            break
        take_blocks(settings, windows, ranks, rank, num_needed)
        if not requests[i].is_decoding:
            requests[i].passed_blocks += passed
        requests[i].step_tokens = num_tokens
        budget -= num_queries if requests[i].is_decoding and num_tokens > 0 else num_tokens
        i = requests[i].after

    num_decodes = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].step_tokens > 0:
            if requests[i].is_decoding:
                num_decodes += 1
            else:
                add_chunk(
                    settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, requests[i].step_tokens
                )
        i = requests[i].after
    if num_decodes > 0:
        lanes[lane].num_skipped = lanes[lane].num_decoding - num_decodes
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding and requests[i].lane == lane and requests[i].step_tokens == 0 and num_decodes > 0:
            lists[lane, PHASES, requests[i].joined % block_size] -= 1
            lists[lane, SLIDING, requests[i].joined % block_size] -= requests[i].slides
            leave_latest(requests, lanes, i, lanes[lane].steps - requests[i].joined)
            lanes[lane].skipped_since_s += requests[i].last_token_s
            lanes[lane].skipped_context_tokens += lanes[lane].steps - requests[i].joined
            requests[i].joined += num_gained
            requests[i].skipped_at = lanes[lane].num_verified
            lists[lane, PHASES, requests[i].joined % block_size] += 1
            lists[lane, SLIDING, requests[i].joined % block_size] += requests[i].slides
        requests[i].step_tokens = 0
        i = requests[i].after
    lanes[lane].looks_again = 1
    rebuild_rank(settings, windows, requests, ranks, lanes, lists, rank)
    return num_decodes, budget, any_preempted


@inner
def find_victim(settings, requests, ranks, lanes, rank, lane):
    """The running request that is given up first: the last, or under priority the greatest (priority, arrival)."""
    victim = NONE
    i = ranks[rank].last
    while i != NONE:
        if not is_in_flight(requests, lanes, lane, i):
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
def form_batch_vllm_v1(settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane, now_s):
    """vLLM V1 `Scheduler.schedule` (0.8 to 0.24): running requests first in their order, then waiting ones, one token
    budget.

    A decoding request takes one token, a prompt the rest of it, cut by the budget and `long_prefill_token_threshold`.
    When no block is free the last running request is preempted (under priority the least important). Waiting requests
    are admitted only if nothing was preempted, in order, without skipping ahead. The usual step, where tokens and
    blocks suffice, costs O(prefilling requests); others walk the running list.

    With `scheduler` TRTLLM this is TensorRT-LLM's GUARANTEED_NO_EVICT (1.0 to 1.3): generation first, context requests
    while `max_num_tokens` and `max_batch_size` allow, admitted only if blocks for prompt and all outputs are free.
    With TRTLLM_MAX_UTILIZATION it is that engine's MAX_UTILIZATION (`MaxUtilizationScheduler`, capacityScheduler.cpp,
    1.0 to 1.3): admission looks at the next step only, and on shortage the request that started last is paused, its
    outputs becoming part of its prompt. TensorRT-LLM gives a prompt that it cuts into chunks all its blocks with the
    first one, where here each chunk takes its own; without chunked context, the default, that is the same.
    """
    block_size = settings.block_size
    reserves = settings.scheduler == TRTLLM
    first_lane = rank * settings.num_stages
    num_decodes = lanes[lane].num_decoding
    budget = settings.max_num_batched_tokens - num_decodes
    if speculation is not None:
        budget = settings.max_num_batched_tokens - num_decodes * speculation.num_queries
    num_needed = 0 if reserves else decode_step_blocks(settings, speculation, lanes, lists, lane)
    num_prefilling = ranks[rank].num_prefilling
    demand = 0
    for position in range(num_prefilling):
        i = lists[first_lane, PREFILLING, position]
        chunk = wanted_tokens(settings, requests, i)
        if num_prefilling == 1 and ranks[rank].last == i:
            chunk = min(chunk, budget)
        demand += chunk
        if not reserves:
            computed = requests[i].computed_tokens
            num_needed += num_blocks_for(computed + chunk, block_size) - num_blocks_for(computed, block_size)

    any_preempted = False
    fits = 0 <= demand <= budget and has_blocks(settings, windows, ranks, rank, num_needed)
    if fits and (demand > 0) == (num_prefilling > 0):
        take_decode_step(settings, windows, speculation, ranks, lanes, lists, rank, lane, num_needed)
        budget -= demand
        for position in range(num_prefilling):
            i = lists[first_lane, PREFILLING, position]
            chunk = min(wanted_tokens(settings, requests, i), demand)
            add_chunk(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, chunk)
    else:
        num_scheduled = 0
        while num_scheduled == 0:  # an empty step: the engine schedules again at once
            num_decodes, budget, any_preempted = walk_running(
                settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane
            )
            num_scheduled = num_decodes + lanes[lane].batch_size
            if not any_preempted or ranks[rank].num_running == 0:
                break
        any_preempted = any_preempted and num_scheduled > 0

    if settings.balance_steps > 0 and ranks[rank].waiting != NONE:
        lanes[lane].looks_again = 1
    if lanes[lane].holds_back or waits_for_a_fuller_batch(settings, ranks, lanes, rank, lane, num_decodes):
        return num_decodes
    while not any_preempted and budget > 0 and ranks[rank].waiting != NONE:
        if ranks[rank].num_running >= settings.max_num_seqs:
            break
        i = ranks[rank].waiting
        if requests[i].arrival_s > lanes[lane].cutoff_s:
            lanes[lane].looks_again = 1
            break
        unused = 0
        if cache is not None:
            unused = look_up(settings, cache, requests, ranks, rank, i)
        chunk = wanted_tokens(settings, requests, i)
        if chunk > budget:
            if not settings.chunked_prefill:
                break
            chunk = budget
        if windows is not None:
            requests[i].passed_blocks = passed_blocks(settings, requests[i].computed_tokens)
        num_needed, num_window_blocks = blocks_to_start(settings, windows, requests, i, chunk)
        if num_needed + unused > ranks[rank].free_blocks or num_window_blocks > ranks[rank].free_window_blocks:
            break
        if cache is not None:
            acquire(cache, requests, ranks, rank, lane, i)
        admit(settings, requests, ranks, lists, rank, i, now_s)
        ranks[rank].free_blocks -= num_needed
        ranks[rank].free_window_blocks -= num_window_blocks
        add_chunk(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, chunk)
        budget -= chunk
    if windows is not None and ranks[rank].waiting != NONE:
        lanes[lane].looks_again = 1
    return num_decodes


@inner
def waits_for_a_fuller_batch(settings, ranks, lanes, rank, lane, num_decodes):
    """TensorRT-LLM's batch wait (`PyExecutor._waiting_requests`, 1.1 to 1.3), which trades TTFT for fewer mixed steps.

    While requests decode, waiting prompts are held back until tokens for `batch_wait_max_tokens_ratio` of
    `max_num_tokens` would be scheduled, or `batch_wait_timeout_iters` steps have passed.
    """
    if settings.batch_wait_steps == 0 or ranks[rank].num_waiting == 0 or num_decodes == 0:
        return False
    fills = num_decodes + ranks[rank].waiting_tokens >= settings.batch_wait_tokens
    if not fills:
        lanes[lane].looks_again = 1
    if fills or ranks[rank].waited_steps >= settings.batch_wait_steps:
        ranks[rank].waited_steps = 0
        return False
    ranks[rank].waited_steps += 1
    return True


@inner
def balance_ranks(settings, requests, ranks, lanes, first, stage, cutoff_s):
    """TensorRT-LLM's balance of attention data-parallel ranks (`PyExecutor._balance_adp_requests`, 1.1 and 1.2):
    whether the waiting prompts of the replica's ranks are held back from the step that is being formed.

    While all ranks decode, prompts wait until every rank has one and room for it, `timeout_iters` steps at most since
    that was last so, and then for `batching_wait_iters` more. The steps count whether a prompt waits or not.
    """
    all_ready, all_decode, any_decodes = True, True, False
    for rank in range(first, first + settings.ranks_per_replica):
        lane = rank * settings.num_stages + stage
        i = ranks[rank].waiting
        has_prompt = i != NONE and requests[i].arrival_s <= cutoff_s
        all_ready = all_ready and has_prompt and ranks[rank].num_running < settings.max_num_seqs
        all_decode = all_decode and lanes[lane].num_decoding > 0
        any_decodes = any_decodes or lanes[lane].num_decoding > 0
    holds_back = 0
    if any_decodes and all_ready:
        ranks[first].balance_waited = 0
        if all_decode:
            holds_back = 1 if ranks[first].balance_ready < settings.balance_wait_steps else 0
            ranks[first].balance_ready = ranks[first].balance_ready + 1 if holds_back else 0
    elif any_decodes:
        ranks[first].balance_waited += 1
        holds_back = 1 if all_decode and ranks[first].balance_waited < settings.balance_steps else 0
        if not holds_back:
            ranks[first].balance_waited = 0
    for rank in range(first, first + settings.ranks_per_replica):
        lanes[rank * settings.num_stages + stage].holds_back = holds_back


@inner
def count_balance(settings, ranks, lanes, first, end, num_steps):
    """After `num_steps` equal decode steps, of which the first is counted, in which nobody waited."""
    for rank in range(first, end):
        if lanes[rank * settings.num_stages].num_decoding == 0:
            return
    ranks[first].balance_waited = (ranks[first].balance_waited + num_steps - 1) % settings.balance_steps


SGLANG_INITIAL_RATIO = 0.7
SGLANG_MINIMUM_FRACTION = 0.14
SGLANG_DECAY_STEPS = 600
SGLANG_RETRACT_STEPS = 20
SGLANG_CLIPPED_OUTPUT_TOKENS = 4096


@inner
def initial_new_token_ratio(settings):
    """What SGLang's `new_token_ratio` starts from."""
    return min(SGLANG_INITIAL_RATIO * settings.schedule_conservativeness, 1.0)


@inner
def form_batch_sglang(settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane, now_s):
    """SGLang `Scheduler.get_next_batch_to_run` (0.5): a prefill batch whenever one can be formed, else a decode step.

    A prefill batch takes up to `chunked_prefill_size` tokens, an unfinished chunk first; a request is admitted while
    its prompt and its clipped output fit beside `new_token_ratio` of what running requests may still produce. The ratio
    starts at 0.7 x `schedule_conservativeness`, falls to 0.14 of that over 600 decode steps, and rises when decode runs
    out of blocks and retracts requests, those with the fewest outputs and the longest prompts first.
    """
    if ranks[rank].steps_to_receive <= 0 or lanes[lane].num_decoding == 0:
        form_prefill_sglang(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, now_s)
    if lanes[lane].batch_size > 0:
        ranks[rank].steps_to_receive = 0
        return 0
    if lanes[lane].num_decoding == 0:
        return 0
    if ranks[rank].steps_to_receive <= 0:
        ranks[rank].steps_to_receive = settings.receive_interval_steps
    num_needed = decode_step_blocks(settings, speculation, lanes, lists, lane)
    if not has_blocks(settings, windows, ranks, rank, num_needed):
        retract_sglang(settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane)
        num_needed = decode_step_blocks(settings, speculation, lanes, lists, lane)
        if not has_blocks(settings, windows, ranks, rank, num_needed):
            return 0
    take_decode_step(settings, windows, speculation, ranks, lanes, lists, rank, lane, num_needed)
    return lanes[lane].num_decoding


LONGEST_PREFIX_WAITING = 128


@inner
def sort_by_prefix(settings, cache, requests, ranks, rank, cutoff_s):
    """Put waiting requests of which more is cached in front: `lpm`, `SchedulePolicy.calc_priority` of SGLang 0.5.

    With more than 128 waiting the order stays as it is, later ones behind. SGLang also holds requests back that begin
    like another one in the queue; that is left out.
    """
    if ranks[rank].num_waiting > LONGEST_PREFIX_WAITING:
        return
    unsorted, waiting = ranks[rank].waiting, NONE
    while unsorted != NONE:
        i = unsorted
        unsorted = meld(requests.order, requests.left, requests.right, requests[i].left, requests[i].right)
        requests[i].left = NONE
        requests[i].right = NONE
        requests[i].order = requests[i].sequence
        if requests[i].arrival_s > cutoff_s:
            requests[i].order += MOST_REQUESTS
        else:
            look_up(settings, cache, requests, ranks, rank, i)
            requests[i].order -= requests[i].computed_tokens * MOST_REQUESTS
        waiting = meld(requests.order, requests.left, requests.right, waiting, i)
    ranks[rank].waiting = waiting


@inner
def form_prefill_sglang(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, now_s):
    """The prefill batch: `PrefillAdder` of SGLang 0.5."""
    block_size = settings.block_size
    if ranks[rank].num_running == 0:
        ranks[rank].new_token_ratio = initial_new_token_ratio(settings)
    chunk_budget = settings.max_num_batched_tokens
    prompt_budget = settings.max_prefill_tokens
    for position in range(ranks[rank].num_prefilling):
        i = lists[rank * settings.num_stages, PREFILLING, position]
        computed = requests[i].computed_tokens
        chunk = min(requests[i].target_tokens - computed, chunk_budget)
        num_needed = num_blocks_for(computed + chunk, block_size) - num_blocks_for(computed, block_size)
        if not has_blocks(settings, windows, ranks, rank, num_needed):
            return
        take_blocks(settings, windows, ranks, rank, num_needed)
        chunk_budget -= chunk
        prompt_budget -= chunk
        add_chunk(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, chunk)
    if cache is not None and settings.longest_prefix_first and ranks[rank].waiting != NONE:
        sort_by_prefix(settings, cache, requests, ranks, rank, lanes[lane].cutoff_s)
        lanes[lane].looks_again = 1
    promised = ranks[rank].remaining_tokens * ranks[rank].new_token_ratio
    while chunk_budget > 0 and prompt_budget > 0 and ranks[rank].waiting != NONE:
        i = ranks[rank].waiting
        if requests[i].arrival_s > lanes[lane].cutoff_s:
            lanes[lane].looks_again = 1
            break
        if ranks[rank].num_running >= settings.max_num_seqs:
            break
        unused = 0
        if cache is not None:
            unused = look_up(settings, cache, requests, ranks, rank, i)
        output = min(remaining_output(requests, i), SGLANG_CLIPPED_OUTPUT_TOKENS)
        free_blocks = (ranks[rank].free_blocks - unused - settings.blocks_per_request) // settings.num_groups
        if settings.window_pool:
            free_blocks = min(free_blocks, ranks[rank].free_window_blocks)
        free_tokens = free_blocks * block_size - promised
        whole = requests[i].target_tokens - requests[i].computed_tokens
        if whole + output > free_tokens and ranks[rank].num_running > 0:
            break
        if whole > prompt_budget and prompt_budget < settings.max_prefill_tokens:
            break
        chunk = min(whole, chunk_budget)
        if chunk < whole and not settings.chunked_prefill:
            break
        if windows is not None:
            requests[i].passed_blocks = passed_blocks(settings, requests[i].computed_tokens)
        num_needed, num_window_blocks = blocks_to_start(settings, windows, requests, i, chunk)
        if num_needed + unused > ranks[rank].free_blocks or num_window_blocks > ranks[rank].free_window_blocks:
            break
        if cache is not None:
            acquire(cache, requests, ranks, rank, lane, i)
        admit(settings, requests, ranks, lists, rank, i, now_s)
        ranks[rank].free_blocks -= num_needed
        ranks[rank].free_window_blocks -= num_window_blocks
        promised += whole - chunk + output
        chunk_budget -= chunk
        prompt_budget -= chunk
        add_chunk(settings, windows, cache, requests, ranks, lanes, lists, rank, lane, i, chunk)


@inner
def find_retracted(requests, ranks, lanes, rank, lane):
    """Among requests that are not in flight the one with the fewest outputs, then the longest prompt; decoding ones
    first.
    """
    victim = NONE
    fewest = 0
    victim_decodes = 0
    spared = lanes[lane].num_decoding == 1
    i = ranks[rank].first
    while i != NONE:
        decodes = requests[i].is_decoding
        if not is_in_flight(requests, lanes, lane, i) and not (decodes and spared and requests[i].lane == lane):
            outputs = 0
            if decodes:
                outputs = lanes[requests[i].lane].steps - requests[i].joined + 1 - requests[i].input_tokens
            longer = victim != NONE and requests[i].input_tokens > requests[victim].input_tokens
            if (
                victim == NONE
                or decodes > victim_decodes
                or (decodes == victim_decodes and (outputs < fewest or (outputs == fewest and longer)))
            ):
                victim, fewest, victim_decodes = i, outputs, decodes
        i = requests[i].after
    return victim


@inner
def retract_sglang(settings, windows, cache, speculation, requests, ranks, lanes, lists, rank, lane):
    """Free blocks for one more decode step: `ScheduleBatch.retract_decode` of SGLang 0.5.

    The lane's last decoding request is never retracted; a prompt half prefilled gives way to it instead.
    """
    while True:
        if has_blocks(settings, windows, ranks, rank, decode_step_blocks(settings, speculation, lanes, lists, lane)):
            break
        victim = find_retracted(requests, ranks, lanes, rank, lane)
        if victim == NONE:
            break
        preempt(settings, windows, cache, requests, ranks, lanes, lists, rank, victim)
    rebuild_rank(settings, windows, requests, ranks, lanes, lists, rank)
    lanes[lane].looks_again = 1
    decoded = 0
    promised = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding and requests[i].lane == lane:
            decoded += lanes[lane].steps - requests[i].joined + 1 - requests[i].input_tokens
            promised += requests[i].output_tokens
        i = requests[i].after
    ratio = (decoded + SGLANG_RETRACT_STEPS * lanes[lane].num_decoding) / max(promised, 1)
    ranks[rank].new_token_ratio = min(ratio, 1.0)


@inner
def decay_new_token_ratio(settings, ranks, rank, num_steps):
    """After `num_steps` decode steps."""
    initial = initial_new_token_ratio(settings)
    least = initial * SGLANG_MINIMUM_FRACTION
    decay = (initial - least) / SGLANG_DECAY_STEPS
    ranks[rank].new_token_ratio = max(ranks[rank].new_token_ratio - decay * num_steps, least)


@inner
def begin_batch(lanes, lane, cutoff_s):
    """Start from an empty batch; requests that arrived after `cutoff_s` cannot be in it."""
    lanes[lane].cutoff_s = cutoff_s
    lanes[lane].batch_size = 0
    lanes[lane].looks_again = 0


@inner
def end_batch(settings, requests, ranks, lanes, lists, rank, lane, num_decodes):
    """Settle the batch that a policy formed with `num_decodes` decoding requests; returns 1, or 0 if it is empty."""
    if lanes[lane].batch_size > 0:
        drop_scheduled(settings, requests, ranks, lists, rank)
    lanes[lane].batch_decodes = 1 if num_decodes > 0 else 0
    return 1 if num_decodes + lanes[lane].batch_size > 0 else 0


@inner
def replica_load(settings, ranks, replica):
    """What a router compares: blocks in use under `least_kv`, requests that wait under `least_waiting`, else those that
    wait or run.
    """
    first = replica * settings.ranks_per_replica
    load = 0
    for rank in range(first, first + settings.ranks_per_replica):
        if settings.router == LEAST_KV:
            load += settings.num_blocks - ranks[rank].free_blocks
        elif settings.router == LEAST_WAITING:
            load += ranks[rank].num_waiting
        else:
            load += ranks[rank].num_outstanding
    return load


UNEVEN_REQUESTS = 64
UNEVEN_RATIO = 1.5


@inner
def replica_with_prefix(settings, cache, ranks, fleet, i):
    """The replica with most of request `i`'s prompt in its cache, of equal ones that with the fewest requests; NONE
    where nothing is cached, or where the load is uneven.

    Uneven is as in SGLang's cache-aware policy (sgl-router 0.2: `balance_abs_threshold` 64 and `balance_rel_threshold`
    1.5): the busiest replica has 64 requests more than the idlest, and 1.5 times as many. The caches are looked at as
    they are, as llm-d's precise prefix scorer does, not by a router's own guess of them. Of a `fleet` only replicas
    that are up count.
    """
    lightest, heaviest = NONE, 0
    for replica in range(settings.num_replicas):
        if fleet is not None:
            if fleet.replicas[replica].phase != UP:
                continue
        load = replica_load(settings, ranks, replica)
        lightest = load if lightest == NONE else min(lightest, load)
        heaviest = max(heaviest, load)
    if heaviest - lightest > UNEVEN_REQUESTS and heaviest > UNEVEN_RATIO * lightest:
        return NONE
    for rank in range(ranks.size):
        evict(settings, cache, ranks, rank)
    best, longest, least = NONE, 0, 0
    node = cache.requests[i].shared
    while node != NONE and best == NONE:
        for rank in range(ranks.size):
            num_blocks = cache.entries[entry_of(cache, rank, node)].num_blocks
            replica = rank // settings.ranks_per_replica
            if fleet is not None:
                if fleet.replicas[replica].phase != UP:
                    continue
            if num_blocks > 0 and num_blocks >= longest:
                load = replica_load(settings, ranks, replica)
                if num_blocks > longest or load < least:
                    best, longest, least = replica, num_blocks, load
        node = cache.nodes[node].parent
    return best


@inner
def route(settings, cache, sessions, ranks, clock, i):
    """The replica that request `i` goes to; of equal ones the first.

    `round_robin` and `random` see no load; `power_of_two` takes the less loaded of two drawn ones (Mitzenmacher, 2001);
    `least_outstanding` and `least_kv` look at all, as the production stack's and llm-d's scorers do; `least_waiting` is
    Vidur's "lor", blind to requests that run.
    `session_affinity` sends a session's later turns where its first went, as the production stack's session router;
    `prefix_affinity` goes where most of the prompt is cached, unless the load is uneven. First turns, and prompts of
    which nothing is cached, go to the replica with the fewest requests.
    """
    if settings.num_replicas == 1:
        return 0
    if settings.router == ROUND_ROBIN:
        replica = clock[0].turn
        clock[0].turn = (replica + 1) % settings.num_replicas
        return replica
    if sessions is not None and settings.router == SESSION_AFFINITY:
        session = sessions.session[i]
        if session != NONE and sessions.replica[session] != NONE:
            return sessions.replica[session]
    if cache is not None and settings.router == PREFIX_AFFINITY:
        replica = replica_with_prefix(settings, cache, ranks, None, i)
        if replica != NONE:
            return replica
    looks_at_all = settings.router != RANDOM and settings.router != POWER_OF_TWO
    best, least = NONE, 0
    for position in range(settings.num_replicas if looks_at_all else 1 + (settings.router == POWER_OF_TWO)):
        replica = position
        if not looks_at_all:
            clock[0].random = clock[0].random * MULTIPLIER % MODULUS
            replica = clock[0].random % settings.num_replicas
        load = replica_load(settings, ranks, replica)
        if best == NONE or load < least or (load == least and replica < best):
            best, least = replica, load
    return best
