"""What per-request scheduling works on, in record arrays like those of `serving.state.records`."""

from typing import NamedTuple, Protocol

import numpy as np

from windtunnel.compiled.records import F8, I8
from windtunnel.serving.state.records import Floats, Ints, KernelSettings


class SequenceState(Protocol):
    """One record a request, beside `serving.state.records.Request`."""

    prompt_tokens: I8  # to compute before the next token: the prompt, after a restart its outputs too
    total_tokens: I8
    processed_tokens: I8  # computed, or found in the cache while it waits; one more when the prompt gave its token
    num_blocks: I8
    is_prefilled: I8
    next: I8  # in the waiting list
    group: I8  # FasterTransformer: the batch that it was admitted with
    last_token_s: F8  # set on restart; otherwise, once prefilled, `left_stage_s`
    left_stage_s: F8  # end of its latest pipeline stage
    paused_s: F8  # between stages
    started_s: F8  # in its first stage; of a pipeline only


class StageTables(NamedTuple):
    """Vidur's look-up tables as seconds of one pipeline stage; used in place of a `StepCost`."""

    token_s: Floats  # [tokens + 1] all operators that depend on the batch's tokens, rounded up to 8
    kv_save_s: Floats  # [tokens + 1] by tokens, not rounded
    prefill_s: Floats  # [cached tokens / granularity + 1, chunk + 1]
    decode_s: Floats  # [requests + 1, cached tokens / granularity + 1]
    send_recv_s: Floats  # [tokens + 1] between stages, by tokens rounded up to 8
    host_s: Floats  # [requests + 1] on every stage
    granularity: int
    prefill_factor: float  # of attention where a batch holds several prompts
    decode_factor: float  # of attention where a batch holds several decoding requests


class Trail(NamedTuple):
    """What every batch held and when it was in each stage, written only when asked for."""

    members: Ints  # [m, 3] row, request, tokens, in the order of the batch
    stage_s: Floats  # [rows, stages, 2] start and end; of a fused run of steps, of the whole


def new_batches(settings: KernelSettings) -> Ints:
    """Make empty lists `[slot or replica, list, position]`.

    A slot's row has the requests of its batch, their tokens, and its decode group's lists; a replica's row its ready
    requests (between two batches) and columns of scratch. `serving.per_request.decode_groups` names them.
    """
    rows = settings.num_replicas * (settings.num_stages + 1)
    most = max(settings.max_num_seqs, settings.max_batch_seqs * settings.num_stages) + 1
    return np.zeros((rows, 5, max(most, settings.block_size)), np.int64)
