"""Replicas that start, drain, stop and fail, by schedule or by a policy that looks at the load."""

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.serving.cluster.losses import clear
from windtunnel.serving.cluster.router_queue import ask_again
from windtunnel.serving.codes import DRAINING, FAILED, KV_USE, OFF, OUTSTANDING, RUNNING, STARTING, UP, WAITING
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import NONE, KernelSettings, Rank, Requests
from windtunnel.serving.state.tables import PoolTables


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
def has_requests(settings: KernelSettings, ranks: Records[Rank], replica: int) -> bool:
    """Whether any request waits or runs at a replica."""
    first = replica * settings.ranks_per_replica
    num_present = 0
    for rank in range(first, first + settings.ranks_per_replica):
        num_present += ranks[rank].num_outstanding
    return num_present > 0


@inner
def after_step(pool: PoolTables, requests: Requests, fleet: ReplicaFleet, replica: int, now_s: float) -> None:
    """Turn a replica off whose step has ended if it drains and is empty now."""
    if fleet.replicas[replica].phase == DRAINING and not has_requests(pool.settings, pool.ranks, replica):
        set_phase(fleet, replica, OFF, now_s)
        clear(pool, requests, fleet, replica, now_s)
        fleet.control[0].next_s = min(fleet.control[0].next_s, now_s)  # it may be wanted again


@inner
def look(settings: KernelSettings, ranks: Records[Rank], fleet: ReplicaFleet) -> None:
    """Look at the load and set the number of replicas wanted: Kubernetes' horizontal pod autoscaler
    (`pkg/controller/podautoscaler`, 1.30).

    As many replicas are recommended as bring the metric to its target, unless it is within the tolerance of it. More
    are started if all looks of the last `up_looks` asked for more, fewer if all of the last `down_looks` asked for
    fewer.
    """
    scaling, control = fleet.scaling, fleet.control
    total = 0
    for rank in range(ranks.size):
        if fleet.replicas[rank // settings.ranks_per_replica].phase != UP:
            continue
        if scaling.metric == OUTSTANDING:
            total += ranks[rank].num_outstanding
        elif scaling.metric == WAITING:
            total += ranks[rank].num_waiting
        elif scaling.metric == RUNNING:
            total += ranks[rank].num_running
        else:
            total += settings.num_blocks - ranks[rank].free_blocks
    if scaling.metric == OUTSTANDING or scaling.metric == WAITING:
        total += control[0].num_at_router
    wanted = control[0].wanted
    needed = total / scaling.target
    if scaling.metric == KV_USE:
        needed = needed / (settings.num_blocks * settings.ranks_per_replica)
    if abs(needed / wanted - 1.0) > scaling.tolerance_fraction:
        wanted = int64(np.ceil(needed))
    wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    fleet.recommended[control[0].num_looks % fleet.recommended.size] = wanted
    least, most = wanted, wanted
    for back in range(fleet.recommended.size):
        earlier = fleet.recommended[(control[0].num_looks - back) % fleet.recommended.size]
        if back <= scaling.up_looks:
            least = min(least, earlier)
        if back <= scaling.down_looks:
            most = max(most, earlier)
    control[0].num_looks += 1
    if control[0].wanted < least:
        control[0].wanted = least
    elif control[0].wanted > most:
        control[0].wanted = most


@inner
def resize(settings: KernelSettings, ranks: Records[Rank], fleet: ReplicaFleet, now_s: float) -> int:
    """Start replicas that are off, the first ones first, or stop some: those that start, the last first, then the one
    with the fewest requests.

    Returns a replica that has nothing to drain and is off at once, or NONE; call it again then.
    """
    num_active = 0
    for replica in range(settings.num_replicas):
        phase = fleet.replicas[replica].phase
        if phase in (STARTING, UP):
            num_active += 1
    for replica in range(settings.num_replicas):
        if num_active < fleet.control[0].wanted and fleet.replicas[replica].phase == OFF:
            set_phase(fleet, replica, STARTING, now_s)
            fleet.replicas[replica].next_s = now_s + fleet.scaling.start_s
            num_active += 1
    for replica in range(settings.num_replicas - 1, -1, -1):
        if num_active > fleet.control[0].wanted and fleet.replicas[replica].phase == STARTING:
            set_phase(fleet, replica, OFF, now_s)
            fleet.replicas[replica].next_s = np.inf
            num_active -= 1
    while num_active > fleet.control[0].wanted:
        idlest, least = NONE, 0
        for replica in range(settings.num_replicas - 1, -1, -1):
            if fleet.replicas[replica].phase == UP:
                first = replica * settings.ranks_per_replica
                load = 0
                for rank in range(first, first + settings.ranks_per_replica):
                    load += ranks[rank].num_outstanding
                if idlest == NONE or load < least:
                    idlest, least = replica, load
        set_phase(fleet, idlest, DRAINING, now_s)
        num_active -= 1
        if least == 0:
            return idlest
    return NONE


@inner
def change(pool: PoolTables, requests: Requests, fleet: ReplicaFleet, now_s: float) -> None:
    """Apply the faults, repairs, starts and decisions of `now_s`."""
    settings, scaling, control, replicas = pool.settings, fleet.scaling, fleet.control, fleet.replicas
    for replica in range(settings.num_replicas):
        if replicas[replica].fails_s <= now_s:
            back_s = now_s + fleet.repair_s[replica, replicas[replica].next_fault]
            replicas[replica].next_fault += 1
            replicas[replica].fails_s = fleet.fault_s[replica, replicas[replica].next_fault]
            if replicas[replica].phase == FAILED:
                replicas[replica].next_s = max(replicas[replica].next_s, back_s)
            elif replicas[replica].phase != OFF:
                set_phase(fleet, replica, FAILED, now_s)
                replicas[replica].next_s = back_s
                clear(pool, requests, fleet, replica, now_s)
        elif replicas[replica].next_s <= now_s:
            replicas[replica].next_s = np.inf
            if replicas[replica].phase == STARTING:
                set_phase(fleet, replica, UP, now_s)
                ask_again(fleet, now_s)
            else:
                set_phase(fleet, replica, OFF, now_s)
    if fleet.change_s[control[0].next_change] <= now_s:
        control[0].wanted = fleet.change_replicas[control[0].next_change]
        control[0].next_change += 1
    if control[0].look_s <= now_s:
        look(settings, pool.ranks, fleet)
        control[0].look_s += scaling.interval_s
    idle = resize(settings, pool.ranks, fleet, now_s)
    while idle != NONE:
        set_phase(fleet, idle, OFF, now_s)
        clear(pool, requests, fleet, idle, now_s)
        idle = resize(settings, pool.ranks, fleet, now_s)
    next_s = min(control[0].look_s, fleet.change_s[control[0].next_change])
    for replica in range(settings.num_replicas):
        next_s = min(next_s, replicas[replica].fails_s, replicas[replica].next_s)
    control[0].next_s = next_s


@inner
def has_room_to_log(settings: KernelSettings, fleet: ReplicaFleet) -> bool:
    """Whether a change, whatever it does, finds room for what it writes down and a fault behind each that happens."""
    control = fleet.control
    if control[0].num_losses + fleet.router_queue.size > fleet.losses.size:
        return False
    if control[0].num_phases + 5 * settings.num_replicas > fleet.phases.size:
        return False
    for replica in range(settings.num_replicas):
        if fleet.replicas[replica].next_fault + 1 >= fleet.fault_s.shape[1]:
            return False
    return True
