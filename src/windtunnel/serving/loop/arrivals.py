"""Requests on their way in: whose turn it is, when, and to which replica and rank it is sent."""

import numpy as np

from windtunnel.compiled.heap import pop
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.cluster.pool_routers import route_arrival
from windtunnel.serving.cluster.router_queue import drop_first_at_router, hold, next_resend_s, route_up, take_lost
from windtunnel.serving.cluster.routers import fewest_outstanding, route
from windtunnel.serving.cluster.slots import wake
from windtunnel.serving.codes import USERS_ROUTER
from windtunnel.serving.schedulers.queue_orders import enqueue, set_queue_key
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools, ranks_of, slots_of
from windtunnel.serving.state.records import NONE, ClientSettings, Clock, KernelSettings, Requests, Sessions
from windtunnel.serving.state.tables import PoolTables, RunTables


@inner
def next_arrival_s(
    settings: ClientSettings, sessions: Sessions | None, requests: Requests, clock: Records[Clock]
) -> float:
    """Return when the next request is sent, in seconds, as far as is known: infinity while the client waits for a
    completion.

    A closed loop of C slots starts the k-th request, or session, when the (k - C + 1)-th completion has freed one, and
    measured ones only when all of warm-up has completed; arrival times then count from there.
    """
    send_s = np.inf
    if clock[0].next < requests.size:
        send_s = requests[clock[0].next].arrival_s
        if settings.concurrency > 0:
            k = clock[0].started
            if 0 < settings.num_warmup <= k:
                if clock[0].ended >= settings.num_warmup:
                    send_s += requests[settings.num_warmup - 1].completed_s + settings.frontend_s
                else:
                    send_s = np.inf
            if k >= settings.concurrency:
                if clock[0].ended > k - settings.concurrency:
                    send_s = max(send_s, requests[k - settings.concurrency].completed_s + settings.frontend_s)
                else:
                    send_s = np.inf
    if sessions is not None and clock[0].thinking > 0:
        send_s = min(send_s, sessions.time_s[0])
    return send_s


@inner
def next_send_s(settings: KernelSettings, run: RunTables, fleet: ReplicaFleet | None) -> float:
    """Return when the next request is sent: a new one, or one of a fleet that waits at the router or was lost."""
    send_s = next_arrival_s(settings, run.sessions, run.requests, run.clock)
    if fleet is not None:
        send_s = min(send_s, next_resend_s(fleet))
    return send_s


@inner
def take_next(sessions: Sessions | None, requests: Requests, clock: Records[Clock], now_s: float) -> int:
    """Take the request that is sent at `now_s`: a session's first turn, or a later one, which goes first at equal
    times."""
    if sessions is not None and clock[0].thinking > 0 and sessions.time_s[0] <= now_s:
        k = sessions.turn[0]
        clock[0].thinking = pop(sessions.time_s, sessions.turn, clock[0].thinking)
        return k
    k = clock[0].next
    clock[0].next += 1
    clock[0].started += 1
    if sessions is not None:
        while clock[0].next < requests.size and sessions.previous[clock[0].next] != NONE:
            clock[0].next += 1
    return k


@inner
def deliver(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, now_s: float) -> None:
    """Send the next request to a replica, there to the rank with the fewest requests; an idle slot wakes.

    With a fleet the next request may be one that waits at the router or was lost, and may have to wait at the router;
    afterwards `pending` says whether a user's router must be asked for it.
    """
    requests, sessions = run.requests, run.sessions
    k, replica = NONE, NONE
    if fleet is not None:
        k, replica = deliver_again(pool, run, fleet, now_s)
        if replica == NONE:
            return
    if fleet is None:
        k = send_next(run, now_s)
        if pools is None:
            replica = route(pool.settings, pool.cache, sessions, pool.ranks, run.clock, k)
        else:
            replica = route_arrival(pool.cache, pools, sessions, requests, run.clock, k)
    if sessions is not None:
        if sessions.session[k] != NONE:
            sessions.replica[sessions.session[k]] = replica
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    if pools is not None:
        settings = pools.pools[pools.pool_of_replica[replica]]
        ranks, slots = ranks_of(pools, settings), slots_of(pools, settings)
        replica -= settings.first_replica
    rank = fewest_outstanding(settings, ranks, replica)
    requests[k].rank = settings.first_rank + rank
    ranks[rank].num_outstanding += 1
    if fleet is None:
        requests[k].target_tokens = requests[k].input_tokens
        set_queue_key(settings, requests, ranks, rank, k, requests[k].input_tokens)
    if fleet is not None:
        if fleet.num_retries[k] == 0:
            requests[k].target_tokens = requests[k].input_tokens
            set_queue_key(settings, requests, ranks, rank, k, requests[k].input_tokens)
        requests[k].arrival_s = now_s
    enqueue(settings, requests, ranks, rank, k)
    for stage in range(settings.num_stages):
        if not slots[replica * settings.ranks_per_replica * settings.num_stages + stage].is_busy:
            wake(settings, slots, run, replica, stage, now_s)
            break


@inner
def send_next(run: RunTables, now_s: float) -> int:
    """Take the next request from the client at `now_s`; returns it."""
    k = take_next(run.sessions, run.requests, run.clock, now_s)
    run.requests[k].arrival_s = now_s
    run.requests[k].sequence = run.clock[0].sent
    run.clock[0].sent += 1
    return k


@inner
def deliver_again(pool: PoolTables, run: RunTables, fleet: ReplicaFleet, now_s: float) -> tuple[int, int]:
    """Choose the next request of a fleet, and the replica that it goes to; returns both.

    The request is one that a user's router has answered for, the first one that waits at the router, a lost one, or a
    new one. Without a replica it waits at the router, or a user's router must be asked for it.
    """
    control = fleet.control
    k, is_at_router, replica = control[0].pending, False, NONE
    is_answered = k != NONE
    if is_answered:
        is_at_router, replica = control[0].is_at_router == 1, control[0].answer
        control[0].pending = NONE
    elif control[0].num_at_router > 0 and control[0].asks:
        k, is_at_router = fleet.router_queue[control[0].first_at_router], True
    else:
        k = take_lost(fleet, now_s)
    if k == NONE:
        k = send_next(run, now_s)
        fleet.sent_s[k] = now_s
    if not is_answered:
        if control[0].num_at_router > 0 and not is_at_router:
            hold(fleet, k)
            return k, NONE
        if pool.settings.router == USERS_ROUTER:
            control[0].pending = k
            control[0].pending_s = now_s
            control[0].is_at_router = is_at_router
            return k, NONE
        replica = route_up(pool.settings, pool.cache, run.sessions, pool.ranks, run.clock, fleet, k)
    if replica == NONE:
        control[0].asks = 0
        if not is_at_router:
            hold(fleet, k)
    elif is_at_router:
        drop_first_at_router(fleet)
    return k, replica
