"""A batch that a user's policy chose, formed or refused."""

from windtunnel.compiled.jit import entry, inner
from windtunnel.compiled.records import Records
from windtunnel.serving.per_request.decode_groups import MEMBERS, ready_row
from windtunnel.serving.per_request.policies import add, admit, put_first, restart
from windtunnel.serving.state.per_request import PerRequestPool, SequenceState
from windtunnel.serving.state.records import NONE, Clock, Ints, Rank, Requests

TWICE, NOT_HERE, TOO_MANY_TOKENS, TOO_FEW_TOKENS, TOO_MANY_BLOCKS, TOO_MANY_SEQS, TOO_LONG = range(-7, 0)
"""What `form_custom_batch` returns for a batch that the engine cannot run; the request is in `clock[0].culprit`."""


@entry
def list_waiting(sequences: Records[SequenceState], ranks: Records[Rank], replica: int, out: Ints) -> int:
    """Write the waiting requests of a replica to `out`, in order; returns how many there are."""
    count = 0
    i = ranks[replica].first_waiting
    while i != NONE and count < out.size:
        out[count] = i
        count += 1
        i = sequences[i].next
    return count


@inner
def form_custom_batch(
    pool: PerRequestPool,
    requests: Requests,
    clock: Records[Clock],
    replica: int,
    slot: int,
    pairs: Ints,
    now_s: float,
) -> int:
    """Form the batch that a user's policy chose, `pairs` [n, 2] of request and tokens; 0 tokens restart a request.

    Requests are taken in the order given: waiting ones are admitted, blocks are taken as the tokens need them. Nothing
    is changed where the answer is one of the error codes, except for what the batch already took: the run is over then.

    Returns the size of the batch, or an error code.
    """
    row = ready_row(pool, replica)
    size, num_tokens = 0, 0
    for k in range(pairs.shape[0]):
        i, tokens = pairs[k, 0], pairs[k, 1]
        clock[0].culprit = i
        if i < 0 or i >= requests.size:
            return NOT_HERE
        position = 0
        while position < pool.ranks[replica].num_ready and pool.batches[row, MEMBERS, position] != i:
            position += 1
        is_ready = position < pool.ranks[replica].num_ready
        if is_ready:
            for later in range(position, pool.ranks[replica].num_ready - 1):
                pool.batches[row, MEMBERS, later] = pool.batches[row, MEMBERS, later + 1]
            pool.ranks[replica].num_ready -= 1
            if tokens == 0:
                restart(pool, requests, replica, i)
                continue
        else:
            for earlier in range(size):
                if pool.batches[slot, MEMBERS, earlier] == i:
                    return TWICE
            before, waiting = NONE, pool.ranks[replica].first_waiting
            while waiting != NONE and waiting != i:
                before, waiting = waiting, pool.sequences[waiting].next
            if waiting == NONE:
                return NOT_HERE
            if before != NONE:
                pool.sequences[before].next = pool.sequences[i].next
                if pool.sequences[i].next == NONE:
                    pool.ranks[replica].last_waiting = before
                pool.ranks[replica].num_waiting -= 1
                pool.ranks[replica].waiting_tokens -= pool.sequences[i].prompt_tokens
                put_first(pool, replica, i)
        left = (
            1
            if pool.sequences[i].is_prefilled
            else pool.sequences[i].prompt_tokens - pool.sequences[i].processed_tokens
        )
        if tokens < 1:
            return TOO_FEW_TOKENS
        if tokens > left:
            return TOO_MANY_TOKENS
        if not is_ready:
            if pool.ranks[replica].num_running >= pool.settings.max_num_seqs:
                return TOO_MANY_SEQS
            admit(pool, requests, replica, 0, now_s)
        held = pool.sequences[i].processed_tokens + (0 if pool.sequences[i].is_prefilled else tokens)
        num_needed = (held + pool.settings.block_size - 1) // pool.settings.block_size - pool.sequences[i].num_blocks
        if num_needed > pool.ranks[replica].free_blocks:
            return TOO_MANY_BLOCKS
        if num_needed > 0:
            pool.sequences[i].num_blocks += num_needed
            pool.ranks[replica].free_blocks -= num_needed
        size = add(pool, slot, size, i, tokens)
        num_tokens += tokens
        if num_tokens > pool.settings.max_num_batched_tokens:
            return TOO_LONG
        if size > pool.rules.max_batch_seqs:
            return TOO_MANY_SEQS
    return size
