"""Replicas that start, drain, stop and fail, by schedule or by an autoscaler that looks at the load of its pool."""

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.serving.cluster.losses import clear
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.cluster.routers import load_of
from windtunnel.serving.codes import DRAINING, FAILED, KV_USE, OFF, OUTSTANDING, STARTING, UP, WAITING
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools
from windtunnel.serving.state.records import NONE
from windtunnel.serving.state.tables import PoolTables, RunTables, pool_tables_of


@inner
def set_phase(fleet: ReplicaFleet, replica: int, phase: int, now_s: float) -> None:
    """Change a replica's phase and write it down."""
    fleet.replicas[replica].phase = phase
    row = fleet.control[0].num_phases
    fleet.phases[row].time_s = now_s
    fleet.phases[row].replica = replica
    fleet.phases[row].phase = phase
    fleet.control[0].num_phases = row + 1


@inner
def blocks_of_replica(pool: PoolTables, pools: Pools | None, replica: int) -> int:
    """Return the KV blocks of a replica of any pool."""
    if pools is None:
        return pool.settings.num_blocks * pool.settings.ranks_per_replica
    settings = pools.pools[pools.pool_of_replica[replica]]
    return settings.num_blocks * settings.ranks_per_replica


@inner
def is_empty(pool: PoolTables, pools: Pools | None, replica: int) -> bool:
    """Whether no request waits or runs at a replica, and no KV of a request that was handed off is left there."""
    if load_of(pool, pools, replica, OUTSTANDING) > 0:
        return False
    if pools is not None:
        settings = pools.pools[pools.pool_of_replica[replica]]
        first = settings.first_rank + (replica - settings.first_replica) * settings.ranks_per_replica
        for rank in range(first, first + settings.ranks_per_replica):
            if pools.handoffs[rank].num_held > 0:
                return False
    return True


@inner
def turn_off_if_drained(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, replica: int, now_s: float
) -> None:
    """Turn a replica off that drains and is empty now; with pools, `pool` is the first one."""
    if fleet.replicas[replica].phase == DRAINING and is_empty(pool, pools, replica):
        set_phase(fleet, replica, OFF, now_s)
        clear_replica(pool, run, pools, fleet, replica, now_s)
        fleet.control[0].next_s = min(fleet.control[0].next_s, now_s)  # it may be wanted again


@inner
def clear_replica(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, replica: int, now_s: float
) -> None:
    """Leave a replica of any pool as it starts, empty; with pools, `pool` is the first one."""
    here = pool
    if pools is not None:
        here = pool_tables_of(pools, pools.pool_of_replica[replica], pool)
    clear(here, pool.cache, run, pools, fleet, replica - here.settings.first_replica, now_s)


@inner
def look(pool: PoolTables, pools: Pools | None, fleet: ReplicaFleet, number: int) -> None:
    """Look at the load of a pool and set the number of replicas wanted: Kubernetes' horizontal pod autoscaler
    (`pkg/controller/podautoscaler`, 1.30).

    As many replicas are recommended as bring the metric to its target, unless it is within the tolerance of it. More
    are started if all looks of the last `up_looks` asked for more, fewer if all of the last `down_looks` asked for
    fewer. Requests at the router count for the pools that requests start at.
    """
    scaler, recommended = fleet.scalers[number], fleet.recommended[number]
    total = 0
    for replica in range(scaler.first_replica, scaler.end_replica):
        if fleet.replicas[replica].phase == UP:
            total += load_of(pool, pools, replica, scaler.metric)
    if scaler.metric == OUTSTANDING or scaler.metric == WAITING:
        if starts_requests(pools, scaler.first_replica):
            total += fleet.control[0].num_at_router
    wanted = scaler.wanted
    needed = total / scaler.target
    if scaler.metric == KV_USE:
        needed = needed / blocks_of_replica(pool, pools, scaler.first_replica)
    if abs(needed / wanted - 1.0) > scaler.tolerance_fraction:
        wanted = int64(np.ceil(needed))
    wanted = min(max(wanted, scaler.min_replicas), scaler.max_replicas)
    recommended[scaler.num_looks % recommended.size] = wanted
    least, most = wanted, wanted
    for back in range(recommended.size):
        earlier = recommended[(scaler.num_looks - back) % recommended.size]
        if back <= scaler.up_looks:
            least = min(least, earlier)
        if back <= scaler.down_looks:
            most = max(most, earlier)
    scaler.num_looks += 1
    if scaler.wanted < least:
        scaler.wanted = least
    elif scaler.wanted > most:
        scaler.wanted = most


@inner
def starts_requests(pools: Pools | None, replica: int) -> bool:
    """Whether requests start at a replica."""
    starts = pools is None
    if pools is not None:
        for entry in pools.entries:
            starts = starts or entry == replica
    return starts


@inner
def resize(pool: PoolTables, pools: Pools | None, fleet: ReplicaFleet, number: int, now_s: float) -> int:
    """Start replicas of a pool that are off, the first ones first, or stop some: those that start, the last first, then
    the one with the fewest requests.

    Returns a replica that has nothing to drain and is off at once, or NONE; call it again then.
    """
    scaler = fleet.scalers[number]
    num_active = 0
    for replica in range(scaler.first_replica, scaler.end_replica):
        phase = fleet.replicas[replica].phase
        if phase in (STARTING, UP):
            num_active += 1
    for replica in range(scaler.first_replica, scaler.end_replica):
        if num_active < scaler.wanted and fleet.replicas[replica].phase == OFF:
            set_phase(fleet, replica, STARTING, now_s)
            fleet.replicas[replica].next_s = now_s + scaler.start_s
            num_active += 1
    for replica in range(scaler.end_replica - 1, scaler.first_replica - 1, -1):
        if num_active > scaler.wanted and fleet.replicas[replica].phase == STARTING:
            set_phase(fleet, replica, OFF, now_s)
            fleet.replicas[replica].next_s = np.inf
            num_active -= 1
    while num_active > scaler.wanted:
        idlest, least = NONE, 0
        for replica in range(scaler.end_replica - 1, scaler.first_replica - 1, -1):
            if fleet.replicas[replica].phase == UP:
                load = load_of(pool, pools, replica, OUTSTANDING)
                if idlest == NONE or load < least:
                    idlest, least = replica, load
        set_phase(fleet, idlest, DRAINING, now_s)
        num_active -= 1
        if is_empty(pool, pools, idlest):
            return idlest
    return NONE


@inner
def change(pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet, now_s: float) -> None:
    """Apply the faults, repairs, starts and decisions of `now_s`; with pools, `pool` is the first one."""
    control, replicas = fleet.control, fleet.replicas
    for replica in range(replicas.size):
        if replicas[replica].fails_s <= now_s:
            back_s = now_s + fleet.repair_s[replica, replicas[replica].next_fault]
            replicas[replica].next_fault += 1
            replicas[replica].fails_s = fleet.fault_s[replica, replicas[replica].next_fault]
            if replicas[replica].phase == FAILED:
                replicas[replica].next_s = max(replicas[replica].next_s, back_s)
            elif replicas[replica].phase != OFF:
                set_phase(fleet, replica, FAILED, now_s)
                replicas[replica].next_s = back_s
                clear_replica(pool, run, pools, fleet, replica, now_s)
        elif replicas[replica].next_s <= now_s:
            replicas[replica].next_s = np.inf
            if replicas[replica].phase == STARTING:
                set_phase(fleet, replica, UP, now_s)
                ask_again(fleet, now_s)
            else:
                set_phase(fleet, replica, OFF, now_s)
    if pools is not None:  # a failure elsewhere may have taken the last request of a replica that drains
        for replica in range(replicas.size):
            turn_off_if_drained(pool, run, pools, fleet, replica, now_s)
    next_s = np.inf
    for number in range(fleet.scalers.size):
        scaler = fleet.scalers[number]
        if fleet.change_s[number, scaler.next_change] <= now_s:
            scaler.wanted = fleet.change_replicas[number, scaler.next_change]
            scaler.next_change += 1
        if scaler.look_s <= now_s:
            look(pool, pools, fleet, number)
            scaler.look_s += scaler.interval_s
        idle = resize(pool, pools, fleet, number, now_s)
        while idle != NONE:
            set_phase(fleet, idle, OFF, now_s)
            clear_replica(pool, run, pools, fleet, idle, now_s)
            idle = resize(pool, pools, fleet, number, now_s)
        next_s = min(next_s, scaler.look_s, fleet.change_s[number, scaler.next_change])
    for replica in range(replicas.size):
        next_s = min(next_s, replicas[replica].fails_s, replicas[replica].next_s)
    control[0].next_s = next_s


@inner
def has_room_to_log(fleet: ReplicaFleet) -> bool:
    """Whether a change, whatever it does, finds room for what it writes down and a fault behind each that happens."""
    control = fleet.control
    if control[0].num_losses + fleet.router_queue.size > fleet.losses.size:
        return False
    if control[0].num_phases + 5 * fleet.replicas.size > fleet.phases.size:
        return False
    for replica in range(fleet.replicas.size):
        if fleet.replicas[replica].next_fault + 1 >= fleet.fault_s.shape[1]:
            return False
    return True
