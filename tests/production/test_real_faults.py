"""Diagnoses of vLLM 0.24.0 on one H200 and one H100 whose faults were made for real (benchmarks/measured)."""

from pathlib import Path

import msgspec
import pytest

from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.production.diagnose import Diagnosis, diagnose
from windtunnel.production.observe import observe_steps
from windtunnel.production.observed import read_requests
from windtunnel.production.slow_steps import diagnose_steps
from windtunnel.report.diagnosis import verdict
from windtunnel.schema import read_yaml
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("run", ["llama-8b/chat", "llama-8b/open", "small-cache/open"])
def test_a_healthy_server_is_called_healthy(run: str) -> None:
    # The small cache holds what arrives in the open loop.
    assert not diagnosed(run).findings


@pytest.mark.full
def test_a_server_far_faster_than_described_is_not_called_healthy() -> None:
    slower = msgspec.structs.replace(described().deployment, device="l4")
    diagnosis = diagnose(
        msgspec.structs.replace(described(), deployment=slower), read_requests(LOADS / "llama-8b/chat")
    )
    assert diagnosis.gaps["e2e"] < -0.5
    assert verdict(diagnosis).endswith("Do the model, the device and the flags describe this server?")


@pytest.mark.full
def test_what_a_host_needs_to_launch_kernels_is_learnt_from_steps_without_graphs() -> None:
    (eager,) = [run for run in read_step_runs(LOADS.parent, {}, {"device": "h200_sxm"}) if run.name == "eager"]
    observed = observe_steps(eager)
    assert observed.learnt == "the host"
    # Decode steps are launched for longer than the device computes, and most steps with prompts, too.
    assert {"GEMM", "GEMM of prompts", "attention decode", "small kernels"} <= set(observed.unidentified)
    assert not observed.calibration.factors
    assert observed.calibration.host.launch_s == pytest.approx(88e-6, rel=0.1)
    assert observed.before["decode"].median > 0.5
    assert observed.after["decode"].median < 0.16


# One H100 ------------------------------------------------------------------------------------------------------------

H100 = LOADS.parents[1] / "h100"


def diagnosed_on_h100(run: str, before: str) -> Diagnosis:
    """Diagnose a load of a server whose owner knows the flags of the healthy one, and what the client sends."""
    workload = read_yaml(H100 / "loads" / run / "scenario.yaml")["workload"]
    command = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 20480"
    given = {"device": "h100_sxm", "engine_version": "0.24.0"}
    server = scenario_from(raw_scenario({**read_launch_command(command).raw, "workload": workload}, given), "")
    earlier = read_requests(H100 / "loads" / before) if before else None
    return diagnose(server, read_requests(H100 / "loads" / run), earlier)


@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "before", "cause", "severity"),
    [
        ("short-graphs/open", "healthy/open", "graphs_end", 8),
        ("small-budget/chat", "healthy/first-chat", "token_limit", 256),
        ("small-kv/chat", "healthy/first-chat", "kv_preemption", 1000),
        ("cache-off/prefix", "", "prefix_cache_cold", 1),
        ("healthy/chat-slow-client", "healthy/chat", "load_generator", 0.0345),
    ],
)
def test_a_fault_that_was_made_on_an_h100_is_found(run: str, before: str, cause: str, severity: float) -> None:
    first = diagnosed_on_h100(run, before).findings[0]
    assert first.name == cause
    assert first.severity == pytest.approx(severity, rel=0.05)


@pytest.mark.full
def test_a_token_budget_that_only_delays_first_tokens_is_not_called_healthy() -> None:
    diagnosis = diagnosed_on_h100("small-budget/chat", "")
    assert abs(diagnosis.gaps["e2e"]) < 0.1
    said = verdict(diagnosis)
    assert said.startswith("Unclear: TTFT is ")
    assert "slower than predicted, and the prediction is sure only within" in said
    assert (diagnosis.others[0].name, diagnosis.others[0].severity) == ("token_limit", 256)


@pytest.mark.full
def test_a_healthy_server_on_an_h100_is_called_healthy() -> None:
    assert not diagnosed_on_h100("healthy/prefix", "").findings
    assert not diagnosed_on_h100("healthy/open", "").findings


@pytest.fixture(scope="module")
def recorded_steps() -> dict[str, StepRun]:
    return {run.name: run for run in read_step_runs(H100, {}, {"device": "h100_sxm"})}


@pytest.mark.parametrize(
    ("run", "cause", "evidence"),
    [
        ("healthy/chat-shared-gpu", "slow_rank", "its steps take 2.1 times their price"),
        ("healthy/open-shared-gpu", "slow_rank", "its steps take 2 times their price"),
        ("healthy/chat-stalls", "stall", "steps of up to 615 ms"),
        ("healthy/open-stalls", "stall", "steps of up to 608 ms"),
        ("healthy/open-one-core", "stall", "steps of up to 61 ms"),
    ],
)
def test_recorded_steps_show_what_was_made_to_happen(
    recorded_steps: dict[str, StepRun], run: str, cause: str, evidence: str
) -> None:
    first = diagnose_steps([recorded_steps[run]]).findings[0]
    assert first.cause == cause
    assert evidence in first.evidence


@pytest.mark.parametrize("run", ["chat", "chat-again", "open", "open-again", "many", "few", "long-prompts", "sampled"])
def test_recorded_steps_of_a_healthy_server_raise_no_alarm(recorded_steps: dict[str, StepRun], run: str) -> None:
    # Steps of 30 to 60 ms take 1 to 2% of their time.
    assert not diagnose_steps([recorded_steps[f"healthy/{run}"]]).findings
