"""`windtunnel profile` and `windtunnel bench` as people call them; what they measure is tested in tests/lab."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.fake_server import fake_server
from windtunnel.cli.lab import bench, profile
from windtunnel.errors import InputError
from windtunnel.lab.bench import client

if TYPE_CHECKING:
    from cli.conftest import Command

LLAMA = "vidur/profiles/compute/a100/meta-llama/Llama-2-7b-hf/mlp.csv"


def test_without_a_command_it_helps(windtunnel: Command) -> None:
    done = windtunnel("profile")
    assert done.code == 0
    assert "collectives" in done.stdout


def test_a_profile_of_vidurs_is_simulated_from(windtunnel: Command, reference: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "profile")
    done = windtunnel("profile", "from-vidur", str(reference / LLAMA), "--device-name", "a100_sxm", "--out", folder)
    assert done.code == 0, done.stderr
    assert "gemm bf16" in done.stdout
    arguments = ("--model", "meta-llama/Llama-2-7b-hf", "--device", "a100_sxm", "--profile", folder, "--json")
    load = ("--input-tokens", "64", "--output-tokens", "8", "--concurrency", "4", "--num-requests", "20")
    done = windtunnel("simulate", *arguments, *load)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sources"]["a100_sxm, Vidur's mlp.csv"] > 0.7  # attention and the head are not in it
    assert found["scenario"]["deployment"]["profile"]["folder"] == folder
    assert found["calibration"]["name"] is None  # the shipped one corrects the shipped tables
    fitted = windtunnel("simulate", *arguments, *load, "--estimator", "monotone")
    assert "a100_sxm, Vidur's mlp.csv, monotone" in json.loads(fitted.stdout)["sources"]
    other = windtunnel("simulate", *arguments, *load, "--set", "deployment.device=h100_sxm")
    assert other.code == 2
    assert "was measured on a100_sxm, the deployment is on h100_sxm" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "cmpute"), "windtunnel profile has no command 'cmpute'"),
        (("profile", "check", "{folder}"), "holds no measured operators"),
        (("profile", "check", "{folder}", "--estimators", "tree"), "there is no estimator 'tree'"),
        (("profile", "from-vidur", "none.csv", "--device-name", "x", "--out", "{folder}"), "there is no file none.csv"),
        (
            ("profile", "compute", "--model", "llama-3.1-8b", "--device-name", "x", "--max-batch", "0", "--out", "o"),
            "--max-batch is 0; at least 1 is needed",
        ),
        (
            ("profile", "compute", "--model", "llama-3.1-8b", "--device-name", "x", "--budget", "1moon", "--out", "o"),
            "--budget: '1moon' has the unit 'moon'",
        ),
        (
            ("profile", "compute", "--model", "llama-3.1-8b", "--device-name", "x", "--quant", "fp9", "--out", "o"),
            "--quant: there is no format 'fp9'",
        ),
        (("profile", "collectives", "--device-name", "x", "--sizes", "8", "--out", "o"), "--sizes: '8' is not a range"),
        (("bench", "--rate", "1"), "give either --endpoint or --start"),
        (("bench", "--endpoint", "http://localhost/v1"), "there is nothing to send"),
        (
            ("bench", "--endpoint", "localhost", "--rate", "1", "--input-tokens", "1", "--output-tokens", "1"),
            "'localhost' is not an endpoint",
        ),
        (
            ("bench", "--start", "vllm", "--rate", "1", "--input-tokens", "1", "--output-tokens", "1"),
            "--start needs a model",
        ),
    ],
)
def test_wrong_input(windtunnel: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = windtunnel(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.code == 2
    assert message in done.stderr
    assert not done.stdout


def test_a_bench_writes_what_a_simulation_writes(windtunnel: Command, tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    import pyarrow.parquet as pq

    workload = tmp_path / "workload.yaml"
    workload.write_text(
        "arrivals: {type: poisson, rate_per_s: 50}\ninput_tokens: 16\noutput_tokens: 4\nnum_requests: 12\n"
    )
    folder, result = tmp_path / "run", tmp_path / "result.json"
    with fake_server(0.01, 0.002) as (url, _):
        written = ("--out", str(folder), "--save-result", str(result), "--slo", "ttft=1s")
        done = windtunnel("bench", "--endpoint", url, "--workload", str(workload), *written)
        assert done.code == 0, done.stderr
        again = windtunnel("bench", "--endpoint", url, "--workload", str(workload), *written)
    assert again.code == 2
    assert "is not empty" in again.stderr
    assert "end to end" in done.stdout
    assert "100% of the answered requests kept every limit" in done.stdout
    requests = pq.read_table(folder / "requests.parquet")
    assert requests.num_rows == 12
    assert pq.read_table(folder / "tokens.parquet").num_rows == 48
    summary = json.loads((folder / "summary.json").read_text())["summary"]
    assert summary["ttft_s"]["mean"] == pytest.approx(sum(requests["ttft_s"].to_pylist()) / 12)
    assert json.loads(result.read_text())["completed"] == 12


@pytest.mark.full
def test_a_measured_run_beside_its_prediction_shows_intervals_and_no_sampling_that_nobody_chose(
    windtunnel: Command, tmp_path: Path
) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "model: llama-3.1-8b\ndeployment: {device: h100_sxm}\nworkload: {arrivals: {type: poisson, rate_per_s: 50}, "
        "input_tokens: 64, output_tokens: 4, num_requests: 12}\n"
    )
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    with fake_server(0.01, 0.002) as (url, _):
        given = ("--workload", str(scenario), "--out", str(real))
        assert windtunnel("bench", "--endpoint", url, *given).code == 0
    assert windtunnel("simulate", str(scenario), "--out", str(simulated)).code == 0
    text = windtunnel("compare", str(real), str(simulated)).stdout
    assert "80% interval" in text
    assert re.search(r"TPOT mean .* ms, measured (within|outside)", text)
    document = json.loads(windtunnel("compare", str(real), str(simulated), "--json").stdout)
    assert not [path for path in document["differences"] if "sampling" in path]
    assert "default" not in document["verdicts"][0]


def test_a_bench_with_failed_requests_fails(windtunnel: Command, tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    with fake_server(0.01, 0.002, fails=5) as (url, _):
        load = ("--rate", "50", "--input-tokens", "16", "--output-tokens", "4", "--num-requests", "11")
        done = windtunnel("bench", "--endpoint", url, *load, "--out", str(tmp_path / "run"))
    assert done.code == 1
    assert done.stderr.endswith("5 of 11 requests failed\n")
    assert "5 requests: status 500" in done.stdout
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.full
def test_a_server_that_hangs_is_told_of(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    monkeypatch.setattr(client, "SILENCE_S", 0.2)
    with fake_server(first_s=1.5) as (url, _):
        load = ("--rate", "50", "--input-tokens", "16", "--output-tokens", "4", "--num-requests", "3")
        done = windtunnel("bench", "--endpoint", url, *load, "--timeout", "60")
        late = windtunnel("bench", "--endpoint", url, *load, "--timeout", "0.3")
    assert done.code == 0
    # Told after 0.2, 0.4 and 0.8 s; once more on a slow machine.
    assert done.stderr.count("no answer for") in (2, 3, 4)
    assert "a request fails after 60 s (--timeout)" in done.stderr
    assert late.code == 1
    assert "every request failed: no part of the answer for 0.3 s" in late.stderr


def test_a_bench_sends_the_workloads_sampling(windtunnel: Command, tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    workload = tmp_path / "workload.yaml"
    shape = "arrivals: {type: poisson, rate_per_s: 50}\ninput_tokens: 16\noutput_tokens: 4\nnum_requests: 3\n"
    workload.write_text(shape + "sampling: {temperature: 0.7, top_p: 0.9, top_k: 50}\n")
    with fake_server(0.01, 0.002) as (url, seen):
        assert windtunnel("bench", "--endpoint", url, "--workload", str(workload)).code == 0
        workload.write_text(shape)
        assert windtunnel("bench", "--endpoint", url, "--workload", str(workload)).code == 0
        workload.write_text(shape + "sampling: {structured_output: true}\n")
        refused = windtunnel("bench", "--endpoint", url, "--workload", str(workload))
    given = [{key: body.get(key) for key in ("temperature", "top_p", "top_k")} for body in seen.bodies]
    assert given == 3 * [{"temperature": 0.7, "top_p": 0.9, "top_k": 50}] + 3 * [
        {"temperature": 0.0, "top_p": None, "top_k": None}
    ]
    assert refused.code == 2
    assert "structured_output cannot be sent" in refused.stderr


def test_an_answer_without_usage_is_pointed_out(windtunnel: Command) -> None:
    shape = ("--input-tokens", "12", "--output-tokens", "4", "--num-requests", "6", "--rate", "50")
    with fake_server(0.01, 0.002, counts=False) as (url, _):
        done = windtunnel("bench", "--endpoint", url, *shape, "--words")
    assert done.code == 0, done.stderr
    assert "does not tell how many tokens 6 answers had" in " ".join(done.stdout.split())


def test_what_was_measured_is_shown_where_it_cannot_be_written(
    windtunnel: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(bench.report, "write_bench", full)
    shape = ("--input-tokens", "12", "--output-tokens", "4", "--num-requests", "6", "--rate", "50")
    with fake_server(0.01, 0.002) as (url, _):
        done = windtunnel("bench", "--endpoint", url, *shape, "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "Measured: " in done.stdout
    assert "the disk is full" in done.stderr


def test_an_interrupted_profile_says_that_it_goes_on(
    windtunnel: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile.profiling, "profile_compute", interrupt)
    folder = str(tmp_path / "profile")
    done = windtunnel("profile", "compute", "--model", "qwen2.5-0.5b", "--device-name", "my_cpu", "--out", folder)
    assert done.code == 130
    assert f"{folder} keeps what was measured" in done.stderr
    assert "nothing was written" not in done.stderr
