"""What a replica that fails loses: its requests, its caches, the steps under way, the KV on its way."""

import numpy as np

from windtunnel.compiled.heap import meld, push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import remove
from windtunnel.compiled.records import Records
from windtunnel.serving.cluster.handoff import free_prefill_blocks, hand_off, occupy_links
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.cluster.slots import wake_replica
from windtunnel.serving.codes import DRAINING, UP, VLLM_V0
from windtunnel.serving.kv.cache import entry_of, forget, free, release, repeats
from windtunnel.serving.kv.tiers import drop, kept_at
from windtunnel.serving.per_request.decode_groups import ENDS, GROUP, MEMBERS, SCRATCH, dissolve, ready_row, write_back
from windtunnel.serving.schedulers.batch import gained_tokens
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import IS_READ, IS_READY, NOT_HANDED, WAITS, Pools, cache_of, ranks_of
from windtunnel.serving.state.records import NONE, Cache, Ints, KernelSettings, Rank, Requests, Slot
from windtunnel.serving.state.tables import PoolTables, RunTables


@inner
def lose(fleet: ReplicaFleet, run: RunTables, pools: Pools | None, replica: int, i: int, now_s: float) -> None:
    """Reset request `i`, which was at a replica of any pool that has failed, and plan to send it again."""
    requests = run.requests
    if pools is not None:
        transfer = pools.transfers[i]
        if transfer.later_output_tokens > 0:
            requests[i].output_tokens = transfer.later_output_tokens
            transfer.later_output_tokens = 0
        transfer.stage = NOT_HANDED
        transfer.handed_s = np.nan
        transfer.transfer_start_s = np.nan
        transfer.transfer_end_s = np.nan
        transfer.held_blocks = 0
        transfer.held_window_blocks = 0
    requests[i].computed_tokens = 0
    requests[i].chunks_in_flight = 0
    requests[i].is_decoding = 0
    requests[i].slides = 0
    requests[i].passed_blocks = 0
    if fleet.rules.starts_over:
        fleet.discarded_tokens[i] += requests[i].target_tokens - requests[i].input_tokens
        requests[i].target_tokens = requests[i].input_tokens
        requests[i].first_token_s = np.nan
    fleet.num_retries[i] += 1
    control = fleet.control
    position = (control[0].first_retry + control[0].num_retries) % fleet.retries.size
    fleet.retries[position] = i
    fleet.retry_s[position] = now_s + fleet.rules.retry_s
    control[0].num_retries += 1
    row = control[0].num_losses
    fleet.losses[row].request = i
    fleet.losses[row].replica = replica
    fleet.losses[row].begin_s = requests[i].arrival_s
    fleet.losses[row].end_s = now_s
    control[0].num_losses = row + 1


@inner
def leave_for_decode(
    pool: PoolTables, run: RunTables, pools: Pools, fleet: ReplicaFleet | None, rank: int, i: int, now_s: float
) -> None:
    """Hand request `i` off, which no longer runs on `rank`, and wake the replica that it goes to."""
    pool.ranks[rank].num_outstanding -= 1
    replica = hand_off(pool, run, pools, fleet, rank, i, now_s)
    if replica != NONE:
        wake_replica(run, pools, replica, now_s)
    if fleet is not None and replica == NONE:
        give_up_handoff(pool, run, pools, fleet, rank, i, now_s)


@inner
def give_up_handoff(
    pool: PoolTables, run: RunTables, pools: Pools, fleet: ReplicaFleet, rank: int, i: int, now_s: float
) -> None:
    """Free what request `i` holds on `rank`, where it was prefilled: no replica decodes, and it is sent again."""
    settings, requests, transfer = pool.settings, run.requests, pools.transfers[i]
    pool.ranks[rank].free_window_blocks += transfer.held_window_blocks
    free(settings, pool.cache, pool.ranks, rank, i, transfer.held_blocks, requests[i].computed_tokens)
    replica = settings.first_replica + rank // settings.ranks_per_replica
    keep_streamed_output(requests, pools, i)
    lose(fleet, run, pools, replica, i, now_s)


@inner
def lose_sequence(pool: PoolTables, requests: Requests, i: int) -> None:
    """Note what request `i` has produced under per-request scheduling: all of it is computed again."""
    if pool.sequences is not None:
        sequence = pool.sequences[i]
        requests[i].target_tokens = sequence.prompt_tokens
        if sequence.is_prefilled:
            sequence.last_token_s = sequence.left_stage_s
            requests[i].target_tokens = sequence.processed_tokens
        requests[i].last_token_s = sequence.last_token_s
        sequence.next = NONE


@inner
def lose_cache(cache: Cache, rank: int) -> None:
    """Forget all that a rank has cached, and its replica's own tiers."""
    entry = cache.ranks[rank].first
    while entry != NONE:
        after = cache.entries[entry].after
        forget(cache, rank, entry)
        cache.entries[entry].num_blocks = 0
        entry = after
    for tier in range(cache.tiers.size):
        if not cache.tiers[tier].outlives:
            row, pool = cache.tiers[tier].row, rank // cache.tiers[tier].ranks_per_pool
            while cache.pools[row, pool].first != NONE:
                drop(cache, row, pool, cache.pools[row, pool].first)


@inner
def forget_own(caches: Cache, pools: Pools, i: int) -> None:
    """Forget what is cached of lost request `i` alone where it was prefilled, which a rank elsewhere would take for its
    own: segments of one request only are on one rank only. Beginnings that prompts share stay cached.
    """
    rank = pools.transfers[i].prefill_rank
    number = pools.pool_of_rank[rank]
    cache, local = cache_of(caches, pools, number), rank - pools.pools[number].first_rank
    node = cache.requests[i].leaf
    while node >= cache.num_shared:
        entry = entry_of(cache, local, node)
        if cache.entries[entry].num_blocks > 0:
            forget(cache, local, entry)
            cache.entries[entry].num_blocks = 0
        for tier in range(cache.tiers.size):
            ranks_per_pool = cache.tiers[tier].ranks_per_pool
            if ranks_per_pool < cache.ranks.size:
                row, kept = cache.tiers[tier].row, kept_at(cache, tier, local, node)
                if cache.kept[row, kept].num_blocks > 0:
                    drop(cache, row, local // ranks_per_pool, kept)
        node = cache.nodes[node].parent


@inner
def lose_shared(cache: Cache, rank: int, i: int) -> None:
    """Forget what running request `i` shares with others of its rank, which fail with it."""
    node = cache.requests[i].deepest
    while node != NONE:
        entry = entry_of(cache, rank, node)
        cache.ranks[rank].repeated_blocks -= repeats(cache, entry)
        cache.entries[entry].num_blocks = 0
        cache.entries[entry].references = 0
        node = cache.nodes[node].parent
    cache.requests[i].deepest = NONE
    cache.requests[i].shared_blocks = 0


@inner
def clear(
    pool: PoolTables,
    caches: Cache | None,
    run: RunTables,
    pools: Pools | None,
    fleet: ReplicaFleet,
    replica: int,
    now_s: float,
) -> None:
    """Leave a replica of its pool as it starts: empty. What it had, if it failed, is sent again, rank by rank: running
    requests in their order, then waiting ones in theirs; then those whose KV was on its way from or to it. `caches` are
    of all pools.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    first, number = replica * settings.ranks_per_replica, settings.first_replica + replica
    if pool.batched is not None and settings.scheduler < VLLM_V0:
        drop_wakes(settings, run, replica)
    for rank in range(first, first + settings.ranks_per_replica):
        if pool.batches is not None:
            if settings.scheduler >= VLLM_V0:
                lose_sequences(pool, run, pools, fleet, rank, now_s)
        if pool.batched is not None and settings.scheduler < VLLM_V0:
            lose_rank(pool, run, pools, fleet, rank, now_s)
        if pools is not None:
            lose_handoffs(caches, run, pools, fleet, settings.first_rank + rank, number, now_s)
        if pool.cache is not None:
            lose_cache(pool.cache, rank)
        empty_rank(settings, fleet, ranks, rank)
        for slot in range(rank * settings.num_stages, (rank + 1) * settings.num_stages):
            empty_slot(fleet, slots, pool.lists, slot)
            if pool.cache is not None:
                pool.cache.load_s[slot] = 0.0
    for stage in range(settings.num_stages):
        pool.stages[replica, stage] = 0.0


@inner
def lose_rank(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, rank: int, now_s: float
) -> None:
    """Lose the requests that run or wait on a rank whose engine batches all that decode together."""
    settings, requests, ranks = pool.settings, run.requests, pool.ranks
    number = settings.first_replica + rank // settings.ranks_per_replica
    i = ranks[rank].first
    while i != NONE:
        after = requests[i].after
        if pool.cache is not None:
            lose_shared(pool.cache, rank, i)
        if requests[i].is_decoding:
            interrupt_decoding(pool, requests, i)
        lose(fleet, run, pools, number, i, now_s)
        i = after
    while ranks[rank].waiting != NONE:
        i = ranks[rank].waiting
        ranks[rank].waiting = meld(requests.order, requests.left, requests.right, requests[i].left, requests[i].right)
        requests[i].left = NONE
        requests[i].right = NONE
        lose(fleet, run, pools, number, i, now_s)


@inner
def lose_sequences(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, replica: int, now_s: float
) -> None:
    """Lose the requests that run or wait at a replica that schedules per request: those that hold blocks by their
    numbers, then the waiting ones in order.
    """
    number, row, count = pool.settings.first_replica + replica, ready_row(pool, replica), 0
    dissolve(pool, replica)
    for slot in range(replica * pool.settings.num_stages, (replica + 1) * pool.settings.num_stages):
        if pool.slots[slot].num_requests > 0:
            if pool.slots[slot].has_group:
                for position in range(pool.slots[slot].group_size):
                    i = pool.batches[slot, GROUP, position]
                    write_back(pool, slot, i, pool.batches[slot, ENDS, position])
                    count = insert(pool, row, count, i)
            for position in range(pool.slots[slot].num_listed):
                count = insert(pool, row, count, pool.batches[slot, MEMBERS, position])
    for position in range(pool.ranks[replica].num_ready):
        count = insert(pool, row, count, pool.batches[row, MEMBERS, position])
    for position in range(count):
        i = pool.batches[row, SCRATCH, position]
        if pool.cache is not None:
            lose_shared(pool.cache, replica, i)
        lose_sequence(pool, run.requests, i)
        lose(fleet, run, pools, number, i, now_s)
    i = pool.ranks[replica].first_waiting
    while i != NONE:
        after = pool.sequences[i].next
        lose_sequence(pool, run.requests, i)
        lose(fleet, run, pools, number, i, now_s)
        i = after


@inner
def insert(pool: PoolTables, row: int, count: int, i: int) -> int:
    """Insert request `i` into the scratch list of a replica, by number; returns the list's new length."""
    position = count
    while position > 0 and pool.batches[row, SCRATCH, position - 1] > i:
        pool.batches[row, SCRATCH, position] = pool.batches[row, SCRATCH, position - 1]
        position -= 1
    pool.batches[row, SCRATCH, position] = i
    return count + 1


@inner
def lose_handoffs(
    caches: Cache | None, run: RunTables, pools: Pools, fleet: ReplicaFleet, rank: int, replica: int, now_s: float
) -> None:
    """Lose the requests whose KV was on its way from or to a rank of any pool, in the order of their numbers.

    Replicas at the other ends have room then, so that all look for work, and the router for a replica.
    """
    requests, transfers = run.requests, pools.transfers
    has_lost = False
    for i in range(requests.size):
        stage = transfers[i].stage
        from_here = transfers[i].prefill_rank == rank and stage != IS_READY
        if stage == NOT_HANDED or not (from_here or transfers[i].decode_rank == rank):
            continue
        has_lost = True
        leave_decode_rank(caches, requests, pools, i)
        if stage == IS_READ and transfers[i].transfer_start_s < now_s:
            occupy_links(pools, i, min(transfers[i].link_end_s, now_s))
        if from_here:
            pools.handoffs[rank].num_held -= 1
            if caches is not None:
                number = pools.pool_of_rank[rank]
                lose_shared(cache_of(caches, pools, number), rank - pools.pools[number].first_rank, i)
        elif stage != IS_READY:
            free_prefill_blocks(caches, requests, pools, i)
        keep_streamed_output(requests, pools, i)
        lose(fleet, run, pools, replica, i, now_s)
    if not has_lost:
        return
    ask_again(fleet, now_s)
    drop_lost_events(run, pools)
    free_links(run, pools)
    for other in range(fleet.replicas.size):
        if other != replica and fleet.replicas[other].phase in (UP, DRAINING):
            wake_replica(run, pools, other, now_s)


@inner
def keep_streamed_output(requests: Requests, pools: Pools, i: int) -> None:
    """Count the output of request `i`'s prefill as produced if the client has it: if the prefill side streams it."""
    routing = pools.routing[0]
    if not (routing.decode_samples_first or routing.decode_streams_first):
        requests[i].target_tokens += 1


@inner
def free_links(run: RunTables, pools: Pools) -> None:
    """Let the interfaces of all ranks go on with the transfers that are left."""
    for rank in range(pools.handoffs.size):
        pools.handoffs[rank].link_free_s = pools.handoffs[rank].link_busy_s
    for i in range(run.requests.size):
        transfer = pools.transfers[i]
        if transfer.stage == IS_READ:
            for rank in (transfer.prefill_rank, transfer.decode_rank):
                pools.handoffs[rank].link_free_s = max(pools.handoffs[rank].link_free_s, transfer.link_end_s)


@inner
def leave_decode_rank(caches: Cache | None, requests: Requests, pools: Pools, i: int) -> None:
    """Take request `i`, which has not begun to run where it decodes, away from there."""
    transfer = pools.transfers[i]
    rank = transfer.decode_rank
    pools.ranks[rank].num_outstanding -= 1
    if transfer.stage == WAITS:
        remove(requests, pools.waiting[rank], i)
        return
    if transfer.stage == IS_READY:
        remove(requests, pools.arrived[rank], i)
    pools.handoffs[rank].num_pulled -= 1
    pools.ranks[rank].free_window_blocks += transfer.taken_window_blocks
    if caches is None:
        pools.ranks[rank].free_blocks += transfer.taken_blocks
    if caches is not None:
        number = pools.pool_of_rank[rank]
        settings, own = pools.pools[number], cache_of(caches, pools, number)
        local = rank - settings.first_rank
        held = own.requests[i].shared_blocks + transfer.taken_blocks
        release(settings, own, ranks_of(pools, settings), local, i, held, 0)


@inner
def drop_lost_events(run: RunTables, pools: Pools) -> None:
    """Take the ends of KV transfers that will not end off the event queue."""
    events, clock = run.events, run.clock
    num_queued, clock[0].queued = clock[0].queued, 0
    for position in range(num_queued):
        time_s, event = events[position].time_s, events[position].slot
        if event >= 0 or pools.transfers[event + run.requests.size].stage == IS_READ:
            clock[0].queued = push(events.time_s, events.slot, clock[0].queued, time_s, event)


@inner
def drop_wakes(settings: KernelSettings, run: RunTables, replica: int) -> None:
    """Take wake-ups of a replica that is emptied off the event queue: else it would have two, and end a step at once.

    It has some if a failure of the same moment freed what its requests waited for. A step that it fails in has no end.
    """
    events, clock = run.events, run.clock
    first = settings.first_event + replica * settings.num_stages
    num_queued, clock[0].queued = clock[0].queued, 0
    for position in range(num_queued):
        time_s, event = events[position].time_s, events[position].slot
        if not first <= event < first + settings.num_stages:
            clock[0].queued = push(events.time_s, events.slot, clock[0].queued, time_s, event)


@inner
def interrupt_decoding(pool: PoolTables, requests: Requests, i: int) -> None:
    """Note what decoding request `i` has produced when its replica fails: all of it is computed again."""
    slots, slot = pool.slots, requests[i].slot
    computed = slots[slot].steps - requests[i].joined
    if requests[i].skipped_at == slots[slot].num_verified:  # left out of the step that the failure ends
        num_gained = 1
        if pool.speculation is not None:
            num_gained = gained_tokens(pool.speculation, slots, slot)
        computed += num_gained
    was_left_out = requests[i].skipped_at != NONE
    was_left_out = was_left_out and requests[i].skipped_at >= slots[slot].num_verified - 1
    if computed > requests[i].target_tokens and not was_left_out:
        requests[i].last_token_s = slots[slot].last_decode_s
    requests[i].target_tokens = computed + 1


@inner
def empty_rank(settings: KernelSettings, fleet: ReplicaFleet, ranks: Records[Rank], rank: int) -> None:
    """Reset a rank to the state that `new_ranks` makes; a wake-up of its replica that is queued stays."""
    is_awake = ranks[rank].is_awake
    ranks[rank] = fleet.idle_rank[0]
    ranks[rank].is_awake = is_awake
    ranks[rank].free_blocks = settings.num_blocks
    ranks[rank].free_window_blocks = settings.num_window_blocks


@inner
def empty_slot(fleet: ReplicaFleet, slots: Records[Slot], lists: Ints, slot: int) -> None:
    """Reset a slot to the state that `new_slots` and `new_lists` make."""
    slots[slot] = fleet.idle_slot[0]
    lists[slot, :, :] = 0
