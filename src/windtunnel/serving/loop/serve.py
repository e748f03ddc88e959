"""The serving loop: arrivals, batches, steps, completions; the cost of a step does not depend on the batch.

Decoding requests are not visited one by one in the usual step. A slot counts its decode steps; a decoding request
stores the count at which it would have had no token (`joined`), so its progress, its next block and its end follow from
that one counter: blocks are needed by `PHASES[steps % block_size]` requests, the next to finish lies on a heap. Steps
between events run in a tight inner loop that only looks durations up and adds them.

A replica of `num_stages` pipeline stages has that many slots, each with a batch in flight: a batch passes the stages in
order and waits where one is busy. Without pipeline parallelism there is one slot, and nothing to wait for.

Events are ordered by (time, arrivals before step ends, slot). A step's end is known when it starts.
"""

import numpy as np

from windtunnel.compiled.heap import pop
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Records
from windtunnel.serving.cluster.handoff import join_ready, pull
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.cluster.scaling import after_step, change, has_room_to_log
from windtunnel.serving.cluster.slots import wake_another
from windtunnel.serving.codes import SGLANG
from windtunnel.serving.engines.sglang.scheduler import form_batch_sglang
from windtunnel.serving.engines.trtllm.balance import balance_ranks
from windtunnel.serving.engines.vllm.scheduler import form_batch_vllm_v1
from windtunnel.serving.loop.arrivals import deliver, next_send_s
from windtunnel.serving.loop.completions import arrive, complete
from windtunnel.serving.loop.steps import start_step
from windtunnel.serving.schedulers.batch import begin_batch, end_batch
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools, cache_of, cost_of
from windtunnel.serving.state.records import NONE, Clock, Requests, StepCost
from windtunnel.serving.state.status import ASK_ROUTER, DONE, MORE, STUCK
from windtunnel.serving.state.tables import PoolTables, RunTables, pool_tables_of


@entry
def serve(pool: PoolTables, cost: StepCost, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None) -> int:
    """Advance the simulation until all requests have finished or the buffer of steps is full.

    Args:
        pool: tables of the only pool. With `pools`, tables of the first one, and the caches of all of them.
        cost: prices of that pool's steps.
        run: requests, events and results; `run.clock[0].rows` says how many rows of `run.steps` were written.
        pools: None where there is one pool.
        fleet: None, or replicas that come and go, or a router that may hold requests back.

    Returns:
        DONE, MORE, STUCK, OUT_OF_STEPS or ASK_ROUTER.
    """
    goes_on = False
    if fleet is None:
        begin_buffer(run.clock)
    if fleet is not None:
        goes_on = resume(pool, run, pools, fleet)
    while True:
        event_s = run.events[0].time_s if run.clock[0].queued > 0 else np.inf
        arrival_s = next_send_s(pool.settings, run, fleet)
        event, ended_step = NONE, False
        if fleet is not None:
            if goes_on:
                event, event_s = fleet.control[0].event, fleet.control[0].event_s
                ended_step = fleet.control[0].ended_step == 1
                fleet.control[0].event = NONE
            elif run.clock[0].finished >= run.requests.size:
                return DONE
            elif fleet.control[0].next_s <= min(arrival_s, event_s) and fleet.control[0].next_s < np.inf:
                if not has_room_to_log(pool.settings, fleet):
                    return MORE
                change(pool, run.requests, fleet, fleet.control[0].next_s)
                continue
        if not goes_on:
            if arrival_s <= event_s:
                if arrival_s == np.inf:
                    return DONE if run.clock[0].finished >= run.requests.size else STUCK
                deliver(pool, run, pools, fleet, arrival_s)
                if fleet is not None:
                    if fleet.control[0].pending != NONE:
                        return ASK_ROUTER
                continue
            if run.clock[0].rows >= run.steps.size:
                return MORE
            event = run.events[0].slot
            run.clock[0].queued = pop(run.events.time_s, run.events.slot, run.clock[0].queued)
        here, prices = pool, cost
        if pools is not None:
            if event < 0:
                arrive(pool.cache, run, pools, event + run.requests.size, event_s)
                continue
            number = pools.pool_of_event[event]
            if pool.cache is None:
                here = pool_tables_of(pools, number, None, pool)
            if pool.cache is not None:
                here = pool_tables_of(pools, number, cache_of(pool.cache, pools, number), pool)
            prices = cost_of(pools, number)
            event -= here.settings.first_event
        if not goes_on:
            ended_step = end_step(here, run, pools, fleet, event, event_s)
        goes_on = False
        if deliver_until(pool, run, pools, fleet, event_s):
            if fleet is not None:
                fleet.control[0].event, fleet.control[0].event_s = event, event_s
                fleet.control[0].ended_step = ended_step
            return ASK_ROUTER
        form_batches(here, run, pools, event, event_s, ended_step, prices.host_overlaps)
        rows = run.clock[0].rows
        replica, stage = event // here.settings.num_stages, event % here.settings.num_stages
        status = start_step(here, prices, run, fleet, replica, stage, event_s)
        if status != DONE:
            return status
        if here.settings.num_stages > 1:
            changed = ended_step or run.clock[0].rows > rows
            wake_another(here, run, replica, stage, event_s, 0 if changed else stage + 1)


@inner
def begin_buffer(clock: Records[Clock]) -> None:
    """Start to write rows to an empty buffer."""
    clock[0].earlier_rows += clock[0].rows
    clock[0].rows = 0


@inner
def resume(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet) -> bool:
    """Begin a call: with empty logs, or with the request that a user's router has answered for.

    Returns whether an event that the question interrupted goes on.
    """
    if fleet.control[0].pending == NONE:
        begin_buffer(run.clock)
        fleet.control[0].num_phases = 0
        fleet.control[0].num_losses = 0
        return False
    goes_on = fleet.control[0].event != NONE
    deliver(pool, run, pools, fleet, fleet.control[0].pending_s)
    return goes_on


@inner
def deliver_until(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, event_s: float
) -> bool:
    """Send the requests that are due by `event_s`; returns whether a user's router must be asked for one of them."""
    arrival_s = next_send_s(pool.settings, run, fleet)
    while arrival_s <= event_s:
        deliver(pool, run, pools, fleet, arrival_s)
        if fleet is not None:
            if fleet.control[0].pending != NONE:
                return True
        arrival_s = next_send_s(pool.settings, run, fleet)
    return False


@inner
def end_step(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, event: int, now_s: float
) -> bool:
    """End the step of a replica's slot on all ranks; returns whether there was one."""
    settings, slots = pool.settings, pool.slots
    replica, stage = event // settings.num_stages, event % settings.num_stages
    first = replica * settings.ranks_per_replica
    num_finished = run.clock[0].finished
    ended_step = False
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        ended_step = ended_step or slots[slot].batch_size > 0 or slots[slot].batch_decodes > 0
        complete(pool, run, pools, rank, slot, now_s)
    if fleet is not None:
        if run.clock[0].finished > num_finished:
            ask_again(fleet, now_s)
            after_step(pool, run.requests, fleet, replica, now_s)
    return ended_step


@inner
def form_batches(
    pool: PoolTables,
    run: RunTables,
    pools: Pools | None,
    event: int,
    now_s: float,
    ended_step: bool,
    host_overlaps: int,
) -> None:
    """Form the batch of a replica's slot on every rank, and start the KV transfers that there is room for.

    Where the host works beside the device, the batch that follows a step at once was formed when that step started:
    requests that have arrived since wait for the one after it. An engine with nothing to run looks again at once.
    """
    settings, slots = pool.settings, pool.slots
    replica, stage = event // settings.num_stages, event % settings.num_stages
    first = replica * settings.ranks_per_replica
    cutoff_s = now_s
    if host_overlaps and ended_step:
        cutoff_s = slots[first * settings.num_stages + stage].started_s
    # A request that gave itself up left its blocks to one whose KV cache has come.
    forms_again = pools is not None and ended_step
    num_batches = 0
    while num_batches == 0:
        if pool.balance is not None:
            if settings.balance_steps > 0:
                balance_ranks(settings, run.requests, pool.ranks, slots, first, stage, cutoff_s)
        for rank in range(first, first + settings.ranks_per_replica):
            slot = rank * settings.num_stages + stage
            begin_batch(slots, slot, cutoff_s)
            if pools is not None:
                join_ready(pool, run.requests, pools, rank, slot)
            num_batches += form_batch(pool, run.requests, rank, slot, now_s)
        if cutoff_s == now_s and not forms_again:
            break
        cutoff_s, forms_again = now_s, False
    if pools is not None:
        for rank in range(first, first + settings.ranks_per_replica):
            pull(pool, run, pools, rank, rank * settings.num_stages + stage, now_s)


@inner
def form_batch(pool: PoolTables, requests: Requests, rank: int, slot: int, now_s: float) -> int:
    """Form the batch of a rank's slot by the engine's scheduler; returns 1, or 0 if it is empty."""
    num_decodes = 0
    if pool.vllm_v1 is not None:
        if pool.settings.scheduler != SGLANG:
            num_decodes = form_batch_vllm_v1(pool, requests, rank, slot, now_s)
    if pool.sglang is not None:
        if pool.settings.scheduler == SGLANG:
            num_decodes = form_batch_sglang(pool, requests, rank, slot, now_s)
    return end_batch(pool.settings, requests, pool.ranks, pool.slots, pool.lists, rank, slot, num_decodes)
