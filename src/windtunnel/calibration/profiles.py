"""Calibrations from a fit to measured runs: overheads, factors, spreads of the remaining error, and provenance.

Spreads are the errors of fits that did not see the runs: whole configurations are left out at a time.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np

from windtunnel.calibration import fit as fits
from windtunnel.calibration.fit import FITTED, NOISE, Fit, LocalFit, PricedServer, Scope, by_configuration
from windtunnel.calibration.measured_runs import METRICS
from windtunnel.calibration.settings_inference import Learnt, Trials, infer, inferred, reserve, with_learnt
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.metrics.uncertainty import Spread
from windtunnel.serving.analysis.intervals import error_scale, uncalibrated_spreads
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.deployment import HostOverheads
from windtunnel.units import version_key
from windtunnel.workload.client import OF_A_CLIENT, Client

NUM_FOLDS = 5
LEAST_CONFIGURATIONS = 5
"""Fewest configurations that a spread, and one of several devices' own calibration, is taken from; with fewer, the
engine's runs on all devices stand in."""


def folds(
    runs: Sequence[PricedServer],
    key: Callable[[PricedServer], str] = by_configuration,
    count: int | None = NUM_FOLDS,
    seed: int = 0,
) -> Ints:
    """Return the fold of every run; runs of equal `key` share one, and with `count` None every key has its own."""
    keys = sorted({key(priced) for priced in runs})
    order = np.random.default_rng(seed).permutation(len(keys))
    fold = {name: int(order[index]) % (count or len(keys)) for index, name in enumerate(keys)}
    return np.array([fold[key(priced)] for priced in runs])


def averaged_fit(runs: Sequence[PricedServer], around: LocalFit, kept: Bools) -> Fit:
    """Return the mean of the fits to the runs that are `kept` under all candidate priors, effect by effect.

    No prior is chosen: which one predicts runs left out best changes with the drawing of the folds.
    """
    solved = [fits.refit(runs, around, kept, priors) for priors in fits.CANDIDATES]
    return Fit({effect: float(np.mean([fit.effects[effect] for fit in solved])) for effect in solved[0].effects})


def held_out(
    runs: Sequence[PricedServer], around: LocalFit, fold: Ints, trials: Trials | None = None
) -> list[dict[str, float]]:
    """Predict every run by a fit, and with settings, that were learnt from runs of other folds alone.

    `around` are predictions that are linear around a fit to all; `trials`, of `runs`, simulate nothing twice.
    """
    predictions: list[dict[str, float]] = [{} for _ in runs]
    trials = trials or Trials(runs)
    for left_out in np.unique(fold):
        kept = fold != left_out
        fit = averaged_fit(runs, around, kept)
        learnt = infer(trials, around, fit, kept)
        for index in np.flatnonzero(~kept).tolist():
            predictions[index] = fits.predict(with_learnt([runs[index]], learnt)[0], fit)
    return predictions


def ratios(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Metric -> measured over predicted, where it was measured; a closed loop's throughput is inverse to E2E."""
    values: dict[str, list[float]] = {}
    for priced, predicted in zip(runs, predictions, strict=True):
        for metric, value in predicted.items():
            if metric in priced.measurement.measured:
                values.setdefault(metric, []).append(priced.measurement.measured[metric] / value)
    if "e2e" in values:
        values["throughput"] = [1 / value for value in values["e2e"]]
    return values


SHARED_ERROR = 0.5
"""In a spread each of n runs of a configuration counts n to the power of minus this, as they share an error.

Of configurations held out again, such intervals covered 81% of the measurements; with equal weights of runs 79%, with
equal weights of configurations 82 to 83%."""


def profile(
    runs: Sequence[PricedServer],
    fit: Fit,
    learnt: Learnt,
    place: Scope,
    left_out: Sequence[Mapping[str, float]],
    source: str,
) -> Calibration:
    """Build the calibration of an engine on a device, or on any.

    Args:
        place: the engine and device; an empty device stands for any, and for the effects that devices share.
        left_out: predictions of the runs by fits that did not see them.
    """
    engine, device = place.engine, place.device or None
    # What an engine's releases have by default, with the device's gaps between kernels.
    hosts = {run.scope.release: run.setup.engine.host for run in runs if run.scope.engine == engine}
    gap_s = next((run.setup.engine.host.kernel_gap_s for run in runs if place.covers(run.scope)), None)
    of_release = {name: msgspec.structs.replace(host, kernel_gap_s=gap_s) for name, host in hosts.items()}
    numbered = sorted(filter(None, of_release), key=version_key)
    latest = of_release[numbered[-1] if numbered else ""]
    recorded = kin(runs, engine, device, assumed=False) or list(range(len(runs)))
    covered = [
        (priced, predicted) for priced, predicted in zip(runs, left_out, strict=True) if place.covers(priced.scope)
    ]
    return Calibration(
        engine=engine,
        device=device,
        host=_host_at(fit, latest, place),
        releases={release: _host_at(fit, of_release[release], place._replace(release=release)) for release in numbered},
        clients=_clients([priced for priced, _ in covered], fit, place),
        factors=_factors({name for priced, _ in covered for name in priced.parts}, fit, place),
        inferred=inferred(runs, learnt, engine, device),
        reserve=reserve(runs, learnt, engine, device),
        spread=_spreads_of(runs, left_out, recorded, engine),
        spread_assumed=_spreads_of(runs, left_out, kin(runs, engine, device, assumed=True), engine),
        provenance=_provenance(covered, source, fit),
    )


def _host_at(fit: Fit, usual: HostOverheads, place: Scope) -> HostOverheads:
    """Return the overheads at a place; gaps between kernels are those of a release on a device, else the default's."""
    host = HostOverheads(**_rounded(fit.host(usual, place), fits.HOST))
    return host if place.device and place.release else msgspec.structs.replace(host, kernel_gap_s=None)


def _clients(runs: Sequence[PricedServer], fit: Fit, place: Scope) -> dict[str, Client]:
    usual = {priced.client_name: priced.setup.client for priced in runs if priced.client_name}
    times = {name: fit.client(usual[name], place._replace(client=name)) for name in sorted(usual)}
    return {name: msgspec.structs.replace(Client(), **_rounded(each, OF_A_CLIENT)) for name, each in times.items()}


def _factors(names: Collection[str], fit: Fit, place: Scope) -> dict[str, float]:
    """Return the factors of operator classes and of formats, rounded."""
    bases = {f"{name.partition('.')[0]}.{name.rpartition('.')[2]}" if "." in name else name for name in names}
    formats = {
        name: sum(fit.effects.get((name, *part), 0.0) for part in ((place.engine,), (place.engine, place.device)))
        for name in names
        if "." in name
    }
    factors = {name: math.exp(fit.logarithm(name, place)) for name in bases}
    factors |= {name: math.exp(value) for name, value in formats.items()}
    return {name: float(f"{value:.4g}") for name, value in sorted(factors.items())}


def _provenance(pairs: Sequence[tuple[PricedServer, Mapping[str, float]]], source: str, fit: Fit) -> Provenance:
    """Record the runs of a calibration, given with their predictions by fits that did not see them."""
    runs, left_out = [priced for priced, _ in pairs], [predicted for _, predicted in pairs]
    setups = [priced.setup for priced in runs]
    num_configurations = len({by_configuration(priced) for priced in runs})
    own = [fits.predict(priced, fit) for priced in runs] if num_configurations == 1 else []
    formats = {str(form) for setup in setups for form in (setup.precision.weights, setup.precision.experts_format)}
    return Provenance(
        fitted_on=source,
        num_runs=len(runs),
        num_configurations=num_configurations,
        models=tuple(sorted({setup.model.name for setup in setups})),
        models_on={
            device: tuple(sorted({setup.model.name for setup in setups if setup.device.name == device}))
            for device in sorted({setup.device.name for setup in setups})
        },
        # An image of no release has no version, and is priced with the defaults.
        versions=tuple(sorted({priced.measurement.labels.get("version", "") for priced in runs} - {""})),
        formats=tuple(sorted(formats)),
        devices=tuple(sorted({setup.device.name for setup in setups})),
        median_error=_median_errors(runs, left_out),
        median_error_before=_median_errors(runs, [fits.predict(priced, Fit({})) for priced in runs]),
        median_error_fitted=_median_errors(runs, own) if own else {},
    )


def _median_errors(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metric -> median relative error."""
    return {
        metric: float(f"{np.median([abs(1 / value - 1) for value in values]):.3g}")
        for metric, values in ratios(runs, predictions).items()
    }


def kin(runs: Sequence[PricedServer], engine: str, device: str | None, assumed: bool) -> list[int]:
    """Return the runs that a spread is taken from: those of the engine on the device (None: on any), of the engine, or
    all; the first of these with five configurations.

    `assumed` takes runs whose settings were assumed, whose errors are larger; else all others.
    """
    every = [i for i, run in enumerate(runs) if run.setup.settings_assumed == assumed]
    of_engine = [i for i in every if runs[i].scope.engine == engine]
    of_device = [i for i in of_engine if device in (None, runs[i].scope.device)]
    for chosen in (of_device, of_engine):
        if len({by_configuration(runs[i]) for i in chosen}) >= LEAST_CONFIGURATIONS:
            return chosen
    return every


def _spreads_of(
    runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]], chosen: Sequence[int], engine: str
) -> dict[str, Spread]:
    """Spreads of the chosen runs; at least as wide as without calibration where there are too few configurations."""
    chosen_spreads = spreads([runs[i] for i in chosen], [predictions[i] for i in chosen])
    if len({by_configuration(runs[i]) for i in chosen}) >= LEAST_CONFIGURATIONS:
        return chosen_spreads
    usual = uncalibrated_spreads().get(engine, {}).get("recorded", {})
    return {
        metric: _widened(spread, usual[metric]) if metric in usual else spread
        for metric, spread in chosen_spreads.items()
    }


def _widened(spread: Spread, usual: Spread) -> Spread:
    """Widen `spread` about its median until, relative to the median, it is no narrower than `usual`."""
    p10 = min(spread.p10, float(f"{spread.p50 * usual.p10 / usual.p50:.4g}"))
    p90 = max(spread.p90, float(f"{spread.p50 * usual.p90 / usual.p50:.4g}"))
    return msgspec.structs.replace(spread, p10=p10, p90=p90)


def _rounded(times: HostOverheads | Client, names: Collection[str]) -> dict[str, float]:
    known = {name: getattr(times, name) for name in names}
    return {name: float(f"{value:.4g}") for name, value in known.items() if value is not None}


def spreads(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Metric -> quantiles of measured over predicted that hold 80% of a further value, not of those seen; of dense
    models (`error_scale`)."""
    configurations = [by_configuration(priced) for priced in runs]
    shares = fits.crowding_weights(configurations, SHARED_ERROR)
    by_metric = {}
    for metric in METRICS:
        known = [
            (ratio ** (1 / error_scale(priced.setup)), share, configuration)
            for priced, predicted, share, configuration in zip(runs, predictions, shares, configurations, strict=True)
            for ratio in ratios([priced], [predicted]).get(metric, ())
        ]
        if known:
            values, weights, groups = zip(*known, strict=True)
            by_metric[metric] = spread_of(np.array(values), np.array(weights), groups)
    return by_metric


def spread_of(values: Floats, weights: Floats, groups: Sequence[str]) -> Spread:
    """Return weighted quantiles that hold 80% of a further group's values: 0.3 / n further out, of n groups.

    Values of one group share an error. Groups of weights w count as n = (sum w)^2 / sum w^2 equal ones. With 0.3, 82 to
    84% of TPOT, TTFT and E2E of 716 runs lie inside, configurations held out; with 0.2, 78 to 84%, with 0.4, 85%.
    """
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    of_groups = np.bincount(np.unique(groups, return_inverse=True)[1], weights)
    outer = min(0.9 + 0.3 * (of_groups**2).sum() / of_groups.sum() ** 2, 1.0)
    p10, p50, p90 = np.interp([1 - outer, 0.5, outer], below / weights.sum(), values[order])
    return Spread(p10=float(f"{p10:.4g}"), p50=float(f"{p50:.4g}"), p90=float(f"{p90:.4g}"), num_runs=values.size)


def profiles(runs: Sequence[PricedServer], source: str) -> dict[str, Calibration]:
    """Name -> calibration: one for every engine on any device, and for every device that is better with its own.

    Where there are several devices, the spread of an engine's calibration is that of devices left out whole. A device
    gets its own where it has five configurations, and its runs, configurations held out, are predicted better than by a
    fit to the other devices alone. (Of four with one model on B300, the effects were those of the model.)
    """
    local_fit, trials, every = fits.fit_runs(runs), Trials(runs), np.ones(len(runs), np.bool_)
    left_out = held_out(runs, local_fit, folds(runs), trials)
    several = len({priced.scope.device for priced in runs}) > 1
    devices_apart = folds(runs, lambda priced: priced.scope.device, None)
    apart = held_out(runs, local_fit, devices_apart, trials) if several else left_out
    fit = averaged_fit(runs, local_fit, every)
    if learnt := infer(trials, local_fit, fit, every):
        served = with_learnt(runs, learnt)
        changed = [a is not b for a, b in zip(served, runs, strict=True)]
        fit = averaged_fit(served, fits.around_again(served, local_fit, changed), every)
    calibrations = {}
    for engine, device in sorted({priced.scope[:2] for priced in runs}):
        indices = [index for index, priced in enumerate(runs) if priced.scope[:2] == (engine, device)]
        is_known = len({by_configuration(runs[index]) for index in indices}) >= LEAST_CONFIGURATIONS
        if not several or (is_known and _misfit(runs, left_out, indices) <= _misfit(runs, apart, indices)):
            calibrations[f"{engine}-{device}"] = profile(runs, fit, learnt, Scope(engine, device), left_out, source)
    for engine in sorted({priced.scope.engine for priced in runs}):
        calibrations[engine] = profile(runs, fit, learnt, Scope(engine, ""), apart, source)
    return calibrations


def _misfit(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]], chosen: Sequence[int]) -> float:
    """Sum of the fitted metrics' median errors, in units of their noise."""
    errors = _median_errors([runs[index] for index in chosen], [predictions[index] for index in chosen])
    return sum(errors[metric] / NOISE[metric] for metric in FITTED if metric in errors)
