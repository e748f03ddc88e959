"""The end of a slot's step: tokens given, prefills that decode from now on, requests that are done."""

from windtunnel.compiled.heap import pop
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import is_unset
from windtunnel.serving.clients import conclude
from windtunnel.serving.cluster.handoff import end_transfer
from windtunnel.serving.cluster.losses import leave_for_decode
from windtunnel.serving.cluster.slots import replica_of, wake_replica
from windtunnel.serving.codes import FAIR_SHARE
from windtunnel.serving.kv.cache import caches_when_scheduled, share
from windtunnel.serving.kv.encoder_cache import release_images
from windtunnel.serving.kv.windows import fills_window
from windtunnel.serving.schedulers.adapters import end_use
from windtunnel.serving.schedulers.batch import begin_decoding, leave, stop_decoding, unlink
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import Pools
from windtunnel.serving.state.records import BATCH, BATCH_ENDS, FAIR_TOKENS, FINISH_KEY, FINISH_VALUE, Cache
from windtunnel.serving.state.tables import PoolTables, RunTables


@inner
def finish(
    pool: PoolTables, run: RunTables, pools: Pools | None, fleet: ReplicaFleet | None, rank: int, i: int, now_s: float
) -> None:
    """End request `i`, which runs and does not decode: it has produced its last token, or the last of this pool."""
    settings, requests = pool.settings, run.requests
    if pools is not None and pools.transfers[i].later_output_tokens > 0:
        unlink(requests, pool.ranks, rank, i)
        if pool.adapters is not None:
            end_use(pool.adapters, settings.first_rank + rank, i)
        leave_for_decode(pool, run, pools, fleet, rank, i, now_s)
        return
    requests[i].finish_s = now_s
    leave(pool, requests, rank, i)
    if settings.queue_order == FAIR_SHARE:
        requests[requests[i].tenant].tenant_tag += 2 * requests[i].output_tokens // FAIR_TOKENS
    conclude(settings, run, i, now_s)


@inner
def arrive(cache: Cache | None, run: RunTables, pools: Pools, i: int, now_s: float) -> None:
    """End the KV transfer of request `i`: both ranks may have something to do."""
    end_transfer(cache, run.requests, pools, i)
    for rank in (pools.transfers[i].prefill_rank, pools.transfers[i].decode_rank):
        wake_replica(run, pools, replica_of(pools, rank), now_s)


@inner
def complete(
    pool: PoolTables,
    run: RunTables,
    pools: Pools | None,
    fleet: ReplicaFleet | None,
    rank: int,
    slot: int,
    now_s: float,
) -> None:
    """Apply the end of the slot's step: finished requests leave, complete prefills give their token and begin to
    decode.
    """
    settings, requests, ranks, slots, lists = pool.settings, run.requests, pool.ranks, pool.slots, pool.lists
    while slots[slot].finish_size > 0 and lists[slot, FINISH_KEY, 0] <= slots[slot].steps:
        i = lists[slot, FINISH_VALUE, 0]
        slots[slot].finish_size = pop(lists[slot, FINISH_KEY], lists[slot, FINISH_VALUE], slots[slot].finish_size)
        if pool.windows is not None and fills_window(pool, requests, rank, i):
            continue
        stop_decoding(pool, requests, i)
        if pool.speculation is not None:
            end = requests[i].input_tokens + requests[i].output_tokens - 1
            ranks[rank].remaining_tokens += requests[i].computed_tokens - end
        finish(pool, run, pools, fleet, rank, i, now_s)

    for position in range(slots[slot].batch_size):
        i = lists[slot, BATCH, position]
        requests[i].chunks_in_flight -= 1
        if pool.encoder is not None:
            release_images(pool, rank, i, requests[i].computed_tokens)
        if pool.cache is not None and not caches_when_scheduled(settings):
            share(settings, pool.cache, ranks, rank, i, requests[i].computed_tokens)
        if not lists[slot, BATCH_ENDS, position]:
            continue
        if is_unset(requests[i].first_token_s):
            requests[i].first_token_s = now_s
        ranks[rank].remaining_tokens -= 1
        end = requests[i].input_tokens + requests[i].output_tokens - 1
        if requests[i].computed_tokens >= end:
            finish(pool, run, pools, fleet, rank, i, now_s)
        else:
            requests[i].last_token_s = now_s
            begin_decoding(pool, requests, rank, slot, i)
    slots[slot].batch_size = 0
    slots[slot].batch_decodes = 0
