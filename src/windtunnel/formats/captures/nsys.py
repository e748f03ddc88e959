"""Nsight Systems' captures, as `nsys export -t sqlite` writes them.

Read by what a file holds, not by its version: tables are left out where they would be empty, and versions add columns
(`greenContextId`, 2023) and tables (`CUPTI_ACTIVITY_KIND_GRAPH_TRACE`). Tested on the full schemas of 2022.4 (3.0.0)
and 2023.4 (3.7.2). The environment of the process that was profiled, which a capture holds too, is not read.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, unreadable
from windtunnel.formats.captures.capture import (
    CALL_COLUMNS,
    CLASSES,
    COPY,
    GRAPH,
    KERNEL,
    KERNEL_COLUMNS,
    MEMSET,
    RANGE_COLUMNS,
    Capture,
    Names,
    capture_table,
    innermost_ranges,
    theoretical_occupancy,
)
from windtunnel.formats.captures.kernel_names import call_name, kernel_class
from windtunnel.metrics.records import Table

MAGIC = b"SQLite format 3\x00"
REPORT_HINT = "export it first: nsys export --type sqlite --output capture.sqlite FILE"

_KERNELS, _COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSETS, _GRAPHS = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_KNOWN = (_KERNELS, _COPIES, _MEMSETS, _GRAPHS, _CALLS, _RANGES)

_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_PROCESS = ~0xFFFFFF
"""The part of a thread's global number that is its process."""

COPY_NAMES = {
    1: "Host-to-Device",
    2: "Device-to-Host",
    3: "Host-to-Array",
    4: "Array-to-Host",
    5: "Array-to-Array",
    6: "Array-to-Device",
    7: "Device-to-Array",
    8: "Device-to-Device",
    9: "Host-to-Host",
    10: "Peer-to-Peer",
    11: "Unified Host-to-Device",
    12: "Unified Device-to-Host",
    13: "Unified Device-to-Device",
}
"""CUPTI's kinds of copies under the labels that `nsys stats` prints."""

NO_KERNELS = "the capture holds no kernels: record with `--trace cuda`, and look for a process that was forked"
GRAPHS_ONLY = (
    "{share:.0%} of the device's time is in CUDA graphs that were recorded whole, without their kernels: "
    "record with `--cuda-graph-trace=node`"
)


def read_nsys(path: Path) -> Capture:
    """The capture in an exported SQLite file.

    Raises:
        InputError: no such file, a report that was not exported, a broken file, or no capture of Nsight Systems.
    """
    with _opened(path) as database:
        return _capture(database, path)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, read only; what SQLite says about it is one sentence."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise unreadable(path, error) from None
    if start != MAGIC:
        hint = REPORT_HINT if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm") else None
        raise InputError(f"{path} is not an SQLite file", hint)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            yield database
    # The message about a broken schema quotes it, in whatever bytes it has become.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as SQLite: {error}", "is the file cut off? export it again") from None


def _capture(database: sqlite3.Connection, path: Path) -> Capture:
    found = _Database(database)
    if not any(name in found.columns for name in (*_KNOWN, "StringIds")):
        raise InputError(f"{path} is no capture of Nsight Systems: it has neither StringIds nor CUPTI's tables")
    missing = next(_missing(found), None)
    if missing:
        raise InputError(f"{path} is no whole capture of Nsight Systems: {missing} is missing")
    texts = dict(found.rows("StringIds", "id", "value", order="id")) if "StringIds" in found.columns else {}
    names = Names()
    start_ns = found.start_ns()
    ranges = _ranges(found, texts, names, start_ns)
    calls, keys = _calls(found, texts, names, start_ns)
    kernels = _kernels(found, texts, names, start_ns, calls, keys, ranges)
    return Capture(
        tool=found.tool(),
        names=names.texts(),
        kernels=kernels,
        calls=calls,
        ranges=ranges,
        devices=found.devices(),
        notes=tuple(_notes(kernels)),
    )


def _missing(found: "_Database") -> Iterator[str]:
    """Tables and columns without which nothing can be said."""
    if "StringIds" not in found.columns and (_KERNELS in found.columns or _CALLS in found.columns):
        yield "StringIds"
    for table in _KNOWN:
        for column in ("start", "end"):
            if table in found.columns and column not in found.columns[table]:
                yield f"the column {column} of {table}"


class _Database:
    """What tables and columns a file has, and their rows."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {
            name: frozenset(row[1] for row in database.execute(f'PRAGMA table_info("{name}")')) for name in tables
        }

    def rows(self, table: str, *columns: str, order: str = "start, rowid", where: str = "1") -> list[tuple[Any, ...]]:
        """The columns of a table; those that this version lacks are None. Newer exports promise no order."""
        chosen = ", ".join(f'"{name}"' if name in self.columns[table] else "NULL" for name in columns)
        return self._database.execute(f'SELECT {chosen} FROM "{table}" WHERE {where} ORDER BY {order}').fetchall()

    def arrays(self, table: str, *columns: str) -> dict[str, NDArray[np.int64]]:
        """The columns as whole numbers, -1 where there is none; no rows of a table that is missing."""
        has = self.columns.get(table, frozenset())
        chosen = ", ".join(f'coalesce("{name}", -1)' if name in has else "-1" for name in columns)
        query = f'SELECT {chosen} FROM "{table}" ORDER BY start, rowid'
        rows = self._database.execute(query).fetchall() if has else []
        return dict(zip(columns, _whole_numbers(rows, table).reshape(len(rows), len(columns)).T, strict=True))

    def start_ns(self) -> int:
        """The earliest time of anything that is read."""
        starts = [
            value
            for table in _KNOWN
            if table in self.columns
            for (value,) in self._database.execute(f'SELECT min(start) FROM "{table}"')
            if value is not None
        ]
        return int(_whole_numbers(starts, "a column of times").min(initial=np.iinfo(np.int64).max)) if starts else 0

    def tool(self) -> str:
        """The version of the exporter and of its schema."""
        table = next((name for name in ("META_DATA_EXPORT", "EXPORT_META_DATA") if name in self.columns), None)
        facts = dict(self.rows(table, "name", "value", order="name")) if table else {}
        version = next((str(facts[name]) for name in facts if re.search(r"PRODUCT.*VERSION|BUILD_VERSION", name)), "")
        schema = facts.get("EXPORT_SCHEMA_VERSION")
        return " ".join(["nsys", *([version] if version else []), *([f"(schema {schema})"] if schema else [])])

    def devices(self) -> dict[int, str]:
        if "TARGET_INFO_GPU" not in self.columns:
            return {}
        rows = self.rows("TARGET_INFO_GPU", "cuDevice", "id", "name", order="id")
        numbers = _whole_numbers([number if own is None else own for own, number, _ in rows], "TARGET_INFO_GPU")
        return dict(zip(numbers.tolist(), (str(name) for *_, name in rows), strict=True))

    def limits(self) -> dict[int, tuple[dict[str, float], float]]:
        """Device -> what a multiprocessor of it holds, and the shared memory reserved for each block."""
        columns = ("maxWarpsPerSm", "maxBlocksPerSm", "maxRegistersPerSm", "maxShmemPerSm", "computeMajor")
        if "TARGET_INFO_GPU" not in self.columns or not set(columns) <= self.columns["TARGET_INFO_GPU"]:
            return {}
        found = {}
        rows = self.rows("TARGET_INFO_GPU", "cuDevice", "id", *columns, order="id")
        numbers = _whole_numbers([[value or 0 for value in row[2:]] for row in rows], "TARGET_INFO_GPU")
        for device, values in zip(self.devices(), numbers.tolist(), strict=False):
            if all(values[:4]):
                limits = dict(zip(("warps", "blocks", "registers", "shared_bytes"), map(float, values), strict=False))
                found[device] = (limits, 1024.0 if values[4] >= 8 else 0.0)
        return found


def _whole_numbers(values: Sequence[Any], table: str) -> NDArray[np.int64]:
    """Values of a table as numbers; SQLite keeps whatever it is given, and a broken file whatever it became."""
    try:
        return np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        raise sqlite3.DataError(f"{table} holds what is no number") from None


def _seconds(ns: NDArray[np.int64], start_ns: int) -> NDArray[np.float64]:
    return (ns - start_ns).astype(np.float64) * 1e-9


def _ranges(found: _Database, texts: Mapping[int, str], names: Names, start_ns: int) -> Table:
    rows, domains = [], {}
    if _RANGES in found.columns:
        columns = ("eventType", "start", "end", "text", "textId", "globalTid", "endGlobalTid", "domainId")
        rows = found.rows(_RANGES, *columns, where=f"eventType IN ({_PUSH_POP}, {_START_END}, {_DOMAIN})")
        domains = {
            (row[5] & _PROCESS if row[5] is not None else None, row[7]): _text(row, texts)
            for row in rows
            if row[0] == _DOMAIN
        }
    ends = _whole_numbers([row[1] if row[2] is None else row[2] for row in rows], _RANGES)
    last_ns = int(ends.max(initial=0))
    rows = [row for row in rows if row[0] != _DOMAIN and row[6] in (None, row[5])]
    shown = []
    for row in rows:
        domain = domains.get((row[5] & _PROCESS if row[5] is not None else None, row[7]), "") if row[7] else ""
        shown.append(f"{domain}:{_text(row, texts)}" if domain else _text(row, texts))
    start = _whole_numbers([row[1] for row in rows], _RANGES)
    end = _whole_numbers([last_ns if row[2] is None else row[2] for row in rows], _RANGES)
    columns_of = {
        "name": names.codes(shown),
        "start_s": _seconds(start, start_ns),
        "duration_s": (end - start) * 1e-9,
        "thread": _whole_numbers([-1 if row[5] is None else row[5] for row in rows], _RANGES),
        "is_nested": [int(row[0] == _PUSH_POP) for row in rows],
    }
    return capture_table(RANGE_COLUMNS, len(rows), columns_of)


def _text(row: tuple[Any, ...], texts: Mapping[int, str]) -> str:
    """A range's text, its own or a registered one."""
    return str(row[3]) if row[3] is not None else _name(texts, row[4])


def _name(texts: Mapping[int, str], code: Any) -> str:
    """The text of that number, which a file that was cut or merged may lack."""
    return str(texts[code]) if code in texts else f"(name {code} is missing)"


def _calls(
    found: _Database, texts: Mapping[int, str], names: Names, start_ns: int
) -> tuple[Table, dict[tuple[int, int], int]]:
    """The API calls, and (process, correlation) -> row of the call that launched."""
    calls = found.arrays(_CALLS, "start", "end", "nameId", "globalTid", "correlationId")
    number = len(calls["start"])
    codes = {code: names.code(call_name(_name(texts, code))) for code in np.unique(calls["nameId"]).tolist()}
    table = capture_table(
        CALL_COLUMNS,
        number,
        {
            "name": [codes[code] for code in calls["nameId"].tolist()],
            "start_s": _seconds(calls["start"], start_ns),
            "duration_s": (calls["end"] - calls["start"]) * 1e-9,
            "thread": calls["globalTid"],
        },
    )
    keys = zip((calls["globalTid"] & _PROCESS).tolist(), calls["correlationId"].tolist(), strict=True)
    return table, {key: row for row, key in enumerate(keys)}


def _kernels(
    found: _Database,
    texts: Mapping[int, str],
    names: Names,
    start_ns: int,
    calls: Table,
    keys: Mapping[tuple[int, int], int],
    ranges: Table,
) -> Table:
    place = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId")
    shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
    kernels = found.arrays(_KERNELS, *place, "demangledName", *shape, "staticSharedMemory", "dynamicSharedMemory")
    copies = found.arrays(_COPIES, *place, "copyKind", "bytes")
    memsets = found.arrays(_MEMSETS, *place, "bytes")
    graphs = found.arrays(_GRAPHS, *place, "graphId")
    of_kernels = [_name(texts, code) for code in kernels["demangledName"].tolist()]
    of_copies = [f"[CUDA memcpy {COPY_NAMES.get(kind, f'kind {kind}')}]" for kind in copies["copyKind"].tolist()]
    of_graphs = [f"[CUDA graph {number}]" for number in graphs["graphId"].tolist()]
    parts = (kernels, copies, memsets, graphs)
    sizes = [len(part["start"]) for part in parts]
    columns: dict[str, Any] = {
        "name": names.codes([*of_kernels, *of_copies, *["[CUDA memset]"] * sizes[2], *of_graphs]),
        "activity": np.repeat([KERNEL, COPY, MEMSET, GRAPH], sizes),
        "kernel_class": [
            *map(kernel_class, of_kernels),
            *[CLASSES.index("copy")] * (sizes[1] + sizes[2]),
            *[CLASSES.index("graph")] * sizes[3],
        ],
    }
    whole = {name: np.concatenate([part[name] for part in parts]) for name in place}
    columns |= {
        "start_s": _seconds(whole["start"], start_ns),
        "duration_s": (whole["end"] - whole["start"]) * 1e-9,
        "device": whole["deviceId"],
        "stream": whole["streamId"],
    }
    launched = zip((whole["globalPid"] & _PROCESS).tolist(), whole["correlationId"].tolist(), strict=True)
    columns["call"] = call = np.array([keys.get(key, -1) for key in launched], np.int64)
    if len(calls):
        columns["range"] = np.where(call >= 0, innermost_ranges(calls, ranges)[call], -1)
    columns |= _padded(kernels, shape, sum(sizes[1:]))
    unknown = np.full(sizes[0], np.nan)
    columns["num_bytes"] = np.concatenate([unknown, copies["bytes"], memsets["bytes"], np.full(sizes[3], np.nan)])
    shared = kernels["staticSharedMemory"] + kernels["dynamicSharedMemory"]
    columns["shared_bytes"] = np.append(shared, np.full(sum(sizes[1:]), -1))
    columns["occupancy_fraction"] = np.append(_occupancy(found, kernels, shared), np.full(sum(sizes[1:]), np.nan))
    table = capture_table(KERNEL_COLUMNS, sum(sizes), columns)
    order = np.argsort(table["start_s"], kind="stable")
    return Table({name: column[order] for name, column in table.columns.items()}, KERNEL_COLUMNS)


def _padded(
    kernels: Mapping[str, NDArray[np.int64]], shape: Iterable[str], num_others: int
) -> dict[str, NDArray[np.int64]]:
    """The shape of each kernel under our names; unknown of what is no kernel."""
    ours = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers")
    return {name: np.append(kernels[own], np.full(num_others, -1)) for name, own in zip(ours, shape, strict=True)}


def _occupancy(
    found: _Database, kernels: Mapping[str, NDArray[np.int64]], shared_bytes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What each kernel's registers and memory allow; NaN where the device's limits are not in the file."""
    occupancy = np.full(len(shared_bytes), np.nan)
    threads = kernels["blockX"] * kernels["blockY"] * kernels["blockZ"]
    for device, (limits, reserved_bytes) in found.limits().items():
        here = kernels["deviceId"] == device
        occupancy[here] = theoretical_occupancy(
            threads[here], kernels["registersPerThread"][here], shared_bytes[here], limits, reserved_bytes
        )
    return occupancy


def _notes(kernels: Table) -> Iterator[str]:
    whole_s = kernels["duration_s"].sum()
    graphs_s = kernels["duration_s"][kernels["activity"] == GRAPH].sum()
    if not np.isin(kernels["activity"], (KERNEL, GRAPH)).any():
        yield NO_KERNELS
    if graphs_s:
        yield GRAPHS_ONLY.format(share=graphs_s / whole_s)
