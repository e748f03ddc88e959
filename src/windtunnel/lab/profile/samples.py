"""Statistics of repeated times: of one operator, and of a step with all of its operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from windtunnel.lab.profile.model import StepShape
from windtunnel.model.operators import Op

MIN_REPEATS, MAX_REPEATS = 6, 50
REPEAT_S = 0.5
"""Measured time after which a step is not repeated again, within the two counts above."""


@dataclass(frozen=True)
class TimeStatistics:
    """Statistics of repeated times of one operator."""

    median_s: float
    mean_s: float
    min_s: float
    max_s: float
    std_s: float
    num_samples: int
    num_outliers: int


OUTLIER_SPREAD = 5.0
"""Interquartile ranges above the median from which samples are outliers: interrupted, so counted but not used."""


def statistics_of(seconds: Sequence[float]) -> TimeStatistics:
    """Return the statistics of samples without outliers; the median counts the outliers too, which hardly move it."""
    samples = np.asarray(seconds, np.float64)
    low, median, high = np.percentile(samples, [25, 50, 75])
    limit = median + OUTLIER_SPREAD * max(high - low, 0.02 * median)
    kept = samples[samples <= limit]
    return TimeStatistics(
        median_s=float(median),
        mean_s=float(kept.mean()),
        min_s=float(kept.min()),
        max_s=float(kept.max()),
        std_s=float(kept.std()),
        num_samples=samples.size,
        num_outliers=samples.size - kept.size,
    )


@dataclass(frozen=True)
class MeasuredOperator:
    """An operator as a step executed it."""

    name: str
    op: Op
    count: int
    """Executions in the step."""
    statistics: TimeStatistics


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step with all of its operators."""

    shape: StepShape
    operators: tuple[MeasuredOperator, ...]
    whole_s: float
    """Time of the same forward without timers inside."""

    @property
    def sum_s(self) -> float:
        """Sum of the operators, each at its median."""
        return sum(operator.count * operator.statistics.median_s for operator in self.operators)

    @property
    def closure_error(self) -> float:
        """Sum of the operators over the whole forward, minus one."""
        return self.sum_s / self.whole_s - 1


@dataclass
class Repeats:
    """Repeats of one step, alternately with timers inside and without, so that both meet the same machine.

    The speed of a machine that others use too changes by tens of percent within seconds. All operators of a forward
    slow down together, so that the medians over forwards of each operator's time in a whole forward add up to the
    median of their sums, which the medians of single executions do not. The forward without timers is compared with
    its neighbour in time: the median of the ratios of pairs, and not the ratio of two medians.
    """

    totals_s: dict[str, list[float]] = field(default_factory=dict)
    """Operator -> its time in each forward."""
    counts: dict[str, int] = field(default_factory=dict)
    """Operator -> its executions in a forward."""
    whole_s: list[float] = field(default_factory=list)

    def add(self, durations: Mapping[str, Sequence[float]], whole_s: float) -> None:
        """Add a pair of forwards: the executions of each operator in one, the seconds of the other."""
        for name, seconds in durations.items():
            self.totals_s.setdefault(name, []).append(sum(seconds))
            self.counts[name] = len(seconds)
        self.whole_s.append(whole_s)

    @property
    def is_enough(self) -> bool:
        """Whether enough was measured."""
        number = len(self.whole_s)
        return number >= MIN_REPEATS and (sum(self.whole_s) >= REPEAT_S or number >= MAX_REPEATS)

    def step(self, shape: StepShape, known: Mapping[str, Op]) -> MeasuredStep:
        """Return the step with the statistics of its operators, `known` by name: means of a forward's executions."""
        operators = tuple(
            MeasuredOperator(
                name, known[name], self.counts[name], statistics_of([s / self.counts[name] for s in totals_s])
            )
            for name, totals_s in self.totals_s.items()
        )
        timed_s = np.sum(list(self.totals_s.values()), axis=0)
        whole_s = np.median(timed_s) / np.median(timed_s / np.array(self.whole_s))
        return MeasuredStep(shape, operators, float(whole_s))
