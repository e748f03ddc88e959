"""Write a timeline's file in the Trace Event Format, which appears completely or not at all."""

import gzip
import itertools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import unwritable
from windtunnel.files import draft_of

Event = dict[str, Any]

SUFFIXES = (".json", ".json.gz")


def write_events(path: Path, about: Mapping[str, Any], events: Iterable[Event]) -> int:
    """Write events, one a line, behind notes for the reader; return their number.

    Compressed where `path` ends in `.gz`. The file appears completely or not at all; the same events give the same
    bytes. InputError where the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    remaining, num_events = iter(events), 0
    try:
        with ExitStack() as files:
            file: Any = files.enter_context(files.enter_context(draft_of(path)).open("wb"))
            if path.suffix == ".gz":
                # No time and no name in the header: the same run gives the same bytes.
                packed = gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file, mtime=0)
                file = files.enter_context(packed)
            # Perfetto tells formats apart by the first key: `{"meta` would be another one.
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
            while chunk := list(itertools.islice(remaining, 1000)):
                file.write((b",\n" if num_events else b"") + b",\n".join(map(encode, chunk)))
                num_events += len(chunk)
            file.write(b"\n]}\n")
    except OSError as error:
        raise unwritable(path, error) from None
    return num_events


def process_names(pid: int, name: str) -> tuple[Event, Event]:
    """Return the metadata that names a process and sorts it by its number."""
    return (
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    )


def thread_name(pid: int, tid: int, name: str) -> Event:
    """Return the metadata that names a thread."""
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
