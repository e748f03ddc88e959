"""Replicas that come and go, and requests that wait for them at the router, in plain Python: the oracle of fleets.

`plan` is `serving.setup.fleet_plan.FleetPlan` by shape; the engine is that of `loop.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oracles.serving.cache import TierPool
from oracles.serving.loop import Reference
from oracles.serving.state import Request, Step
from windtunnel.serving.codes import (
    DRAINING,
    FAILED,
    HOLDING_ROUTERS,
    KV_USE,
    OFF,
    OUTSTANDING,
    ROUTERS,
    RUNNING,
    STARTING,
    UP,
    WAITING,
)

ALL_ROUTERS = (*ROUTERS, *HOLDING_ROUTERS)


@dataclass
class Replica:
    """What is known of a replica beside its ranks."""

    phase: int
    faults: Iterator[tuple[float, float]]
    fault: tuple[float, float] = (math.inf, 0.0)
    next_s: float = math.inf
    """End of its start or repair."""

    @property
    def serves(self) -> bool:
        return self.phase == UP


@dataclass(frozen=True)
class Stay:
    """Of a request at a replica that failed."""

    request: int
    replica: int
    begin_s: float
    end_s: float


class ReferenceFleet(Reference):
    """The whole simulation; `run` returns its steps, `phases` and `stays` say what happened to the replicas."""

    def __init__(
        self,
        plan: Any,
        settings: Any,
        cost: Any,
        requests: Sequence[Request],
        tiers: Sequence[Any] = (),
        load_overlaps: bool = False,
        speculation: Any = None,
        router: Callable[["ReferenceFleet", Request, float], int] | None = None,
    ) -> None:
        super().__init__(settings, cost, requests, tiers, load_overlaps, speculation)
        self.plan, self.router = plan, router
        (self.scaling,) = plan.scalings

    def start(self) -> None:
        super().start()
        scaling = self.scaling
        self.replicas = [
            Replica(UP if number < scaling.initial_replicas else OFF, iter(self.plan.faults_of(number)))
            for number in range(self.settings.num_replicas)
        ]
        for replica in self.replicas:
            replica.fault = next(replica.faults, (math.inf, 0.0))
        self.changes = list(self.plan.changes[0])
        self.look_s = float(scaling.interval_s) if scaling.target > 0 else math.inf
        self.wanted = int(scaling.initial_replicas)
        self.recommended = [self.wanted] * (max(scaling.up_looks, scaling.down_looks) + 1)
        self.held: list[Request] = []
        self.asks_since_s: float | None = None
        self.lost: list[tuple[float, Request]] = []
        self.sent_s: dict[int, float] = {}
        self.num_retries: dict[int, int] = {}
        self.discarded: dict[int, int] = {}
        self.phases: list[tuple[float, int, int]] = []
        self.stays: list[Stay] = []
        self.resize_at_s = math.inf

    def run(self) -> list[Step]:
        self.start()
        while any(math.isnan(request.finish_s) for request in self.requests):
            event_s, (replica, slot) = min(((end, at) for at, end in self.end_s.items()), default=(math.inf, (-1, -1)))
            arrival_s, change_s = self.next_arrival_s(), self.next_change_s()
            if arrival_s == event_s == change_s == math.inf:
                raise AssertionError("a request can never be scheduled")
            if change_s <= min(arrival_s, event_s):
                self.change(change_s)
            elif arrival_s <= event_s:
                self.deliver(arrival_s)
            else:
                num_unfinished = self.num_unfinished()
                ends_step = self.end_step(replica, slot, event_s)
                if self.num_unfinished() < num_unfinished:
                    self.ask_again(event_s)
                    self.stop_if_drained(replica, event_s)
                while self.next_arrival_s() <= event_s:
                    self.deliver(self.next_arrival_s())
                self.go_on(replica, slot, event_s, ends_step)
        return self.steps

    def num_unfinished(self) -> int:
        return sum(math.isnan(request.finish_s) for request in self.requests)

    def go_on(self, replica: int, slot: int, now_s: float, ends_step: bool) -> None:
        if (replica, slot) in self.end_s:
            super().go_on(replica, slot, now_s, ends_step)

    # Requests at the router

    def next_arrival_s(self) -> float:
        times = [super().next_arrival_s(), *(send_s for send_s, _ in self.lost[:1])]
        if self.held and self.asks_since_s is not None:
            times.append(self.asks_since_s)
        return min(times)

    def ask_again(self, now_s: float) -> None:
        if self.held:
            self.asks_since_s = now_s

    def deliver(self, now_s: float) -> None:
        if self.held and self.asks_since_s is not None:
            request = self.held.pop(0)
            if not self.send(request, now_s):
                self.held.insert(0, request)
            return
        if self.lost and self.lost[0][0] <= now_s:
            request = self.lost.pop(0)[1]
        else:
            request = self.take_next(now_s)
            request.arrival_s = self.sent_s[request.index] = now_s
            request.sequence = self.sent
            self.sent += 1
        if self.held or not self.send(request, now_s):
            self.held.append(request)

    def send(self, request: Request, now_s: float) -> bool:
        replica = self.router(self, request, now_s) if self.router is not None else self.route(request)
        if replica < 0:
            self.asks_since_s = None
            return False
        self.replica_of_session[request.session] = replica
        rank = min(self.ranks_of(replica), key=lambda rank: rank.num_outstanding)
        if not self.num_retries.get(request.index):
            request.queue_key = self.queue_key(rank, request, request.input_tokens)
        request.arrival_s = now_s
        self.enqueue(rank, request)
        self.wake(replica, now_s)
        return True

    def route(self, request: Request) -> int:
        router = ALL_ROUTERS[self.settings.router]
        up = [number for number, replica in enumerate(self.replicas) if replica.serves]
        if not up:
            return -1
        if router == "round_robin":
            replica = min(up, key=lambda number: (number - self.turn) % self.settings.num_replicas)
            self.turn = (replica + 1) % self.settings.num_replicas
            return replica
        if router == "random":
            return up[self.draw(len(up))]
        if router == "power_of_two":
            return min(sorted(up[self.draw(len(up))] for _ in range(2)), key=self.num_outstanding)
        if router == "session_affinity" and request.session >= 0:
            former = self.replica_of_session.get(request.session)
            if former in up:
                return former
        if router == "prefix_affinity" and self.caches:
            loads = {number: self.num_outstanding(number) for number in up}
            cached = {number: self.cached_blocks(number, request) for number in range(len(self.replicas))}
            longest = max(up, key=lambda number: (cached[number], -loads[number], -number))
            least, most = min(loads.values()), max(loads.values())
            if cached[longest] > 0 and not (most - least > 64 and most > 1.5 * least):
                return longest
        load_of = {"least_kv": self.used_blocks, "least_waiting": self.num_waiting}.get(router, self.num_outstanding)
        best = min(up, key=load_of)
        if router == "deferred" and load_of(best) >= self.plan.rules.most_outstanding:
            return -1
        return best

    # Replicas

    def next_change_s(self) -> float:
        times = [self.look_s, self.resize_at_s, *(at_s for at_s, _ in self.changes[:1])]
        return float(min([*times, *(min(replica.fault[0], replica.next_s) for replica in self.replicas)]))

    def set_phase(self, number: int, phase: int, now_s: float) -> None:
        self.replicas[number].phase = phase
        self.phases.append((now_s, number, phase))

    def change(self, now_s: float) -> None:
        self.resize_at_s = math.inf
        for number, replica in enumerate(self.replicas):
            if replica.fault[0] <= now_s:
                back_s = now_s + replica.fault[1]
                replica.fault = next(replica.faults, (math.inf, 0.0))
                if replica.phase == FAILED:
                    replica.next_s = max(replica.next_s, back_s)
                elif replica.phase != OFF:
                    self.set_phase(number, FAILED, now_s)
                    replica.next_s = back_s
                    self.lose_all(number, now_s)
            elif replica.next_s <= now_s:
                replica.next_s = math.inf
                self.set_phase(number, UP if replica.phase == STARTING else OFF, now_s)
                if replica.serves:
                    self.ask_again(now_s)
        if self.changes and self.changes[0][0] <= now_s:
            self.wanted = self.changes.pop(0)[1]
        if self.look_s <= now_s:
            self.look()
            self.look_s += self.scaling.interval_s
        self.resize(now_s)

    def look(self) -> None:
        scaling = self.scaling
        ranks = [rank for number, r in enumerate(self.replicas) if r.serves for rank in self.ranks_of(number)]
        totals = {
            OUTSTANDING: sum(rank.num_outstanding for rank in ranks) + len(self.held),
            WAITING: sum(len(rank.waiting) for rank in ranks) + len(self.held),
            RUNNING: sum(len(rank.running) for rank in ranks),
            KV_USE: sum(int(self.settings.num_blocks) - rank.free_blocks for rank in ranks),
        }
        needed = totals[scaling.metric] / scaling.target
        if scaling.metric == KV_USE:
            needed = needed / (self.settings.num_blocks * self.settings.ranks_per_replica)
        wanted = math.ceil(needed) if abs(needed / self.wanted - 1.0) > scaling.tolerance_fraction else self.wanted
        self.recommended.append(min(max(wanted, scaling.min_replicas), scaling.max_replicas))
        least = min(self.recommended[-1 - scaling.up_looks :])
        most = max(self.recommended[-1 - scaling.down_looks :])
        if self.wanted < least:
            self.wanted = least
        elif self.wanted > most:
            self.wanted = most

    def resize(self, now_s: float) -> None:
        def those(phase: int) -> list[int]:
            return [number for number, replica in enumerate(self.replicas) if replica.phase == phase]

        missing = self.wanted - len(those(STARTING)) - len(those(UP))
        for number in those(OFF)[: max(missing, 0)]:
            self.set_phase(number, STARTING, now_s)
            self.replicas[number].next_s = now_s + self.scaling.start_s
        surplus = len(those(STARTING)) + len(those(UP)) - self.wanted
        for number in those(STARTING)[::-1][: max(surplus, 0)]:
            self.set_phase(number, OFF, now_s)
            self.replicas[number].next_s = math.inf
        surplus = len(those(STARTING)) + len(those(UP)) - self.wanted
        for number in sorted(those(UP), key=lambda number: (self.num_outstanding(number), -number))[: max(surplus, 0)]:
            self.set_phase(number, DRAINING, now_s)
            if self.num_outstanding(number) == 0:
                self.set_phase(number, OFF, now_s)
                self.empty(number)

    def stop_if_drained(self, number: int, now_s: float) -> None:
        if self.replicas[number].phase == DRAINING and self.num_outstanding(number) == 0:
            self.set_phase(number, OFF, now_s)
            self.empty(number)
            self.resize_at_s = now_s

    def lose_all(self, number: int, now_s: float) -> None:
        for rank in self.ranks_of(number):
            for request in [*rank.running, *rank.waiting]:
                self.stays.append(Stay(request.index, number, request.arrival_s, now_s))
                request.computed_tokens = request.num_blocks = 0
                request.shared_blocks = request.num_used_segments = 0
                request.num_window_blocks = request.passed = 0
                request.slides = False
                if self.plan.rules.starts_over:
                    self.discarded[request.index] = self.discarded.get(request.index, 0) + request.num_outputs
                    request.num_outputs, request.first_token_s = 0, math.nan
                request.is_decoding = False
                self.num_retries[request.index] = self.num_retries.get(request.index, 0) + 1
                self.lost.append((now_s + float(self.plan.rules.retry_s), request))
        self.empty(number)

    def empty(self, number: int) -> None:
        """The replica's memory is gone, its own tiers included."""
        s = self.settings
        first = number * s.ranks_per_replica
        for at in range(first, first + s.ranks_per_replica):
            for slot in range(s.num_stages):
                self.num_verified.pop((id(self.ranks[at]), slot), None)
            self.ranks[at] = self.new_rank()
            for tier, pools in zip(self.tiers, self.pools, strict=True):
                if not tier.outlives:
                    pools[at // int(tier.ranks_per_pool)] = TierPool(int(tier.capacity_blocks))
        self.stage_free_s[number] = [0.0] * s.num_stages
        for slot in range(s.num_stages):
            self.end_s.pop((number, slot), None)

    def start_step(self, replica: int, slot: int, now_s: float, ends_step: bool) -> bool:
        started = super().start_step(replica, slot, now_s, ends_step)
        fails_s = self.replicas[replica].fault[0]
        if started and self.end_s[replica, slot] >= fails_s:
            step = self.steps[-1]
            self.steps[-1] = Step(now_s, fails_s - now_s, replica, {}, step.used_blocks, [])
            self.end_s[replica, slot] = math.inf
        return started
