"""SGLang's policy in plain Python."""

from oracles.serving.batch import Batches
from oracles.serving.state import Rank, Request


class Sglang(Batches):
    """Prompts before decodes; outputs are promised blocks by a ratio that falls while nothing is retracted."""

    caches: bool
    """Whether any request has something that can be cached."""

    @property
    def initial_ratio(self) -> float:
        return min(0.7 * float(self.settings.schedule_conservativeness), 1.0)

    def form_batch_sglang(self, rank: Rank, slot: int, now_s: float) -> None:
        s = self.settings
        if rank.steps_to_receive <= 0 or not self.decoding(rank, slot):
            self.form_prefill_sglang(rank, slot, now_s)
        if rank.batches[slot]:
            rank.steps_to_receive = 0
            return
        if not self.decoding(rank, slot):
            return
        if rank.steps_to_receive <= 0:
            rank.steps_to_receive = s.receive_interval_steps
        if not self.all_fit_sglang(rank, slot):
            self.retract_sglang(rank, slot)
        if self.all_fit_sglang(rank, slot):
            for request in self.decoding(rank, slot):
                self.take(rank, slot, request, self.gained(rank, slot))

    def decoding(self, rank: Rank, slot: int) -> list[Request]:
        return [r for r in rank.running if r.is_decoding and r.slot == slot]

    def all_fit_sglang(self, rank: Rank, slot: int) -> bool:
        needed = [self.new_blocks(r, self.gained(rank, slot)) for r in self.decoding(rank, slot)]
        fits = sum(blocks for blocks, _ in needed) <= rank.free_blocks
        return fits and sum(blocks for _, blocks in needed) <= rank.free_window_blocks

    def count_decode_sglang(self, rank: Rank, slot: int) -> None:
        if rank.batches[slot] and not self.prefills(rank, slot):
            least = self.initial_ratio * 0.14
            rank.new_token_ratio = max(rank.new_token_ratio - (self.initial_ratio - least) / 600, least)
            rank.steps_to_receive -= 1

    def form_prefill_sglang(self, rank: Rank, slot: int, now_s: float) -> None:
        s = self.settings
        if not rank.running:
            rank.new_token_ratio = self.initial_ratio
        chunk_budget, prompt_budget = s.max_num_batched_tokens, s.max_prefill_tokens
        decoding_elsewhere = sum(r.is_decoding and rank.is_in_flight(r, slot) for r in rank.running)
        promised = (sum(r.remaining_outputs for r in rank.running) - decoding_elsewhere) * rank.new_token_ratio
        for request in [r for r in rank.running if not r.is_decoding and r.wanted_tokens]:
            chunk = min(request.wanted_tokens, chunk_budget)
            if not self.fits(rank, request, chunk):
                return
            self.take(rank, slot, request, chunk)
            chunk_budget -= chunk
            prompt_budget -= chunk
        if self.caches and s.longest_prefix_first and len(rank.waiting) <= 128:
            self.sort_by_prefix(rank)
        while chunk_budget > 0 and prompt_budget > 0 and rank.waiting and len(rank.running) < s.max_num_seqs:
            request = self.next_waiting(rank)
            if request is None:
                break
            unused = self.look_up(rank, request)
            whole, output = request.wanted_tokens, min(request.remaining_outputs, 4096)
            free_blocks = (rank.free_blocks - unused - s.blocks_per_request) // s.num_groups
            if s.window_pool:
                free_blocks = min(free_blocks, rank.free_window_blocks)
            free_tokens = free_blocks * s.block_size - promised
            chunk = min(whole, chunk_budget)
            if (
                (whole + output > free_tokens and rank.running)
                or (whole > prompt_budget and prompt_budget < s.max_prefill_tokens)
                or (chunk < whole and not s.chunked_prefill)
                or not self.fits(rank, request, chunk, unused)
            ):
                break
            self.admit(rank, slot, request, chunk, now_s)
            promised += whole - chunk + output
            chunk_budget -= chunk
            prompt_budget -= chunk

    def sort_by_prefix(self, rank: Rank) -> None:
        for request in rank.waiting:
            late = request.arrival_s > self.cutoff_s
            if not late:
                self.look_up(rank, request)
            request.order = (1 if late else -request.computed_tokens, request.sequence)
        rank.waiting.sort(key=lambda request: request.order)

    def retract_sglang(self, rank: Rank, slot: int) -> None:
        while not self.all_fit_sglang(rank, slot):
            idle = [r for r in rank.running if not rank.is_in_flight(r, slot)]
            spared = len(self.decoding(rank, slot)) == 1
            decoding = [r for r in idle if r.is_decoding and not (spared and r.slot == slot)]
            victims = decoding or [r for r in idle if not r.is_decoding]
            if not victims:
                break
            self.preempt(rank, slot, min(victims, key=self.retraction_key))
        decoding = self.decoding(rank, slot)
        decoded = sum(r.num_outputs for r in decoding)
        promised = sum(r.output_tokens for r in decoding)
        rank.new_token_ratio = min((decoded + 20 * len(decoding)) / max(promised, 1), 1.0)

    @staticmethod
    def retraction_key(request: Request) -> tuple[int, int]:
        return (request.num_outputs if request.is_decoding else 0, -request.input_tokens)

    def cancel_decode(self, rank: Rank, slot: int) -> None:
        for request in rank.running:
            if chunk := rank.batches[slot].pop(request.index, None):
                request.computed_tokens -= chunk.gained
                self.give_back(rank, request, request.passed_before)
                given_back, window_given_back = self.new_blocks(request, 0)
                request.num_blocks += given_back
                rank.free_blocks -= given_back
                request.num_window_blocks += window_given_back
                rank.free_window_blocks -= window_given_back
