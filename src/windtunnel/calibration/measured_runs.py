"""Measured serving runs from any source, as one schema: the scenario that was run, and the measured values.

Read are tables of runs (CSV or Parquet, a row each, `COLUMNS`), the result files of benchmark clients, and files of
measured runs (`.jsonl`, a `MeasuredRun` each): the neutral form that a converter writes once for any source.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import read_bytes, read_text, write_text
from windtunnel.formats.clients.read import MS, read_client_results
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.parallelism import Parallelism
from windtunnel.pricing.table import read_parquet
from windtunnel.schema import Schema, decode, encode, fields_of, read_yaml, set_path
from windtunnel.serving.deployment import EngineSettings, Pool
from windtunnel.serving.engines.contract import behaviour_of
from windtunnel.serving.scenario import Scenario, keep_published_formats, scenario_from
from windtunnel.serving.shorthand import lay_over
from windtunnel.training.job import TrainingJob

METRICS = ("tpot", "ttft", "e2e", "throughput", "power", "step", "rate")
"""Metrics: seconds per output token after the first, seconds to the first token and in all; output tokens a second; W.
Of training: seconds of a step, and FLOP/s of a device by the framework's count."""

STATISTICS = ("mean", "p50")

SCORED = ("primary", "secondary")
"""Uses of runs that are scored by default; primary runs are less likely to have unrecorded settings."""

MOST_TOKENS = 1e9
"""Of a request, a choice far beyond any context."""
UNRECORDED_SPREAD = 0.1
"""Lengths that a client did not record are taken as uniform within 10% of their mean. Exactly equal lengths keep a
closed loop's requests in step for ever, all prompts of a wave arriving at once; the mean TTFT of runs whose clients are
unknown grows smoothly with the concurrency and hardly depends on the lengths, as only desynchronised loops do
(TensorRT-LLM, Qwen3-235B, H100: 90th percentile of |error| around its median 67% in step, 33% with the spread)."""

ROLES = ("prefill", "decode")
"""Roles of separate pools."""


class Column(Schema):
    """A column of a table of runs (`columns.yaml`)."""

    name: str
    meaning: str
    needed: bool = False
    sets: str = ""
    """Path of the setting in a scenario, or in a pool."""
    pool: str = ""
    """Role of the pool that it describes."""
    is_text: bool = False
    may_be_unknown: bool = False
    """Whether `UNKNOWN` may stand for a value that nobody recorded."""
    of_client: bool = False
    """Whether it describes the client."""
    is_whole: bool = True
    may_be_zero: bool = False
    metric: str = ""
    """One of `METRICS`, which it measured."""
    also: tuple[str, ...] = ()
    """Names that others publish it under, such as InferenceX, in lower case with `_` for all else."""


def columns_of(kind: type[Any], path: Path) -> dict[str, Any]:
    """Read the columns that a YAML file describes, by name."""
    columns: list[Any] = decode(read_yaml(path), list[kind], path.name)  # type: ignore[valid-type]
    return {column.name: column for column in columns}


COLUMNS: Mapping[str, Column] = columns_of(Column, Path(__file__).with_name("columns.yaml"))
"""Columns of a table of runs by name; beside the needed ones a measured value is needed, and a concurrency or rate."""
_PUBLISHED = {"silicon_ttft_ms", "n_accel"}
"""Columns of published tables that `benchmarks/measured_runs.py` converts."""
UNKNOWN = "?"
"""Value in a table of runs for a setting that was not recorded and need not have been the engine's default."""
VERSION = "engine_version"
"""Column of the engine's version; where it is unknown, `releases.with_inferred_versions` infers it."""

_NUMBER = re.compile(r"\d+(\.\d*)?([eE][-+]?\d+)?")
_OTHER_SEPARATOR = re.compile(r"[;\t|]")


@dataclass(frozen=True)
class Measurement:
    """A measured run, of serving or training."""

    id: str
    scenario: Scenario | None
    """The scenario that was run; None where it is unknown, and `refused` says why."""
    refused: str
    measured: Mapping[str, float]
    """Metric -> value, for the known ones of `METRICS`."""
    labels: Mapping[str, str]
    """Labels that runs are grouped by: engine, version, device, model, format, parallelism, prompt, output,
    concurrency."""
    use: str = "primary"
    """`primary` runs are scored first."""
    statistic: str = "mean"
    """Statistic of the latencies: one of `STATISTICS`."""
    weight: float = 1.0
    """Weight in a calibration; 0: left out."""
    unknown: tuple[str, ...] = ()
    """Engine settings that nobody recorded; a calibration may infer them, the engine's defaults stand for them until
    then."""
    lacks_acceptance: bool = False
    """The number of accepted draft tokens was not recorded; the scenario says 0 until `accepting` sets it."""
    job: TrainingJob | None = None
    """The training job that was run, in place of a scenario."""
    num_failed: int = 0
    """Requests besides that were not answered."""

    @property
    def configuration(self) -> str:
        """The deployment, at whatever load: the unit that cross-validation leaves out."""
        names = ("engine", "version", "device", "model", "format", "parallelism")
        return " ".join(self.labels.get(name, "") for name in names)

    def accepting(self, share: float) -> Measurement:
        """Return the run with this share of its draft tokens accepted."""
        assert self.scenario is not None
        engine = self.scenario.deployment.engine
        assert engine.speculative is not None
        speculative = msgspec.structs.replace(engine.speculative, acceptance_fraction=share)
        scenario = self.scenario.with_deployment(engine=msgspec.structs.replace(engine, speculative=speculative))
        return replace(self, scenario=scenario, lacks_acceptance=False)


def plain_name(column: str) -> str:
    """Return the name of a column in lower case, with `_` for what is neither letter nor digit."""
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")


def reason_of(error: InputError) -> str:
    """Return the reason of a refusal, with the name that may have been meant."""
    hint = error.hint or ""
    return f"{error.message}; {hint}" if hint.startswith("did you mean") else error.message


def read_table(
    path: Path, rows: Sequence[Mapping[str, str]] | None = None, server: Mapping[str, Any] | None = None
) -> list[Measurement]:
    """Return the runs of a CSV or Parquet file with `COLUMNS`, whose `rows` may have been read before.

    `server` is what served them all, as a scenario in builtins, where neither columns nor a row's command say more.
    InputError for an unknown or missing column, or a value that is none; names the row.
    """
    rows = list(text_rows(path)) if rows is None else rows
    if not rows:
        raise InputError(
            f"{path} has no rows", "a header, and below it a run a line: docs/guides/validate-and-calibrate.md"
        )
    if _PUBLISHED & rows[0].keys():
        raise InputError(
            f"{path.name} is a table of published runs, which does not hold their settings",
            f"convert it first: python benchmarks/measured_runs.py {path.name} --out runs.jsonl",
        )
    rows = with_our_columns(path, rows, COLUMNS)
    said = {"model": (server or {}).get("model"), "device": (server or {}).get("deployment", {}).get("device")}
    check_columns(path, rows[0], COLUMNS, [name for name in OF_SERVER if "command" in rows[0] or said[name]])
    runs = [
        _measurement(f"{path.name} row {number}", str(number), row, server or {}) for number, row in enumerate(rows, 1)
    ]
    check_ids(runs, path, "give each its own, or leave the column out")
    return runs


OF_SERVER = ("model", "device")
"""Needed columns that a command says, or the options of a server."""


_UNIT = re.compile(r"_(ms|s|kw|w)$")
_FACTORS: Mapping[tuple[str, ...], float] = {("ms", "s"): 1e-3, ("s", "ms"): 1e3, ("kw", "w"): 1e3}


def column_of(name: str, columns: Mapping[str, Column]) -> str:
    """Return the column that a table calls `name`; the name itself where none is, or where a time says no unit."""
    plain = plain_name(name)
    own = next((own for own, column in columns.items() if plain in (own.lower(), *column.also)), name)
    if own == name and plain.endswith("_ms"):
        own = next((own for own, column in columns.items() if plain[:-3] in column.also and own.endswith("_s")), name)
    return name if name in columns or (own.endswith("_ms") and _UNIT.search(plain) is None) else own


def with_our_columns(
    path: Path, rows: Sequence[Mapping[str, str]], columns: Mapping[str, Column]
) -> list[dict[str, str]]:
    """Return rows under our names of columns, times in their units; InputError where two columns mean one of ours."""
    names = {name: column_of(name, columns) for name in rows[0]}
    factors: dict[str, float] = {}
    for name, own in names.items():
        if len(twice := [other for other, meant in names.items() if meant == own]) > 1:
            raise InputError(f"{path.name} says {own} twice: in {' and '.join(twice)}", "keep one of them")
        units = tuple(found[1] if (found := _UNIT.search(each)) else "s" for each in (plain_name(name), own))
        if own != name and columns[own].metric and units in _FACTORS:
            factors[name] = _FACTORS[units]

    def text_of(name: str, text: str) -> str:
        return repr(float(text) * factors[name]) if name in factors and _NUMBER.fullmatch(text) else text

    return [{names[name]: text_of(name, text) for name, text in row.items()} for row in rows]


def check_columns(
    path: Path, row: Mapping[str, str], columns: Mapping[str, Column], may_lack: Sequence[str] = ()
) -> None:
    """Raise InputError where a row has a column that is not among `columns`, or lacks a needed one."""
    unknown = [name for name in row if name not in columns and not name.startswith("_")]
    if unknown:
        known = "separate columns by commas" if _OTHER_SEPARATOR.search(unknown[0]) else f"known: {', '.join(columns)}"
        ours = {alias: name for name, column in columns.items() for alias in (name, *column.also)}
        renames = ", ".join(f"{name} -> {ours[plain]}" for name in unknown if (plain := plain_name(name)) in ours)
        hint = f"rename {renames} (_ms: milliseconds), and leave the others out" if renames else None
        hint = hint or f"{did_you_mean(unknown[0], columns, known)}; as _{unknown[0]} it is left out"
        raise InputError(f"{path.name} has a column {unknown[0]!r}, which is not known", hint)
    for name, column in columns.items():
        if column.needed and name not in row and name not in may_lack:
            hint = f"known: {', '.join(columns)}"
            if columns is COLUMNS and name in OF_SERVER:
                hint = f"--{name}, --from-command or a column `command` may say it as well; {hint}"
            raise InputError(f"{path.name} has no column {name!r}", hint)


def check_ids(runs: Sequence[Measurement], path: Path, hint: str) -> None:
    """Raise InputError where two runs of a file share an id."""
    repeated = [name for name, count in Counter(run.id for run in runs).items() if count > 1]
    if repeated:
        raise InputError(f"{path.name} has several runs of id {repeated[0]!r}", hint)


def read_client_files(path: Path, base: dict[str, Any]) -> list[Measurement]:
    """Read a benchmark client's result file; `base`, a scenario without workload, describes the deployment."""
    runs, base = [], deepcopy(base)
    unknown = _unknown_version(base, ())
    for result in read_client_results(path):
        values = vars(result)
        for metric in result.measured:
            check_known(metric, METRICS, f"{path.name}: {result.client} has no metric {metric!r}")
        check_model(path.name, str(result.model), str(base["model"]))
        if result.concurrency is None and result.rate_per_s is None:
            hint = f"`windtunnel gate --measured {path} --baseline OTHER` compares it with an earlier one"
            raise InputError(f"{path.name}: {result.client} does not record the load, so it cannot be simulated", hint)
        workload = _workload(path.name, values, are_means=True)
        if result.client in catalog.names("clients"):
            workload["client"] = result.client
        described = deepcopy(base)  # an engine that one result names is not that of the next
        if result.engine is not None and isinstance(described.get("deployment"), dict):
            settings = described["deployment"].setdefault("engine", {})
            if isinstance(settings, dict):
                settings.setdefault("name", result.engine)
        scenario = scenario_from({**described, "workload": workload}, path.name)
        labels = _labels(scenario, values)
        run = Measurement(result.id, scenario, "", result.measured, labels, unknown=unknown)
        runs.append(replace(run, num_failed=result.num_failed))
    return runs


def check_model(source: str, sent_to: str, served: str) -> None:
    """Raise InputError where a client sent to one model of the catalog, and one of another shape is said to have
    served it.
    """
    is_other = False
    with suppress(InputError):  # a name of the server's own
        sent_to, served = (catalog.known_name("models", name) for name in (sent_to, served))
        shapes = [msgspec.structs.replace(catalog.model(name), name="") for name in (sent_to, served)]
        is_other = sent_to not in (served, *catalog.checkpoints(served)) and shapes[0] != shapes[1]
    if is_other:
        said = f"{source} has requests to {sent_to}, and {served} is said to have served them"
        raise InputError(said, "name the server of these requests")


def text_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV or Parquet file as text by column. InputError where it cannot be read, two columns have
    one name, or a row has another number of values."""
    if path.suffix == ".parquet":
        for row in read_parquet(path).to_pylist():
            yield {name: "" if value is None else str(value) for name, value in row.items()}
        return
    lines = csv.DictReader(read_text(path).removeprefix("\ufeff").splitlines())
    columns = lines.fieldnames or ()
    for name in columns:
        if columns.count(name) > 1:
            raise InputError(f"{path.name} has two columns {name!r}", "keep one of them")
    for number, line in enumerate(lines, 1):
        if None in line or None in line.values():
            raise InputError(
                f"{path.name} row {number} has another number of values than the header has columns ({len(columns)})",
                "is the file cut off, or a comma inside a value not quoted?",
            )
        yield {name: value.strip() for name, value in line.items()}


def _started_by(where: str, command: str) -> dict[str, Any]:
    try:
        reading = read_launch_command(command)
    except InputError as error:
        message = error.message.removeprefix("--from-command: ")
        raise InputError(f"{where}: command: {message}", error.hint) from None
    if reading.unknown:
        raise InputError(f"{where}: command: {reading.unknown[0]} is not known", "mend it, or leave it out")
    return reading.raw


def _measurement(where: str, identity: str, row: Mapping[str, str], server: Mapping[str, Any]) -> Measurement:
    given = {name: row[name] for name in COLUMNS if row.get(name)}
    unknown = tuple(name for name, value in given.items() if COLUMNS[name].may_be_unknown and value == UNKNOWN)
    given = {name: value for name, value in given.items() if name not in unknown}
    raw: dict[str, Any] = deepcopy(dict(server))
    if "command" in given:
        lay_over(raw, _started_by(where, given["command"]))
    if "model" in given:
        raw["model"] = given["model"]
    for name, said in (("model", raw.get("model")), ("device", raw.get("deployment", {}).get("device"))):
        given |= {name: str(said)} if said and name not in given else {}
    for name, column in COLUMNS.items():
        if column.needed and name not in given:
            raise InputError(f"{where}: {name} is empty", _meaning(name))
    measured = {}
    for name, text in given.items():
        if metric := COLUMNS[name].metric:
            measured[metric] = _number(where, name, text) * (MS if name.endswith("_ms") else 1.0)
    if not measured:
        metrics = [name for name, column in COLUMNS.items() if column.metric]
        raise InputError(f"{where}: nothing was measured", f"one of: {', '.join(metrics)}")
    statistic = {"median": "p50"}.get(given.get("statistic", "mean"), given.get("statistic", "mean"))
    if statistic not in STATISTICS:
        raise InputError(f"{where}: statistic is {statistic!r}; known: {', '.join(STATISTICS)}", _meaning("statistic"))
    values = _client_values(where, given)
    for name, text in given.items():
        if COLUMNS[name].sets and not COLUMNS[name].pool:
            set_path(raw, COLUMNS[name].sets, text if COLUMNS[name].is_text else _typed(where, name, text))
    unknown = _unknown_version(raw, unknown)
    if set(unknown) - {VERSION}:
        set_path(raw, "deployment.settings_assumed", True)
    _set_pools(where, raw, given)
    raw["workload"] = raw.get("workload", {}) | _workload(where, values, are_means=False)
    identity = given.get("id", identity)
    try:
        keep_published_formats(raw)
        scenario = scenario_from(raw, where)
    except InputError as error:
        known = {
            "model": given["model"],
            "device": given["device"],
            "engine": given.get("engine", EngineSettings().name),
        }
        return Measurement(identity, None, reason_of(error), measured, known, given.get("use", "primary"), statistic)
    labels, use = _labels(scenario, values), given.get("use", "primary")
    return Measurement(identity, scenario, "", measured, labels, use, statistic, unknown=unknown)


def _unknown_version(raw: dict[str, Any], unknown: tuple[str, ...]) -> tuple[str, ...]:
    """Take an unknown version out of a scenario in builtins; return the unknown settings with it."""
    engine = raw.get("deployment", {}).get("engine", {})
    if VERSION not in unknown and engine.get("version") != UNKNOWN:
        return unknown
    engine.pop("version", None)
    return tuple(dict.fromkeys((*unknown, VERSION)))


def _client_values(where: str, given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: _number(where, name, text) for name, text in given.items() if COLUMNS[name].of_client
    }
    for name, value in values.items():
        if COLUMNS[name].is_whole and value != int(value):
            raise InputError(f"{where}: {name} is {given[name]!r}; a whole number is needed", _meaning(name))
    if values.get("range_ratio", 1.0) > 1:
        raise InputError(
            f"{where}: range_ratio is {given['range_ratio']!r}; from 0 to 1 is needed", _meaning("range_ratio")
        )
    return values


def _set_pools(where: str, raw: dict[str, Any], given: Mapping[str, str]) -> None:
    """Give `raw` two pools where the row has columns of them, and the engine's handling of the first token."""
    of_pools = [name for name in given if COLUMNS[name].pool]
    if not of_pools:
        return
    for role in ROLES:
        if not any(COLUMNS[name].pool == role for name in of_pools):
            raise InputError(
                f"{where}: {of_pools[0]} is given and nothing of the servers that {role}",
                f"{role}_tp and {role}_replicas say how wide they are and how many",
            )
    for name in ("tp", "pp", "ep", "attention_dp", "replicas"):
        if name in given:
            raise InputError(
                f"{where}: {name} and {of_pools[0]} exclude each other",
                f"prefill_{name} and decode_{name} are of pools",
            )
    pools: dict[str, dict[str, Any]] = {role: {"name": role, "role": role} for role in ROLES}
    for name in of_pools:
        set_path(pools[COLUMNS[name].pool], COLUMNS[name].sets, _typed(where, name, given[name]))
    raw["deployment"]["pools"] = list(pools.values())
    engine = given.get("engine", EngineSettings().name)
    if engine in catalog.names("engines") and behaviour_of(engine).decode_samples_first:
        raw["deployment"]["transfer"] = {"first_token": "decode"}


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < float("inf") or (value == 0 and COLUMNS[name].may_be_zero)):
        raise InputError(f"{where}: {name} is {text!r}; a number above zero is needed", _meaning(name))
    return value


def _meaning(column: str) -> str:
    return f"{column}: {COLUMNS[column].meaning}"


def _typed(where: str, name: str, text: str) -> float | int:
    value = _number(where, name, text)
    return int(value) if value == int(value) else value


def _workload(where: str, values: Mapping[str, Any], are_means: bool) -> dict[str, Any]:
    concurrency, rate = values.get("concurrency"), values.get("rate_per_s")
    if concurrency is not None:
        arrivals: dict[str, Any] = {"type": "closed_loop", "concurrency": int(concurrency)}
        if rate is not None:
            arrivals |= {"rate_per_s": rate, "cv": values.get("gap_cv", 1.0)}
        if values.get("num_warmup_requests"):
            arrivals["num_warmup_requests"] = int(values["num_warmup_requests"])
    elif rate is not None:
        gap_cv = values.get("gap_cv", 1.0)
        kind = {0.0: "static", 1.0: "poisson"}.get(gap_cv, "gamma")
        arrivals = {"type": kind, "rate_per_s": rate} | ({"cv": gap_cv} if kind == "gamma" else {})
    else:
        raise InputError(f"{where}: neither concurrency nor rate_per_s is given", _meaning("concurrency"))
    return {
        "arrivals": arrivals,
        "input_tokens": _lengths(where, values["input_tokens"], values.get("range_ratio"), are_means),
        "output_tokens": _lengths(where, values["output_tokens"], values.get("range_ratio"), are_means),
        "num_requests": int(values.get("num_requests") or 10 * (concurrency or 100)),
    }


def _lengths(where: str, tokens: float, range_ratio: float | None, are_means: bool) -> int | dict[str, Any]:
    """Return lengths from the longest and the shortest one's share of it, or from a mean with the unrecorded spread.
    InputError where no request is that long."""
    if tokens > MOST_TOKENS:
        raise InputError(f"{where}: {tokens:g} tokens are longer than any request", "give those of one request")
    if range_ratio is None:
        low, high = tokens * (1 - UNRECORDED_SPREAD), tokens * (1 + UNRECORDED_SPREAD)
    else:
        high = 2 * tokens / (1 + range_ratio) if are_means else tokens
        low = high * range_ratio
    shortest, longest = max(round(low), 1), max(round(high), 1)
    return longest if shortest == longest else {"type": "uniform", "min_tokens": shortest, "max_tokens": longest}


def _labels(scenario: Scenario, values: Mapping[str, Any]) -> dict[str, str]:
    deployment, precision = scenario.deployment, scenario.precision
    return {
        "engine": deployment.engine.name,
        "version": deployment.engine.version or "",
        "device": deployment.device,
        "model": scenario.model_name.rpartition("/")[2],
        "format": "" if precision is None else f"{precision.weights}/{precision.experts_format}/{precision.kv_cache}",
        "parallelism": parallelism_label(deployment.parallelism, deployment.pools),
        "mode": "disagg" if deployment.pools else "agg",
        "prompt": f"{values['input_tokens']:.0f}",
        "output": f"{values['output_tokens']:.0f}",
        "concurrency": f"{values['concurrency']:.0f}" if values.get("concurrency") else "",
    }


def parallelism_label(shape: Parallelism, pools: Sequence[Pool] = ()) -> str:
    """Label a layout: `tp4 ep8 dp2`, or with pools `P 2x tp8 ep8 D 1x tp4`."""
    if pools:
        parts = [(pool.role[0].upper(), pool.replicas, pool.parallelism or shape) for pool in pools]
        return " ".join(f"{role} {replicas}x {parallelism_label(pool_shape)}" for role, replicas, pool_shape in parts)
    widths = {"tp": shape.tp, "pp": shape.pp, "ep": shape.ep, "dp": shape.attention_dp}
    return " ".join(f"{name}{width}" for name, width in widths.items() if width > 1 or name == "tp")


MARK = '{"windtunnel":"measured_run"'
"""First bytes of each line, which tell the file from a benchmark client's."""


class Measured(Schema):
    """Measured values of a run; unmeasured ones are left out."""

    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Time per output token after the first."""
    e2e_s: float | None = None
    """Latency of a request."""
    output_tokens_per_s: float | None = None
    """Output tokens per second of the whole deployment."""
    power_w: float | None = None
    """Mean power of all its devices."""
    step_s: float | None = None
    """Time of a training step."""
    flops_per_s: float | None = None
    """FLOP/s of one device in training, by the framework's count."""


_FIELDS = {
    "tpot": "tpot_s",
    "ttft": "ttft_s",
    "e2e": "e2e_s",
    "throughput": "output_tokens_per_s",
    "power": "power_w",
    "step": "step_s",
    "rate": "flops_per_s",
}
"""Metric of a `Measurement` -> field of `Measured`."""

_SHARED = ("id", "refused", "statistic", "use", "weight", "labels", "unknown", "lacks_acceptance")
"""Fields that a `Measurement` and a `MeasuredRun` share."""


class MeasuredRun(Schema):
    """A line of a file of measured runs."""

    windtunnel: Literal["measured_run"]
    """Tag of the line."""
    id: str
    measured: Measured = Measured()
    scenario: dict[str, Any] | None = None
    """The scenario that was run, as in a scenario file; absent where it is unknown, and then `refused` says why."""
    job: dict[str, Any] | None = None
    """The training job that was run, as in a job file, in place of a scenario."""
    refused: str = ""
    """Why the run has neither."""
    statistic: Literal["mean", "p50"] = "mean"
    """Statistic of the three latencies over requests."""
    use: str = "primary"
    """`primary` or `secondary` runs are scored; anything else leaves the run out unless `--use` names it."""
    weight: float = 1.0
    """Weight in a calibration; 0 leaves the run out of the fit."""
    labels: dict[str, str] = {}
    """Name -> value to group results by: engine, version, device, model, format, parallelism, ..."""
    unknown: tuple[str, ...] = ()
    """Engine settings that nobody recorded; a calibration may infer them."""
    lacks_acceptance: bool = False
    """The run used speculative decoding, and the number of accepted draft tokens was not recorded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.scenario is not None) + (self.job is not None) + bool(self.refused) != 1:
            raise ValueError("a run has a scenario, or a training job, or a reason why it is refused")


def is_run_file(path: Path) -> bool:
    """Whether a file begins as a file of measured runs does; InputError where the file cannot be read."""
    return read_bytes(path, len(MARK)) == MARK.encode()


def read_run_file(path: Path) -> list[Measurement]:
    """Read every run of a file of measured runs. InputError where a line is not JSON, has an unknown key or a wrong
    value, or two runs have one id; names the line."""
    lines = read_text(path).splitlines()
    runs = [_measured_run(f"{path.name} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    check_ids(runs, path, "give each run an id of its own")
    return runs


def write_run_file(runs: Iterable[Measurement], path: Path) -> None:
    """Write runs so that `read_run_file` gives equal ones; InputError where the file cannot be written."""
    lines = []
    for run in runs:
        row = MeasuredRun(
            windtunnel="measured_run",
            measured=Measured(**{_FIELDS[metric]: value for metric, value in run.measured.items()}),
            scenario=None if run.scenario is None else encode(run.scenario),
            job=None if run.job is None else encode(run.job),
            **fields_of(run, *_SHARED),
        )
        lines.append(f"{msgspec.json.encode(row).decode()}\n")
    write_text(path, "".join(lines))


def _measured_run(where: str, line: str) -> Measurement:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}", "is the file cut off?") from None
    run: MeasuredRun = decode(raw, MeasuredRun, where)
    values = {metric: getattr(run.measured, field) for metric, field in _FIELDS.items()}
    return Measurement(
        scenario=None if run.scenario is None else scenario_from(run.scenario, where),
        job=None if run.job is None else decode(run.job, TrainingJob, f"{where}: job"),
        measured={metric: value for metric, value in values.items() if value is not None},
        **fields_of(run, *_SHARED),
    )
