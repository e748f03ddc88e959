"""What a client or a server recorded of its requests: the files that a diagnosis reads."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.measured_runs import columns_of
from windtunnel.calibration.steps.read import RUNS, StepColumn, is_step_table
from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError, missing_file
from windtunnel.files import read_bytes
from windtunnel.formats.recognise import FileContent, FileFormat, find_format
from windtunnel.formats.telemetry.prometheus import LATEST_S, is_grafana, read_scrapes
from windtunnel.formats.telemetry.record import ServerRecord, record_of_requests
from windtunnel.serving.scenario import Scenario, load
from windtunnel.units import format_count
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import generate
from windtunnel.workload.traces.columns import Column, dates_s
from windtunnel.workload.traces.table_file import header_of, read_columns

COLUMNS: Mapping[str, StepColumn] = columns_of(StepColumn, Path(__file__).with_suffix(".yaml"))
PHASE, WARMUP = "metadata.benchmark_phase", "warmup"
"""AIPerf's column of phases, and that of requests that do not count."""
TABLES = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
SCENARIO = "scenario.yaml"
"""What `windtunnel bench` and `simulate` write beside their requests."""
LEAST_REQUESTS = 20
"""Fewer requests tell nothing."""


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
    num_failed: int = 0
    """Requests besides that were not answered."""

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
    """Read the requests of a run. InputError for another file, a missing column, or too few requests.

    Args:
        path: `requests.parquet` of `windtunnel bench` or `simulate`, its folder, a table with the same columns or
            AIPerf's, the JSON of `vllm bench serve --save-result --save-detailed` or guidellm, or spans. The workload
            of a `scenario.yaml` beside it says which prompts have a common beginning.
    """
    if path.is_dir() and not (path := path / "requests.parquet").exists():
        raise InputError(f"there is no file {path}", f"saved metrics are read by windtunnel observe {path.parent}")
    if not path.exists():
        raise missing_file(path)
    if (kind := json_telemetry(path)) is not None:
        columns = kind.read(path).requests
        if columns is None:
            raise InputError(f"{path} does not tell of each request")
    elif path.suffix == ".json":
        columns = _detailed(path)
    elif path.name.endswith(TABLES):
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
    InputError where the file is of no known kind, or says too little."""
    if path.is_dir():
        if (path / "requests.parquet").is_file():
            return _record_of(read_requests(path))
        return None if (path / RUNS).is_file() else read_scrapes(path)
    kind = json_telemetry(path)
    if kind is None and is_step_table(path):
        return _record_of(read_requests(path)) if is_request_table(path) else None
    if kind is None and path.suffix == ".json" and is_detailed(path):
        return _record_of(read_requests(path))
    record: ServerRecord = (kind or find_format(path, "server telemetry")).read(path)
    return record


def json_telemetry(path: Path) -> FileFormat | None:
    """Return the kind of a JSON file or Grafana table that a server emitted; None for another, as a table of steps."""
    with suppress(InputError):
        if (file := FileContent(path)).is_json or is_grafana(file):
            return find_format(path, "server telemetry")
    return None


def is_detailed(path: Path) -> bool:
    """Whether a client's result says when each request was sent, as vLLM's with its details and guidellm's do."""
    return any(f'"{name}"' in FileContent(path).text for name in ("start_times", "request_start_time"))


def is_request_table(path: Path) -> bool:
    """Whether the columns of a table are those of answered requests; it may be one of steps otherwise."""
    if not path.name.endswith(TABLES):
        return False
    header = header_of(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):  # measured runs are lines too
        return all(name in _named(header) for name, column in COLUMNS.items() if column.needed)
    return any(word in name.lower() for name in header for word in ("ttft", "first_token"))


def _record_of(recorded: Observed) -> ServerRecord:
    names = ["arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s"]
    names += [] if recorded.cached_tokens is None else ["cached_tokens"]
    return record_of_requests("recorded requests", {name: getattr(recorded, name) for name in names})


def observed(columns: Mapping[str, NDArray[Any]], where: str = "the run") -> Observed:
    """Return a table's answered requests without its warm-up; InputError for too few, or times that cannot be."""
    size = len(columns["arrival_s"])
    counts = ~np.asarray(columns.get("is_warmup", np.zeros(size)), bool)
    keep = counts & np.isfinite(columns["ttft_s"]) & np.isfinite(columns["e2e_s"])
    if "failed" in columns:
        keep &= ~np.asarray(columns["failed"], bool)
    for name in [name for name, column in COLUMNS.items() if name in columns and not column.is_text]:
        if (missing := np.flatnonzero(keep & ~np.isfinite(columns[name]))).size:
            raise InputError(f"{where}: request {missing[0] + 1} has no {name}", "fill it in, or remove the row")
    keep &= columns["output_tokens"] > 0
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
        num_failed=int((counts & ~keep).sum()),
    )


def _named(header: Sequence[str]) -> dict[str, str]:
    names = {name: next((each for each in column.names if each in header), "") for name, column in COLUMNS.items()}
    return {name: given for name, given in names.items() if given}


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    header = header_of(path)
    named = _named(header)
    if missing := [name for name, column in COLUMNS.items() if column.needed and name not in named]:
        hint = f"rename those that hold them (_ms: milliseconds); its columns are {', '.join(header)}"
        raise InputError(f"{path} has no column {', '.join(missing)}", hint)
    values = read_columns(path, list(named.values()))
    return {column: _values(path, COLUMNS[column], name, values[name]) for column, name in named.items()}


def _values(path: Path, column: StepColumn, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return a column's values, numbers in our unit."""
    if column.is_text:
        return np.asarray(values == WARMUP if name == PHASE else values, bool)
    if column.name == "arrival_s" and values.dtype.kind not in "iuf":
        return dates_s(Column(path, name, values, np.arange(1, values.size + 1)), None)[0]
    try:
        return np.asarray(values, np.float64) * column.names[name]
    except (ValueError, TypeError):
        raise InputError(f"{path}: {name} is not a number everywhere", column.meaning) from None


def _detailed(path: Path) -> dict[str, NDArray[Any]]:
    """Return the columns of a result of vLLM's client with its lists of every request."""
    try:
        document = json.loads(read_bytes(path))
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        if "benchmarks" in document:
            return _of_guidellm(path, document["benchmarks"])
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
        hint = "newer versions of vllm bench serve --save-result --save-detailed write it"
        raise InputError(f"{path} has no list of every request: {error}", hint) from None


def _of_guidellm(path: Path, runs: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return the columns of guidellm's requests (0.3 to 0.8); InputError for several loads, or a sample of requests."""
    answered = [run["requests"]["successful"] for run in runs if run["requests"]["successful"]]
    if len(answered) != 1:
        raise InputError(f"{path} has the requests of {len(answered)} loads", "run guidellm with one")
    total = sum(run["metrics"]["request_totals"]["successful"] for run in runs)
    if len(answered[0]) < total:
        raise InputError(f"{path} has {len(answered[0])} of {total} requests", "let guidellm save all of them")
    names = {"arrival_s": "request_start_time", "ttft_s": "time_to_first_token_ms", "e2e_s": "request_latency"}
    names |= {"input_tokens": "prompt_tokens", "output_tokens": "output_tokens"}
    columns = {own: np.array([row[name] for row in answered[0]], np.float64) for own, name in names.items()}
    return columns | {"ttft_s": columns["ttft_s"] / 1e3}
