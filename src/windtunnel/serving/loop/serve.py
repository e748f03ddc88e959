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
from windtunnel.serving.clients import next_send_s
from windtunnel.serving.cluster.handoff import join_ready, pull
from windtunnel.serving.cluster.losses import leave_for_decode
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.cluster.routers import load_of_ranks
from windtunnel.serving.cluster.scaling import change, has_room_to_log, turn_off_if_drained
from windtunnel.serving.cluster.slots import first_wake_event, replica_of, wake_another
from windtunnel.serving.codes import OUTSTANDING, SGLANG, VLLM_V0
from windtunnel.serving.engines.sglang.scheduler import form_batch_sglang
from windtunnel.serving.engines.trtllm.balance import balance_ranks
from windtunnel.serving.engines.vllm.scheduler import form_batch_vllm_v1
from windtunnel.serving.loop.arrivals import deliver
from windtunnel.serving.loop.completions import arrive, complete
from windtunnel.serving.loop.steps import start_step
from windtunnel.serving.per_request.batches import complete_batch, start_batches
from windtunnel.serving.per_request.decode_groups import SCRATCH, ready_row
from windtunnel.serving.schedulers.batch import begin_batch, end_batch
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools, cost_of
from windtunnel.serving.state.records import NONE, KernelSettings, Requests, StepCost
from windtunnel.serving.state.status import ASK_POLICY, ASK_ROUTER, DONE, MORE, REFUSED, STUCK
from windtunnel.serving.state.tables import PoolTables, RunTables, pool_tables_of, with_record


@entry
def serve(pool: PoolTables, cost: StepCost, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None) -> int:
    """Advance the simulation until all requests have finished, the buffer of steps is full, or `run.until_s`.

    `pool` and `cost` are the only pool's; with `pools`, `pool` has the tables of the first one and the caches of all.
    `run.clock[0].rows` says how many rows of `run.steps` were written. Returns one of `serving.state.status`.
    """
    if pool.records is not None:
        return run_events(with_record(pool, pool.records[0]), cost, run, pools, fleet)
    return run_events(pool, cost, run, pools, fleet)


@inner
def run_events(
    pool: PoolTables, cost: StepCost, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None
) -> int:
    """Run events in their order until the simulation must stop; arguments and results are those of `serve`."""
    clock = run.clock
    goes_on = resume(pool, run, pools, fleet)
    while True:
        event_s = run.events[0].time_s if clock[0].queued > 0 else np.inf
        arrival_s = next_send_s(pool.settings, run, fleet)
        event, ended_step = NONE, False
        if goes_on:
            event, event_s, ended_step = clock[0].event, clock[0].event_s, clock[0].ended_step == 1
            clock[0].event = NONE
        else:
            if run.until_s is not None:
                if next_change_s(fleet, min(arrival_s, event_s)) > run.until_s[0]:
                    return MORE
            if pool.batches is not None:
                if min(arrival_s, event_s) > end_of_run_s(pool, pools):
                    return DONE
            if fleet is not None:
                if clock[0].finished >= run.requests.size:
                    return DONE
                if fleet.control[0].next_s <= min(arrival_s, event_s) and fleet.control[0].next_s < np.inf:
                    if not has_room_to_log(fleet):
                        return MORE
                    change(pool, run, pools, fleet, fleet.control[0].next_s)
                    continue
            if arrival_s <= event_s:
                if arrival_s == np.inf:
                    return DONE if clock[0].finished >= run.requests.size else STUCK
                deliver(pool, run, pools, fleet, arrival_s)
                if fleet is not None and fleet.control[0].pending != NONE:
                    return ASK_ROUTER
                continue
            if not has_room_for_rows(pool, run, pools):
                return MORE
            event = run.events[0].slot
            clock[0].queued = pop(run.events.time_s, run.events.slot, clock[0].queued)
        here, prices = pool, cost
        if pools is not None:
            if event < 0:
                i = event + run.requests.size
                arrive(pool.cache, run, pools, i, event_s)
                if fleet is not None:
                    turn_off_if_drained(
                        pool, run, pools, fleet, replica_of(pools, pools.transfers[i].prefill_rank), event_s
                    )
                continue
            number = pools.pool_of_event[event]
            here = pool_tables_of(pools, number, pool)
            prices = cost_of(pools, number)
        replica, stage = place_of(here.settings, pools, event)
        if not goes_on:
            ended_step = end_step(here, run, pools, fleet, replica, stage, event_s)
            if fleet is not None:
                turn_off_if_drained(pool, run, pools, fleet, here.settings.first_replica + replica, event_s)
        goes_on = False
        if deliver_until(pool, run, pools, fleet, event_s):
            clock[0].event, clock[0].event_s, clock[0].ended_step = event, event_s, ended_step
            return ASK_ROUTER
        status = start_steps(here, prices, run, pools, fleet, replica, stage, event_s, ended_step)
        if status in (ASK_POLICY, REFUSED):
            clock[0].event, clock[0].event_s = event, event_s
        if status != DONE:
            return status


@inner
def resume(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None) -> bool:
    """Begin a call: with an empty buffer and empty logs, or with the answer of a user's router or policy.

    Returns whether an event that the question interrupted goes on.
    """
    clock = run.clock
    if clock[0].answered:
        return True
    if fleet is not None:
        if fleet.control[0].pending != NONE:
            deliver(pool, run, pools, fleet, fleet.control[0].pending_s)
            return clock[0].event != NONE
        fleet.control[0].num_phases = 0
        fleet.control[0].num_losses = 0
    clock[0].earlier_rows += clock[0].rows
    clock[0].rows = 0
    clock[0].members = 0
    return False


@inner
def next_change_s(fleet: ReplicaFleet | None, event_s: float) -> float:
    """Return when the next event or change of a replica is, where the next event is at `event_s`."""
    if fleet is not None:
        event_s = min(event_s, fleet.control[0].next_s)
    return event_s


@inner
def end_of_run_s(pool: PoolTables, pools: Pools | None) -> float:
    """Return the time after which nothing happens."""
    if pools is None and pool.batches is not None:
        return pool.settings.end_s
    return np.inf


@inner
def has_room_for_rows(pool: PoolTables, run: RunTables, pools: Pools | None) -> bool:
    """Whether the buffers hold what one event may write: a row, of per-request scheduling one a pipeline stage."""
    num_rows = 1
    if pool.batches is not None:
        num_rows = pool.settings.num_stages if pools is None else pools.stages.shape[1]
    has_room = run.clock[0].rows + num_rows <= run.steps.size
    if run.trail is not None and pool.batches is not None:
        num_members = run.clock[0].members + num_rows * pool.batches.shape[2]
        has_room = has_room and num_members <= run.trail.members.shape[0]
    return has_room


@inner
def place_of(settings: KernelSettings, pools: Pools | None, event: int) -> tuple[int, int]:
    """Return the replica of its pool that an event belongs to, and the stage of its slot; NONE for a wake-up."""
    first_wake = first_wake_event(settings, pools)
    if event >= first_wake:
        return event - first_wake - settings.first_replica, NONE
    event -= settings.first_event
    return event // settings.num_stages, event % settings.num_stages


@inner
def deliver_until(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, event_s: float
) -> bool:
    """Send the requests that are due by `event_s`; returns whether a user's router must be asked for one of them."""
    arrival_s = next_send_s(pool.settings, run, fleet)
    while arrival_s <= event_s:
        deliver(pool, run, pools, fleet, arrival_s)
        if fleet is not None and fleet.control[0].pending != NONE:
            return True
        arrival_s = next_send_s(pool.settings, run, fleet)
    return False


@inner
def end_step(
    pool: PoolTables,
    run: RunTables,
    pools: Pools | None,
    fleet: ReplicaFleet | None,
    replica: int,
    stage: int,
    now_s: float,
) -> bool:
    """End the step of a replica's slot on all ranks; returns whether there was one."""
    settings, slots = pool.settings, pool.slots
    num_outstanding = outstanding_at(pool, replica)
    ended_step = False
    if pool.batches is not None:
        if settings.scheduler >= VLLM_V0:
            if stage == NONE:
                pool.ranks[replica].is_awake = 0
            else:
                slot = replica * settings.num_stages + stage
                if slots[slot].num_requests > 0:
                    num_leaving = complete_batch(pool, run, pools, replica, slot, now_s)
                    if pools is not None:
                        for position in range(num_leaving):
                            i = pool.batches[ready_row(pool, replica), SCRATCH, position]
                            leave_for_decode(pool, run, pools, fleet, replica, i, now_s)
    if pool.batched is not None and settings.scheduler < VLLM_V0:
        first = replica * settings.ranks_per_replica
        for rank in range(first, first + settings.ranks_per_replica):
            slot = rank * settings.num_stages + stage
            ended_step = ended_step or slots[slot].batch_size > 0 or slots[slot].batch_decodes > 0
            complete(pool, run, pools, fleet, rank, slot, now_s)
    if fleet is not None and outstanding_at(pool, replica) < num_outstanding:
        ask_again(fleet, now_s)
    return ended_step


@inner
def outstanding_at(pool: PoolTables, replica: int) -> int:
    """Return how many requests wait or run at a replica of the pool."""
    return load_of_ranks(pool.settings, pool.ranks, replica, OUTSTANDING)


@inner
def start_steps(
    pool: PoolTables,
    cost: StepCost,
    run: RunTables,
    pools: Pools | None,
    fleet: ReplicaFleet | None,
    replica: int,
    stage: int,
    now_s: float,
    ended_step: bool,
) -> int:
    """Form and start the batches that a replica's event lets it run; returns DONE, or why the loop must stop."""
    settings = pool.settings
    if pool.batches is not None:
        if settings.scheduler >= VLLM_V0:
            slot = replica * settings.num_stages
            if pools is not None:
                begin_batch(pool.slots, slot, now_s)
                join_ready(pool, run.requests, pools, replica, slot)
            status = start_batches(pool, cost, run, fleet, replica, now_s)
            if pools is not None and status == DONE:
                pull(pool, run, pools, replica, slot, now_s)
            return status
    if pool.batched is not None:
        form_batches(pool, run, pools, replica, stage, now_s, ended_step, cost.host_overlaps)
        rows = run.clock[0].rows
        status = start_step(pool, cost, run, fleet, replica, stage, now_s)
        if status != DONE:
            return status
        if settings.num_stages > 1:
            changed = ended_step or run.clock[0].rows > rows
            wake_another(pool, run, replica, stage, now_s, 0 if changed else stage + 1)
    return DONE


@inner
def form_batches(
    pool: PoolTables,
    run: RunTables,
    pools: Pools | None,
    replica: int,
    stage: int,
    now_s: float,
    ended_step: bool,
    host_overlaps: int,
) -> None:
    """Form the batch of a replica's slot on every rank, and start the KV transfers that there is room for.

    Where the host works beside the device, the batch that follows a step at once was formed when that step started:
    requests that have arrived since wait for the one after it. An engine with nothing to run looks again at once: where
    all that ran gave itself up, requests whose KV cache has come take the freed places first.
    """
    settings, slots = pool.settings, pool.slots
    first = replica * settings.ranks_per_replica
    cutoff_s = now_s
    if host_overlaps and ended_step:
        cutoff_s = slots[first * settings.num_stages + stage].started_s
    num_batches = 0
    while num_batches == 0:
        if pool.balance is not None and settings.balance_steps > 0:
            balance_ranks(settings, run.requests, pool.ranks, slots, first, stage, cutoff_s)
        for rank in range(first, first + settings.ranks_per_replica):
            slot = rank * settings.num_stages + stage
            while True:
                begin_batch(slots, slot, cutoff_s)
                if pools is not None:
                    join_ready(pool, run.requests, pools, rank, slot)
                num_batches += form_batch(pool, run.requests, rank, slot, now_s)
                if slots[slot].gave_up == 0:
                    break
        if cutoff_s == now_s:
            break
        cutoff_s = now_s
    if pools is not None:
        for rank in range(first, first + settings.ranks_per_replica):
            pull(pool, run, pools, rank, rank * settings.num_stages + stage, now_s)


@inner
def form_batch(pool: PoolTables, requests: Requests, rank: int, slot: int, now_s: float) -> int:
    """Form the batch of a rank's slot by the engine's scheduler; returns 1, or 0 if it is empty."""
    num_decodes = 0
    if pool.vllm_v1 is not None and pool.settings.scheduler != SGLANG:
        num_decodes = form_batch_vllm_v1(pool, requests, rank, slot, now_s)
    if pool.sglang is not None and pool.settings.scheduler == SGLANG:
        num_decodes = form_batch_sglang(pool, requests, rank, slot, now_s)
    return end_batch(pool, requests, rank, slot, num_decodes)
