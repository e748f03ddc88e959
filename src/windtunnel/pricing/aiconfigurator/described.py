"""Tables that an operator's own class describes (`model.operators.MeasuredTable`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.collection import KERNELS, Collection, Place, Rows, joined, read_rows
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices, projection_seconds
from windtunnel.pricing.table import Floats, MeasurementTable, table_of

_PHASES = {"decode": "generation", "prefill": "context"}


def described_table(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Return the table that an operator's class names, of the nearest version that has one; None without one."""
    table = op.measured
    if table is None:
        return None
    words = {**table.words, **({"phase": (_PHASES[op.variant],)} if hasattr(op, "decode") else {})}
    for place in collection.places(table.family, table.names[0]):
        rows = _joined_rows(place, table, words)
        if rows is not None:
            return _measurements(collection, op, rows, table)
    return None


def _joined_rows(place: Place, table: ops.MeasuredTable, words: Mapping[str, tuple[str, ...]]) -> Rows | None:
    """Return the rows of a place's tables and models together, or None where it has none."""
    every: Rows | None = None
    for rows in _parts(place, table, words):
        every = rows if every is None else joined(every, rows)
    return every if every is None or table.is_point is None else every.take(table.is_point(every.columns) != 0)


def _parts(place: Place, table: ops.MeasuredTable, words: Mapping[str, tuple[str, ...]]) -> Iterator[Rows]:
    names = [name for name in table.names if (place.folder / f"{name}.parquet").is_file()]
    for name, chosen in product(names, product(*words.values())):
        for model, dimensions in (table.models or {"": {}}).items():
            asked = dict(zip(words, chosen, strict=True)) | ({"model": model} if model else {})
            rows = read_rows(place, name, table.columns, asked)
            if rows is not None:
                given = {key: np.full(len(rows), float(value)) for key, value in dimensions.items()}
                yield replace(rows, columns={**rows.columns, **given})


def _measurements(collection: Collection, op: ops.Op, rows: Rows, table: ops.MeasuredTable) -> MeasurementTable | None:
    """Return one row per point: the sum over kernels (convolution and delta rule), each the median of its repeats."""
    label = collection.label(table.family, rows)
    if table.repeats is not None:
        rows = rows.with_latency(rows.latency / table.repeats(rows.columns))
    if table.projections is not None:
        sites = {name: value(rows.columns) for name, value in table.sites.items()}
        price = gemm_prices(collection.at(rows.place))
        taken_s = projection_seconds(rows, sites, table.projections, table.projections_format, price)
        if taken_s is None:
            return None
        left_s = np.maximum(rows.seconds - taken_s, KERNELS.sparse_least_share * rows.seconds)
        rows, label = rows.with_latency(left_s * 1e3), f"{label} less its projections"
    if not table.sums_kernels:
        rows = replace(rows, kernel_codes=np.zeros_like(rows.kernel_codes))
    names = [name for name in rows.columns if name != "latency"]
    points = np.column_stack([rows.columns[name] for name in names])
    unique, codes = np.unique(points, axis=0, return_inverse=True)
    total, complete = _fastest_group(rows, codes.ravel(), len(unique), table.kernels)
    column = dict(zip(names, unique[complete].T, strict=True))
    dimensions = {name: value(column) for name, value in (*table.sites.items(), *table.axes.items())}
    return table_of(op, total[complete], label, decode=getattr(op, "decode", 0.0), **dimensions)


def _fastest_group(
    rows: Rows, codes: np.ndarray, num_points: int, groups: tuple[tuple[str, ...], ...]
) -> tuple[Floats, np.ndarray]:
    """Return the seconds of each point in the fastest group of kernels, and a mask of points that have one."""
    if not groups:
        return _summed_kernels(rows, codes, num_points)
    fastest = np.full(num_points, np.inf)
    for group in groups:
        here = rows.named(group.__contains__)
        if len(np.unique(rows.kernel_codes[here])) == len(group):
            total, complete = _summed_kernels(rows.take(here), codes[here], num_points)
            fastest[complete] = np.minimum(fastest, total)[complete]
    return fastest, np.isfinite(fastest)


def _summed_kernels(rows: Rows, codes: np.ndarray, num_points: int) -> tuple[Floats, np.ndarray]:
    """Return the seconds of each point, and a mask of points that have every kernel."""
    total, complete = np.zeros(num_points), np.ones(num_points, dtype=bool)
    for kernel in np.unique(rows.kernel_codes):
        here = rows.kernel_codes == kernel
        order = np.lexsort((rows.seconds[here], codes[here]))
        code, took = codes[here][order], rows.seconds[here][order]
        present, starts, counts = np.unique(code, return_index=True, return_counts=True)
        total[present] += took[starts + counts // 2]
        complete &= np.isin(np.arange(num_points), present)
    return total, complete
