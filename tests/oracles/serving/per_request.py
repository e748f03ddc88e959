"""Schedulers that may batch any subset of requests, in plain Python: the oracle of `serving.per_request`.

One object a request, lists for queues, one step at a time; it imports the codes and none of the kernels. `settings`,
`rules` and `cost` are `serving.state.records.KernelSettings`, `serving.state.per_request.PerRequestRules` and
`serving.state.records.StepCost` by shape.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.cost import Prices, deviation
from windtunnel.serving.codes import FASTER_TRANSFORMER, VLLM_V0

MULTIPLIER, MODULUS = 48271, 2**31 - 1

Policy = Callable[["Replica", float], list[tuple["Request", int]]]


@dataclass(eq=False)
class Request:
    """A request and what became of it."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    computed: int = 0
    outputs: int = 0
    blocks: int = 0
    restarts: int = 0
    is_prefilled: bool = False
    lost_prompt: int = 0
    """Prompt tokens that a restart made the engine take for outputs."""
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    finish_s: float = math.nan

    @property
    def known(self) -> int:
        return self.input_tokens + self.outputs - self.lost_prompt

    @property
    def to_prefill(self) -> int:
        return self.known - self.computed

    @property
    def left(self) -> int:
        return self.output_tokens + self.lost_prompt - self.outputs


@dataclass(eq=False)
class Batch:
    """A batch under way."""

    parts: list[tuple[Request, int]]
    decode_group: list[Request]
    """FasterTransformer: the requests that were admitted together."""


@dataclass
class Replica:
    """A scheduler, its KV pool and its pipeline."""

    settings: Any
    rules: Any
    free: int
    stage_free_s: list[float]
    waiting: deque[Request] = field(default_factory=deque)
    ready: list[Request] = field(default_factory=list)
    paused_batches: list[Batch] = field(default_factory=list)
    under_way: dict[int, Batch] = field(default_factory=dict)
    holding: set[Request] = field(default_factory=set)
    waited_steps: int = 0

    @property
    def outstanding(self) -> int:
        decode_groups = {r for batch in (*self.paused_batches, *self.under_way.values()) for r, _ in batch.parts}
        alive = {*self.waiting, *self.ready, *decode_groups}
        return sum(math.isnan(request.finish_s) for request in alive)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // int(self.settings.block_size))

    def admit(self, request: Request, blocks: int, now_s: float) -> None:
        self.waiting.remove(request)
        self.holding.add(request)
        self.free -= blocks
        request.blocks = blocks
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now_s

    def release(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = 0
        self.holding.discard(request)

    def restart(self, request: Request) -> None:
        self.release(request)
        if not request.is_prefilled and self.rules.loses_prompts:
            request.lost_prompt += request.to_prefill
        request.computed = 0
        request.is_prefilled = False
        request.restarts += 1
        self.waiting.appendleft(request)

    def append_block(self, request: Request) -> None:
        if request.known > request.blocks * self.settings.block_size:
            request.blocks += 1
            self.free -= 1

    def find_room(self, request: Request, others: list[Request]) -> bool:
        """Restart the latest of `others` until a block is free; False when `request` itself had to go."""
        while self.free < 1:
            if not others:
                self.restart(request)
                return False
            self.restart(others.pop())
        return True


@dataclass
class PerRequestReference:
    """The whole simulation; `run` returns (start, duration, replica, parts) of every batch."""

    settings: Any
    rules: Any
    cost: Any
    requests: Sequence[Request]
    policy: Policy | None = None

    def run(self) -> list[tuple[float, float, int, list[tuple[int, int]]]]:
        s = self.settings
        self.replicas = [Replica(s, self.rules, s.num_blocks, [0.0] * s.num_stages) for _ in range(s.num_replicas)]
        self.events: dict[tuple[int, int], float] = {}
        self.next, self.turn, self.random = 0, 0, int(s.seed) % (MODULUS - 1) + 1
        self.completed_s: list[float] = []
        self.batches: list[tuple[float, float, int, list[tuple[int, int]]]] = []
        self.prices = Prices(self.cost)
        num_slots = s.num_replicas * s.num_stages
        while True:
            arrival_s = self.next_arrival_s()
            event_s, at = min(((time_s, at) for at, time_s in self.events.items()), default=(math.inf, (-1, -1)))
            if min(arrival_s, event_s) == math.inf:
                return self.batches
            if arrival_s <= event_s:
                self.deliver(arrival_s, num_slots)
                continue
            del self.events[at]
            index = at[1] if at[0] == num_slots else at[0] // s.num_stages
            replica = self.replicas[index]
            if at[0] < num_slots:
                self.complete(replica, replica.under_way.pop(at[0] % s.num_stages), event_s)
            while self.next_arrival_s() <= event_s:
                self.deliver(self.next_arrival_s(), num_slots)
            self.form_batches(index, event_s)

    def next_arrival_s(self) -> float:
        s = self.settings
        if self.next >= len(self.requests):
            return math.inf
        send_s = self.requests[self.next].arrival_s
        if s.concurrency == 0:
            return send_s
        if 0 < s.num_warmup <= self.next:
            if len(self.completed_s) < s.num_warmup:
                return math.inf
            send_s += self.completed_s[s.num_warmup - 1] + s.frontend_s
        if self.next - len(self.completed_s) >= s.concurrency:
            return math.inf
        if self.next >= s.concurrency:
            send_s = max(send_s, self.completed_s[self.next - s.concurrency] + s.frontend_s)
        return send_s

    def deliver(self, now_s: float, num_slots: int) -> None:
        request = self.requests[self.next]
        request.arrival_s = now_s
        self.next += 1
        index = self.route()
        replica = self.replicas[index]
        replica.waiting.append(request)
        if len(replica.under_way) < self.settings.num_stages:
            self.events.setdefault((num_slots, index), now_s)

    def route(self) -> int:
        n, router = len(self.replicas), self.settings.router
        if n == 1:
            return 0
        if router == 0:
            chosen, self.turn = self.turn, (self.turn + 1) % n
            return chosen
        if router in (1, 2):
            drawn = []
            for _ in range(router):
                self.random = self.random * MULTIPLIER % MODULUS
                drawn.append(self.random % n)
            return min(sorted(drawn), key=lambda k: self.replicas[k].outstanding)
        loads: dict[int, Callable[[int], int]] = {
            4: lambda k: int(self.settings.num_blocks) - self.replicas[k].free,
            7: lambda k: len(self.replicas[k].waiting),
        }
        return min(range(n), key=loads.get(router, lambda k: self.replicas[k].outstanding))

    def complete(self, replica: Replica, batch: Batch, now_s: float) -> None:
        done: list[Request] = []
        left: list[Request] = []
        for request, tokens in batch.parts:
            request.computed += tokens
            if request.to_prefill == 0:
                request.is_prefilled = True
                request.outputs += 1
                request.last_token_s = now_s
                if math.isnan(request.first_token_s):
                    request.first_token_s = now_s
            (done if request.left == 0 else left).append(request)
        for request in done:
            request.finish_s = now_s
            self.completed_s.append(now_s)
        if self.settings.scheduler == FASTER_TRANSFORMER:
            replica.holding -= set(done)
            if left:
                replica.paused_batches.append(Batch([(request, 1) for request in left], batch.decode_group))
            else:
                for request in [r for r, _ in batch.parts] if self.rules.leaks_blocks else batch.decode_group:
                    replica.release(request)
        else:
            for request in done:
                replica.release(request)
            replica.ready += left

    def form_batches(self, index: int, now_s: float) -> None:
        s, replica = self.settings, self.replicas[index]
        form = (self.vllm_v0, self.sarathi, self.orca, self.faster_transformer, self.lightllm, self.users_own)
        while len(replica.under_way) < s.num_stages:
            self.decode_group: list[Request] = []
            parts = form[s.scheduler - VLLM_V0](replica, now_s)
            if not parts:
                return
            slot = next(k for k in range(s.num_stages) if k not in replica.under_way)
            end_s = self.finish_time_s(replica, parts, now_s)
            replica.under_way[slot] = Batch(parts, self.decode_group)
            self.events[index * s.num_stages + slot, 0] = end_s
            self.batches.append((now_s, end_s - now_s, index, [(r.index, tokens) for r, tokens in parts]))

    # Policies

    def by_arrival(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.arrival_s)

    def vllm_v0(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        s = self.settings
        parts: list[tuple[Request, int]] = []
        while replica.waiting:
            head = replica.waiting[0]
            blocks = replica.blocks_for(head.known)
            longest = max(head.known, *(tokens for _, tokens in parts)) if parts else head.known
            if (
                replica.free - blocks < self.rules.watermark_blocks
                or (len(parts) + 1) * longest > s.max_num_batched_tokens
            ):
                break
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                break
            replica.admit(head, blocks, now_s)
            parts.append((head, head.known))
        if parts:
            return parts
        queue = self.by_arrival(replica.ready)
        while queue and len(parts) < self.rules.max_batch_seqs:
            request = queue.pop(0)
            if replica.find_room(request, queue):
                replica.append_block(request)
                parts.append((request, 1))
        replica.ready = queue
        return parts

    def sarathi(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        s = self.settings
        parts: list[tuple[Request, int]] = []
        begun, skipped, queue = [], [], list(replica.ready)

        def budget() -> int:
            return int(s.max_num_batched_tokens) - sum(tokens for _, tokens in parts)

        while queue and len(parts) < self.rules.max_batch_seqs:
            request = queue.pop(0)
            if not request.is_prefilled:
                begun.append(request)
            elif replica.find_room(request, queue):
                replica.append_block(request)
                parts.append((request, 1))
        for request in begun:
            if budget() > 0:
                parts.append((request, min(request.to_prefill, budget())))
            else:
                skipped.append(request)
        replica.ready = self.by_arrival(skipped + queue)
        while replica.waiting and budget() > 0:
            head = replica.waiting[0]
            blocks = replica.blocks_for(head.known)
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                break
            if replica.free - blocks < self.rules.watermark_blocks:
                break
            chunk = min(head.known, budget())
            replica.admit(head, blocks, now_s)
            parts.append((head, chunk))
        return parts

    def admit_reserved(self, replica: Replica, parts: list[tuple[Request, int]], now_s: float) -> None:
        while replica.waiting and len(parts) < self.rules.max_batch_seqs and replica.free >= self.rules.reserved_blocks:
            head = replica.waiting[0]
            replica.admit(head, self.rules.reserved_blocks, now_s)
            parts.append((head, head.known))

    def orca(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        most = self.rules.max_batch_seqs
        parts = [(request, 1) for request in replica.ready[:most]]
        replica.ready = replica.ready[most:]
        self.admit_reserved(replica, parts, now_s)
        return parts

    def faster_transformer(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        if replica.paused_batches:
            batch = replica.paused_batches.pop(0)
            self.decode_group = batch.decode_group
            return batch.parts
        parts: list[tuple[Request, int]] = []
        self.admit_reserved(replica, parts, now_s)
        self.decode_group = [request for request, _ in parts]
        return parts

    def lightllm(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        parts: list[tuple[Request, int]] = []
        if not replica.ready or replica.waited_steps >= self.rules.max_waiting_steps:
            self.admit_by_peak(replica, parts, now_s)
            if parts or replica.ready:
                replica.waited_steps = 0
            if parts:
                return parts
        if not replica.ready:
            return []
        replica.waited_steps += 1
        fitting = replica.ready[: replica.free]
        replica.ready = replica.ready[replica.free :]
        for request in fitting:
            replica.append_block(request)
        return [(request, 1) for request in fitting]

    def admit_by_peak(self, replica: Replica, parts: list[tuple[Request, int]], now_s: float) -> None:
        s = self.settings
        while replica.waiting:
            head = replica.waiting[0]
            if sum(tokens for _, tokens in parts) + head.known > s.max_num_batched_tokens:
                return
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                return
            held = [(max(r.left - 1, 0), r.known) for r in replica.ready]
            held += [(max(r.left - 2, 0), r.known + 1) for r in [*(r for r, _ in parts), head]]
            held.sort(key=lambda pair: -pair[0])
            sums = [sum(tokens for _, tokens in held[: k + 1]) for k in range(len(held))]
            if max(left * (k + 1) + sums[k] for k, (left, _) in enumerate(held)) >= s.num_blocks:
                return
            replica.admit(head, replica.blocks_for(head.known), now_s)
            parts.append((head, head.known))

    def users_own(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        assert self.policy is not None
        parts = []
        for request, tokens in self.policy(replica, now_s):
            if request in replica.ready:
                replica.ready.remove(request)
                if tokens == 0:
                    replica.restart(request)
                    continue
            else:
                replica.admit(request, 0, now_s)
            held = request.known if request.is_prefilled else request.computed + tokens
            more = max(replica.blocks_for(held) - request.blocks, 0)
            request.blocks += more
            replica.free -= more
            parts.append((request, tokens))
        return parts

    # Cost

    def finish_time_s(self, replica: Replica, parts: list[tuple[Request, int]], now_s: float) -> float:
        s, c = self.settings, self.cost
        device_s = self.device_s(parts)
        host_s = c.host_step_s + c.host_request_s * len(replica.holding)
        if s.num_stages == 1:
            return now_s + float(max(device_s, host_s) if c.host_overlaps else device_s + host_s)
        end_s = now_s if c.host_overlaps else now_s + host_s
        for stage in range(s.num_stages):
            end_s = max(end_s, replica.stage_free_s[stage]) + device_s / s.num_stages
            replica.stage_free_s[stage] = end_s
        return float(max(end_s, now_s + host_s) if c.host_overlaps else end_s)

    def device_s(self, parts: list[tuple[Request, int]]) -> float:
        c = self.cost
        decodes = [request for request, _ in parts if request.is_prefilled]
        prompts = [(request, tokens) for request, tokens in parts if not request.is_prefilled]
        context = sum(request.known for request in decodes)
        spread = deviation([request.known for request in decodes])
        attention_s = self.prices.decode_attention_s(len(decodes), context, bool(prompts), spread)
        if not prompts:
            return float(c.decode_token_s[len(decodes)] + attention_s)
        tokens = sum(tokens for _, tokens in prompts)
        pairs = sum(tokens * (request.computed + 0.5 * tokens) for request, tokens in prompts)
        attention_s += self.prices.prefill_attention_s(tokens, pairs)
        sampled = len(decodes) + sum(tokens == request.to_prefill for request, tokens in prompts)
        num_tokens = len(decodes) + tokens
        device_s = float(c.mixed_token_s[num_tokens] + c.sample_s[sampled] + attention_s)
        return max(device_s, float(c.launch_s[min(num_tokens, len(c.launch_s) - 1)]))
