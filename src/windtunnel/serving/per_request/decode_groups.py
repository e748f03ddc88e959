"""Decode groups of the per-request loop: decoding requests that take every step together, counted instead of visited
one by one.

What a slot's batch decoded stays its decode group as long as the next batch decodes all of it again. A member's state
is then its state when it joined and the steps since: the decode group keeps those, the sum of what its members have
processed, the step at which the first one ends, and how many need a block at which step. A batch that cannot take all
of it (no room in the batch, no block free, another slot's batch in between) dissolves it into ready requests, as if it
had never been. A replica has one decode group that is ready at most; `group_position` says in front of which ready
request it stands.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.serving.codes import FASTER_TRANSFORMER, ORCA, USER, VLLM_V0
from windtunnel.serving.loop.completions import conclude
from windtunnel.serving.state.per_request import BatchSlot, PerRequestSettings, Replica, SequenceState, SequenceTables
from windtunnel.serving.state.records import NONE, Ints, Requests
from windtunnel.serving.state.tables import RunTables

MEMBERS, TOKENS, SCRATCH = 0, 1, 2
"""Columns of `batches`: of a slot's row its requests that are visited one by one and their tokens; of a replica's row,
further down, MEMBERS holds the ready requests and the columns from SCRATCH on are free."""
GROUP, ENDS, PHASES = 2, 3, 4
"""Further columns of a slot's row: the members of its decode group, the decode group's step after which each ends, and
how many of them need a block for a step, by the decode group's steps before it modulo the block size."""


@inner
def ready_row(settings: PerRequestSettings, replica: int) -> int:
    """Return the row of `batches` that lists the replica's ready requests."""
    return settings.num_replicas * settings.num_stages + replica


@inner
def reserves_blocks(settings: PerRequestSettings) -> bool:
    """Whether a request has all its blocks from its admission on."""
    return settings.scheduler == ORCA or settings.scheduler == FASTER_TRANSFORMER


@inner
def may_join(
    settings: PerRequestSettings,
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    sequences: Records[SequenceState],
    batches: Ints,
    replica: int,
    slot: int,
) -> bool:
    """Whether the requests that the slot's batch decoded may be its decode group from now on: there is none that was
    left out, and every ready one is in the middle of its prompt.
    """
    if settings.scheduler == USER or settings.scheduler == FASTER_TRANSFORMER:
        return False
    if replicas[replica].ready_group == slot and not slots[slot].has_group:
        return False
    row = ready_row(settings, replica)
    for position in range(replicas[replica].num_ready):
        if sequences[batches[row, MEMBERS, position]].is_prefilled:
            return False
    return True


@inner
def join(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    slots: Records[BatchSlot],
    batches: Ints,
    slot: int,
    i: int,
    now_s: float,
) -> None:
    """Add decoding request `i` to the slot's decode group: vLLM V0's in order of arrival, others at the end."""
    members, ends = batches[slot, GROUP], batches[slot, ENDS]
    position = slots[slot].group_size
    if position == 0:
        slots[slot].group_steps = 0
        slots[slot].group_tokens = 0
        slots[slot].group_paused_s = 0.0
        slots[slot].group_left_s = now_s
        slots[slot].first_end = int64(1) << 40
        for phase in range(settings.block_size):
            batches[slot, PHASES, phase] = 0
    steps, processed = slots[slot].group_steps, sequences[i].processed_tokens
    end = steps + sequences[i].total_tokens - processed
    if settings.scheduler == VLLM_V0:
        while position > 0 and not (settings.numbered_by_arrival and i > members[position - 1]):
            if requests[members[position - 1]].arrival_s <= requests[i].arrival_s:
                break
            members[position] = members[position - 1]
            ends[position] = ends[position - 1]
            position -= 1
    members[position] = i
    ends[position] = end
    batches[slot, PHASES, (steps + 1 - processed) % settings.block_size] += 1
    sequences[i].paused_s -= slots[slot].group_paused_s
    slots[slot].first_end = min(slots[slot].first_end, end)
    slots[slot].group_tokens += processed
    slots[slot].group_size += 1


@inner
def write_back(
    settings: PerRequestSettings,
    sequences: Records[SequenceState],
    slots: Records[BatchSlot],
    slot: int,
    i: int,
    end: int,
) -> None:
    """Write the record of a member that ends after the decode group's step `end`, as if it had been visited one by
    one."""
    sequences[i].processed_tokens = sequences[i].total_tokens - (end - slots[slot].group_steps)
    sequences[i].left_stage_s = slots[slot].group_left_s
    sequences[i].paused_s += slots[slot].group_paused_s
    if not reserves_blocks(settings):
        held = sequences[i].processed_tokens - 1
        sequences[i].num_blocks = (held + settings.block_size - 1) // settings.block_size


@inner
def advance(tables: SequenceTables, run: RunTables, replica: int, slot: int, now_s: float) -> None:
    """Count the steps of the slot's batch for its decode group; members that end leave."""
    settings, sequences, batches = tables.settings, tables.sequences, tables.batches
    slots, replicas = tables.slots, tables.replicas
    slots[slot].group_steps += slots[slot].num_steps
    slots[slot].group_tokens += slots[slot].num_steps * slots[slot].group_size
    slots[slot].group_left_s = now_s
    steps = slots[slot].group_steps
    if steps < slots[slot].first_end:
        return
    members, ends = batches[slot, GROUP], batches[slot, ENDS]
    kept, first_end = 0, int64(1) << 40
    for position in range(slots[slot].group_size):
        i, end = members[position], ends[position]
        if end > steps:
            members[kept] = i
            ends[kept] = end
            kept += 1
            first_end = min(first_end, end)
            continue
        write_back(settings, sequences, slots, slot, i, end)
        slots[slot].group_tokens -= sequences[i].total_tokens
        batches[slot, PHASES, (steps + 1 - sequences[i].total_tokens) % settings.block_size] -= 1
        run.requests[i].finish_s = now_s
        conclude(settings, run, i, now_s)
        replicas[replica].num_outstanding -= 1
        replicas[replica].num_running -= 1
        replicas[replica].free_blocks += sequences[i].num_blocks
        sequences[i].num_blocks = 0
    slots[slot].group_size = kept
    slots[slot].first_end = first_end


@inner
def dissolve(
    settings: PerRequestSettings,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
) -> None:
    """Make the members of the replica's ready decode group, if there is one, ready requests like others."""
    slot = replicas[replica].ready_group
    if slot == NONE:
        return
    ready, members, ends = batches[ready_row(settings, replica), MEMBERS], batches[slot, GROUP], batches[slot, ENDS]
    first, size = replicas[replica].group_position, slots[slot].group_size
    for position in range(replicas[replica].num_ready - 1, first - 1, -1):
        ready[position + size] = ready[position]
    for position in range(size):
        write_back(settings, sequences, slots, slot, members[position], ends[position])
        ready[first + position] = members[position]
    replicas[replica].num_ready += size
    replicas[replica].ready_group = NONE
    slots[slot].group_size = 0


@inner
def take_group(
    settings: PerRequestSettings,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    slots: Records[BatchSlot],
    batches: Ints,
    replica: int,
    slot: int,
) -> int:
    """Have the batch of `slot` decode the ready decode group, with blocks for all that is ready, or dissolve it.

    Returns how many of the batch's requests are not visited one by one.
    """
    if replicas[replica].ready_group == NONE:
        return 0
    row, num_ready = ready_row(settings, replica), replicas[replica].num_ready
    needed, room = 0, replicas[replica].free_blocks
    if reserves_blocks(settings):
        room = int64(1) << 40
    else:
        needed = batches[slot, PHASES, slots[slot].group_steps % settings.block_size]
    takes = (
        replicas[replica].ready_group == slot
        and slots[slot].group_size + num_ready <= min(settings.max_batch_seqs, room)
        and needed + num_ready < room
    )
    for position in range(replicas[replica].group_position):
        takes = takes and not sequences[batches[row, MEMBERS, position]].is_prefilled
    if not takes:
        dissolve(settings, sequences, replicas, slots, batches, replica)
        return 0
    replicas[replica].free_blocks -= needed
    replicas[replica].ready_group = NONE
    slots[slot].has_group = 1
    return slots[slot].group_size
