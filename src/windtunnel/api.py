"""A function for each question that the command line answers; a notebook shows their results as reports."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.calibration import measured_runs
from windtunnel.calibration.validate import RunPrediction, predict_runs, with_odd_runs
from windtunnel.notebook import Shown
from windtunnel.report.search.study import SearchEvidence, evidence_of
from windtunnel.schema import encode
from windtunnel.search.capacity.capacity import Capacities, capacities
from windtunnel.search.capacity.limits import limits_of, parse_limits
from windtunnel.search.executors import Means
from windtunnel.search.recommend import deployments_space
from windtunnel.search.space.space import Space, load_space, space_from
from windtunnel.search.store import Store, default_path
from windtunnel.search.study import search as search_space
from windtunnel.serving.explain import Explanation, explain_step, step_batch
from windtunnel.serving.scenario import Scenario, resolve
from windtunnel.serving.shorthand import JOB_PATHS, raw_scenario, scenario
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.step import TrainingResult, simulate_training


class Validation(Shown, list[RunPrediction]):
    """Measured runs with their predictions."""

    REPORT = "calibration.validation:validation_report"


def capacity(described: Scenario, slo: str | None = None, num_streams: int = 3) -> Capacities:
    """Find the greatest load that a deployment sustains within `slo` (`ttft_p90=2s,tpot_p99=50ms`; None: its own)."""
    return capacities(described, limits_of(described.slo) if slo is None else parse_limits(slo), num_streams, 0.005)


def search(space: Space | Mapping[str, Any] | Path | str, workers: int = 1, top: int = 10) -> SearchEvidence:
    """Find the best deployments, or layouts of a training job, of a space: a file's path, or what a file would say."""
    if isinstance(space, Path | str):
        space = load_space(Path(space))
    return _search(space if isinstance(space, Space) else space_from(dict(space)), workers, top)


def recommend(
    model: str, devices: Sequence[str], slo: str, rate_per_s: float | None = None, workers: int = 1, **options: Any
) -> SearchEvidence:
    """Say what to serve a model on: `recommend("llama-3.1-8b", ["l40s"], "ttft_p90=1s", rate_per_s=40, ...)`.

    Args:
        slo: limits that the requests must keep.
        rate_per_s: load of the whole fleet; None: the least money for a request wins.
        options: the workload and the engine, as `scenario` takes them.
    """
    shared = encode(scenario(model=model, device=devices[0], rate_per_s=rate_per_s or 1.0, **options))
    space = deployments_space(shared, devices, parse_limits(slo), {})
    return _search(space, workers, 5, rate_per_s, True)


def _search(
    space: Space, workers: int, top: int, load: float | None = None, recommends: bool = False
) -> SearchEvidence:
    means = Means("processes" if workers > 1 else "here", workers)
    store = Store(default_path(), warnings.warn)
    return evidence_of(search_space(space, store, means), store, top, load, recommends=recommends)


def explain(described: Scenario, batch: int = 64, context: float = 2048, prefill_tokens: int = 0) -> Explanation:
    """Price one step operator by operator: `batch` requests decode at a context in tokens, beside a prompt's chunk."""
    return explain_step(resolve(described), step_batch(batch, context, prefill_tokens))


def train(job: TrainingJob | Path | str | None = None, **options: Any) -> TrainingResult:
    """Predict a training step of a job, a job's file, or options such as `model`, `num_devices`, `tp` (or both)."""
    if not isinstance(job, TrainingJob):
        job = load(job, {JOB_PATHS.get(name, name): value for name, value in options.items()})
    return simulate_training(job)


def validate(runs: Path | str, calibration: str | None = None, **deployment: Any) -> Validation:
    """Predict the measured runs of a table, or of a client's result file with the deployment behind it."""
    path = Path(runs)
    if path.suffix == ".jsonl" and measured_runs.is_run_file(path):
        measured = measured_runs.read_run_file(path)
    elif path.suffix in (".json", ".jsonl"):
        measured = measured_runs.read_client_files(path, raw_scenario({}, deployment))
    else:
        measured = measured_runs.read_table(path)
    return Validation(with_odd_runs(predict_runs(measured, calibration)))
