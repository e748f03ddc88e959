"""What must hold in every run, whatever was simulated; found from the records, not from the loop."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import ReplicaRows
from windtunnel.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_ERROR_FRACTION = 1e-6
"""Of Little's law and of idle time, where sums of millions of floats are compared."""
MOST_PIPELINE_ERROR_FRACTION = 0.01
"""In a pipeline, where the counters are read when a batch starts and requests leave in between."""


class Checks(Schema):
    """A run's self-check."""

    passed: bool
    num_out_of_order: int
    """Requests without sending <= first scheduling <= first token <= last token."""
    num_missing_tokens: int
    """Output tokens of the requests, and those that they discarded, less those that the steps sampled."""
    littles_law_error_fraction: float
    """Little's law, L = lambda W: mean requests present by the steps' counters against the requests' own times."""
    idle_with_work_fraction: float
    """Work conservation: time in which a replica ran no step although one of its requests was there, over busy time."""


def check_run(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int, stays: Table | None = None) -> Checks:
    """The self-check of a finished run.

    `stays` says when each request was at which replica, where it was not at one all the time; `rows` are then of it.

    Source of Little's law: J. D. C. Little, A Proof for the Queuing Formula L = lambda W, Operations Research 9 (1961).
    """
    stays = requests if stays is None else stays
    times = [requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    in_order = np.logical_and.reduce([before <= after for before, after in pairwise(times)])
    sampled = steps["num_sampled"] + (steps["num_steps"].astype(np.int64) - 1) * steps["decode_tokens"]
    discarded = int(requests["discarded_tokens"].sum()) if "discarded_tokens" in requests.columns else 0
    num_missing = int(requests["output_tokens"].sum() + discarded - sampled.sum())
    counted_s, expected_s, lost_s = np.sum([_of_replica(stays, mine, steps, own) for own, mine in rows], axis=0)
    law = abs(counted_s - expected_s) / expected_s if expected_s > 0 else float(counted_s > 0)
    idle = lost_s / max(float(steps["duration_s"].sum()), np.finfo(float).tiny)
    num_out_of_order = int((~in_order).sum())
    most = MOST_PIPELINE_ERROR_FRACTION if num_stages > 1 else MOST_ERROR_FRACTION
    return Checks(
        passed=bool(num_out_of_order == 0 and num_missing == 0 and law <= most and idle <= most),
        num_out_of_order=num_out_of_order,
        num_missing_tokens=num_missing,
        littles_law_error_fraction=float(law),
        idle_with_work_fraction=float(idle),
    )


def _of_replica(stays: Table, mine: Ints, steps: Table, own: Ints) -> tuple[float, float, float]:
    """Of one replica: L and lambda W, both times the span, and the time that it stood still with work.

    A request counts from the first row that starts after it was sent, for the counters are read then. A row's counters
    hold until the next row starts or all steps so far have ended.
    """
    starts = steps["start_s"][own]
    ends_s = np.maximum.accumulate(starts + steps["duration_s"][own])
    following = np.append(starts[1:], np.inf)
    present = steps["num_running"][own].astype(np.float64) + steps["num_waiting"][own]
    counted_s = float((present * (np.minimum(following, ends_s) - starts)).sum())
    arrival_s, finish_s = stays["arrival_s"][mine], stays["finish_s"][mine]
    seen_s = np.append(starts, np.inf)[np.searchsorted(starts, arrival_s)]
    expected_s = float((finish_s - np.minimum(seen_s, finish_s)).sum())
    return counted_s, expected_s, _idle_with_work_s(ends_s, following, arrival_s, finish_s)


def _idle_with_work_s(ends_s: Floats, following: Floats, arrival_s: Floats, finish_s: Floats) -> float:
    """Time between a replica's steps in which one of its requests was there."""
    gaps = np.flatnonzero((following - ends_s > 1e-9 * np.maximum(np.abs(ends_s), 1.0)) & np.isfinite(following))
    begin, end = ends_s[gaps], following[gaps]
    middle = (begin + end) / 2
    came = np.searchsorted(np.sort(arrival_s), middle, side="right")
    left = np.searchsorted(np.sort(finish_s), middle, side="right")
    return float((end - begin)[came > left].sum())
