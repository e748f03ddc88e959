"""Schedulers and routers in Python behind the API: those that fail are named, and the server answers with errors."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from live_twins import client_of, scenario_of
from windtunnel.twin import live
from windtunnel.twin.server import TwinApp
from windtunnel.twin.start import twin_app

pytestmark = pytest.mark.interpreted

ASKED = {"prompt": [5] * 40, "max_tokens": 5, "ignore_eos": True}
FAILURES = {
    "failing": "the scheduler failing failed at",
    "babbling": "the scheduler babbling returned 'everything'",
    "greedy": "the scheduler greedy gave request 0 more tokens than it has left to compute",
    "endless": "the scheduler endless has not returned for 0.5 s",
    "sleeping": "the scheduler sleeping has not returned for 0.5 s",
}


def answered(app: TwinApp, *asked: dict[str, Any]) -> list[httpx.Response]:
    """Send requests at the same time, then ask for the server's health."""

    async def talk() -> list[httpx.Response]:
        async with client_of(app) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in asked))
            return [*answers, await client.get("/health"), await client.get("/metrics")]

    return asyncio.run(talk())


def app_of(**deployment: Any) -> TwinApp:
    return twin_app(scenario_of(deployment), None, names=("m",), max_requests=64)


@pytest.mark.full
def test_a_scheduler_and_a_router_in_python_serve() -> None:
    app = app_of(router="own_functions:by_session", engine={"scheduler": "own_functions:shortest_first"}, replicas=3)
    asked = [ASKED | {"user": f"u{number % 3}", "stream": number % 2 == 0} for number in range(12)]
    *answers, health, _ = answered(app, *asked)
    assert [answer.status_code for answer in (*answers, health)] == [200] * 13
    assert all(answer.json()["usage"]["completion_tokens"] == 5 for answer in answers[1::2])
    assert all(answer.text.count('"text"') == 5 for answer in answers[::2])


@pytest.mark.full
@pytest.mark.parametrize("name", FAILURES)
def test_one_that_fails_is_named_and_the_server_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "LIVE_CALL_S", 0.5)
    app = app_of(engine={"scheduler": f"own_functions:{name}"})
    whole, stream, health, metrics = answered(app, ASKED, ASKED | {"stream": True})
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "InternalServerError"
    assert FAILURES[name] in whole.json()["error"]["message"]
    if name == "greedy":  # fails before the stream begins
        assert stream.status_code == 500
    else:
        *_, error, done = stream.text.split("\n\n")[:-1]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
    assert health.status_code == 503
    assert FAILURES[name] in health.json()["error"]["message"]
    assert metrics.status_code == 200
    assert FAILURES[name] in caplog.text
    again, *_ = answered(app, ASKED)
    assert again.status_code == 500
    assert FAILURES[name] in again.json()["error"]["message"]


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/responses", "/generate"])
def test_other_streams_end_with_the_error_too(path: str) -> None:
    app = app_of(engine={"scheduler": "own_functions:failing"})

    async def talk() -> str:
        async with client_of(app) as client:
            asked = {"input": "Hi"} if path == "/v1/responses" else {"text": "Hi"}
            return (await client.post(path, json=asked | {"stream": True})).text

    documents = [part.rpartition("data: ")[2] for part in asyncio.run(talk()).split("\n\n")[:-1]]
    if path == "/generate":
        assert documents.pop() == "[DONE]"
        assert FAILURES["failing"] in json.loads(documents[-1])["error"]["message"]
        return
    events = [json.loads(document) for document in documents]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "error"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert (events[-1]["code"], FAILURES["failing"] in events[-1]["message"]) == ("500", True)


@pytest.mark.full
def test_a_router_that_fails_is_named() -> None:
    app = app_of(router="own_functions:astray", replicas=2)
    first, second, *_ = answered(app, ASKED, ASKED)
    assert {first.status_code, second.status_code} == {500}
    assert "the router astray sent request" in second.json()["error"]["message"]
    assert "replicas that are up: 0, 1" in second.json()["error"]["message"]


@pytest.mark.full
def test_one_that_chooses_nothing_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(engine={"scheduler": "own_functions:idle"})

    async def talk() -> None:
        async with client_of(app) as client:
            await asyncio.wait_for(client.post("/v1/completions", json=ASKED), 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(talk())
    assert "lets 1 request wait, and nothing else is under way" in caplog.text
