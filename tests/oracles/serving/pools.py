"""Pools of replicas in plain Python: the oracle of runs in which requests prefill in one pool and decode in another.

Every pool is an engine of `loop.py` with settings and costs of its own; this module moves requests between them.
`plans` and `handoff_rules` are `serving.state.pools.PoolPlan` and `HandoffRules` by shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.cache import Segment, TierPool
from oracles.serving.loop import Reference
from oracles.serving.state import Rank, Request, Step
from windtunnel.serving.codes import ROUTERS

BOTH, PREFILL, DECODE = range(3)

HELD = ("num_blocks", "shared_blocks", "num_used_segments", "num_window_blocks", "passed")


def holding(request: Request) -> tuple[int, ...]:
    """What `request` holds of a rank's memory."""
    return tuple(getattr(request, name) for name in HELD)


def hold(request: Request, held: tuple[int, ...]) -> None:
    """`request` holds that now."""
    for name, value in zip(HELD, held, strict=True):
        setattr(request, name, value)


@dataclass
class KvTransfer:
    """Where a request that is handed off has been."""

    request: Request
    output_tokens: int
    """All of them; the request itself asks for one while it prefills."""
    prefill_pool: "Pool"
    prefill_rank: Rank
    held: tuple[int, ...] = ()
    """Of the prefill side, until the KV has been read: `HELD` of the request."""
    handed_s: float = math.nan
    decode_pool: "Pool | None" = None
    decode_rank: Rank | None = None
    transfer_start_s: float = math.nan
    transfer_end_s: float = math.nan


class Pool(Reference):
    """An engine whose requests may come from, or go on to, another pool."""

    def __init__(
        self, world: "ReferencePools", plan: Any, chains: Sequence[tuple[Segment, ...]], below: tuple[Any, bool]
    ) -> None:
        super().__init__(plan.settings, plan.cost, world.requests, *below, speculation=world.speculation)
        self.world, self.role, self.link_bytes_per_s = world, plan.role, plan.link_bytes_per_s
        self.kv_copies = plan.kv_copies
        self.chains = chains
        self.start()
        self.caches = any(chains)
        # What the client knows is the same for all pools.
        self.completed_s, self.thinking, self.service = world.completed_s, world.thinking, world.service
        self.handed: dict[int, list[KvTransfer]] = {id(rank): [] for rank in self.ranks}
        self.pulled: dict[int, list[KvTransfer]] = {id(rank): [] for rank in self.ranks}
        """They hold blocks: their KV is under way."""
        self.ready: dict[int, list[KvTransfer]] = {id(rank): [] for rank in self.ranks}
        self.link_free_s = {id(rank): 0.0 for rank in self.ranks}

    def num_outstanding(self, replica: int) -> int:
        queues = (self.handed, self.pulled, self.ready)
        return sum(self.outstanding_at(rank, queues) for rank in self.ranks_of(replica))

    def outstanding_at(self, rank: Rank, queues: Sequence[dict[int, list[KvTransfer]]]) -> int:
        return rank.num_outstanding + sum(len(queue[id(rank)]) for queue in queues)

    def fewest_outstanding(self, replica: int) -> Rank:
        queues = (self.handed, self.pulled, self.ready)
        return min(self.ranks_of(replica), key=lambda rank: self.outstanding_at(rank, queues))

    def deliver_to(self, replica: int, request: Request, now_s: float) -> None:
        rank = self.fewest_outstanding(replica)
        if request.index in self.world.transfers:
            transfer = self.world.transfers[request.index]
            transfer.prefill_pool, transfer.prefill_rank = self, rank
        request.segments = self.chains[request.index]
        request.queue_key = self.queue_key(rank, request, request.input_tokens)
        self.enqueue(rank, request)
        self.wake(replica, now_s)

    def replica_of(self, rank: Rank) -> int:
        position = next(index for index, other in enumerate(self.ranks) if other is rank)
        return position // int(self.settings.ranks_per_replica)

    def finish(self, rank: Rank, request: Request, now_s: float) -> None:
        transfer = self.world.transfers.get(request.index)
        if transfer is None or self is not transfer.prefill_pool or transfer.decode_pool is not None:
            super().finish(rank, request, now_s)
            return
        transfer.held = holding(request)
        hold(request, (0,) * len(HELD))
        transfer.handed_s = now_s
        request.output_tokens = transfer.output_tokens
        request.is_decoding = False
        if self.world.handoff_rules.decode_samples_first:
            request.num_outputs = 0
        if self.world.handoff_rules.decode_samples_first or self.world.handoff_rules.decode_streams_first:
            request.first_token_s = math.nan
        self.world.hand_off(transfer, now_s)

    def form_batch(self, rank: Rank, slot: int, now_s: float) -> None:
        ready = self.ready[id(rank)]
        while ready and len(rank.running) < self.settings.max_num_seqs and ready[0].transfer_end_s <= self.cutoff_s:
            request = ready.pop(0).request
            rank.running.append(request)
            request.computed_tokens = request.input_tokens - self.world.handoff_rules.decode_samples_first
            request.is_decoding, request.slot = not self.world.handoff_rules.decode_samples_first, slot
            if self.world.handoff_rules.decode_streams_first and request.is_decoding:
                request.first_token_s = request.last_token_s = self.cutoff_s
            self.share(rank, request, request.computed_tokens)
            if request.is_decoding:
                self.see_whether_it_slides(rank, request)
        super().form_batch(rank, slot, now_s)

    def formed(self, replica: int, now_s: float) -> None:
        for rank in self.ranks_of(replica):
            self.pull(rank, now_s)

    def pull(self, rank: Rank, now_s: float) -> None:
        s, handed, pulled = self.settings, self.handed[id(rank)], self.pulled[id(rank)]
        while handed and handed[0].handed_s <= self.cutoff_s:
            request = handed[0].request
            num_at_router = len(rank.running) + len(pulled) + len(self.ready[id(rank)])
            if num_at_router >= s.max_num_seqs or self.an_older_one_waits(rank, request):
                return
            num_read = request.input_tokens - self.world.handoff_rules.decode_samples_first
            unused = self.look_up(rank, request, known_tokens=request.input_tokens, loads=False)
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
            pulled.append(handed[0])
            self.world.transfer(handed.pop(0), now_s)

    def an_older_one_waits(self, rank: Rank, request: Request) -> bool:
        def key(r: Request) -> tuple[int, int]:
            return (r.queue_key if self.settings.queue_order else 0, r.sequence)

        return bool(rank.waiting) and key(rank.waiting[0]) < key(request)

    def let_go(self, transfer: KvTransfer) -> None:
        """The KV has been read: what the prefill side held of it is free, or cached."""
        request = transfer.request
        here, segments = holding(request), request.segments
        hold(request, transfer.held)
        request.segments = self.chains[request.index]
        self.release(transfer.prefill_rank, request, request.input_tokens)
        hold(request, here)
        request.segments = segments

    def arrived(self, rank: Rank, transfer: KvTransfer) -> None:
        self.pulled[id(rank)].remove(transfer)
        self.ready[id(rank)].append(transfer)


@dataclass
class ReferencePools:
    """The whole simulation over several pools; `run` returns its steps, replicas counted through all pools."""

    plans: Sequence[Any]
    handoff_rules: Any
    requests: Sequence[Request]
    speculation: Any = None
    chains: Sequence[Sequence[tuple[Segment, ...]]] = ()
    """What each pool may cache of each request; empty where none caches anything."""
    below: Sequence[tuple[Any, bool]] = ()
    """Each pool's lower tiers, and whether they load beside a step; tiers that have one `store` number are one."""
    transfers: dict[int, KvTransfer] = field(default_factory=dict)

    def run(self) -> list[Step]:
        self.completed_s: list[float] = []
        self.thinking: list[tuple[float, int]] = []
        self.service: dict[int, int] = {}
        self.replica_of_session: dict[int, int] = {}
        chains = self.chains or [[()] * len(self.requests)] * len(self.plans)
        below = self.below or [((), False)] * len(self.plans)
        self.pools = [Pool(self, *of_pool) for of_pool in zip(self.plans, chains, below, strict=True)]
        stores: dict[int, list[TierPool]] = {}
        for pool in self.pools:
            for at, tier in enumerate(pool.tiers):
                if tier.store:
                    pool.pools[at] = stores.setdefault(int(tier.store), pool.pools[at])
        self.first = self.pools[0]
        self.replicas = [(pool, i) for pool in self.pools for i in range(pool.settings.num_replicas)]
        splits = any(pool.role == PREFILL for pool in self.pools)
        decodes = DECODE if splits and any(pool.role == DECODE for pool in self.pools) else BOTH
        self.entries = [at for at, (pool, _) in enumerate(self.replicas) if pool.role != DECODE]
        self.decoders = [at for at, (pool, _) in enumerate(self.replicas) if pool.role == decodes]
        self.turns = [0, 0]
        self.arrivals: list[tuple[float, int]] = []
        while True:
            event_s, what = self.next_event()
            arrival_s = self.first.next_arrival_s()
            if arrival_s == event_s == math.inf:
                return self.all_steps()
            if arrival_s <= event_s:
                self.deliver(arrival_s)
            elif what[0] < 0:
                self.end_transfer(self.transfers[what[1]], event_s)
            else:
                pool, (replica, slot) = self.pools[what[0]], what[1:]
                ends_step = pool.end_step(replica, slot, event_s)
                while self.first.next_arrival_s() <= event_s:
                    self.deliver(self.first.next_arrival_s())
                pool.go_on(replica, slot, event_s, ends_step)

    def next_event(self) -> tuple[float, tuple[int, ...]]:
        ends = [(end, (p, *at)) for p, pool in enumerate(self.pools) for at, end in pool.end_s.items()]
        return min([*ends, *((end, (-1, index)) for end, index in self.arrivals)], default=(math.inf, ()))

    def all_steps(self) -> list[Step]:
        assert not any(math.isnan(request.finish_s) for request in self.requests), "a request can never be scheduled"
        steps, first = [], 0
        for pool in self.pools:
            steps += [
                Step(s.start_s, s.duration_s, first + s.replica, s.scheduled, s.used_blocks, s.gaps_s)
                for s in pool.steps
            ]
            first += pool.settings.num_replicas
        return steps

    def deliver(self, now_s: float) -> None:
        request = self.first.take_next(now_s)
        request.arrival_s = now_s
        request.sequence = self.first.sent
        self.first.sent += 1
        is_local = request.input_tokens <= self.handoff_rules.local_tokens
        candidates = self.decoders if is_local else self.entries
        router = self.handoff_rules.decode_router if is_local else self.first.settings.router
        former = self.replica_of_session.get(request.session, -1) if request.session >= 0 else -1
        if ROUTERS[router] == "session_affinity" and former in candidates:
            at = former
        else:
            at = self.with_prefix(candidates, router, request)
            if at < 0:
                at = self.choose(candidates, router, int(is_local))
        self.replica_of_session[request.session] = at
        pool, replica = self.replicas[at]
        hands_off = pool.role == PREFILL and not is_local
        if hands_off and (request.output_tokens > 1 or self.handoff_rules.decode_samples_first):
            self.transfers[request.index] = KvTransfer(request, request.output_tokens, pool, pool.ranks[0])
            request.output_tokens = 1
        pool.deliver_to(replica, request, now_s)

    def with_prefix(self, candidates: list[int], code: int, request: Request) -> int:
        if ROUTERS[code] != "prefix_affinity" or not any(pool.caches for pool in self.pools):
            return -1
        loads = [pool.num_outstanding(replica) for pool, replica in map(self.replicas.__getitem__, candidates)]
        found = []
        for pool, replica in map(self.replicas.__getitem__, candidates):
            request.segments = pool.chains[request.index]
            found.append(pool.cached_blocks(replica, request) * int(pool.settings.block_size))
        longest = max(range(len(candidates)), key=lambda n: (found[n], -loads[n]))
        uneven = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
        return candidates[longest] if found[longest] > 0 and not uneven else -1

    def choose(self, candidates: list[int], code: int, turn: int) -> int:
        router, n = ROUTERS[code], len(candidates)
        in_turn = self.turns[turn] % n
        self.turns[turn] += 1
        if n == 1 or router == "round_robin":
            return candidates[in_turn]
        if router == "random":
            return candidates[self.first.draw(n)]
        if router == "power_of_two":
            candidates = sorted(candidates[self.first.draw(n)] for _ in range(2))

        def load(at: int) -> int:
            pool, replica = self.replicas[at]
            if router == "least_waiting":
                return pool.num_waiting(replica)
            return pool.used_blocks(replica) if router == "least_kv" else pool.num_outstanding(replica)

        return min(candidates, key=load)

    def hand_off(self, transfer: KvTransfer, now_s: float) -> None:
        pool, replica = self.replicas[self.choose(self.decoders, self.handoff_rules.decode_router, 1)]
        transfer.decode_pool, transfer.decode_rank = pool, pool.fewest_outstanding(replica)
        transfer.request.segments = pool.chains[transfer.request.index]
        if pool.settings.queue_order:
            transfer.request.queue_key = pool.queue_key(transfer.decode_rank, transfer.request, 0)
        pool.handed[id(transfer.decode_rank)].append(transfer)
        pool.wake(replica, now_s)

    def transfer(self, transfer: KvTransfer, now_s: float) -> None:
        """The interfaces of either rank send one request's KV after the other's."""
        t, request = self.handoff_rules, transfer.request
        assert transfer.decode_pool is not None
        ends = ((transfer.prefill_pool, transfer.prefill_rank), (transfer.decode_pool, transfer.decode_rank))
        cached = request.shared_blocks * int(transfer.decode_pool.settings.block_size)
        num_bytes = t.bytes_per_token * (request.input_tokens - cached) + t.bytes_per_request
        whole_s = num_bytes * (transfer.decode_pool.kv_copies / min(pool.link_bytes_per_s for pool, _ in ends))
        may_start_s = now_s if t.tail_fraction == 1.0 else request.scheduled_s
        start_s = max(may_start_s, *(pool.link_free_s[id(rank)] for pool, rank in ends))
        for pool, rank in ends:
            pool.link_free_s[id(rank)] = start_s + whole_s
        transfer.transfer_start_s = start_s
        transfer.transfer_end_s = max(start_s + whole_s, now_s + whole_s * t.tail_fraction) + t.latency_s
        self.arrivals.append((transfer.transfer_end_s, request.index))

    def end_transfer(self, transfer: KvTransfer, now_s: float) -> None:
        self.arrivals.remove((now_s, transfer.request.index))
        assert transfer.decode_pool is not None
        assert transfer.decode_rank is not None
        transfer.prefill_pool.let_go(transfer)
        transfer.decode_pool.arrived(transfer.decode_rank, transfer)
        for pool, rank in (
            (transfer.prefill_pool, transfer.prefill_rank),
            (transfer.decode_pool, transfer.decode_rank),
        ):
            pool.wake(pool.replica_of(rank), now_s)
