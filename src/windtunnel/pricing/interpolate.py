"""Interpolation of seconds between, around and beyond measured points.

All of it works on the logarithm of measured seconds over a reference (`roofline.Roofline.seconds`): the reference
knows where an operator turns from launch to memory to compute bound, so what is left is flat, and holding it constant
beyond the grid means holding the measured utilisation. Inside a cell the result is bounded by the cell's corners: no
overshoot, no wiggle. Where an engine is known to call another kernel from some size on, each kernel has its own points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Reference = Callable[[Mapping[str, Floats]], Floats]
"""Function of axes (arrays of one shape) to reference seconds at one site."""


@dataclass(frozen=True)
class Interpolated:
    """Seconds at points of one site, and masks of points that were measured or lie between measured points."""

    seconds: Floats
    exact: NDArray[np.bool_]
    inside: NDArray[np.bool_]


@dataclass(frozen=True)
class Curve:
    """Seconds along one axis, at ascending points; `log_ratio` is the log of the measurements over the reference."""

    axis: str
    points: Floats
    log_seconds: Floats
    log_ratio: Floats
    measured: NDArray[np.bool_]
    """False where a point was filled in."""
    straight: bool = False
    """Whether the curve is straight in log-log between points, and not in the shape of the reference."""
    steps: tuple[float, ...] = ()
    """Coordinates from which on another kernel runs: nothing is interpolated across them."""

    @staticmethod
    def of(
        axis: str,
        points: Floats,
        seconds: Floats,
        reference: Reference,
        straight: bool = False,
        measured: NDArray[np.bool_] | None = None,
        steps: tuple[float, ...] = (),
    ) -> Curve:
        """Return the curve through points; all are measured unless `measured` says otherwise."""
        log_seconds = np.log(seconds)
        known = np.ones(len(points), dtype=bool) if measured is None else measured
        return Curve(axis, points, log_seconds, log_seconds - np.log(reference({axis: points})), known, straight, steps)

    def predict(self, values: Floats, reference: Reference) -> Interpolated:
        """Return the seconds at `values`: between the points around, or at the utilisation of a kernel's last point."""
        if not self.steps:
            return self._smooth(values, reference)
        kernel, point_kernel = (np.searchsorted(self.steps, axis, side="right") for axis in (values, self.points))
        seconds, exact = np.empty(len(values)), np.empty(len(values), dtype=bool)
        for index in np.unique(kernel):
            here, points = kernel == index, point_kernel == index
            piece = self._part(points) if points.any() else replace(self, steps=())
            prediction = piece._smooth(values[here], reference)
            seconds[here], exact[here] = prediction.seconds, prediction.exact
        inside = (values >= self.points[0]) & (values <= self.points[-1])
        low, high = (np.exp(self.log_seconds[row]) for row in self._around(values))
        return Interpolated(np.where(inside, _between(seconds, low, high), seconds), exact, inside)

    def _part(self, points: NDArray[np.bool_]) -> Curve:
        """Return the curve of some of the points, without a step."""
        columns = (self.points[points], self.log_seconds[points], self.log_ratio[points], self.measured[points])
        return Curve(self.axis, *columns, self.straight)

    def _around(self, values: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the points below and above, or twice the point that is met or nearest."""
        right = np.clip(np.searchsorted(self.points, values), 0, len(self.points) - 1)
        return np.where((self.points[right] > values) & (right > 0), right - 1, right), right

    def _smooth(self, values: Floats, reference: Reference) -> Interpolated:
        log_values, log_grid = np.log(values), np.log(self.points)
        left, right = self._around(values)
        inside = (values >= self.points[0]) & (values <= self.points[-1])
        log_seconds = np.log(reference({self.axis: values})) + np.interp(log_values, log_grid, self.log_ratio)
        bounded = _between(log_seconds, self.log_seconds[left], self.log_seconds[right])
        if self.straight:
            bounded = np.interp(log_values, log_grid, self.log_seconds)
        exact = inside & (left == right) & self.measured[right]
        return Interpolated(np.exp(np.where(inside, bounded, log_seconds)), exact, inside)


@dataclass(frozen=True)
class Surface:
    """Seconds over two axes: one curve along the second axis for every measured value of the first (a ragged grid)."""

    axes: tuple[str, str]
    points: Floats
    """Measured coordinates of the first axis, ascending."""
    curves: tuple[Curve, ...]

    @staticmethod
    def of(
        axes: Mapping[str, Floats],
        seconds: Floats,
        reference: Reference,
        measured: NDArray[np.bool_] | None = None,
        steps: tuple[float, ...] = (),
    ) -> Surface:
        """Return the surface through points sorted by the first axis, then the second; else as `Curve.of`."""
        known = np.ones(len(seconds), dtype=bool) if measured is None else measured
        first, second = axes
        levels, starts = np.unique(axes[first], return_index=True)
        curves = []
        for value, rows in zip(levels, np.split(np.arange(len(seconds)), starts[1:]), strict=True):
            along = _fixed(reference, first, float(value))
            curves.append(Curve.of(second, axes[second][rows], seconds[rows], along, measured=known[rows], steps=steps))
        return Surface((first, second), levels, tuple(curves))

    def predict(self, axes: Mapping[str, Floats], reference: Reference) -> Interpolated:
        """Return the seconds at points given along both axes.

        Each point lies between two measured values of the first axis. Both curves are read at the point's second
        coordinate, and what they give over the reference is interpolated along the first axis.
        """
        first, second = (axes[name] for name in self.axes)
        upper = np.clip(np.searchsorted(self.points, first), 0, len(self.points) - 1)
        lower = np.where((self.points[upper] > first) & (upper > 0), upper - 1, upper)
        log_ratio = np.empty((2, len(first)))
        log_seconds = np.empty((2, len(first)))
        exact = np.empty((2, len(first)), dtype=bool)
        inside = np.empty((2, len(first)), dtype=bool)
        for side, chosen in enumerate((lower, upper)):
            for index in np.unique(chosen):
                here = chosen == index
                along = _fixed(reference, self.axes[0], float(self.points[index]))
                prediction = self.curves[index].predict(second[here], along)
                log_seconds[side, here] = np.log(prediction.seconds)
                log_ratio[side, here] = log_seconds[side, here] - np.log(along({self.axes[1]: second[here]}))
                exact[side, here], inside[side, here] = prediction.exact, prediction.inside
        weight = _position(first, self.points[lower], self.points[upper])
        blended = np.log(reference(axes)) + log_ratio[0] * (1 - weight) + log_ratio[1] * weight
        within = (first >= self.points[0]) & (first <= self.points[-1])
        bounded = _between(blended, log_seconds[0], log_seconds[1])
        on_grid = within & (lower == upper)
        return Interpolated(np.exp(np.where(within, bounded, blended)), on_grid & exact[0], within & inside.all(axis=0))


def _fixed(reference: Reference, axis: str, value: float) -> Reference:
    def along(axes: Mapping[str, Floats]) -> Floats:
        (other,) = axes.values()
        return reference({axis: np.full(other.shape, value), **axes})

    return along


def _between(value: Floats, left: Floats, right: Floats) -> Floats:
    return np.clip(value, np.minimum(left, right), np.maximum(left, right))


def _position(value: Floats, low: Floats, high: Floats) -> Floats:
    """Return the share of the way from `low` to `high` on a logarithmic scale, 0 to 1; 0 where they are equal."""
    span = np.log(high / low)
    return np.clip(np.divide(np.log(value / low), span, out=np.zeros_like(span), where=span > 0), 0.0, 1.0)


Point = tuple[float, ...]
"""Coordinates along a site's axes."""


def gaps(points: Floats, levels: Floats) -> list[tuple[int, float]]:
    """Return (row below, level) of each gap, in order: levels of the last axis that a curve lacks between two points.

    `points` are `[num_points, num_axes]`, sorted; `levels` are ascending, those that any site was measured at.
    """
    same_curve = np.all(points[1:, :-1] == points[:-1, :-1], axis=1)
    first = np.searchsorted(levels, points[:-1, -1], side="right")
    last = np.searchsorted(levels, points[1:, -1], side="left")
    rows = np.flatnonzero(same_curve & (last > first))
    return [(int(row), float(level)) for row in rows for level in levels[first[row] : last[row]]]


def bend(log_seconds: Mapping[Point, float], low: Point, middle: Point, high: Point) -> float | None:
    """Return the distance of log seconds at `middle` from the line `low` to `high` (log-log); None if unknown."""
    if low not in log_seconds or middle not in log_seconds or high not in log_seconds:
        return None
    part = math.log(middle[-1] / low[-1]) / math.log(high[-1] / low[-1])
    return log_seconds[middle] - log_seconds[low] * (1 - part) - log_seconds[high] * part


def nearest_sites(sites: Floats, target: Floats, count: int) -> tuple[NDArray[np.intp], Floats]:
    """Return the sites nearest to `target` in log space and their weights (inverse squared distance, Shepard 1968).

    `sites` are `[num_sites, num_dimensions]` and `target` is `[num_dimensions]`, all positive.
    """
    distance = np.sqrt(((np.log(sites) - np.log(target)) ** 2).sum(axis=1))
    chosen = np.argsort(distance, kind="stable")[:count]
    weights = 1.0 / np.maximum(distance[chosen], 1e-6) ** 2
    return chosen, weights / weights.sum()


def corner_sites(sites: Floats, target: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return the corners of the grid cell around `target` and their multilinear weights in log space.

    Along a dimension that the grid does not reach, the cell is flat. Corners that were not measured lose their weight.
    """
    levels = [np.unique(column) for column in sites.T]
    corners: list[tuple[tuple[float, ...], float]] = [((), 1.0)]
    for grid, value in zip(levels, target, strict=True):
        high = int(np.clip(np.searchsorted(grid, value), 0, len(grid) - 1))
        low = high - 1 if grid[high] > value and high > 0 else high
        part = float(_position(np.array([value]), grid[[low]], grid[[high]])[0])
        choices = {float(grid[low]): 1 - part} if low == high else {float(grid[low]): 1 - part, float(grid[high]): part}
        corners = [((*point, level), weight * share) for point, weight in corners for level, share in choices.items()]
    row_of = {tuple(site): row for row, site in enumerate(sites.tolist())}
    present = [(row_of[point], weight) for point, weight in corners if point in row_of and weight > 0]
    if not present:
        return nearest_sites(sites, target, 1)
    rows, weights = np.array([row for row, _ in present]), np.array([weight for _, weight in present])
    return rows, weights / weights.sum()
