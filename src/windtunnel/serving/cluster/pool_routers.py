"""Which replica of which pool a request goes to."""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.cluster.routers import UNEVEN_RATIO, UNEVEN_REQUESTS
from windtunnel.serving.codes import (
    LEAST_KV,
    LEAST_WAITING,
    POWER_OF_TWO,
    PREFIX_AFFINITY,
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
)
from windtunnel.serving.kv.cache import entry_of, evict
from windtunnel.serving.state.pools import Pools, cache_of, ranks_of
from windtunnel.serving.state.records import MODULUS, MULTIPLIER, NONE, Cache, Clock, Ints, Requests, Sessions


@inner
def load_of(pools: Pools, replica: int, router: int) -> int:
    """Return the load of a replica of any pool, as `serving.cluster.routers.replica_load`."""
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
def cached_tokens(cache: Cache, pools: Pools, replica: int, i: int) -> int:
    """Return how many tokens of request `i` one replica has cached, on the rank that has most of them."""
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
def candidate_with_prefix(cache: Cache, pools: Pools, candidates: Ints, router: int, i: int) -> int:
    """Return the candidate with most of the prompt cached, as `serving.cluster.routers.replica_with_prefix`."""
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
def choose(pools: Pools, clock: Records[Clock], candidates: Ints, router: int, turn: int) -> int:
    """Choose one of the `candidates`, replicas of all pools, for a request, as `serving.cluster.routers.route` over
    several pools.
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
def route_arrival(
    cache: Cache | None, pools: Pools, sessions: Sessions | None, requests: Requests, clock: Records[Clock], i: int
) -> int:
    """Choose the replica that arriving request `i` starts at; one that is to be handed off asks for one token there.

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
    if not is_local and pools.pools[pools.pool_of_replica[replica]].hands_off:
        if requests[i].output_tokens > 1 or routing.decode_samples_first:
            pools.transfers[i].later_output_tokens = requests[i].output_tokens
            requests[i].output_tokens = 1
    return replica
