"""The policy of vLLM's V1 engine, and TensorRT-LLM's by the same loop, in plain Python."""

from oracles.serving.batch import Batches
from oracles.serving.state import Rank, Request
from windtunnel.serving.codes import VLLM_V1


class VllmV1(Batches):
    """Running requests first, then waiting ones, as long as tokens and blocks last."""

    def capped(self, request: Request) -> int:
        threshold = int(self.settings.long_prefill_token_threshold)
        return min(request.wanted_tokens, threshold) if threshold > 0 else request.wanted_tokens

    def form_batch_vllm_v1(self, rank: Rank, slot: int, now_s: float) -> None:
        s = self.settings
        budget = s.max_num_batched_tokens
        position = 0
        any_preempted = False
        encoder, to_encode = rank.encoder, []
        if encoder is not None:
            encoder.left_tokens = encoder.budget_tokens
        while position < len(rank.running) and budget > 0:
            request = rank.running[position]
            if request.is_decoding and budget < self.prices.num_queries:
                break
            gained = self.gained(rank, slot)
            num_tokens = gained if request.is_decoding else min(self.capped(request), budget)
            if encoder is not None and not request.is_decoding:
                num_tokens, to_encode = encoder.try_schedule(request, num_tokens)
            if (request.is_decoding and request.slot != slot) or num_tokens == 0:
                position += 1
                continue
            victim = None
            while not self.fits_with_its_own(rank, request, num_tokens):
                victims = [r for r in rank.running if not rank.is_in_flight(r, slot)]
                if not victims:
                    break
                victim = max(victims, key=lambda r: (r.priority, r.sequence)) if s.queue_order == 1 else victims[-1]
                if rank.running.index(victim) < position:
                    position -= 1
                budget += self.preempt(rank, slot, victim)
                any_preempted = True
                if victim is request:
                    break
            if victim is request or not self.fits_with_its_own(rank, request, num_tokens):
                break
            if encoder is not None and not request.is_decoding:
                encoder.allocate(request, to_encode)
            self.take(rank, slot, request, num_tokens)
            budget -= self.prices.num_queries if request.is_decoding else num_tokens
            position += 1
        if s.scheduler == VLLM_V1:
            for request in self.in_batch(rank, slot, decodes=False):
                self.share(rank, request, request.computed_tokens)
        if rank.holds_back or self.waits_for_a_fuller_batch(rank, slot):
            return
        while not any_preempted and rank.waiting and budget > 0 and len(rank.running) < s.max_num_seqs:
            request = self.next_waiting(rank)
            if request is None:
                break
            unused = self.look_up(rank, request)
            num_tokens = self.capped(request)
            if num_tokens > budget and not s.chunked_prefill:
                break
            num_tokens = min(num_tokens, budget)
            if encoder is not None:
                num_tokens, to_encode = encoder.try_schedule(request, num_tokens)
                if num_tokens == 0:
                    break
            if s.reserves_prompt and not self.fits_whole(rank, request, unused):
                break
            if not self.fits(rank, request, num_tokens, unused):
                break
            if encoder is not None:
                encoder.allocate(request, to_encode)
            self.admit(rank, slot, request, num_tokens, now_s)
            if s.scheduler == VLLM_V1:
                self.share(rank, request, request.computed_tokens)
            budget -= num_tokens
        if any_preempted and not rank.batches[slot]:  # an empty step: the engine schedules again at once
            self.form_batch(rank, slot, now_s)

    def balance(self, ranks: list[Rank], slot: int) -> None:
        """Whether the replica's ranks hold their waiting prompts back, so that all prefill in the same steps."""
        s, first = self.settings, ranks[0]
        if not s.balance_steps:
            return
        ready = all(r.waiting and r.waiting[0].arrival_s <= self.cutoff_s for r in ranks)
        ready = ready and all(len(r.running) < s.max_num_seqs for r in ranks)
        decoding = [any(q.is_decoding and q.slot == slot for q in r.running) for r in ranks]
        decode, holds_back = all(decoding), False
        if not any(decoding):
            pass
        elif ready:
            first.balance_waited = 0
            holds_back = decode and first.balance_ready < s.balance_wait_steps
            if decode:
                first.balance_ready = first.balance_ready + 1 if holds_back else 0
        else:
            first.balance_waited += 1
            holds_back = decode and first.balance_waited < s.balance_steps
            if not holds_back:
                first.balance_waited = 0
        for rank in ranks:
            rank.holds_back = holds_back

    def waits_for_a_fuller_batch(self, rank: Rank, slot: int) -> bool:
        s = self.settings
        num_decodes = sum(chunk.decodes for chunk in rank.batches[slot].values())
        if not s.batch_wait_steps or not rank.waiting or not num_decodes:
            return False
        fills = num_decodes + sum(r.known_tokens for r in rank.waiting) >= s.batch_wait_tokens
        if fills or rank.waited_steps >= s.batch_wait_steps:
            rank.waited_steps = 0
            return False
        rank.waited_steps += 1
        return True
