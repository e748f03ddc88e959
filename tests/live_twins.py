"""Scenarios whose twins tests talk to."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.live import prepare_live
from windtunnel.twin.metrics import Metrics
from windtunnel.twin.server import TwinApp
from windtunnel.workload.generate.requests import generate


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


def run(app: TwinApp, talk: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """Return what a conversation with an application ends with."""

    async def whole() -> Any:
        async with client_of(app) as client:
            return await talk(client)

    return asyncio.run(whole())


def post(app: TwinApp, path: str, body: Any) -> httpx.Response:
    """Return the answer to a request with a body of JSON."""
    answer: httpx.Response = run(app, lambda client: client.post(path, json=body))
    return answer


def served(scenario: Scenario, every_s: float = math.inf) -> tuple[Twin, Metrics, list[str]]:
    """Send a scenario's requests to a twin at their simulated times; also return its metrics every so many seconds."""
    requests, clock = generate(scenario.workload, scenario.seed), TwinClock(None)
    metrics = Metrics(scenario.deployment.engine.name, "m", 1, 4096)
    twin = Twin(prepare_live(scenario, max_requests=256), clock, 256, metrics)
    twin.live.on_steps = metrics.steps
    metrics.describe(twin.deployment.prepared.pools, has_adapters=False)
    scrapes: list[str] = []

    def run_to(time_s: float) -> None:
        while len(scrapes) * every_s <= time_s:
            look_s = len(scrapes) * every_s
            twin.run_to(look_s)
            clock.reached_s = look_s
            scrapes.append(metrics.text(twin, clock))
        twin.run_to(time_s)
        clock.reached_s = time_s

    async def send() -> None:
        for i, arrival_s in enumerate(requests.arrival_s.tolist()):
            run_to(arrival_s)
            lengths = int(requests.input_tokens[i]), int(requests.output_tokens[i])
            twin.submit(lengths, lambda *_: None, range(i << 20, (i << 20) + sum(lengths)))
        twin.close()
        twin.run_to(1e9)

    asyncio.run(send())
    return twin, metrics, scrapes
