"""Run any scenario: one kind of replica, or pools of several."""

from windtunnel.engine import pools, serving
from windtunnel.engine.serving import Progress, Result
from windtunnel.estimate.estimator import Estimator
from windtunnel.spec.scenario import Scenario


def simulate(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
) -> Result:
    """Simulate `scenario`.

    Args:
        scenario: what to run.
        estimator: prices operators; None reads the tables measured on each pool's device, or its calibrated roofline.
        progress: called now and then.
        allow_download: look models up on the Hugging Face hub too.

    Raises:
        InputError: the scenario's parts do not go together, or a request that this deployment can never serve.
    """
    run = pools.simulate_pools if scenario.deployment.pools else serving.simulate
    return run(scenario, estimator, progress, allow_download)
