"""The per-request loop: serving engines whose batches may be any subset of a replica's requests, and users' own
policies.

It visits the requests of a batch once when it is formed and once when it ends, except those that decode together
again and again (`serving.per_request.decode_groups`). Between two events, equal decode steps of one batch are taken
at once. A replica of `num_stages` pipeline stages has that many batches in flight; they pass the stages in order, and
one that waits for a stage was formed before.

Events are ordered by (time, arrivals before batch ends, slot).
"""

from typing import NamedTuple

import numpy as np

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Records, int64, is_unset
from windtunnel.serving.cluster.routers import route
from windtunnel.serving.codes import ASSIGNED, FASTER_TRANSFORMER, LIGHTLLM, ORCA, SARATHI, USER, VLLM_V0
from windtunnel.serving.loop.arrivals import next_arrival_s, send_next
from windtunnel.serving.loop.completions import conclude
from windtunnel.serving.loop.step_cost import SAME_DURATION, with_host
from windtunnel.serving.per_request.cost import ceil_to, model_step_s, table_stage_s
from windtunnel.serving.per_request.decode_groups import (
    MEMBERS,
    PHASES,
    SCRATCH,
    TOKENS,
    advance,
    dissolve,
    join,
    may_join,
    ready_row,
    reserves_blocks,
)
from windtunnel.serving.per_request.policies import (
    form_batch_faster_transformer,
    form_batch_lightllm,
    form_batch_orca,
    form_batch_sarathi,
    form_batch_vllm_v0,
    put_last,
    release,
)
from windtunnel.serving.state.per_request import (
    PerRequestClock,
    PerRequestSettings,
    Prices,
    SequenceState,
    SequenceTables,
    Trail,
)
from windtunnel.serving.state.records import NONE, Floats, Requests, StepCost
from windtunnel.serving.state.status import ASK_POLICY, DONE, MORE, OUT_OF_STEPS, OUT_OF_TABLES, STUCK
from windtunnel.serving.state.tables import RunTables


class Batch(NamedTuple):
    """A batch that starts: sums over its requests and its decode group; tokens."""

    num_listed: int
    """Requests beside the decode group."""
    num_requests: int
    num_decodes: int
    num_prompts: int
    prompt_tokens: int
    squares: int
    """Sum of the squares of the prompt chunks."""
    cached: int
    """Tokens processed before the chunks, each request's rounded up to the look-up tables' granularity."""
    context_tokens: int
    sampled: int
    pairs: float
    """Query-key pairs of the prompt chunks."""
    paused: int
    """Decoding requests that did not decode in the step before."""
    resumed: int
    """Prompts that end here and were restarted before."""
    late_since_s: float
    """Sum of the times of the latest tokens of both."""
    num_running: int


class Passage(NamedTuple):
    """A batch's way through the pipeline stages; seconds."""

    start_s: float
    end_s: float
    between_s: float
    """Waits between stages."""


@inner
def deliver(tables: SequenceTables, run: RunTables, now_s: float) -> None:
    """Send the next request to a replica; one with a batch to spare wakes."""
    settings, sequences, replicas = tables.settings, tables.sequences, tables.replicas
    requests, sessions, clock = run.requests, run.sessions, run.clock
    i = send_next(run, now_s)
    replica = requests[i].rank
    if settings.router != ASSIGNED:  # replicas and their settings have what a router reads of ranks
        replica = route(settings, None, sessions, replicas, clock, i)  # type: ignore[arg-type]
    if sessions is not None:
        if sessions.session[i] != NONE:
            sessions.replica[sessions.session[i]] = replica
    requests[i].rank = replica
    replicas[replica].num_outstanding += 1
    put_last(sequences, replicas, replica, i)
    if replicas[replica].num_in_flight < settings.num_stages and not replicas[replica].is_awake:
        replicas[replica].is_awake = 1
        slot = settings.num_replicas * settings.num_stages + replica
        clock[0].queued = push(run.events.time_s, run.events.slot, clock[0].queued, now_s, slot)


@inner
def complete(
    tables: SequenceTables, trail: Trail | None, run: RunTables, replica: int, slot: int, now_s: float
) -> None:
    """Apply the end of a batch: finished requests leave, those that it decoded are its decode group, others are ready
    again.
    """
    settings, sequences, replicas = tables.settings, tables.sequences, tables.replicas
    requests, slots, batches = run.requests, tables.slots, tables.batches
    row = ready_row(settings, replica)
    size, num_steps = slots[slot].num_listed, slots[slot].num_steps
    unfinished = NONE
    if replicas[replica].ready_group != slot:
        dissolve(settings, sequences, replicas, slots, batches, replica)
    if slots[slot].has_group:
        advance(tables, run, replica, slot, now_s)
    joins = False
    if trail is None:
        joins = may_join(settings, replicas, slots, sequences, batches, replica, slot)
    num_ready = replicas[replica].num_ready
    num_ready_before, has_joined = num_ready, False
    members, tokens, ready = batches[slot, MEMBERS], batches[slot, TOKENS], batches[row, MEMBERS]
    for position in range(size):
        i = members[position]
        has_decoded = sequences[i].is_prefilled
        count_tokens(requests, sequences, i, tokens[position] * num_steps, now_s)
        if sequences[i].processed_tokens >= sequences[i].total_tokens:
            end_request(tables, run, replica, i, now_s)
        elif has_decoded and joins:
            join(settings, requests, sequences, slots, batches, slot, i, now_s)
            has_joined = True
        else:
            unfinished = i
            ready[num_ready] = i
            num_ready += 1
    replicas[replica].num_ready = num_ready
    if has_joined or (slots[slot].has_group and slots[slot].group_size > 0):
        replicas[replica].ready_group = slot
        replicas[replica].group_position = num_ready_before
    slots[slot].has_group = 0
    if settings.scheduler == FASTER_TRANSFORMER:
        release_together(tables, replica, slot, unfinished)
    slots[slot].num_requests = 0
    replicas[replica].num_in_flight -= 1


@inner
def end_request(tables: SequenceTables, run: RunTables, replica: int, i: int, now_s: float) -> None:
    """End request `i`, which has its last token; its blocks are freed, FasterTransformer's with the whole batch."""
    run.requests[i].finish_s = now_s
    conclude(tables.settings, run, i, now_s)
    tables.replicas[replica].num_outstanding -= 1
    if tables.settings.scheduler != FASTER_TRANSFORMER:
        release(tables.sequences, tables.replicas, replica, i)


@inner
def count_tokens(requests: Requests, sequences: Records[SequenceState], i: int, num_tokens: int, now_s: float) -> None:
    """Count `num_tokens` that request `i` has processed at `now_s`, and the token that the end of its prompt gives."""
    processed = sequences[i].processed_tokens + num_tokens
    sequences[i].left_stage_s = now_s
    if not sequences[i].is_prefilled and processed >= sequences[i].prompt_tokens:
        sequences[i].is_prefilled = 1
        processed += 1
        if is_unset(requests[i].first_token_s):
            requests[i].first_token_s = now_s
    sequences[i].processed_tokens = processed


@inner
def release_together(tables: SequenceTables, replica: int, slot: int, unfinished: int) -> None:
    """Free the blocks of a FasterTransformer batch's finished requests with its last one; `unfinished` is one that goes
    on, or NONE.
    """
    sequences, replicas, slots = tables.sequences, tables.replicas, tables.slots
    for position in range(slots[slot].num_listed):
        i = tables.batches[slot, MEMBERS, position]
        if sequences[i].processed_tokens < sequences[i].total_tokens:
            continue
        if unfinished == NONE:
            release(sequences, replicas, replica, i)
        elif tables.settings.leaks_blocks:
            replicas[replica].num_running -= 1
        else:  # freed with the batch's last request
            sequences[unfinished].num_blocks += sequences[i].num_blocks
            replicas[replica].num_running -= 1
            sequences[i].num_blocks = 0


@inner
def fused_steps(tables: SequenceTables, replica: int, slot: int, size: int) -> int:
    """Return the most decode steps that the batch may take before one of its requests ends.

    Writes to the replica's scratch list how many of its requests need a block, by the number of steps from now modulo
    the block size.
    """
    settings, sequences, replicas = tables.settings, tables.sequences, tables.replicas
    slots, batches = tables.slots, tables.batches
    row = ready_row(settings, replica)
    for phase in range(settings.block_size):
        batches[row, SCRATCH, phase] = 0
    fewest = int64(1) << 40
    if slots[slot].has_group:
        steps = slots[slot].group_steps
        fewest = slots[slot].first_end - steps
        for phase in range(settings.block_size):
            batches[row, SCRATCH, phase] = batches[slot, PHASES, (steps + phase) % settings.block_size]
    for position in range(size):
        i = batches[slot, MEMBERS, position]
        fewest = min(fewest, sequences[i].total_tokens - sequences[i].processed_tokens)
        steps_to_full = sequences[i].num_blocks * settings.block_size + 1 - sequences[i].processed_tokens
        batches[row, SCRATCH, steps_to_full % settings.block_size] += 1
    if settings.scheduler == LIGHTLLM and replicas[replica].num_waiting > 0:
        fewest = min(fewest, settings.max_waiting_steps - replicas[replica].waited_steps + 1)
    return fewest


@inner
def through_stages(
    settings: PerRequestSettings,
    trail: Trail | None,
    stages: Floats,
    clock: Records[PerRequestClock],
    replica: int,
    ready_s: float,
    stage_s: float,
    send_s: float,
) -> Passage:
    """Take a batch that is ready at `ready_s` through the replica's stages: `stage_s` in each, `send_s` to the next.

    Returns a `Passage`.
    """
    start_s, end_s, between_s = ready_s, ready_s, 0.0
    for stage in range(settings.num_stages):
        begin_s = max(end_s, stages[replica, stage])
        if stage == 0:
            start_s = begin_s
        else:
            between_s += begin_s - end_s
        spent_s = stage_s
        if stage < settings.num_stages - 1:
            spent_s += send_s
        end_s = begin_s + spent_s
        stages[replica, stage] = end_s
        if trail is not None:
            trail.stage_s[clock[0].rows, stage, 0] = begin_s
            trail.stage_s[clock[0].rows, stage, 1] = end_s
    return Passage(start_s, end_s, between_s)


@inner
def take_equal_steps(
    tables: SequenceTables,
    prices: Prices,
    batch: Batch,
    replica: int,
    slot: int,
    now_s: float,
    end_s: float,
    horizon_s: float,
) -> tuple[int, float]:
    """After a decode step from `now_s` to `end_s`, take those that follow up to `horizon_s`, as long as they take about
    as long, blocks last and no request ends.

    Returns how many steps there are with the first one, and when the last one ends.
    """
    settings, sequences, replicas, batches = tables.settings, tables.sequences, tables.replicas, tables.batches
    row = ready_row(settings, replica)
    most = fused_steps(tables, replica, slot, batch.num_listed)
    reserves = reserves_blocks(settings)
    duration_s, num_steps = end_s - now_s, 1
    while num_steps < most and end_s < horizon_s and end_s <= settings.end_s:
        context = batch.context_tokens + num_steps * batch.num_decodes
        needed = 0 if reserves else batches[row, SCRATCH, num_steps % settings.block_size]
        step_s = 0.0
        if prices.cost is not None:
            device_s = model_step_s(prices.cost, batch.num_decodes, context, 0, 0.0, 0)
            step_s = with_host(prices.cost, device_s, batch.num_running)
        if prices.tables is not None:
            step_s = table_stage_s(prices.tables, batch.num_decodes, context, 0, 0, 0, 0, batch.num_decodes)
        fits = reserves or needed < replicas[replica].free_blocks
        if not fits or step_s < 0 or step_s > SAME_DURATION * duration_s:
            break
        replicas[replica].free_blocks -= needed
        end_s += step_s
        num_steps += 1
    if num_steps > 1 and settings.scheduler == LIGHTLLM:
        period = max(settings.max_waiting_steps, 1)
        replicas[replica].waited_steps = (replicas[replica].waited_steps + num_steps - 2) % period + 1
    if num_steps > 1 and not reserves:
        for position in range(batch.num_listed):
            i = batches[slot, MEMBERS, position]
            num_tokens = sequences[i].processed_tokens + num_steps - 1
            num_blocks = (num_tokens + settings.block_size - 1) // settings.block_size
            sequences[i].num_blocks = max(sequences[i].num_blocks, num_blocks)
    return num_steps, end_s


@inner
def start(
    tables: SequenceTables,
    prices: Prices,
    trail: Trail | None,
    run: RunTables,
    replica: int,
    slot: int,
    size: int,
    now_s: float,
) -> int:
    """Start the batch of `slot`, `size` requests beside its decode group, or a run of equal decode steps: price it,
    advance to its end, record it.

    Returns DONE, OUT_OF_STEPS or OUT_OF_TABLES.
    """
    settings, cost, clock = tables.settings, prices.cost, tables.clock
    granularity = 1
    if prices.tables is not None:
        granularity = prices.tables.granularity
    batch = batch_of(tables, run.requests, replica, slot, size, granularity, now_s)
    if cost is not None:
        if 0 < cost.recorded_step_s.size <= clock[0].batches:
            return OUT_OF_STEPS
    passage = passage_of(tables, prices, trail, clock, batch, replica, now_s)
    if passage.end_s < now_s:
        clock[0].culprit = batch.num_requests
        return OUT_OF_TABLES
    num_steps, end_s = 1, passage.end_s
    late_gap_s = (
        end_s - batch.late_since_s / (batch.paused + batch.resumed) if batch.paused + batch.resumed > 0 else 0.0
    )
    is_alone = batch.num_prompts == 0 and settings.num_stages == 1 and tables.replicas[replica].num_ready == 0
    # Blocks of a restarted request may let it in again at the next step.
    goes_on = settings.fuses_steps == 1 and settings.scheduler != USER and not tables.replicas[replica].has_restarted
    if cost is not None:
        goes_on = goes_on and cost.recorded_step_s.size == 0
    if goes_on and is_alone:
        horizon_s = next_arrival_s(settings, run.sessions, run.requests, run.clock)
        if (settings.concurrency > 0 or run.sessions is not None) and clock[0].queued > 0:
            horizon_s = min(horizon_s, run.events[0].time_s)
        if end_s < horizon_s:
            num_steps, end_s = take_equal_steps(tables, prices, batch, replica, slot, now_s, end_s, horizon_s)
            tables.stages[replica, 0] = end_s
    if settings.num_stages > 1:
        count_pauses(tables, slot, size, passage)
    if trail is not None:
        leave_trail(tables, trail, clock, slot, size, now_s, end_s)
    record_batch(tables, run, batch, replica, slot, num_steps, now_s, end_s, late_gap_s)
    clock[0].queued = push(run.events.time_s, run.events.slot, clock[0].queued, end_s, slot)
    return DONE


@inner
def batch_of(
    tables: SequenceTables, requests: Requests, replica: int, slot: int, size: int, granularity: int, now_s: float
) -> Batch:
    """Return the sums over the `size` requests of a slot's batch and its decode group; waits until now are counted."""
    settings, sequences, slots = tables.settings, tables.sequences, tables.slots
    num_prompts, prompt_tokens, squares, cached, context_tokens, sampled = 0, 0, 0, 0, 0, 0
    pairs = 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    members, tokens = tables.batches[slot, MEMBERS], tables.batches[slot, TOKENS]
    for position in range(size):
        i = members[position]
        processed, left_s = sequences[i].processed_tokens, sequences[i].left_stage_s
        if sequences[i].is_prefilled:
            context_tokens += processed
            if left_s < now_s:
                paused += 1
                late_since_s += left_s
        else:
            chunk = tokens[position]
            num_prompts += 1
            prompt_tokens += chunk
            pairs += chunk * (processed + 0.5 * chunk)
            squares += chunk * chunk
            cached += ceil_to(processed, granularity)
            if processed + chunk == sequences[i].prompt_tokens:
                sampled += 1
                if not is_unset(requests[i].first_token_s):
                    resumed += 1
                    late_since_s += sequences[i].last_token_s
        if left_s < now_s and settings.num_stages == 1:
            sequences[i].paused_s += now_s - left_s
    num_requests = size
    if slots[slot].has_group:
        num_requests += slots[slot].group_size
        context_tokens += slots[slot].group_tokens
        left_s = slots[slot].group_left_s
        if left_s < now_s:
            paused += slots[slot].group_size
            late_since_s += slots[slot].group_size * left_s
            if settings.num_stages == 1:
                slots[slot].group_paused_s += now_s - left_s
    num_decodes = num_requests - num_prompts
    return Batch(
        size,
        num_requests,
        num_decodes,
        num_prompts,
        prompt_tokens,
        squares,
        cached,
        context_tokens,
        sampled + num_decodes,
        pairs,
        paused,
        resumed,
        late_since_s,
        tables.replicas[replica].num_running,
    )


@inner
def batch_device_s(cost: StepCost, clock: Records[PerRequestClock], batch: Batch) -> float:
    """Price a batch on the device, by the recorded durations where there are any."""
    if cost.recorded_step_s.size > 0:
        return cost.recorded_step_s[clock[0].batches]
    return model_step_s(cost, batch.num_decodes, batch.context_tokens, batch.prompt_tokens, batch.pairs, batch.sampled)


@inner
def passage_of(
    tables: SequenceTables,
    prices: Prices,
    trail: Trail | None,
    clock: Records[PerRequestClock],
    batch: Batch,
    replica: int,
    now_s: float,
) -> Passage:
    """Price a batch and take it through the pipeline; returns its `Passage`, which ends before it starts where the
    batch lies outside the look-up tables.
    """
    settings, stages = tables.settings, tables.stages
    if prices.cost is not None:
        cost = prices.cost
        device_s = batch_device_s(cost, clock, batch)
        if settings.num_stages == 1:
            return Passage(now_s, now_s + with_host(cost, device_s, batch.num_running), 0.0)
        host_s = cost.host_step_s + cost.host_request_s * batch.num_running
        ready_s = now_s if cost.host_overlaps else now_s + host_s
        stage_s = device_s / settings.num_stages
        passage = through_stages(settings, trail, stages, clock, replica, ready_s, stage_s, 0.0)
        if cost.host_overlaps:
            return Passage(passage.start_s, max(passage.end_s, now_s + host_s), passage.between_s)
        return passage
    assert prices.tables is not None
    stage_s = table_stage_s(
        prices.tables,
        batch.num_decodes,
        batch.context_tokens,
        batch.num_prompts,
        batch.prompt_tokens,
        batch.squares,
        batch.cached,
        batch.num_requests,
    )
    if stage_s < 0:
        return Passage(now_s, -np.inf, 0.0)
    send_s = 0.0
    if settings.num_stages > 1:
        send_s = prices.tables.send_recv_s[ceil_to(batch.num_decodes + batch.prompt_tokens, 8)]
    return through_stages(settings, trail, stages, clock, replica, now_s, stage_s, send_s)


@inner
def count_pauses(tables: SequenceTables, slot: int, size: int, passage: Passage) -> None:
    """Count what the requests of a batch waited before the pipeline's first stage and between stages."""
    sequences, slots = tables.sequences, tables.slots
    if slots[slot].has_group:
        slots[slot].group_paused_s += passage.between_s + (passage.start_s - slots[slot].group_left_s)
    for position in range(size):
        i = tables.batches[slot, MEMBERS, position]
        sequences[i].paused_s += passage.between_s
        if is_unset(sequences[i].left_stage_s):
            sequences[i].started_s = passage.start_s
        else:
            sequences[i].paused_s += passage.start_s - sequences[i].left_stage_s


@inner
def leave_trail(
    tables: SequenceTables,
    trail: Trail,
    clock: Records[PerRequestClock],
    slot: int,
    size: int,
    now_s: float,
    end_s: float,
) -> None:
    """Write what a batch holds; without pipeline stages, also when it runs."""
    if tables.settings.num_stages == 1:
        trail.stage_s[clock[0].rows, 0, 0] = now_s
        trail.stage_s[clock[0].rows, 0, 1] = end_s
    for position in range(size):
        trail.members[clock[0].members, 0] = clock[0].batches
        trail.members[clock[0].members, 1] = tables.batches[slot, MEMBERS, position]
        trail.members[clock[0].members, 2] = tables.batches[slot, TOKENS, position]
        clock[0].members += 1


@inner
def record_batch(
    tables: SequenceTables,
    run: RunTables,
    batch: Batch,
    replica: int,
    slot: int,
    num_steps: int,
    now_s: float,
    end_s: float,
    late_gap_s: float,
) -> None:
    """Mark the slot as busy until `end_s`, and write the row of its step, or of its run of equal steps."""
    replicas, slots, steps, clock = tables.replicas, tables.slots, run.steps, tables.clock
    replicas[replica].has_restarted = 0
    slots[slot].num_requests = batch.num_requests
    slots[slot].num_listed = batch.num_listed
    slots[slot].num_steps = num_steps
    slots[slot].start_s = now_s
    slots[slot].end_s = end_s
    replicas[replica].num_in_flight += 1
    row = clock[0].rows
    steps[row].start_s = now_s
    steps[row].duration_s = end_s - now_s
    steps[row].num_steps = num_steps
    steps[row].replica = replica
    steps[row].decode_tokens = batch.num_decodes
    steps[row].prefill_tokens = batch.prompt_tokens
    steps[row].num_prefills = batch.num_prompts
    steps[row].num_sampled = batch.sampled
    steps[row].context_tokens = batch.context_tokens - batch.num_decodes
    steps[row].prefill_pairs = batch.pairs
    steps[row].used_blocks = tables.settings.num_blocks - replicas[replica].free_blocks
    steps[row].num_running = batch.num_running
    steps[row].num_waiting = replicas[replica].num_waiting
    steps[row].paused_tokens = batch.paused
    steps[row].resumed_tokens = batch.resumed
    steps[row].late_gap_s = late_gap_s
    clock[0].rows += 1
    clock[0].batches += 1


@entry
def run_per_request(tables: SequenceTables, prices: Prices, trail: Trail | None, run: RunTables) -> int:
    """Advance the simulation until all requests have finished, the buffer of steps is full, or `end_s` has come.

    Args:
        tables: the replicas; changed in place.
        prices: seconds of a step.
        trail: where to write what each batch held, or None.
        run: requests, events and results; `run.clock[0].rows` says how many rows of `run.steps` were written.

    Returns:
        DONE, MORE, STUCK, OUT_OF_STEPS, OUT_OF_TABLES or ASK_POLICY: call `form_custom_batch`, then this again.
    """
    settings, replicas, slots, clock = tables.settings, tables.replicas, tables.slots, tables.clock
    if not clock[0].answered:
        clock[0].rows = 0
        clock[0].members = 0
    num_slots = settings.num_replicas * settings.num_stages
    while True:
        if clock[0].replica == NONE:
            event_s = run.events[0].time_s if clock[0].queued > 0 else np.inf
            arrival_s = next_arrival_s(settings, run.sessions, run.requests, run.clock)
            if min(event_s, arrival_s) > settings.end_s:
                return DONE
            if arrival_s <= event_s:
                if arrival_s == np.inf:
                    return DONE if clock[0].finished >= run.requests.size else STUCK
                deliver(tables, run, arrival_s)
                continue
            slot = run.events[0].slot
            clock[0].queued = pop(run.events.time_s, run.events.slot, clock[0].queued)
            clock[0].now_s = event_s
            if slot >= num_slots:
                clock[0].replica = slot - num_slots
                replicas[clock[0].replica].is_awake = 0
            else:
                clock[0].replica = slot // settings.num_stages
                complete(tables, trail, run, clock[0].replica, slot, event_s)
        replica, now_s = clock[0].replica, clock[0].now_s
        while replicas[replica].num_in_flight < settings.num_stages:
            if clock[0].rows >= run.steps.size:
                return MORE
            if trail is not None:
                if clock[0].members + tables.batches.shape[2] > trail.members.shape[0]:
                    return MORE
            slot = replica * settings.num_stages
            while slots[slot].num_requests > 0:
                slot += 1
            if settings.scheduler != USER:
                size = form_batch(tables, run.requests, replica, slot, now_s)
            elif clock[0].answered:
                size = clock[0].custom_size
                clock[0].answered = 0
            else:
                clock[0].slot = slot
                return ASK_POLICY
            if size == 0 and not slots[slot].has_group:
                break
            status = start(tables, prices, trail, run, replica, slot, size, now_s)
            if status != DONE:
                return status
        clock[0].replica = NONE


@inner
def form_batch(tables: SequenceTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """Form the next batch of a replica by its scheduler; returns the number of requests beside the decode group."""
    settings, sequences, replicas = tables.settings, tables.sequences, tables.replicas
    slots, batches = tables.slots, tables.batches
    if settings.scheduler == VLLM_V0:
        return form_batch_vllm_v0(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
    if settings.scheduler == SARATHI:
        return form_batch_sarathi(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
    if settings.scheduler == ORCA:
        return form_batch_orca(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
    if settings.scheduler == FASTER_TRANSFORMER:
        return form_batch_faster_transformer(settings, requests, sequences, replicas, batches, replica, slot, now_s)
    return form_batch_lightllm(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
