"""Pools of replicas, each with its own device, parallelism and engine, joined by requests that prefill in one and
decode in another.

A request that will be handed over is, where it prefills, a request for a single token. Its blocks stay taken there
until the decode side has read them; there it waits, in the order of arrival, for blocks to read into, which an engine
gives when it forms a batch, after those of the requests that it runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from windtunnel.kernels.heap import push
from windtunnel.kernels.jit import inlined, inner
from windtunnel.kernels.kvcache import acquire, entry_of, evict, look_up, release, share
from windtunnel.kernels.kvtiers import leave_below
from windtunnel.kernels.policies import (
    UNEVEN_RATIO,
    UNEVEN_REQUESTS,
    blocks_to_start,
    held_blocks,
    held_window_blocks,
    link,
    set_queue_key,
)
from windtunnel.kernels.pool_caches import cache_of
from windtunnel.kernels.state import (
    EVENT,
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
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
    Floats,
    Ints,
    Settings,
    StepCost,
    Table,
    new_lanes,
    new_lists,
    new_ranks,
)
from windtunnel.kernels.windows import begin_to_slide, next_change, passed_blocks

BOTH, PREFILL, DECODE = range(3)
"""What a pool does: whole requests, prefills alone, or decodes what was prefilled elsewhere."""


class PoolPlan(NamedTuple):
    """One pool, as a run is started with it."""

    settings: Settings
    """`first_*` are filled in by `new_pools`."""
    cost: StepCost
    role: int = BOTH
    link_bytes_per_s: float = np.inf
    """Of the network interfaces of one rank, in one direction."""


class Travel(NamedTuple):
    """How requests go from pool to pool. Scalars."""

    decode_router: int = ROUND_ROBIN
    local_tokens: int = 0
    """Prompts up to so many prefill where they decode."""
    decode_samples_first: int = 0
    """1: the decode side computes the last prompt token again and has the first output; 0: the prefill side has it."""
    bytes_per_token: float = 0.0
    """Of KV cache, all ranks of tensor and pipeline parallelism together."""
    bytes_per_request: float = 0.0
    """Of state whose size is fixed."""
    latency_s: float = 0.0
    tail_fraction: float = 1.0
    """Share of the KV that is sent after the prefill: all, or the last layer's."""


POOL = np.dtype(
    [(name, "f8" if kind is float else "i8") for name, kind in Settings.__annotations__.items()]
    + [
        ("end_replica", "i8"),  # ends of the pool's share of the arrays of all pools
        ("end_rank", "i8"),
        ("first_lane", "i8"),
        ("end_lane", "i8"),
        ("first_entry", "i8"),  # of the pool's prefix caches, where there are any
        ("end_entry", "i8"),
        ("first_tier", "i8"),  # of the tiers below them
        ("end_tier", "i8"),
        ("load_overlaps", "i8"),  # as `Cache.load_overlaps`
        ("hands_over", "i8"),  # 1: requests leave after their prefill
        ("link_bytes_per_s", "f8"),  # of the network interfaces of one rank
    ]
)
"""One record a pool: its settings, and where it lies among all pools' replicas, ranks and lanes."""

JOURNEY = np.dtype(
    [
        ("prefill_rank", "i8"),  # of all pools' ranks
        ("decode_rank", "i8"),  # the same rank where nothing is handed over
        ("handed_s", "f8"),  # end of the prefill
        ("transfer_start_s", "f8"),
        ("transfer_end_s", "f8"),
        ("later_output_tokens", "i8"),  # while it prefills elsewhere, where it is a request for one token
        ("held_blocks", "i8"),  # of the prefill rank, until its KV has been read
        ("held_window_blocks", "i8"),  # of the windows' own pool there
        ("cached_tokens", "i8"),  # of its prompt, found where it was first admitted; filled in when the run has ended
    ]
)
"""One record a request of a run with pools."""

HANDOVER = np.dtype(
    [
        ("pull_first", "i8"),  # ends of the list of requests that wait for blocks to read their KV into
        ("pull_last", "i8"),
        ("ready_first", "i8"),  # ends of the list of those whose KV has come
        ("ready_last", "i8"),
        ("num_pulled", "i8"),  # requests that hold blocks here and do not run yet
        ("link_free_s", "f8"),  # when the rank's interfaces have sent and received all that they were given
    ]
)
"""One record a rank of a run with pools."""

ROUTING = np.dtype(
    [
        ("turn", "i8"),  # arrivals and handovers so far, for `round_robin`
        ("decode_turn", "i8"),
        ("router", "i8"),
        *((name, "f8" if kind is float else "i8") for name, kind in Travel.__annotations__.items()),
    ]
)
"""One record a run with pools."""


class Pools(NamedTuple):
    """What a run with several pools needs beside requests, events and clock; the arrays of all pools end to end."""

    pools: Table
    """[pool]"""
    cost: StepCost
    """Every field with a first axis of pools."""
    ranks: Table
    lanes: Table
    lists: Ints
    stages: Floats
    handovers: Table
    """[rank]"""
    journeys: Table
    """[request]"""
    routing: Table
    """[1]"""
    pool_of_event: Ints
    """[lane in the event queue]"""
    pool_of_replica: Ints
    pool_of_rank: Ints
    entries: Ints
    """Replicas that a request may start at."""
    decoders: Ints
    """Replicas that a request may be handed to."""


def new_pools(plans: Sequence[PoolPlan], travel: Travel, num_requests: int) -> Pools:
    """Idle pools, end to end in the order of `plans`.

    The router, its seed and the client's behaviour are those of the first plan's settings.
    """
    pools = np.zeros(len(plans), POOL).view(np.recarray)
    hands_over = any(plan.role == PREFILL for plan in plans)
    ends = np.zeros(4, np.int64)
    for pool, plan in zip(pools, plans, strict=True):
        num_replicas, num_stages = plan.settings.num_replicas, plan.settings.num_stages
        num_ranks = num_replicas * plan.settings.ranks_per_replica
        for name, value in plan.settings._asdict().items():
            pool[name] = value
        pool.first_replica, pool.first_rank, pool.first_lane, pool.first_event = ends
        ends += (num_replicas, num_ranks, num_ranks * num_stages, num_replicas * num_stages)
        pool.end_replica, pool.end_rank, pool.end_lane, _ = ends
        pool.heeds_all_events, pool.hands_over = hands_over, plan.role == PREFILL
        pool.link_bytes_per_s = plan.link_bytes_per_s
    journeys = np.zeros(num_requests, JOURNEY).view(np.recarray)
    for unknown in ("handed_s", "transfer_start_s", "transfer_end_s"):
        journeys[unknown] = np.nan
    handovers = np.zeros(ends[1], HANDOVER).view(np.recarray)
    for nobody in ("pull_first", "pull_last", "ready_first", "ready_last"):
        handovers[nobody] = NONE
    routing = np.zeros(1, ROUTING).view(np.recarray)
    routing.router = plans[0].settings.router
    for name, value in travel._asdict().items():
        routing[name] = value
    roles = np.array([plan.role for plan in plans])
    of_replica = np.repeat(np.arange(len(plans)), [plan.settings.num_replicas for plan in plans])
    decoding = DECODE if hands_over and (roles == DECODE).any() else BOTH
    lists = [new_lists(plan.settings) for plan in plans]
    return Pools(
        pools=pools,
        cost=stacked([plan.cost for plan in plans]),
        ranks=np.concatenate([new_ranks(plan.settings) for plan in plans]).view(np.recarray),
        lanes=np.concatenate([new_lanes(plan.settings) for plan in plans]).view(np.recarray),
        lists=np.concatenate([widened(part, max(part.shape[2] for part in lists)) for part in lists]),
        stages=np.zeros((ends[0], max(plan.settings.num_stages for plan in plans))),
        handovers=handovers,
        journeys=journeys,
        routing=routing,
        pool_of_event=np.repeat(
            np.arange(len(plans)), [plan.settings.num_replicas * plan.settings.num_stages for plan in plans]
        ),
        pool_of_replica=of_replica,
        pool_of_rank=np.repeat(np.arange(len(plans)), pools.end_rank - pools.first_rank),
        entries=np.flatnonzero(roles[of_replica] != DECODE),
        decoders=np.flatnonzero(roles[of_replica] == decoding),
    )


def new_pool_events(plans: Sequence[PoolPlan]) -> Table:
    """An empty queue of `EVENT` records: lanes, and the transfers that may be under way."""
    lanes = sum(plan.settings.num_replicas * plan.settings.num_stages for plan in plans)
    pulled = sum(
        plan.settings.num_replicas * plan.settings.ranks_per_replica * plan.settings.max_num_seqs for plan in plans
    )
    return np.zeros(lanes + pulled + 1, EVENT).view(np.recarray)


def widened(lists: Ints, width: int) -> Ints:
    """`lists` with room for `width` positions in each."""
    return np.pad(lists, ((0, 0), (0, 0), (0, width - lists.shape[2])))


def stacked(costs: Sequence[StepCost]) -> StepCost:
    """Every field with a first axis of pools; grids that are shorter than others go on in a straight line."""
    longest = {name: max(getattr(cost, name).size for cost in costs) for name in _NODES}
    costs = [_extended(cost, longest) for cost in costs]
    parts = {}
    for name in StepCost._fields:
        arrays = [np.asarray(getattr(cost, name)) for cost in costs]
        largest = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
        parts[name] = np.zeros((len(costs), *largest), arrays[0].dtype)
        for pool, array in enumerate(arrays):
            parts[name][(pool, *map(slice, array.shape))] = array
    return StepCost(**parts)


_NODES = ("context_nodes", "chunk_nodes", "length_nodes")


def _extended(cost: StepCost, sizes: dict[str, int]) -> StepCost:
    """`cost` with its grids' nodes brought to `sizes`, values extrapolated as look-ups beyond the end would be."""
    decode = _grown(cost.decode_attention_s, cost.context_nodes, sizes["context_nodes"])
    prefill = _grown(cost.prefill_attention_s, cost.length_nodes, sizes["length_nodes"])
    prefill = _grown(prefill.T, cost.chunk_nodes, sizes["chunk_nodes"]).T
    mixed = cost.mixed_decode_attention_s if cost.mixed_decode_attention_s.size else cost.decode_attention_s
    mixed = _grown(mixed, cost.context_nodes, sizes["context_nodes"])
    nodes = {name: _grown(getattr(cost, name), getattr(cost, name), size) for name, size in sizes.items()}
    return cost._replace(
        decode_attention_s=decode, mixed_decode_attention_s=mixed, prefill_attention_s=prefill, **nodes
    )


def _grown(values: Floats, nodes: Floats, size: int) -> Floats:
    """`values` at `nodes` on its last axis, and at nodes as far apart as the last two up to `size` of them."""
    more = np.arange(1, size - nodes.size + 1)
    return np.concatenate([values, values[..., -1:] + (values[..., -1:] - values[..., -2:-1]) * more], axis=-1)


@inlined
def cost_of(pools, pool):
    """The step costs of one pool."""
    cost = pools.cost
    return StepCost(
        cost.decode_token_s[pool],
        cost.mixed_token_s[pool],
        cost.sample_s[pool],
        cost.context_nodes[pool],
        cost.decode_attention_s[pool],
        cost.chunk_nodes[pool],
        cost.length_nodes[pool],
        cost.prefill_attention_s[pool],
        cost.host_step_s[pool],
        cost.host_request_s[pool],
        cost.host_overlaps[pool],
        cost.recorded_step_s[pool],
        cost.group_token_s[pool],
        cost.draft_s[pool],
        cost.launch_s[pool],
        cost.mixed_decode_attention_s[pool],
    )


@inlined
def ranks_of(pools, settings):
    """A pool's share of the ranks."""
    return pools.ranks[settings.first_rank : settings.end_rank]


@inlined
def lanes_of(pools, settings):
    """A pool's share of the lanes."""
    return pools.lanes[settings.first_lane : settings.end_lane]


@inner
def load_of(pools, replica, router):
    """What a router compares: `policies.replica_load` of a replica of any pool."""
    settings = pools.pools[pools.pool_of_replica[replica]]
    first = settings.first_rank + (replica - settings.first_replica) * settings.ranks_per_replica
    load = 0
    for rank in range(first, first + settings.ranks_per_replica):
        if router == LEAST_KV:
            load += settings.num_blocks - pools.ranks[rank].free_blocks
        elif router == LEAST_WAITING:
            load += pools.ranks[rank].num_waiting
        else:
            load += pools.ranks[rank].num_outstanding
    return load


@inner
def cached_tokens(cache, pools, replica, i):
    """How much of request `i` lies in the cache of a replica of all pools', on the rank that has most of it."""
    pool = pools.pool_of_replica[replica]
    settings, own = pools.pools[pool], cache_of(cache, pools, pool)
    first = (replica - settings.first_replica) * settings.ranks_per_replica
    most_blocks = 0
    for rank in range(first, first + settings.ranks_per_replica):
        evict(settings, own, ranks_of(pools, settings), rank)
        node = own.requests[i].shared
        while node != NONE and own.entries[entry_of(own, rank, node)].num_blocks == 0:
            node = own.nodes[node].parent
        if node != NONE:
            found = own.nodes[node].first_block + own.entries[entry_of(own, rank, node)].num_blocks
            most_blocks = max(most_blocks, found)
    return most_blocks * settings.block_size


@inner
def candidate_with_prefix(cache, pools, candidates, router, i):
    """`policies.replica_with_prefix` among the `candidates`, replicas of all pools."""
    lightest, heaviest = NONE, 0
    best, longest, least = NONE, 0, 0
    for replica in candidates:
        load = load_of(pools, replica, router)
        lightest = load if lightest == NONE else min(lightest, load)
        heaviest = max(heaviest, load)
        found = cached_tokens(cache, pools, replica, i)
        if found > longest or (found > 0 and found == longest and load < least):
            best, longest, least = replica, found, load
    if heaviest - lightest > UNEVEN_REQUESTS and heaviest > UNEVEN_RATIO * lightest:
        return NONE
    return best


@inner
def choose(pools, clock, candidates, router, turn):
    """The one of the `candidates`, replicas of all pools, that a request goes to: `policies.route` over several
    pools.
    """
    if candidates.size == 1:
        return candidates[0]
    if router == ROUND_ROBIN:
        return candidates[turn % candidates.size]
    looks_at_all = router not in (RANDOM, POWER_OF_TWO)
    best, least = NONE, 0
    for position in range(candidates.size if looks_at_all else 1 + (router == POWER_OF_TWO)):
        replica = candidates[position]
        if not looks_at_all:
            clock[0].random = clock[0].random * MULTIPLIER % MODULUS
            replica = candidates[clock[0].random % candidates.size]
        load = load_of(pools, replica, router)
        if best == NONE or load < least or (load == least and replica < best):
            best, least = replica, load
    return best


@inner
def route_arrival(cache, pools, sessions, requests, clock, i):
    """The replica that arriving request `i` starts at; one that is to be handed over asks for one token there.

    Under `session_affinity` a session's later turns start where its former one did, if they may; under
    `prefix_affinity` where most of the prompt is cached.
    """
    routing = pools.routing[0]
    is_local = requests[i].input_tokens <= routing.local_tokens
    candidates = pools.decoders if is_local else pools.entries
    router = routing.decode_router if is_local else routing.router
    replica = NONE
    if sessions is not None and router == SESSION_AFFINITY:
        if sessions.session[i] != NONE and sessions.replica[sessions.session[i]] != NONE:
            former = sessions.replica[sessions.session[i]]
            for candidate in candidates:
                replica = former if candidate == former else replica
    if cache is not None and router == PREFIX_AFFINITY:
        replica = candidate_with_prefix(cache, pools, candidates, router, i)
    if replica == NONE:
        replica = choose(pools, clock, candidates, router, routing.decode_turn if is_local else routing.turn)
        if is_local:
            routing.decode_turn += 1
        else:
            routing.turn += 1
    if not is_local and pools.pools[pools.pool_of_replica[replica]].hands_over:
        if requests[i].output_tokens > 1 or routing.decode_samples_first:
            pools.journeys[i].later_output_tokens = requests[i].output_tokens
            requests[i].output_tokens = 1
    return replica


@inner
def fewest_outstanding(settings, ranks, replica):
    """The rank of a replica with the fewest requests."""
    first = replica * settings.ranks_per_replica
    rank = first
    for other in range(first + 1, first + settings.ranks_per_replica):
        if ranks[other].num_outstanding < ranks[rank].num_outstanding:
            rank = other
    return rank


@inner
def hand_over(settings, windows, requests, lanes, clock, pools, rank, i, now_s):
    """Request `i` has ended its prefill at `now_s`, on `rank` of its pool: send it to a replica that decodes.

    Returns that replica, of all pools'.
    """
    routing = pools.routing[0]
    journey = pools.journeys[i]
    journey.held_blocks = held_blocks(settings, windows, requests, lanes, i)
    if windows is not None:
        journey.held_window_blocks = held_window_blocks(settings, requests, lanes, i)
        requests[i].passed_blocks = 0
    journey.prefill_rank = settings.first_rank + rank
    journey.handed_s = now_s
    requests[i].output_tokens = journey.later_output_tokens
    journey.later_output_tokens = 0
    requests[i].last_token_s = now_s
    if routing.decode_samples_first:
        requests[i].first_token_s = np.nan
    replica = choose(pools, clock, pools.decoders, routing.decode_router, routing.decode_turn)
    routing.decode_turn += 1

    there = pools.pools[pools.pool_of_replica[replica]]
    to_rank = there.first_rank + fewest_outstanding(there, ranks_of(pools, there), replica - there.first_replica)
    journey.decode_rank = to_rank
    set_queue_key(there, requests, ranks_of(pools, there), to_rank - there.first_rank, i, 0)
    pools.ranks[to_rank].num_outstanding += 1
    requests[i].after = NONE
    last = pools.handovers[to_rank].pull_last
    if last == NONE:
        pools.handovers[to_rank].pull_first = i
    else:
        requests[last].after = i
    pools.handovers[to_rank].pull_last = i
    return replica


@inner
def pull(settings, windows, cache, requests, ranks, lanes, events, clock, pools, rank, lane, now_s):
    """Give blocks to the requests that wait to be read, in their order, while there are any; their transfers start.

    Requests that wait to be computed here, preempted or local ones, go first if they are the older. The request counts
    towards `max_num_seqs` from now on. A transfer occupies the interfaces of both ranks one after another: they have
    sent what they were given at `link_free_s`. With overlap the KV of a layer leaves when it has been computed, so that
    the transfer may have begun with the prefill and ends a layer's share after it, or when the link has caught up.
    Of what is cached here nothing is read (vLLM's `NixlConnector`, 0.10 to 0.24: `get_num_new_matched_tokens`); lower
    tiers are not asked, as the prefill side has it all (`MultiConnector`: the first one that has any loads it).
    """
    routing = pools.routing[0]
    here = pools.handovers[settings.first_rank + rank]
    while here.pull_first != NONE:
        i = here.pull_first
        journey = pools.journeys[i]
        if journey.handed_s > lanes[lane].cutoff_s:
            lanes[lane].looks_again = 1
            break
        if ranks[rank].num_running + here.num_pulled >= settings.max_num_seqs:
            break
        waiting = ranks[rank].waiting
        if waiting != NONE:
            order, first_order = requests[i].sequence, requests[waiting].sequence
            if settings.queue_order != FCFS:
                order += requests[i].queue_key * MOST_REQUESTS
                first_order += requests[waiting].queue_key * MOST_REQUESTS
            if first_order < order:
                break
        unused, cached = 0, 0
        requests[i].computed_tokens = 0
        if cache is not None:
            unused = look_up(settings, cache, requests, ranks, rank, i)
            unused -= leave_below(settings, cache, requests, i)
            cached = requests[i].computed_tokens
        num_read = requests[i].input_tokens - routing.decode_samples_first
        if windows is not None:
            requests[i].passed_blocks = passed_blocks(settings, num_read - 1)
        num_needed, num_window_blocks = blocks_to_start(settings, windows, requests, i, num_read - cached)
        if num_needed + unused > ranks[rank].free_blocks or num_window_blocks > ranks[rank].free_window_blocks:
            if windows is not None:
                lanes[lane].looks_again = 1
            break
        if cache is not None:
            acquire(cache, requests, ranks, rank, lane, i)
        ranks[rank].free_blocks -= num_needed
        ranks[rank].free_window_blocks -= num_window_blocks
        here.num_pulled += 1
        here.pull_first = requests[i].after
        if here.pull_first == NONE:
            here.pull_last = NONE

        sender = pools.handovers[journey.prefill_rank]
        sent_bytes_per_s = pools.pools[pools.pool_of_rank[journey.prefill_rank]].link_bytes_per_s
        whole_s = routing.bytes_per_token * (requests[i].input_tokens - cached) + routing.bytes_per_request
        whole_s /= min(sent_bytes_per_s, settings.link_bytes_per_s)
        ready_s = now_s if routing.tail_fraction == 1.0 else requests[i].scheduled_s
        start_s = max(ready_s, sender.link_free_s, here.link_free_s)
        end_s = max(start_s + whole_s, now_s + whole_s * routing.tail_fraction)
        sender.link_free_s = start_s + whole_s
        here.link_free_s = start_s + whole_s
        journey.transfer_start_s = start_s
        journey.transfer_end_s = end_s + routing.latency_s
        clock[0].queued = push(events.time_s, events.lane, clock[0].queued, journey.transfer_end_s, i - requests.size)


@inner
def end_transfer(cache, requests, pools, i):
    """Request `i` has been read: its blocks on the prefill side are free, those of its prompt stay cached there as long
    as there is room, and it may run on the decode side.
    """
    journey = pools.journeys[i]
    pools.ranks[journey.prefill_rank].free_window_blocks += journey.held_window_blocks
    if cache is None:
        pools.ranks[journey.prefill_rank].free_blocks += journey.held_blocks
    if cache is not None:
        pool = pools.pool_of_rank[journey.prefill_rank]
        settings, own = pools.pools[pool], cache_of(cache, pools, pool)
        rank = journey.prefill_rank - settings.first_rank
        release(settings, own, ranks_of(pools, settings), rank, i, journey.held_blocks, requests[i].input_tokens)
    journey.held_blocks = 0
    here = pools.handovers[journey.decode_rank]
    requests[i].after = NONE
    if here.ready_last == NONE:
        here.ready_first = i
    else:
        requests[here.ready_last].after = i
    here.ready_last = i


@inner
def join_ready(settings, windows, cache, requests, ranks, lanes, lists, pools, rank, lane):
    """Let the requests whose KV has come run, in their order: they decode in this lane's next step. What has come is
    cached.

    Where the decode side samples the first output, the last prompt token is computed again, as a prefill of one token.
    """
    samples_first = pools.routing[0].decode_samples_first
    here = pools.handovers[settings.first_rank + rank]
    while here.ready_first != NONE and ranks[rank].num_running < settings.max_num_seqs:
        i = here.ready_first
        if pools.journeys[i].transfer_end_s > lanes[lane].cutoff_s:
            lanes[lane].looks_again = 1
            break
        here.ready_first = requests[i].after
        if here.ready_first == NONE:
            here.ready_last = NONE
        here.num_pulled -= 1
        link(requests, ranks, rank, i)
        requests[i].target_tokens = requests[i].input_tokens
        requests[i].computed_tokens = requests[i].input_tokens - samples_first
        if cache is not None:
            share(settings, cache, ranks, rank, i, requests[i].computed_tokens)
        ranks[rank].remaining_tokens += requests[i].output_tokens - 1 + samples_first
        if samples_first:
            lists[rank * settings.num_stages, PREFILLING, ranks[rank].num_prefilling] = i
            ranks[rank].num_prefilling += 1
        else:
            joined = lanes[lane].steps - requests[i].computed_tokens
            requests[i].is_decoding = 1
            requests[i].lane = lane
            requests[i].joined = joined
            requests[i].skipped_at = NONE
            lanes[lane].num_decoding += 1
            lanes[lane].num_joined += 1
            lanes[lane].joined_since_s += requests[i].last_token_s
            lanes[lane].context_tokens += requests[i].computed_tokens
            lists[lane, PHASES, joined % settings.block_size] += 1
            change = joined + requests[i].input_tokens + requests[i].output_tokens - 1
            if windows is not None:
                begin_to_slide(settings, requests, ranks, lanes, lists, rank, i)
                change = next_change(settings, requests, i)
            lanes[lane].finish_size = push(
                lists[lane, FINISH_KEY], lists[lane, FINISH_VALUE], lanes[lane].finish_size, change, i
            )
