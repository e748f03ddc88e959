"""The serving loop: arrivals, batches, steps, completions; cost per step independent of the batch.

Decoding requests are never walked in the usual step. A lane counts its decode steps; a decoding request stores the
count at which it would have had no token (`joined`), so its progress, its next block and its end follow from that one
counter: blocks are needed by `PHASES[steps % block_size]` requests, the next to finish lies on a heap. Steps between
events run in a tight inner loop that only looks durations up and adds them.

A replica of `num_stages` pipeline stages has that many lanes, each with a batch in flight: a batch passes the stages in
order and waits where one is busy. Without pipeline parallelism there is one lane, and nothing to wait for.

Events are ordered by (time, arrivals before step ends, lane). A step's end is known when it starts.
"""

import numpy as np

from windtunnel.kernels.fleet import (
    after_step,
    ask_again,
    change,
    drop_held,
    has_room_to_log,
    hold,
    next_resend_s,
    route_up,
    take_lost,
)
from windtunnel.kernels.heap import pop, push
from windtunnel.kernels.jit import entry, inner
from windtunnel.kernels.kvcache import caches_when_scheduled, release, share
from windtunnel.kernels.policies import (
    balance_ranks,
    begin_batch,
    count_balance,
    decay_new_token_ratio,
    decode_step_blocks,
    end_batch,
    enqueue,
    form_batch_sglang,
    form_batch_vllm_v1,
    gained_tokens,
    held_blocks,
    held_window_blocks,
    passed_of_step,
    route,
    set_queue_key,
    stop_decoding,
    take_decode_step,
    unlink,
)
from windtunnel.kernels.pool_caches import cache_of
from windtunnel.kernels.pools import (
    cost_of,
    end_transfer,
    hand_over,
    join_ready,
    lanes_of,
    pull,
    ranks_of,
    route_arrival,
)
from windtunnel.kernels.state import (
    BATCH,
    BATCH_ENDS,
    BATCH_TOKENS,
    FAIR_SHARE,
    FAIR_TOKENS,
    FINISH_KEY,
    FINISH_VALUE,
    NONE,
    PHASES,
    SGLANG,
    TRTLLM,
    USERS_ROUTER,
)
from windtunnel.kernels.windows import (
    begin_to_slide,
    fills_window,
    give_back,
    has_blocks,
    next_change,
    take_blocks,
)

DONE, MORE, STUCK, OUT_OF_STEPS, ASK_ROUTER = range(5)
"""What `run` returns: all requests finished; a buffer is full, call again; a request can never be scheduled; the
recorded step durations are used up; a user's router must say where the request `pending` of the fleet goes."""

IDLE, BUSY = np.int64(0), np.int64(1)
"""Of a lane. A literal 0 is a type of its own, for which what is called with it is compiled once more; so counters that
are handed to functions start as np.int64(0) too."""

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
def decode_attention_s(cost, num_decodes, context_tokens, prompt_tokens):
    """Attention of `num_decodes` single-token queries over `context_tokens` keys in all, beside `prompt_tokens`."""
    if num_decodes == 0:
        return 0.0
    grid = cost.decode_attention_s
    if prompt_tokens > 0 and cost.mixed_decode_attention_s.size > 0:
        grid = cost.mixed_decode_attention_s
    return interpolate_row(cost.context_nodes, grid[num_decodes], context_tokens / num_decodes)


@inner
def prefill_attention_s(cost, num_tokens, num_pairs):
    """Attention of prefill chunks of `num_tokens` in all that see `num_pairs` query-key pairs; bilinear."""
    if num_tokens == 0:
        return 0.0
    nodes = cost.chunk_nodes
    j = grid_cell(nodes, float(num_tokens))
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
def next_arrival_s(settings, sessions, requests, clock):
    """When the next request is sent, as far as is known: infinity while the client waits for a completion.

    A closed loop of C slots starts the k-th request, or session, when the (k - C + 1)-th completion has freed one, and
    measured ones only when all of warm-up has completed; arrival times then count from there.
    """
    send_s = np.inf
    if clock[0].next < requests.size:
        send_s = requests[clock[0].next].arrival_s
        if settings.concurrency > 0:
            k = clock[0].started
            if 0 < settings.num_warmup <= k:
                if clock[0].ended >= settings.num_warmup:
                    send_s += requests[settings.num_warmup - 1].completed_s + settings.frontend_s
                else:
                    send_s = np.inf
            if k >= settings.concurrency:
                if clock[0].ended > k - settings.concurrency:
                    send_s = max(send_s, requests[k - settings.concurrency].completed_s + settings.frontend_s)
                else:
                    send_s = np.inf
    if sessions is not None and clock[0].thinking > 0:
        send_s = min(send_s, sessions.time_s[0])
    return send_s


@inner
def take_next(sessions, requests, clock, now_s):
    """The request that is sent at `now_s`: a session's first turn, or a later one, which goes first at equal times."""
    if sessions is not None and clock[0].thinking > 0 and sessions.time_s[0] <= now_s:
        k = sessions.turn[0]
        clock[0].thinking = pop(sessions.time_s, sessions.turn, clock[0].thinking)
        return k
    k = clock[0].next
    clock[0].next += 1
    clock[0].started += 1
    if sessions is not None:
        while clock[0].next < requests.size and sessions.previous[clock[0].next] != NONE:
            clock[0].next += 1
    return k


@inner
def deliver(settings, cache, sessions, requests, ranks, lanes, events, clock, now_s, pools, fleet):
    """Send the next request to a replica, there to the rank with the fewest requests; an idle lane wakes.

    Of a fleet the next one may be one that was held or lost, and may have to be held; `pending` says afterwards whether
    a user's router must be asked for it.
    """
    k, replica = NONE, NONE
    if fleet is not None:
        k, replica = deliver_again(settings, cache, sessions, requests, ranks, clock, now_s, fleet)
        if replica == NONE:
            return
    if fleet is None:
        k = take_next(sessions, requests, clock, now_s)
        requests[k].arrival_s = now_s
        requests[k].sequence = clock[0].sent
        clock[0].sent += 1
        if pools is None:
            replica = route(settings, cache, sessions, ranks, clock, k)
        else:
            replica = route_arrival(cache, pools, sessions, requests, clock, k)
    if sessions is not None and sessions.session[k] != NONE:
        sessions.replica[sessions.session[k]] = replica
    if pools is not None:
        settings = pools.pools[pools.pool_of_replica[replica]]
        ranks, lanes = ranks_of(pools, settings), lanes_of(pools, settings)
        replica -= settings.first_replica
    first = replica * settings.ranks_per_replica
    rank = first
    for other in range(first + 1, first + settings.ranks_per_replica):
        if ranks[other].num_outstanding < ranks[rank].num_outstanding:
            rank = other
    requests[k].rank = settings.first_rank + rank
    ranks[rank].num_outstanding += 1
    if fleet is None:
        requests[k].target_tokens = requests[k].input_tokens
        set_queue_key(settings, requests, ranks, rank, k, requests[k].input_tokens)
    if fleet is not None:
        if fleet.num_retries[k] == 0:
            requests[k].target_tokens = requests[k].input_tokens
            set_queue_key(settings, requests, ranks, rank, k, requests[k].input_tokens)
        requests[k].arrival_s = now_s
    enqueue(settings, requests, ranks, rank, k)
    for stage in range(settings.num_stages):
        if not lanes[first * settings.num_stages + stage].is_busy:
            wake(settings, lanes, events, clock, replica, stage, now_s)
            break


@inner
def deliver_again(settings, cache, sessions, requests, ranks, clock, now_s, fleet):
    """The next request of a fleet, and the replica that it goes to: one that a user's router has answered for, the
    first one held, a lost one, or a new one. Without a replica it is held, or a user's router must be asked for it.
    """
    control = fleet.control
    k, is_held, replica = control[0].pending, False, NONE
    is_answered = k != NONE
    if is_answered:
        is_held, replica = control[0].is_held == 1, control[0].answer
        control[0].pending = NONE
    elif control[0].num_held > 0 and control[0].asks:
        k, is_held = fleet.held[control[0].first_held], True
    else:
        k = take_lost(fleet, now_s)
    if k == NONE:
        k = take_next(sessions, requests, clock, now_s)
        requests[k].arrival_s = now_s
        requests[k].sequence = clock[0].sent
        clock[0].sent += 1
        fleet.sent_s[k] = now_s
    if not is_answered:
        if control[0].num_held > 0 and not is_held:
            hold(fleet, k)
            return k, NONE
        if settings.router == USERS_ROUTER:
            control[0].pending = k
            control[0].pending_s = now_s
            control[0].is_held = is_held
            return k, NONE
        replica = route_up(settings, cache, sessions, ranks, clock, fleet, k)
    if replica == NONE:
        control[0].asks = 0
        if not is_held:
            hold(fleet, k)
    elif is_held:
        drop_held(fleet)
    return k, replica


@inner
def wake(settings, lanes, events, clock, replica, stage, now_s):
    """Let an idle lane of the replica look for work at `now_s`."""
    set_busy(settings, lanes, replica, stage, BUSY)
    lane = settings.first_event + replica * settings.num_stages + stage
    clock[0].queued = push(events.time_s, events.lane, clock[0].queued, now_s, lane)


@inner
def wake_replica(events, clock, pools, replica, now_s):
    """Let the first idle lane of a replica, of all pools', look for work."""
    settings = pools.pools[pools.pool_of_replica[replica]]
    lanes = lanes_of(pools, settings)
    replica -= settings.first_replica
    for stage in range(settings.num_stages):
        if not lanes[replica * settings.ranks_per_replica * settings.num_stages + stage].is_busy:
            wake(settings, lanes, events, clock, replica, stage, now_s)
            break


@inner
def set_busy(settings, lanes, replica, stage, is_busy):
    """Mark the lane `stage` of all ranks of a replica: they step together."""
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        lanes[rank * settings.num_stages + stage].is_busy = is_busy


@inner
def wake_another(settings, ranks, lanes, events, clock, replica, stage, now_s, first_stage):
    """After an event of lane `stage`: wake an idle lane that may have something to schedule, the first from
    `first_stage` on.
    """
    first = replica * settings.ranks_per_replica
    for other in range(first_stage, settings.num_stages):
        if other == stage or lanes[first * settings.num_stages + other].is_busy:
            continue
        for rank in range(first, first + settings.ranks_per_replica):
            has_decodes = lanes[rank * settings.num_stages + other].num_decoding > 0
            if has_decodes or ranks[rank].num_waiting > 0 or ranks[rank].num_prefilling > 0:
                wake(settings, lanes, events, clock, replica, other, now_s)
                return


@inner
def finish(settings, windows, cache, sessions, requests, ranks, lanes, events, clock, rank, i, now_s, pools):
    """Request `i`, running and not decoding, has produced its last token, or the last of this pool."""
    if pools is not None:
        if pools.journeys[i].later_output_tokens > 0:
            unlink(requests, ranks, rank, i)
            ranks[rank].num_outstanding -= 1
            replica = hand_over(settings, windows, requests, lanes, clock, pools, rank, i, now_s)
            wake_replica(events, clock, pools, replica, now_s)
            return
    requests[i].finish_s = now_s
    held = held_blocks(settings, windows, requests, lanes, i)
    if windows is not None:
        ranks[rank].free_window_blocks += held_window_blocks(settings, requests, lanes, i)
    if cache is None:
        ranks[rank].free_blocks += held
    else:
        release(settings, cache, ranks, rank, i, held, requests[i].computed_tokens)
    unlink(requests, ranks, rank, i)
    ranks[rank].num_outstanding -= 1
    if settings.queue_order == FAIR_SHARE:
        requests[requests[i].tenant].tenant_tag += 2 * requests[i].output_tokens // FAIR_TOKENS
    conclude(settings, sessions, requests, clock, i, now_s)


@inner
def arrive(cache, requests, events, clock, pools, i, now_s):
    """The KV of request `i` has been read: both sides may have something to do."""
    end_transfer(cache, requests, pools, i)
    for rank in (pools.journeys[i].prefill_rank, pools.journeys[i].decode_rank):
        settings = pools.pools[pools.pool_of_rank[rank]]
        replica = settings.first_replica + (rank - settings.first_rank) // settings.ranks_per_replica
        wake_replica(events, clock, pools, replica, now_s)


@inner
def conclude(settings, sessions, requests, clock, i, now_s):
    """Request `i` is done: the turn that follows it will be sent, or the client has a free slot."""
    clock[0].finished += 1
    if sessions is not None and sessions.following[i] != NONE:
        turn = sessions.following[i]
        send_s = max(now_s + settings.frontend_s + sessions.think_s[turn], requests[turn].arrival_s)
        clock[0].thinking = push(sessions.time_s, sessions.turn, clock[0].thinking, send_s, turn)
    else:
        requests[clock[0].ended].completed_s = now_s
        clock[0].ended += 1


@inner
def complete(
    settings,
    windows,
    cache,
    sessions,
    speculation,
    requests,
    ranks,
    lanes,
    lists,
    events,
    clock,
    rank,
    lane,
    now_s,
    pools,
):
    """Apply the end of the lane's step: finished requests leave, complete prefills give their token and begin to
    decode.
    """
    while lanes[lane].finish_size > 0 and lists[lane, FINISH_KEY, 0] <= lanes[lane].steps:
        i = lists[lane, FINISH_VALUE, 0]
        lanes[lane].finish_size = pop(lists[lane, FINISH_KEY], lists[lane, FINISH_VALUE], lanes[lane].finish_size)
        if windows is not None:
            if fills_window(settings, requests, ranks, lanes, lists, rank, i):
                continue
        stop_decoding(settings, windows, requests, lanes, lists, i)
        if speculation is not None:
            end = requests[i].input_tokens + requests[i].output_tokens - 1
            ranks[rank].remaining_tokens += requests[i].computed_tokens - end
        finish(settings, windows, cache, sessions, requests, ranks, lanes, events, clock, rank, i, now_s, pools)

    for position in range(lanes[lane].batch_size):
        i = lists[lane, BATCH, position]
        requests[i].chunks_in_flight -= 1
        if cache is not None and not caches_when_scheduled(settings):
            share(settings, cache, ranks, rank, i, requests[i].computed_tokens)
        if not lists[lane, BATCH_ENDS, position]:
            continue
        if requests[i].first_token_s != requests[i].first_token_s:
            requests[i].first_token_s = now_s
        ranks[rank].remaining_tokens -= 1
        end = requests[i].input_tokens + requests[i].output_tokens - 1
        if requests[i].computed_tokens >= end:
            finish(settings, windows, cache, sessions, requests, ranks, lanes, events, clock, rank, i, now_s, pools)
        else:
            joined = lanes[lane].steps - requests[i].computed_tokens
            requests[i].is_decoding = 1
            requests[i].lane = lane
            requests[i].joined = joined
            requests[i].skipped_at = NONE
            requests[i].last_token_s = now_s
            lanes[lane].num_decoding += 1
            lanes[lane].num_joined += 1
            lanes[lane].joined_since_s += now_s
            lanes[lane].context_tokens += requests[i].computed_tokens
            lists[lane, PHASES, joined % settings.block_size] += 1
            change = joined + end
            if windows is not None:
                begin_to_slide(settings, requests, ranks, lanes, lists, rank, i)
                change = next_change(settings, requests, i)
            lanes[lane].finish_size = push(
                lists[lane, FINISH_KEY], lists[lane, FINISH_VALUE], lanes[lane].finish_size, change, i
            )
    lanes[lane].batch_size = 0
    lanes[lane].batch_decodes = 0


@inner
def through_stages(settings, cost, stages, replica, now_s, device_s, num_running):
    """When a batch that starts now leaves the last pipeline stage; the stages it occupies are taken."""
    if settings.num_stages == 1:
        return now_s + with_host(cost, device_s, num_running)
    host_s = cost.host_step_s + cost.host_request_s * num_running
    time_s = now_s if cost.host_overlaps else now_s + host_s
    for stage in range(settings.num_stages):
        time_s = max(time_s, stages[replica, stage]) + device_s / settings.num_stages
        stages[replica, stage] = time_s
    return max(time_s, now_s + host_s) if cost.host_overlaps else time_s


@inner
def with_loading(settings, cache, first, end, stage, device_s):
    """A step's time on the device where its batch waits for KV blocks from lower tiers, or they come up beside it."""
    load_s = 0.0
    for rank in range(first, end):
        lane = rank * settings.num_stages + stage
        load_s = max(load_s, cache.load_s[lane])
        cache.load_s[lane] = 0.0
    return max(device_s, load_s) if cache.load_overlaps else device_s + load_s


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
    lanes,
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
    """Start the step that a replica's lane has formed, or a run of equal ones; writes its row and its end event.

    A step that its replica's next failure will cut short is written with its time and no tokens, and never ends.

    Returns DONE with the lane busy or idle, or OUT_OF_STEPS.
    """
    first = replica * settings.ranks_per_replica
    end = first + settings.ranks_per_replica
    any_prefill = False
    for rank in range(first, end):
        any_prefill = any_prefill or lanes[rank * settings.num_stages + stage].batch_size > 0
    if sglang is not None and settings.scheduler == SGLANG and any_prefill:
        for rank in range(first, end):
            undo_decode(settings, windows, speculation, ranks, lanes, lists, rank, rank * settings.num_stages + stage)

    row = clock[0].rows
    queries, decodes, prefill_tokens, sampled, running, waiting, context, num_prefills = 0, 0, 0, 0, 0, 0, 0, 0
    pairs = 0.0
    paused, resumed, late_since_s = 0, 0, 0.0
    most_decodes, most_tokens, most_sampled, most_running = 0, 0, 0, np.int64(0)
    attention_s = 0.0
    for rank in range(first, end):
        lane = rank * settings.num_stages + stage
        rank_decodes = lanes[lane].num_decoding if lanes[lane].batch_decodes else 0
        rank_decodes -= lanes[lane].num_skipped
        rank_queries = rank_decodes if speculation is None else rank_decodes * speculation.num_queries
        rank_tokens, rank_sampled = np.int64(0), rank_queries
        rank_pairs = 0.0
        for position in range(lanes[lane].batch_size):
            i = lists[lane, BATCH, position]
            chunk = lists[lane, BATCH_TOKENS, position]
            rank_tokens += chunk
            rank_pairs += chunk * (requests[i].computed_tokens - 0.5 * chunk)
            if lists[lane, BATCH_ENDS, position]:
                rank_sampled += 1
                if requests[i].first_token_s == requests[i].first_token_s:
                    resumed += 1
                    late_since_s += requests[i].last_token_s
        rank_context = lanes[lane].context_tokens - lanes[lane].skipped_context_tokens if rank_decodes > 0 else 0
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
        num_prefills += lanes[lane].batch_size
        running += ranks[rank].num_running
        waiting += ranks[rank].num_waiting

    if decodes + prefill_tokens == 0:
        set_busy(settings, lanes, replica, stage, IDLE)
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
        lane = rank * settings.num_stages + stage
        joined += lanes[lane].num_joined
        skipped += lanes[lane].num_skipped
        if lanes[lane].batch_decodes and not is_doomed:
            rank_decodes = lanes[lane].num_decoding - lanes[lane].num_skipped
            older = rank_decodes - lanes[lane].num_joined
            since_s = lanes[lane].joined_since_s
            num_late = lanes[lane].num_joined
            are_late = since_s < num_late * now_s * (1 - 1e-12)
            if older > 0 and lanes[lane].last_decode_s < now_s:
                num_late, are_late = rank_decodes, True
                since_s += older * lanes[lane].last_decode_s
            if are_late:
                paused += num_late
                late_since_s += since_s
            num_gained = 1
            if speculation is not None:
                num_gained = gained_tokens(speculation, lanes, lane)
            lanes[lane].steps += num_gained
            lanes[lane].num_verified += 1
            lanes[lane].context_tokens += num_gained * rank_decodes
            ranks[rank].remaining_tokens -= num_gained * rank_decodes
    late_gap_s = time_s - late_since_s / (paused + resumed) if paused + resumed > 0 else 0.0

    latest = NONE
    if prefill_tokens == 0 and cost.recorded_step_s.size == 0 and settings.num_stages == 1 and not is_doomed:
        if paused + joined + skipped == 0:
            latest = row_to_extend(lanes, clock, steps, first, now_s, first_step_s, decodes, running, waiting)
        if latest != NONE:
            first_step_s = lanes[first].row_step_s
        horizon_s = next_arrival_s(settings, sessions, requests, clock)
        if fleet is not None:
            horizon_s = min(horizon_s, next_resend_s(fleet), fleet.control[0].next_s)
            if fleet.control[0].num_held > 0 and clock[0].queued > 0:
                horizon_s = min(horizon_s, events[0].time_s)
        if (settings.concurrency > 0 or settings.heeds_all_events) and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s)
        if sessions is not None and clock[0].queued > 0:
            horizon_s = min(horizon_s, events[0].time_s + settings.frontend_s + sessions.least_think_s)
        most_steps = steps_until_event(settings, speculation, ranks, lanes, lists, first, end)
        while num_steps < most_steps and time_s < horizon_s:
            attention_s = 0.0
            fits = True
            for rank in range(first, end):
                count = lanes[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    needed = decode_step_blocks(settings, speculation, lanes, lists, rank)
                    fits = fits and has_blocks(settings, windows, ranks, rank, needed)
                context_tokens = lanes[rank].context_tokens + count
                attention_s = max(attention_s, decode_attention_s(cost, count, context_tokens, prefill_tokens))
            step_s = with_host(cost, cost.decode_token_s[most_decodes] + attention_s, most_running)
            if not fits or step_s > SAME_DURATION * first_step_s or time_s + step_s >= fails_s:
                break
            for rank in range(first, end):
                count = lanes[rank].num_decoding
                if settings.scheduler != TRTLLM:
                    needed = decode_step_blocks(settings, speculation, lanes, lists, rank)
                    take_decode_step(settings, windows, speculation, ranks, lanes, lists, rank, rank, needed)
                num_gained = 1
                if speculation is not None:
                    num_gained = gained_tokens(speculation, lanes, rank)
                lanes[rank].steps += num_gained
                if count > 0:
                    lanes[rank].num_verified += 1
                lanes[rank].context_tokens += num_gained * count
                ranks[rank].remaining_tokens -= num_gained * count
            if windows is not None:  # elsewhere the last of equal steps uses most
                used = max(used, used_blocks(settings, ranks, first, end))
            last_start_s = time_s
            time_s += step_s
            num_steps += 1

    if settings.balance_steps > 0 and num_steps > 1:
        count_balance(settings, ranks, lanes, first, end, num_steps)
    used = max(used, used_blocks(settings, ranks, first, end))
    for rank in range(first, end):
        lane = rank * settings.num_stages + stage
        lanes[lane].started_s = last_start_s
        if lanes[lane].batch_decodes and not is_doomed:
            lanes[lane].last_decode_s = time_s
            lanes[lane].num_joined = lanes[lane].num_skipped
            lanes[lane].joined_since_s = lanes[lane].skipped_since_s
            if sglang is not None and settings.scheduler == SGLANG:
                steps_to_receive = ranks[rank].steps_to_receive - num_steps
                ranks[rank].steps_to_receive = steps_to_receive % settings.receive_interval_steps
                decay_new_token_ratio(settings, ranks, rank, num_steps)
        lanes[lane].num_skipped = 0
        lanes[lane].skipped_context_tokens = 0
        lanes[lane].skipped_since_s = 0.0

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
        lanes[first * settings.num_stages + stage].row = clock[0].earlier_rows + row
        lanes[first * settings.num_stages + stage].row_step_s = first_step_s
    lanes[first * settings.num_stages + stage].row_end_s = time_s
    if not is_doomed:
        lane = settings.first_event + replica * settings.num_stages + stage
        clock[0].queued = push(events.time_s, events.lane, clock[0].queued, time_s, lane)
    return DONE


@inner
def used_blocks(settings, ranks, first, end):
    """Blocks of the ranks' pools that are taken."""
    used = 0
    for rank in range(first, end):
        used += settings.num_blocks - ranks[rank].free_blocks
    return used


@inner
def row_to_extend(lanes, clock, steps, first, now_s, step_s, decodes, running, waiting):
    """The row of a replica's latest step where the one that starts now is equal to it, or NONE.

    Other replicas' arrivals end a run of steps, for a router may look at all; its row goes on. A row is written from
    its replica's own events alone, as many as if it were by itself.
    """
    row = lanes[first].row - clock[0].earlier_rows
    if row < 0 or lanes[first].row_end_s != now_s or step_s > SAME_DURATION * lanes[first].row_step_s:
        return NONE
    if steps[row].prefill_tokens > 0 or steps[row].decode_tokens != decodes:
        return NONE
    if steps[row].num_running != running or steps[row].num_waiting != waiting:
        return NONE
    return row


@inner
def undo_decode(settings, windows, speculation, ranks, lanes, lists, rank, lane):
    """SGLang's attention data parallelism: while any rank prefills, the others do not decode."""
    if lanes[lane].batch_decodes and lanes[lane].batch_size == 0:
        take_blocks(settings, windows, ranks, rank, -decode_step_blocks(settings, speculation, lanes, lists, lane))
        if windows is not None:
            give_back(settings, ranks, rank, -passed_of_step(settings, speculation, lanes, lists, lane))
        lanes[lane].batch_decodes = 0


@inner
def steps_until_event(settings, speculation, ranks, lanes, lists, first, end):
    """How many decode steps may run before a request finishes or the policy must look again, arrivals aside."""
    fewest = np.int64(1) << 40
    for rank in range(first, end):
        if lanes[rank].finish_size > 0:
            fewest = min(fewest, lists[rank, FINISH_KEY, 0] - lanes[rank].steps + 1)
            if speculation is not None:
                left = max(lists[rank, FINISH_KEY, 0] - lanes[rank].steps, 0)
                fewest = min(fewest, (left + speculation.num_queries - 1) // speculation.num_queries + 1)
        if lanes[rank].looks_again or ranks[rank].num_prefilling > 0:
            fewest = 1
        if settings.scheduler == SGLANG and ranks[rank].num_waiting > 0:
            fewest = min(fewest, max(ranks[rank].steps_to_receive, 1))
    return fewest


@inner
def begin_buffer(clock):
    """Start to write rows to an empty buffer."""
    clock[0].earlier_rows += clock[0].rows
    clock[0].rows = 0


@entry
def run(
    settings,
    cost,
    cache,
    sessions,
    speculation,
    requests,
    ranks,
    lanes,
    lists,
    stages,
    events,
    clock,
    steps,
    pools,
    fleet,
    vllm_v1,
    sglang,
    windows,
):
    """Advance the simulation until all requests have finished or `steps` is full.

    Where the host works beside the device, the batch that follows a step at once was formed when that step started:
    requests that have arrived since wait for the one after it. An engine with nothing to run looks again at once.

    Args:
        settings, cost: see `kernels.state`.
        cache, sessions, speculation: None where prompts share nothing, where no request waits for another, and where
            a decode step gives a token.
        requests, ranks, lanes, lists, stages, events, clock: see `kernels.state`; changed in place.
        steps: buffer for the rows of this call; `clock[0].rows` says how many were written.
        pools: None, or `kernels.pools.Pools`; what belongs to one pool is then read from there at every event.
        fleet: None, or `kernels.fleet.Fleet`, where replicas come and go or requests are held at the router.
        vllm_v1, sglang, windows: 1 or None, see `policies.in_use`; `windows` where layers have one.

    Returns:
        DONE, MORE, STUCK, OUT_OF_STEPS or ASK_ROUTER.
    """
    goes_on = False
    if fleet is not None:
        if fleet.control[0].pending == NONE:
            begin_buffer(clock)
            fleet.control[0].num_phases = 0
            fleet.control[0].num_losses = 0
        else:
            goes_on = fleet.control[0].event != NONE
            now_s = fleet.control[0].pending_s
            deliver(settings, cache, sessions, requests, ranks, lanes, events, clock, now_s, pools, fleet)
    if fleet is None:
        begin_buffer(clock)
    own_cache = cache  # of the pool whose event it is
    while True:
        event_s = events[0].time_s if clock[0].queued > 0 else np.inf
        arrival_s = next_arrival_s(settings, sessions, requests, clock)
        event, ends_step = NONE, False
        if fleet is not None:
            arrival_s = min(arrival_s, next_resend_s(fleet))
            if goes_on:
                event, event_s = fleet.control[0].event, fleet.control[0].event_s
                ends_step = fleet.control[0].ended_step == 1
                fleet.control[0].event = NONE
            elif clock[0].finished >= requests.size:
                return DONE
            elif fleet.control[0].next_s <= min(arrival_s, event_s) and fleet.control[0].next_s < np.inf:
                if not has_room_to_log(settings, fleet):
                    return MORE
                now_s = fleet.control[0].next_s
                change(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, now_s)
                continue
        if arrival_s <= event_s and not goes_on:
            if arrival_s == np.inf:
                return DONE if clock[0].finished >= requests.size else STUCK
            deliver(settings, cache, sessions, requests, ranks, lanes, events, clock, arrival_s, pools, fleet)
            if fleet is not None:
                if fleet.control[0].pending != NONE:
                    return ASK_ROUTER
            continue
        if clock[0].rows >= steps.size and not goes_on:
            return MORE
        if not goes_on:
            event = events[0].lane
            clock[0].queued = pop(events.time_s, events.lane, clock[0].queued)
        if pools is not None:
            if event < 0:
                arrive(cache, requests, events, clock, pools, event + requests.size, event_s)
                continue
            pool = pools.pool_of_event[event]
            settings, cost = pools.pools[pool], cost_of(pools, pool)
            ranks, lanes = ranks_of(pools, settings), lanes_of(pools, settings)
            lists = pools.lists[settings.first_lane : settings.end_lane]
            stages = pools.stages[settings.first_replica : settings.end_replica]
            event -= settings.first_event
            if cache is not None:
                own_cache = cache_of(cache, pools, pool)
        replica, stage = event // settings.num_stages, event % settings.num_stages
        first = replica * settings.ranks_per_replica
        num_finished = clock[0].finished
        for rank in range(first, first + settings.ranks_per_replica if not goes_on else first):
            lane = rank * settings.num_stages + stage
            ends_step = ends_step or lanes[lane].batch_size > 0 or lanes[lane].batch_decodes
            complete(
                settings,
                windows,
                own_cache,
                sessions,
                speculation,
                requests,
                ranks,
                lanes,
                lists,
                events,
                clock,
                rank,
                lane,
                event_s,
                pools,
            )
        goes_on = False
        arrival_s = next_arrival_s(settings, sessions, requests, clock)
        if fleet is not None:
            if clock[0].finished > num_finished:
                ask_again(fleet, event_s)
                after_step(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, replica, event_s)
            arrival_s = min(arrival_s, next_resend_s(fleet))
        while arrival_s <= event_s:
            deliver(settings, cache, sessions, requests, ranks, lanes, events, clock, arrival_s, pools, fleet)
            arrival_s = next_arrival_s(settings, sessions, requests, clock)
            if fleet is not None:
                if fleet.control[0].pending != NONE:
                    fleet.control[0].event = event
                    fleet.control[0].event_s = event_s
                    fleet.control[0].ended_step = ends_step
                    return ASK_ROUTER
                arrival_s = min(arrival_s, next_resend_s(fleet))
        cutoff_s = event_s
        if cost.host_overlaps and ends_step:
            cutoff_s = lanes[first * settings.num_stages + stage].started_s
        # A request that gave itself up left its blocks to one whose KV cache has come.
        forms_again = pools is not None and ends_step
        num_batches = 0
        while num_batches == 0:
            if settings.balance_steps > 0:
                balance_ranks(settings, requests, ranks, lanes, first, stage, cutoff_s)
            for rank in range(first, first + settings.ranks_per_replica):
                lane = rank * settings.num_stages + stage
                begin_batch(lanes, lane, cutoff_s)
                if pools is not None:
                    join_ready(settings, windows, own_cache, requests, ranks, lanes, lists, pools, rank, lane)
                num_decodes = 0
                if vllm_v1 is not None and settings.scheduler != SGLANG:
                    num_decodes = form_batch_vllm_v1(
                        settings, windows, own_cache, speculation, requests, ranks, lanes, lists, rank, lane, event_s
                    )
                if sglang is not None and settings.scheduler == SGLANG:
                    num_decodes = form_batch_sglang(
                        settings, windows, own_cache, speculation, requests, ranks, lanes, lists, rank, lane, event_s
                    )
                num_batches += end_batch(settings, requests, ranks, lanes, lists, rank, lane, num_decodes)
            if cutoff_s == event_s and not forms_again:
                break
            cutoff_s, forms_again = event_s, False
        if pools is not None:
            for rank in range(first, first + settings.ranks_per_replica):
                lane = rank * settings.num_stages + stage
                pull(settings, windows, own_cache, requests, ranks, lanes, events, clock, pools, rank, lane, event_s)
        rows = clock[0].rows
        status = start_step(
            settings,
            windows,
            cost,
            own_cache,
            sessions,
            speculation,
            requests,
            ranks,
            lanes,
            lists,
            stages,
            events,
            clock,
            steps,
            replica,
            stage,
            event_s,
            fleet,
            sglang,
        )
        if status != DONE:
            return status
        if settings.num_stages > 1:
            changed = ends_step or clock[0].rows > rows
            wake_another(settings, ranks, lanes, events, clock, replica, stage, event_s, 0 if changed else stage + 1)
