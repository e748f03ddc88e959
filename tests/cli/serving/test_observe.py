"""`windtunnel observe`: the files that it writes, and what it refuses."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from live_twins import scenario_of, served
from windtunnel.errors import InputError
from windtunnel.formats.telemetry import prometheus
from windtunnel.schema import read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from cli.conftest import Command

SERVER = "vllm serve qwen2.5-0.5b"


@pytest.fixture
def steps(tmp_path: Path) -> str:
    path = tmp_path / "steps.csv"
    rows = [f"{number},0,0,{number % 50 + 1},{(number % 50 + 1) * 300},{6 + number % 7 / 10}" for number in range(400)]
    header = "counter,prefill_tokens,prefill_requests,decode_requests,decode_kv_tokens,wall_time_ms"
    path.write_text("\n".join([header, *rows]), encoding="utf-8")
    return str(path)


@pytest.mark.full
def test_what_is_learnt_is_written_and_simulated(windtunnel: Command, steps: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    load = ("--rate", "20", "--num-requests", "40", "--input-tokens", "64", "--output-tokens", "16")
    assert windtunnel("simulate", "--from-command", SERVER, "--device", "h100_sxm", *load, "--out", str(run)).code == 0
    out = tmp_path / "learnt"
    arguments = (steps, "--from-command", SERVER, "--device", "h100_sxm", "--requests", str(run), "--out", str(out))
    done = windtunnel("observe", *arguments, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["after"]["decode"]["median"] < 0.2
    assert sorted(path.name for path in out.iterdir()) == ["calibration.yaml", "requests.csv", "scenario.yaml"]
    simulated = json.loads(windtunnel("simulate", str(out / "scenario.yaml"), "--json").stdout)
    assert simulated["summary"]["num_requests"] == 40
    assert simulated["calibration"]["name"] == str(out / "calibration.yaml")


@pytest.fixture
def scrapes() -> list[str]:
    return served(scenario_of({}, rate_per_s=20.0, num_requests=400), every_s=0.5)[2]


@pytest.mark.full
def test_saved_scrapes_give_a_calibration_and_a_scenario(
    windtunnel: Command, scrapes: list[str], tmp_path: Path
) -> None:
    folder, out = tmp_path / "scrapes", tmp_path / "learnt"
    folder.mkdir()
    for number, text in enumerate(scrapes):
        (folder / f"{number:03d}.prom").write_text(text, encoding="utf-8")
    server = ("--model", "llama-3.1-8b", "--device", "h100_sxm")
    done = windtunnel("observe", str(folder), *server, "--out", str(out), "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["load"]["rate_per_s"] == pytest.approx(20, rel=0.15)
    assert sorted(path.name for path in out.iterdir()) == ["calibration.yaml", "scenario.yaml"]
    out = out.rename(tmp_path / "moved")
    simulated = json.loads(windtunnel("simulate", str(out / "scenario.yaml"), "--json").stdout)
    assert simulated["calibration"]["name"] == str(out / "calibration.yaml")
    watched = windtunnel("observe", str(folder), *server, "--watch", str(out / "calibration.yaml"), "--json")
    assert watched.code == 0, watched.stderr
    assert json.loads(watched.stdout)["has_drifted"] is False
    for path in folder.iterdir():
        text = path.read_text()
        path.write_text(text + text.replace('engine="0"', 'engine="1"'), encoding="utf-8")
    several = windtunnel("observe", str(folder), *server, "--out", str(tmp_path / "two"))
    assert "2 engines, and so many replicas are in the scenario" in several.stderr
    assert read_yaml(tmp_path / "two" / "scenario.yaml")["deployment"]["replicas"] == 2


@pytest.mark.full
def test_a_live_server_is_scraped(windtunnel: Command, scrapes: list[str]) -> None:
    left = iter(scrapes)

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(left).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        done = windtunnel(
            "observe", url, "--model", "llama-3.1-8b", "--device", "h100_sxm", "--for", "1", "--every", "0.04", "--json"
        )
        server.shutdown()
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert sum(document["intervals"].values()) > 15
    assert document["load"]["concurrency"] > 1


def test_a_drifted_server_exits_with_1(windtunnel: Command, steps: str, tmp_path: Path) -> None:
    server, out = ("--from-command", SERVER, "--device", "h100_sxm"), str(tmp_path / "learnt")
    assert windtunnel("observe", steps, *server, "--out", out).code == 0
    header, *rows = (tmp_path / "steps.csv").read_text().splitlines()
    cells = [row.split(",") for row in rows]
    slow = [",".join([str(int(row[0]) + len(rows)), *row[1:-1], str(float(row[-1]) * 1.3)]) for row in cells]
    (tmp_path / "slow.csv").write_text("\n".join([header, *rows, *slow]))
    done = windtunnel("observe", str(tmp_path / "slow.csv"), *server, "--watch", f"{out}/calibration.yaml")
    assert done.code == 1
    assert "Drifted: from step 39" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--watch", "a.yaml", "--out", "b"), "--watch learns nothing"),
        (("--every", "90"), "--every is 90 s and --for 60 s"),
        (("--learn", "2"), "--learn is 2; a share between 0 and 1 is needed"),
        (("--requests", "run.json"), "--requests is for the scenario that --out writes"),
        (("--only", "another"), "--only: no run's id contains 'another'"),
    ],
)
def test_wrong_options_are_refused(windtunnel: Command, steps: str, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel("observe", steps, "--from-command", SERVER, "--device", "h100_sxm", *arguments)
    assert done.code == 2
    assert message in done.stderr


def test_the_seconds_of_scraping_are_told_and_a_page_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    text = 'vllm:prompt_tokens_total{engine="0"} 7\n'
    monkeypatch.setattr(prometheus, "answer_of", lambda _: text)
    prometheus.poll("http://a/metrics", 1.0, 0.2, lambda *done: told.append(done))
    assert told[0] == (0, 1)
    assert told[-1] == (1, 1)
    text = "<html>Not here</html>"
    with pytest.raises(InputError, match="answers no Prometheus metrics"):
        prometheus.poll("http://a/", 1000.0, 1.0)


def test_a_server_that_does_not_answer_is_named(windtunnel: Command) -> None:
    done = windtunnel("observe", "http://127.0.0.1:9/metrics", "--model", "qwen3-8b", "--device", "h100_sxm")
    assert done.code == 2
    assert "http://127.0.0.1:9/metrics does not answer" in done.stderr


def test_an_address_without_its_scheme_is_pointed_out(windtunnel: Command) -> None:
    done = windtunnel("observe", "localhost:8000/metrics", "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
    assert (done.code, "http://localhost:8000/metrics" in done.stderr) == (2, True)
