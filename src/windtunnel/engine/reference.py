"""The serving engine again, in plain Python: one object a request, one pass over all of them a step. The oracle.

It says what the compiled loop must do, in the order in which the engines' sources say it, and is a hundred times
slower. It imports none of the kernels; `settings` and `cost` are `kernels.state.Settings` and `StepCost` by shape.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.engine.reference_cache import RankCache, Segment, TierPool

VLLM_V1, TRTLLM, SGLANG, TRTLLM_MAX_UTILIZATION = range(4)
ROUTERS = (
    "round_robin",
    "random",
    "power_of_two",
    "least_outstanding",
    "least_kv",
    "session_affinity",
    "prefix_affinity",
    "least_waiting",
)
QUEUE_ORDERS = ("fcfs", "priority", "shortest", "deadline", "fair_share")


@dataclass(eq=False)
class Request:
    """A request and what became of it."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    priority: int = 0
    segments: tuple[Segment, ...] = ()
    """Of its prompt and output, root first, as far as they can be cached."""
    previous: int = -1
    """Its predecessor in a session."""
    think_s: float = 0.0
    session: int = -1
    sequence: int = -1
    """Requests sent before it."""
    tenant: int = 0
    ttft_limit_s: float = math.inf
    queue_key: int = 0
    """What it is ordered by while it waits, before `sequence`."""
    order: tuple[int, int] = (0, 0)
    """Its place in the queue."""
    shared_blocks: int = 0
    """Of those that it holds, in the prefix cache."""
    num_used_segments: int = 0
    loading_blocks: int = 0
    """Of those that it was found to have, in lower tiers."""
    load_s: float = 0.0
    cached_tokens: int = -1
    """Found when it was first admitted."""
    computed_tokens: int = 0
    num_outputs: int = 0
    num_blocks: int = 0
    num_window_blocks: int = 0
    """Of the windows' own pool."""
    passed: int = 0
    """Blocks of its tokens, from the first on, that no window sees any more and that were given back."""
    passed_before: int = 0
    """The step that is being formed."""
    slides: bool = False
    num_preemptions: int = 0
    is_decoding: bool = False
    """Its prefill, or the prefill after its latest preemption, is complete."""
    lane: int = -1
    """While decoding: the one of the replica's batches in flight that it belongs to."""
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


@dataclass(frozen=True)
class Chunk:
    """What a request computes in one step."""

    tokens: int
    computed_before: int
    emits_token: bool
    decodes: bool
    gained: int = 1
    """Output tokens, where it decodes."""


@dataclass
class Rank:
    """A scheduler and its KV pool."""

    free_blocks: int
    free_window_blocks: int
    batches: list[dict[int, Chunk]]
    """Per lane, request index -> its part of the step under way."""
    cache: RankCache = field(default_factory=RankCache)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    load_s: float = 0.0
    """To load for the batch that is being formed."""
    new_token_ratio: float = 0.0
    steps_to_receive: int = 0
    waited_steps: int = 0
    balance_waited: int = 0
    balance_ready: int = 0
    holds_back: bool = False
    fair_tag: int = 0
    """The most service that an admitted request's tenant had had when it was sent."""

    @property
    def num_outstanding(self) -> int:
        return len(self.running) + len(self.waiting)

    def is_in_flight(self, request: Request, lane: int) -> bool:
        if request.is_decoding:
            return request.lane != lane and any(chunk.decodes for chunk in self.batches[request.lane].values())
        return any(request.index in batch for other, batch in enumerate(self.batches) if other != lane)


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
    tiers: Sequence[Any] = ()
    """Of memory below the device's; `kernels.state.TIER` by shape."""
    load_overlaps: bool = False
    speculation: Any = None
    """`kernels.state.Speculation` by shape."""

    def run(self) -> list[Step]:
        self.start()
        while True:
            event_s, (replica, lane) = min(((end, at) for at, end in self.end_s.items()), default=(math.inf, (-1, -1)))
            arrival_s = self.next_arrival_s()
            if arrival_s == event_s == math.inf:
                if any(rank.num_outstanding for rank in self.ranks):
                    raise AssertionError("a request can never be scheduled")
                return self.steps
            if arrival_s <= event_s:
                self.deliver(arrival_s)
                continue
            ends_step = self.end_step(replica, lane, event_s)
            while self.next_arrival_s() <= event_s:
                self.deliver(self.next_arrival_s())
            self.go_on(replica, lane, event_s, ends_step)

    def start(self) -> None:
        s = self.settings
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

    @property
    def num_queries(self) -> int:
        return 1 if self.speculation is None else int(self.speculation.num_queries)

    def gained(self, rank: Rank, lane: int) -> int:
        """Tokens of every decoding request in the lane's next step: as even as whole numbers of that mean can be."""
        if self.speculation is None:
            return 1
        mean = float(self.speculation.tokens_per_step)
        before = self.num_verified.get((id(rank), lane), 0)
        return math.floor((before + 1) * mean) - math.floor(before * mean)

    def end_step(self, replica: int, lane: int, now_s: float) -> bool:
        """Returns whether a step has ended; else the idle lane was woken."""
        ends_step = any(rank.batches[lane] for rank in self.ranks_of(replica))
        for rank in self.ranks_of(replica):
            self.complete(rank, lane, now_s)
        return ends_step

    def go_on(self, replica: int, lane: int, now_s: float, ends_step: bool) -> None:
        del self.end_s[replica, lane]
        started = self.start_step(replica, lane, now_s, ends_step)
        self.wake_another(replica, lane, now_s, first=0 if ends_step or started else lane + 1)

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
        idle = [lane for lane in range(self.settings.num_stages) if (replica, lane) not in self.end_s]
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
            rank.cache.shrink(rank.free_blocks)
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

    def wake_another(self, replica: int, lane: int, now_s: float, first: int) -> None:
        for other in range(first, self.settings.num_stages):
            idle = other != lane and (replica, other) not in self.end_s
            if idle and any(self.has_work(rank, other) for rank in self.ranks_of(replica)):
                self.end_s[replica, other] = now_s
                return

    def has_work(self, rank: Rank, lane: int) -> bool:
        unscheduled = any(not r.is_decoding and r.wanted_tokens for r in rank.running)
        return bool(rank.waiting) or unscheduled or any(r.is_decoding and r.lane == lane for r in rank.running)

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
            "deadline": int(min((request.arrival_s + request.ttft_limit_s) * 1e3, 2.0**31)),
        }
        return keys[order]

    def start_step(self, replica: int, lane: int, now_s: float, ends_step: bool) -> bool:
        ranks = self.ranks_of(replica)
        ahead = self.cost.host_overlaps and ends_step
        self.cutoff_s = self.started_s[replica, lane] if ahead else now_s
        self.balance(ranks, lane)
        for rank in ranks:
            self.form_batch(rank, lane, now_s)
        if ends_step and not any(rank.batches[lane] for rank in ranks):
            self.cutoff_s = now_s
            self.balance(ranks, lane)
            for rank in ranks:
                self.form_batch(rank, lane, now_s)
        self.formed(replica, now_s)
        if self.settings.scheduler == SGLANG and any(self.prefills(rank, lane) for rank in ranks):
            for rank in ranks:
                if not self.prefills(rank, lane):
                    self.cancel_decode(rank, lane)
        if self.settings.scheduler == SGLANG:
            for rank in ranks:
                self.count_decode_sglang(rank, lane)
        if not any(rank.batches[lane] for rank in ranks):
            return False
        for rank in ranks:
            if any(chunk.decodes for chunk in rank.batches[lane].values()):
                self.num_verified[id(rank), lane] = self.num_verified.get((id(rank), lane), 0) + 1
        end_s = self.finish_time_s(replica, lane, now_s)
        gaps_s = [
            end_s - request.last_token_s
            for rank in ranks
            for request in rank.running
            if request.num_outputs > 0 and self.emits_token(rank, lane, request)
        ]
        used = sum(self.settings.num_blocks - rank.free_blocks for rank in ranks)
        scheduled = {index: chunk.tokens for rank in ranks for index, chunk in rank.batches[lane].items()}
        self.steps.append(Step(now_s, end_s - now_s, replica, scheduled, used, gaps_s))
        self.end_s[replica, lane] = end_s
        self.started_s[replica, lane] = now_s
        return True

    def formed(self, replica: int, now_s: float) -> None:
        """A batch has been formed, or there was nothing to form one of; a pool then looks at its handovers."""

    def emits_token(self, rank: Rank, lane: int, request: Request) -> bool:
        return request.index in rank.batches[lane] and rank.batches[lane][request.index].emits_token

    def prefills(self, rank: Rank, lane: int) -> bool:
        return any(not chunk.decodes for chunk in rank.batches[lane].values())

    def complete(self, rank: Rank, lane: int, now_s: float) -> None:
        decoding = self.in_batch(rank, lane, decodes=True)
        # Of requests that a verified step ends, the one whose last token comes sooner leaves first.
        decoding.sort(key=lambda r: (r.remaining_outputs - rank.batches[lane][r.index].gained, r.index))
        for request in [*decoding, *self.in_batch(rank, lane, decodes=False)]:
            if not request.is_decoding and self.settings.scheduler != VLLM_V1:
                self.share(rank, request, request.computed_tokens)
            if not self.emits_token(rank, lane, request):
                continue
            request.num_outputs += rank.batches[lane][request.index].gained
            request.is_decoding = True
            request.lane = lane
            request.last_token_s = now_s
            if math.isnan(request.first_token_s):
                request.first_token_s = now_s
            if request.num_outputs >= request.output_tokens:
                rank.running.remove(request)
                self.finish(rank, request, now_s)
            else:
                self.see_whether_it_slides(rank, request)
        rank.batches[lane] = {}

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

    def in_batch(self, rank: Rank, lane: int, decodes: bool) -> list[Request]:
        return [self.requests[index] for index, chunk in rank.batches[lane].items() if chunk.decodes == decodes]

    # Prefix cache

    def look_up(self, rank: Rank, request: Request, known_tokens: int | None = None) -> int:
        """Start waiting `request` from what is cached of its `known_tokens`, all without it; returns the blocks in the
        cache that nobody else uses.
        """
        rank.cache.shrink(rank.free_blocks)
        known_tokens = request.known_tokens if known_tokens is None else known_tokens
        most_blocks = (known_tokens - 1) // int(self.settings.block_size)
        request.num_used_segments, hit_blocks = rank.cache.find(request.segments, most_blocks)
        used = request.segments[: request.num_used_segments]
        unused = sum(rank.cache.blocks[s.index] for s in used if s.index in rank.cache.unused)
        whole = self.whole_blocks(request)[0]
        if not rank.running and unused > hit_blocks and whole + unused - hit_blocks > rank.free_blocks:
            request.num_used_segments = unused = 0
            hit_blocks, most_blocks = 0, 0
        request.shared_blocks = found = hit_blocks
        request.load_s = 0.0
        for tier, pool in zip(self.tiers, self.pools_of(rank), strict=True):
            below = pool.find(request.segments, most_blocks)
            request.load_s += max(below - found, 0) * float(tier.block_s)
            found = max(found, below)
        request.loading_blocks = found - hit_blocks
        request.num_blocks = found
        request.computed_tokens = found * int(self.settings.block_size)
        request.passed = self.passed_at(request.computed_tokens)
        return unused + found - hit_blocks

    def use_found(self, rank: Rank, request: Request) -> None:
        """`request` takes what `look_up` found of it."""
        rank.free_blocks -= sum(rank.cache.use(s) for s in request.segments[: request.num_used_segments])

    def pools_of(self, rank: Rank) -> list[TierPool]:
        """Of each tier the one that keeps blocks for `rank`."""
        number = next(number for number, other in enumerate(self.ranks) if other is rank)
        return [pools[number // int(tier.ranks_per_pool)] for tier, pools in zip(self.tiers, self.pools, strict=True)]

    def share(self, rank: Rank, request: Request, computed_tokens: int) -> None:
        """Cache the full blocks that `request` has computed; where they are cached already, give up its own."""
        rank.cache.shrink(rank.free_blocks)
        whole = computed_tokens // int(self.settings.block_size)
        for position, segment in enumerate(request.segments):
            mine = min(whole, segment.end_block) - segment.first_block
            found = rank.cache.blocks.get(segment.index, 0)
            behind = segment.index in rank.cache.unused and found > mine
            if mine <= 0 or (position >= request.num_used_segments and behind):
                break
            if segment.first_block + mine <= request.shared_blocks:
                continue
            if position >= request.num_used_segments:
                rank.free_blocks -= rank.cache.use(segment)
                request.num_used_segments += 1
            rank.cache.blocks[segment.index] = max(found, mine)
            gained = segment.first_block + mine - request.shared_blocks
            request.shared_blocks += gained
            rank.free_blocks += gained - max(mine - found, 0)

    def release(self, rank: Rank, request: Request, computed_tokens: int) -> None:
        """`request` stops running; what it computed stays in the cache, and in the tiers below."""
        self.share(rank, request, computed_tokens)
        for pool in self.pools_of(rank):
            pool.write(request.segments, computed_tokens // int(self.settings.block_size))
        rank.free_blocks += request.num_blocks - request.shared_blocks
        rank.free_blocks += rank.cache.leave(request.segments[: request.num_used_segments])
        rank.free_window_blocks += request.num_window_blocks
        request.num_blocks = request.shared_blocks = request.num_used_segments = 0
        request.num_window_blocks = request.passed = 0
        request.slides = False

    # Sliding windows

    def pool_blocks(self, num_blocks: int, num_window_blocks: int) -> int:
        """Blocks of the pool: one of each group of layers for a block of tokens, fewer in those with a window."""
        s = self.settings
        return int((s.num_groups - s.num_window_groups) * num_blocks + s.num_window_groups * num_window_blocks)

    def passed_at(self, num_tokens: int) -> int:
        """Whole blocks of tokens that the token after `num_tokens` is a window or more away from."""
        s = self.settings
        if s.window_tokens == 0 or s.scheduler == TRTLLM:
            return 0
        return max(num_tokens - int(s.window_tokens) + 1, 0) // int(s.block_size)

    def whole_blocks(self, request: Request) -> tuple[int, int]:
        """What `request` takes at most of the pool, and of the windows' own."""
        s = self.settings
        blocks = windows = self.blocks_for(request.input_tokens + request.output_tokens)
        if s.window_tokens:
            windows = min(blocks, self.blocks_for(s.window_tokens - 1 + s.max_num_batched_tokens) + 1)
        return self.pool_blocks(blocks, windows) + int(s.blocks_per_request), int(s.window_pool) * windows

    def will_pass(self, request: Request, num_tokens: int) -> int:
        """`Request.passed` when its next `num_tokens` are scheduled."""
        if not request.is_decoding:
            return self.passed_at(request.computed_tokens)
        return self.passed_at(request.computed_tokens + num_tokens - 1) if request.slides else request.passed

    def give_back(self, rank: Rank, request: Request, passed: int) -> None:
        """Blocks before `passed` leave the groups with a window."""
        num_blocks = passed - request.passed
        rank.free_blocks += num_blocks * int(self.settings.num_window_groups)
        request.num_blocks -= num_blocks * int(self.settings.num_window_groups)
        rank.free_window_blocks += num_blocks * int(self.settings.window_pool)
        request.num_window_blocks -= num_blocks * int(self.settings.window_pool)
        request.passed = passed

    def see_whether_it_slides(self, rank: Rank, request: Request) -> None:
        """`request` decodes: once its window is full, it gives blocks back while it goes on."""
        s = self.settings
        if request.computed_tokens >= s.window_tokens > 0 and not request.slides and s.scheduler != TRTLLM:
            request.slides = True
            self.give_back(rank, request, self.passed_at(request.computed_tokens - 1))

    # Policies

    def form_batch(self, rank: Rank, lane: int, now_s: float) -> None:
        if self.settings.scheduler == SGLANG:
            self.form_batch_sglang(rank, lane, now_s)
        else:
            self.form_batch_vllm_v1(rank, lane, now_s)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self.settings.block_size))

    def capped(self, request: Request) -> int:
        threshold = int(self.settings.long_prefill_token_threshold)
        return min(request.wanted_tokens, threshold) if threshold > 0 else request.wanted_tokens

    def new_blocks(self, request: Request, num_tokens: int) -> tuple[int, int]:
        """Blocks that `request` needs beyond those that it holds to compute `num_tokens` more: of the pool, and of the
        windows' own.
        """
        if self.settings.scheduler == TRTLLM:
            blocks, window_blocks = self.whole_blocks(request)
        else:
            whole = self.blocks_for(request.computed_tokens + num_tokens)
            blocks = self.pool_blocks(whole, whole - request.passed) + int(self.settings.blocks_per_request)
            window_blocks = (whole - request.passed) * int(self.settings.window_pool)
        return blocks - request.num_blocks, window_blocks - request.num_window_blocks

    def fits(self, rank: Rank, request: Request, num_tokens: int, unused: int = 0) -> bool:
        needed, window_needed = self.new_blocks(request, num_tokens)
        return needed + unused <= rank.free_blocks and window_needed <= rank.free_window_blocks

    def fits_with_its_own(self, rank: Rank, request: Request, num_tokens: int) -> bool:
        """Whether there are blocks for it once it has given back what its window has passed."""
        passed = request.passed
        self.give_back(rank, request, self.will_pass(request, num_tokens))
        fits = self.fits(rank, request, num_tokens)
        self.give_back(rank, request, passed)
        return fits

    def take(self, rank: Rank, lane: int, request: Request, num_tokens: int) -> None:
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
            rank.batches[lane][request.index] = Chunk(1, before, True, True, num_tokens)
        else:
            rank.batches[lane][request.index] = Chunk(num_tokens, before, ends, False)

    def admit(self, rank: Rank, lane: int, request: Request, num_tokens: int, now_s: float) -> None:
        rank.waiting.remove(request)
        rank.fair_tag = max(rank.fair_tag, request.queue_key)
        rank.running.append(request)
        self.use_found(rank, request)
        rank.free_blocks -= request.loading_blocks
        rank.load_s += request.load_s
        if request.cached_tokens < 0:
            request.cached_tokens = request.computed_tokens
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now_s
        self.take(rank, lane, request, num_tokens)

    def preempt(self, rank: Rank, lane: int, request: Request) -> int:
        """Returns the tokens of the step that `request` gives back."""
        rank.running.remove(request)
        given_back = rank.batches[lane].pop(request.index, None)
        computed = given_back.computed_before if given_back else request.computed_tokens
        self.release(rank, request, 0 if self.settings.scheduler == SGLANG else computed)
        request.computed_tokens = 0
        request.is_decoding = False
        request.num_preemptions += 1
        self.enqueue(rank, request)
        if given_back is None:
            return 0
        return self.num_queries if given_back.decodes else given_back.tokens

    def form_batch_vllm_v1(self, rank: Rank, lane: int, now_s: float) -> None:
        s = self.settings
        budget = s.max_num_batched_tokens
        position = 0
        any_preempted = False
        while position < len(rank.running) and budget > 0:
            request = rank.running[position]
            if request.is_decoding and budget < self.num_queries:
                break
            gained = self.gained(rank, lane)
            num_tokens = gained if request.is_decoding else min(self.capped(request), budget)
            if (request.is_decoding and request.lane != lane) or num_tokens == 0:
                position += 1
                continue
            victim = None
            while not self.fits_with_its_own(rank, request, num_tokens):
                victims = [r for r in rank.running if not rank.is_in_flight(r, lane)]
                if not victims:
                    break
                victim = max(victims, key=lambda r: (r.priority, r.sequence)) if s.queue_order == 1 else victims[-1]
                if rank.running.index(victim) < position:
                    position -= 1
                budget += self.preempt(rank, lane, victim)
                any_preempted = True
                if victim is request:
                    break
            if victim is request or not self.fits_with_its_own(rank, request, num_tokens):
                break
            self.take(rank, lane, request, num_tokens)
            budget -= self.num_queries if request.is_decoding else num_tokens
            position += 1
        if s.scheduler == VLLM_V1:
            for request in self.in_batch(rank, lane, decodes=False):
                self.share(rank, request, request.computed_tokens)
        if rank.holds_back or self.waits_for_a_fuller_batch(rank, lane):
            return
        while not any_preempted and rank.waiting and budget > 0 and len(rank.running) < s.max_num_seqs:
            request = rank.waiting[0]
            if request.arrival_s > self.cutoff_s:
                break
            unused = self.look_up(rank, request)
            num_tokens = self.capped(request)
            if num_tokens > budget and not s.chunked_prefill:
                break
            num_tokens = min(num_tokens, budget)
            if not self.fits(rank, request, num_tokens, unused):
                break
            self.admit(rank, lane, request, num_tokens, now_s)
            if s.scheduler == VLLM_V1:
                self.share(rank, request, request.computed_tokens)
            budget -= num_tokens
        if any_preempted and not rank.batches[lane]:  # an empty step: the engine schedules again at once
            self.form_batch_vllm_v1(rank, lane, now_s)

    def balance(self, ranks: list[Rank], lane: int) -> None:
        """Whether the replica's ranks hold their waiting prompts back, so that all prefill in the same steps."""
        s, first = self.settings, ranks[0]
        if not s.balance_steps:
            return
        ready = all(r.waiting and r.waiting[0].arrival_s <= self.cutoff_s for r in ranks)
        ready = ready and all(len(r.running) < s.max_num_seqs for r in ranks)
        decoding = [any(q.is_decoding and q.lane == lane for q in r.running) for r in ranks]
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

    def waits_for_a_fuller_batch(self, rank: Rank, lane: int) -> bool:
        s = self.settings
        num_decodes = sum(chunk.decodes for chunk in rank.batches[lane].values())
        if not s.batch_wait_steps or not rank.waiting or not num_decodes:
            return False
        fills = num_decodes + sum(r.known_tokens for r in rank.waiting) >= s.batch_wait_tokens
        if fills or rank.waited_steps >= s.batch_wait_steps:
            rank.waited_steps = 0
            return False
        rank.waited_steps += 1
        return True

    @property
    def initial_ratio(self) -> float:
        return min(0.7 * float(self.settings.schedule_conservativeness), 1.0)

    def form_batch_sglang(self, rank: Rank, lane: int, now_s: float) -> None:
        s = self.settings
        if rank.steps_to_receive <= 0 or not self.decoding(rank, lane):
            self.form_prefill_sglang(rank, lane, now_s)
        if rank.batches[lane]:
            rank.steps_to_receive = 0
            return
        if not self.decoding(rank, lane):
            return
        if rank.steps_to_receive <= 0:
            rank.steps_to_receive = s.receive_interval_steps
        if not self.all_fit_sglang(rank, lane):
            self.retract_sglang(rank, lane)
        if self.all_fit_sglang(rank, lane):
            for request in self.decoding(rank, lane):
                self.take(rank, lane, request, self.gained(rank, lane))

    def decoding(self, rank: Rank, lane: int) -> list[Request]:
        return [r for r in rank.running if r.is_decoding and r.lane == lane]

    def all_fit_sglang(self, rank: Rank, lane: int) -> bool:
        needed = [self.new_blocks(r, self.gained(rank, lane)) for r in self.decoding(rank, lane)]
        fits = sum(blocks for blocks, _ in needed) <= rank.free_blocks
        return fits and sum(blocks for _, blocks in needed) <= rank.free_window_blocks

    def count_decode_sglang(self, rank: Rank, lane: int) -> None:
        if rank.batches[lane] and not self.prefills(rank, lane):
            least = self.initial_ratio * 0.14
            rank.new_token_ratio = max(rank.new_token_ratio - (self.initial_ratio - least) / 600, least)
            rank.steps_to_receive -= 1

    def form_prefill_sglang(self, rank: Rank, lane: int, now_s: float) -> None:
        s = self.settings
        if not rank.running:
            rank.new_token_ratio = self.initial_ratio
        chunk_budget, prompt_budget = s.max_num_batched_tokens, s.max_prefill_tokens
        decoding_elsewhere = sum(r.is_decoding and rank.is_in_flight(r, lane) for r in rank.running)
        promised = (sum(r.remaining_outputs for r in rank.running) - decoding_elsewhere) * rank.new_token_ratio
        for request in [r for r in rank.running if not r.is_decoding and r.wanted_tokens]:
            chunk = min(request.wanted_tokens, chunk_budget)
            if not self.fits(rank, request, chunk):
                return
            self.take(rank, lane, request, chunk)
            chunk_budget -= chunk
            prompt_budget -= chunk
        if self.caches and s.longest_prefix_first and len(rank.waiting) <= 128:
            self.sort_by_prefix(rank)
        while chunk_budget > 0 and prompt_budget > 0 and rank.waiting and len(rank.running) < s.max_num_seqs:
            request = rank.waiting[0]
            if request.arrival_s > self.cutoff_s:
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
            self.admit(rank, lane, request, chunk, now_s)
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

    def retract_sglang(self, rank: Rank, lane: int) -> None:
        while not self.all_fit_sglang(rank, lane):
            idle = [r for r in rank.running if not rank.is_in_flight(r, lane)]
            spared = len(self.decoding(rank, lane)) == 1
            decoding = [r for r in idle if r.is_decoding and not (spared and r.lane == lane)]
            victims = decoding or [r for r in idle if not r.is_decoding]
            if not victims:
                break
            self.preempt(rank, lane, min(victims, key=self.retraction_key))
        decoding = self.decoding(rank, lane)
        decoded = sum(r.num_outputs for r in decoding)
        promised = sum(r.output_tokens for r in decoding)
        rank.new_token_ratio = min((decoded + 20 * len(decoding)) / max(promised, 1), 1.0)

    @staticmethod
    def retraction_key(request: Request) -> tuple[int, int]:
        return (request.num_outputs if request.is_decoding else 0, -request.input_tokens)

    def cancel_decode(self, rank: Rank, lane: int) -> None:
        for request in rank.running:
            if chunk := rank.batches[lane].pop(request.index, None):
                request.computed_tokens -= chunk.gained
                self.give_back(rank, request, request.passed_before)
                given_back, window_given_back = self.new_blocks(request, 0)
                request.num_blocks += given_back
                rank.free_blocks -= given_back
                request.num_window_blocks += window_given_back
                rank.free_window_blocks -= window_given_back

    # Cost

    def finish_time_s(self, replica: int, lane: int, now_s: float) -> float:
        s, c, ranks = self.settings, self.cost, self.ranks_of(replica)
        if len(c.recorded_step_s):
            return now_s + float(c.recorded_step_s[len(self.steps)])
        device_s = self.device_s([rank.batches[lane] for rank in ranks])
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

    def device_s(self, batches: list[dict[int, Chunk]]) -> float:
        c = self.cost
        attention_s = 0.0
        for batch in batches:
            decodes = [chunk for chunk in batch.values() if chunk.decodes]
            prefills = [chunk for chunk in batch.values() if not chunk.decodes]
            context = sum(chunk.computed_before for chunk in decodes) + len(decodes)
            tokens = sum(chunk.tokens for chunk in prefills)
            pairs = sum(chunk.tokens * (chunk.computed_before + 0.5 * chunk.tokens) for chunk in prefills)
            decode_s = self.decode_attention_s(len(decodes), context, is_mixed=bool(prefills))
            attention_s = max(attention_s, decode_s + self.prefill_attention_s(tokens, pairs))
        if any(not chunk.decodes for batch in batches for chunk in batch.values()):
            q = self.num_queries
            num_tokens = [sum(q if chunk.decodes else chunk.tokens for chunk in batch.values()) for batch in batches]
            most_tokens = max(num_tokens)
            sampled = max(
                sum(q if chunk.decodes else chunk.emits_token for chunk in batch.values()) for batch in batches
            )
            group_s = float(c.group_token_s[sum(num_tokens)]) if len(batches) > 1 else 0.0
            device_s = float(c.mixed_token_s[most_tokens] + c.sample_s[sampled] + attention_s)
            if self.speculation is not None:
                device_s += float(c.draft_s[max(sum(chunk.decodes for chunk in batch.values()) for batch in batches)])
            return max(device_s + group_s, float(c.launch_s[min(most_tokens, len(c.launch_s) - 1)]))
        return float(c.decode_token_s[max(len(batch) for batch in batches)] + attention_s)

    def decode_attention_s(self, num_decodes: int, context_tokens: int, is_mixed: bool = False) -> float:
        if num_decodes == 0:
            return 0.0
        grid = self.cost.decode_attention_s
        if is_mixed and len(self.cost.mixed_decode_attention_s):
            grid = self.cost.mixed_decode_attention_s
        return _interpolate(self.cost.context_nodes, grid[num_decodes], context_tokens / num_decodes)

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
