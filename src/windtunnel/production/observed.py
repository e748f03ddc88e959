"""What a client or a server recorded of its requests: the files that a diagnosis reads."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.steps.read import RUNS, is_step_table
from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError, missing_file
from windtunnel.files import read_bytes
from windtunnel.formats.recognise import FileContent, find_format
from windtunnel.formats.telemetry.prometheus import read_scrapes
from windtunnel.formats.telemetry.record import ServerRecord, record_of_requests
from windtunnel.pricing.table import numeric_column, read_parquet
from windtunnel.serving.scenario import Scenario, load
from windtunnel.units import format_count
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import generate
from windtunnel.workload.traces.table_file import header_of

if TYPE_CHECKING:
    import pyarrow as pa

NEEDED = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s")
SCENARIO = "scenario.yaml"
"""What `windtunnel bench` and `simulate` write beside their requests."""
LEAST_REQUESTS = 20
"""Fewer requests tell nothing."""
LATEST_S = 1e11
"""The year 5138: later times are in milliseconds or smaller units."""


@dataclass(frozen=True, eq=False)
class Observed:
    """Answered requests in the order of their arrival, one entry each; seconds."""

    arrival_s: Floats
    """From the first arrival."""
    input_tokens: Ints
    output_tokens: Ints
    ttft_s: Floats
    e2e_s: Floats
    sent_late_s: Floats
    """How much later than planned each was sent; zeros where the client does not say."""
    position: Ints
    """Place of each among all that were sent."""
    cached_tokens: Ints | None = None
    """Of each prompt, found in the server's prefix cache; None where it does not say."""
    prefixes: PrefixArrays | None = None
    """Common beginnings of the prompts; None where the client does not say, or there are none."""

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN for a single token."""
        later = np.where(self.output_tokens > 1, self.output_tokens - 1.0, np.nan)
        return np.asarray((self.e2e_s - self.ttft_s) / later)

    @property
    def cache_hit_fraction(self) -> float | None:
        """Share of all prompt tokens that were found in the prefix cache; None where the server does not say."""
        if self.cached_tokens is None:
            return None
        return float(self.cached_tokens.sum() / max(self.input_tokens.sum(), 1))


def read_requests(path: Path) -> Observed:
    """Read the requests of a run.

    Args:
        path: `requests.parquet` of `windtunnel bench` or `simulate`, its folder, a CSV file with the same columns, or
            the JSON of `vllm bench serve --save-result --save-detailed`. The workload of a `scenario.yaml` beside it
            says which prompts have a common beginning.

    Raises:
        InputError: another file, a missing column, or too few requests.
    """
    if path.is_dir() and not (path := path / "requests.parquet").exists():
        raise InputError(f"there is no file {path}", f"saved metrics are read by windtunnel observe {path.parent}")
    if not path.exists():
        raise missing_file(path)
    if path.suffix == ".json":
        columns = _detailed(path)
    elif path.name.endswith((".parquet", ".csv", ".csv.gz")):
        columns = _columns(path)
    else:
        hint = "a requests.parquet or its folder, a .csv with its columns, or the JSON of vllm bench --save-detailed"
        raise InputError(f"{path} is of no known kind", hint)
    found = observed(columns, str(path))
    beside = path.with_name(SCENARIO)
    with suppress(InputError):  # it may be another file than the client's
        return replace(found, prefixes=sent_prefixes(load(beside), found))
    return found


def sent_prefixes(scenario: Scenario, recorded: Observed) -> PrefixArrays | None:
    """Return the common beginnings of recorded requests; None where the scenario's workload makes none or others."""
    try:
        drawn = generate(scenario.workload, scenario.seed)
    except InputError:
        return None
    if drawn.prefixes is None or drawn.arrival_s.size <= recorded.position.max():
        return None
    sent = drawn.mapped(lambda _, column: column[recorded.position])
    return sent.prefixes if np.array_equal(sent.input_tokens, recorded.input_tokens) else None


def read_record(path: Path) -> ServerRecord | None:
    """Read what a server emitted or its clients recorded; None for a table of recorded steps, or a folder with one.

    Raises:
        InputError: the file is of no known kind, or says too little.
    """
    if path.is_dir():
        if (path / "requests.parquet").is_file():
            return _record_of(read_requests(path))
        return None if (path / RUNS).is_file() else read_scrapes(path)
    start = FileContent(path).start
    if is_step_table(path) and b"resourceSpans" not in start:
        return _record_of(read_requests(path)) if is_request_table(path) else None
    if path.suffix == ".json" and b"resourceSpans" not in start and '"ttfts"' in FileContent(path).text:
        return _record_of(read_requests(path))
    record: ServerRecord = find_format(path, "server telemetry").read(path)
    return record


def is_request_table(path: Path) -> bool:
    """Whether the columns of a table are those of answered requests; it may be one of steps otherwise."""
    is_table = path.name.endswith((".csv", ".csv.gz", ".parquet"))
    return is_table and any(word in name.lower() for name in header_of(path) for word in ("ttft", "first_token"))


def _record_of(recorded: Observed) -> ServerRecord:
    names = ["arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s"]
    names += [] if recorded.cached_tokens is None else ["cached_tokens"]
    return record_of_requests("recorded requests", {name: getattr(recorded, name) for name in names})


def observed(columns: Mapping[str, NDArray[Any]], where: str = "the run") -> Observed:
    """Return a table's answered requests without its warm-up; InputError for too few, or times that cannot be."""
    size = len(columns["arrival_s"])
    keep = np.isfinite(columns["ttft_s"]) & np.isfinite(columns["e2e_s"]) & (columns["output_tokens"] > 0)
    for name in ("is_warmup", "failed"):
        if name in columns:
            keep &= ~np.asarray(columns[name], bool)
    if keep.sum() < LEAST_REQUESTS:
        count = format_count(int(keep.sum()), "answered request")
        raise InputError(f"{where} has {count}; {LEAST_REQUESTS} are needed")
    ttft_s, e2e_s, latest_s = columns["ttft_s"], columns["e2e_s"], columns["arrival_s"][keep].max()
    wrong = np.flatnonzero(keep & ((e2e_s < ttft_s) | (ttft_s <= 0)))
    if wrong.size:
        row = f"request {wrong[0] + 1} has ttft_s {ttft_s[wrong[0]]:g} and e2e_s {e2e_s[wrong[0]]:g}"
        raise InputError(
            f"{where}: a request ends before its first token: {row}",
            "both are seconds from sending; columns in milliseconds are ttft_ms and e2e_ms",
        )
    if latest_s > LATEST_S:
        hint = "arrival_s is in seconds; a column in milliseconds is arrival_ms"
        raise InputError(f"{where}: the last request arrives at {latest_s:.4g} s", hint)
    order = np.argsort(columns["arrival_s"][keep], kind="stable")
    kept = {name: np.asarray(column)[keep][order] for name, column in columns.items()}
    return Observed(
        arrival_s=kept["arrival_s"] - kept["arrival_s"][0],
        input_tokens=kept["input_tokens"].astype(np.int64),
        output_tokens=kept["output_tokens"].astype(np.int64),
        ttft_s=kept["ttft_s"].astype(np.float64),
        e2e_s=kept["e2e_s"].astype(np.float64),
        sent_late_s=kept["sent_late_s"].astype(np.float64) if "sent_late_s" in kept else np.zeros(order.size),
        position=np.arange(size)[keep][order],
        cached_tokens=kept["cached_tokens"].astype(np.int64) if "cached_tokens" in kept else None,
    )


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    rows = _table(path)
    if not rows.num_rows:
        raise InputError(f"{path} holds no request", f"{LEAST_REQUESTS} are needed")
    scale, own = dict.fromkeys(rows.column_names, 1.0), ", ".join(rows.column_names)
    for name in [name for name in scale if name.endswith("_ms")]:
        seconds = f"{name.removesuffix('ms')}s"
        if seconds not in scale:
            rows, scale[seconds] = rows.append_column(seconds, rows[name]), 1e-3
    if missing := [name for name in NEEDED if name not in scale]:
        hint = f"rename those that hold them (_ms: milliseconds); its columns are {own}"
        raise InputError(f"{path} has no column {', '.join(missing)}", hint)
    columns = {}
    for name in [name for name in (*NEEDED, "is_warmup", "failed", "sent_late_s", "cached_tokens") if name in scale]:
        if name in ("is_warmup", "failed"):
            columns[name] = np.array(rows[name].to_pylist(), bool)
        elif name in ("ttft_s", "e2e_s"):  # a request that failed has none
            values = [np.nan if value is None else float(value) for value in rows[name].to_pylist()]
            columns[name] = np.array(values) * scale[name]
        else:
            columns[name] = numeric_column(rows, name, path) * scale[name]
    return columns


def _table(path: Path) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.csv as pc

    if path.suffix == ".parquet":
        return read_parquet(path)
    try:
        return pc.read_csv(pa.BufferReader(read_bytes(path)))
    except pa.ArrowInvalid as error:
        raise InputError(f"{path} is no readable table: {str(error).splitlines()[0]}") from None


def _detailed(path: Path) -> dict[str, NDArray[Any]]:
    """Return the columns of a result of vLLM's client with its lists of every request."""
    try:
        document = json.loads(read_bytes(path))
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        sent, ttft = (np.array(document[name], np.float64) for name in ("start_times", "ttfts"))
        gaps = [float(np.sum(times)) for times in document["itls"]]
        counts = {f"{kind}_tokens": np.array(document[f"{kind}_lens"], np.float64) for kind in ("input", "output")}
        errors = document.get("errors") or [""] * sent.size
        return {
            "arrival_s": sent,
            "ttft_s": ttft,
            "e2e_s": ttft + gaps,
            "failed": np.array([*map(bool, errors)]),
            **counts,
        }
    except (ValueError, KeyError, TypeError) as error:
        hint = "vllm bench serve --save-result --save-detailed writes it"
        raise InputError(f"{path} has no list of every request: {error}", hint) from None
