"""The clients: which request they send next and when, in an open loop, a closed loop or sessions."""

import numpy as np

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import NONE, Clock, KernelSettings, Requests, Sessions
from windtunnel.serving.state.tables import RunTables


@inner
def next_arrival_s(
    settings: KernelSettings, sessions: Sessions | None, requests: Requests, clock: Records[Clock]
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
def send_next(run: RunTables, now_s: float) -> int:
    """Take the next request from the client at `now_s`; returns it."""
    k = take_next(run.sessions, run.requests, run.clock, now_s)
    if run.until_s is not None:
        run.clock[0].next = run.requests.size
    run.requests[k].arrival_s = now_s
    run.requests[k].deadline_s = now_s + run.requests[k].ttft_limit_s
    run.requests[k].sequence = run.clock[0].sent
    run.clock[0].sent += 1
    return k


@inner
def conclude(settings: KernelSettings, run: RunTables, i: int, now_s: float) -> None:
    """Tell the client that request `i` is done: it sends the turn that follows, or has a free slot."""
    clock, sessions = run.clock, run.sessions
    clock[0].finished += 1
    if sessions is not None:
        turn = sessions.following[i]
        if turn != NONE:
            send_s = max(now_s + settings.frontend_s + sessions.think_s[turn], run.requests[turn].arrival_s)
            clock[0].thinking = push(sessions.time_s, sessions.turn, clock[0].thinking, send_s, turn)
            return
    run.requests[clock[0].ended].completed_s = now_s
    clock[0].ended += 1


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
def next_send_s(settings: KernelSettings, run: RunTables, fleet: ReplicaFleet | None) -> float:
    """Return when the next request is sent: a new one, or one of a fleet that waits at the router or was lost."""
    send_s = next_arrival_s(settings, run.sessions, run.requests, run.clock)
    if fleet is not None:
        send_s = min(send_s, next_resend_s(fleet))
    return send_s


@inner
def horizon_of_steps(settings: KernelSettings, run: RunTables, fleet: ReplicaFleet | None) -> float:
    """Return when the next event may change what a replica that only decodes does next."""
    clock, events = run.clock, run.events
    horizon_s = next_send_s(settings, run, fleet)
    if run.until_s is not None:
        horizon_s = min(horizon_s, run.until_s[0])
    if fleet is not None:
        horizon_s = min(horizon_s, fleet.control[0].next_s)
        if fleet.control[0].num_at_router > 0 and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s)
    if (settings.concurrency > 0 or settings.heeds_all_events) and clock[0].queued > 0:
        horizon_s = min(horizon_s, events[0].time_s)
    if run.sessions is not None:
        if clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s + settings.frontend_s + run.sessions.least_think_s)
    return horizon_s
