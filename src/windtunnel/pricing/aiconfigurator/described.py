"""Tables of kinds that one reader serves, as `described.yaml` describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import product
from pathlib import Path

import numpy as np

from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import KERNELS, Collection, Place, Rows
from windtunnel.pricing.aiconfigurator.gemms import gemm_prices, projection_seconds
from windtunnel.pricing.table import Floats, MeasurementTable, table_of
from windtunnel.schema import Schema
from windtunnel.units import version_key


class DescribedTable(Schema, frozen=True):
    """Tables that hold a kind of operator's measurements: `<family>/.../<table>.parquet`, whose rows are joined."""

    family: str
    tables: tuple[str, ...]
    columns: tuple[str, ...]
    """Numbers that tell its points apart; a column of an operator's dimension may have its name."""
    dimensions: dict[str, str]
    """Other dimensions of the operator -> a column, or one of `_COMPUTED`."""
    words: dict[str, dict[str, tuple[str, ...]]]
    """Column of words -> variant of the operator -> the words of its rows, any of them."""
    models: dict[str, dict[str, float]] = {}
    """Name in the column `model` -> further columns: dimensions of that model which the table leaves out."""
    repeats: str | None = None
    """Column of the executions that a row holds; None: one."""
    sums_kernels: bool = True
    """Whether an execution runs every kernel of the table; else each point was measured with the one that it runs."""
    kernels: tuple[tuple[str, ...], ...] = ()
    """Groups of kernels any of which computes the operator, each run whole; the fastest counts. Empty: see above."""
    since: dict[str, dict[str, dict[str, str]]] = {}
    """Kernel -> engine -> architecture -> the engine's first version that runs it: older ones take the next place."""
    projections: Format | None = None
    """Format of the operator's `projections`, which were measured with it and which a step launches apart."""


_TABLES = catalog.entry(Path(__file__).with_name("described.yaml"), dict[str, DescribedTable])

_COMPUTED: Mapping[str, Callable[[Mapping[str, Floats]], Floats]] = {
    # As in `operators.PrefillBatch`, of `isl` new tokens after `step` cached ones.
    "chunk_tokens": lambda of: of["isl"] + 2 * of["step"],
    "chunks": lambda of: of["batch_size"] * of["isl"] / (of["isl"] + 2 * of["step"]),
    "context_tokens": lambda of: of["step"] + 1,
    # Every layer of DeepSeek-V4 compresses for itself, and chooses of what joins four tokens.
    "always": lambda of: np.ones_like(of["batch_size"]),
    "one_of_four": lambda of: np.equal(of["compress_ratio"], 4).astype(np.float64),
    "groups_of_rank": lambda of: of["all_groups"] / of["tp_size"],
    "shared_heads": lambda of: np.maximum(of["num_heads"] // of["heads_per_kv_head"], 1),
    # x of every head, B and C of every group.
    "channels": lambda of: of["nheads"] * of["head_dim"] + 2 * of["n_groups"] * of["d_state"],
}


def _with_dimensions(table: DescribedTable, columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the columns, and the dimensions of the operator that are computed from them."""
    every = {**columns}
    for name, source in table.dimensions.items():
        every[name] = _COMPUTED[source](columns) if source in _COMPUTED else columns[source]
    return every


def described_table(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Return the described table of an operator's kind, of the nearest version that has one; None without one."""
    table = _TABLES.get(op.kind)
    if table is None or any(op.variant not in by_variant for by_variant in table.words.values()):
        return None
    words = {name: by_variant[op.variant] for name, by_variant in table.words.items()}
    for place in collection.places(table.family, table.tables[0]):
        parts = list(_parts(place, table, words))
        if parts and not any(_came_later(collection, table, place, part) for part in parts):
            return _measurements(collection, op, reduce(Rows.joined, parts), table)
    return None


def _came_later(collection: Collection, table: DescribedTable, place: Place, rows: Rows) -> bool:
    """Whether a kernel of a place's rows came to its engine after the version that is asked."""
    architecture = collection.roofline.device.architecture
    first = (table.since.get(str(name), {}).get(place.engine, {}).get(architecture) for name in rows.kernel_names)
    older = place.engine == collection.engine
    return any(older and since and version_key(collection.version) < version_key(since) for since in first)


def _parts(place: Place, table: DescribedTable, words: Mapping[str, tuple[str, ...]]) -> Iterator[Rows]:
    """Yield the rows of each of a place's tables and models."""
    names = [name for name in table.tables if (place.folder / f"{name}.parquet").is_file()]
    for name, chosen in product(names, product(*words.values())):
        for model, dimensions in (table.models or {"": {}}).items():
            asked = dict(zip(words, chosen, strict=True)) | ({"model": model} if model else {})
            rows = place.read_rows(name, table.columns, asked)
            if rows is not None:
                yield rows.replaced(**{key: np.full(len(rows), value) for key, value in dimensions.items()})


def _measurements(collection: Collection, op: ops.Op, rows: Rows, table: DescribedTable) -> MeasurementTable | None:
    """Return one row per point: the sum over kernels (convolution and delta rule), each the median of its repeats."""
    label = collection.label(table.family, rows)
    if "chunks" in table.dimensions.values():  # what `operators.PrefillBatch` can express
        rows = rows.where((rows["batch_size"] == 1) | (rows["step"] == 0))
    if table.repeats is not None:
        rows = rows.replaced(latency=rows.latency / rows[table.repeats])
    names = [name for name in rows.columns if name not in ("latency", "kernel")]
    if table.projections is not None:
        columns = _with_dimensions(table, {name: rows[name] for name in names})
        price = gemm_prices(collection.at(rows.place))
        sites = {name: columns[name] for name in columns.keys() - {*op.axes, "batch_size", "isl", "step"}}
        taken_s = projection_seconds(rows, sites, op.projections, table.projections, price)
        if taken_s is None:
            return None
        left_s = np.maximum(rows.seconds - taken_s, KERNELS.sparse_least_share * rows.seconds)
        rows, label = rows.replaced(latency=left_s * 1e3), f"{label} less its projections"
    if not table.sums_kernels:
        rows = rows.replaced(kernel=np.zeros_like(rows["kernel"]))
    unique, codes = np.unique(np.column_stack([rows[name] for name in names]), axis=0, return_inverse=True)
    total, complete = _fastest_group(rows, codes.ravel(), len(unique), table.kernels)
    columns = _with_dimensions(table, dict(zip(names, unique[complete].T, strict=True)))
    return table_of(op, total[complete], label, **{"decode": getattr(op, "decode", 0.0), **columns})


def _fastest_group(
    rows: Rows, codes: np.ndarray, num_points: int, groups: tuple[tuple[str, ...], ...]
) -> tuple[Floats, np.ndarray]:
    """Return the seconds of each point in the fastest group of kernels, and a mask of points that have one."""
    if not groups:
        return _summed_kernels(rows, codes, num_points)
    fastest = np.full(num_points, np.inf)
    for group in groups:
        here = rows.named(group.__contains__)
        if len(np.unique(rows["kernel"][here])) == len(group):
            total, complete = _summed_kernels(rows.where(here), codes[here], num_points)
            fastest[complete] = np.minimum(fastest, total)[complete]
    return fastest, np.isfinite(fastest)


def _summed_kernels(rows: Rows, codes: np.ndarray, num_points: int) -> tuple[Floats, np.ndarray]:
    """Return the seconds of each point, and a mask of points that have every kernel."""
    total, complete = np.zeros(num_points), np.ones(num_points, dtype=bool)
    for kernel in np.unique(rows["kernel"]):
        here = rows["kernel"] == kernel
        order = np.lexsort((rows.seconds[here], codes[here]))
        code, took = codes[here][order], rows.seconds[here][order]
        present, starts, counts = np.unique(code, return_index=True, return_counts=True)
        total[present] += took[starts + counts // 2]
        complete &= np.isin(np.arange(num_points), present)
    return total, complete
