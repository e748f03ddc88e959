"""One profile in memory, whatever the profiler: the device's kernels and copies, API calls, ranges, and names.

Texts are stored once, in `Capture.names`; the tables' `name` columns are positions in it. Times are seconds from the
start of the capture. Unknown values are -1 in a column of whole numbers and NaN in one of floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.formats.recognise import find_format
from windtunnel.metrics.records import Table
from windtunnel.schema import read_yaml

if TYPE_CHECKING:
    import pyarrow as pa

ACTIVITIES = ("kernel", "copy", "memset", "graph", "operator")
"""Kinds of rows in the kernel table. `graph`: a whole CUDA graph; `operator`: an outermost operator of a CPU."""
KERNEL, COPY, MEMSET, GRAPH, OPERATOR = range(len(ACTIVITIES))

CLASSES = (
    *("gemm", "attention", "experts", "norm", "activation", "rope", "kv_cache", "embedding", "communication"),
    *("sampling", "quantization", "elementwise", "copy", "graph", "other"),
)
"""Purposes of kernels."""

_PATTERNS = tuple(
    (CLASSES.index(name), re.compile("|".join(patterns), re.IGNORECASE))
    for name, patterns in read_yaml(Path(__file__).with_name("kernel_classes.yaml")).items()
)

TableKind = Literal["kernels", "calls", "ranges"]
COLUMNS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_name("columns.yaml"))
"""Table -> column -> meaning."""
_FLOAT_ENDINGS = ("_s", "_fraction", "flops", "num_bytes")
"""Columns with these endings hold floats, all others whole numbers."""


@dataclass(frozen=True, eq=False)
class Capture:
    """One profile."""

    tool: str
    """The profiler, with its version."""
    names: tuple[str, ...]
    kernels: Table
    """Kernels, copies and memsets in the order of their start; without a device, the outermost operators."""
    calls: Table
    ranges: Table
    devices: Mapping[int, str]
    """Number -> name."""
    notes: tuple[str, ...] = ()
    """Remarks for people on facts that the capture does not show."""

    def name_of(self, code: int) -> str:
        """Return the text at `code`; empty for -1."""
        return self.names[code] if code >= 0 else ""

    @property
    def is_timeline(self) -> bool:
        """Whether starts are known, and not only durations."""
        return bool(np.isfinite(self.kernels["start_s"]).all())

    def kernels_of(self, *activities: int) -> Table:
        return self.kernels.where(np.isin(self.kernels["activity"], activities))

    def launched_s(self) -> Floats:
        """Return when each row of the kernel table was launched; its own start where the launch is unknown."""
        launched_s = self.kernels["start_s"].copy()
        is_known = self.kernels["call"] >= 0
        launched_s[is_known] = self.calls["start_s"][self.kernels["call"][is_known]]
        return launched_s

    def to_arrow(self) -> pa.Table:
        """Return the kernel table with its texts, for Parquet."""
        import pyarrow as pa

        table = self.kernels.to_arrow()
        for name, texts in (
            ("name", self.names),
            ("operator", self.names),
            ("activity", ACTIVITIES),
            ("kernel_class", CLASSES),
        ):
            codes = self.kernels[name]
            column = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(texts, pa.string()))
            index = table.schema.get_field_index(name)
            table = table.set_column(index, pa.field(name, column.type, metadata=table.field(index).metadata), column)
        return table


def capture_table(kind: TableKind, num_rows: int = 0, columns: Mapping[str, Any] | None = None) -> Table:
    """Make a table of a capture with all its columns.

    `columns` has one value for each row, or one for all; columns that are left out are unknown in all rows. InputError
    where a column has something else than numbers of 64 bits.
    """
    columns, meanings, filled = columns or {}, COLUMNS[kind], {}
    for name in meanings:
        dtype, unknown = (np.float64, np.nan) if name.endswith(_FLOAT_ENDINGS) else (np.int64, -1)
        try:
            filled[name] = np.full(num_rows, columns.get(name, unknown), dtype)
        except (OverflowError, TypeError, ValueError):
            raise InputError(f"the {name} of one of the {kind} is no number of 64 bits") from None
    return Table(filled, meanings)


def shape_columns(shape: str, sizes: Iterable[Sequence[int] | None]) -> dict[str, list[int]]:
    """Return the columns `SHAPE_x`, `SHAPE_y` and `SHAPE_z` of sizes, each three numbers or None."""
    known = [(-1, -1, -1) if size is None or len(size) != 3 else size for size in sizes]
    return {f"{shape}_{axis}": [size[i] for size in known] for i, axis in enumerate("xyz")}


class Names(dict[str, int]):
    """Texts and their positions, each once, in the order of their first use."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))

    def codes(self, texts: Iterable[str]) -> Ints:
        return np.array([self[text] for text in texts], np.int64)


def innermost_ranges(calls: Table, ranges: Table) -> Ints:
    """Return the row of the innermost range around each call's start on the call's thread; -1 without a range."""
    innermost = np.full(len(calls), -1, np.int64)
    for thread in np.unique(ranges["thread"]):
        call_rows = np.flatnonzero(calls["thread"] == thread)
        call_rows = call_rows[np.argsort(calls["start_s"][call_rows], kind="stable")]
        calls_s = calls["start_s"][call_rows]
        rows = np.flatnonzero(ranges["thread"] == thread)
        start_s, end_s = ranges["start_s"][rows], ranges["start_s"][rows] + ranges["duration_s"][rows]
        first, last = np.searchsorted(calls_s, start_s, "left"), np.searchsorted(calls_s, end_s, "right")
        on_thread = np.full(len(call_rows), -1, np.int64)
        # Outer ranges start earlier, or at the same time and last longer: later ones in this order lie within.
        for i in np.lexsort((-end_s, start_s)):
            on_thread[first[i] : last[i]] = rows[i]
        innermost[call_rows] = on_thread
    return innermost


def within(capture: Capture, range_name: str) -> Capture:
    """Cut a capture to the first range of that name, on any thread; without such a range, return all of it."""
    named = [row for row, code in enumerate(capture.ranges["name"]) if capture.names[code] == range_name]
    if not named:
        return capture
    start_s = capture.ranges["start_s"][named[0]]
    end_s = start_s + capture.ranges["duration_s"][named[0]]
    in_kernels, in_calls, in_ranges = (
        (began_s >= start_s) & (began_s <= end_s)
        for began_s in (capture.launched_s(), capture.calls["start_s"], capture.ranges["start_s"])
    )
    kernels = capture.kernels.where(in_kernels)
    # The rows that columns point to have moved; -1 stays what it is.
    calls, ranges = (np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1) for kept in (in_calls, in_ranges))
    return replace(
        capture,
        kernels=kernels.replaced(call=calls[kernels["call"]], range=ranges[kernels["range"]]),
        calls=capture.calls.where(in_calls),
        ranges=capture.ranges.where(in_ranges),
    )


@cache
def kernel_class(name: str) -> int:
    """Return the position in CLASSES of a kernel's or operator's purpose, by its name; `other` where it is unclear."""
    return next((code for code, pattern in _PATTERNS if pattern.search(name)), CLASSES.index("other"))


@cache
def short_name(name: str) -> str:
    """Return a kernel's name without its return type, template arguments, namespace and parameters.

    `void at::native::elementwise_kernel<128, 4, ...>(int, ...)` -> `elementwise_kernel`.
    """
    if name.startswith("["):
        return name
    text = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, list[str]()
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and kept:
            break
        if depth == 0 and letter != ">":
            kept.append(letter)
    return "".join(kept).strip().split(" ")[-1].rsplit("::", 1)[-1] or name


def call_name(name: str) -> str:
    """Return a function's name without CUPTI's version: `cudaLaunchKernel_v7000` -> `cudaLaunchKernel`."""
    return re.sub(r"_v\d{4,5}$", "", name)


def read_capture(path: Path) -> Capture:
    """Read a profiler's file; InputError where it is missing, broken, not exported, or of another program."""
    capture: Capture = find_format(path, "capture").read(path)
    return capture
