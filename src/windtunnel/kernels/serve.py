"""The serving loop: arrivals, batches, steps, completions; cost per step independent of the batch.

Decoding requests are never walked in the usual step. A rank counts its decode steps; a decoding request stores the count at
which it would have had no token (`joined`), so its progress, its next block and its end follow from that one counter: blocks
are needed by `PHASES[steps % block_size]` requests, the next to finish lies on a heap. Steps between events run in a
tight inner loop that only looks durations up and adds them.

Events are ordered by (time, arrivals before step ends, replica). A step's duration is known when it starts.
"""

import numpy as np

from windtunnel.kernels.heap import pop, push
from windtunnel.kernels.jit import entry, inner
from windtunnel.kernels.policies import (
    decay_new_token_ratio,
    enqueue,
    form_batch,
    held_blocks,
    stop_decoding,
    unlink,
)
from windtunnel.kernels.state import (
    BATCH,
    BATCH_TOKENS,
    FINISH_KEY,
    FINISH_VALUE,
    PHASES,
    PREFILLING,
    SGLANG,
    TRTLLM,
)

DONE, MORE, STUCK, OUT_OF_STEPS = range(4)
"""What `run` returns: all requests finished; the row buffer is full, call again; a request can never be scheduled; the
recorded step durations are used up."""

SAME_DURATION = 1.01
"""A run of steps becomes one row while its steps stay within 1% of the first one's duration."""


@inner
def grid_cell(nodes, value):
    """The index j of the grid cell with nodes[j] <= value < nodes[j + 1], clamped to the grid."""
    low, high = 0, nodes.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if nodes[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def interpolate_row(nodes, row, value):
    """Linear between nodes, extended by the slope of the end cells."""
    j = grid_cell(nodes, value)
    return row[j] + (row[j + 1] - row[j]) * ((value - nodes[j]) / (nodes[j + 1] - nodes[j]))


@inner
def decode_attention_s(cost, num_decodes, context_tokens):
    """Attention of `num_decodes` single-token queries over `context_tokens` keys in all."""
    if num_decodes == 0:
        return 0.0
    return interpolate_row(cost.context_nodes, cost.decode_attention_s[num_decodes], context_tokens / num_decodes)


@inner
def prefill_attention_s(cost, num_tokens, num_pairs):
    """Attention of prefill chunks of `num_tokens` in all that see `num_pairs` query-key pairs; bilinear."""
    if num_tokens == 0:
        return 0.0
    nodes = cost.chunk_nodes
    j = grid_cell(nodes, num_tokens)
    length = 2.0 * num_pairs / num_tokens
    low = interpolate_row(cost.length_nodes, cost.prefill_attention_s[j], length)
    high = interpolate_row(cost.length_nodes, cost.prefill_attention_s[j + 1], length)
    return low + (high - low) * ((num_tokens - nodes[j]) / (nodes[j + 1] - nodes[j]))


@inner
def with_host(cost, device_s, num_running):
    """A step's duration from the device's share and the host's, beside or before it."""
    host_s = cost.host_step_s + cost.host_request_s * num_running
    return max(device_s, host_s) if cost.host_overlaps else device_s + host_s


@inner
def next_arrival_s(settings, requests, clock):
    """When the next request is sent, as far as is known: infinity while the client waits for a completion."""
    k = clock[0].next
    if k >= requests.arrival_s.size:
        return np.inf
    if settings.concurrency == 0:
        return requests[k].arrival_s
    if clock[0].in_flight >= settings.concurrency:
        return np.inf
    if k == settings.num_warmup and clock[0].in_flight > 0:
        return np.inf
    return max(requests[k].arrival_s, clock[0].slot_s)


@inner
def deliver(settings, requests, ranks, lists, replicas, clock, now_s):
    """Send the next request: to the replicas in turn, there to the rank with the fewest requests."""
    k = clock[0].next
    clock[0].next += 1
    clock[0].in_flight += 1
    requests[k].arrival_s = now_s
    replica = clock[0].turn
    clock[0].turn = (replica + 1) % settings.num_replicas
    first = replica * settings.ranks_per_replica
    rank = first
    for other in range(first + 1, first + settings.ranks_per_replica):
        if ranks[other].num_outstanding < ranks[rank].num_outstanding:
            rank = other
    requests[k].rank = rank
    requests[k].target_tokens = requests[k].input_tokens
    ranks[rank].num_outstanding += 1
    enqueue(settings, requests, ranks, rank, k)
    if not replicas[replica].is_busy:
        replicas[replica].is_busy = 1
        clock[0].queued = push(replicas.event_s, replicas.event_replica, clock[0].queued, now_s, replica)


@inner
def finish(settings, requests, ranks, clock, rank, i, now_s):
    """Request `i`, running and not decoding, has produced its last token."""
    requests[i].finish_s = now_s
    ranks[rank].free_blocks += held_blocks(settings, requests, ranks, rank, i)
    unlink(requests, ranks, rank, i)
    ranks[rank].num_outstanding -= 1
    clock[0].finished += 1
    clock[0].in_flight -= 1
    clock[0].slot_s = now_s


@inner
def complete(settings, requests, ranks, lists, clock, rank, now_s):
    """Apply the end of the rank's step: finished requests leave, complete prefills give their token and begin to decode."""
    while ranks[rank].finish_size > 0 and lists[rank, FINISH_KEY, 0] <= ranks[rank].steps:
        i = lists[rank, FINISH_VALUE, 0]
        ranks[rank].finish_size = pop(lists[rank, FINISH_KEY], lists[rank, FINISH_VALUE], ranks[rank].finish_size)
        stop_decoding(settings, requests, ranks, lists, rank, i)
        finish(settings, requests, ranks, clock, rank, i, now_s)

    for position in range(ranks[rank].batch_size):
        i = lists[rank, BATCH, position]
        requests[i].computed_tokens += lists[rank, BATCH_TOKENS, position]
        if requests[i].computed_tokens < requests[i].target_tokens:
            continue
        if requests[i].first_token_s != requests[i].first_token_s:
            requests[i].first_token_s = now_s
        ranks[rank].remaining_tokens -= 1
        end = requests[i].input_tokens + requests[i].output_tokens - 1
        if requests[i].computed_tokens >= end:
            finish(settings, requests, ranks, clock, rank, i, now_s)
        else:
            joined = ranks[rank].steps - requests[i].computed_tokens
            requests[i].is_decoding = 1
            requests[i].joined = joined
            ranks[rank].num_decoding += 1
            ranks[rank].num_joined += 1
            ranks[rank].joined_since_s += now_s
            requests[i].last_token_s = now_s
            ranks[rank].context_tokens += requests[i].computed_tokens
            lists[rank, PHASES, joined % settings.block_size] += 1
            ranks[rank].finish_size = push(
                lists[rank, FINISH_KEY], lists[rank, FINISH_VALUE], ranks[rank].finish_size, joined + end, i
            )
    if ranks[rank].batch_size > 0:
        kept = 0
        for position in range(ranks[rank].num_prefilling):
            i = lists[rank, PREFILLING, position]
            if requests[i].computed_tokens < requests[i].target_tokens:
                lists[rank, PREFILLING, kept] = i
                kept += 1
        ranks[rank].num_prefilling = kept
        ranks[rank].batch_size = 0


@inner
def schedule(settings, cost, requests, ranks, lists, replicas, clock, steps, replica, now_s):
    """Start the replica's next step, or a run of equal ones; writes its row and its end event.

    Returns DONE, or what stopped it.
    """
    first = replica * settings.ranks_per_replica
    end = first + settings.ranks_per_replica
    any_prefill = False
    for rank in range(first, end):
        form_batch(settings, requests, ranks, lists, rank, now_s)
        any_prefill = any_prefill or ranks[rank].batch_size > 0
    if settings.scheduler == SGLANG and any_prefill:
        for rank in range(first, end):
            undo_decode(settings, ranks, lists, rank)

    row = clock[0].rows
    decodes, prefill_tokens, sampled, running, waiting, context, num_prefills = 0, 0, 0, 0, 0, 0, 0
    pairs = 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    most_decodes, most_tokens, most_sampled, most_running = 0, 0, 0, 0
    attention_s = 0.0
    for rank in range(first, end):
        rank_decodes = ranks[rank].num_decoding if ranks[rank].batch_decodes else 0
        rank_decodes -= ranks[rank].num_skipped
        rank_tokens, rank_sampled = 0, rank_decodes
        rank_pairs = 0.0
        for position in range(ranks[rank].batch_size):
            i = lists[rank, BATCH, position]
            chunk = lists[rank, BATCH_TOKENS, position]
            computed = requests[i].computed_tokens
            rank_tokens += chunk
            rank_pairs += chunk * (computed + 0.5 * chunk)
            if computed + chunk == requests[i].target_tokens:
                rank_sampled += 1
                if requests[i].first_token_s == requests[i].first_token_s:
                    resumed += 1
                    late_since_s += requests[i].last_token_s
        rank_context = ranks[rank].context_tokens - ranks[rank].skipped_context_tokens if rank_decodes > 0 else 0
        attention_s = max(
            attention_s,
            decode_attention_s(cost, rank_decodes, rank_context + rank_decodes)
            + prefill_attention_s(cost, rank_tokens, rank_pairs),
        )
        most_decodes = max(most_decodes, rank_decodes)
        most_tokens = max(most_tokens, rank_decodes + rank_tokens)
        most_sampled = max(most_sampled, rank_sampled)
        most_running = max(most_running, ranks[rank].num_running)
        decodes += rank_decodes
        prefill_tokens += rank_tokens
        sampled += rank_sampled
        pairs += rank_pairs
        context += rank_context
        num_prefills += ranks[rank].batch_size
        running += ranks[rank].num_running
        waiting += ranks[rank].num_waiting

    if decodes + prefill_tokens == 0:
        replicas[replica].is_busy = 0
        return STUCK if waiting + running > 0 else DONE

    if cost.recorded_step_s.size > 0:
        if clock[0].recorded >= cost.recorded_step_s.size:
            return OUT_OF_STEPS
        duration_s = cost.recorded_step_s[clock[0].recorded]
        clock[0].recorded += 1
    elif prefill_tokens == 0:
        duration_s = with_host(cost, cost.decode_token_s[most_decodes] + attention_s, most_running)
    else:
        device_s = cost.mixed_token_s[most_tokens] + cost.sample_s[most_sampled] + attention_s
        duration_s = with_host(cost, device_s, most_running)
    time_s = now_s + duration_s
    num_steps = 1

    for rank in range(first, end):
        if ranks[rank].batch_decodes:
            rank_decodes = ranks[rank].num_decoding - ranks[rank].num_skipped
            older = rank_decodes - ranks[rank].num_joined
            since_s = ranks[rank].joined_since_s
            if older > 0:
                since_s += older * ranks[rank].last_decode_s
            if (older > 0 and ranks[rank].last_decode_s < now_s) or since_s < rank_decodes * now_s * (1 - 1e-12):
                paused += rank_decodes
                late_since_s += since_s
            ranks[rank].steps += 1
            ranks[rank].context_tokens += rank_decodes
            ranks[rank].remaining_tokens -= rank_decodes
    late_gap_s = time_s - late_since_s / (paused + resumed) if paused + resumed > 0 else 0.0

    if prefill_tokens == 0 and cost.recorded_step_s.size == 0:
        horizon_s = next_arrival_s(settings, requests, clock)
        if settings.concurrency > 0 and clock[0].queued > 0:
            horizon_s = min(horizon_s, replicas[0].event_s)
        most_steps = steps_until_event(settings, ranks, lists, first, end)
        while num_steps < most_steps and time_s < horizon_s:
            attention_s = 0.0
            fits = True
            for rank in range(first, end):
                count = ranks[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    needed = lists[rank, PHASES, ranks[rank].steps % settings.block_size]
                    fits = fits and needed <= ranks[rank].free_blocks
                attention_s = max(attention_s, decode_attention_s(cost, count, ranks[rank].context_tokens + count))
            step_s = with_host(cost, cost.decode_token_s[most_decodes] + attention_s, most_running)
            if not fits or step_s > SAME_DURATION * duration_s:
                break
            for rank in range(first, end):
                count = ranks[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    ranks[rank].free_blocks -= lists[rank, PHASES, ranks[rank].steps % settings.block_size]
                ranks[rank].steps += 1
                ranks[rank].context_tokens += count
                ranks[rank].remaining_tokens -= count
            time_s += step_s
            num_steps += 1

    used = 0
    for rank in range(first, end):
        used += settings.num_blocks - ranks[rank].free_blocks
        ranks[rank].num_skipped = 0
        ranks[rank].skipped_context_tokens = 0
        if ranks[rank].batch_decodes:
            ranks[rank].last_decode_s = time_s
            ranks[rank].num_joined = 0
            ranks[rank].joined_since_s = 0.0
            if settings.scheduler == SGLANG:
                steps_to_receive = ranks[rank].steps_to_receive - num_steps
                ranks[rank].steps_to_receive = steps_to_receive % settings.receive_interval_steps
                decay_new_token_ratio(settings, ranks, rank, num_steps)

    steps[row].start_s = now_s
    steps[row].duration_s = time_s - now_s
    steps[row].num_steps = num_steps
    steps[row].replica = replica
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
    clock[0].queued = push(replicas.event_s, replicas.event_replica, clock[0].queued, time_s, replica)
    return DONE


@inner
def undo_decode(settings, ranks, lists, rank):
    """SGLang's attention data parallelism: while any rank prefills, the others do not decode."""
    if ranks[rank].batch_decodes and ranks[rank].batch_size == 0:
        ranks[rank].free_blocks += lists[rank, PHASES, ranks[rank].steps % settings.block_size]
        ranks[rank].batch_decodes = 0


@inner
def steps_until_event(settings, ranks, lists, first, end):
    """How many decode steps may run before a request finishes or the policy must look again, arrivals aside."""
    fewest = np.int64(1) << 40
    for rank in range(first, end):
        if ranks[rank].finish_size > 0:
            fewest = min(fewest, lists[rank, FINISH_KEY, 0] - ranks[rank].steps + 1)
        if ranks[rank].looks_again or ranks[rank].num_prefilling > 0:
            fewest = 1
        if settings.scheduler == SGLANG and ranks[rank].num_waiting > 0:
            fewest = min(fewest, max(ranks[rank].steps_to_receive, 1))
    return fewest


@entry
def run(settings, cost, requests, ranks, lists, replicas, clock, steps):
    """Advance the simulation until all requests have finished or `steps` is full.

    Args:
        settings, cost, requests, ranks, lists, replicas, clock: see `kernels.state`; changed in place.
        steps: buffer for the rows of this call; `clock[0].rows` says how many were written.

    Returns:
        DONE, MORE, STUCK or OUT_OF_STEPS.
    """
    clock[0].rows = 0
    while True:
        event_s = replicas[0].event_s if clock[0].queued > 0 else np.inf
        arrival_s = next_arrival_s(settings, requests, clock)
        if arrival_s <= event_s:
            if arrival_s == np.inf:
                return DONE if clock[0].next >= requests.arrival_s.size else STUCK
            deliver(settings, requests, ranks, lists, replicas, clock, arrival_s)
            continue
        if clock[0].rows >= steps.start_s.size:
            return MORE
        replica = replicas[0].event_replica
        clock[0].queued = pop(replicas.event_s, replicas.event_replica, clock[0].queued)
        first = replica * settings.ranks_per_replica
        for rank in range(first, first + settings.ranks_per_replica):
            complete(settings, requests, ranks, lists, clock, rank, event_s)
        arrival_s = next_arrival_s(settings, requests, clock)
        while arrival_s <= event_s:
            deliver(settings, requests, ranks, lists, replicas, clock, arrival_s)
            arrival_s = next_arrival_s(settings, requests, clock)
        status = schedule(settings, cost, requests, ranks, lists, replicas, clock, steps, replica, event_s)
        if status != DONE:
            return status
