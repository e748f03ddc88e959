"""The serving engine again, in plain Python: one object a request, one pass over all of them a step. The oracle.

It says what the compiled loop must do, in the order in which the engines' sources say it, and is a hundred times slower. It
imports none of the kernels; `settings` and `cost` are `kernels.state.Settings` and `StepCost` by shape.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

VLLM_V1, TRTLLM, SGLANG = range(3)


@dataclass(eq=False)
class Request:
    """A request and what became of it."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    priority: int = 0
    computed_tokens: int = 0
    num_outputs: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    is_decoding: bool = False
    """Its prefill, or the prefill after its latest preemption, is complete."""
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    finish_s: float = math.nan

    @property
    def known_tokens(self) -> int:
        return self.input_tokens + self.num_outputs

    @property
    def wanted_tokens(self) -> int:
        return self.known_tokens - self.computed_tokens

    @property
    def remaining_outputs(self) -> int:
        return self.output_tokens - self.num_outputs


@dataclass
class Rank:
    """A scheduler and its KV pool."""

    free_blocks: int
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    batch: dict[int, int] = field(default_factory=dict)
    """Request index -> tokens in the step under way."""
    new_token_ratio: float = 0.0
    steps_to_receive: int = 0

    @property
    def num_outstanding(self) -> int:
        return len(self.running) + len(self.waiting)


@dataclass(frozen=True)
class Step:
    """One step of one replica."""

    start_s: float
    duration_s: float
    replica: int
    scheduled: dict[int, int]
    """Request index -> tokens."""
    used_blocks: int
    gaps_s: list[float]
    """Time since the request's previous token, for every token of the step that is not a first one."""


@dataclass
class Reference:
    """The whole simulation; `run` returns its steps, the requests hold their times."""

    settings: Any
    cost: Any
    requests: Sequence[Request]

    def run(self) -> list[Step]:
        s = self.settings
        self.ranks = [Rank(s.num_blocks) for _ in range(s.num_replicas * s.ranks_per_replica)]
        self.end_s: dict[int, float] = {}
        self.next, self.in_flight, self.turn, self.slot_s = 0, 0, 0, 0.0
        self.steps: list[Step] = []
        while True:
            event_s, replica = min(((end, r) for r, end in self.end_s.items()), default=(math.inf, -1))
            arrival_s = self.next_arrival_s()
            if arrival_s == event_s == math.inf:
                return self.steps
            if arrival_s <= event_s:
                self.deliver(arrival_s)
                continue
            del self.end_s[replica]
            for rank in self.ranks_of(replica):
                self.complete(rank, event_s)
            while self.next_arrival_s() <= event_s:
                self.deliver(self.next_arrival_s(), waking=replica)
            self.start_step(replica, event_s)

    def ranks_of(self, replica: int) -> list[Rank]:
        n = self.settings.ranks_per_replica
        return self.ranks[replica * n : (replica + 1) * n]

    def next_arrival_s(self) -> float:
        s = self.settings
        if self.next >= len(self.requests):
            return math.inf
        release_s = self.requests[self.next].arrival_s
        if s.concurrency == 0:
            return release_s
        drains = self.next == s.num_warmup and self.in_flight > 0
        return math.inf if self.in_flight >= s.concurrency or drains else max(release_s, self.slot_s)

    def deliver(self, now_s: float, waking: int = -1) -> None:
        request = self.requests[self.next]
        request.arrival_s = now_s
        self.next += 1
        self.in_flight += 1
        replica, self.turn = self.turn, (self.turn + 1) % self.settings.num_replicas
        rank = min(self.ranks_of(replica), key=lambda rank: rank.num_outstanding)
        self.enqueue(rank, request)
        if replica not in self.end_s and replica != waking:
            self.end_s[replica] = now_s

    def enqueue(self, rank: Rank, request: Request) -> None:
        def key(waiting: Request) -> tuple[int, int]:
            return (waiting.priority if self.settings.priority else 0, waiting.index)

        bisect.insort(rank.waiting, request, key=key)

    def start_step(self, replica: int, now_s: float) -> None:
        ranks = self.ranks_of(replica)
        for rank in ranks:
            self.form_batch(rank, now_s)
        if self.settings.scheduler == SGLANG and any(self.prefills(rank) for rank in ranks):
            for rank in ranks:
                if not self.prefills(rank):
                    self.cancel_decode(rank)
        if self.settings.scheduler == SGLANG:
            for rank in ranks:
                self.count_decode_sglang(rank)
        if not any(rank.batch for rank in ranks):
            if any(rank.num_outstanding for rank in ranks):
                raise AssertionError("a request can never be scheduled")
            return
        duration_s = self.duration_s(ranks)
        end_s = now_s + duration_s
        gaps_s = []
        for rank in ranks:
            for request in rank.running:
                if self.emits_token(rank, request) and request.num_outputs > 0:
                    gaps_s.append(end_s - request.last_token_s)
        used = sum(self.settings.num_blocks - rank.free_blocks for rank in ranks)
        scheduled = {index: tokens for rank in ranks for index, tokens in rank.batch.items()}
        self.steps.append(Step(now_s, duration_s, replica, scheduled, used, gaps_s))
        self.end_s[replica] = end_s

    def emits_token(self, rank: Rank, request: Request) -> bool:
        tokens = rank.batch.get(request.index, 0)
        return tokens > 0 and request.computed_tokens + tokens == request.known_tokens

    def prefills(self, rank: Rank) -> bool:
        return any(request.index in rank.batch and not request.is_decoding for request in rank.running)

    def complete(self, rank: Rank, now_s: float) -> None:
        for request in [r for r in rank.running if r.index in rank.batch]:
            emits = self.emits_token(rank, request)
            request.computed_tokens += rank.batch[request.index]
            if not emits:
                continue
            request.num_outputs += 1
            request.is_decoding = True
            request.last_token_s = now_s
            if math.isnan(request.first_token_s):
                request.first_token_s = now_s
            if request.num_outputs == request.output_tokens:
                request.finish_s = now_s
                rank.running.remove(request)
                rank.free_blocks += request.num_blocks
                self.in_flight -= 1
                self.slot_s = now_s
        rank.batch = {}

    # Policies

    def form_batch(self, rank: Rank, now_s: float) -> None:
        if self.settings.scheduler == SGLANG:
            self.form_batch_sglang(rank, now_s)
        else:
            self.form_batch_vllm_v1(rank, now_s)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.block_size)

    def capped(self, request: Request) -> int:
        threshold = self.settings.long_prefill_token_threshold
        return min(request.wanted_tokens, threshold) if threshold > 0 else request.wanted_tokens

    def new_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` needs beyond those that it holds to compute `num_tokens` more."""
        fixed = self.settings.blocks_per_request
        if self.settings.scheduler == TRTLLM:
            return self.blocks_for(request.input_tokens + request.output_tokens) + fixed - request.num_blocks
        return self.blocks_for(request.computed_tokens + num_tokens) + fixed - request.num_blocks

    def take(self, rank: Rank, request: Request, num_tokens: int) -> None:
        needed = self.new_blocks(request, num_tokens)
        rank.free_blocks -= needed
        request.num_blocks += needed
        rank.batch[request.index] = num_tokens

    def admit(self, rank: Rank, request: Request, num_tokens: int, now_s: float) -> None:
        rank.waiting.remove(request)
        rank.running.append(request)
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now_s
        self.take(rank, request, num_tokens)

    def preempt(self, rank: Rank, request: Request) -> int:
        """Returns the tokens of the step that `request` gives back."""
        rank.running.remove(request)
        rank.free_blocks += request.num_blocks
        request.num_blocks = 0
        request.computed_tokens = 0
        request.is_decoding = False
        request.num_preemptions += 1
        self.enqueue(rank, request)
        return rank.batch.pop(request.index, 0)

    def form_batch_vllm_v1(self, rank: Rank, now_s: float) -> None:
        s = self.settings
        budget = s.max_num_batched_tokens
        position = 0
        any_preempted = False
        while position < len(rank.running) and budget > 0:
            request = rank.running[position]
            num_tokens = 1 if request.is_decoding else min(self.capped(request), budget)
            while self.new_blocks(request, num_tokens) > rank.free_blocks:
                victim = rank.running[-1]
                if s.priority:
                    victim = max(rank.running, key=lambda r: (r.priority, r.index))
                if rank.running.index(victim) < position:
                    position -= 1
                budget += self.preempt(rank, victim)
                any_preempted = True
                if victim is request:
                    break
            if request not in rank.running:
                break
            self.take(rank, request, num_tokens)
            budget -= num_tokens
            position += 1
        while not any_preempted and rank.waiting and budget > 0 and len(rank.running) < s.max_num_seqs:
            request = rank.waiting[0]
            num_tokens = self.capped(request)
            if num_tokens > budget and not s.chunked_prefill:
                break
            num_tokens = min(num_tokens, budget)
            if self.new_blocks(request, num_tokens) > rank.free_blocks:
                break
            self.admit(rank, request, num_tokens, now_s)
            budget -= num_tokens
        if any_preempted and not rank.batch:  # an empty step: the engine schedules again at once
            self.form_batch_vllm_v1(rank, now_s)

    @property
    def initial_ratio(self) -> float:
        return min(0.7 * self.settings.schedule_conservativeness, 1.0)

    def form_batch_sglang(self, rank: Rank, now_s: float) -> None:
        s = self.settings
        decoding = [r for r in rank.running if r.is_decoding]
        if rank.steps_to_receive <= 0 or not decoding:
            self.form_prefill_sglang(rank, now_s)
        if rank.batch:
            rank.steps_to_receive = 0
            return
        if not decoding:
            return
        if rank.steps_to_receive <= 0:
            rank.steps_to_receive = s.receive_interval_steps
        if sum(self.new_blocks(r, 1) for r in decoding) > rank.free_blocks:
            self.retract_sglang(rank)
        for request in [r for r in rank.running if r.is_decoding]:
            self.take(rank, request, 1)

    def count_decode_sglang(self, rank: Rank) -> None:
        if rank.batch and not self.prefills(rank):
            least = self.initial_ratio * 0.14
            rank.new_token_ratio = max(rank.new_token_ratio - (self.initial_ratio - least) / 600, least)
            rank.steps_to_receive -= 1

    def form_prefill_sglang(self, rank: Rank, now_s: float) -> None:
        s = self.settings
        if not rank.running:
            rank.new_token_ratio = self.initial_ratio
        chunk_budget, prompt_budget = s.max_num_batched_tokens, s.max_prefill_tokens
        promised = sum(r.remaining_outputs for r in rank.running) * rank.new_token_ratio
        for request in [r for r in rank.running if not r.is_decoding]:
            chunk = min(request.wanted_tokens, chunk_budget)
            if self.new_blocks(request, chunk) > rank.free_blocks:
                return
            self.take(rank, request, chunk)
            chunk_budget -= chunk
            prompt_budget -= chunk
        while chunk_budget > 0 and prompt_budget > 0 and rank.waiting and len(rank.running) < s.max_num_seqs:
            request = rank.waiting[0]
            whole, output = request.wanted_tokens, min(request.remaining_outputs, 4096)
            free_tokens = (rank.free_blocks - s.blocks_per_request) * s.block_size - promised
            chunk = min(whole, chunk_budget)
            if (
                (whole + output > free_tokens and rank.running)
                or (whole > prompt_budget and prompt_budget < s.max_prefill_tokens)
                or (chunk < whole and not s.chunked_prefill)
                or self.new_blocks(request, chunk) > rank.free_blocks
            ):
                break
            self.admit(rank, request, chunk, now_s)
            promised += whole - chunk + output
            chunk_budget -= chunk
            prompt_budget -= chunk

    def retract_sglang(self, rank: Rank) -> None:
        def needed() -> int:
            return sum(self.new_blocks(r, 1) for r in rank.running if r.is_decoding)

        while len(rank.running) > 1 and needed() > rank.free_blocks:
            decoding = [r for r in rank.running if r.is_decoding]
            victims = decoding if len(decoding) > 1 else [r for r in rank.running if not r.is_decoding]
            self.preempt(rank, min(victims, key=self.retraction_key))
        decoding = [r for r in rank.running if r.is_decoding]
        decoded = sum(r.num_outputs for r in decoding)
        promised = sum(r.output_tokens for r in decoding)
        rank.new_token_ratio = min((decoded + 20 * len(decoding)) / max(promised, 1), 1.0)

    @staticmethod
    def retraction_key(request: Request) -> tuple[int, int]:
        return (request.num_outputs if request.is_decoding else 0, -request.input_tokens)

    def cancel_decode(self, rank: Rank) -> None:
        for request in rank.running:
            if rank.batch.pop(request.index, 0):
                given_back = request.num_blocks - self.blocks_for(request.computed_tokens)
                given_back -= self.settings.blocks_per_request
                request.num_blocks -= given_back
                rank.free_blocks += given_back

    # Cost

    def duration_s(self, ranks: list[Rank]) -> float:
        c = self.cost
        if len(c.recorded_step_s):
            return float(c.recorded_step_s[len(self.steps)])
        decodes = [[r for r in rank.running if r.index in rank.batch and r.is_decoding] for rank in ranks]
        prefills = [[r for r in rank.running if r.index in rank.batch and not r.is_decoding] for rank in ranks]
        attention_s = 0.0
        for rank, decoding, prefilling in zip(ranks, decodes, prefills, strict=True):
            context = sum(r.computed_tokens for r in decoding) + len(decoding)
            tokens = sum(rank.batch[r.index] for r in prefilling)
            pairs = sum(rank.batch[r.index] * (r.computed_tokens + 0.5 * rank.batch[r.index]) for r in prefilling)
            attention_s = max(
                attention_s, self.decode_attention_s(len(decoding), context) + self.prefill_attention_s(tokens, pairs)
            )
        host_s = c.host_step_s + c.host_request_s * max(len(rank.running) for rank in ranks)
        if any(prefills):
            most_tokens = max(sum(rank.batch.values()) for rank in ranks)
            sampled = max(sum(self.emits_token(rank, r) for r in rank.running) for rank in ranks)
            device_s = c.mixed_token_s[most_tokens] + c.sample_s[sampled] + attention_s
        else:
            device_s = c.decode_token_s[max(len(decoding) for decoding in decodes)] + attention_s
        return float(max(device_s, host_s) if c.host_overlaps else device_s + host_s)

    def decode_attention_s(self, num_decodes: int, context_tokens: int) -> float:
        if num_decodes == 0:
            return 0.0
        return _interpolate(
            self.cost.context_nodes, self.cost.decode_attention_s[num_decodes], context_tokens / num_decodes
        )

    def prefill_attention_s(self, num_tokens: int, num_pairs: float) -> float:
        if num_tokens == 0:
            return 0.0
        nodes, grid = self.cost.chunk_nodes, self.cost.prefill_attention_s
        j = _cell(nodes, num_tokens)
        length = 2.0 * num_pairs / num_tokens
        low = _interpolate(self.cost.length_nodes, grid[j], length)
        high = _interpolate(self.cost.length_nodes, grid[j + 1], length)
        return low + (high - low) * ((num_tokens - float(nodes[j])) / (float(nodes[j + 1]) - float(nodes[j])))


def _cell(nodes: Sequence[float], value: float) -> int:
    return min(max(bisect.bisect_right(nodes, value) - 1, 0), len(nodes) - 2)


def _interpolate(nodes: Sequence[float], row: Sequence[float], value: float) -> float:
    j = _cell(nodes, value)
    share = (value - float(nodes[j])) / (float(nodes[j + 1]) - float(nodes[j]))
    return float(row[j]) + (float(row[j + 1]) - float(row[j])) * share
