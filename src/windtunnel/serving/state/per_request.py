"""What the per-request loop works on, in record arrays like those of `serving.state.records`."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from windtunnel.compiled.records import F8, I8, Records, layout
from windtunnel.serving.codes import ROUND_ROBIN
from windtunnel.serving.state.records import MODULUS, NONE, Floats, Ints, StepCost, Table


class PerRequestSettings(NamedTuple):
    """How a replica's engine forms batches. Scalars."""

    scheduler: int
    num_replicas: int
    num_stages: int
    """Pipeline stages, and so batches that a replica may have in flight."""
    max_num_seqs: int
    """Requests that may hold KV blocks at once."""
    max_batch_seqs: int
    """Requests of one batch."""
    max_num_batched_tokens: int
    """vLLM V0: prompts of a batch times the longest of them; LightLLM: prompt tokens of a batch; Sarathi: tokens of a
    batch, the chunk size."""
    block_size: int
    num_blocks: int
    watermark_blocks: int = 0
    """Blocks that admission leaves free."""
    reserved_blocks: int = 0
    """Orca and FasterTransformer: blocks that a request is given when it is admitted."""
    max_waiting_steps: int = 0
    """LightLLM: decode steps after which waiting requests are looked at."""
    loses_prompts: int = 0
    """1: a request that is restarted in the middle of its prompt computes the rest of it one token a step."""
    leaks_blocks: int = 0
    """1: the end of a FasterTransformer batch frees the blocks of its last step's requests only."""
    fuses_steps: int = 1
    """1: equal decode steps up to the next event are taken at once; the same times, fewer rows."""
    end_s: float = np.inf
    """Nothing after this time happens."""
    concurrency: int = 0
    num_warmup: int = 0
    frontend_s: float = 0.0
    router: int = ROUND_ROBIN
    seed: int = 0
    numbered_by_arrival: int = 1
    """0: later requests may arrive earlier, as turns of sessions do."""
    ranks_per_replica: int = 1
    """Always 1: these engines have no attention data parallelism."""


class SequenceState(Protocol):
    """One record a request, beside `serving.state.records.REQUEST`."""

    prompt_tokens: I8  # to compute before the next token: the prompt, after a restart its outputs too
    total_tokens: I8
    processed_tokens: I8  # computed, and one more as soon as the prompt is: the token that it gave
    num_blocks: I8
    is_prefilled: I8
    next: I8  # in the waiting list
    group: I8  # FasterTransformer: the batch that it was admitted with
    last_token_s: F8  # set on restart; otherwise, once prefilled, `left_stage_s`
    left_stage_s: F8  # end of its latest pipeline stage
    paused_s: F8  # between stages
    started_s: F8  # in its first stage; of a pipeline only


SEQUENCE = layout(SequenceState)


class Replica(Protocol):
    """One record a replica."""

    free_blocks: I8
    num_running: I8  # requests that hold blocks
    num_waiting: I8
    num_outstanding: I8
    num_ready: I8
    num_in_flight: I8  # batches
    first_waiting: I8
    last_waiting: I8
    waited_steps: I8
    num_groups: I8  # FasterTransformer: batches formed so far
    has_restarted: I8  # 1 if the batch that is formed made one restart
    is_awake: I8  # 1 while an event that lets it look for work is queued
    ready_group: I8  # slot whose decode group is in no batch, or NONE
    group_position: I8  # of the ready requests, the first one behind it


REPLICA = layout(Replica)


class BatchSlot(Protocol):
    """One record a batch that may be in flight, `num_stages` for each replica."""

    num_requests: I8  # 0: idle
    num_listed: I8  # of them, those that are not in the decode group
    num_steps: I8
    has_group: I8  # 1 if the batch decodes the slot's decode group
    group_size: I8
    group_steps: I8  # that its members have taken together
    group_tokens: I8  # processed by all its members
    first_end: I8  # the decode group's step after which the first member ends
    group_left_s: F8  # end of its latest pipeline stage
    group_paused_s: F8  # between stages, all its steps
    start_s: F8
    end_s: F8


SLOT = layout(BatchSlot)


class PerRequestClock(Protocol):
    """The loop's registers, one record, kept outside so that a run can stop and go on."""

    next: I8  # request to be sent next, of those that wait for no other one
    started: I8  # such requests sent
    sent: I8
    ended: I8  # requests finished that no other one waits for
    finished: I8
    thinking: I8  # turns whose predecessor has finished
    queued: I8  # events on the heap
    turn: I8  # round robin: replica that the next request goes to
    random: I8  # state of the router's generator
    rows: I8  # rows of the step buffer written
    members: I8  # rows of the trail's members written
    batches: I8  # rows written by all calls
    replica: I8  # whose batches are being formed, or NONE
    slot: I8  # where the batch that a user's policy is asked for belongs
    answered: I8  # 1 when it is there
    custom_size: I8
    culprit: I8  # the request or batch size behind an error
    now_s: F8


PER_REQUEST_CLOCK = layout(PerRequestClock)


class Tables(NamedTuple):
    """Vidur's look-up tables as seconds of one pipeline stage; used in place of a `StepCost`."""

    token_s: Floats
    """[tokens + 1] all operators that depend on the batch's tokens, rounded up to 8."""
    kv_save_s: Floats
    """[tokens + 1] by tokens, not rounded."""
    prefill_s: Floats
    """[cached tokens / granularity + 1, chunk + 1]"""
    decode_s: Floats
    """[requests + 1, cached tokens / granularity + 1]"""
    send_recv_s: Floats
    """[tokens + 1] between stages, by tokens rounded up to 8."""
    host_s: Floats
    """[requests + 1] on every stage."""
    granularity: int
    prefill_factor: float
    """Of attention where a batch holds several prompts."""
    decode_factor: float
    """Of attention where a batch holds several decoding requests."""


class SequenceTables(NamedTuple):
    """The replicas of a run: how they behave, and the sequences and batches that they have."""

    settings: PerRequestSettings
    sequences: Records[SequenceState]
    """[request] `SEQUENCE` records."""
    replicas: Records[Replica]
    """[replica] `REPLICA` records."""
    slots: Records[BatchSlot]
    """[replica x stage] `SLOT` records."""
    batches: Ints
    """[slot or replica, list, position], see `new_batches`."""
    stages: Floats
    """[replica, stage] Time at which each pipeline stage is free."""
    clock: Records[PerRequestClock]
    """[1] The same record as in the run's tables, with the registers of this loop."""


class Prices(NamedTuple):
    """What prices a step: one of the two; the other is None."""

    cost: StepCost | None
    tables: Tables | None


class Trail(NamedTuple):
    """What every batch held and when it was in each stage, written only when asked for."""

    members: Ints
    """[m, 3] row, request, tokens, in the order of the batch."""
    stage_s: Floats
    """[rows, stages, 2] start and end; of a fused run of steps, of the whole."""


def new_sequences(requests: Table) -> Table:
    """Make fresh `SEQUENCE` records for `requests`."""
    sequences = np.zeros(requests.size, SEQUENCE).view(np.recarray)
    sequences.prompt_tokens = requests.input_tokens
    sequences.total_tokens = requests.input_tokens + requests.output_tokens
    sequences.next = NONE
    for unknown in ("last_token_s", "left_stage_s", "started_s"):
        sequences[unknown] = np.nan
    return sequences


def new_replicas(settings: PerRequestSettings) -> Table:
    """Make idle `REPLICA` records with empty KV pools."""
    replicas = np.zeros(settings.num_replicas, REPLICA).view(np.recarray)
    replicas.free_blocks = settings.num_blocks
    replicas.first_waiting = NONE
    replicas.last_waiting = NONE
    replicas.ready_group = NONE
    return replicas


def new_slots(settings: PerRequestSettings) -> Table:
    """Make idle `SLOT` records."""
    return np.zeros(settings.num_replicas * settings.num_stages, SLOT).view(np.recarray)


def new_batches(settings: PerRequestSettings) -> Ints:
    """`[slot or replica, list, position]`: the requests of a batch and their tokens, and its decode group's lists; then
    a replica's ready requests (between two batches), and columns of scratch. `serving.per_request.decode_groups` names
    them.
    """
    rows = settings.num_replicas * (settings.num_stages + 1)
    most = max(settings.max_num_seqs, settings.max_batch_seqs * settings.num_stages) + 1
    return np.zeros((rows, 5, max(most, settings.block_size)), np.int64)


def new_per_request_clock(settings: PerRequestSettings) -> Table:
    """Make one `PER_REQUEST_CLOCK` record at the beginning."""
    clock = np.zeros(1, PER_REQUEST_CLOCK).view(np.recarray)
    clock.random = settings.seed % (MODULUS - 1) + 1
    clock.replica = NONE
    return clock


def new_trail(settings: PerRequestSettings, num_rows: int, num_members: int) -> Any:
    """Make buffers for `num_rows` batches and `num_members` parts in them."""
    return Trail(np.zeros((num_members, 3), np.int64), np.zeros((num_rows, settings.num_stages, 2)))
