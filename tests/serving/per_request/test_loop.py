"""The per-request loop against its plain-Python oracle, and what must hold for any scheduler."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from oracles.serving.deployment import ReferenceDeployment
from oracles.serving.per_request import Policy as ReferencePolicy
from oracles.serving.per_request import Replica
from oracles.serving.state import Request, Step
from serving.loop.test_oracle import random_cost
from serving.served import assert_equal_requests, assert_equal_steps, oracle_requests
from windtunnel.errors import InputError
from windtunnel.metrics.records import STEP_COLUMNS
from windtunnel.serving import codes
from windtunnel.serving.custom import time_limit
from windtunnel.serving.custom.policy import Policy, PolicyEngine, PolicyRequests, load_function
from windtunnel.serving.engines.defaults import OWN_SCHEDULERS
from windtunnel.serving.run import Custom, LoopRun, prepare_loop
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.requests import RequestArrays

SCHEDULERS = (codes.VLLM_V0, codes.SARATHI, codes.ORCA, codes.FASTER_TRANSFORMER, codes.LIGHTLLM)
ROUTERS = ("round_robin", "random", "power_of_two", "least_outstanding", "least_kv", "least_waiting")


@dataclass(frozen=True)
class Case:
    settings: state.KernelSettings
    cost: state.StepCost
    arrival_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray

    @property
    def requests(self) -> RequestArrays:
        return RequestArrays(
            self.arrival_s,
            self.input_tokens,
            self.output_tokens,
            np.zeros(self.arrival_s.size, np.int64),
            self.settings.concurrency,
            self.settings.num_warmup,
        )

    @property
    def plan(self) -> PoolPlan:
        return PoolPlan(self.settings, self.cost)

    def run(self, keeps_trail: bool = False, policy: Policy | None = None) -> LoopRun:
        loop = prepare_loop([self.plan], self.requests)
        return loop.run(Custom(None, [policy]), keeps_trail=keeps_trail)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 30))
    scheduler = draw(st.sampled_from(SCHEDULERS))
    inputs = np.array(draw(st.lists(st.integers(1, 60), min_size=n, max_size=n)))
    outputs = np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)))
    block_size = 1 if scheduler == codes.LIGHTLLM else draw(st.sampled_from([1, 2, 4, 16]))
    largest = int(-(-(inputs + outputs).max() // block_size))
    watermark = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stages = draw(st.sampled_from([1, 1, 2, 4])) if scheduler != codes.LIGHTLLM else 1
    most = draw(st.integers(1, 12))
    concurrency = draw(st.sampled_from([0, 1, 3, 8]))
    chunk = draw(st.integers(2, 80)) if scheduler == codes.SARATHI else 100
    gap_s = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    return Case(
        settings=state.KernelSettings(
            scheduler=scheduler,
            num_replicas=draw(st.integers(1, 3)),
            ranks_per_replica=1,
            num_stages=stages,
            max_num_seqs=most,
            max_num_batched_tokens=chunk,
            block_size=block_size,
            num_blocks=largest + watermark + 1 + draw(st.integers(0, 3 * largest)),
            concurrency=concurrency,
            num_warmup=min(n, draw(st.integers(0, 5))) if concurrency else 0,
            frontend_s=draw(st.sampled_from([0.0, 0.004])),
            router=codes.ROUTERS.index(draw(st.sampled_from(ROUTERS))),
            seed=draw(st.integers(0, 2**32)),
            max_batch_seqs=max(most // stages, 1),
            watermark_blocks=watermark,
            reserved_blocks=largest if scheduler in (codes.ORCA, codes.FASTER_TRANSFORMER) else 0,
            max_waiting_steps=draw(st.integers(0, 10)),
            loses_prompts=draw(st.sampled_from([0, 0, 1])),
            fuses_steps=draw(st.sampled_from([0, 1, 1])),
        ),
        cost=random_cost(rng, most, most * 60 + 100, draw(st.booleans())),
        arrival_s=np.cumsum(rng.exponential(gap_s, n)) if gap_s else np.zeros(n),
        input_tokens=inputs,
        output_tokens=outputs,
    )


def run_oracle(case: Case, policy: ReferencePolicy | None = None) -> tuple[ReferenceDeployment, list[Step]]:
    oracle = ReferenceDeployment([case.plan], oracle_requests(case.requests), policies=[policy])
    return oracle, oracle.run()


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_loop_equals_the_oracle(case: Case) -> None:
    run = case.run(keeps_trail=True)
    oracle, steps = run_oracle(case)
    assert_equal_requests(run.requests, oracle.requests)
    assert_equal_steps(run.steps, oracle, steps)
    if not case.settings.fuses_steps:
        assert run.trail is not None
        np.testing.assert_array_equal(
            run.trail.members[:, 1:], [part for step in steps for part in step.scheduled.items()]
        )


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_a_decode_group_counts_as_if_each_member_were_stepped(case: Case) -> None:
    """A trail names every request of every batch, so a run that keeps one has no decode groups."""
    counted = case.run()
    run = case.run(keeps_trail=True)
    for column in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions", "rank", "sequence"):
        np.testing.assert_array_equal(counted.requests[column], run.requests[column])
    for column in STEP_COLUMNS:
        if column != "late_gap_s":
            np.testing.assert_array_equal(counted.steps[column], run.steps[column])
    # Sums of differences in another order.
    np.testing.assert_allclose(counted.steps["late_gap_s"], run.steps["late_gap_s"], rtol=1e-9, atol=1e-12)
    for column in ("num_blocks", "processed_tokens", "prompt_tokens", "last_token_s", "paused_s", "started_s"):
        np.testing.assert_allclose(counted.sequences[column], run.sequences[column], rtol=1e-12, atol=1e-12)


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_recorded_steps_are_played_back_one_by_one(case: Case) -> None:
    """Equal ones are not taken at once: each has a duration of its own."""
    cost = case.cost._replace(recorded_step_s=np.linspace(0.01, 0.02, 10_000))
    fused, single = (
        replace(case, cost=cost, settings=case.settings._replace(fuses_steps=fuses)).run().requests["finish_s"]
        for fuses in (1, 0)
    )
    np.testing.assert_array_equal(fused, single)


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_every_token_is_computed_once_and_every_block_comes_back(case: Case) -> None:
    """Invariant 1, Invariant 2 and Invariant 3."""
    settings = case.settings
    run = replace(case, settings=case.settings._replace(loses_prompts=0)).run()
    requests, steps = run.requests, run.steps
    assert (requests["arrival_s"] <= requests["scheduled_s"]).all()
    assert (requests["scheduled_s"] < requests["first_token_s"]).all()
    assert (requests["first_token_s"] <= requests["finish_s"]).all()
    tokens = steps["decode_tokens"] @ steps["num_steps"] + steps["resumed_tokens"].sum()
    assert tokens == (case.output_tokens - 1).sum()
    assert (run.sequences["num_blocks"] == 0).all()
    assert steps["used_blocks"].max() <= settings.num_blocks
    assert steps["num_running"].max() <= settings.max_num_seqs * settings.num_stages
    in_stages_s = run.execution_s
    assert (in_stages_s > 0).all()
    assert (in_stages_s <= (requests["finish_s"] - requests["scheduled_s"]) * (1 + 1e-12)).all()


def first_come(
    requests: PolicyRequests, waiting: np.ndarray, ready: np.ndarray, engine: PolicyEngine
) -> list[tuple[int, int]]:
    """What Sarathi does while blocks suffice."""
    batch = [(int(i), 1) for i in ready if requests.is_prefilled[i]]
    budget = engine.max_num_batched_tokens - len(batch)
    for i in [i for i in ready if not requests.is_prefilled[i]] + list(
        waiting[: engine.max_num_seqs - engine.num_running]
    ):
        chunk = min(int(requests.prompt_tokens[i] - requests.processed_tokens[i]), budget)
        if chunk > 0:
            batch.append((int(i), chunk))
            budget -= chunk
    return batch


def unbound(settings: state.KernelSettings) -> state.KernelSettings:
    """Settings under which neither memory nor the size of a batch binds."""
    rules = {"watermark_blocks": 0, "reserved_blocks": 0, "max_waiting_steps": 0, "loses_prompts": 0}
    return settings._replace(num_blocks=10_000, max_batch_seqs=settings.max_num_seqs, **rules)


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_a_users_policy_runs_on_the_same_loop(case: Case) -> None:
    """One written like Sarathi gives Sarathi's times, where neither memory nor the size of a batch binds."""
    settings = case.settings._replace(
        num_blocks=10_000, max_num_batched_tokens=max(case.settings.max_num_batched_tokens, 40), num_stages=1
    )
    settings = unbound(settings)
    case = replace(case, settings=settings)
    ours = replace(case, settings=settings._replace(scheduler=codes.SARATHI)).run()
    users = replace(case, settings=settings._replace(scheduler=codes.USER)).run(policy=first_come)
    for column in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_array_equal(users.requests[column], ours.requests[column])


def moody(
    requests: PolicyRequests, waiting: np.ndarray, ready: np.ndarray, engine: PolicyEngine
) -> list[tuple[int, int]]:
    """Restarts the last ready request now and then, cuts prompts into sevens, and admits the youngest first."""
    restarted = [(int(ready[-1]), 0)] if ready.size > 2 and int(engine.now_s * 1e6) % 5 == 0 else []
    left = requests.prompt_tokens - requests.processed_tokens
    kept = ready[: ready.size - len(restarted)]
    batch = [(int(i), 1 if requests.is_prefilled[i] else min(int(left[i]), 7)) for i in kept]
    room = engine.max_num_seqs - engine.num_running
    return [*restarted, *batch, *((int(i), min(int(left[i]), 7)) for i in waiting[::-1][:room])]


def moody_reference(replica: Replica, now_s: float) -> list[tuple[Request, int]]:
    """`moody` on the oracle's objects."""
    ready = list(replica.ready)
    restarted = [(ready.pop(), 0)] if len(ready) > 2 and int(now_s * 1e6) % 5 == 0 else []
    batch = [(r, 1 if r.is_decoding else min(r.wanted_tokens, 7)) for r in ready]
    room = replica.settings.max_num_seqs - len(replica.holding)
    young = list(replica.waiting)[::-1][: max(room, 0)]
    return [*restarted, *batch, *((r, min(r.wanted_tokens, 7)) for r in young)]


@pytest.mark.full
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_a_users_policy_equals_the_oracles(case: Case) -> None:
    settings = case.settings._replace(
        scheduler=codes.USER, num_blocks=10_000, max_num_batched_tokens=7 * case.settings.max_num_seqs
    )
    settings = unbound(settings)
    case = replace(case, settings=settings)
    run = case.run(policy=moody)
    oracle, steps = run_oracle(case, moody_reference)
    assert_equal_requests(run.requests, oracle.requests)
    assert_equal_steps(run.steps, oracle, steps)


@pytest.mark.full
def test_a_batch_that_leaks_its_blocks_leaves_room_for_one() -> None:
    """FasterTransformer as Vidur has it frees the blocks of a batch's last step only; the right one all of them.

    Four requests fill the pool and three of them end early: then only one fits at a time, for good.
    """
    settings = state.KernelSettings(codes.FASTER_TRANSFORMER, 1, 1, 4, 100, block_size=16, num_blocks=8)
    settings = settings._replace(max_batch_seqs=4, reserved_blocks=2)
    n = 12
    outputs = np.arange(n) % 4 + 1
    cost = random_cost(np.random.default_rng(0), 4, 400, False)
    case = Case(settings, cost, np.zeros(n), np.full(n, 8), outputs)
    right = case.run()
    leaky = replace(case, settings=settings._replace(leaks_blocks=1)).run()
    assert right.sequences["num_blocks"].sum() == 0
    assert leaky.sequences["num_blocks"].sum() == 3 * 2
    assert right.steps["num_running"].max() == leaky.steps["num_running"].max() == 4
    first_batch_s = leaky.requests["finish_s"][:4].max()
    assert leaky.steps["num_running"][leaky.steps["start_s"] >= first_batch_s].max() == 1
    assert right.requests["finish_s"].max() < leaky.requests["finish_s"].max()


@pytest.mark.parametrize(
    ("scheduler", "settings", "message"),
    [
        ("lightllm", {}, "5,000 input tokens; lightllm runs a prompt whole, in a batch of 4,096"),
        ("vllm_v0", {"max_num_batched_tokens": 5050}, r"5,000 input tokens \(5,099 if it is restarted at its end\)"),
        ("sarathi", {"scheduling_policy": "priority"}, "sarathi knows no priority order"),
        ("orca", {"long_prefill_token_threshold": 64}, "the scheduler orca does not read it"),
    ],
)
def test_what_a_scheduler_cannot_run_is_refused(scheduler: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wt.simulate(five_thousand(scheduler, settings))


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["orca", "faster_transformer", "vllm_v0"])
def test_long_prompts_run_whole_where_nothing_caps_them(scheduler: str) -> None:
    assert wt.simulate(five_thousand(scheduler, {})).summary.num_requests == 4


def five_thousand(scheduler: str, settings: dict[str, object]) -> wt.Scenario:
    return wt.scenario(
        model="llama-3.1-8b",
        device="h100_sxm",
        scheduler=scheduler,
        input_tokens=5000,
        output_tokens=100,
        rate_per_s=1,
        num_requests=4,
        settings={f"deployment.engine.{name}": value for name, value in settings.items()},
    )


def test_an_explicit_prefix_cache_is_refused_where_there_is_none() -> None:
    shared = {"workload.shared_prompts": {"tokens": 500}, "deployment.engine.enable_prefix_caching": True}
    scenario = wt.scenario(
        model="llama-3.1-8b",
        device="h100_sxm",
        scheduler="sarathi",
        input_tokens=600,
        output_tokens=10,
        rate_per_s=1,
        num_requests=4,
        settings=shared,
    )
    with pytest.raises(InputError, match="has no prefix cache"):
        wt.simulate(scenario)


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([(0, 1), (0, 1)], "chose request 0 twice"),
        ([(7, 1)], "neither waits at this replica nor is ready"),
        ([(99, 1)], "neither waits at this replica nor is ready"),
        ([(0, 11)], "more tokens than it has left"),
        ([(0, -1)], "no tokens, or fewer"),
        ([(0, 10), (1, 10)], "free KV blocks"),
        ("abc", "returned 'abc'"),
        ([(0, 1, 2)], "returned"),
        ([(0, 1.5)], r"<lambda> returned \[\(0, 1.5\)\]"),
        ([(0, float("nan"))], "returned"),
        (np.array([[0, 1]], bool), "returned"),
        ([(0, 10**30)], "returned"),
        ({0: 1}, "returned"),
    ],
)
def test_a_policy_that_returns_nonsense_is_told_so(answer: object, problem: str) -> None:
    ten = np.full(3, 10)
    with pytest.raises(InputError, match=problem):
        users_case(ten, ten, num_blocks=15).run(policy=lambda *_: answer)


@pytest.mark.full
@pytest.mark.parametrize("answer", [[], None])
def test_a_policy_that_chooses_nothing_is_named(answer: object) -> None:
    with pytest.raises(InputError, match="3 of 3 requests can never be scheduled") as raised:
        users_case(np.full(3, 10), np.full(3, 10), num_blocks=50).run(policy=lambda *_: answer)
    assert raised.value.hint is not None
    assert "test_loop:<lambda> chose none of them, and nothing else is under way" in raised.value.hint


@pytest.mark.full
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("is_main_thread", [False, True])
def test_a_policy_that_does_not_return_is_named(
    sleeps: bool, is_main_thread: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if sleeps and not is_main_thread:
        pytest.skip("only a signal ends a sleep")
    monkeypatch.setattr(time_limit, "MOST_CALL_S", 0.1)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as commands in the background do

    def hangs(*_arguments: object) -> list[tuple[int, int]]:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            if sleeps:
                time.sleep(60)
        return []

    def run() -> str:
        with pytest.raises(InputError, match=r"the scheduler hangs has not returned for 0\.1 s") as raised:
            users_case(np.ones(1, int), np.ones(1, int), num_blocks=15).run(policy=hangs)
        return raised.value.message

    started_s = time.monotonic()
    if is_main_thread:
        run()
    else:
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(run).result()
    assert time.monotonic() - started_s < 30


@pytest.mark.full
def test_ctrl_c_in_a_policy_is_no_time_limit() -> None:
    def interrupted(*_arguments: object) -> list[tuple[int, int]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        users_case(np.ones(1, int), np.ones(1, int), num_blocks=15).run(policy=interrupted)


def users_case(input_tokens: np.ndarray, output_tokens: np.ndarray, num_blocks: int) -> Case:
    settings = state.KernelSettings(codes.USER, 1, 1, 8, 100, block_size=1, num_blocks=num_blocks)
    cost = random_cost(np.random.default_rng(0), 8, 108, overlaps=False)
    return Case(settings._replace(max_batch_seqs=8), cost, np.zeros(input_tokens.size), input_tokens, output_tokens)


@pytest.mark.full
def test_a_policy_that_raises_is_named_with_its_line() -> None:
    one = np.ones(1, np.int64)

    def divides(*arguments: np.ndarray) -> list[tuple[int, int]]:
        return [(0, 1 // len(arguments[2]))]

    with pytest.raises(InputError, match="divides failed at 0 s: ZeroDivisionError") as caught:
        users_case(one, one, num_blocks=50).run(policy=divides)
    assert caught.value.hint is not None
    assert "test_loop.py, line" in caught.value.hint


def test_a_policy_is_loaded_by_name() -> None:
    assert load_function("operator:add", OWN_SCHEDULERS)(1, 2) == 3  # type: ignore[call-arg, arg-type]
    with pytest.raises(InputError, match="has no function 'ad'"):
        load_function("operator:ad", OWN_SCHEDULERS)
    with pytest.raises(InputError, match="cannot be imported"):
        load_function("no_such_module_here:f", OWN_SCHEDULERS)
