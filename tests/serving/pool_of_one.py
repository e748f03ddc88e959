"""Run the loop with one pool of replicas, as many tests do."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.forms import prepare_loop
from windtunnel.metrics.records import Table
from windtunnel.serving.run import Custom
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.state import records as state
from windtunnel.serving.state.adapters import AdapterPlan
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.requests import RequestArrays


def run_pool(
    settings: state.KernelSettings,
    cost: state.StepCost,
    requests: RequestArrays,
    cache: state.Cache | None = None,
    speculation: state.Speculation | None = None,
    fleet: FleetRun | None = None,
    router: Any = None,
    adapters: AdapterPlan | None = None,
) -> tuple[NDArray[np.void], Table]:
    """Return the records of the requests and the step table."""
    caches = [] if cache is None else [cache]
    plan = PoolPlan(settings, cost, speculation=speculation, adapters=adapters)
    run = prepare_loop([plan], requests, caches, fleet=fleet).run(Custom(router))
    return run.requests, run.steps
