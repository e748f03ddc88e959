"""The steps that a slot takes: a formed batch, or the run of equal steps until the next event, as one row."""

import numpy as np

from windtunnel.compiled.heap import push
from windtunnel.compiled.jit import inner
from windtunnel.serving.cluster.router_queue import next_resend_s
from windtunnel.serving.cluster.slots import IDLE, set_busy
from windtunnel.serving.engines.sglang.scheduler import decay_new_token_ratio
from windtunnel.serving.engines.trtllm.balance import count_balance
from windtunnel.serving.kv.windows import give_back, has_blocks, take_blocks
from windtunnel.serving.loop.arrivals import next_arrival_s
from windtunnel.serving.loop.step_cost import (
    SAME_DURATION,
    decode_attention_s,
    prefill_attention_s,
    through_stages,
    with_host,
    with_loading,
)
from windtunnel.serving.schedulers.batch import decode_step_blocks, gained_tokens, passed_of_step, take_decode_step
from windtunnel.serving.state.records import BATCH, BATCH_ENDS, BATCH_TOKENS, FINISH_KEY, NONE, SGLANG, TRTLLM
from windtunnel.serving.state.status import DONE, OUT_OF_STEPS


@inner
def start_step(
    settings,
    windows,
    cost,
    cache,
    sessions,
    speculation,
    requests,
    ranks,
    slots,
    lists,
    stages,
    events,
    clock,
    steps,
    replica,
    stage,
    now_s,
    fleet,
    sglang,
):
    """Start the step that a replica's slot has formed, or a run of equal ones; writes its row and its end event.

    A step that its replica's next failure will cut short is written with its time and no tokens, and never ends.

    Returns DONE with the slot busy or idle, or OUT_OF_STEPS.
    """
    first = replica * settings.ranks_per_replica
    end = first + settings.ranks_per_replica
    any_prefill = False
    for rank in range(first, end):
        any_prefill = any_prefill or slots[rank * settings.num_stages + stage].batch_size > 0
    if sglang is not None and settings.scheduler == SGLANG and any_prefill:
        for rank in range(first, end):
            undo_decode(settings, windows, speculation, ranks, slots, lists, rank, rank * settings.num_stages + stage)

    row = clock[0].rows
    queries, decodes, prefill_tokens, sampled, running, waiting, context, num_prefills = 0, 0, 0, 0, 0, 0, 0, 0
    pairs = 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    most_decodes, most_tokens, most_sampled, most_running = 0, 0, 0, np.int64(0)
    attention_s = 0.0
    for rank in range(first, end):
        slot = rank * settings.num_stages + stage
        rank_decodes = slots[slot].num_decoding if slots[slot].batch_decodes else 0
        rank_decodes -= slots[slot].num_skipped
        rank_queries = rank_decodes if speculation is None else rank_decodes * speculation.num_queries
        rank_tokens, rank_sampled = np.int64(0), rank_queries
        rank_pairs = 0.0
        for position in range(slots[slot].batch_size):
            i = lists[slot, BATCH, position]
            chunk = lists[slot, BATCH_TOKENS, position]
            rank_tokens += chunk
            rank_pairs += chunk * (requests[i].computed_tokens - 0.5 * chunk)
            if lists[slot, BATCH_ENDS, position]:
                rank_sampled += 1
                if requests[i].first_token_s == requests[i].first_token_s:
                    resumed += 1
                    late_since_s += requests[i].last_token_s
        rank_context = slots[slot].context_tokens - slots[slot].skipped_context_tokens if rank_decodes > 0 else 0
        attention_s = max(
            attention_s,
            decode_attention_s(cost, rank_decodes, rank_context + rank_decodes, rank_tokens)
            + prefill_attention_s(cost, rank_tokens, rank_pairs),
        )
        most_decodes = max(most_decodes, rank_decodes)
        most_tokens = max(most_tokens, rank_queries + rank_tokens)
        most_sampled = max(most_sampled, rank_sampled)
        most_running = max(most_running, ranks[rank].num_running)
        decodes += rank_decodes
        queries += rank_queries
        prefill_tokens += rank_tokens
        sampled += rank_sampled
        pairs += rank_pairs
        context += rank_context
        num_prefills += slots[slot].batch_size
        running += ranks[rank].num_running
        waiting += ranks[rank].num_waiting

    if decodes + prefill_tokens == 0:
        set_busy(settings, slots, replica, stage, IDLE)
        return DONE

    if cost.recorded_step_s.size > 0:
        if clock[0].recorded >= cost.recorded_step_s.size:
            return OUT_OF_STEPS
        time_s = now_s + cost.recorded_step_s[clock[0].recorded]
        clock[0].recorded += 1
    else:
        if prefill_tokens == 0:
            device_s = cost.decode_token_s[most_decodes] + attention_s
        else:
            device_s = cost.mixed_token_s[most_tokens] + cost.sample_s[most_sampled] + attention_s
            if speculation is not None:
                device_s += cost.draft_s[most_decodes]
            if settings.ranks_per_replica > 1:
                device_s += cost.group_token_s[min(queries + prefill_tokens, cost.group_token_s.size - 1)]
            device_s = max(device_s, cost.launch_s[min(most_tokens, cost.launch_s.size - 1)])
        if cache is not None:
            loaded_s = with_loading(settings, cache, first, end, stage, device_s)
            steps[row].load_s = loaded_s - device_s
            device_s = loaded_s
        time_s = through_stages(settings, cost, stages, replica, now_s, device_s, most_running)
    fails_s, is_doomed = np.inf, False
    if fleet is not None:
        fails_s = fleet.replicas[replica].fails_s
        is_doomed = time_s >= fails_s
        if is_doomed:
            time_s = fails_s
            decodes, prefill_tokens, num_prefills, sampled, context, paused, resumed = 0, 0, 0, 0, 0, 0, 0
            pairs, late_since_s = 0.0, 0.0
            steps[row].load_s = 0.0
    first_step_s = time_s - now_s
    last_start_s = now_s
    num_steps = 1
    used = np.int64(0)
    if windows is not None:
        used = used_blocks(settings, ranks, first, end)

    joined, skipped = 0, 0
    for rank in range(first, end):
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
            num_gained = 1
            if speculation is not None:
                num_gained = gained_tokens(speculation, slots, slot)
            slots[slot].steps += num_gained
            slots[slot].num_verified += 1
            slots[slot].context_tokens += num_gained * rank_decodes
            ranks[rank].remaining_tokens -= num_gained * rank_decodes
    late_gap_s = time_s - late_since_s / (paused + resumed) if paused + resumed > 0 else 0.0

    latest = NONE
    if prefill_tokens == 0 and cost.recorded_step_s.size == 0 and settings.num_stages == 1 and not is_doomed:
        if paused + joined + skipped == 0:
            latest = row_to_extend(slots, clock, steps, first, now_s, first_step_s, decodes, running, waiting)
        if latest != NONE:
            first_step_s = slots[first].row_step_s
        horizon_s = next_arrival_s(settings, sessions, requests, clock)
        if fleet is not None:
            horizon_s = min(horizon_s, next_resend_s(fleet), fleet.control[0].next_s)
            if fleet.control[0].num_at_router > 0 and clock[0].queued > 0:
                horizon_s = min(horizon_s, events[0].time_s)
        if (settings.concurrency > 0 or settings.heeds_all_events) and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s)
        if sessions is not None and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s + settings.frontend_s + sessions.least_think_s)
        most_steps = steps_until_event(settings, speculation, ranks, slots, lists, first, end)
        while num_steps < most_steps and time_s < horizon_s:
            attention_s = 0.0
            fits = True
            for rank in range(first, end):
                count = slots[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    needed = decode_step_blocks(settings, speculation, slots, lists, rank)
                    fits = fits and has_blocks(settings, windows, ranks, rank, needed)
                context_tokens = slots[rank].context_tokens + count
                attention_s = max(attention_s, decode_attention_s(cost, count, context_tokens, prefill_tokens))
            step_s = with_host(cost, cost.decode_token_s[most_decodes] + attention_s, most_running)
            if not fits or step_s > SAME_DURATION * first_step_s or time_s + step_s >= fails_s:
                break
            for rank in range(first, end):
                count = slots[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    needed = decode_step_blocks(settings, speculation, slots, lists, rank)
                    take_decode_step(settings, windows, speculation, ranks, slots, lists, rank, rank, needed)
                num_gained = 1
                if speculation is not None:
                    num_gained = gained_tokens(speculation, slots, rank)
                slots[rank].steps += num_gained
                if count > 0:
                    slots[rank].num_verified += 1
                slots[rank].context_tokens += num_gained * count
                ranks[rank].remaining_tokens -= num_gained * count
            if windows is not None:  # elsewhere the last of equal steps uses most
                used = max(used, used_blocks(settings, ranks, first, end))
            last_start_s = time_s
            time_s += step_s
            num_steps += 1

    if settings.balance_steps > 0 and num_steps > 1:
        count_balance(settings, ranks, slots, first, end, num_steps)
    used = max(used, used_blocks(settings, ranks, first, end))
    for rank in range(first, end):
        slot = rank * settings.num_stages + stage
        slots[slot].started_s = last_start_s
        if slots[slot].batch_decodes and not is_doomed:
            slots[slot].last_decode_s = time_s
            slots[slot].num_joined = slots[slot].num_skipped
            slots[slot].joined_since_s = slots[slot].skipped_since_s
            if sglang is not None and settings.scheduler == SGLANG:
                steps_to_receive = ranks[rank].steps_to_receive - num_steps
                ranks[rank].steps_to_receive = steps_to_receive % settings.receive_interval_steps
                decay_new_token_ratio(settings, ranks, rank, num_steps)
        slots[slot].num_skipped = 0
        slots[slot].skipped_context_tokens = 0
        slots[slot].skipped_since_s = 0.0

    if latest != NONE:
        steps[latest].duration_s = time_s - steps[latest].start_s
        steps[latest].num_steps += num_steps
        steps[latest].used_blocks = max(steps[latest].used_blocks, used)
    else:
        steps[row].start_s = now_s
        steps[row].duration_s = time_s - now_s
        steps[row].num_steps = num_steps
        steps[row].replica = settings.first_replica + replica
        steps[row].decode_tokens = decodes
        steps[row].prefill_tokens = prefill_tokens
        steps[row].num_prefills = num_prefills
        steps[row].num_sampled = sampled
        steps[row].context_tokens = context
        steps[row].prefill_pairs = pairs
        steps[row].used_blocks = used
        steps[row].num_running = running
        steps[row].num_waiting = waiting
        steps[row].paused_tokens = paused
        steps[row].resumed_tokens = resumed
        steps[row].late_gap_s = late_gap_s
        clock[0].rows += 1
        slots[first * settings.num_stages + stage].row = clock[0].earlier_rows + row
        slots[first * settings.num_stages + stage].row_step_s = first_step_s
    slots[first * settings.num_stages + stage].row_end_s = time_s
    if not is_doomed:
        slot = settings.first_event + replica * settings.num_stages + stage
        clock[0].queued = push(events.time_s, events.slot, clock[0].queued, time_s, slot)
    return DONE


@inner
def used_blocks(settings, ranks, first, end):
    """Blocks of the ranks' pools that are taken."""
    used = 0
    for rank in range(first, end):
        used += settings.num_blocks - ranks[rank].free_blocks
    return used


@inner
def row_to_extend(slots, clock, steps, first, now_s, step_s, decodes, running, waiting):
    """The row of a replica's latest step where the one that starts now is equal to it, or NONE.

    Other replicas' arrivals end a run of steps, for a router may look at all; its row goes on. A row is written from
    its replica's own events alone, as many as if it were by itself.
    """
    row = slots[first].row - clock[0].earlier_rows
    if row < 0 or slots[first].row_end_s != now_s or step_s > SAME_DURATION * slots[first].row_step_s:
        return NONE
    if steps[row].prefill_tokens > 0 or steps[row].decode_tokens != decodes:
        return NONE
    if steps[row].num_running != running or steps[row].num_waiting != waiting:
        return NONE
    return row


@inner
def undo_decode(settings, windows, speculation, ranks, slots, lists, rank, slot):
    """SGLang's attention data parallelism: while any rank prefills, the others do not decode."""
    if slots[slot].batch_decodes and slots[slot].batch_size == 0:
        take_blocks(settings, windows, ranks, rank, -decode_step_blocks(settings, speculation, slots, lists, slot))
        if windows is not None:
            give_back(settings, ranks, rank, -passed_of_step(settings, speculation, slots, lists, slot))
        slots[slot].batch_decodes = 0


@inner
def steps_until_event(settings, speculation, ranks, slots, lists, first, end):
    """How many decode steps may run before a request finishes or the policy must look again, arrivals aside."""
    fewest = np.int64(1) << 40
    for rank in range(first, end):
        if slots[rank].finish_size > 0:
            fewest = min(fewest, lists[rank, FINISH_KEY, 0] - slots[rank].steps + 1)
            if speculation is not None:
                left = max(lists[rank, FINISH_KEY, 0] - slots[rank].steps, 0)
                fewest = min(fewest, (left + speculation.num_queries - 1) // speculation.num_queries + 1)
        if slots[rank].looks_again or ranks[rank].num_prefilling > 0:
            fewest = 1
        if settings.scheduler == SGLANG and ranks[rank].num_waiting > 0:
            fewest = min(fewest, max(ranks[rank].steps_to_receive, 1))
    return fewest
