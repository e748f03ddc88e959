"""Diagnoses of vLLM 0.24.0 on one H200 whose faults were made for real (benchmarks/measured/h200)."""

from pathlib import Path

import msgspec
import pytest

from windtunnel.formats.launch.read import read_launch_command
from windtunnel.production.diagnose import Diagnosis, diagnose
from windtunnel.production.observed import read_requests
from windtunnel.report.diagnosis import verdict
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.shorthand import raw_scenario

LOADS = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200" / "loads"
COMMAND = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 20480 --no-enable-prefix-caching"
WORKLOAD = {"arrivals": {"type": "burst"}, "input_tokens": 1, "output_tokens": 1, "num_requests": 1}


def described() -> Scenario:
    """The server as its owner thinks that it runs."""
    given = {"device": "h200_sxm", "engine_version": "0.24.0"}
    return scenario_from(raw_scenario({**read_launch_command(COMMAND).raw, "workload": WORKLOAD}, given), "")


def diagnosed(run: str) -> Diagnosis:
    server, load = run.split("/")
    return diagnose(described(), read_requests(LOADS / server / load), read_requests(LOADS / "llama-8b" / load))


@pytest.mark.parametrize(
    ("run", "cause", "severity", "gap"),
    [
        ("few-requests/chat", "batch_limit", 16, 2.5),
        ("small-cache/chat", "kv_preemption", 1200, 0.9),
        ("eager/chat", "eager", 3, 3.5),
        ("eager/open", "eager", 2, 2.2),
    ],
)
def test_a_fault_that_was_made_is_found(run: str, cause: str, severity: float, gap: float) -> None:
    diagnosis = diagnosed(run)
    first = diagnosis.findings[0]
    assert first.name == cause
    assert first.severity == pytest.approx(severity, rel=0.2)  # the limit and the cache are as the server was told
    assert first.shares["e2e"] > 0.8
    assert diagnosis.gaps["e2e"] == pytest.approx(gap, rel=0.1)


@pytest.mark.parametrize("run", ["llama-8b/chat", "llama-8b/open", "small-cache/open"])
def test_a_healthy_server_is_called_healthy(run: str) -> None:
    # The small cache holds what arrives in the open loop.
    assert not diagnosed(run).findings


def test_a_server_far_faster_than_described_is_not_called_healthy() -> None:
    slower = msgspec.structs.replace(described().deployment, device="l4")
    diagnosis = diagnose(
        msgspec.structs.replace(described(), deployment=slower), read_requests(LOADS / "llama-8b/chat")
    )
    assert diagnosis.gaps["e2e"] < -0.5
    assert verdict(diagnosis).endswith("Do the model, the device and the flags describe this server?")
