"""Slots that wait for work, and who wakes them."""

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.serving.codes import VLLM_V0
from windtunnel.serving.state.pools import Pools, ranks_of, slots_of
from windtunnel.serving.state.records import KernelSettings, Rank, Slot
from windtunnel.serving.state.tables import PoolTables, RunTables

IDLE, BUSY = int64(0), int64(1)
"""Of a slot. A literal 0 is a type of its own, for which what is called with it is compiled once more; so counters that
are handed to functions start as int64(0) too."""


@inner
def first_wake_event(settings: KernelSettings, pools: Pools | None) -> int:
    """Return the number of the first replica's wake-up in the event queue, behind the events of all slots.

    A replica that schedules per request looks for work in all its idle slots at once, after the batches that end at the
    same time.
    """
    if pools is None:
        return settings.num_replicas * settings.num_stages
    return pools.routing[0].num_slot_events


@inner
def wake_for_request(
    settings: KernelSettings,
    ranks: Records[Rank],
    slots: Records[Slot],
    run: RunTables,
    pools: Pools | None,
    replica: int,
    now_s: float,
) -> None:
    """Let a replica of this pool look for work at `now_s`, if it has an idle slot."""
    if settings.scheduler >= VLLM_V0:
        if ranks[replica].num_in_flight < settings.num_stages and not ranks[replica].is_awake:
            ranks[replica].is_awake = 1
            event = first_wake_event(settings, pools) + settings.first_replica + replica
            run.clock[0].queued = push(run.events.time_s, run.events.slot, run.clock[0].queued, now_s, event)
        return
    for stage in range(settings.num_stages):
        if not slots[replica * settings.ranks_per_replica * settings.num_stages + stage].is_busy:
            wake(settings, slots, run, replica, stage, now_s)
            break


@inner
def wake(
    settings: KernelSettings, slots: Records[Slot], run: RunTables, replica: int, stage: int, now_s: float
) -> None:
    """Let an idle slot of the replica look for work at `now_s`."""
    set_busy(settings, slots, replica, stage, BUSY)
    slot = settings.first_event + replica * settings.num_stages + stage
    run.clock[0].queued = push(run.events.time_s, run.events.slot, run.clock[0].queued, now_s, slot)


@inner
def replica_of(pools: Pools, rank: int) -> int:
    """Return the replica that a rank of any pool belongs to."""
    settings = pools.pools[pools.pool_of_rank[rank]]
    return settings.first_replica + (rank - settings.first_rank) // settings.ranks_per_replica


@inner
def wake_replica(run: RunTables, pools: Pools, replica: int, now_s: float) -> None:
    """Let a replica of any pool look for work at `now_s`, if it has an idle slot."""
    settings = pools.pools[pools.pool_of_replica[replica]]
    ranks, slots = ranks_of(pools, settings), slots_of(pools, settings)
    wake_for_request(settings, ranks, slots, run, pools, replica - settings.first_replica, now_s)


@inner
def set_busy(settings: KernelSettings, slots: Records[Slot], replica: int, stage: int, is_busy: int) -> None:
    """Mark the slot `stage` of all ranks of a replica: they step together."""
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slots[rank * settings.num_stages + stage].is_busy = is_busy


@inner
def wake_another(pool: PoolTables, run: RunTables, replica: int, stage: int, now_s: float, first_stage: int) -> None:
    """Wake, after an event of slot `stage`, an idle slot that may have something to schedule, the first from
    `first_stage` on.
    """
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    first = replica * settings.ranks_per_replica
    for other in range(first_stage, settings.num_stages):
        if other == stage or slots[first * settings.num_stages + other].is_busy:
            continue
        for rank in range(first, first + settings.ranks_per_replica):
            has_decodes = slots[rank * settings.num_stages + other].num_decoding > 0
            if has_decodes or ranks[rank].num_waiting > 0 or ranks[rank].num_prefilling > 0:
                wake(settings, slots, run, replica, other, now_s)
                return
