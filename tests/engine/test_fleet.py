"""Replicas that come and go: the loop against the plain-Python fleet, and what must hold whatever fails."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.engine.fleet import FleetPlan, FleetRun, start_fleet
from windtunnel.engine.prefix_cache import prefix_cache
from windtunnel.engine.reference import Request
from windtunnel.engine.reference_fleet import ReferenceFleet
from windtunnel.engine.serving import run_loop
from windtunnel.kernels import state
from windtunnel.kernels.fleet import METRICS, Scaling
from windtunnel.metrics.records import Table
from engine.test_oracle import Case, chains, give_tenants, random_cost, session_cases


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
        scaling=Scaling(
            initial_replicas=draw(st.integers(1, num_replicas)),
            start_s=draw(st.sampled_from([0.0, 0.013, 0.2])),
            retry_s=draw(st.sampled_from([0.0, 0.013, 0.1])),
            metric=draw(st.integers(0, len(METRICS) - 1)),
            target=draw(st.sampled_from([0.1, 0.7, 2.0, 5.0])) if kind == "target" else 0.0,
            min_replicas=least,
            max_replicas=draw(st.integers(least, num_replicas)),
            interval_s=draw(st.sampled_from([0.01, 0.1])),
            tolerance_fraction=draw(st.sampled_from([0.0, 0.1])),
            up_looks=draw(st.sampled_from([0, 2])),
            down_looks=draw(st.sampled_from([0, 1, 5])),
            most_outstanding=draw(st.integers(1, 6)),
        ),
        changes=[(float(at), int(rng.integers(1, num_replicas + 1))) for at in times] if kind == "plan" else [],
        faults_of=lambda replica: iter(faults[replica]),
    )


@st.composite
def fleet_cases(draw: st.DrawFn) -> FleetCase:
    """With prefix caches, sessions and speculation always there, so that the loop is compiled once."""
    case = draw(session_cases())
    router = draw(st.sampled_from([case.settings.router, state.DEFERRED]))
    s = case.settings
    if s.scheduler == state.SGLANG:  # does not speculate in a pipeline
        s = s._replace(num_stages=1)
    num_queries = draw(st.sampled_from([1, 3])) if s.num_stages == 1 else 1
    speculation = state.Speculation(num_queries, draw(st.floats(1.0, num_queries)))
    most = max(s.max_num_batched_tokens, num_queries)
    if num_queries > 1 and s.chunked_prefill:
        most = draw(st.sampled_from([most, num_queries + 1, 2 * num_queries + 1]))  # short: requests are left out
    case.settings = s._replace(router=router, num_blocks=s.num_blocks + num_queries, max_num_batched_tokens=most)
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


def run_both(found: FleetCase) -> tuple[np.ndarray, Table, FleetRun, ReferenceFleet, list[Request]]:
    case, arrays = found.case, found.case.requests
    requests = [
        Request(i, float(arrival), int(inputs), int(outputs), int(priority), segments)
        for i, (arrival, inputs, outputs, priority, segments) in enumerate(
            zip(arrays.arrival_s, arrays.input_tokens, arrays.output_tokens, arrays.priority, chains(case), strict=True)
        )
    ]
    give_tenants(requests, arrays)
    if arrays.previous is not None and arrays.think_s is not None and arrays.session is not None:
        for request, previous, think_s, session in zip(
            requests, arrays.previous, arrays.think_s, arrays.session, strict=True
        ):
            request.previous, request.think_s, request.session = int(previous), float(think_s), int(session)
    reference = ReferenceFleet(
        found.plan, case.settings, case.cost, requests, case.tiers, case.load_overlaps, found.speculation
    )
    reference.run()
    cache = prefix_cache(case.settings, arrays, case.tiers, case.load_overlaps)
    fleet = start_fleet(found.plan, case.settings, arrays.arrival_s.size)
    records, steps, _ = run_loop(
        case.settings, case.cost, arrays, cache=cache, speculation=found.speculation, fleet=fleet
    )
    return records, steps, fleet, reference, requests


@settings(max_examples=300)
@given(fleet_cases())
def test_loop_equals_the_oracle(found: FleetCase) -> None:
    records, steps, fleet, reference, requests = run_both(found)
    phases = np.concatenate(fleet.phases)
    assert [tuple(row) for row in phases.tolist()] == reference.phases
    losses = np.concatenate(fleet.losses)
    assert [tuple(row) for row in losses.tolist()] == [
        (stay.request, stay.replica, stay.begin_s, stay.end_s) for stay in reference.stays
    ]
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions"):
        np.testing.assert_array_equal(records[name], [getattr(request, name) for request in requests], err_msg=name)
    np.testing.assert_array_equal(fleet.fleet.sent_s, [reference.sent_s[request.index] for request in requests])
    for replica in range(found.case.settings.num_replicas):
        mine = np.flatnonzero(steps["replica"] == replica)
        tokens = np.repeat(steps["decode_tokens"][mine] + steps["prefill_tokens"][mine], steps["num_steps"][mine])
        theirs = [step for step in reference.steps if step.replica == replica]
        np.testing.assert_array_equal(tokens, [sum(step.scheduled.values()) for step in theirs])
