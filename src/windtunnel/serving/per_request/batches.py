"""Batches of schedulers that may choose any subset of a replica's requests: Vidur's five, and users' own policies.

A batch's requests are visited once when it is formed and once when it ends, except those that decode together again and
again (`serving.per_request.decode_groups`). Between two events, equal decode steps of one batch are taken at once. A
replica of `num_stages` pipeline stages has that many batches in flight; they pass the stages in order, and one that
waits for a stage was formed before.
"""

import math
from typing import NamedTuple

import numpy as np

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64, is_unset
from windtunnel.serving.clients import conclude, horizon_of_steps
from windtunnel.serving.codes import FASTER_TRANSFORMER, LIGHTLLM, ORCA, SARATHI, USER, VLLM_V0
from windtunnel.serving.per_request.custom_batch import form_custom_batch, list_waiting
from windtunnel.serving.per_request.decode_groups import (
    MEMBERS,
    PHASES,
    SCRATCH,
    TOKENS,
    advance,
    dissolve,
    group_context_squares,
    join,
    may_join,
    ready_row,
    reserves_blocks,
)
from windtunnel.serving.per_request.policies import (
    computed_tokens,
    form_batch_faster_transformer,
    form_batch_lightllm,
    form_batch_orca,
    form_batch_sarathi,
    form_batch_vllm_v0,
    release,
)
from windtunnel.serving.schedulers.step_batch import Batch, emptied, fails_at_s, write_row
from windtunnel.serving.schedulers.step_cost import (
    SAME_DURATION,
    Passage,
    decode_attention_s,
    decode_step_s,
    deviation,
    prefill_attention_s,
    price_batch,
    repeated_tokens,
    through_stages,
    with_host,
    with_stages,
)
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.per_request import StageTables
from windtunnel.serving.state.pools import Pools
from windtunnel.serving.state.records import NONE, Requests, StepCost
from windtunnel.serving.state.status import ASK_POLICY, DONE, OUT_OF_STEPS, OUT_OF_TABLES, REFUSED
from windtunnel.serving.state.tables import PoolTables, RunTables


class Listed(NamedTuple):
    """What a batch of one rank has beside the counts of a `Batch`; tokens."""

    num_listed: int  # requests beside the decode group
    squares: int  # sum of the squares of the prompt chunks
    cached: int  # tokens processed before the chunks, each request's rounded up to the look-up tables' granularity
    deviation_tokens: float  # standard deviation of the contexts of the decoding requests
    paused: int  # decoding requests that did not decode in the step before


@inner
def complete_batch(pool: PoolTables, run: RunTables, pools: Pools | None, replica: int, slot: int, now_s: float) -> int:
    """Apply the end of a batch: finished requests leave, those that it decoded are its decode group, others are ready
    again.

    Returns how many requests leave for a replica that decodes: the scratch list of the replica's row has them.
    """
    row = ready_row(pool, replica)
    size, num_steps = pool.slots[slot].num_listed, pool.slots[slot].num_steps
    unfinished = NONE
    if pool.ranks[replica].ready_group != slot:
        dissolve(pool, replica)
    if pool.slots[slot].has_group:
        advance(pool, run, replica, slot, now_s)
    joins = False
    if run.trail is None:
        joins = may_join(pool, replica, slot)
    num_ready = pool.ranks[replica].num_ready
    num_ready_before, num_leaving, has_joined = num_ready, 0, False
    members, tokens, ready = pool.batches[slot, MEMBERS], pool.batches[slot, TOKENS], pool.batches[row, MEMBERS]
    for position in range(size):
        i = members[position]
        has_decoded = pool.sequences[i].is_prefilled
        count_tokens(pool, run.requests, i, tokens[position] * num_steps, now_s)
        if pool.sequences[i].processed_tokens >= pool.sequences[i].total_tokens:
            if pools is not None and pools.transfers[i].later_output_tokens > 0:
                pool.batches[row, SCRATCH, num_leaving] = i
                num_leaving += 1
                run.requests[i].computed_tokens = computed_tokens(pool.sequences, i)
                pool.ranks[replica].num_running -= 1
                continue
            end_request(pool, run, replica, i, now_s)
        elif has_decoded and joins:
            join(pool, run.requests, slot, i, now_s)
            has_joined = True
        else:
            unfinished = i
            ready[num_ready] = i
            num_ready += 1
    pool.ranks[replica].num_ready = num_ready
    if has_joined or (pool.slots[slot].has_group and pool.slots[slot].group_size > 0):
        pool.ranks[replica].ready_group = slot
        pool.ranks[replica].group_position = num_ready_before
    pool.slots[slot].has_group = 0
    if pool.settings.scheduler == FASTER_TRANSFORMER:
        release_together(pool, replica, slot, unfinished)
    pool.slots[slot].num_requests = 0
    pool.ranks[replica].num_in_flight -= 1
    return num_leaving


@inner
def end_request(pool: PoolTables, run: RunTables, replica: int, i: int, now_s: float) -> None:
    """End request `i`, which has its last token; its blocks are freed, FasterTransformer's with the whole batch."""
    run.requests[i].finish_s = now_s
    conclude(pool.settings, run, i, now_s)
    pool.ranks[replica].num_outstanding -= 1
    if pool.settings.scheduler != FASTER_TRANSFORMER:
        release(pool, replica, i)


@inner
def count_tokens(pool: PoolTables, requests: Requests, i: int, num_tokens: int, now_s: float) -> None:
    """Count `num_tokens` that request `i` has processed at `now_s`, and the token that the end of its prompt gives."""
    processed = pool.sequences[i].processed_tokens + num_tokens
    pool.sequences[i].left_stage_s = now_s
    if not pool.sequences[i].is_prefilled and processed >= pool.sequences[i].prompt_tokens:
        pool.sequences[i].is_prefilled = 1
        processed += 1
        if is_unset(requests[i].first_token_s):
            requests[i].first_token_s = now_s
    pool.sequences[i].processed_tokens = processed


@inner
def release_together(pool: PoolTables, replica: int, slot: int, unfinished: int) -> None:
    """Free the blocks of a FasterTransformer batch's finished requests with its last one; `unfinished` is one that goes
    on, or NONE.
    """
    for position in range(pool.slots[slot].num_listed):
        i = pool.batches[slot, MEMBERS, position]
        if pool.sequences[i].processed_tokens < pool.sequences[i].total_tokens:
            continue
        if unfinished == NONE:
            release(pool, replica, i)
        elif pool.settings.leaks_blocks:
            pool.ranks[replica].num_running -= 1
        else:  # freed with the batch's last request
            pool.sequences[unfinished].num_blocks += pool.sequences[i].num_blocks
            pool.ranks[replica].num_running -= 1
            pool.sequences[i].num_blocks = 0


@inner
def start_batches(
    pool: PoolTables, cost: StepCost, run: RunTables, fleet: ReplicaFleet | None, replica: int, now_s: float
) -> int:
    """Form and start batches while the replica has an idle slot and something to run.

    Returns DONE, OUT_OF_STEPS, OUT_OF_TABLES, REFUSED or ASK_POLICY: call again with the answer in `run.pairs`.
    """
    clock, size = run.clock, 0
    while pool.ranks[replica].num_in_flight < pool.settings.num_stages:
        slot = replica * pool.settings.num_stages
        while pool.slots[slot].num_requests > 0:
            slot += 1
        if pool.settings.scheduler != USER:
            size = form_batch(pool, run.requests, replica, slot, now_s)
        if run.waiting is not None and pool.settings.scheduler == USER:
            if not clock[0].answered:
                list_waiting(pool, run.requests, replica, run.waiting)
                clock[0].slot = slot
                return ASK_POLICY
            clock[0].answered = 0
            size = form_custom_batch(pool, run, replica, slot, now_s)
            if size < 0:
                clock[0].problem = size
                return REFUSED
        if size == 0 and not pool.slots[slot].has_group:
            return DONE
        status = start_batch(pool, cost, run, fleet, replica, slot, size, now_s)
        if status != DONE:
            return status
    return DONE


@inner
def form_batch(pool: PoolTables, requests: Requests, replica: int, slot: int, now_s: float) -> int:
    """Form the next batch of a replica by its scheduler; returns the number of requests beside the decode group."""
    if pool.settings.scheduler == VLLM_V0:
        return form_batch_vllm_v0(pool, requests, replica, slot, now_s)
    if pool.settings.scheduler == SARATHI:
        return form_batch_sarathi(pool, requests, replica, slot, now_s)
    if pool.settings.scheduler == ORCA:
        return form_batch_orca(pool, requests, replica, slot, now_s)
    if pool.settings.scheduler == FASTER_TRANSFORMER:
        return form_batch_faster_transformer(pool, requests, replica, slot, now_s)
    return form_batch_lightllm(pool, requests, replica, slot, now_s)


@inner
def start_batch(
    pool: PoolTables,
    cost: StepCost,
    run: RunTables,
    fleet: ReplicaFleet | None,
    replica: int,
    slot: int,
    size: int,
    now_s: float,
) -> int:
    """Start the batch of `slot`, `size` requests beside its decode group, or a run of equal decode steps: price it,
    advance to its end, record it.

    A step that its replica's next failure will cut short is written with its time and no tokens, and never ends.

    Returns DONE, OUT_OF_STEPS or OUT_OF_TABLES.
    """
    clock = run.clock
    batch, listed = batch_of(pool, cost, run.requests, replica, slot, size, now_s)
    has_recorded_steps = False
    if pool.stage_tables is None:
        has_recorded_steps = cost.recorded_step_s.size > 0
        if has_recorded_steps and cost.recorded_step_s.size <= clock[0].recorded:
            return OUT_OF_STEPS
    num_requests = batch.decode_tokens + batch.num_prefills
    passage = passage_of(pool, cost, run, batch, listed, replica, slot, now_s)
    if passage.end_s < now_s:
        clock[0].culprit = num_requests
        return OUT_OF_TABLES
    num_steps, end_s, paused, late_gap_s = 1, passage.end_s, listed.paused, 0.0
    if paused + batch.resumed > 0:
        late_gap_s = end_s - batch.late_since_s / (paused + batch.resumed)
    fails_s, is_doomed = fails_at_s(pool.settings, fleet, replica), False
    if fleet is not None:
        is_doomed = end_s >= fails_s
        if is_doomed:
            end_s, paused, late_gap_s = fails_s, 0, 0.0
            run.steps[clock[0].rows].load_s = 0.0
            batch = emptied(batch)
    is_alone = batch.num_prefills == 0 and pool.settings.num_stages == 1 and pool.ranks[replica].num_ready == 0
    # Blocks of a restarted request may let it in again at the next step.
    goes_on = (
        pool.settings.fuses_steps == 1 and pool.settings.scheduler != USER and not pool.ranks[replica].has_restarted
    )
    if goes_on and is_alone and not (is_doomed or has_recorded_steps):
        horizon_s = min(horizon_of_steps(pool.settings, run, fleet), fails_s)
        if end_s < horizon_s:
            num_steps, end_s = take_equal_steps(
                pool, cost, batch, listed, replica, slot, now_s, end_s, horizon_s, fails_s
            )
            pool.stages[replica, 0] = end_s
    if pool.settings.num_stages > 1 and not is_doomed:
        count_pauses(pool, slot, size, passage)
    if run.trail is not None:
        leave_trail(pool, run, slot, size, now_s, end_s)
    pool.ranks[replica].has_restarted = 0
    pool.slots[slot].num_requests = num_requests
    pool.slots[slot].num_listed = size
    pool.slots[slot].num_steps = num_steps
    pool.ranks[replica].num_in_flight += 1
    used = pool.settings.num_blocks - pool.ranks[replica].free_blocks
    write_row(run, pool.settings.first_replica + replica, batch, num_steps, now_s, end_s, used, paused, late_gap_s)
    if not is_doomed:
        event = pool.settings.first_event + slot
        clock[0].queued = push(run.events.time_s, run.events.slot, clock[0].queued, end_s, event)
    return DONE


@inner
def batch_of(
    pool: PoolTables, cost: StepCost, requests: Requests, replica: int, slot: int, size: int, now_s: float
) -> tuple[Batch, Listed]:
    """Return the sums over the `size` requests of a slot's batch and its decode group; waits until now are counted."""
    granularity = 1
    if pool.stage_tables is not None:
        granularity = pool.stage_tables.granularity
    num_prompts, prompt_tokens, squares, cached, context_tokens, context_squares, sampled = 0, 0, 0, 0, 0, 0, 0
    pairs, attention_s = 0.0, 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    members, tokens = pool.batches[slot, MEMBERS], pool.batches[slot, TOKENS]
    for position in range(size):
        i = members[position]
        processed, left_s = pool.sequences[i].processed_tokens, pool.sequences[i].left_stage_s
        if pool.sequences[i].is_prefilled:
            context_tokens += processed
            context_squares += processed * processed
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
            if processed + chunk == pool.sequences[i].prompt_tokens:
                sampled += 1
                if not is_unset(requests[i].first_token_s):
                    resumed += 1
                    late_since_s += pool.sequences[i].last_token_s
        if left_s < now_s and pool.settings.num_stages == 1:
            pool.sequences[i].paused_s += now_s - left_s
    num_requests = size
    if pool.slots[slot].has_group:
        num_requests += pool.slots[slot].group_size
        context_tokens += pool.slots[slot].group_tokens
        context_squares += group_context_squares(pool, slot)
        left_s = pool.slots[slot].group_left_s
        if left_s < now_s:
            paused += pool.slots[slot].group_size
            late_since_s += pool.slots[slot].group_size * left_s
            if pool.settings.num_stages == 1:
                pool.slots[slot].group_paused_s += now_s - left_s
    num_decodes = num_requests - num_prompts
    deviation_tokens = 0.0
    if num_decodes > 1 and cost.longest_share > 0.0:
        deviation_tokens = deviation(num_decodes, context_tokens, context_squares)
    num_queries = num_decodes
    if pool.speculation is not None:
        num_queries = num_decodes * pool.speculation.num_queries
    sampled += num_queries
    if pool.stage_tables is None:
        repeated = repeated_tokens(pool, replica)
        attention_s = decode_attention_s(cost, num_decodes, context_tokens, prompt_tokens, deviation_tokens, repeated)
        attention_s += prefill_attention_s(cost, prompt_tokens, pairs)
    running = pool.ranks[replica].num_running
    batch = Batch(
        num_decodes,
        num_queries,
        prompt_tokens,
        num_prompts,
        sampled,
        context_tokens - num_decodes,
        pairs,
        resumed,
        late_since_s,
        num_decodes,
        num_queries + prompt_tokens,
        sampled,
        running,
        running,
        pool.ranks[replica].num_waiting,
        attention_s,
    )
    return batch, Listed(size, squares, cached, deviation_tokens, paused)


@inner
def passage_of(
    pool: PoolTables,
    cost: StepCost,
    run: RunTables,
    batch: Batch,
    listed: Listed,
    replica: int,
    slot: int,
    now_s: float,
) -> Passage:
    """Price a batch and take it through the pipeline; returns its `Passage`, which ends before it starts where the
    batch lies outside the look-up tables.
    """
    if pool.stage_tables is None:
        device_s = price_batch(pool, cost, run, batch, replica, slot % pool.settings.num_stages)
        return with_stages(pool, cost, run, replica, now_s, device_s, batch.running)
    tables = pool.stage_tables
    stage_s = table_stage_s(tables, batch, listed, batch.context_tokens + batch.decode_tokens)
    if stage_s < 0:
        return Passage(now_s, -np.inf, 0.0)
    send_s = 0.0
    if pool.settings.num_stages > 1:
        send_s = tables.send_recv_s[ceil_to(batch.decode_tokens + batch.prefill_tokens, 8)]
    return through_stages(pool, run, replica, now_s, stage_s, send_s)


@inner
def ceil_to(value: int, step: int) -> int:
    """Round `value` up to a multiple of `step`."""
    return (value + step - 1) // step * step


@inner
def table_stage_s(tables: StageTables, batch: Batch, listed: Listed, context_tokens: int) -> float:
    """Price one pipeline stage by Vidur's tables, without `send_recv`; -1.0 outside the tables.

    `vidur/execution_time_predictor/sklearn_execution_time_predictor.py`: decode attention is looked up at the mean of
    `context_tokens`, prefill attention as one prompt with the root of the squared chunks and all cached tokens.
    """
    num_decodes, size = batch.decode_tokens, batch.decode_tokens + batch.num_prefills
    num_tokens = num_decodes + batch.prefill_tokens
    rounded = ceil_to(num_tokens, 8)
    if rounded >= tables.token_s.size or num_tokens >= tables.kv_save_s.size:
        return -1.0
    stage_s = tables.token_s[rounded] + tables.kv_save_s[num_tokens]
    if num_decodes > 0:
        mean = int(context_tokens / num_decodes)
        cell = (mean + tables.granularity - 1) // tables.granularity
        if num_decodes >= tables.decode_s.shape[0] or cell >= tables.decode_s.shape[1]:
            return -1.0
        factor = tables.decode_factor if num_decodes > 1 else 1.0
        stage_s += tables.decode_s[num_decodes, cell] * factor
    if batch.num_prefills > 0:
        chunk = int(round(math.sqrt(listed.squares)))  # noqa: RUF046  numba's round gives a float
        cell = listed.cached // tables.granularity
        if cell >= tables.prefill_s.shape[0] or chunk >= tables.prefill_s.shape[1]:
            return -1.0
        factor = tables.prefill_factor if batch.num_prefills > 1 else 1.0
        stage_s += tables.prefill_s[cell, chunk] * factor
    if tables.host_s.size > 0:
        if size >= tables.host_s.size:
            return -1.0
        stage_s += tables.host_s[size]
    return stage_s


@inner
def take_equal_steps(
    pool: PoolTables,
    cost: StepCost,
    batch: Batch,
    listed: Listed,
    replica: int,
    slot: int,
    now_s: float,
    end_s: float,
    horizon_s: float,
    fails_s: float,
) -> tuple[int, float]:
    """After a decode step from `now_s` to `end_s`, take those that follow up to `horizon_s`, as long as they take about
    as long, blocks last, no request ends and the replica does not fail.

    Returns how many steps there are with the first one, and when the last one ends.
    """
    row = ready_row(pool, replica)
    most_steps = steps_until_end(pool, replica, slot, listed.num_listed)
    reserves = reserves_blocks(pool)
    duration_s, num_steps = end_s - now_s, 1
    while num_steps < most_steps and end_s < horizon_s and end_s <= pool.settings.end_s:
        context = batch.context_tokens + (num_steps + 1) * batch.decode_tokens
        needed = 0 if reserves else pool.batches[row, SCRATCH, num_steps % pool.settings.block_size]
        if pool.stage_tables is None:
            deviation_tokens, repeated = listed.deviation_tokens, repeated_tokens(pool, replica)
            attention_s = decode_attention_s(cost, batch.decode_tokens, context, 0, deviation_tokens, repeated)
            step_s = with_host(cost, decode_step_s(cost, batch.decode_tokens, attention_s), batch.running)
        else:
            step_s = table_stage_s(pool.stage_tables, batch, listed, context)
        fits = reserves or needed < pool.ranks[replica].free_blocks
        if not fits or step_s < 0 or step_s > SAME_DURATION * duration_s or end_s + step_s >= fails_s:
            break
        pool.ranks[replica].free_blocks -= needed
        end_s += step_s
        num_steps += 1
    if num_steps > 1 and pool.settings.scheduler == LIGHTLLM:
        period = max(pool.settings.max_waiting_steps, 1)
        pool.ranks[replica].waited_steps = (pool.ranks[replica].waited_steps + num_steps - 2) % period + 1
    if num_steps > 1 and not reserves:
        for position in range(listed.num_listed):
            i = pool.batches[slot, MEMBERS, position]
            num_tokens = pool.sequences[i].processed_tokens + num_steps - 1
            num_blocks = (num_tokens + pool.settings.block_size - 1) // pool.settings.block_size
            pool.sequences[i].num_blocks = max(pool.sequences[i].num_blocks, num_blocks)
    return num_steps, end_s


@inner
def steps_until_end(pool: PoolTables, replica: int, slot: int, size: int) -> int:
    """Return the most decode steps that the batch may take before one of its requests ends.

    Writes to the replica's scratch list how many of its requests need a block, by the number of steps from now modulo
    the block size.
    """
    block_size, row = pool.settings.block_size, ready_row(pool, replica)
    for phase in range(block_size):
        pool.batches[row, SCRATCH, phase] = 0
    fewest = int64(1) << 40
    if pool.slots[slot].has_group:
        steps = pool.slots[slot].group_steps
        fewest = pool.slots[slot].first_end - steps
        for phase in range(block_size):
            pool.batches[row, SCRATCH, phase] = pool.batches[slot, PHASES, (steps + phase) % block_size]
    for position in range(size):
        i = pool.batches[slot, MEMBERS, position]
        fewest = min(fewest, pool.sequences[i].total_tokens - pool.sequences[i].processed_tokens)
        steps_to_full = pool.sequences[i].num_blocks * block_size + 1 - pool.sequences[i].processed_tokens
        pool.batches[row, SCRATCH, steps_to_full % block_size] += 1
    if pool.settings.scheduler == LIGHTLLM and pool.ranks[replica].num_waiting > 0:
        fewest = min(fewest, pool.settings.max_waiting_steps - pool.ranks[replica].waited_steps + 1)
    return fewest


@inner
def count_pauses(pool: PoolTables, slot: int, size: int, passage: Passage) -> None:
    """Count what the requests of a batch waited before the pipeline's first stage and between stages."""
    if pool.slots[slot].has_group:
        pool.slots[slot].group_paused_s += passage.between_s + (passage.start_s - pool.slots[slot].group_left_s)
    for position in range(size):
        i = pool.batches[slot, MEMBERS, position]
        pool.sequences[i].paused_s += passage.between_s
        if is_unset(pool.sequences[i].left_stage_s):
            pool.sequences[i].started_s = passage.start_s
        else:
            pool.sequences[i].paused_s += passage.start_s - pool.sequences[i].left_stage_s


@inner
def leave_trail(pool: PoolTables, run: RunTables, slot: int, size: int, now_s: float, end_s: float) -> None:
    """Write what a batch holds; without pipeline stages, also when it runs."""
    clock = run.clock
    if run.trail is not None:
        if pool.settings.num_stages == 1:
            run.trail.stage_s[clock[0].rows, 0, 0] = now_s
            run.trail.stage_s[clock[0].rows, 0, 1] = end_s
        for position in range(size):
            run.trail.members[clock[0].members, 0] = clock[0].earlier_rows + clock[0].rows
            run.trail.members[clock[0].members, 1] = pool.batches[slot, MEMBERS, position]
            run.trail.members[clock[0].members, 2] = pool.batches[slot, TOKENS, position]
            clock[0].members += 1
