"""From prefill to decode: a request handed off, its KV cache read, and the batch that it joins."""

import numpy as np

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import is_unset
from windtunnel.serving.cluster.routers import choose_for, fewest_outstanding
from windtunnel.serving.codes import FCFS, VLLM_V0
from windtunnel.serving.kv.cache import acquire, look_up, release, share
from windtunnel.serving.kv.tiers import leave_below
from windtunnel.serving.kv.windows import passed_blocks
from windtunnel.serving.per_request.custom_batch import join_with_cache
from windtunnel.serving.schedulers.adapters import begin_use, may_run
from windtunnel.serving.schedulers.batch import begin_decoding, blocks_to_start, held_blocks, held_window_blocks, link
from windtunnel.serving.schedulers.queue_orders import set_queue_key
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import IS_READ, IS_READY, NOT_HANDED, WAITS, Pools, cache_of, ranks_of
from windtunnel.serving.state.records import MOST_REQUESTS, NONE, PREFILLING, Cache, KernelSettings, Requests
from windtunnel.serving.state.tables import PoolTables, RunTables


@inner
def hand_off(
    pool: PoolTables, run: RunTables, pools: Pools, fleet: ReplicaFleet | None, rank: int, i: int, now_s: float
) -> int:
    """Send request `i`, whose prefill has ended at `now_s` on `rank` of its pool, to a replica that decodes.

    Returns that replica, of all pools'; NONE where none takes requests: then it is sent again, as after a failure.
    """
    settings, requests, slots = pool.settings, run.requests, pool.slots
    routing = pools.routing[0]
    transfer = pools.transfers[i]
    if pool.sequences is not None:
        if settings.scheduler >= VLLM_V0:
            transfer.held_blocks = pool.sequences[i].num_blocks
            pool.sequences[i].num_blocks = 0
    if pool.batched is not None and settings.scheduler < VLLM_V0:
        transfer.held_blocks = held_blocks(settings, pool.windows, requests, slots, i)
    if pool.windows is not None:
        transfer.held_window_blocks = held_window_blocks(settings, requests, slots, i)
        requests[i].passed_blocks = 0
    transfer.prefill_rank = settings.first_rank + rank
    transfer.handed_s = now_s
    requests[i].output_tokens = transfer.later_output_tokens
    transfer.later_output_tokens = 0
    requests[i].last_token_s = now_s
    is_first = requests[i].target_tokens == requests[i].input_tokens
    if is_first and (routing.decode_samples_first or routing.decode_streams_first):
        requests[i].first_token_s = np.nan
    replica = choose_for(pool, run.clock, pools, fleet, routing.decode_router, True, i)
    if replica == NONE:
        return NONE

    there = pools.pools[pools.pool_of_replica[replica]]
    to_rank = there.first_rank + fewest_outstanding(there, ranks_of(pools, there), replica - there.first_replica)
    transfer.decode_rank = to_rank
    requests[i].rank = to_rank
    transfer.stage = WAITS
    set_queue_key(there, requests, ranks_of(pools, there), to_rank - there.first_rank, i, 0)
    pools.ranks[to_rank].num_outstanding += 1
    pools.handoffs[transfer.prefill_rank].num_held += 1
    append(requests, pools.waiting[to_rank], i)
    return replica


@inner
def pull(pool: PoolTables, run: RunTables, pools: Pools, rank: int, slot: int, now_s: float) -> None:
    """Give blocks to the requests that wait to be read, in their order, while there are any; their transfers start.

    Requests that wait to be computed here, preempted or local ones, go first if they are the older. The request counts
    towards `max_num_seqs` from now on. A transfer occupies the interfaces of both ranks one after another: they have
    sent what they were given at `link_free_s`. With overlap the KV of a layer leaves when it has been computed, so that
    the transfer may have begun with the prefill and ends a layer's share after it, or when the link has caught up.
    Of what is cached here nothing is read (vLLM's `NixlConnector`, 0.10 to 0.24: `get_num_new_matched_tokens`); lower
    tiers are not asked, as the prefill side has it all (`MultiConnector`: the first one that has any loads it).
    Requests whose adapter may not run here yet are passed over, as those that wait to be computed.
    """
    settings, requests, ranks, slots = pool.settings, run.requests, pool.ranks, pool.slots
    routing = pools.routing[0]
    here, to_read = pools.handoffs[settings.first_rank + rank], pools.waiting[settings.first_rank + rank]
    following = to_read.first
    while following != NONE:
        i, following = following, requests[following].after
        transfer = pools.transfers[i]
        if transfer.handed_s > slots[slot].cutoff_s:
            slots[slot].looks_again = 1
            break
        if ranks[rank].num_running + here.num_pulled >= settings.max_num_seqs:
            break
        if pool.adapters is not None:
            if not may_run(pool.adapters, settings.first_rank + rank, i):
                continue
        waiting = ranks[rank].first_waiting if settings.scheduler >= VLLM_V0 else ranks[rank].waiting
        if waits_behind(settings, requests, waiting, i):
            break
        unused, cached = 0, 0
        requests[i].computed_tokens = 0
        if pool.cache is not None:
            unused = look_up(settings, pool.cache, requests, ranks, rank, i)
            unused -= leave_below(settings, pool.cache, requests, i)
            cached = requests[i].computed_tokens
        num_read = requests[i].target_tokens - routing.decode_samples_first
        if pool.windows is not None:
            requests[i].passed_blocks = passed_blocks(settings, num_read - 1)
        num_needed, num_window_blocks = blocks_to_start(settings, pool.windows, requests, i, num_read - cached)
        if num_needed + unused > ranks[rank].free_blocks or num_window_blocks > ranks[rank].free_window_blocks:
            if pool.windows is not None:
                slots[slot].looks_again = 1
            break
        if pool.cache is not None:
            acquire(pool.cache, requests, ranks, rank, slot, i)
        ranks[rank].free_blocks -= num_needed
        ranks[rank].free_window_blocks -= num_window_blocks
        transfer.stage = IS_READ
        transfer.taken_blocks = num_needed
        transfer.taken_window_blocks = num_window_blocks
        here.num_pulled += 1
        remove(requests, to_read, i)
        begin_transfer(run, pools, i, cached, now_s)


@inner
def waits_behind(settings: KernelSettings, requests: Requests, waiting: int, i: int) -> bool:
    """Whether request `i`, whose KV is to be read, goes after `waiting`, the first that waits to be computed here."""
    if waiting == NONE:
        return False
    order, first_order = requests[i].sequence, requests[waiting].sequence
    if settings.queue_order != FCFS:
        order += requests[i].queue_key * MOST_REQUESTS
        first_order += requests[waiting].queue_key * MOST_REQUESTS
    return first_order < order


@inner
def begin_transfer(run: RunTables, pools: Pools, i: int, cached: int, now_s: float) -> None:
    """Send the KV of request `i`, less `cached` tokens, to its decode rank; the event of its end goes on the queue."""
    routing, transfer = pools.routing[0], pools.transfers[i]
    here, sender = pools.handoffs[transfer.decode_rank], pools.handoffs[transfer.prefill_rank]
    receiver = pools.pools[pools.pool_of_rank[transfer.decode_rank]]
    sent_bytes_per_s = pools.pools[pools.pool_of_rank[transfer.prefill_rank]].link_bytes_per_s
    transfer_s = routing.bytes_per_token * (run.requests[i].target_tokens - cached) + routing.bytes_per_request
    transfer_s *= receiver.kv_copies / min(sent_bytes_per_s, receiver.link_bytes_per_s)
    ready_s = now_s if routing.tail_fraction == 1.0 else run.requests[i].scheduled_s
    start_s = max(ready_s, sender.link_free_s, here.link_free_s)
    end_s = max(start_s + transfer_s, now_s + transfer_s * routing.tail_fraction)
    transfer.link_end_s = start_s + transfer_s
    sender.link_free_s = transfer.link_end_s
    here.link_free_s = transfer.link_end_s
    transfer.transfer_start_s = start_s
    transfer.transfer_end_s = end_s + routing.latency_s
    event = i - run.requests.size
    run.clock[0].queued = push(run.events.time_s, run.events.slot, run.clock[0].queued, transfer.transfer_end_s, event)


@inner
def end_transfer(cache: Cache | None, requests: Requests, pools: Pools, i: int) -> None:
    """End the KV transfer of request `i`: it frees its blocks on the prefill side, and may run on the decode side."""
    free_prefill_blocks(cache, requests, pools, i)
    transfer = pools.transfers[i]
    transfer.stage = IS_READY
    occupy_links(pools, i, transfer.link_end_s)
    append(requests, pools.arrived[transfer.decode_rank], i)


@inner
def occupy_links(pools: Pools, i: int, until_s: float) -> None:
    """Note that the KV transfer of request `i`, which is over, kept the interfaces of both ranks busy until then."""
    for rank in (pools.transfers[i].prefill_rank, pools.transfers[i].decode_rank):
        pools.handoffs[rank].link_busy_s = max(pools.handoffs[rank].link_busy_s, until_s)


@inner
def free_prefill_blocks(cache: Cache | None, requests: Requests, pools: Pools, i: int) -> None:
    """Free what request `i` holds where it was prefilled; blocks of its prompt stay cached as long as there is room."""
    transfer = pools.transfers[i]
    pools.handoffs[transfer.prefill_rank].num_held -= 1
    pools.ranks[transfer.prefill_rank].free_window_blocks += transfer.held_window_blocks
    if cache is None:
        pools.ranks[transfer.prefill_rank].free_blocks += transfer.held_blocks
    if cache is not None:
        number = pools.pool_of_rank[transfer.prefill_rank]
        settings, own = pools.pools[number], cache_of(cache, pools, number)
        rank = transfer.prefill_rank - settings.first_rank
        release(settings, own, ranks_of(pools, settings), rank, i, transfer.held_blocks, requests[i].target_tokens)
    transfer.held_blocks = 0


@inner
def join_ready(pool: PoolTables, requests: Requests, pools: Pools, rank: int, slot: int) -> None:
    """Let the requests whose KV has come run, in their order: they decode in this slot's next step. What has come is
    cached. Those whose adapter may not run yet are passed over.

    Where the decode side samples the first output, the last prompt token is computed again, as a prefill of one token.
    Where it streams the prefill side's, the client has it when the batch is formed.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    samples_first = pools.routing[0].decode_samples_first
    streams_first = pools.routing[0].decode_streams_first
    arrived = pools.arrived[settings.first_rank + rank]
    following = arrived.first
    while following != NONE and ranks[rank].num_running < settings.max_num_seqs:
        i, following = following, requests[following].after
        if pools.transfers[i].transfer_end_s > slots[slot].cutoff_s:
            slots[slot].looks_again = 1
            break
        if pool.adapters is not None:
            if not may_run(pool.adapters, settings.first_rank + rank, i):
                continue
            begin_use(pool.adapters, settings.first_rank + rank, i)
        remove(requests, arrived, i)
        pools.handoffs[settings.first_rank + rank].num_pulled -= 1
        pools.transfers[i].stage = NOT_HANDED
        requests[i].computed_tokens = requests[i].target_tokens - samples_first
        if pool.cache is not None:
            share(settings, pool.cache, ranks, rank, i, requests[i].computed_tokens)
        if streams_first and not samples_first and is_unset(requests[i].first_token_s):
            requests[i].first_token_s = slots[slot].cutoff_s
            requests[i].last_token_s = slots[slot].cutoff_s
        if pool.batches is not None:
            if settings.scheduler >= VLLM_V0:
                join_with_cache(pool, requests, rank, i)
        if pool.batched is not None and settings.scheduler < VLLM_V0:
            join_batch(pool, requests, rank, slot, i)


@inner
def join_batch(pool: PoolTables, requests: Requests, rank: int, slot: int, i: int) -> None:
    """Let request `i`, whose KV has come, decode in the slot's next step, or compute its last prompt token again."""
    settings, ranks = pool.settings, pool.ranks
    link(requests, ranks, rank, i)
    end = requests[i].input_tokens + requests[i].output_tokens - 1
    ranks[rank].remaining_tokens += end - requests[i].computed_tokens
    if requests[i].computed_tokens < requests[i].target_tokens:
        pool.lists[rank * settings.num_stages, PREFILLING, ranks[rank].num_prefilling] = i
        ranks[rank].num_prefilling += 1
    else:
        begin_decoding(pool, requests, rank, slot, i)
