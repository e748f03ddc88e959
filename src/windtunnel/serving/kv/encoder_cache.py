"""The encoder cache of vLLM V1: embeddings of images that prompts still need, then of as many others as there is room.

`EncoderCacheManager` (vllm/v1/core/encoder_cache_manager.py) and `Scheduler._try_schedule_encoder_inputs`
(vllm/v1/core/sched/scheduler.py, 0.11 to 0.24): a chunk of a prompt ends before an image whose embeddings are not
cached if the step's budget of embeddings is spent or those in use leave no room.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.serving.state.records import NONE, EncoderCache, Requests
from windtunnel.serving.state.tables import PoolTables


@inner
def begin_encoding(pool: PoolTables, rank: int) -> None:
    """Give the batch that is being formed on a rank its budget of embeddings."""
    settings = pool.settings
    pool.encoder.ranks[settings.first_rank + rank].left_tokens = settings.encoder_budget_tokens


@inner
def encodable(pool: PoolTables, requests: Requests, rank: int, i: int, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` of prompt `i` a step may compute; makes room for their images.

    Cached images among them are in use from now on. What is not cached takes its place in `encode`.
    """
    if pool.settings.encoder_cache_tokens == 0:
        return num_tokens
    cache, here = pool.encoder, pool.settings.first_rank + rank
    ranks, entries, begin = cache.ranks, cache.entries, requests[i].computed_tokens
    ranks[here].num_calls += 1
    scheduled_tokens = 0
    for item in range(cache.items.shape[1]):
        first = cache.items[i, item, 2]
        if cache.items[i, item, 0] == NONE or first >= begin + num_tokens:
            break
        size = cache.tokens[cache.items[i, item, 0]]
        entry = entry_of(cache, here, i, item)
        if first + size <= begin or entries[entry].call == ranks[here].num_calls:
            continue
        if entries[entry].is_cached:
            use(cache, here, i, item)
            continue
        if size + scheduled_tokens > ranks[here].left_tokens or size + scheduled_tokens > ranks[here].freeable_tokens:
            return max(first - begin, 0)
        while size + scheduled_tokens > ranks[here].free_tokens:
            oldest = ranks[here].first
            remove(entries, ranks[here], oldest)
            entries[oldest].is_cached = 0
            ranks[here].free_tokens += entries[oldest].num_tokens
        scheduled_tokens += size
        entries[entry].call = ranks[here].num_calls
    return num_tokens


@inner
def encode(pool: PoolTables, rank: int, i: int, begin: int, num_tokens: int) -> None:
    """Encode what `num_tokens` of prompt `i` from `begin` on need and is not cached, in the step that is being
    formed."""
    if pool.settings.encoder_cache_tokens == 0 or num_tokens == 0:
        return
    cache, here = pool.encoder, pool.settings.first_rank + rank
    for item in range(cache.items.shape[1]):
        kind, first = cache.items[i, item, 0], cache.items[i, item, 2]
        if kind == NONE or first >= begin + num_tokens:
            break
        if first + cache.tokens[kind] <= begin:
            continue
        entry = entry_of(cache, here, i, item)
        if not cache.entries[entry].is_cached:
            cache.entries[entry].is_cached = 1
            cache.entries[entry].num_users = 0
            cache.entries[entry].num_tokens = cache.tokens[kind]
            cache.ranks[here].free_tokens -= cache.tokens[kind]
            cache.ranks[here].left_tokens -= cache.tokens[kind]
            cache.counts[here, kind] += 1
            append(cache.entries, cache.ranks[here], entry)
        use(cache, here, i, item)


@inner
def entry_of(cache: EncoderCache, here: int, i: int, item: int) -> int:
    """Return the entry of an image of request `i` on a rank of all pools'."""
    return here * (cache.entries.size // cache.ranks.size) + cache.items[i, item, 1]


@inner
def use(cache: EncoderCache, here: int, i: int, item: int) -> None:
    """Let request `i` use an image that is cached; it counts once, however often its prompt has the image."""
    entry, same = entry_of(cache, here, i, item), cache.items[i, item, 3]
    if cache.used[i, same]:
        return
    cache.used[i, same] = 1
    if cache.entries[entry].num_users == 0:
        remove(cache.entries, cache.ranks[here], entry)
        cache.ranks[here].freeable_tokens -= cache.entries[entry].num_tokens
    cache.entries[entry].num_users += 1


@inner
def release_images(pool: PoolTables, rank: int, i: int, computed_tokens: int) -> None:
    """End the use of what lies within the first `computed_tokens` of prompt `i`: it stays cached while there is room.

    As in the engine, an image that a prompt has again further on is released with its first place.
    """
    if pool.settings.encoder_cache_tokens == 0:
        return
    cache, here = pool.encoder, pool.settings.first_rank + rank
    for item in range(cache.items.shape[1]):
        kind, same = cache.items[i, item, 0], cache.items[i, item, 3]
        if kind == NONE or cache.items[i, item, 2] + cache.tokens[kind] > computed_tokens:
            break
        if cache.used[i, same]:
            cache.used[i, same] = 0
            entry = entry_of(cache, here, i, item)
            cache.entries[entry].num_users -= 1
            if cache.entries[entry].num_users == 0:
                append(cache.entries, cache.ranks[here], entry)
                cache.ranks[here].freeable_tokens += cache.entries[entry].num_tokens
