"""LoRA adapters of all pools' ranks: where each lies, which requests use it, and what it costs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from windtunnel.compiled.records import I8, RecordGrid, Records, new_table
from windtunnel.serving.state.records import NONE, Floats, Ints


class Adapter(Protocol):
    """One record an adapter and rank: running requests that use it, where its weights are (`schedulers.adapters`), and,
    where no request uses it, its neighbours in the order of last use."""

    num_running: I8
    place: I8
    before: I8
    after: I8
    stamp: I8  # of the latest step that counted it


class AdapterList(Protocol):
    """One record a rank and place: the ends of the list of idle adapters there, the one idle longest first."""

    first: I8
    last: I8


class AdapterLimits(NamedTuple):
    """How a rank serves LoRA adapters. Scalars."""

    max_loras: int  # adapters that may run together, and slots in the device's memory
    max_cpu_loras: int  # adapters in host memory, those in slots among them
    host_load_s: float  # to copy an adapter into a slot
    disk_load_s: float  # to read it into host memory before


class AdapterRank(AdapterLimits):
    """One record a rank: its limits, adapters of running requests, those in slots and in host memory, and what has
    happened."""

    pool: int
    num_running: int  # adapters
    num_in_slots: int
    num_cached: int  # in host memory, those in slots among them
    decoding: int  # requests with an adapter that decode
    skipped: int  # of them, those that the step under way leaves out
    stamp: int
    step_adapters: int  # of the step under way
    num_lookups: int  # requests admitted with an adapter
    num_loads: int  # of them, those that had to load it into a slot
    num_disk_loads: int  # and of those from disk
    step_s: float  # products of the adapters in the step under way
    load_s: float  # to load for the batch that is being formed
    total_step_s: float
    total_load_s: float  # of a replica's first rank: of the slowest rank in each step


class AdapterPlan(NamedTuple):
    """How a pool serves LoRA adapters."""

    limits: AdapterLimits
    token_nodes: Floats  # [t] tokens of requests with an adapter, ascending
    step_s: Floats  # [max_loras + 1, t] products of so many adapters in a step


class Adapters(NamedTuple):
    """LoRA adapters of requests, see `schedulers.adapters`; one slot a rank, no pipeline. The ranks of all pools lie
    end to end."""

    of_request: Ints  # [request] or NONE
    token_nodes: Floats  # [pool, t] as `AdapterPlan`'s
    step_s: Floats  # [pool, n, t]
    table: RecordGrid[Adapter]  # [rank, adapter]
    lists: RecordGrid[AdapterList]  # [rank, place]
    ranks: Records[AdapterRank]
    num_steps: Ints  # [rank, n] steps with n adapters


def new_adapters(plans: Sequence[AdapterPlan], num_ranks: Sequence[int], of_request: Ints) -> Adapters:
    """Return the adapters at the beginning of a run; `of_request` is the adapter of each request, or NONE.

    Slots and host memory have those of the lowest numbers, which are used most, the lowest as if used last.
    """
    pool_of_rank, num_adapters = np.repeat(np.arange(len(plans)), num_ranks), int(of_request.max(initial=0)) + 1
    table = new_table(Adapter, (pool_of_rank.size, num_adapters), before=NONE, after=NONE)
    lists = new_table(AdapterList, (pool_of_rank.size, 3), first=NONE, last=NONE)
    ranks = new_table(AdapterRank, pool_of_rank.size, pool=pool_of_rank)
    for name in AdapterLimits._fields:
        ranks[name] = np.array([getattr(plan.limits, name) for plan in plans])[pool_of_rank]
    ranks["num_in_slots"] = np.minimum(ranks["max_loras"], num_adapters)
    ranks["num_cached"] = np.minimum(ranks["max_cpu_loras"], num_adapters)
    for rank, here in enumerate(ranks):
        for place, first, end in ((2, 0, here.num_in_slots), (1, here.num_in_slots, here.num_cached)):
            if end > first:
                numbers = np.arange(first, end)
                table["place"][rank, first:end] = place
                table["before"][rank, first:end] = np.where(numbers == end - 1, NONE, numbers + 1)
                table["after"][rank, first:end] = np.where(numbers == first, NONE, numbers - 1)
                lists["first"][rank, place], lists["last"][rank, place] = end - 1, first
    most_loras, most_nodes = (max(sizes) for sizes in zip(*(plan.step_s.shape for plan in plans), strict=True))
    token_nodes, step_s = np.zeros((len(plans), most_nodes)), np.zeros((len(plans), most_loras, most_nodes))
    for pool, plan in enumerate(plans):
        token_nodes[pool] = grown(plan.token_nodes, plan.token_nodes, most_nodes)
        step_s[pool, : plan.step_s.shape[0]] = grown(plan.step_s, plan.token_nodes, most_nodes)
    num_steps = np.zeros((pool_of_rank.size, most_loras), np.int64)
    return Adapters(of_request, token_nodes, step_s, table, lists, ranks, num_steps)


def grown(values: Floats, nodes: Floats, size: int) -> Floats:
    """Extend `values` at `nodes` on the last axis by values at nodes as far apart as the last two up to `size` of
    them."""
    more = np.arange(1, size - nodes.size + 1)
    return np.concatenate([values, values[..., -1:] + (values[..., -1:] - values[..., -2:-1]) * more], axis=-1)
