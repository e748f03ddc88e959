"""Which replica a request goes to, and which of its ranks.

Replicas are numbered through all pools. `pools` is None where there is one pool, and `fleet` where all replicas are
there all the time.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving import codes
from windtunnel.serving.kv.cache import entry_of, evict
from windtunnel.serving.schedulers.adapters import has_in_slot
from windtunnel.serving.state.adapters import Adapters
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools, cache_of, ranks_of
from windtunnel.serving.state.records import MODULUS, MULTIPLIER, NONE, Cache, Clock, KernelSettings, Rank
from windtunnel.serving.state.tables import PoolTables, RunTables

UNEVEN_REQUESTS = 64
UNEVEN_RATIO = 1.5
"""Prefix affinity gives way to balance where the busiest replica has so many requests more than the idlest, and so many
times as many: SGLang's cache-aware policy (sgl-router 0.2: `balance_abs_threshold` and `balance_rel_threshold`)."""


@inner
def num_candidates(pool: PoolTables, pools: Pools | None, decodes: bool) -> int:
    """Return how many replicas may take a request: those that decode, or those that requests start at."""
    if pools is None:
        return pool.settings.num_replicas
    return pools.decoders.size if decodes else pools.entries.size


@inner
def candidate(pools: Pools | None, decodes: bool, position: int) -> int:
    """Return one of these replicas."""
    if pools is None:
        return position
    return pools.decoders[position] if decodes else pools.entries[position]


@inner
def is_up(fleet: ReplicaFleet | None, replica: int) -> bool:
    """Whether a replica takes requests."""
    if fleet is None:
        return True
    return fleet.replicas[replica].phase == codes.UP


@inner
def count_up(pool: PoolTables, pools: Pools | None, fleet: ReplicaFleet | None, decodes: bool) -> int:
    """Return how many candidates take requests."""
    num_up = num_candidates(pool, pools, decodes)
    if fleet is not None:
        num_up = 0
        for position in range(num_candidates(pool, pools, decodes)):
            if is_up(fleet, candidate(pools, decodes, position)):
                num_up += 1
    return num_up


@inner
def nth_up(pools: Pools | None, fleet: ReplicaFleet | None, decodes: bool, n: int) -> int:
    """Return the `n`-th of the candidates that take requests."""
    position = n
    if fleet is not None:
        position = 0
        while n > 0 or not is_up(fleet, candidate(pools, decodes, position)):
            n -= is_up(fleet, candidate(pools, decodes, position))
            position += 1
    return candidate(pools, decodes, position)


@inner
def load_of_ranks(settings: KernelSettings, ranks: Records[Rank], replica: int, metric: int) -> int:
    """Return the load of a pool's replica in the units of a metric: requests, or KV blocks in use."""
    first = replica * settings.ranks_per_replica
    load = 0
    for rank in range(first, first + settings.ranks_per_replica):
        if metric == codes.OUTSTANDING:
            load += ranks[rank].num_outstanding
        elif metric == codes.WAITING:
            load += ranks[rank].num_waiting
        elif metric == codes.RUNNING:
            load += ranks[rank].num_running
        else:
            load += settings.num_blocks - ranks[rank].free_blocks
    return load


@inner
def load_of(pool: PoolTables, pools: Pools | None, replica: int, metric: int) -> int:
    """Return the load of a replica of any pool."""
    if pools is None:
        return load_of_ranks(pool.settings, pool.ranks, replica, metric)
    settings = pools.pools[pools.pool_of_replica[replica]]
    return load_of_ranks(settings, ranks_of(pools, settings), replica - settings.first_replica, metric)


@inner
def compared_metric(router: int) -> int:
    """Return the metric by which a router that looks at the load compares replicas."""
    if router == codes.LEAST_KV:
        return codes.KV_USE
    return codes.WAITING if router == codes.LEAST_WAITING else codes.OUTSTANDING


@inner
def cached_blocks_of_ranks(settings: KernelSettings, cache: Cache, ranks: Records[Rank], replica: int, i: int) -> int:
    """Return how many blocks of request `i` a pool's replica has cached, on the rank that has most of them."""
    first = replica * settings.ranks_per_replica
    most_blocks = 0
    for rank in range(first, first + settings.ranks_per_replica):
        evict(settings, cache, ranks, rank)
        node = cache.requests[i].shared
        while node != NONE and cache.entries[entry_of(cache, rank, node)].num_blocks == 0:
            node = cache.nodes[node].parent
        if node != NONE:
            num_blocks = cache.nodes[node].first_block + cache.entries[entry_of(cache, rank, node)].num_blocks
            most_blocks = max(most_blocks, num_blocks)
    return most_blocks


@inner
def cached_tokens(pool: PoolTables, cache: Cache, pools: Pools | None, replica: int, i: int) -> int:
    """Return how many tokens of request `i` a replica of any pool has cached."""
    if pools is None:
        return cached_blocks_of_ranks(pool.settings, cache, pool.ranks, replica, i) * pool.settings.block_size
    number = pools.pool_of_replica[replica]
    settings, own = pools.pools[number], cache_of(cache, pools, number)
    replica -= settings.first_replica
    return cached_blocks_of_ranks(settings, own, ranks_of(pools, settings), replica, i) * settings.block_size


@inner
def replica_with_prefix(
    pool: PoolTables, cache: Cache, pools: Pools | None, fleet: ReplicaFleet | None, decodes: bool, i: int
) -> int:
    """Return the candidate with most of request `i`'s prompt in its cache, of equal ones that with the fewest requests;
    NONE where nothing is cached, or where the load is uneven.

    The caches are looked at as they are, as llm-d's precise prefix scorer does, not by a router's own guess of them.
    """
    lightest, heaviest = NONE, 0
    best, longest, least = NONE, 0, 0
    for position in range(num_candidates(pool, pools, decodes)):
        replica = candidate(pools, decodes, position)
        if not is_up(fleet, replica):
            continue
        load = load_of(pool, pools, replica, codes.OUTSTANDING)
        lightest = load if lightest == NONE else min(lightest, load)
        heaviest = max(heaviest, load)
        num_tokens = cached_tokens(pool, cache, pools, replica, i)
        if num_tokens > longest or (num_tokens > 0 and num_tokens == longest and load < least):
            best, longest, least = replica, num_tokens, load
    if heaviest - lightest > UNEVEN_REQUESTS and heaviest > UNEVEN_RATIO * lightest:
        return NONE
    return best


@inner
def replica_with_adapter(
    pool: PoolTables, adapters: Adapters, pools: Pools | None, fleet: ReplicaFleet | None, decodes: bool, i: int
) -> int:
    """Return the candidate that has the adapter of request `i` in a slot, of several the one with the fewest requests;
    NONE where none has it, or the request uses the base model.

    The slots are looked at as they are; the LoRA scorer of the Gateway API inference extension sees the adapters of
    running requests in the servers' metric `vllm:lora_requests_info`.
    """
    best, least = NONE, 0
    for position in range(num_candidates(pool, pools, decodes)):
        replica = candidate(pools, decodes, position)
        if is_up(fleet, replica):
            settings = pool.settings if pools is None else pools.pools[pools.pool_of_replica[replica]]
            first = settings.first_rank + (replica - settings.first_replica) * settings.ranks_per_replica
            load = load_of(pool, pools, replica, codes.OUTSTANDING)
            for rank in range(first, first + settings.ranks_per_replica):
                if has_in_slot(adapters, rank, i) and (best == NONE or load < least):
                    best, least = replica, load
    return best


@inner
def next_in_turn(
    pool: PoolTables, clock: Records[Clock], pools: Pools | None, fleet: ReplicaFleet | None, decodes: bool
) -> int:
    """Return the next candidate in turn that takes requests; there is one."""
    position = clock[0].decode_turn if decodes else clock[0].turn
    while not is_up(fleet, candidate(pools, decodes, position)):
        position = (position + 1) % num_candidates(pool, pools, decodes)
    following = (position + 1) % num_candidates(pool, pools, decodes)
    if decodes:
        clock[0].decode_turn = following
    else:
        clock[0].turn = following
    return candidate(pools, decodes, position)


@inner
def choose(
    pool: PoolTables, clock: Records[Clock], pools: Pools | None, fleet: ReplicaFleet | None, router: int, decodes: bool
) -> int:
    """Choose a replica that takes requests, of equal ones the first; NONE where there is none, or none with room.

    `round_robin` and `random` see no load; `power_of_two` takes the less loaded of two drawn ones (Mitzenmacher, 2001);
    `least_outstanding` and `least_kv` look at all, as the production stack's and llm-d's scorers do; `least_waiting` is
    Vidur's "lor", blind to requests that run. The others look at all too where they have no preference.
    """
    if num_candidates(pool, pools, decodes) == 1 and fleet is None:
        return candidate(pools, decodes, 0)
    num_up = count_up(pool, pools, fleet, decodes)
    if num_up == 0:
        return NONE
    if router == codes.ROUND_ROBIN:
        return next_in_turn(pool, clock, pools, fleet, decodes)
    draws, metric = router in (codes.RANDOM, codes.POWER_OF_TWO), compared_metric(router)
    best, least = NONE, 0
    for position in range(1 + (router == codes.POWER_OF_TWO) if draws else num_candidates(pool, pools, decodes)):
        if draws:
            if num_candidates(pool, pools, decodes) > 1:
                clock[0].random = clock[0].random * MULTIPLIER % MODULUS
            replica = nth_up(pools, fleet, decodes, clock[0].random % num_up)
        else:
            replica = candidate(pools, decodes, position)
        if not is_up(fleet, replica):
            continue
        load = load_of(pool, pools, replica, metric)
        if best == NONE or load < least or (load == least and replica < best):
            best, least = replica, load
    if fleet is not None and router == codes.DEFERRED and least >= fleet.rules.most_outstanding:
        return NONE
    return best


@inner
def choose_for(
    pool: PoolTables,
    clock: Records[Clock],
    pools: Pools | None,
    fleet: ReplicaFleet | None,
    router: int,
    decodes: bool,
    i: int,
) -> int:
    """Choose as `choose`; `adapter_affinity` sends request `i` where its LoRA adapter lies in a slot."""
    if pool.adapters is not None and router == codes.ADAPTER_AFFINITY:
        replica = replica_with_adapter(pool, pool.adapters, pools, fleet, decodes, i)
        if replica != NONE:
            return replica
    return choose(pool, clock, pools, fleet, router, decodes)


@inner
def route(
    pool: PoolTables,
    run: RunTables,
    pools: Pools | None,
    fleet: ReplicaFleet | None,
    router: int,
    decodes: bool,
    i: int,
) -> int:
    """Choose the replica that request `i` is sent to, as `choose_for`.

    `session_affinity` sends a session's later turns where its first went, as the production stack's session router;
    `prefix_affinity` goes where most of the prompt is cached, unless the load is uneven.
    """
    sessions = run.sessions
    if sessions is not None and router == codes.SESSION_AFFINITY:
        session = sessions.session[i]
        if session != NONE and sessions.replica[session] != NONE:
            former = sessions.replica[session]
            for position in range(num_candidates(pool, pools, decodes)):
                if candidate(pools, decodes, position) == former and is_up(fleet, former):
                    return former
    if pool.cache is not None and router == codes.PREFIX_AFFINITY:
        replica = replica_with_prefix(pool, pool.cache, pools, fleet, decodes, i)
        if replica != NONE:
            return replica
    return choose_for(pool, run.clock, pools, fleet, router, decodes, i)


@inner
def fewest_outstanding(settings: KernelSettings, ranks: Records[Rank], replica: int) -> int:
    """Return the rank of a pool's replica with the fewest requests."""
    first = replica * settings.ranks_per_replica
    rank = first
    for other in range(first + 1, first + settings.ranks_per_replica):
        if ranks[other].num_outstanding < ranks[rank].num_outstanding:
            rank = other
    return rank
