"""SGLang's policy: prompts before decodes, as long as the promised outputs fit; retraction where they do not."""

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.kv.cache import look_up
from windtunnel.serving.kv.windows import has_blocks, num_blocks_for, pass_blocks, take_blocks
from windtunnel.serving.schedulers.adapters import may_run, put_back, set_aside
from windtunnel.serving.schedulers.batch import (
    add_chunk,
    decode_step_blocks,
    is_in_flight,
    look_up_waiting,
    preempt,
    rebuild_rank,
    remaining_output,
    start,
    take_decode_step,
)
from windtunnel.serving.state.records import (
    MOST_REQUESTS,
    NONE,
    PREFILLING,
    Cache,
    KernelSettings,
    Rank,
    Requests,
    Slot,
)
from windtunnel.serving.state.tables import PoolTables

SGLANG_INITIAL_RATIO = 0.7
SGLANG_MINIMUM_FRACTION = 0.14
SGLANG_DECAY_STEPS = 600
SGLANG_RETRACT_STEPS = 20
SGLANG_CLIPPED_OUTPUT_TOKENS = 4096
LONGEST_PREFIX_WAITING = 128


@inner
def initial_new_token_ratio(settings: KernelSettings) -> float:
    """Return what SGLang's `new_token_ratio` starts from."""
    return min(SGLANG_INITIAL_RATIO * settings.schedule_conservativeness, 1.0)


@inner
def form_batch_sglang(pool: PoolTables, requests: Requests, rank: int, slot: int, now_s: float) -> int:
    """SGLang `Scheduler.get_next_batch_to_run` (0.5): a prefill batch whenever one can be formed, else a decode step.

    A prefill batch takes up to `chunked_prefill_size` tokens, an unfinished chunk first; a request is admitted while
    its prompt and its clipped output fit beside `new_token_ratio` of what running requests may still produce. The ratio
    starts at 0.7 x `schedule_conservativeness`, falls to 0.14 of that over 600 decode steps, and rises when decode runs
    out of blocks and retracts requests, those with the fewest outputs and the longest prompts first.
    """
    settings, windows, speculation = pool.settings, pool.windows, pool.speculation
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    if ranks[rank].steps_to_receive <= 0 or slots[slot].num_decoding == 0:
        form_prefill_sglang(pool, requests, rank, slot, now_s)
    if slots[slot].batch_size > 0:
        ranks[rank].steps_to_receive = 0
        return 0
    if slots[slot].num_decoding == 0:
        return 0
    if ranks[rank].steps_to_receive <= 0:
        ranks[rank].steps_to_receive = settings.receive_interval_steps
    num_needed = decode_step_blocks(settings, speculation, slots, lists, slot)
    if not has_blocks(settings, windows, ranks, rank, num_needed):
        retract_sglang(pool, requests, rank, slot)
        num_needed = decode_step_blocks(settings, speculation, slots, lists, slot)
        if not has_blocks(settings, windows, ranks, rank, num_needed):
            return 0
    take_decode_step(pool, rank, slot, num_needed)
    return slots[slot].num_decoding


@inner
def sort_by_prefix(
    settings: KernelSettings, cache: Cache, requests: Requests, ranks: Records[Rank], rank: int, cutoff_s: float
) -> None:
    """Put waiting requests of which more is cached in front: `lpm`, `SchedulePolicy.calc_priority` of SGLang 0.5.

    With more than 128 waiting the order stays as it is, later ones behind. SGLang also holds requests back that begin
    like another one in the queue; that is left out.
    """
    if ranks[rank].num_waiting > LONGEST_PREFIX_WAITING:
        return
    unsorted, waiting = ranks[rank].waiting, NONE
    while unsorted != NONE:
        i = unsorted
        unsorted = meld(requests.order, requests.left, requests.right, requests[i].left, requests[i].right)
        requests[i].left = NONE
        requests[i].right = NONE
        requests[i].order = requests[i].sequence
        if requests[i].arrival_s > cutoff_s:
            requests[i].order += MOST_REQUESTS
        else:
            look_up(settings, cache, requests, ranks, rank, i)
            requests[i].order -= requests[i].computed_tokens * MOST_REQUESTS
        waiting = meld(requests.order, requests.left, requests.right, waiting, i)
    ranks[rank].waiting = waiting


@inner
def form_prefill_sglang(pool: PoolTables, requests: Requests, rank: int, slot: int, now_s: float) -> None:
    """Form a prefill batch: `PrefillAdder` of SGLang 0.5."""
    settings, windows, cache = pool.settings, pool.windows, pool.cache
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    block_size = settings.block_size
    if ranks[rank].num_running == 0:
        ranks[rank].new_token_ratio = initial_new_token_ratio(settings)
    chunk_budget = settings.max_num_batched_tokens
    prompt_budget = settings.max_prefill_tokens
    for position in range(ranks[rank].num_prefilling):
        i = lists[rank * settings.num_stages, PREFILLING, position]
        computed = requests[i].computed_tokens
        chunk = min(requests[i].target_tokens - computed, chunk_budget)
        num_needed = num_blocks_for(computed + chunk, block_size) - num_blocks_for(computed, block_size)
        if not has_blocks(settings, windows, ranks, rank, num_needed):
            return
        take_blocks(settings, windows, ranks, rank, num_needed)
        chunk_budget -= chunk
        prompt_budget -= chunk
        if windows is not None:
            pass_blocks(settings, requests, ranks, rank, i, computed)
        add_chunk(pool, requests, rank, slot, i, chunk)
    if cache is not None and settings.longest_prefix_first and ranks[rank].waiting != NONE:
        sort_by_prefix(settings, cache, requests, ranks, rank, slots[slot].cutoff_s)
        slots[slot].looks_again = 1
    promised, skipped = ranks[rank].remaining_tokens * ranks[rank].new_token_ratio, NONE
    while chunk_budget > 0 and prompt_budget > 0 and ranks[rank].waiting != NONE:
        i = ranks[rank].waiting
        if requests[i].arrival_s > slots[slot].cutoff_s:
            slots[slot].looks_again = 1
            break
        if ranks[rank].num_running >= settings.max_num_seqs:
            break
        if pool.adapters is not None:
            if not may_run(pool.adapters, settings.first_rank + rank, i):
                skipped = set_aside(requests, ranks, rank, i, skipped)
                continue
        unused = look_up_waiting(pool, requests, rank, i)
        output = min(remaining_output(requests, i), SGLANG_CLIPPED_OUTPUT_TOKENS)
        free_blocks = (ranks[rank].free_blocks - unused - settings.blocks_per_request) // settings.num_groups
        if settings.window_pool:
            free_blocks = min(free_blocks, ranks[rank].free_window_blocks)
        free_tokens = free_blocks * block_size - promised
        whole = requests[i].target_tokens - requests[i].computed_tokens
        if whole + output > free_tokens and ranks[rank].num_running > 0:
            break
        if whole > prompt_budget and prompt_budget < settings.max_prefill_tokens:
            break
        chunk = min(whole, chunk_budget)
        if chunk < whole and not settings.chunked_prefill:
            break
        if not start(pool, requests, rank, slot, i, chunk, unused, now_s):
            break
        promised += whole - chunk + output
        chunk_budget -= chunk
        prompt_budget -= chunk
    if pool.adapters is not None:
        put_back(requests, ranks, rank, skipped)


@inner
def find_retracted(requests: Requests, ranks: Records[Rank], slots: Records[Slot], rank: int, slot: int) -> int:
    """Find, among requests that are not in flight, the one with the fewest outputs, then the longest prompt; decoding
    ones first.
    """
    victim = NONE
    fewest = 0
    victim_decodes = 0
    spared = slots[slot].num_decoding == 1
    i = ranks[rank].first
    while i != NONE:
        decodes = requests[i].is_decoding
        if not is_in_flight(requests, slots, slot, i) and not (decodes and spared and requests[i].slot == slot):
            outputs = 0
            if decodes:
                outputs = slots[requests[i].slot].steps - requests[i].joined + 1 - requests[i].input_tokens
            longer = victim != NONE and requests[i].input_tokens > requests[victim].input_tokens
            if (
                victim == NONE
                or decodes > victim_decodes
                or (decodes == victim_decodes and (outputs < fewest or (outputs == fewest and longer)))
            ):
                victim, fewest, victim_decodes = i, outputs, decodes
        i = requests[i].after
    return victim


@inner
def retract_sglang(pool: PoolTables, requests: Requests, rank: int, slot: int) -> None:
    """Free blocks for one more decode step: `ScheduleBatch.retract_decode` of SGLang 0.5.

    The slot's last decoding request is never retracted; a prompt half prefilled gives way to it instead.
    """
    settings, windows, speculation = pool.settings, pool.windows, pool.speculation
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    while True:
        if has_blocks(settings, windows, ranks, rank, decode_step_blocks(settings, speculation, slots, lists, slot)):
            break
        victim = find_retracted(requests, ranks, slots, rank, slot)
        if victim == NONE:
            break
        preempt(pool, requests, rank, victim)
    rebuild_rank(pool, requests, rank)
    slots[slot].looks_again = 1
    decoded = 0
    promised = 0
    i = ranks[rank].first
    while i != NONE:
        if requests[i].is_decoding and requests[i].slot == slot:
            decoded += slots[slot].steps - requests[i].joined + 1 - requests[i].input_tokens
            promised += requests[i].output_tokens
        i = requests[i].after
    ratio = (decoded + SGLANG_RETRACT_STEPS * slots[slot].num_decoding) / max(promised, 1)
    ranks[rank].new_token_ratio = min(ratio, 1.0)


@inner
def decay_new_token_ratio(settings: KernelSettings, ranks: Records[Rank], rank: int, num_steps: int) -> None:
    """Lower the estimate of outputs still to come, after `num_steps` decode steps."""
    initial = initial_new_token_ratio(settings)
    least = initial * SGLANG_MINIMUM_FRACTION
    decay = (initial - least) / SGLANG_DECAY_STEPS
    ranks[rank].new_token_ratio = max(ranks[rank].new_token_ratio - decay * num_steps, least)
