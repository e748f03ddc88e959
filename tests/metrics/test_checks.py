"""Records that cannot be are found out: each check fails when its own quantity is tampered with, and only then."""

from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.metrics.checks import Checks, check_run
from windtunnel.metrics.records import Table
from windtunnel.metrics.tokens import range_max, rows_by_replica, with_token_times

BASE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "device": "h100_sxm",
    "input_tokens": 600,
    "output_tokens": 40,
}
RUNS: dict[str, dict[str, Any]] = {
    "open loop": {"rate_per_s": 20, "num_requests": 300, "replicas": 2},
    "closed loop": {"concurrency": 16, "num_requests": 100},
    "preempted": {"concurrency": 64, "num_requests": 200, "settings": {"deployment.engine.num_gpu_blocks": 600}},
    "SGLang": {"concurrency": 32, "num_requests": 200, "engine": "sglang"},
    "TensorRT-LLM": {"rate_per_s": 30, "num_requests": 200, "engine": "trtllm"},
    "pipeline": {"rate_per_s": 20, "num_requests": 200, "pp": 2},
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def result(request: pytest.FixtureRequest) -> wt.Result:
    return wt.simulate(wt.scenario(**BASE, **request.param))


def checked(result: wt.Result, requests: Table | None = None, steps: Table | None = None) -> Checks:
    requests, steps = requests or result.requests, steps or result.steps
    rows = rows_by_replica(requests, steps, result.scenario.deployment.replicas)
    return check_run(requests, steps, rows, result.setup.parallelism.pp)


def test_a_run_is_consistent(result: wt.Result) -> None:
    """Invariant 2, Invariant 4, Invariant 5 and Invariant 6."""
    checks = result.summary.checks
    assert checks is not None
    assert checks.passed
    assert checks == checked(result)
    assert checks.num_missing_tokens == 0


def test_a_request_that_finishes_before_its_first_token_is_found(result: wt.Result) -> None:
    finish_s = result.requests["finish_s"].copy()
    finish_s[5] = result.requests["first_token_s"][5] - 1e-3
    assert checked(result, result.requests.replaced(finish_s=finish_s)).num_out_of_order == 1


def test_a_lost_token_is_found(result: wt.Result) -> None:
    output_tokens = result.requests["output_tokens"].copy()
    output_tokens[7] += 1
    checks = checked(result, result.requests.replaced(output_tokens=output_tokens))
    assert checks.num_missing_tokens == 1
    assert not checks.passed


def test_counters_that_are_off_break_littles_law(result: wt.Result) -> None:
    checks = checked(result, steps=result.steps.replaced(num_running=result.steps["num_running"] + 1))
    assert checks.littles_law_error_fraction > 0.01
    assert not checks.passed


def test_a_pause_with_work_is_found(result: wt.Result) -> None:
    """Every step is half as long: half the time a replica with requests does nothing."""
    checks = checked(result, steps=result.steps.replaced(duration_s=result.steps["duration_s"] / 2))
    assert checks.idle_with_work_fraction > (0.1 if result.setup.parallelism.pp > 1 else 0.5)
    assert not checks.passed


def test_the_longest_gap_by_hand() -> None:
    """Two requests on one replica: tokens of the first at 1, 2, 5 and 6 s, of the second at 5 and 6 s."""
    steps = Table(
        {
            "start_s": np.array([0.0, 1.0, 2.0, 5.0]),
            "duration_s": np.array([1.0, 1.0, 3.0, 1.0]),
            "num_steps": np.array([1, 1, 1, 1]),
            "replica": np.array([0, 0, 0, 0]),
            "decode_tokens": np.array([0, 1, 1, 2]),
            "prefill_tokens": np.array([10, 0, 10, 0]),
        },
        {},
    )
    requests = Table(
        {
            "replica": np.array([0, 0]),
            "scheduled_s": np.array([0.0, 2.0]),
            "first_token_s": np.array([1.0, 5.0]),
            "finish_s": np.array([6.0, 6.0]),
            "output_tokens": np.array([4, 2]),
        },
        {},
    )
    result_checks = with_token_times(requests, steps, rows_by_replica(requests, steps, 1), num_stages=1)
    assert list(result_checks["itl_max_s"]) == [3.0, 1.0]
    assert list(result_checks["execution_s"]) == [6.0, 4.0]
    preempted = requests.replaced(output_tokens=np.array([3, 2]))
    result_checks = with_token_times(preempted, steps, rows_by_replica(requests, steps, 1), num_stages=1)
    assert np.isnan(result_checks["itl_max_s"][0])


def test_the_longest_gap_lies_between_the_mean_and_the_longest_of_all(result: wt.Result) -> None:
    longest, requests = result.requests["itl_max_s"], result.requests
    if result.setup.parallelism.pp > 1:
        assert np.isnan(longest).all()
        return
    known = ~np.isnan(longest)
    assert known.mean() > (0.5 if requests["num_preemptions"].any() else 0.999)
    assert np.all(longest[known] >= requests["tpot_s"][known] * (1 - 1e-9))
    in_steps = requests["execution_s"] / (requests["finish_s"] - requests["scheduled_s"])
    assert np.all(in_steps <= 1 + 1e-9)


def test_range_max_is_that_of_each_range() -> None:
    rng = np.random.default_rng(0)
    values = rng.random(300)
    begin = rng.integers(0, 300, 2000)
    end = np.minimum(begin + rng.integers(0, 200, 2000), 300)
    plain = [values[b:e].max() if e > b else -np.inf for b, e in zip(begin, end, strict=True)]
    assert list(range_max(values, begin, end)) == plain
