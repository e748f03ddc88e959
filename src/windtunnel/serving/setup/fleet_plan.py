"""Turn autoscaling and faults of a deployment into the loop's arrays, and the loop's logs into records."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError
from windtunnel.metrics.fleet import FLEET_COLUMNS, PHASE_COLUMNS, STAY_COLUMNS
from windtunnel.metrics.records import Table
from windtunnel.schema import fields_of
from windtunnel.serving import codes
from windtunnel.serving.deployment import Deployment, Faults, ScheduledScaling, TargetScaling, is_own_router
from windtunnel.serving.state import fleet as kernel
from windtunnel.workload.generate.draws import child

FAULT_STREAM = 2000
"""The seed's child whose children draw each replica's faults."""
FAULT_COLUMNS = 32
"""Coming faults of a replica that the loop knows."""

Fault = tuple[float, float]
"""Begin and duration of a fault, seconds."""


@dataclass(frozen=True)
class FleetPlan:
    """Scaling and faults of a run."""

    scalings: Sequence[kernel.Scaling]
    """Of every pool."""
    rules: kernel.FleetRules = field(default_factory=kernel.FleetRules)
    changes: Sequence[Sequence[tuple[float, int]]] = ((),)
    """Of every pool (time in seconds, replicas) of scheduled changes, in order."""
    faults_of: Callable[[int], Iterator[Fault]] = lambda _replica: iter(())
    """Replica, counted through all pools -> its faults, in order."""


@dataclass(eq=False)
class FleetRun:
    """A running fleet and its log."""

    begin: Callable[[], tuple[kernel.ReplicaFleet, list[Iterator[Fault]]]]
    """Makes the fleet and its faults, as at the beginning."""
    fleet: kernel.ReplicaFleet
    faults: list[Iterator[Fault]]
    phases: list[NDArray[np.void]] = field(default_factory=list)
    losses: list[NDArray[np.void]] = field(default_factory=list)

    def begin_again(self) -> None:
        """Go back to the beginning, for another run."""
        self.fleet, self.faults = self.begin()
        self.phases, self.losses = [], []

    def collect(self) -> None:
        """Copy the loop's log, and draw new faults for those that have happened."""
        control = self.fleet.control[0]
        self.phases.append(self.fleet.phases[: control.num_phases].copy())
        self.losses.append(self.fleet.losses[: control.num_losses].copy())
        control.num_phases = control.num_losses = 0
        for replica, faults in enumerate(self.faults):
            row = self.fleet.replicas[replica]
            kept = FAULT_COLUMNS - row.next_fault
            for table in (self.fleet.fault_s, self.fleet.repair_s):
                table[replica, :kept] = table[replica, row.next_fault :].copy()
            _fill(self.fleet.fault_s[replica], self.fleet.repair_s[replica], kept, faults)
            row.next_fault = 0


def start_fleet(plan: FleetPlan, num_replicas: Sequence[int], num_requests: int) -> FleetRun:
    """Return a fleet at the beginning of a run, with at most so many replicas in each pool."""

    def begin() -> tuple[kernel.ReplicaFleet, list[Iterator[Fault]]]:
        faults = [plan.faults_of(replica) for replica in range(sum(num_replicas))]
        fault_s = np.full((len(faults), FAULT_COLUMNS), np.inf)
        repair_s = np.zeros_like(fault_s)
        for replica, ahead in enumerate(faults):
            _fill(fault_s[replica], repair_s[replica], 0, ahead)
        tables = fault_s, repair_s
        return kernel.new_fleet(num_replicas, plan.rules, plan.scalings, plan.changes, tables, num_requests), faults

    return FleetRun(begin, *begin())


def _fill(fault_s: Floats, repair_s: Floats, first: int, faults: Iterator[Fault]) -> None:
    """Write the next faults into the columns from `first` on; inf where there are no more."""
    for column in range(first, FAULT_COLUMNS):
        fault_s[column], repair_s[column] = next(faults, (np.inf, 0.0))


def has_fleet(deployment: Deployment) -> bool:
    """Whether replicas come and go, or requests may wait at the router."""
    return comes_and_goes(deployment) or deployment.router == "deferred" or is_own_router(deployment.router)


def comes_and_goes(deployment: Deployment) -> bool:
    """Whether the number of replicas changes during a run."""
    return deployment.faults is not None or any(group.autoscaling for group in deployment.groups)


def fleet_plan(deployment: Deployment, most_outstanding: int, seed: int) -> FleetPlan:
    """Return the plan of a deployment with `autoscaling`, `faults` or a router that holds requests back.

    `most_outstanding` limits requests at a replica for the router `deferred` where the deployment gives no limit.
    InputError where the deployment does not say how long a replica takes to start, or a fault names no replica.
    """
    faults, groups = deployment.faults, deployment.groups
    if comes_and_goes(deployment) and deployment.start_s is None:
        raise InputError(
            "replicas come and go, and nobody says how long one takes until it serves",
            "give deployment.start_s: loading weights and capturing graphs, and booting the node if that is part of it",
        )
    num_devices = [
        (group.parallelism or deployment.parallelism).num_devices
        for group in groups
        for _ in range(group.most_replicas)
    ]
    _check_faults(faults, len(num_devices), deployment.start_s or 0.0)

    def faults_of(replica: int) -> Iterator[Fault]:
        return drawn_faults(faults, num_devices[replica], replica, seed) if faults else iter(())

    return FleetPlan(
        scalings=[_scaling(group.replicas, group.autoscaling, deployment.start_s or 0.0) for group in groups],
        rules=kernel.FleetRules(
            retry_s=faults.retry_s if faults else 0.0,
            starts_over=int(faults is not None and faults.retry == "start_over"),
            most_outstanding=deployment.router_limit or most_outstanding,
        ),
        changes=[_changes(group.autoscaling) for group in groups],
        faults_of=faults_of,
    )


def _scaling(replicas: int, autoscaling: TargetScaling | ScheduledScaling | None, start_s: float) -> kernel.Scaling:
    """Return how the number of a pool's replicas changes, as the loop takes it."""
    scaling = kernel.Scaling(initial_replicas=replicas, start_s=start_s)
    if not isinstance(autoscaling, TargetScaling):
        return scaling
    return scaling._replace(
        metric=codes.SCALING_METRICS.index(autoscaling.metric),
        **fields_of(autoscaling, "target", "min_replicas", "max_replicas", "interval_s", "tolerance_fraction"),
        up_looks=int(autoscaling.scale_up_after_s // autoscaling.interval_s),
        down_looks=int(autoscaling.scale_down_after_s // autoscaling.interval_s),
    )


def _changes(autoscaling: TargetScaling | ScheduledScaling | None) -> list[tuple[float, int]]:
    changes = autoscaling.changes if isinstance(autoscaling, ScheduledScaling) else ()
    return [(change.at_s, change.replicas) for change in changes]


def _check_faults(faults: Faults | None, num_replicas: int, start_s: float) -> None:
    """Raise InputError for a fault of no replica, or devices that fail faster than a replica starts."""
    for fault in faults.scheduled if faults else ():
        if fault.replica >= num_replicas:
            raise InputError(
                f"a fault of replica {fault.replica} is scheduled; there are replicas 0 to {num_replicas - 1}",
                "deployment.faults.scheduled counts replicas from 0, through all pools",
            )
    if faults and faults.device_mtbf_s is not None and faults.device_mtbf_s <= start_s:
        raise InputError(
            f"a device fails every {faults.device_mtbf_s:g} s on average and a replica takes {start_s:g} s to start",
            "give device_mtbf_s in hours or days of one device: 50000h",
        )


def drawn_faults(faults: Faults, num_devices: int, replica: int, seed: int) -> Iterator[Fault]:
    """Yield the faults of one replica in order: scheduled ones, and those drawn for its devices.

    Times between failures are exponential with `device_mtbf_s / num_devices` from the end of the former repair, and
    repairs exponential with `mttr_s`.
    """
    scheduled = sorted((fault.at_s, fault.repair_s) for fault in faults.scheduled if fault.replica == replica)
    return heapq.merge(scheduled, _renewals(faults, num_devices, replica, seed))


def _renewals(faults: Faults, num_devices: int, replica: int, seed: int) -> Iterator[Fault]:
    if faults.device_mtbf_s is None or faults.mttr_s is None:
        return
    rng = np.random.default_rng(child(child(np.random.SeedSequence(seed), FAULT_STREAM), replica))
    time_s = 0.0
    while True:
        time_s += float(rng.exponential(faults.device_mtbf_s / num_devices))
        repair_s = float(rng.exponential(faults.mttr_s))
        yield time_s, repair_s
        time_s += repair_s


def phase_table(run: FleetRun) -> Table:
    """Return every change of a replica's phase, from the beginning."""
    up = np.concatenate([scaler.first_replica + np.arange(scaler.initial_replicas) for scaler in run.fleet.scalers])
    rows = np.concatenate([new_table(kernel.Phase, up.size, replica=up, phase=codes.UP), *run.phases])
    return Table({name: rows[name].copy() for name in PHASE_COLUMNS}, PHASE_COLUMNS)


def stay_table(run: FleetRun, records: NDArray[np.void], replicas: Ints) -> Table:
    """Return every stay of a request at a replica: those that a failure ended, then the last of each, in `replicas`.

    `arrival_s` of the loop's `records` is when the request was last sent to a replica.
    """
    lost = np.concatenate([new_table(kernel.Loss, 0), *run.losses])
    n = records.size
    columns = {
        "request": np.concatenate([lost["request"], np.arange(n)]),
        "replica": np.concatenate([lost["replica"], replicas]),
        "arrival_s": np.concatenate([lost["begin_s"], records["arrival_s"]]),
        "finish_s": np.concatenate([lost["end_s"], records["finish_s"]]),
        "is_lost": np.arange(lost.size + n) < lost.size,
    }
    return Table(columns, STAY_COLUMNS)


@dataclass(frozen=True, eq=False)
class FleetRecord:
    """Phases of the replicas of a finished run, and stays of its requests."""

    phases: Table
    """One row for each change of a replica's phase."""
    stays: Table
    """One row for each stay of a request at a replica."""


def with_retries(requests: Table, num_retries: Ints, discarded_tokens: Ints) -> Table:
    """Add retries to the request table; gaps and times in steps of requests sent again are unknown."""
    was_lost = num_retries > 0
    unknown = {name: np.where(was_lost, np.nan, requests[name]) for name in ("itl_max_s", "execution_s")}
    added = {"num_retries": num_retries, "discarded_tokens": discarded_tokens}
    return requests.replaced(**unknown).with_columns(added, FLEET_COLUMNS)
