"""The per-request loop: serving engines whose batches may be any subset of a replica's requests, and users' own
policies.

It walks over the requests of a batch, once when it is formed and once when it ends, but for those that decode together
again and again (`serving.per_request.decode_groups`). Between two events, equal decode steps of one batch are taken
at once. A replica of
`num_stages` pipeline stages has that many batches in flight; they pass the stages in order, and one that waits for a
stage was formed before.

Events are ordered by (time, arrivals before batch ends, slot).
"""

import numpy as np

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import entry, inner
from windtunnel.serving.cluster.routers import route
from windtunnel.serving.loop.arrivals import next_arrival_s, take_next
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
from windtunnel.serving.state.per_request import ASSIGNED, FASTER_TRANSFORMER, LIGHTLLM, ORCA, SARATHI, USER, VLLM_V0
from windtunnel.serving.state.records import NONE
from windtunnel.serving.state.status import ASK_POLICY, DONE, MORE, OUT_OF_STEPS, OUT_OF_TABLES, STUCK


@inner
def deliver(settings, sessions, requests, sequences, replicas, events, clock, now_s):
    """Send the next request to a replica; one with a batch to spare wakes."""
    i = take_next(sessions, requests, clock, now_s)
    requests[i].arrival_s = now_s
    requests[i].sequence = clock[0].sent
    clock[0].sent += 1
    replica = requests[i].rank if settings.router == ASSIGNED else route(settings, None, sessions, replicas, clock, i)
    if sessions is not None and sessions.session[i] != NONE:
        sessions.replica[sessions.session[i]] = replica
    requests[i].rank = replica
    replicas[replica].num_outstanding += 1
    put_last(sequences, replicas, replica, i)
    if replicas[replica].num_in_flight < settings.num_stages and not replicas[replica].is_awake:
        replicas[replica].is_awake = 1
        slot = settings.num_replicas * settings.num_stages + replica
        clock[0].queued = push(events.time_s, events.slot, clock[0].queued, now_s, slot)


@inner
def complete(settings, trail, sessions, requests, sequences, replicas, slots, batches, clock, replica, slot, now_s):
    """Apply the end of a batch: finished requests leave, those that it decoded are its decode group, others ready
    again."""
    row = ready_row(settings, replica)
    size, num_steps = slots[slot].num_listed, slots[slot].num_steps
    unfinished = NONE
    if replicas[replica].ready_group != slot:
        dissolve(settings, sequences, replicas, slots, batches, replica)
    if slots[slot].has_group:
        advance(settings, sessions, requests, sequences, replicas, slots, batches, clock, replica, slot, now_s)
    joins = False
    if trail is None:
        joins = may_join(settings, replicas, slots, sequences, batches, replica, slot)
    num_ready = replicas[replica].num_ready
    num_ready_before, has_joined = num_ready, False
    members, tokens, ready = batches[slot, MEMBERS], batches[slot, TOKENS], batches[row, MEMBERS]
    for position in range(size):
        i = members[position]
        processed = sequences[i].processed_tokens + tokens[position] * num_steps
        has_decoded = sequences[i].is_prefilled
        sequences[i].left_stage_s = now_s
        if not sequences[i].is_prefilled and processed >= sequences[i].prompt_tokens:
            sequences[i].is_prefilled = 1
            processed += 1
            if requests[i].first_token_s != requests[i].first_token_s:
                requests[i].first_token_s = now_s
        sequences[i].processed_tokens = processed
        if processed >= sequences[i].total_tokens:
            requests[i].finish_s = now_s
            conclude(settings, sessions, requests, clock, i, now_s)
            replicas[replica].num_outstanding -= 1
            if settings.scheduler != FASTER_TRANSFORMER:
                release(sequences, replicas, replica, i)
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
        for position in range(size):
            i = batches[slot, MEMBERS, position]
            if sequences[i].processed_tokens < sequences[i].total_tokens:
                continue
            if unfinished == NONE:
                release(sequences, replicas, replica, i)
            elif settings.leaks_blocks:
                replicas[replica].num_running -= 1
            else:  # freed with the batch's last request
                sequences[unfinished].num_blocks += sequences[i].num_blocks
                replicas[replica].num_running -= 1
                sequences[i].num_blocks = 0
    slots[slot].num_requests = 0
    replicas[replica].num_in_flight -= 1


@inner
def fused_steps(settings, sequences, replicas, slots, batches, replica, slot, size):
    """Most decode steps that the batch may take before one of its requests ends, and, in the replica's scratch list,
    how many of its requests need a block by the number of steps from now, modulo the block size.
    """
    row = ready_row(settings, replica)
    for phase in range(settings.block_size):
        batches[row, SCRATCH, phase] = 0
    fewest = np.int64(1) << 40
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
def through_stages(settings, trail, stages, clock, replica, ready_s, stage_s, send_s):
    """Take a batch that is ready at `ready_s` through the replica's stages: `stage_s` in each, `send_s` to the next.

    Returns when it begins in the first stage and ends in the last, and how long it waits between stages.
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
    return start_s, end_s, between_s


@inner
def take_equal_steps(
    settings, cost, tables, sequences, replicas, slots, batches, replica, slot, size, num_decodes, context_tokens,
    now_s, end_s, horizon_s,
):  # fmt: skip
    """After a decode step from `now_s` to `end_s`: take those that follow up to `horizon_s`, as long as they take about
    as long, blocks last and no request ends.

    Returns how many steps there are with the first one, and when the last one ends.
    """
    row, running = ready_row(settings, replica), replicas[replica].num_running
    most = fused_steps(settings, sequences, replicas, slots, batches, replica, slot, size)
    reserves = reserves_blocks(settings)
    duration_s, num_steps = end_s - now_s, 1
    while num_steps < most and end_s < horizon_s and end_s <= settings.end_s:
        context = context_tokens + num_steps * num_decodes
        needed = 0 if reserves else batches[row, SCRATCH, num_steps % settings.block_size]
        step_s = 0.0
        if cost is not None:
            step_s = with_host(cost, model_step_s(cost, num_decodes, context, 0, 0.0, 0), running)
        if tables is not None:
            step_s = table_stage_s(tables, num_decodes, context, 0, 0, 0, 0, num_decodes)
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
        for position in range(size):
            i = batches[slot, MEMBERS, position]
            held = sequences[i].processed_tokens + num_steps - 1
            num_blocks = (held + settings.block_size - 1) // settings.block_size
            sequences[i].num_blocks = max(sequences[i].num_blocks, num_blocks)
    return num_steps, end_s


@inner
def start(
    settings, cost, tables, trail, sessions, requests, sequences, replicas, slots, batches, stages, events, clock,
    steps, replica, slot, size, now_s,
):  # fmt: skip
    """Start the batch of `slot`, `size` requests beside its decode group, or a run of equal decode steps; writes its
    row and its end event.

    Returns DONE, OUT_OF_STEPS or OUT_OF_TABLES.
    """
    granularity = 1
    if tables is not None:
        granularity = tables.granularity
    num_prompts, prompt_tokens, squares, cached, context_tokens, sampled = 0, 0, 0, 0, 0, 0
    pairs = 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    members, tokens = batches[slot, MEMBERS], batches[slot, TOKENS]
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
                if requests[i].first_token_s == requests[i].first_token_s:
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
    sampled += num_decodes
    running = replicas[replica].num_running

    end_s = now_s
    between_s, start_s = 0.0, now_s
    if cost is not None:
        device_s = 0.0
        if cost.recorded_step_s.size == 0:
            device_s = model_step_s(cost, num_decodes, context_tokens, prompt_tokens, pairs, sampled)
        elif clock[0].batches >= cost.recorded_step_s.size:
            return OUT_OF_STEPS
        else:
            device_s = cost.recorded_step_s[clock[0].batches]
        host_s = cost.host_step_s + cost.host_request_s * running
        if settings.num_stages == 1:
            end_s = now_s + with_host(cost, device_s, running)
        else:
            if not cost.host_overlaps:
                end_s += host_s
            stage_s = device_s / settings.num_stages
            start_s, end_s, between_s = through_stages(settings, trail, stages, clock, replica, end_s, stage_s, 0.0)
            if cost.host_overlaps:
                end_s = max(end_s, now_s + host_s)
    if tables is not None:
        stage_s = table_stage_s(
            tables, num_decodes, context_tokens, num_prompts, prompt_tokens, squares, cached, num_requests
        )
        if stage_s < 0:
            clock[0].culprit = num_requests
            return OUT_OF_TABLES
        send_s = 0.0
        if settings.num_stages > 1:
            send_s = tables.send_recv_s[ceil_to(num_decodes + prompt_tokens, 8)]
        start_s, end_s, between_s = through_stages(settings, trail, stages, clock, replica, end_s, stage_s, send_s)
    late_gap_s = end_s - late_since_s / (paused + resumed) if paused + resumed > 0 else 0.0

    num_steps = 1
    is_alone = num_prompts == 0 and settings.num_stages == 1 and replicas[replica].num_ready == 0
    # Blocks of a restarted request may let it in again at the next step.
    goes_on = settings.fuses_steps == 1 and settings.scheduler != USER and not replicas[replica].has_restarted
    if cost is not None:
        goes_on = goes_on and cost.recorded_step_s.size == 0
    horizon_s = 0.0
    if goes_on and is_alone:
        horizon_s = next_arrival_s(settings, sessions, requests, clock)
        if (settings.concurrency > 0 or sessions is not None) and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s)
    if end_s < horizon_s:
        num_steps, end_s = take_equal_steps(
            settings, cost, tables, sequences, replicas, slots, batches, replica, slot, size, num_decodes,
            context_tokens, now_s, end_s, horizon_s,
        )  # fmt: skip
        stages[replica, 0] = end_s
    if trail is not None and settings.num_stages == 1:
        trail.stage_s[clock[0].rows, 0, 0] = now_s
        trail.stage_s[clock[0].rows, 0, 1] = end_s

    if settings.num_stages > 1:
        if slots[slot].has_group:
            slots[slot].group_paused_s += between_s + (start_s - slots[slot].group_left_s)
        for position in range(size):
            i = batches[slot, MEMBERS, position]
            sequences[i].paused_s += between_s
            if sequences[i].left_stage_s == sequences[i].left_stage_s:
                sequences[i].paused_s += start_s - sequences[i].left_stage_s
            else:
                sequences[i].started_s = start_s
    if trail is not None:
        for position in range(size):
            trail.members[clock[0].members, 0] = clock[0].batches
            trail.members[clock[0].members, 1] = batches[slot, MEMBERS, position]
            trail.members[clock[0].members, 2] = batches[slot, TOKENS, position]
            clock[0].members += 1

    replicas[replica].has_restarted = 0
    slots[slot].num_requests = num_requests
    slots[slot].num_listed = size
    slots[slot].num_steps = num_steps
    slots[slot].start_s = now_s
    slots[slot].end_s = end_s
    replicas[replica].num_in_flight += 1
    row = clock[0].rows
    steps[row].start_s = now_s
    steps[row].duration_s = end_s - now_s
    steps[row].num_steps = num_steps
    steps[row].replica = replica
    steps[row].decode_tokens = num_decodes
    steps[row].prefill_tokens = prompt_tokens
    steps[row].num_prefills = num_prompts
    steps[row].num_sampled = sampled
    steps[row].context_tokens = context_tokens - num_decodes
    steps[row].prefill_pairs = pairs
    steps[row].used_blocks = settings.num_blocks - replicas[replica].free_blocks
    steps[row].num_running = running
    steps[row].num_waiting = replicas[replica].num_waiting
    steps[row].paused_tokens = paused
    steps[row].resumed_tokens = resumed
    steps[row].late_gap_s = late_gap_s
    clock[0].rows += 1
    clock[0].batches += 1
    clock[0].queued = push(events.time_s, events.slot, clock[0].queued, end_s, slot)
    return DONE


@entry
def run_per_request(
    settings, cost, tables, trail, sessions, requests, sequences, replicas, slots, batches, stages, events, clock, steps
):  # fmt: skip
    """Advance the simulation until all requests have finished, `steps` is full, or `settings.end_s` has come.


    Args:
        settings, requests, walks, replicas, slots, batches, stages, events, clock: see `serving.state.per_request`;
            changed in place.
        cost, tables: one of them prices steps; the other is None.
        trail: where to write what each batch held, or None.
        sessions: `serving.state.records.Sessions`, or None where no request waits for another.
        steps: buffer for the rows of this call; `clock[0].rows` says how many were written.

    Returns:
        DONE, MORE, STUCK, OUT_OF_STEPS, OUT_OF_TABLES or ASK_POLICY: call `asked.form_custom_batch`, then this again.
    """
    if not clock[0].answered:
        clock[0].rows = 0
        clock[0].members = 0
    num_slots = settings.num_replicas * settings.num_stages
    while True:
        if clock[0].replica == NONE:
            event_s = events[0].time_s if clock[0].queued > 0 else np.inf
            arrival_s = next_arrival_s(settings, sessions, requests, clock)
            if min(event_s, arrival_s) > settings.end_s:
                return DONE
            if arrival_s <= event_s:
                if arrival_s == np.inf:
                    return DONE if clock[0].finished >= requests.size else STUCK
                deliver(settings, sessions, requests, sequences, replicas, events, clock, arrival_s)
                continue
            slot = events[0].slot
            clock[0].queued = pop(events.time_s, events.slot, clock[0].queued)
            clock[0].now_s = event_s
            if slot >= num_slots:
                clock[0].replica = slot - num_slots
                replicas[clock[0].replica].is_awake = 0
            else:
                clock[0].replica = slot // settings.num_stages
                complete(
                    settings,
                    trail,
                    sessions,
                    requests,
                    sequences,
                    replicas,
                    slots,
                    batches,
                    clock,
                    clock[0].replica,
                    slot,
                    event_s,
                )
        replica, now_s = clock[0].replica, clock[0].now_s
        while replicas[replica].num_in_flight < settings.num_stages:
            if clock[0].rows >= steps.size:
                return MORE
            if trail is not None and clock[0].members + batches.shape[2] > trail.members.shape[0]:
                return MORE
            slot = replica * settings.num_stages
            while slots[slot].num_requests > 0:
                slot += 1
            if settings.scheduler == VLLM_V0:
                size = form_batch_vllm_v0(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
            elif settings.scheduler == SARATHI:
                size = form_batch_sarathi(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
            elif settings.scheduler == ORCA:
                size = form_batch_orca(settings, requests, sequences, replicas, slots, batches, replica, slot, now_s)
            elif settings.scheduler == FASTER_TRANSFORMER:
                size = form_batch_faster_transformer(
                    settings, requests, sequences, replicas, batches, replica, slot, now_s
                )
            elif settings.scheduler == LIGHTLLM:
                size = form_batch_lightllm(
                    settings, requests, sequences, replicas, slots, batches, replica, slot, now_s
                )
            elif clock[0].answered:
                size = clock[0].custom_size
                clock[0].answered = 0
            else:
                clock[0].slot = slot
                return ASK_POLICY
            if size == 0 and not slots[slot].has_group:
                break
            status = start(
                settings, cost, tables, trail, sessions, requests, sequences, replicas, slots, batches, stages, events,
                clock, steps, replica, slot, size, now_s,
            )  # fmt: skip
            if status != DONE:
                return status
        clock[0].replica = NONE
