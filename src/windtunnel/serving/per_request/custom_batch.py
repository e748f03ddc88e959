"""A batch that a user's policy chose, formed or refused."""

from windtunnel.compiled.jit import entry
from windtunnel.compiled.records import Records
from windtunnel.serving.per_request.decode_groups import MEMBERS, ready_row
from windtunnel.serving.per_request.policies import add, admit, put_first, restart
from windtunnel.serving.state.per_request import PerRequestClock, PerRequestSettings, Replica, SequenceState
from windtunnel.serving.state.records import NONE, Ints, Requests

TWICE, NOT_HERE, TOO_MANY_TOKENS, TOO_FEW_TOKENS, TOO_MANY_BLOCKS, TOO_MANY_SEQS, TOO_LONG = range(-7, 0)
"""What `form_custom_batch` returns for a batch that the engine cannot run; the request is in `clock[0].culprit`."""


@entry
def list_waiting(sequences: Records[SequenceState], replicas: Records[Replica], replica: int, out: Ints) -> int:
    """Write the waiting requests of a replica to `out`, in order; returns how many there are."""
    count = 0
    i = replicas[replica].first_waiting
    while i != NONE and count < out.size:
        out[count] = i
        count += 1
        i = sequences[i].next
    return count


@entry
def form_custom_batch(
    settings: PerRequestSettings,
    requests: Requests,
    sequences: Records[SequenceState],
    replicas: Records[Replica],
    batches: Ints,
    clock: Records[PerRequestClock],
    pairs: Ints,
) -> int:
    """Form the batch that a user's policy chose, `pairs` [n, 2] of request and tokens; 0 tokens restart a request.

    Requests are taken in the order given: waiting ones are admitted, blocks are taken as the tokens need them. Nothing
    is changed where the answer is one of the error codes, except for what the batch already took: the run is over then.

    Returns the size of the batch, or an error code.
    """
    replica, slot, now_s = clock[0].replica, clock[0].slot, clock[0].now_s
    row = ready_row(settings, replica)
    size, num_tokens = 0, 0
    for k in range(pairs.shape[0]):
        i, tokens = pairs[k, 0], pairs[k, 1]
        clock[0].culprit = i
        if i < 0 or i >= requests.size:
            return NOT_HERE
        position = 0
        while position < replicas[replica].num_ready and batches[row, MEMBERS, position] != i:
            position += 1
        is_ready = position < replicas[replica].num_ready
        if is_ready:
            for later in range(position, replicas[replica].num_ready - 1):
                batches[row, MEMBERS, later] = batches[row, MEMBERS, later + 1]
            replicas[replica].num_ready -= 1
            if tokens == 0:
                restart(settings, requests, sequences, replicas, replica, i)
                continue
        else:
            for earlier in range(size):
                if batches[slot, MEMBERS, earlier] == i:
                    return TWICE
            before, at = NONE, replicas[replica].first_waiting
            while at != NONE and at != i:
                before, at = at, sequences[at].next
            if at == NONE:
                return NOT_HERE
            if before != NONE:
                sequences[before].next = sequences[i].next
                if sequences[i].next == NONE:
                    replicas[replica].last_waiting = before
                replicas[replica].num_waiting -= 1
                put_first(sequences, replicas, replica, i)
        left = 1 if sequences[i].is_prefilled else sequences[i].prompt_tokens - sequences[i].processed_tokens
        if tokens < 1:
            return TOO_FEW_TOKENS
        if tokens > left:
            return TOO_MANY_TOKENS
        if not is_ready:
            if replicas[replica].num_running >= settings.max_num_seqs:
                return TOO_MANY_SEQS
            admit(requests, sequences, replicas, replica, 0, now_s)
        held = sequences[i].processed_tokens + (0 if sequences[i].is_prefilled else tokens)
        num_needed = (held + settings.block_size - 1) // settings.block_size - sequences[i].num_blocks
        if num_needed > replicas[replica].free_blocks:
            return TOO_MANY_BLOCKS
        if num_needed > 0:
            sequences[i].num_blocks += num_needed
            replicas[replica].free_blocks -= num_needed
        size = add(batches, slot, size, i, tokens)
        num_tokens += tokens
        if num_tokens > settings.max_num_batched_tokens:
            return TOO_LONG
        if size > settings.max_batch_seqs:
            return TOO_MANY_SEQS
    clock[0].custom_size = size
    clock[0].answered = 1
    return size
