"""A pool whose engine batches all that decode together, in plain Python: steps begun and ended, handoffs given room.

A request that is handed off is, where it prefills, a request for a single token. What it holds there stays taken until
the decode side has read it; there it waits, in order, for blocks to read into.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oracles.serving.adapters import RankAdapters
from oracles.serving.cache import Segment, TierPool
from oracles.serving.cost import Prices
from oracles.serving.encoder import EmbeddingCache, EncoderCache
from oracles.serving.sglang import Sglang
from oracles.serving.state import Chunk, Rank, Request, Step
from oracles.serving.vllm_v1 import VllmV1
from windtunnel.serving.codes import QUEUE_ORDERS, SGLANG, VLLM_V1

HELD = ("num_blocks", "shared_blocks", "num_used_segments", "num_window_blocks", "passed")
"""What a request holds of a rank's memory."""


def swap_held(request: Request, held: tuple[int, ...] = (0,) * len(HELD)) -> tuple[int, ...]:
    """Let `request` hold `held`; returns what it held before."""
    before = tuple(getattr(request, name) for name in HELD)
    for name, value in zip(HELD, held, strict=True):
        setattr(request, name, value)
    return before


@dataclass(eq=False)
class KvTransfer:
    """The way of a request that is handed off: where it has been since it was last sent to a replica."""

    request: Request
    output_tokens: int
    """All of them; the request itself asks for one while it prefills."""
    prefill_pool: "EnginePool"
    prefill_rank: Rank
    prompt_tokens: int = 0
    """Computed there."""
    held: tuple[int, ...] = ()
    """Of the prefill side, until the KV has been read: `HELD` of the request."""
    handed_s: float = math.nan
    decode_pool: "EnginePool | None" = None
    decode_rank: Rank | None = None
    start_s: float = math.nan
    link_end_s: float = math.nan
    """The interfaces of both ranks are done with it."""
    end_s: float = math.nan


class EnginePool(VllmV1, Sglang):
    """Equal replicas of an engine.

    `plan` is `serving.state.pools.PoolPlan` by shape; `deployment` has the clients, the other pools and the fleet.
    """

    def __init__(
        self, deployment: Any, plan: Any, chains: Sequence[tuple[Segment, ...]], below: tuple[Sequence[Any], bool]
    ) -> None:
        s = plan.settings
        self.deployment, self.settings, self.cost, self.role = deployment, s, plan.cost, plan.role
        self.link_bytes_per_s, self.kv_copies, self.speculation = (
            plan.link_bytes_per_s,
            plan.kv_copies,
            plan.speculation,
        )
        self.requests, self.service = deployment.requests, deployment.service
        self.chains, self.caches = chains, any(chains)
        self.tiers, self.load_overlaps = below
        self.prices, self.adapters = Prices(self.cost, self.speculation), plan.adapters
        self.num_adapters = 1 + max([0, *(request.adapter for request in self.requests)])
        num_ranks = s.num_replicas * s.ranks_per_replica
        self.ranks = [self.new_rank() for _ in range(num_ranks)]
        self.pools = [
            [TierPool(int(tier.capacity_blocks)) for _ in range(0, num_ranks, int(tier.ranks_per_pool))]
            for tier in self.tiers
        ]
        self.end_s: dict[tuple[int, int], float] = {}
        self.started_s: dict[tuple[int, int], float] = {}
        self.stage_free_s = [[0.0] * s.num_stages for _ in range(s.num_replicas)]
        self.steps: list[Step] = []
        self.num_verified: dict[tuple[int, int], int] = {}

    def new_rank(self) -> Rank:
        s = self.settings
        has_cache = s.encoder_cache_tokens > 0
        encoder = EncoderCache(int(s.encoder_cache_tokens), int(s.encoder_budget_tokens)) if has_cache else None
        rank = Rank(s.num_blocks, s.num_window_blocks, [{} for _ in range(s.num_stages)], encoder)
        if s.embedding_cache_tokens >= 0:
            rank.embeddings = EmbeddingCache(int(s.embedding_cache_tokens), bool(s.embeddings_by_request))
        rank.adapters = None if self.adapters is None else RankAdapters(self.adapters.limits, self.num_adapters)
        return rank

    # Events

    def events(self) -> Iterator[tuple[float, bool, int, int]]:
        """(time, whether it goes behind the others of that time, replica, slot)"""
        return ((end_s, False, *at) for at, end_s in self.end_s.items())

    def end_event(self, replica: int, slot: int, now_s: float) -> bool:
        """Returns whether a step has ended; else the idle slot was woken."""
        ends_step = any(rank.batches[slot] for rank in self.ranks_of(replica))
        for rank in self.ranks_of(replica):
            self.complete(rank, slot, now_s)
        return ends_step

    def go_on(self, replica: int, slot: int, now_s: float, ends_step: bool) -> None:
        if self.end_s.pop((replica, slot), None) is None:  # the replica has been turned off
            return
        started = self.start_step(replica, slot, now_s, ends_step)
        self.wake_another(replica, slot, now_s, first=0 if ends_step or started else slot + 1)

    def deliver_to(self, replica: int, request: Request, now_s: float) -> None:
        rank = min(self.ranks_of(replica), key=self.outstanding_at)
        if request.index in self.deployment.transfers:
            self.deployment.transfers[request.index].prefill_rank = rank
        request.segments = self.chains[request.index]
        self.give_key(rank, request, request.input_tokens)
        self.enqueue(rank, request)
        self.wake(replica, now_s)

    def give_key(self, rank: Rank, request: Request, prompt_tokens: int) -> None:
        """A request that is sent again keeps its key where the pool that it was at had the same order."""
        if request.key_order != self.settings.queue_order or not self.deployment.was_lost(request):
            request.queue_key = self.queue_key(rank, request, prompt_tokens)
            request.key_order = self.settings.queue_order

    def wake(self, replica: int, now_s: float) -> None:
        idle = [slot for slot in range(self.settings.num_stages) if (replica, slot) not in self.end_s]
        if idle:
            self.end_s[replica, idle[0]] = now_s

    def ranks_of(self, replica: int) -> list[Rank]:
        n = self.settings.ranks_per_replica
        return self.ranks[replica * n : (replica + 1) * n]

    # What others see of a replica

    def cached_tokens(self, replica: int, request: Request) -> int:
        found = []
        for rank in self.ranks_of(replica):
            rank.cache.shrink(rank.free_blocks // int(self.settings.num_groups))
            shared = [segment for segment in self.chains[request.index] if not segment.is_own]
            found.append(rank.cache.find(shared, 2**60)[1])
        return max(found) * int(self.settings.block_size)

    def has_adapter(self, replica: int, adapter: int) -> bool:
        adapters = [rank.adapters for rank in self.ranks_of(replica)]
        return any(each is not None and adapter in each.slots for each in adapters)

    def outstanding_at(self, rank: Rank) -> int:
        """Requests that wait or run, and those that will decode here."""
        return rank.num_outstanding + len(rank.handed) + len(rank.pulled) + len(rank.ready)

    def num_outstanding(self, replica: int) -> int:
        return sum(self.outstanding_at(rank) for rank in self.ranks_of(replica))

    def num_running(self, replica: int) -> int:
        return sum(len(rank.running) for rank in self.ranks_of(replica))

    def num_waiting(self, replica: int) -> int:
        return sum(len(rank.waiting) for rank in self.ranks_of(replica))

    def used_blocks(self, replica: int) -> int:
        return sum(int(self.settings.num_blocks) - rank.free_blocks for rank in self.ranks_of(replica))

    def is_empty(self, replica: int) -> bool:
        """No request is there, and no KV of one that was handed off."""
        kept = any(rank in self.ranks_of(replica) for rank in self.deployment.ranks_that_keep_kv())
        return not kept and self.num_outstanding(replica) == 0

    # Steps

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
        for rank in ranks:
            self.pull(rank, now_s)
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
        chunks = {index: chunk for rank in ranks for index, chunk in rank.batches[slot].items()}
        fails_s = self.deployment.fails_s(self, replica)
        if end_s >= fails_s:  # a failure cuts it short: it has no end of its own, and gives nothing
            chunks, gaps_s = {}, []
        self.end_s[replica, slot] = end_s if end_s < fails_s else math.inf
        self.started_s[replica, slot] = now_s
        self.steps.append(
            Step(
                now_s,
                min(end_s, fails_s) - now_s,
                replica,
                chunks,
                self.used_blocks(replica),
                self.num_running(replica),
                self.num_waiting(replica),
                gaps_s,
            )
        )
        return True

    def complete(self, rank: Rank, slot: int, now_s: float) -> None:
        decoding = self.in_batch(rank, slot, decodes=True)
        # Of requests that a verified step ends, the one whose last token comes sooner leaves first.
        decoding.sort(key=lambda r: (r.remaining_outputs - rank.batches[slot][r.index].gained, r.index))
        for request in [*decoding, *self.in_batch(rank, slot, decodes=False)]:
            if not request.is_decoding and self.settings.scheduler != VLLM_V1:
                self.share(rank, request, request.computed_tokens)
            if not request.is_decoding and rank.encoder is not None:
                rank.encoder.release(request, request.computed_tokens)
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
                if rank.adapters is not None:
                    rank.adapters.leave(request.adapter)
                self.finish(rank, request, now_s)
            else:
                self.see_whether_it_slides(rank, request)
        rank.batches[slot] = {}

    def finish(self, rank: Rank, request: Request, now_s: float) -> None:
        """`request`, which has left the running ones, has its last token, or the last of this pool."""
        transfer = self.deployment.transfers.get(request.index)
        if transfer is not None and transfer.decode_pool is None:
            self.deployment.hand_off(transfer, now_s)
            return
        if QUEUE_ORDERS[self.settings.queue_order] == "fair_share":
            self.service[request.tenant] += 2 * request.output_tokens // 16
        self.release(rank, request, request.computed_tokens)
        self.deployment.clients.conclude(request, now_s)

    def form_batch(self, rank: Rank, slot: int, now_s: float) -> None:
        self.join_ready(rank, slot)
        if self.settings.scheduler == SGLANG:
            self.form_batch_sglang(rank, slot, now_s)
        else:
            self.form_batch_vllm_v1(rank, slot, now_s)

    def finish_time_s(self, replica: int, slot: int, now_s: float) -> float:
        s, c, ranks = self.settings, self.cost, self.ranks_of(replica)
        if len(c.recorded_step_s):
            return now_s + float(c.recorded_step_s[len(self.steps)])
        adapters_s = [self.adapters_s(rank, rank.batches[slot]) for rank in ranks]
        repeated = [rank.cache.num_repeated_blocks * int(s.block_size) // int(s.num_stages) for rank in ranks]
        device_s = self.prices.device_s([rank.batches[slot] for rank in ranks], adapters_s, repeated)
        load_s = max(rank.load_s for rank in ranks)
        device_s = max(device_s, load_s) if self.load_overlaps else device_s + load_s
        for rank in ranks:
            rank.load_s = 0.0
        if self.adapters is not None:
            device_s += max(rank.adapters.take_load_s() for rank in ranks)
        device_s += max(self.encoder_s(rank, slot) for rank in ranks)
        host_s = c.host_step_s + c.host_request_s * max(len(rank.running) for rank in ranks)
        if s.num_stages == 1:
            return now_s + float(max(device_s, host_s) if c.host_overlaps else device_s + host_s)
        time_s = now_s if c.host_overlaps else now_s + host_s
        for stage in range(s.num_stages):
            time_s = max(time_s, self.stage_free_s[replica][stage]) + device_s / s.num_stages
            self.stage_free_s[replica][stage] = time_s
        return max(time_s, now_s + host_s) if c.host_overlaps else time_s

    def adapters_s(self, rank: Rank, batch: dict[int, Chunk]) -> float:
        """Of the adapters of all that run where some decode, else of the prompts'; by tokens of requests with one."""
        if self.adapters is None:
            return 0.0
        tokens = sum(
            self.prices.num_queries if chunk.decodes else chunk.tokens
            for index, chunk in batch.items()
            if self.requests[index].adapter >= 0
        )
        users = [self.requests[index] for index in batch]
        if any(chunk.decodes for chunk in batch.values()):
            users = [*rank.running]
        num_adapters = len({request.adapter for request in users} - {-1}) if tokens else 0
        if batch:
            rank.adapters.num_steps[num_adapters] += 1
        return self.prices.adapters_s(self.adapters, num_adapters, tokens)

    def encoder_s(self, rank: Rank, slot: int) -> float:
        """The tower encodes what the cache lacks; without one, what has its first token in a chunk of this step, unless
        the request had a token before."""
        kinds: list[int] = []
        if rank.encoder is not None:
            kinds, rank.encoder.encoded = rank.encoder.encoded, []
        prefills = [(self.requests[i], chunk) for i, chunk in rank.batches[slot].items() if not chunk.decodes]
        if rank.embeddings is not None:
            kinds = rank.embeddings.encoded(
                [(request, c.computed_before, c.computed_before + c.tokens) for request, c in prefills]
            )
            prefills = []
        for request, chunk in prefills if rank.encoder is None else ():
            if math.isnan(request.first_token_s):
                end = chunk.computed_before + chunk.tokens
                kinds += [item.kind for item in request.media if chunk.computed_before <= item.begin < end]
        return sum(self.prices.encode_s(kind, kinds.count(kind)) for kind in range(len(self.cost.encode_s)))

    # Handoffs

    def join_ready(self, rank: Rank, slot: int) -> None:
        """Requests whose KV has come run from now on."""
        rules = self.deployment.handoff_rules
        for transfer in list(rank.ready):
            request = transfer.request
            if len(rank.running) >= self.settings.max_num_seqs or transfer.end_s > self.cutoff_s:
                return
            if rank.adapters is not None:
                if not rank.adapters.may_run(request.adapter):
                    continue
                rank.adapters.admit(request.adapter)
            rank.ready.remove(transfer)
            rank.running.append(request)
            # Of the last token that is known nothing is computed: an output that decodes, or the prompt's last again.
            request.computed_tokens = request.known_tokens - 1
            request.is_decoding, request.slot = not rules.decode_samples_first, slot
            if rules.decode_streams_first and math.isnan(request.first_token_s) and request.is_decoding:
                request.first_token_s = request.last_token_s = self.cutoff_s
            self.share(rank, request, request.computed_tokens)
            if request.is_decoding:
                self.see_whether_it_slides(rank, request)

    def pull(self, rank: Rank, now_s: float) -> None:
        """Give blocks to requests whose KV waits on the prefill side, in order, while there are any."""
        for transfer in list(rank.handed):
            request = transfer.request
            if transfer.handed_s > self.cutoff_s:
                return
            num_there = len(rank.running) + len(rank.pulled) + len(rank.ready)
            if num_there >= self.settings.max_num_seqs:
                return
            if rank.adapters is not None and not rank.adapters.may_run(request.adapter):
                continue
            if self.an_older_one_waits(rank, request):
                return
            num_read = request.known_tokens - 1
            unused = self.look_up(rank, request, known_tokens=transfer.prompt_tokens, loads=False)
            request.passed = self.passed_at(num_read - 1)
            num_tokens = num_read - request.computed_tokens
            if not self.fits(rank, request, num_tokens, unused):
                return
            needed, window_needed = self.new_blocks(request, num_tokens)
            self.use_found(rank, request)
            rank.free_blocks -= needed
            request.num_blocks += needed
            rank.free_window_blocks -= window_needed
            request.num_window_blocks += window_needed
            rank.handed.remove(transfer)
            rank.pulled.append(transfer)
            self.deployment.begin_transfer(transfer, now_s)

    def an_older_one_waits(self, rank: Rank, request: Request) -> bool:
        def key(r: Request) -> tuple[int, int]:
            return (r.queue_key if self.settings.queue_order else 0, r.sequence)

        return bool(rank.waiting) and key(rank.waiting[0]) < key(request)

    def let_go(self, transfer: KvTransfer) -> None:
        """Of a request whose KV has been read, or will not be: what the prefill side held is free, or cached."""
        request = transfer.request
        here, segments = swap_held(request, transfer.held), request.segments
        request.segments = self.chains[request.index]
        self.release(transfer.prefill_rank, request, transfer.prompt_tokens)
        swap_held(request, here)
        request.segments = segments
        transfer.held = ()

    # Failures

    def forget_own(self, request: Request) -> None:
        """A lost request is sent again: what is cached of it alone is forgotten, but for what all replicas share."""
        for segment in self.chains[request.index]:
            if segment.is_own:
                for rank in self.ranks:
                    rank.cache.forget(segment)
                for tier, pools in zip(self.tiers, self.pools, strict=True):
                    if tier.ranks_per_pool < len(self.ranks):
                        for pool in pools:
                            pool.blocks.pop(segment.index, None)

    def leave(self, transfer: KvTransfer) -> None:
        """A request that was to decode here, and has not begun, will not."""
        rank = transfer.decode_rank
        assert rank is not None
        queue = next(each for each in (rank.handed, rank.pulled, rank.ready) if transfer in each)
        queue.remove(transfer)
        if queue is not rank.handed:
            self.release(rank, transfer.request, 0)

    def empty_rank(self, rank: Rank) -> None:
        """Forget all that a rank of a failed replica, or of one that is turned off, had."""
        for slot in range(self.settings.num_stages):
            self.num_verified.pop((id(rank), slot), None)
        vars(rank).update(vars(self.new_rank()))
        for tier, pools in zip(self.tiers, self.pools, strict=True):
            if not tier.outlives:
                pools[self.ranks.index(rank) // int(tier.ranks_per_pool)] = TierPool(int(tier.capacity_blocks))

    def empty_slots(self, replica: int) -> None:
        self.stage_free_s[replica] = [0.0] * self.settings.num_stages
        for slot in range(self.settings.num_stages):
            self.end_s.pop((replica, slot), None)
