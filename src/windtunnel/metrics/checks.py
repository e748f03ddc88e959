"""Self-check of a run: conditions that hold in every run, checked on the records and not in the loop."""

from itertools import pairwise

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import ReplicaRows
from windtunnel.schema import Schema

MOST_ERROR_FRACTION = 1e-6
"""Tolerated error of Little's law and of idle time, where sums of millions of floats are compared."""
MOST_PIPELINE_ERROR_FRACTION = 0.01
"""Tolerated error in a pipeline, where counters are read when a batch starts and requests leave in between. What they
count between a batch's end and the next start, as where the pipeline drains, is tolerated besides."""


class Checks(Schema):
    """A run's self-check."""

    passed: bool
    num_out_of_order: int
    """Requests that break sending <= first scheduling <= first token <= last token."""
    num_missing_tokens: int
    """Output tokens of the requests and tokens that they discarded, less tokens that the steps sampled."""
    littles_law_error_fraction: float
    """Relative error of Little's law, L = lambda W: mean requests present by the steps' counters and by the requests'
    times."""
    idle_with_work_fraction: float
    """Time in which a replica ran no step although it had a request, over busy time (work conservation)."""


def check_run(requests: Table, steps: Table, rows: ReplicaRows, num_stages: int, stays: Table | None = None) -> Checks:
    """Check a finished run.

    Args:
        rows: rows of `stays`, or else of `requests`, and of `steps`, by replica.
        num_stages: pipeline stages of a replica.
        stays: when each request was at which replica, where requests move between replicas.

    Source of Little's law: J. D. C. Little, A Proof for the Queuing Formula L = lambda W, Operations Research 9 (1961).
    """
    stays = requests if stays is None else stays
    times = [requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    in_order = np.logical_and.reduce([before <= after for before, after in pairwise(times)])
    sampled = steps["num_sampled"] + (steps["num_steps"].astype(np.int64) - 1) * steps["decode_tokens"]
    discarded = int(requests["discarded_tokens"].sum()) if "discarded_tokens" in requests.columns else 0
    num_missing = int(requests["output_tokens"].sum() + discarded - sampled.sum())
    counted_s, expected_s, lost_s, stale_s = np.sum(
        [_check_replica(stays, stay_rows, steps, step_rows) for step_rows, stay_rows in rows], axis=0
    )
    law = abs(counted_s - expected_s) / expected_s if expected_s > 0 else float(counted_s > 0)
    idle = lost_s / max(float(steps["duration_s"].sum()), np.finfo(float).tiny)
    num_out_of_order = int((~in_order).sum())
    tolerance = MOST_PIPELINE_ERROR_FRACTION if num_stages > 1 else MOST_ERROR_FRACTION
    excused = stale_s / expected_s if num_stages > 1 and expected_s > 0 else 0.0
    return Checks(
        passed=bool(num_out_of_order == 0 and num_missing == 0 and law <= tolerance + excused and idle <= tolerance),
        num_out_of_order=num_out_of_order,
        num_missing_tokens=num_missing,
        littles_law_error_fraction=float(law),
        idle_with_work_fraction=float(idle),
    )


def _check_replica(stays: Table, stay_rows: Ints, steps: Table, step_rows: Ints) -> tuple[float, float, float, float]:
    """Return, for one replica, L and lambda W times the span, its idle time with work, and what of L is counted after
    a batch has ended and before the next starts, all in seconds.

    A request counts from the first row that starts after it was sent, for the counters are read then. A row's counters
    hold until the next row starts or all steps so far have ended.
    """
    starts = steps["start_s"][step_rows]
    batch_ends_s = starts + steps["duration_s"][step_rows]
    ends_s = np.maximum.accumulate(batch_ends_s)
    following = np.append(starts[1:], np.inf)
    present = steps["num_running"][step_rows].astype(np.float64) + steps["num_waiting"][step_rows]
    until_s = np.minimum(following, ends_s)
    counted_s = float((present * (until_s - starts)).sum())
    first_end_s = np.append(np.sort(batch_ends_s), np.inf)[np.searchsorted(np.sort(batch_ends_s), starts, side="right")]
    stale_s = float((present * np.maximum(until_s - first_end_s, 0.0)).sum())
    arrival_s, finish_s = stays["arrival_s"][stay_rows], stays["finish_s"][stay_rows]
    seen_s = np.append(starts, np.inf)[np.searchsorted(starts, arrival_s)]
    expected_s = float((finish_s - np.minimum(seen_s, finish_s)).sum())
    return counted_s, expected_s, _idle_with_work_s(ends_s, following, arrival_s, finish_s), stale_s


def _idle_with_work_s(ends_s: Floats, following: Floats, arrival_s: Floats, finish_s: Floats) -> float:
    """Return the seconds between a replica's steps in which it had a request."""
    gaps = np.flatnonzero((following - ends_s > 1e-9 * np.maximum(np.abs(ends_s), 1.0)) & np.isfinite(following))
    begin, end = ends_s[gaps], following[gaps]
    middle = (begin + end) / 2
    came = np.searchsorted(np.sort(arrival_s), middle, side="right")
    left = np.searchsorted(np.sort(finish_s), middle, side="right")
    return float((end - begin)[came > left].sum())
