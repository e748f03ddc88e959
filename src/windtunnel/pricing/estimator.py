"""Seconds of an operator, and where they come from: a measured point, points around it, other shapes or a roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model import operators as ops
from windtunnel.model.exchange import TokenExchange
from windtunnel.model.feed_forward.experts import MegaMoe
from windtunnel.model.precision import Format, computed_as
from windtunnel.pricing.exchange import EXCHANGE_ERROR, MEGA_MOE_ERROR
from windtunnel.pricing.interpolate import Curve, Interpolated, Point, Surface, bend, corner_sites, gaps, nearest_sites
from windtunnel.pricing.roofline import CPU, CPU_MEDIAN_ERROR, KINDS, UNFITTED_ERROR, Roofline, fit_for, has_closed_form
from windtunnel.pricing.table import Floats, MeasurementTable, operator_type, site_fields, site_names, site_of
from windtunnel.schema import read_yaml


class Coverage(StrEnum):
    """Provenance of an estimate, the surest first."""

    MEASURED = "measured"
    """The point itself was measured."""
    INTERPOLATED = "interpolated"
    """The point lies between measured points of its shape, or its shape between measured shapes."""
    SCALED = "scaled"
    """The point lies beyond measured points or shapes: its work at the measured utilisation."""
    ROOFLINE = "roofline"
    """No table has the operator: the calibrated roofline."""


COVERAGES = tuple(Coverage)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one operator, or of a family of them (one array of the shape of the operator's axes)."""

    seconds: ops.Size
    coverage: Coverage
    """Coverage of the least sure point of the family."""
    source: str
    """Name of the table or fit, for people."""
    relative_error: float
    """Median |error| of this kind of estimate when measured points are left out (`benchmarks/operator_accuracy.py`)."""
    longest_share: float = 0.0
    """As `MeasurementTable.longest_share`."""


class Estimator(Protocol):
    """Anything that prices operators."""

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`, vectorised over arrays along its axes."""
        ...


@dataclass(frozen=True)
class UsersEstimator:
    """An estimator of the user's, whose answers are checked and have the shape of the operator's axes."""

    estimator: Estimator

    def estimate(self, op: ops.Op) -> Estimate:
        """Return its estimate. InputError where it returned none, another number of seconds than points, or seconds
        that cannot be."""
        answer: Any = self.estimator.estimate(op)
        told = f"the estimator {type(self.estimator).__name__} returned"
        if not isinstance(answer, Estimate):
            raise InputError(f"{told} {answer!r:.60} for {op.kind}, not an Estimate")
        shape = np.broadcast_shapes(*map(np.shape, ops.axis_values(op).values()))
        seconds = np.asarray(answer.seconds, np.float64)
        if seconds.shape not in ((), shape):
            raise InputError(f"{told} seconds of shape {seconds.shape} for {op.kind} of shape {shape}")
        if not np.all(np.isfinite(seconds) & (seconds >= 0)):
            raise InputError(f"{told} seconds for {op.kind} that are below 0 or no number")
        return replace(answer, seconds=np.broadcast_to(seconds, shape)) if shape and not seconds.shape else answer


def users_estimator(estimator: Estimator) -> Estimator:
    """Return an estimator that is not ours with its answers checked."""
    return estimator if type(estimator).__module__.startswith("windtunnel.") else UsersEstimator(estimator)


TableSource = Callable[[ops.Op], MeasurementTable | None]
"""Function that returns the table that prices an operator, or None where nobody measured its kind in its format."""


class LeftOut(StrEnum):
    """Part of a table that the benchmark leaves out to learn the error of estimates without it."""

    INSIDE = "inside"
    """A point between others of its shape; the table's other shapes stay whole."""
    LEVEL = "level"
    """A size along the axis, out of all shapes; each has points around it."""
    LAST = "last"
    """The largest point of its shape."""
    SHAPE = "shape"
    """All points of a shape."""


LEFT_OUT_FILE = catalog.shipped("roofline/left_out.yaml")


@cache
def _left_out_errors() -> Mapping[str, Mapping[str, float]]:
    errors: Mapping[str, Mapping[str, float]] = read_yaml(LEFT_OUT_FILE)["median_error"]
    return errors


def expected_error(kind: str, lacking: LeftOut | None) -> float:
    """Return the median |error| of estimates of a kind that lacked something; 0 for measured points."""
    return 0.0 if lacking is None else float(_left_out_errors()[kind][lacking])


def least_seconds(op: ops.Op, device: Device) -> ops.Size:
    """Return the seconds in which memory delivers what an operator reads of its layer (`Op.held_bytes`).

    Loops that measure one operator find it in the L2 cache: on L40S (96 MiB, 864 GB/s) products of one row read 16 MB
    of weights at up to 2,300 GB/s and 100 MB at 730. In a step the other layers pass in between.
    """
    return op.held_bytes / device.memory_bytes_per_s


@dataclass(frozen=True)
class RooflineEstimator:
    """Estimator that prices every operator from the device's published figures."""

    roofline: Roofline

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds by the calibrated roofline."""
        _require_work(op)
        if not has_closed_form(op):
            _require_counts(op)
        op, remark = _computed(op, self.roofline)
        least_s = least_seconds(op, self.roofline.device)
        seconds = _scalar_or_array(np.asarray(np.maximum(self.roofline.seconds(op), least_s), dtype=np.float64))
        if self.roofline.device.architecture == CPU:
            return Estimate(seconds, Coverage.ROOFLINE, "roofline of a processor, not calibrated", CPU_MEDIAN_ERROR)
        if isinstance(op, TokenExchange):
            return Estimate(seconds, Coverage.ROOFLINE, "closed form of DeepEP's published times", EXCHANGE_ERROR)
        if isinstance(op, MegaMoe):
            return Estimate(seconds, Coverage.ROOFLINE, "closed form of Mega MoE's published times", MEGA_MOE_ERROR)
        if not has_closed_form(op):
            return Estimate(seconds, Coverage.ROOFLINE, f"plain roofline, not fitted to {op.kind}", UNFITTED_ERROR)
        fit = fit_for(op)
        return Estimate(seconds, Coverage.ROOFLINE, f"roofline fitted on {fit.fitted_on}{remark}", fit.median_error)


def _computed(op: ops.Op, roofline: Roofline) -> tuple[ops.Op, str]:
    """Return `op` in the format as which the device computes it, and a remark where that is another one."""
    given = getattr(op, "format", None)
    form = given and computed_as(given, roofline.device.peak_flops_per_s)
    return (op, "") if form is given else (_with(op, {"format": form}), f"; {given} is dequantised, as {form}")


ANY = "any"
"""Name of the table of all elementwise kernels, which cost what their bytes cost."""


def canonical(op: ops.Op, table: MeasurementTable) -> ops.Op:
    """Return `op` with the dimensions that do not change its cost made equal, so that it meets its measured rows.

    A table of all elementwise kernels has bytes only.
    """
    if isinstance(op, ops.Elementwise) and table.words["name"] == ANY:
        return ops.Elementwise(ANY, op.num_bytes, 1.0)
    return op


@dataclass(frozen=True)
class TableModel:
    """One table with the curves and surfaces that read it anywhere."""

    table: MeasurementTable
    roofline: Roofline
    _shapes: dict[tuple[float, ...], Curve | Surface] = field(default_factory=dict)
    _points: dict[tuple[float, ...], dict[Point, float]] = field(default_factory=dict)
    _chunk_shapes: dict[tuple[float, ...], Surface | None] = field(default_factory=dict)

    def estimate(self, op: ops.Op) -> tuple[Floats, Coverage, LeftOut | None]:
        """Return seconds at each point of `op`'s axes (flat), the least sure coverage, and what was lacking there."""
        points = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in ops.axis_values(op).values()))
        axes = {name: value.ravel() for name, value in zip(op.axes, points, strict=True)}
        site = site_of(op)
        if site in self.table.rows_by_site:
            prediction = self.at_site(site, op, axes)
            coverage, lacking = _worst(prediction)
            if self.table.is_fitted and coverage == Coverage.MEASURED:
                return prediction.seconds, Coverage.INTERPOLATED, LeftOut.INSIDE
            return prediction.seconds, coverage, lacking
        return *self.between_sites(site, op, axes), LeftOut.SHAPE

    def at_site(self, site: tuple[float, ...], op: ops.Op, axes: Mapping[str, Floats]) -> Interpolated:
        """Return the seconds at points of a measured site."""
        if op.kind in CHUNKED:
            after_cached = self._chunks(site, op)
            alone = axes["batch"] <= 1.0
            if after_cached is not None and alone.any():
                return _either(
                    alone,
                    after_cached.predict(_chunk_axes(axes, alone), self._chunk_reference(op)),
                    self._along_axes(site, op, {name: values[~alone] for name, values in axes.items()}),
                )
        return self._along_axes(site, op, axes)

    def _chunks(self, site: tuple[float, ...], op: ops.Op) -> Surface | None:
        """Return the surface of a site's single chunks, over their tokens and cached ones; None without cached ones."""
        if site not in self._chunk_shapes:
            axes, seconds = self.table.site_rows(site)
            shape = None
            if (axes["batch"] < 1.0).any():
                alone = axes["batch"] <= 1.0
                grid = _chunk_axes(axes, alone)
                order = np.lexsort([*grid.values()][::-1])
                sorted_grid = {name: values[order] for name, values in grid.items()}
                shape = Surface.of(sorted_grid, seconds[alone][order], self._chunk_reference(op))
            self._chunk_shapes[site] = shape
        return self._chunk_shapes[site]

    def _chunk_reference(self, op: ops.Op) -> Callable[[Mapping[str, Floats]], Floats]:
        return lambda chunks: np.asarray(self.roofline.seconds(_with(op, _as_batch(chunks))))

    def _along_axes(self, site: tuple[float, ...], op: ops.Op, axes: Mapping[str, Floats]) -> Interpolated:
        def reference(points: Mapping[str, Floats]) -> Floats:
            return np.asarray(self.roofline.seconds(_with(op, points)))

        if site not in self._shapes:
            grid, seconds, measured = self.filled(site)
            steps = self.table.steps.get(site, ())
            if len(grid) == 1:
                ((axis, points),) = grid.items()
                self._shapes[site] = Curve.of(axis, points, seconds, reference, op.kind in _STRAIGHT, measured, steps)
            else:
                self._shapes[site] = Surface.of(grid, seconds, reference, measured, steps)
        shape = self._shapes[site]
        if isinstance(shape, Curve):
            return shape.predict(axes[shape.axis], reference)
        return shape.predict(axes, reference)

    def filled(self, site: tuple[float, ...]) -> tuple[dict[str, Floats], Floats, NDArray[np.bool_]]:
        """Return axes and seconds of one site, and a mask of measured points.

        A point that the site lacks and similar sites have is filled in: a straight line between the site's points, bent
        as similar sites bend. Kernels switch at the same sizes there.
        """
        axes, seconds = self.table.site_rows(site)
        points = np.column_stack(list(axes.values()))
        similar = self._similar_sites(site)
        new: list[Point] = []
        values: list[float] = []
        for row, level in gaps(points, self._levels):
            low, high = tuple(points[row].tolist()), tuple(points[row + 1].tolist())
            middle = (*low[:-1], level)
            bends = self._bends(site, similar, (low, middle, high))
            if len(bends) >= _LEAST_BENDS:
                part = np.log(level / low[-1]) / np.log(high[-1] / low[-1])
                line = np.log(seconds[row]) * (1 - part) + np.log(seconds[row + 1]) * part
                new.append(middle)
                values.append(float(np.exp(line + np.median(bends))))
        if not new:
            return axes, seconds, np.ones(len(seconds), dtype=bool)
        every = np.concatenate([points, np.array(new)])
        order = np.lexsort(every.T[::-1])
        measured = np.arange(len(every)) < len(points)
        columns = dict(zip(axes, every[order].T, strict=True))
        return columns, np.concatenate([seconds, values])[order], measured[order]

    @cached_property
    def _levels(self) -> Floats:
        return np.unique(list(self.table.axes.values())[-1])

    def _similar_sites(self, site: tuple[float, ...]) -> list[tuple[float, ...]]:
        """Return the sites similar to one site, the nearest first."""
        every = [other for other in self.table.rows_by_site if other != site]
        if not every:
            return []
        rows, _ = _nearest(self.table.kind, np.array(every), np.array(site), _NUM_LOOKED_AT)
        return [every[row] for row in rows]

    def _bends(
        self, site: tuple[float, ...], similar: list[tuple[float, ...]], points: tuple[Point, Point, Point]
    ) -> list[float]:
        """Return the bends of similar sites between three points, or between points that give them the same work."""
        name = operator_type(self.table.kind).shares_batch
        index = site_names(self.table.kind).index(name) if name else None
        bends: list[float] = []
        for other in similar:
            for share in [1.0] if index is None else [1.0, site[index] / other[index]]:
                low, middle, high = ((*(share * first for first in point[:-1]), point[-1]) for point in points)
                value = bend(self.log_seconds_at(other), low, middle, high)
                if value is not None:
                    bends.append(value)
            if len(bends) >= _NUM_BENDS:
                break
        return bends

    def log_seconds_at(self, site: tuple[float, ...]) -> dict[Point, float]:
        """Return measured point of a site -> log of its seconds."""
        if site not in self._points:
            axes, seconds = self.table.site_rows(site)
            points = map(tuple, np.column_stack(list(axes.values())).tolist())
            self._points[site] = dict(zip(points, np.log(seconds).tolist(), strict=True))
        return self._points[site]

    def between_sites(self, site: tuple[float, ...], op: ops.Op, axes: Mapping[str, Floats]) -> tuple[Floats, Coverage]:
        """Return the seconds at a site that was not measured: its work at its neighbours' measured utilisation."""
        sites = np.array(list(self.table.rows_by_site))
        rows, weights, around = neighbours(op.kind, sites, np.array(site))
        log_seconds = np.log(np.asarray(self.roofline.seconds(_with(op, axes))))
        worst = Coverage.INTERPOLATED if around else Coverage.SCALED
        for row, weight in zip(rows, weights, strict=True):
            neighbour = tuple(sites[row].tolist())
            near = _with(op, site_fields(op.kind, neighbour))
            same_work = _same_work(op.kind, site, neighbour, axes)
            prediction = self.at_site(neighbour, near, same_work)
            expected = np.asarray(self.roofline.seconds(_with(near, same_work)))
            log_seconds = log_seconds + weight * np.log(prediction.seconds / expected)
            if not prediction.inside.all():
                worst = Coverage.SCALED
        return np.exp(log_seconds), worst


CHUNKED = ("prefill_attention", "latent_prefill_attention", "compressed_prefill", "block_sparse_prefill")
"""Kinds whose batches may be chunks of prompts."""


def _chunk_axes(axes: Mapping[str, Floats], rows: NDArray[np.bool_]) -> dict[str, Floats]:
    """Return single chunks over their tokens and one more than the tokens cached before them.

    Over batch and length (`ops.PrefillBatch`) hardly two chunks share a coordinate: on Vidur's table of 4,418 chunks,
    the median error on points left out is 4.0% over those, and 2.3% over these axes.
    """
    batch, length = axes["batch"][rows], axes["num_tokens"][rows]
    chunk = np.round(batch * length, 6)
    return {"chunk": chunk, "cached": np.round((length - chunk) / 2, 6) + 1.0}


def _as_batch(chunks: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the axes of `ops.PrefillBatch` for those of `_chunk_axes`."""
    length = 2 * (chunks["cached"] - 1.0) + chunks["chunk"]
    return {"batch": chunks["chunk"] / length, "num_tokens": length}


def _either(rows: NDArray[np.bool_], here: Interpolated, elsewhere: Interpolated) -> Interpolated:
    """Join two predictions in the order of `rows`."""

    def joined(name: str) -> NDArray[Any]:
        values = np.empty(rows.size, getattr(here, name).dtype)
        values[rows], values[~rows] = getattr(here, name), getattr(elsewhere, name)
        return values

    return Interpolated(joined("seconds"), joined("exact"), joined("inside"))


_NUM_BENDS = 6
_LEAST_BENDS = 3
"""Fewer bends say nothing: each size of a collective switches protocols at its own message (2.4 %, else 3.5 %)."""
_NUM_LOOKED_AT = 16


def _same_work(
    kind: str, site: tuple[float, ...], other: tuple[float, ...], axes: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Return points of another site that give its kernels the work of `axes` at `site`."""
    name = operator_type(kind).shares_batch
    if name is None:
        return dict(axes)
    index = site_names(kind).index(name)
    return {**axes, "batch": axes["batch"] * site[index] / other[index]}


_STRAIGHT = ("experts", "mega_moe")
"""Kinds whose curves are straighter than their closed form: leaving out points inside, the median error of experts is
2.2 % along straight lines and 2.9 % along the form. Others do as well or better with it (prefill 2.7 % to 3.9 %)."""


def neighbours(kind: str, sites: Floats, site: Floats) -> tuple[NDArray[np.intp], Floats, bool]:
    """Return the measured sites that price `site`, their weights, and whether they lie around it.

    A GEMM's (n, k) form a grid: its cell's corners are taken. Other kinds take the nearest few shapes in log space;
    dimensions in which kernels are compiled apart (head size, window) weigh more than those that only add work.
    """
    if kind == "gemm":
        rows, weights = corner_sites(sites, site)
        around = bool(np.all(site >= sites.min(axis=0)) and np.all(site <= sites.max(axis=0)))
        return rows, weights, around
    rows, weights = _nearest(kind, sites, site, 4)
    return rows, weights, False


def _nearest(kind: str, sites: Floats, site: Floats, count: int) -> tuple[NDArray[np.intp], Floats]:
    scales = np.array([KINDS["distances"].get(kind, {}).get(name, 1.0) for name in site_names(kind)])
    positive = np.where(sites <= 0, _ABSENT, sites)
    target = np.where(site <= 0, _ABSENT, site)
    return nearest_sites(positive**scales, target**scales, count)


_ABSENT = 2.0**20
"""Stands for a window of 0, which means none: as far as the longest context."""


def _with(op: ops.Op, dimensions: Mapping[str, Any]) -> ops.Op:
    """Return `op` with other dimensions (`replace`, for a union of operators)."""
    changed: ops.Op = replace(cast(Any, op), **dimensions)
    return changed


def _worst(prediction: Interpolated) -> tuple[Coverage, LeftOut | None]:
    """Return the coverage of the least sure point, and what was lacking there."""
    if prediction.exact.all():
        return Coverage.MEASURED, None
    if prediction.inside.all():
        return Coverage.INTERPOLATED, LeftOut.LEVEL
    return Coverage.SCALED, LeftOut.LAST


def _require_work(op: ops.Op) -> None:
    for name, value in ops.axis_values(op).items():
        if not np.all(np.isfinite(value) & (np.asarray(value) > 0)):
            least = float(np.min(value))
            raise InputError(f"{op.kind}: {name} is {least:g}; an operator needs a positive finite size to be priced")


def _require_counts(op: ops.Op) -> None:
    for work in map(np.asarray, (op.flops, op.num_bytes)):
        if work.dtype.kind not in "fiu" or not np.all(np.isfinite(work) & (work >= 0)):
            raise InputError(f"{op.kind}: its arithmetic or its bytes are below 0 or no number")


def _scalar_or_array(seconds: Floats) -> ops.Size:
    return seconds if seconds.ndim else float(seconds)


OTHER_DEVICE_ERROR = 0.15
"""Relative error of operators measured on another device at this one's rates: what whole runs of A100 PCIe are off in
the median (59 of TensorRT-LLM); H200 NVL's are off by 0.05, H100 NVL's and PCIe's by 0.11 (MLPerf Inference)."""

STAND_IN_ERROR = 0.12
"""Relative error of a measured format that stands in for another.

Where the tables of H100, H200, B200 and B300 have both, fp8 and fp8_block price each other's products and experts, and
int4 and mxfp4 each other's experts, with a median error of 0.10: 0.05 to 0.32 by engine and device, but 0.35 to 0.75
for SGLang's experts on Hopper, where one kernel is Triton's and the other Marlin.
"""


KEPT_ESTIMATES = 2000
"""Operators whose prices an estimator keeps, up to 50 KB each."""


@dataclass(frozen=True)
class TableEstimator:
    """Estimator that prices operators from measured tables, and from the roofline where there is none."""

    table_for: TableSource
    roofline: Roofline
    _models: dict[int, TableModel] = field(default_factory=dict)
    _answers: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)
    own: Roofline | None = None
    """Of a device with other rates than `roofline`'s, which was measured: times change as on the two rooflines."""

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op` with coverage and source. InputError where a size along an axis is not positive
        and finite, or a table cannot be read."""
        estimate = self._as_measured(op)
        if self.own is None or estimate.coverage is Coverage.ROOFLINE:
            return estimate if self.own is None else RooflineEstimator(self.own).estimate(op)
        longer = self.own.seconds(op) / self.roofline.seconds(op)
        if np.all(longer == 1.0):
            return estimate
        seconds = _scalar_or_array(np.asarray(estimate.seconds) * longer)
        coverage = max(estimate.coverage, Coverage.SCALED, key=COVERAGES.index)
        source = f"{estimate.source} at {self.own.device.name}'s rates"
        error = max(estimate.relative_error, OTHER_DEVICE_ERROR)
        return replace(estimate, seconds=seconds, coverage=coverage, source=source, relative_error=error)

    def _as_measured(self, op: ops.Op) -> Estimate:
        """Price `op`, or repeat what it was priced at: a run is compared with others of nearly the same operators."""
        sizes = ((each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in vars(op).values())
        key = type(op), *sizes
        if key not in self._answers:
            answer = self._look_up(op)
            if isinstance(answer.seconds, np.ndarray):
                answer.seconds.flags.writeable = False
            if len(self._answers) >= KEPT_ESTIMATES:
                self._answers.clear()
            self._answers[key] = answer
        return self._answers[key]

    def _look_up(self, op: ops.Op) -> Estimate:
        _require_work(op)
        computed, remark = _computed(op, self.roofline)
        table = self.table_for(computed)
        if table is None:
            return self._standing_in(computed, remark) or RooflineEstimator(self.roofline).estimate(op)
        op = canonical(computed, table)
        if id(table) not in self._models:
            self._models[id(table)] = TableModel(table, self.roofline)
        seconds, coverage, lacking = self._models[id(table)].estimate(op)
        shaped = seconds.reshape(np.broadcast_shapes(*map(np.shape, ops.axis_values(op).values())))
        source, least_s = table.source + remark, least_seconds(op, self.roofline.device)
        if lacking is LeftOut.SHAPE and getattr(op, "window_tokens", False):  # no slower than without its window
            shaped = np.minimum(shaped, self._as_measured(_with(op, {"window_tokens": 0})).seconds)
        if np.any(shaped < least_s):
            shaped, coverage = np.maximum(shaped, least_s), max(coverage, Coverage.SCALED, key=COVERAGES.index)
            source += ", no faster than memory"
        error = expected_error(op.kind, lacking)
        return Estimate(_scalar_or_array(shaped), coverage, source, error, table.longest_share)

    def _standing_in(self, op: ops.Op, remark: str) -> Estimate | None:
        """Return the seconds of a format's operator from a measured format of the same arithmetic (`stand_ins`); None
        where there is none."""
        other = KINDS["stand_ins"].get(op.kind, {}).get(op.variant)
        near = None if other is None else _with(op, {"format": Format(other)})
        if near is None or self.table_for(near) is None:
            return None
        estimate = self._as_measured(near)
        seconds = np.asarray(estimate.seconds) * self.roofline.seconds(op) / self.roofline.seconds(near)
        source = f"{estimate.source}, whose {other} stands in for {op.variant}{remark}"
        error = max(estimate.relative_error, STAND_IN_ERROR)
        return Estimate(
            _scalar_or_array(seconds), max(estimate.coverage, Coverage.SCALED, key=COVERAGES.index), source, error
        )
