"""The loop against closed forms of queueing theory; every step takes the same time, so that a server is all there is.

With one sequence at a time a request of k output tokens is a service of k steps (its prompt fits the first). Formulas
are in L. Kleinrock, Queueing Systems: Little's result in chapter 2 and the mean wait of M/G/1 (Pollaczek and Khinchine)
in chapter 5 of volume 1 (1975), priorities without preemption (Cobham) in chapter 3 of volume 2 (1976).
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.pool_of_one import run_pool
from windtunnel.metrics.records import Table
from windtunnel.serving.codes import SCHEDULERS
from windtunnel.serving.state.records import KernelSettings, StepCost
from windtunnel.workload.generate.requests import RequestArrays

pytestmark = pytest.mark.compiled  # thousands of requests

STEP_S = 0.01
ONE_AT_A_TIME = KernelSettings(
    scheduler=0,
    num_replicas=1,
    ranks_per_replica=1,
    max_num_seqs=1,
    max_num_batched_tokens=64,
    max_prefill_tokens=64,
    block_size=16,
    num_blocks=100_000,
)


def cost(settings: KernelSettings, step_s: float = STEP_S) -> StepCost:
    requests, tokens = settings.max_num_seqs + 1, settings.max_num_batched_tokens + settings.max_num_seqs + 1
    ends, nothing = np.array([0.0, 1.0]), np.zeros((2, 2))
    return StepCost(
        decode_token_s=np.full(requests, step_s),
        mixed_token_s=np.full(tokens, step_s),
        sample_s=np.zeros(requests),
        context_nodes=ends,
        decode_attention_s=np.zeros((requests, 2)),
        chunk_nodes=ends,
        length_nodes=ends,
        prefill_attention_s=nothing,
        host_step_s=0.0,
        host_request_s=0.0,
        host_overlaps=0,
        recorded_step_s=np.zeros(0),
    )


def serve(
    arrival_s: NDArray[np.float64],
    output_tokens: Any = 1,
    input_tokens: Any = 1,
    priority: Any = 0,
    by_priority: bool = False,
    **settings: Any,
) -> tuple[NDArray[Any], Table]:
    n = arrival_s.size
    chosen = ONE_AT_A_TIME._replace(queue_order=int(by_priority), **settings)
    arrays = RequestArrays(
        arrival_s,
        np.broadcast_to(np.asarray(input_tokens, np.int64), n),
        np.broadcast_to(np.asarray(output_tokens, np.int64), n),
        np.broadcast_to(np.asarray(priority, np.int64), n),
        concurrency=chosen.concurrency,
        num_warmup=chosen.num_warmup,
    )
    records, steps = run_pool(chosen, cost(chosen), arrays)
    return records, steps


def poisson(rate_per_s: float, n: int, seed: int = 0) -> NDArray[np.float64]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, n))


@pytest.mark.full
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("scheduler", range(len(SCHEDULERS)), ids=SCHEDULERS)
def test_deterministic_service_waits_as_m_d_1(load: float, scheduler: int) -> None:
    """Mean wait rho D / 2 (1 - rho); 400,000 requests leave a standard error of about 1% at rho = 0.8."""
    records, _ = serve(poisson(load / STEP_S, 400_000), scheduler=scheduler)
    wait_s = (records["scheduled_s"] - records["arrival_s"]).mean()
    assert wait_s == pytest.approx(load * STEP_S / (2 * (1 - load)), rel=0.03)


@pytest.mark.full
def test_random_service_waits_by_pollaczek_and_khinchine() -> None:
    """M/G/1 with geometric service: lambda E[S^2] / 2 (1 - rho), twice the wait of constant service and more."""
    tokens = np.random.default_rng(1).geometric(1 / 8, 400_000)
    rate_per_s = 0.7 / (8 * STEP_S)
    records, _ = serve(poisson(rate_per_s, 400_000), output_tokens=tokens)
    second_moment = (tokens.astype(float) ** 2).mean() * STEP_S**2
    load = rate_per_s * tokens.mean() * STEP_S
    wait_s = (records["scheduled_s"] - records["arrival_s"]).mean()
    assert wait_s == pytest.approx(rate_per_s * second_moment / (2 * (1 - load)), rel=0.04)


@pytest.mark.full
def test_priorities_wait_as_cobham_says() -> None:
    """Two classes without preemption: W0 / (1 - rho1) and W0 / (1 - rho1) (1 - rho), W0 = rho D / 2."""
    low = np.random.default_rng(2).random(400_000) < 0.5
    records, _ = serve(poisson(0.8 / STEP_S, 400_000), priority=low, by_priority=True)
    wait_s = records["scheduled_s"] - records["arrival_s"]
    residual_s = 0.8 * STEP_S / 2
    assert wait_s[~low].mean() == pytest.approx(residual_s / (1 - 0.4), rel=0.03)
    assert wait_s[low].mean() == pytest.approx(residual_s / (1 - 0.4) / (1 - 0.8), rel=0.05)


def test_nothing_waits_where_the_server_is_always_free() -> None:
    """D/D/1 below capacity: every request is served at once; above it the queue grows by a constant."""
    records, _ = serve(np.arange(1000.0) * 2 * STEP_S)
    np.testing.assert_allclose(records["finish_s"] - records["arrival_s"], STEP_S)
    records, _ = serve(np.arange(1000.0) * STEP_S / 2)
    np.testing.assert_allclose(records["scheduled_s"] - records["arrival_s"], np.arange(1000) * STEP_S / 2, atol=1e-9)


def test_first_come_first_served() -> None:
    records, _ = serve(poisson(90, 5000), output_tokens=np.random.default_rng(3).integers(1, 4, 5000), max_num_seqs=4)
    assert (np.diff(records["scheduled_s"]) >= 0).all()


@pytest.mark.parametrize("scheduler", range(len(SCHEDULERS)), ids=SCHEDULERS)
def test_the_server_never_idles_while_there_is_work(scheduler: int) -> None:
    """Invariant 5."""
    tokens = np.random.default_rng(4).integers(1, 9, 3000)
    records, steps = serve(poisson(60, 3000), output_tokens=tokens, max_num_seqs=4, scheduler=scheduler)
    starts, ends = steps["start_s"], steps["start_s"] + steps["duration_s"]
    idle = np.flatnonzero(starts[1:] > ends[:-1] + 1e-12)
    assert idle.size > 0
    for row in idle:
        assert not ((records["arrival_s"] <= ends[row]) & (records["finish_s"] > ends[row] + 1e-12)).any()
        assert np.isclose(records["arrival_s"], starts[row + 1]).any()


@pytest.mark.parametrize("scheduler", range(len(SCHEDULERS)), ids=SCHEDULERS)
def test_littles_law(scheduler: int) -> None:
    """Invariant 6. Requests admitted, summed over time, equal times spent admitted, summed over requests."""
    tokens = np.random.default_rng(5).integers(1, 50, 2000)
    records, steps = serve(poisson(40, 2000), output_tokens=tokens, max_num_seqs=16, scheduler=scheduler)
    assert records["num_preemptions"].sum() == 0
    admitted_s = (records["finish_s"] - records["scheduled_s"]).sum()
    assert (steps["num_running"] * steps["duration_s"]).sum() == pytest.approx(admitted_s)


def test_one_client_waits_for_each_answer() -> None:
    tokens = np.arange(1, 101)
    records, steps = serve(np.zeros(100), output_tokens=tokens, concurrency=1, max_num_seqs=8)
    e2e_s = records["finish_s"] - records["arrival_s"]
    np.testing.assert_allclose(e2e_s, tokens * STEP_S)
    np.testing.assert_allclose(records["arrival_s"][1:], records["finish_s"][:-1])
    assert steps["duration_s"].sum() == pytest.approx(e2e_s.sum())


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_throughput_saturates_at_a_token_per_client_and_step(clients: int) -> None:
    records, steps = serve(np.zeros(64 * clients), output_tokens=20, concurrency=clients, max_num_seqs=64)
    span_s = steps["start_s"][-1] + steps["duration_s"][-1]
    assert records.size * 20 / span_s == pytest.approx(clients / STEP_S)
    # Little's law of a closed loop: so many requests in flight, all the time.
    assert (records["finish_s"] - records["arrival_s"]).sum() / span_s == pytest.approx(clients)


def test_a_warm_up_drains_before_the_rest_is_sent() -> None:
    records, _ = serve(np.zeros(50), output_tokens=np.arange(1, 51), concurrency=4, num_warmup=10, max_num_seqs=8)
    assert records["arrival_s"][10:].min() == records["finish_s"][:10].max()


def test_replicas_take_turns() -> None:
    records, steps = serve(poisson(100, 1001), output_tokens=3, num_replicas=4, max_num_seqs=8)
    counts = np.bincount(records["rank"], minlength=4)
    assert counts.tolist() == [251, 250, 250, 250]
    np.testing.assert_array_equal(records["rank"], np.arange(1001) % 4)
    assert set(steps["replica"].tolist()) == {0, 1, 2, 3}


def test_replicas_are_servers_of_their_own() -> None:
    """Round robin gives each replica every second request of the stream, as if it were alone with them."""
    arrival_s = poisson(150, 2000)
    records, _ = serve(arrival_s, num_replicas=2)
    for replica in (0, 1):
        alone, _ = serve(arrival_s[replica::2])
        np.testing.assert_array_equal(records["finish_s"][replica::2], alone["finish_s"])


@pytest.mark.parametrize("scheduler", range(len(SCHEDULERS)), ids=SCHEDULERS)
def test_a_prompt_takes_its_length_in_budgets(scheduler: int) -> None:
    lengths = np.array([1, 63, 64, 65, 128, 129, 1000])
    budgets: dict[str, Any] = {"max_num_batched_tokens": 64, "max_prefill_tokens": 4096}
    records, _ = serve(10.0 * np.arange(7.0), input_tokens=lengths, scheduler=scheduler, **budgets)
    np.testing.assert_allclose(records["first_token_s"] - records["arrival_s"], np.ceil(lengths / 64) * STEP_S)


def test_ranks_of_a_replica_step_together() -> None:
    """Attention data parallelism: twice the requests at once, one step for all."""
    one, _ = serve(np.zeros(32), output_tokens=10, max_num_seqs=16)
    two, steps = serve(np.zeros(32), output_tokens=10, max_num_seqs=16, ranks_per_replica=2)
    assert one["finish_s"].max() == pytest.approx(20 * STEP_S)
    assert two["finish_s"].max() == pytest.approx(10 * STEP_S)
    assert np.bincount(two["rank"]).tolist() == [16, 16]
    assert steps["decode_tokens"].max() == 32
