"""A function for each question that the command line answers; a notebook shows their results as reports."""

from __future__ import annotations  # `help` prints them as they are written

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

from windtunnel import catalog
from windtunnel.arguments import checked
from windtunnel.calibration.run_files import read_measurements
from windtunnel.calibration.validate import RunPrediction, predict_runs, with_odd_runs
from windtunnel.diffusion.job import job_from
from windtunnel.diffusion.job import resolve as resolve_diffusion
from windtunnel.diffusion.simulate import DiffusionResult, simulate_diffusion
from windtunnel.errors import InputError
from windtunnel.formats.job_files import read_job_file
from windtunnel.metrics.limits import limits_of, parse_limits
from windtunnel.network.collectives.call import CollectiveChoices, CollectiveRun, operation_named, size_of
from windtunnel.network.collectives.closed_forms import LAUNCH_S
from windtunnel.network.collectives.run import run_collective
from windtunnel.network.settings import settings_from
from windtunnel.network.topology import fabric_of, nodes_of
from windtunnel.notebook import Shown
from windtunnel.production.diagnose import Diagnosis
from windtunnel.production.diagnose import diagnose as diagnose_requests
from windtunnel.production.observed import read_requests
from windtunnel.report.comparison import ComparedRun, check_runs, read_run
from windtunnel.report.results import entry_of
from windtunnel.report.search.study import SearchEvidence, evidence_of
from windtunnel.report.search.study_files import write_study
from windtunnel.report.search.whatif import Grid
from windtunnel.report.serving.run import check_folder, run_document, write_run
from windtunnel.schema import Schema, builtin, encode, set_path
from windtunnel.schema import save as write_yaml
from windtunnel.search.asker import Asker
from windtunnel.search.capacity.capacity import Capacities, capacities
from windtunnel.search.evaluation.schema import Question
from windtunnel.search.executors import Means, start_workers
from windtunnel.search.prices import asked_prices
from windtunnel.search.recommend import deployments_space, ranked_changes
from windtunnel.search.space.space import Space, grid_of, load_space, space_from
from windtunnel.search.store import Store, default_path
from windtunnel.search.study import search as search_space
from windtunnel.serving.explain import Explanation, explain_step, pool_of_step, step_batch
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Described, pool_scenario, read_raw, resolve
from windtunnel.serving.shorthand import (
    JOB_PATHS,
    OF_LOAD,
    PATHS,
    LoadOptions,
    MeasuredOptions,
    RecommendOptions,
    ScenarioOptions,
    TrainOptions,
    described_by,
    scenario,
    unknown_option,
)
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.step import TrainingResult, simulate_training


class Validation(Shown, list[RunPrediction]):
    """Measured runs with their predictions."""

    REPORT = "calibration.validation:validation_report"


class Comparison(Shown, list[ComparedRun]):
    """Results side by side; the others are compared with the first."""

    REPORT = "comparison:comparison_report"


Limits = str | Mapping[str, float | str]
"""Limits of latencies: `"ttft_p90=2s,tpot_p99=50ms"`, or `{"ttft_p90": 2, "tpot_p99": "50ms"}`."""


@checked
def capacity(
    described: Described | None = None, slo: Limits | None = None, num_streams: int = 3, **options: Unpack[LoadOptions]
) -> Capacities:
    """Find the greatest load that a deployment sustains, in requests/s, or in clients of a closed loop.

    Args:
        described: the scenario, whose arrivals are scaled; None: `options` say it.
        slo: limits to keep; None: the scenario's own.
        num_streams: streams of requests that are drawn.
        options: as `scenario` takes them; they change a scenario that is given.

    Raises:
        InputError: a limit that there is not, an impossible deployment, or a workload without a load to change.
    """
    if described is None and options and not options.keys() & {"rate_per_s", "concurrency", "trace", "settings"}:
        options["rate_per_s"] = 1.0
    described = described_by(described, options, ("num_streams",))
    return capacities(described, limits_of(described.slo) if slo is None else parse_limits(slo), num_streams, 0.005)


@overload
def whatif(
    described: Described | None = None, vary: None = None, workers: int = 1, **options: Unpack[ScenarioOptions]
) -> SearchEvidence: ...


@overload
def whatif(
    described: Described | None = None,
    *,
    vary: Mapping[str, Sequence[Any]],
    workers: int = 1,
    **options: Unpack[ScenarioOptions],
) -> Grid: ...


@overload
def whatif(
    described: Described | None, vary: Mapping[str, Sequence[Any]], workers: int = 1, **options: Unpack[ScenarioOptions]
) -> Grid: ...


@checked
def whatif(
    described: Described | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    workers: int = 1,
    **options: Unpack[ScenarioOptions],
) -> Grid | SearchEvidence:
    """Simulate every combination of some settings' values, `whatif(chat, {"tp": [1, 2], "rate_per_s": [4, 8]})`; or
    rank single changes of the deployment by what they gain, `whatif(chat)`.

    Args:
        described: the scenario around which they vary; None: `options` say it, those that vary aside.
        vary: names of options, or paths in a scenario, and their values; None: what could be changed of the engine's
            settings, formats and parallelism, and of replicas and their autoscaler where they come and go.
        workers: processes.
        options: as `scenario` takes them; points that break a limit of `slo` are marked.

    Raises:
        InputError: nothing varies, a path leads nowhere, or every point is refused.
    """
    if vary is None:
        base = described_by(described, options, ("vary", "workers"))
        space = ranked_changes(base, limits_of(base.slo))
        store = Store(None, warnings.warn)
        return evidence_of(search_space(space, store, _means(workers)), store, 10, recommends=True)
    varied = {}
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"vary {name} is {values!r:.60}; a list of values is needed", 'vary={"tp": [1, 2]}')
        varied[name] = [builtin(value) for value in values]
    firsts = {name: values[0] for name, values in varied.items() if name in (*PATHS, *OF_LOAD) and values}
    if "concurrency" in firsts:  # its number of requests is that of every point
        numbers = [value for value in varied["concurrency"] if isinstance(value, int)]
        firsts["concurrency"] = max(numbers, default=firsts["concurrency"])
    base = described_by(described, firsts | options if described is None else options, ("vary", "workers"))
    raw = {**encode(base), "limits": {limit.name: limit.most_s for limit in limits_of(base.slo)}}
    raw.pop("slo", None)
    space = grid_of(raw, {"rate" if name == "rate_per_s" else name: values for name, values in varied.items()})
    with start_workers(space, _means(workers)) as run_chunks:
        asker = Asker(space, Store(None, warnings.warn), run_chunks)
        answers = asker.ask(None, range(space.num_points), Question())
    asker.check_some(None, answers)
    return Grid(space, answers)


@checked
def search(space: Space | Mapping[str, Any] | Path | str, workers: int = 1, top: int = 10) -> SearchEvidence:
    """Find the best deployments, or layouts of a training job, of a space: a file's path, or what a file would say."""
    if isinstance(space, Path | str):
        space = load_space(Path(space))
    return _search(space if isinstance(space, Space) else space_from(dict(space)), workers, top)


@checked
def recommend(
    model: str,
    devices: Sequence[str],
    slo: Limits,
    rate_per_s: float | None = None,
    workers: int = 1,
    max_devices: int | None = None,
    max_usd_per_hour: float | None = None,
    **options: Unpack[RecommendOptions],
) -> SearchEvidence:
    """Say what to serve a model on: `recommend("llama-3.1-8b", ["l40s"], "ttft_p90=1s", rate_per_s=40, ...)`.

    Args:
        slo: limits that the requests must keep.
        rate_per_s: load of the whole fleet; None: the least money for a request wins.
        workers: processes.
        max_devices: most devices of one replica; None: those of a node.
        max_usd_per_hour: most money of one replica.
        options: the workload and the engine, as `scenario` takes them; `prices`: `{"l40s": 0.90}` in USD an hour for
            one device, as a text `"l40s=0.90"`, or a YAML file of offers; without it the catalog's list prices.
    """
    devices = devices.split(",") if isinstance(devices, str) else devices
    if not devices:
        raise InputError("devices is empty; a device at least is needed", "`windtunnel catalog devices` lists them")
    if "device" in options:
        raise unknown_option("device", ["devices"])
    given: dict[str, Any] = {"model": model, "device": devices[0], "rate_per_s": rate_per_s, **options}
    asked = given.pop("prices", None)
    if isinstance(asked, Mapping):
        asked = ",".join(f"{name}={usd}" for name, usd in asked.items())
    prices = asked_prices(None if asked is None else str(asked), None, None, devices)
    if rate_per_s is None and not options.keys() & {"concurrency", "trace"}:
        given["rate_per_s"] = 1.0
    shared = encode(scenario(**given))
    if shared["workload"].get("arrivals", {}).get("type") == "poisson":
        shared["workload"]["arrivals"]["rate_per_s"] = 1.0  # a capacity depends on no rate: answers serve all
    budget = {"devices": max_devices, "usd_per_hour": max_usd_per_hour}
    usd = {name: price.usd_per_hour for name, price in prices.items()}
    space = deployments_space(shared, devices, parse_limits(slo), budget, usd)
    return _search(space, workers, 5, rate_per_s, recommends=True, prices=tuple(prices.values()))


def _search(space: Space, workers: int, top: int, load: float | None = None, **shown: Any) -> SearchEvidence:
    store = Store(default_path(), warnings.warn)
    return evidence_of(search_space(space, store, _means(workers)), store, top, load, **shown)


def _means(workers: int) -> Means:
    return Means("processes" if workers > 1 else "here", workers)


@checked
def explain(
    described: Described | None = None,
    batch: int = 64,
    context: float = 2048,
    prefill_tokens: int = 0,
    pool: str | None = None,
    **options: Unpack[ScenarioOptions],
) -> Explanation:
    """Price one step operator by operator: `explain(model="llama-3.1-8b", device="h100_sxm", batch=8)`.

    Args:
        described: what serves; None: `options` say it.
        batch: requests that decode one token.
        context: tokens that each of them attends to.
        prefill_tokens: tokens of a prompt's chunk beside them.
        pool: name of the pool whose step it is; None: the first that does such steps.
        options: as `scenario` takes them; they change a scenario that is given.

    Raises:
        InputError: an empty or impossible step, or a deployment that its model does not fit.
    """
    step = step_batch(batch, context, prefill_tokens)
    # A step has no workload, but a scenario has.
    load: dict[str, Any] = {"concurrency": max(batch, 1), "input_tokens": 1, "output_tokens": 1}
    load = load if described is None and options else {}
    given = described_by(described, load | options, ("batch", "context", "prefill_tokens", "pool"))
    chosen = pool_of_step(given.deployment, pool, is_decode=batch > 0)
    explanation = explain_step(resolve(pool_scenario(given, chosen)), step, workload=given.workload)
    return replace(explanation, pool=chosen.name)


@checked
def compare(runs: Mapping[str, Result | Path | str] | Sequence[Result | Path | str]) -> Comparison:
    """Say which of several results is faster, and why: `compare({"small": run(1024), "large": run(8192)})`.

    Args:
        runs: 2 to 8 results of `simulate`, or folders that `save` or `--out` wrote, by name or in order.

    Raises:
        InputError: another number, or a folder without a result.
    """
    if not isinstance(runs, Mapping):
        runs = {f"run {place}" if isinstance(run, Result) else str(run): run for place, run in enumerate(runs, 1)}
    compared = Comparison(_compared(name, run) for name, run in runs.items())
    check_runs(compared)
    return compared


def _compared(name: str, run: Result | Path | str) -> ComparedRun:
    if isinstance(run, Path | str):
        read = read_run(Path(run))
        return replace(read, entry=replace(read.entry, name=name))
    if not isinstance(run, Result):
        raise InputError(f"{name} is no result but a {type(run).__name__}", "give what simulate returns, or a folder")
    document = run_document(run)
    return ComparedRun(entry_of(document, name), document, run.requests)


@checked
def collective(
    op: str,
    size_bytes: int | str,
    *,
    device: Path | str | None = None,
    num_devices: int | None = None,
    topology: Path | str | None = None,
    ranks: int | Sequence[int] | None = None,
    backend: str = "analytic",
    algorithm: str = "auto",
) -> CollectiveRun:
    """Predict the time and bandwidth of one collective: `collective("all_reduce", "1GiB", device="h100_sxm")`.

    Args:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_recv; also as NCCL writes it.
        size_bytes: as nccl-tests counts them: a number, or a text with its unit.
        device: a device, on its usual nodes; None: `topology` says it.
        num_devices: how many of them; None: one node.
        topology: a file, a type with parameters (`"nvl:num_gpus=144"`), or a node of the catalog.
        ranks: how many GPUs, or their ids; None: all.
        backend: analytic, flow or packet.
        algorithm: ring, tree, nvls, ...; `auto` takes the choice of NCCL.

    Raises:
        InputError: no such operation, device, topology, backend or ranks, or neither a device nor a topology is given.
    """
    if (device is None) == (topology is None):
        raise InputError("a device or a topology is needed, and not both", 'device="h100_sxm", num_devices=64')
    if topology is None:
        topology, num_devices = nodes_of(catalog.device(str(device)), num_devices)
    elif num_devices is not None:
        raise InputError("num_devices is for device", "give ranks")
    fabric, choices = fabric_of(str(topology)), CollectiveChoices(algorithm, launch_s=LAUNCH_S)
    ranks = ranks if ranks is not None else num_devices or fabric.num_gpus
    settings, num_bytes = settings_from({"backend": backend}), size_of(str(size_bytes))
    return run_collective(fabric, operation_named(op), num_bytes, ranks, backend, settings, choices)


@checked
def diffusion(job: Mapping[str, Any] | Path | str, settings: Mapping[str, Any] | None = None) -> DiffusionResult:
    """Predict a batch of images or videos: `diffusion({"model": "FLUX.1-dev", "device": "h100_sxm", "batch": 4})`.

    `job` has the keys of a diffusion job, or names its file; `settings` change it: `{"parallelism.ulysses": 4}`.
    InputError where a key is wrong, or the model cannot be divided so."""
    raw = read_raw(Path(job)) if isinstance(job, Path | str) else dict(encode(dict(job)))
    for path, value in (settings or {}).items():
        set_path(raw, path, value)
    return simulate_diffusion(resolve_diffusion(job_from(raw, str(job) if isinstance(job, Path | str) else "")))


@checked
def diagnose(
    requests: Path | str,
    described: Described | None = None,
    before: Path | str | Sequence[Path | str] = (),
    **options: Unpack[ScenarioOptions],
) -> Diagnosis:
    """Say why a server is slow: `diagnose("runs/real", model="qwen3-32b", device="h100_sxm", tp=2)`.

    Args:
        requests: what was recorded of its requests, as `windtunnel diagnose` takes it.
        described: the deployment that served them; None: `options` say it.
        before: earlier, healthy runs of the same deployment: they show smaller faults.
        options: as `scenario` takes them; they change a scenario that is given.

    Raises:
        InputError: a file is missing or malformed, or the deployment cannot serve the recorded requests.
    """
    # The recorded requests replace the load, but a scenario has one.
    load: dict[str, Any] = {"rate_per_s": 1.0, "input_tokens": 1, "output_tokens": 1}
    given = described_by(described, load | options if described is None and options else options, ("before",))
    earlier = [before] if isinstance(before, Path | str) else before
    return diagnose_requests(given, read_requests(Path(requests)), [read_requests(Path(path)) for path in earlier])


@checked
def train(
    job: TrainingJob | Mapping[str, Any] | Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[TrainOptions],
) -> TrainingResult:
    """Predict a training step of a job, or what options such as `model`, `num_devices` and `tp` describe.

    Args:
        job: what to run: a job, its keys, or its file, which may be another tool's; None: `options` say it.
        settings: dotted path -> value, for everything without a short name.
        options: the names that the command line takes, and fields of a job; they change a job that is given. A
            dictionary is a field, as `recompute={"granularity": "full"}`.

    Raises:
        InputError: an unknown option, or a job whose parts do not go together; one that does not fit is predicted.
    """
    known = [*JOB_PATHS, *TrainingJob.__struct_fields__, "settings"]
    for name in options:
        if name not in known:
            raise unknown_option(name, known)
    fields = {
        name if isinstance(value, Mapping) else JOB_PATHS.get(name, name): value for name, value in options.items()
    }
    given = fields | dict(settings or {})
    if isinstance(job, Path | str):
        read = read_job_file(Path(job), given)
        for remark in read.remarks:
            warnings.warn(f"{job}: {remark}", stacklevel=3)
        return simulate_training(read.job)
    return simulate_training(load(encode(job) if isinstance(job, TrainingJob) else job, given))


@checked
def save(thing: Any, path: Path | str, overwrite: bool = False) -> None:
    """Write a scenario, job, device or model, which reads back as an equal one; a result as `--out` does.

    Args:
        thing: what to write.
        path: the file, replaced where there is one: JSON where it ends so, else YAML; of a result of `simulate`,
            `search` or `recommend` a new folder.
        overwrite: replace what a former result wrote to the folder.

    Raises:
        InputError: the place cannot be written, or nothing writes such a thing.
    """
    if isinstance(thing, Result | SearchEvidence):
        check_folder(Path(path), overwrite)
        write_run(thing, Path(path)) if isinstance(thing, Result) else write_study(thing, Path(path))
    elif isinstance(thing, Schema):
        write_yaml(thing, path)
    else:
        raise InputError(f"{type(thing).__name__} cannot be saved", "pickle keeps every result")


@checked
def validate(
    runs: Path | str | Sequence[Path | str], calibration: str | None = None, **deployment: Unpack[MeasuredOptions]
) -> Validation:
    """Predict the measured runs of a table, or of a client's result file with the deployment behind it.

    Args:
        runs: one or several files, as `windtunnel validate` takes them.
        calibration: a calibration of the catalog, its file, or none; None: the shipped one.
        deployment: what served a client's results, as `scenario` takes it.

    Raises:
        InputError: a file is missing or malformed, or a client's result has no model and device.
    """
    paths = [Path(path) for path in ([runs] if isinstance(runs, Path | str) else runs)]
    return Validation(with_odd_runs(predict_runs(read_measurements(paths, deployment), calibration)))
