"""Speculative decoding: the compiled loop against plain Python, and the mean that the formula promises."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from engine.test_oracle import Case, cases, give_tenants, random_cost
from windtunnel.engine.reference import Reference, Request
from windtunnel.engine.serving import run_loop
from windtunnel.errors import InputError
from windtunnel.kernels import state
from windtunnel.spec.deployment import Speculative


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


@settings(max_examples=cases_to_try(300))
@given(speculative_cases())
def test_loop_equals_the_oracle(drawn: tuple[Case, state.Speculation]) -> None:
    case, speculation = drawn
    arrays = case.requests
    columns = (arrays.arrival_s, arrays.input_tokens, arrays.output_tokens, arrays.priority)
    requests = [
        Request(i, float(arrival), int(inputs), int(outputs), int(priority))
        for i, (arrival, inputs, outputs, priority) in enumerate(zip(*columns, strict=True))
    ]
    give_tenants(requests, arrays)
    reference_steps = Reference(case.settings, case.cost, requests, speculation=speculation).run()
    records, steps, _ = run_loop(case.settings, case.cost, arrays, speculation=speculation)
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions"):
        np.testing.assert_array_equal(records[name], [getattr(request, name) for request in requests], err_msg=name)
    assert steps["num_steps"].sum() == len(reference_steps)
    assert steps["used_blocks"].max() == max(step.used_blocks for step in reference_steps)


@settings(max_examples=cases_to_try(100))
@given(cases())
def test_one_token_a_step_is_no_speculation(case: Case) -> None:
    plain = case.settings._replace(num_stages=1)
    cost = case.cost._replace(draft_s=np.zeros(plain.max_num_seqs + 1))
    expected, _, _ = run_loop(plain, cost, case.requests)
    found, _, _ = run_loop(plain, cost, case.requests, speculation=state.Speculation(1, 1.0))
    for name in expected.dtype.names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def simulated(**speculative: object) -> wt.Result:
    chosen = {"deployment.engine.speculative": speculative} if speculative else {}
    return wt.simulate(
        wt.scenario(
            model="meta-llama/Llama-3.1-70B",
            quant="fp8",
            device="h100_sxm",
            tp=4,
            concurrency=8,
            num_requests=32,
            input_tokens=512,
            output_tokens=401,
            settings=chosen,
        )
    )


@pytest.mark.parametrize(
    ("acceptance", "mean"),
    [
        (0.6, (1 - 0.6**4) / (1 - 0.6)),  # Leviathan et al. (2023), equation 1
        (1.0, 4.0),
        (0.0, 1.0),
        ((0.9, 0.5, 0.2), 1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.2),
    ],
)
def test_a_step_gives_as_many_tokens_as_the_formula_says(acceptance: object, mean: float) -> None:
    speculative = Speculative(method="ngram", num_draft_tokens=3, acceptance_fraction=acceptance)  # type: ignore[arg-type]
    assert speculative.tokens_per_step == pytest.approx(mean)
    summary = simulated(method="ngram", num_draft_tokens=3, acceptance_fraction=acceptance).summary
    assert summary.tpot_s is not None
    assert summary.itl_s is not None
    assert summary.itl_s.p50 / summary.tpot_s.mean == pytest.approx(mean, rel=0.03)


def test_drafting_costs_time_and_memory() -> None:
    plain, free, layer, model = (
        simulated(),
        simulated(method="ngram", num_draft_tokens=2, acceptance_fraction=0.7),
        simulated(method="mtp", num_draft_tokens=2, acceptance_fraction=0.7),
        simulated(method="draft_model", draft_model="llama-3.2-1b", num_draft_tokens=2, acceptance_fraction=0.7),
    )
    assert plain.memory.num_blocks == free.memory.num_blocks > layer.memory.num_blocks > model.memory.num_blocks
    steps = [run.summary.itl_s.p50 for run in (plain, free, layer, model) if run.summary.itl_s]
    assert steps == sorted(steps)
    assert len(set(steps)) == 4
    assert free.summary.checks is None


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "mtp", "num_draft_tokens": 0, "acceptance_fraction": 0.5}, "num_draft_tokens is 0"),
        ({"method": "mtp", "num_draft_tokens": 1, "acceptance_fraction": 1.5}, "acceptance_fraction is 1.5"),
        ({"method": "mtp", "num_draft_tokens": 3, "acceptance_fraction": [0.5, 0.4]}, "2 entries for 3 draft tokens"),
        ({"method": "draft_model", "num_draft_tokens": 1, "acceptance_fraction": 0.5}, "draft_model goes with"),
        (
            {"method": "draft_model", "draft_model": "qwen3-8b", "num_draft_tokens": 1, "acceptance_fraction": 0.5},
            "same vocabulary|tokens and",
        ),
        ({"method": "guess", "num_draft_tokens": 1, "acceptance_fraction": 0.5}, "'guess', which is not known"),
    ],
)
def test_speculation_that_cannot_work_is_refused(speculative: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulated(**speculative)
