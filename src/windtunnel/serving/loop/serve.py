"""The serving loop: arrivals, batches, steps, completions; cost per step independent of the batch.

Decoding requests are never walked in the usual step. A slot counts its decode steps; a decoding request stores the
count at which it would have had no token (`joined`), so its progress, its next block and its end follow from that one
counter: blocks are needed by `PHASES[steps % block_size]` requests, the next to finish lies on a heap. Steps between
events run in a tight inner loop that only looks durations up and adds them.

A replica of `num_stages` pipeline stages has that many slots, each with a batch in flight: a batch passes the stages in
order and waits where one is busy. Without pipeline parallelism there is one slot, and nothing to wait for.

Events are ordered by (time, arrivals before step ends, slot). A step's end is known when it starts.
"""

import numpy as np

from windtunnel.compiled.heap import pop
from windtunnel.compiled.jit import entry, inner
from windtunnel.serving.cluster.handoff import join_ready, pull
from windtunnel.serving.cluster.router_queue import ask_again, next_resend_s
from windtunnel.serving.cluster.scaling import after_step, change, has_room_to_log
from windtunnel.serving.cluster.slots import wake_another
from windtunnel.serving.engines.sglang.scheduler import form_batch_sglang
from windtunnel.serving.engines.trtllm.balance import balance_ranks
from windtunnel.serving.engines.vllm.scheduler import form_batch_vllm_v1
from windtunnel.serving.loop.arrivals import deliver, next_arrival_s
from windtunnel.serving.loop.completions import arrive, complete
from windtunnel.serving.loop.steps import start_step
from windtunnel.serving.schedulers.batch import begin_batch, end_batch
from windtunnel.serving.state.pools import cache_of, cost_of, ranks_of, slots_of
from windtunnel.serving.state.records import NONE, SGLANG
from windtunnel.serving.state.status import ASK_ROUTER, DONE, MORE, STUCK


@inner
def begin_buffer(clock):
    """Start to write rows to an empty buffer."""
    clock[0].earlier_rows += clock[0].rows
    clock[0].rows = 0


@entry
def run(
    settings,
    cost,
    cache,
    sessions,
    speculation,
    requests,
    ranks,
    slots,
    lists,
    stages,
    events,
    clock,
    steps,
    pools,
    fleet,
    vllm_v1,
    sglang,
    windows,
):
    """Advance the simulation until all requests have finished or `steps` is full.

    Where the host works beside the device, the batch that follows a step at once was formed when that step started:
    requests that have arrived since wait for the one after it. An engine with nothing to run looks again at once.

    Args:
        settings, cost: see `serving.state.records`.
        cache, sessions, speculation: None where prompts share nothing, where no request waits for another, and where
            a decode step gives a token.
        requests, ranks, slots, lists, stages, events, clock: see `serving.state.records`; changed in place.
        steps: buffer for the rows of this call; `clock[0].rows` says how many were written.
        pools: None, or `serving.state.pools.Pools`; what belongs to one pool is then read from there at every event.
        fleet: None, or `serving.state.fleet.ReplicaFleet`, where replicas come and go or requests are held at the
            router. vllm_v1, sglang, windows: 1 or None, see `policies.in_use`; `windows` where layers have one.

    Returns:
        DONE, MORE, STUCK, OUT_OF_STEPS or ASK_ROUTER.
    """
    goes_on = False
    if fleet is not None:
        if fleet.control[0].pending == NONE:
            begin_buffer(clock)
            fleet.control[0].num_phases = 0
            fleet.control[0].num_losses = 0
        else:
            goes_on = fleet.control[0].event != NONE
            now_s = fleet.control[0].pending_s
            deliver(settings, cache, sessions, requests, ranks, slots, events, clock, now_s, pools, fleet)
    if fleet is None:
        begin_buffer(clock)
    own_cache = cache  # of the pool whose event it is
    while True:
        event_s = events[0].time_s if clock[0].queued > 0 else np.inf
        arrival_s = next_arrival_s(settings, sessions, requests, clock)
        event, ends_step = NONE, False
        if fleet is not None:
            arrival_s = min(arrival_s, next_resend_s(fleet))
            if goes_on:
                event, event_s = fleet.control[0].event, fleet.control[0].event_s
                ends_step = fleet.control[0].ended_step == 1
                fleet.control[0].event = NONE
            elif clock[0].finished >= requests.size:
                return DONE
            elif fleet.control[0].next_s <= min(arrival_s, event_s) and fleet.control[0].next_s < np.inf:
                if not has_room_to_log(settings, fleet):
                    return MORE
                now_s = fleet.control[0].next_s
                change(settings, cache, requests, speculation, ranks, slots, lists, stages, fleet, now_s)
                continue
        if arrival_s <= event_s and not goes_on:
            if arrival_s == np.inf:
                return DONE if clock[0].finished >= requests.size else STUCK
            deliver(settings, cache, sessions, requests, ranks, slots, events, clock, arrival_s, pools, fleet)
            if fleet is not None:
                if fleet.control[0].pending != NONE:
                    return ASK_ROUTER
            continue
        if clock[0].rows >= steps.size and not goes_on:
            return MORE
        if not goes_on:
            event = events[0].slot
            clock[0].queued = pop(events.time_s, events.slot, clock[0].queued)
        if pools is not None:
            if event < 0:
                arrive(cache, requests, events, clock, pools, event + requests.size, event_s)
                continue
            pool = pools.pool_of_event[event]
            settings, cost = pools.pools[pool], cost_of(pools, pool)
            ranks, slots = ranks_of(pools, settings), slots_of(pools, settings)
            lists = pools.lists[settings.first_slot : settings.end_slot]
            stages = pools.stages[settings.first_replica : settings.end_replica]
            event -= settings.first_event
            if cache is not None:
                own_cache = cache_of(cache, pools, pool)
        replica, stage = event // settings.num_stages, event % settings.num_stages
        first = replica * settings.ranks_per_replica
        num_finished = clock[0].finished
        for rank in range(first, first + settings.ranks_per_replica if not goes_on else first):
            slot = rank * settings.num_stages + stage
            ends_step = ends_step or slots[slot].batch_size > 0 or slots[slot].batch_decodes
            complete(
                settings,
                windows,
                own_cache,
                sessions,
                speculation,
                requests,
                ranks,
                slots,
                lists,
                events,
                clock,
                rank,
                slot,
                event_s,
                pools,
            )
        goes_on = False
        arrival_s = next_arrival_s(settings, sessions, requests, clock)
        if fleet is not None:
            if clock[0].finished > num_finished:
                ask_again(fleet, event_s)
                after_step(settings, cache, requests, speculation, ranks, slots, lists, stages, fleet, replica, event_s)
            arrival_s = min(arrival_s, next_resend_s(fleet))
        while arrival_s <= event_s:
            deliver(settings, cache, sessions, requests, ranks, slots, events, clock, arrival_s, pools, fleet)
            arrival_s = next_arrival_s(settings, sessions, requests, clock)
            if fleet is not None:
                if fleet.control[0].pending != NONE:
                    fleet.control[0].event = event
                    fleet.control[0].event_s = event_s
                    fleet.control[0].ended_step = ends_step
                    return ASK_ROUTER
                arrival_s = min(arrival_s, next_resend_s(fleet))
        cutoff_s = event_s
        if cost.host_overlaps and ends_step:
            cutoff_s = slots[first * settings.num_stages + stage].started_s
        # A request that gave itself up left its blocks to one whose KV cache has come.
        forms_again = pools is not None and ends_step
        num_batches = 0
        while num_batches == 0:
            if settings.balance_steps > 0:
                balance_ranks(settings, requests, ranks, slots, first, stage, cutoff_s)
            for rank in range(first, first + settings.ranks_per_replica):
                slot = rank * settings.num_stages + stage
                begin_batch(slots, slot, cutoff_s)
                if pools is not None:
                    join_ready(settings, windows, own_cache, requests, ranks, slots, lists, pools, rank, slot)
                num_decodes = 0
                if vllm_v1 is not None and settings.scheduler != SGLANG:
                    num_decodes = form_batch_vllm_v1(
                        settings, windows, own_cache, speculation, requests, ranks, slots, lists, rank, slot, event_s
                    )
                if sglang is not None and settings.scheduler == SGLANG:
                    num_decodes = form_batch_sglang(
                        settings, windows, own_cache, speculation, requests, ranks, slots, lists, rank, slot, event_s
                    )
                num_batches += end_batch(settings, requests, ranks, slots, lists, rank, slot, num_decodes)
            if cutoff_s == event_s and not forms_again:
                break
            cutoff_s, forms_again = event_s, False
        if pools is not None:
            for rank in range(first, first + settings.ranks_per_replica):
                slot = rank * settings.num_stages + stage
                pull(settings, windows, own_cache, requests, ranks, slots, events, clock, pools, rank, slot, event_s)
        rows = clock[0].rows
        status = start_step(
            settings,
            windows,
            cost,
            own_cache,
            sessions,
            speculation,
            requests,
            ranks,
            slots,
            lists,
            stages,
            events,
            clock,
            steps,
            replica,
            stage,
            event_s,
            fleet,
            sglang,
        )
        if status != DONE:
            return status
        if settings.num_stages > 1:
            changed = ends_step or clock[0].rows > rows
            wake_another(settings, ranks, slots, events, clock, replica, stage, event_s, 0 if changed else stage + 1)
