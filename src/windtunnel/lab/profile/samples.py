"""Statistics of repeated times, of an operator and of a step with all of its operators; and the journal of steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.files import write_text
from windtunnel.lab.profile.model import StepShape
from windtunnel.model.operators import Op
from windtunnel.model.shape import operator_types

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
    kept = samples[samples <= median + OUTLIER_SPREAD * max(high - low, 0.02 * median)]
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


def without_event_cost(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return steps with each operator shorter by what an event between two kernels costs a GPU.

    A kernel after an event is not made ready while the kernel before it runs, as in a graph. The cost is the median
    over the steps of what the operators' sum exceeds the whole by, for each execution: 2.1 to 3.4 us, median 2.6 us, in
    81 steps on an H200, whichever the step (benchmarks/measured/h200/profile).
    """
    excess_s = [(step.sum_s - step.whole_s) / sum(each.count for each in step.operators) for step in steps]
    cost_s = max(float(np.median(excess_s)), 0.0) if excess_s else 0.0
    return [replace(step, operators=tuple(_shorter(each, cost_s) for each in step.operators)) for step in steps]


def _shorter(operator: MeasuredOperator, seconds: float) -> MeasuredOperator:
    measured = operator.statistics
    # No kernel is shorter than a quarter of its span; the cost is that of a typical kernel.
    seconds = min(seconds, 0.75 * measured.min_s)
    shorter = {name: getattr(measured, name) - seconds for name in ("median_s", "mean_s", "min_s", "max_s")}
    return replace(operator, statistics=replace(measured, **shorter))


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
        number = len(self.whole_s)
        return number >= MIN_REPEATS and (sum(self.whole_s) >= REPEAT_S or number >= MAX_REPEATS)

    def step(self, shape: StepShape, known: Mapping[str, Op]) -> MeasuredStep:
        """Return the step with the statistics of its operators, `known` by name: means of a forward's executions."""
        operators = tuple(
            MeasuredOperator(name, known[name], count, statistics_of([s / count for s in self.totals_s[name]]))
            for name, count in self.counts.items()
        )
        timed_s = np.sum(list(self.totals_s.values()), axis=0)
        whole_s = np.median(timed_s) / np.median(timed_s / np.array(self.whole_s))
        return MeasuredStep(shape, operators, float(whole_s))


class Journal:
    """The steps measured so far, a line of JSON each, so that an interrupted profile goes on where it stopped.
    InputError where the file belongs to another measurement, or is broken.

    Args:
        about: the measured model and method; a journal of something else is refused.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path, self.about = path, dict(about)
        self.steps: dict[StepShape, MeasuredStep] = {}
        if rows := _json_lines(path) if path.exists() else []:
            header, *lines = rows
            for key in sorted(self.about):
                if header.get(key) != self.about[key]:
                    raise InputError(
                        f"{path} was measured with {key} {header.get(key)}, now it is {self.about[key]}",
                        "choose another folder, or start anew with --overwrite",
                    )
            self.steps = {step.shape: step for step in map(_step_from, lines)}
        else:
            write_text(path, json.dumps(self.about) + "\n")

    def add(self, step: MeasuredStep) -> None:
        self.steps[step.shape] = step
        document = asdict(step)
        for row, operator in zip(document["operators"], step.operators, strict=True):
            row["kind"] = operator.op.kind
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document, default=float) + "\n")


def read_journal(path: Path) -> list[MeasuredStep]:
    """Read the steps of one journal; InputError where it is broken."""
    return [_step_from(line) for line in _json_lines(path)[1:]]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a journal; a last line that an interruption cut off is left out, and removed from the file."""
    complete, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        write_text(path, complete + "\n" if complete else "")
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is not a journal of a profile: {error}") from None


def _step_from(line: Mapping[str, Any]) -> MeasuredStep:
    try:
        operators = []
        for row in line["operators"]:
            op, statistics = operator_types()[row["kind"]](**row["op"]), TimeStatistics(**row["statistics"])
            operators.append(MeasuredOperator(row["name"], op, int(row["count"]), statistics))
        return MeasuredStep(StepShape(**line["shape"]), tuple(operators), float(line["whole_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a journal of a profile is broken: {error!r}", "start anew with --overwrite") from None
