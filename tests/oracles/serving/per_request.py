"""Schedulers that may batch any subset of requests, in plain Python: the oracle of `serving.per_request`.

Lists for queues, one step at a time. `settings` (`rules` too) and `cost` are `serving.state.records.KernelSettings`
and `serving.state.records.StepCost` by shape.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.cost import Prices, deviation, launched_s
from oracles.serving.state import Chunk, Request, Step
from windtunnel.serving.codes import FASTER_TRANSFORMER, VLLM_V0

WAKE = -1
"""In place of a slot, where a replica was woken."""

Policy = Callable[["Replica", float], list[tuple[Request, int]]]


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
    end_s: dict[int, float] = field(default_factory=dict)
    """Of the batches under way that no failure cuts short."""
    woken_s: float | None = None
    """When it looks for work, in all idle slots."""
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
        request.num_blocks = blocks
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now_s

    def release(self, request: Request) -> None:
        self.free += request.num_blocks
        request.num_blocks = 0
        self.holding.discard(request)

    def restart(self, request: Request) -> None:
        self.release(request)
        if not request.is_decoding and self.rules.loses_prompts:
            request.lost_prompt += request.wanted_tokens
        request.computed_tokens = 0
        request.is_decoding = False
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def append_block(self, request: Request) -> None:
        if request.known_tokens > request.num_blocks * self.settings.block_size:
            request.num_blocks += 1
            self.free -= 1

    def find_room(self, request: Request, others: list[Request]) -> bool:
        """Restart the latest of `others` until a block is free; False when `request` itself had to go."""
        while self.free < 1:
            if not others:
                self.restart(request)
                return False
            self.restart(others.pop())
        return True


class PerRequestPool:
    """Equal replicas whose scheduler may batch any subset of requests.

    `plan` is `serving.state.pools.PoolPlan` by shape; `deployment` has the clients, the other pools and the fleet.
    """

    caches = False

    def __init__(self, deployment: Any, plan: Any, policy: Policy | None) -> None:
        s = plan.settings
        self.deployment, self.settings, self.rules, self.cost, self.role = (deployment, s, s, plan.cost, plan.role)
        self.policy, self.prices = policy, Prices(plan.cost)
        self.replicas = [self.new_replica() for _ in range(s.num_replicas)]
        self.steps: list[Step] = []

    def new_replica(self) -> Replica:
        return Replica(self.settings, self.rules, self.settings.num_blocks, [0.0] * self.settings.num_stages)

    # Events

    def events(self) -> Iterator[tuple[float, bool, int, int]]:
        """(time, whether it goes behind the others of that time, replica, slot)"""
        for number, replica in enumerate(self.replicas):
            yield from ((end_s, False, number, slot) for slot, end_s in replica.end_s.items())
            if replica.woken_s is not None:
                yield (replica.woken_s, True, number, WAKE)

    def end_event(self, number: int, slot: int, now_s: float) -> bool:
        """Returns whether a batch has ended; else the replica was woken."""
        replica = self.replicas[number]
        if slot == WAKE:
            replica.woken_s = None
            return False
        del replica.end_s[slot]
        self.complete(replica, replica.under_way.pop(slot), now_s)
        return True

    def go_on(self, number: int, _slot: int, now_s: float, _ends_step: bool) -> None:
        self.form_batches(number, now_s)

    def deliver_to(self, number: int, request: Request, now_s: float) -> None:
        request.key_order = self.settings.queue_order
        self.replicas[number].waiting.append(request)
        self.wake(number, now_s)

    def wake(self, number: int, now_s: float) -> None:
        replica = self.replicas[number]
        if len(replica.under_way) < self.settings.num_stages and replica.woken_s is None:
            replica.woken_s = now_s

    # What others see of a replica

    def num_outstanding(self, number: int) -> int:
        return self.replicas[number].outstanding

    def num_waiting(self, number: int) -> int:
        return len(self.replicas[number].waiting)

    def num_running(self, number: int) -> int:
        return len(self.replicas[number].holding)

    def used_blocks(self, number: int) -> int:
        return int(self.settings.num_blocks) - self.replicas[number].free

    def cached_tokens(self, _number: int, _request: Request) -> int:
        return 0

    def is_empty(self, number: int) -> bool:
        return self.num_outstanding(number) == 0

    # Failures

    def forget_own(self, request: Request) -> None:
        """Nothing is cached here."""

    def empty(self, number: int) -> list[Request]:
        """Of a failed replica or one that is turned off; returns the requests that were there: those that hold blocks
        by number, then the waiting ones in order.
        """
        replica = self.replicas[number]
        holding = [request for request in replica.holding if math.isnan(request.finish_s)]
        self.replicas[number] = self.new_replica()
        self.replicas[number].woken_s = replica.woken_s
        return [*sorted(holding, key=lambda request: request.index), *replica.waiting]

    # Batches

    def complete(self, replica: Replica, batch: Batch, now_s: float) -> None:
        done: list[Request] = []
        left: list[Request] = []
        for request, tokens in batch.parts:
            request.computed_tokens += tokens
            if request.wanted_tokens == 0:
                request.is_decoding = True
                request.num_outputs += 1
                request.last_token_s = now_s
                if math.isnan(request.first_token_s):
                    request.first_token_s = now_s
            (done if request.remaining_outputs == 0 else left).append(request)
        for request in done:
            self.deployment.clients.conclude(request, now_s)
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

    def form_batches(self, number: int, now_s: float) -> None:
        s, replica = self.settings, self.replicas[number]
        form = (self.vllm_v0, self.sarathi, self.orca, self.faster_transformer, self.lightllm, self.users_own)
        while len(replica.under_way) < s.num_stages:
            self.decode_group: list[Request] = []
            parts = form[s.scheduler - VLLM_V0](replica, now_s)
            if not parts:
                return
            slot = next(k for k in range(s.num_stages) if k not in replica.under_way)
            end_s = self.finish_time_s(replica, parts, now_s)
            replica.under_way[slot] = Batch(parts, self.decode_group)
            fails_s = self.deployment.fails_s(self, number)
            if end_s < fails_s:
                replica.end_s[slot] = end_s
            self.record(number, parts, now_s, end_s, fails_s)

    def record(self, number: int, parts: list[tuple[Request, int]], now_s: float, end_s: float, fails_s: float) -> None:
        """A batch that a failure cuts short gives nothing."""
        chunks = {
            r.index: Chunk(tokens, r.known_tokens - 1, True, True)
            if r.is_decoding
            else Chunk(tokens, r.computed_tokens, tokens == r.wanted_tokens, False)
            for r, tokens in parts
        }
        gaps_s = [end_s - r.last_token_s for r, _ in parts if r.num_outputs > 0 and chunks[r.index].emits_token]
        if end_s >= fails_s:
            chunks, gaps_s = {}, []
        seen = self.used_blocks(number), self.num_running(number), self.num_waiting(number)
        self.steps.append(Step(now_s, min(end_s, fails_s) - now_s, number, chunks, *seen, gaps_s))

    # Policies

    def by_arrival(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.arrival_s)

    def vllm_v0(self, replica: Replica, now_s: float) -> list[tuple[Request, int]]:
        s = self.settings
        parts: list[tuple[Request, int]] = []
        while replica.waiting:
            head = replica.waiting[0]
            blocks = replica.blocks_for(head.known_tokens)
            longest = max(head.known_tokens, *(tokens for _, tokens in parts)) if parts else head.known_tokens
            if (
                replica.free - blocks < self.rules.watermark_blocks
                or (len(parts) + 1) * longest > s.max_num_batched_tokens
            ):
                break
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                break
            replica.admit(head, blocks, now_s)
            parts.append((head, head.known_tokens))
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
            if not request.is_decoding:
                begun.append(request)
            elif replica.find_room(request, queue):
                replica.append_block(request)
                parts.append((request, 1))
        for request in begun:
            if budget() > 0:
                parts.append((request, min(request.wanted_tokens, budget())))
            else:
                skipped.append(request)
        replica.ready = self.by_arrival(skipped + queue)
        while replica.waiting and budget() > 0:
            head = replica.waiting[0]
            blocks = replica.blocks_for(head.known_tokens)
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                break
            if replica.free - blocks < self.rules.watermark_blocks:
                break
            chunk = min(head.known_tokens, budget())
            replica.admit(head, blocks, now_s)
            parts.append((head, chunk))
        return parts

    def admit_reserved(self, replica: Replica, parts: list[tuple[Request, int]], now_s: float) -> None:
        while replica.waiting and len(parts) < self.rules.max_batch_seqs and replica.free >= self.rules.reserved_blocks:
            head = replica.waiting[0]
            replica.admit(head, self.rules.reserved_blocks, now_s)
            parts.append((head, head.known_tokens))

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
            if sum(tokens for _, tokens in parts) + head.known_tokens > s.max_num_batched_tokens:
                return
            if len(replica.holding) == s.max_num_seqs or len(parts) == self.rules.max_batch_seqs:
                return
            held = [(max(r.remaining_outputs - 1, 0), r.known_tokens) for r in replica.ready]
            held += [(max(r.remaining_outputs - 2, 0), r.known_tokens + 1) for r in [*(r for r, _ in parts), head]]
            held.sort(key=lambda pair: -pair[0])
            sums = [sum(tokens for _, tokens in held[: k + 1]) for k in range(len(held))]
            if max(left * (k + 1) + sums[k] for k, (left, _) in enumerate(held)) >= s.num_blocks:
                return
            replica.admit(head, replica.blocks_for(head.known_tokens), now_s)
            parts.append((head, head.known_tokens))

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
            held = request.known_tokens if request.is_decoding else request.computed_tokens + tokens
            more = max(replica.blocks_for(held) - request.num_blocks, 0)
            request.num_blocks += more
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
        decodes = [request for request, _ in parts if request.is_decoding]
        prompts = [(request, tokens) for request, tokens in parts if not request.is_decoding]
        context = sum(request.known_tokens for request in decodes)
        spread = deviation([request.known_tokens for request in decodes])
        attention_s = self.prices.decode_attention_s(len(decodes), context, bool(prompts), spread)
        if not prompts:
            decode_s = float(c.decode_token_s[len(decodes)] + attention_s)
            return launched_s(decode_s, self.prices.decode_launch_s(len(decodes))) + c.unhidden_step_s
        tokens = sum(tokens for _, tokens in prompts)
        pairs = sum(tokens * (request.computed_tokens + 0.5 * tokens) for request, tokens in prompts)
        attention_s += self.prices.prefill_attention_s(tokens, pairs)
        sampled = len(decodes) + sum(tokens == request.wanted_tokens for request, tokens in prompts)
        num_tokens = len(decodes) + tokens
        device_s = float(c.mixed_token_s[num_tokens] + c.sample_s[sampled] + attention_s)
        return launched_s(device_s, float(c.launch_s[min(num_tokens, len(c.launch_s) - 1)])) + c.unhidden_step_s
