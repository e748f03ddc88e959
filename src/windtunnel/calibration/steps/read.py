"""Read recorded steps, and the deployments that took them: tables with the column names of several recorders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.measured_runs import columns_of, parallelism_label, reason_of, text_rows
from windtunnel.errors import InputError, did_you_mean, missing_file
from windtunnel.formats.launch.read import read_launch_command, servers
from windtunnel.schema import Schema, set_path
from windtunnel.serving.scenario import Scenario, Setup, resolve, scenario_from
from windtunnel.serving.shorthand import raw_scenario
from windtunnel.workload.traces.table_file import header_of, read_columns, text_of

StepTable = NDArray[Any]
"""Record array of recorded steps, a field for each of `COLUMNS`; numbers are floats, NaN where a cell is empty."""

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".jsonl", ".jsonl.gz")


class StepColumn(Schema):
    """A column of a table of recorded steps (`columns.yaml`)."""

    name: str
    meaning: str
    names: dict[str, float]
    """Name in a file -> factor of its unit."""
    needed: bool = False
    is_text: bool = False


BATCH_COLUMNS = ("prefill_tokens", "prefill_requests", "decode_requests")
MOST_IN_STEP = 1 << 22
"""Tokens, or requests, of a step that can be priced: 64 times the largest budget that engines are given."""

COLUMNS: Mapping[str, StepColumn] = columns_of(StepColumn, Path(__file__).with_name("columns.yaml"))


def is_step_table(path: Path) -> bool:
    """Whether a file's name is that of a table."""
    return path.name.endswith(SUFFIXES)


def read_steps(path: Path) -> StepTable:
    """Read a table of recorded steps, a row for each step and rank. InputError where the file is missing or no table; a
    column is missing, given twice, or holds a text for a number."""
    if not path.exists():
        raise missing_file(path)
    if not is_step_table(path):
        raise InputError(f"{path.name} is no table of steps", f"its name must end in {', '.join(SUFFIXES)}")
    header = header_of(path)
    if not any(name in header for column in COLUMNS.values() if column.needed for name in column.names):
        hint = f"its columns are {', '.join(header)}; requests need arrival_s, input_tokens, ttft_s, ..."
        raise InputError(f"{path.name} has no column for steps, nor for requests", hint)
    names = {column.name: _name_in(path, header, column) for column in COLUMNS.values()}
    values = read_columns(path, list(filter(None, names.values())))
    num_steps = len(next(iter(values.values())))
    steps = np.zeros(num_steps, [(name, object if column.is_text else float) for name, column in COLUMNS.items()])
    for name, given in names.items():
        if given is not None:
            steps[name] = _field(path, given, values[given], COLUMNS[name])
        elif COLUMNS[name].is_text:
            steps[name] = ""
    for name in BATCH_COLUMNS:
        if (largest := np.nanmax(steps[name], initial=0.0)) > MOST_IN_STEP:
            meaning = COLUMNS[name].meaning
            raise InputError(
                f"{path.name}: {largest:,.0f} is too many for {meaning}; at most {MOST_IN_STEP:,} can be priced"
            )
    return steps


def _name_in(path: Path, header: list[str], column: StepColumn) -> str | None:
    given = [name for name in column.names if name in header]
    if len(given) > 1:
        raise InputError(f"{path.name} has two columns of one meaning: {', '.join(given)}", "keep one of them")
    if not given and column.needed:
        names = list(column.names)
        hint = did_you_mean(names[0], header, f"its columns are {', '.join(header)}")
        raise InputError(f"{path.name} has no column for {column.meaning}: {' or '.join(names)}", hint)
    return given[0] if given else None


def _field(path: Path, name: str, values: NDArray[Any], column: StepColumn) -> Any:
    """Return a column's values, numbers in our unit."""
    if column.is_text:
        return list(map(text_of, values))
    try:
        return np.asarray(values, np.float64) * column.names[name]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path.name}: {name} is not a number everywhere: {error}", column.meaning) from None


RUNS = "runs.csv"
"""File of a folder that names the deployment of every run."""

_WORKLOAD = {"arrivals": {"type": "burst"}, "input_tokens": 1, "output_tokens": 1, "num_requests": 1}


@dataclass(frozen=True)
class StepRun:
    """A run whose steps were recorded."""

    name: str
    model: str
    steps: StepTable
    setup: Setup | None
    """What took the steps; None where it is unknown, and `refused` says why."""
    refused: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        layout = "" if self.setup is None else parallelism_label(self.setup.parallelism)
        return " ".join(filter(None, (self.name, self.model.rpartition("/")[2], layout)))


def read_step_runs(path: Path, base: Mapping[str, Any], options: Mapping[str, Any]) -> list[StepRun]:
    """Read the runs of a table of steps, or of a folder with one and `runs.csv`.

    `base` is the raw scenario of a server's command line, of which a folder has one for each run instead; `options` of
    a deployment, by their short names, go over it, and a device is needed. InputError for a file that is missing or
    malformed, or a deployment that is not described.
    """
    given = _given(options, base)
    if not path.is_dir():
        steps = read_steps(path)
        _check_model(path.name, base, given)
        return [_run(name or path.name, steps[steps["run"] == name], base, given) for name in _names(steps)]
    if base:
        raise InputError(f"--from-command describes one server; {path / RUNS} describes each", "leave it out")
    described = _described(path / RUNS)
    tables = [file for file in sorted(path.iterdir()) if is_step_table(file) and file.stem.startswith("steps")]
    if len(tables) != 1:
        raise InputError(f"{path} has {len(tables)} tables of steps; one is needed", "name it steps.csv.gz, ...")
    steps = read_steps(tables[0])
    if unknown := [name for name in _names(steps) if name not in described]:
        raise InputError(f"{RUNS} does not describe the run {unknown[0]!r}", f"it has {', '.join(described)}")
    return [_described_run(described[name], steps[steps["run"] == name], given) for name in _names(steps)]


def run_without_steps(name: str, base: Mapping[str, Any], options: Mapping[str, Any]) -> StepRun:
    """Return the deployment behind what else a server recorded, `name`; InputError without its model or device."""
    given = _given(options, base)
    _check_model(name, base, given)
    columns = [(column.name, "U1" if column.is_text else float) for column in COLUMNS.values()]
    return _run(name, np.zeros(1, columns), base, given)


def _given(options: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    if "device" not in given and not base.get("deployment", {}).get("device"):
        raise InputError("records do not say what device they are of: --device is missing", "for instance b300_sxm")
    return given


def _check_model(name: str, base: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if "model" not in given and "model" not in base:
        hint = 'for instance --model qwen3-32b, or --from-command "vllm serve ..."'
        raise InputError(f"{name} does not say what was served: --model is missing", hint)


def _names(steps: StepTable) -> list[str]:
    return [str(name) for name in dict.fromkeys(steps["run"].tolist())]


def _described(path: Path) -> dict[str, dict[str, str]]:
    """Return run -> its line of `runs.csv`."""
    rows = list(text_rows(path))
    for name in ("run", "engine_args"):
        if not rows or name not in rows[0]:
            raise InputError(f"{path} has no column {name!r}", "run, engine_args and vllm_version are needed")
    return {row["run"]: row for row in rows}


def _described_run(row: Mapping[str, str], steps: StepTable, given: Mapping[str, Any]) -> StepRun:
    """Return a run with the deployment of its line: the engine's arguments, its version, and fused all-reduces.

    Recorders join arguments by spaces, so that JSON stands without the quotes that a shell would take away.
    """
    engine = next((name for name in servers() if row.get(f"{name}_version")), row.get("engine") or "vllm")
    arguments = re.sub(r"(?<!\S)\{[^']*?\}(?!\S)", lambda json: shlex.quote(json[0]), row["engine_args"])
    try:
        reading = read_launch_command(f"{' '.join(servers()[engine].command)} {arguments}")
    except InputError as error:
        return StepRun(row["run"], row.get("model", ""), steps, None, reason_of(error))
    base = reading.raw
    if version := row.get(f"{engine}_version") or row.get("version"):
        set_path(base, "deployment.engine.version", version)
    if fused := row.get("fuse_allreduce_rms"):
        set_path(base, "deployment.engine.fused_all_reduce", fused == "True")
    return _run(row["run"], steps, base, given)


def _run(name: str, steps: StepTable, base: Mapping[str, Any], given: Mapping[str, Any]) -> StepRun:
    model = str(given.get("model") or base.get("model"))
    try:
        raw = raw_scenario({**base, "workload": _WORKLOAD}, dict(given))
        setup, remarks = _wide_enough(scenario_from(raw, name), steps)
    except InputError as error:
        return StepRun(name, model, steps, None, reason_of(error))
    ranks = int(np.unique(steps["dp_rank"]).size)
    if steps["wall_s"].any() and setup.parallelism.attention_dp > ranks:
        remarks.append(
            f"{ranks} of {setup.parallelism.attention_dp} attention data-parallel ranks is recorded; "
            "the others are taken to decode as many requests"
        )
    return StepRun(name, model, steps, setup, "", tuple(remarks))


def _wide_enough(scenario: Scenario, steps: StepTable) -> tuple[Setup, list[str]]:
    """Resolve a scenario with limits that hold the widest recorded step, and sentences on those that were raised."""
    setup, remarks, raised = resolve(scenario), [], {}
    counts = {"max_num_batched_tokens": "prefill_tokens", "max_num_seqs": "prefill_requests"}
    for name, count in counts.items():
        widest = int((np.nan_to_num(steps[count]) + np.nan_to_num(steps["decode_requests"])).max())
        limit = getattr(setup.engine, name)
        if widest > limit:
            raised[name] = widest
            remarks.append(f"{name} is {limit:,} by the deployment, and a step has {widest:,}: taken as {widest:,}")
    return replace(setup, engine=msgspec.structs.replace(setup.engine, **raised)), remarks
