"""Speculative decoding: the compiled loop against plain Python, and the mean that the formula promises."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_oracle import Case, cases, random_cost
from windtunnel.engine.reference import Reference, Request
from windtunnel.engine.serving import run_loop
from windtunnel.kernels import state


@st.composite
def speculative_cases(draw: st.DrawFn) -> tuple[Case, state.Speculation]:
    case = draw(cases())
    num_queries = draw(st.integers(2, 5))
    speculation = state.Speculation(num_queries, draw(st.floats(1.0, num_queries)))
    s = case.settings
    whole = case.requests.input_tokens + case.requests.output_tokens + num_queries
    largest = int((-(-whole // s.block_size)).max()) + s.blocks_per_request
    s = s._replace(
        num_stages=1,
        num_blocks=largest + draw(st.integers(0, 3 * largest)),
        max_num_batched_tokens=max(s.max_num_batched_tokens, num_queries),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = s.max_num_batched_tokens + num_queries * s.max_num_seqs
    cost = random_cost(rng, s.max_num_seqs, most, bool(case.cost.host_overlaps))
    cost = cost._replace(
        sample_s=1e-4 + 1e-6 * np.arange(num_queries * s.max_num_seqs + 1.0),
        draft_s=1e-4 * np.arange(s.max_num_seqs + 1.0),
    )
    return replace(case, settings=s, cost=cost), speculation


@settings(max_examples=300)
@given(speculative_cases())
def test_loop_equals_the_oracle(drawn: tuple[Case, state.Speculation]) -> None:
    case, speculation = drawn
    arrays = case.requests
    columns = (arrays.arrival_s, arrays.input_tokens, arrays.output_tokens, arrays.priority)
    requests = [
        Request(i, float(arrival), int(inputs), int(outputs), int(priority))
        for i, (arrival, inputs, outputs, priority) in enumerate(zip(*columns, strict=True))
    ]
    reference_steps = Reference(case.settings, case.cost, requests, speculation).run()
    records, steps, _ = run_loop(case.settings, case.cost, arrays, speculation=speculation)
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions"):
        np.testing.assert_array_equal(records[name], [getattr(request, name) for request in requests], err_msg=name)
    assert steps["num_steps"].sum() == len(reference_steps)
    assert steps["used_blocks"].max() == max(step.used_blocks for step in reference_steps)


@settings(max_examples=100)
@given(cases())
def test_one_token_a_step_is_no_speculation(case: Case) -> None:
    plain = case.settings._replace(num_stages=1)
    cost = case.cost._replace(draft_s=np.zeros(plain.max_num_seqs + 1))
    expected, _, _ = run_loop(plain, cost, case.requests)
    found, _, _ = run_loop(plain, cost, case.requests, speculation=state.Speculation(1, 1.0))
    for name in expected.dtype.names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
