"""Pools whose replicas come and go, with engines' and per-request schedulers: what must hold whatever fails."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from serving.cluster.test_fleet import plans as fleet_plans
from serving.forms import prepare_loop
from serving.loop.test_oracle import random_cost
from serving.per_request.test_loop import first_come
from serving.test_pools import Case
from serving.test_pools import cases as pool_cases
from windtunnel.metrics.fleet import lost_steps
from windtunnel.report.serving.setup import deployment_text
from windtunnel.serving import codes
from windtunnel.serving.codes import BOTH, PREFILL
from windtunnel.serving.over_time import over_time
from windtunnel.serving.run import Custom, LoopRun
from windtunnel.serving.setup.fleet_plan import Fault, FleetPlan, FleetRun, start_fleet
from windtunnel.serving.setup.prefix_cache import caches_of


@dataclass
class Failing:
    """Pools, and what becomes of their replicas."""

    case: Case
    plan: FleetPlan


@st.composite
def failing_cases(draw: st.DrawFn) -> Failing:
    """Each pool has an autoscaler or a plan of its own; every replica of any of them may fail."""
    case = draw(pool_cases(have_windows=True))
    counts = [plan.settings.num_replicas for plan in case.plans]
    whole = draw(fleet_plans(sum(counts)))
    each = [draw(fleet_plans(count)) for count in counts]
    scalings = [plan.scalings[0]._replace(start_s=whole.scalings[0].start_s) for plan in each]
    changes = [plan.changes[0] for plan in each]
    return Failing(case, FleetPlan(scalings, whole.rules, changes, whole.faults_of))


def run(failing: Failing) -> tuple[LoopRun, FleetRun]:
    case = failing.case
    fleet = start_fleet(failing.plan, [plan.settings.num_replicas for plan in case.plans], case.requests.arrival_s.size)
    caches = [caches_of(plan.settings, kept, case.requests) for plan, kept in zip(case.plans, case.retention)]  # noqa: B905
    return prepare_loop(case.plans, case.requests, caches, case.handoff_rules, fleet).run(), fleet


def assert_conserved(failing: Failing, finished: LoopRun, fleet: FleetRun) -> None:
    """Invariant 1, Invariant 2 and Invariant 3, in a fleet."""
    records, steps, case, pools = finished.requests, finished.steps, failing.case, finished.pools
    assert pools is not None
    assert np.isfinite(records["finish_s"]).all()
    np.testing.assert_array_equal(records["output_tokens"], case.requests.output_tokens)
    assert (records["scheduled_s"] < records["first_token_s"]).all()
    assert (records["first_token_s"] <= records["finish_s"]).all()
    assert (fleet.fleet.sent_s <= records["arrival_s"]).all()
    assert (pools.ranks.num_outstanding == 0).all()
    assert (pools.ranks.num_waiting == 0).all()
    assert (pools.ranks.num_running == 0).all()
    assert (pools.handoffs.num_pulled == 0).all()
    assert (pools.handoffs.num_held == 0).all()
    assert (pools.transfers["stage"] == 0).all()
    for pool in pools.pools:
        ranks = pools.ranks[pool.first_rank : pool.end_rank]
        assert (ranks.free_blocks == pool.num_blocks).all()
        assert (ranks.free_window_blocks == pool.num_window_blocks).all()
    retries = np.zeros(records.size, np.int64)
    for losses in fleet.losses:
        np.add.at(retries, losses["request"], 1)
    np.testing.assert_array_equal(retries, fleet.fleet.num_retries)
    kept = steps.where(~lost_steps(steps))
    if not case.handoff_rules.decode_samples_first:
        emitted = (kept["decode_tokens"] * kept["num_steps"]).sum() + kept["resumed_tokens"].sum()
        assert emitted >= (case.requests.output_tokens - 1).sum()
        if not retries.any():
            assert emitted == (case.requests.output_tokens - 1).sum()


@pytest.mark.full
@pytest.mark.loops("pools")
@settings(max_examples=cases_to_try(20))
@given(failing_cases())
def test_nothing_is_lost_between_pools_that_fail(failing: Failing) -> None:
    finished, fleet = run(failing)
    assert_conserved(failing, finished, fleet)


@pytest.mark.full
@pytest.mark.interpreted
@pytest.mark.loops("pools")
@settings(max_examples=cases_to_try(15))
@given(failing_cases())
def test_pools_that_do_everything_are_one_fleet(failing: Failing) -> None:
    """Invariant 12, with replicas that fail and a router that holds requests back."""
    plan = failing.case.plans[0]._replace(role=BOTH)
    count = plan.settings.num_replicas
    scaling = failing.plan.scalings[0]._replace(initial_replicas=count, target=0.0)
    rules, num_drawn = failing.plan.rules, sum(each.settings.num_replicas for each in failing.case.plans)

    def faults_of(replica: int) -> Iterator[Fault]:
        return failing.plan.faults_of(replica % num_drawn)

    requests = failing.case.requests
    apart = FleetPlan([scaling, scaling], rules, [[], []], faults_of)
    whole = FleetPlan([scaling._replace(initial_replicas=2 * count)], rules, [[]], faults_of)
    handoff_rules = failing.case.handoff_rules._replace(local_tokens=0)
    fleet = start_fleet(apart, [count, count], requests.arrival_s.size)
    two = prepare_loop([plan, plan], requests, (), handoff_rules, fleet).run()
    together = plan._replace(settings=plan.settings._replace(num_replicas=2 * count))
    alone = start_fleet(whole, [2 * count], requests.arrival_s.size)
    one = prepare_loop([together], requests, fleet=alone).run()
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions", "rank"):
        np.testing.assert_array_equal(two.requests[name], one.requests[name], err_msg=name)
    for name in ("start_s", "replica", "decode_tokens", "prefill_tokens", "used_blocks"):
        np.testing.assert_array_equal(two.steps[name], one.steps[name], err_msg=name)


@pytest.mark.full
@pytest.mark.loops("pools")
@settings(max_examples=cases_to_try(15))
@given(failing_cases(), st.integers(0, 2**32))
def test_a_policy_of_ones_own_fails_and_scales_as_the_one_that_it_copies(failing: Failing, seed: int) -> None:
    """Pools of any roles but prefill, one of them scheduled per request: Sarathi's rules, by the engine or the user."""
    case = failing.case
    if any(plan.role == PREFILL for plan in case.plans):
        case = replace(case, plans=[plan._replace(role=BOTH) for plan in case.plans])
    first = case.plans[0].settings
    own = first._replace(
        scheduler=codes.SARATHI,
        num_stages=1,
        ranks_per_replica=1,
        num_blocks=10_000,
        block_size=4,
        queue_order=0,
        max_num_batched_tokens=max(first.max_num_batched_tokens, 40),
        window_tokens=0,
        num_groups=1,
        num_window_groups=0,
        window_pool=0,
        num_window_blocks=0,
        balance_steps=0,
        blocks_per_request=0,
        max_batch_seqs=first.max_num_seqs,
        fuses_steps=0,
    )
    cost = random_cost(np.random.default_rng(seed), own.max_num_seqs, 2_000, overlaps=False)
    scheduled = case.plans[0]._replace(settings=own, cost=cost)
    counts = [plan.settings.num_replicas for plan in case.plans]
    runs = []
    for scheduler, policy in ((codes.SARATHI, None), (codes.USER, first_come)):
        plan = scheduled._replace(settings=own._replace(scheduler=scheduler))
        fleet = start_fleet(failing.plan, counts, case.requests.arrival_s.size)
        policies = [policy, *(None for _ in case.plans[1:])]
        loop = prepare_loop([plan, *case.plans[1:]], case.requests, (), case.handoff_rules, fleet)
        runs.append(loop.run(Custom(None, policies)))
    engines, users = runs
    assert np.isfinite(engines.requests["finish_s"]).all()
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "rank"):
        np.testing.assert_array_equal(users.requests[name], engines.requests[name], err_msg=name)


def disaggregated(**settings: object) -> wt.Result:
    pools = [{"name": "prefill", "role": "prefill", "replicas": 2}, {"name": "decode", "role": "decode", "replicas": 2}]
    given_settings = {"deployment.pools": pools, "deployment.start_s": 10} | settings
    return wt.simulate(
        wt.scenario(
            model="llama-3.1-8b",
            device="h100_sxm",
            rate_per_s=20,
            num_requests=1500,
            input_tokens=512,
            output_tokens=100,
            settings=given_settings,
        )
    )


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize(("replica", "column"), [(0, "prefill_replica"), (2, "replica")])
def test_a_failure_on_either_side_sends_requests_again(replica: int, column: str) -> None:
    """A replica fails in the middle of a request's prefill, or of its decoding."""
    calm = disaggregated().requests
    there = calm.where((calm[column] == replica) & (calm["arrival_s"] > 20))
    begin, end = ("scheduled_s", "first_token_s") if replica == 0 else ("first_token_s", "finish_s")
    fails_s = float(there[begin][0] + there[end][0]) / 2
    faults = {"scheduled": [{"at_s": fails_s, "replica": replica, "repair_s": 5}], "retry_s": 1}
    result = disaggregated(**{"deployment.faults": faults})
    fleet = result.summary.fleet
    assert fleet is not None
    assert fleet.num_failures == 1
    retried = result.requests["num_retries"] > 0
    assert 0 < retried.sum() < 100
    assert np.isfinite(result.requests["finish_s"]).all()
    before = calm["finish_s"] < fails_s
    np.testing.assert_array_equal(result.requests["finish_s"][before], calm["finish_s"][before])
    assert (result.requests["finish_s"][retried] > fails_s + 1).all()


@pytest.mark.full
@pytest.mark.compiled
def test_decode_replicas_follow_their_load() -> None:
    scaling = {"type": "target", "metric": "outstanding", "target": 4, "max_replicas": 6, "scale_down_after_s": 30}
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": 2},
        {"name": "decode", "role": "decode", "parallelism": {"tp": 2}, "autoscaling": scaling},
    ]
    result = disaggregated(**{"deployment.pools": pools})
    assert result.summary.pools is not None
    prefill, decode = result.summary.pools
    assert decode.usd_per_hour is not None
    assert prefill.usd_per_hour is not None
    price = prefill.usd_per_hour / 2
    assert 2 * price < decode.usd_per_hour < 12 * price
    assert decode.mean_devices == pytest.approx(decode.usd_per_hour / price)
    assert deployment_text(result.scenario.deployment).endswith("decode: 2 to 12 x h100_sxm")
    use, throughput = result.summary.utilisation, result.summary.throughput
    held = [2, decode.mean_devices / 2]
    busy = [pool.utilisation.busy_fraction for pool in (prefill, decode)]
    assert use.busy_fraction == pytest.approx(np.average(busy, weights=held))
    devices = throughput.output_tokens_per_s / throughput.output_tokens_per_s_per_device
    assert devices == pytest.approx(2 + decode.mean_devices)
    series = over_time(result)
    for column, whole in (("busy_fraction", use.busy_fraction), ("num_replicas", sum(held))):
        assert np.average(series[column], weights=series["num_replicas"] if "busy" in column else None) == (
            pytest.approx(whole, rel=1e-6)
        )
    assert result.summary.power is not None
    assert series["power_w"].mean() == pytest.approx(result.summary.power.mean_w, rel=1e-6)
    assert result.summary.cost is not None
    assert result.summary.cost.usd_per_hour == pytest.approx(prefill.usd_per_hour + decode.usd_per_hour)


@pytest.mark.full
@pytest.mark.compiled
def test_a_fleet_in_which_nothing_happens_draws_the_same_routes() -> None:
    """The only decode replica is not drawn, whether it might fail or not."""
    pools = [{"name": "prefill", "role": "prefill", "replicas": 2}, {"name": "decode", "role": "decode"}]
    drawn = {"deployment.pools": pools, "deployment.router": "random", "deployment.transfer.router": "random"}
    never = {"scheduled": [{"at_s": 1e7, "replica": 0, "repair_s": 5}]}
    calm, might_fail = (disaggregated(**drawn, **faults).requests for faults in ({}, {"deployment.faults": never}))
    np.testing.assert_array_equal(calm["prefill_replica"], might_fail["prefill_replica"])
