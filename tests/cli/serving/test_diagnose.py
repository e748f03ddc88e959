"""`windtunnel diagnose`: its verdict, its document, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from windtunnel.pricing.table import read_parquet

if TYPE_CHECKING:
    from pathlib import Path

    from cli.conftest import Command

COLUMNS = "arrival_s,input_tokens,output_tokens"
SERVER = "vllm serve qwen2.5-0.5b"
LOAD = (
    *("--device", "h100_sxm", "--rate", "30", "--num-requests", "60"),
    *("--input-tokens", "64-256", "--output-tokens", "16-64"),
)


def simulate(windtunnel: Command, folder: Path, *options: str) -> str:
    done = windtunnel("simulate", "--from-command", SERVER, *LOAD, *options, "--out", str(folder))
    assert done.code == 0, done.stderr
    return str(folder)


@pytest.mark.full
def test_an_eager_server_is_told_what_to_change(windtunnel: Command, tmp_path: Path) -> None:
    slow = simulate(windtunnel, tmp_path / "slow", "--set", "deployment.engine.max_cudagraph_capture_size=0")
    healthy = simulate(windtunnel, tmp_path / "healthy", "--seed", "3")
    arguments = (slow, "--from-command", SERVER, "--device", "h100_sxm", "--before", healthy)
    page = tmp_path / "why.html"
    done = windtunnel("diagnose", *arguments, "--html", str(page), "--json")
    assert done.code == 0
    document = json.loads(done.stdout)
    assert document["causes"][0]["cause"] == "eager"
    assert "Check whether the server runs with --enforce-eager, and remove it" in document["verdict"]
    # No line of a page ends within an option.
    assert 'runs with <span class="flag">--enforce-eager</span>' in page.read_text(encoding="utf-8")
    assert "times as long as usual" not in document["causes"][0]["evidence"]


@pytest.mark.full
def test_a_server_as_predicted_is_healthy(windtunnel: Command, tmp_path: Path) -> None:
    run = simulate(windtunnel, tmp_path / "run")
    done = windtunnel("diagnose", run, "--from-command", SERVER, "--device", "h100_sxm")
    assert "Healthy: end to end as fast as predicted" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.csv", "--model", "qwen2.5-0.5b", "--device", "h100_sxm"), "there is no file missing.csv"),
        (("README.md", "--model", "qwen2.5-0.5b", "--device", "h100_sxm"), "is of no known kind"),
        ((), "requests is missing"),
        (("http://localhost:8000/metrics",), "windtunnel observe URL"),
    ],
)
def test_what_cannot_be_read_is_refused(windtunnel: Command, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel("diagnose", *arguments)
    assert done.code == 2
    assert message.lower() in done.stderr.lower()


@pytest.mark.full
def test_what_served_must_be_named(windtunnel: Command, tmp_path: Path) -> None:
    run = simulate(windtunnel, tmp_path / "run")
    done = windtunnel("diagnose", run, "--device", "h100_sxm")
    assert done.code == 2
    assert "--model is missing" in done.stderr


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("ttft_ms,latency_ms", "0,64,8,20,200", "has no column e2e_s"),
        ("time_to_first_token,e2e_s", "0,64,8,0.1,0.2", "hint: rename those that hold them"),
        ("ttft_s,e2e_s", "0,64,8,0.1,0.2", "has 1 answered request; 20 are needed"),
    ],
)
def test_a_table_of_requests_is_not_taken_for_steps(
    windtunnel: Command, tmp_path: Path, columns: str, row: str, message: str
) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(f"{COLUMNS},{columns}\n{row}\n")
    done = windtunnel("diagnose", str(path), "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
    assert done.code == 2
    assert message in done.stderr
    assert "simulate --trace" not in done.stderr


def test_a_result_of_means_alone_is_not_taken_for_steps(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "means.jsonl"
    means = {f"mean_{name}_ms": 9.0 for name in ("ttft", "tpot", "e2e_latency")}
    load = {"completed": 99, "total_input_tokens": 9900, "total_output_tokens": 990, "request_rate": 8.0}
    path.write_text(json.dumps({"backend": "sglang", "duration": 10.0, **load, **means}))
    done = windtunnel("diagnose", str(path), "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
    assert done.code == 2
    assert "SGLang's `bench_serving`, without the arrival of every request" in done.stderr
    path.rename(tmp_path / "means.json")
    done = windtunnel("diagnose", str(tmp_path / "means.json"), "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
    assert "vllm bench serve --save-detailed" in done.stderr.replace("\n", " ")


def test_a_load_test_of_web_servers_can_only_be_compared(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "run_stats.csv"
    head = "Type,Name,Request Count,Failure Count,Average Response Time,50%"
    path.write_text(f"{head}\nPOST,/v1/chat/completions,103,3,1642.0,1500\n,Aggregated,103,3,1642.0,1500\n")
    for verb in ("diagnose", "validate", "observe"):
        done = windtunnel(verb, str(path), "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
        assert done.code == 2
        assert f"`windtunnel gate --measured {path} --baseline OTHER` compares" in done.stderr.replace("\n", " ")
        assert "reads it" not in done.stderr


@pytest.mark.full
def test_times_in_milliseconds_under_names_of_seconds_are_pointed_out(windtunnel: Command, tmp_path: Path) -> None:
    simulate(windtunnel, tmp_path / "run")
    requests = read_parquet(tmp_path / "run" / "requests.parquet").to_pylist()
    rows = [
        f"{row['arrival_s']},{row['input_tokens']},{row['output_tokens']},{1e3 * row['ttft_s']},{1e3 * row['e2e_s']}"
        for row in requests
    ]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join([f"{COLUMNS},ttft_s,e2e_s", *rows]))
    done = windtunnel("diagnose", str(path), "--model", "qwen2.5-0.5b", "--device", "h100_sxm")
    assert done.code == 2
    assert "milliseconds belong in ttft_ms and e2e_ms" in done.stderr
