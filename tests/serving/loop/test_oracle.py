"""The compiled loop against the plain-Python engine, event for event, on random small scenarios."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from oracles.serving.cache import Segment
from oracles.serving.deployment import ReferenceDeployment
from oracles.serving.state import Step
from serving.forms import prepare_loop
from serving.pool_of_one import run_pool
from serving.served import (
    assert_equal_adapters,
    assert_equal_requests,
    assert_equal_steps,
    engine_plan,
    oracle_requests,
)
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError
from windtunnel.metrics.summary import itl_distribution
from windtunnel.serving import codes
from windtunnel.serving.setup.prefix_cache import NO_TIERS, prefix_cache
from windtunnel.serving.state import records as state
from windtunnel.serving.state.adapters import AdapterLimits, AdapterPlan
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

pytestmark = pytest.mark.loops


@dataclass
class Case:
    """One scenario, small enough to shrink and wide enough to meet preemption, chunking, blocking and warm-up."""

    settings: state.KernelSettings
    cost: state.StepCost
    requests: RequestArrays
    caches: bool = False
    tiers: np.ndarray = field(default_factory=lambda: NO_TIERS)
    load_overlaps: bool = False
    adapters: AdapterPlan | None = None


@st.composite
def cases(draw: st.DrawFn, have_windows: bool = False) -> Case:
    """With windows or without: the loop is compiled for either."""
    n = draw(st.integers(1, 30))
    scheduler = draw(st.sampled_from(range(len(codes.SCHEDULERS))))
    waits = codes.SCHEDULERS[scheduler].startswith("trtllm")
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    inputs = np.array(draw(st.lists(st.integers(1, 60), min_size=n, max_size=n)))
    outputs = np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)))
    fixed = draw(st.sampled_from([0, 0, 2]))
    largest = int((-(-(inputs + outputs) // block_size)).max()) + fixed
    chunked = draw(st.booleans())
    concurrency = draw(st.sampled_from([0, 1, 3, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gap_s = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    max_num_seqs, num_stages = draw(st.integers(1, 12)), draw(st.sampled_from([1, 1, 2, 4]))
    max_num_batched_tokens = draw(st.integers(2, 80)) if chunked else 100
    windows = draw(windows_of(largest)) if have_windows else {}
    return Case(
        settings=state.KernelSettings(
            scheduler=scheduler,
            num_replicas=draw(st.integers(1, 3)),
            ranks_per_replica=draw(st.sampled_from([1, 1, 2, 3])),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 7, 20])),
            chunked_prefill=int(chunked),
            reserves_prompt=int(draw(st.booleans())) if scheduler == codes.VLLM_V1 else 0,
            max_prefill_tokens=draw(st.integers(30, 200)),
            queue_order=draw(st.integers(0, len(codes.QUEUE_ORDERS) - 1)) if scheduler == codes.VLLM_V1 else 0,
            block_size=block_size,
            num_blocks=windows.get("num_groups", 1) * (largest + draw(st.integers(0, 3 * largest))),
            blocks_per_request=fixed,
            schedule_conservativeness=draw(st.sampled_from([0.5, 1.0, 1.3])),
            receive_interval_steps=draw(st.sampled_from([1, 1, 3, 10])),
            concurrency=concurrency,
            num_warmup=min(n, draw(st.integers(0, 5))) if concurrency else 0,
            frontend_s=draw(st.sampled_from([0.0, 0.004])),
            num_stages=num_stages,
            batch_wait_steps=draw(st.sampled_from([0, 2, 5])) if waits else 0,
            batch_wait_tokens=draw(st.integers(1, 100)),
            balance_steps=draw(st.sampled_from([0, 2, 7])) if waits and num_stages == 1 else 0,
            balance_wait_steps=draw(st.sampled_from([0, 0, 3])),
            router=draw(st.integers(0, len(codes.ROUTERS) - 1)),
            seed=draw(st.integers(0, 2**32)),
            **windows,
        ),
        cost=random_cost(rng, max_num_seqs, max_num_batched_tokens, draw(st.booleans())),
        requests=RequestArrays(
            arrival_s=np.cumsum(rng.exponential(gap_s, n)) if gap_s else np.zeros(n),
            input_tokens=inputs,
            output_tokens=outputs,
            priority=rng.integers(0, 3, n),
            tenant=rng.integers(0, min(n, 3), n),
            ttft_limit_s=rng.choice([0.05, 0.5, np.inf], n),
            concurrency=concurrency,
        ),
    )


@st.composite
def media_cases(draw: st.DrawFn) -> Case:
    """Prompts that end with images and videos, whose tokens may be computed in several steps."""
    case = draw(cases())
    rng, size = np.random.default_rng(draw(st.integers(0, 2**32))), case.requests.arrival_s.size
    tokens = [draw(st.integers(1, 9)) for _ in range(draw(st.sampled_from([2, 3, 12])))]
    media = np.full((size, 8, 3), -1)
    distinct = draw(st.sampled_from([2, 10, 1000]))
    for row, prompt in zip(media, case.requests.input_tokens.tolist(), strict=True):
        kinds = rng.integers(0, len(tokens), rng.integers(0, 9))
        kinds = kinds[np.cumsum(np.array(tokens)[kinds]) <= prompt]
        sizes = np.array(tokens)[kinds]
        row[: kinds.size, 0] = kinds
        row[: kinds.size, 1] = kinds + len(tokens) * rng.integers(0, distinct, kinds.size)
        row[: kinds.size, 2] = np.cumsum(sizes) - sizes + rng.integers(0, prompt - sizes.sum() + 1)
    prices = np.cumsum(rng.random((len(tokens), draw(st.sampled_from([2, 5])))), axis=1) * 1e-2
    prices[:, 0] = 0.0
    settings = case.settings
    if settings.scheduler == codes.VLLM_V1 and draw(st.booleans()):
        budget, room = draw(st.integers(max(tokens), 40)), draw(st.integers(max(tokens), 60))
        settings = settings._replace(encoder_cache_tokens=room, encoder_budget_tokens=budget)
    elif settings.scheduler == codes.SGLANG and draw(st.booleans()):
        room, by_request = draw(st.integers(0, 60)), int(draw(st.booleans()))
        settings = settings._replace(embedding_cache_tokens=room, embeddings_by_request=by_request)
    return replace(
        case,
        settings=settings,
        cost=case.cost._replace(encode_s=prices),
        requests=replace(case.requests, media=media, media_tokens=tuple(tokens)),
    )


@st.composite
def adapter_plans(draw: st.DrawFn, rng: np.random.Generator, least_loras: int = 1) -> AdapterPlan:
    """How a pool serves adapters."""
    max_loras, nodes = draw(st.integers(least_loras, least_loras + 3)), np.array([1.0, 2.0, 8.0, 60.0])
    limits = AdapterLimits(max_loras, max_loras + draw(st.integers(0, 3)), host_load_s=2e-3, disk_load_s=2e-2)
    return AdapterPlan(limits, nodes, np.cumsum(rng.random((max_loras + 1, nodes.size)), axis=1) * 1e-3)


@st.composite
def adapter_cases(draw: st.DrawFn) -> Case:
    """Requests with LoRA adapters, more of them than may run together; some use the base model."""
    case = draw(cases())
    rng, size = np.random.default_rng(draw(st.integers(0, 2**32))), case.requests.arrival_s.size
    count, plan = draw(st.integers(1, 8)), draw(adapter_plans(rng))
    scheduler = draw(st.sampled_from([codes.VLLM_V1, codes.SGLANG]))
    router = draw(st.sampled_from([case.settings.router, codes.ADAPTER_AFFINITY]))
    changed = {"scheduler": scheduler, "router": router, "num_stages": 1, "batch_wait_steps": 0, "balance_steps": 0}
    return replace(
        case,
        settings=case.settings._replace(**changed),
        requests=replace(case.requests, adapter=rng.integers(-1, count, size)),
        adapters=plan,
    )


@st.composite
def windows_of(draw: st.DrawFn, largest: int) -> dict[str, int]:
    """Layers with a sliding window, in groups that share the pool or in a pool of their own; some are never full."""
    found = {"window_tokens": draw(st.sampled_from([1, 2, 5, 8, 16, 30, 1000]))}
    if draw(st.booleans()):
        return found | {"window_pool": 1, "num_window_blocks": largest + draw(st.integers(0, largest))}
    groups, full = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 1, 2]))
    return found | {"num_groups": groups + full, "num_window_groups": groups}


@st.composite
def session_cases(draw: st.DrawFn) -> Case:
    """Cases with windows whose prompts share beginnings and whose requests may be turns of a session; some cache."""
    case = draw(cases(have_windows=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    requests = random_sessions(
        rng, case.requests, case.settings.num_warmup, draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.booleans())
    )
    whole = requests.input_tokens + requests.output_tokens
    largest = int((-(-whole // case.settings.block_size)).max()) + case.settings.blocks_per_request
    budget = case.settings.max_num_batched_tokens
    if not case.settings.chunked_prefill:
        budget = max(budget, int(whole.max()))
    settings = case.settings._replace(
        longest_prefix_first=int(draw(st.booleans())),
        num_blocks=case.settings.num_groups * (largest + draw(st.integers(0, 3 * largest))),
        # Of what is cached the groups without a window are counted, and there is one of them.
        num_window_groups=case.settings.num_groups - 1,
        num_window_blocks=case.settings.window_pool * (largest + draw(st.integers(0, largest))),
        max_num_batched_tokens=budget,
    )
    return Case(
        settings=settings,
        cost=random_cost(rng, settings.max_num_seqs, budget, bool(case.cost.host_overlaps)),
        requests=requests,
        caches=draw(st.sampled_from([True, True, False])),
        tiers=random_tiers(rng, draw(st.sampled_from([0, 0, 1, 2])), settings),
        load_overlaps=draw(st.booleans()),
    )


def random_tiers(rng: np.random.Generator, count: int, settings: state.KernelSettings) -> np.ndarray:
    tiers = new_table(state.Tier, count)
    tiers.capacity_blocks = rng.integers(1, 4 * settings.num_blocks, count)
    num_ranks = settings.num_replicas * settings.ranks_per_replica
    tiers.ranks_per_pool = rng.choice([settings.ranks_per_replica, num_ranks], count)
    tiers.block_s = rng.choice([1e-5, 1e-3], count)
    return tiers


def random_sessions(
    rng: np.random.Generator, requests: RequestArrays, num_warmup: int, follows: float, have_outputs: bool
) -> RequestArrays:
    """`requests` with prompts that share beginnings, some of them after another one of their session."""
    n = requests.arrival_s.size
    parents, tokens = [-1, -1, 0, 1], [int(rng.integers(1, 50)) for _ in range(4)]
    previous, session, node, output_node = (np.full(n, -1) for _ in range(4))
    inputs, think_s = requests.input_tokens.copy(), rng.choice([0.0, 0.0, 0.02], n)
    followed: set[int] = set()
    for i in range(n):
        before = [j for j in range(num_warmup, i) if j not in followed]
        session[i] = i
        node[i] = rng.integers(-1, len(parents))
        if i >= num_warmup and before and rng.random() < follows:
            previous[i] = rng.choice(before)
            session[i] = session[previous[i]]
            followed.add(int(previous[i]))
            parents.append(int(output_node[previous[i]]))
            tokens.append(int(rng.integers(1, 30)))
            node[i] = len(parents) - 1
        own = int(rng.integers(0, 20)) if node[i] >= 0 else int(inputs[i])
        path, at = 0, int(node[i])
        while at >= 0:
            path, at = path + tokens[at], parents[at]
        inputs[i] = path + own
        if have_outputs and rng.random() < 0.8:
            parents.append(int(node[i]))
            tokens.append(own + int(requests.output_tokens[i]))
            output_node[i] = len(parents) - 1
    arrivals = requests.arrival_s * (previous < 0) + (requests.arrival_s * 2 * (rng.random(n) < 0.1)) * (previous >= 0)
    forest = PrefixArrays(np.array(parents), np.array(tokens), node, output_node)
    return replace(
        requests,
        arrival_s=arrivals,
        input_tokens=inputs,
        previous=previous,
        think_s=think_s,
        session=session,
        prefixes=forest,
    )


OWN_SEGMENTS = 10_000
"""Numbers from here on are those of segments that one prompt alone has."""


def chains(case: Case) -> list[tuple[Segment, ...]]:
    """The segments of each request's prompt and output that have full blocks, root first."""
    forest, block_size = case.requests.prefixes, case.settings.block_size
    if forest is None or not case.caches:
        return [()] * case.requests.arrival_s.size
    found = []
    for i, whole in enumerate(case.requests.input_tokens + case.requests.output_tokens):
        at, path = int(forest.request_node[i]), []
        if forest.request_output_node[i] >= 0:
            at = int(forest.request_output_node[i])
        while at >= 0:
            path.append((at, int(forest.node_tokens[at])))
            at = int(forest.node_parent[at])
        if forest.request_output_node[i] < 0:
            path.insert(0, (OWN_SEGMENTS + i, int(whole) - sum(tokens for _, tokens in path)))
        end, segments = 0, []
        for index, tokens in reversed(path):
            segment = Segment(index, end // block_size, (end + tokens) // block_size, is_own=index >= OWN_SEGMENTS)
            end += tokens
            if segment.end_block > segment.first_block:
                segments.append(segment)
        found.append(tuple(segments))
    return found


def random_cost(
    rng: np.random.Generator, max_num_seqs: int, max_num_batched_tokens: int, overlaps: bool
) -> state.StepCost:
    requests, tokens = np.arange(max_num_seqs + 1), np.arange(max_num_batched_tokens + max_num_seqs + 1)
    lengths, chunks = np.array([0, 1, 7, 20, 64, 200, 1000.0]), np.array([0, 3, 10, 50, 400.0])
    return state.StepCost(
        decode_token_s=8e-3 + 2e-5 * requests + 1e-4 * rng.random(requests.size),
        mixed_token_s=8e-3 + 1e-4 * tokens.astype(np.float64),
        sample_s=1e-4 + 1e-6 * requests.astype(np.float64),
        context_nodes=lengths,
        decode_attention_s=np.cumsum(rng.random((requests.size, lengths.size)), axis=1) * 1e-3,
        chunk_nodes=chunks,
        length_nodes=lengths,
        prefill_attention_s=np.cumsum(rng.random((chunks.size, lengths.size)), axis=1) * 1e-3,
        host_step_s=1e-3,
        host_request_s=1e-5,
        host_overlaps=int(overlaps),
        recorded_step_s=np.zeros(0),
        group_token_s=2e-5 * np.arange(3.0 * tokens.size),
        launch_s=np.where(tokens <= 8, 7e-3, 9.5e-3),
        decode_launch_s=np.where(np.arange(max_num_seqs + 1) <= max_num_seqs // 2, 0.0, 8.5e-3),
        mixed_decode_attention_s=np.cumsum(rng.random((requests.size, lengths.size)), axis=1) * 2e-3,
        longest_share=float(rng.choice([0.0, 0.5])),
        waiting_attention_s=np.cumsum(rng.random((requests.size, lengths.size)), axis=1) * 1e-3,
        padded_requests=np.minimum(-(-requests // 4) * 4, max_num_seqs),
        unhidden_step_s=float(rng.choice([0.0, 3e-4])),
        repeated_share=0.3 if max_num_seqs % 2 else 1.0,
    )


def run_oracle(case: Case, speculation: state.Speculation | None = None) -> tuple[ReferenceDeployment, list[Step]]:
    tiers = case.tiers if case.caches else NO_TIERS
    plan = engine_plan(case.settings, case.cost, speculation)._replace(adapters=case.adapters)
    oracle = ReferenceDeployment(
        [plan], oracle_requests(case.requests), chains=[chains(case)], below=[(tiers, case.load_overlaps)]
    )
    return oracle, oracle.run()


@settings(max_examples=cases_to_try(50))
@given(cases())
def test_loop_equals_the_oracle(case: Case) -> None:
    """Invariant 11."""
    assert_equal_to_the_oracle(case)


@settings(max_examples=cases_to_try(50))
@given(cases(have_windows=True))
def test_windows_equal_the_oracles(case: Case) -> None:
    assert_equal_to_the_oracle(case)


@pytest.mark.interpreted
@settings(max_examples=cases_to_try(100))
@given(media_cases())
def test_images_and_videos_equal_the_oracles(case: Case) -> None:
    assert_equal_to_the_oracle(case)


@pytest.mark.interpreted
@settings(max_examples=cases_to_try(100))
@given(adapter_cases())
def test_adapters_equal_the_oracles(case: Case) -> None:
    """Who is passed over, what is loaded, how many adapters each step has."""
    oracle, _ = run_oracle(case)
    assert_equal_to_the_oracle(case)
    plan = engine_plan(case.settings, case.cost)._replace(adapters=case.adapters)
    assert_equal_adapters(prepare_loop([plan], case.requests).run(), oracle)


@settings(max_examples=cases_to_try(70))
@given(session_cases())
def test_cached_prefixes_and_sessions_equal_the_oracles(case: Case) -> None:
    assert_equal_to_the_oracle(case)


def assert_equal_to_the_oracle(case: Case, speculation: state.Speculation | None = None) -> None:
    oracle, reference_steps = run_oracle(case, speculation)
    cache = prefix_cache(case.settings, case.requests, case.tiers, case.load_overlaps) if case.caches else None
    records, steps = run_pool(
        case.settings, case.cost, case.requests, cache=cache, speculation=speculation, adapters=case.adapters
    )
    assert_equal_requests(records, oracle.requests)
    if cache is not None:
        np.testing.assert_array_equal(
            cache.requests.cached_tokens, [request.cached_tokens for request in oracle.requests]
        )
    assert_equal_steps(steps, oracle, reference_steps)


@settings(max_examples=cases_to_try(50))
@given(cases())
def test_inter_token_latency_equals_the_oracles(case: Case) -> None:
    """Exact in the mean, also where preemption, another order or a short token budget leaves decoding requests out."""
    _, reference_steps = run_oracle(case)
    _, steps = run_pool(case.settings, case.cost, case.requests)
    gaps_s = np.array([gap for step in reference_steps for gap in step.gaps_s])
    found = itl_distribution(steps)
    if not gaps_s.size:
        assert found is None
        return
    assert found is not None
    assert found.mean == np.float64(gaps_s.mean()) or abs(found.mean / gaps_s.mean() - 1) < 5e-3


@settings(max_examples=cases_to_try(35))
@given(cases())
def test_invariants(case: Case) -> None:
    """Invariant 1, Invariant 2, Invariant 3, Invariant 4 and Invariant 10."""
    records, steps = run_pool(case.settings, case.cost, case.requests)
    assert (records["arrival_s"] <= records["scheduled_s"]).all()
    assert (records["scheduled_s"] < records["first_token_s"]).all()
    assert (records["first_token_s"] <= records["finish_s"]).all()
    for replica in range(case.settings.num_replicas):
        rows = steps["replica"] == replica
        starts, ends = steps["start_s"][rows], steps["start_s"][rows] + steps["duration_s"][rows]
        assert (np.diff(starts) >= 0).all()
        in_flight = (starts[None, :] <= starts[:, None]) & (ends[None, :] > starts[:, None] + 1e-12)
        assert not starts.size or in_flight.sum(axis=1).max() <= case.settings.num_stages
    capacity = case.settings.num_blocks * case.settings.ranks_per_replica
    assert (steps["used_blocks"] <= capacity).all()
    assert (steps["num_running"] <= case.settings.max_num_seqs * case.settings.ranks_per_replica).all()
    # Every output token but the first of each is decoded once; a preemption turns one into the end of a prefill.
    emitted = (steps["decode_tokens"] * steps["num_steps"]).sum() + steps["resumed_tokens"].sum()
    assert emitted == (case.requests.output_tokens - 1).sum()
    recomputed = records["num_preemptions"].sum() > 0
    prefilled, given = steps["prefill_tokens"].sum(), case.requests.input_tokens.sum()
    assert prefilled > given if recomputed else prefilled == given
    if case.settings.concurrency:
        starts_and_ends = np.concatenate([records["arrival_s"], records["finish_s"]])
        change = np.concatenate([np.ones(records.size), -np.ones(records.size)])
        order = np.lexsort((change, starts_and_ends))
        assert np.cumsum(change[order]).max() <= case.settings.concurrency


@settings(max_examples=cases_to_try(20))
@given(cases())
def test_the_scheduler_is_blind_to_output_lengths(case: Case) -> None:
    """Invariant 7. Until the first request ends, vLLM's schedule cannot depend on how long outputs will be."""
    if case.settings.scheduler != codes.VLLM_V1 or case.settings.concurrency:
        return
    longer = RequestArrays(
        case.requests.arrival_s, case.requests.input_tokens, case.requests.output_tokens + 5, case.requests.priority
    )
    roomy = case.settings._replace(num_blocks=case.settings.num_blocks + 10 * case.requests.arrival_s.size)
    first, _ = run_pool(roomy, case.cost, case.requests)
    second, _ = run_pool(roomy, case.cost, longer)
    horizon_s = min(first["finish_s"].min(), second["finish_s"].min())
    early = first["first_token_s"] < horizon_s
    np.testing.assert_array_equal(first["first_token_s"][early], second["first_token_s"][early])


@pytest.mark.compiled
@pytest.mark.full
def test_a_run_in_which_a_request_is_preempted_for_ever_ends_with_an_error() -> None:
    """A scenario is refused if a request does not fit the KV cache; this loop is given one all the same."""
    own = state.KernelSettings(codes.VLLM_V1, 1, 1, 1, 32, block_size=16, num_blocks=3, chunked_prefill=1)
    arrays = [np.array([value], np.int64) for value in (60, 10, 0)]
    cost = random_cost(np.random.default_rng(0), 1, 32, False)
    with pytest.raises(InputError, match="request 0 was preempted"):
        run_pool(own, cost, RequestArrays(np.zeros(1), *arrays))
