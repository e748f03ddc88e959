"""`windtunnel bench --sweep`: one server at several loads, kept, resumed and predicted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lab.fake_server import fake_server
from windtunnel.metrics.records import Table
from windtunnel.report.comparison import ComparedRun
from windtunnel.report.lab.bench import Level, Sweep, saturation, sweep_report
from windtunnel.report.report import Table as ReportTable
from windtunnel.report.results import ResultEntry

if TYPE_CHECKING:
    from cli.conftest import Command

RISES = "Output still rises at 4.00 concurrent requests."
SHAPE = ("--input-tokens", "12", "--output-tokens", "4", "--num-requests", "6")


def run_of(output: float, growth: float) -> ComparedRun:
    """A run of a given output, in which each second of arrivals adds `growth` seconds to TTFT."""
    arrival_s = np.arange(50) * 0.1
    columns = {"arrival_s": arrival_s, "ttft_s": 0.05 + growth * arrival_s, "is_warmup": np.zeros(50, bool)}
    entry = ResultEntry("", "bench", 0.0, figures={"output_tokens_per_s": output})
    return ComparedRun(entry, {"model": "m", "endpoint": "http://localhost/v1"}, Table(columns, {}))


@pytest.mark.parametrize(
    ("kind", "outputs", "growths", "largest", "sentence"),
    [
        ("rate", (10, 20, 30), (0, 0.01, 0.3), 2.0, "Keeps up with 2.00 requests/s; at 4.00 the queue grows."),
        ("rate", (10, 20, 40), (0, 0, 0), None, "Keeps up with every load, to 4.00 requests/s."),
        ("rate", (9, 9, 9), (0.1, 0.5, 0.7), None, "The queue grows at 1.00 requests/s already."),
        ("concurrency", (10, 19.2, 20), (0, 0, 0), 2.0, "Saturates at 2.00 concurrent requests: more add less than 5%"),
        ("concurrency", (10, 18, 20), (0, 0, 0), None, "Output still rises at 4.00 concurrent requests."),
    ],
)
def test_a_server_is_saturated_where_more_load_adds_only_waiting(
    kind: str, outputs: tuple[float, ...], growths: tuple[float, ...], largest: float | None, sentence: str
) -> None:
    loads, runs = [1.0, 2.0, 4.0], [run_of(*pair) for pair in zip(outputs, growths, strict=True)]
    assert saturation(kind, loads, runs) == largest
    report = sweep_report(Sweep(kind, [Level(*pair) for pair in zip(loads, runs, strict=True)]))
    assert report.verdict.startswith(sentence)


@pytest.mark.parametrize(
    ("kind", "failures", "largest", "sentence"),
    [
        ("rate", (0, 0, 3), 2.0, "Keeps up with 2.00 requests/s; at 4.00 requests fail."),
        ("rate", (2, 0, 3), None, "Requests fail at 1.00 requests/s already."),
        ("concurrency", (0, 1, 3), None, RISES + " Requests failed at 2.00, 4.00."),
    ],
)
def test_a_server_does_not_keep_up_with_a_load_at_which_requests_fail(
    kind: str, failures: tuple[int, ...], largest: float | None, sentence: str
) -> None:
    loads, runs = [1.0, 2.0, 4.0], [run_of(output, 0.0) for output in (10, 18, 30)]
    for run, failed in zip(runs, failures, strict=True):
        run.document["summary"] = {"num_failed": failed}
    assert saturation(kind, loads, runs) == largest
    report = sweep_report(Sweep(kind, [Level(*pair) for pair in zip(loads, runs, strict=True)]))
    assert report.verdict == sentence
    (table,) = [block for block in report.sections[0].blocks if isinstance(block, ReportTable)]
    assert table.headers[-1] == "failed"


def test_levels_are_kept_and_not_measured_again(windtunnel: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "sweep")
    with fake_server(0.01, 0.002) as (url, seen):
        shared = ("bench", "--endpoint", url, *SHAPE, "--out", folder)
        first = windtunnel(*shared, "--sweep", "rate=50,100")
        assert first.code == 0, first.stderr
        assert len(seen.bodies) == 12
        second = windtunnel(*shared, "--sweep", "rate=200,50,100", "--json", "--html", str(tmp_path / "page.html"))
        assert len(seen.bodies) == 18
        assert "rate 50: measured before\nrate 100: measured before\n" in second.stderr
        assert "rate 200: 6 answered, 0 failed" in second.stderr, second.stderr
        refused = windtunnel(*shared, "--sweep", "rate=50", "--seed", "1")
        assert (refused.code, "rate-50 has other requests" in refused.stderr) == (2, True)
    document = json.loads(second.stdout)
    assert [level["load"] for level in document["levels"]] == [50.0, 100.0, 200.0]
    assert [level["predicted"] for level in document["levels"]] == [None] * 3
    kept = json.loads((tmp_path / "sweep" / "rate-50" / "summary.json").read_text())
    assert document["levels"][0]["measured"]["ttft_s"] == kept["summary"]["ttft_s"]["mean"] > 0.01
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text()) == document
    assert "TTFT p99 over the load" in (tmp_path / "page.html").read_text()


@pytest.mark.full
def test_no_load_finds_the_prompts_of_another_in_the_servers_cache(windtunnel: Command) -> None:
    with fake_server(0.01, 0.002, metrics=True) as (url, seen):
        shared = ("bench", "--endpoint", url, *SHAPE, "--rate", "100")
        assert windtunnel("bench", "--endpoint", url, *SHAPE, "--sweep", "rate=50,100").code == 0
        assert len({str(body["prompt"]) for body in seen.bodies}) == 12
        first = windtunnel(*shared, "--seed", "3", "--json")
        assert json.loads(first.stdout)["server"] == {"prompt_tokens": 72.0, "cache_hits": 0.0}
        again = windtunnel(*shared, "--seed", "3")
        assert "100% of the prompt tokens were in the server's prefix cache already" in " ".join(again.stdout.split())
        assert "prefix cache" not in first.stdout


@pytest.mark.full
@pytest.mark.compiled
def test_a_described_deployment_is_predicted_beside(windtunnel: Command, tmp_path: Path) -> None:
    described: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 1},
            "input_tokens": 12,
            "output_tokens": 4,
            "num_requests": 6,
        },
        "slo": {"ttft_s": 5.0},
    }
    (tmp_path / "scenario.yaml").write_text(json.dumps(described))
    given = ("--workload", str(tmp_path / "scenario.yaml"), "--sweep", "concurrency=1,3")
    with fake_server(0.1, 0.002) as (url, seen):
        done = windtunnel("bench", "--endpoint", url, *given)
    assert seen.most_under_way == 3
    text = " ".join(done.stdout.split())
    assert "Predicted: " in text
    assert "Holds the SLO up to 3.00." in text
    rows = [line for line in done.stdout.splitlines() if line.lstrip().startswith("3.00")]
    assert sum(row.count("%)") for row in rows) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--sweep", "rate"), "'rate' is no load and its values"),
        (("--sweep", "rate=1,x"), "is no load"),
        (("--sweep", "rate=0,1"), "is no load"),
        (("--sweep", "concurrency=1.5"), "is no load"),
        (("--sweep", "users=1"), "is no load"),
        (("--sweep", "rate=1", "--save-result", "x.json"), "--save-result is of one load"),
    ],
)
def test_wrong_sweeps_are_refused(windtunnel: Command, given: tuple[str, ...], message: str) -> None:
    done = windtunnel("bench", "--endpoint", "http://127.0.0.1:9/v1", *SHAPE, *given)
    assert (done.code, done.stdout, message in done.stderr) == (2, "", True), done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_kept_as_far_as_it_came(number: int, code: int, tmp_path: Path) -> None:
    files = ("--out", str(tmp_path / "run"), "--save-result", str(tmp_path / "result.json"))
    load = ("--rate", "20", *SHAPE[:4], "--num-requests", "400")
    with fake_server(0.01, 0.002) as (url, seen):
        command = [sys.executable, "-m", "windtunnel", "bench", "--endpoint", url, *load, *files, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(seen.bodies) < 20 and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(number)
            output, errors = process.communicate(timeout=30)
    document = json.loads(output)
    ended = document["summary"]["num_requests"]
    assert (process.returncode, 0 < ended < 400) == (code, True)
    assert document["cut"] == f"interrupted after {ended} of 400 requests"
    assert errors.endswith(f"error: interrupted after {ended} of 400 requests\n")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == document
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == ended


@pytest.mark.full
def test_an_interrupted_sweep_keeps_whole_loads_and_goes_on_from_there(windtunnel: Command, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"

    def interrupt() -> None:
        while len(seen.bodies) < 8:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with fake_server(0.01, 0.002) as (url, seen):
        shared = ("bench", "--endpoint", url, *SHAPE, "--out", str(folder), "--sweep", "concurrency=1,6")
        slow = ("--set", "workload.arrivals.rate_per_s=4")
        threading.Thread(target=interrupt).start()
        cut = windtunnel(*shared, *slow, "--json")
        assert cut.code == 130, cut.stderr
        assert [level["load"] for level in json.loads(cut.stdout)["levels"]] == [1.0]
        assert "error: concurrency 6 is interrupted" in cut.stderr
        assert not (folder / "concurrency-6").exists()
        whole = windtunnel(*shared, *slow, "--json")
        assert (whole.code, "concurrency 1: measured before" in whole.stderr) == (0, True)
        assert len(json.loads(whole.stdout)["levels"]) == 2
