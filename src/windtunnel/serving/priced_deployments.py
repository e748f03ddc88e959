"""Prepare deployments for runs, and share the operators and prices that they have in common."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.prepared import PreparedDeployment, prepare
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.estimators import calibrated, estimator_for, estimator_key, on_network
from windtunnel.serving.setup.step_prices import DeployedModel, LoweredSteps, lower_steps
from windtunnel.workload.generate.requests import RequestArrays

PRICED_SETTINGS = (
    "max_cudagraph_capture_size",
    "cudagraph_sizes",
    "cudagraph_padding",
    "piecewise_cudagraphs",
    "full_cudagraphs",
    "piecewise_sizes",
    "speculative",
    "host",
    "async_scheduling",
)
"""Engine settings that a step's price depends on; others only decide which steps are formed."""
REACHES = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens")
"""Settings that decide the reach of price grids."""


@dataclass(frozen=True, eq=False)
class PricedDeployments:
    """Prepares deployments. Operators of a device are read once, and steps of a model on it priced once, for all
    settings of the engine that they do not depend on: the price of a step does not depend on how far its grid reaches.
    """

    estimators: dict[Any, Estimator] = field(default_factory=dict)
    prices: dict[Any, tuple[tuple[int, ...], LoweredSteps]] = field(default_factory=dict)
    furthest: list[tuple[int, ...]] = field(default_factory=list)
    """Furthest reach of any grid so far; the next grid reaches as far at once."""

    def server(self, scenario: Scenario, requests: RequestArrays, setup: Setup | None = None) -> PreparedDeployment:
        """Prepare the deployment of `scenario`, which resolves to `setup`, for requests of these lengths. InputError
        for what `serving.prepared.prepare` raises."""
        setups = None if setup is None or scenario.deployment.pools else [setup]
        return prepare(scenario, requests, setups, estimator_of=self.estimator, lower=self.lower)

    def estimator(self, setup: Setup) -> Estimator:
        """Return `serving.setup.estimators.estimator_for`, the same object for the same device and engine."""
        key = estimator_key(setup)
        if key not in self.estimators:
            self.estimators[key] = estimator_for(replace(setup, calibration=None, network=None, arithmetic_slower=1.0))
        network = None if setup.network is None else (msgspec.json.encode(setup.network), setup.parallelism)
        placed = (*key, setup.calibration_name, setup.arithmetic_slower, network)
        if placed not in self.estimators:
            self.estimators[placed] = on_network(calibrated(self.estimators[key], setup), setup)
        return self.estimators[placed]

    def lower(self, estimator: Estimator, deployed: DeployedModel) -> LoweredSteps:
        """Return `serving.setup.step_prices.lower_steps`, reaching at least as far as `deployed` does."""
        engine = deployed.engine
        settings = tuple(getattr(engine, name) for name in PRICED_SETTINGS)
        key = (id(estimator), deployed.device.name, deployed.shard, settings, deployed.drafter)
        reach = (deployed.max_model_len, *(getattr(engine, name) or 0 for name in REACHES))
        reached, lowered = self.prices.get(key, ((0,) * len(reach), None))
        if lowered is None or any(needed > far for needed, far in zip(reach, reached, strict=True)):
            reached = tuple(max(each) for each in zip(reach, reached, *self.furthest, strict=True))
            self.furthest[:] = [reached]
            grown = dict(zip(REACHES, (value or None for value in reached[1:]), strict=True))
            furthest = msgspec.structs.replace(engine, **grown)
            lowered = lower_steps(estimator, deployed._replace(engine=furthest, max_model_len=reached[0]))
            self.prices[key] = (reached, lowered)
        return lowered
