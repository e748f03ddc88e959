"""What two predictions owe each other, whatever the scenario: more of a thing is never less of its consequence.

And what one owes itself: requests, tokens and energy are conserved, and equal seeds give equal bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from fuzz.nonsense import nonsense
from windtunnel.errors import InputError
from windtunnel.report.serving.run import run_document
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.scenario import resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import plan_memory

pytestmark = pytest.mark.interpreted

ALMOST = 0.98
"""A measured table is not smooth: two neighbouring shapes may be 2% out of order."""

DEPLOYMENTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.1-8b", "Qwen/Qwen3-30B-A3B", "qwen2.5-0.5b"]),
        "device": st.sampled_from(["h100_sxm", "h200_sxm", "b200_sxm"]),
        "engine": st.sampled_from(["vllm", "sglang", "trtllm"]),
        "tp": st.sampled_from([1, 2]),
    }
)
UNMEASURED = ("mi300x", "mi355x", "gaudi3")
"""Devices priced by the roofline."""
LENGTHS = st.fixed_dictionaries({"input_tokens": st.integers(8, 300), "output_tokens": st.integers(2, 5)})


def served(**fields: Any) -> Any:
    return wt.simulate(wt.scenario(**{"num_requests": 6, **fields}))


@pytest.mark.full
@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, LENGTHS, st.sampled_from([20.0, 300.0, 5000.0]))
def test_company_is_never_faster_than_being_alone(deployment: Any, lengths: Any, rate_per_s: float) -> None:
    """Between two loads a mean may fall: prompts that arrive together are computed together."""
    alone, loaded = (served(**deployment, **lengths, rate_per_s=rate) for rate in (0.01, rate_per_s))
    for name in ("ttft_s", "e2e_s"):
        assert getattr(loaded.summary, name).mean >= ALMOST * getattr(alone.summary, name).mean
    assert loaded.summary.span_s <= alone.summary.span_s
    for result in (alone, loaded):
        assert list(nonsense(run_document(result))) == []


@pytest.mark.full
@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, LENGTHS, st.sampled_from([2, 3, 10]))
def test_a_longer_request_is_never_cheaper(deployment: Any, lengths: Any, factor: int) -> None:
    longer = [{**lengths, name: factor * lengths[name]} for name in lengths]
    one = served(**deployment, **lengths, concurrency=1, num_requests=1)
    for each in longer:
        more = served(**deployment, **each, concurrency=1, num_requests=1)
        assert more.summary.e2e_s.mean >= ALMOST * one.summary.e2e_s.mean
        assert more.summary.ttft_s.mean >= ALMOST * one.summary.ttft_s.mean


@pytest.mark.full
@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, st.integers(1, 2000), st.integers(1, 64), st.sampled_from([2, 4]))
def test_a_larger_step_is_never_cheaper(deployment: Any, context: int, batch: int, factor: int) -> None:
    setup = resolve(wt.scenario(**deployment, input_tokens=8000, output_tokens=100, rate_per_s=1.0))
    step_s = explain_step(setup, step_batch(batch, context)).step_s
    assert explain_step(setup, step_batch(batch, factor * context)).step_s >= ALMOST * step_s
    assert explain_step(setup, step_batch(factor * batch, context)).step_s >= ALMOST * step_s
    prefill_s = explain_step(setup, step_batch(prefill_tokens=context)).step_s
    assert explain_step(setup, step_batch(prefill_tokens=factor * context)).step_s >= ALMOST * prefill_s


@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, st.sampled_from(UNMEASURED), st.integers(1, 2000), st.integers(1, 64), st.sampled_from([2, 4]))
def test_a_larger_step_is_never_cheaper_without_tables(
    deployment: Any, device: str, context: int, batch: int, factor: int
) -> None:
    """Without the allowance for measured kernels, some of which are faster for more tokens (docs/decisions.md)."""
    fields = {**deployment, "device": device, "engine": "vllm"}
    setup = resolve(wt.scenario(**fields, input_tokens=8000, output_tokens=100, rate_per_s=1.0))
    step_s = explain_step(setup, step_batch(batch, context)).step_s
    assert explain_step(setup, step_batch(factor * batch, context)).step_s >= step_s


@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, st.floats(0.5, 0.9), st.floats(0.01, 0.09))
def test_more_memory_never_holds_less(deployment: Any, share: float, more: float) -> None:
    tokens = []
    for utilization in (share, share + more):
        load = {"input_tokens": 100, "output_tokens": 10, "rate_per_s": 1.0}
        setup = resolve(wt.scenario(**deployment, **load, gpu_memory_utilization=utilization))
        try:
            plan = plan_memory(shard_of(setup), setup.device, setup.engine, setup.max_model_len)
        except InputError:
            tokens.append(0)
        else:
            tokens.append(plan.kv_tokens)
    assert tokens[0] <= tokens[1]


@pytest.mark.full
@settings(max_examples=cases_to_try(15))
@given(DEPLOYMENTS, LENGTHS, st.sampled_from([5.0, 200.0]), st.integers(1, 3))
def test_requests_tokens_and_energy_are_conserved(deployment: Any, lengths: Any, rate: float, replicas: int) -> None:
    result = served(**deployment, **lengths, rate_per_s=rate, replicas=replicas)
    summary, requests, steps = result.summary, result.requests, result.steps
    assert summary.num_requests == len(requests) == 6
    assert requests["output_tokens"].sum() == 6 * lengths["output_tokens"]
    assert summary.throughput.output_tokens_per_s * summary.span_s == pytest.approx(6 * lengths["output_tokens"])
    assert summary.checks is not None
    assert summary.checks.passed
    assert steps["used_blocks"].max() <= result.memory.num_blocks * replicas
    assert np.isfinite(steps["duration_s"]).all()
    if summary.power is not None:
        assert summary.power.energy_j == pytest.approx(summary.power.mean_w * summary.span_s)
        devices, limit_w = summary.num_devices, result.setup.device.tdp_w
        assert 0 < summary.power.mean_w <= devices * (limit_w or np.inf) * 1.001


SPACE = {
    "model": "qwen2.5-0.5b",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 4.0},
        "input_tokens": {"type": "uniform", "min_tokens": 5, "max_tokens": 60},
        "output_tokens": {"type": "uniform", "min_tokens": 1, "max_tokens": 4},
        "num_requests": 6,
    },
    "vary": {"tp": [1, 2], "max_num_seqs": [2, 4]},
    "load": "given",
    "finalist_seeds": 2,
}


def printed(folder: Path, hash_seed: str, *words: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "windtunnel", *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.full
def test_equal_seeds_give_equal_bytes_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    (tmp_path / "run.json").write_text(json.dumps({name: SPACE[name] for name in ("model", "deployment", "workload")}))
    runs = [printed(tmp_path, seed, "simulate", "run.json", "--json", "--out", seed) for seed in ("1", "22")]
    assert runs[0] == runs[1]
    for name in ("requests.parquet", "steps.parquet", "summary.json", "scenario.yaml"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "22" / name).read_bytes()
    search = ("search", "space.json", "--no-store", "--json", "--executor")
    here = printed(tmp_path, "3", *search, "here")
    assert printed(tmp_path, "44", *search, "processes", "--workers", "2") == here
