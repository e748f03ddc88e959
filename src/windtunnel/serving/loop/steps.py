"""The steps that a slot takes: a formed batch, or the run of equal steps until the next event, as one row."""

from typing import NamedTuple

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64, is_unset
from windtunnel.serving.clients import horizon_of_steps
from windtunnel.serving.cluster.slots import IDLE, set_busy
from windtunnel.serving.codes import SGLANG, TRTLLM
from windtunnel.serving.engines.sglang.scheduler import decay_new_token_ratio
from windtunnel.serving.engines.trtllm.balance import count_balance
from windtunnel.serving.kv.embedding_cache import count_missing
from windtunnel.serving.kv.windows import give_back, has_blocks, take_blocks
from windtunnel.serving.schedulers.adapters import adapters_s, count_steps, take_load_s
from windtunnel.serving.schedulers.batch import decode_step_blocks, gained_tokens, passed_of_step, take_decode_step
from windtunnel.serving.schedulers.step_batch import Batch, emptied, fails_at_s, write_row
from windtunnel.serving.schedulers.step_cost import (
    SAME_DURATION,
    decode_attention_s,
    decode_step_s,
    deviation,
    prefill_attention_s,
    price_batch,
    repeated_tokens,
    with_host,
    with_stages,
)
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import (
    BATCH,
    BATCH_ENDS,
    BATCH_TOKENS,
    FINISH_KEY,
    NONE,
    EncoderCache,
    Media,
    Requests,
    Slot,
    StepCost,
)
from windtunnel.serving.state.status import DONE, OUT_OF_STEPS
from windtunnel.serving.state.tables import PoolTables, RunTables


class Pauses(NamedTuple):
    """Tokens of a step whose predecessors are older than the step, for inter-token latencies."""

    num_late: int  # decode tokens of requests that did not decode in the step before
    since_s: float  # sum of the times of their predecessors, and of those of resumed requests
    num_joined: int
    num_skipped: int


class Steps(NamedTuple):
    """A step, or several equal ones."""

    num_steps: int
    first_end_s: float
    last_start_s: float
    end_s: float
    used_blocks: int  # the most KV blocks in use


@inner
def start_step(
    pool: PoolTables, cost: StepCost, run: RunTables, fleet: ReplicaFleet | None, replica: int, stage: int, now_s: float
) -> int:
    """Start the step that a replica's slot has formed, or a run of equal ones: price it, advance to its end, record it.

    A step that its replica's next failure will cut short is written with its time and no tokens, and never ends.

    Returns DONE with the slot busy or idle, or OUT_OF_STEPS.
    """
    settings = pool.settings
    if pool.sglang is not None and settings.scheduler == SGLANG:
        undo_decodes(pool, replica, stage)
    batch = batch_of(pool, cost, run.requests, replica, stage)
    if batch.decode_tokens + batch.prefill_tokens == 0:
        set_busy(settings, pool.slots, replica, stage, IDLE)
        return DONE
    if 0 < cost.recorded_step_s.size <= run.clock[0].recorded:
        return OUT_OF_STEPS
    end_s = step_end_s(pool, cost, run, batch, replica, stage, now_s)
    fails_s, is_doomed = fails_at_s(settings, fleet, replica), False
    if fleet is not None:
        is_doomed = end_s >= fails_s
        if is_doomed:
            end_s = fails_s
            batch = emptied(batch)
            run.steps[run.clock[0].rows].load_s = 0.0

    used = int64(0)
    if pool.windows is not None:
        used = used_blocks(pool, replica)
    pauses = advance_decodes(pool, batch, replica, stage, now_s, is_doomed)
    steps = Steps(1, end_s, now_s, end_s, used)
    latest, first_step_s = int64(NONE), end_s - now_s
    is_decode_only = batch.prefill_tokens == 0 and cost.recorded_step_s.size == 0 and settings.num_stages == 1
    if is_decode_only and not is_doomed:
        if pauses.num_late + pauses.num_joined + pauses.num_skipped == 0:
            latest = row_to_extend(pool, run, batch, replica, now_s, first_step_s)
        if latest != NONE:
            first_step_s = pool.slots[replica * settings.ranks_per_replica].row_step_s
        steps = take_equal_steps(pool, cost, run, fleet, batch, replica, now_s, end_s, used, first_step_s)
    if pool.balance is not None and settings.balance_steps > 0 and steps.num_steps > 1:
        first = replica * settings.ranks_per_replica
        count_balance(settings, pool.ranks, pool.slots, first, first + settings.ranks_per_replica, steps.num_steps)
    settle_slots(pool, replica, stage, steps, is_doomed)
    record_step(pool, run, batch, pauses, steps, latest, replica, stage, now_s)
    if not is_doomed:
        slot = settings.first_event + replica * settings.num_stages + stage
        run.clock[0].queued = push(run.events.time_s, run.events.slot, run.clock[0].queued, steps.end_s, slot)
    return DONE


@inner
def batch_of(pool: PoolTables, cost: StepCost, requests: Requests, replica: int, stage: int) -> Batch:
    """Return the sums over a replica's ranks of what their slots have batched."""
    settings, slots, lists, speculation = pool.settings, pool.slots, pool.lists, pool.speculation
    queries, decodes, prefill_tokens, sampled, running, waiting, context, num_prefills = 0, 0, 0, 0, 0, 0, 0, 0
    pairs, resumed, resumed_since_s, attention_s = 0.0, 0, 0.0, 0.0
    most_decodes, most_tokens, most_sampled, most_running = 0, 0, 0, int64(0)
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        rank_decodes = slots[slot].num_decoding if slots[slot].batch_decodes else 0
        rank_decodes -= slots[slot].num_skipped
        rank_queries = rank_decodes if speculation is None else rank_decodes * speculation.num_queries
        rank_tokens, rank_sampled = int64(0), rank_queries
        rank_pairs = 0.0
        for position in range(slots[slot].batch_size):
            i = lists[slot, BATCH, position]
            chunk = lists[slot, BATCH_TOKENS, position]
            rank_tokens += chunk
            rank_pairs += chunk * (requests[i].computed_tokens - 0.5 * chunk)
            if lists[slot, BATCH_ENDS, position]:
                rank_sampled += 1
                if not is_unset(requests[i].first_token_s):
                    resumed += 1
                    resumed_since_s += requests[i].last_token_s
        rank_context = slots[slot].context_tokens - slots[slot].skipped_context_tokens if rank_decodes > 0 else 0
        deviation_tokens = context_deviation(cost, slots, slot, rank_decodes, rank_context)
        keys, repeated = rank_context + rank_decodes, repeated_tokens(pool, rank)
        rank_s = decode_attention_s(cost, rank_decodes, keys, rank_tokens, deviation_tokens, repeated)
        rank_s += prefill_attention_s(cost, rank_tokens, rank_pairs)
        if pool.adapters is not None:
            num_queries = 1 if speculation is None else speculation.num_queries
            rank_s += adapters_s(pool, pool.adapters, rank, rank_decodes, num_queries)
        attention_s = max(attention_s, rank_s)
        most_decodes = max(most_decodes, rank_decodes)
        most_tokens = max(most_tokens, rank_queries + rank_tokens)
        most_sampled = max(most_sampled, rank_sampled)
        most_running = max(most_running, pool.ranks[rank].num_running)
        decodes += rank_decodes
        queries += rank_queries
        prefill_tokens += rank_tokens
        sampled += rank_sampled
        pairs += rank_pairs
        context += rank_context
        num_prefills += slots[slot].batch_size
        running += pool.ranks[rank].num_running
        waiting += pool.ranks[rank].num_waiting
    return Batch(
        decodes,
        queries,
        prefill_tokens,
        num_prefills,
        sampled,
        context,
        pairs,
        resumed,
        resumed_since_s,
        most_decodes,
        most_tokens,
        most_sampled,
        most_running,
        running,
        waiting,
        attention_s,
    )


@inner
def context_deviation(cost: StepCost, slots: Records[Slot], slot: int, num_decodes: int, context_tokens: int) -> float:
    """Return the standard deviation of the contexts that a slot's `num_decodes` requests decode over, in tokens; 0
    where no price depends on it.

    A context is the slot's `steps` less the request's `joined`.
    """
    if num_decodes < 2 or cost.longest_share == 0.0:
        return 0.0
    joined = num_decodes * slots[slot].steps - context_tokens
    return deviation(num_decodes, joined, slots[slot].joined_squares - slots[slot].skipped_squares)


@inner
def step_end_s(
    pool: PoolTables, cost: StepCost, run: RunTables, batch: Batch, replica: int, stage: int, now_s: float
) -> float:
    """Price a batch and take the pipeline stages for it; returns when its step ends."""
    device_s = price_batch(pool, cost, run, batch, replica, stage)
    if cost.recorded_step_s.size > 0:
        return now_s + device_s
    if pool.adapters is not None:
        first = pool.settings.first_rank + replica * pool.settings.ranks_per_replica
        device_s += take_load_s(pool.adapters, first, first + pool.settings.ranks_per_replica)
    if run.media is not None:
        encoded_s = encoder_s(pool, cost, run.requests, run.media, replica, stage)
        run.media.encoded_s[pool.settings.first_replica + replica] += encoded_s
        device_s += encoded_s
    return with_stages(pool, cost, run, replica, now_s, device_s, batch.most_running).end_s


@inner
def encoder_s(pool: PoolTables, cost: StepCost, requests: Requests, media: Media, replica: int, stage: int) -> float:
    """Return what the vision tower takes for the images and videos that a step encodes: the slowest rank's.

    These are those whose first tokens it computes, or that the encoder cache lacks. Without such a cache a request that
    is computed again after its first token finds them encoded.
    """
    settings = pool.settings
    slowest_s, first = 0.0, replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        rank_s = 0.0
        if pool.encoder is not None:
            take_counts(pool.encoder, media, settings.first_rank + rank)
            if settings.embedding_cache_tokens >= 0:
                count_missing(pool, requests, media, slot, settings.first_rank + rank)
        if settings.encoder_cache_tokens == 0 and settings.embedding_cache_tokens < 0:
            count_begun(pool, requests, media, slot)
        for kind in range(min(cost.encode_s.shape[0], media.counts.size)):
            if media.counts[kind] > 0:
                rank_s += encode_s(cost, kind, media.counts[kind])
                media.counts[kind] = 0
        slowest_s = max(slowest_s, rank_s)
    return slowest_s


@inner
def take_counts(cache: EncoderCache, media: Media, here: int) -> None:
    """Move what a rank's cache lacked of each kind to the counts of the step."""
    for kind in range(cache.counts.shape[1]):
        media.counts[kind] += cache.counts[here, kind]
        cache.counts[here, kind] = 0


@inner
def count_begun(pool: PoolTables, requests: Requests, media: Media, slot: int) -> None:
    """Count the images and videos of each kind whose first tokens are in a slot's batch."""
    for position in range(pool.slots[slot].batch_size):
        i = pool.lists[slot, BATCH, position]
        if is_unset(requests[i].first_token_s):
            end = requests[i].computed_tokens
            begin = end - pool.lists[slot, BATCH_TOKENS, position]
            for item in range(media.items.shape[1]):
                if media.items[i, item, 0] == NONE:
                    break
                if begin <= media.items[i, item, 2] < end:
                    media.counts[media.items[i, item, 0]] += 1


@inner
def encode_s(cost: StepCost, kind: int, count: int) -> float:
    """Look up what the tower takes for `count` images or videos of a kind."""
    last = cost.encode_s.shape[1] - 1
    if count <= last or last == 0:
        return cost.encode_s[kind, min(count, last)]
    return cost.encode_s[kind, last] * (count / last)


@inner
def advance_decodes(pool: PoolTables, batch: Batch, replica: int, stage: int, now_s: float, is_doomed: bool) -> Pauses:
    """Count the step for the decoding requests of a replica's slot; returns which of them had paused before."""
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    paused, late_since_s, joined, skipped = 0, batch.late_since_s, 0, 0
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        joined += slots[slot].num_joined
        skipped += slots[slot].num_skipped
        if slots[slot].batch_decodes and not is_doomed:
            rank_decodes = slots[slot].num_decoding - slots[slot].num_skipped
            older = rank_decodes - slots[slot].num_joined
            since_s = slots[slot].joined_since_s
            num_late = slots[slot].num_joined
            are_late = since_s < num_late * now_s * (1 - 1e-12)
            if older > 0 and slots[slot].last_decode_s < now_s:
                num_late, are_late = rank_decodes, True
                since_s += older * slots[slot].last_decode_s
            if are_late:
                paused += num_late
                late_since_s += since_s
            num_gained = count_decode_step(pool, slot)
            slots[slot].num_verified += 1
            slots[slot].context_tokens += num_gained * rank_decodes
            ranks[rank].remaining_tokens -= num_gained * rank_decodes
    return Pauses(paused, late_since_s, joined, skipped)


@inner
def count_decode_step(pool: PoolTables, slot: int) -> int:
    """Advance the slot's count of decode steps; returns the tokens that each of its requests gains."""
    num_gained = 1
    if pool.speculation is not None:
        num_gained = gained_tokens(pool.speculation, pool.slots, slot)
    pool.slots[slot].steps += num_gained
    return num_gained


@inner
def take_equal_steps(
    pool: PoolTables,
    cost: StepCost,
    run: RunTables,
    fleet: ReplicaFleet | None,
    batch: Batch,
    replica: int,
    now_s: float,
    end_s: float,
    used: int,
    first_step_s: float,
) -> Steps:
    """After a decode step from `now_s` to `end_s`, take the equal ones up to the next event.

    They take as long as `first_step_s` within 1%, blocks last, no request ends and the replica does not fail.
    """
    settings, windows = pool.settings, pool.windows
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    first = replica * settings.ranks_per_replica
    end = first + settings.ranks_per_replica
    fails_s = fails_at_s(settings, fleet, replica)
    horizon_s = horizon_of_steps(settings, run, fleet)
    num_steps, last_start_s, time_s = 1, now_s, end_s
    most_steps = steps_until_event(pool, first, end)
    while num_steps < most_steps and time_s < horizon_s:
        attention_s = 0.0
        fits = True
        for rank in range(first, end):
            count = slots[rank].num_decoding
            if settings.scheduler != TRTLLM:
                needed = decode_step_blocks(settings, pool.speculation, slots, lists, rank)
                fits = fits and has_blocks(settings, windows, ranks, rank, needed)
            context_tokens = slots[rank].context_tokens
            deviation_tokens = context_deviation(cost, slots, rank, count, context_tokens)
            keys, repeated = context_tokens + count, repeated_tokens(pool, rank)
            rank_s = decode_attention_s(cost, count, keys, batch.prefill_tokens, deviation_tokens, repeated)
            if pool.adapters is not None:
                rank_s += pool.adapters.ranks[settings.first_rank + rank].step_s
            attention_s = max(attention_s, rank_s)
        step_s = with_host(cost, decode_step_s(cost, batch.most_decodes, attention_s), batch.most_running)
        if not fits or step_s > SAME_DURATION * first_step_s or time_s + step_s >= fails_s:
            break
        for rank in range(first, end):
            count = slots[rank].num_decoding
            if settings.scheduler != TRTLLM:
                needed = decode_step_blocks(settings, pool.speculation, slots, lists, rank)
                take_decode_step(pool, rank, rank, needed)
            num_gained = count_decode_step(pool, rank)
            if count > 0:
                slots[rank].num_verified += 1
            slots[rank].context_tokens += num_gained * count
            ranks[rank].remaining_tokens -= num_gained * count
        if windows is not None:  # elsewhere the last of equal steps uses most
            used = max(used, used_blocks(pool, replica))
        last_start_s = time_s
        time_s += step_s
        num_steps += 1
    return Steps(num_steps, end_s, last_start_s, time_s, used)


@inner
def settle_slots(pool: PoolTables, replica: int, stage: int, steps: Steps, is_doomed: bool) -> None:
    """Leave a replica's slots as the step, or run of steps, leaves them."""
    settings, ranks, slots = pool.settings, pool.ranks, pool.slots
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        slots[slot].started_s = steps.last_start_s
        if slots[slot].batch_decodes and not is_doomed:
            slots[slot].last_decode_s = steps.end_s
            slots[slot].num_joined = slots[slot].num_skipped
            slots[slot].joined_since_s = slots[slot].skipped_since_s
            if pool.sglang is not None and settings.scheduler == SGLANG:
                steps_to_receive = ranks[rank].steps_to_receive - steps.num_steps
                ranks[rank].steps_to_receive = steps_to_receive % settings.receive_interval_steps
                decay_new_token_ratio(settings, ranks, rank, steps.num_steps)
        if pool.adapters is not None and not is_doomed:
            count_steps(pool.adapters, settings.first_rank + rank, steps.num_steps)
        slots[slot].num_skipped = 0
        slots[slot].skipped_context_tokens = 0
        slots[slot].skipped_squares = 0
        slots[slot].skipped_since_s = 0.0


@inner
def record_step(
    pool: PoolTables,
    run: RunTables,
    batch: Batch,
    pauses: Pauses,
    steps: Steps,
    latest: int,
    replica: int,
    stage: int,
    now_s: float,
) -> None:
    """Write the row of a step, or of a run of equal ones; `latest` is the row that it lengthens, or NONE."""
    settings, slots = pool.settings, pool.slots
    used = max(steps.used_blocks, used_blocks(pool, replica))
    slot = replica * settings.ranks_per_replica * settings.num_stages + stage
    if latest != NONE:
        run.steps[latest].duration_s = steps.end_s - run.steps[latest].start_s
        run.steps[latest].num_steps += steps.num_steps
        run.steps[latest].used_blocks = max(run.steps[latest].used_blocks, used)
    else:
        num_late = pauses.num_late + batch.resumed
        late_gap_s = steps.first_end_s - pauses.since_s / num_late if num_late > 0 else 0.0
        slots[slot].row = run.clock[0].earlier_rows + run.clock[0].rows
        slots[slot].row_step_s = steps.first_end_s - now_s
        number = settings.first_replica + replica
        write_row(run, number, batch, steps.num_steps, now_s, steps.end_s, used, pauses.num_late, late_gap_s)
    slots[slot].row_end_s = steps.end_s


@inner
def used_blocks(pool: PoolTables, replica: int) -> int:
    """Return the KV blocks in use on a replica's ranks."""
    used = 0
    first = replica * pool.settings.ranks_per_replica
    for rank in range(first, first + pool.settings.ranks_per_replica):
        used += pool.settings.num_blocks - pool.ranks[rank].free_blocks
    return used


@inner
def row_to_extend(pool: PoolTables, run: RunTables, batch: Batch, replica: int, now_s: float, step_s: float) -> int:
    """Return the row of a replica's latest step where the one that starts now is equal to it, or NONE.

    Other replicas' arrivals end a run of steps, for a router may look at all; its row goes on. A row is written from
    its replica's own events alone, as many as if it were by itself.
    """
    slots, steps = pool.slots, run.steps
    first = replica * pool.settings.ranks_per_replica
    row = slots[first].row - run.clock[0].earlier_rows
    if row < 0 or slots[first].row_end_s != now_s or step_s > SAME_DURATION * slots[first].row_step_s:
        return NONE
    if steps[row].prefill_tokens > 0 or steps[row].decode_tokens != batch.decode_tokens:
        return NONE
    if steps[row].num_running != batch.running or steps[row].num_waiting != batch.waiting:
        return NONE
    return row


@inner
def undo_decodes(pool: PoolTables, replica: int, stage: int) -> None:
    """Take decode steps back: with SGLang's attention data parallelism nobody decodes while any rank prefills."""
    settings, windows, speculation = pool.settings, pool.windows, pool.speculation
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    first = replica * settings.ranks_per_replica
    num_prefills = 0
    for rank in range(first, first + settings.ranks_per_replica):
        num_prefills += slots[rank * settings.num_stages + stage].batch_size
    if num_prefills == 0:
        return
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        if slots[slot].batch_decodes and slots[slot].batch_size == 0:
            take_blocks(settings, windows, ranks, rank, -decode_step_blocks(settings, speculation, slots, lists, slot))
            if windows is not None:
                give_back(settings, ranks, rank, -passed_of_step(settings, speculation, slots, lists, slot))
            slots[slot].batch_decodes = 0


@inner
def steps_until_event(pool: PoolTables, first: int, end: int) -> int:
    """Return how many decode steps may run before a request finishes or the policy must look again."""
    ranks, slots, lists = pool.ranks, pool.slots, pool.lists
    fewest = int64(1) << 40
    for rank in range(first, end):
        if slots[rank].finish_size > 0:
            fewest = min(fewest, lists[rank, FINISH_KEY, 0] - slots[rank].steps + 1)
            if pool.speculation is not None:
                left = max(lists[rank, FINISH_KEY, 0] - slots[rank].steps, 0)
                fewest = min(fewest, (left + pool.speculation.num_queries - 1) // pool.speculation.num_queries + 1)
        if slots[rank].looks_again or ranks[rank].num_prefilling > 0:
            fewest = 1
        if pool.settings.scheduler == SGLANG and ranks[rank].num_waiting > 0:
            fewest = min(fewest, max(ranks[rank].steps_to_receive, 1))
    return fewest
