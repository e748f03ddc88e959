"""Slots that wait for work, and who wakes them."""

import numpy as np

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.serving.state.pools import slots_of

IDLE, BUSY = np.int64(0), np.int64(1)
"""Of a slot. A literal 0 is a type of its own, for which what is called with it is compiled once more; so counters that
are handed to functions start as np.int64(0) too."""


@inner
def wake(settings, slots, events, clock, replica, stage, now_s):
    """Let an idle slot of the replica look for work at `now_s`."""
    set_busy(settings, slots, replica, stage, BUSY)
    slot = settings.first_event + replica * settings.num_stages + stage
    clock[0].queued = push(events.time_s, events.slot, clock[0].queued, now_s, slot)


@inner
def wake_replica(events, clock, pools, replica, now_s):
    """Let the first idle slot of a replica, of all pools', look for work."""
    settings = pools.pools[pools.pool_of_replica[replica]]
    slots = slots_of(pools, settings)
    replica -= settings.first_replica
    for stage in range(settings.num_stages):
        if not slots[replica * settings.ranks_per_replica * settings.num_stages + stage].is_busy:
            wake(settings, slots, events, clock, replica, stage, now_s)
            break


@inner
def set_busy(settings, slots, replica, stage, is_busy):
    """Mark the slot `stage` of all ranks of a replica: they step together."""
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slots[rank * settings.num_stages + stage].is_busy = is_busy


@inner
def wake_another(settings, ranks, slots, events, clock, replica, stage, now_s, first_stage):
    """After an event of slot `stage`: wake an idle slot that may have something to schedule, the first from
    `first_stage` on.
    """
    first = replica * settings.ranks_per_replica
    for other in range(first_stage, settings.num_stages):
        if other == stage or slots[first * settings.num_stages + other].is_busy:
            continue
        for rank in range(first, first + settings.ranks_per_replica):
            has_decodes = slots[rank * settings.num_stages + other].num_decoding > 0
            if has_decodes or ranks[rank].num_waiting > 0 or ranks[rank].num_prefilling > 0:
                wake(settings, slots, events, clock, replica, other, now_s)
                return
