"""One profile in memory, whatever the profiler: kernels and copies of the device, calls of its API, named ranges.

Texts stand once, in `Capture.names`; the tables' `name` columns are positions in it. Times are seconds from the start
of the capture. Unknown values are -1 in a column of whole numbers and NaN in one of floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ACTIVITIES = ("kernel", "copy", "memset", "graph", "operator")
"""What a row of the kernel table is. `graph`: a whole CUDA graph; `operator`: an outermost operator of a CPU."""
KERNEL, COPY, MEMSET, GRAPH, OPERATOR = range(len(ACTIVITIES))

CLASSES = (
    "gemm",
    "attention",
    "experts",
    "norm",
    "activation",
    "rope",
    "kv_cache",
    "embedding",
    "communication",
    "sampling",
    "quantization",
    "elementwise",
    "copy",
    "graph",
    "other",
)
"""What kernels are for."""

KERNEL_COLUMNS: Mapping[str, str] = {
    "name": "of the kernel, operator or copy",
    "activity": "position in ACTIVITIES",
    "kernel_class": "position in CLASSES",
    "start_s": "on the device; NaN where only the duration is known",
    "duration_s": "on the device",
    "device": "number of the device",
    "stream": "that it ran in; of an operator, its thread",
    "call": "row of the API call that launched it",
    "range": "row of the innermost named range around that call",
    "operator": "name of the framework's operator that launched it",
    "grid_x": "blocks",
    "grid_y": "blocks",
    "grid_z": "blocks",
    "block_x": "threads",
    "block_y": "threads",
    "block_z": "threads",
    "registers": "a thread",
    "shared_bytes": "shared memory of a block",
    "occupancy_fraction": "warps of a multiprocessor: achieved where counted, else what registers and memory allow",
    "flops": "floating point operations, by shape or by counters",
    "num_bytes": "moved: of a copy or memset its size, else by shape or by counters",
    "compute_fraction": "of the multiprocessors' peak, counted",
    "memory_fraction": "of the memory system's peak, counted",
}
CALL_COLUMNS: Mapping[str, str] = {
    "name": "of the function, without its version",
    "start_s": "on the host",
    "duration_s": "on the host",
    "thread": "that called",
}
RANGE_COLUMNS: Mapping[str, str] = {
    "name": "as the program gave it, after its domain",
    "start_s": "on the host",
    "duration_s": "on the host",
    "thread": "that it began on",
    "is_nested": "a push/pop range, which nests; else one with a start and an end of its own",
}
_INTS = frozenset(
    [
        "name",
        "activity",
        "kernel_class",
        "device",
        "stream",
        "call",
        "range",
        "operator",
        "registers",
        "shared_bytes",
        "thread",
        "is_nested",
        "grid_x",
        "grid_y",
        "grid_z",
        "block_x",
        "block_y",
        "block_z",
    ]
)


@dataclass(frozen=True, eq=False)
class Capture:
    """One profile."""

    tool: str
    """That recorded it, with its version."""
    names: tuple[str, ...]
    kernels: Table
    """Kernels, copies and memsets in the order of their start; without a device, the outermost operators."""
    calls: Table
    ranges: Table
    devices: Mapping[int, str]
    """Number -> name."""
    notes: tuple[str, ...] = ()
    """What the capture does not show."""

    def name_of(self, code: int) -> str:
        """The text at `code`; empty for -1."""
        return self.names[code] if code >= 0 else ""

    @property
    def is_timeline(self) -> bool:
        """Whether it says when things ran, and not only for how long."""
        return bool(np.isfinite(self.kernels["start_s"]).all())

    def kernels_of(self, *activities: int) -> Table:
        """The kernel table's rows of these activities."""
        return self.kernels.where(np.isin(self.kernels["activity"], activities))

    def to_arrow(self) -> pa.Table:
        """The kernel table with its texts, for Parquet."""
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
            place = table.schema.get_field_index(name)
            table = table.set_column(place, pa.field(name, column.type, metadata=table.field(place).metadata), column)
        return table


def capture_table(meanings: Mapping[str, str], num_rows: int, columns: Mapping[str, Any]) -> Table:
    """A table with every column of `meanings`; what `columns` leaves out is unknown in all rows."""
    found = {}
    for name in meanings:
        wanted = np.int64 if name in _INTS else np.float64
        given = columns.get(name)
        found[name] = (
            np.full(num_rows, -1 if wanted is np.int64 else np.nan, wanted)
            if given is None
            else np.asarray(given, wanted).reshape(num_rows)
        )
    return Table(found, meanings)


class Names:
    """Texts, each once, in the order in which they were first asked for."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The position of `text`."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: list[str]) -> Ints:
        """The positions of `texts`."""
        return np.array([self.code(text) for text in texts], np.int64)

    def texts(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._codes)


def innermost_ranges(calls: Table, ranges: Table) -> Ints:
    """Row of the innermost range that holds each call's start on the call's thread; -1 where none does."""
    found = np.full(len(calls), -1, np.int64)
    for thread in np.unique(ranges["thread"]):
        here = np.flatnonzero(calls["thread"] == thread)
        here = here[np.argsort(calls["start_s"][here], kind="stable")]
        starts = calls["start_s"][here]
        mine = np.flatnonzero(ranges["thread"] == thread)
        start_s, end_s = ranges["start_s"][mine], ranges["start_s"][mine] + ranges["duration_s"][mine]
        first, last = np.searchsorted(starts, start_s, "left"), np.searchsorted(starts, end_s, "right")
        inner = np.full(len(here), -1, np.int64)
        # Outer ranges start earlier, or as early and last longer: what comes later lies within.
        for place in np.lexsort((-end_s, start_s)):
            inner[first[place] : last[place]] = mine[place]
        found[here] = inner
    return found


def within(capture: Capture, range_name: str) -> Capture:
    """What was launched within the first range of that name, on any thread; all of it where there is no such range."""
    named = [row for row, code in enumerate(capture.ranges["name"]) if capture.names[code] == range_name]
    if not named:
        return capture
    start_s = capture.ranges["start_s"][named[0]]
    end_s = start_s + capture.ranges["duration_s"][named[0]]
    began_s = capture.kernels["start_s"].copy()
    launched = capture.kernels["call"] >= 0
    began_s[launched] = capture.calls["start_s"][capture.kernels["call"][launched]]
    kept = [(began >= start_s) & (began <= end_s) for began in (capture.calls["start_s"], capture.ranges["start_s"])]
    kernels = capture.kernels.where((began_s >= start_s) & (began_s <= end_s))
    # The rows that columns point to have moved; -1 stays what it is.
    calls, ranges = (np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1) for keep in kept)
    return replace(
        capture,
        kernels=kernels.replaced(call=calls[kernels["call"]], range=ranges[kernels["range"]]),
        calls=capture.calls.where(kept[0]),
        ranges=capture.ranges.where(kept[1]),
    )


def theoretical_occupancy(
    threads: Ints, registers: Ints, shared_bytes: Ints, limits: Mapping[str, float], reserved_bytes: float
) -> Floats:
    """Share of a multiprocessor's warps that its registers, shared memory and block limit let run.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block.
        limits: `warps`, `blocks`, `registers`, `shared_bytes` of a multiprocessor.
        reserved_bytes: shared memory that the driver takes of each block (1 KiB from compute capability 8.0 on).

    Source: NVIDIA's occupancy calculator; registers are given to a warp in units of 256, and to warps four at a time
    (compute capability 3.0 and newer).
    """
    warps = np.maximum(np.ceil(threads / 32), 1)
    per_warp = np.ceil(np.maximum(registers, 1) * 32.0 / 256) * 256
    by_registers = np.floor(np.floor(limits["registers"] / per_warp / 4) * 4 / warps)
    by_memory = np.floor(limits["shared_bytes"] / np.maximum(shared_bytes + reserved_bytes, 1))
    blocks = np.minimum(np.minimum(by_registers, by_memory), np.floor(limits["warps"] / warps))
    occupancy: Floats = np.minimum(blocks, limits["blocks"]) * warps / limits["warps"]
    return occupancy
