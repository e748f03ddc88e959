"""Speculative decoding: the compiled loop against plain Python, and the mean that the formula promises."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windtunnel as wt
from effort import cases_to_try
from serving.kv.test_prefix_cache import VLLM
from serving.loop.test_oracle import Case, assert_equal_to_the_oracle, cases, random_cost, session_cases
from serving.pool_of_one import run_pool
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.serving import codes
from windtunnel.serving.deployment import Speculative
from windtunnel.serving.setup.prefix_cache import prefix_cache
from windtunnel.serving.state import records as state
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays


@st.composite
def speculative_cases(draw: st.DrawFn, plain: st.SearchStrategy[Case]) -> tuple[Case, state.Speculation]:
    case = draw(plain)
    num_queries = draw(st.integers(2, 5))
    speculation = state.Speculation(num_queries, draw(st.floats(1.0, num_queries)))
    s = case.settings
    whole = case.requests.input_tokens + case.requests.output_tokens + num_queries
    largest = int((-(-whole // s.block_size)).max()) + s.blocks_per_request
    s = s._replace(
        num_stages=1,
        num_blocks=s.num_groups * (largest + draw(st.integers(0, 3 * largest))),
        num_window_blocks=s.window_pool * (largest + draw(st.integers(0, largest))),
        max_num_batched_tokens=max(s.max_num_batched_tokens, num_queries),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cost = speculative_cost(rng, s, num_queries, bool(case.cost.host_overlaps))
    return replace(case, settings=s, cost=cost), speculation


def speculative_cost(
    rng: np.random.Generator, s: state.KernelSettings, num_queries: int, overlaps: bool = False
) -> state.StepCost:
    cost = random_cost(rng, s.max_num_seqs, s.max_num_batched_tokens + num_queries * s.max_num_seqs, overlaps)
    return cost._replace(
        sample_s=1e-4 + 1e-6 * np.arange(num_queries * s.max_num_seqs + 1.0),
        draft_s=1e-4 * np.arange(s.max_num_seqs + 1.0),
    )


@pytest.mark.loops
@settings(max_examples=cases_to_try(50))
@given(speculative_cases(cases()))
def test_loop_equals_the_oracle(drawn: tuple[Case, state.Speculation]) -> None:
    assert_equal_to_the_oracle(*drawn)


@pytest.mark.loops
@settings(max_examples=cases_to_try(35))
@given(speculative_cases(session_cases()))
def test_cached_prefixes_and_sessions_equal_the_oracles(drawn: tuple[Case, state.Speculation]) -> None:
    assert_equal_to_the_oracle(*drawn)


@pytest.mark.loops
@pytest.mark.parametrize("scheduler", ["vllm_v1", "sglang"])
def test_of_requests_that_a_step_ends_the_one_with_the_sooner_last_token_is_evicted_first(scheduler: str) -> None:
    """Requests 0 and 1 end in one step, the first with its second token and the other with its first."""
    s = VLLM._replace(
        scheduler=codes.SCHEDULERS.index(scheduler),
        max_num_seqs=8,
        max_num_batched_tokens=100,
        block_size=1,
        num_blocks=40,
    )
    case = Case(
        settings=s,
        cost=speculative_cost(np.random.default_rng(1), s, num_queries=2),
        requests=RequestArrays(
            arrival_s=np.array([0.0, 0.0, 1.0, 2.0]),
            input_tokens=np.array([10, 10, 23, 11]),
            output_tokens=np.array([3, 2, 1, 1]),
            priority=np.zeros(4, np.int64),
            prefixes=PrefixArrays(np.array([-1, -1]), np.array([10, 10]), np.array([0, 1, -1, 0]), np.full(4, -1)),
            previous=np.full(4, -1),
            think_s=np.zeros(4),
            session=np.arange(4),
        ),
        caches=True,
    )
    speculation = state.Speculation(2, 2.0)
    assert_equal_to_the_oracle(case, speculation)
    cache = prefix_cache(case.settings, case.requests)
    run_pool(case.settings, case.cost, case.requests, cache=cache, speculation=speculation)
    assert cache.requests.cached_tokens.tolist() == [0, 0, 0, 10]


@pytest.mark.loops
@settings(max_examples=cases_to_try(35))
@given(cases())
def test_one_token_a_step_is_no_speculation(case: Case) -> None:
    plain = case.settings._replace(num_stages=1)
    cost = case.cost._replace(draft_s=np.zeros(plain.max_num_seqs + 1))
    expected, _ = run_pool(plain, cost, case.requests)
    found, _ = run_pool(plain, cost, case.requests, speculation=state.Speculation(1, 1.0))
    for name in expected.dtype.names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


DRAFTING = catalog.model_config("meta-llama/Llama-3.1-70B") | {"name": "drafting", "num_nextn_predict_layers": 1}
"""A model with a prediction layer and a smaller one of its vocabulary; none is published."""


def simulated(model: object = DRAFTING, **speculative: object) -> wt.Result:
    # Some drafts keep an engine from scheduling ahead; here only their own cost is to differ.
    chosen: dict[str, object] = {"deployment.engine.async_scheduling": False}
    chosen |= {"deployment.engine.speculative": speculative} if speculative else {}
    return wt.simulate(
        wt.scenario(
            model=model,
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-70B", DRAFTING | {"num_nextn_predict_layers": 0}])
def test_a_model_without_a_prediction_layer_drafts_nothing(model: object) -> None:
    with pytest.raises(InputError, match="has no prediction layer"):
        simulated(model, method="mtp", num_draft_tokens=1, acceptance_fraction=0.7)


@pytest.mark.full
def test_the_head_of_eagle_is_a_dense_layer() -> None:
    """As wide as the experts of a token: of Mixtral's eight, two."""
    mixtral = catalog.model_config("mistralai/Mixtral-8x7B-v0.1") | {"name": "mixing", "num_nextn_predict_layers": 1}
    blocks = {
        method: simulated(mixtral, method=method, num_draft_tokens=2, acceptance_fraction=0.7).memory.num_blocks
        for method in ("ngram", "eagle", "mtp")
    }
    head, layer = blocks["ngram"] - blocks["eagle"], blocks["ngram"] - blocks["mtp"]
    assert 0.2 < head / layer < 0.35
