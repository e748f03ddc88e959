"""Chromium for the tests of pages, and a page of every verb: small cases, as fast as possible."""

import contextlib
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

import nsys_report
from dashboard.conftest import SERVED, SPACE, folder  # noqa: F401 a fixture
from windtunnel import cli
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of
from windtunnel.metrics.client import ClientSummary
from windtunnel.report.lab.bench import bench_report
from windtunnel.report.lab.comparison import METRICS, compare_run, comparison_report, request_columns
from windtunnel.report.render import terminal
from windtunnel.report.render.html import page
from windtunnel.report.report import Report
from windtunnel.schema import decode
from windtunnel.serving.scenario import load, resolve

Answer = TypeVar("Answer")
Browse = Callable[[Callable[[Any], Answer]], Answer]

SHARED = ("--model", str(SERVED["model"]), "--device", "h100_sxm")
LENGTHS = ("--input-tokens", "64", "--output-tokens", "8", "--num-requests", "60")
JOB = ("--device", "h100_sxm", "--num-devices", "8", "--sequence-tokens", "2048", "--global-batch", "8")
RUNS = """\
id,model,device,tp,max_num_seqs,max_num_batched_tokens,input_tokens,output_tokens,range_ratio,concurrency,num_requests,ttft_ms,tpot_ms
one,qwen2.5-0.5b,h100_sxm,1,16,1024,256,32,0.8,1,4,20,3
two,qwen2.5-0.5b,h100_sxm,1,16,1024,256,32,0.8,8,32,30,4
bad,qwen2.5-0.5b,h100_sxm,3,16,1024,256,32,0.8,8,32,30,4
"""
STEPS = "run,counter_id,sum_prefill_tokens,num_prefill_requests,num_decode_requests,sum_decode_kv_tokens,latency_ms\n"
STEPS += "".join(f"a,{number},0,0,8,{8 * (1000 + number)},2.5\n" for number in range(30))


@pytest.fixture(scope="session")
def browse() -> Iterator[Browse[Any]]:
    """Runs a function with a browser, in a thread of its own: playwright's event loop must not meet other tests'."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no page is tried")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no chromium is installed: no page is tried in a browser")
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(lambda: playwright.sync_playwright().start()).result()
        launch = {"executable_path": chromium, "args": ["--no-sandbox"]}
        browser = thread.submit(lambda: started.chromium.launch(**launch)).result()
        yield lambda work: thread.submit(work, browser).result()
        thread.submit(lambda: (browser.close(), started.stop())).result()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that checks a page's accessibility."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def reports(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """Name -> the page of a report of every verb."""
    place = tmp_path_factory.mktemp("pages")
    inputs = {"space.yaml": json.dumps(SPACE), "runs.csv": RUNS, "steps.csv": STEPS}
    for name, text in inputs.items():
        (place / name).write_text(text, encoding="utf-8")
    nsys_report.write_report(place / "profile.sqlite")
    many = ("--vary", "max_num_seqs=1,2,4,8,16,32,64,128,256", "--vary", "rate=2,8,32")
    commands = {
        "holds": ("simulate", *SHARED, *LENGTHS, "--rate", "20", "--slo", "ttft=500ms,tpot=50ms"),
        "breaks": ("simulate", *SHARED, *LENGTHS, "--rate", "2000", "--slo", "ttft=30ms,tpot=6ms"),
        "capacity": ("capacity", *SHARED, *LENGTHS, "--seeds", "1", "--slo", "tpot_p99=10ms"),
        "explain": ("explain", *SHARED),
        "grid": ("whatif", *SHARED, *LENGTHS, *many, "--slo", "tpot_p99=8ms"),
        "train": ("train", "--model", "meta-llama/Llama-3.1-8B", *JOB, "--pp", "4"),
        "does_not_fit": ("train", "--model", "meta-llama/Llama-3.1-70B", *JOB, "--tp", "8"),
        "search": ("search", str(place / "space.yaml"), "--no-store"),
        "nothing_found": ("search", str(place / "space.yaml"), "--no-store", "--slo", "ttft_p90=1us"),
        "validate": ("validate", str(place / "runs.csv")),
        "validate_steps": ("validate", "--steps", str(place / "steps.csv"), *SHARED),
        "topology": ("topology", "show", "dgx_h100:num_servers=2"),
        "kernels": ("lab", "kernels", str(place / "profile.sqlite")),
    }  # fmt: skip
    pages = {name: report_of(command) for name, command in commands.items()}
    pages["compare"], pages["bench"] = compared(folder / "served" / "slow"), measured(folder / "real")
    for name, report in pages.items():
        (place / f"{name}.html").write_text(page(report), encoding="utf-8")
    return {name: place / f"{name}.html" for name in pages}


def report_of(command: tuple[str, ...]) -> Report:
    """The report that a command prints."""
    shown: list[Report] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.setattr(terminal, "show", shown.append)
        assert cli.run(command) == 0, command
    return shown[0]


def compared(run: Path) -> Report:
    """A run beside one that takes a tenth longer."""
    columns = request_columns(run / "requests.parquet")
    slower = columns | {name: columns[name] * 1.1 for name in METRICS}
    comparison = compare_run(run, slower, resolve(load(run / "scenario.yaml")))
    operators = [
        {"name": name, "measured_s": seconds, "simulated_s": 1.2 * seconds, "error": 0.2}
        for name, seconds in (("qkv_proj", 1e-5), ("attention", 3e-5), ("step", 4e-5))
    ]
    step = {"name": "Decode steps", "num_steps": 3, "unmatched_fraction": 0.1, "operators": operators}
    return comparison_report(replace(comparison, document=comparison.document | {"steps": [step]}))


def measured(run: Path) -> Report:
    """What a client measured."""
    document = json.loads((run / "summary.json").read_text())
    return bench_report(
        decode(document["summary"], ClientSummary), {"model": "served", "endpoint": "http://localhost/v1"}
    )


@pytest.fixture(scope="session")
def dashboard(folder: Path) -> Iterator[str]:  # noqa: F811
    """The address of a dashboard of results of every verb."""
    with DashboardServer(dashboard_of(folder)) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server.url.rstrip("/")
        server.stop()
        thread.join()
