"""Request traces: CSV, JSON Lines or Parquet with named columns, read into arrays.

The column names of common traces are known (`KNOWN_LAYOUTS`); others are named by `TraceColumns`.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, did_you_mean
from windtunnel.spec import catalog
from windtunnel.spec.workload import MAX_TOKENS, Trace, TraceColumns

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIX_TIME_AFTER_S = 365 * 86400.0
"""A first arrival later than this is a date in Unix time: no trace starts a year after its zero."""

LENGTHS = ("input_tokens", "output_tokens")
STREAMS = ("arrival", *LENGTHS)


@dataclass(frozen=True, slots=True)
class Layout:
    """The column names of one kind of trace."""

    name: str
    arrival: str
    input_tokens: str
    output_tokens: str
    source: str
    arrival_unit: str = "s"
    priority: str | None = None

    @property
    def columns(self) -> tuple[str, str, str]:
        """The names of the streams' columns."""
        return self.arrival, self.input_tokens, self.output_tokens


KNOWN_LAYOUTS = (
    Layout(
        name="windtunnel",
        arrival="arrival_s",
        input_tokens="input_tokens",
        output_tokens="output_tokens",
        priority="priority",
        source="this project",
    ),
    Layout(
        name="azure",
        arrival="TIMESTAMP",
        input_tokens="ContextTokens",
        output_tokens="GeneratedTokens",
        source="https://github.com/Azure/AzurePublicDataset (LLM inference 2023 and 2024)",
    ),
    Layout(
        name="vidur",
        arrival="arrived_at",
        input_tokens="num_prefill_tokens",
        output_tokens="num_decode_tokens",
        source="https://github.com/microsoft/vidur",
    ),
    Layout(
        name="burstgpt",
        arrival="Timestamp",
        input_tokens="Request tokens",
        output_tokens="Response tokens",
        source="https://github.com/HPMLL/BurstGPT",
    ),
    Layout(
        name="mooncake",
        arrival="timestamp",
        arrival_unit="ms",
        input_tokens="input_length",
        output_tokens="output_length",
        source="https://github.com/kvcache-ai/Mooncake",
    ),
    Layout(
        name="splitwise",
        arrival="arrival_timestamp",
        input_tokens="prompt_size",
        output_tokens="token_size",
        source="https://github.com/Mutinifni/splitwise-sim",
    ),
    Layout(
        name="llmservingsim",
        arrival="arrival_ns",
        arrival_unit="ns",
        input_tokens="input_toks",
        output_tokens="output_toks",
        source="https://github.com/casys-kaist/LLMServingSim",
    ),
)
"""Recognised by the columns of both lengths; times may be absent, as in Vidur's length files of ShareGPT and arXiv."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequests:
    """A trace's columns, each of shape [num_requests]; None where the file has no such column.

    `arrival_s` is float64, sorted and not negative; token counts are positive int64; `priority` is int64.
    """

    arrival_s: NDArray[np.float64] | None
    input_tokens: NDArray[np.int64] | None
    output_tokens: NDArray[np.int64] | None
    priority: NDArray[np.int64] | None

    @property
    def num_requests(self) -> int:
        """Rows of whichever columns were read."""
        columns = (self.arrival_s, self.input_tokens, self.output_tokens)
        return next(len(column) for column in columns if column is not None)


def read_requests(trace: Trace, needed: Sequence[str] = STREAMS) -> RecordedRequests:
    """The requests in `trace.path`, every row checked. `start_s` and `time_scale` are the caller's to apply.

    Args:
        trace: where the file is and what its columns are called.
        needed: which of `STREAMS` to read; priorities are read wherever the file has them.

    Raises:
        InputError: a missing, empty or broken file, a missing column, a value that cannot be; names file and row.
    """
    path = _find(trace.path)
    suffix = _suffix(path)
    content = _content(path)
    read_header, read_columns = _READERS[suffix]
    header = read_header(path, content)
    layout = _recognise(header, trace.columns, needed)
    names = _find_columns(path, header, layout, trace.columns, needed)
    arrays = read_columns(path, content, list(names.values()))
    columns = {stream: _column(path, name, arrays[name]) for stream, name in names.items()}
    unit_s = UNITS_S[layout.arrival_unit if layout and not trace.columns.arrival else trace.columns.arrival_unit]
    return RecordedRequests(
        arrival_s=_arrival_s(columns["arrival"], unit_s) if "arrival" in columns else None,
        input_tokens=_tokens(columns["input_tokens"]) if "input_tokens" in columns else None,
        output_tokens=_tokens(columns["output_tokens"]) if "output_tokens" in columns else None,
        priority=_integers(columns["priority"]) if "priority" in columns else None,
    )


def read_lengths(path: str, column: str | None, stream: str) -> NDArray[np.int64]:
    """The token counts in one column of a requests file; None means the known layout's column for `stream`.

    Raises:
        InputError: as `read_requests`.
    """
    columns = msgspec.structs.replace(TraceColumns(), **{stream: column})
    lengths: NDArray[np.int64] = getattr(read_requests(Trace(path=path, columns=columns), (stream,)), stream)
    return lengths


# The file


def _find(name: str) -> Path:
    """The file at the path `name`; a bare word that is no file names a trace of the catalog."""
    path = Path(name)
    is_word = path.suffix == "" and path.name == name
    return catalog.find("traces", name) if is_word and not path.exists() else path


def _suffix(path: Path) -> str:
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in _READERS:
        hint = f"known endings: {', '.join(_READERS)}, each also with .gz"
        raise InputError(f"{path} is not a kind of requests file that can be read", hint)
    return suffix


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"there is no file {path}", did_you_mean(path.name, siblings)) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path} is a broken gzip file: {error}", "fetch or compress it again") from None
    if not content.strip():
        raise InputError(f"{path} is empty")
    return content


def _csv_header(path: Path, content: bytes) -> list[str]:
    first_line = io.BytesIO(content.lstrip(b"\r\n")).readline()
    try:
        return [name.strip() for name in next(csv.reader(io.StringIO(first_line.decode("utf-8-sig"))))]
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} does not begin with a line of column names") from None


def _csv_columns(path: Path, content: bytes, names: list[str]) -> dict[str, Any]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header = _csv_header(path, content)
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(content.lstrip(b"\r\n")),
            read_options=arrow_csv.ReadOptions(column_names=header, skip_rows=1, block_size=1 << 24),
            convert_options=arrow_csv.ConvertOptions(include_columns=names),
        )
    except pa.ArrowInvalid as error:
        raise _broken_csv_row(path, content, len(header), error) from None
    return {name: table[name] for name in names}


def _broken_csv_row(path: Path, content: bytes, num_columns: int, error: Exception) -> InputError:
    """What is wrong with a file that pyarrow refused; it names rows only of some files, so they are counted again."""
    lines = io.StringIO(content.decode(errors="replace").strip())
    try:
        rows = [len(row) for row in csv.reader(lines) if row]
    except csv.Error:
        rows = []
    for row, num_values in enumerate(rows):
        if num_values != num_columns:
            return InputError(f"{path} row {row} has {num_values} values, but there are {num_columns} columns")
    return InputError(f"{path} is not valid CSV: {_first_sentence(error)}")


def _json_header(path: Path, content: bytes) -> list[str]:
    first_line = io.BytesIO(content.lstrip()).readline()
    try:
        return list(msgspec.json.decode(first_line, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} row 1 is not a JSON object: {error}", "one object a line is needed") from None


def _json_columns(path: Path, content: bytes, names: list[str]) -> dict[str, Any]:
    keys = [f"column_{index}" for index in range(len(names))]
    row_type = msgspec.defstruct(
        "Row",
        [(key, int | float | str | None, None) for key in keys],
        rename=dict(zip(keys, names, strict=True)),
        gc=False,
    )
    decoder = msgspec.json.Decoder(row_type)
    try:
        rows = decoder.decode_lines(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _broken_json_row(path, content, decoder) from None
    return {name: _json_column([getattr(row, key) for row in rows]) for key, name in zip(keys, names, strict=True)}


def _json_column(values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        kind = str if any(isinstance(value, str) for value in values) else float
        return pa.array([None if value is None else kind(value) for value in values])


def _broken_json_row(path: Path, content: bytes, decoder: Any) -> InputError:
    lines = [line for line in content.split(b"\n") if line.strip()]
    for row, line in enumerate(lines, start=1):
        try:
            decoder.decode(line)
        except msgspec.ValidationError as error:
            reason = str(error).replace(" - at `$.", " at ").rstrip("`")
            return InputError(f"{path} row {row}: {reason[:1].lower()}{reason[1:]}".replace("`", ""))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = "the file ends within it" if row == len(lines) and "truncated" in str(error) else str(error)
            return InputError(f"{path} row {row} is not valid JSON: {reason}")
    return InputError(f"{path} is not valid JSON Lines")


def _parquet_header(path: Path, content: bytes) -> list[str]:
    return [str(name) for name in _from_parquet(path, content, lambda file: file.schema_arrow.names)]


def _parquet_columns(path: Path, content: bytes, names: list[str]) -> dict[str, Any]:
    table = _from_parquet(path, content, lambda file: file.read(columns=names))
    return {name: table[name] for name in names}


def _from_parquet(path: Path, content: bytes, look: Callable[[Any], Any]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return look(parquet.ParquetFile(pa.BufferReader(content)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a valid Parquet file: {_first_sentence(error)}") from None


_READERS = {
    ".csv": (_csv_header, _csv_columns),
    ".jsonl": (_json_header, _json_columns),
    ".ndjson": (_json_header, _json_columns),
    ".parquet": (_parquet_header, _parquet_columns),
}
"""Ending of the file's name -> its column names, and its columns as pyarrow arrays."""


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


# Which column is what


def _recognise(header: list[str], asked: TraceColumns, needed: Sequence[str]) -> Layout | None:
    """The first layout whose lengths the file has, under the names asked for where there are any.

    Our own is also recognised by what is needed alone, such as nothing but `arrival_s`.
    """
    for layout in KNOWN_LAYOUTS:
        lengths = (asked.input_tokens or layout.input_tokens, asked.output_tokens or layout.output_tokens)
        if all(name in header for name in lengths):
            return layout
    ours = KNOWN_LAYOUTS[0]
    return ours if all((getattr(asked, stream) or getattr(ours, stream)) in header for stream in needed) else None


def _find_columns(
    path: Path, header: list[str], layout: Layout | None, asked: TraceColumns, needed: Sequence[str]
) -> dict[str, str]:
    """Stream -> the name of its column: of every stream in `needed`, and of the priority where there is one."""
    wanted = (*needed, "priority")
    named = {stream: getattr(asked, stream) for stream in wanted if getattr(asked, stream)}
    if unknown := [name for name in named.values() if name not in header]:
        raise InputError(
            f"{path} has no column {unknown[0]!r}; it has {_listed(header)}", did_you_mean(unknown[0], header)
        )
    known = {stream: getattr(layout, stream) for stream in wanted} if layout else {}
    found = {stream: name for stream, name in (known | named).items() if name in header}
    if not set(needed) <= set(found):
        raise _no_stream(path, header, [stream for stream in needed if stream not in named], layout)
    if repeated := [name for name in found.values() if header.count(name) > 1]:
        raise InputError(f"{path} has more than one column {repeated[0]!r}")
    return found


def _no_stream(path: Path, header: list[str], streams: Sequence[str], layout: Layout | None) -> InputError:
    """What to say where not all of `streams`, none of which was given a name, are there."""
    expected = layout or max(KNOWN_LAYOUTS, key=lambda it: sum(name in header for name in it.columns))
    missing = [it for it in (*LENGTHS, "arrival") if it in streams and getattr(expected, it) not in header]
    if not missing or not set(expected.columns) & set(header):
        hint = "name them: workload.trace.columns: {arrival: NAME, input_tokens: NAME, output_tokens: NAME}"
        near = did_you_mean(streams[0], header)
        return InputError(f"{path} has no columns of a known trace; it has {_listed(header)}", near or hint)
    name = getattr(expected, missing[0])
    near = did_you_mean(name, [column for column in header if column not in expected.columns])
    if missing[0] == "arrival":
        hint = "give workload.arrivals, or name the column of times: workload.trace.columns: {arrival: NAME}"
        return InputError(f"{path} has no arrival times: no column {name!r} beside {_listed(header)}", near or hint)
    hint = f"name it: workload.trace.columns: {{{missing[0]}: NAME}}"
    return InputError(f"{path} has no column {name!r}; it has {_listed(header)}", near or hint)


def _listed(header: list[str]) -> str:
    shown = ", ".join(_shown(name) for name in header[:8])
    return f"{shown} and {len(header) - 8} more" if len(header) > 8 else shown


def _shown(value: Any) -> str:
    """A value of a file, short and on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


# What the columns hold


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """A column without gaps: numbers, dates or objects; and where it comes from."""

    path: Path
    name: str
    values: NDArray[Any]

    @property
    def is_numeric(self) -> bool:
        return self.values.dtype.kind in "iuf"

    def refuse(self, wrong: Any, reason: str, hint: str | None = None) -> None:
        """Raise an InputError for the first row where `wrong`."""
        if np.any(wrong):
            row = int(np.argmax(wrong))
            raise InputError(f"{self.path} row {row + 1}: {self.name} {reason}: {_shown(self.values[row])}", hint)


def _column(path: Path, name: str, column: Any) -> _Column:
    if len(column) == 0:
        raise InputError(f"{path} has no requests")
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null()))) + 1
        raise InputError(f"{path} row {row}: {name} is missing or not a number")
    return _Column(path, name, np.asarray(column))


def _arrival_s(column: _Column, unit_s: float) -> NDArray[np.float64]:
    seconds = _times_s(column, unit_s) if column.is_numeric else _dates_s(column)
    backwards = np.flatnonzero(seconds[1:] < seconds[:-1])
    if backwards.size:
        row = int(backwards[0]) + 2
        message = f"{column.path} row {row}: {column.name} is before that of row {row - 1}"
        raise InputError(message, f"sort the requests by {column.name}")
    return seconds


def _times_s(column: _Column, unit_s: float) -> NDArray[np.float64]:
    times = column.values
    column.refuse(~np.isfinite(times), "is not a time")
    column.refuse(times < 0, "is negative")
    origin = times[0] if times[0] * unit_s > UNIX_TIME_AFTER_S else 0
    return np.asarray((times - origin) * unit_s, np.float64)


def _dates_s(column: _Column) -> NDArray[np.float64]:
    """Seconds since the first date; dates are datetime64, or ISO 8601 text (UTC where it names no zone)."""
    if column.values.dtype.kind == "M":
        return np.asarray((column.values - column.values[0]) / np.timedelta64(1, "s"), np.float64)
    dates = [_date(value) for value in column.values]
    wrong = [date is None for date in dates]
    column.refuse(
        [bad and not _is_number(value) for bad, value in zip(wrong, column.values, strict=True)], "is not a time"
    )
    column.refuse(wrong, "is not a date, but others are")
    stamps = [date.replace(tzinfo=date.tzinfo or UTC).timestamp() for date in dates if date]
    return np.array(stamps, np.float64) - stamps[0]


def _tokens(column: _Column) -> NDArray[np.int64]:
    tokens = _integers(column)
    column.refuse(tokens < 1, "is not positive", "leave out requests that failed or generated nothing")
    column.refuse(tokens > MAX_TOKENS, f"is above {MAX_TOKENS}")
    return tokens


def _integers(column: _Column) -> NDArray[np.int64]:
    if not column.is_numeric:
        column.refuse([not _is_number(value) for value in column.values], "is not a number")
        column.refuse([True], "is text, not a number")
    if column.values.dtype.kind == "f":
        column.refuse(column.values != np.rint(column.values), "is not a whole number")
        column.refuse(~(np.abs(column.values) < 2.0**62), "is out of range")
    return column.values.astype(np.int64)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _date(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
