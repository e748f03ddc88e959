"""Regressions over measured tables, chosen by cross-validation and lowered to tables again.

A fitted regression is evaluated at the measured points and at the crossings of their coordinates, and becomes a table,
which is read like every other (`interpolate`): between points along the roofline's shape, beyond them at the
utilisation of the last. So no regression extrapolates on its own (a forest is flat there),
the simulator needs no scikit-learn, and the file on disk is a small Parquet file and never a pickle.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.disk_cache import home
from windtunnel.errors import InputError, check_known
from windtunnel.model import operators as ops
from windtunnel.pricing.choices import REGRESSIONS, estimators
from windtunnel.pricing.estimator import CHUNKED, TableModel
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, grouped, read_tables, write_tables

Ints = NDArray[np.intp]
FOLDS = 5
MOST_CHOICE_SITES = 3
"""Shapes of a table that `auto` looks at, spread evenly over the sorted shapes: all shapes take five times as long
for the same choice, or one within 0.1 points."""
SEED = 0


@dataclass(frozen=True)
class MethodScore:
    """Errors of one regression on points that it was not shown."""

    method: str
    mean_error: float
    """Mean |predicted / measured - 1| (MAPE)."""
    median_error: float


def fitted(table: MeasurementTable, roofline: Roofline, method: str) -> MeasurementTable:
    """Return the table of a regression, at the measured points and between them (`lattice`).

    `method` is one of `choices.estimators()`; `auto` chooses by cross-validation. InputError where there is no such
    method, or scikit-learn is needed and missing.
    """
    check_known(method, estimators(), f"there is no estimator {method!r}")
    if method in REGRESSIONS:
        REGRESSIONS.get(method)  # refuses one that has the name of another
    if method == "auto":
        method = scores(few_sites(table), roofline)[0].method
    if method == "interpolation":
        return table
    note = f"{table.source}, {method.replace('_', ' ')}"
    if method == "monotone":
        return monotone(replace(table, source=note, statistics={}, is_fitted=True))
    nodes = lattice(table)
    seconds = _predicted(table, roofline, method, nodes)
    lowered = replace(nodes, seconds=seconds, source=note, is_fitted=True)
    return monotone(lowered) if REGRESSIONS.get(method).RISES else lowered


def check_methods(names: Sequence[str] | None) -> list[str]:
    """Return the methods to compare, all but `auto` where none are named; InputError where there is no such method."""
    known = [name for name in estimators() if name != "auto"]
    for name in names or ():
        check_known(name, known, f"there is no estimator {name!r}")
    return list(names or known)


def scores(
    table: MeasurementTable, roofline: Roofline, methods: Sequence[str] | None = None, folds: int = FOLDS
) -> list[MethodScore]:
    """Return every method's error on points left out, the best first.

    Points are left out at random, one fold after another, within each site; a fit sees the others and is then read as
    the simulator reads it. Repeated points are left out together. InputError where scikit-learn is needed and missing.
    """
    results = [_score(table, roofline, method, folds) for method in check_methods(methods)]
    return sorted(results, key=lambda score: score.median_error)


def _score(table: MeasurementTable, roofline: Roofline, method: str, folds: int) -> MethodScore:
    fold = fold_numbers(table, folds)
    errors = []
    for number in range(folds):
        hidden = fold == number
        if not hidden.any() or hidden.all():
            continue
        shown = fitted(table.take(~hidden), roofline, method)
        errors.append(np.abs(predict(shown, roofline, table.take(hidden)) / table.seconds[hidden] - 1))
    every = np.concatenate(errors) if errors else np.array([np.nan])
    return MethodScore(method, float(every.mean()), float(np.median(every)))


def few_sites(table: MeasurementTable) -> MeasurementTable:
    """Return the rows of at most `MOST_CHOICE_SITES` sites."""
    sites = list(table.rows_by_site.values())
    if len(sites) <= MOST_CHOICE_SITES:
        return table
    chosen = np.linspace(0, len(sites) - 1, MOST_CHOICE_SITES).round().astype(int)
    return table.take(np.concatenate([sites[number] for number in chosen]))


def fold_numbers(table: MeasurementTable, folds: int) -> Ints:
    """Return the fold of every row, at random; rows of one site and point share a fold."""
    columns = np.column_stack([*table.sites.values(), *table.axes.values()])
    _, numbers = np.unique(columns, axis=0, return_inverse=True)
    points = numbers.ravel()
    return np.asarray(np.random.default_rng(SEED).permutation(int(points.max()) + 1)[points] % folds, np.intp)


def predict(shown: MeasurementTable, roofline: Roofline, points: MeasurementTable) -> Floats:
    """Return the seconds at the rows of `points`, read from the table `shown`."""
    model = TableModel(shown, roofline)
    seconds = np.empty(len(points))
    for site, rows in points.rows_by_site.items():
        axes = {name: column[rows] for name, column in points.axes.items()}
        seconds[rows] = model.estimate(points.operator(site, axes))[0]
    return seconds


def _predicted(table: MeasurementTable, roofline: Roofline, method: str, points: MeasurementTable) -> Floats:
    """Return the seconds of a regression of `table` at the rows of `points`; each site has its own fit, as in Vidur."""
    seconds = np.empty(len(points))
    for site, rows in points.rows_by_site.items():
        shown = table.rows_by_site[site]
        if len(shown) < _LEAST_ROWS:
            seconds[rows] = table.seconds[rows]
            continue
        known = features(table, shown), _roofline_s(table, roofline, site, shown), table.seconds[shown]
        model = REGRESSIONS.call(method, "fit", Callable, *known)
        answer = np.asarray(model(features(points, rows), _roofline_s(points, roofline, site, rows)))
        if answer.shape != rows.shape or answer.dtype.kind != "f" or not (np.isfinite(answer) & (answer > 0)).all():
            hint = f"its function takes features and roofline seconds [{len(rows)}], and returns seconds [{len(rows)}]"
            raise InputError(f"the estimator {method!r} answered with {answer!r:.60}, which are no times", hint)
        seconds[rows] = answer
    return seconds


_LEAST_ROWS = 4
"""Fewer points of a site are left as they are."""


def lattice(table: MeasurementTable) -> MeasurementTable:
    """Return the points at which a fit is evaluated, with seconds of 1.

    They are the measured points and, with two axes, the crossings of their coordinates at a site, within what was
    measured; with one axis, the coordinates of other sites.
    """
    sites: list[Floats] = []
    points: list[Floats] = []
    levels = np.unique(next(iter(table.axes.values()))) if len(table.axes) == 1 else np.zeros(0)
    for site, rows in table.rows_by_site.items():
        measured = np.unique(np.column_stack([column[rows] for column in table.axes.values()]), axis=0)
        new = _crossings(table, rows, levels)
        is_dense = 0 < len(new) <= _MOST_CROSSINGS * len(measured)
        every = np.unique(np.concatenate([measured, new]), axis=0) if is_dense else measured
        points.append(every)
        sites.append(np.tile(np.array(site), (len(every), 1)))
    point_rows, site_rows = np.concatenate(points), np.concatenate(sites)
    return MeasurementTable(
        table.kind,
        dict(zip(table.sites, site_rows.T, strict=True)),
        dict(zip(table.axes, point_rows.T, strict=True)),
        np.ones(len(point_rows)),
        table.source,
        table.words,
    )


_MOST_CROSSINGS = 4
"""Most crossings per point: with more, points are too scattered for their crossings to mean anything."""


def _crossings(table: MeasurementTable, rows: Ints, levels: Floats) -> Floats:
    """Return crossings along the axes of `table`, one per row."""
    if len(table.axes) == 1:
        (points,) = (column[rows] for column in table.axes.values())
        return np.asarray(levels[(levels >= points.min()) & (levels <= points.max())][:, None], np.float64)
    x = features(table, rows)
    x = x[x[:, 0] == 1.0, 1:] if x.shape[1] == 3 else x
    if not len(x):
        return np.zeros((0, 2))
    first, second = (grid.ravel() for grid in np.meshgrid(np.unique(x[:, 0]), np.unique(x[:, 1]), indexing="ij"))
    if table.kind not in CHUNKED:
        return np.column_stack([first, second])
    within = first + second <= x.sum(axis=1).max()
    length = 2 * second[within] + first[within]
    return np.column_stack([first[within] / length, length])


def features(table: MeasurementTable, rows: Ints) -> Floats:
    """Return the features of each row: its axes; for prefill, prompts, tokens of each and tokens cached before them."""
    axes = {name: column[rows] for name, column in table.axes.items()}
    if table.kind not in CHUNKED:
        return np.column_stack(list(axes.values()))
    batch, length = axes["batch"], axes["num_tokens"]
    prompts = np.maximum(batch, 1.0)
    cached = np.asarray(ops.prefill_context_tokens(batch, length)) - batch * length
    return np.column_stack([prompts, batch * length / prompts, np.round(cached, 6)])


def _roofline_s(table: MeasurementTable, roofline: Roofline, site: tuple[float, ...], rows: Ints) -> Floats:
    op: ops.Op = table.operator(site, {name: column[rows] for name, column in table.axes.items()})
    return np.broadcast_to(np.asarray(roofline.seconds(op), np.float64), len(rows))


def monotone(table: MeasurementTable) -> MeasurementTable:
    """Return the table with the nearest times that never fall along an axis of a site, by pooling neighbours.

    More tokens are not less work: a measured curve falls by noise, or where padding would reach the faster kernel too.
    Surfaces are pooled along one axis after the other until both rise.
    """
    seconds = table.seconds.copy()
    for rows in table.rows_by_site.values():
        seconds[rows] = np.exp(_rising(list(features(table, rows).T), np.log(seconds[rows])))
    return replace(table, seconds=seconds)


_MOST_PASSES = 20


def _rising(axes: list[Floats], values: Floats) -> Floats:
    lines = [_lines(axes, axis) for axis in range(len(axes))]
    for _ in range(_MOST_PASSES):
        before = values
        for along in lines:
            values = values.copy()
            for rows in along:
                values[rows] = pooled(values[rows])
        if np.array_equal(before, values):
            return values
    for along in lines:  # what pooling in turn has not settled is lifted
        for rows in along:
            values[rows] = np.maximum.accumulate(values[rows])
    return values


def _lines(axes: list[Floats], axis: int) -> list[Ints]:
    """Return the rows of every line along `axis`, sorted: all other coordinates are equal."""
    others = [column for index, column in enumerate(axes) if index != axis]
    if not others:
        return [np.argsort(axes[axis], kind="stable")]
    return [rows for rows in grouped(others, [axes[axis]]) if len(rows) > 1]


def pooled(values: Floats) -> Floats:
    """Return the rising sequence nearest to `values` in squares (pool adjacent violators; Ayer et al. 1955)."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(values).x)


_VERSION = "2"
"""Version of the methods' results; it changes with them."""


def cached(table: MeasurementTable, roofline: Roofline, method: str) -> MeasurementTable:
    """Return `fitted`, kept on disk under a hash of everything that decides it: rows, device, method and libraries."""
    path = cache_folder() / f"{_digest(table, roofline, method)}.parquet"
    if path.is_file():
        return replace(read_tables(path)[0], is_fitted=method != "interpolation")
    regressed = fitted(table, roofline, method)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tables(path, [regressed], {"method": method})
    return regressed


def cache_folder() -> Path:
    """Return the folder of fits, below the user's cache folder."""
    return home() / "fits"


def _digest(table: MeasurementTable, roofline: Roofline, method: str) -> str:
    digest = hashlib.sha256(repr((_VERSION, table.kind, sorted(table.words.items()), table.source, method)).encode())
    if method in REGRESSIONS.names():
        digest.update(inspect.getsource(REGRESSIONS.get(method)).encode())
    digest.update(repr((roofline.device, roofline.node, np.__version__)).encode())
    for name, column in sorted({**table.sites, **table.axes, "seconds": table.seconds}.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:32]
