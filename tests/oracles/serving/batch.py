"""How a batch is filled, in plain Python: who waits, who is admitted, who takes part, who is preempted."""

import bisect
import math
from collections.abc import Sequence
from typing import Any

from oracles.serving.cost import Prices
from oracles.serving.memory import Memory
from oracles.serving.state import Chunk, Rank, Request
from windtunnel.serving.codes import QUEUE_ORDERS, SGLANG


class Batches(Memory):
    """Of every replica's slots; the policies choose for them."""

    requests: Sequence[Request]
    speculation: Any
    prices: Prices
    service: dict[int, int]
    """Of each tenant, under fair share."""
    num_verified: dict[tuple[int, int], int]
    cutoff_s: float
    """Who arrived later was not known when the batch was formed."""

    def gained(self, rank: Rank, slot: int) -> int:
        """Tokens of every decoding request in the slot's next step: as even as whole numbers of that mean can be."""
        if self.speculation is None:
            return 1
        mean = float(self.speculation.tokens_per_step)
        before = self.num_verified.get((id(rank), slot), 0)
        return math.floor((before + 1) * mean) - math.floor(before * mean)

    def enqueue(self, rank: Rank, request: Request) -> None:
        first = request.queue_key if self.settings.queue_order else 0
        request.order = (first, request.sequence)
        bisect.insort(rank.waiting, request, key=lambda waiting: waiting.order)

    def queue_key(self, rank: Rank, request: Request, prompt_tokens: int) -> int:
        """The first part of a waiting request's key: by priority, prompt, deadline or its tenant's service."""
        order = QUEUE_ORDERS[self.settings.queue_order]
        if order == "fair_share":
            key = max(self.service.get(request.tenant, 0), rank.fair_tag)
            self.service[request.tenant] = key + -(-prompt_tokens // 16)
            return key
        keys = {
            "fcfs": 0,
            "priority": request.priority,
            "shortest": request.input_tokens,
            "deadline": int(min((request.sent_s + request.ttft_limit_s) * 1e3, 2.0**31)),
        }
        return keys[order]

    def next_waiting(self, rank: Rank) -> Request | None:
        """The first waiting request that has arrived and whose adapter may join those that run."""
        for request in rank.waiting:
            if request.arrival_s > self.cutoff_s:
                return None
            if rank.adapters is None or rank.adapters.may_run(request.adapter):
                return request
        return None

    def take(self, rank: Rank, slot: int, request: Request, num_tokens: int) -> None:
        needed, window_needed = self.new_blocks(request, num_tokens)
        rank.free_blocks -= needed
        request.num_blocks += needed
        rank.free_window_blocks -= window_needed
        request.num_window_blocks += window_needed
        request.passed_before = request.passed
        self.give_back(rank, request, self.will_pass(request, num_tokens))
        before = request.computed_tokens
        request.computed_tokens += num_tokens
        ends = request.computed_tokens == request.known_tokens
        if request.is_decoding:
            rank.batches[slot][request.index] = Chunk(1, before, True, True, num_tokens)
        else:
            rank.batches[slot][request.index] = Chunk(num_tokens, before, ends, False)

    def admit(self, rank: Rank, slot: int, request: Request, num_tokens: int, now_s: float) -> None:
        rank.waiting.remove(request)
        rank.fair_tag = max(rank.fair_tag, request.queue_key)
        rank.running.append(request)
        self.use_found(rank, request)
        rank.free_blocks -= request.loading_blocks
        rank.load_s += request.load_s
        if rank.adapters is not None:
            rank.adapters.admit(request.adapter)
        if request.cached_tokens < 0:
            request.cached_tokens = request.computed_tokens
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now_s
        self.take(rank, slot, request, num_tokens)

    def preempt(self, rank: Rank, slot: int, request: Request) -> int:
        """Returns the tokens of the step that `request` gives back."""
        rank.running.remove(request)
        if rank.adapters is not None:
            rank.adapters.leave(request.adapter)
        given_back = rank.batches[slot].pop(request.index, None)
        computed = given_back.computed_before if given_back else request.computed_tokens
        self.release(rank, request, 0 if self.settings.scheduler == SGLANG else computed)
        if rank.encoder is not None:
            rank.encoder.release(request, request.known_tokens)
        request.computed_tokens = 0
        request.is_decoding = False
        request.num_preemptions += 1
        self.enqueue(rank, request)
        if given_back is None:
            return 0
        return self.prices.num_queries if given_back.decodes else given_back.tokens

    def emits_token(self, rank: Rank, slot: int, request: Request) -> bool:
        return request.index in rank.batches[slot] and rank.batches[slot][request.index].emits_token

    def prefills(self, rank: Rank, slot: int) -> bool:
        return any(not chunk.decodes for chunk in rank.batches[slot].values())

    def in_batch(self, rank: Rank, slot: int, decodes: bool) -> list[Request]:
        return [self.requests[index] for index, chunk in rank.batches[slot].items() if chunk.decodes == decodes]
