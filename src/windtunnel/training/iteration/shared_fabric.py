"""Run several training jobs on one fabric: where their collectives meet, each job's iteration takes longer.

Collectives on the wire at the same time share links max-min fairly, connection by connection. Their speeds are computed
once for every set of collectives that meet, and are constant until the set changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError, check_known
from windtunnel.network.collectives.algorithms import direct, ring
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.closed_forms import place_of
from windtunnel.network.collectives.ring_classes import ring_connections
from windtunnel.network.collectives.run import groups_seconds
from windtunnel.network.fabric import Fabric, with_joined_switches
from windtunnel.network.flows import Flows, together
from windtunnel.network.paths import Paths, data_bytes_per_s, find_paths
from windtunnel.network.settings import NetworkSettings
from windtunnel.training.iteration.layers import Communication, LayerPhase, LayerWorkload, groups_of

PLACEMENTS = ("packed", "striped")
"""Jobs take servers one after the other, or are dealt servers in turn."""
LEAST_S = 1e-12
"""Shorter times count as zero."""
PHASE = (math.sqrt(5.0) - 1.0) / 2.0
"""Jobs begin at multiples of the golden section of their iterations, so that none begins with another."""


@dataclass(frozen=True)
class PlacedJob:
    """A job and the GPU of each of its ranks."""

    workload: LayerWorkload
    gpus: NDArray[np.int32]


@dataclass(frozen=True)
class SharedJob:
    """One job's iteration alone on the fabric, and beside the others."""

    workload: LayerWorkload
    gpus: NDArray[np.int32]
    alone_s: float
    shared_s: float
    """Mean of `num_iterations`."""
    slowest_s: float
    """The longest of them."""
    num_iterations: int

    @property
    def slowdown(self) -> float:
        return self.shared_s / self.alone_s


@dataclass(frozen=True)
class JobAction:
    """A part of an iteration: computation, a collective that is waited for, or one beside what follows."""

    seconds: float
    """Alone."""
    call: int | None = None
    """Number of its collective."""
    beside: bool = False
    drains: bool = False
    """Whether it waits for every collective that runs beside."""


@dataclass
class _Running:
    """A job's position in its iteration; remaining seconds are those without other jobs."""

    actions: Sequence[JobAction]
    left_s: float
    """Seconds left of the action at `position`; before the first iteration, until it begins."""
    counts_from_s: float
    """Iterations that began earlier are not recorded."""
    position: int = -1
    beside: list[JobAction] = field(default_factory=list)
    """Collectives that queue beside it; the first is on the wire."""
    beside_left_s: float = 0.0
    began_s: float = 0.0
    took_s: list[float] = field(default_factory=list)

    @property
    def calls(self) -> tuple[int | None, int | None]:
        """Return the collective that is waited for, and the one beside."""
        waited = self.actions[self.position].call if self.position >= 0 else None
        return waited, self.beside[0].call if self.beside else None

    def seconds_to_go(self, speed: dict[int | None, float]) -> float:
        """Return the time until one of its actions ends, if nothing else changes."""
        waited, beside = self.calls
        ends = [self.left_s / speed.get(waited, 1.0)] if self.left_s > LEAST_S else []
        return min([*ends, self.beside_left_s / speed.get(beside, 1.0)] if self.beside else ends)

    def advance(self, step_s: float, speed: dict[int | None, float], now_s: float) -> None:
        """Let `step_s` pass, to `now_s`, and begin what comes next."""
        waited, beside = self.calls
        self.left_s -= step_s * speed.get(waited, 1.0)
        self.beside_left_s -= step_s * speed.get(beside, 1.0)
        while self.beside and self.beside_left_s <= LEAST_S:
            self.beside.pop(0)
            self.beside_left_s = self.beside[0].seconds if self.beside else 0.0
        while self.left_s <= LEAST_S:
            if self.position >= 0 and self.actions[self.position].drains and self.beside:
                return
            self._next(now_s)

    def _next(self, now_s: float) -> None:
        self.position += 1
        if self.position == len(self.actions):
            if self.began_s >= self.counts_from_s:
                self.took_s.append(now_s - self.began_s)
            self.position = 0
        if self.position == 0:
            self.began_s = now_s
        action = self.actions[self.position]
        self.left_s = 0.0 if action.beside else action.seconds
        if action.beside:
            if not self.beside:
                self.beside_left_s = action.seconds
            self.beside.append(action)


def place_jobs(workloads: Sequence[LayerWorkload], fabric: Fabric, placement: str = "packed") -> list[PlacedJob]:
    """Place jobs on a fabric, whole servers each. InputError where there is no such placement, a job does not fill
    servers, or all need more than there are."""
    check_known(placement, PLACEMENTS, f"there is no placement {placement!r}")
    servers = [np.flatnonzero(fabric.server[: fabric.num_gpus] == s) for s in range(fabric.num_servers)]
    size = len(servers[0])
    needed = [job.num_gpus // size for job in workloads]
    for job in workloads:
        if job.num_gpus % size:
            raise InputError(f"{job.name} is for {job.num_gpus} GPUs, which do not fill servers of {size}")
    if sum(needed) > len(servers):
        raise InputError(
            f"the jobs need {sum(needed)} servers; {fabric.name} has {len(servers)}", "take a larger topology"
        )
    if placement == "packed":
        owner = np.repeat(np.arange(len(needed)), needed)
    else:
        turns = np.concatenate([np.arange(count) for count in needed])
        owner = np.repeat(np.arange(len(needed)), needed)[np.argsort(turns, kind="stable")]
    return [
        PlacedJob(job, np.concatenate([servers[s] for s in np.flatnonzero(owner == index)]).astype(np.int32))
        for index, job in enumerate(workloads)
    ]


def run_jobs(
    jobs: Sequence[PlacedJob], fabric: Fabric, settings: NetworkSettings, num_iterations: int = 10
) -> list[SharedJob]:
    """Run every job over and over until each has ended `num_iterations` iterations beside the others.

    Forward and input-gradient collectives block, those of weight gradients queue beside what follows, as in
    `iteration.layers.run_layers`; a pipeline's transfers and idle time follow the iteration. InputError where a job's
    groups do not spread evenly over servers or are not connected, or it does nothing.
    """
    if settings.compat is not None:
        raise InputError("SimAI runs one job at a time", "leave --compat out, or give one workload")
    wire = _Wire(with_joined_switches(fabric), settings)
    programs = [wire.program(job) for job in jobs]
    alone = [_together([program], [0.0], wire, 1)[0][0] for program in programs]
    begins = [seconds * (index * PHASE % 1.0) for index, seconds in enumerate(alone)]
    shared = _together(programs, begins, wire, num_iterations)
    return [
        SharedJob(job.workload, job.gpus, alone_s, float(np.mean(took)), max(took), len(took))
        for job, alone_s, took in zip(jobs, alone, shared, strict=True)
    ]


def _together(
    programs: Sequence[Sequence[JobAction]], begins: Sequence[float], wire: _Wire, num_iterations: int
) -> list[list[float]]:
    """Return the seconds of every job's iterations, until each job has ended `num_iterations`."""
    jobs = [_Running(program, begin, max(begins)) for program, begin in zip(programs, begins, strict=True)]
    now_s = step_s = 0.0
    speed: dict[int | None, float] = {}
    while min(len(job.took_s) for job in jobs) < num_iterations:
        for job in jobs:
            job.advance(step_s, speed, now_s)
        speed = wire.speeds(frozenset(call for job in jobs for call in job.calls if call is not None))
        step_s = min(job.seconds_to_go(speed) for job in jobs)
        now_s += step_s
    return [job.took_s for job in jobs]


@dataclass
class _Wire:
    """The collectives on the wire: their connections, and the speeds of those that meet."""

    fabric: Fabric
    settings: NetworkSettings
    paths: list[Paths] = field(default_factory=list)
    """Of each collective that leaves a server."""
    alone: list[float] = field(default_factory=list)
    """Bytes per second of its slowest connection."""
    known: dict[frozenset[int], dict[int | None, float]] = field(default_factory=dict)

    def program(self, job: PlacedJob) -> list[JobAction]:
        """Return a job's iteration as actions."""
        workload, actions = job.workload, list[JobAction]()
        timed: dict[Communication, JobAction] = {}

        def add(phase: LayerPhase, beside: bool = False) -> None:
            actions.append(JobAction(phase.compute_s))
            call = phase.communication
            if call is not None:
                if call not in timed:
                    timed[call] = self._timed(call.op, call.size_bytes, job.gpus[groups_of(workload, call.group)])
                actions.append(replace(timed[call], beside=beside))

        for layer in workload.layers:
            add(layer.forward)
        for layer in reversed(workload.layers):
            add(layer.input_gradient)
            add(layer.weight_gradient, beside=True)
        actions.append(JobAction(0.0, drains=True))
        if workload.pp > 1:
            busy = sum(action.seconds for action in actions if not action.beside)
            if workload.pp_bytes:
                stride = workload.num_gpus // workload.pp
                pairs = np.column_stack([job.gpus[:-stride], job.gpus[stride:]])
                send = self._timed("send_recv", workload.pp_bytes, pairs)
                count = 2 * workload.num_micro_batches * workload.vpp
                actions.append(replace(send, seconds=count * send.seconds))
            actions.append(JobAction(busy * (workload.pp - 1) / (workload.num_micro_batches * workload.vpp)))
        if sum(action.seconds for action in actions) <= LEAST_S:
            raise InputError(f"{workload.name}: an iteration of it takes no time", "give computations or collectives")
        return actions

    def _timed(self, op: str, size_bytes: int, groups: NDArray[np.int32]) -> JobAction:
        seconds = groups_seconds(self.fabric, op, size_bytes, groups, self.settings)
        if seconds == 0.0 or place_of(self.fabric, groups[0]).num_servers == 1:
            return JobAction(seconds)
        self.paths.append(find_paths(self.fabric, self._connections(op, groups), self.settings))
        number = len(self.paths) - 1
        self.alone.append(self._slowest([number])[number])
        return JobAction(seconds, number)

    def _connections(self, op: str, groups: NDArray[np.int32]) -> Flows:
        """Return who sends to whom all the time while a collective runs."""
        place = place_of(self.fabric, groups[0])
        calls = [CollectiveCall(self.fabric, op, len(group), group, place, self.settings) for group in groups]
        if op in ring.OPERATIONS:
            return ring_connections(ring.rings_of(*calls))
        return together([direct.flows(call) for call in calls])

    def speeds(self, calls: frozenset[int]) -> dict[int | None, float]:
        """Return collective -> its speed beside the others, as a fraction of its speed alone."""
        if calls not in self.known:
            slowest = self._slowest(sorted(calls)) if len(calls) > 1 else {}
            self.known[calls] = {call: rate / self.alone[call] for call, rate in slowest.items()}
        return self.known[calls]

    def _slowest(self, calls: Sequence[int]) -> dict[int, float]:
        """Return collective -> bytes per second of its slowest connection while these are on the wire."""
        paths = [self.paths[call] for call in calls]
        capacity = np.repeat(data_bytes_per_s(self.fabric, self.settings), 2)
        rates = max_min_rates(paths, capacity)
        return {call: float(rate.min()) for call, rate in zip(calls, rates, strict=True)}


def max_min_rates(paths: Sequence[Paths], capacity: Floats) -> list[Floats]:
    """Return the max-min fair rates of connections that always have something to send, by progressive filling.

    `paths` are sets of connections, whose rates are in bytes per second, like `capacity` (num_links,) of every directed
    link.

    Source: Bertsekas and Gallager, "Data Networks", 2nd edition, section 6.5.2.
    """
    first = np.cumsum([0, *(len(each.of_flow) for each in paths)])
    connection, link, share = zip(*(each.crossings() for each in paths), strict=True)
    of = np.concatenate([rows + begin for rows, begin in zip(connection, first, strict=False)])
    on, part = np.concatenate(link), np.concatenate(share)
    rate, left, open_ = np.zeros(first[-1]), capacity.copy(), np.ones(first[-1], bool)
    while open_.any():
        demand = np.bincount(on, part * open_[of], len(capacity))
        with np.errstate(divide="ignore", invalid="ignore"):
            headroom = np.where(demand > 0, left / demand, np.inf)
        step = headroom.min()
        rate[open_] += step
        left -= step * demand
        full = headroom <= step * (1 + 1e-9)
        open_[of[full[on] & (part > 0)]] = False
    return np.split(rate, first[1:-1])
