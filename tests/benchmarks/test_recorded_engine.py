"""Parity with a real vLLM V1 engine (CPU build): the same batches, and latencies from a model of one run."""

from pathlib import Path

import numpy as np
import pytest

from readers.engine_run import EngineRun, read_engine_runs
from recorded import entries
from serving.pool_of_one import run_pool
from step_model import fit_step_model, lower_step_model
from windtunnel.metrics.records import Table
from windtunnel.serving.state.records import KernelSettings, StepCost, played_back
from windtunnel.workload.generate.requests import RequestArrays

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 32, 512
"""As the engine was started."""


def settings() -> KernelSettings:
    return KernelSettings(
        scheduler=0,
        num_replicas=1,
        ranks_per_replica=1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_prefill_tokens=MAX_NUM_BATCHED_TOKENS,
        block_size=16,
        num_blocks=4096,
    )


def simulate(run: EngineRun, cost: StepCost) -> tuple[np.ndarray, Table]:
    arrays = RequestArrays(run.arrival_s, run.input_tokens, run.output_tokens, np.zeros(run.arrival_s.size, np.int64))
    records, steps = run_pool(settings(), cost, arrays)
    return records, steps


RECORDED = entries("engine_runs/*.json.gz")


@pytest.mark.parametrize("file", RECORDED)
def test_batches_equal_the_engine_step_for_step(reference: Path, file: str) -> None:
    for run in read_engine_runs(reference / "engine_runs" / file):
        _, steps = simulate(run, played_back(run.duration_s, MAX_NUM_SEQS))
        np.testing.assert_array_equal(steps["num_steps"], 1)
        np.testing.assert_array_equal(steps["decode_tokens"], run.batches.decode_requests)
        np.testing.assert_array_equal(steps["prefill_tokens"], run.batches.prefill_tokens)
        np.testing.assert_array_equal(steps["prefill_pairs"], run.batches.prefill_pairs)
        np.testing.assert_array_equal(
            steps["context_tokens"], run.batches.decode_context_tokens - run.batches.decode_requests
        )


@pytest.mark.parametrize("file", RECORDED)
def test_token_times_equal_the_engines(reference: Path, file: str) -> None:
    for run in read_engine_runs(reference / "engine_runs" / file):
        records, _ = simulate(run, played_back(run.duration_s, MAX_NUM_SEQS))
        np.testing.assert_allclose(records["first_token_s"], run.first_token_s, rtol=0, atol=1e-6)
        np.testing.assert_allclose(records["finish_s"], run.finish_s, rtol=0, atol=1e-6)


@pytest.mark.parametrize("file", RECORDED)
def test_latencies_from_a_model_of_one_run(reference: Path, file: str) -> None:
    runs = read_engine_runs(reference / "engine_runs" / file)
    # The busiest run without disturbance shows the widest range of batches. Repeats of one seed differ by 11% in TTFT.
    fitted = max(runs, key=lambda run: (run.cpu_pressure < 0.1, run.rate_per_s))
    others = [run for run in runs if run is not fitted]
    batches = fitted.batches
    model = fit_step_model(
        batches.decode_requests,
        batches.decode_context_tokens,
        batches.prefill_tokens,
        batches.prefill_pairs,
        fitted.duration_s,
    )
    cost = lower_step_model(model, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    for run in others:
        records, _ = simulate(run, cost)
        ttft_s = (records["first_token_s"] - records["arrival_s"]).mean()
        e2e_s = (records["finish_s"] - records["arrival_s"]).mean()
        itl_s = (records["finish_s"] - records["first_token_s"]).sum() / (records["output_tokens"] - 1).sum()
        assert ttft_s == pytest.approx(run.ttft_s.mean(), rel=0.10)
        assert itl_s == pytest.approx(run.gaps_s.mean(), rel=0.10)
        assert e2e_s == pytest.approx(run.e2e_s.mean(), rel=0.10)
