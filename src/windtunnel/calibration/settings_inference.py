"""Infer unrecorded engine settings, and the memory that an engine keeps from its KV cache, from measured runs.

The runs of a series were served with the same settings: those of a model behind a version of an engine on a device, or,
of the kept memory, all of an engine on a device. A series' runs are simulated again with other values. One is taken
where it explains them so much better than the default that it is twenty times as likely, and where each configuration's
runs are predicted better with the value that the series' other configurations speak for, no metric worse in the median.
Where all runs are of one configuration nothing but their own likelihood and median errors decide. Several settings are
taken one after the other.

The share of draft tokens that an engine accepted, where it was not recorded, is one for each model, from the measured
TPOT.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from windtunnel.calibration import fit as fits
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.compiled.arrays import Bools, Floats
from windtunnel.errors import InputError
from windtunnel.pricing.calibrated import CalibratedEstimator
from windtunnel.pricing.estimator import Estimator
from windtunnel.schema import fields_of
from windtunnel.serving.calibration import Calibration, Inferred, LearntAcceptance, Reserve
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Setup
from windtunnel.serving.state import records as state
from windtunnel.units import GIB

Values = tuple[tuple[str, float], ...]
"""Settings of `EngineSettings` by name, in the order in which they were inferred; empty: the engine's defaults."""

RESERVE = "reserved_bytes"
RESERVES = tuple(size * GIB for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0))
RESERVE_PRIOR, LEAST_RESERVE = math.log(2.0), 2.0 * GIB
"""Prior of the reserved memory, known to a factor of two; below `LEAST_RESERVE` its size makes no difference."""

OUTLIER = 3.0
"""Scale of robust residuals: larger ones count by their logarithm, as in Cauchy's distribution. Where both values are
far off, the farther one still counts for more."""

PRICE = 3.0
"""Price of a value that is not the default, in units of log-likelihood."""


class RunSeries(NamedTuple):
    """Runs that were served with the same settings; an empty field stands for any."""

    engine: str
    device: str = ""
    version: str = ""
    model: str = ""
    source: str = ""


def series_of(priced: fits.PricedServer) -> RunSeries | None:
    """Return the series that shares a run's unrecorded settings; None where all were recorded."""
    if not priced.measurement.unknown:
        return None
    (engine, device, *_), source = priced.scope, priced.measurement.labels.get("source", "")
    return RunSeries(engine, device, str(priced.setup.engine.version), priced.setup.model.name, source)


class Trials:
    """Simulations of measured runs with other settings, each made once, with the default overheads and factors."""

    def __init__(self, runs: Sequence[fits.PricedServer]) -> None:
        self.runs = runs
        self._before = cache(lambda index: fits.predict(runs[index], fits.Fit({})))
        self._shift = cache(self._simulated_shift)

    def shift(self, index: int, values: Values) -> Mapping[str, float] | None:
        """Metric -> log of its prediction with `values` over that without; None where `values` cannot serve the run."""
        return self._shift(index, tuple(sorted(values)))

    def _simulated_shift(self, index: int, values: Values) -> Mapping[str, float] | None:
        priced = self.runs[index]
        try:
            other = priced.served_with(dict(values))
        except InputError:
            return None
        if _limits(other) == _limits(priced):
            return dict.fromkeys(fits.FITTED, 0.0)
        before, after = self._before(index), fits.predict(other, fits.Fit({}))
        return {metric: math.log(after[metric] / before[metric]) for metric in fits.FITTED}


def _limits(priced: fits.PricedServer) -> state.KernelSettings:
    """Return the settings of a run's server, where limits beyond its client's reach count as equal."""
    settings, requests = priced.settings, priced.requests
    if not settings.concurrency:
        return settings
    longest = int((requests.input_tokens + requests.output_tokens).max())
    blocks = -(-longest // settings.block_size) * settings.num_groups + settings.blocks_per_request
    return settings._replace(
        max_num_seqs=min(settings.max_num_seqs, settings.concurrency),
        num_blocks=min(settings.num_blocks, settings.concurrency * blocks),
        num_window_blocks=min(settings.num_window_blocks, settings.concurrency * blocks),
    )


@dataclass(frozen=True)
class Taken:
    """Values that explain a series' runs."""

    values: Values
    runs: Sequence[int]
    """Indices of the series' runs."""
    before: Sequence[Mapping[str, float]]
    """For each run: metric -> log of measured over predicted with the defaults."""
    left_out: Sequence[Mapping[str, float]]
    """The same with the values inferred from the runs of other configurations; with those taken where all runs share
    one."""


Learnt = Mapping[RunSeries, Taken]


def infer(trials: Trials, around: fits.LocalFit, fit: fits.Fit, kept: Bools) -> Learnt:
    """Infer settings from the `kept` runs alone, under a fit; `around` has predictions linear around some fit."""
    runs = trials.runs
    unrecorded: dict[RunSeries, list[int]] = {}
    retention: dict[RunSeries, list[int]] = {}
    for index in np.flatnonzero(kept).tolist():
        priced = runs[index]
        if priced.measurement.weight <= 0:
            continue
        if (series := series_of(priced)) is not None:
            unrecorded.setdefault(series, []).append(index)
        elif priced.keeps_by_default:
            engine, device, *_ = priced.scope
            for scope in (RunSeries(engine), RunSeries(engine, device)):
                retention.setdefault(scope, []).append(index)
    learnt: dict[RunSeries, Taken] = {}
    left_open = _left_open(runs)
    for series, members in (unrecorded | retention).items():
        names = left_open.get(series, (RESERVE,))
        residuals = []
        for index in members:
            measured, predicted = runs[index].measurement.measured, around.predict(index, runs[index], fit)
            residuals.append(
                {name: math.log(measured[name] / predicted[name]) for name in fits.FITTED if name in measured}
            )
        taken = _taken(_SettingsQuestion(trials, members, residuals, names))
        if taken.values:
            learnt[series] = taken
    for engine, device in {priced.scope[:2] for priced in runs}:
        if RunSeries(engine) in learnt and RunSeries(engine, device) not in retention:
            # As a calibration of the engine on any device says.
            learnt[RunSeries(engine, device)] = learnt[RunSeries(engine)]
    return learnt


def _left_open(runs: Sequence[fits.PricedServer]) -> dict[RunSeries, tuple[str, ...]]:
    """Series -> the settings that none of its runs recorded; where one run recorded a setting, it is not inferred."""
    unrecorded: dict[RunSeries, tuple[str, ...]] = {}
    for priced in runs:
        if (series := series_of(priced)) is not None:
            unknown = priced.measurement.unknown
            unrecorded[series] = tuple(name for name in unrecorded.get(series, unknown) if name in unknown)
    return unrecorded


def values_of(priced: fits.PricedServer, learnt: Learnt) -> Values:
    """Return the values learnt for the settings that a run's record leaves open."""
    engine, device, *_ = priced.scope
    series = series_of(priced)
    if series is not None:
        return learnt[series].values if series in learnt else ()
    scope = RunSeries(engine, device)
    return learnt[scope].values if priced.keeps_by_default and scope in learnt else ()


def with_learnt(runs: Sequence[fits.PricedServer], learnt: Learnt) -> list[fits.PricedServer]:
    """Return the runs with the learnt settings, where these can serve them."""

    def served(priced: fits.PricedServer) -> fits.PricedServer:
        try:
            return priced.served_with(dict(values_of(priced, learnt)))
        except InputError:
            return priced

    return [served(priced) for priced in runs]


class _SettingsQuestion(NamedTuple):
    """The question which values of the settings `names` explain the runs `members`."""

    trials: Trials
    members: Sequence[int]
    residuals: Sequence[Mapping[str, float]]
    """For each run: metric -> log of measured over predicted with the defaults."""
    names: Sequence[str]

    def left(self, values: Values) -> list[Mapping[str, float]] | None:
        """Return the residuals with `values`; None where some run cannot be served with them."""
        shifts = [self.trials.shift(index, values) for index in self.members]
        if any(shift is None for shift in shifts):
            return None
        return [
            {name: value - shift[name] for name, value in residual.items()}
            for residual, shift in zip(self.residuals, shifts, strict=True)
            if shift is not None
        ]

    def costs(self, left: Sequence[Mapping[str, float]]) -> Floats:
        """Negative log-likelihood of every run."""
        costs = []
        for residual in left:
            squares = [(value / fits.NOISE[name]) ** 2 for name, value in residual.items()]
            costs.append(sum(0.5 * OUTLIER**2 * math.log1p(square / OUTLIER**2) for square in squares))
        crowding = fits.crowding_weights([fits.by_configuration(self.trials.runs[index]) for index in self.members])
        return np.asarray(crowding * np.array(costs), np.float64)


def _taken(question: _SettingsQuestion) -> Taken:
    """Add values setting by setting, as long as each is worth its price and improves left-out runs."""
    values: Values = ()
    left: Sequence[Mapping[str, float]] = question.residuals
    left_out = left
    configurations = np.array([fits.by_configuration(question.trials.runs[index]) for index in question.members])
    while True:
        ways = [(values, left), *_further(question, values)]
        costs = np.array([question.costs(residuals) for _, residuals in ways])
        prices = np.array([_price(question, tried) for tried, _ in ways])
        best = int((costs.sum(axis=1) + prices).argmin())
        chosen = np.full(len(question.members), best)
        for configuration in set(configurations.tolist()):
            others = configurations != configuration
            if others.any():
                chosen[~others] = (costs[:, others].sum(axis=1) + prices).argmin()
        foreseen = [ways[way][1][run] for run, way in enumerate(chosen.tolist())]
        better = question.costs(foreseen).sum() + prices[best] < costs[0].sum() + prices[0]
        before = _median_errors(left)
        is_farther = any(error > before[name] for name, error in _median_errors(foreseen).items())
        if best == 0 or not better or is_farther:
            return Taken(values, question.members, question.residuals, left_out)
        left_out, (values, left) = foreseen, ways[best]


def _further(question: _SettingsQuestion, values: Values) -> Iterator[tuple[Values, Sequence[Mapping[str, float]]]]:
    """Every way to fix one more setting, with the residuals that remain."""
    for name in question.names:
        if name in dict(values):
            continue
        for value in RESERVES if name == RESERVE else fits.TRIED[name]:
            more = (*values, (name, value))
            if (left := question.left(more)) is not None:
                yield more, left


def _price(question: _SettingsQuestion, values: Values) -> float:
    price = PRICE * len(values)
    if RESERVE in dict(values):
        default = float(question.trials.runs[question.members[0]].setup.engine.reserved_bytes or 0.0)
        ratio = (dict(values)[RESERVE] + LEAST_RESERVE) / (default + LEAST_RESERVE)
        price += 0.5 * (math.log(ratio) / RESERVE_PRIOR) ** 2
    return price


def inferred(
    runs: Sequence[fits.PricedServer], learnt: Learnt, engine: str, device: str | None
) -> tuple[Inferred, ...]:
    """Values learnt of unrecorded settings, for a calibration."""
    return tuple(
        Inferred(
            **fields_of(series, "device", "version", "model"),
            settings={name: int(value) if value == int(value) else value for name, value in sorted(taken.values)},
            **_record(runs, taken),
        )
        for series, taken in sorted(learnt.items())
        if series.model and series.engine == engine and device in (None, series.device)
    )


def reserve(runs: Sequence[fits.PricedServer], learnt: Learnt, engine: str, device: str | None) -> Reserve | None:
    """Memory that an engine was found to keep from its KV cache, for a calibration."""
    taken = learnt.get(RunSeries(engine, device or ""))
    return None if taken is None else Reserve(reserved_bytes=int(dict(taken.values)[RESERVE]), **_record(runs, taken))


def _record(runs: Sequence[fits.PricedServer], taken: Taken) -> dict[str, Any]:
    return {
        "num_runs": len(taken.runs),
        "num_configurations": len({fits.by_configuration(runs[index]) for index in taken.runs}),
        "median_error_before": _median_errors(taken.before),
        "median_error": _median_errors(taken.left_out),
    }


def _median_errors(residuals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    errors_of = {
        name: [math.exp(-residual[name]) - 1 for residual in residuals if name in residual] for name in fits.FITTED
    }
    return {name: float(f"{np.median(np.abs(errors)):.3g}") for name, errors in errors_of.items() if errors}


SHARES = tuple(round(0.2 + 0.05 * step, 2) for step in range(16))
"""Shares of accepted draft tokens to choose from."""


@dataclass(frozen=True)
class Drafting:
    """A measured run with speculative decoding, simulated at every share of `SHARES`."""

    priced: fits.PricedServer
    predicted: tuple[Mapping[str, float], ...]

    @property
    def model(self) -> str:
        return self.priced.setup.model.name

    @property
    def num_draft_tokens(self) -> int:
        speculative = self.priced.setup.engine.speculative
        assert speculative is not None
        return speculative.num_draft_tokens

    @property
    def error(self) -> Floats:
        """|log(predicted / measured)| of TPOT at every share."""
        measured = self.priced.measurement.measured["tpot"]
        return np.abs(np.log([metrics["tpot"] / measured for metrics in self.predicted]))


def drafting(
    measurements: Iterable[Measurement], calibrations: Mapping[str, Calibration]
) -> Iterator[tuple[Measurement, Drafting | str]]:
    """Return every run with its predictions, or with the reason why there are none.

    The runs decode speculatively, and their acceptance was not recorded. Calibrations are by engine and device
    (`vllm-h100_sxm`) or engine; what is fitted here corrects what they leave.
    """

    plain_estimator = PricedDeployments().estimator

    def fitted(setup: Setup) -> Calibration | None:
        engine, device = setup.engine.name, setup.device.name
        return calibrations.get(f"{engine}-{device}") or calibrations.get(engine)

    def calibrated_estimator(setup: Setup) -> Estimator:
        calibration, plain = fitted(setup), plain_estimator(setup)
        return plain if calibration is None else CalibratedEstimator(plain, setup.device, calibration.factors)

    runs = (run.accepting(0.0) for run in measurements if run.scenario and "tpot" in run.measured)
    for measurement, priced in fits.priced_servers(runs, calibrated_estimator):
        if isinstance(priced, str):
            yield measurement, priced
        else:
            calibration, host, client = fitted(priced.setup), priced.setup.engine.host, priced.setup.client
            if calibration is not None:
                host = calibration.host_of(str(priced.setup.engine.version)).over(host)
                client = calibration.clients.get(priced.client_name, client).over(client)
            predicted = tuple(_accepting(priced, share).predict({}, host, client) for share in SHARES)
            yield measurement, Drafting(priced, predicted)


def _accepting(priced: fits.PricedServer, share: float) -> fits.PricedServer:
    speculative = priced.setup.engine.speculative
    assert speculative is not None
    assert priced.speculation is not None
    changed = msgspec.structs.replace(speculative, acceptance_fraction=share)
    return replace(priced, speculation=priced.speculation._replace(tokens_per_step=changed.tokens_per_step))


def best_share(runs: Sequence[Drafting]) -> int:
    """The position in `SHARES` of the least mean error of TPOT, each configuration with the same weight."""
    by_configuration: dict[str, list[Floats]] = {}
    for run in runs:
        by_configuration.setdefault(fits.by_configuration(run.priced), []).append(run.error)
    return int(np.mean([np.mean(errors, axis=0) for errors in by_configuration.values()], axis=0).argmin())


def acceptances(runs: Sequence[Drafting]) -> tuple[LearntAcceptance, ...]:
    """For every model and number of draft tokens, the share that explains its runs best.

    The share also stands for what else the draft tokens cost, so each number of them has its own.
    """
    found = []
    for model, num_draft_tokens in sorted({(run.model, run.num_draft_tokens) for run in runs}):
        kin = [run for run in runs if (run.model, run.num_draft_tokens) == (model, num_draft_tokens)]
        share = SHARES[best_share(kin)]
        found.append(
            LearntAcceptance(model=model, num_draft_tokens=num_draft_tokens, fraction=share, num_runs=len(kin))
        )
    return tuple(found)


def with_acceptances(made: Mapping[str, Calibration], measurements: Iterable[Measurement]) -> dict[str, Calibration]:
    """The calibrations with the acceptance of every model of which runs with speculative decoding were measured."""
    learnt = acceptances([run for _, run in drafting(measurements, made) if isinstance(run, Drafting)])
    return {name: msgspec.structs.replace(calibration, acceptance=learnt) for name, calibration in made.items()}
