"""Memory below the device's, which keeps KV blocks that its pool has no room for: the host's, a disk's, a store's.

What a request has computed is written to every tier when it ends or is preempted, beside the device's work; each tier
then drops its least recently written blocks, those from the end of a path first. A request that finds more of its
prompt in a tier than in the pool above loads the difference, at the tier's bandwidth, in the step that admits it.

vLLM's native offloading and LMCache write through like this, and SGLang's HiCache under `write_through`. With a tier a
preempted request is swapped out and in again; without one it is computed again.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.serving.state.records import NONE, Cache, KernelSettings, Requests


@inner
def kept_at(cache: Cache, tier: int, rank: int, node: int) -> int:
    """Return where a tier keeps the state of a segment for a rank: ranks that share a pool share it, and where all of
    them do those of other kinds of replicas may, too.
    """
    num_ranks, ranks_per_pool = cache.ranks.size, cache.tiers[tier].ranks_per_pool
    if ranks_per_pool >= num_ranks:
        return node
    if node < cache.num_shared:
        return node * num_ranks + rank - rank % ranks_per_pool
    return (num_ranks - 1) * cache.num_shared + node


@inner
def drop(cache: Cache, row: int, pool: int, entry: int) -> None:
    """Take a segment off a pool's list, with its blocks."""
    remove(cache.kept[row], cache.pools[row, pool], entry)
    cache.pools[row, pool].num_blocks -= cache.kept[row, entry].num_blocks
    cache.kept[row, entry].num_blocks = 0


@inner
def keep(cache: Cache, row: int, pool: int, entry: int, num_blocks: int) -> None:
    """Put a segment with `num_blocks` blocks at the end of a pool's list."""
    append(cache.kept[row], cache.pools[row, pool], entry)
    cache.kept[row, entry].num_blocks = num_blocks
    cache.pools[row, pool].num_blocks += num_blocks


@inner
def write_through(settings: KernelSettings, cache: Cache, rank: int, i: int, computed_tokens: int) -> None:
    """Keep the full blocks among the first `computed_tokens` of request `i` in every tier."""
    for tier in range(cache.tiers.size):
        row, pool = cache.tiers[tier].row, rank // cache.tiers[tier].ranks_per_pool
        node = cache.requests[i].leaf
        end_block = min(computed_tokens // settings.block_size, cache.nodes[node].end_block)
        while node != NONE:
            num_blocks = min(end_block, cache.nodes[node].end_block) - cache.nodes[node].first_block
            if num_blocks > 0:
                entry = kept_at(cache, tier, rank, node)
                if cache.kept[row, entry].num_blocks > 0:
                    num_blocks = max(num_blocks, cache.kept[row, entry].num_blocks)
                    drop(cache, row, pool, entry)
                keep(cache, row, pool, entry, num_blocks)
            node = cache.nodes[node].parent
        surplus = cache.pools[row, pool].num_blocks - cache.tiers[tier].capacity_blocks
        while surplus > 0:
            entry = cache.pools[row, pool].first
            num_blocks = cache.kept[row, entry].num_blocks
            if num_blocks <= surplus:
                drop(cache, row, pool, entry)
            else:
                cache.kept[row, entry].num_blocks -= surplus
                cache.pools[row, pool].num_blocks -= surplus
            surplus -= num_blocks


@inner
def find_below(cache: Cache, rank: int, i: int, hit_blocks: int, most_blocks: int) -> tuple[int, float]:
    """Look for more of request `i`'s path than the `hit_blocks` that the pool has; returns the blocks found in all, and
    the seconds to load them. Faster tiers are asked first.
    """
    load_s = 0.0
    for tier in range(cache.tiers.size):
        found = hit_blocks
        node = cache.requests[i].leaf
        while node != NONE and cache.nodes[node].end_block > hit_blocks:
            num_blocks = cache.kept[cache.tiers[tier].row, kept_at(cache, tier, rank, node)].num_blocks
            if num_blocks > 0 and cache.nodes[node].first_block < most_blocks:
                found = min(cache.nodes[node].first_block + num_blocks, most_blocks)
                break
            node = cache.nodes[node].parent
        if found > hit_blocks:
            load_s += (found - hit_blocks) * cache.tiers[tier].block_s
            if cache.requests[i].cached_tokens == NONE:
                cache.loaded[tier, i] = found - hit_blocks
            hit_blocks = found
        elif cache.requests[i].cached_tokens == NONE:
            cache.loaded[tier, i] = 0
    return hit_blocks, load_s


@inner
def leave_below(settings: KernelSettings, cache: Cache, requests: Requests, i: int) -> int:
    """Load nothing from lower tiers for request `i`, which was looked up; returns the blocks that it would have
    loaded."""
    num_blocks = cache.requests[i].loading_blocks
    cache.requests[i].loading_blocks = 0
    cache.requests[i].load_s = 0.0
    requests[i].computed_tokens -= num_blocks * settings.block_size
    if cache.requests[i].cached_tokens == NONE:
        for tier in range(cache.tiers.size):
            cache.loaded[tier, i] = 0
    return num_blocks
