"""Routers over replicas: who gets what, and that looking at the load pays."""

import numpy as np
import pytest

from serving.pool_of_one import run_pool
from windtunnel.serving.codes import ROUTERS
from windtunnel.serving.state.records import KernelSettings, StepCost
from windtunnel.workload.generate.requests import RequestArrays

NUM_REPLICAS = 8
STEP_S = 0.01


def settings(router: str, seed: int = 0) -> KernelSettings:
    return KernelSettings(
        scheduler=0,
        num_replicas=NUM_REPLICAS,
        ranks_per_replica=1,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        block_size=16,
        num_blocks=64,
        router=ROUTERS.index(router),
        seed=seed,
    )


def constant_cost() -> StepCost:
    ends = np.array([0.0, 1.0])
    steps = np.full(128, STEP_S)
    return StepCost(
        steps, steps, np.zeros(128), ends, np.zeros((128, 2)), ends, ends, np.zeros((2, 2)), 0.0, 0.0, 0, ends[:0]
    )


def asked(num_requests: int, load: float) -> RequestArrays:
    """Requests of 1 to 39 steps, 20 in the mean, that keep every replica busy for `load` of the time."""
    rng = np.random.default_rng(1)
    outputs = rng.integers(1, 40, num_requests)
    gap_s = outputs.mean() * STEP_S / NUM_REPLICAS / load
    arrivals = np.cumsum(rng.exponential(gap_s, num_requests))
    return RequestArrays(arrivals, np.full(num_requests, 8), outputs, np.zeros(num_requests, np.int64))


def served(router: str, num_requests: int = 4000, load: float = 0.8, seed: int = 0) -> np.ndarray:
    """Their records."""
    records, _ = run_pool(settings(router, seed), constant_cost(), asked(num_requests, load))
    return records


def mean_wait_s(router: str) -> float:
    records = served(router)
    return float((records["scheduled_s"] - records["arrival_s"]).mean())


def test_round_robin_goes_in_turn() -> None:
    np.testing.assert_array_equal(served("round_robin", 100)["rank"], np.arange(100) % NUM_REPLICAS)


@pytest.mark.compiled
def test_random_is_uniform_and_follows_its_seed() -> None:
    counts = np.bincount(served("random")["rank"], minlength=NUM_REPLICAS)
    expected = counts.sum() / NUM_REPLICAS
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-squared with 7 degrees of freedom, 99.9%
    first, same, other = (served("random", 50, seed=seed)["rank"] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.compiled
def test_looking_at_the_load_shortens_the_queue() -> None:
    """Mitzenmacher (2001): two choices are far better than one, and all of them better still."""
    blind, two, every = (mean_wait_s(router) for router in ("random", "power_of_two", "least_outstanding"))
    assert every < two < 0.5 * blind


@pytest.mark.parametrize("router", ["least_outstanding", "least_kv"])
def test_an_idle_replica_is_taken_first(router: str) -> None:
    arrays = RequestArrays(
        np.arange(NUM_REPLICAS) * 1e-4,
        np.full(NUM_REPLICAS, 8),
        np.full(NUM_REPLICAS, 30),
        np.zeros(NUM_REPLICAS, np.int64),
    )
    records, _ = run_pool(settings(router), constant_cost(), arrays)
    np.testing.assert_array_equal(records["rank"], np.arange(NUM_REPLICAS))


def test_a_row_of_steps_goes_on_past_other_replicas_arrivals() -> None:
    requests = asked(400, 0.2)
    records, steps = run_pool(settings("least_outstanding"), constant_cost(), requests)
    assert (records["scheduled_s"] == records["arrival_s"]).all()  # so that nothing but its own end ends a row
    assert steps["num_steps"].sum() == requests.output_tokens.sum()
    assert len(steps) == 400 + (requests.output_tokens > 1).sum()
