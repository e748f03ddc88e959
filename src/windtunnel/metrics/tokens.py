"""Gaps between a request's tokens, from the steps of the replica that decoded it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.records import Table

ReplicaRows = list[tuple[Ints, Ints]]
"""Rows of the step table, in order of start, and rows of the request table, for each replica."""


def rows_by_replica(requests: Table, steps: Table, num_replicas: int) -> ReplicaRows:
    """Return the rows of each replica; a stable sort keeps the step table's order of start."""
    assert np.all(np.diff(steps["start_s"]) >= 0), "steps are recorded when they start"
    tables = (rows_of_replicas(table["replica"], num_replicas) for table in (steps, requests))
    return list(zip(*tables, strict=True))


def rows_of_replicas(replica: NDArray[Any], num_replicas: int) -> list[Ints]:
    """Return each replica's rows of a table. Keys of 16 bits are sorted by radix, 30 million in half a second."""
    keys = replica.astype(np.uint16) if num_replicas < 1 << 16 else replica
    ends = np.cumsum(np.bincount(replica, minlength=num_replicas))
    return np.split(np.argsort(keys, kind="stable"), ends[:-1])


def with_token_times(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> Table:
    """Return `requests` with the longest gap and the time in steps of each, from the steps of its replica.

    The longest gap is NaN for a single token and for requests that missed a decode step of their replica between their
    first and last token: preempted, or left out for want of tokens. In a pipeline both columns are NaN.
    """
    longest_s, execution_s = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    if num_stages == 1:
        for step_rows, request_rows in rows:
            if request_rows.size:
                times_s = _times_on_replica(requests, request_rows, steps, step_rows)
                longest_s[request_rows], execution_s[request_rows] = times_s
    return requests.replaced(itl_max_s=longest_s, execution_s=execution_s)


def _times_on_replica(requests: Table, request_rows: Ints, steps: Table, step_rows: Ints) -> tuple[Floats, Floats]:
    """Return (longest gap, time in steps) of one replica's requests."""
    columns = ("start_s", "duration_s", "num_steps", "decode_tokens", "prefill_tokens")
    starts, duration_s, num_steps, decode_tokens, prefill_tokens = (steps[name][step_rows] for name in columns)
    times = ("scheduled_s", "first_token_s", "finish_s", "output_tokens")
    scheduled_s, first_token_s, finish_s, output_tokens = (requests[name][request_rows] for name in times)
    decodes = decode_tokens > 0
    begin, end = np.searchsorted(starts, first_token_s), np.searchsorted(starts, finish_s)
    prompt_s = _between(np.where(prefill_tokens > 0, duration_s, 0.0), np.searchsorted(starts, scheduled_s), begin)
    execution_s = prompt_s + _between(np.where(decodes, duration_s, 0.0), begin, end)

    below = np.concatenate([[0], np.cumsum(decodes)])
    begin, end = below[begin], below[end]
    starts, num_steps, duration_s = starts[decodes], num_steps[decodes], duration_s[decodes]
    step_s = duration_s / num_steps
    gap_s = starts + step_s - np.concatenate([[-np.inf], (starts + duration_s)[:-1]])
    worst_s = np.maximum(gap_s, np.where(num_steps > 1, step_s, 0.0))
    in_every_step = _between(num_steps, begin, end) == output_tokens - 1
    several = (output_tokens > 1) & in_every_step
    first = begin[several]
    first_gap_s = np.maximum(
        starts[first] + step_s[first] - first_token_s[several], np.where(num_steps[first] > 1, step_s[first], 0.0)
    )
    longest_s = np.full(request_rows.size, np.nan)
    longest_s[several] = np.maximum(first_gap_s, range_max(worst_s, first + 1, end[several]))
    return longest_s, execution_s


def _between(values: NDArray[Any], begin: Ints, end: Ints) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(sums[end] - sums[begin])


def range_max(values: Floats, begin: Ints, end: Ints) -> Floats:
    """Return the largest of values[begin : end] for many ranges; -inf for an empty range.

    Two ranges of length 2^k that may overlap cover a range; one k after the other needs a single array. Source:
    Bender and Farach-Colton, The LCA Problem Revisited (2000), section 3 (sparse table).
    """
    largest = np.full(begin.size, -np.inf)
    length = end - begin
    level = np.full(begin.size, -1)
    level[length > 0] = np.log2(length[length > 0]).astype(np.int64)
    blocks, size = values, 1
    for k in range(int(level.max(initial=-1)) + 1):
        if k:
            blocks = np.maximum(blocks[:-size], blocks[size:])
            size *= 2
        ranges = np.flatnonzero(level == k)
        largest[ranges] = np.maximum(blocks[begin[ranges]], blocks[end[ranges] - size])
    return largest
