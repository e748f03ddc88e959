"""Bundles of tables that travel together through the serving loop.

A field that is None leaves out the code of its feature when the loop is compiled (`compiled.jit.NoneTests`).
"""

from typing import NamedTuple

from windtunnel.compiled.jit import inlined
from windtunnel.compiled.records import Records
from windtunnel.serving.state.adapters import Adapters
from windtunnel.serving.state.per_request import SequenceState, StageTables, Trail
from windtunnel.serving.state.pools import PoolRecord, Pools, cache_of, ranks_of, slots_of
from windtunnel.serving.state.records import (
    Cache,
    Clock,
    EncoderCache,
    Events,
    Floats,
    Ints,
    KernelSettings,
    Media,
    Rank,
    Requests,
    Sessions,
    Slot,
    Speculation,
    Step,
)


class PoolTables(NamedTuple):
    """One pool of equal replicas: how they behave and the state they are in."""

    settings: KernelSettings
    cache: Cache | None
    """None where prompts share nothing."""
    speculation: Speculation | None
    """None where a decode step gives one token."""
    windows: int | None
    """1 where layers of any pool have a sliding window, else None."""
    batched: int | None
    """1 where any pool's engine batches all that decode together, else None."""
    vllm_v1: int | None
    """1 where any pool forms its batches with `form_batch_vllm_v1`, else None."""
    sglang: int | None
    """1 where any pool forms its batches with `form_batch_sglang`, else None."""
    balance: int | None
    """1 where any pool balances its attention data-parallel ranks as TensorRT-LLM does, else None."""
    ranks: Records[Rank]
    """[rank]"""
    slots: Records[Slot]
    """[slot]"""
    lists: Ints
    """[slot, list, position], see `serving.state.records.FINISH_KEY`."""
    stages: Floats
    """[replica, stage] Time at which each pipeline stage is free."""
    sequences: Records[SequenceState] = None  # type: ignore[assignment]
    """[request]; None where no pool schedules per request, as the next."""
    batches: Ints = None  # type: ignore[assignment]
    """[slot or replica, list, position], see `serving.state.per_request.new_batches`."""
    stage_tables: StageTables | None = None
    """None where a `StepCost` prices steps."""
    encoder: EncoderCache = None  # type: ignore[assignment]
    """Of all pools; None where no pool has one."""
    records: Records[PoolRecord] | None = None
    """[pool] Settings, where a call unpacks them faster than 40 numbers; `in_pools` takes them from here."""
    adapters: Adapters | None = None
    """Of all pools; None where no request has a LoRA adapter."""


class RunTables(NamedTuple):
    """The requests, events and results of a run, which all pools share."""

    requests: Requests
    """[request]"""
    sessions: Sessions | None
    """None where no request waits for another."""
    events: Events
    """The event queue, a heap."""
    clock: Records[Clock]
    """[1]"""
    steps: Records[Step]
    """Buffer for the rows of one call."""
    trail: Trail | None = None
    """None where the contents of batches are not recorded."""
    waiting: Ints | None = None
    """[request] The requests that wait where a user's policy is asked, in order; None where no pool has one."""
    pairs: Ints = None  # type: ignore[assignment]
    """[n, 2] Request and tokens of the batch that it chose."""
    media: Media | None = None
    """None where all requests are text."""
    until_s: Floats | None = None
    """[1] Of a run that is told of requests while it runs: seconds up to which it knows them all, and stops. Only the
    request `clock.next` is sent, and `clock.next` is the number of requests then. None where all are known."""


@inlined
def pool_tables_of(pools: Pools, number: int, common: PoolTables) -> PoolTables:
    """Return the tables of one pool; what all have in common, and the caches of all, are `common`'s."""
    settings = pools.pools[number]
    cache, speculation, batches = None, None, None
    if common.cache is not None:
        cache = cache_of(common.cache, pools, number)
    if common.speculation is not None:
        speculation = Speculation(settings.num_queries, settings.tokens_per_step)
    if common.batches is not None:
        first_row = settings.first_event + settings.first_replica
        batches = common.batches[first_row : first_row + settings.num_replicas * (settings.num_stages + 1)]
    return PoolTables(
        settings,
        cache,
        speculation,
        common.windows,
        common.batched,
        common.vllm_v1,
        common.sglang,
        common.balance,
        ranks_of(pools, settings),
        slots_of(pools, settings),
        pools.lists[settings.first_slot : settings.end_slot],
        pools.stages[settings.first_replica : settings.end_replica],
        common.sequences,
        batches,
        common.stage_tables,
        common.encoder,
        None,  # records
        common.adapters,
    )


@inlined
def with_record(pool: PoolTables, settings: PoolRecord) -> PoolTables:
    """Return the tables of the only pool, or of the first one, with the `settings` of its record."""
    return PoolTables(
        settings,
        pool.cache,
        pool.speculation,
        pool.windows,
        pool.batched,
        pool.vllm_v1,
        pool.sglang,
        pool.balance,
        pool.ranks,
        pool.slots,
        pool.lists,
        pool.stages,
        pool.sequences,
        pool.batches,
        pool.stage_tables,
        pool.encoder,
        None,  # records
        pool.adapters,
    )
