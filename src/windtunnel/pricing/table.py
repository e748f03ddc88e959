"""Tables of measured operators, between a profiler's file and an estimate.

A table holds one kind of operator in one number format. Its rows are grouped into *sites*: the exact discrete shape (a
GEMM's n and k, an attention's heads) at which a curve or surface was measured along the operator's axes
(`model.operators`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, check_known, did_you_mean, missing_file
from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.model.shape import operator_types

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]

SCHEMA_VERSION = "1"

_TEXT_FIELDS = ("format", "kv_format", "name", "op")

STATISTICS = ("mean_s", "min_s", "max_s", "std_s", "num_samples", "num_outliers")
"""Statistics that a profiler may keep beside `seconds`, the median of samples; all but the last exclude outliers."""


def operator_type(kind: str) -> type[ops.Op]:
    """Return the class of the operators that files call `kind`."""
    return operator_types()[kind]


def site_names(kind: str) -> tuple[str, ...]:
    """Return the numeric dimensions that tell one site of `kind` from another."""
    return _site_names(operator_type(kind))


@cache
def _site_names(operator: Hashable) -> tuple[str, ...]:
    assert isinstance(operator, type)
    assert issubclass(operator, ops.Op)
    return tuple(f.name for f in fields(operator) if f.name not in operator.axes and f.name not in _TEXT_FIELDS)


def text_names(kind: str) -> tuple[str, ...]:
    """Return the dimensions of `kind` that are words (formats, a collective's name); a table has one word each."""
    return tuple(f.name for f in fields(operator_type(kind)) if f.name in _TEXT_FIELDS)


def grouped(keys: Sequence[NDArray[Any]], along: Sequence[Floats] = ()) -> list[NDArray[np.intp]]:
    """Return the rows of each group with equal `keys`, sorted by `along`; groups and columns in lexical order."""
    order = np.lexsort([*keys, *along][::-1])
    sorted_keys = np.column_stack([key[order] for key in keys])
    starts = np.flatnonzero(np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)) + 1
    return np.split(order, starts) if len(order) else []


@dataclass(frozen=True)
class MeasurementTable:
    """Seconds of one kind of operator in one format, measured on one device. InputError for a column of another length,
    or a time that is not a positive finite number.

    Args:
        kind: kind of operator (`gemm`, `decode_attention`, ...).
        sites: site dimension -> a number per row, in the order of `site_names(kind)`.
        axes: axis -> a number per row.
        seconds: time of one execution.
        source: a short name for people: device, engine, version, kernel.
        words: the table's words (`format`, `kv_format`, `op`).
        statistics: statistics of each row's samples: all of `STATISTICS`, or none.
        is_fitted: the seconds are a regression's, so that no row is a measurement; not kept in files.
        steps: site -> where along the last axis its engine begins to call another kernel; not kept in files.
        longest_share: of a kernel of decode attention that gives every request as many blocks, so that it ends with the
            longest one: what that one alone takes of the time of as many as it. 0.0 of one that balances unequal
            requests; not kept in files.
    """

    kind: str
    sites: Mapping[str, Floats]
    axes: Mapping[str, Floats]
    seconds: Floats
    source: str
    words: Mapping[str, str]
    statistics: Mapping[str, Floats] = field(default_factory=dict)
    is_fitted: bool = False
    steps: Mapping[tuple[float, ...], tuple[float, ...]] = field(default_factory=dict)
    longest_share: float = 0.0

    def __post_init__(self) -> None:
        for name, column in (*self.sites.items(), *self.axes.items(), *self.statistics.items()):
            if len(column) != len(self.seconds):
                raise InputError(
                    f"{self.source}: column {name} has {len(column)} rows, seconds has {len(self.seconds)}"
                )
        bad = ~(np.isfinite(self.seconds) & (self.seconds > 0))
        if bad.any():
            row = int(np.argmax(bad))
            raise InputError(f"{self.source}: row {row} took {self.seconds[row]} s; a positive finite time is needed")

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def key(self) -> tuple[str, ...]:
        """Kind and words, by which tables of one source are told apart."""
        return (self.kind, *self.words.values())

    @cached_property
    def rows_by_site(self) -> dict[tuple[float, ...], NDArray[np.intp]]:
        """Rows of each site, sorted along the axes."""
        groups = grouped(list(self.sites.values()), list(self.axes.values()))
        first = np.array([rows[0] for rows in groups], dtype=np.intp)
        keys = np.column_stack([column[first] for column in self.sites.values()])
        return dict(zip(map(tuple, keys.tolist()), groups, strict=True))

    def site_rows(self, site: tuple[float, ...]) -> tuple[dict[str, Floats], Floats]:
        """Return axes and seconds of one site, sorted, with repeated points replaced by their median."""
        rows = self.rows_by_site[site]
        axes = {name: column[rows] for name, column in self.axes.items()}
        return _without_repeats(axes, self.seconds[rows])

    def take(self, rows: NDArray[Any]) -> MeasurementTable:
        """Return the table with only `rows` (a mask or indices)."""
        parts = self.sites, self.axes, self.statistics
        sites, axes, statistics = ({name: column[rows] for name, column in part.items()} for part in parts)
        return replace(self, sites=sites, axes=axes, seconds=self.seconds[rows], statistics=statistics)

    def operator(self, site: tuple[float, ...], axes: Mapping[str, Any]) -> ops.Op:
        """Return the operator at `site`, with arrays along its axes."""
        words = {name: Format(word) if name in ("format", "kv_format") else word for name, word in self.words.items()}
        operator: ops.Op = operator_type(self.kind)(**site_fields(self.kind, site), **axes, **words)
        return operator


def site_fields(kind: str, site: tuple[float, ...]) -> dict[str, Any]:
    """Return the dimensions of a site as an operator has them: flags and whole numbers."""
    flags = {f.name for f in fields(operator_type(kind)) if f.type in (bool, "bool")}
    return {
        name: bool(value) if name in flags else int(value) if float(value).is_integer() else value
        for name, value in zip(site_names(kind), site, strict=True)
    }


def _without_repeats(axes: dict[str, Floats], seconds: Floats) -> tuple[dict[str, Floats], Floats]:
    points = np.column_stack(list(axes.values()))
    new = np.append(True, np.any(points[1:] != points[:-1], axis=1))
    if new.all():
        return axes, seconds
    groups = np.split(seconds, np.flatnonzero(new)[1:])
    return {name: column[new] for name, column in axes.items()}, np.array([np.median(group) for group in groups])


Points = tuple[ops.Op, Floats, Mapping[str, Floats]]
"""An operator with numbers or arrays along its axes, its seconds [n] (NaN: not measured), and their statistics."""


def tables_from(points: Iterable[Points], source: str) -> list[MeasurementTable]:
    """Tables of measured operators, one for each kind and words; rows that were not measured are left out.

    Statistics are kept where all operators of a table have them.
    """
    return merged([_measured(*point, source) for point in points])


def _measured(op: ops.Op, seconds: Floats, statistics: Mapping[str, Floats], source: str) -> MeasurementTable:
    known = np.isfinite(seconds)
    names = (*site_names(op.kind), *op.axes)
    dimensions = {name: np.broadcast_to(getattr(op, name), seconds.shape)[known] for name in names}
    kept = {name: statistics[name][known] for name in STATISTICS} if set(STATISTICS) <= set(statistics) else {}
    return replace(table_of(op, seconds[known], source, **dimensions), statistics=kept)


def table_of(op: ops.Op, seconds: Floats, source: str, /, **dimensions: ops.Size) -> MeasurementTable:
    """Return a table of the kind and words of `op`; `dimensions` have a number for each row, or one for all."""
    columns = {name: np.full(len(seconds), values, np.float64) for name, values in dimensions.items()}
    sites, axes = ({name: columns[name] for name in names} for names in (site_names(op.kind), op.axes))
    return MeasurementTable(op.kind, sites, axes, seconds, source, words_of(op))


def words_of(op: ops.Op) -> dict[str, str]:
    """Return the words of the table that `op` belongs to."""
    return {name: str(getattr(op, name)) for name in text_names(op.kind)}


def merged(tables: list[MeasurementTable]) -> list[MeasurementTable]:
    """Join tables of the same kind and words; statistics are kept where all tables have them."""
    groups: dict[tuple[str, ...], list[MeasurementTable]] = {}
    for table in tables:
        groups.setdefault(table.key, []).append(table)
    return [parts[0] if len(parts) == 1 else _joined(parts) for _, parts in sorted(groups.items())]


def _joined(parts: list[MeasurementTable]) -> MeasurementTable:
    first = parts[0]

    def joined(columns: list[Mapping[str, Floats]]) -> dict[str, Floats]:
        return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}

    statistics = joined([part.statistics for part in parts]) if all(part.statistics for part in parts) else {}
    return MeasurementTable(
        first.kind,
        joined([part.sites for part in parts]),
        joined([part.axes for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        " and ".join(dict.fromkeys(part.source for part in parts)),
        first.words,
        statistics,
    )


def site_of(op: ops.Op) -> tuple[float, ...]:
    """Return the numeric site of `op`: its key in a table of its words."""
    return tuple(float(getattr(op, name)) for name in _site_names(type(op)))


def write_tables(path: Path, tables: list[MeasurementTable], provenance: Mapping[str, str]) -> None:
    """Write tables of one kind to one Parquet file: words, sites, axes, `seconds`, `source`; as metadata provenance:
    device, engine, version, method and time. The file is replaced only when the whole was written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = tables[0].kind
    kept = STATISTICS if any(table.statistics for table in tables) else ()
    parts = [pa.table(_columns_of(table, kept)) for table in tables]
    metadata = {"windtunnel.schema": SCHEMA_VERSION, "windtunnel.kind": kind}
    metadata |= {f"windtunnel.{key}": value for key, value in provenance.items()}
    partial = path.with_suffix(".partial")
    pq.write_table(pa.concat_tables(parts).replace_schema_metadata(metadata), partial)
    partial.replace(path)


def _columns_of(table: MeasurementTable, kept: tuple[str, ...]) -> dict[str, Any]:
    words = {name: [word] * len(table) for name, word in table.words.items()}
    statistics = {name: table.statistics.get(name, np.full(len(table), np.nan)) for name in kept}
    numbers = {**table.sites, **table.axes, "seconds": table.seconds, **statistics}
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in numbers.items()}
    return {**words, **columns, "source": [table.source] * len(table)}


def read_tables(path: Path) -> list[MeasurementTable]:
    """Read the tables that `write_tables` wrote to `path`, one for every combination of words. InputError for no such
    file, not Parquet, not of this schema, a missing column, or a time that is not positive."""
    rows = read_parquet(path)
    metadata = {key.decode(): value.decode() for key, value in (rows.schema.metadata or {}).items()}
    kind = metadata.get("windtunnel.kind", "")
    if metadata.get("windtunnel.schema") != SCHEMA_VERSION or kind not in operator_types():
        raise InputError(
            f"{path} is not a measurement table of schema {SCHEMA_VERSION}", did_you_mean(kind, operator_types())
        )
    words, sites, axes = text_names(kind), site_names(kind), operator_type(kind).axes
    require_columns(path, rows.column_names, (*words, *sites, *axes, "seconds", "source"))
    labels = (*words, "source")
    combinations, codes = np.unique(
        np.array([rows[name].to_pylist() for name in labels]).T, axis=0, return_inverse=True
    )
    kept = STATISTICS if set(STATISTICS) <= set(rows.column_names) else ()
    numbers = {name: numeric_column(rows, name, path) for name in (*sites, *axes, "seconds", *kept)}
    tables = []
    for index, combination in enumerate(combinations):
        columns = {name: column[codes.ravel() == index] for name, column in numbers.items()}
        named = dict(zip(labels, map(str, combination), strict=True))
        source = named.pop("source")
        site_part, axis_part, statistics = ({name: columns[name] for name in names} for names in (sites, axes, kept))
        tables.append(MeasurementTable(kind, site_part, axis_part, columns["seconds"], source, named, statistics))
    return tables


def read_provenance(path: Path) -> dict[str, str]:
    """Read the provenance that `write_tables` wrote; InputError where there is no such file, or it is not Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _unreadable_parquet(path, error) from None
    ours = {key.decode(): value.decode() for key, value in metadata.items() if key.startswith(b"windtunnel.")}
    return {key.removeprefix("windtunnel."): value for key, value in ours.items()}


def read_parquet(path: Path, columns: list[str] | None = None, dictionaries: list[str] | None = None) -> pa.Table:
    """Read the rows of a Parquet file: all `columns` where None are named.

    `dictionaries` are text columns to keep dictionary-coded, which is many times faster to compare. InputError where it
    is missing, is not valid Parquet, or lacks one of `dictionaries`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, read_dictionary=dictionaries) as file:
            present = [name for name in columns if name in file.schema_arrow.names] if columns else None
            return file.read(columns=present, use_threads=False)
    except FileNotFoundError:
        raise missing_file(path) from None
    except KeyError:
        require_columns(path, pq.read_schema(path).names, tuple(dictionaries or ()))
        raise
    except (OSError, pa.ArrowException) as error:
        raise _unreadable_parquet(path, error) from None


def _unreadable_parquet(path: Path, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0]
    return InputError(f"{path} is not a readable Parquet file: {reason}", "is it cut off?")


def require_columns(path: Path, present: list[str], needed: tuple[str, ...]) -> None:
    """Raise InputError for a file that lacks a column: it names the first one, and near ones that are there."""
    for name in needed:
        check_known(name, present, f"{path} has no column {name}", f"found: {', '.join(present)}")


def numeric_column(rows: pa.Table, name: str, path: Path) -> Floats:
    """Return one column as floats; InputError where it holds text or empty cells."""
    import pyarrow as pa

    column = rows[name]
    if column.null_count:
        raise InputError(f"{path}: column {name} has {column.null_count} empty cells")
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise InputError(f"{path}: column {name} is {column.type}; numbers are needed")
    return as_numpy(column).astype(np.float64)


def as_numpy(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """Return a column of numbers without empty cells, by DLPack.

    `to_numpy` imports pandas (0.3 s) where that is installed, and `cast` imports `pyarrow.compute` (0.09 s).
    """
    if len(column) == 0:
        return np.empty(0)
    return np.from_dlpack(column.combine_chunks() if hasattr(column, "num_chunks") else column)
