"""Read Nsight Systems' captures, as `nsys export -t sqlite` writes them, and remove what identifies the machine.

Tables and columns are found by name, not by version: exports leave out empty tables, and versions add columns
(`greenContextId`, 2023) and tables (`CUPTI_ACTIVITY_KIND_GRAPH_TRACE`). Tested on the full schemas of 2022.4 (3.0.0)
and 2023.4 (3.7.2). The environment of the profiled process, which a capture holds too, is not read.
"""

import re
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.files import draft_of, read_bytes
from windtunnel.formats.captures import capture as profile
from windtunnel.formats.recognise import FileContent
from windtunnel.metrics.records import Table
from windtunnel.schema import read_yaml

MAGIC = b"SQLite format 3\x00"
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
"""Endings of reports that were not exported."""
REPORT_HINT = "export it first: nsys export --type sqlite --output capture.sqlite FILE"

_KERNELS, _COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSETS, _GRAPHS = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_KNOWN = (_KERNELS, _COPIES, _MEMSETS, _GRAPHS, _CALLS, _RANGES)

_PLACE = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId")
_SHAPE = {f"{shape}_{axis}": f"{shape}{axis.upper()}" for shape in ("grid", "block") for axis in "xyz"}
_SHAPE["registers"] = "registersPerThread"
"""Column of the kernel table -> column of the export."""

_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_PROCESS = ~0xFFFFFF
"""The part of a thread's global number that is its process."""

_FACTS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("nsys.yaml"))
_COPY_NAMES = dict(enumerate(_FACTS["copies"], start=1))

NO_KERNELS = "the capture holds no kernels: record with `--trace cuda`, and look for a process that was forked"
GRAPHS_ONLY = (
    "{share:.0%} of the device's time is in CUDA graphs that were recorded whole, without their kernels: "
    "record with `--cuda-graph-trace=node`"
)


def is_nsys(file: FileContent) -> bool:
    """Whether a file is an SQLite file, or a report that was not exported."""
    return MAGIC.startswith(file.start[: len(MAGIC)]) or file.path.suffix in REPORTS


def read_nsys(path: Path) -> profile.Capture:
    """Read an exported SQLite file; InputError where it is missing, not exported, broken, or not of Nsight Systems."""
    with _opened(path) as database:
        return _Export(database, path).capture()


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database read-only; an error of SQLite becomes one sentence."""
    start = read_bytes(path, len(MAGIC))
    if path.suffix in REPORTS:
        hint = REPORT_HINT.replace("FILE", path.name)
        raise InputError(f"{path} is a report that only its own tool opens", hint)
    if start != MAGIC:
        raise InputError(f"{path} is not an SQLite file")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            yield database
    # The message about a broken schema quotes it, in whatever bytes it has become.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as SQLite: {error}", "is the file cut off? export it again") from None


class _Export:
    """Tables and columns of an exported file, with the start of its clock and the texts met so far. InputError where a
    table or column is missing without which nothing can be read."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {
            name: frozenset(row[1] for row in database.execute(f'PRAGMA table_info("{name}")')) for name in tables
        }
        if not any(name in self.columns for name in (*_KNOWN, "StringIds")):
            raise InputError(f"{path} is no capture of Nsight Systems: it has neither StringIds nor CUPTI's tables")
        missing = [
            f"the column {column} of {table}"
            for table in _KNOWN
            for column in ("start", "end")
            if column not in self.columns.get(table, {column})
        ]
        if "StringIds" not in self.columns and (_KERNELS in self.columns or _CALLS in self.columns):
            missing.insert(0, "StringIds")
        if missing:
            raise InputError(f"{path} is no whole capture of Nsight Systems: {missing[0]} is missing")
        self.texts = dict(self.rows("StringIds", "id", "value", order="id"))
        self.names = profile.Names()
        self.start_ns = self._start_ns()

    def capture(self) -> profile.Capture:
        ranges = self.ranges()
        calls, call_rows = self.calls()
        kernels = self.kernels(call_rows)
        if len(calls):
            inner = profile.innermost_ranges(calls, ranges)
            kernels = kernels.replaced(range=np.where(kernels["call"] >= 0, inner[kernels["call"]], -1))
        kernels = kernels.where(np.argsort(kernels["start_s"], kind="stable"))
        notes = tuple(_notes(kernels))
        return profile.Capture(self.tool(), tuple(self.names), kernels, calls, ranges, self.devices(), notes)

    def rows(
        self, table: str, *columns: str, order: str = "start, rowid", where: str = "1", unknown: str = "NULL"
    ) -> list[tuple[Any, ...]]:
        """Return columns of a table, `unknown` where a value or the whole column is missing; a missing table has no
        rows. Newer exports promise no order.
        """
        if table not in self.columns:
            return []
        present = self.columns[table]
        chosen = ", ".join(f'coalesce("{name}", {unknown})' if name in present else unknown for name in columns)
        return self._database.execute(f'SELECT {chosen} FROM "{table}" WHERE {where} ORDER BY {order}').fetchall()

    def arrays(self, table: str, *columns: str) -> dict[str, Ints]:
        """Return columns as whole numbers, -1 where a value is missing."""
        rows = self.rows(table, *columns, unknown="-1")
        return dict(zip(columns, _whole_numbers(rows, table).reshape(len(rows), len(columns)).T, strict=True))

    def _start_ns(self) -> int:
        """Return the earliest time of all tables."""
        starts = [
            value
            for table in _KNOWN
            if table in self.columns
            for (value,) in self._database.execute(f'SELECT min(start) FROM "{table}"')
            if value is not None
        ]
        return int(_whole_numbers(starts, "a column of times").min(initial=np.iinfo(np.int64).max)) if starts else 0

    def tool(self) -> str:
        """Return the version of the exporter and of its schema."""
        table = next((name for name in ("META_DATA_EXPORT", "EXPORT_META_DATA") if name in self.columns), None)
        facts = dict(self.rows(table, "name", "value", order="name")) if table else {}
        version = next((str(facts[name]) for name in facts if re.search(r"PRODUCT.*VERSION|BUILD_VERSION", name)), "")
        schema = facts.get("EXPORT_SCHEMA_VERSION")
        return " ".join(["nsys", *([version] if version else []), *([f"(schema {schema})"] if schema else [])])

    def devices(self) -> dict[int, str]:
        rows = self.rows("TARGET_INFO_GPU", "cuDevice", "id", "name", order="id")
        numbers = _whole_numbers([row[1] if row[0] is None else row[0] for row in rows], "TARGET_INFO_GPU")
        return dict(zip(numbers.tolist(), (str(name) for *_, name in rows), strict=True))

    def span(self, start_ns: Ints, end_ns: Ints) -> dict[str, NDArray[Any]]:
        return {
            "start_s": (start_ns - self.start_ns).astype(np.float64) * 1e-9,
            "duration_s": (end_ns - start_ns) * 1e-9,
        }

    def text(self, code: Any) -> str:
        """Return the text with the number `code`, which a file that was cut or merged may lack."""
        return str(self.texts[code]) if code in self.texts else f"(name {code} is missing)"

    def ranges(self) -> Table:
        """Return the NVTX ranges; a range that never ended lasts to the last event."""
        columns = ("eventType", "start", "end", "text", "textId", "globalTid", "endGlobalTid", "domainId")
        kinds = f"eventType IN ({_PUSH_POP}, {_START_END}, {_DOMAIN})"
        rows = self.rows(_RANGES, *columns, where=kinds)
        texts = [str(row[3]) if row[3] is not None else self.text(row[4]) for row in rows]
        domains = {_domain(row): text for row, text in zip(rows, texts, strict=True) if row[0] == _DOMAIN}
        last_ns = int(_whole_numbers([row[1] if row[2] is None else row[2] for row in rows], _RANGES).max(initial=0))
        kept = [i for i, row in enumerate(rows) if row[0] != _DOMAIN and row[6] in (None, row[5])]
        prefixes = [domains.get(_domain(rows[i]), "") if rows[i][7] else "" for i in kept]
        names = [f"{prefix}:{texts[i]}" if prefix else texts[i] for i, prefix in zip(kept, prefixes, strict=True)]
        rows = [rows[i] for i in kept]
        start_ns = _whole_numbers([row[1] for row in rows], _RANGES)
        end_ns = _whole_numbers([last_ns if row[2] is None else row[2] for row in rows], _RANGES)
        values = {
            "name": self.names.codes(names),
            **self.span(start_ns, end_ns),
            "thread": _whole_numbers([-1 if row[5] is None else row[5] for row in rows], _RANGES),
            "is_nested": [int(row[0] == _PUSH_POP) for row in rows],
        }
        return profile.capture_table("ranges", len(rows), values)

    def calls(self) -> tuple[Table, dict[tuple[int, int], int]]:
        """Return the API calls, and (process, correlation) -> row of the call that launched."""
        calls = self.arrays(_CALLS, "start", "end", "nameId", "globalTid", "correlationId")
        ids = calls["nameId"].tolist()
        codes = {code: self.names[profile.call_name(self.text(code))] for code in sorted(set(ids))}
        values = {
            "name": [codes[code] for code in ids],
            **self.span(calls["start"], calls["end"]),
            "thread": calls["globalTid"],
        }
        keys = zip((calls["globalTid"] & _PROCESS).tolist(), calls["correlationId"].tolist(), strict=True)
        return profile.capture_table("calls", len(ids), values), {key: row for row, key in enumerate(keys)}

    def kernels(self, call_rows: Mapping[tuple[int, int], int]) -> Table:
        """Return kernels, copies, memsets and whole graphs, one kind after another."""
        shared = ("staticSharedMemory", "dynamicSharedMemory")
        kernels = self.arrays(_KERNELS, *_PLACE, "demangledName", *_SHAPE.values(), *shared)
        copies = self.arrays(_COPIES, *_PLACE, "copyKind", "bytes")
        memsets = self.arrays(_MEMSETS, *_PLACE, "bytes")
        graphs = self.arrays(_GRAPHS, *_PLACE, "graphId")
        kernel_names = [self.text(code) for code in kernels["demangledName"].tolist()]
        copy_names = [f"[CUDA memcpy {_COPY_NAMES.get(kind, f'kind {kind}')}]" for kind in copies["copyKind"].tolist()]
        memset_names = ["[CUDA memset]"] * len(memsets["start"])
        graph_names = [f"[CUDA graph {number}]" for number in graphs["graphId"].tolist()]
        of_kernels = {
            "kernel_class": list(map(profile.kernel_class, kernel_names)),
            "shared_bytes": kernels[shared[0]] + kernels[shared[1]],
            **{column: kernels[theirs] for column, theirs in _SHAPE.items()},
        }
        copy = profile.CLASSES.index("copy")
        parts = (
            (profile.KERNEL, kernel_names, kernels, of_kernels),
            (profile.COPY, copy_names, copies, {"kernel_class": copy, "num_bytes": copies["bytes"]}),
            (profile.MEMSET, memset_names, memsets, {"kernel_class": copy, "num_bytes": memsets["bytes"]}),
            (profile.GRAPH, graph_names, graphs, {"kernel_class": profile.CLASSES.index("graph")}),
        )
        tables = []
        for activity, names, columns, values in parts:
            launches = zip((columns["globalPid"] & _PROCESS).tolist(), columns["correlationId"].tolist(), strict=True)
            common = {
                "name": self.names.codes(names),
                "activity": activity,
                **self.span(columns["start"], columns["end"]),
                "device": columns["deviceId"],
                "stream": columns["streamId"],
                "call": [call_rows.get(key, -1) for key in launches],
            }
            tables.append(profile.capture_table("kernels", len(names), {**common, **values}))
        columns = {name: np.concatenate([table[name] for table in tables]) for name in tables[0].columns}
        return Table(columns, tables[0].meanings)


def _domain(row: tuple[Any, ...]) -> tuple[int | None, Any]:
    """Return process and number of the domain that a row of NVTX_EVENTS names."""
    return row[5] & _PROCESS if row[5] is not None else None, row[7]


def _whole_numbers(values: Sequence[Any], table: str) -> Ints:
    """Return values of a table as numbers; a broken file may hold anything in a column of numbers."""
    try:
        return np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        raise sqlite3.DataError(f"{table} holds a value that is no number") from None


def _notes(kernels: Table) -> Iterator[str]:
    total_s = kernels["duration_s"].sum()
    graphs_s = kernels["duration_s"][kernels["activity"] == profile.GRAPH].sum()
    if not np.isin(kernels["activity"], (profile.KERNEL, profile.GRAPH)).any():
        yield NO_KERNELS
    if graphs_s:
        yield GRAPHS_ONLY.format(share=graphs_s / total_s)


def scrub_nsys(path: Path) -> int:
    """Remove environment variables, users, hosts, folders and the list of processes from an exported capture.
    InputError where it is no capture of Nsight Systems; WindtunnelError where it cannot be written.

    Returns:
        The number of removed rows. The file changes completely or not at all.
    """
    read_nsys(path)
    try:
        with draft_of(path) as draft:
            shutil.copy2(path, draft)
            with closing(sqlite3.connect(draft)) as database:
                tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                removed = sum(
                    database.execute(f"DELETE FROM {table} WHERE {where}").rowcount
                    for table, where in _FACTS["private"]
                    if table in tables
                )
                database.commit()
                # Deleted rows stay readable in the file until it is written anew.
                database.execute("VACUUM")
    except (OSError, sqlite3.Error) as error:
        raise WindtunnelError(f"{path} cannot be scrubbed: {error}") from None
    return removed
