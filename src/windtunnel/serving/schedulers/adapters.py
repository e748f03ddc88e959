"""LoRA adapters of running requests: which may run together, which lie in the device's slots, loads and step times.

vLLM admits a waiting request if its adapter runs already or fewer than `max_loras` adapters run; it passes over others
and looks further (vllm/v1/core/sched/scheduler.py, `scheduled_loras`, 0.8 to 0.33). SGLang does the same (scheduler.py,
`can_run_lora_batch`, 0.5). The step that admits a request first puts its adapter into a slot, in place of the one that
has been idle longest; what is not in host memory comes from disk (`LRUCacheWorkerLoRAManager._apply_adapters`).
Ranks of adapters are numbered through all pools; the waiting requests of `set_aside` and `put_back` are a pool's.
"""

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.linked_list import append, remove
from windtunnel.compiled.records import Records
from windtunnel.serving.schedulers.step_cost import interpolate_row
from windtunnel.serving.state.adapters import Adapters
from windtunnel.serving.state.records import BATCH, BATCH_TOKENS, NONE, Rank, Requests
from windtunnel.serving.state.tables import PoolTables

ON_DISK, IN_HOST, IN_SLOT = range(3)
"""Where the weights of an adapter are: on disk, in host memory, or in a slot of the device's memory too."""


@inner
def may_run(adapters: Adapters, rank: int, i: int) -> bool:
    """Whether the adapter of waiting request `i` may join those of the requests that run."""
    adapter = adapters.of_request[i]
    if adapter == NONE or adapters.table[rank, adapter].num_running > 0:
        return True
    return adapters.ranks[rank].num_running < adapters.ranks[rank].max_loras


@inner
def has_in_slot(adapters: Adapters, rank: int, i: int) -> bool:
    """Whether the adapter of request `i` lies in a slot of a rank; the base model lies in none."""
    adapter = adapters.of_request[i]
    return adapter != NONE and adapters.table[rank, adapter].place == IN_SLOT


@inner
def set_aside(requests: Requests, ranks: Records[Rank], rank: int, i: int, skipped: int) -> int:
    """Move the first waiting request, `i`, to the heap `skipped`; returns the heap's root."""
    ranks[rank].waiting = meld(requests.order, requests.left, requests.right, requests[i].left, requests[i].right)
    requests[i].left = NONE
    requests[i].right = NONE
    return meld(requests.order, requests.left, requests.right, skipped, i)


@inner
def put_back(requests: Requests, ranks: Records[Rank], rank: int, skipped: int) -> None:
    """Let the requests of the heap `skipped` wait again, each in its place."""
    ranks[rank].waiting = meld(requests.order, requests.left, requests.right, ranks[rank].waiting, skipped)


@inner
def begin_use(adapters: Adapters, rank: int, i: int) -> None:
    """Count request `i`, which is admitted, among those of its adapter, and load the adapter where no slot has it."""
    adapter = adapters.of_request[i]
    if adapter == NONE:
        return
    table, here = adapters.table[rank], adapters.ranks[rank]
    table[adapter].num_running += 1
    here.num_lookups += 1
    if table[adapter].num_running > 1:
        return
    here.num_running += 1
    place = table[adapter].place
    if place != ON_DISK:
        remove(table, adapters.lists[rank, place], adapter)
    if place == IN_SLOT:
        return
    if place == ON_DISK:
        here.num_disk_loads += 1
        here.load_s += here.disk_load_s
        if here.num_cached == here.max_cpu_loras:
            drop_oldest(adapters, rank)
        here.num_cached += 1
    if here.num_in_slots == here.max_loras:
        oldest = adapters.lists[rank, IN_SLOT].first
        remove(table, adapters.lists[rank, IN_SLOT], oldest)
        table[oldest].place = IN_HOST
        append(table, adapters.lists[rank, IN_HOST], oldest)
        here.num_in_slots -= 1
    here.num_in_slots += 1
    here.num_loads += 1
    here.load_s += here.host_load_s
    table[adapter].place = IN_SLOT


@inner
def drop_oldest(adapters: Adapters, rank: int) -> None:
    """Give up the adapter in host memory that has been idle longest; those in slots have been idle for less time."""
    place = IN_HOST if adapters.lists[rank, IN_HOST].first != NONE else IN_SLOT
    oldest = adapters.lists[rank, place].first
    remove(adapters.table[rank], adapters.lists[rank, place], oldest)
    adapters.table[rank, oldest].place = ON_DISK
    adapters.ranks[rank].num_cached -= 1
    if place == IN_SLOT:
        adapters.ranks[rank].num_in_slots -= 1


@inner
def end_use(adapters: Adapters, rank: int, i: int) -> None:
    """Stop counting request `i`, which runs no longer; an adapter without requests stays in its slot until another one
    needs it."""
    adapter = adapters.of_request[i]
    if adapter == NONE:
        return
    table = adapters.table[rank]
    table[adapter].num_running -= 1
    if table[adapter].num_running == 0:
        adapters.ranks[rank].num_running -= 1
        append(table, adapters.lists[rank, IN_SLOT], adapter)


@inner
def adapters_s(pool: PoolTables, adapters: Adapters, rank: int, num_decodes: int, num_queries: int) -> float:
    """Price the adapters' products in the batch of the slot of a pool's `rank`, of which `num_decodes` requests decode,
    seconds.

    The step's adapters are those of all running requests where some decode, else those of its prompts.
    """
    first, lists = pool.settings.first_rank, pool.lists
    here = adapters.ranks[first + rank]
    here.stamp += 1
    num_tokens, num_adapters = 0, 0
    if num_decodes > 0:
        num_tokens = (here.decoding - here.skipped) * num_queries
        num_adapters = here.num_running
    for position in range(pool.slots[rank].batch_size):
        adapter = adapters.of_request[lists[rank, BATCH, position]]
        if adapter != NONE:
            num_tokens += lists[rank, BATCH_TOKENS, position]
            if num_decodes == 0 and adapters.table[first + rank, adapter].stamp != here.stamp:
                adapters.table[first + rank, adapter].stamp = here.stamp
                num_adapters += 1
    if num_tokens == 0:
        num_adapters = 0
    here.step_adapters = num_adapters
    here.step_s = 0.0
    if num_adapters > 0:
        nodes, prices_s = adapters.token_nodes[here.pool], adapters.step_s[here.pool, num_adapters]
        here.step_s = interpolate_row(nodes, prices_s, float(num_tokens))
    return here.step_s


@inner
def take_load_s(adapters: Adapters, first: int, end: int) -> float:
    """Return how long a step waits for adapters: the slowest load of its ranks, from `first` to `end`, seconds."""
    load_s = 0.0
    for rank in range(first, end):
        load_s = max(load_s, adapters.ranks[rank].load_s)
        adapters.ranks[rank].load_s = 0.0
    adapters.ranks[first].total_load_s += load_s
    return load_s


@inner
def count_steps(adapters: Adapters, rank: int, num_steps: int) -> None:
    """Count `num_steps` equal steps of a rank by their adapters."""
    here = adapters.ranks[rank]
    adapters.num_steps[rank, here.step_adapters] += num_steps
    here.total_step_s += num_steps * here.step_s
    here.skipped = 0
