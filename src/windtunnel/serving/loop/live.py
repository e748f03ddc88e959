"""Requests of a run that gets its arrivals while it runs: the tokens that they have been given, and cancelling them."""

import numpy as np

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Records, int64, is_unset
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.cluster.slots import wake_for_request
from windtunnel.serving.codes import TRTLLM, VLLM_V0
from windtunnel.serving.per_request.custom_batch import cancel_sequence
from windtunnel.serving.per_request.decode_groups import count_members
from windtunnel.serving.schedulers.batch import held_blocks, leave, rebuild_rank, remaining_output
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import NOT_HANDED, Pools, slots_of
from windtunnel.serving.state.records import BATCH, BATCH_ENDS, NONE, Floats, Ints, Rank, Requests, Slot, Speculation
from windtunnel.serving.state.tables import PoolTables, RunTables, pool_tables_of, with_record


@entry
def given_tokens(
    pool: PoolTables, run: RunTables, pools: Pools | None, num_live: Ints, live: Ints, given: Ints, changed: Ints
) -> int:
    """Update the output tokens that requests have been given by `run.until_s`; return how many `changed` names.

    A decoding request has those of its slot's steps but the one under way, which ends later.

    Args:
        num_live: [1] how many requests are under way.
        live: [request] their numbers, in the first `num_live` places.
        given: [request] output tokens, of before and then of now; they never become fewer.
        changed: [request] filled with the requests that have been given more, or have finished.
    """
    if pool.records is not None:
        return tokens_of_all(with_record(pool, pool.records[0]), run, pools, num_live, live, given, changed)
    return tokens_of_all(pool, run, pools, num_live, live, given, changed)


@inner
def tokens_of_all(
    pool: PoolTables, run: RunTables, pools: Pools | None, num_live: Ints, live: Ints, given: Ints, changed: Ints
) -> int:
    """Update the output tokens of all requests under way; arguments and result are those of `given_tokens`."""
    requests, num_changed = run.requests, 0
    if pool.batches is not None:
        count_all_members(pool, pools)
    for position in range(num_live[0]):
        i = live[position]
        tokens = requests[i].target_tokens - requests[i].input_tokens
        if not is_unset(requests[i].first_token_s):
            tokens = max(tokens, 1)
        is_finished = not is_unset(requests[i].finish_s)
        if is_finished:
            tokens = requests[i].output_tokens
        elif requests[i].is_decoding:
            slots, speculation = pool.slots, pool.speculation
            if pools is not None:
                settings = pools.pools[pools.pool_of_rank[requests[i].rank]]
                slots = slots_of(pools, settings)
                if pool.speculation is not None:
                    speculation = Speculation(settings.num_queries, settings.tokens_per_step)
            tokens = decoded_tokens(requests, slots, speculation, i) - requests[i].input_tokens + 1
        elif pool.batches is not None:
            if pool.sequences[i].is_prefilled:
                tokens = max(tokens, pool.sequences[i].processed_tokens - requests[i].input_tokens)
        if tokens > given[i] or is_finished:
            given[i] = max(tokens, given[i])
            changed[num_changed] = i
            num_changed += 1
    return num_changed


@inner
def count_all_members(pool: PoolTables, pools: Pools | None) -> None:
    """Write what decode groups have processed to the records of their members, in every pool that has such groups."""
    if pools is None:
        count_members(pool)
    if pools is not None:
        for number in range(pools.pools.size):
            if pools.pools[number].scheduler >= VLLM_V0:
                count_members(pool_tables_of(pools, number, pool))


@inner
def decoded_tokens(requests: Requests, slots: Records[Slot], speculation: Speculation | None, i: int) -> int:
    """Return the tokens that decoding request `i` has computed in the steps of its slot that have ended."""
    slot = requests[i].slot
    computed = slots[slot].steps - requests[i].joined
    if slots[slot].batch_decodes and requests[i].skipped_at != slots[slot].num_verified - 1:
        if speculation is None:
            return computed - 1
        end = np.floor(slots[slot].num_verified * speculation.tokens_per_step)
        begin = np.floor((slots[slot].num_verified - 1) * speculation.tokens_per_step)
        return computed - int64(end - begin)
    return computed


@entry
def cancel(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, which: Ints, now_s: Floats
) -> int:
    """End request `which[0]`, whose client has left, and free what it holds; NONE: nothing is done. `now_s` is `[1]`.

    One that waits leaves its queue at once. One that is in a step ends with that step, as an engine that looks at
    aborted requests between two steps lets it. Returns 1, or 0 where it must be tried again later: its KV is on its way
    between pools.
    """
    if pool.records is not None:
        return end_early(with_record(pool, pool.records[0]), run, pools, fleet, which, now_s)
    return end_early(pool, run, pools, fleet, which, now_s)


@inner
def end_early(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, which: Ints, now_s: Floats
) -> int:
    """End a request whose client has left; arguments and result are those of `cancel`."""
    requests, i = run.requests, which[0]
    if i == NONE:
        return int64(1)
    here, rank = pool, requests[i].rank
    if fleet is not None:
        if leave_router(fleet, i):
            requests[i].finish_s = now_s[0]
            return int64(1)
    if pools is not None:
        if pools.transfers[i].stage != NOT_HANDED:
            return int64(0)
        pools.transfers[i].later_output_tokens = 0
        number = pools.pool_of_rank[rank]
        here = pool_tables_of(pools, number, pool)
        rank -= here.settings.first_rank
    is_alone = False
    if pool.batches is not None:
        is_alone = here.settings.scheduler >= VLLM_V0
        if is_alone and cancel_sequence(here, requests, rank, i, now_s[0]):
            wake_for_request(here.settings, here.ranks, here.slots, run, pools, rank, now_s[0])
    if not is_alone:
        leave_rank(here, requests, rank, i, now_s[0])
    if fleet is not None:
        ask_again(fleet, now_s[0])
    return int64(1)


@inner
def leave_rank(here: PoolTables, requests: Requests, rank: int, i: int, now_s: float) -> None:
    """End request `i` at a rank whose engine batches all that decode together."""
    if is_running(requests, here.ranks, rank, i):
        if requests[i].is_decoding:
            shorten_decoding(here, requests, rank, i)
        elif requests[i].chunks_in_flight > 0:
            shorten_prefill(here, requests, rank, i)
        else:
            here.ranks[rank].remaining_tokens -= remaining_output(requests, i)
            leave(here, requests, rank, i)
            requests[i].finish_s = now_s
        rebuild_rank(here, requests, rank)
    else:
        leave_queue(requests, here.ranks, rank, i)
        requests[i].finish_s = now_s


@inner
def leave_router(fleet: ReplicaFleet, i: int) -> bool:
    """Take request `i` out of the router queue, or out of those that are sent again after a failure, if it is there."""
    control, is_there = fleet.control, False
    first, size = control[0].first_at_router, fleet.router_queue.size
    for position in range(control[0].num_at_router):
        k = fleet.router_queue[(first + position) % size]
        if is_there:
            fleet.router_queue[(first + position - 1) % size] = k
        is_there = is_there or k == i
    if is_there:
        control[0].num_at_router -= 1
        return True
    first = control[0].first_retry
    for position in range(control[0].num_retries):
        row = (first + position) % size
        if is_there:
            fleet.retries[(row - 1) % size] = fleet.retries[row]
            fleet.retry_s[(row - 1) % size] = fleet.retry_s[row]
        is_there = is_there or fleet.retries[row] == i
    if is_there:
        control[0].num_retries -= 1
    return is_there


@inner
def is_running(requests: Requests, ranks: Records[Rank], rank: int, i: int) -> bool:
    """Whether request `i` is in the running list of its rank."""
    other = ranks[rank].first
    while other not in (NONE, i):
        other = requests[other].after
    return other == i


@inner
def shorten_decoding(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Let decoding request `i` end with the step of its slot that is under way, or else with the next."""
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    slot = requests[i].slot
    tokens = slots[slot].steps - requests[i].joined - requests[i].input_tokens + 1
    if not slots[slot].batch_decodes:
        tokens += 1
    if tokens < requests[i].output_tokens:
        held = held_blocks(settings, pool.windows, requests, slots, i)
        ranks[rank].remaining_tokens -= requests[i].output_tokens - tokens
        requests[i].output_tokens = tokens
        if settings.scheduler == TRTLLM:
            ranks[rank].free_blocks += held - held_blocks(settings, pool.windows, requests, slots, i)


@inner
def shorten_prefill(pool: PoolTables, requests: Requests, rank: int, i: int) -> None:
    """Let request `i` end with the step that computes a chunk of its prompt now."""
    settings, ranks, slots, lists = pool.settings, pool.ranks, pool.slots, pool.lists
    held = held_blocks(settings, pool.windows, requests, slots, i)
    ranks[rank].remaining_tokens -= remaining_output(requests, i) - 1
    for slot in range(rank * settings.num_stages, (rank + 1) * settings.num_stages):
        for position in range(slots[slot].batch_size):
            if lists[slot, BATCH, position] == i:
                lists[slot, BATCH_ENDS, position] = 1
    requests[i].input_tokens = requests[i].computed_tokens
    requests[i].target_tokens = requests[i].computed_tokens
    requests[i].output_tokens = 1
    if settings.scheduler == TRTLLM:
        ranks[rank].free_blocks += held - held_blocks(settings, pool.windows, requests, slots, i)


@inner
def leave_queue(requests: Requests, ranks: Records[Rank], rank: int, i: int) -> None:
    """Take waiting request `i` out of the heap of its rank, which is built anew without it."""
    root, left = NONE, ranks[rank].waiting
    while left != NONE:
        k = left
        left = meld(requests.order, requests.left, requests.right, requests[k].left, requests[k].right)
        requests[k].left = NONE
        requests[k].right = NONE
        if k != i:
            root = meld(requests.order, requests.left, requests.right, root, k)
    ranks[rank].waiting = root
    ranks[rank].num_waiting -= 1
    ranks[rank].waiting_tokens -= requests[i].target_tokens
    ranks[rank].num_outstanding -= 1
