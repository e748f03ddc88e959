"""Whole deployments against the plain-Python one: pools of any scheduler and role, whose replicas come and go."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from oracles.serving.deployment import ReferenceDeployment
from oracles.serving.state import Request
from serving.cluster.test_fleet import plans as fleet_plans
from serving.cluster.test_pools_that_fail import Failing, assert_conserved
from serving.forms import prepare_loop
from serving.loop.test_oracle import random_cost
from serving.per_request.test_loop import SCHEDULERS, moody, moody_reference
from serving.served import assert_equal_fleets, assert_equal_requests, assert_equal_steps, assert_equal_transfers
from serving.test_pools import Case, caching_cases, one_step_cost, oracle_of, with_speculation
from serving.test_pools import cases as pool_cases
from windtunnel.serving import codes
from windtunnel.serving.codes import BOTH, DECODE, PREFILL
from windtunnel.serving.custom.router import Arrival, Replicas
from windtunnel.serving.run import Custom, LoopRun
from windtunnel.serving.setup.fleet_plan import FleetPlan, FleetRun, start_fleet
from windtunnel.serving.setup.prefix_cache import KvRetention, caches_of
from windtunnel.serving.state import records as state
from windtunnel.serving.state.fleet import FleetRules, Scaling
from windtunnel.serving.state.pools import HandoffRules, PoolPlan
from windtunnel.workload.generate.requests import RequestArrays


@dataclass
class Deployed:
    """Pools, and what becomes of their replicas."""

    case: Case
    fleet_plan: FleetPlan | None
    """None where all replicas are there all the time."""
    is_users_router: bool = False


@st.composite
def fleets(draw: st.DrawFn, case: Case) -> FleetPlan:
    """Each pool has an autoscaler or a plan of its own; every replica of any of them may fail."""
    counts = [plan.settings.num_replicas for plan in case.plans]
    whole = draw(fleet_plans(sum(counts)))
    each = [draw(fleet_plans(count)) for count in counts]
    scalings = [plan.scalings[0]._replace(start_s=whole.scalings[0].start_s) for plan in each]
    return FleetPlan(scalings, whole.rules, [plan.changes[0] for plan in each], whole.faults_of)


@st.composite
def routed(draw: st.DrawFn, case: Case) -> Case:
    """`case` with a router that may hold requests back."""
    router = draw(st.sampled_from([case.plans[0].settings.router, codes.DEFERRED]))
    plans = [plan._replace(settings=plan.settings._replace(router=router)) for plan in case.plans]
    return replace(case, plans=plans)


@st.composite
def failing_deployments(draw: st.DrawFn) -> Deployed:
    case = draw(routed(draw(caching_cases())))
    return Deployed(case, draw(fleets(case)))


@st.composite
def scheduled_per_request(
    draw: st.DrawFn, plan: PoolPlan, requests: RequestArrays, scheduler: int, rng: np.random.Generator
) -> PoolPlan:
    """`plan` with a scheduler that may batch any subset of requests."""
    longest = int((requests.input_tokens + requests.output_tokens).max())
    block_size = 1 if scheduler == codes.LIGHTLLM else plan.settings.block_size
    largest, watermark = -(-longest // block_size), draw(st.integers(0, 3))
    stages = plan.settings.num_stages if scheduler != codes.LIGHTLLM else 1
    most = plan.settings.max_num_seqs
    is_users = scheduler == codes.USER
    own = plan.settings._replace(
        scheduler=scheduler,
        ranks_per_replica=1,
        num_stages=stages,
        max_num_batched_tokens=7 * most if is_users else max(plan.settings.max_num_batched_tokens, longest),
        block_size=block_size,
        num_blocks=10_000 if is_users else largest + watermark + 1 + draw(st.integers(0, 3 * largest)),
        queue_order=codes.FCFS,
        blocks_per_request=0,
        balance_steps=0,
        batch_wait_steps=0,
        window_tokens=0,
        num_groups=1,
        num_window_groups=0,
        window_pool=0,
        num_window_blocks=0,
        max_batch_seqs=most if is_users else max(most // stages, 1),
        watermark_blocks=watermark,
        reserved_blocks=largest if scheduler in (codes.ORCA, codes.FASTER_TRANSFORMER) else 0,
        max_waiting_steps=draw(st.integers(0, 10)),
        fuses_steps=draw(st.sampled_from([0, 1, 1])),
    )
    cost = random_cost(rng, most, most * longest + 100, draw(st.booleans()))
    return plan._replace(settings=own, cost=cost)


@st.composite
def mixed_cases(draw: st.DrawFn, plain: st.SearchStrategy[Case], schedulers: tuple[int, ...]) -> Case:
    """Some pools schedule per request, at least one; none of those that requests are handed to does."""
    case = draw(plain)
    roles = [plan.role for plan in case.plans]
    if PREFILL in roles:
        roles = [DECODE if role == BOTH else role for role in roles] if DECODE not in roles else roles
    plans = [plan._replace(role=role) for plan, role in zip(case.plans, roles, strict=True)]
    retention = list(case.retention)
    if BOTH not in roles:
        plans.append(plans[0]._replace(role=BOTH))
        retention += retention[:1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    whole = [number for number, plan in enumerate(plans) if plan.role == BOTH]
    for number in whole:
        if number == whole[0] or draw(st.booleans()):
            scheduler = draw(st.sampled_from(schedulers))
            plans[number] = draw(scheduled_per_request(plans[number], case.requests, scheduler, rng))
            if retention:
                retention[number] = KvRetention(False)
    if draw(st.booleans()):
        plans.reverse()
        retention.reverse()
    return replace(case, plans=plans, retention=retention)


@st.composite
def mixed_deployments(draw: st.DrawFn) -> Deployed:
    case = draw(routed(draw(mixed_cases(caching_cases(), SCHEDULERS))))
    return Deployed(case, draw(fleets(case)))


@st.composite
def users_deployments(draw: st.DrawFn) -> Deployed:
    """A policy of the user, and perhaps a router; with caches or without, in a fleet or not."""
    plain = caching_cases() if draw(st.booleans()) else pool_cases()
    case = draw(mixed_cases(plain, (codes.USER, codes.USER, *SCHEDULERS)))
    is_users_router = draw(st.booleans())
    if is_users_router:
        plans = [plan._replace(settings=plan.settings._replace(router=codes.USERS_ROUTER)) for plan in case.plans]
        case = replace(case, plans=plans)
    has_fleet = is_users_router or draw(st.booleans())
    return Deployed(case, draw(fleets(case)) if has_fleet else None, is_users_router)


def fewest_of_four(_request: Arrival, replicas: Replicas) -> int | None:
    """The replica with the fewest requests that has fewer than four."""
    present = replicas.num_waiting + replicas.num_running
    up = [int(number) for number in np.flatnonzero(replicas.is_up) if present[number] < 4]
    return min(up, key=lambda number: present[number], default=None)


def reference_fewest_of_four(deployment: ReferenceDeployment, _request: Request, _now_s: float) -> int:
    """`fewest_of_four` on the oracle's objects."""

    def present(number: int) -> int:
        pool, replica = deployment.replicas[number]
        return int(pool.num_waiting(replica) + pool.num_running(replica))

    up = [number for number in deployment.entries if deployment.is_up(number) and present(number) < 4]
    return min(up, key=present, default=-1)


def assert_equal_to_the_oracle(deployed: Deployed) -> tuple[LoopRun, FleetRun | None]:
    """Invariant 11, of whole deployments; returns the loop's run."""
    case, plan = deployed.case, deployed.fleet_plan
    is_users = [each.settings.scheduler == codes.USER for each in case.plans]
    oracle = oracle_of(
        case,
        fleet_plan=plan,
        policies=[moody_reference if own else None for own in is_users],
        users_router=reference_fewest_of_four if deployed.is_users_router else None,
    )
    steps = oracle.run()
    plans, requests = with_speculation(case), case.requests
    fleet = None
    if plan is not None:
        fleet = start_fleet(plan, [each.settings.num_replicas for each in plans], requests.arrival_s.size)
    caches = [caches_of(each.settings, kept, requests) for each, kept in zip(plans, case.retention, strict=False)]
    router = fewest_of_four if deployed.is_users_router else None
    custom = Custom(router, [moody if own else None for own in is_users])
    run = prepare_loop(plans, requests, caches, case.handoff_rules, fleet).run(custom)
    if fleet is not None:
        assert_equal_fleets(fleet, oracle)
    assert_equal_requests(run.requests, oracle.requests)
    if run.pools is not None:
        assert_equal_transfers(run, oracle)
    assert_equal_steps(run.steps, oracle, steps)
    return run, fleet


@pytest.mark.loops("pools")
@settings(max_examples=cases_to_try(35))
@given(failing_deployments())
def test_pools_of_engines_that_fail_equal_the_oracles(deployed: Deployed) -> None:
    run, fleet = assert_equal_to_the_oracle(deployed)
    assert fleet is not None
    assert deployed.fleet_plan is not None
    assert_conserved(Failing(deployed.case, deployed.fleet_plan), run, fleet)


@pytest.mark.loops("pools")
@settings(max_examples=cases_to_try(35))
@given(mixed_deployments())
def test_pools_of_any_scheduler_that_fail_equal_the_oracles(deployed: Deployed) -> None:
    assert_equal_to_the_oracle(deployed)


@pytest.mark.interpreted
@settings(max_examples=cases_to_try(35))
@given(users_deployments())
def test_users_policies_and_routers_equal_the_oracles(deployed: Deployed) -> None:
    assert_equal_to_the_oracle(deployed)


@pytest.mark.loops("pools")
def test_a_replica_that_fails_with_the_one_it_hands_off_to_begins_anew_with_one_event() -> None:
    """The decode side's failure wakes the prefill side, which fails in the same moment and is up again at once."""
    cost = one_step_cost(0.01)
    engine = state.KernelSettings(codes.VLLM_V1, 1, 1, 4, 64, block_size=16, num_blocks=100, max_prefill_tokens=64)
    plans = [PoolPlan(engine, cost, role=role, link_bytes_per_s=1e3) for role in (DECODE, PREFILL)]
    arrays = [np.full(6, value, np.int64) for value in (16, 20, 0)]
    requests = RequestArrays(np.zeros(6), *arrays, tenant=np.zeros(6, np.int64), ttft_limit_s=np.full(6, np.inf))
    fixed = Scaling(1, min_replicas=1, max_replicas=1)
    plan = FleetPlan([fixed, fixed], FleetRules(), [[], []], lambda _: iter([(0.035, 0.0)]))
    case = Case(plans, HandoffRules(bytes_per_token=1.0, latency_s=1e-3), requests)
    run, fleet = assert_equal_to_the_oracle(Deployed(case, plan))
    assert fleet is not None
    assert fleet.fleet.num_retries.sum() > 0
    own = run.steps["replica"] == 1
    assert (run.steps["duration_s"][own][run.steps["start_s"][own] > 0.035] >= 0.01).all()
