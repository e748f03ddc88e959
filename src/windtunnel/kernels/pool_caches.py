"""The prefix caches of several pools of replicas, and the tiers of memory below them, end to end in one `Cache`."""

from collections.abc import Sequence

import numpy as np

from windtunnel.kernels.jit import inlined
from windtunnel.kernels.state import Cache, Table


def joined_caches(pools: Table, caches: Sequence[Cache]) -> Cache:
    """The prefix caches of all pools, end to end as `cache_of` takes them apart.

    Args:
        pools: `pools.POOL` records; where each pool's share of the entries and tiers lies is written there.
        caches: of every pool, for the same requests and segments.
    """
    ends = np.cumsum([(0, 0), *((cache.entries.size, cache.tiers.size) for cache in caches)], axis=0)
    pools["first_entry"], pools["first_tier"] = ends[:-1].T
    pools["end_entry"], pools["end_tier"] = ends[1:].T
    pools["load_overlaps"] = [cache.load_overlaps for cache in caches]
    joined = {
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
    """The rows of all tables, each as long as the longest."""
    width = max(table.shape[1] for table in tables)
    found = np.zeros((sum(table.shape[0] for table in tables), width), tables[0].dtype).view(np.recarray)
    first = 0
    for table in tables:
        found[first : first + table.shape[0], : table.shape[1]] = table
        first += table.shape[0]
    return found


@inlined
def cache_of(cache, pools, pool):
    """The prefix caches of one pool's ranks."""
    record = pools.pools[pool]
    num_nodes, num_requests = cache.nodes.size // pools.pools.size, cache.requests.size // pools.pools.size
    return Cache(
        cache.num_shared,
        cache.nodes[pool * num_nodes : (pool + 1) * num_nodes],
        cache.entries[record.first_entry : record.end_entry],
        cache.requests[pool * num_requests : (pool + 1) * num_requests],
        cache.ranks[record.first_rank : record.end_rank],
        record.load_overlaps,
        cache.load_s[record.first_lane : record.end_lane],
        cache.tiers[record.first_tier : record.end_tier],
        cache.kept,
        cache.pools,
        cache.loaded[record.first_tier : record.end_tier],
    )
