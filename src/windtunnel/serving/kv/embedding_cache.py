"""SGLang's cache of embeddings: those used last, up to a number of bytes, without a budget that ends a chunk.

`MultiModalStaticCache` (python/sglang/srt/mem_cache/multimodal_cache.py, 0.5) keeps embeddings in the order of their
last use, and drops the oldest until a new one fits; one that is larger than the cache drops all and is not kept.
`_get_chunked_prefill_embedding` (python/sglang/srt/managers/mm_utils.py) looks images up in the step that computes
their tokens:

- to 0.5.9 by the hashes of all images of a request together: a chunk before the end of its last image encodes them all
  unless that set is cached;
- from 0.5.10 (pull request 22038) each image by its own hash, and only those of which the chunk has tokens. All that a
  step lacks are encoded once, then kept in the order of the batch, as from pull request 24013 (July 2026) on.

The engine looks the images of a request up apart from its videos; here they are one set.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.serving.state.records import BATCH, BATCH_TOKENS, NONE, EncoderCache, Media, Requests
from windtunnel.serving.state.tables import PoolTables


@inner
def count_missing(pool: PoolTables, requests: Requests, media: Media, slot: int, here: int) -> None:
    """Count the images of each kind that a slot's batch has to encode on the rank `here` of all pools'."""
    cache = pool.encoder
    cache.ranks[here].num_calls += 2
    for stores in range(1 if pool.settings.embeddings_by_request else 2):
        for position in range(pool.slots[slot].batch_size):
            i = pool.lists[slot, BATCH, position]
            end = requests[i].computed_tokens
            begin = end - pool.lists[slot, BATCH_TOKENS, position]
            if pool.settings.embeddings_by_request:
                count_request(cache, media, here, i, begin)
            else:
                count_images(cache, media, here, i, begin, end, stores)


@inner
def count_images(cache: EncoderCache, media: Media, here: int, i: int, begin: int, end: int, stores: int) -> None:
    """Look the images of a chunk up, and count those that are not cached; once all were, keep these (`stores`).

    An entry's `call` is the rank's, if its image is missing in this step, and 1 more once it has been kept.
    """
    num_calls = cache.ranks[here].num_calls
    for item in range(media.items.shape[1]):
        kind, first = media.items[i, item, 0], media.items[i, item, 2]
        if kind == NONE or first >= end:
            break
        if first + cache.tokens[kind] <= begin:
            continue
        entry = entry_at(cache, here, media.items[i, item, 1])
        if stores:
            if cache.entries[entry].call == num_calls:
                cache.entries[entry].call = num_calls + 1
                keep(cache, here, entry, cache.tokens[kind])
        elif cache.entries[entry].is_cached:
            remove(cache.entries, cache.ranks[here], entry)
            append(cache.entries, cache.ranks[here], entry)
        elif cache.entries[entry].call != num_calls:
            cache.entries[entry].call = num_calls
            media.counts[kind] += 1


@inner
def count_request(cache: EncoderCache, media: Media, here: int, i: int, begin: int) -> None:
    """Look the images of a request up together, unless all are computed; count and keep them if they are not cached."""
    num_tokens, last_end = 0, 0
    for item in range(media.items.shape[1]):
        kind = media.items[i, item, 0]
        if kind == NONE:
            break
        num_tokens += cache.tokens[kind]
        last_end = media.items[i, item, 2] + cache.tokens[kind]
    if last_end <= begin:
        return
    entry = entry_at(cache, here, cache.together[i])
    if cache.entries[entry].is_cached:
        remove(cache.entries, cache.ranks[here], entry)
        append(cache.entries, cache.ranks[here], entry)
        return
    for item in range(media.items.shape[1]):
        if media.items[i, item, 0] == NONE:
            break
        media.counts[media.items[i, item, 0]] += 1
    keep(cache, here, entry, num_tokens)


@inner
def entry_at(cache: EncoderCache, here: int, number: int) -> int:
    """Return the entry of an image, or of a request's images, on a rank of all pools'."""
    return here * (cache.entries.size // cache.ranks.size) + number


@inner
def keep(cache: EncoderCache, here: int, entry: int, num_tokens: int) -> None:
    """Keep embeddings as those used last, in place of the oldest; those that are too large alone are not kept."""
    entries, ranks = cache.entries, cache.ranks
    while ranks[here].free_tokens < num_tokens:
        oldest = ranks[here].first
        if oldest == NONE:
            return
        remove(entries, ranks[here], oldest)
        entries[oldest].is_cached = 0
        ranks[here].free_tokens += entries[oldest].num_tokens
    append(entries, ranks[here], entry)
    entries[entry].is_cached = 1
    entries[entry].num_tokens = num_tokens
    ranks[here].free_tokens -= num_tokens
