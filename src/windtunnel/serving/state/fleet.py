"""Replicas that come and go, and what waits for them at the router: autoscaling, faults, deferred and users' routing.

A replica is off, starts for `start_s`, is up, drains (serves what it has and gets nothing new) or has failed. Faults
are drawn before the run, so that a step knows when it starts whether it will end: one that a failure cuts short is
recorded with its time and no tokens, and nothing of it is kept. The requests of a failed replica are sent again
`retry_s` later; what they had produced stays produced, and is computed again with their prompt, as after a preemption,
unless they start over.
Requests for which no replica has room wait in the router queue in order, and tried again whenever a request ends or a
replica comes up.

Changes of replicas go before arrivals and step ends of the same time.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from windtunnel.compiled.records import F8, I8, Records, new_table
from windtunnel.serving.codes import OUTSTANDING, UP
from windtunnel.serving.state.records import NONE, Floats, Ints, KernelSettings, Rank, Slot, new_ranks, new_slots


class FleetRules(NamedTuple):
    """What the replicas of all pools have in common. Scalars."""

    retry_s: float = 0.0  # from a failure until its requests are sent again
    starts_over: int = 0  # 1: they are sent without what they had produced
    most_outstanding: int = 0  # `deferred`: requests at a replica, beyond which it gets no more


class Scaling(NamedTuple):
    """How the number of a pool's replicas changes. Scalars."""

    initial_replicas: int
    start_s: float = 0.0  # from the launch of a replica until it is up
    metric: int = OUTSTANDING
    target: float = 0.0  # of the metric for each replica; 0: no autoscaler
    min_replicas: int = 1
    max_replicas: int = 1
    interval_s: float = np.inf
    tolerance_fraction: float = 0.0
    up_looks: int = 0  # looks before the present one that must have asked for more too
    down_looks: int = 0


class Scaler(Scaling):
    """The scaling of a pool, where its replicas lie among all pools', and the registers of its autoscaler."""

    first_replica: int
    end_replica: int
    look_s: float  # next look
    num_looks: int
    next_change: int  # of the plan
    wanted: int  # replicas that start or are up


class FleetReplica(Protocol):
    """One record a replica."""

    phase: I8
    next_s: F8  # end of its start or repair
    fails_s: F8  # its next fault
    next_fault: I8  # position of that in its list


class Control(Protocol):
    """The registers, one record."""

    next_s: F8  # of the next change of a replica
    asks: I8  # 1: the first held request is tried again
    asked_s: F8  # since then
    num_at_router: I8
    first_at_router: I8
    num_retries: I8  # waiting for their time
    first_retry: I8
    num_phases: I8  # rows of `phases` written by this call
    num_losses: I8  # rows of `losses`
    pending: I8  # request that a user's router is asked for, or NONE
    answer: I8
    is_at_router: I8  # 1: the pending request is the first held one
    pending_s: F8


class Phase(Protocol):
    """One record a change of a replica's phase."""

    time_s: F8
    replica: I8
    phase: I8


class Loss(Protocol):
    """One record a stay of a request at a replica that failed."""

    request: I8
    replica: I8
    begin_s: F8
    end_s: F8


class ReplicaFleet(NamedTuple):
    """What a run with replicas that come and go, or with a router that holds requests back, needs."""

    rules: FleetRules
    scalers: Records[Scaler]  # [pool]
    replicas: Records[FleetReplica]  # [replica] of all pools
    control: Records[Control]  # [1]
    fault_s: Floats  # [replica, k] in order; inf: none. The host writes further ones over past ones
    repair_s: Floats  # [replica, k] how long each lasts
    change_s: Floats  # [pool, changes + 1] of the plan, in order, infinity at the end
    change_replicas: Ints  # [pool, changes + 1]
    recommended: Ints  # [pool, looks] replicas that the latest looks asked for
    sent_s: Floats  # [request] when the client sent it; `arrival_s` is when it reached its replica
    num_retries: Ints  # [request]
    discarded_tokens: Ints  # [request] that it had produced and produces again
    router_queue: Ints  # [request] ring
    retries: Ints  # [request] ring
    retry_s: Floats  # [request] when each of those is due
    phases: Records[Phase]
    losses: Records[Loss]
    idle_rank: Records[Rank]  # [1] a rank without KV blocks
    idle_slot: Records[Slot]  # [1]


def new_fleet(
    num_replicas: Sequence[int],
    rules: FleetRules,
    scalings: Sequence[Scaling],
    changes: Sequence[Sequence[tuple[float, int]]],
    faults: tuple[Floats, Floats],
    num_requests: int,
) -> ReplicaFleet:
    """Make a fleet of pools of at most `num_replicas` replicas, the first `initial_replicas` of each of them up.

    `changes` of each pool are (time in seconds, replicas), in order; `faults` are `fault_s` and `repair_s` of
    `ReplicaFleet`.
    """
    scalers = new_table(Scaler, len(scalings))
    replicas = new_table(FleetReplica, sum(num_replicas), next_s=np.inf, fails_s=faults[0][:, 0])
    most_changes = max(len(each) for each in changes) + 1
    change_s, change_replicas = np.full((len(scalings), most_changes), np.inf), np.zeros((len(scalings), most_changes))
    ends = np.cumsum(num_replicas)
    for number, (scaler, scaling) in enumerate(zip(scalers, scalings, strict=True)):
        for name, value in scaling._asdict().items():
            scaler[name] = value
        scaler.first_replica, scaler.end_replica = ends[number] - num_replicas[number], ends[number]
        scaler.wanted = scaling.initial_replicas
        scaler.look_s = scaling.interval_s if scaling.target > 0 else np.inf
        replicas.phase[scaler.first_replica : scaler.first_replica + scaling.initial_replicas] = UP
        for row, (time_s, count) in enumerate(changes[number]):
            change_s[number, row], change_replicas[number, row] = time_s, count
    looks = max(max(scaling.up_looks, scaling.down_looks) for scaling in scalings) + 1
    next_s = min(scalers.look_s.min(), change_s[:, 0].min(), replicas.fails_s.min())
    one = KernelSettings(0, 1, 1, max_num_seqs=1, max_num_batched_tokens=1, block_size=1, num_blocks=0)
    return ReplicaFleet(
        rules=rules,
        scalers=scalers,
        replicas=replicas,
        control=new_table(Control, 1, next_s=next_s, pending=NONE),
        fault_s=faults[0],
        repair_s=faults[1],
        change_s=change_s,
        change_replicas=change_replicas.astype(np.int64),
        recommended=np.repeat(scalers.initial_replicas[:, np.newaxis], looks, axis=1).astype(np.int64),
        sent_s=np.zeros(num_requests),
        num_retries=np.zeros(num_requests, np.int64),
        discarded_tokens=np.zeros(num_requests, np.int64),
        router_queue=np.zeros(num_requests, np.int64),
        retries=np.zeros(num_requests, np.int64),
        retry_s=np.zeros(num_requests),
        phases=new_table(Phase, max(8 * replicas.size, 4096)),
        losses=new_table(Loss, num_requests + 4096),
        idle_rank=new_ranks(one),
        idle_slot=new_slots(one),
    )
