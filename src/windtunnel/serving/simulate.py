"""Simulate any scenario: equal replicas, or pools of several kinds."""

from windtunnel.errors import InputError
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.custom.policy import Policy
from windtunnel.serving.custom.router import Router
from windtunnel.serving.pools import simulate_pools
from windtunnel.serving.replicas import simulate_replicas
from windtunnel.serving.results import Result
from windtunnel.serving.runners.batched import Progress
from windtunnel.serving.scenario import Scenario


def simulate(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    policy: Policy | None = None,
    router: Router | None = None,
) -> Result:
    """Simulate `scenario`.

    Args:
        scenario: what to run.
        estimator: prices operators; None reads the tables measured on each pool's device, or its calibrated roofline.
        progress: called now and then.
        allow_download: look models up on the Hugging Face hub too.
        policy: the user's scheduler, in place of the engine's: see `serving.custom.policy.Policy`.
        router: the user's router, in place of the deployment's: see `serving.custom.router.Router`.

    Raises:
        InputError: the scenario's parts do not go together, or a request that this deployment can never serve.
    """
    if not isinstance(scenario, Scenario):
        raise InputError(
            f"simulate takes a Scenario, not a {type(scenario).__name__}",
            "windtunnel.load(path) reads one, windtunnel.scenario(model=..., device=..., ...) makes one",
        )
    if not scenario.deployment.pools:
        return simulate_replicas(scenario, estimator, progress, allow_download, policy, router)
    if router is not None:
        raise InputError("a router of one's own does not run in pools", "leave the pools out of the deployment")
    if policy is not None:
        raise InputError("a scheduler of one's own does not run in pools", "leave the pools out of the deployment")
    return simulate_pools(scenario, estimator, progress, allow_download)
