"""Turn the shared beginnings of prompts into the prefix caches that the loop works on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from windtunnel.compiled.arrays import Ints
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError
from windtunnel.hardware import host_bytes_per_s
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.state import records as state
from windtunnel.units import format_bytes
from windtunnel.workload.generate.requests import RequestArrays

MAX_ENTRIES = 2**31 - 1
"""Segments times ranks that the caches can tell apart."""


def check_windows(setup: Setup, memory: MemoryPlan) -> None:
    """Raise InputError where layers form groups whose kept blocks the cache cannot count."""
    if memory.num_full_groups != 1:
        raise InputError(
            f"the prefix cache needs one group of layers that keep every token; {setup.model.name} has "
            f"{memory.num_full_groups} and {memory.num_window_groups} with a window",
            "set engine.window_kv to full, which counts windows like other layers, or engine.enable_prefix_caching to "
            "false",
        )


def kv_tiers(setup: Setup, memory: MemoryPlan, settings: state.KernelSettings) -> state.Table:
    """Return `Tier` records of the lower tiers; every device of a rank keeps and loads its own part of a block.
    InputError for a tier that holds no block, or an encoder, which has none."""
    engine, parallelism = setup.engine, setup.parallelism
    if engine.kv_tiers and setup.model.is_encoder:
        raise InputError(
            f"{setup.model.name} is an encoder, which keeps no KV blocks that a lower tier could hold",
            "leave engine.kv_tiers out",
        )
    block_bytes = memory.kv_bytes_per_token * memory.block_size
    rank_bytes = block_bytes * parallelism.tp * parallelism.pp
    tiers = new_table(state.Tier, len(engine.kv_tiers or ()))
    for row, tier in zip(tiers, engine.kv_tiers or (), strict=True):
        replicas = settings.num_replicas if tier.shared_by == "deployment" else 1
        ranks = settings.ranks_per_replica * replicas
        above_bytes = rank_bytes * memory.num_blocks * ranks
        capacity_bytes = tier.capacity_bytes or int((tier.capacity_ratio or 0.0) * above_bytes)
        if not rank_bytes or capacity_bytes < rank_bytes:
            raise InputError(
                f"the KV tier {tier.name!r} of {format_bytes(capacity_bytes)} holds no block: one takes "
                f"{format_bytes(rank_bytes)}",
                "raise its capacity, or leave it out where no layer's KV cache grows with the context",
            )
        row.capacity_blocks = capacity_bytes // rank_bytes
        row.block_s = block_bytes / (tier.bandwidth_bytes_per_s or host_bytes_per_s(setup.node))
        row.outlives = tier.shared_by == "deployment"
        row.ranks_per_pool = ranks
    return tiers


NO_TIERS = new_table(state.Tier, 0)


def prefix_cache(
    settings: state.KernelSettings, requests: RequestArrays, tiers: state.Table = NO_TIERS, load_overlaps: bool = False
) -> state.Cache:
    """Return empty caches for the prompts of `requests`, on every rank; without `prefixes` these share nothing.

    A request whose output no other prompt begins with gets a segment of its own: its blocks take room in the cache like
    any other, and it finds them again after a preemption. `tiers` are `Tier` records of memory below the pool.
    InputError for too many segments for the number of ranks.
    """
    prefixes = requests.prefixes
    num_requests = requests.arrival_s.size
    if prefixes is None:
        shared = np.zeros(0, np.int64), np.zeros(0, np.int64)
        request_node, leaf = np.full(num_requests, -1), np.full(num_requests, -1)
    else:
        shared = prefixes.node_parent, prefixes.node_tokens
        request_node, leaf = prefixes.request_node, prefixes.request_output_node.copy()
    num_shared = shared[0].size
    alone = np.flatnonzero(leaf < 0)
    leaf[alone] = num_shared + np.arange(alone.size)
    end_tokens = path_tokens(*shared)
    before = np.where(request_node[alone] >= 0, np.append(end_tokens, 0)[request_node[alone]], 0)
    nodes = new_table(state.Node, num_shared + alone.size)
    nodes.parent = np.concatenate([shared[0], request_node[alone]])
    nodes.first_block = np.concatenate([end_tokens - shared[1], before]) // settings.block_size
    all_tokens = requests.input_tokens[alone] + requests.output_tokens[alone]
    nodes.end_block = np.concatenate([end_tokens, all_tokens]) // settings.block_size
    num_ranks = settings.num_replicas * settings.ranks_per_replica
    if num_ranks * num_shared + alone.size > MAX_ENTRIES:
        raise InputError(
            f"{num_shared:,} shared prompt segments on {num_ranks:,} ranks are too many for the prefix caches",
            "use fewer replicas or requests, or set engine.enable_prefix_caching to false",
        )
    deepest_shared = np.where(leaf < num_shared, leaf, request_node)
    tiers = tiers.copy()
    tiers["row"] = np.arange(tiers.size)
    held = {"shared": deepest_shared, "leaf": leaf, "deepest": state.NONE, "cached_tokens": state.NONE}
    nobody = {"first": state.NONE, "last": state.NONE}
    entries = new_table(state.Entry, (num_ranks - 1) * num_shared + nodes.size)
    return state.Cache(
        num_shared=num_shared,
        nodes=nodes,
        entries=entries,
        requests=new_table(state.CachedRequest, leaf.size, **held),
        ranks=new_table(state.CacheRank, num_ranks, **nobody),
        load_overlaps=int(load_overlaps),
        load_s=np.zeros(num_ranks * settings.num_stages),
        tiers=tiers,
        kept=new_table(state.Kept, (tiers.size, entries.size)),
        pools=new_table(state.TierPool, (tiers.size, num_ranks), **nobody),
        loaded=np.zeros((tiers.size, leaf.size), np.int64),
    )


def path_tokens(node_parent: Ints, node_tokens: Ints) -> Ints:
    """Sum the tokens from the root to every segment, `[num_nodes]`, by pointer jumping in O(n log depth)."""
    tokens, above = node_tokens.astype(np.int64), node_parent.copy()
    while (above >= 0).any():
        has = above >= 0
        step = above[has]
        tokens[has] += tokens[step]
        above[has] = above[step]
    return tokens


def session_state(requests: RequestArrays) -> state.Sessions | None:
    """Return which request waits for which, as the loop takes it; None where none waits and no session is named."""
    if requests.previous is None and requests.session is None and requests.ready_s is None:
        return None
    size = requests.arrival_s.size
    nobody, time_s, turn = np.full(size, state.NONE), np.zeros(size + 1), np.zeros(size + 1, np.int64)
    previous = nobody if requests.previous is None else requests.previous
    think_s = np.zeros(size) if requests.think_s is None else requests.think_s
    session = nobody if requests.session is None else requests.session
    follows, following = previous >= 0, nobody.copy()
    following[previous[follows]] = np.flatnonzero(follows)
    least_think_s = float(think_s[follows].min(initial=np.inf))
    replica = np.full(max(int(session.max(initial=state.NONE)) + 1, 1), state.NONE)
    if requests.ready_s is not None:
        # Requests that reach the router later than they arrive are turns that are under way already; none has others.
        is_late = requests.ready_s > requests.arrival_s
        late = np.flatnonzero(is_late)
        late = late[np.argsort(requests.ready_s[late], kind="stable")]
        time_s[: late.size], turn[: late.size] = requests.ready_s[late], late
        previous = np.where(is_late, np.arange(size), state.NONE)
    return state.Sessions(previous, following, think_s, least_think_s, session, replica, time_s, turn)


@dataclass(frozen=True, eq=False)
class KvRetention:
    """Where a pool keeps KV blocks that no running request uses."""

    on_device: bool
    """Whether it has prefix caches."""
    tiers: state.Table = field(default_factory=lambda: NO_TIERS)
    """`Tier` records of memory below the device's."""
    load_overlaps: bool = False

    @property
    def anywhere(self) -> bool:
        return self.on_device or self.tiers.size > 0


def shares_prefixes(retention: Sequence[KvRetention], requests: RequestArrays) -> bool:
    """Whether prompts share beginnings, and any pool has prefix caches for them."""
    return requests.prefixes is not None and any(pool.on_device for pool in retention)


def caches_of(settings: state.KernelSettings, retention: KvRetention, requests: RequestArrays) -> state.Cache:
    """Return empty prefix caches of a pool; where it keeps nothing, caches of segments that no block fits into."""
    cache = prefix_cache(settings, requests, retention.tiers, retention.load_overlaps)
    if not retention.anywhere:
        cache.nodes["first_block"] = cache.nodes["end_block"] = 0
    return cache
