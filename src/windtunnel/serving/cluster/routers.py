"""Which replica a request goes to, and which of its ranks."""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.codes import (
    LEAST_KV,
    LEAST_WAITING,
    POWER_OF_TWO,
    PREFIX_AFFINITY,
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
    UP,
)
from windtunnel.serving.kv.cache import entry_of, evict
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import MODULUS, MULTIPLIER, NONE, Cache, Clock, KernelSettings, Rank, Sessions

UNEVEN_REQUESTS = 64
UNEVEN_RATIO = 1.5


@inner
def replica_load(settings: KernelSettings, ranks: Records[Rank], replica: int) -> int:
    """Return the load that a router compares: blocks in use under `least_kv`, requests that wait under `least_waiting`,
    else those that wait or run.
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


@inner
def replica_with_prefix(
    settings: KernelSettings, cache: Cache, ranks: Records[Rank], fleet: ReplicaFleet | None, i: int
) -> int:
    """Return the replica with most of request `i`'s prompt in its cache, of equal ones that with the fewest requests;
    NONE where nothing is cached, or where the load is uneven.

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
def route(
    settings: KernelSettings,
    cache: Cache | None,
    sessions: Sessions | None,
    ranks: Records[Rank],
    clock: Records[Clock],
    i: int,
) -> int:
    """Choose the replica that request `i` goes to; of equal ones the first.

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


@inner
def fewest_outstanding(settings: KernelSettings, ranks: Records[Rank], replica: int) -> int:
    """Return the rank of a replica with the fewest requests."""
    first = replica * settings.ranks_per_replica
    rank = first
    for other in range(first + 1, first + settings.ranks_per_replica):
        if ranks[other].num_outstanding < ranks[rank].num_outstanding:
            rank = other
    return rank
