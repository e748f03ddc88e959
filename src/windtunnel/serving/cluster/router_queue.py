"""Requests that wait at the router, are sent again, and which of the replicas that are up takes the next."""

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.cluster.routers import replica_load, replica_with_prefix
from windtunnel.serving.codes import DEFERRED, POWER_OF_TWO, PREFIX_AFFINITY, RANDOM, ROUND_ROBIN, SESSION_AFFINITY, UP
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import MODULUS, MULTIPLIER, NONE, Cache, Clock, KernelSettings, Rank, Sessions


@inner
def next_resend_s(fleet: ReplicaFleet) -> float:
    """Return when a request that waits at the router, or was lost, is next tried."""
    control = fleet.control
    send_s = np.inf
    if control[0].num_at_router > 0 and control[0].asks:
        send_s = control[0].asked_s
    if control[0].num_retries > 0:
        send_s = min(send_s, fleet.retry_s[control[0].first_retry])
    return send_s


@inner
def ask_again(fleet: ReplicaFleet, now_s: float) -> None:
    """Try the first request at the router again: something ended or came up."""
    if fleet.control[0].num_at_router > 0:
        fleet.control[0].asks = 1
        fleet.control[0].asked_s = now_s


@inner
def take_lost(fleet: ReplicaFleet, now_s: float) -> int:
    """Take the lost request that is due at `now_s`, or NONE."""
    control = fleet.control
    if control[0].num_retries == 0 or fleet.retry_s[control[0].first_retry] > now_s:
        return NONE
    k = fleet.retries[control[0].first_retry]
    control[0].first_retry = (control[0].first_retry + 1) % fleet.retries.size
    control[0].num_retries -= 1
    return k


@inner
def hold(fleet: ReplicaFleet, k: int) -> None:
    """Put request `k` at the end of the router queue."""
    control = fleet.control
    fleet.router_queue[(control[0].first_at_router + control[0].num_at_router) % fleet.router_queue.size] = k
    control[0].num_at_router += 1


@inner
def drop_first_at_router(fleet: ReplicaFleet) -> None:
    """Take the first request off the router queue."""
    control = fleet.control
    control[0].first_at_router = (control[0].first_at_router + 1) % fleet.router_queue.size
    control[0].num_at_router -= 1


@inner
def count_up(fleet: ReplicaFleet) -> int:
    """Return how many replicas are up."""
    num_up = 0
    for replica in range(fleet.replicas.size):
        if fleet.replicas[replica].phase == UP:
            num_up += 1
    return num_up


@inner
def nth_up(fleet: ReplicaFleet, n: int) -> int:
    """Return the `n`-th of the replicas that are up."""
    for replica in range(fleet.replicas.size):
        if fleet.replicas[replica].phase == UP:
            if n == 0:
                return replica
            n -= 1
    return NONE


@inner
def route_up(
    settings: KernelSettings,
    cache: Cache | None,
    sessions: Sessions | None,
    ranks: Records[Rank],
    clock: Records[Clock],
    fleet: ReplicaFleet,
    i: int,
) -> int:
    """Choose a replica that is up, as `serving.cluster.routers.route`; NONE where there is none, or none with room."""
    num_up = count_up(fleet)
    if num_up == 0:
        return NONE
    if settings.router == ROUND_ROBIN:
        replica = clock[0].turn
        while fleet.replicas[replica].phase != UP:
            replica = (replica + 1) % settings.num_replicas
        clock[0].turn = (replica + 1) % settings.num_replicas
        return replica
    if sessions is not None and settings.router == SESSION_AFFINITY:
        session = sessions.session[i]
        if session != NONE and sessions.replica[session] != NONE:
            if fleet.replicas[sessions.replica[session]].phase == UP:
                return sessions.replica[session]
    if cache is not None and settings.router == PREFIX_AFFINITY:
        replica = replica_with_prefix(settings, cache, ranks, fleet, i)
        if replica != NONE:
            return replica
    draws = settings.router == RANDOM or settings.router == POWER_OF_TWO
    best, least = NONE, 0
    for position in range(1 + (settings.router == POWER_OF_TWO) if draws else settings.num_replicas):
        replica = position
        if draws:
            clock[0].random = clock[0].random * MULTIPLIER % MODULUS
            replica = nth_up(fleet, clock[0].random % num_up)
        if fleet.replicas[replica].phase != UP:
            continue
        load = replica_load(settings, ranks, replica)
        if best == NONE or load < least or (load == least and replica < best):
            best, least = replica, load
    if settings.router == DEFERRED and least >= fleet.scaling.most_outstanding:
        return NONE
    return best
