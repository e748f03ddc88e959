"""Bundles of tables that travel together through the serving loop.

A field that is None leaves out the code of its feature when the loop is compiled (`compiled.jit.NoneTests`).
"""

from typing import NamedTuple

from windtunnel.compiled.jit import inlined
from windtunnel.compiled.records import Records
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


@inlined
def pool_tables_of(pools: Pools, number: int, cache: Cache | None, common: PoolTables) -> PoolTables:
    """Return the tables of one pool, whose share of the caches is `cache`; what pools have in common is `common`'s."""
    settings = pools.pools[number]
    return PoolTables(
        settings,
        cache,
        common.speculation,
        common.windows,
        common.vllm_v1,
        common.sglang,
        common.balance,
        ranks_of(pools, settings),
        slots_of(pools, settings),
        pools.lists[settings.first_slot : settings.end_slot],
        pools.stages[settings.first_replica : settings.end_replica],
    )
