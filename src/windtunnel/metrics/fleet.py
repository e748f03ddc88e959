"""Replicas that come and go: how long each was there, what failed, and what it cost."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table
from windtunnel.schema import Schema

Floats = NDArray[np.float64]

PHASES = ("off", "starting", "up", "draining", "failed")
"""The codes of the column `phase` are positions here."""
OFF, STARTING, UP, DRAINING, FAILED = range(5)
HOLDING = (STARTING, UP, DRAINING, FAILED)
"""Phases in which a replica holds its devices."""

PHASE_COLUMNS: Mapping[str, str] = {
    "time_s": "when the phase began",
    "replica": "counted from 0",
    "phase": "0 off, 1 starting, 2 up, 3 draining, 4 failed",
}

STAY_COLUMNS: Mapping[str, str] = {
    "request": "position in the order of sending, from 0",
    "replica": "that it was at",
    "arrival_s": "when it came there",
    "finish_s": "when it ended, or when the replica failed",
    "is_lost": "the replica failed; the request was sent again",
}

FLEET_COLUMNS: Mapping[str, str] = {
    "num_retries": "times that its replica failed and it was sent again",
    "discarded_tokens": "output tokens that it had streamed and streamed again, where it started over",
}
"""Further columns of the request table of a fleet."""


class FleetSummary(Schema):
    """Replicas over the whole span, from the first request's sending to the last one's end."""

    mean_replicas: float
    """Of those that hold their devices: starting, up, draining or failed."""
    max_replicas: int
    replica_hours: float
    """Of those that hold their devices; what is paid for."""
    serving_hours: float
    """Up or draining."""
    starting_hours: float
    failed_hours: float
    availability_fraction: float
    """Serving time over serving, failed and starting-again time."""
    outage_s: float
    """Time in which no replica took requests."""
    num_failures: int
    num_starts: int
    num_retries: int
    num_retried_requests: int
    num_discarded_tokens: int
    """Output tokens that were produced twice."""
    lost_step_s: float
    """Device time of steps that a failure cut short, over all replicas."""


def fleet_summary(phases: Table, requests: Table, steps: Table, num_replicas: int) -> FleetSummary:
    """The summary of a fleet of at most `num_replicas` replicas."""
    begin_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    hours = np.zeros(len(PHASES))
    again_s, changes = 0.0, []
    for replica in range(num_replicas):
        mine = np.flatnonzero(phases["replica"] == replica)
        kinds, starts_s = phases["phase"][mine], phases["time_s"][mine]
        lengths_s = np.diff(np.clip(np.append(starts_s, np.inf), begin_s, end_s))
        np.add.at(hours, kinds, lengths_s / 3600.0)
        again_s += float(lengths_s[_starts_again(kinds)].sum())
        changes.append((starts_s, kinds))
    held = [_count_over_time(changes, begin_s, end_s, kinds) for kinds in (HOLDING, (UP,))]
    (lengths_s, holding), (up_lengths_s, up) = held
    serving_h = float(hours[UP] + hours[DRAINING])
    away_h = float(hours[FAILED]) + again_s / 3600.0
    within = (phases["time_s"] > begin_s) & (phases["time_s"] <= end_s)
    num_retries = requests["num_retries"]
    return FleetSummary(
        mean_replicas=float((lengths_s * holding).sum() / (end_s - begin_s)),
        max_replicas=int(holding[lengths_s > 0].max()),
        replica_hours=float(hours[STARTING:].sum()),
        serving_hours=serving_h,
        starting_hours=float(hours[STARTING]),
        failed_hours=float(hours[FAILED]),
        availability_fraction=serving_h / (serving_h + away_h) if serving_h else 0.0,
        outage_s=float(up_lengths_s[up == 0].sum()),
        num_failures=int((within & (phases["phase"] == FAILED)).sum()),
        num_starts=int((within & (phases["phase"] == STARTING)).sum()),
        num_retries=int(num_retries.sum()),
        num_retried_requests=int((num_retries > 0).sum()),
        num_discarded_tokens=int(requests["discarded_tokens"].sum()),
        lost_step_s=float(steps["duration_s"][lost_steps(steps)].sum()),
    )


def lost_steps(steps: Table) -> NDArray[np.bool_]:
    """The rows of steps that a failure cut short: they have no tokens."""
    return np.asarray((steps["decode_tokens"] == 0) & (steps["prefill_tokens"] == 0))


def count_over_time(phases: Table, begin_s: float, end_s: float, kinds: tuple[int, ...]) -> tuple[Floats, Floats]:
    """How many replicas are in one of the phases `kinds`: (start of each stretch in seconds, replicas)."""
    num_replicas = int(phases["replica"].max()) + 1
    changes = [
        (phases["time_s"][phases["replica"] == replica], phases["phase"][phases["replica"] == replica])
        for replica in range(num_replicas)
    ]
    lengths_s, counts = _count_over_time(changes, begin_s, end_s, kinds)
    return begin_s + np.concatenate([[0.0], np.cumsum(lengths_s)[:-1]]), counts


def _starts_again(kinds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Phases in which a replica starts after it failed: it goes through `off` at once."""
    again = np.zeros(kinds.size, bool)
    again[2:] = (kinds[2:] == STARTING) & (kinds[1:-1] == OFF) & (kinds[:-2] == FAILED)
    return again


def _count_over_time(
    changes: list[tuple[Floats, NDArray[np.int64]]], begin_s: float, end_s: float, kinds: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """(length of each stretch in seconds, replicas in one of `kinds`)."""
    times, steps = [np.zeros(0)], [np.zeros(0)]
    for starts_s, phases in changes:
        inside = np.isin(phases, kinds).astype(np.float64)
        times.append(np.clip(starts_s, begin_s, end_s))
        steps.append(np.diff(inside, prepend=0.0))
    at_s = np.concatenate(times)
    order = np.argsort(at_s, kind="stable")
    counts = np.concatenate([[0.0], np.cumsum(np.concatenate(steps)[order])])
    edges = np.concatenate([[begin_s], at_s[order], [end_s]])
    return np.diff(edges), counts
