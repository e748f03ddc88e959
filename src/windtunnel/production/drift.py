"""Notice that a server has drifted from its calibration: its steps, or intervals, become slower or faster and stay so.

A step's residual is the logarithm of measured over predicted time, less its level: a slowly followed mean, and an
offset for each captured graph size, which is learnt where the size first occurs and lies close to those of the sizes
next to it: a change that comes together with a new size is no offset. Residuals beyond an allowance add up
(CUSUM; Page, Continuous inspection schemes, 1954), each by at most 1, so that no single step raises an alarm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from windtunnel.calibration.steps.price import PricedSteps, price_run
from windtunnel.calibration.steps.read import StepRun
from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.record import ServerRecord
from windtunnel.production.intervals import price_intervals
from windtunnel.serving.calibration import Calibration
from windtunnel.serving.engines.launches import decode_tokens
from windtunnel.serving.priced_deployments import PricedDeployments


class Counts(NamedTuple):
    """Rows that the parts of the watch take."""

    first: int
    """For the first level."""
    offset: int
    """For the offset of a graph size."""
    alarm: float
    """CUSUM that raises an alarm: so many rows in a row, if all are well beyond the allowance."""
    near: float
    """Most that an offset differs from the one between those of the next smaller and larger graph sizes."""


COUNTS: Mapping[str, Counts] = {"step": Counts(50, 8, 45.0, 0.04), "interval": Counts(10, 4, 8.0, np.inf)}
ALLOWANCE, WIDTH = 0.02, 0.005
"""Residual that does not count, and that beyond it which counts as 1. Chosen with `FOLLOW` and `SUSPECT` on five
recorded runs of vLLM 0.20.1 on B300, whose prices are off by up to 4% as batches and contexts change
(`benchmarks/observe.py`). So were the counts of steps."""
FOLLOW, MOST_FOLLOWED = 0.1, 0.01
"""Share of a residual, taken as no larger than the second, by which the level follows."""
SUSPECT = 1 / 6
"""Share of the alarm's CUSUM from which the level stays as it is."""
MOST_LAGS = 50
FAR = 4.0
"""Spreads beyond which a change is no chance."""
OTHERS = 0.14
"""Change of the logarithm below which steps of one of several data-parallel ranks tell nothing, as the busiest of the
others lengthens them: in seven recorded runs by up to 11%, but for two changes of 15 and 28%."""
LEAST_BETWEEN = 100
"""Rows between false alarms, at the least, below which an alarm says nothing."""


@dataclass(frozen=True)
class Drift:
    """A lasting change."""

    begins: int
    """Row from which the CUSUM rose."""
    noticed: int
    """Row of the alarm."""
    change: float
    """Relative change of the measured time."""


@dataclass(frozen=True)
class Watch:
    """What became of a server beside its calibration."""

    run: str
    unit: str
    """`step` or `interval`."""
    num_rows: int
    level: float
    """Measured over calibrated time at the beginning, less one."""
    is_off: bool
    """Whether that is beyond the calibration's own spread."""
    drifts: tuple[Drift, ...]
    rows_between_false_alarms: float | None
    """At least, if a server that has not drifted deviates as long and as far as this one did before any alarm; None
    where there are too few rows to tell."""
    spread: float = 0.0
    """Standard deviation of the logarithm of measured over predicted time before an alarm, by its median deviation."""
    remarks: tuple[str, ...] = ()
    is_partial: bool = False
    """Whether only some of the data-parallel ranks that step together are recorded."""

    @property
    def is_sure(self) -> bool:
        """Whether false alarms are known to be rare, or the first change is far beyond what times varied by before.

        The bound is loose: false alarms are far rarer than it says.
        """
        if self.is_partial and self.drifts and abs(np.log1p(self.drifts[0].change)) < OTHERS:
            return False
        if self.rows_between_false_alarms is None or self.rows_between_false_alarms >= LEAST_BETWEEN:
            return True
        return bool(self.drifts) and abs(np.log1p(self.drifts[0].change)) > FAR * self.spread

    @property
    def has_drifted(self) -> bool:
        return self.is_off or (bool(self.drifts) and self.is_sure)


def watch_steps(run: StepRun) -> Watch:
    """Watch the steps without prompts of a run, whose deployment has the calibration. InputError where the deployment
    is not known, or too few steps can be priced."""
    return _watched(run, "step", lambda: price_run(run, PricedDeployments().estimator))


def watch_record(run: StepRun, record: ServerRecord) -> Watch:
    """Watch the intervals of what a server emitted; errors are those of `watch_steps`."""
    return _watched(run, "interval", lambda: price_intervals(run, record, PricedDeployments().estimator))


def _watched(run: StepRun, unit: str, price: Callable[[], PricedSteps]) -> Watch:
    if run.setup is None or run.setup.calibration is None:
        raise InputError(f"{run.name}: {run.refused or 'the deployment has no calibration'}")
    priced, counts = price(), COUNTS[unit]
    if unit == "step":
        priced = priced.taken(priced.kind == 0)
    if priced.kind.size < counts.first + counts.alarm:
        hint = f"{counts.first + counts.alarm:.0f} are needed"
        raise InputError(f"{run.name} has {priced.kind.size} {unit}s that can be watched", hint)
    residuals = np.log(priced.measured_s / priced.predicted_s)
    watching = watch(residuals, states_of(priced, unit), counts)
    level = float(np.median(residuals[: counts.first]))
    before = residuals[: max(watching.drifts[0].begins, counts.first)] if watching.drifts else residuals
    return Watch(
        run=run.label,
        unit=unit,
        num_rows=residuals.size,
        level=float(np.expm1(level)),
        is_off=_is_off(level, run.setup.calibration),
        drifts=tuple(watching.drifts),
        rows_between_false_alarms=_between_false_alarms(watching.additions, counts.alarm),
        spread=1.4826 * float(np.median(np.abs(before - np.median(before)))),
        remarks=run.remarks,
        is_partial=unit == "step" and run.setup.parallelism.attention_dp > np.unique(run.steps["dp_rank"]).size,
    )


def states_of(priced: PricedSteps, unit: str) -> Ints:
    """Return what rows must share for their offset to be the same: a graph size, or of intervals the kind."""
    if unit == "interval" or priced.run.setup is None:
        return priced.kind
    batches = priced.num_requests.astype(np.int64)
    sizes = decode_tokens(priced.run.setup.engine, int(batches.max()))
    return np.asarray(sizes[batches], np.int64)


@dataclass
class _Watching:
    """The state of a watch."""

    drifts: list[Drift] = field(default_factory=list)
    additions: list[float] = field(default_factory=list)
    """What each row before the first alarm added to the larger CUSUM."""


def watch(residuals: Floats, states: Ints, counts: Counts) -> _Watching:
    """Find lasting changes; after each, the new level is learnt afresh.

    Args:
        residuals: [rows] logarithms of measured over predicted time.
        states: [rows] as `states_of` returns them.
    """
    found, start = _Watching(), 0
    while start < residuals.size and (drift := _next(residuals, states, counts, start, found)) is not None:
        found.drifts.append(drift)
        start = drift.noticed + 1
    return found


class _Offsets:
    """What the residuals of each graph size are off by, beside the level."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._known: dict[int, float] = {}
        self._seen: dict[int, list[float]] = {}

    def look(self, state: int, residual: float) -> float | None:
        """Return the offset of a size, of which another residual is known now; None where nothing tells."""
        if state in self._known:
            return self._known[state]
        seen = self._seen.setdefault(state, [])
        seen.append(residual)
        offset, is_near = float(np.median(seen)), bool(self._known) and np.isfinite(self._counts.near)
        if is_near:
            sizes = sorted(self._known)
            between = float(np.interp(state, sizes, [self._known[size] for size in sizes]))
            offset = float(np.clip(offset, between - self._counts.near, between + self._counts.near))
        if len(seen) >= self._counts.offset:
            self._known[state] = offset
        return offset if is_near else None


def _next(residuals: Floats, states: Ints, counts: Counts, start: int, found: _Watching) -> Drift | None:
    """Return the next drift behind `start`, or None."""
    offsets = _Offsets(counts)
    level = float(np.median(residuals[start : start + counts.first]))
    sums, begins, levels = [0.0, 0.0], [start, start], [level, level]
    beyond: list[list[float]] = [[], []]
    for row in range(start + counts.first, residuals.size):
        residual = float(residuals[row]) - level
        offset = offsets.look(int(states[row]), residual)
        if offset is None:
            continue
        residual -= offset
        for side, sign in enumerate((1.0, -1.0)):
            addition = float(np.clip((sign * residual - ALLOWANCE) / WIDTH, -1.0, 1.0))
            if sums[side] == 0.0:
                begins[side], levels[side], beyond[side] = row, level, []
            sums[side] = max(sums[side] + addition, 0.0)
            beyond[side].append(residual + level - levels[side])
            if not found.drifts and side == 0:
                found.additions.append(float(np.clip((abs(residual) - ALLOWANCE) / WIDTH, -1.0, 1.0)))
            if sums[side] > counts.alarm:
                return Drift(begins[side], row, float(np.expm1(np.median(beyond[side]))))
        if max(sums) < SUSPECT * counts.alarm:
            level += FOLLOW * float(np.clip(residual, -MOST_FOLLOWED, MOST_FOLLOWED))
    return None


def _is_off(level: float, calibration: Calibration) -> bool:
    """Whether a first level lies beyond the spread of a calibration's own errors."""
    spread = calibration.spread.get("tpot")
    low, high = (0.0, 0.0) if spread is None else (np.log(spread.p10), np.log(spread.p90))
    return not low - ALLOWANCE - WIDTH <= level <= high + ALLOWANCE + WIDTH


def _between_false_alarms(additions: list[float], alarm: float) -> float | None:
    """Return a lower bound of the mean number of rows between false alarms, exp(2 m h / l).

    Additions from -1 to 1 with the mean -m reach h before they fall back to 0 with a probability of at most
    exp(-2 m h) (Hoeffding, 1963), and an alarm is as rare as that (Lorden, 1971). Those that hang together over l rows
    count as one.
    """
    values = np.array(additions)
    if values.size <= MOST_LAGS:
        return None
    if not values.mean() < 0:
        return 1.0
    deviations = values - values.mean()
    variance = float(np.mean(deviations**2)) or 1.0
    lags = [float(np.mean(deviations[lag:] * deviations[:-lag])) / variance for lag in range(1, MOST_LAGS)]
    together = 1 + 2 * sum(max(each, 0.0) for each in lags)
    return float(np.exp(min(-2 * values.mean() * alarm / together, 50.0)))
