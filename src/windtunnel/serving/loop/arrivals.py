"""Requests on their way in: to which replica and rank each is sent."""

from windtunnel.compiled.jit import inner
from windtunnel.serving.clients import send_next
from windtunnel.serving.cluster.losses import forget_own
from windtunnel.serving.cluster.router_queue import drop_first_at_router, hold, take_lost
from windtunnel.serving.cluster.routers import fewest_outstanding, route
from windtunnel.serving.cluster.slots import wake_for_request
from windtunnel.serving.codes import ASSIGNED, USERS_ROUTER, VLLM_V0
from windtunnel.serving.per_request.policies import begin_sequence, put_last
from windtunnel.serving.schedulers.queue_orders import enqueue, set_queue_key
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import PoolRecord, Pools, ranks_of, slots_of
from windtunnel.serving.state.records import NONE
from windtunnel.serving.state.tables import PoolTables, RunTables


@inner
def deliver(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, now_s: float) -> None:
    """Send the next request to a replica, there to the rank with the fewest requests; an idle slot wakes.

    With a fleet the next request may be one that waits at the router or was lost, and may have to wait at the router;
    afterwards `pending` says whether a user's router must be asked for it. With pools, `pool` is the first one.
    """
    requests, sessions = run.requests, run.sessions
    k, replica = NONE, NONE
    if fleet is not None:
        k, replica = deliver_again(pool, run, pools, fleet, now_s)
        if replica == NONE:
            return
    if fleet is None:
        k = send_next(run, now_s)
        requests[k].target_tokens = requests[k].input_tokens
        replica = requests[k].rank
        if pool.settings.router != ASSIGNED:
            replica = choose_replica(pool, run, pools, fleet, k)
    if sessions is not None and sessions.session[k] != NONE:
        sessions.replica[sessions.session[k]] = replica
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    if pools is not None:
        settings = pools.pools[pools.pool_of_replica[replica]]
        ranks, slots = ranks_of(pools, settings), slots_of(pools, settings)
        replica -= settings.first_replica
        limit_to_prefill(run, pools, settings, k)
    rank, former_rank = fewest_outstanding(settings, ranks, replica), requests[k].rank
    requests[k].rank = settings.first_rank + rank
    ranks[rank].num_outstanding += 1
    keeps_key = False
    if fleet is not None:
        requests[k].arrival_s = now_s
        keeps_key = fleet.num_retries[k] > 0
        if pools is not None and keeps_key:
            if pool.cache is not None:
                forget_own(pool.cache, pools, k)
            keeps_key = pools.pools[pools.pool_of_rank[former_rank]].queue_order == settings.queue_order
    if pool.batches is not None:
        if settings.scheduler >= VLLM_V0:
            begin_sequence(pool.sequences, requests, k)
            put_last(pool.sequences, ranks, rank, k)
    if pool.batched is not None and settings.scheduler < VLLM_V0:
        if not keeps_key:
            set_queue_key(settings, requests, ranks, rank, k, requests[k].input_tokens)
        enqueue(settings, requests, ranks, rank, k)
    wake_for_request(settings, ranks, slots, run, pools, replica, now_s)


@inner
def choose_replica(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, k: int) -> int:
    """Choose the replica that request `k` starts at, of all pools; NONE where none takes it now."""
    if pools is None:
        return route(pool, run, pools, fleet, pool.settings.router, False, k)
    routing = pools.routing[0]
    decodes = run.requests[k].target_tokens <= routing.local_tokens
    return route(pool, run, pools, fleet, routing.decode_router if decodes else routing.router, decodes, k)


@inner
def limit_to_prefill(run: RunTables, pools: Pools, settings: PoolRecord, k: int) -> None:
    """Let request `k`, which is to be handed off, ask its first replica for one token."""
    requests = run.requests
    if settings.hands_off:
        first_output = requests[k].target_tokens - requests[k].input_tokens + 1
        if requests[k].output_tokens > first_output or pools.routing[0].decode_samples_first:
            pools.transfers[k].later_output_tokens = requests[k].output_tokens
            requests[k].output_tokens = first_output


@inner
def deliver_again(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, now_s: float
) -> tuple[int, int]:
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
        run.requests[k].target_tokens = run.requests[k].input_tokens
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
        replica = choose_replica(pool, run, pools, fleet, k)
    if replica == NONE:
        control[0].asks = 0
        if not is_at_router:
            hold(fleet, k)
    elif is_at_router:
        drop_first_at_router(fleet)
    return k, replica
