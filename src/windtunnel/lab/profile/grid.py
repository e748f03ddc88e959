"""Choose the steps to measure: a coarse grid, then midpoints where straight lines between points err most.

Refinement ends when every interval is expected to be within the tolerance, or when the budget does not last for the
next step. What was measured before is not measured again.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

Point = tuple[float, float]
"""Coordinates along two axes."""

START_ERROR = 0.5
"""Expected error of an interval whose middle is not measured: more than any tolerance, so that it is measured."""
HALVED = 0.35
"""Share of an interval's error that its halves keep: a quarter where curves are smooth, half at a kink."""


@dataclass(order=True, frozen=True)
class GridInterval:
    """Two neighbouring points along one axis, and the possible error of a straight line (log-log) between them."""

    rank: float
    low: Point
    high: Point
    axis: int = field(compare=False)
    error: float = field(compare=False)


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
        """Return the points of the coarse grid."""
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
        return self.queue[0].error if self.queue else 0.0

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
        heapq.heappush(self.queue, GridInterval(-error, low, high, axis, error))


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
