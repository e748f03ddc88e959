"""Bundles of tables that travel together through the serving loop.

A field that is None leaves out the code of its feature when the loop is compiled (`compiled.jit.NoneTests`).
"""

from typing import NamedTuple

from windtunnel.compiled.jit import inlined
from windtunnel.compiled.records import Records
from windtunnel.serving.state.per_request import PerRequestPool, PerRequestRules, SequenceState, StageTables, Trail
from windtunnel.serving.state.pools import Pools, ranks_of, slots_of
from windtunnel.serving.state.records import (
    Cache,
    Clock,
    Events,
    Floats,
    Ints,
    KernelSettings,
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
    rules: PerRequestRules | None = None
    """None where no pool schedules per request."""
    sequences: Records[SequenceState] | None = None
    """[request] None as `rules`."""
    batches: Ints | None = None
    """[slot or replica, list, position] see `serving.state.per_request.new_batches`; None as `rules`."""
    stage_tables: StageTables | None = None
    """None where a `StepCost` prices steps."""


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
    pairs: Ints | None = None
    """[n, 2] Request and tokens of the batch that a user's policy chose; None where no pool has one."""


@inlined
def pool_tables_of(pools: Pools, number: int, cache: Cache | None, common: PoolTables) -> PoolTables:
    """Return the tables of one pool, whose share of the caches is `cache`; what pools have in common is `common`'s."""
    settings = pools.pools[number]
    speculation = None
    if common.speculation is not None:
        speculation = Speculation(settings.num_queries, settings.tokens_per_step)
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
        common.rules,
        common.sequences,
        common.batches,
        common.stage_tables,
    )


@inlined
def per_request_pool(pool: PoolTables, pools: Pools | None) -> PerRequestPool:
    """Return a pool that schedules per request, the only one or one of `pools`."""
    rules, batches = pool.rules, pool.batches
    if pools is not None:
        settings = pool.settings
        first_row = settings.first_event + settings.first_replica
        rules = pools.pools[pools.pool_of_replica[settings.first_replica]]  # has its fields
        batches = batches[first_row : first_row + settings.num_replicas * (settings.num_stages + 1)]  # type: ignore[index]
    return PerRequestPool(
        pool.settings,
        rules,  # type: ignore[arg-type]  # not None, like the two below
        pool.sequences,  # type: ignore[arg-type]
        pool.ranks,
        pool.slots,
        batches,  # type: ignore[arg-type]
        pool.stages,
        pool.stage_tables,
        pool.cache,
        pool.speculation,
    )
