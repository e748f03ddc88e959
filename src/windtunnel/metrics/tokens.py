"""What a request's tokens waited for, found from the steps of the replica that decoded it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenTimes:
    """Arrays of shape [num_requests]."""

    itl_max_s: Floats
    """The longest gap before one of its tokens; NaN for a single token, and where it was not in every decode step of
    its replica between its first and last token: preempted, left out for want of tokens, or in a pipeline."""
    execution_s: Floats
    """In steps that computed prompts, until its first token, and in steps that decoded, from there on; NaN in a
    pipeline."""


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """Rows of the step table, one replica's after the other, in order of start."""

    order: Ints
    """[num_rows] positions in the step table."""
    first: Ints
    """[num_replicas + 1] where each replica's rows begin."""


def rows_by_replica(steps: Table, num_replicas: int) -> ReplicaRows:
    """The rows of each replica."""
    order = np.lexsort((steps["start_s"], steps["replica"]))
    return ReplicaRows(order, np.searchsorted(steps["replica"][order], np.arange(num_replicas + 1)))


def with_token_times(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> Table:
    """`requests` with the longest gap and the time in steps of each."""
    found = token_times(requests, steps, rows, num_stages)
    return requests.replaced(itl_max_s=found.itl_max_s, execution_s=found.execution_s)


def token_times(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> TokenTimes:
    """Longest gap and time in steps of each request, from the rows of its replica."""
    replica, output_tokens = requests["replica"], requests["output_tokens"]
    first_token_s = requests["first_token_s"]
    unknown = np.full(replica.size, np.nan)
    if num_stages > 1:
        return TokenTimes(unknown, unknown.copy())
    table = {name: steps[name][rows.order] for name in ("start_s", "duration_s", "num_steps", "decode_tokens")}
    prefill_s = np.where(steps["prefill_tokens"][rows.order] > 0, table["duration_s"], 0.0)
    decodes = table["decode_tokens"] > 0
    starts = table["start_s"]
    begin = first_row_from(starts, rows, replica, first_token_s)
    end = first_row_from(starts, rows, replica, requests["finish_s"])
    prompt = _between(prefill_s, first_row_from(starts, rows, replica, requests["scheduled_s"]), begin)
    execution_s = prompt + _between(np.where(decodes, table["duration_s"], 0.0), begin, end)

    kept = np.flatnonzero(decodes)
    below = np.concatenate([[0], np.cumsum(decodes)])
    begin, end = below[begin], below[end]
    starts, num_steps = starts[kept], table["num_steps"][kept]
    step_s = table["duration_s"][kept] / num_steps
    ends = starts + table["duration_s"][kept]
    gap_s = starts + step_s - np.concatenate([[-np.inf], ends[:-1]])
    worst_s = np.maximum(gap_s, np.where(num_steps > 1, step_s, 0.0))
    in_every_step = _between(num_steps, begin, end) == output_tokens - 1
    several = (output_tokens > 1) & in_every_step
    itl_max_s = unknown
    first = begin[several]
    own_s = np.maximum(
        starts[first] + step_s[first] - first_token_s[several], np.where(num_steps[first] > 1, step_s[first], 0.0)
    )
    itl_max_s[several] = np.maximum(own_s, range_max(worst_s, first + 1, end[several]))
    return TokenTimes(itl_max_s, execution_s)


def first_row_from(starts: Floats, rows: ReplicaRows, replica: Ints, time_s: Floats) -> Ints:
    """The first row of each request's replica that starts at its time or later."""
    found = np.empty(replica.size, np.int64)
    of_replica = np.argsort(replica, kind="stable")
    ends = np.searchsorted(replica[of_replica], np.arange(rows.first.size))
    for index in range(rows.first.size - 1):
        mine = of_replica[ends[index] : ends[index + 1]]
        low, high = rows.first[index], rows.first[index + 1]
        found[mine] = low + np.searchsorted(starts[low:high], time_s[mine])
    return found


def _between(values: NDArray[np.generic], begin: Ints, end: Ints) -> Floats:
    """Sums of values[begin : end]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(sums[end] - sums[begin])


def range_max(values: Floats, begin: Ints, end: Ints) -> Floats:
    """The largest of values[begin : end] for many ranges; -inf for an empty one.

    A range is covered by two of length 2^k that may overlap; one k after the other needs a single array. Source:
    Bender and Farach-Colton, The LCA Problem Revisited (2000), section 3 (sparse table).
    """
    found = np.full(begin.size, -np.inf)
    length = end - begin
    level = np.full(begin.size, -1)
    level[length > 0] = np.log2(length[length > 0]).astype(np.int64)
    blocks, size = values, 1
    for k in range(int(level.max(initial=-1)) + 1):
        if k:
            blocks = np.maximum(blocks[:-size], blocks[size:])
            size *= 2
        mine = np.flatnonzero(level == k)
        found[mine] = np.maximum(blocks[begin[mine]], blocks[end[mine] - size])
    return found
