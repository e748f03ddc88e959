"""Replicas that come and go: the loop against the plain-Python fleet, and what must hold whatever fails."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from oracles.serving.deployment import ReferenceDeployment
from serving.loop.test_oracle import Case, chains, random_cost, session_cases
from serving.pool_of_one import run_pool
from serving.served import assert_equal_fleets, assert_equal_requests, assert_equal_steps, engine_plan, oracle_requests
from windtunnel.errors import InputError
from windtunnel.serving import codes
from windtunnel.serving.codes import SCALING_METRICS
from windtunnel.serving.setup.fleet_plan import FleetPlan, start_fleet
from windtunnel.serving.setup.prefix_cache import prefix_cache
from windtunnel.serving.state import records as state
from windtunnel.serving.state.fleet import FleetRules, Scaling


@dataclass
class FleetCase:
    """A scenario of the oracle's tests, and what becomes of its replicas."""

    case: Case
    plan: FleetPlan
    speculation: state.Speculation


@st.composite
def plans(draw: st.DrawFn, num_replicas: int) -> FleetPlan:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mean_s = draw(st.sampled_from([0.05, 0.3, 1.0]))
    most_faults = draw(st.sampled_from([0, 0, 1, 3, 50]))
    faults = []
    for _ in range(num_replicas):
        gaps, repairs = rng.exponential(mean_s, most_faults), rng.exponential(mean_s / 4, most_faults)
        at_s, ahead = 0.0, []
        for gap, repair in zip(gaps, repairs, strict=True):
            ahead.append((at_s + gap, repair))
            at_s += gap + (repair if draw(st.sampled_from([True, True, False])) else 0.0)
        faults.append(ahead)
    kind = draw(st.sampled_from(["none", "target", "plan"]))
    least = draw(st.integers(1, num_replicas))
    times = np.cumsum(rng.exponential(0.2, 4))
    return FleetPlan(
        rules=FleetRules(
            retry_s=draw(st.sampled_from([0.0, 0.013, 0.1])),
            starts_over=draw(st.integers(0, 1)),
            most_outstanding=draw(st.integers(1, 6)),
        ),
        scalings=[
            Scaling(
                initial_replicas=draw(st.integers(1, num_replicas)),
                start_s=draw(st.sampled_from([0.0, 0.013, 0.2])),
                metric=draw(st.integers(0, len(SCALING_METRICS) - 1)),
                target=draw(st.sampled_from([0.1, 0.7, 2.0, 5.0])) if kind == "target" else 0.0,
                min_replicas=least,
                max_replicas=draw(st.integers(least, num_replicas)),
                interval_s=draw(st.sampled_from([0.01, 0.1])),
                tolerance_fraction=draw(st.sampled_from([0.0, 0.1])),
                up_looks=draw(st.sampled_from([0, 2])),
                down_looks=draw(st.sampled_from([0, 1, 5])),
            )
        ],
        changes=[[(float(at), int(rng.integers(1, num_replicas + 1))) for at in times] if kind == "plan" else []],
        faults_of=lambda replica: iter(faults[replica]),
    )


@st.composite
def fleet_cases(draw: st.DrawFn) -> FleetCase:
    """With prefix caches, sessions and speculation always there, so that the loop is compiled once."""
    case = draw(session_cases())
    router = draw(st.sampled_from([case.settings.router, codes.DEFERRED]))
    s = case.settings
    if s.scheduler == codes.SGLANG:  # does not speculate in a pipeline
        s = s._replace(num_stages=1)
    num_queries = draw(st.sampled_from([1, 3])) if s.num_stages == 1 else 1
    speculation = state.Speculation(num_queries, draw(st.floats(1.0, num_queries)))
    most = max(s.max_num_batched_tokens, num_queries)
    if num_queries > 1 and s.chunked_prefill:
        most = draw(st.sampled_from([most, num_queries + 1, 2 * num_queries + 1]))  # short: requests are left out
    case.settings = s._replace(
        router=router,
        num_blocks=s.num_blocks + num_queries * s.num_groups,
        num_window_blocks=s.num_window_blocks + num_queries * s.window_pool,
        max_num_batched_tokens=most,
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cost = random_cost(rng, s.max_num_seqs, most + num_queries * s.max_num_seqs, bool(case.cost.host_overlaps))
    case.cost = cost._replace(
        sample_s=1e-4 + 1e-6 * np.arange(num_queries * s.max_num_seqs + 1.0),
        draft_s=1e-4 * np.arange(s.max_num_seqs + 1.0),
    )
    case.caches = True
    if case.tiers.size:
        case.tiers.outlives = case.tiers.ranks_per_pool > s.ranks_per_replica
    return FleetCase(case, draw(plans(s.num_replicas)), speculation)


@pytest.mark.loops
@pytest.mark.interpreted
@settings(max_examples=cases_to_try(100))
@given(fleet_cases())
def test_loop_equals_the_oracle(found: FleetCase) -> None:
    case, arrays = found.case, found.case.requests
    oracle = ReferenceDeployment(
        [engine_plan(case.settings, case.cost, found.speculation)],
        oracle_requests(arrays),
        fleet_plan=found.plan,
        chains=[chains(case)],
        below=[(case.tiers, case.load_overlaps)],
    )
    reference_steps = oracle.run()
    cache = prefix_cache(case.settings, arrays, case.tiers, case.load_overlaps)
    fleet = start_fleet(found.plan, [case.settings.num_replicas], arrays.arrival_s.size)
    records, steps = run_pool(case.settings, case.cost, arrays, cache=cache, speculation=found.speculation, fleet=fleet)
    assert_equal_fleets(fleet, oracle)
    assert_equal_requests(records, oracle.requests)
    assert_equal_steps(steps, oracle, reference_steps)


def simulated(num_requests: int = 2000, **deployment: object) -> wt.Result:
    return wt.simulate(
        wt.scenario(
            model="llama-3.1-8b",
            device="h100_sxm",
            rate_per_s=20,
            num_requests=num_requests,
            input_tokens=512,
            output_tokens=200,
            settings={f"deployment.{name}": value for name, value in deployment.items()},
        )
    )


def assert_consistent(result: wt.Result) -> None:
    checks = result.summary.checks
    assert checks is not None
    assert checks.passed, checks
    assert not np.isnan(result.requests["finish_s"]).any()


@pytest.mark.compiled
def test_nothing_is_lost_when_everything_fails_at_once() -> None:
    """Both replicas are away from 20 s to 20 s + 5 s of repair + 10 s of start."""
    scheduled = [{"at_s": 20, "replica": replica, "repair_s": 5} for replica in (0, 1)]
    result = simulated(replicas=2, start_s=10, faults={"scheduled": scheduled, "retry_s": 1})
    assert_consistent(result)
    fleet = result.summary.fleet
    assert fleet is not None
    assert (fleet.num_failures, fleet.num_starts) == (2, 2)
    assert fleet.outage_s == pytest.approx(15.0)
    span_s = result.requests["finish_s"].max() - result.requests["arrival_s"].min()
    assert fleet.availability_fraction == pytest.approx(1 - 15 / span_s, rel=1e-6)
    assert fleet.replica_hours == pytest.approx(2 * span_s / 3600)
    retried = result.requests["num_retries"] > 0
    assert fleet.num_retries == retried.sum() == result.fleet.stays["is_lost"].sum() > 0  # type: ignore[union-attr]
    begins, ends = result.steps["start_s"], result.steps["start_s"] + result.steps["duration_s"]
    assert not ((ends > 20 + 1e-9) & (begins < 35)).any()
    during = (result.requests["arrival_s"] > 20) & (result.requests["arrival_s"] < 35)
    assert (result.requests["scheduled_s"][during] >= 35).all()


@pytest.mark.compiled
def test_what_a_lost_request_had_produced_stays_produced() -> None:
    """Its first token is the one that it had; all tokens are sampled once."""
    calm = simulated(replicas=2)
    faults = {"scheduled": [{"at_s": 20, "replica": 0, "repair_s": 5}]}
    result = simulated(replicas=2, start_s=10, faults=faults)
    assert_consistent(result)
    had_token = (result.requests["num_retries"] > 0) & (calm.requests["first_token_s"] < 20)
    assert had_token.any()
    np.testing.assert_array_equal(
        result.requests["first_token_s"][had_token], calm.requests["first_token_s"][had_token]
    )
    assert (result.requests["finish_s"][had_token] > 21).all()


@pytest.mark.compiled
def test_a_request_that_starts_over_streams_its_tokens_again() -> None:
    faults = {"scheduled": [{"at_s": 20, "replica": 0, "repair_s": 5}], "retry": "start_over"}
    result = simulated(replicas=2, start_s=10, faults=faults)
    assert_consistent(result)
    retried = result.requests["num_retries"] > 0
    assert (result.requests["first_token_s"][retried] > 21).all()
    discarded = result.requests["discarded_tokens"]
    assert (discarded[~retried] == 0).all()
    assert (discarded < result.requests["output_tokens"]).all()
    fleet = result.summary.fleet
    assert fleet is not None
    assert fleet.num_discarded_tokens == discarded.sum() > 0
    kept = simulated(replicas=2, start_s=10, faults=faults | {"retry": "resume"})
    assert (kept.requests["discarded_tokens"] == 0).all()
    assert kept.requests["finish_s"].mean() < result.requests["finish_s"].mean()


@pytest.mark.full
@pytest.mark.compiled
def test_faults_come_as_often_as_they_should() -> None:
    """30 devices that fail every 100 s for 1 s on average: exponential times between failures."""
    faults = {"device_mtbf_s": 100.0, "mttr_s": 1.0, "retry_s": 0.1}
    result = simulated(num_requests=10_000, replicas=30, start_s=0.5, faults=faults)
    assert_consistent(result)
    fleet = result.summary.fleet
    assert fleet is not None
    span_s = result.requests["finish_s"].max() - result.requests["arrival_s"].min()
    expected = 30 * span_s / 101
    assert abs(fleet.num_failures - expected) < 4 * expected**0.5
    assert fleet.availability_fraction == pytest.approx(100 / 101.5, abs=0.01)
    again = simulated(num_requests=10_000, replicas=30, start_s=0.5, faults=faults)
    np.testing.assert_array_equal(again.requests["finish_s"], result.requests["finish_s"])


@pytest.mark.compiled
def test_replicas_follow_the_load() -> None:
    """Little's law: 20 requests/s of about 1.6 s each keep about 32 outstanding, 4 replicas at a target of 9."""
    scaling = {"type": "target", "metric": "outstanding", "target": 9, "max_replicas": 8, "scale_down_after_s": 30}
    result = simulated(num_requests=8000, start_s=5, autoscaling=scaling)
    assert_consistent(result)
    fleet = result.summary.fleet
    assert fleet is not None
    present = result.summary.utilisation.mean_present
    assert fleet.mean_replicas == pytest.approx(present / 9, rel=0.35)
    assert fleet.max_replicas <= 8
    assert result.summary.cost is not None
    per_replica = 2.95 if result.setup.device.price_usd_per_hour is None else result.setup.device.price_usd_per_hour
    assert result.summary.cost.usd_per_hour == pytest.approx(per_replica * fleet.mean_replicas)


@pytest.mark.compiled
def test_replicas_follow_the_clock() -> None:
    changes = [{"at_s": 10, "replicas": 3}, {"at_s": 50, "replicas": 1}]
    result = simulated(replicas=1, start_s=4, autoscaling={"type": "schedule", "changes": changes})
    assert_consistent(result)
    assert result.fleet is not None
    phases = result.fleet.phases
    rows = list(zip(*(phases[name].tolist() for name in ("time_s", "replica", "phase")), strict=True))
    assert rows[:5] == [(0, 0, 2), (10, 1, 1), (10, 2, 1), (14, 1, 2), (14, 2, 2)]
    drained = [row for row in rows if row[2] == 3]
    assert [row[0] for row in drained] == [50, 50]
    assert [row[1] for row in rows if row[2] == 0] == sorted(
        (row[1] for row in drained), key=lambda replica: next(r[0] for r in rows if r[1] == replica and r[2] == 0)
    )
    after = result.requests["arrival_s"] > 50
    assert len(set(result.requests["replica"][after])) == 1


@pytest.mark.compiled
def test_a_deferring_router_keeps_the_queue_at_the_router() -> None:
    """No replica ever has more than its limit, and the queue is served in order."""
    result = simulated(num_requests=600, replicas=2, router="deferred", router_limit=4, calibration="none")
    assert_consistent(result)
    present = result.steps["num_running"] + result.steps["num_waiting"]
    assert present.max() <= 4
    assert (np.diff(result.requests["scheduled_s"]) >= 0).all()


@pytest.mark.compiled
def test_each_replica_of_a_deferring_router_takes_the_queue_in_order() -> None:
    """A replica in the middle of a step takes a request later than an idle one that was chosen after it."""
    result = simulated(num_requests=600, replicas=2, router="deferred", router_limit=4)
    for replica in range(2):
        scheduled_s = result.requests["scheduled_s"][result.requests["replica"] == replica]
        assert scheduled_s.size > 100
        assert (np.diff(scheduled_s) >= 0).all()


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"faults": {"device_mtbf_s": 1e6, "mttr_s": 60}}, "how long one takes"),
        ({"start_s": 1, "faults": {"device_mtbf_s": 1e6}}, "go together"),
        ({"start_s": 1, "faults": {"scheduled": [{"at_s": 1, "replica": 7, "repair_s": 1}]}}, "replicas 0 to 0"),
        ({"start_s": 90, "faults": {"device_mtbf_s": 10, "mttr_s": 1}}, "to start"),
        ({"start_s": 1, "autoscaling": {"type": "schedule", "changes": []}}, "changes is empty"),
        (
            {"start_s": 1, "autoscaling": {"type": "target", "metric": "kv_use", "target": 80, "max_replicas": 2}},
            "at most 1",
        ),
        ({"router": "least_busy"}, "router is 'least_busy'"),
    ],
)
def test_wrong_fleets_are_refused(deployment: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulated(num_requests=10, **deployment)
