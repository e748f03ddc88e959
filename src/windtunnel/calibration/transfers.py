"""Fit the KV transfer between pools to measured runs of separate pools for prefill and decode.

Two numbers an engine and device: the latency of a transfer of nothing, and the share of the links' bandwidth that large
ones reach (`serving.deployment.Transfer`). All else keeps the calibration of the aggregated runs. A run's TTFT is
taken as linear in the latency and in the inverse of the share, from finite differences, and simulated again around the
first fit. What is minimised is Geman and McClure's loss of log(measured / predicted TTFT), with log-normal priors
around the defaults.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from scipy.optimize import minimize

from windtunnel import catalog
from windtunnel.calibration.fit import LEAST_RELATIVE, NOISE, NUM_ROUNDS, PRIORS, Scope, crowding_weights
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.serving.calibration import Calibration, LearntTransfer, Provenance, TransferRecord, calibration_for
from windtunnel.serving.deployment import LINK_EFFICIENCY, TRANSFER_LATENCY_S
from windtunnel.serving.prepared import PreparedDeployment, prepare
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.run import replicas_of
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve
from windtunnel.serving.setup.frontend import client_delay_s
from windtunnel.workload.generate.requests import RequestArrays, generate

Values = tuple[float, float]
"""Latency in seconds, and share of the links' bandwidth."""

DEFAULT: Values = (TRANSFER_LATENCY_S, LINK_EFFICIENCY)

PRIOR = (math.log(5.0), math.log(1.3))
"""Standard deviations of the two logarithms: the latency is known to a factor of five; measured shares of bandwidth lie
within 30% of each other."""

LATENCY_STEP_S, SHARE_STEP = 20e-3, 1 / 1.3
"""Steps of the finite differences in the latency, and in the share as a factor: the decode side takes a request in at
its next step, so that a latency shorter than a step shows no effect."""

STARTS = (1.0, 10.0, 100.0)
"""Starting points of the minimisation, in default latencies: far from the minimum the loss is flat."""

LEAST_GAIN = 0.01
"""Smallest relative fall of the left-out runs' error for which the values are kept."""


@dataclass(frozen=True)
class PricedPools:
    """A measured run of separate pools, ready to be simulated with any KV transfer."""

    measurement: Measurement
    deployment: PreparedDeployment
    """The pools, prepared with no latency and the whole bandwidth."""
    requests: RequestArrays

    def ttft_s(self, values: Values) -> float:
        """Simulate the run; return the TTFT statistic that was measured."""
        latency_s, efficiency = values
        run = self.deployment.with_transfers(latency_s, efficiency).serve(self.requests)
        _, replica, num_replicas = replicas_of(run)
        seen_s = client_delay_s(
            self.deployment.pools[0].setup.frontend, self.requests, run.requests, replica, num_replicas
        )
        ttft_s = (run.requests["first_token_s"] - run.requests["arrival_s"] + seen_s)[self.requests.num_warmup :]
        return float(np.median(ttft_s) if self.measurement.statistic == "p50" else np.mean(ttft_s))


def tells_of_transfers(measurement: Measurement) -> bool:
    """Whether a run of separate pools measured a TTFT and leaves its transfer open."""
    if measurement.scenario is None or measurement.lacks_acceptance or "ttft" not in measurement.measured:
        return False
    deployment = measurement.scenario.deployment
    given = (deployment.transfer.bytes_per_s, deployment.transfer.link_efficiency, deployment.transfer.latency_s)
    return any(pool.role == "prefill" for pool in deployment.pools) and given == (None, None, None)


def with_transfers(
    made: Mapping[str, Calibration], measurements: Sequence[Measurement], source: str
) -> dict[str, Calibration]:
    """Return the calibrations by name, each with the transfer fitted to runs of its engine and device, if any tell of
    it.

    Where nothing was fitted to aggregated runs of an engine on a device, all else is as in the shipped calibration, or
    as without one; `source` is then what the runs are.
    """
    runs = [run for run in measurements if run.weight > 0 and tells_of_transfers(run)]
    priced_servers = list(_priced_pools(runs, made))
    calibrations = {}
    for name, calibration in made.items():
        place = Scope(calibration.engine, calibration.device or "")
        members = [priced for priced in priced_servers if place.covers(Scope(*_kin(priced)))]
        calibrations[name] = msgspec.structs.replace(calibration, transfer=fit_transfers(members))
    for engine, device in dict.fromkeys(map(_kin, priced_servers)):
        if engine in made or f"{engine}-{device}" in made:
            continue
        members = [priced for priced in priced_servers if _kin(priced) == (engine, device)]
        learnt = fit_transfers(members)
        if learnt is not None:
            base = _base(engine, device, [priced.measurement for priced in members], source)
            calibrations[f"{engine}-{device}"] = msgspec.structs.replace(base, transfer=learnt)
    return calibrations


def _kin(priced: PricedPools) -> tuple[str, str]:
    decodes = next(part.setup for part in priced.deployment.pools if part.pool.role != "prefill")
    return decodes.engine.name, decodes.device.name


def _base(engine: str, device: str, runs: Sequence[Measurement], source: str) -> Calibration:
    """Return the shipped calibration for these runs, or an empty one."""
    versions = sorted({run.labels.get("version", "") for run in runs} - {""})
    for version in versions:
        shipped = calibration_for(engine, device, version).calibration
        if shipped is not None:
            return msgspec.structs.replace(shipped, device=device)
    provenance = Provenance(
        fitted_on=source, num_runs=0, num_configurations=0, versions=tuple(versions), devices=(device,)
    )
    return Calibration(engine=engine, device=device, provenance=provenance)


def _priced_pools(runs: Sequence[Measurement], made: Mapping[str, Calibration]) -> Iterator[PricedPools]:
    """Prepare the runs that can be simulated, with the calibration of aggregated ones."""
    estimator_of = PricedDeployments().estimator

    def calibration_of(alone: Scenario) -> Calibration | None:
        engine, device = alone.deployment.engine.name, catalog.device(alone.deployment.device).name
        return made.get(f"{engine}-{device}") or made.get(engine)

    for run in runs:
        assert run.scenario is not None
        transfer = msgspec.structs.replace(run.scenario.deployment.transfer, latency_s=0.0, link_efficiency=1.0)
        scenario = run.scenario.with_deployment(transfer=transfer)
        try:
            requests = generate(scenario.workload, scenario.seed)
            alone = [pool_scenario(scenario, pool) for pool in scenario.deployment.pools]
            setups = [resolve(each, calibration=calibration_of(each)) for each in alone]
            prepared = prepare(scenario, requests, setups, estimator_of=estimator_of)
        except InputError:
            continue
        yield PricedPools(run, prepared, requests)


LocalTtft = Callable[[Values], Floats]
"""Returns the TTFT of every run with some values."""


def _local(priced_servers: Sequence[PricedPools], around: Values) -> LocalTtft:
    """Return TTFT as linear around some values: base + by_latency x seconds + by_inverse x (1 / share), as changes."""
    latency_s, efficiency = around
    moved = (latency_s + LATENCY_STEP_S, efficiency * SHARE_STEP)
    base, later, slower = (
        np.array([priced.ttft_s(values) for priced in priced_servers])
        for values in (around, (moved[0], efficiency), (latency_s, moved[1]))
    )
    by_inverse = (slower - base) / (1 / moved[1] - 1 / efficiency)
    by_latency = (later - base) / LATENCY_STEP_S

    def ttft_s(values: Values) -> Floats:
        change = by_latency * (values[0] - latency_s) + by_inverse * (1 / values[1] - 1 / efficiency)
        return np.asarray(np.maximum(base + change, LEAST_RELATIVE * base))

    return ttft_s


def fit_transfers(priced_servers: Sequence[PricedPools]) -> LearntTransfer | None:
    """Fit the transfer to runs; None where predictions of configurations left out are no better than the defaults'."""
    names = np.array([priced.measurement.configuration for priced in priced_servers])
    configurations = sorted(set(names.tolist()))
    if len(configurations) < 2:
        return None
    measured = np.array([priced.measurement.measured["ttft"] for priced in priced_servers])
    weights = np.array([priced.measurement.weight for priced in priced_servers]) * crowding_weights(names.tolist())
    around = values = DEFAULT
    ttft_s = _local(priced_servers, around)
    before_s = ttft_s(around)
    for number in range(NUM_ROUNDS):
        values = _fitted(ttft_s, around, measured, weights)
        if number + 1 < NUM_ROUNDS:
            around, ttft_s = values, _local(priced_servers, values)
    after_s = np.empty_like(measured)
    for configuration in configurations:
        left_out = names == configuration
        after_s[left_out] = ttft_s(_fitted(ttft_s, around, measured, weights * ~left_out))[left_out]
    before, after = (float(np.median(np.abs(times_s / measured - 1))) for times_s in (before_s, after_s))
    if after >= before * (1 - LEAST_GAIN):
        return None
    return LearntTransfer(
        latency_s=float(f"{values[0]:.4g}"),
        link_efficiency=float(f"{values[1]:.4g}"),
        record=TransferRecord(
            num_runs=len(priced_servers),
            num_configurations=len(configurations),
            median_error=float(f"{after:.3g}"),
            median_error_before=float(f"{before:.3g}"),
        ),
    )


def _fitted(ttft_s: LocalTtft, around: Values, measured: Floats, weights: Floats) -> Values:
    """Return the values of least loss; logarithms are counted from the defaults."""

    def values_of(moved: Floats) -> Values:
        return DEFAULT[0] * math.exp(moved[0]), DEFAULT[1] * math.exp(moved[1])

    def loss(moved: Floats) -> float:
        residual = np.log(measured / ttft_s(values_of(moved))) / NOISE["ttft"]
        robust = residual**2 / (1 + (residual / PRIORS.outlier) ** 2)
        return float((weights * robust).sum() + ((moved / np.array(PRIOR)) ** 2).sum())

    middle = [math.log(mine / default) for mine, default in zip(around, DEFAULT, strict=True)]
    starts = [middle, *([math.log(times), 0.0] for times in STARTS)]
    bounds = [(-8.0, 8.0), (-3.0, -math.log(DEFAULT[1]))]
    minima = [minimize(loss, np.array(start), method="L-BFGS-B", bounds=bounds) for start in starts]
    return values_of(min(minima, key=lambda minimum: float(minimum.fun)).x)
