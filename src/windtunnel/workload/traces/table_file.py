"""Files of rows with named columns, as CSV, JSON Lines, JSON or Parquet, also packed, read block by block."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.files import behind_mark, opened
from windtunnel.units import format_count

BLOCK_BYTES = 1 << 24
PACKED = (".gz", ".zst")
"""Endings of packed files, behind the ending of what is in them."""
BLOCK_ROWS = 1 << 18
"""Rows of a block of Parquet."""
HEADER_ROWS = 100
"""Rows of JSON and JSON Lines whose names are those of the columns, beside the first."""

Batch = dict[str, Any]
"""Column -> pyarrow array of a block of rows; a list where its values are lists or objects."""


def header_of(path: Path) -> list[str]:
    """Return the names of the file's columns; InputError where it is missing, empty, broken or of an unknown ending."""
    header: list[str] = next(_READERS[_suffix(path)](path, None))
    return header


def batches_of(path: Path, names: list[str]) -> Iterator[Batch]:
    """Yield the columns `names` block by block of rows; InputError for a broken file, with its row if that is known."""
    return _READERS[_suffix(path)](path, names)


def read_columns(path: Path, names: list[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return the columns `names` of a whole file, by default all; NaN where a number is missing, None where a text is.
    InputError as `header_of` and `batches_of`; or there are no rows."""
    names = header_of(path) if names is None else names
    blocks = [{name: _array_of(column) for name, column in block.items()} for block in batches_of(path, names)]
    if not any(len(column) for block in blocks for column in block.values()):
        raise InputError(f"{path} has no rows", "is it cut off?")
    return {name: np.concatenate([block[name] for block in blocks]) for name in names}


def text_of(value: Any) -> str:
    """Return a value as text; empty where it is missing."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def values_of(column: Any) -> list[Any]:
    """Return a block of a column as Python values."""
    return column if isinstance(column, list) else column.to_pylist()


def _array_of(column: Any) -> NDArray[Any]:
    import pyarrow as pa

    if isinstance(column, list):
        return np.array([*column, None], object)[:-1]
    array: NDArray[Any] = (column.cast(pa.float64()) if pa.types.is_null(column.type) else column).to_numpy(False)
    return array


def _suffix(path: Path) -> str:
    suffix = Path(path.stem if path.suffix.lower() in PACKED else path.name).suffix.lower()
    if suffix not in _READERS:
        hint = f"known endings: {', '.join(_READERS)}, each also with {' or '.join(PACKED)}"
        if path.is_dir() or ".tar" in path.name.lower() or suffix == ".tgz":
            hint = f"ServeGen's models of clients are no trace: give workload.clients: {{path: {path}}} in its place"
        raise InputError(f"{path} is not a kind of requests file that can be read", hint)
    return suffix


@contextmanager
def _unpacked(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, as `opened`; one of Zstandard is unpacked too, whatever its name."""
    with opened(path, BLOCK_BYTES) as file:
        if file.peek(4)[:4] == b"\x28\xb5\x2f\xfd":
            import pyarrow as pa

            with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as unpacked:
                yield behind_mark(io.BufferedReader(unpacked, BLOCK_BYTES))
        else:
            yield file


def _first_line(path: Path, file: BinaryIO) -> bytes:
    """Return the first line that is not blank; `file` then stands behind it."""
    for line in file:
        if line.strip():
            return line
    raise _is_empty(path)


def _is_empty(path: Path) -> InputError:
    is_csv = _suffix(path) == ".csv"
    hint = "a line of column names is needed, and a line for each row" if is_csv else "one object a line is needed"
    return InputError(f"{path} is empty", hint)


def _csv_names(path: Path, line: bytes) -> list[str]:
    try:
        names = [name.strip() for name in next(csv.reader(io.StringIO(line.decode())))]
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} does not begin with a line of column names", "is it another kind of file?") from None
    if separator := next((mark for mark in (";", "\t") if len(names) == 1 and mark in names[0]), None):
        raise InputError(f"{path} separates its columns by {separator!r}", "separate them by commas")
    return names


def _csv(path: Path, names: list[str] | None) -> Iterator[Any]:
    """Read columns of the types that pyarrow sees in the first block.

    From a block that does not fit them on, columns are read as text and converted block by block.
    """
    if names is None:
        with _unpacked(path) as file:
            yield _csv_names(path, _first_line(path, file))
        return
    import pyarrow as pa

    num_read = 0
    for types in ({}, dict.fromkeys(names, pa.string())):
        row = 0
        try:
            for batch in _csv_blocks(path, names, types):
                first = max(num_read - row, 0)
                columns = {name: batch.column(name).slice(first) for name in names}
                if first < batch.num_rows or not types:
                    yield {name: _typed(column) for name, column in columns.items()} if types else columns
                row += batch.num_rows
        except pa.ArrowInvalid as error:
            if types or "conversion error" not in str(error):
                raise _broken_csv_row(path, error) from None
            num_read = row
        else:
            return


def _csv_blocks(path: Path, names: list[str], types: dict[str, Any]) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with _unpacked(path) as file:
        header = _csv_names(path, _first_line(path, file))
        if not file.peek(1):
            return  # pyarrow refuses to stream a file without a single row
        yield from arrow_csv.open_csv(
            pa.PythonFile(file, mode="r"),
            arrow_csv.ReadOptions(column_names=header, block_size=BLOCK_BYTES),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=names, column_types=types, strings_can_be_null=True
            ),
        )


def _typed(column: Any) -> Any:
    """Return a column of text as whole numbers, else numbers, else dates; as it is where a value is none of these."""
    import pyarrow as pa
    from pyarrow import compute

    trimmed = compute.utf8_trim_whitespace(column)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        try:
            return trimmed.cast(kind)
        except pa.ArrowInvalid:
            continue
    return column


def _broken_csv_row(path: Path, error: Exception) -> InputError:
    """Return the error of a file that pyarrow refused, which names the row only sometimes; rows are counted again."""
    with _unpacked(path) as file:
        lines = io.TextIOWrapper(file, errors="replace")
        try:
            rows = (row for row in csv.reader(lines) if row)
            num_columns = len(next(rows))
            for number, row in enumerate(rows, start=1):
                if len(row) != num_columns:
                    return InputError(
                        f"{path} row {number} has {format_count(len(row), 'value')}, "
                        f"but there are {format_count(num_columns, 'column')}"
                    )
        except (csv.Error, StopIteration):
            pass
    return InputError(f"{path} is not valid CSV: {_first_sentence(error)}")


_LINES = msgspec.json.Decoder(dict[str, Any])


def _json_lines(path: Path, names: list[str] | None) -> Iterator[Any]:
    row = 0
    with _unpacked(path) as file:
        if names is None:
            try:
                header = dict.fromkeys(_names_of(_LINES.decode(_first_line(path, file))))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"{path} row 1 is not a JSON object: {error}", "one object a line is needed") from None
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                for further in _LINES.decode_lines(b"".join(islice(file, HEADER_ROWS))):
                    header.update(dict.fromkeys(_names_of(further)))
            yield list(header)
            return
        while lines := file.readlines(BLOCK_BYTES):
            try:
                rows = _LINES.decode_lines(b"".join(lines))
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise _broken_json_row(path, lines, row, not file.read(1)) from None
            if rows:
                yield _columns(rows, names)
            row += len(rows)


def _columns(rows: list[dict[str, Any]], names: list[str]) -> Batch:
    return {name: _json_column([_value(row, name) for row in rows]) for name in names}


def _names_of(row: dict[str, Any]) -> list[str]:
    """Return the names of an object's values, and those of the objects in it as `outer.inner`."""
    inner = [f"{name}.{below}" for name, value in row.items() if isinstance(value, dict) for below in _names_of(value)]
    return [*row, *inner]


def _value(row: dict[str, Any], name: str) -> Any:
    """Return the value called `name`, also `outer.inner`, or None."""
    if name in row or "." not in name:
        return row.get(name)
    outer, inner = name.split(".", 1)
    below = row.get(outer)
    return _value(below, inner) if isinstance(below, dict) else None


def _json_column(values: list[Any]) -> Any:
    import pyarrow as pa

    if all(value is None or isinstance(value, dict | list) for value in values):
        return values
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        is_number = all(value is None or isinstance(value, int | float) for value in values)
        return pa.array([None if value is None else float(value) if is_number else str(value) for value in values])


def _broken_json_row(path: Path, lines: list[bytes], first_row: int, is_end: bool) -> InputError:
    lines = [line for line in lines if line.strip()]
    for row, line in enumerate(lines, start=first_row + 1):
        try:
            _LINES.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if isinstance(error, msgspec.ValidationError):
                return InputError(f"{path} row {row} is not a JSON object: {error}".replace("`", ""))
            is_cut = is_end and row == first_row + len(lines) and "truncated" in str(error)
            return InputError(f"{path} row {row} is not valid JSON: {'the file ends within it' if is_cut else error}")
    return InputError(f"{path} is not valid JSON Lines")


def _json(path: Path, names: list[str] | None) -> Iterator[Any]:
    with _unpacked(path) as file:
        content = file.read()
    if not content.strip():
        raise _is_empty(path)
    try:
        rows = msgspec.json.decode(content, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "one object for each request is needed; a client's result is for windtunnel validate, lines are .jsonl"
        raise InputError(f"{path} is not a JSON list of objects: {error}".replace("`", ""), hint) from None
    header = dict.fromkeys(name for row in rows[: HEADER_ROWS + 1] for name in _names_of(row))
    yield list(header) if names is None else _columns(rows, names)


def _parquet(path: Path, names: list[str] | None) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    with _unpacked(path) as file:
        if not file.peek(1):
            raise _is_empty(path)
        source = pa.BufferReader(file.read()) if path.suffix.lower() in PACKED else file
        try:
            table = parquet.ParquetFile(source)
            if names is None:
                yield [str(name) for name in table.schema_arrow.names]
                return
            for batch in table.iter_batches(batch_size=BLOCK_ROWS, columns=names):
                yield {name: batch.column(name) for name in names}
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a valid Parquet file: {_first_sentence(error)}") from None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


_READERS: Mapping[str, Callable[[Path, list[str] | None], Iterator[Any]]] = {
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}
"""Ending of a file's name -> a reader that yields blocks of the named columns; without names, those of all columns."""
