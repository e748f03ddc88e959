"""The batch of a step: what decides its price, and the row that is written of it."""

from typing import NamedTuple

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import KernelSettings
from windtunnel.serving.state.tables import RunTables


class Batch(NamedTuple):
    """The batch of a replica's slot. Counts are sums over its ranks, `most_*` the largest of a rank; tokens."""

    decode_tokens: int  # decoding requests
    query_tokens: int  # tokens that they compute, several each with speculative decoding
    prefill_tokens: int
    num_prefills: int  # prompts with a chunk in the batch
    sampled: int
    context_tokens: int  # tokens in the cache of the decoding requests
    pairs: float  # query-key pairs of the prefill chunks
    resumed: int  # prompts that end here and were preempted before
    late_since_s: float  # sum of the times of their latest tokens, and of paused requests if scheduled one by one
    most_decodes: int
    most_tokens: int
    most_sampled: int
    most_running: int
    running: int
    waiting: int
    attention_s: float  # attention of the slowest rank, seconds


@inner
def emptied(batch: Batch) -> Batch:
    """Return the batch of a step that a failure cuts short: it gives no tokens."""
    running, waiting, most_running = batch.running, batch.waiting, batch.most_running
    return Batch(0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0, 0, most_running, running, waiting, 0.0)


@inner
def fails_at_s(settings: KernelSettings, fleet: ReplicaFleet | None, replica: int) -> float:
    """Return when a replica of a pool fails next, in seconds; infinity where it never does."""
    if fleet is not None:
        return fleet.replicas[settings.first_replica + replica].fails_s
    return np.inf


@inner
def write_row(
    run: RunTables,
    replica: int,
    batch: Batch,
    num_steps: int,
    start_s: float,
    end_s: float,
    used_blocks: int,
    paused: int,
    late_gap_s: float,
) -> None:
    """Write the next row of the step table: `num_steps` steps of a batch on a replica, counted through all pools."""
    row = run.clock[0].rows
    run.steps[row].start_s = start_s
    run.steps[row].duration_s = end_s - start_s
    run.steps[row].num_steps = num_steps
    run.steps[row].replica = replica
    run.steps[row].decode_tokens = batch.decode_tokens
    run.steps[row].prefill_tokens = batch.prefill_tokens
    run.steps[row].num_prefills = batch.num_prefills
    run.steps[row].num_sampled = batch.sampled
    run.steps[row].context_tokens = batch.context_tokens
    run.steps[row].prefill_pairs = batch.pairs
    run.steps[row].used_blocks = used_blocks
    run.steps[row].num_running = batch.running
    run.steps[row].num_waiting = batch.waiting
    run.steps[row].paused_tokens = paused
    run.steps[row].resumed_tokens = batch.resumed
    run.steps[row].late_gap_s = late_gap_s
    run.clock[0].rows = row + 1
