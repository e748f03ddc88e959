"""Infer the release of an engine whose version was not recorded, from the runs that it served.

A few runs of each configuration are predicted with every release whose defaults differ. Each configuration takes the
release that predicts the other ones best, so that its own errors stay those of a prediction.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from windtunnel.calibration.measured_runs import VERSION, Measurement
from windtunnel.calibration.validate import RunPrediction, predict_runs
from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.serving.run import Progress

TOLD_BY = ("tpot", "e2e", "throughput", "ttft")
"""Metrics that tell a release, the best first; TTFT has the client in it as well."""
MOST_CONFIGURATIONS = 12
"""So many are predicted with every release, the runs with the lowest and the highest load of each."""
EQUAL_WITHIN = 0.005
"""Releases whose mean errors differ by less explain the runs equally well; the newest of them is taken."""


def with_inferred_versions(
    runs: Sequence[Measurement],
    calibration: str | None = None,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Return runs in their order, those of unknown version with the release that explains others of their source best.
    InputError where no release predicts runs of unknown version.

    Args:
        calibration, num_processes: as for `predict_runs`, which predicts the trials.
    """
    known = list(runs)
    sources: dict[tuple[str, str], list[int]] = {}
    for place, run in enumerate(runs):
        if VERSION in run.unknown and run.scenario is not None:
            sources.setdefault((run.scenario.deployment.engine.name, run.labels.get("source", "")), []).append(place)
    for (engine, _), places in sources.items():
        taken = _inferred([runs[place] for place in places], engine, calibration, num_processes, progress)
        for place, run in zip(places, taken, strict=True):
            known[place] = run
    return known


def _inferred(
    runs: Sequence[Measurement], engine: str, calibration: str | None, num_processes: int, progress: Progress | None
) -> list[Measurement]:
    """Return the runs of one source, each with a release of the engine."""
    defaults = engine_defaults(engine)
    newest = defaults.newest_version or defaults.default_version
    releases = list(dict.fromkeys([*(entry.since for entry in defaults.versions), newest]))
    chosen = _spread_out(runs)
    trials = [_of_release(run, release) for release in releases for run in chosen]
    errors = np.array([_error(prediction) for prediction in predict_runs(trials, calibration, num_processes, progress)])
    each = errors.reshape(len(releases), len(chosen))
    of_name = {
        name: each[:, [run.configuration == name for run in chosen]].mean(axis=1)
        for name in dict.fromkeys(run.configuration for run in chosen)
    }
    of_name = {name: column for name, column in of_name.items() if np.isfinite(column).any()}
    by_name = np.stack([*of_name.values()], axis=1) if of_name else np.full((len(releases), 1), np.inf)
    if not np.isfinite(by_name.mean(axis=1)).any():
        raise InputError(
            f"no release of {defaults.title} predicts the runs whose {VERSION} was not recorded", "name their version"
        )
    places = {name: place for place, name in enumerate(of_name)}
    taken = [releases[_best(by_name, places.get(run.configuration))] for run in runs]
    said = f"{defaults.title} {_described(by_name.mean(axis=1), releases, taken)}"
    return [_of_release(run, release, said) for run, release in zip(runs, taken, strict=True)]


def _spread_out(runs: Sequence[Measurement]) -> list[Measurement]:
    """Return the runs with the lowest and the highest load of some configurations."""
    by_name: dict[str, list[Measurement]] = {}
    for run in sorted(runs, key=lambda run: float(run.labels.get("concurrency") or 0)):
        by_name.setdefault(run.configuration, []).append(run)
    every = list(by_name.values())
    picked = np.unique(np.linspace(0, len(every) - 1, min(len(every), MOST_CONFIGURATIONS)).round().astype(int))
    return [run for place in picked for run in every[place][:1] + every[place][1:][-1:]]


def _of_release(run: Measurement, release: str, said: str = "") -> Measurement:
    """Return a run as one of a release; `said` is how well releases explain it."""
    assert run.scenario is not None
    engine = msgspec.structs.replace(run.scenario.deployment.engine, version=release)
    labels = {**run.labels, "version": release, "inferred": said}
    unknown = tuple(name for name in run.unknown if name != VERSION)
    return replace(run, scenario=run.scenario.with_deployment(engine=engine), labels=labels, unknown=unknown)


def _error(prediction: RunPrediction) -> float:
    """Return the error of the most telling metric as a logarithm; infinite where the run is refused."""
    metric = next((name for name in TOLD_BY if name in prediction.predicted), None)
    if metric is None:
        return float("inf")
    return abs(float(np.log(prediction.predicted[metric] / prediction.measurement.measured[metric])))


def _best(errors: Floats, left_out: int | None) -> int:
    """Return the release that predicts all configurations best but one, or the only one.

    Args:
        errors: `[releases, configurations]`.
        left_out: the configuration that does not choose.
    """
    others = np.arange(errors.shape[1]) != left_out
    mean = errors[:, others if others.any() else ~others].mean(axis=1)
    return int(np.flatnonzero(mean <= mean.min() + EQUAL_WITHIN)[-1])


def _described(mean: Floats, releases: Sequence[str], taken: Sequence[str]) -> str:
    """Say how well the releases that were taken explain the runs, and how well others would.

    Args:
        mean: of each release over all configurations, as a logarithm.
        taken: by each run.
    """
    best, usual = _best(mean[:, None], None), Counter(taken).most_common(1)[0][0]
    equal = [release for release, error in zip(releases, mean, strict=True) if error <= mean[best] + 2 * EQUAL_WITHIN]
    span = f"{equal[0]} to {equal[-1]} explain the runs equally well, " if len(equal) > 1 else ""
    newest = f" ({np.expm1(mean[-1]):.0%} with {releases[-1]})"
    beside = newest if best + 1 < len(mean) and np.isfinite(mean[-1]) else ""
    return f"{usual} is inferred: {span}mean error {np.expm1(mean[best]):.0%}{beside}"
