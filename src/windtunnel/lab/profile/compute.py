"""Choose the steps to measure and their order within a time budget; return their operators as tables.

A coarse grid comes first, then midpoints where straight lines between points err most. Refinement ends when every
interval is expected to be within the tolerance, or when the budget does not last for the next step. What was measured
before is not measured again.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from windtunnel.lab.profile.model import StepShape
from windtunnel.lab.profile.samples import MeasuredStep, TimeStatistics
from windtunnel.model.operators import Op
from windtunnel.pricing.table import STATISTICS, MeasurementTable, Points, tables_from

Point = tuple[float, float]
"""Coordinates along two axes."""

START_ERROR = 0.5
"""Expected error of an interval whose middle is not measured: more than any tolerance, so that it is measured."""
HALVED = 0.35
"""Share of an interval's error that its halves keep: a quarter where curves are smooth, half at a kink."""


class GridInterval(NamedTuple):
    """Two neighbouring points along one axis, and less the possible error of a straight line (log-log) between them."""

    rank: float
    low: Point
    high: Point
    axis: int


@dataclass
class Refinement:
    """The state of a refinement of one grid.

    Args:
        axes: the coarse levels of both axes, ascending.
        allowed: which points can be measured (they fit the memory and the engine).
    """

    axes: tuple[Sequence[float], Sequence[float]]
    allowed: Callable[[Point], bool]
    seconds: dict[Point, float] = field(default_factory=dict)
    queue: list[GridInterval] = field(default_factory=list)

    def coarse(self) -> Iterator[Point]:
        return filter(self.allowed, product(*self.axes))

    def start(self, seconds: Mapping[Point, float]) -> None:
        """Begin to refine from the measured coarse grid."""
        self.seconds.update(seconds)
        for axis in (0, 1):
            for point in sorted(self.seconds):
                later = [p for p in self.seconds if p[1 - axis] == point[1 - axis] and p[axis] > point[axis]]
                if later:
                    self._push(point, min(later, key=lambda p: p[axis]), axis, START_ERROR)

    def worst(self) -> float:
        """Return the largest expected error that is left."""
        return -self.queue[0].rank if self.queue else 0.0

    def next_point(self) -> tuple[GridInterval, Point] | None:
        """Return the worst interval and its midpoint; None when nothing is left to refine."""
        while self.queue:
            interval = heapq.heappop(self.queue)
            middle = _middle(interval)
            if middle is not None and self.allowed(middle):
                return interval, middle
        return None

    def learn(self, interval: GridInterval, middle: Point, seconds: float) -> float:
        """Take in a measured midpoint; return the error of the straight line there."""
        low, high = self.seconds[interval.low], self.seconds[interval.high]
        axis = interval.axis
        part = math.log(middle[axis] / interval.low[axis]) / math.log(interval.high[axis] / interval.low[axis])
        line = math.log(low) * (1 - part) + math.log(high) * part
        error = abs(math.log(seconds) - line)
        self.seconds[middle] = seconds
        self._push(interval.low, middle, axis, error * HALVED)
        self._push(middle, interval.high, axis, error * HALVED)
        return error

    def _push(self, low: Point, high: Point, axis: int, error: float) -> None:
        heapq.heappush(self.queue, GridInterval(-error, low, high, axis))


def _middle(interval: GridInterval) -> Point | None:
    """Return the geometric middle of an interval, whole along its axis; None where nothing lies between."""
    low, high = interval.low[interval.axis], interval.high[interval.axis]
    middle = round(math.sqrt(low * high))
    if not low < middle < high:
        return None
    return (float(middle), interval.low[1]) if interval.axis == 0 else (interval.low[0], float(middle))


def octaves(largest: int, step: int = 2) -> list[float]:
    """Return 1, `step`, `step`^2, ... and `largest`."""
    levels = [float(step**power) for power in range(int(math.log(max(largest, 1), step)) + 1)]
    return levels if levels[-1] == largest else [*levels, float(largest)]


class Stepper(Protocol):
    """Something that executes steps and times their operators."""

    def measure(self, shape: StepShape) -> MeasuredStep:
        """Execute and time one step, with repeats."""
        ...

    def fits(self, shape: StepShape) -> bool: ...


@dataclass(frozen=True)
class ComputePlan:
    """The choices of a compute profile: splits, kernels, clock, limits of the grid of steps, and budget."""

    tp: tuple[int, ...] = (1,)
    """Tensor-parallel splits; each rank's shard is measured alone, without collectives."""
    engine: str = "torch"
    """Owner of the kernels: one of `lab.profile.run.ENGINES`."""
    config: Mapping[str, Any] | None = None
    """The model's config.json, which vLLM needs."""
    torch_device: str | None = None
    """`cpu` or `cuda`; None takes a GPU where torch finds one."""
    clock: str | None = None
    """Name in `lab.timing.CLOCKS`; None takes the steadiest."""
    attention: str = "sdpa"
    """Name in `lab.profile.attention.PACKAGES`, for torch."""
    max_batch: int = 64
    """Most decoding requests."""
    max_context: int = 4096
    """Most tokens of a request."""
    max_tokens: int = 2048
    """Most tokens of a step."""
    budget_s: float | None = None
    """Time to refine in, shared evenly by the splits; None: until the tolerance is met."""
    tolerance: float = 0.05
    """Largest deviation from a straight line (log-log) between measured points."""
    overwrite: bool = False
    """Whether to discard what the folder holds of this model and engine."""


Notify = Callable[[int, float | None, float], None]
"""Called with the number of steps so far, the time until the budget ends (None without one), and the largest expected
error of the intervals that are left."""


def prefill_grid(plan: ComputePlan, stepper: Stepper) -> Refinement:
    """Return the grid of effective length over chunk (1: nothing cached) x tokens of the chunk."""

    def allowed(point: Point) -> bool:
        ratio, chunk = point
        longest = _prefill_shape(point)
        is_integral = ((ratio - 1) * chunk) % 2 == 0
        return is_integral and longest.context + longest.chunk <= plan.max_context and stepper.fits(longest)

    chunks = [level for level in octaves(plan.max_tokens, 4) if level >= 4]
    return Refinement(([1.0, 3.0, 9.0], chunks), allowed)


def _decode_shape(point: Point) -> StepShape:
    return StepShape(int(point[0]), int(point[1]))


def _prefill_shape(point: Point) -> StepShape:
    """Return a prefill's shape: c tokens after p cached ones have effective length 2 p + c (`ops.PrefillAttention`)."""
    ratio, chunk = point
    return StepShape(1, int((ratio - 1) * chunk / 2), int(chunk))


def measure_steps(
    stepper: Stepper, plan: ComputePlan, known: Mapping[StepShape, MeasuredStep], notify: Notify
) -> Iterator[MeasuredStep]:
    """Measure the coarse grids, then refine them worst interval first; what is `known` is not measured again.

    The budget counts the time of measuring alone, not what the caller does in between.

    Yields:
        Every step that was measured now.
    """
    contexts = [level for level in octaves(plan.max_context, 4) if level >= 16]
    decode = Refinement((octaves(plan.max_batch, 4), contexts), lambda point: stepper.fits(_decode_shape(point)))
    grids = [(decode, _decode_shape), (prefill_grid(plan, stepper), _prefill_shape)]
    steps = dict(known)
    cost_s: dict[StepShape, float] = {}

    def spent() -> float:
        return sum(cost_s.values())

    def take(shape: StepShape, error: float) -> Iterator[MeasuredStep]:
        if shape not in steps:
            before_s = time.monotonic()
            steps[shape] = stepper.measure(shape)
            cost_s[shape] = time.monotonic() - before_s
            left_s = None if plan.budget_s is None else max(plan.budget_s - spent(), 0.0)
            notify(len(steps), left_s, error)
            yield steps[shape]

    coarse = [shape_of(point) for grid, shape_of in grids for point in grid.coarse()]
    # In no order along the axes: a machine that becomes slower meanwhile must not look like a slope.
    for number in np.random.default_rng(0).permutation(len(coarse)):
        yield from take(coarse[number], 1.0)
    for grid, shape_of in grids:
        grid.start({point: steps[shape_of(point)].sum_s for point in grid.coarse()})
    while True:
        grid, shape_of = max(grids, key=lambda pair: pair[0].worst())
        if grid.worst() <= plan.tolerance or (plan.budget_s is not None and spent() >= plan.budget_s):
            return
        if (following := grid.next_point()) is None:
            continue
        interval, middle = following
        shape = shape_of(middle)
        longest_s = max((cost_s.get(shape_of(end), 0.0) for end in (interval.low, interval.high)), default=0.0)
        if plan.budget_s is not None and spent() + longest_s > plan.budget_s:
            continue
        yield from take(shape, grid.worst())
        grid.learn(interval, middle, steps[shape].sum_s)


def operator_tables(measured: Iterable[tuple[Op, TimeStatistics]], source: str) -> list[MeasurementTable]:
    """Return measured operators as tables with statistics, one per kind and words."""

    def point(op: Op, statistics: TimeStatistics) -> Points:
        kept = {name: np.array([float(getattr(statistics, name))]) for name in STATISTICS}
        return op, np.array([statistics.median_s]), kept

    return tables_from((point(*operator) for operator in measured), source)
