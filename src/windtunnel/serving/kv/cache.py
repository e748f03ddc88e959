"""The prefix cache of a rank: which segments of which prompts lie in its KV pool, and in the tiers below it.

Prompts are root paths in a forest of token segments. A full block belongs to the segment that its last token lies in,
so what is cached of a path is a prefix of it, and one number says how much of a segment is: eviction takes blocks from
the end. A running request holds references to every segment of the part of its path that it shares; segments without
references lie on a list in the order of their release, deeper ones first where they were released together, and lose
blocks from its front. `free_blocks` counts those as free; they are given up only when blocks run short, at the latest
before the next look at the cache, so that a decode step takes blocks by count as it does without a cache.

vLLM V1 keeps blocks so (`BlockPool`, `KVCacheManager`, 0.8 to 0.24: freed in reverse order, reused from the front);
SGLang's radix cache is the same with blocks of one token (`RadixCache`, 0.5), TensorRT-LLM's block reuse with blocks
of 32 (`WindowBlockManager`, 1.0 to 1.3). Where two requests compute the same block side by side, the second gives its
copy up once it is complete, as in SGLang; vLLM keeps and caches both.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import Records
from windtunnel.serving.codes import USER, VLLM_V1
from windtunnel.serving.kv.tiers import find_below, leave_below, write_through
from windtunnel.serving.kv.windows import most_window_blocks, num_blocks_for, pool_blocks
from windtunnel.serving.state.records import NONE, Cache, KernelSettings, Rank, Requests


@inner
def entry_of(cache: Cache, rank: int, node: int) -> int:
    """Return where the state of a segment on a rank is: segments of one request only are on one rank only."""
    num_ranks = cache.ranks.size
    if node < cache.num_shared:
        return node * num_ranks + rank
    return (num_ranks - 1) * cache.num_shared + node


@inner
def evict(settings: KernelSettings, cache: Cache, ranks: Records[Rank], rank: int) -> None:
    """Give up cached blocks, the least recently used first, until no more are left than the free blocks have room for.

    Where groups of layers share the pool, each group's block of the same tokens was freed too and waits to be used
    anew among the others: so many free blocks are there for each that is cached.
    """
    entries = cache.entries
    room = ranks[rank].free_blocks // settings.num_groups
    while cache.ranks[rank].evictable_blocks > room:
        entry = cache.ranks[rank].first
        taken = min(entries[entry].num_blocks, cache.ranks[rank].evictable_blocks - room)
        if taken == entries[entry].num_blocks:
            forget(cache, rank, entry)
            entries[entry].num_blocks = 0
        else:
            entries[entry].num_blocks -= taken
            cache.ranks[rank].evictable_blocks -= taken


@inner
def remember(cache: Cache, rank: int, entry: int) -> None:
    """Put a segment that lost its last reference at the end of the list: its blocks may be given up."""
    append(cache.entries, cache.ranks[rank], entry)
    cache.ranks[rank].evictable_blocks += cache.entries[entry].num_blocks


@inner
def forget(cache: Cache, rank: int, entry: int) -> None:
    """Take a segment off the list: it is used, or all of its blocks are given up."""
    remove(cache.entries, cache.ranks[rank], entry)
    cache.ranks[rank].evictable_blocks -= cache.entries[entry].num_blocks


@inner
def refer(cache: Cache, rank: int, entry: int, change: int) -> None:
    """Change the number of running requests that use a segment."""
    cache.ranks[rank].repeated_blocks -= repeats(cache, entry)
    cache.entries[entry].references += change
    cache.ranks[rank].repeated_blocks += repeats(cache, entry)


@inner
def repeats(cache: Cache, entry: int) -> int:
    """Return a segment's blocks, once for every running request that uses it beside the first."""
    return max(cache.entries[entry].references - 1, 0) * cache.entries[entry].num_blocks


@inner
def look_up(settings: KernelSettings, cache: Cache, requests: Requests, ranks: Records[Rank], rank: int, i: int) -> int:
    """Find how much of what waiting request `i` must compute is cached; it starts from there.

    Whole blocks count, and one token at least is computed again, for its logits. Returns how many blocks count as free
    now and would not if the request took what was found here and in the tiers below.
    """
    evict(settings, cache, ranks, rank)
    most_blocks = (requests[i].target_tokens - 1) // settings.block_size
    node = cache.requests[i].leaf
    while node != NONE:
        num_blocks = cache.entries[entry_of(cache, rank, node)].num_blocks
        if num_blocks > 0 and cache.nodes[node].first_block < most_blocks:
            break
        node = cache.nodes[node].parent
    cache.requests[i].deepest = node
    hit_blocks = 0
    if node != NONE:
        hit_blocks = min(cache.nodes[node].first_block + num_blocks, most_blocks)
    cache.requests[i].shared_blocks = hit_blocks
    found, load_s = find_below(cache, rank, i, hit_blocks, most_blocks)
    cache.requests[i].load_s = load_s
    cache.requests[i].loading_blocks = found - hit_blocks
    requests[i].computed_tokens = found * settings.block_size
    unused = 0
    while node != NONE:
        entry = entry_of(cache, rank, node)
        if cache.entries[entry].references > 0:
            break
        unused += cache.entries[entry].num_blocks
        node = cache.nodes[node].parent
    if ranks[rank].num_running == 0 and unused > hit_blocks:
        # The last block is held twice while it is computed again: in a pool just large enough that would wait forever.
        num_tokens = requests[i].input_tokens + requests[i].output_tokens
        num_blocks = num_blocks_for(num_tokens, settings.block_size)
        whole = pool_blocks(settings, num_blocks, most_window_blocks(settings, num_tokens))
        if whole + settings.blocks_per_request + unused - hit_blocks > ranks[rank].free_blocks:
            leave_below(settings, cache, requests, i)
            cache.requests[i].deepest = NONE
            cache.requests[i].shared_blocks = 0
            requests[i].computed_tokens = 0
            return 0
    return unused + found - hit_blocks


@inner
def acquire(cache: Cache, requests: Requests, ranks: Records[Rank], rank: int, slot: int, i: int) -> None:
    """Take references to what `look_up` found for request `i`, which is admitted to the slot's batch, and blocks for
    what it loads.
    """
    ranks[rank].free_blocks -= cache.requests[i].loading_blocks
    cache.load_s[slot] += cache.requests[i].load_s
    node = cache.requests[i].deepest
    while node != NONE:
        entry = entry_of(cache, rank, node)
        if cache.entries[entry].num_blocks > 0:
            if cache.entries[entry].references == 0:
                forget(cache, rank, entry)
                ranks[rank].free_blocks -= cache.entries[entry].num_blocks
            refer(cache, rank, entry, 1)
        node = cache.nodes[node].parent
    if cache.requests[i].cached_tokens == NONE:
        cache.requests[i].cached_tokens = requests[i].computed_tokens


@inner
def caches_when_scheduled(settings: KernelSettings) -> bool:
    """Whether others find a block once it is scheduled (vLLM, users' policies) or computed (SGLang, TensorRT-LLM)."""
    return settings.scheduler == VLLM_V1 or settings.scheduler == USER


@inner
def share(
    settings: KernelSettings, cache: Cache, ranks: Records[Rank], rank: int, i: int, computed_tokens: int
) -> None:
    """Cache the full blocks among the first `computed_tokens` of running request `i`, those that are not yet.

    They are taken from what the request holds for itself; of what others have cached meanwhile its own copy is given
    up. A segment of which more is cached, and not in use, than the request has computed is left until it has caught up.
    """
    evict(settings, cache, ranks, rank)
    node = cache.requests[i].leaf
    deepest, shared_blocks = cache.requests[i].deepest, cache.requests[i].shared_blocks
    end_block = min(computed_tokens // settings.block_size, cache.nodes[node].end_block)
    if end_block <= shared_blocks:
        return
    reached = NONE
    added = 0
    while node != NONE:
        num_blocks = min(end_block, cache.nodes[node].end_block) - cache.nodes[node].first_block
        if num_blocks > 0:
            entry = entry_of(cache, rank, node)
            found = cache.entries[entry].num_blocks
            if node != deepest and cache.entries[entry].references == 0 and found > num_blocks:
                end_block = cache.nodes[node].first_block
            else:
                if node != deepest:
                    if cache.entries[entry].references == 0 and found > 0:
                        forget(cache, rank, entry)
                        found = 0
                    refer(cache, rank, entry, 1)
                    if reached == NONE:
                        reached = node
                if num_blocks > found:
                    cache.ranks[rank].repeated_blocks -= repeats(cache, entry)
                    cache.entries[entry].num_blocks = num_blocks
                    cache.ranks[rank].repeated_blocks += repeats(cache, entry)
                    added += num_blocks - found
        if node == deepest:
            break
        node = cache.nodes[node].parent
    if reached != NONE:
        cache.requests[i].deepest = reached
    cache.requests[i].shared_blocks = end_block
    ranks[rank].free_blocks += end_block - shared_blocks - added


@inner
def release(
    settings: KernelSettings, cache: Cache, ranks: Records[Rank], rank: int, i: int, held: int, computed_tokens: int
) -> None:
    """Stop request `i`, which holds `held` blocks in all: what it computed stays cached as long as there is
    room.
    """
    share(settings, cache, ranks, rank, i, computed_tokens)
    write_through(settings, cache, rank, i, computed_tokens)
    ranks[rank].free_blocks += held - cache.requests[i].shared_blocks
    node = cache.requests[i].deepest
    while node != NONE:
        entry = entry_of(cache, rank, node)
        if cache.entries[entry].references > 0:
            refer(cache, rank, entry, -1)
            if cache.entries[entry].references == 0:
                ranks[rank].free_blocks += cache.entries[entry].num_blocks
                remember(cache, rank, entry)
        node = cache.nodes[node].parent
    cache.requests[i].deepest = NONE
    cache.requests[i].shared_blocks = 0


@inner
def free(
    settings: KernelSettings, cache: Cache | None, ranks: Records[Rank], rank: int, i: int, held: int, computed: int
) -> None:
    """Free the `held` blocks of request `i`; what it computed stays in the prefix cache as long as there is room."""
    if cache is None:
        ranks[rank].free_blocks += held
    else:
        release(settings, cache, ranks, rank, i, held, computed)
