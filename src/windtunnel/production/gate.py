"""A gate for changes: whether a deployment keeps its limits after one, predicted or measured.

A predicted change is two simulations of the same requests. A measured one is the results of a benchmark client beside
earlier ones of the same load, or beside the prediction; it fails where it is worse than chance or the prediction's own
error explains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from windtunnel.calibration.validate import RunPrediction
from windtunnel.errors import InputError
from windtunnel.formats.clients.read import ClientResult
from windtunnel.metrics.limits import Limit, limit_of
from windtunnel.metrics.uncertainty import SURE
from windtunnel.notebook import Shown
from windtunnel.schema import encode, read_yaml, set_path, with_defaults
from windtunnel.search.capacity.probe import quantile
from windtunnel.search.space.space import value_text
from windtunnel.serving.engines.command_line import NO_COMMAND, Reading
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, changed_settings, follows

PRIOR = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Metric -> standard deviation of the logarithm of a run's mean, and `worth_runs`."""
FALSE_ALARMS = 0.001
"""Share of comparisons of equal servers that are taken for a change, metric by metric."""
NUM_INDEPENDENT = 100
"""All requests of a run count as at most so many, as one step serves many of them."""
LEAST_FOR_MEDIAN = 3
"""Repeats from which their median is compared and not their mean: one run in ten is an outlier."""
MEDIAN_PENALTY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of many normal values."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal value over the median of its absolute deviations."""


def centre(values: Sequence[float]) -> float:
    """Return the value that stands for repeated runs: the median, or the mean of one or two."""
    return median(values) if len(values) >= LEAST_FOR_MEDIAN else fmean(values)


def least_change(metric: str, before: Sequence[float], after: Sequence[float], sampling: float = 0.0) -> float:
    """Return the smallest change, as a share, that chance explains in no more than `FALSE_ALARMS` of comparisons.

    The variance of the logarithms is pooled from the repeats on both sides, of three or more from the median absolute
    deviation, as one repeat in ten is an outlier; and from what is known of repeated runs of other servers, which
    counts as so many repeats more. The change is Student's t times its standard error.

    Args:
        metric: one of `tpot`, `ttft`, `e2e`, `throughput`.
        before, after: means, or values of one percentile, of the repeats on each side, at least one.
        sampling: standard deviation of the logarithm of a run's value besides, as `sampling_error` of a percentile.
    """
    from scipy.stats import t

    known = math.hypot(PRIOR[metric], sampling)
    freedom, squares = float(PRIOR["worth_runs"]), PRIOR["worth_runs"] * known**2
    variance = 0.0
    for values in (before, after):
        logs = [math.log(value) for value in values]
        middle = centre(logs)
        if len(logs) >= LEAST_FOR_MEDIAN:
            squares += (len(logs) - 1) * (NORMAL_MAD * median(abs(value - middle) for value in logs)) ** 2
        else:
            squares += sum((value - middle) ** 2 for value in logs)
        freedom += len(logs) - 1
        variance += (MEDIAN_PENALTY**2 if len(logs) >= LEAST_FOR_MEDIAN else 1.0) / len(logs)
    quantile = float(t.ppf(1 - FALSE_ALARMS, freedom))
    return math.expm1(quantile * math.sqrt(squares / freedom * variance))


def sampling_error(name: str, run: ClientResult) -> float:
    """Return the standard deviation of the logarithm of a run's percentile (`ttft_p99`) that its sample explains.

    It is that of a quantile q of n log-normal values, sigma sqrt(q (1 - q) / n) / phi(z), with z the normal quantile
    and phi the density there (David and Nagaraja, Order Statistics, 2003, section 10.2). sigma is the largest that the
    run's percentiles show.
    """
    from scipy.stats import norm

    latency, _, percentile = name.partition("_p")
    others = {key: value for key, value in run.percentiles.items() if key.startswith(f"{latency}_p")}
    middle = others.pop(f"{latency}_p50", run.measured.get(latency, math.nan))
    quantiles = {key: float(norm.ppf(float(key.partition("_p")[2]) / 100)) for key in others}
    sigma = max((math.log(others[key] / middle) / z for key, z in quantiles.items() if abs(z) > 1), default=0.0)
    share = float(percentile) / 100
    count = min(run.num_requests, NUM_INDEPENDENT)
    return sigma * math.sqrt(share * (1 - share) / count) / float(norm.pdf(norm.ppf(share)))


COST, THROUGHPUT, FAILED = "cost", "throughput", "failed"
USUAL_INCREASES: Mapping[str, float] = {"ttft_p90": 0.1, "tpot_p90": 0.05, "e2e_p90": 0.05, COST: 0.05}
"""Figure -> share by which a predicted change may raise it, where nothing else is said."""
USUAL_MEASURED: Mapping[str, float] = {"tpot": 0.02, "ttft": 0.1, "e2e": 0.02, THROUGHPUT: 0.02}
"""Metric -> share by which measured runs may be worse than the earlier ones, beyond chance."""
CHANGE_ERROR = 0.25
"""Share of a predicted change that the measured one may miss."""
UNSET: tuple[Any, ...] = (None, {})
MOST_CHANGES = 8
"""Changed settings that a remark names."""
SAME_LENGTH = 0.05
"""Largest relative difference of the mean lengths of two runs of the same load."""


@dataclass(frozen=True)
class Check:
    """One figure, and whether it is good enough."""

    name: str
    """A latency and its statistic (`ttft_p90`), `cost` in USD per million output tokens, a measured metric, or the
    share of requests that `failed`."""
    rule: str
    """`slo`: a limit of its own; `increase`: above what it was; `band`: above what the prediction leaves open;
    `expected`: above what it was, times its predicted change."""
    before: float | None
    """What it was, or is predicted to be; None where it is not compared."""
    after: float
    most: float
    """The worst value that passes; of `throughput` the least."""
    least_change: float | None = None
    """The smallest change that chance does not explain, as a share; None where nothing is measured."""
    expected: float | None = None
    """What the change is predicted to make of `before`; None where nothing is predicted."""

    @property
    def change(self) -> float | None:
        """After over before, less one."""
        return self.after / self.before - 1 if self.before else None

    @property
    def holds(self) -> bool:
        return self.after >= self.most if self.name == THROUGHPUT else self.after <= self.most


@dataclass(frozen=True)
class Gate(Shown):
    """The checks of a change."""

    REPORT = "gate:gate_report"

    title: str
    checks: Sequence[Check]
    remarks: Sequence[str] = ()
    after: Result | None = None
    """The changed deployment's run, where it is predicted."""
    not_starting: Sequence[str] = ()
    """Sentences on why the changed server would not start."""

    @property
    def passes(self) -> bool:
        """Whether the server starts and every check holds."""
        return not self.not_starting and all(check.holds for check in self.checks)


def gate_change(
    before: Result | None, after: Result, limits: Sequence[Limit], increases: Mapping[str, float] | None = None
) -> Gate:
    """Compare the simulation of a deployment with that of the one before a change. InputError for no limit and nothing
    to compare with, or a figure that one of the runs does not have.

    Args:
        before: of the same requests; None: only the limits count.
        increases: figure -> share by which it may rise; None: `USUAL_INCREASES`, where both sides have it.
    """
    checks = []
    for limit in limits:
        old = None if before is None else statistic(before, limit)
        checks.append(Check(limit.name, "slo", old, statistic(after, limit), limit.most_s))
    for name, share in (USUAL_INCREASES if increases is None else increases).items():
        if before is None:
            continue
        value, other = figure(before, name), figure(after, name)
        if value is not None and other is not None:
            checks.append(Check(name, "increase", value, other, value * (1 + share)))
        elif increases is not None:
            raise InputError(f"{name} is not known of both deployments", "leave it out of --max-increase")
    if not checks:
        raise InputError("there is nothing to check", "give limits with --slo, or what was before with --before")
    deployment = after.scenario.deployment
    devices = " and ".join(dict.fromkeys(group.device or deployment.device for group in deployment.groups))
    title = f"{after.scenario.model_name} on {devices}, {after.setup.engine.name} {after.setup.engine.version}"
    return Gate(title, checks, [] if before is None else _what_changes(before, after), after)


def with_servers(gate: Gate, after: Reading, before: Reading = NO_COMMAND) -> Gate:
    """Return a gate that fails where the changed server's command would not start, and names what no prediction has of
    both commands.
    """
    stopped = [f"before the change, {sentence}" for sentence in before.not_starting]
    remarks = dict.fromkeys([*gate.remarks, *after.remarks, *before.remarks, *stopped])
    return replace(gate, remarks=list(remarks), not_starting=after.not_starting)


def _what_changes(before: Result, after: Result) -> list[str]:
    """Say which settings differ between two deployments, their defaults filled in."""
    scenarios = [_as_served(before), _as_served(after)]
    usual = [with_defaults(each, Scenario) for each in scenarios]
    differing = changed_settings(scenarios)
    changed = {path: values for path, values in differing.items() if any(each not in UNSET for each in values)}
    causes = {path: values for path, values in changed.items() if not follows(path, values)}
    texts = []
    for path, values in (causes or changed).items():
        old, new = (
            f"{value_text(known[path])} (the default)"
            if value is None and known.get(path) is not None
            else value_text(value)
            for value, known in zip(values, usual, strict=True)
        )
        texts.append(f"{path.removeprefix('deployment.')} {old} -> {new}")
    hidden = f", and {len(texts) - MOST_CHANGES} more" if len(texts) > MOST_CHANGES else ""
    follow = ", ".join(path.removeprefix("deployment.") for path in changed if causes and path not in causes)
    follow = follow and f"; what follows: {follow}"
    return [f"changed: {', '.join(texts[:MOST_CHANGES]) or 'nothing'}{hidden}{follow}"]


def _as_served(result: Result) -> dict[str, Any]:
    """Encode a run's scenario with the greatest length that its server takes; the run's own is that of its requests."""
    raw, setup = encode(result.scenario), result.setup
    if not result.pools:
        length = setup.engine.max_model_len or setup.model.max_context_tokens
        set_path(raw, "deployment.engine.max_model_len", length)
    return dict(raw)


def statistic(result: Result, limit: Limit) -> float:
    """Return the value of a latency's statistic in a run, in seconds; InputError where no request has that latency."""
    if limit.metric == "itl":
        gaps = result.summary.itl_s
        values = np.zeros(0) if gaps is None else np.array([getattr(gaps, limit.statistic)])
    else:
        values = result.requests[f"{limit.metric}_s"][~result.requests["is_warmup"]]
        values = values[~np.isnan(values)]
    if values.size == 0:
        raise InputError(f"no request has a {limit.metric.upper()}: answers have one token", "leave that limit out")
    if limit.metric == "itl" or limit.statistic == "mean":
        return float(values.mean())
    return quantile(values, limit.quantile)


def figure(result: Result, name: str) -> float | None:
    """Return a figure of a run by its name: `cost`, or a latency and statistic; None where the run has none."""
    if name == COST:
        return None if result.summary.cost is None else result.summary.cost.usd_per_million_output_tokens
    limit = limit_of(name, 1.0)
    if limit.metric in ("tpot", "itl") and result.summary.tpot_s is None:
        return None
    return statistic(result, limit)


def gate_measured(
    before: Sequence[ClientResult],
    after: Sequence[ClientResult],
    increases: Mapping[str, float] | None = None,
    ratios: Mapping[str, float] | None = None,
) -> Gate:
    """Compare measured runs of a load with earlier ones. InputError where the runs are of different loads, or have no
    metric in common.

    Args:
        before, after: repeats of the same load, at least one each.
        increases: metric, or percentile (`ttft_p99`), -> share by which it may be worse; None: `USUAL_MEASURED`.
        ratios: metric -> what a change of the deployment is predicted to multiply it by, at both sides' load; metrics
            without one are left out. None: nothing should change.
    """
    _check_same_load([*before, *after])
    checks, lacking = [], []
    for name, share in (USUAL_MEASURED if increases is None else increases).items():
        old, new = (
            [known[name] for known in map(ClientResult.values, side) if name in known] for side in (before, after)
        )
        if old and new and (ratios is None or name in ratios):
            sampling = fmean(sampling_error(name, run) for run in (*before, *after)) if "_p" in name else 0.0
            by_chance = least_change(name.partition("_")[0], old, new, sampling)
            ratio = 1.0 if ratios is None else ratios[name]
            expected, worst = centre(old) * ratio, 1 + max(share, by_chance) + CHANGE_ERROR * abs(ratio - 1)
            most = expected / worst if name == THROUGHPUT else expected * worst
            rule, told = ("increase", None) if ratios is None else ("expected", expected)
            checks.append(Check(name, rule, centre(old), centre(new), most, by_chance, told))
        elif old or new:
            lacking.append(f"{name} is not compared: {'the prediction' if old and new else 'one side'} lacks it")
        elif "_" in name:
            known = [each for each in before[0].values() if "_" in each]
            raise InputError(f"the runs do not tell {name}", f"they tell {', '.join(known) or 'means'}")
    if not checks:
        common = ", ".join(ratios or USUAL_MEASURED)
        raise InputError("; ".join(lacking) or "the runs have no metric in common", f"one of {common}")
    checks += _failures(before, after)
    remarks = [f"{len(after)} measured beside {len(before)} earlier", *lacking]
    for what in ("client", "model", "engine"):
        old_name, new_name = (getattr(side[0], what) for side in (before, after))
        if old_name and new_name and old_name != new_name:
            remarks.append(f"the {what} is another one: {new_name}, and {old_name} before")
    blind = [check for check in checks if check.name != "ttft" and (check.least_change or 0.0) > LEAST_SEEN]
    if means := [check.least_change or 0.0 for check in blind if "_" not in check.name]:
        remarks.append(f"so few repeats show only changes above {max(means):.1%}; five on each side show about 3%")
    seen = {check.name: check.least_change for check in blind if "_" in check.name}
    remarks += [f"so few repeats show only changes of {name} above {least:.0%}" for name, least in seen.items()]
    return Gate(f"{after[0].id} against {before[0].id}", checks, remarks)


LEAST_SEEN = 0.05
"""Changes that a gate should be able to see."""


def _failures(before: Sequence[ClientResult], after: Sequence[ClientResult]) -> list[Check]:
    """Return the check of failed requests; none where all were answered.

    Fisher's exact test: of as many failures in all, more than so many are after the change by chance in no more than
    `FALSE_ALARMS` of comparisons. A prediction counts as as many requests, all of them answered.
    """
    from scipy.stats import hypergeom

    failed = [sum(run.num_failed for run in side) for side in (before, after)]
    old, new = (sum(run.num_requests + run.num_failed for run in side) for side in (before or after, after))
    if not any(failed):
        return []
    most = 0
    while most < new and hypergeom.sf(most, old + new, failed[0] + most + 1, new) > FALSE_ALARMS:
        most += 1
    return [Check(FAILED, "increase" if before else "band", failed[0] / old, failed[1] / new, most / new)]


def _check_same_load(runs: Sequence[ClientResult]) -> None:
    """Raise InputError where runs are not repeats of one load."""
    first = runs[0]
    for run in runs[1:]:
        if (run.concurrency, run.rate_per_s) != (first.concurrency, first.rate_per_s):
            said = f"{run.id} and {first.id} have different loads: {_load(run)} and {_load(first)}"
            raise InputError(said, "compare runs of the same load, one load in a file")
        for name in ("input_tokens", "output_tokens"):
            mean, other = getattr(first, name), getattr(run, name)
            if abs(other - mean) > SAME_LENGTH * mean:
                hint = "compare runs of the same lengths"
                raise InputError(f"{name} of {run.id} are {other:g} on average, of {first.id} {mean:g}", hint)


def _load(run: ClientResult) -> str:
    said = [f"{run.rate_per_s:g} requests/s"] if run.rate_per_s else []
    return " and ".join([*said, *([f"{run.concurrency} at once"] if run.concurrency else [])]) or "not recorded"


def predicted_ratios(before: Sequence[RunPrediction], after: Sequence[RunPrediction]) -> dict[str, float]:
    """Return the ratio that a change gives each metric and percentile, as predicted on both sides; InputError for a
    refused run.
    """
    _check_predicted([*before, *after])
    old, new = ([{**run.predicted, **run.percentiles} for run in side] for side in (before, after))
    names = [name for name in old[0] if all(name in values for values in (*old, *new))]
    return {name: centre([run[name] for run in new]) / centre([run[name] for run in old]) for name in names}


def _check_predicted(runs: Sequence[RunPrediction]) -> None:
    for run in runs:
        if run.refused:
            raise InputError(f"{run.measurement.id} cannot be predicted: {run.refused}")


def gate_predicted(runs: Sequence[RunPrediction], results: Sequence[ClientResult] = ()) -> Gate:
    """Compare measured runs of one load with their prediction: worse than its 99% interval fails. InputError for a run
    that cannot be predicted.

    Args:
        results: the same runs as the client recorded them, with the requests that failed.
    """
    _check_predicted(runs)
    checks = []
    for name in USUAL_MEASURED:
        values = [run.measurement.measured[name] for run in runs if name in run.predicted]
        if values and name in runs[0].intervals:
            interval, expected = runs[0].intervals[name], runs[0].predicted[name]
            end = interval.low if name == THROUGHPUT else interval.high
            most = expected * math.exp(SURE * math.log(end / expected))
            checks.append(Check(name, "band", expected, centre(values), most))
    if not checks:
        raise InputError("the prediction has no interval", "a calibration gives one; or compare with --baseline")
    checks += _failures([], results)
    named = f"calibration: {runs[0].calibration or 'none'}"
    return Gate(f"{runs[0].measurement.id} against its prediction", checks, [named, *runs[0].remarks])
