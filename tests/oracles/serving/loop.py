"""From arrival to last token, in plain Python: requests routed, steps begun and ended, on one pool of replicas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oracles.serving.cache import TierPool
from oracles.serving.cost import Prices
from oracles.serving.sglang import Sglang
from oracles.serving.state import Rank, Request, Step
from oracles.serving.vllm_v1 import VllmV1
from windtunnel.serving.codes import QUEUE_ORDERS, ROUTERS, SGLANG, VLLM_V1


@dataclass
class Reference(VllmV1, Sglang):
    """The whole simulation; `run` returns its steps, the requests hold their times.

    `settings`, `cost` and `speculation` are `serving.state.records.KernelSettings`, `StepCost` and `Speculation` by
    shape.
    """

    settings: Any
    cost: Any
    requests: Sequence[Request]
    tiers: Sequence[Any] = ()
    """Of memory below the device's; `serving.state.records.TIER` by shape."""
    load_overlaps: bool = False
    speculation: Any = None

    def run(self) -> list[Step]:
        self.start()
        while True:
            event_s, (replica, slot) = min(((end, at) for at, end in self.end_s.items()), default=(math.inf, (-1, -1)))
            arrival_s = self.next_arrival_s()
            if arrival_s == event_s == math.inf:
                if any(rank.num_outstanding for rank in self.ranks):
                    raise AssertionError("a request can never be scheduled")
                return self.steps
            if arrival_s <= event_s:
                self.deliver(arrival_s)
                continue
            ends_step = self.end_step(replica, slot, event_s)
            while self.next_arrival_s() <= event_s:
                self.deliver(self.next_arrival_s())
            self.go_on(replica, slot, event_s, ends_step)

    def start(self) -> None:
        s = self.settings
        self.prices = Prices(self.cost, self.speculation)
        num_ranks = s.num_replicas * s.ranks_per_replica
        self.ranks = [self.new_rank() for _ in range(num_ranks)]
        self.pools = [
            [TierPool(int(tier.capacity_blocks)) for _ in range(0, num_ranks, int(tier.ranks_per_pool))]
            for tier in self.tiers
        ]
        self.end_s: dict[tuple[int, int], float] = {}
        self.started_s: dict[tuple[int, int], float] = {}
        self.stage_free_s = [[0.0] * s.num_stages for _ in range(s.num_replicas)]
        self.turn, self.sent = 0, 0
        self.service: dict[int, int] = {}
        self.caches = any(request.segments for request in self.requests)
        self.starts = [request for request in self.requests if request.previous < 0]
        self.started = 0
        self.following = {request.previous: request for request in self.requests if request.previous >= 0}
        self.thinking: list[tuple[float, int]] = []
        self.replica_of_session: dict[int, int] = {}
        self.completed_s: list[float] = []
        self.random: int = s.seed % (2**31 - 2) + 1
        self.steps: list[Step] = []
        self.num_verified: dict[tuple[int, int], int] = {}

    def new_rank(self) -> Rank:
        s = self.settings
        return Rank(s.num_blocks, s.num_window_blocks, [{} for _ in range(s.num_stages)])

    def end_step(self, replica: int, slot: int, now_s: float) -> bool:
        """Returns whether a step has ended; else the idle slot was woken."""
        ends_step = any(rank.batches[slot] for rank in self.ranks_of(replica))
        for rank in self.ranks_of(replica):
            self.complete(rank, slot, now_s)
        return ends_step

    def go_on(self, replica: int, slot: int, now_s: float, ends_step: bool) -> None:
        del self.end_s[replica, slot]
        started = self.start_step(replica, slot, now_s, ends_step)
        self.wake_another(replica, slot, now_s, first=0 if ends_step or started else slot + 1)

    def ranks_of(self, replica: int) -> list[Rank]:
        n = self.settings.ranks_per_replica
        return self.ranks[replica * n : (replica + 1) * n]

    def next_arrival_s(self) -> float:
        return min([self.next_start_s(), *(send_s for send_s, _ in self.thinking)])

    def next_start_s(self) -> float:
        s = self.settings
        if self.started >= len(self.starts):
            return math.inf
        send_s = self.starts[self.started].arrival_s
        if s.concurrency == 0:
            return send_s
        if 0 < s.num_warmup <= self.started:
            if len(self.completed_s) < s.num_warmup:
                return math.inf
            send_s += self.completed_s[s.num_warmup - 1] + s.frontend_s
        if self.started - len(self.completed_s) >= s.concurrency:
            return math.inf
        if self.started >= s.concurrency:
            send_s = max(send_s, self.completed_s[self.started - s.concurrency] + s.frontend_s)
        return send_s

    def take_next(self, now_s: float) -> Request:
        ready = sorted(turn for turn in self.thinking if turn[0] <= now_s)
        if ready:
            self.thinking.remove(ready[0])
            return self.requests[ready[0][1]]
        self.started += 1
        return self.starts[self.started - 1]

    def deliver(self, now_s: float) -> None:
        request = self.take_next(now_s)
        request.arrival_s = now_s
        request.sequence = self.sent
        self.sent += 1
        replica = self.route(request)
        self.replica_of_session[request.session] = replica
        self.deliver_to(replica, request, now_s)

    def deliver_to(self, replica: int, request: Request, now_s: float) -> None:
        rank = min(self.ranks_of(replica), key=lambda rank: rank.num_outstanding)
        request.queue_key = self.queue_key(rank, request, request.input_tokens)
        self.enqueue(rank, request)
        self.wake(replica, now_s)

    def wake(self, replica: int, now_s: float) -> None:
        idle = [slot for slot in range(self.settings.num_stages) if (replica, slot) not in self.end_s]
        if idle:
            self.end_s[replica, idle[0]] = now_s

    def route(self, request: Request) -> int:
        router, n = ROUTERS[self.settings.router], self.settings.num_replicas
        if n == 1:
            return 0
        if router == "round_robin":
            replica, self.turn = self.turn, (self.turn + 1) % n
            return replica
        if router == "random":
            return self.draw(n)
        if router == "power_of_two":
            return min(sorted([self.draw(n), self.draw(n)]), key=self.num_outstanding)
        if router == "session_affinity" and request.session >= 0 and request.session in self.replica_of_session:
            return self.replica_of_session[request.session]
        if router == "prefix_affinity":
            loads = [self.num_outstanding(replica) for replica in range(n)]
            longest = max(range(n), key=lambda replica: (self.cached_blocks(replica, request), -loads[replica]))
            uneven = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
            if self.cached_blocks(longest, request) > 0 and not uneven:
                return longest
        load_of = {"least_kv": self.used_blocks, "least_waiting": self.num_waiting}.get(router, self.num_outstanding)
        return min(range(n), key=load_of)

    def cached_blocks(self, replica: int, request: Request) -> int:
        for rank in self.ranks_of(replica):
            rank.cache.shrink(rank.free_blocks // int(self.settings.num_groups))
        return max(rank.cache.find(request.segments, 2**60)[1] for rank in self.ranks_of(replica))

    def draw(self, count: int) -> int:
        self.random = self.random * 48271 % (2**31 - 1)
        return self.random % count

    def num_outstanding(self, replica: int) -> int:
        return sum(rank.num_outstanding for rank in self.ranks_of(replica))

    def num_waiting(self, replica: int) -> int:
        return sum(len(rank.waiting) for rank in self.ranks_of(replica))

    def used_blocks(self, replica: int) -> int:
        return sum(int(self.settings.num_blocks) - rank.free_blocks for rank in self.ranks_of(replica))

    def wake_another(self, replica: int, slot: int, now_s: float, first: int) -> None:
        for other in range(first, self.settings.num_stages):
            idle = other != slot and (replica, other) not in self.end_s
            if idle and any(self.has_work(rank, other) for rank in self.ranks_of(replica)):
                self.end_s[replica, other] = now_s
                return

    def has_work(self, rank: Rank, slot: int) -> bool:
        unscheduled = any(not r.is_decoding and r.wanted_tokens for r in rank.running)
        return bool(rank.waiting) or unscheduled or any(r.is_decoding and r.slot == slot for r in rank.running)

    def start_step(self, replica: int, slot: int, now_s: float, ends_step: bool) -> bool:
        ranks = self.ranks_of(replica)
        ahead = self.cost.host_overlaps and ends_step
        self.cutoff_s = self.started_s[replica, slot] if ahead else now_s
        self.balance(ranks, slot)
        for rank in ranks:
            self.form_batch(rank, slot, now_s)
        if ends_step and not any(rank.batches[slot] for rank in ranks):
            self.cutoff_s = now_s
            self.balance(ranks, slot)
            for rank in ranks:
                self.form_batch(rank, slot, now_s)
        self.formed(replica, now_s)
        if self.settings.scheduler == SGLANG and any(self.prefills(rank, slot) for rank in ranks):
            for rank in ranks:
                if not self.prefills(rank, slot):
                    self.cancel_decode(rank, slot)
        if self.settings.scheduler == SGLANG:
            for rank in ranks:
                self.count_decode_sglang(rank, slot)
        if not any(rank.batches[slot] for rank in ranks):
            return False
        for rank in ranks:
            if any(chunk.decodes for chunk in rank.batches[slot].values()):
                self.num_verified[id(rank), slot] = self.num_verified.get((id(rank), slot), 0) + 1
        end_s = self.finish_time_s(replica, slot, now_s)
        gaps_s = [
            end_s - request.last_token_s
            for rank in ranks
            for request in rank.running
            if request.num_outputs > 0 and self.emits_token(rank, slot, request)
        ]
        used = sum(self.settings.num_blocks - rank.free_blocks for rank in ranks)
        scheduled = {index: chunk.tokens for rank in ranks for index, chunk in rank.batches[slot].items()}
        self.steps.append(Step(now_s, end_s - now_s, replica, scheduled, used, gaps_s))
        self.end_s[replica, slot] = end_s
        self.started_s[replica, slot] = now_s
        return True

    def formed(self, replica: int, now_s: float) -> None:
        """A batch has been formed, or there was nothing to form one of; a pool then looks at its handoffs."""

    def complete(self, rank: Rank, slot: int, now_s: float) -> None:
        decoding = self.in_batch(rank, slot, decodes=True)
        # Of requests that a verified step ends, the one whose last token comes sooner leaves first.
        decoding.sort(key=lambda r: (r.remaining_outputs - rank.batches[slot][r.index].gained, r.index))
        for request in [*decoding, *self.in_batch(rank, slot, decodes=False)]:
            if not request.is_decoding and self.settings.scheduler != VLLM_V1:
                self.share(rank, request, request.computed_tokens)
            if not self.emits_token(rank, slot, request):
                continue
            request.num_outputs += rank.batches[slot][request.index].gained
            request.is_decoding = True
            request.slot = slot
            request.last_token_s = now_s
            if math.isnan(request.first_token_s):
                request.first_token_s = now_s
            if request.num_outputs >= request.output_tokens:
                rank.running.remove(request)
                self.finish(rank, request, now_s)
            else:
                self.see_whether_it_slides(rank, request)
        rank.batches[slot] = {}

    def finish(self, rank: Rank, request: Request, now_s: float) -> None:
        request.finish_s = now_s
        if QUEUE_ORDERS[self.settings.queue_order] == "fair_share":
            self.service[request.tenant] += 2 * request.output_tokens // 16
        self.release(rank, request, request.computed_tokens)
        if request.index in self.following:
            turn = self.following[request.index]
            send_s = max(now_s + self.settings.frontend_s + turn.think_s, turn.arrival_s)
            self.thinking.append((send_s, turn.index))
        else:
            self.completed_s.append(now_s)

    def form_batch(self, rank: Rank, slot: int, now_s: float) -> None:
        if self.settings.scheduler == SGLANG:
            self.form_batch_sglang(rank, slot, now_s)
        else:
            self.form_batch_vllm_v1(rank, slot, now_s)

    def finish_time_s(self, replica: int, slot: int, now_s: float) -> float:
        s, c, ranks = self.settings, self.cost, self.ranks_of(replica)
        if len(c.recorded_step_s):
            return now_s + float(c.recorded_step_s[len(self.steps)])
        device_s = self.prices.device_s([rank.batches[slot] for rank in ranks])
        load_s = max(rank.load_s for rank in ranks)
        device_s = max(device_s, load_s) if self.load_overlaps else device_s + load_s
        for rank in ranks:
            rank.load_s = 0.0
        host_s = c.host_step_s + c.host_request_s * max(len(rank.running) for rank in ranks)
        if s.num_stages == 1:
            return now_s + float(max(device_s, host_s) if c.host_overlaps else device_s + host_s)
        time_s = now_s if c.host_overlaps else now_s + host_s
        for stage in range(s.num_stages):
            time_s = max(time_s, self.stage_free_s[replica][stage]) + device_s / s.num_stages
            self.stage_free_s[replica][stage] = time_s
        return max(time_s, now_s + host_s) if c.host_overlaps else time_s
