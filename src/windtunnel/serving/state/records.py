"""What the serving loop works on: record arrays, so that a call passes a few pointers and not a hundred array
descriptors.

Measured on this loop: named tuples of one array per field compile in 23 s and cost 5 us a scheduling call, because
every array of a tuple travels as seven arguments; record arrays of the same fields are read as `table[i].field`, in
numpy without a compiler too.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.records import F8, I4, I8, RecordGrid, Records, new_table
from windtunnel.serving.codes import FCFS, ROUND_ROBIN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = Any
"""A record array of one of the layouts below."""

MODULUS, MULTIPLIER = 2**31 - 1, 48271
"""Park and Miller's minimal standard generator (1988, with the multiplier of 1993), for the few draws of a router."""

NONE = -1
"""No request, no neighbour."""

MOST_REQUESTS = 1 << 31
"""More than any run has: the step from one priority to the next in the key of the waiting heap."""

FAIR_TOKENS = 16
"""Tokens of one unit of service under `fair_share`."""


class KernelSettings(NamedTuple):
    """How a replica's engine forms batches. Scalars."""

    scheduler: int
    num_replicas: int
    ranks_per_replica: int  # attention data-parallel ranks that step together, each with scheduler and KV pool
    max_num_seqs: int  # requests that may hold KV blocks at once
    max_num_batched_tokens: int
    """With per-request scheduling: vLLM V0: prompts of a batch times the longest of them; LightLLM: prompt tokens of a
    batch; Sarathi: tokens of a batch, the chunk size."""
    block_size: int
    num_blocks: int  # of one rank
    long_prefill_token_threshold: int = 0  # 0: none
    chunked_prefill: int = 1
    reserves_prompt: int = 0  # vLLM V1: 1: a request is admitted only if its whole prompt fits
    max_prefill_tokens: int = 0  # SGLang: prompt tokens of one prefill batch
    queue_order: int = FCFS  # of waiting requests, a position in `QUEUE_ORDERS`; by priority, of victims too
    blocks_per_request: int = 0  # state of fixed size (linear attention), in blocks
    schedule_conservativeness: float = 1.0  # SGLang: scales the share of outputs to come that admission keeps free
    receive_interval_steps: int = 1  # SGLang: steps between looks at new requests while decoding
    concurrency: int = 0  # closed loop: requests in flight at the client; 0: open loop
    num_warmup: int = 0  # closed loop: first requests, which run and drain before the others are sent
    frontend_s: float = 0.0  # closed loop: from the engine's last token to the client's next request
    num_stages: int = 1  # pipeline stages, and so batches that a replica may have in flight
    batch_wait_steps: int = 0  # TensorRT-LLM: most decode steps for which prefill waits for `batch_wait_tokens`
    batch_wait_tokens: int = 0
    balance_steps: int = 0  # TensorRT-LLM: decode steps for which prompts wait until every rank has one; 0: never
    balance_wait_steps: int = 0  # TensorRT-LLM: and for so many more, so that more prompts go together
    longest_prefix_first: int = 0  # SGLang: 1: waiting requests of which more is cached go first (`lpm`)
    router: int = ROUND_ROBIN
    seed: int = 0  # of the router's draws
    first_replica: int = 0  # of this pool among all pools' replicas
    first_rank: int = 0
    first_event: int = 0  # of this pool's slots in the event queue
    heeds_all_events: int = 0  # 1: any replica's event may bring this one work, and ends a run of equal steps
    window_tokens: int = 0  # sliding window of the layers that have one (`serving.kv.windows`); 0: none
    num_groups: int = 1  # blocks of the pool that a block of tokens takes: one for each group of layers
    num_window_groups: int = 0  # of them of layers with the window
    window_pool: int = 0  # 1: those layers have a pool of their own instead, of `num_window_blocks`
    num_window_blocks: int = 0
    max_batch_seqs: int = 0  # per-request scheduling, from here on: requests of one batch
    watermark_blocks: int = 0  # blocks that admission leaves free
    reserved_blocks: int = 0  # Orca and FasterTransformer: blocks that a request is given on admission
    max_waiting_steps: int = 0  # LightLLM: decode steps after which waiting requests are looked at
    loses_prompts: int = 0  # 1: a request restarted in its prompt computes the rest one token a step
    leaks_blocks: int = 0  # 1: a FasterTransformer batch frees the blocks of its last step's requests only
    fuses_steps: int = 1  # 1: equal decode steps up to the next event are taken at once; the same times, fewer rows
    end_s: float = np.inf  # nothing after this time happens
    encoder_cache_tokens: int = 0  # vLLM V1: embeddings of images that a rank keeps; 0: no encoder cache
    encoder_budget_tokens: int = 0  # and those that it encodes in one step at most
    embedding_cache_tokens: int = -1  # SGLang: embeddings that a rank keeps by last use; -1: no such cache
    embeddings_by_request: int = 0  # 1: those of a request are one entry


class Request(Protocol):
    """One record a request, in the order of sending."""

    arrival_s: F8  # open loop: arrival; closed loop: earliest sending time, replaced by the sending time
    scheduled_s: F8
    first_token_s: F8
    finish_s: F8
    completed_s: F8  # not of this request: when the so-many-eth request (or session) to complete did
    last_token_s: F8  # set on preemption
    input_tokens: I8
    output_tokens: I8
    computed_tokens: I8  # scheduled so far; while decoding it is the slot's `steps` minus `joined`
    target_tokens: I8  # prefill ends here: the prompt, or prompt and outputs after a preemption
    joined: I8  # while decoding: the slot's step count at which nothing would be computed
    step_tokens: I8  # scratch of a pass over the running list: tokens given in this step
    priority: I8  # smaller goes first, as in vLLM
    sequence: I8  # requests sent before it
    order: I8  # key in the waiting heap
    queue_key: I8  # its first part; the second is `sequence`
    ttft_limit_s: F8  # from the sending to the deadline of the first token
    deadline_s: F8  # of the first token, from when the client has sent it
    tenant: I8
    tenant_tag: I8  # not of this request: the service that the tenant of this number has had, in units
    before: I8  # neighbours in the rank's running list
    after: I8
    left: I8  # children in the rank's waiting heap
    right: I8
    rank: I8
    slot: I8  # while decoding
    chunks_in_flight: I8
    num_preemptions: I8
    is_decoding: I8
    passed_blocks: I8  # blocks of each window group given back; while it slides, as of when it began to
    slides: I8  # 1: decoding, with a full window
    skipped_at: I8  # while decoding: `num_verified` of its slot when a step last left it out, or NONE


class Requests(Records[Request], Protocol):
    """`Request` records, and the columns that the waiting heap works on."""

    order: Ints
    left: Ints
    right: Ints


class Rank(Protocol):
    """One record a rank: a scheduler with a KV pool of its own."""

    num_running: I8
    num_waiting: I8
    waiting_tokens: I8  # to prefill, of waiting requests
    num_outstanding: I8  # waiting and running
    remaining_tokens: I8  # output tokens that running requests have yet to produce
    free_blocks: I8
    free_window_blocks: I8  # of the windows' own pool
    first: I8  # ends of the running list
    last: I8
    waiting: I8  # root of the waiting heap
    num_prefilling: I8
    new_token_ratio: F8  # SGLang's estimate of the share of outputs still to come
    fair_tag: I8  # the greatest key admitted under `fair_share`
    waited_steps: I8  # TensorRT-LLM, LightLLM: decode steps for which prompts have been held back
    balance_waited: I8  # of a replica's first rank: steps since every rank had a prompt or one was let in
    balance_ready: I8  # of a replica's first rank: steps waited on top when every rank had one
    steps_to_receive: I8  # SGLang: decode steps until waiting requests are looked at again
    first_waiting: I8  # per-request scheduling, from here on: ends of the list of waiting requests
    last_waiting: I8
    num_ready: I8  # requests that hold blocks and are in no batch
    num_in_flight: I8  # batches
    num_groups: I8  # FasterTransformer: batches formed so far
    has_restarted: I8  # 1 if the batch that is formed made one restart
    is_awake: I8  # 1 while an event that lets the replica look for work is queued
    ready_group: I8  # slot whose decode group is in no batch, or NONE
    group_position: I8  # of the ready requests, the first one behind it


class Slot(Protocol):
    """One record a slot: one of the `num_stages` batches that a rank may have in flight, with the requests that decode
    in it.

    A decoding request cannot be scheduled again before its batch has come back, and is then scheduled at once, so it
    stays in its slot.
    """

    is_busy: I8
    steps: I8  # decode steps so far: the clock of the slot's decoding requests
    num_decoding: I8
    context_tokens: I8  # in the cache of decoding requests
    joined_squares: I8  # sum of their squared `joined`: contexts differ as those do
    finish_size: I8
    batch_size: I8
    batch_decodes: I8  # 1 if the step under way decodes
    num_skipped: I8  # decoding requests that the step under way leaves out for want of token budget
    skipped_context_tokens: I8  # in their cache
    skipped_squares: I8  # sum of their squared `joined`
    skipped_since_s: F8  # sum of the times of their latest tokens
    started_s: F8  # start of the latest step
    cutoff_s: F8  # requests that arrived later cannot be in the batch that is being formed
    holds_back: I8  # 1 if no waiting request may join the batch that is being formed
    gave_up: I8  # 1 if the batch is empty since all that ran has been preempted
    looks_again: I8  # 1 if the next step may admit what this one could not: no run of equal steps
    num_joined: I8  # requests that began to decode since the latest decode step, or that it left out
    joined_since_s: F8  # sum of the times of their latest tokens
    last_decode_s: F8  # end of that step
    num_verified: I8  # speculative decode steps so far
    row: I8  # of its latest step, counted from the run's first
    row_step_s: F8  # duration of that row's first step
    row_end_s: F8  # end of its last one
    num_requests: I8  # per-request scheduling, from here on: requests of the batch; 0: idle
    num_listed: I8  # of them, those that are not in the decode group
    num_steps: I8
    has_group: I8  # 1 if the batch decodes the slot's decode group
    group_size: I8
    group_steps: I8  # that its members have taken together
    group_tokens: I8  # processed by all its members
    group_squares: I8  # sum of the squares of what each had processed when the group had taken no step
    first_end: I8  # the decode group's step after which the first member ends
    group_left_s: F8  # end of its latest pipeline stage
    group_paused_s: F8  # between stages, all its steps


FINISH_KEY, FINISH_VALUE, BATCH, BATCH_TOKENS, BATCH_ENDS, PHASES, PREFILLING, SLIDING = range(8)
"""Rows of `lists[slot]`: the heap of (step count at the end, request); requests with a prefill chunk in the step under
way, the chunk, and whether it ends the prefill; decoding requests by `joined` modulo the block size, that is, by the
step in which they need a block. In a rank's first slot also its running requests whose prefill is not scheduled to the
end, in running order. The last row is that of requests whose window is full, by `joined` too; their keys on the heap
are where they end, those of others that will fill a window where they do."""


class Event(Protocol):
    """The event queue, a heap: when a batch ends, or an idle slot looks for work; `slot` counts through all replicas'
    slots."""

    time_s: F8
    slot: I8


class Events(Records[Event], Protocol):
    """`Event` records, and the columns that their heap works on."""

    time_s: Floats
    slot: Ints


class Clock(Protocol):
    """The loop's registers, one record, kept outside so that a run can stop and go on."""

    next: I8  # request to be sent next, of those that wait for no other one
    started: I8  # such requests sent: sessions, where turns follow one another
    sent: I8
    ended: I8  # requests finished that no other one waits for
    finished: I8
    thinking: I8  # turns whose predecessor has finished
    queued: I8  # events on the heap
    recorded: I8  # recorded step durations used
    turn: I8  # round robin: which of the replicas that requests start at is next
    decode_turn: I8  # and of those that decode
    random: I8  # state of the router's generator
    rows: I8  # rows of the step buffer written
    earlier_rows: I8  # of buffers before it
    event: I8  # event that a question to a user's router or policy interrupts, or NONE
    event_s: F8
    ended_step: I8  # 1 if that event ended a step
    asks_policy: I8  # 1 while a user's policy must form the batch of `slot`
    answered: I8  # 1 when it has, in the run's `pairs`
    slot: I8
    problem: I8  # with that batch: an error code of `serving.per_request.custom_batch`
    culprit: I8  # request or batch size behind an error
    members: I8  # rows of the trail's members written


class Step(Protocol):
    """One record a run of equal steps; with several ranks the counts are sums over them."""

    start_s: F8
    duration_s: F8  # of all `num_steps` together
    prefill_pairs: F8  # query-key pairs of the prefill chunks
    load_s: F8  # of it, waiting for KV blocks from lower tiers
    late_gap_s: F8  # mean time since their predecessors of the paused and resumed tokens
    context_tokens: I8  # in the cache of the decoding requests, at the start
    used_blocks: I8
    num_steps: I4
    replica: I4
    decode_tokens: I4  # of each step
    prefill_tokens: I4
    num_prefills: I4  # prompts with a chunk in the step
    num_sampled: I4
    num_running: I4
    num_waiting: I4
    paused_tokens: I4  # decode tokens of the first step whose predecessor is older than the step
    resumed_tokens: I4  # tokens that end the prefill of a request preempted before


class Speculation(NamedTuple):
    """Speculative decoding: every decode step drafts and verifies tokens. Scalars."""

    num_queries: int  # tokens that a request's verification computes: those drafted and one more
    tokens_per_step: float  # mean that a request gains by it, from 1 to `num_queries`


class StepCost(NamedTuple):
    """The estimator, lowered to arrays; seconds. A step's time is a sum of look-ups.

    decode step of n requests:   decode_token_s[n] + decode_attention(n, mean context), launched in decode_launch_s[n]
    step with prefill, T tokens: mixed_token_s[T] + sample_s[sampled] + decode_attention + prefill_attention(C, 2 W / C)
                                 where decode_attention may be another one beside prompts,
                                 launched in launch_s[T]
    where what takes the device d seconds and is launched in l takes (d^8 + l^8)^(1/8) (`step_cost.launched_s`), and
    unhidden_step_s more;
    with attention data parallelism each term is the largest over the ranks.
    """

    decode_token_s: Floats
    """[max_num_seqs + 1] everything but attention, CUDA-graph padding and head included."""
    mixed_token_s: Floats
    """[max_num_batched_tokens + max_num_seqs + 1] everything but attention and head."""
    sample_s: Floats
    """[max_num_seqs + 1] LM head and sampling, by sampled positions."""
    context_nodes: Floats
    """[c] context lengths of the decode-attention grid, ascending."""
    decode_attention_s: Floats
    """[max_num_seqs + 1, c]"""
    chunk_nodes: Floats
    """[t] prompt tokens of the prefill-attention grid, ascending."""
    length_nodes: Floats
    """[l] effective prompt lengths 2 W / C of that grid, ascending."""
    prefill_attention_s: Floats
    """[t, l]"""
    host_step_s: float
    host_request_s: float
    """Per running request and step."""
    host_overlaps: int
    """1: host work runs beside the device's (asynchronous scheduling); 0: before it."""
    recorded_step_s: Floats
    """Durations to use instead, one a step; empty to use the model."""
    group_token_s: Floats = np.zeros(1)
    """[tokens of all ranks + 1] what the ranks of an attention data-parallel replica compute together in a step with
    prefill, the experts; not in `mixed_token_s` then. `[0.0]` where there is one rank."""
    draft_s: Floats = np.zeros(1)
    """[max_num_seqs + 1] drafting for so many requests in a step with prefill; elsewhere it is in `decode_token_s`."""
    launch_s: Floats = np.zeros(1)
    """[max_num_batched_tokens + max_num_seqs + 1] what the host needs to launch a step with prefill of so many tokens;
    beyond the end as at the end."""
    decode_launch_s: Floats = np.zeros(1)
    """[max_num_seqs + 1] what the host needs to launch a step of n decoding requests that no CUDA graph holds, 0.0 for
    others; beyond the end as at the end."""
    mixed_decode_attention_s: Floats = np.zeros((0, 0))
    """[max_num_seqs + 1, c] decode attention in a step whose rank prefills too; `[0, 0]` where it is the same."""
    longest_share: float = 0.0
    """What the longest request alone takes of the time of as many as it; see `decode_attention_s`. 0.0: no kernel waits
    for its longest request."""
    waiting_attention_s: Floats = np.zeros((0, 0))
    """[max_num_seqs + 1, c] the part of `decode_attention_s` of kernels that wait for their longest request; `[0, 0]`
    where none does."""
    padded_requests: Ints = np.zeros(0, np.int64)
    """[max_num_seqs + 1] requests that the CUDA graph of a decode step was captured for, `max_num_seqs` at most; `[0]`
    where no kernel waits."""
    unhidden_step_s: float = 0.0
    """Work of the host in every step that nothing hides."""
    repeated_share: float = 1.0
    """Time of decode attention over KV that the requests before in the batch have read too, over that of KV of its own:
    it comes from the L2 cache."""
    encode_s: Floats = np.zeros((2, 1))
    """[kind, n + 1] what a vision tower takes in a step for so many images of each size, and for so many videos; beyond
    the end in proportion. `[2, 1]` zeros where there are none."""


def played_back(duration_s: Floats, max_num_seqs: int) -> StepCost:
    """Return a cost that plays back step durations, in seconds, one for each step, whatever the step holds."""
    nothing, nodes = np.zeros(max_num_seqs + 1), np.array([0.0, 1.0])
    rows, grid = np.zeros((max_num_seqs + 1, 2)), np.zeros((2, 2))
    return StepCost(nothing, nothing, nothing, nodes, rows, nodes, nodes, grid, 0.0, 0.0, 0, duration_s)


NO_COST = played_back(np.zeros(0), 0)
"""Of a pool whose steps other tables price."""


class Node(Protocol):
    """One record a segment of prompts, parents first: the full blocks of the root path that end in it."""

    parent: I4
    first_block: I4
    end_block: I4


class Entry(Protocol):
    """One record a segment and rank: how many of its blocks are cached, requests that use them, and, where none does,
    its neighbours in the order of release."""

    num_blocks: I4
    references: I4
    before: I4
    after: I4


class CachedRequest(Protocol):
    """One record a request: its place in the prefix cache."""

    shared: I8  # the last segment that others may have of its prompt and output
    leaf: I8  # segment that the request's output, or what nobody shares of its prompt and output, belongs to
    deepest: I8  # segment that it holds references to, with all above it
    shared_blocks: I8  # of those that it holds, in cached segments
    loading_blocks: I8  # of those that it was found to have, in lower tiers
    load_s: F8  # to bring them up
    cached_tokens: I8  # found when it was first admitted


class CacheRank(Protocol):
    """One record a rank: cached blocks that no running request uses, the ends of their list, and those used often."""

    evictable_blocks: I8
    first: I8
    last: I8
    repeated_blocks: I8  # of those that running requests use, once for every request that uses one beside the first


class Tier(Protocol):
    """One record a tier of memory below the device's, fastest first."""

    capacity_blocks: I8  # that one pool of it holds
    ranks_per_pool: I8  # ranks that share a pool
    block_s: F8  # to load a block to a rank
    outlives: I8  # 1: its pools outlive their replicas
    store: I8  # tiers of several kinds of replicas that have one number are one; 0: nobody else's
    row: I8  # of what it keeps among all tiers; filled in by `setup.prefix_cache`


class Kept(Protocol):
    """One record a segment and rank (the first of those that share a pool): how many of its blocks the tier has, and
    its neighbours in the order of writing."""

    num_blocks: I4
    before: I4
    after: I4


class TierPool(Protocol):
    """One record a pool of a tier: its blocks, and the ends of its list."""

    num_blocks: I8
    first: I8
    last: I8


class Cache(NamedTuple):
    """The prefix caches of all ranks, see `serving.kv.cache`."""

    num_shared: int  # segments that may be cached on any rank; the rest belong to one request each
    nodes: Records[Node]
    entries: Records[Entry]  # [segment, rank] of shared segments in one row, then one for each of the rest
    requests: Records[CachedRequest]
    ranks: Records[CacheRank]
    load_overlaps: int  # 1: blocks load beside the step that admits their request; 0: before it
    load_s: Floats  # [slot] to load for the batch that is being formed
    tiers: Records[Tier]
    kept: RecordGrid[Kept]  # [row of a tier, entry]
    pools: RecordGrid[TierPool]  # [row of a tier, pool]
    loaded: Ints  # [tier, n] blocks of each prompt that came from each tier when it was first admitted


class Media(NamedTuple):
    """Images and videos of prompts: a vision tower encodes each in the step that computes the first of its tokens,
    unless an encoder cache says otherwise."""

    items: Ints
    """[request, n, 4] In the order of a prompt: kind, or NONE behind the last; number of the image; position of its
    first token; place of the same image's first one in the prompt."""
    encoded_s: Floats  # [replica] time of its towers so far
    counts: Ints  # [kind] those to encode in the step that is being priced; all 0 between steps


class EncoderEntry(Protocol):
    """One record a rank and image: whether its embeddings are cached, requests that need them, and, where none does,
    its neighbours in the order of release."""

    is_cached: I8
    num_users: I8
    num_tokens: I8  # of its embeddings, while they are cached
    before: I8
    after: I8
    call: I8  # the rank's call of `encodable` that last found room for it


class EncoderRank(Protocol):
    """One record a rank of all pools: tokens of embeddings that it has room for, and the ends of the list of cached
    images that no request needs."""

    left_tokens: I8  # of the budget of the batch that is being formed
    free_tokens: I8
    freeable_tokens: I8  # with those of images that no request needs
    first: I8
    last: I8
    num_calls: I8


class EncoderCache(NamedTuple):
    """The encoder caches of all ranks, see `serving.kv.encoder_cache` and `serving.kv.embedding_cache`."""

    items: Ints  # as in `Media`
    tokens: Ints  # [kind] tokens of one image or video
    entries: Records[EncoderEntry]  # [rank x image]
    ranks: Records[EncoderRank]
    counts: Ints  # [rank, kind] images to encode in the batch that is being formed
    together: Ints  # [request] number of its images together, for caches by request: behind those of the images
    used: Ints  # [request, n] 1 while the request needs the image, at the image's first place in the prompt


class Sessions(NamedTuple):
    """Which request is sent when which other one is done."""

    previous: Ints  # [n]
    following: Ints  # [n] the inverse
    think_s: Floats  # [n]
    least_think_s: float  # of those that follow another one: no completion can send a request sooner
    session: Ints  # [n] or NONE
    replica: Ints  # [sessions] that a session was last sent to, or NONE
    time_s: Floats  # [n] the heap of turns to be sent, with `turn`
    turn: Ints


def new_ranks(settings: KernelSettings) -> Table:
    """Make idle `Rank` records with empty KV pools."""
    nobody = dict.fromkeys(("first", "last", "waiting", "first_waiting", "last_waiting", "ready_group"), NONE)
    free = {"free_blocks": settings.num_blocks, "free_window_blocks": settings.num_window_blocks}
    return new_table(Rank, settings.num_replicas * settings.ranks_per_replica, **free, **nobody)


def new_slots(settings: KernelSettings) -> Table:
    """Make idle `Slot` records, `num_stages` for each rank."""
    num_slots = settings.num_replicas * settings.ranks_per_replica * settings.num_stages
    return new_table(Slot, num_slots, last_decode_s=-np.inf, row=NONE)


def new_lists(settings: KernelSettings) -> Ints:
    """`[slot, list, position]`, see `FINISH_KEY`."""
    num_slots = settings.num_replicas * settings.ranks_per_replica * settings.num_stages
    return np.zeros((num_slots, SLIDING + 1, max(settings.max_num_seqs + 1, settings.block_size)), np.int64)
