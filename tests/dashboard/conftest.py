"""A folder with results of every verb, and a dashboard of it that answers on a free port."""

import contextlib
import http.client
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import windtunnel as wt
from windtunnel import cli
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of
from windtunnel.metrics.client import client_summary, client_tables
from windtunnel.report.lab.bench import bench_document, write_bench
from windtunnel.report.serving.run import write_run

SERVED: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "device": "h100_sxm",
    "input_tokens": 64,
    "output_tokens": 8,
    "num_requests": 130,
    "slo": {"ttft_s": 1.0},
}
SPACE = {
    "model": SERVED["model"],
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 1.0},
        "input_tokens": 64,
        "output_tokens": 8,
        "num_requests": 40,
    },
    "vary": {"tp": [1, 3], "max_num_seqs": [16, 256]},
    "limits": {"ttft_p90": "1s"},
    "finalist_seeds": 2,
}


@dataclass(frozen=True)
class Got:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)


Ask = Callable[..., Got]


def write_bench_run(folder: Path) -> None:
    """What a client recorded of a server: 20 requests, the third of which failed."""
    sent_s = np.arange(20) * 0.1
    parts = [time_s + 0.05 + 0.01 * np.arange(8) for time_s in sent_s]
    parts[2] = np.array([])
    requests, tokens = client_tables(sent_s, np.zeros(20), np.full(20, 64), np.full(20, 8), parts)
    scenario = wt.scenario(**{**SERVED, "num_requests": 20}, rate_per_s=10.0)
    about = {"model": "served", "endpoint": "http://localhost:8000/v1", "failed": "1 request: <b>no</b>"}
    document = bench_document(client_summary(requests, tokens, scenario.slo), about, scenario)
    write_bench(folder, requests, tokens, document, scenario)


def printed(*arguments: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of every verb, and two that are broken. Tests only read it."""
    runs = tmp_path_factory.mktemp("runs")
    for name, rate in (("served/slow", 20.0), ("served/fast", 200.0)):
        write_run(wt.simulate(wt.scenario(**SERVED, rate_per_s=rate, replicas=2)), runs / name)
    write_bench_run(runs / "real")
    space = runs / "space.yaml"
    space.write_text(json.dumps(SPACE))
    printed("search", str(space), "--store", str(runs / "kept.sqlite"), "--out", str(runs / "found"))
    images = runs / "images.yaml"
    images.write_text("{kind: diffusion, model: FLUX.1-schnell, device: h100_sxm, batch: 2}")
    shared = ("--model", str(SERVED["model"]), "--device", "h100_sxm")
    load = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "40", "--rate", "1")
    commands = {
        "capacity": ("capacity", *shared, *load, "--seeds", "1", "--slo", "ttft_p99=1s"),
        "step": ("explain", *shared),
        "images": ("simulate", str(images)),
        "grid": ("whatif", *shared, *load, "--vary", "tp=1,2"),
        "step_of_training": (
            *("train", *shared, "--num-devices", "8", "--tp", "2"),
            *("--sequence-tokens", "2048", "--global-batch", "8"),
        ),
    }
    for name, command in commands.items():
        (runs / f"{name}.json").write_text(printed(*command, "--json"))
    (runs / "torn").mkdir()
    (runs / "torn" / "summary.json").write_text('{"windtunnel": "1", "summary": {')
    (runs / "half").mkdir()
    (runs / "half" / "requests.parquet").write_bytes(b"PAR1")
    return runs


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Ask]]:
    """Serves a folder in a thread of this process."""
    with contextlib.ExitStack() as stack:

        def started(path: Path) -> Ask:
            server = stack.enter_context(DashboardServer(dashboard_of(path)))
            thread = threading.Thread(target=server.serve, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.stop)
            return asker(server)

        yield started


def asker(server: DashboardServer) -> Ask:
    """Asks a server: `ask(path)`, or with `post` what a form of its own pages would send."""
    port = server.port

    def ask(path: str, post: Mapping[str, Any] | None = None, method: str = "", **headers: str) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if post is not None:
            sent = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/x-www-form-urlencoded", **sent}
        body = None if post is None else urlencode(post)
        connection.request(method or ("GET" if post is None else "POST"), path, body, sent)
        response = connection.getresponse()
        found = Got(response.status, response.headers, response.read().decode("utf-8", "replace"))
        connection.close()
        return found

    return ask


@pytest.fixture
def ask(folder: Path, serve: Callable[[Path], Ask]) -> Ask:
    """Asks a dashboard of `folder`."""
    return serve(folder)
