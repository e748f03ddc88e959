"""Fit what no operator table holds to measured runs: times of hosts and clients, and factors on classes of operators.

A run is priced once, class by class (`PricedServer`); a simulation with other factors and overheads then costs
milliseconds. The fit is a ridge regression of log(measured / predicted) on the logarithms of all parameters
(Gauss-Newton on predictions that are linear in the parameters, from finite differences), repeated around its own
result. Every parameter is a sum of effects: of all runs, of an engine, of an engine on a device, of its release and of
that on a device (overheads), and of a format (factors), each drawn towards zero, so that what few runs speak for stays
near what is known of its kin, and an engine, a device or a release without runs falls back to theirs. Runs that no such
correction explains lose weight (Geman and McClure, 1985).

What API server and client add to TTFT shows only as their sum. Runs of one client cannot tell whose a difference from
the usual sum is, so most of it goes to the client (`Priors.clients`): the server's part, which predictions for other
clients take, moves where several clients agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from windtunnel.calibration.measured_runs import Measurement, reason_of
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError
from windtunnel.pricing.calibrated import factor, shares
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.calibration import NONE, release_of
from windtunnel.serving.deployment import EngineSettings, HostOverheads
from windtunnel.serving.engines.defaults import for_architecture, whole_prompt_tokens, with_defaults
from windtunnel.serving.prepared import check_requests, with_model_len
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.run import prepare_loop
from windtunnel.serving.scenario import Setup, resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.frontend import client_delay_s, turnaround_s, usual_streams
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import DeployedModel, StepPrices, combined, price_steps, priced_parts
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.client import IN_TTFT, Client, name_of
from windtunnel.workload.generate.requests import RequestArrays, generate

HOST = tuple(name for name in HostOverheads.__struct_fields__ if name != "chat_s")  # no run that is fitted has chats
"""Overheads that are fitted, as multiples of the engine's defaults."""

CLIENT = tuple(f"client.{name}" for name in IN_TTFT)
"""Parameters of a client by name: multiples of its times in the catalog."""

HIDDEN = ("step_s", "request_s")
"""Overheads that asynchronous scheduling hides behind the device."""

TRIED: Mapping[str, tuple[float, ...]] = {
    "max_num_seqs": tuple(2.0**power for power in range(3, 11)),
    "max_num_batched_tokens": tuple(2.0**power for power in range(10, 16)),
    "gpu_memory_utilization": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95),
    "receive_interval_steps": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
}
"""Engine settings that may be inferred where nobody recorded them (`calibration.settings_inference`), and what is
tried."""

PRICED_UP_TO = ("max_num_seqs", "max_num_batched_tokens")
"""Inferable settings whose largest value bounds the steps that are priced."""

FITTED = ("tpot", "ttft")
NOISE: Mapping[str, float] = {"tpot": 0.04, "ttft": 0.10}
"""Relative difference of two runs with equal settings, rounded up: the scale in which residuals are counted."""

TRUST = 0.5
"""Largest change of an effect in one step."""


@dataclass(frozen=True)
class Priors:
    """Standard deviations of the ridge's prior, of logarithms. By default overheads are known to a factor of two,
    operators to 15%, and those that arithmetic bounds, most of them in steps with prompts, to 31%.
    """

    host: tuple[float, float, float] = (0.4, 0.5, 0.4)
    """Overheads: effects of all runs, of an engine, and of an engine on a device."""
    releases: tuple[float, float] = (0.3, 0.4)
    """Overheads: effects of an engine's release, and of a release on a device, as a release seldom ran on two hosts."""
    models: float = 8.0
    """Of m models that show an effect of a release, its prior variance is the share m / (m + this)."""
    operators: tuple[float, float, float] = (0.1, 0.1, 0.06)
    """The same of factors."""
    prompts: float = 2.0
    """Multiple of these, and of `formats`, for what prompts spend most of their time in: operators that arithmetic
    bounds, and attention of prefill."""
    owners: tuple[float, float] = (0.4, 0.5)
    """Launches on the servers of an owner: effects of all of them, and of those with an engine. They are as wide as the
    effects of hosts and engines, from which runs of one owner cannot tell them."""
    servers: tuple[float, float] = (0.4, 0.3)
    """An API server's part of TTFT: effects of an engine, and of it on a device."""
    clients: tuple[float, float, float, float] = (0.8, 0.3, 0.6, 0.6)
    """A client's part: effects of all clients, of one with all engines, with an engine, and with it on a device."""
    formats: float = 0.1
    """Effect of a format on GEMMs and experts, of an engine and of an engine on a device."""
    outlier: float = 3.0
    """Residuals of so many scales have a quarter of their weight, and larger ones hardly any."""


PRIORS = Priors()


def _narrowed(operators: float, outlier: float) -> Priors:
    of_all, of_engine, of_device = PRIORS.operators
    of_operators = (operators * of_all, operators * of_engine, operators * of_device)
    return Priors(operators=of_operators, formats=operators * PRIORS.formats, outlier=outlier)


CANDIDATES = tuple(_narrowed(operators, outlier) for operators in (0.6, 1.0) for outlier in (1.5, 2.0, 3.0))
"""Priors whose fits are averaged."""

CROWDING = 0.4
"""Runs of one configuration share an error: each of n counts n to the power of minus this."""

HOST_RATIO, FACTOR_RATIO = 2.0, 1.05
"""Factors by which a parameter is moved for a finite difference."""

NUM_ROUNDS = 2
"""Rounds of simulating around the last fit and fitting again."""
NUM_STEPS = 8
"""Most Gauss-Newton steps."""
CONVERGED = 0.01
LEAST_RELATIVE = 0.05
"""A linear prediction is taken to fall no lower than this share of where it started."""


class Scope(NamedTuple):
    """The engine, device, release and client whose parameters a run informs."""

    engine: str
    device: str
    release: str = ""
    """Release of the engine, such as 0.10; empty for an image of no release, or for what its releases share."""
    client: str = ""
    """Name of the client; empty where its times are given."""
    owner: str = ""
    """Whose servers the run was of: the client's name where its published runs are all of its own; else empty."""

    def covers(self, scope: Scope) -> bool:
        """Whether a run of that scope has this engine, on this device if one is named."""
        return self.engine == scope.engine and self.device in ("", scope.device)


@dataclass(frozen=True)
class PricedServer:
    """A measured run, priced class by class and ready to be simulated with any calibration."""

    measurement: Measurement
    setup: Setup
    """Not calibrated."""
    settings: state.KernelSettings
    requests: RequestArrays
    parts: Mapping[str, StepPrices]
    """Name of a factor -> prices of the operators that it applies to, as shares of them. One part where decoding is
    speculative: its attention is the slower of two bounds, which does not split."""
    speculation: state.Speculation | None = None

    @property
    def scope(self) -> Scope:
        version = self.measurement.labels.get("version", "")
        owner = self.client_name if self.setup.client.launch_ratio else ""
        return Scope(self.setup.engine.name, self.setup.device.name, release_of(version), self.client_name, owner)

    @property
    def client_name(self) -> str:
        assert self.measurement.scenario is not None
        return name_of(self.measurement.scenario.workload.client)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that its times inform: `host.step_s`, `gemm.fp8.memory`, ...

        Where scheduling overlaps, the host's work per step is a floor that steps seldom reach, and a fit would raise it
        to the slowest steps. It is fitted on runs whose steps it adds to.
        """
        hidden = HIDDEN if self.setup.engine.async_scheduling else ()
        overheads = (f"host.{name}" for name in HOST if name not in hidden)
        return (*overheads, *(CLIENT if self.client_name else ()), *self.parts)

    @property
    def keeps_by_default(self) -> bool:
        """Whether its settings are known, except the memory that the engine itself keeps from the KV cache."""
        assert self.measurement.scenario is not None
        given = self.measurement.scenario.deployment.engine
        return not self.setup.settings_assumed and given.reserved_bytes is None and given.num_gpu_blocks is None

    def served_with(self, values: Mapping[str, float]) -> PricedServer:
        """Return the run with other engine defaults, same prices; InputError where memory then holds no request."""
        if not values:
            return self
        assert self.measurement.scenario is not None
        usual, deployment = self.setup.engine, self.measurement.scenario.deployment
        typed = {n: int(value) if isinstance(getattr(usual, n), int) else value for n, value in values.items()}
        other = msgspec.structs.replace(EngineSettings(host=usual.host), **typed)
        engine = with_defaults(deployment.engine, self.setup.device, other, deployment.parallelism)
        model = self.setup.model
        engine = for_architecture(deployment.engine, engine, model.architecture, model.is_recurrent)
        setup = replace(self.setup, engine=whole_prompt_tokens(deployment.engine, engine, self.setup.max_model_len))
        memory = _memory(setup, self.requests)
        seed = self.measurement.scenario.seed
        settings = kernel_settings(setup, memory, deployment.replicas, self.requests, deployment.router, seed)
        return replace(self, settings=settings)

    def predict(self, factors: Mapping[str, float], host: HostOverheads, client: Client) -> dict[str, float]:
        """Simulate with these factors and times; TPOT is NaN where every output is one token."""
        prices = combined(self.parts, {name: factor(factors, name) for name in self.parts})
        engine = msgspec.structs.replace(prices.engine, host=host)
        cost = replace(prices, engine=engine).lowered().cost
        settings, requests = self.settings, self.requests
        busy = usual_streams(settings.max_num_seqs, self.setup, settings.num_replicas, requests.concurrency)
        frontend = client.behind(host)
        timed = settings._replace(frontend_s=turnaround_s(frontend, requests, busy))
        records = prepare_loop([PoolPlan(timed, cost, speculation=self.speculation)], requests).run().requests
        replica = records["rank"] // settings.ranks_per_replica
        seen_s = client_delay_s(frontend, requests, records, replica, settings.num_replicas)
        measured = np.arange(records.size) >= self.requests.num_warmup
        ttft_s = (records["first_token_s"] - records["arrival_s"] + seen_s)[measured]
        decoding_s = (records["finish_s"] - records["first_token_s"])[measured]
        gaps = records["output_tokens"][measured] - 1
        middle = np.median if self.measurement.statistic == "p50" else np.mean
        tpot_s = middle(decoding_s[gaps > 0] / gaps[gaps > 0]) if (gaps > 0).any() else math.nan
        return {"tpot": float(tpot_s), "ttft": float(middle(ttft_s)), "e2e": float(middle(ttft_s + decoding_s))}


def priced_servers(
    measurements: Iterable[Measurement], estimator_of: Callable[[Setup], Estimator] | None = None
) -> Iterator[tuple[Measurement, PricedServer | str]]:
    """Yield every measurement with its priced server, or with the reason why it cannot be simulated.

    Args:
        estimator_of: prices a setup's operators; None reads the tables of each device and engine version once.
    """
    estimator_of = estimator_of or PricedDeployments().estimator
    for measurement in measurements:
        try:
            yield measurement, _priced(measurement, estimator_of)
        except InputError as error:
            yield measurement, reason_of(error)


def _priced(measurement: Measurement, estimator_of: Callable[[Setup], Estimator]) -> PricedServer:
    if measurement.scenario is None:
        raise InputError(measurement.refused or "it is a training run, and a calibration is of serving")
    if measurement.lacks_acceptance:
        raise InputError("it decodes speculatively, and how many draft tokens were accepted was not recorded")
    if measurement.scenario.deployment.pools:
        raise InputError("its pools are separate: such a run informs only an open transfer, by its TTFT")
    scenario = measurement.scenario.with_deployment(calibration=NONE)
    deployment = scenario.deployment
    requests = generate(scenario.workload, scenario.seed)
    if "tpot" in measurement.measured and requests.output_tokens.max() == 1:
        raise InputError("a TPOT was measured, and every output is a single token")
    setup = with_model_len(resolve(scenario), requests)
    shard = shard_of(setup)
    speculation, drafter = speculation_of(setup), drafter_of(setup, shard)
    memory = _memory(setup, requests)
    # Limits that nobody recorded are raised to the largest values tried, so that their steps are priced as well.
    unknown = [name for name in PRICED_UP_TO if name in measurement.unknown]
    limits = {name: max(int(TRIED[name][-1]), getattr(setup.engine, name)) for name in unknown}
    widest = msgspec.structs.replace(setup.engine, **limits)
    deployed = DeployedModel(setup.device, shard, widest, setup.max_model_len, drafter)
    if speculation is None:
        parts = priced_parts(estimator_of(setup), deployed, lambda op: shares(op, setup.device))
    else:
        parts = {"all": price_steps(estimator_of(setup), deployed)}
    settings = kernel_settings(setup, memory, deployment.replicas, requests, deployment.router, scenario.seed)
    return PricedServer(measurement, setup, settings, requests, parts, speculation)


def _memory(setup: Setup, requests: RequestArrays) -> MemoryPlan:
    shard = shard_of(setup)
    engine = with_drafter(setup, drafter_of(setup, shard)).engine
    memory = plan_memory(shard, setup.device, engine, setup.max_model_len)
    check_requests(requests, setup, memory)
    return memory


Effect = tuple[str, ...]
"""Owner of an effect: (parameter or its class, "all" | engine | engine and device | engine and release | all three),
with the client before them for its own times; for a format's effect, (parameter, engine | engine and device); for an
owner's on launches, (parameter, "of", owner | owner and engine)."""

MOST_EFFECTS = 7


def effects(parameter: str, scope: Scope, priors: Priors = PRIORS) -> dict[Effect, float]:
    """Return the effects whose sum is the logarithm of a parameter of a run, with the prior spread of each."""
    kind, _, rest = parameter.partition(".")
    engine, device, release, client, owner = scope
    if kind == "client":
        places = [("all",), (client,), (client, engine), (client, engine, device)]
        return {(parameter, *place): spread for place, spread in zip(places, priors.clients, strict=True)}
    if kind == "host" and rest in IN_TTFT:
        of_engine, of_device = priors.servers
        return {(parameter, engine): of_engine, (parameter, engine, device): of_device}
    base = parameter if kind == "host" else f"{kind}.{rest.rpartition('.')[2]}" if rest else kind
    wider = priors.prompts if kind == "prefill_attention" or rest.endswith("compute") else 1.0
    overall, of_engine, of_device = priors.host if kind == "host" else (wider * each for each in priors.operators)
    spreads = {(base, "all"): overall, (base, engine): of_engine, (base, engine, device): of_device}
    if kind == "host" and release:
        spreads[base, engine, release], spreads[base, engine, device, release] = priors.releases
    if base == "host.launch_s" and owner:
        spreads[base, "of", owner], spreads[base, "of", owner, engine] = priors.owners
    if base != parameter:
        spreads[parameter, engine] = wider * priors.formats
        spreads[parameter, engine, device] = wider * priors.formats
    return spreads


@dataclass(frozen=True)
class Fit:
    """Fitted effects; effects that are absent are zero."""

    effects: Mapping[Effect, float]

    def logarithm(self, parameter: str, scope: Scope) -> float:
        return sum(self.effects.get(effect, 0.0) for effect in effects(parameter, scope))

    def factors(self, priced: PricedServer) -> dict[str, float]:
        """Factors by the names of a run's parts, format and all; `factor` then finds no others to multiply."""
        return {name: math.exp(self.logarithm(name, priced.scope)) for name in priced.parts}

    def _moved(
        self, default: HostOverheads | Client, kind: str, names: Iterable[str], scope: Scope
    ) -> dict[str, float]:
        """Return times from their defaults; parameters are called `kind` and the time."""
        moved = {name: math.exp(self.logarithm(f"{kind}.{name}", scope)) for name in names}
        return {name: float(getattr(default, name) or 0.0) * ratio for name, ratio in moved.items()}

    def host(self, default: HostOverheads, scope: Scope) -> HostOverheads:
        return HostOverheads(**self._moved(default, "host", HOST, scope))

    def client(self, default: Client, scope: Scope) -> Client:
        """Return the times of a client before an engine's release on a device, from its times in the catalog."""
        if not scope.client:
            return default
        moved = self._moved(default, "client", IN_TTFT, scope)
        if default.launch_ratio:
            more = self.logarithm("host.launch_s", scope._replace(owner=scope.client))
            moved["launch_ratio"] = math.exp(more - self.logarithm("host.launch_s", scope._replace(owner="")))
        return msgspec.structs.replace(default, **moved)


def predict(priced: PricedServer, fit: Fit) -> dict[str, float]:
    """Predict the metrics of a run under a fit."""
    host, client = fit.host(priced.setup.engine.host, priced.scope), fit.client(priced.setup.client, priced.scope)
    return priced.predict(fit.factors(priced), host, client)


@dataclass(frozen=True)
class LocalFit:
    """Predictions around a fit; seconds are linear in every factor and overhead."""

    fit: Fit
    base: Sequence[Mapping[str, float]]
    """For every run: metric -> its prediction under the fit."""
    slopes: Sequence[Mapping[str, Mapping[str, float]]]
    """For every run: metric -> parameter -> the share of the metric that is proportional to the parameter."""

    def predict(self, index: int, priced: PricedServer, fit: Fit) -> dict[str, float]:
        """Predict the fitted metrics of a run under another fit, without simulating it again."""
        metrics = {}
        for metric, slope in self.slopes[index].items():
            moved = {name: fit.logarithm(name, priced.scope) - self.fit.logarithm(name, priced.scope) for name in slope}
            relative = 1.0 + sum(share * (math.exp(moved[name]) - 1.0) for name, share in slope.items())
            metrics[metric] = self.base[index][metric] * max(relative, LEAST_RELATIVE)
        return metrics


def local(runs: Sequence[PricedServer], fit: Fit) -> LocalFit:
    """Simulate every run with every one of its parameters moved.

    Overheads are doubled, not nudged: else those that the device hides at first would never be found.
    """
    base, slopes = [], []
    for priced in runs:
        factors, host = fit.factors(priced), fit.host(priced.setup.engine.host, priced.scope)
        client = fit.client(priced.setup.client, priced.scope)
        here = priced.predict(factors, host, client)
        slope: dict[str, dict[str, float]] = {metric: {} for metric in FITTED}
        for name in priced.parameters:
            kind, _, field = name.partition(".")
            if kind == "client":
                continue
            if kind == "host":
                of_client = getattr(client, field) if field in IN_TTFT else 0.0
                ratio, of_server = HOST_RATIO, getattr(host, field)
                both = of_server + of_client
                longer = msgspec.structs.replace(host, **{field: of_server + both * (ratio - 1.0)})
                metrics = priced.predict(factors, longer, client)
                shares = {name: of_server / both} if both else {name: 1.0}
                if f"client.{field}" in priced.parameters:
                    shares[f"client.{field}"] = 1.0 - shares[name]
            else:
                ratio, shares = FACTOR_RATIO, {name: 1.0}
                metrics = priced.predict(factors | {name: factors[name] * ratio}, host, client)
            for metric in FITTED:
                for parameter, share in shares.items():
                    slope[metric][parameter] = share * (metrics[metric] / here[metric] - 1.0) / (ratio - 1.0)
        base.append(here)
        slopes.append(slope)
    return LocalFit(fit, base, slopes)


def fit_runs(runs: Sequence[PricedServer], num_rounds: int = NUM_ROUNDS) -> LocalFit:
    """Fit effects to `runs`; return the predictions around the fit."""
    around = local(runs, Fit({}))
    for number in range(num_rounds):
        fit = _fitted(runs, around)
        if number + 1 < num_rounds:
            around = local(runs, fit)
        else:
            around = replace(around, fit=fit, base=[predict(priced, fit) for priced in runs])
    return around


def around_again(runs: Sequence[PricedServer], around: LocalFit, changed: Sequence[bool]) -> LocalFit:
    """Return `around` with the runs flagged in `changed` simulated again."""
    places = [index for index, flag in enumerate(changed) if flag]
    anew = local([runs[index] for index in places], around.fit)
    base, slopes = list(around.base), list(around.slopes)
    for place, metrics, slope in zip(places, anew.base, anew.slopes, strict=True):
        base[place], slopes[place] = metrics, slope
    return LocalFit(around.fit, base, slopes)


def refit(runs: Sequence[PricedServer], around: LocalFit, kept: Bools, priors: Priors = PRIORS) -> Fit:
    """Fit the runs that are `kept`.

    The regression is solved again on the measurements of the kept runs. The fit to all runs gives only the point around
    which predictions are linear, and no measurement.
    """
    chosen = np.flatnonzero(kept).tolist()
    base, slopes = [around.base[index] for index in chosen], [around.slopes[index] for index in chosen]
    return _fitted([runs[index] for index in chosen], LocalFit(around.fit, base, slopes), priors)


def crowding_weights(configurations: Sequence[str], power: float = CROWDING) -> Floats:
    """Return the weight of every run, by the number of runs of its configuration."""
    sizes = Counter(configurations)
    return np.array([sizes[name] ** -power for name in configurations])


def _fitted(runs: Sequence[PricedServer], around: LocalFit, priors: Priors = PRIORS) -> Fit:
    """Solve the ridge regression by Gauss-Newton, on predictions linear around a fit; no runs give no effects."""
    if not runs:
        return Fit({})
    crowding = crowding_weights([by_configuration(priced) for priced in runs])
    weights = np.repeat(np.array([priced.measurement.weight for priced in runs]) * crowding, len(FITTED))
    spreads = _spreads(runs, priors)
    names = {effect: index for index, effect in enumerate(spreads)}
    shares, summed = _terms(runs, around, names)
    measured = np.array([[priced.measurement.measured.get(metric, math.nan) for metric in FITTED] for priced in runs])
    base = np.array([[metrics[metric] for metric in FITTED] for metrics in around.base])
    scale = np.tile([1.0 / NOISE[metric] for metric in FITTED], len(runs))
    start = np.array([around.fit.effects.get(effect, 0.0) for effect in names])
    values = start.copy()
    for _ in range(NUM_STEPS):
        moved = np.append(values - start, 0.0)
        grown = np.exp(moved[summed].sum(axis=-1))
        relative = np.maximum(1.0 + np.einsum("rmp,rp->rm", shares, grown - 1.0), LEAST_RELATIVE)
        terms = shares * grown[:, None, :] / relative[:, :, None]
        design = np.zeros((*base.shape, len(names) + 1))
        for place in range(summed.shape[-1]):
            run, metric, parameter = np.indices(terms.shape)
            np.add.at(design, (run, metric, summed[run, parameter, place]), terms)
        residual = np.log(measured / (base * relative))
        flat = design[:, :, :-1].reshape(residual.size, -1)
        change = _ridge_step(
            flat, residual.ravel(), scale, weights, np.array(list(spreads.values())), values, priors.outlier
        )
        values = values + change
        if np.abs(change).max(initial=0.0) < CONVERGED:
            break
    return Fit(dict(zip(names, values.tolist(), strict=True)))


def _spreads(runs: Sequence[PricedServer], priors: Priors) -> dict[Effect, float]:
    """Return the prior spread of every effect of the runs; those of a release shrink where few models show it.

    What a single model shows on a release may be the model's: its kernels, its experts.
    """
    spreads: dict[Effect, float] = {}
    models: dict[Effect, set[str]] = {}
    for priced in runs:
        scope = priced.scope
        for parameter in priced.parameters:
            for effect, spread in effects(parameter, scope, priors).items():
                spreads[effect] = spread
                if scope.release and effect[-1] == scope.release:
                    models.setdefault(effect, set()).add(priced.setup.model.name)
    shares = {effect: len(names) / (len(names) + priors.models) for effect, names in models.items()}
    return {effect: spread * math.sqrt(shares.get(effect, 1.0)) for effect, spread in spreads.items()}


def _terms(runs: Sequence[PricedServer], around: LocalFit, names: Mapping[Effect, int]) -> tuple[Floats, Ints]:
    """[run, metric, parameter] shares, and [run, parameter, ...] the effects that a parameter sums.

    What a run lacks has a share of 0 and the effect after the last.
    """
    num_parameters = max(len(priced.parameters) for priced in runs)
    shares = np.zeros((len(runs), len(FITTED), num_parameters))
    summed = np.full((len(runs), num_parameters, MOST_EFFECTS), len(names))
    for run, (priced, slope) in enumerate(zip(runs, around.slopes, strict=True)):
        for position, parameter in enumerate(priced.parameters):
            shares[run, :, position] = [slope[metric][parameter] for metric in FITTED]
            for place, effect in enumerate(effects(parameter, priced.scope)):
                summed[run, position, place] = names[effect]
    return shares, summed


def _ridge_step(
    design: Floats, residual: Floats, scale: Floats, share: Floats, spreads: Floats, values: Floats, outlier: float
) -> Floats:
    """Return the change of all effects: weighted least squares with the prior, and Geman and McClure's weights."""
    known = np.isfinite(residual)
    a, r = design[known] * scale[known, None], residual[known] * scale[known]
    weight = np.sqrt(share[known]) / (1.0 + (r / outlier) ** 2)
    weighted = a * weight[:, None]
    curvature = weighted.T @ weighted + np.diag(spreads**-2)
    slope = weighted.T @ (r * weight) - values / spreads**2
    change: Floats = np.clip(np.linalg.solve(curvature, slope), -TRUST, TRUST)
    return change


def by_configuration(priced: PricedServer) -> str:
    """Return the key of a run's configuration; runs that differ in load only share it."""
    return priced.measurement.configuration
