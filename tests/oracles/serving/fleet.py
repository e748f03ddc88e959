"""Replicas that come and go, in plain Python: faults, repairs, schedules and autoscalers of all pools of a deployment.

`plan` is `serving.setup.fleet_plan.FleetPlan` by shape.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.state import Request
from windtunnel.serving.codes import DRAINING, FAILED, KV_USE, OFF, OUTSTANDING, RUNNING, STARTING, UP, WAITING


@dataclass
class Replica:
    """A replica's phase, and what will change it."""

    phase: int
    faults: Iterator[tuple[float, float]]
    fault: tuple[float, float] = (math.inf, 0.0)
    """The next one: begin and duration."""
    next_s: float = math.inf
    """End of its start or repair."""

    def __post_init__(self) -> None:
        self.draw_fault()

    @property
    def serves(self) -> bool:
        return self.phase in (UP, DRAINING)

    def draw_fault(self) -> float:
        """Go on to the next fault; returns how long the present one lasts."""
        repair_s = self.fault[1]
        self.fault = next(self.faults, (math.inf, 0.0))
        return repair_s


@dataclass(frozen=True)
class Stay:
    """Of a request at a replica that failed."""

    request: int
    replica: int
    begin_s: float
    end_s: float


@dataclass
class Scaler:
    """How many replicas a pool wants."""

    pool: Any
    numbers: range
    """Its replicas, of all pools'."""
    scaling: Any
    changes: list[tuple[float, int]]
    starts_requests: bool
    recommended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        scaling = self.scaling
        self.wanted = int(scaling.initial_replicas)
        self.recommended = [self.wanted] * (max(scaling.up_looks, scaling.down_looks) + 1)
        self.look_s = float(scaling.interval_s) if scaling.target > 0 else math.inf

    @property
    def next_s(self) -> float:
        return min([self.look_s, *(at_s for at_s, _ in self.changes[:1])])

    def look(self, serving: list[int], num_at_router: int) -> None:
        """Kubernetes' rule: replicas for the metric's sum over those that serve."""
        scaling, pool = self.scaling, self.pool
        metric = {
            OUTSTANDING: pool.num_outstanding,
            WAITING: pool.num_waiting,
            RUNNING: pool.num_running,
            KV_USE: pool.used_blocks,
        }[scaling.metric]
        total = sum(metric(number - self.numbers.start) for number in serving)
        if self.starts_requests and scaling.metric in (OUTSTANDING, WAITING):
            total += num_at_router
        needed = total / scaling.target
        if scaling.metric == KV_USE:
            needed = needed / (pool.settings.num_blocks * pool.settings.ranks_per_replica)
        is_near = abs(needed / self.wanted - 1.0) <= scaling.tolerance_fraction
        recommended = self.wanted if is_near else math.ceil(needed)
        self.recommended.append(min(max(recommended, scaling.min_replicas), scaling.max_replicas))
        least = min(self.recommended[-1 - scaling.up_looks :])
        most = max(self.recommended[-1 - scaling.down_looks :])
        self.wanted = max(self.wanted, least) if self.wanted < least else min(self.wanted, most)
        self.look_s += scaling.interval_s


class Fleet:
    """All replicas of a deployment, requests that wait at the router, and those that are to be sent again."""

    def __init__(self, deployment: Any, plan: Any) -> None:
        self.deployment, self.rules = deployment, plan.rules
        self.replicas, self.scalers = [], []
        for pool, scaling, changes in zip(deployment.pools, plan.scalings, plan.changes, strict=True):
            numbers = range(len(self.replicas), len(self.replicas) + int(pool.settings.num_replicas))
            starts = numbers[0] in deployment.entries
            self.scalers.append(Scaler(pool, numbers, scaling, list(changes), starts))
            for count, number in enumerate(numbers):
                phase = UP if count < scaling.initial_replicas else OFF
                self.replicas.append(Replica(phase, iter(plan.faults_of(number))))
        self.resize_at_s = math.inf
        self.at_router: list[Request] = []
        self.asks_since_s: float | None = None
        """The first request at the router is tried again."""
        self.lost: list[tuple[float, Request]] = []
        self.num_retries: dict[int, int] = {}
        self.discarded: dict[int, int] = {}
        self.phases: list[tuple[float, int, int]] = []
        self.stays: list[Stay] = []

    def next_send_s(self) -> float:
        times = [send_s for send_s, _ in self.lost[:1]]
        if self.at_router and self.asks_since_s is not None:
            times.append(self.asks_since_s)
        return min(times, default=math.inf)

    def next_change_s(self) -> float:
        times = [self.resize_at_s, *(scaler.next_s for scaler in self.scalers)]
        return float(min([*times, *(min(replica.fault[0], replica.next_s) for replica in self.replicas)]))

    def ask_again(self, now_s: float) -> None:
        """A request has ended, or a replica serves: there may be room."""
        if self.at_router:
            self.asks_since_s = now_s

    def set_phase(self, number: int, phase: int, now_s: float) -> None:
        self.replicas[number].phase = phase
        self.phases.append((now_s, number, phase))

    def change(self, now_s: float) -> None:
        self.resize_at_s = math.inf
        for number, replica in enumerate(self.replicas):
            if replica.fault[0] <= now_s:
                back_s = now_s + replica.draw_fault()
                if replica.phase == FAILED:
                    replica.next_s = max(replica.next_s, back_s)
                elif replica.phase != OFF:
                    self.set_phase(number, FAILED, now_s)
                    replica.next_s = back_s
                    self.deployment.empty(number, now_s)
            elif replica.next_s <= now_s:
                replica.next_s = math.inf
                self.set_phase(number, UP if replica.phase == STARTING else OFF, now_s)
                if replica.phase == UP:
                    self.ask_again(now_s)
        for number in range(len(self.replicas)):
            self.stop_if_drained(number, now_s)
        for scaler in self.scalers:
            if scaler.changes and scaler.changes[0][0] <= now_s:
                scaler.wanted = scaler.changes.pop(0)[1]
            if scaler.look_s <= now_s:
                scaler.look(self.in_phase(scaler, UP), len(self.at_router))
            self.resize(scaler, now_s)

    def in_phase(self, scaler: Scaler, phase: int) -> list[int]:
        return [number for number in scaler.numbers if self.replicas[number].phase == phase]

    def resize(self, scaler: Scaler, now_s: float) -> None:
        def num_surplus() -> int:
            return len(self.in_phase(scaler, STARTING)) + len(self.in_phase(scaler, UP)) - scaler.wanted

        for number in self.in_phase(scaler, OFF)[: max(-num_surplus(), 0)]:
            self.set_phase(number, STARTING, now_s)
            self.replicas[number].next_s = now_s + scaler.scaling.start_s
        for number in self.in_phase(scaler, STARTING)[::-1][: max(num_surplus(), 0)]:
            self.set_phase(number, OFF, now_s)
            self.replicas[number].next_s = math.inf
        idlest = sorted(
            self.in_phase(scaler, UP), key=lambda number: (self.deployment.num_outstanding(number), -number)
        )
        for number in idlest[: max(num_surplus(), 0)]:
            self.set_phase(number, DRAINING, now_s)
            if self.deployment.is_empty(number):
                self.set_phase(number, OFF, now_s)
                self.deployment.empty(number, now_s)

    def stop_if_drained(self, number: int, now_s: float) -> None:
        if self.replicas[number].phase == DRAINING and self.deployment.is_empty(number):
            self.set_phase(number, OFF, now_s)
            self.deployment.empty(number, now_s)
            self.resize_at_s = now_s

    def lose(self, request: Request, number: int, now_s: float) -> None:
        """`request` was at a replica that failed, and is sent again later with what the client has of it."""
        self.stays.append(Stay(request.index, number, request.arrival_s, now_s))
        request.computed_tokens = request.num_blocks = 0
        request.shared_blocks = request.num_used_segments = 0
        request.num_window_blocks = request.passed = 0
        request.slides = request.is_decoding = False
        if self.rules.starts_over:
            self.discarded[request.index] = self.discarded.get(request.index, 0) + request.num_outputs
            request.num_outputs, request.first_token_s = 0, math.nan
        self.num_retries[request.index] = self.num_retries.get(request.index, 0) + 1
        self.lost.append((now_s + float(self.rules.retry_s), request))
