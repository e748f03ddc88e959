"""Seconds of a training pass: every task by the serving estimator, then what long runs and overlap change.

Three figures are global; none belongs to a model, a framework or a run. `benchmarks/training_accuracy.py` prints what
they give on measured runs, each data set also with figures fitted without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from windtunnel.estimate.estimator import COVERAGES, Coverage, Estimator
from windtunnel.ops import op as ops
from windtunnel.ops.training import Group, Task
from windtunnel.spec.hardware import Device

SUSTAINED_FRACTION: Mapping[str, float] = {"ampere": 0.9, "hopper": 0.85, "blackwell": 0.85}
"""Rate of matrix products in a run of days against that in a profiling loop of milliseconds, by architecture. A loop
ends before power and temperature lower the clock."""
OTHER_SUSTAINED_FRACTION = 0.87

OVERLAP_SLOWDOWN = 0.12
"""What computation loses for each second of communication beside it: NCCL's kernels hold 16 to 24 of an H100's 132
multiprocessors, and both share the memory's bandwidth."""

CLASSES = ("matrix products", "attention", "experts", "memory-bound kernels", "recomputation")


@dataclass(frozen=True)
class TaskCost:
    """One task's time and how it was found."""

    task: Task
    seconds: float
    coverage: Coverage
    source: str
    relative_error: float


@dataclass
class PassCost:
    """One pass of one micro-batch through some layers. Seconds; exposed and hidden add up to all communication."""

    compute_s: dict[str, float] = field(default_factory=dict)
    """By class of operator."""
    exposed_s: dict[Group, float] = field(default_factory=dict)
    hidden_s: dict[Group, float] = field(default_factory=dict)
    pairable_s: float = 0.0
    """Of the exposed communication, what hides where another micro-batch's pass runs beside this one (DualPipe)."""
    slowdown_s: float = 0.0
    """What computation loses to the communication beside it."""
    error_s: float = 0.0
    """Expected error of the estimates, in seconds, were they all wrong the same way."""
    by_coverage: dict[Coverage, float] = field(default_factory=dict)

    @property
    def computing_s(self) -> float:
        return sum(self.compute_s.values()) + self.slowdown_s

    @property
    def seconds(self) -> float:
        return self.computing_s + sum(self.exposed_s.values())

    def add(self, other: PassCost, times: float = 1.0) -> None:
        """Add `times` of another pass to this one."""
        for mine, others in (
            (self.compute_s, other.compute_s),
            (self.exposed_s, other.exposed_s),
            (self.hidden_s, other.hidden_s),
            (self.by_coverage, other.by_coverage),
        ):
            for name, seconds in others.items():
                mine[name] = mine.get(name, 0.0) + seconds * times  # type: ignore[index, call-overload]
        self.pairable_s += other.pairable_s * times
        self.slowdown_s += other.slowdown_s * times
        self.error_s += other.error_s * times


@dataclass(frozen=True)
class TrainingPricer:
    """Prices tasks; equal operators once."""

    estimator: Estimator
    device: Device
    sustained_fraction: float
    overlap_slowdown: float = OVERLAP_SLOWDOWN
    _known: dict[ops.Op, tuple[float, Coverage, str, float]] = field(default_factory=dict)

    def task(self, task: Task) -> TaskCost:
        """Seconds of one task."""
        if task.op not in self._known:
            estimate = self.estimator.estimate(task.op)
            seconds = float(estimate.seconds)
            if not isinstance(task.op, ops.Elementwise | ops.Collective):
                seconds /= self.sustained_fraction
            self._known[task.op] = (seconds, estimate.coverage, estimate.source, estimate.relative_error)
        seconds, coverage, source, error = self._known[task.op]
        return TaskCost(task, seconds * task.count, coverage, source, error)

    def seconds(self, tasks: Iterable[Task]) -> float:
        """Seconds of tasks one after the other."""
        return sum(self.task(task).seconds for task in tasks)

    def of_pass(self, tasks: Iterable[Task]) -> PassCost:
        """A pass in which collectives run beside the computations that they name, and alone otherwise."""
        found = PassCost()
        costs = [self.task(task) for task in tasks]
        for cost in costs:
            found.by_coverage[cost.coverage] = found.by_coverage.get(cost.coverage, 0.0) + cost.seconds
            found.error_s += cost.seconds * cost.relative_error
            if cost.task.group is None:
                kind = class_of(cost.task)
                found.compute_s[kind] = found.compute_s.get(kind, 0.0) + cost.seconds
        room = {cost.task.name: cost.seconds for cost in costs if cost.task.group is None}
        for cost in costs:
            if cost.task.group is not None:
                self._communicate(found, cost, cost.task.group, room)
        return found

    def _communicate(self, found: PassCost, cost: TaskCost, group: Group, room: dict[str, float]) -> None:
        task, hidden = cost.task, 0.0
        if task.beside == "experts_beside":
            found.pairable_s += cost.seconds
        elif task.beside in room:
            hidden = min(cost.seconds, room[task.beside])
            if task.pieces > 1:
                hidden *= 1.0 - 1.0 / task.pieces
            room[task.beside] -= hidden
            found.slowdown_s += hidden * self.overlap_slowdown
        found.hidden_s[group] = found.hidden_s.get(group, 0.0) + hidden
        found.exposed_s[group] = found.exposed_s.get(group, 0.0) + cost.seconds - hidden


def pricer(estimator: Estimator, device: Device) -> TrainingPricer:
    """A pricer with the shipped figures of the device's architecture."""
    sustained = SUSTAINED_FRACTION.get(device.architecture, OTHER_SUSTAINED_FRACTION)
    return TrainingPricer(estimator, device, sustained)


def class_of(task: Task) -> str:
    """The class under which a report counts a computation."""
    if task.name.startswith("recompute_"):
        return "recomputation"
    if isinstance(task.op, ops.Gemm):
        return "matrix products"
    if isinstance(task.op, ops.Experts):
        return "experts"
    return "memory-bound kernels" if isinstance(task.op, ops.Elementwise) else "attention"


def worst(by_coverage: Mapping[Coverage, float]) -> Coverage:
    """The least sure coverage that any time has."""
    return max(by_coverage, key=COVERAGES.index, default=Coverage.MEASURED)
