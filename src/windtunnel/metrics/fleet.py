"""Summary of a fleet whose replicas start, drain and fail: their hours, failures and retries."""

import numpy as np

from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.metrics.records import COLUMNS, Table
from windtunnel.schema import Schema

PHASES = ("off", "starting", "up", "draining", "failed")
"""The codes of the column `phase` are positions here."""
OFF, STARTING, UP, DRAINING, FAILED = range(5)
HOLDING = (STARTING, UP, DRAINING, FAILED)
"""Phases in which a replica holds its devices."""

PHASE_COLUMNS, STAY_COLUMNS, FLEET_COLUMNS = (COLUMNS[table] for table in ("phases", "stays", "fleet"))


class FleetSummary(Schema):
    """Use of the replicas over the whole span, from the first request's sending to the last one's end."""

    mean_replicas: float
    """Mean number of replicas that hold their devices: starting, up, draining or failed."""
    max_replicas: int
    replica_hours: float
    """Hours of replicas that hold their devices, which are paid for."""
    serving_hours: float
    """Hours of replicas that are up or draining."""
    starting_hours: float
    failed_hours: float
    availability_fraction: float
    """Serving time over the sum of serving time, failed time and restarting time."""
    outage_s: float
    """Time in which no replica took requests."""
    num_failures: int
    num_starts: int
    num_retries: int
    num_retried_requests: int
    num_discarded_tokens: int
    """Output tokens that were generated twice."""
    lost_step_s: float
    """Device time of steps that a failure cut short, over all replicas."""


def fleet_summary(phases: Table, requests: Table, steps: Table, num_replicas: int) -> FleetSummary:
    """Summarise a fleet of at most `num_replicas` replicas."""
    begin_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    hours = np.zeros(len(PHASES))
    restarting_s = 0.0
    changes = _changes(phases, num_replicas)
    for starts_s, codes in changes:
        lengths_s = np.diff(np.clip(np.append(starts_s, np.inf), begin_s, end_s))
        np.add.at(hours, codes, lengths_s / 3600.0)
        # After a failure a replica starts again by way of `off`.
        restarts = (codes[2:] == STARTING) & (codes[1:-1] == OFF) & (codes[:-2] == FAILED)
        restarting_s += float(lengths_s[2:][restarts].sum())
    lengths_s, holding = _lengths_and_counts(changes, begin_s, end_s, HOLDING)
    up_lengths_s, up = _lengths_and_counts(changes, begin_s, end_s, (UP,))
    serving_h = float(hours[UP] + hours[DRAINING])
    away_h = float(hours[FAILED]) + restarting_s / 3600.0
    within = (phases["time_s"] > begin_s) & (phases["time_s"] <= end_s)
    num_retries = requests["num_retries"]
    return FleetSummary(
        mean_replicas=mean_replicas(phases, requests, 0, num_replicas),
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


def mean_replicas(phases: Table, requests: Table, first: int, end: int) -> float:
    """Return the mean number of the replicas from `first` to `end` that hold their devices, over the whole span."""
    begin_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    lengths_s, holding = _lengths_and_counts(_changes(phases, end)[first:], begin_s, end_s, HOLDING)
    return float((lengths_s * holding).sum() / (end_s - begin_s))


def lost_steps(steps: Table) -> Bools:
    """Return a mask of the steps that a failure cut short: they have no tokens."""
    return np.asarray((steps["decode_tokens"] == 0) & (steps["prefill_tokens"] == 0))


def count_over_time(phases: Table, begin_s: float, end_s: float, kinds: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Count the replicas in one of the phases `kinds`: (start of each stretch in seconds, replicas)."""
    changes = _changes(phases, int(phases["replica"].max()) + 1)
    lengths_s, counts = _lengths_and_counts(changes, begin_s, end_s, kinds)
    return begin_s + np.concatenate([[0.0], np.cumsum(lengths_s)[:-1]]), counts


def _changes(phases: Table, num_replicas: int) -> list[tuple[Floats, Ints]]:
    """Return each replica's (start of each phase in seconds, code of the phase)."""
    rows = [phases["replica"] == replica for replica in range(num_replicas)]
    return [(phases["time_s"][chosen], phases["phase"][chosen]) for chosen in rows]


def _lengths_and_counts(
    changes: list[tuple[Floats, Ints]], begin_s: float, end_s: float, kinds: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Return (length of each stretch in seconds, replicas in one of the phases `kinds`)."""
    changes_s = np.clip(np.concatenate([starts_s for starts_s, _ in changes]), begin_s, end_s)
    steps = [np.diff(np.isin(phases, kinds).astype(np.float64), prepend=0.0) for _, phases in changes]
    order = np.argsort(changes_s, kind="stable")
    counts = np.concatenate([[0.0], np.cumsum(np.concatenate(steps)[order])])
    return np.diff(np.concatenate([[begin_s], changes_s[order], [end_s]])), counts
