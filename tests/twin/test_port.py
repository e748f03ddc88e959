"""A twin at a port: streams that come in time, clients that leave, and the command that serves it."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from live_twins import scenario_of
from windtunnel.cli.serving.serve import _named_by, port_of
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.lab.bench.client import Endpoint, bench
from windtunnel.twin.server import TwinServer
from windtunnel.twin.start import twin_app
from windtunnel.workload.generate.requests import RequestArrays

ASKED = {"prompt": list(range(64)), "ignore_eos": True, "stream": True}


@pytest.fixture
def server() -> Iterator[TwinServer]:
    with TwinServer(twin_app(scenario_of({}), 1.0, max_requests=64)) as server:
        started = threading.Event()
        thread = threading.Thread(target=server.serve, args=(started.set,), daemon=True)
        thread.start()
        assert started.wait(30)
        yield server
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def num_tokens(line: str) -> int:
    """Return the tokens of an event: words, of which a server that is late sends several together."""
    return len(json.loads(line[6:])["choices"][0]["text"].split()) if '"text"' in line else 0


def test_tokens_come_when_they_are_due(server: TwinServer) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ASKED | {"max_tokens": 60}) as answer:
        times = [time.perf_counter() for line in answer.iter_lines() for _ in range(num_tokens(line))]
    assert len(times) == 60
    step_s = (times[-1] - times[0]) / 59
    histogram = server.app.metrics.histograms["itl"][0]
    assert step_s == pytest.approx(histogram.total / 59, rel=0.2)
    assert 0.004 < step_s < 0.012  # a step of an 8-billion model on this device


def test_a_client_that_leaves_frees_its_blocks(server: TwinServer) -> None:
    ranks = server.app.twin.live.loop.pool.ranks
    idle = int(ranks["free_blocks"][0])
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ASKED | {"max_tokens": 3000}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert int(ranks["free_blocks"][0]) < idle
    deadline = time.monotonic() + 10
    while server.app.twin.live.num_live and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.app.twin.live.num_live == 0
    assert int(ranks["free_blocks"][0]) == idle
    assert httpx.get(f"{server.url}/metrics").text.count('finished_reason="abort"} 1.0') == 1


def test_a_client_without_the_key_is_told_to_give_it(server: TwinServer) -> None:
    server.app.require_key(["secret"])
    load = RequestArrays(np.zeros(1), np.full(1, 12), np.full(1, 4), np.zeros(1, np.int64))
    with pytest.raises(InputError, match="/v1/models answers 401") as raised:
        bench(Endpoint(f"{server.url}/v1"), load)
    assert raised.value.hint is not None
    assert "--api-key" in raised.value.hint
    headers = {"Authorization": "Bearer secret"}
    assert bench(Endpoint(f"{server.url}/v1", headers=headers), load).requests["output_tokens"].tolist() == [4]


def test_many_slow_readers_get_everything(server: TwinServer) -> None:
    async def one(client: httpx.AsyncClient) -> int:
        count = 0
        async with client.stream("POST", f"{server.url}/v1/completions", json=ASKED | {"max_tokens": 50}) as answer:
            async for line in answer.aiter_lines():
                count += num_tokens(line)
                await asyncio.sleep(0.001)
        return count

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    assert asyncio.run(all_of_them()) == [50] * 20


@pytest.mark.full
def test_the_command_serves_until_it_is_told_to_end() -> None:
    command = [sys.executable, "-m", "windtunnel", "serve", "--model", "llama-3.1-8b", "--device", "h100_sxm"]
    with subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline()
        told = json.loads(text)
        assert httpx.get(f"{told['url']}/models").json()["data"][0]["id"] == told["models"][0] == "llama-3.1-8b"
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


@pytest.mark.parametrize(
    ("command", "served", "adapters"),
    [
        ("vllm serve llama-3.1-8b", ["m"], []),
        ("vllm serve llama-3.1-8b --served-model-name foo bar --port 9000", ["foo", "bar"], []),
        ('vllm serve llama-3.1-8b --lora-modules sql=/x \'{"name": "chat", "path": "/y"}\'', ["m"], ["sql", "chat"]),
        (
            "python -m sglang.launch_server --model-path llama-3.1-8b --served-model-name=foo --lora-paths a=/x",
            ["foo"],
            ["a"],
        ),
    ],
)
def test_a_command_names_what_it_serves(command: str, served: list[str], adapters: list[str]) -> None:
    assert _named_by(read_launch_command(command, None), "m") == (served, adapters, [])


def test_a_command_names_its_keys() -> None:
    command = "vllm serve llama-3.1-8b --api-key one --port 9000"
    assert _named_by(read_launch_command(command, None), "m") == (["m"], [], ["one"])


@pytest.mark.parametrize(("words", "port"), [("", 8000), ("--port 8123", 8123), ("--port=$PORT", 8000)])
def test_a_command_says_where_it_listens(words: str, port: int) -> None:
    assert port_of(read_launch_command(f"vllm serve llama-3.1-8b {words}", None)) == port


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speed", "fast"], "--speed is fast"),
        (["--speed", "-1"], "--speed is -1"),
        (["--tokenizer", "nowhere"], "nowhere cannot be read as a tokenizer"),
        (["--max-requests", "0"], "--max-requests is 0"),
        (["--port", "70000"], "--port is 70000"),
    ],
)
def test_wrong_options_are_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from windtunnel import cli

    assert cli.run(["serve", "--model", "llama-3.1-8b", "--device", "h100_sxm", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_task_without_answers_needs_no_length_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    from windtunnel import cli

    options = ["--model", "qwen3-embedding-8b", "--device", "h100_sxm", "--task", "embed", "--speed", "fast"]
    assert cli.run(["serve", *options]) == 2
    assert "--speed is fast" in capsys.readouterr().err  # which is looked at once the task is known


@pytest.mark.full
def test_every_replica_may_have_a_port_of_its_own() -> None:
    app = twin_app(scenario_of({"replicas": 3, "router": "least_outstanding"}), 1.0, max_requests=64, by_port=True)
    with TwinServer(app, num_ports=3) as server:
        started = threading.Event()
        thread = threading.Thread(target=server.serve, args=(started.set,), daemon=True)
        thread.start()
        assert started.wait(30)
        for _ in range(4):
            httpx.post(f"{server.urls[2]}/v1/completions", json=ASKED | {"stream": False, "max_tokens": 2})
        texts = [httpx.get(f"{url}/metrics").text for url in server.urls]
        server.stop()
        thread.join(10)
    totals = [next(line for line in text.splitlines() if line.startswith("vllm:generation_tokens")) for text in texts]
    assert [line.rpartition(" ")[2] for line in totals] == ["0.0", "0.0", "8.0"]
    assert all('engine="0"' in line for line in totals)
    for text in texts:  # of the process: the same at every port
        lines = [line for line in text.splitlines() if line.startswith("windtunnel:")]
        assert any("lateness_seconds_count" in line and line.endswith(" 8") for line in lines)
        assert any(line.startswith("windtunnel:simulated_seconds_total") for line in lines)
        assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    with pytest.raises(InputError, match="cannot choose among replicas"):
        twin_app(scenario_of({"replicas": 2, "router": "deferred"}), by_port=True)
