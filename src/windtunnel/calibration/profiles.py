"""What a calibration keeps of a fit to measured runs: overheads, factors, what remained, and the record of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.cross_validation import LEAST_CONFIGURATIONS, averaged_fit, folds, held_out
from windtunnel.calibration.fit import (
    FITTED,
    HOST,
    METRICS,
    NOISE,
    Fit,
    PricedServer,
    Scope,
    around_again,
    by_configuration,
    fit_runs,
    predict,
)
from windtunnel.calibration.settings_inference import Learnt, Trials, infer, inferred, reserve, with_learnt
from windtunnel.metrics.uncertainty import Spread
from windtunnel.serving.analysis.intervals import uncalibrated_spreads
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.deployment import HostOverheads
from windtunnel.versions import version_key

Floats = NDArray[np.float64]


def ratios(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Metric -> measured over predicted, for what was measured; throughput of a closed loop is inverse to E2E."""
    found: dict[str, list[float]] = {}
    for priced, predicted in zip(runs, predictions, strict=True):
        for metric, value in predicted.items():
            if metric in priced.measurement.measured:
                found.setdefault(metric, []).append(priced.measurement.measured[metric] / value)
    if "e2e" in found:
        found["throughput"] = [1 / value for value in found["e2e"]]
    return found


ALIKE = 0.5
"""In a spread each of n runs of a configuration counts n to the power of minus this, as they err alike.

Of configurations held out again, such intervals held 81% of the measurements; with every run alike 79%, with every
configuration alike 82 to 83%."""


def profile(
    runs: Sequence[PricedServer],
    fit: Fit,
    learnt: Learnt,
    engine: str,
    device: str | None,
    held: Sequence[Mapping[str, float]],
    source: str,
) -> Calibration:
    """The calibration of an engine on a device, or on any.

    Args:
        runs: all that were fitted.
        fit: to all of them.
        learnt: what they say of settings.
        engine, device: whose; None: the effects that devices share.
        held: predictions of the runs by fits that did not see them.
        source: what the runs are, for the record.
    """
    own = [
        index for index, priced in enumerate(runs) if priced.scope[0] == engine and device in (None, priced.scope[1])
    ]
    place = Scope(engine, device or "")
    of_release = {priced.scope.release: priced.setup.engine.host for priced in runs if priced.scope.engine == engine}
    numbered = sorted(filter(None, of_release), key=version_key)
    latest = of_release[numbered[-1] if numbered else ""]
    names = {name for index in own for name in runs[index].parts}
    bases = {f"{name.partition('.')[0]}.{name.rpartition('.')[2]}" if "." in name else name for name in names}
    formats = {
        name: sum(fit.effects.get(effect, 0.0) for effect in ((name, engine), (name, engine, place.device)))
        for name in names
        if "." in name
    }
    factors = {name: math.exp(fit.logarithm(name, place)) for name in bases}
    factors |= {name: math.exp(value) for name, value in formats.items()}
    setups = [runs[index].setup for index in own]
    formats_seen = {str(form) for one in setups for form in (one.precision.weights, one.precision.experts_format)}
    return Calibration(
        engine=engine,
        device=device,
        host=_rounded(fit.host(latest, place)),
        releases={
            release: _rounded(fit.host(of_release[release], place._replace(release=release))) for release in numbered
        },
        factors={name: float(f"{value:.4g}") for name, value in sorted(factors.items())},
        inferred=inferred(runs, learnt, engine, device),
        reserve=reserve(runs, learnt, engine, device),
        spread=_spreads_of(runs, held, kin(runs, engine, device, assumed=False) or list(range(len(runs))), engine),
        spread_assumed=_spreads_of(runs, held, kin(runs, engine, device, assumed=True), engine),
        provenance=Provenance(
            fitted_on=source,
            num_runs=len(own),
            num_configurations=len({by_configuration(runs[index]) for index in own}),
            models=tuple(sorted({one.model.name for one in setups})),
            versions=tuple(sorted({version for version in (_version(runs[index]) for index in own) if version})),
            formats=tuple(sorted(formats_seen)),
            devices=tuple(sorted({one.device.name for one in setups})),
            median_error={
                metric: _median_error(values)
                for metric, values in ratios([runs[i] for i in own], [held[i] for i in own]).items()
            },
            median_error_before={
                metric: _median_error(values)
                for metric, values in ratios([runs[i] for i in own], [predict(runs[i], Fit({})) for i in own]).items()
            },
        ),
    )


def kin(
    runs: Sequence[PricedServer], engine: str, device: str | None, assumed: bool, among: Sequence[int] | None = None
) -> list[int]:
    """The runs that a spread is taken from: of the engine on the device, of the engine, or all: the first of these with
    five configurations.

    Args:
        runs: all of them.
        engine, device: whose spread it is; None: on any device.
        assumed: whether of runs whose settings were assumed, which are off by more, or of all others.
        among: indices of runs that may be taken; None: all.
    """
    some = range(len(runs)) if among is None else among
    every = [i for i in some if runs[i].setup.settings_assumed == assumed]
    of_engine = [i for i in every if runs[i].scope[0] == engine]
    own = [i for i in of_engine if device in (None, runs[i].scope[1])]
    for chosen in (own, of_engine):
        if len({by_configuration(runs[i]) for i in chosen}) >= LEAST_CONFIGURATIONS:
            return chosen
    return every


def _spreads_of(
    runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]], chosen: Sequence[int], engine: str
) -> dict[str, Spread]:
    """Of the chosen runs; where these are of too few configurations, as wide at least as without calibration."""
    found = spreads([runs[i] for i in chosen], [predictions[i] for i in chosen])
    if len({by_configuration(runs[i]) for i in chosen}) >= LEAST_CONFIGURATIONS:
        return found
    usual = uncalibrated_spreads().get(engine, {}).get("recorded", {})
    return {metric: _widened(spread, usual[metric]) if metric in usual else spread for metric, spread in found.items()}


def _widened(spread: Spread, usual: Spread) -> Spread:
    """`spread` about its own median, in proportion to it no narrower than `usual`."""
    p10 = min(spread.p10, float(f"{spread.p50 * usual.p10 / usual.p50:.4g}"))
    p90 = max(spread.p90, float(f"{spread.p50 * usual.p90 / usual.p50:.4g}"))
    return msgspec.structs.replace(spread, p10=p10, p90=p90)


def _version(priced: PricedServer) -> str:
    """What the record says was run; empty where an image of no release stands there and defaults were priced."""
    return priced.measurement.labels.get("version", "")


def _rounded(host: HostOverheads) -> HostOverheads:
    return HostOverheads(**{name: float(f"{getattr(host, name):.4g}") for name in HOST})


def spreads(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Metric -> quantiles of measured over predicted that hold 80% of a further value, not of those seen."""
    sizes = Counter(by_configuration(priced) for priced in runs)
    found = {}
    for metric in (*METRICS, "throughput"):
        values, weights = [], []
        for priced, predicted in zip(runs, predictions, strict=True):
            of_one = ratios([priced], [predicted]).get(metric)
            if of_one:
                values += of_one
                weights.append(sizes[by_configuration(priced)] ** -ALIKE)
        if values:
            found[metric] = spread_of(np.array(values), np.array(weights))
    return found


def spread_of(values: Floats, weights: Floats) -> Spread:
    """Weighted quantiles, each one value further out than those of the values themselves."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    outer = min(0.9 * (1 + 1 / values.size), 1.0)
    p10, p50, p90 = np.interp([1 - outer, 0.5, outer], below / weights.sum(), values[order])
    return Spread(p10=float(f"{p10:.4g}"), p50=float(f"{p50:.4g}"), p90=float(f"{p90:.4g}"), num_runs=values.size)


def _median_error(values: Sequence[float]) -> float:
    return float(f"{np.median([abs(1 / value - 1) for value in values]):.3g}")


def profiles(runs: Sequence[PricedServer], source: str) -> dict[str, Calibration]:
    """Name -> calibration: one for every engine on any device, and for every device that is better with its own.

    The spread of the former is of devices left out whole, where there are several. A device has one of its own
    where its runs, configurations held out, are predicted better than by a fit to the other devices alone.
    """
    whole, trials, every = fit_runs(runs), Trials(runs), np.ones(len(runs), np.bool_)
    held = held_out(runs, whole, folds(runs), trials)
    several = len({priced.scope[1] for priced in runs}) > 1
    apart = held_out(runs, whole, folds(runs, lambda priced: priced.scope[1], None), trials) if several else held
    fit = averaged_fit(runs, whole, every)
    if learnt := infer(trials, whole, fit, every):
        served = with_learnt(runs, learnt)
        fit = averaged_fit(
            served, around_again(served, whole, [a is not b for a, b in zip(served, runs, strict=True)]), every
        )
    found = {}
    for engine, device in sorted({priced.scope[:2] for priced in runs}):
        own = [index for index, priced in enumerate(runs) if priced.scope[:2] == (engine, device)]
        if not several or _misfit(runs, held, own) <= _misfit(runs, apart, own):
            found[f"{engine}-{device}"] = profile(runs, fit, learnt, engine, device, held, source)
    for engine in sorted({priced.scope[0] for priced in runs}):
        found[engine] = profile(runs, fit, learnt, engine, None, apart, source)
    return found


def _misfit(runs: Sequence[PricedServer], predictions: Sequence[Mapping[str, float]], chosen: Sequence[int]) -> float:
    """Median errors of the fitted metrics in units of their noise."""
    found = ratios([runs[index] for index in chosen], [predictions[index] for index in chosen])
    return sum(_median_error(found[metric]) / NOISE[metric] for metric in FITTED if metric in found)
