"""Request traces: CSV, JSON Lines, JSON or Parquet with named columns, read into arrays block by block.

The column names of common traces are known (`KNOWN_LAYOUTS`); others are named by `TraceColumns`. Memory is what the
arrays take, 24 bytes a request, and a block of the file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, did_you_mean
from windtunnel.interop.table_file import Batch, batches_of, header_of
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
    tenant: str | None = None
    session: str | None = None
    hash_ids: str | None = None
    zero_output_failed: bool = False
    """Its publisher says that requests without output failed; they are left out."""

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
        tenant="tenant",
        session="session",
        hash_ids="hash_ids",
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
        session="Session ID",
        zero_output_failed=True,
        source="https://github.com/HPMLL/BurstGPT",
    ),
    Layout(
        name="mooncake",
        arrival="timestamp",
        arrival_unit="ms",
        input_tokens="input_length",
        output_tokens="output_length",
        hash_ids="hash_ids",
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


CONVERSATIONS = "conversations"
"""Column of ShareGPT's JSON: what people and the model said, in turn. As in vLLM's benchmark, the first text is the
prompt and the second the output, and conversations of fewer than two texts are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """The blocks of each prompt: those of row i are ids[offsets[i] : offsets[i + 1]]."""

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    block_tokens: int

    def at(self, rows: NDArray[np.int64] | slice) -> "BlockIds":
        """Those of `rows`, in that order."""
        sizes = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        begin = np.repeat(self.offsets[:-1][rows] - offsets[:-1], sizes)
        return replace(self, offsets=offsets, ids=self.ids[begin + np.arange(offsets[-1])])


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequests:
    """A trace's columns, each of shape [num_requests]; None where the file has no such column.

    `arrival_s` is float64, sorted and not negative; token counts are positive int64; the others are int64.
    """

    arrival_s: NDArray[np.float64] | None = None
    input_tokens: NDArray[np.int64] | None = None
    output_tokens: NDArray[np.int64] | None = None
    priority: NDArray[np.int64] | None = None
    tenant: NDArray[np.int64] | None = None
    """Position in `tenant_names`."""
    session: NDArray[np.int64] | None = None
    """Number of the session, from 0; -1 where the file names none."""
    tenant_names: tuple[str, ...] = ()
    blocks: BlockIds | None = None

    @property
    def num_requests(self) -> int:
        """Rows of whichever columns were read."""
        columns = (self.arrival_s, self.input_tokens, self.output_tokens)
        return next(len(column) for column in columns if column is not None)

    def at(self, rows: NDArray[np.int64] | slice) -> "RecordedRequests":
        """The requests `rows`, in that order."""
        columns = ("arrival_s", "input_tokens", "output_tokens", "priority", "tenant", "session", "blocks")
        found = {name: getattr(self, name) for name in columns if getattr(self, name) is not None}
        return replace(
            self, **{name: value.at(rows) if name == "blocks" else value[rows] for name, value in found.items()}
        )


def read_requests(trace: Trace, needed: Sequence[str] = STREAMS, most: int | None = None) -> RecordedRequests:
    """The requests in `trace.path`, every row checked, lengths scaled and shortened as `trace` says.

    `start_s`, `time_scale` and `order` are the caller's to apply.

    Args:
        trace: where the file is and what its columns are called.
        needed: which of `STREAMS` to read; priorities, tenants, sessions and blocks are read where the file has them.
        most: stop after so many requests; None reads all.

    Raises:
        InputError: a missing, empty or broken file, a missing column, a value that cannot be; names file and row.
    """
    path = _find(trace.path)
    header = header_of(path)
    if CONVERSATIONS in header and set(needed) <= set(LENGTHS):
        recorded = _conversations(path, trace)
    else:
        recorded = _rows(path, header, trace, needed, most)
    return _fitted(recorded, trace)


def read_lengths(path: str, column: str | None, stream: str) -> NDArray[np.int64]:
    """The token counts in one column of a requests file; None means the known layout's column for `stream`.

    Raises:
        InputError: as `read_requests`.
    """
    columns = msgspec.structs.replace(TraceColumns(), **{stream: column})
    lengths: NDArray[np.int64] = getattr(read_requests(Trace(path=path, columns=columns), (stream,)), stream)
    return lengths


def _find(name: str) -> Path:
    """The file at the path `name`; a bare word that is no file names a trace of the catalog."""
    path = Path(name)
    is_word = path.suffix == "" and path.name == name
    return catalog.find("traces", name) if is_word and not path.exists() else path


def _rows(path: Path, header: list[str], trace: Trace, needed: Sequence[str], most: int | None) -> RecordedRequests:
    layout = _recognise(header, trace.columns, needed)
    names = _find_columns(path, header, layout, trace.columns, needed)
    if "hash_ids" in names and ("input_tokens" not in needed or trace.input_scale != 1 or trace.max_tokens is not None):
        del names["hash_ids"]
    unit_s = UNITS_S[layout.arrival_unit if layout and not trace.columns.arrival else trace.columns.arrival_unit]
    drops = trace.failed == "leave_out" or (trace.failed is None and layout is not None and layout.zero_output_failed)
    reading = _Reading(path, names, unit_s, drops, trace.hash_block_tokens)

    def use(row: int, batch: Batch) -> bool:
        nonlocal reading
        if row == 0:
            reading = _Reading(path, names, unit_s, drops, trace.hash_block_tokens)
        reading.add(row, batch)
        return most is None or reading.num_requests < most

    batches_of(path, list(names.values()), use)
    recorded = reading.finish()
    return recorded if most is None else recorded.at(slice(0, most))


@dataclass(slots=True)
class _Reading:
    """A file's columns so far, block by block."""

    path: Path
    names: dict[str, str]
    unit_s: float
    drops_failed: bool
    block_tokens: int
    num_requests: int = 0
    num_rows: int = 0
    origin: Any = None
    last_s: float = -math.inf
    parts: dict[str, list[Any]] = field(default_factory=dict)
    codes: dict[str, dict[str, int]] = field(default_factory=lambda: {"tenant": {}, "session": {}})

    def add(self, row: int, batch: Batch) -> None:
        """Check a block and keep it."""
        columns = {
            stream: _column(self.path, name, batch[name], row)
            for stream, name in self.names.items()
            if stream in (*STREAMS, "priority", "tenant")
        }
        keep: Any = slice(None)
        if "output_tokens" in columns and self.drops_failed:
            outputs = _integers(columns["output_tokens"])
            keep = outputs != 0
            columns["output_tokens"] = replace(columns["output_tokens"], values=np.where(keep, outputs, 1))
        found: dict[str, Any] = {}
        if "arrival" in columns:
            found["arrival"] = self._arrival_s(columns["arrival"])
        for stream in LENGTHS:
            if stream in columns:
                found[stream] = _tokens(columns[stream])
        if "priority" in columns:
            found["priority"] = _integers(columns["priority"])
        for stream in ("tenant", "session"):
            if stream in self.names:
                found[stream] = self._codes(stream, batch[self.names[stream]])
        size = len(next(iter(batch.values())))
        for stream, values in found.items():
            self.parts.setdefault(stream, []).append(values[keep])
        if "hash_ids" in self.names:
            self.parts.setdefault("hash_ids", []).append(
                _block_ids(self.path, self.names["hash_ids"], batch[self.names["hash_ids"]], row).at(
                    np.arange(size)[keep]
                )
            )
        self.num_rows += size
        self.num_requests += len(next(iter(found.values()))[keep])

    def finish(self) -> RecordedRequests:
        """All blocks as one."""
        if not self.num_requests:
            why = "; all of them failed" if self.num_rows else ""
            raise InputError(f"{self.path} has no requests{why}")
        whole = {
            {"arrival": "arrival_s"}.get(stream, stream): np.concatenate(parts)
            for stream, parts in self.parts.items()
            if stream != "hash_ids"
        }
        blocks = _joined(self.parts["hash_ids"], self.block_tokens) if "hash_ids" in self.parts else None
        if blocks is not None:
            _check_blocks(self.path, self.names["hash_ids"], blocks, whole["input_tokens"])
        return RecordedRequests(**whole, tenant_names=tuple(self.codes["tenant"]), blocks=blocks)

    def _arrival_s(self, column: "_Column") -> NDArray[np.float64]:
        if not column.values.size:
            return np.zeros(0)
        if column.is_numeric:
            seconds = self._times_s(column)
        else:
            seconds, self.origin = _dates_s(column, self.origin)
        backwards = np.flatnonzero(np.diff(seconds, prepend=self.last_s) < 0)
        if backwards.size:
            row = column.first_row + int(backwards[0]) + 1
            message = f"{column.path} row {row}: {column.name} is before that of row {row - 1}"
            raise InputError(message, f"sort the requests by {column.name}")
        self.last_s = float(seconds[-1])
        return seconds

    def _times_s(self, column: "_Column") -> NDArray[np.float64]:
        times = column.values
        column.refuse(~np.isfinite(times), "is not a time")
        column.refuse(times < 0, "is negative")
        if self.origin is None:
            self.origin = times[0] if times[0] * self.unit_s > UNIX_TIME_AFTER_S else times.dtype.type(0)
        return np.asarray((times - self.origin) * self.unit_s, np.float64)

    def _codes(self, stream: str, column: Any) -> NDArray[np.int64]:
        """Each value's number, in order of first appearance; -1 for none."""
        known = self.codes[stream]
        values, of_row = np.unique(np.array([_name(value) for value in column.to_pylist()]), return_inverse=True)
        first = np.full(values.size, len(of_row))
        np.minimum.at(first, of_row, np.arange(len(of_row)))
        numbers = np.empty(values.size, np.int64)
        for at in np.argsort(first):
            name = str(values[at])
            numbers[at] = known.setdefault(name, len(known)) if name else -1
        return numbers[of_row]


def _name(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def _block_ids(path: Path, name: str, column: Any, first_row: int) -> BlockIds:
    """The blocks of one part of a file; its last offset is the number of its ids."""
    lists = column.to_pylist() if hasattr(column, "to_pylist") else column
    for row, ids in enumerate(lists, start=first_row + 1):
        if ids is not None and not (isinstance(ids, list) and all(isinstance(block, int) for block in ids)):
            raise InputError(f"{path} row {row}: {name} is not a list of whole numbers: {_shown(ids)}")
    sizes = [0 if ids is None else len(ids) for ids in lists]
    flat = [block for ids in lists if ids for block in ids]
    return BlockIds(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.array(flat, np.int64), 0)


def _joined(parts: list[BlockIds], block_tokens: int) -> BlockIds:
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return BlockIds(offsets, np.concatenate([part.ids for part in parts]), block_tokens)


def _check_blocks(path: Path, name: str, blocks: BlockIds, input_tokens: NDArray[np.int64]) -> None:
    counts = np.diff(blocks.offsets)
    too_many = (counts > 0) & ((counts - 1) * blocks.block_tokens >= input_tokens)
    if too_many.any():
        row = int(np.argmax(too_many))
        raise InputError(
            f"{path} row {row + 1}: {name} has {counts[row]} blocks of {blocks.block_tokens} tokens, "
            f"but the prompt has {input_tokens[row]:,} tokens",
            "say how long a block is: workload.trace.hash_block_tokens",
        )


def _conversations(path: Path, trace: Trace) -> RecordedRequests:
    """The first text and its answer of each conversation, their lengths estimated from their characters."""
    if trace.characters_per_token is None:
        raise InputError(
            f"{path} holds texts, not lengths",
            "say how long a token is: workload.trace.characters_per_token (about 4 for English), or count the tokens",
        )
    lengths: list[tuple[int, int]] = []

    def use(_: int, batch: Batch) -> bool:
        for row, conversation in enumerate(batch[CONVERSATIONS], start=1):
            texts = [_text(path, row, said) for said in conversation or []]
            if len(texts) >= 2:
                lengths.append((len(texts[0]), len(texts[1])))
        return True

    batches_of(path, [CONVERSATIONS], use)
    if not lengths:
        raise InputError(f"{path} has no requests: no conversation of two texts")
    tokens = np.ceil(np.array(lengths) / trace.characters_per_token).astype(np.int64)
    tokens = np.maximum(tokens, 1)
    return RecordedRequests(input_tokens=tokens[:, 0], output_tokens=tokens[:, 1])


def _text(path: Path, row: int, said: Any) -> str:
    text = said.get("value", said.get("content")) if isinstance(said, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{path} row {row}: a part of {CONVERSATIONS} has no text: {_shown(said)}")
    return text


def _fitted(recorded: RecordedRequests, trace: Trace) -> RecordedRequests:
    """Lengths scaled, then shortened to `trace.max_tokens` in all; nothing becomes less than one token."""
    scaled = {}
    for stream, scale in (("input_tokens", trace.input_scale), ("output_tokens", trace.output_scale)):
        tokens = getattr(recorded, stream)
        if tokens is not None and scale != 1:
            scaled[stream] = np.clip(np.floor(tokens * scale), 1, MAX_TOKENS).astype(np.int64)
    recorded = replace(recorded, **scaled)
    prompt, output = recorded.input_tokens, recorded.output_tokens
    if trace.max_tokens is None or prompt is None or output is None:
        return recorded
    whole, most = prompt + output, trace.max_tokens
    is_long = whole > most
    if trace.shorten == "both":
        shorter = np.clip(prompt * (most / whole), 1, most - 1).astype(np.int64)
        shorter_output = most - shorter
    else:
        shorter = np.maximum(most - output, 1)
        shorter_output = np.minimum(output, most - 1)
    return replace(
        recorded,
        input_tokens=np.where(is_long, shorter, prompt),
        output_tokens=np.where(is_long, shorter_output, output),
    )


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
    wanted = (*needed, "priority", "tenant", "session", "hash_ids")
    named = {stream: getattr(asked, stream) for stream in wanted if getattr(asked, stream)}
    if unknown := [name for name in named.values() if name not in header]:
        raise InputError(
            f"{path} has no column {unknown[0]!r}; it has {_listed(header)}", did_you_mean(unknown[0], header)
        )
    known = {stream: getattr(layout, stream) for stream in wanted} if layout else {}
    found = {stream: name for stream, name in (known | named).items() if name is not None and name in header}
    if not set(needed) <= set(found):
        raise _no_stream(path, header, [stream for stream in needed if stream not in named], layout)
    if repeated := [name for name in found.values() if header.count(name) > 1]:
        raise InputError(f"{path} has more than one column {repeated[0]!r}")
    return found


def _no_stream(path: Path, header: list[str], streams: Sequence[str], layout: Layout | None) -> InputError:
    """What to say where not all of `streams`, none of which was given a name, are there."""
    if CONVERSATIONS in header:
        return InputError(
            f"{path} is of ShareGPT's kind, which has no arrival times", "say how they arrive: a rate or a concurrency"
        )
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
    first_row: int = 0

    @property
    def is_numeric(self) -> bool:
        return self.values.dtype.kind in "iuf"

    def refuse(self, wrong: Any, reason: str, hint: str | None = None) -> None:
        """Raise an InputError for the first row where `wrong`."""
        if np.any(wrong):
            row = int(np.argmax(wrong))
            message = f"{self.path} row {self.first_row + row + 1}: {self.name} {reason}: {_shown(self.values[row])}"
            raise InputError(message, hint)


def _column(path: Path, name: str, column: Any, first_row: int) -> _Column:
    if isinstance(column, list):
        raise InputError(f"{path} row {first_row + 1}: {name} is not a number: {_shown(column[0])}")
    if column.null_count and len(column):
        row = first_row + int(np.argmax(np.asarray(column.is_null()))) + 1
        raise InputError(f"{path} row {row}: {name} is missing or not a number")
    return _Column(path, name, np.asarray(column), first_row)


def _dates_s(column: _Column, origin: Any) -> tuple[NDArray[np.float64], Any]:
    """Seconds since `origin` (None: the first date), and that; dates are datetime64 or ISO 8601 (UTC by default)."""
    if column.values.dtype.kind == "M":
        origin = column.values[0] if origin is None else origin
        return np.asarray((column.values - origin) / np.timedelta64(1, "s"), np.float64), origin
    dates = [_date(value) for value in column.values]
    wrong = [date is None for date in dates]
    column.refuse(
        [bad and not _is_number(value) for bad, value in zip(wrong, column.values, strict=True)], "is not a time"
    )
    column.refuse(wrong, "is not a date, but others are")
    stamps = [date.replace(tzinfo=date.tzinfo or UTC).timestamp() for date in dates if date]
    origin = stamps[0] if origin is None else origin
    return np.array(stamps, np.float64) - origin, origin


def _tokens(column: _Column) -> NDArray[np.int64]:
    tokens = _integers(column)
    column.refuse(tokens < 1, "is not positive", "leave out requests that failed or generated nothing")
    column.refuse(tokens > MAX_TOKENS, f"is above {MAX_TOKENS}")
    return tokens


def _integers(column: _Column) -> NDArray[np.int64]:
    if not column.is_numeric:
        column.refuse([not _is_number(value) for value in column.values], "is not a number")
        if ".csv" not in column.path.name.lower():
            column.refuse(np.ones(column.values.size, bool), "is text, not a number")
        # Text of a CSV file, read so because a later row is wrong.
        column = replace(column, values=column.values.astype(np.float64))
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
