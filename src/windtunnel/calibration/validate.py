"""Predict measured runs, one simulation each, beside their measured values."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from windtunnel.calibration.measured_runs import METRICS, Measurement, reason_of
from windtunnel.errors import InputError
from windtunnel.metrics.uncertainty import Interval
from windtunnel.pricing.estimator import Coverage
from windtunnel.processes import WorkerProcesses
from windtunnel.serving.prepared import prepare
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.run import Progress
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.simulate import serve_scenario
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
    """Facts that explain an error: shares of time, peak of KV use, preemptions, share of rooflines."""
    remarks: tuple[str, ...] = ()
    odd: str = ""
    """Why its series looks like that of a faulty server (`odd_runs`); empty: it does not."""

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
        progress: called with the runs predicted so far and the runs in all.
    """
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
    for measurement in measurements:
        try:
            yield _predicted(measurement, calibration, priced)
        except InputError as error:
            yield RunPrediction(measurement, reason_of(error), {}, {}, "", {})


def _predicted(measurement: Measurement, calibration: str | None, priced: PricedDeployments) -> RunPrediction:
    if measurement.scenario is None:
        raise InputError(measurement.refused)
    scenario = measurement.scenario
    if calibration is not None:
        deployment = msgspec.structs.replace(scenario.deployment, calibration=calibration)
        scenario = msgspec.structs.replace(scenario, deployment=deployment)
    setup = _decoding_setup(scenario)
    if measurement.lacks_acceptance:
        scenario = _accepting(measurement, setup, scenario)
        setup = _decoding_setup(scenario)

    requests = generate(scenario.workload, scenario.seed)
    prepared = prepare(scenario, requests, estimator_of=priced.estimator, lower=priced.lower)
    result = serve_scenario(scenario, prepared, requests)
    return RunPrediction(
        measurement=measurement,
        refused="",
        predicted=_metrics(result, measurement),
        intervals={name: interval for name, interval in result.intervals.items() if name in METRICS},
        calibration=setup.calibration_name or "",
        facts={
            "host": result.summary.time_fractions["host"],
            "communication": result.summary.time_fractions["communication"],
            "kv_peak": result.summary.utilisation.kv_peak_fraction,
            "preemptions": float(result.summary.utilisation.num_preemptions),
            "roofline": result.coverage.get(Coverage.ROOFLINE, 0.0),
            "scaled": result.coverage.get(Coverage.SCALED, 0.0),
        },
        remarks=result.calibration_remarks,
    )


def _decoding_setup(scenario: Scenario) -> Setup:
    """Resolve the scenario; with pools, the first that decodes."""
    return resolve(pool_scenario(scenario, next(pool for pool in scenario.deployment.groups if pool.role != "prefill")))


def _accepting(measurement: Measurement, setup: Setup, scenario: Scenario) -> Scenario:
    """Return the scenario with the share of accepted draft tokens from the calibration in force."""
    shares = {} if setup.calibration is None else setup.calibration.acceptance
    if setup.model.name not in shares:
        where = "no calibration is in force" if setup.calibration is None else "the calibration has none of the model"
        raise InputError(f"it decodes speculatively, no acceptance of draft tokens was recorded, and {where}")
    accepting = replace(measurement, scenario=scenario).accepting(shares[setup.model.name]).scenario
    assert accepting is not None
    return accepting


def _metrics(result: Result, measurement: Measurement) -> dict[str, float]:
    summary = result.summary
    distributions = {"tpot": summary.tpot_s, "ttft": summary.ttft_s, "e2e": summary.e2e_s}
    values = {
        name: float(getattr(distribution, measurement.statistic))
        for name, distribution in distributions.items()
        if distribution is not None
    }
    values["throughput"] = summary.throughput.output_tokens_per_s
    return {name: value for name, value in values.items() if name in measurement.measured}
