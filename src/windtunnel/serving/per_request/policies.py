"""How engines whose batches may be any subset of a replica's requests form the next one.

A policy takes the ready decode group, if there is one, fills MEMBERS and TOKENS of a slot, takes the blocks that the
step needs, and returns how many requests it listed. `ready` requests hold blocks and are in no batch. Each policy forms
the batches of Vidur 7d47513 (`vidur/scheduler/replica_scheduler`), restarts and conservative block checks included.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, is_unset
from windtunnel.serving.per_request.decode_groups import MEMBERS, SCRATCH, TOKENS, dissolve, ready_row, take_group
from windtunnel.serving.state.per_request import BatchSlot, PerRequestSettings, Replica, SequenceState
from windtunnel.serving.state.records import NONE, Ints, Requests


@inner
def next_prompt_blocks(settings: PerRequestSettings, sequences: Records[SequenceState], i: int) -> int:
    """Return the blocks for all that request `i` must compute before its next token."""
    return (sequences[i].prompt_tokens + settings.block_size - 1) // settings.block_size


@inner
def put_first(sequences: Records[SequenceState], replicas: Records[Replica], replica: int, i: int) -> None:
    """Put request `i` in front of the waiting ones."""
    sequences[i].next = replicas[replica].first_waiting
    replicas[replica].first_waiting = i
    if replicas[replica].last_waiting == NONE:
        replicas[replica].last_waiting = i
    replicas[replica].num_waiting += 1


@inner
def put_last(sequences: Records[SequenceState], replicas: Records[Replica], replica: int, i: int) -> None:
    """Put request `i` behind the waiting ones."""
    sequences[i].next = NONE
    last = replicas[replica].last_waiting
    if last == NONE:
        replicas[replica].first_waiting = i
    else:
        sequences[last].next = i
    replicas[replica].last_waiting = i
    replicas[replica].num_waiting += 1


@inner
def admit(
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    replica: int,
    num_blocks: int,
    now_s: float,
) -> int:
    """Give the first waiting request `num_blocks` blocks and return it."""
    i = replicas[replica].first_waiting
    replicas[replica].first_waiting = sequences[i].next
    if sequences[i].next == NONE:
        replicas[replica].last_waiting = NONE
    replicas[replica].num_waiting -= 1
    replicas[replica].free_blocks -= num_blocks
    replicas[replica].num_running += 1
    sequences[i].num_blocks = num_blocks
    if is_unset(requests[i].scheduled_s):
        requests[i].scheduled_s = now_s
    return i


@inner
def release(sequences: Records[SequenceState], replicas: Records[Replica], replica: int, i: int) -> None:
    """Free the blocks of request `i`."""
    replicas[replica].free_blocks += sequences[i].num_blocks
    replicas[replica].num_running -= 1
    sequences[i].num_blocks = 0


@inner
def restart(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    replica: int,
    i: int,
) -> None:
    """Free all of request `i` and put it in front of the waiting ones, to be computed again with its outputs so far."""
    release(sequences, replicas, replica, i)
    if sequences[i].is_prefilled:
        sequences[i].last_token_s = sequences[i].left_stage_s
    if sequences[i].is_prefilled or settings.loses_prompts:
        sequences[i].prompt_tokens = sequences[i].processed_tokens
    sequences[i].processed_tokens = 0
    sequences[i].is_prefilled = 0
    requests[i].num_preemptions += 1
    replicas[replica].has_restarted = 1
    put_first(sequences, replicas, replica, i)


@inner
def take_block(
    settings: PerRequestSettings, sequences: Records[SequenceState], replicas: Records[Replica], replica: int, i: int
) -> None:
    """Give decoding request `i` another block if its last one is full."""
    if sequences[i].processed_tokens > sequences[i].num_blocks * settings.block_size:
        sequences[i].num_blocks += 1
        replicas[replica].free_blocks -= 1


@inner
def sort_ready(
    settings: PerRequestSettings, requests: Requests, replicas: Records[Replica], batches: Ints, replica: int
) -> None:
    """Order the ready requests by arrival; equal ones stay as they were.

    They nearly always are in order, which their indices tell: requests are numbered as they arrive.
    """
    row = ready_row(settings, replica)
    for position in range(1, replicas[replica].num_ready):
        i = batches[row, MEMBERS, position]
        if settings.numbered_by_arrival and i > batches[row, MEMBERS, position - 1]:
            continue
        arrival_s = requests[i].arrival_s
        before = position - 1
        while before >= 0 and requests[batches[row, MEMBERS, before]].arrival_s > arrival_s:
            batches[row, MEMBERS, before + 1] = batches[row, MEMBERS, before]
            before -= 1
        batches[row, MEMBERS, before + 1] = i


@inner
def drop_ready(
    settings: PerRequestSettings, replicas: Records[Replica], batches: Ints, replica: int, first: int, end: int
) -> None:
    """Keep the ready requests at positions `first` to `end`."""
    row = ready_row(settings, replica)
    for position in range(first, end):
        batches[row, MEMBERS, position - first] = batches[row, MEMBERS, position]
    replicas[replica].num_ready = end - first


@inner
def add(batches: Ints, slot: int, size: int, i: int, num_tokens: int) -> int:
    """Put `num_tokens` of request `i` into the batch; returns its new size."""
    batches[slot, MEMBERS, size] = i
    batches[slot, TOKENS, size] = num_tokens
    return size + 1


@inner
def make_room(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    batches: Ints,
    replica: int,
    i: int,
    position: int,
    end: int,
) -> int:
    """See that a block is free for decoding request `i`, as vLLM V0's `_can_append_slots` asks whether it needs one or
    not: restart the last of the ready requests at positions `position` to `end`, and `i` itself when there is none.

    Returns the new `end`, or NONE if `i` was restarted.
    """
    row = ready_row(settings, replica)
    while replicas[replica].free_blocks < 1:
        if position >= end:
            restart(settings, requests, sequences, replicas, replica, i)
            return NONE
        end -= 1
        restart(settings, requests, sequences, replicas, replica, batches[row, MEMBERS, end])
    return end


@inner
def form_batch_vllm_v0(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """vLLM V0 `Scheduler._schedule` (0.2 to 0.7, without chunked prefill): waiting prompts on their own, else a decode
    step of all that are ready, in order of arrival.

    A prompt is admitted whole, while blocks above the watermark are free and the batch, padded to its longest prompt,
    stays within `max_num_batched_tokens`. When no block is free, the latest request is restarted.
    """
    size, longest = 0, 0
    while replicas[replica].first_waiting != NONE:
        i = replicas[replica].first_waiting
        longest = max(longest, sequences[i].prompt_tokens)
        num_blocks = next_prompt_blocks(settings, sequences, i)
        if (
            replicas[replica].free_blocks - num_blocks < settings.watermark_blocks
            or (size + 1) * longest > settings.max_num_batched_tokens
            or replicas[replica].num_running == settings.max_num_seqs
            or size == settings.max_batch_seqs
        ):
            break
        admit(requests, sequences, replicas, replica, num_blocks, now_s)
        size = add(batches, slot, size, i, sequences[i].prompt_tokens)
    if size > 0:
        return size
    room = settings.max_batch_seqs - take_group(settings, sequences, replicas, slots, batches, replica, slot)
    sort_ready(settings, requests, replicas, batches, replica)
    row = ready_row(settings, replica)
    position, end = 0, replicas[replica].num_ready
    while position < end and size < room:
        i = batches[row, MEMBERS, position]
        position += 1
        left = make_room(settings, requests, sequences, replicas, batches, replica, i, position, end)
        if left != NONE:
            end = left
            take_block(settings, sequences, replicas, replica, i)
            size = add(batches, slot, size, i, 1)
        else:
            end = position
    drop_ready(settings, replicas, batches, replica, position, end)
    return size


@inner
def form_batch_sarathi(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """Sarathi-Serve's `SarathiScheduler` (Agrawal et al., OSDI 2024): decoding requests, then the rest of begun
    prompts, then new ones, the prompts cut so that a step has `max_num_batched_tokens` tokens.

    Decoding requests are not limited by the budget, but use it up. Blocks of a whole prompt are taken at admission,
    above the watermark. When no block is free, the latest ready request is restarted.
    """
    num_tokens = take_group(settings, sequences, replicas, slots, batches, replica, slot)
    room = settings.max_batch_seqs - num_tokens
    row = ready_row(settings, replica)
    size, begun = 0, 0
    position, end = 0, replicas[replica].num_ready
    while position < end and size < room:
        i = batches[row, MEMBERS, position]
        position += 1
        if not sequences[i].is_prefilled:
            batches[row, SCRATCH, begun] = i
            begun += 1
            continue
        left = make_room(settings, requests, sequences, replicas, batches, replica, i, position, end)
        if left != NONE:
            end = left
            take_block(settings, sequences, replicas, replica, i)
            size = add(batches, slot, size, i, 1)
            num_tokens += 1
        else:
            end = position

    skipped = 0
    for k in range(begun):
        i = batches[row, SCRATCH, k]
        chunk = min(
            sequences[i].prompt_tokens - sequences[i].processed_tokens, settings.max_num_batched_tokens - num_tokens
        )
        if chunk > 0:
            size = add(batches, slot, size, i, chunk)
            num_tokens += chunk
        else:
            batches[row, SCRATCH, skipped] = i
            skipped += 1
    for k in range(position, end):
        batches[row, SCRATCH, skipped] = batches[row, MEMBERS, k]
        skipped += 1
    for k in range(skipped):
        batches[row, MEMBERS, k] = batches[row, SCRATCH, k]
    replicas[replica].num_ready = skipped
    sort_ready(settings, requests, replicas, batches, replica)

    while replicas[replica].first_waiting != NONE:
        i = replicas[replica].first_waiting
        num_blocks = next_prompt_blocks(settings, sequences, i)
        chunk = min(sequences[i].prompt_tokens, settings.max_num_batched_tokens - num_tokens)
        if (
            replicas[replica].num_running == settings.max_num_seqs
            or size == room
            or replicas[replica].free_blocks - num_blocks < settings.watermark_blocks
            or chunk <= 0
        ):
            break
        admit(requests, sequences, replicas, replica, num_blocks, now_s)
        size = add(batches, slot, size, i, chunk)
        num_tokens += chunk
    return size


@inner
def admit_reserved(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    batches: Ints,
    replica: int,
    slot: int,
    size: int,
    room: int,
    now_s: float,
) -> int:
    """Fill the batch with whole prompts up to `room`, each given `reserved_blocks` for good."""
    while (
        replicas[replica].first_waiting != NONE
        and size < room
        and replicas[replica].free_blocks >= settings.reserved_blocks
    ):
        i = admit(requests, sequences, replicas, replica, settings.reserved_blocks, now_s)
        size = add(batches, slot, size, i, sequences[i].prompt_tokens)
    return size


@inner
def form_batch_orca(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """Orca's iteration-level scheduling (Yu et al., OSDI 2022, algorithm 1): everything that is ready, then waiting
    requests, prompts whole; a request is admitted with blocks for the longest sequence that the engine serves.
    """
    room = settings.max_batch_seqs - take_group(settings, sequences, replicas, slots, batches, replica, slot)
    row = ready_row(settings, replica)
    size = min(replicas[replica].num_ready, room)
    for position in range(size):
        add(batches, slot, position, batches[row, MEMBERS, position], 1)
    drop_ready(settings, replicas, batches, replica, size, replicas[replica].num_ready)
    return admit_reserved(settings, requests, sequences, replicas, batches, replica, slot, size, room, now_s)


@inner
def form_batch_faster_transformer(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """FasterTransformer's request-level batching: a batch runs until all its requests have finished, then the next is
    formed; as Orca's, admission reserves the longest sequence.
    """
    row = ready_row(settings, replica)
    size = 0
    while size < replicas[replica].num_ready:
        i = batches[row, MEMBERS, size]
        if sequences[i].group != sequences[batches[row, MEMBERS, 0]].group:
            break
        add(batches, slot, size, i, 1)
        size += 1
    if size > 0:
        drop_ready(settings, replicas, batches, replica, size, replicas[replica].num_ready)
        return size
    room = settings.max_batch_seqs
    size = admit_reserved(settings, requests, sequences, replicas, batches, replica, slot, 0, room, now_s)
    replicas[replica].num_groups += 1
    for position in range(size):
        sequences[batches[slot, MEMBERS, position]].group = replicas[replica].num_groups
    return size


@inner
def form_batch_lightllm(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """LightLLM's token-level router (`ReqQueue`, 1.0): decode steps of everything; waiting prompts are looked at when
    nothing runs or after `max_waiting_steps` decode steps, and run on their own.

    A prompt is admitted if the most blocks that all running requests will ever hold together, knowing their outputs,
    stays below the pool. The block size is one token.
    """
    is_empty = replicas[replica].num_ready == 0 and replicas[replica].ready_group == NONE
    size = 0
    if is_empty or replicas[replica].waited_steps >= settings.max_waiting_steps:
        if replicas[replica].first_waiting != NONE:
            dissolve(settings, sequences, replicas, slots, batches, replica)
            size = admit_by_peak(settings, requests, sequences, replicas, batches, replica, slot, now_s)
        if size > 0 or not is_empty:
            replicas[replica].waited_steps = 0
        if size > 0:
            return size
    if is_empty:
        return 0
    replicas[replica].waited_steps += 1
    take_group(settings, sequences, replicas, slots, batches, replica, slot)
    row = ready_row(settings, replica)
    num_ready = replicas[replica].num_ready
    for position in range(min(num_ready, replicas[replica].free_blocks)):
        i = batches[row, MEMBERS, position]
        take_block(settings, sequences, replicas, replica, i)
        size = add(batches, slot, size, i, 1)
    drop_ready(settings, replicas, batches, replica, size, num_ready)
    return size


@inner
def admit_by_peak(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    batches: Ints,
    replica: int,
    slot: int,
    now_s: float,
) -> int:
    """Admit the prompts that LightLLM's peak test lets in."""
    row = ready_row(settings, replica)
    considered = 0
    for position in range(replicas[replica].num_ready):
        i = batches[row, MEMBERS, position]
        considered = consider(sequences, batches, row, considered, i, sequences[i].processed_tokens)
    size, num_tokens = 0, 0
    while replicas[replica].first_waiting != NONE:
        i = replicas[replica].first_waiting
        prompt = sequences[i].prompt_tokens
        if (
            num_tokens + prompt > settings.max_num_batched_tokens
            or replicas[replica].num_running == settings.max_num_seqs
            or size == settings.max_batch_seqs
        ):
            break
        considered = consider(sequences, batches, row, considered, i, prompt + 1)
        if peak_blocks(batches, row, considered) >= settings.num_blocks:
            break
        num_blocks = next_prompt_blocks(settings, sequences, i)
        admit(requests, sequences, replicas, replica, num_blocks, now_s)
        size = add(batches, slot, size, i, prompt)
        num_tokens += prompt
    return size


@inner
def consider(sequences: Records[SequenceState], batches: Ints, row: int, size: int, i: int, held_tokens: int) -> int:
    """Insert (steps left, tokens held) of request `i` into the scratch lists, the most steps first."""
    left = max(sequences[i].total_tokens - held_tokens - 1, 0)
    position = size
    while position > 0 and batches[row, SCRATCH, position - 1] < left:
        batches[row, SCRATCH, position] = batches[row, SCRATCH, position - 1]
        batches[row, SCRATCH + 1, position] = batches[row, SCRATCH + 1, position - 1]
        position -= 1
    batches[row, SCRATCH, position] = left
    batches[row, SCRATCH + 1, position] = held_tokens
    return size + 1


@inner
def peak_blocks(batches: Ints, row: int, size: int) -> int:
    """Return the most tokens that the requests of the scratch lists will hold together: when the k-th longest ends, k
    of them are left, each with its tokens of then.
    """
    peak, held = 0, 0
    for position in range(size):
        held += batches[row, SCRATCH + 1, position]
        peak = max(peak, batches[row, SCRATCH, position] * (position + 1) + held)
    return peak
