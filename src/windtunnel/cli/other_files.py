"""Which command reads a file that another command was given."""

from contextlib import suppress
from pathlib import Path
from typing import get_args

from windtunnel.calibration.measured_runs import COLUMNS
from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.captures.kineto import TRACE
from windtunnel.formats.clients import web
from windtunnel.formats.recognise import Use, find_format
from windtunnel.production.observed import is_request_table
from windtunnel.workload.schema import TraceColumns
from windtunnel.workload.traces.layouts import LENGTHS, recognise
from windtunnel.workload.traces.table_file import header_of

_READERS = {
    "client result": ("validate", "calibrate", "diagnose", "gate"),
    "workload or trace": ("workload", "network", "lab"),
    "capture": ("lab kernels", "lab", "profile", "workload"),
    "server telemetry": ("observe",),
}
"""What a file is read as -> the verbs that do, the usual one first."""
_RUNS = {name for name, column in COLUMNS.items() if column.needed and column.of_client}
_SERVER = {name for name, column in COLUMNS.items() if column.needed and not column.of_client}
_METRICS = {each for name, column in COLUMNS.items() if column.metric for each in (name, column.metric, *column.also)}
_LOADS = {each for name in ("concurrency", "rate_per_s") for each in (name, *COLUMNS[name].also)}


def reader_of(path: Path, verb: str) -> str | None:
    """Return a hint that names the command that reads a file; None where `verb` (or `--trace`) reads it, or none."""
    kind, use, *readers = _kind_of(path)
    return None if verb in readers or not kind else f"it is {kind}: {use}"


def _kind_of(path: Path) -> tuple[str, ...]:
    """Return what a file is, what reads it, and the verbs that do; empty texts where nothing is known."""
    with suppress(InputError):
        if b"CREATE TABLE evaluations" in read_bytes(path, limit=4096):
            return "a store of searches", _reads(f"search SPACE --store {path}"), "search", "recommend", "dashboard"
        kind = find_format(path, *(use for use in get_args(Use) if use in _READERS))
        if kind.is_certain:
            readers = _READERS[kind.use]
            result = "a result of " if kind.use == "client result" else "a "
            compares = f"`windtunnel gate --measured {path} --baseline OTHER` compares two"
            if kind in web.FORMATS:  # without a load
                return f"{result}{kind.name}", compares, "gate"
            gate = f"; {compares}" if "gate" in readers else ""
            reads = _reads(f"{readers[0]} {path}")
            if kind.name == TRACE:
                reads = f"`windtunnel lab kernels {path}` shows where its time goes"
            return f"{result}{kind.name}", f"{reads}{gate}", *readers
    with suppress(InputError):
        header = header_of(path)
        if header[:2] == ["Metric", "avg"]:
            return "GenAI-Perf's table", "`windtunnel validate` reads the JSON file that is written beside it"
        if set(header) >= _RUNS and (_METRICS | _SERVER) & set(header) and _LOADS & set(header):
            return "a table of measured runs", _reads(f"validate {path}"), "validate", "calibrate", "diagnose"
        if {"isl", "osl"} <= {name.lower() for name in header}:
            needs = "`windtunnel validate` says which columns of it to rename, as a CSV file"
            return "a table of InferenceX's runs", needs, *(["validate"] if path.suffix == ".csv" else [])
        layout = recognise(path, header, TraceColumns(), LENGTHS)
        if _METRICS & set(header) and layout.arrival not in header:
            return "", ""  # measured, but not request by request
        answered = ("diagnose", "observe") if is_request_table(path) else ()
        return "a trace of requests", _reads(f"simulate --trace {path}"), "--trace", *answered
    return "", ""


def _reads(command: str) -> str:
    return f"`windtunnel {command}` reads it"
