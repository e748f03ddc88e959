"""A deployment in plain Python, event by event: clients, a router, pools of any scheduler, handoffs, a fleet.

It says what the serving loop must do, whatever the pools are. `plans`, `handoff_rules` and `fleet_plan` are
`serving.state.pools.PoolPlan` and `HandoffRules` and `serving.setup.fleet_plan.FleetPlan` by shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oracles.serving.cache import Segment, TierPool
from oracles.serving.clients import Clients
from oracles.serving.engine import EnginePool, KvTransfer, swap_held
from oracles.serving.fleet import Fleet
from oracles.serving.per_request import PerRequestPool, Policy
from oracles.serving.router import Router
from oracles.serving.state import Rank, Request, Step
from windtunnel.serving.codes import DECODE, PREFILL, UP, VLLM_V0

TRANSFERS = -1
"""In place of a pool's position, in the order of events of one time."""


@dataclass
class ReferenceDeployment:
    """The whole simulation; `run` returns its steps, replicas counted through all pools."""

    plans: Sequence[Any]
    requests: Sequence[Request]
    handoff_rules: Any = None
    """None where no request is handed off."""
    fleet_plan: Any = None
    """None where all replicas are there all the time."""
    chains: Sequence[Sequence[tuple[Segment, ...]]] = ()
    """What each pool may cache of each request; empty where none caches anything."""
    below: Sequence[tuple[Sequence[Any], bool]] = ()
    """Each pool's lower tiers, and whether they load beside a step; tiers that have one `store` number are one."""
    policies: Sequence[Policy | None] = ()
    """The user's, of each pool."""
    users_router: Callable[["ReferenceDeployment", Request, float], int] | None = None

    def __post_init__(self) -> None:
        first = self.plans[0].settings
        self.clients = Clients(first, self.requests)
        self.service: dict[int, int] = {}
        """Of each tenant, under fair share."""
        self.transfers: dict[int, KvTransfer] = {}
        """By request; of its latest stay at a replica that prefills for another."""
        self.link_busy_s: dict[int, float] = {}
        """By rank: until when its interfaces were busy with transfers that have ended or were cut short."""
        self.pools = self.new_pools()
        self.replicas = [(pool, i) for pool in self.pools for i in range(pool.settings.num_replicas)]
        hands_off = any(pool.role == PREFILL for pool in self.pools)
        decoding = DECODE if hands_off and any(pool.role == DECODE for pool in self.pools) else 0
        self.entries = [number for number, (pool, _) in enumerate(self.replicas) if pool.role != DECODE]
        self.decoders = [number for number, (pool, _) in enumerate(self.replicas) if pool.role == decoding]
        self.fleet = None if self.fleet_plan is None else Fleet(self, self.fleet_plan)
        self.router = Router(self, first.seed, self.fleet is None, any(pool.caches for pool in self.pools))
        if self.fleet is not None:
            self.router.most_outstanding = self.fleet.rules.most_outstanding

    def new_pools(self) -> list[Any]:
        chains = self.chains or [[()] * len(self.requests)] * len(self.plans)
        below = self.below or [((), False)] * len(self.plans)
        policies = self.policies or [None] * len(self.plans)
        pools = [
            EnginePool(self, plan, own_chains, own_below)
            if plan.settings.scheduler < VLLM_V0
            else PerRequestPool(self, plan, policy)
            for plan, own_chains, own_below, policy in zip(self.plans, chains, below, policies, strict=True)
        ]
        stores: dict[int, list[TierPool]] = {}
        for pool in pools:
            for row, tier in enumerate(pool.tiers if isinstance(pool, EnginePool) else ()):
                if tier.store:
                    pool.pools[row] = stores.setdefault(int(tier.store), pool.pools[row])
        return pools

    # Events

    def run(self) -> list[Step]:
        while self.fleet is None or any(math.isnan(request.finish_s) for request in self.requests):
            event_s, _, at = self.next_event()
            send_s, change_s = self.next_send_s(), math.inf if self.fleet is None else self.fleet.next_change_s()
            if event_s == send_s == change_s == math.inf:
                break
            if self.fleet is not None and change_s <= min(send_s, event_s):
                self.fleet.change(change_s)
            elif send_s <= event_s:
                self.deliver(send_s)
            elif at[0] == TRANSFERS:
                self.end_transfer(self.transfers[at[1]], event_s)
            else:
                self.handle(*at, event_s)
        assert not any(math.isnan(request.finish_s) for request in self.requests), "a request can never be scheduled"
        return self.all_steps()

    def next_event(self) -> tuple[float, bool, tuple[int, ...]]:
        """Of equal times KV transfers first, then slots, then replicas that were woken."""
        events = [
            (time_s, is_late, (number, *at))
            for number, pool in enumerate(self.pools)
            for time_s, is_late, *at in pool.events()
        ]
        events += [(transfer.end_s, False, (TRANSFERS, transfer.request.index)) for transfer in self.under_way()]
        return min(events, default=(math.inf, False, ()))

    def next_send_s(self) -> float:
        resend_s = math.inf if self.fleet is None else self.fleet.next_send_s()
        return min(self.clients.next_send_s(), resend_s)

    def handle(self, number: int, replica: int, slot: int, now_s: float) -> None:
        pool = self.pools[number]
        num_outstanding = pool.num_outstanding(replica)
        ends_step = pool.end_event(replica, slot, now_s)
        if self.fleet is not None:
            if pool.num_outstanding(replica) < num_outstanding:
                self.fleet.ask_again(now_s)
            self.fleet.stop_if_drained(self.number_of(pool, replica), now_s)
        while self.next_send_s() <= now_s:
            self.deliver(self.next_send_s())
        pool.go_on(replica, slot, now_s, ends_step)

    def all_steps(self) -> list[Step]:
        return [replace(step, replica=self.number_of(pool, step.replica)) for pool in self.pools for step in pool.steps]

    # Replicas, by number

    def number_of(self, pool: Any, replica: int) -> int:
        before = self.pools[: self.pools.index(pool)]
        return sum(int(each.settings.num_replicas) for each in before) + replica

    def is_up(self, number: int) -> bool:
        return self.fleet is None or self.fleet.replicas[number].phase == UP

    def fails_s(self, pool: Any, replica: int) -> float:
        return math.inf if self.fleet is None else self.fleet.replicas[self.number_of(pool, replica)].fault[0]

    def was_lost(self, request: Request) -> bool:
        return self.fleet is not None and request.index in self.fleet.num_retries

    def num_outstanding(self, number: int) -> int:
        pool, replica = self.replicas[number]
        return int(pool.num_outstanding(replica))

    def num_waiting(self, number: int) -> int:
        pool, replica = self.replicas[number]
        return int(pool.num_waiting(replica))

    def used_blocks(self, number: int) -> int:
        pool, replica = self.replicas[number]
        return int(pool.used_blocks(replica))

    def cached_tokens(self, number: int, request: Request) -> int:
        pool, replica = self.replicas[number]
        return int(pool.cached_tokens(replica, request))

    def has_adapter(self, number: int, adapter: int) -> bool:
        pool, replica = self.replicas[number]
        return bool(pool.has_adapter(replica, adapter))

    def is_empty(self, number: int) -> bool:
        pool, replica = self.replicas[number]
        return bool(pool.is_empty(replica))

    def wake_rank(self, pool: EnginePool, rank: Rank, now_s: float) -> None:
        pool.wake(pool.ranks.index(rank) // int(pool.settings.ranks_per_replica), now_s)

    # Requests

    def deliver(self, now_s: float) -> None:
        """Send the next request: the first one at the router, a lost one, or a new one."""
        fleet, is_at_router = self.fleet, False
        if fleet is not None and fleet.at_router and fleet.asks_since_s is not None:
            request, is_at_router = fleet.at_router[0], True
        elif fleet is not None and fleet.lost and fleet.lost[0][0] <= now_s:
            request = fleet.lost.pop(0)[1]
        else:
            request = self.clients.send(now_s)
        if fleet is None:
            self.send(request, self.route(request, now_s), now_s)
            return
        number = -1
        if is_at_router or not fleet.at_router:
            number = self.route(request, now_s)
            if number < 0:
                fleet.asks_since_s = None
        if number < 0 and not is_at_router:
            fleet.at_router.append(request)
        if number >= 0:
            if is_at_router:
                fleet.at_router.pop(0)
            self.send(request, number, now_s)

    def route(self, request: Request, now_s: float) -> int:
        if self.users_router is not None:
            return self.users_router(self, request, now_s)
        rules = self.handoff_rules
        if rules is not None and request.known_tokens <= rules.local_tokens:
            return self.router.route(request, rules.decode_router, self.decoders, decodes=True)
        return self.router.route(request, self.plans[0].settings.router, self.entries, decodes=False)

    def send(self, request: Request, number: int, now_s: float) -> None:
        if request.session >= 0:
            self.router.replica_of_session[request.session] = number
        pool, replica = self.replicas[number]
        request.arrival_s = now_s
        if self.was_lost(request):
            for each in self.pools:
                each.forget_own(request)
        samples_later = pool.role == PREFILL and bool(self.handoff_rules.decode_samples_first)
        if pool.role == PREFILL and (request.remaining_outputs > 1 or samples_later):
            self.transfers[request.index] = KvTransfer(request, request.output_tokens, pool, pool.ranks[0])
            request.output_tokens = request.num_outputs + 1
        pool.deliver_to(replica, request, now_s)

    # Handoffs

    def hand_off(self, transfer: KvTransfer, now_s: float) -> None:
        """The prefill of a request, which has given its token, has ended."""
        rules, request = self.handoff_rules, transfer.request
        transfer.handed_s = now_s
        transfer.prompt_tokens = request.computed_tokens
        transfer.held = swap_held(request)
        request.output_tokens = transfer.output_tokens
        request.is_decoding = False
        if request.num_outputs == 1 and (rules.decode_samples_first or rules.decode_streams_first):
            request.first_token_s = math.nan
        if rules.decode_samples_first:
            request.num_outputs -= 1
        number = self.router.choose(request, rules.decode_router, self.decoders, decodes=True)
        if number < 0:
            assert self.fleet is not None
            replica = transfer.prefill_pool.ranks.index(transfer.prefill_rank)
            replica //= int(transfer.prefill_pool.settings.ranks_per_replica)
            transfer.prefill_pool.let_go(transfer)
            self.lose_handoff(transfer, self.number_of(transfer.prefill_pool, replica), now_s)
            return
        pool, replica = self.replicas[number]
        rank = min(pool.ranks_of(replica), key=pool.outstanding_at)
        transfer.decode_pool, transfer.decode_rank = pool, rank
        request.segments = pool.chains[request.index]
        request.queue_key, request.key_order = pool.queue_key(rank, request, 0), pool.settings.queue_order
        rank.handed.append(transfer)
        pool.wake(replica, now_s)

    def handed(self) -> list[KvTransfer]:
        """Handoffs that are not over, by request."""
        handed = [t for t in self.transfers.values() if t.decode_rank is not None and t in self.queues_of(t)]
        return sorted(handed, key=lambda transfer: transfer.request.index)

    @staticmethod
    def queues_of(transfer: KvTransfer) -> list[KvTransfer]:
        rank = transfer.decode_rank
        return [] if rank is None else [*rank.handed, *rank.pulled, *rank.ready]

    def under_way(self) -> list[KvTransfer]:
        """Those whose KV is being read."""
        return [t for t in self.transfers.values() if t.decode_rank is not None and t in t.decode_rank.pulled]

    def ranks_that_keep_kv(self) -> list[Rank]:
        """Of requests that were handed off and have not been read."""
        return [transfer.prefill_rank for transfer in self.handed() if transfer.held]

    def link_free_s(self, rank: Rank) -> float:
        """When the interfaces of `rank` are done with all that they were given."""
        ends = [t.link_end_s for t in self.under_way() if rank in (t.prefill_rank, t.decode_rank)]
        return max([self.link_busy_s.get(id(rank), 0.0), *ends])

    def begin_transfer(self, transfer: KvTransfer, now_s: float) -> None:
        """The interfaces of both ranks send one request's KV after the other's."""
        rules, request, reader = self.handoff_rules, transfer.request, transfer.decode_pool
        assert reader is not None
        assert transfer.decode_rank is not None
        cached = request.shared_blocks * int(reader.settings.block_size)
        num_bytes = rules.bytes_per_token * (transfer.prompt_tokens - cached) + rules.bytes_per_request
        slower = min(transfer.prefill_pool.link_bytes_per_s, reader.link_bytes_per_s)
        whole_s = num_bytes * (reader.kv_copies / slower)
        may_start_s = now_s if rules.tail_fraction == 1.0 else request.scheduled_s
        ranks = (transfer.prefill_rank, transfer.decode_rank)
        transfer.start_s = max(may_start_s, *(self.link_free_s(rank) for rank in ranks))
        transfer.link_end_s = transfer.start_s + whole_s
        transfer.end_s = max(transfer.link_end_s, now_s + whole_s * rules.tail_fraction) + rules.latency_s

    def end_transfer(self, transfer: KvTransfer, now_s: float) -> None:
        pool, rank = transfer.decode_pool, transfer.decode_rank
        assert pool is not None
        assert rank is not None
        transfer.prefill_pool.let_go(transfer)
        rank.pulled.remove(transfer)
        rank.ready.append(transfer)
        self.occupy_links(transfer, transfer.link_end_s)
        self.wake_rank(transfer.prefill_pool, transfer.prefill_rank, now_s)
        self.wake_rank(pool, rank, now_s)
        if self.fleet is not None:
            sender = transfer.prefill_pool
            replica = sender.ranks.index(transfer.prefill_rank) // int(sender.settings.ranks_per_replica)
            self.fleet.stop_if_drained(self.number_of(sender, replica), now_s)

    def occupy_links(self, transfer: KvTransfer, until_s: float) -> None:
        for rank in (transfer.prefill_rank, transfer.decode_rank):
            self.link_busy_s[id(rank)] = max(self.link_busy_s.get(id(rank), 0.0), until_s)

    # Failures

    def empty(self, number: int, now_s: float) -> None:
        """Leave a replica, which has failed or is turned off, as it starts; what it had is sent again."""
        pool, replica = self.replicas[number]
        assert self.fleet is not None
        if isinstance(pool, PerRequestPool):
            for request in pool.empty(replica):
                self.fleet.lose(request, number, now_s)
            return
        for rank in pool.ranks_of(replica):
            for request in [*rank.running, *rank.waiting]:
                self.restore(request)
                self.fleet.lose(request, number, now_s)
            self.lose_handoffs(rank, number, now_s)
            pool.empty_rank(rank)
        pool.empty_slots(replica)

    def restore(self, request: Request) -> None:
        """A lost request asks for all of its outputs again."""
        transfer = self.transfers.pop(request.index, None)
        if transfer is not None:
            request.output_tokens = transfer.output_tokens

    def lose_handoffs(self, rank: Rank, number: int, now_s: float) -> None:
        """Requests whose KV is not where they decode yet go with either side; those whose KV is, with that one."""
        lost = [t for t in self.handed() if t.decode_rank is rank or (t.prefill_rank is rank and t.held)]
        for transfer in lost:
            pool = transfer.decode_pool
            assert pool is not None
            if transfer in self.under_way() and transfer.start_s < now_s:
                self.occupy_links(transfer, min(transfer.link_end_s, now_s))
            pool.leave(transfer)
            if transfer.held and transfer.prefill_rank is not rank:
                transfer.prefill_pool.let_go(transfer)
            self.lose_handoff(transfer, number, now_s)
        if lost:  # there is room elsewhere
            assert self.fleet is not None
            self.fleet.ask_again(now_s)
            for other, (pool, replica) in enumerate(self.replicas):
                if other != number and self.fleet.replicas[other].serves:
                    pool.wake(replica, now_s)

    def lose_handoff(self, transfer: KvTransfer, number: int, now_s: float) -> None:
        """The client keeps the output of the prefill if it has it: at once, or only with the first decode step."""
        rules, request = self.handoff_rules, transfer.request
        assert self.fleet is not None
        if rules.decode_streams_first and not rules.decode_samples_first:
            request.num_outputs -= 1
        self.restore(request)
        self.fleet.lose(request, number, now_s)
