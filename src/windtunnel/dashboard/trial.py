"""Scenarios that are typed on a page: simulated, swept over their load, saved."""

import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from windtunnel.errors import InputError, check_known
from windtunnel.files import is_file, write_text
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import start_remark
from windtunnel.metrics.limits import limits_of
from windtunnel.report.layout import layouts_beside
from windtunnel.report.search.capacity import capacity_document
from windtunnel.report.serving.run import check_folder, write_run
from windtunnel.schema import parse_yaml, yaml_text
from windtunnel.search.capacity.capacity import CHECKS, Capacities, capacity, steady
from windtunnel.search.capacity.load import stream_of
from windtunnel.search.capacity.probe import Probe, probe
from windtunnel.serving.engines.command_line import Reading
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve, scenario_from
from windtunnel.serving.shorthand import PATHS, parse_lengths, raw_scenario
from windtunnel.serving.simulate import simulate
from windtunnel.units import format_count

MOST_S = 60.0
"""A longer simulation is ended: it belongs in a terminal."""
MOST_REQUESTS = 1_000_000
MOST_SWEPT_REQUESTS = 20_000

SWEPT_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
"""Loads of a sweep, as fractions of the capacity."""

FORM = layouts_beside(__file__)
LABELS = {name: field["label"] for fields in FORM["groups"].values() for name, field in fields.items()}
"""Short name of a setting -> its label in the form."""
LIMITS = FORM["limits"]
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)


@dataclass(frozen=True)
class Trial:
    """A typed scenario."""

    scenario: Scenario
    launch: Reading
    """The server's command line, and why its server would not start; empty but for that without one."""


def trial_of(query: Mapping[str, str], folder: Path) -> Trial:
    """Return the scenario of a form: a pasted one or a server's command line, if given, with the other fields over it.
    InputError names the field, or the path in the scenario, that is wrong.

    Args:
        query: `text`; the short names in `LABELS`; `arrivals` (`rate` or `concurrency`) with `load`; those of `LIMITS`.
        folder: the only one whose files it may name.
    """
    raw, launch = _base(query.get("text", ""), folder)
    deployment, keys = raw.get("deployment"), {"model": "model", "device": "deployment", **dict.fromkeys(LIMITS, "slo")}
    has_device = isinstance(deployment, dict) and "device" in deployment
    said = raw.keys() if has_device else raw.keys() - {"deployment"}
    first = {name: text for name, text in FORM["first"].items() if keys.get(name, "workload") in said}
    if any(query.get(name) != FORM["first"][name] for name in ("arrivals", "load")):
        first = {name: text for name, text in first.items() if name not in ("arrivals", "load")}
    query = {name: text for name, text in query.items() if first.get(name) != text}
    options = {name: _value(query[name]) for name in LABELS if query.get(name, "").strip()}
    for stream in ("input_tokens", "output_tokens"):
        if stream in options:
            options[stream] = parse_lengths(LABELS[stream], query[stream])
    load = _load(query.get("arrivals", ""), query.get("load", ""))
    slo: dict[str, Any] = {name: query[name] for name in LIMITS if query.get(name, "").strip()}
    _check_files([raw, options], folder)
    try:
        raw = raw_scenario(raw, options, load.get("rate"), load.get("concurrency"), None, slo)
        _check_needed(raw)
        scenario = scenario_from(raw, folder=folder)
    except InputError as error:
        raise InputError(_as_labelled(error.message), error.hint) from None
    deployment = scenario.deployment
    schedulers = [deployment.engine.scheduler, *(pool.engine.scheduler for pool in deployment.pools)]
    if any(":" in str(name) for name in (*schedulers, deployment.router)):
        raise InputError("a scheduler or router of one's own does not run here", "windtunnel simulate runs it")
    _check_size(scenario)
    with suppress(InputError):  # of an engine whose command is not known; the run refuses what cannot be
        launch.not_starting += [sentence] if (sentence := start_remark(scenario, launch)) else []
    return Trial(scenario, launch)


def _check_size(scenario: Scenario) -> None:
    """Raise InputError for more requests or clients than a page waits for."""
    workload = scenario.workload
    for name, number in (
        ("requests", workload.num_requests),
        ("concurrent requests", getattr(workload.arrivals, "concurrency", None)),
        ("requests", (workload.duration_s or 0.0) * (getattr(workload.arrivals, "rate_per_s", None) or 0.0)),
    ):
        if number is not None and number > MOST_REQUESTS:
            many = f"{number:,.0f} {name} are too many to try"
            raise InputError(many, f"take {MOST_REQUESTS:,} at most, or windtunnel simulate in a terminal")


def _base(text: str, folder: Path) -> tuple[dict[str, Any], Reading]:
    """Return the pasted scenario as builtins, and the server's command line that it is read from, if it is one."""
    if not text.strip():
        return {}, Reading()
    if re.match(r"[\s\w./='\"-]*(vllm\s+serve|vllm\.entrypoints|sglang|trtllm-serve)", text):
        with suppress(ValueError):
            words = shlex.split(text.replace("\\\n", " "), comments=True)
            _check_files([word.partition("=")[2] if word.startswith("-") else word for word in words], folder)
        # With a line break it is no file's name.
        launch = read_launch_command(f"{text.strip()}\n")
        return launch.raw, launch
    try:
        raw = parse_yaml(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise InputError(
            f"the text is neither YAML{line} nor a server's command line", "vllm serve MODEL ..."
        ) from None
    if not isinstance(raw, dict):
        raise InputError(
            "the text is no scenario: keys and values are needed", "or a line such as vllm serve MODEL ..."
        )
    return raw, Reading()


def _value(text: str) -> Any:
    try:
        return parse_yaml(text.strip())
    except yaml.YAMLError:
        return text.strip()


def _load(kind: str, text: str) -> dict[str, Any]:
    if not kind:
        return {}
    check_known(kind, ("rate", "concurrency"), f"there are no arrivals {kind!r}", "rate, concurrency")
    value = positive(text, "load")
    return {"rate": value} if kind == "rate" else {"concurrency": max(round(value), 1)}


def positive(text: str, label: str) -> float:
    """Return the number above 0 of a field."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"{label}: {text!r} is not a number above 0")
    return value


def _check_needed(raw: dict[str, Any]) -> None:
    workload, deployment = raw.get("workload"), raw.get("deployment")
    for name, there in (
        ("model", raw.get("model")),
        ("device", deployment.get("device") if isinstance(deployment, dict) else None),
        ("load", not isinstance(workload, dict) or {"arrivals", "trace", "clients", "tenants"} & set(workload)),
    ):
        if not there:
            raise InputError(f"{name} is missing", "type it, or paste a scenario that has it")


def _check_files(raw: Any, folder: Path, key: str = "") -> None:
    """Raise InputError where a scenario names a file that is not below `folder`, whether it is there or not.

    Args:
        key: that `raw` is the value of.
    """
    if isinstance(raw, dict | list):
        for name, part in raw.items() if isinstance(raw, dict) else ((key, part) for part in raw):
            _check_files(part, folder, str(name))
        return
    if not isinstance(raw, str) or not raw or "\0" in raw:
        return
    named, below = Path(raw), folder / raw
    is_given_away = named.is_absolute() or raw.startswith("~") or ".." in named.parts
    # A folder may be called like an engine.
    is_word = re.fullmatch(r"[\w-]+", raw) is not None and key not in ("folder", "path")
    for path in (named, below):
        is_there = is_file(path) or is_file(path / "config.json") or (not is_word and _exists(path))
        if (is_given_away or is_there) and not path.resolve().is_relative_to(folder):
            hint = "a scenario that is tried here names files below it"
            raise InputError(f"{raw:.200} lies outside {folder.name}", hint)
    if raw.endswith((".json", ".yaml", ".yml")) and not (is_file(named) or is_file(below)):
        raise InputError(f"there is no {raw:.200} in {folder.name}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # too long for a name


def _as_labelled(message: str) -> str:
    """Replace paths in the scenario by the form's labels."""
    names = {f"$.{PATHS[name]}": label for name, label in LABELS.items()}
    names |= {f"$.slo.{name}": label for name, label in LIMITS.items()}
    names |= {"$.workload.arrivals.rate_per_s": "load", "$.workload.arrivals.concurrency": "load"}
    for path in sorted(names, key=len, reverse=True):
        message = message.replace(path, names[path])
    return message


def simulated(scenario: Scenario) -> Result:
    """Simulate a scenario; InputError where it cannot be, or takes longer than `MOST_S`."""
    end_s = time.monotonic() + MOST_S

    def in_time(finished: int, total: int) -> None:
        if time.monotonic() > end_s:
            done = f"{finished:,} of {format_count(total, 'request')} are simulated"
            raise InputError(f"after {MOST_S:g} s {done}", "take fewer requests, or windtunnel simulate in a terminal")

    return simulate(scenario, progress=in_time)


@dataclass(frozen=True, eq=False)
class Sweep:
    """One deployment at many loads."""

    capacities: Capacities
    """Capacity for one stream of requests."""
    probes: list[Probe]
    """Tried loads, ascending."""


def swept(scenario: Scenario) -> Sweep:
    """Find the capacity of a scenario's deployment, and its latencies at loads below and above. InputError where the
    deployment cannot be, or its workload has no load to change, or too many requests."""
    stream = stream_of(scenario.workload, scenario.seed)
    if stream.unit.num_requests > MOST_SWEPT_REQUESTS:
        many = f"{stream.unit.num_requests:,} requests are too many for a sweep"
        raise InputError(many, f"take {MOST_SWEPT_REQUESTS:,} at most, or windtunnel capacity in a terminal")
    limits = limits_of(scenario.slo)
    pools = scenario.deployment.pools
    setup = resolve(pool_scenario(scenario, scenario.deployment.groups[0]))
    server_of = partial(PricedDeployments().server, scenario, setup=None if pools else setup)
    answer = steady(
        lambda stream, near: capacity(server_of(stream.unit), stream, limits, near=near, checks=CHECKS),
        [stream],
        limits,
    )
    stream = answer.streams[0]
    server = server_of(stream.unit)
    base = answer.found[0].load or stream.usual_load
    loads = sorted({max(round(share * base), 1) if stream.is_closed else share * base for share in SWEPT_SHARES})
    max_load = float(stream.unit.num_requests) if stream.is_closed else np.inf
    probes = [probe(server, stream, load, limits, is_patient=True) for load in loads if load <= max_load]
    return Sweep(Capacities(scenario, setup, limits, answer, 0.0), probes)


def sweep_document(sweep: Sweep) -> dict[str, Any]:
    """Document a sweep: what `windtunnel capacity --json` prints for one stream, and every load."""
    return {**capacity_document(sweep.capacities), "loads": [point_of(tried) for tried in sweep.probes]}


def point_of(tried: Probe) -> dict[str, Any]:
    """Return a load with its latencies and output."""
    served = tried.served
    assert served is not None, "a patient run is not given up"
    latencies: dict[str, float] = {}
    for name, percentiles in served.percentiles((50, 99)).items():
        if name != "queueing":
            figures = {"mean": float(served.values(name).mean()), **percentiles}
            latencies |= {f"{name}_{statistic}_s": value for statistic, value in figures.items()}
    span_s = float((served.arrival_s + served.e2e_s).max() - served.arrival_s.min())
    return {
        "load": tried.load,
        "holds": tried.passes,
        "limited_by": tried.limited_by,
        **latencies,
        "output_tokens_per_s": float(served.output_tokens.sum()) / span_s,
    }


def kept(query: Mapping[str, str], folder: Path) -> str:
    """Write the scenario, or its run, below `folder`; returns the name that it has there. InputError where the name is
    none, or something of that name is there.

    Args:
        query: of `trial_of`, with `name` and `what`, which is `scenario` or `run`.
    """
    name, what = query.get("name", "").strip(), query.get("what")
    if not _NAME.fullmatch(name) or ".." in name:
        raise InputError(f"{name!r} is no name", "letters, digits, dots, dashes, and slashes between folders")
    if what not in ("scenario", "run"):
        raise InputError(f"there is no {what!r} to save", "scenario, or run")
    trial = trial_of(query, folder)
    if what == "run":
        check_folder(folder / name, overwrite=False)
        write_run(simulated(trial.scenario), folder / name, trial.launch.document)
        return name
    name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    if _exists(folder / name):
        raise InputError(f"{name} exists", "choose another name")
    write_text(folder / name, yaml_text(trial.scenario))
    return name
