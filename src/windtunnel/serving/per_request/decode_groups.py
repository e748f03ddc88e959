"""Decode groups of per-request scheduling: decoding requests that take every step together, counted instead of visited
one by one.

What a slot's batch decoded stays its decode group as long as the next batch decodes all of it again. A member's state
is then its state when it joined and the steps since: the decode group keeps those, the sum of what its members have
processed, the step at which the first one ends, and how many need a block at which step. A batch that cannot take all
of it (no room in the batch, no block free, another slot's batch in between) dissolves it into ready requests, as if it
had never been. A replica has one decode group that is ready at most; `group_position` says in front of which ready
request it stands.
"""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import int64
from windtunnel.serving.clients import conclude
from windtunnel.serving.codes import FASTER_TRANSFORMER, ORCA, USER, VLLM_V0
from windtunnel.serving.state.records import NONE, Requests
from windtunnel.serving.state.tables import PoolTables, RunTables

MEMBERS, TOKENS, SCRATCH = 0, 1, 2
"""Columns of `batches`: of a slot's row its requests that are visited one by one and their tokens; of a replica's row,
further down, MEMBERS holds the ready requests and the columns from SCRATCH on are free."""
GROUP, ENDS, PHASES = 2, 3, 4
"""Further columns of a slot's row: the members of its decode group, the decode group's step after which each ends, and
how many of them need a block for a step, by the decode group's steps before it modulo the block size."""


@inner
def ready_row(pool: PoolTables, replica: int) -> int:
    """Return the row of `batches` that lists the replica's ready requests."""
    return pool.settings.num_replicas * pool.settings.num_stages + replica


@inner
def reserves_blocks(pool: PoolTables) -> bool:
    """Whether a request has all its blocks from its admission on."""
    return pool.settings.scheduler == ORCA or pool.settings.scheduler == FASTER_TRANSFORMER


@inner
def may_join(pool: PoolTables, replica: int, slot: int) -> bool:
    """Whether the requests that the slot's batch decoded may be its decode group from now on: there is none that was
    left out, and every ready one is in the middle of its prompt.
    """
    if pool.settings.scheduler == USER or pool.settings.scheduler == FASTER_TRANSFORMER:
        return False
    if pool.ranks[replica].ready_group == slot and not pool.slots[slot].has_group:
        return False
    row = ready_row(pool, replica)
    for position in range(pool.ranks[replica].num_ready):
        if pool.sequences[pool.batches[row, MEMBERS, position]].is_prefilled:
            return False
    return True


@inner
def join(pool: PoolTables, requests: Requests, slot: int, i: int, now_s: float) -> None:
    """Add decoding request `i` to the slot's decode group: vLLM V0's in order of arrival, others at the end."""
    members, ends = pool.batches[slot, GROUP], pool.batches[slot, ENDS]
    position = pool.slots[slot].group_size
    if position == 0:
        pool.slots[slot].group_steps = 0
        pool.slots[slot].group_tokens = 0
        pool.slots[slot].group_squares = 0
        pool.slots[slot].group_paused_s = 0.0
        pool.slots[slot].group_left_s = now_s
        pool.slots[slot].first_end = int64(1) << 40
        for phase in range(pool.settings.block_size):
            pool.batches[slot, PHASES, phase] = 0
    steps, processed = pool.slots[slot].group_steps, pool.sequences[i].processed_tokens
    end = steps + pool.sequences[i].total_tokens - processed
    if pool.settings.scheduler == VLLM_V0:
        while position > 0 and requests[members[position - 1]].arrival_s > requests[i].arrival_s:
            members[position] = members[position - 1]
            ends[position] = ends[position - 1]
            position -= 1
    members[position] = i
    ends[position] = end
    pool.batches[slot, PHASES, (steps + 1 - processed) % pool.settings.block_size] += 1
    pool.sequences[i].paused_s -= pool.slots[slot].group_paused_s
    pool.slots[slot].first_end = min(pool.slots[slot].first_end, end)
    pool.slots[slot].group_tokens += processed
    pool.slots[slot].group_squares += (processed - steps) * (processed - steps)
    pool.slots[slot].group_size += 1


@inner
def group_context_squares(pool: PoolTables, slot: int) -> int:
    """Return the sum of the squares of what the members of the slot's decode group have processed."""
    steps, size = pool.slots[slot].group_steps, pool.slots[slot].group_size
    started_tokens = pool.slots[slot].group_tokens - size * steps
    return pool.slots[slot].group_squares + 2 * steps * started_tokens + size * steps * steps


@inner
def count_members(pool: PoolTables) -> None:
    """Write what the members of all decode groups have processed to their records, and leave them members."""
    for slot in range(pool.settings.num_replicas * pool.settings.num_stages):
        for position in range(pool.slots[slot].group_size):
            i, end = pool.batches[slot, GROUP, position], pool.batches[slot, ENDS, position]
            left = end - pool.slots[slot].group_steps
            pool.sequences[i].processed_tokens = pool.sequences[i].total_tokens - left


@inner
def write_back(pool: PoolTables, slot: int, i: int, end: int) -> None:
    """Write the record of a member that ends after the decode group's step `end`, as if it had been visited one by
    one."""
    pool.sequences[i].processed_tokens = pool.sequences[i].total_tokens - (end - pool.slots[slot].group_steps)
    pool.sequences[i].left_stage_s = pool.slots[slot].group_left_s
    pool.sequences[i].paused_s += pool.slots[slot].group_paused_s
    if not reserves_blocks(pool):
        held = pool.sequences[i].processed_tokens - 1
        pool.sequences[i].num_blocks = (held + pool.settings.block_size - 1) // pool.settings.block_size


@inner
def advance(pool: PoolTables, run: RunTables, replica: int, slot: int, now_s: float) -> None:
    """Count the steps of the slot's batch for its decode group; members that end leave."""
    pool.slots[slot].group_steps += pool.slots[slot].num_steps
    pool.slots[slot].group_tokens += pool.slots[slot].num_steps * pool.slots[slot].group_size
    pool.slots[slot].group_left_s = now_s
    steps = pool.slots[slot].group_steps
    if steps < pool.slots[slot].first_end:
        return
    members, ends = pool.batches[slot, GROUP], pool.batches[slot, ENDS]
    kept, first_end = 0, int64(1) << 40
    for position in range(pool.slots[slot].group_size):
        i, end = members[position], ends[position]
        if end > steps:
            members[kept] = i
            ends[kept] = end
            kept += 1
            first_end = min(first_end, end)
            continue
        write_back(pool, slot, i, end)
        pool.slots[slot].group_tokens -= pool.sequences[i].total_tokens
        started_tokens = pool.sequences[i].total_tokens - end
        pool.slots[slot].group_squares -= started_tokens * started_tokens
        pool.batches[slot, PHASES, (steps + 1 - pool.sequences[i].total_tokens) % pool.settings.block_size] -= 1
        run.requests[i].finish_s = now_s
        conclude(pool.settings, run, i, now_s)
        pool.ranks[replica].num_outstanding -= 1
        pool.ranks[replica].num_running -= 1
        pool.ranks[replica].free_blocks += pool.sequences[i].num_blocks
        pool.sequences[i].num_blocks = 0
    pool.slots[slot].group_size = kept
    pool.slots[slot].first_end = first_end


@inner
def dissolve(pool: PoolTables, replica: int) -> None:
    """Make the members of the replica's ready decode group, if there is one, ready requests like others."""
    slot = pool.ranks[replica].ready_group
    if slot == NONE:
        return
    ready, members, ends = (
        pool.batches[ready_row(pool, replica), MEMBERS],
        pool.batches[slot, GROUP],
        pool.batches[slot, ENDS],
    )
    first, size = pool.ranks[replica].group_position, pool.slots[slot].group_size
    for position in range(pool.ranks[replica].num_ready - 1, first - 1, -1):
        ready[position + size] = ready[position]
    for position in range(size):
        write_back(pool, slot, members[position], ends[position])
        ready[first + position] = members[position]
    pool.ranks[replica].num_ready += size
    pool.ranks[replica].ready_group = NONE
    pool.slots[slot].group_size = 0


@inner
def take_group(pool: PoolTables, replica: int, slot: int) -> int:
    """Have the batch of `slot` decode the ready decode group, with blocks for all that is ready, or dissolve it.

    Returns how many of the batch's requests are not visited one by one.
    """
    if pool.ranks[replica].ready_group == NONE:
        return 0
    row, num_ready = ready_row(pool, replica), pool.ranks[replica].num_ready
    needed, room = 0, pool.ranks[replica].free_blocks
    if reserves_blocks(pool):
        room = int64(1) << 40
    else:
        needed = pool.batches[slot, PHASES, pool.slots[slot].group_steps % pool.settings.block_size]
    takes = (
        pool.ranks[replica].ready_group == slot
        and pool.slots[slot].group_size + num_ready <= min(pool.settings.max_batch_seqs, room)
        and needed + num_ready < room
    )
    for position in range(pool.ranks[replica].group_position):
        takes = takes and not pool.sequences[pool.batches[row, MEMBERS, position]].is_prefilled
    if not takes:
        dissolve(pool, replica)
        return 0
    pool.ranks[replica].free_blocks -= needed
    pool.ranks[replica].ready_group = NONE
    pool.slots[slot].has_group = 1
    return pool.slots[slot].group_size
