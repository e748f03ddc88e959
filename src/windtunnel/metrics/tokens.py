"""What a request's tokens waited for, found from the steps of the replica that decoded it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """Rows of the step table and of the request table, one replica's after the other."""

    steps: Ints
    """[num_rows] positions in the step table, of each replica in order of start."""
    first_step: Ints
    """[num_replicas + 1] where each replica's rows begin."""
    requests: Ints
    """[num_requests] positions in the request table."""
    first_request: Ints
    """[num_replicas + 1]"""

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        """(rows of the step table, rows of the request table) of each replica."""
        for index in range(self.first_step.size - 1):
            yield (
                self.steps[self.first_step[index] : self.first_step[index + 1]],
                self.requests[self.first_request[index] : self.first_request[index + 1]],
            )


def rows_by_replica(requests: Table, steps: Table, num_replicas: int) -> ReplicaRows:
    """The rows of each replica; a step table lists them in order of start, which a stable sort keeps."""
    order, first_step = _grouped(steps["replica"], num_replicas)
    assert np.all(np.diff(steps["start_s"]) >= 0), "steps are recorded when they start"
    return ReplicaRows(order, first_step, *_grouped(requests["replica"], num_replicas))


def _grouped(replica: NDArray[Any], num_replicas: int) -> tuple[Ints, Ints]:
    """Rows by replica, and where each one's begin. Keys of 16 bits are sorted by radix, 30 million in half a second."""
    keys = replica.astype(np.uint16) if num_replicas < 1 << 16 else replica
    counts = np.bincount(replica, minlength=num_replicas)
    return np.argsort(keys, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def with_token_times(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> Table:
    """`requests` with the longest gap and the time in steps of each."""
    found = token_times(requests, steps, rows, num_stages)
    return requests.replaced(itl_max_s=found.itl_max_s, execution_s=found.execution_s)


def token_times(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> TokenTimes:
    """Longest gap and time in steps of each request, from the rows of its replica."""
    found = TokenTimes(np.full(len(requests), np.nan), np.full(len(requests), np.nan))
    if num_stages == 1:
        for own_steps, own_requests in rows:
            if own_requests.size:
                times = _of_replica(requests, own_requests, steps, own_steps)
                found.itl_max_s[own_requests], found.execution_s[own_requests] = times
    return found


def _of_replica(requests: Table, own_requests: Ints, steps: Table, own_steps: Ints) -> tuple[Floats, Floats]:
    """(longest gap, time in steps) of one replica's requests."""
    columns = ("start_s", "duration_s", "num_steps", "decode_tokens", "prefill_tokens")
    starts, duration_s, num_steps, decode_tokens, prefill_tokens = (steps[name][own_steps] for name in columns)
    times = ("scheduled_s", "first_token_s", "finish_s", "output_tokens")
    scheduled_s, first_token_s, finish_s, output_tokens = (requests[name][own_requests] for name in times)
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
    own_s = np.maximum(
        starts[first] + step_s[first] - first_token_s[several], np.where(num_steps[first] > 1, step_s[first], 0.0)
    )
    longest_s = np.full(own_requests.size, np.nan)
    longest_s[several] = np.maximum(own_s, range_max(worst_s, first + 1, end[several]))
    return longest_s, execution_s


def _between(values: NDArray[Any], begin: Ints, end: Ints) -> Floats:
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
