"""What must hold in every run, whatever was simulated; found from the records, not from the loop."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import ReplicaRows, first_row_from
from windtunnel.spec.noun import Noun

MOST_ERROR_FRACTION = 1e-6
"""Of Little's law and of idle time, where sums of millions of floats are compared."""
MOST_PIPELINE_ERROR_FRACTION = 0.01
"""In a pipeline, where the counters are read when a batch starts and requests leave in between."""


class Checks(Noun):
    """A run's self-check."""

    passed: bool
    num_out_of_order: int
    """Requests without sending <= first scheduling <= first token <= last token."""
    num_missing_tokens: int
    """Output tokens of the requests less those that the steps sampled."""
    littles_law_error_fraction: float
    """Little's law, L = lambda W: mean requests present by the steps' counters against the requests' own times."""
    idle_with_work_fraction: float
    """Work conservation: time in which a replica ran no step although one of its requests was there, over busy time."""


def check_run(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int) -> Checks:
    """The self-check of a finished run.

    Source of Little's law: J. D. C. Little, A Proof for the Queuing Formula L = lambda W, Operations Research 9 (1961).
    """
    times = [requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    in_order = np.logical_and.reduce([before <= after for before, after in pairwise(times)])
    sampled = steps["num_sampled"] + (steps["num_steps"].astype(np.int64) - 1) * steps["decode_tokens"]
    num_missing = int(requests["output_tokens"].sum() - sampled.sum())
    ends_s = busy_until(steps, rows)
    law = _littles_law_error(requests, steps, rows, ends_s)
    idle = _idle_with_work(requests, steps, rows, ends_s)
    num_out_of_order = int((~in_order).sum())
    most = MOST_PIPELINE_ERROR_FRACTION if num_stages > 1 else MOST_ERROR_FRACTION
    return Checks(
        passed=num_out_of_order == 0 and num_missing == 0 and law <= most and idle <= most,
        num_out_of_order=num_out_of_order,
        num_missing_tokens=num_missing,
        littles_law_error_fraction=law,
        idle_with_work_fraction=idle,
    )


def busy_until(steps: Table, rows: ReplicaRows) -> NDArray[np.float64]:
    """When each row's replica has ended all its steps so far, in order of `rows`."""
    ends_s = (steps["start_s"] + steps["duration_s"])[rows.order]
    for low, high in pairwise(rows.first):
        np.maximum.accumulate(ends_s[low:high], out=ends_s[low:high])
    return np.asarray(ends_s)


def _next_start(steps: Table, rows: ReplicaRows) -> NDArray[np.float64]:
    """When the next row of the same replica starts; inf for its last one."""
    starts = steps["start_s"][rows.order]
    following = np.append(starts[1:], np.inf)
    following[rows.first[1:][rows.first[1:] > rows.first[:-1]] - 1] = np.inf
    return following


def _littles_law_error(requests: Table, steps: Table, rows: ReplicaRows, ends_s: NDArray[np.float64]) -> float:
    """|L - lambda W| / lambda W, both times the span.

    A request counts from the first row that starts after it was sent: the counters are read then.
    """
    starts = steps["start_s"][rows.order]
    held_s = np.minimum(_next_start(steps, rows), ends_s) - starts
    present = (steps["num_running"].astype(np.float64) + steps["num_waiting"])[rows.order]
    counted = float((present * held_s).sum())
    seen = first_row_from(starts, rows, requests["replica"], requests["arrival_s"])
    inside = seen < rows.first[requests["replica"] + 1]
    own = requests["finish_s"] - np.where(inside, starts[np.minimum(seen, starts.size - 1)], requests["finish_s"])
    expected = float(own.sum())
    return abs(counted - expected) / expected if expected > 0 else float(counted > 0)


def _idle_with_work(requests: Table, steps: Table, rows: ReplicaRows, ends_s: NDArray[np.float64]) -> float:
    """Time between a replica's steps in which one of its requests was there, over the time in its steps."""
    following = _next_start(steps, rows)
    lost_s = 0.0
    for index in range(rows.first.size - 1):
        mine = slice(rows.first[index], rows.first[index + 1])
        begin, end = ends_s[mine], following[mine]
        gaps = np.flatnonzero((end - begin > 1e-9 * np.maximum(np.abs(begin), 1.0)) & np.isfinite(end))
        if not gaps.size:
            continue
        middle = (begin[gaps] + end[gaps]) / 2
        own = requests["replica"] == index
        came = np.searchsorted(np.sort(requests["arrival_s"][own]), middle, side="right")
        left = np.searchsorted(np.sort(requests["finish_s"][own]), middle, side="right")
        lost_s += float((end[gaps] - begin[gaps])[came > left].sum())
    return lost_s / max(float(steps["duration_s"].sum()), np.finfo(float).tiny)
