"""A server's metrics alone: a calibration with what was put into a twin, and its workload."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import windtunnel as wt
from live_twins import scenario_of, served
from windtunnel.calibration.steps.read import StepRun, run_without_steps
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.prometheus import record_of, scrape_text
from windtunnel.formats.telemetry.record import INTERVAL, Buckets, ServerRecord
from windtunnel.production.intervals import price_intervals, steps_of
from windtunnel.production.observe import observe_record
from windtunnel.production.workload import load_of, workload_of
from windtunnel.report.observation import observation_document, observation_report
from windtunnel.schema import save
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import resolve, scenario_from

BASE = {"model": "llama-3.1-8b", "device": "h100_sxm", "calibration": "none"}


def server() -> StepRun:
    return run_without_steps("metrics", {}, BASE)


def emitted(folder: Path, factor: float = 1.0, late_s: float = 0.0, **given: Any) -> ServerRecord:
    """Return the metrics, each second, of a twin whose GEMMs take `factor` times as long and steps `late_s` more."""
    host = resolve(scenario_of({"calibration": "none"})).engine.host
    host = msgspec.structs.replace(host, unhidden_step_s=(host.unhidden_step_s or 0.0) + late_s)
    factors = {"gemm.memory": factor, "gemm.compute": factor}
    made = Provenance(fitted_on="a test", num_runs=1, num_configurations=1)
    save(Calibration(engine="vllm", provenance=made, host=host, factors=factors), folder / "server.yaml")
    scenario = scenario_of({"calibration": str(folder / "server.yaml")}, rate_per_s=15.0, num_requests=800, **given)
    return record_of([scrape_text(text, np.nan) for text in served(scenario, every_s=1.0)[2]])


@pytest.mark.full
def test_slow_operators_are_learnt_from_metrics_alone(tmp_path: Path) -> None:
    observation = observe_record(server(), emitted(tmp_path, factor=1.3))
    assert "operators" in observation.learnt
    assert observation.calibration.factors["gemm.memory"] == pytest.approx(1.3, abs=0.07)
    assert observation.before["mixed"].median > 0.15
    assert observation.after["mixed"].median < 0.03


@pytest.mark.full
def test_steps_of_sglang_decode_nothing_beside_prompts() -> None:
    scenario = scenario_of({"calibration": "none", "engine": {"name": "sglang"}}, num_requests=250)
    record = record_of([scrape_text(text, np.nan) for text in served(scenario, every_s=1.0)[2]])
    run = run_without_steps("metrics", {}, {**BASE, "engine": "sglang"})
    priced = price_intervals(run, record, PricedDeployments().estimator)
    assert np.median(priced.errors) == pytest.approx(0, abs=0.03)
    mixed = price_intervals(run, replace(record, prompts_apart=False), PricedDeployments().estimator)
    assert np.median(mixed.errors) < -0.08


@pytest.mark.full
def test_late_steps_are_learnt_from_metrics_alone(tmp_path: Path) -> None:
    observation = observe_record(server(), emitted(tmp_path, late_s=3e-3))
    assert observation.before["mixed"].median > 0.2
    assert observation.after["mixed"].median < 0.05


@pytest.mark.full
def test_next_to_nothing_is_learnt_from_a_server_as_it_is_priced(tmp_path: Path) -> None:
    observation = observe_record(server(), emitted(tmp_path))
    assert all(factor == pytest.approx(1, abs=0.05) for factor in observation.calibration.factors.values())
    assert observation.after["mixed"].median < 0.02
    assert "unequal contexts" in observation.unidentified


@pytest.mark.full
def test_the_written_scenario_serves_as_the_server_did(tmp_path: Path) -> None:
    record = emitted(tmp_path, factor=1.3)
    observation = observe_record(server(), record)
    save(observation.calibration, tmp_path / "learnt.yaml")
    workload = workload_of(record, load_of(record))
    deployment = {"device": "h100_sxm", "calibration": str(tmp_path / "learnt.yaml")}
    raw = {"model": "llama-3.1-8b", "deployment": deployment, "workload": workload}
    summary = wt.simulate(scenario_from(raw)).summary
    measured_s = record.intervals["gaps_s"].sum() / record.intervals["gaps"].sum()
    assert summary.itl_s is not None
    assert summary.itl_s.mean == pytest.approx(measured_s, rel=0.05)


@pytest.mark.full
def test_the_load_is_reconstructed(tmp_path: Path) -> None:
    record = emitted(tmp_path)
    load = load_of(record)
    assert load.rate_per_s == pytest.approx(15, rel=0.1)
    assert load.gap_cv == pytest.approx(1, abs=0.3)
    assert load.input_tokens == pytest.approx(410, rel=0.1)
    assert load.output_tokens == pytest.approx(80, rel=0.1)
    workload = workload_of(record, load)
    assert workload is not None
    assert workload["arrivals"]["type"] == "poisson"
    document = observation_document(observe_record(server(), record))
    assert document["intervals"]["learnt_from"] >= 8
    assert document["load"]["num_requests"] == load.num_requests
    assert observation_report(observe_record(server(), record)).sections[-1].title == "The load"


def test_a_load_that_never_changes_is_that_of_clients() -> None:
    rows = np.zeros(30, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["running"], rows["prompts"] = np.arange(30), 1.0, 12.0, 3.0
    rows["prompt_tokens"], rows["cached_tokens"] = 300.0, 150.0
    lengths = {
        name: Buckets((50.0, 100.0, 200.0), (0.0, 90.0, 0.0), 90.0) for name in ("input_tokens", "output_tokens")
    }
    record = ServerRecord("metrics", rows, lengths=lengths)
    workload = workload_of(record, load_of(record))
    assert workload is not None
    assert workload["arrivals"] == {"type": "closed_loop", "concurrency": 12}
    assert workload["shared_prompts"] == {"tokens": 45}
    assert np.average(workload["input_tokens"]["values"], weights=workload["input_tokens"]["weights"]) < 50


def test_bursts_are_gamma_gaps() -> None:
    rows = np.zeros(40, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["running"] = np.arange(40), 1.0, np.arange(40)
    rows["prompts"] = np.where(np.arange(40) % 10 == 0, 40.0, 0.0)
    load = load_of(ServerRecord("metrics", rows))
    assert load.gap_cv > 4


def test_steps_with_prompts_follow_from_the_histogram_of_a_steps_tokens() -> None:
    rows = np.zeros(1, INTERVAL)
    rows["duration_s"], rows["gaps"], rows["gaps_s"], rows["steps"] = 1.0, 1000.0, 10.0, 100.0
    rows["prompts"], rows["prompt_tokens"], rows["context_tokens"] = 12.0, 12 * 700.0, 500.0
    bounds = np.array([8.0, 16.0, 512.0, 1024.0, np.inf])
    counts = np.array([[0.0, 88.0, 0.0, 12.0, 0.0]])
    taken = steps_of(ServerRecord("metrics", rows, step_tokens=(bounds, counts)), 8192)
    assert taken.share.tolist() == pytest.approx([0.88, 0.12])
    assert taken.steps["prefill_tokens"].tolist() == [0, 700]
    assert taken.steps["decode_requests"].tolist() == [10, 10]
    # Without it, prompts meet at random: 100 (1 - exp(-12 / 100)) steps have one.
    alone = steps_of(ServerRecord("metrics", rows), 8192)
    assert alone.share[1] == pytest.approx(1 - np.exp(-0.12))


def test_more_requests_than_the_described_limit_are_priced() -> None:
    rows = np.zeros(30, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["context_tokens"] = np.arange(30), 1.0, 500.0
    rows["gaps"], rows["gaps_s"], rows["steps"] = 4000 * 20.0, 4000.0, 20.0
    rows["prompts"], rows["prompt_tokens"] = 100.0, 1e6
    observation = observe_record(server(), ServerRecord("metrics", rows))
    assert observation.num_judged == 15


@pytest.mark.full
def test_operators_behind_the_launches_of_a_host_are_not_learnt_from_metrics() -> None:
    rows = np.zeros(60, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["context_tokens"] = np.arange(60), 1.0, 500.0
    rows["gaps"], rows["gaps_s"], rows["steps"] = 400.0, 8.0, 50.0
    record, given = ServerRecord("metrics", rows), {**BASE, "model": "llama-3.2-1b"}
    base = {"deployment": {"engine": {"name": "vllm", "max_cudagraph_capture_size": 0}}}
    eager, graphs = (observe_record(run_without_steps("metrics", each, given), record) for each in (base, {}))
    assert {"GEMM", "attention decode"} <= set(eager.unidentified)
    assert not eager.calibration.factors
    assert "GEMM" not in graphs.unidentified


def test_nothing_is_learnt_from_scatter_of_a_few_intervals() -> None:
    # Gauges of a log are those of a moment: with few requests, times between tokens scatter by a third.
    rows = np.zeros(36, INTERVAL)
    rows["start_s"], rows["duration_s"], rows["context_tokens"] = np.arange(36), 1.0, 500.0
    rows["gaps"], rows["steps"] = 1000.0, np.nan
    rows["gaps_s"] = 7.6 * np.exp(0.3 * np.random.default_rng(13).standard_normal(36))
    assert observe_record(server(), ServerRecord("metrics", rows)).learnt == "nothing"


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"engine": "sglang"}, "metrics is of sglang, and the engine of the described server is vllm"),
        ({"model": "Qwen/Qwen3-8B"}, "metrics has requests to Qwen/Qwen3-8B, and"),
    ],
)
def test_what_another_server_emitted_is_refused(known: dict[str, str], message: str) -> None:
    rows = np.zeros(60, INTERVAL)
    with pytest.raises(InputError, match=message):
        observe_record(server(), ServerRecord("metrics", rows, **known))  # type: ignore[arg-type]


def test_an_idle_server_is_refused() -> None:
    with pytest.raises(InputError, match="no interval has 10 tokens behind others"):
        observe_record(server(), ServerRecord("metrics", np.zeros(30, INTERVAL)))
