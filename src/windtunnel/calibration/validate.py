"""Predict measured runs, one simulation each, beside their measured values; find series of them whose server was slow.

Such a series is late at every step by much the same time, unlike sibling runs.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from windtunnel import catalog
from windtunnel.calibration.measured_runs import METRICS, Measurement, reason_of
from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.metrics.power import waited
from windtunnel.metrics.summary import Distribution
from windtunnel.metrics.uncertainty import Interval
from windtunnel.model.launches.forward import attention_side
from windtunnel.pricing.estimator import Coverage
from windtunnel.processes import WorkerProcesses
from windtunnel.serving.analysis.device_use import power_model
from windtunnel.serving.calibration import LearntAcceptance, acceptance_of
from windtunnel.serving.prepared import prepare
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.run import Progress
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.simulate import serve_scenario
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import TrainingSetup
from windtunnel.training.setup import resolve as resolve_job
from windtunnel.training.step import simulate_with, step_interval, training_prices
from windtunnel.units import format_seconds
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.generate.requests import generate

TELLING_FACTS = {
    "roofline": (0.2, "device time priced by a roofline"),
    "scaled": (0.3, "device time beyond measured shapes"),
    "host": (0.3, "the time is the host's"),
    "communication": (0.3, "the time is communication"),
}
"""Fact of a run -> the share above which it may explain an error, and its words; the first one counts."""


@dataclass(frozen=True)
class RunPrediction:
    """A measured run with its prediction, or with the reason why there is none."""

    measurement: Measurement
    refused: str
    predicted: dict[str, float]
    """Metric -> predicted value, for metrics that were measured."""
    intervals: dict[str, Interval]
    calibration: str
    """Name of the calibration in force; empty: none."""
    facts: dict[str, float]
    """Facts that explain an error: shares of time, peak of KV use, preemptions, share of rooflines, and the power of
    steps as slow as measured (`slow_w`) where devices waited."""
    remarks: tuple[str, ...] = ()
    odd: str = ""
    """Why its series looks like that of a faulty server (`with_odd_runs`); empty: it does not."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """Latency and percentile (`ttft_p99`) -> predicted seconds."""

    def error(self, metric: str) -> float:
        """Return predicted over measured, less one; NaN where either is missing."""
        measured, predicted = self.measurement.measured.get(metric), self.predicted.get(metric)
        return math.nan if measured is None or predicted is None else predicted / measured - 1

    @property
    def reason(self) -> str:
        """A fact about the run that bears on an error; empty where there is none.

        What its record says of itself comes before shares of the simulated time, as those presuppose its settings.
        Settings that a scenario cannot hold are named behind them: whether they mattered is not known.
        """
        labels, facts, scenario = self.measurement.labels, self.facts, self.measurement.scenario
        if labels.get("odd"):
            return f"the record calls it odd: {labels['odd'].replace('_', ' ')}"
        if self.odd:
            return self.odd
        if slow_w := facts.get("slow_w"):
            drew = f"its devices drew {self.measurement.measured['power']:,.0f} W, and steps this slow would draw"
            return f"{drew} {slow_w:,.0f} W: they waited for their host or the client"
        if facts.get("unfit"):
            return "its devices' memory is predicted not to suffice"
        if scenario is not None and scenario.deployment.settings_assumed:
            return "settings of server and client were not recorded"
        if facts.get("preemptions") or facts.get("kv_peak", 0.0) > 0.98:
            return "KV cache full: queueing decides, and a small error of its size counts much"
        for name, (limit, text) in TELLING_FACTS.items():
            if facts.get(name, 0.0) > limit:
                return f"{facts[name]:.0%} of {text}"
        reasons = [f"not recorded: {labels['assumed']}"] if labels.get("assumed") else []
        if labels.get("unmodelled"):
            reasons.append(f"recorded, not simulated: {labels['unmodelled']}")
        if self.remarks:
            reasons.append(f"outside the calibration: {', '.join(self.remarks)}")
        return "; ".join(reasons)


def predict_runs(
    measurements: Sequence[Measurement],
    calibration: str | None = None,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> list[RunPrediction]:
    """Predict runs, in the order of `measurements`.

    Args:
        calibration: by name or file, in place of the scenarios' own (`none`: without).
        num_processes: runs of one device and engine go together, as their tables are read once.
    """
    served = [measurement.scenario.workload for measurement in measurements if measurement.scenario]
    check_size(measured_runs=len(served), requests_in_turn=sum(workload.num_requests or 0 for workload in served))
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, measurement in enumerate(measurements):
        names = ("device", "engine", "version", "model")
        groups.setdefault(tuple(measurement.labels.get(name, "") for name in names), []).append(index)
    batches = sorted(groups.values(), key=len, reverse=True)
    work = [([measurements[index] for index in batch], calibration) for batch in batches]
    if num_processes > 1 and len(batches) > 1:
        with WorkerProcesses(num_processes) as pool:
            done = list(_counted(pool.map(_predict_batch, work), len(measurements), progress))
    else:
        one_by_one = ([prediction] for batch in work for prediction in _predictions(*batch))
        done = list(_counted(one_by_one, len(measurements), progress))
    predictions = dict(zip(chain.from_iterable(batches), done, strict=True))
    return [predictions[index] for index in range(len(measurements))]


def _counted(batches: Iterable[list[RunPrediction]], total: int, progress: Progress | None) -> Iterator[RunPrediction]:
    count = 0
    for batch in batches:
        yield from batch
        count += len(batch)
        if progress is not None:
            progress(count, total)


def _predict_batch(work: tuple[list[Measurement], str | None]) -> list[RunPrediction]:
    return list(_predictions(*work))


def _predictions(measurements: Iterable[Measurement], calibration: str | None) -> Iterator[RunPrediction]:
    priced = PricedDeployments()
    trained: dict[str, TrainingPricer] = {}
    for measurement in measurements:
        try:
            if measurement.job is not None:
                yield _predicted_step(measurement, resolve_job(measurement.job), trained)
            else:
                yield _predicted(measurement, calibration, priced)
        except InputError as error:
            yield RunPrediction(measurement, reason_of(error), {}, {}, "", {})


def _predicted(measurement: Measurement, calibration: str | None, priced: PricedDeployments) -> RunPrediction:
    if measurement.scenario is None:
        raise InputError(measurement.refused)
    scenario = measurement.scenario
    if calibration is not None:
        scenario = scenario.with_deployment(calibration=calibration)
    setup = _decoding_setup(scenario)
    remarks: tuple[str, ...] = ()
    if measurement.lacks_acceptance:
        learnt, speculative = _learnt_acceptance(setup), setup.engine.speculative
        accepting = replace(measurement, scenario=scenario).accepting(learnt.fraction).scenario
        assert accepting is not None
        assert speculative is not None
        scenario, setup = accepting, _decoding_setup(accepting)
        if learnt.num_draft_tokens != speculative.num_draft_tokens:
            remarks = (f"the acceptance was measured with {learnt.num_draft_tokens} draft tokens a step",)

    requests = generate(scenario.workload, scenario.seed)
    prepared = prepare(scenario, requests, estimator_of=priced.estimator, lower=priced.lower)
    result = serve_scenario(scenario, prepared, requests)
    predicted = _metrics(result, measurement)
    return RunPrediction(
        measurement=measurement,
        refused="",
        predicted=predicted,
        intervals={name: interval for name, interval in result.intervals.items() if name in METRICS},
        calibration=setup.calibration_name or "",
        facts={
            "host": result.summary.time_fractions["host"],
            "communication": result.summary.time_fractions["communication"],
            "kv_peak": result.summary.utilisation.kv_peak_fraction,
            "preemptions": float(result.summary.utilisation.num_preemptions),
            "roofline": result.coverage.get(Coverage.ROOFLINE, 0.0),
            "scaled": result.coverage.get(Coverage.SCALED, 0.0),
            **_waiting(result, measurement, predicted),
        },
        remarks=(*result.calibration_remarks, *remarks),
        percentiles={
            f"{name}_{each}": getattr(distribution, each)
            for name, distribution in _distributions(result).items()
            for each in ("p50", "p90", "p95", "p99")
        },
    )


def _predicted_step(measurement: Measurement, setup: TrainingSetup, prices: dict[str, TrainingPricer]) -> RunPrediction:
    """Predict a step of training; `prices` are by device, node and network."""
    key = f"{setup.device}{setup.node}{setup.job.network}"
    if key not in prices:
        prices[key] = training_prices(setup)
    result = simulate_with(setup, prices[key])
    total_s = sum(result.by_coverage.values())
    predicted = {"step": result.step_s, "rate": result.flops_per_s_per_device}
    shares = {how.value: seconds / total_s for how, seconds in result.by_coverage.items()} if total_s else {}
    return RunPrediction(
        measurement=measurement,
        refused="",
        predicted={name: value for name, value in predicted.items() if name in measurement.measured},
        intervals={"step": step_interval(result)},
        calibration="",
        facts={**shares, "unfit": float(not result.fits)},
    )


def _decoding_setup(scenario: Scenario) -> Setup:
    """Resolve the scenario; with pools, the first that decodes."""
    return resolve(pool_scenario(scenario, next(pool for pool in scenario.deployment.groups if pool.role != "prefill")))


def _learnt_acceptance(setup: Setup) -> LearntAcceptance:
    """Return what the calibration in force says of the model's draft tokens."""
    speculative = setup.engine.speculative
    assert speculative is not None
    learnt = None
    if setup.calibration is not None:
        learnt = acceptance_of(setup.calibration.acceptance, setup.model.name, speculative.num_draft_tokens)
    if learnt is None:
        where = "no calibration is in force" if setup.calibration is None else "the calibration has none of the model"
        raise InputError(f"it decodes speculatively, no acceptance of draft tokens was recorded, and {where}")
    return learnt


def _distributions(result: Result) -> dict[str, Distribution]:
    summary = result.summary
    known = {"tpot": summary.tpot_s, "ttft": summary.ttft_s, "e2e": summary.e2e_s}
    return {name: distribution for name, distribution in known.items() if distribution is not None}


def _waiting(result: Result, measurement: Measurement, predicted: Mapping[str, float]) -> dict[str, float]:
    """Return what all devices would draw in steps as slow as the measured ones (`slow_w`), of a run whose devices
    waited; nothing of another one, or where its power is not known.
    """
    setup, steps, measured = result.setup, result.steps, measurement.measured
    ratios = {name: measured[name] / predicted[name] for name in ("tpot", "throughput") if name in predicted}
    slower = ratios.get("tpot") or 1 / ratios.get("throughput", math.inf)
    if slower < LEAST_SLOWER or "power" not in predicted or result.pools:
        return {}
    slowed = steps.replaced(duration_s=slower * steps["duration_s"])
    model = power_model(result.scenario.deployment, setup, attention_side(shard_of(setup)), slowed)
    assert model is not None  # as power was predicted
    slow_w, idle_w = (model.at(busy) * result.summary.num_devices for busy in (1.0, 0.0))
    return {"slow_w": slow_w} if waited(measured["power"], slow_w, predicted["power"], idle_w, slower) else {}


def _metrics(result: Result, measurement: Measurement) -> dict[str, float]:
    values = {name: getattr(known, measurement.statistic) for name, known in _distributions(result).items()}
    values["throughput"] = result.summary.throughput.output_tokens_per_s
    if result.summary.power is not None:
        values["power"] = result.summary.power.mean_w
    return {name: value for name, value in values.items() if name in measurement.measured}


LEAST_SLOWER = 1.25
"""Measured over predicted time of a token from which measured power tells devices that waited from slow ones."""
LEAST_RUNS = 3
"""Runs of a series, and of its siblings, that a judgement needs."""
MOST_SPREAD = 0.75
"""Interquartile range of the excess over its median up to which a series counts as late by a constant."""
LEAST_SHARE = 0.5
"""Median excess, as a share of the median predicted time per output token, from which it counts as slow."""
LEAST_RATIO = 2.5
"""Median excess over the interquartile range of those siblings' residuals from which it lies far outside them."""

Series = tuple[Hashable, ...]


def with_odd_runs(predictions: Sequence[RunPrediction]) -> list[RunPrediction]:
    """Return the predictions, with `odd` set in those of a series whose steps are late.

    A series has one deployment and one kind of prompts, at several loads. Its residual in time per output token, at
    each load, is compared with that of its siblings: runs of a model of the same shape and format on the same device
    with the same engine and version, or else on other devices.
    """
    series: dict[Series, list[int]] = {}
    for index, prediction in enumerate(predictions):
        if _load(prediction) and math.isfinite(_residual_s(prediction)):
            series.setdefault(_series(prediction), []).append(index)
    flagged = list(predictions)
    for key, members in series.items():
        siblings = _siblings(series, key)
        excess_s = _excess_s([predictions[i] for i in members], [predictions[i] for i in siblings])
        if excess_s is not None:
            text = f"its steps are {format_seconds(excess_s)} longer than in sibling runs at any load; a slow server?"
            for index in members:
                flagged[index] = replace(predictions[index], odd=text)
    return flagged


def _residual_s(prediction: RunPrediction) -> float:
    measured, predicted = prediction.measurement.measured.get("tpot"), prediction.predicted.get("tpot")
    return math.nan if measured is None or predicted is None else measured - predicted


def _load(prediction: RunPrediction) -> int:
    """Return the requests that run at once: the clients of a closed loop, or its server's limit; 0 of another load."""
    scenario = prediction.measurement.scenario
    arrivals = None if scenario is None else scenario.workload.arrivals
    if scenario is None or not isinstance(arrivals, ClosedLoop):
        return 0
    return min(arrivals.concurrency, scenario.deployment.engine.max_num_seqs or arrivals.concurrency)


_NUM_SHARED = 4
"""Entries of a series' key that siblings share: the model's shape and format, the engine and its version."""


def _series(prediction: RunPrediction) -> Series:
    scenario, labels = prediction.measurement.scenario, prediction.measurement.labels
    assert scenario is not None
    model = catalog.model(scenario.model)
    names = ("format", "engine", "version", "device", "model", "parallelism", "prompt")
    return ((model.hidden_size, model.vocab_size, model.layers), *(labels.get(name, "") for name in names))


def _siblings(series: Mapping[Series, Sequence[int]], key: Series) -> list[int]:
    """Return the runs of sibling series: on the same device where there are some, else on others."""
    others = {
        other: runs for other, runs in series.items() if other != key and other[:_NUM_SHARED] == key[:_NUM_SHARED]
    }
    here = [index for other, runs in others.items() if other[_NUM_SHARED] == key[_NUM_SHARED] for index in runs]
    return here or [index for runs in others.values() for index in runs]


def _excess_s(members: Sequence[RunPrediction], siblings: Sequence[RunPrediction]) -> float | None:
    """Return the median excess of a slow series, s; None where it is not slow.

    The excess of a run is its residual less the median residual of the siblings nearest to it in load.
    """
    if len(members) < LEAST_RUNS or len(siblings) < LEAST_RUNS:
        return None
    loads = np.log([_load(run) for run in siblings])
    residuals_s = np.array([_residual_s(run) for run in siblings])
    nearest_s = []
    for run in members:
        distance = np.abs(loads - np.log(_load(run)))
        nearest_s.append(np.median(residuals_s[distance <= distance.min() + 1e-9]))
    excess = np.array([_residual_s(run) for run in members]) - nearest_s
    low, middle, high = np.percentile(excess, [25, 50, 75])
    expected_s = np.median([run.predicted["tpot"] for run in members])
    spread_s = np.subtract(*np.percentile(nearest_s, [75, 25]))
    is_constant = excess.min() > 0 and high - low <= MOST_SPREAD * middle
    is_far = middle >= LEAST_SHARE * expected_s and middle >= LEAST_RATIO * spread_s
    return float(middle) if is_constant and is_far else None
