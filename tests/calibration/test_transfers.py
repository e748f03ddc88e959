"""What handing a KV cache over takes, learnt from runs that the simulator itself made with known values."""

import msgspec
import pytest

import windtunnel as wt
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.transfers import tells_of_transfers, with_transfers
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.deployment import LINK_EFFICIENCY, TRANSFER_LATENCY_S, Transfer
from windtunnel.serving.scenario import Scenario

LATENCY_S, EFFICIENCY = 0.02, 0.5
PROMPTS = (64, 256, 1024, 3000)
HELD = Calibration("vllm", Provenance("made up", 0, 0), device="h100_pcie")


def run_of(prompt: int, tp: int, transfer: Transfer, **changes: object) -> Measurement:
    """One that took what a simulation with `transfer` takes, and does not say so: a small model over a slow link."""
    scenario = wt.scenario(
        model="microsoft/Phi-3-mini-4k-instruct",
        device="h100_pcie",
        concurrency=2,
        num_requests=10,
        input_tokens=prompt,
        output_tokens=4,
        settings={
            "deployment.node": "pcie",
            "deployment.calibration": "none",
            "deployment.parallelism.tp": tp,
            "deployment.engine.window_kv": "full",  # the loop without windows compiles sooner
            "deployment.pools": [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}],
            "deployment.transfer.first_token": "decode",
            **changes,
        },
    )
    measured = wt.simulate(with_transfer(scenario, transfer)).summary.ttft_s.mean
    labels = {"engine": "vllm", "device": "h100_pcie", "parallelism": f"tp{tp}"}
    return Measurement(f"{prompt} on {tp}", scenario, "", {"ttft": measured}, labels)


def with_transfer(scenario: Scenario, transfer: Transfer) -> Scenario:
    own = msgspec.structs.replace(transfer, first_token="decode")
    return msgspec.structs.replace(scenario, deployment=msgspec.structs.replace(scenario.deployment, transfer=own))


@pytest.mark.full
def test_known_transfers_are_recovered() -> None:
    taken = Transfer(latency_s=LATENCY_S, link_efficiency=EFFICIENCY)
    runs = [run_of(prompt, tp, taken) for prompt in PROMPTS for tp in (1, 2, 4)]
    found = with_transfers({"vllm-h100_pcie": HELD}, runs, "made up")["vllm-h100_pcie"]
    assert found.transfer is not None
    assert found.transfer.latency_s == pytest.approx(LATENCY_S, rel=0.1)
    assert found.transfer.link_efficiency == pytest.approx(EFFICIENCY, rel=0.1)
    record = found.transfer.record
    assert (record.num_runs, record.num_configurations) == (12, 3)
    assert record.median_error < 0.03 < record.median_error_before
    assert msgspec.structs.replace(found, transfer=None) == HELD


@pytest.mark.full
def test_a_latency_of_a_hundred_times_the_default_is_found_where_steps_are_long() -> None:
    taken = Transfer(latency_s=100 * TRANSFER_LATENCY_S)
    long = {"workload.output_tokens": 32, "workload.arrivals.concurrency": 4}
    runs = [run_of(prompt, tp, taken, **long) for prompt in (64, 256) for tp in (1, 2, 4)]
    found = with_transfers({"vllm-h100_pcie": HELD}, runs, "made up")["vllm-h100_pcie"].transfer
    assert found is not None
    assert found.latency_s == pytest.approx(taken.latency_s, rel=0.25)


@pytest.mark.full
def test_runs_as_the_defaults_have_them_change_nothing() -> None:
    runs = [run_of(prompt, tp, Transfer()) for prompt in PROMPTS for tp in (1, 2)]
    assert with_transfers({"vllm-h100_pcie": HELD}, runs, "made up") == {"vllm-h100_pcie": HELD}
    assert with_transfers({}, runs, "made up") == {}


@pytest.mark.full
def test_where_transfers_are_negligible_nothing_is_learnt() -> None:
    """TTFT off by a fifth of seconds of prefill is no latency of a transfer known to a factor of five."""
    runs = [run_of(prompt, tp, Transfer()) for prompt in (1500, 2000) for tp in (1, 2)]
    slower = [Measurement(run.id, run.scenario, "", {"ttft": 1.2 * run.measured["ttft"]}, run.labels) for run in runs]
    found = with_transfers({"vllm-h100_pcie": HELD}, slower, "made up")["vllm-h100_pcie"].transfer
    assert found is None or found.latency_s < 10 * TRANSFER_LATENCY_S
    assert found is None or found.link_efficiency > LINK_EFFICIENCY / 1.3


@pytest.mark.full
def test_one_configuration_can_be_held_against_no_other() -> None:
    taken = Transfer(latency_s=LATENCY_S, link_efficiency=EFFICIENCY)
    assert with_transfers({}, [run_of(prompt, 1, taken) for prompt in PROMPTS], "made up") == {}


@pytest.mark.full
def test_without_aggregated_runs_a_calibration_holds_the_transfer_alone() -> None:
    taken = Transfer(latency_s=LATENCY_S, link_efficiency=EFFICIENCY)
    runs = [run_of(prompt, tp, taken) for prompt in PROMPTS for tp in (1, 2)]
    (found,) = with_transfers({}, runs, "made up").values()
    assert (found.engine, found.device) == ("vllm", "h100_pcie")
    assert found.transfer is not None


def test_only_runs_that_leave_their_transfers_open_tell_of_them() -> None:
    run = run_of(64, 1, Transfer())
    assert run.scenario is not None
    assert tells_of_transfers(run)
    for given in (Transfer(latency_s=0.0), Transfer(link_efficiency=0.5), Transfer(bytes_per_s=1e9)):
        assert not tells_of_transfers(Measurement("", with_transfer(run.scenario, given), "", run.measured, run.labels))
    assert not tells_of_transfers(Measurement("", run.scenario, "", {"tpot": 1.0}, {}))
    alone = msgspec.structs.replace(run.scenario.deployment, pools=())
    one_pool = msgspec.structs.replace(run.scenario, deployment=alone)
    assert not tells_of_transfers(Measurement("", one_pool, "", run.measured, {}))
