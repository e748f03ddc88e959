"""Files of rows with named columns, as CSV, JSON Lines, JSON or Parquet, also gzipped, read block by block."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from windtunnel.errors import InputError, unreadable
from windtunnel.units import format_count

BLOCK_BYTES = 1 << 24
BLOCK_ROWS = 1 << 18
"""Rows of a block of Parquet."""

Batch = dict[str, Any]
"""Column -> pyarrow array, a block of rows."""


def header_of(path: Path) -> list[str]:
    """Return the names of the file's columns.

    Raises:
        InputError: a missing, empty or broken file, or an unknown ending.
    """
    return _READERS[_suffix(path)][0](path)


def batches_of(path: Path, names: list[str], use: Callable[[int, Batch], bool]) -> None:
    """Call `use` with the number of the first row and the columns `names` of one block after another.

    `use` returns False when it has seen enough. Where a later block does not fit the type of the first, everything is
    read again, from row 0.

    Raises:
        InputError: a broken file; names its row where that can be found.
    """
    _READERS[_suffix(path)][1](path, names, use)


def _suffix(path: Path) -> str:
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in _READERS:
        hint = f"known endings: {', '.join(_READERS)}, each also with .gz"
        raise InputError(f"{path} is not a kind of requests file that can be read", hint)
    return suffix


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Yield the file's content, unpacked while it is read."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if is_packed:
                with gzip.open(file) as unpacked:
                    yield io.BufferedReader(unpacked, BLOCK_BYTES)
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is a broken gzip file: {error}", "fetch or compress it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _first_line(path: Path, file: BinaryIO) -> bytes:
    """Return the first line that is not blank; `file` then stands behind it."""
    for line in file:
        if line.strip():
            return line
    raise _is_empty(path)


def _is_empty(path: Path) -> InputError:
    return InputError(f"{path} is empty", "a line of column names is needed, and a line for each request")


# CSV


def _csv_header(path: Path) -> list[str]:
    with _opened(path) as file:
        return _csv_names(path, _first_line(path, file))


def _csv_names(path: Path, line: bytes) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader(io.StringIO(line.decode("utf-8-sig"))))]
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} does not begin with a line of column names", "is it another kind of file?") from None


def _csv_batches(path: Path, names: list[str], use: Callable[[int, Batch], bool]) -> None:
    """Read a file whose column types pyarrow decides by the first block.

    Where a later block does not fit, numbers are read as floats, and at last the wrong column as text, so that its user
    can name the row.
    """
    import pyarrow as pa

    try:
        return _csv_pass(path, names, use, {})
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise _broken_csv_row(path, error) from None
    types = {name: _wider(kind) for name, kind in _first_types(path, names).items()}
    if not _fits(path, names, types):
        culprits = [name for name in names if _fits(path, names, {**types, name: pa.string()})]
        types |= dict.fromkeys(culprits[:1] or names, pa.string())
    return _csv_pass(path, names, use, types)


def _fits(path: Path, names: list[str], types: dict[str, Any]) -> bool:
    """Whether every value is of its column's type."""
    import pyarrow as pa

    try:
        _csv_pass(path, names, lambda _row, _batch: True, types)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise _broken_csv_row(path, error) from None
        return False
    return True


def _csv_pass(path: Path, names: list[str], use: Callable[[int, Batch], bool], types: dict[str, Any]) -> None:
    """Read once; the columns in `types` have those types, others the type of their first block."""
    with _opened(path) as file:
        row = 0
        for batch in _csv_reader(path, file, names, types):
            if not use(row, {name: batch.column(name) for name in names}):
                return
            row += batch.num_rows


def _first_types(path: Path, names: list[str]) -> dict[str, Any]:
    with _opened(path) as file:
        schema = _csv_reader(path, file, names, {}).schema
        return {name: schema.field(name).type for name in names}


def _csv_reader(path: Path, file: BinaryIO, names: list[str], types: dict[str, Any]) -> Any:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header = _csv_names(path, _first_line(path, file))
    return arrow_csv.open_csv(
        pa.PythonFile(_NotEmpty(file), mode="r"),
        read_options=arrow_csv.ReadOptions(column_names=header, block_size=BLOCK_BYTES),
        convert_options=arrow_csv.ConvertOptions(include_columns=names, column_types=types, strings_can_be_null=True),
    )


def _wider(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns", kind.tz)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return pa.float64() if is_number else pa.string()


class _NotEmpty:
    """A file that is not quite empty: pyarrow refuses to stream a file without a single row."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.closed = False
        self.is_begun = False

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        if not content and not self.is_begun:
            content = b"\n"
        self.is_begun = True
        return content

    def close(self) -> None:
        self.closed = True


def _broken_csv_row(path: Path, error: Exception) -> InputError:
    """Return the error of a file that pyarrow refused, which names the row only sometimes; rows are counted again."""
    with _opened(path) as file:
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


# JSON Lines and JSON


def _json_lines_header(path: Path) -> list[str]:
    with _opened(path) as file:
        line = _first_line(path, file)
    try:
        return list(msgspec.json.decode(line, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} row 1 is not a JSON object: {error}", "one object a line is needed") from None


def _json_lines_batches(path: Path, names: list[str], use: Callable[[int, Batch], bool]) -> None:
    decoder = msgspec.json.Decoder(_row_type(names))
    row = 0
    with _opened(path) as file:
        while lines := file.readlines(BLOCK_BYTES):
            try:
                rows = decoder.decode_lines(b"".join(lines))
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise _broken_json_row(path, lines, row, decoder, not file.read(1)) from None
            if rows and not use(row, _columns(rows, names)):
                return
            row += len(rows)


def _row_type(names: list[str]) -> Any:
    keys = [f"column_{index}" for index in range(len(names))]
    return msgspec.defstruct(
        "Row",
        [(key, int | float | str | list[int] | None, None) for key in keys],
        rename=dict(zip(keys, names, strict=True)),
        gc=False,
    )


def _columns(rows: list[Any], names: list[str]) -> Batch:
    return {name: _json_column([getattr(row, f"column_{index}") for row in rows]) for index, name in enumerate(names)}


def _json_column(values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        is_text = any(isinstance(value, str | list) for value in values)
        return pa.array([None if value is None else str(value) if is_text else float(value) for value in values])


def _broken_json_row(path: Path, lines: list[bytes], first_row: int, decoder: Any, is_end: bool) -> InputError:
    lines = [line for line in lines if line.strip()]
    for row, line in enumerate(lines, start=first_row + 1):
        try:
            decoder.decode(line)
        except msgspec.ValidationError as error:
            reason = str(error).replace(" - at `$.", " at ").rstrip("`")
            return InputError(f"{path} row {row}: {reason[:1].lower()}{reason[1:]}".replace("`", ""))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            is_cut = is_end and row == first_row + len(lines) and "truncated" in str(error)
            return InputError(f"{path} row {row} is not valid JSON: {'the file ends within it' if is_cut else error}")
    return InputError(f"{path} is not valid JSON Lines")


def _json_objects(path: Path) -> list[dict[str, Any]]:
    with _opened(path) as file:
        content = file.read()
    if not content.strip():
        raise _is_empty(path)
    try:
        return msgspec.json.decode(content, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "with one object a line, call it .jsonl"
        raise InputError(f"{path} is not a JSON list of objects: {error}".replace("`", ""), hint) from None


def _json_header(path: Path) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(_json_objects(path)[:1])))


def _json_batches(path: Path, names: list[str], use: Callable[[int, Batch], bool]) -> None:
    """Read all rows at once; a column of objects, such as ShareGPT's conversations, stays a list."""
    objects = _json_objects(path)
    columns = {name: [row.get(name) for row in objects] for name in names}
    nested = {name for name, values in columns.items() if any(isinstance(value, dict | list) for value in values)}
    use(0, {name: values if name in nested else _json_column(values) for name, values in columns.items()})


# Parquet


def _parquet_header(path: Path) -> list[str]:
    return [str(name) for name in _from_parquet(path, lambda file: file.schema_arrow.names)]


def _parquet_batches(path: Path, names: list[str], use: Callable[[int, Batch], bool]) -> None:
    def read(file: Any) -> None:
        row = 0
        for batch in file.iter_batches(batch_size=BLOCK_ROWS, columns=names):
            if not use(row, {name: batch.column(name) for name in names}):
                return
            row += batch.num_rows

    _from_parquet(path, read)


def _from_parquet(path: Path, look: Callable[[Any], Any]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    with _opened(path) as file:
        if not file.peek(1) if isinstance(file, io.BufferedReader) else False:
            raise _is_empty(path)
        source = pa.BufferReader(file.read()) if path.name.lower().endswith(".gz") else file
        try:
            return look(parquet.ParquetFile(source))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a valid Parquet file: {_first_sentence(error)}") from None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


_READERS: dict[str, tuple[Callable[[Path], list[str]], Callable[[Path, list[str], Callable[[int, Batch], bool]], None]]]
_READERS = {
    ".csv": (_csv_header, _csv_batches),
    ".jsonl": (_json_lines_header, _json_lines_batches),
    ".ndjson": (_json_lines_header, _json_lines_batches),
    ".json": (_json_header, _json_batches),
    ".parquet": (_parquet_header, _parquet_batches),
}
"""Ending of a file's name -> readers of its column names and of its blocks."""
