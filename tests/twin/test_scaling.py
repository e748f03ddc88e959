"""An autoscaler scales on a twin's metrics as KEDA does: its Prometheus scaler asks for a sum, and the horizontal pod
autoscaler behind it wants ceil(sum / threshold) replicas.
"""

import asyncio
import math
from typing import Any

import httpx
import pytest

from live_twins import client_of, scenario_of
from windtunnel.twin.start import twin_app

THRESHOLD, LEAST, MOST = 8.0, 1, 4
QUERY = "sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting)"
POLL_S, COOL_DOWN_S = 5.0, 60.0
"""`pollingInterval` and the window that scaling down waits for."""


class Prometheus:
    """Answers `/api/v1/query` with sums of the latest scrape, for terms of `sum(METRIC)`."""

    def __init__(self, twin: httpx.AsyncClient) -> None:
        self.twin = twin

    async def query(self, text: str) -> dict[str, Any]:
        page = (await self.twin.get("/metrics")).text
        total = 0.0
        for term in text.split(" + "):
            metric = term.removeprefix("sum(").removesuffix(")")
            values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(metric + "{")]
            assert values, metric
            total += sum(map(float, values))
        vector = [{"metric": {}, "value": [0, str(total)]}]
        return {"status": "success", "data": {"resultType": "vector", "result": vector}}


def wanted(answer: dict[str, Any]) -> int:
    """Return the replicas that KEDA and the autoscaler make of a query's answer."""
    value = float(answer["data"]["result"][0]["value"][1])
    return min(max(math.ceil(value / THRESHOLD), LEAST), MOST)


@pytest.mark.full
def test_replicas_follow_the_load_that_the_metrics_show() -> None:
    app = twin_app(scenario_of({"replicas": MOST}), 1.0, max_requests=4096, by_port=True)
    twin, clock = app.twin, app.twin.clock
    clock.now_s = lambda: clock.reached_s  # type: ignore[method-assign]
    history: list[tuple[float, int]] = []

    async def talk() -> None:
        replicas, number, high_at_s = 1, 0, 0.0
        async with client_of(app) as client:
            prometheus = Prometheus(client)
            for poll in range(40):
                begin_s = poll * POLL_S
                rate = 10.0 if 30 <= begin_s < 90 else 0.5
                for k in range(int(rate * POLL_S)):
                    clock.reached_s = max(clock.reached_s, begin_s + k / rate)
                    twin.submit(
                        (256, 256),
                        lambda *_: None,
                        range(number << 20, (number << 20) + 512),
                        replica=number % replicas,
                    )
                    number += 1
                clock.reached_s = begin_s + POLL_S
                count = wanted(await prometheus.query(QUERY))
                if count >= replicas or clock.reached_s - high_at_s >= COOL_DOWN_S:
                    replicas, high_at_s = count, clock.reached_s
                history.append((clock.reached_s, replicas))
        twin.close()

    asyncio.run(talk())
    assert all(count == 1 for time_s, count in history if time_s <= 30)
    assert max(count for _, count in history) > 1
    assert next(time_s for time_s, count in history if count > 1) <= 30 + 3 * POLL_S
    assert history[-1][1] == 1
    busy = [histogram for histogram in app.metrics.histograms["ttft"] if sum(histogram.counts)]
    assert len(busy) == max(count for _, count in history)
