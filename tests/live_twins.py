"""Scenarios whose twins tests talk to."""

from typing import Any

import httpx

from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.twin.server import TwinApp


def scenario_of(deployment: dict[str, Any], rate_per_s: float = 20.0, num_requests: int = 60, **given: Any) -> Scenario:
    """Return a scenario of a small model with short requests."""
    workload = {
        "arrivals": {"type": "poisson", "rate_per_s": rate_per_s},
        "input_tokens": {"type": "lognormal", "median_tokens": 300, "sigma": 0.8, "max_tokens": 2000},
        "output_tokens": {"type": "lognormal", "median_tokens": 60, "sigma": 0.8, "max_tokens": 300},
        "num_requests": num_requests,
    }
    engine = {"max_model_len": 4096} | deployment.pop("engine", {})
    deployment = {"device": "h100_sxm", "engine": engine} | deployment
    return scenario_from({"model": "llama-3.1-8b", "deployment": deployment, "workload": workload | given})


def client_of(app: TwinApp) -> httpx.AsyncClient:
    """Return a client of an application that no port leads to."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://twin")
