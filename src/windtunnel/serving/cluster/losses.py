"""What a replica that fails loses: its requests, its caches, the steps under way."""

import numpy as np

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.kv.cache import entry_of, forget
from windtunnel.serving.kv.tiers import drop
from windtunnel.serving.schedulers.batch import gained_tokens
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import NONE, Cache, Ints, KernelSettings, Rank, Requests, Slot
from windtunnel.serving.state.tables import PoolTables


@inner
def lose(fleet: ReplicaFleet, requests: Requests, replica: int, i: int, now_s: float) -> None:
    """Reset request `i`, which was at a replica that has failed, and plan to send it again."""
    requests[i].computed_tokens = 0
    requests[i].chunks_in_flight = 0
    requests[i].is_decoding = 0
    requests[i].slides = 0
    requests[i].passed_blocks = 0
    if fleet.scaling.starts_over:
        fleet.discarded_tokens[i] += requests[i].target_tokens - requests[i].input_tokens
        requests[i].target_tokens = requests[i].input_tokens
        requests[i].first_token_s = np.nan
    fleet.num_retries[i] += 1
    control = fleet.control
    at = (control[0].first_retry + control[0].num_retries) % fleet.retries.size
    fleet.retries[at] = i
    fleet.retry_s[at] = now_s + fleet.scaling.retry_s
    control[0].num_retries += 1
    row = control[0].num_losses
    fleet.losses[row].request = i
    fleet.losses[row].replica = replica
    fleet.losses[row].begin_s = requests[i].arrival_s
    fleet.losses[row].end_s = now_s
    control[0].num_losses = row + 1


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
def lose_shared(cache: Cache, rank: int, i: int) -> None:
    """Forget what running request `i` shares with others of its rank, which fail with it."""
    node = cache.requests[i].deepest
    while node != NONE:
        entry = entry_of(cache, rank, node)
        cache.entries[entry].num_blocks = 0
        cache.entries[entry].references = 0
        node = cache.nodes[node].parent
    cache.requests[i].deepest = NONE
    cache.requests[i].shared_blocks = 0


@inner
def clear(pool: PoolTables, requests: Requests, fleet: ReplicaFleet, replica: int, now_s: float) -> None:
    """Leave a replica as it starts: empty. What it had, if it failed, is sent again, rank by rank: running requests in
    their order, then waiting ones in theirs.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        i = ranks[rank].first
        while i != NONE:
            after = requests[i].after
            if pool.cache is not None:
                lose_shared(pool.cache, rank, i)
            if requests[i].is_decoding:
                interrupt_decoding(pool, requests, i)
            lose(fleet, requests, replica, i, now_s)
            i = after
        while ranks[rank].waiting != NONE:
            i = ranks[rank].waiting
            ranks[rank].waiting = meld(
                requests.order, requests.left, requests.right, requests[i].left, requests[i].right
            )
            requests[i].left = NONE
            requests[i].right = NONE
            lose(fleet, requests, replica, i, now_s)
        if pool.cache is not None:
            lose_cache(pool.cache, rank)
        empty_rank(settings, ranks, rank)
        for slot in range(rank * settings.num_stages, (rank + 1) * settings.num_stages):
            empty_slot(slots, pool.lists, slot)
            if pool.cache is not None:
                pool.cache.load_s[slot] = 0.0
    for stage in range(settings.num_stages):
        pool.stages[replica, stage] = 0.0


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
def empty_rank(settings: KernelSettings, ranks: Records[Rank], rank: int) -> None:
    """Reset a rank to the state that `new_ranks` makes."""
    ranks[rank].num_running = 0
    ranks[rank].num_waiting = 0
    ranks[rank].waiting_tokens = 0
    ranks[rank].num_outstanding = 0
    ranks[rank].remaining_tokens = 0
    ranks[rank].free_blocks = settings.num_blocks
    ranks[rank].free_window_blocks = settings.num_window_blocks
    ranks[rank].first = NONE
    ranks[rank].last = NONE
    ranks[rank].waiting = NONE
    ranks[rank].num_prefilling = 0
    ranks[rank].new_token_ratio = 0.0
    ranks[rank].fair_tag = 0
    ranks[rank].waited_steps = 0
    ranks[rank].balance_waited = 0
    ranks[rank].balance_ready = 0
    ranks[rank].steps_to_receive = 0


@inner
def empty_slot(slots: Records[Slot], lists: Ints, slot: int) -> None:
    """Reset a slot to the state that `new_slots` and `new_lists` make."""
    slots[slot].is_busy = 0
    slots[slot].steps = 0
    slots[slot].num_decoding = 0
    slots[slot].context_tokens = 0
    slots[slot].finish_size = 0
    slots[slot].batch_size = 0
    slots[slot].batch_decodes = 0
    slots[slot].num_skipped = 0
    slots[slot].skipped_context_tokens = 0
    slots[slot].skipped_since_s = 0.0
    slots[slot].holds_back = 0
    slots[slot].looks_again = 0
    slots[slot].num_joined = 0
    slots[slot].joined_since_s = 0.0
    slots[slot].last_decode_s = -np.inf
    slots[slot].num_verified = 0
    for kind in range(lists.shape[1]):
        for position in range(lists.shape[2]):
            lists[slot, kind, position] = 0
