"""Pools of replicas, each with its own device, parallelism and engine, joined by requests that prefill in one and
decode in another.

A request that will be handed off is, where it prefills, a request for a single token. Its blocks stay taken there
until the decode side has read them; there it waits, in the order of arrival, for blocks to read into, which an engine
gives when it forms a batch, after those of the requests that it runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from windtunnel.compiled.jit import inlined
from windtunnel.compiled.records import F8, I8, Records, new_table
from windtunnel.serving.codes import BOTH, DECODE, PREFILL, ROUND_ROBIN
from windtunnel.serving.state.adapters import AdapterPlan, grown
from windtunnel.serving.state.records import (
    NONE,
    Cache,
    Event,
    Floats,
    Ints,
    KernelSettings,
    Rank,
    Slot,
    Speculation,
    StepCost,
    Table,
    new_lists,
    new_ranks,
    new_slots,
)

NO_SPECULATION = Speculation(1, 1.0)
"""A decode step that verifies one token and gives one."""


class PoolPlan(NamedTuple):
    """One pool, as a run is started with it."""

    settings: KernelSettings  # `first_*` are filled in by `new_pools`
    cost: StepCost
    speculation: Speculation | None = None  # None where a decode step gives one token
    role: int = BOTH
    link_bytes_per_s: float = np.inf  # of the network interfaces of one rank, in one direction
    kv_copies: float = 1.0  # of a request's KV on the devices of one rank, each of which is sent
    adapters: AdapterPlan | None = None  # None where no request has a LoRA adapter


class HandoffRules(NamedTuple):
    """How requests go from pool to pool. Scalars."""

    decode_router: int = ROUND_ROBIN
    local_tokens: int = 0  # prompts up to so many prefill where they decode
    decode_samples_first: int = 0  # 1: the decode side computes the last prompt token again and so the first output
    decode_streams_first: int = 0  # 1: the client has the first output when the request enters a batch there
    bytes_per_token: float = 0.0  # of KV cache, all ranks of tensor and pipeline parallelism together
    bytes_per_request: float = 0.0  # of state whose size is fixed
    latency_s: float = 0.0
    tail_fraction: float = 1.0  # share of the KV that is sent after the prefill: all, or the last layer's


class PoolRecord(KernelSettings):
    """The settings of a pool, and where it lies among all pools' replicas, ranks and slots."""

    end_replica: int  # ends of the pool's share of the arrays of all pools
    end_rank: int
    first_slot: int
    end_slot: int
    first_entry: int  # of the pool's prefix caches, where there are any
    end_entry: int
    first_tier: int  # of the tiers below them
    end_tier: int
    load_overlaps: int  # as `Cache.load_overlaps`
    hands_off: int  # 1: requests leave after their prefill
    link_bytes_per_s: float  # of the network interfaces of one rank
    kv_copies: float  # of a request's KV on its devices
    num_queries: int  # as `Speculation`; 1 where a decode step gives one token
    tokens_per_step: float


class KvTransfer(Protocol):
    """One record a request of a run with pools."""

    prefill_rank: I8  # of all pools' ranks
    decode_rank: I8  # the same rank where nothing is handed off
    handed_s: F8  # end of the prefill
    transfer_start_s: F8
    transfer_end_s: F8
    link_end_s: F8  # when the interfaces of both ranks have sent it
    later_output_tokens: I8  # while it prefills elsewhere, where it is a request for one token
    stage: I8  # of its handoff: `NOT_HANDED`, `WAITS`, `IS_READ` or `IS_READY`
    held_blocks: I8  # of the prefill rank, until its KV has been read
    held_window_blocks: I8  # of the windows' own pool there
    taken_blocks: I8  # of the decode rank, from when it is read until it runs there
    taken_window_blocks: I8
    cached_tokens: I8  # of its prompt, found where it was first admitted; filled in when the run has ended


NOT_HANDED, WAITS, IS_READ, IS_READY = range(4)
"""Stages of a handoff: not under way; the KV waits on the prefill side for blocks to be read into; it is being read; it
has come, and the request has not joined a batch yet."""


class Handoff(Protocol):
    """One record a rank of a run with pools."""

    num_pulled: I8  # requests that hold blocks here and do not run yet
    num_held: I8  # requests handed off whose KV is still here
    link_free_s: F8  # when the rank's interfaces have sent and received all that they were given
    link_busy_s: F8  # until when they were busy with transfers that have ended or that a failure has cut short


class RequestList(Protocol):
    """The ends of a list of requests, which are linked by their `before` and `after`."""

    first: I8
    last: I8


class Routing(HandoffRules):
    """How the requests of a run with pools are routed."""

    router: int
    num_slot_events: int  # events of slots in the event queue; those of wake-ups follow


class Pools(NamedTuple):
    """What a run with several pools needs beside requests, events and clock; the arrays of all pools end to end."""

    pools: Records[PoolRecord]  # [pool]
    cost: Any  # `StepCost` whose every field has a first axis of pools
    ranks: Records[Rank]
    slots: Records[Slot]
    lists: Ints
    stages: Floats
    handoffs: Records[Handoff]  # [rank]
    waiting: Records[RequestList]  # [rank] requests that wait for blocks to read their KV into
    arrived: Records[RequestList]  # [rank] those whose KV has come
    transfers: Records[KvTransfer]  # [request]
    routing: Records[Routing]  # [1]
    pool_of_event: Ints  # [event] of every slot, then of every replica's wake-up
    pool_of_replica: Ints
    pool_of_rank: Ints
    entries: Ints  # replicas that a request may start at
    decoders: Ints  # replicas that a request may be handed to


def new_pool_records(plans: Sequence[PoolPlan]) -> Table:
    """Make the records of pools, end to end in the order of `plans`."""
    pools = new_table(PoolRecord, len(plans))
    hands_off = any(plan.role == PREFILL for plan in plans)
    ends = np.zeros(4, np.int64)
    for pool, plan in zip(pools, plans, strict=True):
        num_replicas, num_stages = plan.settings.num_replicas, plan.settings.num_stages
        num_ranks = num_replicas * plan.settings.ranks_per_replica
        for name, value in plan.settings._asdict().items():
            pool[name] = value
        pool.first_replica, pool.first_rank, pool.first_slot, pool.first_event = ends
        ends += (num_replicas, num_ranks, num_ranks * num_stages, num_replicas * num_stages)
        pool.end_replica, pool.end_rank, pool.end_slot, _ = ends
        pool.heeds_all_events, pool.hands_off = hands_off, plan.role == PREFILL
        pool.link_bytes_per_s, pool.kv_copies = plan.link_bytes_per_s, plan.kv_copies
        pool.num_queries, pool.tokens_per_step = plan.speculation or NO_SPECULATION
    return pools


def new_pools(plans: Sequence[PoolPlan], handoff_rules: HandoffRules, num_requests: int) -> Pools:
    """Make idle pools, end to end in the order of `plans`.

    The router, its seed and the client's behaviour are those of the first plan's settings.
    """
    pools = new_pool_records(plans)
    hands_off, num_ranks = bool(pools.hands_off.any()), pools.end_rank[-1]
    unknown = dict.fromkeys(("handed_s", "transfer_start_s", "transfer_end_s"), np.nan)
    routing = new_table(Routing, 1, **handoff_rules._asdict())
    routing.router = plans[0].settings.router
    routing.num_slot_events = (pools.num_replicas * pools.num_stages).sum()
    roles = np.array([plan.role for plan in plans])
    of_replica = np.repeat(np.arange(len(plans)), [plan.settings.num_replicas for plan in plans])
    decoding = DECODE if hands_off and (roles == DECODE).any() else BOTH
    return Pools(
        pools=pools,
        cost=stacked([plan.cost for plan in plans]),
        ranks=np.concatenate([new_ranks(plan.settings) for plan in plans]).view(np.recarray),
        slots=np.concatenate([new_slots(plan.settings) for plan in plans]).view(np.recarray),
        lists=joined_lists([new_lists(plan.settings) for plan in plans]),
        stages=np.zeros((pools.end_replica[-1], max(plan.settings.num_stages for plan in plans))),
        handoffs=new_table(Handoff, num_ranks),
        waiting=new_table(RequestList, num_ranks, first=NONE, last=NONE),
        arrived=new_table(RequestList, num_ranks, first=NONE, last=NONE),
        transfers=new_table(KvTransfer, num_requests, **unknown),
        routing=routing,
        pool_of_event=np.concatenate(
            [np.repeat(np.arange(len(plans)), pools.num_replicas * pools.num_stages), of_replica]
        ),
        pool_of_replica=of_replica,
        pool_of_rank=np.repeat(np.arange(len(plans)), pools.end_rank - pools.first_rank),
        entries=np.flatnonzero(roles[of_replica] != DECODE),
        decoders=np.flatnonzero(roles[of_replica] == decoding),
    )


def joined_caches(pools: Pools, caches: Sequence[Cache]) -> Cache:
    """Join the prefix caches of all pools, as `cache_of` takes them apart; `pools` notes the share of each."""
    ends = np.cumsum([(0, 0), *((cache.entries.size, cache.tiers.size) for cache in caches)], axis=0)
    pools.pools["first_entry"], pools.pools["first_tier"] = ends[:-1].T
    pools.pools["end_entry"], pools.pools["end_tier"] = ends[1:].T
    pools.pools["load_overlaps"] = [cache.load_overlaps for cache in caches]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(cache, name) for cache in caches]).view(np.recarray)
        for name in ("nodes", "entries", "requests", "ranks", "tiers")
    }
    _give_rows(joined["tiers"])
    return caches[0]._replace(
        load_s=np.concatenate([cache.load_s for cache in caches]),
        kept=_stacked_rows([cache.kept for cache in caches]),
        pools=_stacked_rows([cache.pools for cache in caches]),
        loaded=np.concatenate([cache.loaded for cache in caches]),
        **joined,
    )


def _give_rows(tiers: Table) -> None:
    """Number what the tiers of all pools keep; tiers of one store keep it together, in the row of the first."""
    tiers["row"] = np.arange(tiers.size)
    for store in np.unique(tiers["store"][tiers["store"] > 0]):
        same = np.flatnonzero(tiers["store"] == store)
        tiers["row"][same] = same[0]


def _stacked_rows(tables: Sequence[Table]) -> Table:
    """Stack the rows of all tables, each as long as the longest."""
    width = max(table.shape[1] for table in tables)
    found = np.zeros((sum(table.shape[0] for table in tables), width), tables[0].dtype).view(np.recarray)
    first = 0
    for table in tables:
        found[first : first + table.shape[0], : table.shape[1]] = table
        first += table.shape[0]
    return found


@inlined
def cache_of(cache: Cache, pools: Pools, pool: int) -> Cache:
    """Return the prefix caches of one pool's ranks."""
    record = pools.pools[pool]
    num_nodes, num_requests = cache.nodes.size // pools.pools.size, cache.requests.size // pools.pools.size
    return Cache(
        cache.num_shared,
        cache.nodes[pool * num_nodes : (pool + 1) * num_nodes],
        cache.entries[record.first_entry : record.end_entry],
        cache.requests[pool * num_requests : (pool + 1) * num_requests],
        cache.ranks[record.first_rank : record.end_rank],
        record.load_overlaps,
        cache.load_s[record.first_slot : record.end_slot],
        cache.tiers[record.first_tier : record.end_tier],
        cache.kept,
        cache.pools,
        cache.loaded[record.first_tier : record.end_tier],
    )


def new_pool_events(plans: Sequence[PoolPlan]) -> Table:
    """Make an empty queue of `Event` records: slots, wake-ups, and the transfers that may be under way."""
    slots = sum(plan.settings.num_replicas * (plan.settings.num_stages + 1) for plan in plans)
    pulled = sum(
        plan.settings.num_replicas * plan.settings.ranks_per_replica * plan.settings.max_num_seqs for plan in plans
    )
    return new_table(Event, slots + pulled + 1)


def joined_lists(lists: Sequence[Ints]) -> Ints:
    """Join lists `[row, list, position]` of all pools along their rows, each as long as the longest."""
    width = max(each.shape[2] for each in lists)
    return np.concatenate([np.pad(each, ((0, 0), (0, 0), (0, width - each.shape[2]))) for each in lists])


def stacked(costs: Sequence[StepCost]) -> Any:
    """Stack every field along a first axis of pools; grids that are shorter than others go on in a straight line."""
    longest = {name: max(getattr(cost, name).size for cost in costs) for name in _NODES}
    costs = [_extended(cost, longest) for cost in costs]
    parts: dict[str, Any] = {}
    for name in StepCost._fields:
        arrays = [np.asarray(getattr(cost, name)) for cost in costs]
        largest = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
        parts[name] = np.zeros((len(costs), *largest), arrays[0].dtype)
        for pool, array in enumerate(arrays):
            parts[name][pool, *(slice(size) for size in array.shape)] = array
    return StepCost(**parts)


_NODES = ("context_nodes", "chunk_nodes", "length_nodes")


def _extended(cost: StepCost, sizes: dict[str, int]) -> StepCost:
    """Bring the nodes of a cost's grids to `sizes`, values extrapolated as look-ups beyond the end would be."""
    mixed_s = cost.mixed_decode_attention_s if cost.mixed_decode_attention_s.size else cost.decode_attention_s
    decode = {"decode_attention_s": cost.decode_attention_s, "mixed_decode_attention_s": mixed_s}
    if cost.waiting_attention_s.size:
        decode["waiting_attention_s"] = cost.waiting_attention_s
    changed: dict[str, Any] = {
        **{name: grown(grid, cost.context_nodes, sizes["context_nodes"]) for name, grid in decode.items()},
        **{name: grown(getattr(cost, name), getattr(cost, name), size) for name, size in sizes.items()},
    }
    prefill_s = grown(cost.prefill_attention_s, cost.length_nodes, sizes["length_nodes"])
    return cost._replace(prefill_attention_s=grown(prefill_s.T, cost.chunk_nodes, sizes["chunk_nodes"]).T, **changed)


@inlined
def cost_of(pools: Pools, pool: int) -> StepCost:
    """Return the step costs of one pool."""
    cost = pools.cost
    return StepCost(
        cost.decode_token_s[pool],
        cost.mixed_token_s[pool],
        cost.sample_s[pool],
        cost.context_nodes[pool],
        cost.decode_attention_s[pool],
        cost.chunk_nodes[pool],
        cost.length_nodes[pool],
        cost.prefill_attention_s[pool],
        cost.host_step_s[pool],
        cost.host_request_s[pool],
        cost.host_overlaps[pool],
        cost.recorded_step_s[pool],
        cost.group_token_s[pool],
        cost.draft_s[pool],
        cost.launch_s[pool],
        cost.decode_launch_s[pool],
        cost.mixed_decode_attention_s[pool],
        cost.longest_share[pool],
        cost.waiting_attention_s[pool],
        cost.padded_requests[pool],
        cost.unhidden_step_s[pool],
        cost.repeated_share[pool],
        cost.encode_s[pool],
    )


@inlined
def ranks_of(pools: Pools, settings: PoolRecord) -> Records[Rank]:
    """Return a pool's share of the ranks."""
    return pools.ranks[settings.first_rank : settings.end_rank]


@inlined
def slots_of(pools: Pools, settings: PoolRecord) -> Records[Slot]:
    """Return a pool's share of the slots."""
    return pools.slots[settings.first_slot : settings.end_slot]
