"""Request traces: CSV, JSON Lines, JSON or Parquet with named columns, read into arrays block by block.

`layouts` knows the column names of common traces; `TraceColumns` names others. Memory holds the arrays, 24 bytes a
request, and a block of the file.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.workload.lengths import MAX_TOKENS
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.columns import Column, column_of, dates_s, integers, tokens_of
from windtunnel.workload.traces.layouts import (
    LENGTHS,
    MEDIA,
    STREAMS,
    UNITS_S,
    Layout,
    find_columns,
    find_trace,
    is_json,
    recognise,
)
from windtunnel.workload.traces.media import SHAPES, MediaReading, RowMedia, joined
from windtunnel.workload.traces.table_file import BLOCK_BYTES, PACKED, Batch, batches_of, header_of, text_of, values_of

UNIX_TIME_UP_TO_S = 4_102_444_800.0
"""The beginning of the year 2100: a later time is in another unit."""
UNIX_TIME_AFTER_S = 365 * 86400.0
"""A first arrival later than this is taken as Unix time: no trace starts a year after its zero."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """Blocks of prompts: row i has ids[offsets[i] : offsets[i + 1]]."""

    offsets: Ints
    ids: Ints
    block_tokens: float
    """Tokens in a block; a fraction where prompts are scaled. The first n blocks hold floor(n x block_tokens)."""

    def take(self, rows: Ints | slice) -> "BlockIds":
        sizes = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        begin = np.repeat(self.offsets[:-1][rows] - offsets[:-1], sizes)
        return replace(self, offsets=offsets, ids=self.ids[begin + np.arange(offsets[-1])])


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequests:
    """Columns of a trace, each of shape `[num_requests]`; None where the file has no such column.

    `arrival_s` is float64, sorted and not negative; token counts are positive int64; the others are int64.
    """

    arrival_s: Floats | None = None
    input_tokens: Ints | None = None
    output_tokens: Ints | None = None
    priority: Ints | None = None
    tenant: Ints | None = None
    """Position in `tenant_names`."""
    session: Ints | None = None
    """Number of the session, from 0; -1 where the file names none."""
    tenant_names: tuple[str, ...] = ()
    blocks: BlockIds | None = None
    media: RowMedia | None = None
    """None: no request has images or videos."""
    leaves_blocks: bool = False
    """Whether the file has block ids of prompts that were not asked for."""
    remarks: tuple[str, ...] = ()
    """How these differ from the file's rows: how many were left out and why, and how lengths were changed."""

    @property
    def num_requests(self) -> int:
        """Number of rows that were read."""
        columns = (self.arrival_s, self.input_tokens, self.output_tokens)
        return next(len(column) for column in columns if column is not None)

    def take(self, rows: Ints | slice) -> "RecordedRequests":
        names = ("arrival_s", "input_tokens", "output_tokens", "priority", "tenant", "session")
        columns = {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        blocks = None if self.blocks is None else self.blocks.take(rows)
        return replace(self, **columns, blocks=blocks, media=None if self.media is None else self.media.take(rows))


def read_requests(
    trace: Trace, needed: Sequence[str] = STREAMS, limit: int | None = None, with_media: bool = True
) -> RecordedRequests:
    """Read the requests in `trace.path`, every row checked, lengths scaled and shortened as `trace` says.

    `start_s`, `time_scale` and `order` are left to the caller. InputError for a missing, empty or broken file, an
    unknown layout, a missing column, or an impossible value; names the file and the row.

    Args:
        trace: place of the file and names of its columns.
        needed: which of `STREAMS` to read; priorities, tenants, sessions and blocks are read where the file has them.
        limit: maximum number of requests; None reads all.
    """
    path, with_media = find_trace(trace.path), with_media and trace.media == "read"
    header = header_of(path)
    layout = recognise(path, header, trace.columns, needed)
    names = find_columns(path, header, layout, trace.columns, needed)
    known = frozenset(names.values())
    if with_media and is_json(path):  # a key may come in later rows alone
        names |= {what: getattr(trace.columns, what) or what for what in SHAPES}
    media = MediaReading(path, {key: name for key, name in names.items() if key in MEDIA}, known)
    names = {stream: name for stream, name in names.items() if stream not in MEDIA}
    if not with_media:
        media = replace(media, names={})
    if layout.texts_of is None:
        recorded = _rows(path, names, layout, trace, limit, media)
    else:
        recorded = _texts(path, layout.input_tokens, layout.texts_of, trace, media)
    return _fitted(recorded, trace)


def read_lengths(path: str, column: str | None, stream: str) -> Ints:
    """Read the token counts in a column of a file (None: that of `stream`); InputError as `read_requests`."""
    trace = Trace(path=path, columns=msgspec.structs.replace(TraceColumns(), **{stream: column}))
    lengths: Ints = getattr(read_requests(trace, (stream,), with_media=False), stream)
    return lengths


def _rows(
    path: Path, names: dict[str, str], layout: Layout, trace: Trace, limit: int | None, media: MediaReading
) -> RecordedRequests:
    """Read the rows of a file whose columns are `names`."""
    leaves_blocks = "hash_ids" in names and "input_tokens" not in names
    if leaves_blocks:
        del names["hash_ids"]
    unit_s = UNITS_S[trace.columns.arrival_unit if trace.columns.arrival else layout.arrival_unit]
    drops_failed = layout.zero_output_failed if trace.failed is None else trace.failed == "leave_out"
    block_tokens = trace.hash_block_tokens or layout.block_tokens
    rows_with = layout.rows_with if is_json(path) else {}
    reading = _Reading(path, names, unit_s, drops_failed, block_tokens, rows_with, media, layout.is_sorted)
    states_block = isinstance(block_tokens, str) and "hash_ids" in names
    further = [*rows_with, *([str(block_tokens)] if states_block else [])]
    for batch in batches_of(path, list(dict.fromkeys([*names.values(), *further, *media.names.values()]))):
        if num_rows := reading.add(batch):
            _check_rows(path, num_rows, reading.num_requests, limit)
        if limit is not None and layout.is_sorted and reading.num_requests >= limit:
            break
    recorded = replace(reading.finish(), leaves_blocks=leaves_blocks)
    return recorded if limit is None else recorded.take(slice(0, limit))


def _check_rows(path: Path, num_in_block: int, num_read: int, limit: int | None) -> None:
    """Raise InputError where a file whose other blocks are like this one would exceed a limit of memory or time."""
    num_rows = float(num_read)
    if path.suffix.lower() not in (*PACKED, ".parquet"):
        num_rows = max(num_rows, num_in_block * path.stat().st_size / BLOCK_BYTES)
    check_size(trace_rows=num_rows if limit is None else min(num_rows, limit))


@dataclass(slots=True)
class _Reading:
    """The columns of a file, as far as they have been read."""

    path: Path
    names: dict[str, str]
    unit_s: float
    drops_failed: bool
    block_tokens: int | str
    """Or the column that states them."""
    rows_with: Mapping[str, str | None]
    media: MediaReading
    is_sorted: bool = True
    num_requests: int = 0
    num_rows: int = 0
    num_left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rows that are no requests for it."""
    origin: Any = None
    last_s: float = -math.inf
    parts: dict[str, list[Any]] = field(default_factory=dict)
    codes: dict[str, dict[str, int]] = field(default_factory=lambda: {"tenant": {}, "session": {}})

    def add(self, batch: Batch) -> int:
        """Check a block of rows and keep its requests; return how many there are."""
        batch, rows = self._requests_of(batch)
        if not rows.size:
            return 0
        columns = {
            stream: column_of(self.path, name, batch[name], rows)
            for stream, name in self.names.items()
            if stream in (*STREAMS, "priority", "tenant")
        }
        read = {"arrival": self._arrival_s, **dict.fromkeys(LENGTHS, tokens_of), "priority": integers}
        checked: dict[str, Any] = {
            stream: check(columns[stream]) for stream, check in read.items() if stream in columns
        }
        for stream in ("tenant", "session"):
            if stream in self.names:
                parent = batch.get(self.names.get("session_parent", "")) if stream == "session" else None
                checked[stream] = self._codes(stream, batch[self.names[stream]], parent)
        if "hash_ids" in self.names:
            if isinstance(self.block_tokens, str):
                sizes = tokens_of(column_of(self.path, str(self.block_tokens), batch[self.block_tokens], rows))
                Column(self.path, str(self.block_tokens), sizes, rows).refuse(
                    sizes != sizes[0], f"is not that of the first request, {sizes[0]}"
                )
                self.block_tokens = int(sizes[0])
            prompts = Column(self.path, self.names["hash_ids"], checked["input_tokens"], rows)
            checked["hash_ids"] = _block_ids(prompts, values_of(batch[prompts.name]), self.block_tokens)
        if self.media.names:
            checked["media"] = self.media.read(batch, rows)
        for stream, values in checked.items():
            self.parts.setdefault(stream, []).append(values)
        self.num_requests += rows.size
        return rows.size

    def _requests_of(self, batch: Batch) -> tuple[Batch, Ints]:
        """Return the rows of a block that are requests, and their numbers in the file; count the others."""
        rows = self.num_rows + 1 + np.arange(len(next(iter(batch.values()))))
        self.num_rows += rows.size
        for name, value in self.rows_with.items():
            keep = np.array([found == value for found in values_of(batch[name])], bool)
            batch, rows = self._kept(batch, rows, keep, f"{name} is {'given' if value is None else f'not {value}'}")
        if self.drops_failed and "output_tokens" in self.names and rows.size:
            name = self.names["output_tokens"]
            outputs = integers(column_of(self.path, name, batch[name], rows))
            batch, rows = self._kept(batch, rows, outputs != 0, f"{name} is 0")
        return batch, rows

    def _kept(self, batch: Batch, rows: Ints, keep: Bools, why: str) -> tuple[Batch, Ints]:
        if keep.all():
            return batch, rows
        self.num_left_out[why] += int((~keep).sum())
        kept = {
            name: list(compress(column, keep)) if isinstance(column, list) else column.filter(keep)
            for name, column in batch.items()
        }
        return kept, rows[keep]

    def finish(self) -> RecordedRequests:
        """Return all blocks as one."""
        if not self.num_requests:
            why = "; all of them failed" if self.num_rows else ""
            raise InputError(f"{self.path} has no requests{why}")
        blocks = _joined(self.parts.pop("hash_ids")) if "hash_ids" in self.parts else None
        media = joined(self.parts.pop("media")) if "media" in self.parts else None
        columns: dict[str, Any] = {
            {"arrival": "arrival_s"}.get(stream, stream): np.concatenate(parts) for stream, parts in self.parts.items()
        }
        remarks = tuple(
            f"{number:,} of {self.num_rows:,} rows left out: {why}" for why, number in self.num_left_out.items()
        )
        names = tuple(self.codes["tenant"])
        recorded = RecordedRequests(**columns, tenant_names=names, blocks=blocks, media=media, remarks=remarks)
        if self.is_sorted or recorded.arrival_s is None:
            return recorded
        recorded = recorded.take(np.argsort(recorded.arrival_s, kind="stable"))
        assert recorded.arrival_s is not None
        return replace(recorded, arrival_s=recorded.arrival_s - recorded.arrival_s[0]) if self.origin else recorded

    def _arrival_s(self, column: "Column") -> Floats:
        if column.is_numeric:
            seconds = self._times_s(column)
        else:
            seconds, self.origin = dates_s(column, self.origin)
        backwards = np.flatnonzero(np.diff(seconds, prepend=self.last_s) < 0)
        if backwards.size and self.is_sorted:
            row = column.rows[(first := backwards[0])]
            before = column.rows[first - 1] if first else row - 1
            message = f"{column.path} row {row}: {column.name} is before that of row {before}"
            raise InputError(message, f"sort the requests by {column.name}")
        self.last_s = float(seconds[-1])
        return seconds

    def _times_s(self, column: "Column") -> Floats:
        times = column.values
        column.refuse(~np.isfinite(times), "is not a time")
        column.refuse(times < 0, "is negative")
        is_late, hint = times * self.unit_s > UNIX_TIME_UP_TO_S, "say its unit: workload.trace.columns.arrival_unit: ms"
        column.refuse(is_late, "lies behind the year 2100 in its unit", hint)
        if self.origin is None:
            self.origin = times[0] if times[0] * self.unit_s > UNIX_TIME_AFTER_S else times.dtype.type(0)
        return np.asarray((times - self.origin) * self.unit_s, np.float64)

    def _codes(self, stream: str, column: Any, parent: Any = None) -> Ints:
        """Return the number of each value, by order of first appearance; -1 for none.

        With `parent`, a value has the number of its parent, where that came before.
        """
        import pyarrow as pa

        known = self.codes[stream]
        values = [text_of(value) for value in values_of(column)]
        if parent is not None:
            for value, above in zip(values, map(text_of, values_of(parent)), strict=True):
                known.setdefault(value, known.get(above, len(known)))
        names = pa.array(values, pa.string()).dictionary_encode()
        numbers = [known.setdefault(name, len(known)) if name else -1 for name in names.dictionary.to_pylist()]
        return np.asarray(np.array(numbers)[np.asarray(names.indices)], np.int64)


def _block_ids(prompts: Column, lists: list[Any], block_tokens: int) -> BlockIds:
    """Return the block ids of one part of a file, in the column `prompts.name`, for prompts of `prompts.values` tokens.
    InputError where a value is no list of numbers, or has more blocks than its prompt."""
    is_wrong = [
        ids is not None and not (isinstance(ids, list) and all(isinstance(block, int) for block in ids))
        for ids in lists
    ]
    replace(prompts, values=np.array([*lists, None], object)).refuse(is_wrong, "is not a list of whole numbers")
    counts = np.array([len(ids or ()) for ids in lists])
    flat = [block for ids in lists for block in ids or ()]
    try:
        array = np.array(flat, np.int64)
    except OverflowError:  # hashes of 64 bits without a sign
        array = np.array([block & (2**64 - 1) for block in flat], np.uint64).view(np.int64)
    too_many = (counts > 0) & ((counts - 1) * block_tokens >= prompts.values)
    what = f"has more blocks of {block_tokens} tokens ({counts[np.argmax(too_many)]}) than the tokens of its prompt"
    prompts.refuse(too_many, what, "say how long a block is: workload.trace.hash_block_tokens")
    return BlockIds(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), array, block_tokens)


def _joined(parts: list[BlockIds]) -> BlockIds:
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return BlockIds(offsets, np.concatenate([part.ids for part in parts]), parts[0].block_tokens)


def _texts(
    path: Path, column: str, texts_of: Callable[[Any], tuple[str, str] | None], trace: Trace, media: MediaReading
) -> RecordedRequests:
    """Read prompts and answers as texts; their lengths are estimated from their characters."""
    if trace.characters_per_token is None:
        raise InputError(
            f"{path} holds texts, not lengths",
            "say how long a token is: --set workload.trace.characters_per_token=4 suits English; or count the tokens",
        )
    lengths: list[tuple[int, int]] = []
    parts: list[RowMedia] = []
    row = 0
    for batch in batches_of(path, list(dict.fromkeys([column, *media.names.values()]))):
        kept, first = [], row + 1
        for row, value in enumerate(values_of(batch[column]), start=first):
            try:
                texts: Any = texts_of(value)
            except ValueError as error:
                raise InputError(f"{path} row {row}: {error}") from None
            if not isinstance(texts, tuple | list | None) or (texts is not None and len(texts) != 2):
                raise InputError(f"{path} row {row}: texts_of of its layout returned {texts!r:.60}, not two texts")
            if texts is not None:
                lengths.append((len(texts[0]), len(texts[1])))
                kept.append(row - first)
        if media.names:
            parts.append(media.read(batch, first + np.arange(len(batch[column]))).take(np.array(kept, np.int64)))
    if not lengths:
        raise InputError(f"{path} has no requests: no conversation of two texts")
    tokens = np.maximum(np.ceil(np.array(lengths) / trace.characters_per_token).astype(np.int64), 1)
    remark = f"{row - len(lengths):,} of {row:,} rows left out: no prompt with an answer"
    remarks = (remark,) if row > len(lengths) else ()
    return RecordedRequests(
        input_tokens=tokens[:, 0], output_tokens=tokens[:, 1], media=joined(parts) if parts else None, remarks=remarks
    )


def _scaled(blocks: BlockIds | None, scale: float) -> BlockIds | None:
    """Return blocks of prompts that are `scale` times as long."""
    if blocks is not None and blocks.block_tokens * scale < 1:
        raise InputError(
            f"workload.trace.input_scale {scale:g} makes a block of {blocks.block_tokens:g} shared prompt tokens "
            "shorter than one token",
            f"give an input_scale of at least {1 / blocks.block_tokens:g}",
        )
    return blocks if blocks is None or scale == 1 else replace(blocks, block_tokens=blocks.block_tokens * scale)


def _fitted(recorded: RecordedRequests, trace: Trace) -> RecordedRequests:
    """Return lengths scaled, then shortened to `trace.max_tokens` in all; no length becomes less than one token."""
    scaled, remarks = {}, list(recorded.remarks)
    for stream, scale in (("input_tokens", trace.input_scale), ("output_tokens", trace.output_scale)):
        tokens = getattr(recorded, stream)
        if tokens is not None and scale != 1:
            scaled[stream] = np.clip(np.floor(tokens * scale), 1, MAX_TOKENS).astype(np.int64)
            remarks.append(f"{stream} x {scale:g}")
    recorded = replace(recorded, **scaled, blocks=_scaled(recorded.blocks, trace.input_scale))
    prompt, output = recorded.input_tokens, recorded.output_tokens
    if trace.max_tokens is None or prompt is None:
        return replace(recorded, remarks=tuple(remarks))
    limit = trace.max_tokens
    total = prompt if output is None else prompt + output
    is_long = total > limit
    if output is None:
        shorter = np.minimum(prompt, limit)
    elif trace.shorten == "both":
        shorter = np.clip(prompt * (limit / total), 1, limit - 1).astype(np.int64)
        output = np.where(is_long, limit - shorter, output)
    else:
        shorter = np.maximum(limit - output, 1)
        output = np.where(is_long, np.minimum(output, limit - 1), output)
    if is_long.any():
        remarks.append(f"{is_long.sum():,} of {total.size:,} requests shortened to {limit:,} tokens")
    prompt = np.where(is_long, shorter, prompt)
    return replace(recorded, input_tokens=prompt, output_tokens=output, remarks=tuple(remarks))
