"""Pools joined by handoffs: the compiled loop against plain Python, conservation, and limits that are known."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from oracles.serving.deployment import ReferenceDeployment
from serving.forms import prepare_loop
from serving.loop.test_oracle import Case as OnePool
from serving.loop.test_oracle import adapter_plans, chains, random_cost, random_sessions, random_tiers, windows_of
from serving.pool_of_one import run_pool
from serving.served import (
    assert_equal_adapters,
    assert_equal_requests,
    assert_equal_steps,
    assert_equal_transfers,
    oracle_requests,
)
from windtunnel.metrics.summary import itl_distribution
from windtunnel.serving import codes
from windtunnel.serving.codes import BOTH, DECODE, PREFILL
from windtunnel.serving.custom.policy import PolicyEngine, PolicyRequests
from windtunnel.serving.run import Custom, LoopRun, first_pool
from windtunnel.serving.setup.prefix_cache import KvRetention, caches_of
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import HandoffRules, PoolPlan, Pools
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

ROLES = ((PREFILL, DECODE), (PREFILL, DECODE, BOTH), (PREFILL, BOTH), (BOTH, BOTH), (PREFILL, PREFILL, DECODE, DECODE))

pytestmark = pytest.mark.loops("pools")


@dataclass
class Case:
    """Some pools and some requests, small enough to shrink."""

    plans: list[PoolPlan]
    handoff_rules: HandoffRules
    requests: RequestArrays
    speculation: state.Speculation | None = None
    retention: list[KvRetention] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn, have_windows: bool = False) -> Case:
    """With windows or without: the loop is compiled for either."""
    n = draw(st.integers(1, 30))
    inputs = np.array(draw(st.lists(st.integers(1, 60), min_size=n, max_size=n)))
    outputs = np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)))
    concurrency = draw(st.sampled_from([0, 0, 1, 3, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gap_s = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    shared = {
        "concurrency": concurrency,
        "num_warmup": min(n, draw(st.integers(0, 5))) if concurrency else 0,
        "frontend_s": draw(st.sampled_from([0.0, 0.004])),
        "router": draw(st.integers(0, len(codes.ROUTERS) - 1)),
        "seed": draw(st.integers(0, 2**32)),
    }
    roles = draw(st.sampled_from(ROLES))
    pools = [draw(plans(role, inputs + outputs, shared, rng, have_windows)) for role in roles]
    # SGLang's prefill batches never preempt: its decode side cannot compute anything of a prompt.
    samples_first = 0 if any(pool.settings.scheduler == codes.SGLANG for pool in pools) else draw(st.integers(0, 1))
    return Case(
        plans=pools,
        handoff_rules=HandoffRules(
            decode_router=draw(st.integers(0, len(codes.ROUTERS) - 1)),
            local_tokens=draw(st.sampled_from([0, 0, 10, 30])),
            decode_samples_first=samples_first,
            decode_streams_first=0 if samples_first else draw(st.integers(0, 1)),
            bytes_per_token=draw(st.sampled_from([0.0, 1e3, 1e5])),
            bytes_per_request=draw(st.sampled_from([0.0, 1e5])),
            latency_s=draw(st.sampled_from([0.0, 1e-3, 0.05])),
            tail_fraction=draw(st.sampled_from([1.0, 0.1])),
        ),
        requests=RequestArrays(
            arrival_s=np.cumsum(rng.exponential(gap_s, n)) if gap_s else np.zeros(n),
            input_tokens=inputs,
            output_tokens=outputs,
            priority=rng.integers(0, 3, n),
            concurrency=concurrency,
            tenant=rng.integers(0, min(n, 3), n),
            ttft_limit_s=rng.choice([0.05, 1.0, np.inf], n),
        ),
    )


@st.composite
def plans(
    draw: st.DrawFn,
    role: int,
    lengths: np.ndarray,
    shared: dict[str, float],
    rng: np.random.Generator,
    have_windows: bool,
) -> PoolPlan:
    scheduler = draw(st.sampled_from([codes.VLLM_V1, codes.VLLM_V1, codes.TRTLLM, codes.SGLANG]))
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    fixed = draw(st.sampled_from([0, 0, 2]))
    largest = int((-(-lengths // block_size)).max()) + fixed
    chunked = draw(st.booleans())
    max_num_seqs, num_stages = draw(st.integers(1, 12)), draw(st.sampled_from([1, 1, 2]))
    max_num_batched_tokens = draw(st.integers(2, 80)) if chunked else 100
    windows = draw(windows_of(largest)) if have_windows else {}
    own = state.KernelSettings(
        scheduler=scheduler,
        num_replicas=draw(st.integers(1, 3)),
        ranks_per_replica=draw(st.sampled_from([1, 1, 2])),
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
        num_stages=num_stages,
        batch_wait_steps=draw(st.sampled_from([0, 2, 5])) if scheduler == codes.TRTLLM else 0,
        batch_wait_tokens=draw(st.integers(1, 100)),
        balance_steps=draw(st.sampled_from([0, 2, 7])) if scheduler == codes.TRTLLM and num_stages == 1 else 0,
        balance_wait_steps=draw(st.sampled_from([0, 0, 3])),
        **windows,
        **shared,
    )
    cost = random_cost(rng, max_num_seqs, max_num_batched_tokens, draw(st.booleans()))
    return PoolPlan(
        own,
        cost,
        role=role,
        link_bytes_per_s=draw(st.sampled_from([1e6, 1e8, np.inf])),
        kv_copies=draw(st.sampled_from([1.0, 1.0, 8.0])),
    )


def with_speculation(case: Case) -> list[PoolPlan]:
    """A pool that only prefills has no decode steps."""
    return [plan if plan.role == PREFILL else plan._replace(speculation=case.speculation) for plan in case.plans]


def oracle_of(case: Case, **more: Any) -> ReferenceDeployment:
    arrays = case.requests
    if arrays.prefixes is None:
        nobody, nothing = np.full(arrays.arrival_s.size, -1), np.zeros(0, np.int64)
        arrays = replace(arrays, prefixes=PrefixArrays(nothing, nothing, nobody, nobody))
    own = [
        chains(OnePool(plan.settings, plan.cost, arrays, kept.anywhere))
        for plan, kept in zip(case.plans, case.retention, strict=False)
    ]
    return ReferenceDeployment(
        with_speculation(case),
        oracle_requests(arrays),
        case.handoff_rules,
        chains=own,
        below=[(kept.tiers, kept.load_overlaps) for kept in case.retention],
        **more,
    )


def pools_of(run: LoopRun) -> Pools:
    assert run.pools is not None
    return run.pools


def run_compiled(case: Case) -> LoopRun:
    plans = with_speculation(case)
    caches = [caches_of(plan.settings, kept, case.requests) for plan, kept in zip(plans, case.retention, strict=False)]
    return prepare_loop(plans, case.requests, caches, case.handoff_rules).run()


@st.composite
def speculative_cases(draw: st.DrawFn) -> Case:
    """Cases in which a decode step gives several tokens."""
    case = draw(cases(have_windows=True))
    speculation = state.Speculation(3, draw(st.floats(1.0, 3.0)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = case.requests.input_tokens + case.requests.output_tokens + 3
    made = []
    for plan in case.plans:
        s = plan.settings
        largest = int((-(-lengths // s.block_size)).max()) + s.blocks_per_request
        s = s._replace(
            num_stages=1,
            num_blocks=s.num_groups * (largest + draw(st.integers(0, 3 * largest))),
            num_window_blocks=s.window_pool * (largest + draw(st.integers(0, largest))),
            max_num_batched_tokens=max(s.max_num_batched_tokens, 3),
        )
        cost = random_cost(rng, s.max_num_seqs, s.max_num_batched_tokens + 3 * s.max_num_seqs, draw(st.booleans()))
        cost = cost._replace(
            sample_s=1e-4 + 1e-6 * np.arange(3 * s.max_num_seqs + 1.0), draft_s=1e-4 * np.arange(s.max_num_seqs + 1.0)
        )
        made.append(plan._replace(settings=s, cost=cost))
    return replace(case, plans=made, speculation=speculation)


@st.composite
def caching_cases(draw: st.DrawFn) -> Case:
    """Cases whose prompts share beginnings and whose requests may be turns of a session; some pools have caches."""
    case = draw(cases(have_windows=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_warmup = max(plan.settings.num_warmup for plan in case.plans)
    requests = random_sessions(
        rng, case.requests, num_warmup, draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.booleans())
    )
    whole = requests.input_tokens + requests.output_tokens
    made = []
    for plan in case.plans:
        s = plan.settings
        largest = int((-(-whole // s.block_size)).max()) + s.blocks_per_request
        # These prompts may hold what another request is about to write: it then keeps the copy in the cache beside its
        # own, and SGLang spares the last request that decodes.
        least = 2 * largest if s.scheduler == codes.SGLANG else largest
        budget = s.max_num_batched_tokens if s.chunked_prefill else max(s.max_num_batched_tokens, int(whole.max()))
        s = s._replace(
            longest_prefix_first=int(draw(st.booleans())),
            num_blocks=s.num_groups * (least + draw(st.integers(0, 3 * largest))),
            num_window_blocks=s.window_pool * (least + draw(st.integers(0, largest))),
            # Of what is cached the groups without a window are counted, and there is one of them.
            num_window_groups=s.num_groups - 1,
            max_num_batched_tokens=budget,
        )
        made.append(plan._replace(settings=s, cost=random_cost(rng, s.max_num_seqs, budget, draw(st.booleans()))))
    caching = [draw(st.sampled_from([True, True, False])) for _ in made]
    caching = caching if any(caching) else [True] * len(made)
    made = [
        plan if caches else plan._replace(settings=plan.settings._replace(longest_prefix_first=0))
        for plan, caches in zip(made, caching, strict=True)
    ]
    retention = [KvRetention(caches, load_overlaps=draw(st.booleans())) for caches in caching]
    if draw(st.booleans()):
        retention = random_lower_tiers(draw, rng, made, retention)
    return replace(case, plans=made, requests=requests, retention=retention)


def random_lower_tiers(
    draw: st.DrawFn, rng: np.random.Generator, plans: list[PoolPlan], retention: list[KvRetention]
) -> list[KvRetention]:
    """Tiers below the pools that cache; those with blocks of one size may share a store."""
    found = []
    for plan, kept in zip(plans, retention, strict=True):
        tiers = random_tiers(rng, draw(st.integers(0, 2)) if kept.on_device else 0, plan.settings)
        stored = tiers.size > 0 and draw(st.booleans())
        if stored:
            tiers[-1].store = 1 + plan.settings.block_size
            tiers[-1].ranks_per_pool = 10**6
            tiers[-1].capacity_blocks = 1 + 10 * plan.settings.block_size
        found.append(replace(kept, tiers=tiers))
    return found


@st.composite
def preempting_cases(draw: st.DrawFn) -> Case:
    """Cases of prompts that share nothing, in pools that cache: preempted requests find their own blocks."""
    case = draw(caching_cases())
    return replace(case, requests=replace(case.requests, prefixes=None))


@st.composite
def adapter_cases(draw: st.DrawFn) -> Case:
    """Requests with LoRA adapters, in pools with slots of their own numbers; some pools have several ranks."""
    case = draw(cases())
    rng, size = np.random.default_rng(draw(st.integers(0, 2**32))), case.requests.arrival_s.size
    router, decode_router = (
        draw(st.sampled_from([drawn, codes.ADAPTER_AFFINITY]))
        for drawn in (case.plans[0].settings.router, case.handoff_rules.decode_router)
    )
    count, made = draw(st.integers(1, 8)), []
    for plan in case.plans:
        scheduler = draw(st.sampled_from([codes.VLLM_V1, codes.SGLANG]))
        # SGLang takes requests that were handed off whatever their adapter.
        least_loras = count if scheduler == codes.SGLANG and plan.role != PREFILL else 1
        changed = {"scheduler": scheduler, "num_stages": 1, "batch_wait_steps": 0, "balance_steps": 0}
        order = plan.settings.queue_order if scheduler == codes.VLLM_V1 else codes.FCFS
        own = plan.settings._replace(queue_order=order, router=router, **changed)
        made.append(plan._replace(settings=own, adapters=draw(adapter_plans(rng, least_loras))))
    rules = case.handoff_rules._replace(decode_router=decode_router)
    if any(plan.settings.scheduler == codes.SGLANG for plan in made):
        # Its last decoding request is spared, and waits for ever for blocks of one whose place a local prompt took.
        rules = rules._replace(decode_samples_first=0, local_tokens=0)
    adapter = rng.integers(-1, count, size)
    return replace(case, plans=made, handoff_rules=rules, requests=replace(case.requests, adapter=adapter))


@pytest.mark.interpreted
@settings(max_examples=cases_to_try(100))
@given(adapter_cases())
def test_adapters_in_pools_equal_the_oracles(case: Case) -> None:
    """Who is passed over on either side of a handoff, what each rank loads, and who is sent to it."""
    oracle = oracle_of(case)
    steps = oracle.run()
    run = run_compiled(case)
    assert_equal_requests(run.requests, oracle.requests)
    assert_equal_transfers(run, oracle)
    assert_equal_steps(run.steps, oracle, steps)
    assert_equal_adapters(run, oracle)


@settings(max_examples=cases_to_try(50))
@given(st.one_of(cases(), speculative_cases()))
def test_loop_equals_the_oracle(case: Case) -> None:
    assert_equal_to_the_oracle(case)


@settings(max_examples=cases_to_try(45))
@given(caching_cases())
def test_cached_prefixes_and_sessions_equal_the_oracles(case: Case) -> None:
    assert_equal_to_the_oracle(case)


@settings(max_examples=cases_to_try(35))
@given(preempting_cases())
def test_preempted_requests_find_their_own_blocks_as_the_oracles_do(case: Case) -> None:
    assert_equal_to_the_oracle(case, shares=False)


def assert_equal_to_the_oracle(case: Case, shares: bool = True) -> None:
    oracle = oracle_of(case)
    reference_steps = oracle.run()
    run = run_compiled(case)
    assert_equal_requests(run.requests, oracle.requests)
    assert_equal_transfers(run, oracle)
    if case.retention and shares:
        assert_equal_caches(run, oracle)
    assert_equal_steps(run.steps, oracle, reference_steps)


def assert_equal_caches(run: LoopRun, oracle: ReferenceDeployment) -> None:
    assert run.cache is not None
    by_pool = run.cache.requests["cached_tokens"].reshape(len(run.plans), -1)
    cached_tokens = by_pool[first_pool(run), np.arange(len(oracle.requests))]
    np.testing.assert_array_equal(cached_tokens, [max(request.cached_tokens, 0) for request in oracle.requests])


def first_come(
    requests: PolicyRequests, waiting: np.ndarray, ready: np.ndarray, engine: PolicyEngine
) -> list[tuple[int, int]]:
    """Schedule as vLLM V1 does while blocks and tokens suffice."""
    left = np.where(requests.is_prefilled, 1, requests.prompt_tokens - requests.processed_tokens)
    return [(int(i), int(left[i])) for i in (*ready, *waiting[: engine.max_num_seqs - engine.num_running])]


@settings(max_examples=cases_to_try(50))
@given(st.one_of(cases(), caching_cases(), speculative_cases()), st.integers(0, 2**32))
def test_users_policies_run_in_pools_as_the_scheduler_that_they_copy(case: Case, seed: int) -> None:
    rng, budget = np.random.default_rng(seed), 4000
    case.handoff_rules = case.handoff_rules._replace(local_tokens=0)
    engines = []
    for plan in case.plans:
        limits = plan.settings._replace(
            scheduler=codes.VLLM_V1,
            ranks_per_replica=1,
            num_stages=1,
            queue_order=codes.FCFS,
            chunked_prefill=1,
            long_prefill_token_threshold=0,
            max_num_batched_tokens=budget,
            num_blocks=100_000,
            window_tokens=0,
            num_groups=1,
            num_window_groups=0,
            window_pool=0,
            num_window_blocks=0,
            blocks_per_request=0,
            batch_wait_steps=0,
            balance_steps=0,
        )
        cost = random_cost(rng, limits.max_num_seqs, budget, False)
        samples = 1e-4 + 1e-6 * np.arange(3 * limits.max_num_seqs + 1.0)
        # A policy may have KV read a step earlier: what is held then has no price in pools that hand KV over.
        cost = cost._replace(sample_s=samples, draft_s=1e-4 * np.arange(limits.max_num_seqs + 1.0), repeated_share=1.0)
        engines.append(plan._replace(settings=limits, cost=cost))
    users = [
        plan._replace(
            settings=plan.settings._replace(
                scheduler=codes.USER, max_batch_seqs=plan.settings.max_num_seqs, fuses_steps=0
            )
        )
        for plan in engines
    ]
    runs = []
    for plans, policies in ((engines, [None for _ in engines]), (users, [first_come for _ in users])):
        plans = [plan if plan.role == PREFILL else plan._replace(speculation=case.speculation) for plan in plans]
        caches = [
            caches_of(plan.settings, kept, case.requests) for plan, kept in zip(plans, case.retention, strict=False)
        ]
        runs.append(prepare_loop(plans, case.requests, caches, case.handoff_rules).run(Custom(None, policies)))
    expected, run = runs
    for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(run.requests[name], expected.requests[name], rtol=1e-9, err_msg=name)
    for name in ("handed_s", "transfer_start_s", "transfer_end_s", "decode_rank"):
        np.testing.assert_allclose(
            pools_of(run).transfers[name], pools_of(expected).transfers[name], rtol=1e-9, err_msg=name
        )
    if run.cache is not None and expected.cache is not None:
        np.testing.assert_array_equal(run.cache.requests["cached_tokens"], expected.cache.requests["cached_tokens"])


@settings(max_examples=cases_to_try(50))
@given(cases())
def test_inter_token_latency_equals_the_oracles(case: Case) -> None:
    reference_steps = oracle_of(case).run()
    steps = run_compiled(case).steps
    gaps_s = np.array([gap for step in reference_steps for gap in step.gaps_s])
    found = itl_distribution(steps)
    if gaps_s.size:
        assert found is not None
        assert found.mean == pytest.approx(gaps_s.mean(), rel=5e-3)


@settings(max_examples=cases_to_try(35))
@given(cases())
def test_invariants(case: Case) -> None:
    run = run_compiled(case)
    records, pools, steps = run.requests, pools_of(run), run.steps
    for pool in pools.pools:
        assert (pools.ranks[pool.first_rank : pool.end_rank].free_blocks == pool.num_blocks).all()
        windows = pools.ranks[pool.first_rank : pool.end_rank].free_window_blocks
        assert (windows == pool.num_window_blocks).all()
        mine = (steps["replica"] >= pool.first_replica) & (steps["replica"] < pool.end_replica)
        assert (steps["used_blocks"][mine] <= pool.num_blocks * pool.ranks_per_replica).all()
        assert (steps["num_running"][mine] <= pool.max_num_seqs * pool.ranks_per_replica).all()
        assert not pool.hands_off or (steps["decode_tokens"][mine] == 0).all()
    assert (pools.ranks.num_outstanding == 0).all()
    assert (pools.ranks.remaining_tokens == 0).all()
    assert (pools.handoffs.num_pulled == 0).all()
    assert (records["arrival_s"] <= records["scheduled_s"]).all()
    assert (records["scheduled_s"] < records["first_token_s"]).all()
    assert (records["first_token_s"] <= records["finish_s"]).all()

    moved = ~np.isnan(pools.transfers.handed_s)
    transfers = pools.transfers[moved]
    assert (transfers.transfer_end_s >= transfers.handed_s).all()
    assert (records["finish_s"][moved] > transfers.transfer_end_s).all()
    if not case.handoff_rules.decode_samples_first:
        if case.handoff_rules.decode_streams_first:
            assert (records["first_token_s"][moved] >= transfers.transfer_end_s).all()
        else:
            np.testing.assert_array_equal(records["first_token_s"][moved], transfers.handed_s)
        emitted = (steps["decode_tokens"] * steps["num_steps"]).sum() + steps["resumed_tokens"].sum()
        assert emitted == (case.requests.output_tokens - 1).sum()


@settings(max_examples=cases_to_try(35))
@given(cases())
def test_pools_that_do_everything_are_one_pool(case: Case) -> None:
    """Invariant 12. Equal pools of role `both` are the replicas of one deployment, to the bit."""
    plan = case.plans[0]._replace(role=BOTH)
    handoff_rules = case.handoff_rules._replace(local_tokens=0)
    run = prepare_loop([plan, plan], case.requests, handoff_rules=handoff_rules).run()
    records, steps = run.requests, run.steps
    whole = plan.settings._replace(num_replicas=2 * plan.settings.num_replicas)
    expected, expected_steps = run_pool(whole, plan.cost, case.requests)
    for name in set(records.dtype.names) - {"slot"}:  # slots are counted in each pool
        np.testing.assert_array_equal(records[name], expected[name], err_msg=name)
    for name in steps.columns:
        np.testing.assert_array_equal(steps[name], expected_steps[name], err_msg=name)


@settings(max_examples=cases_to_try(35))
@given(cases())
def test_time_to_first_token_is_that_of_prefill_alone(case: Case) -> None:
    """Where transfers take no time and the decode side has room for all, prefill never waits for it."""
    if case.requests.concurrency:
        return
    prefill, decode = case.plans[0]._replace(role=PREFILL, link_bytes_per_s=np.inf), case.plans[-1]
    ample = decode.settings._replace(
        num_blocks=10**6, max_num_seqs=len(case.requests.arrival_s), max_num_batched_tokens=10**4, num_stages=1
    )
    rng = np.random.default_rng(0)
    cost = random_cost(rng, ample.max_num_seqs, ample.max_num_batched_tokens, False)
    roomy = PoolPlan(ample, cost, role=DECODE)
    # The decode side looks at its queue when it forms a batch; until then blocks are held, which must not matter.
    prefill = prefill._replace(settings=prefill.settings._replace(num_blocks=10**6))
    handoff_rules = HandoffRules(decode_router=case.handoff_rules.decode_router)
    records = prepare_loop([prefill, roomy], case.requests, handoff_rules=handoff_rules).run().requests
    ones = replace(case.requests, output_tokens=np.ones_like(case.requests.output_tokens))
    alone, _ = run_pool(prefill.settings, prefill.cost, ones)
    if case.plans[0].settings.router == codes.ROUTERS.index("round_robin") or prefill.settings.num_replicas == 1:
        np.testing.assert_array_equal(records["first_token_s"], alone["first_token_s"])


def one_step_cost(seconds: float) -> state.StepCost:
    """Every step takes `seconds`."""
    return state.StepCost(
        decode_token_s=np.full(9, seconds),
        mixed_token_s=np.full(200, seconds),
        sample_s=np.zeros(9),
        context_nodes=np.array([0.0, 1.0]),
        decode_attention_s=np.zeros((9, 2)),
        chunk_nodes=np.array([0.0, 1.0]),
        length_nodes=np.array([0.0, 1.0]),
        prefill_attention_s=np.zeros((2, 2)),
        host_step_s=0.0,
        host_request_s=0.0,
        host_overlaps=0,
        recorded_step_s=np.zeros(0),
    )


def one_slow_link(tail_fraction: float, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
    """Requests that prefill at once, in one step of 10 ms, and share a link that needs 4 ms for each."""
    nothing = one_step_cost(0.01)
    engine = state.KernelSettings(codes.VLLM_V1, 1, 1, 8, 160, block_size=16, num_blocks=100, max_prefill_tokens=160)
    plans = [PoolPlan(engine, nothing, role=role, link_bytes_per_s=1e6) for role in (PREFILL, DECODE)]
    arrays = [np.full(num_requests, value) for value in (0.0, 16, 4, 0)]
    requests = RequestArrays(arrays[0], *(array.astype(np.int64) for array in arrays[1:]))
    handoff_rules = HandoffRules(bytes_per_token=250.0, latency_s=1e-3, tail_fraction=tail_fraction)
    run = prepare_loop(plans, requests, handoff_rules=handoff_rules).run()
    return run.requests, pools_of(run).transfers


def test_transfers_share_a_link_one_after_another() -> None:
    records, transfers = one_slow_link(1.0, 3)
    np.testing.assert_allclose(transfers.handed_s, 0.01)
    np.testing.assert_allclose(transfers.transfer_start_s, [0.01, 0.014, 0.018])
    np.testing.assert_allclose(transfers.transfer_end_s, [0.015, 0.019, 0.023])
    # The first decodes alone from 15 ms on, three steps; the others join at the ends of its steps.
    np.testing.assert_allclose(records["finish_s"], [0.045, 0.055, 0.055])


def test_an_overlapped_transfer_ends_a_layer_after_the_prefill_or_when_the_link_has_caught_up() -> None:
    _, transfers = one_slow_link(0.1, 3)
    np.testing.assert_allclose(transfers.transfer_start_s, [0.0, 0.004, 0.008])
    np.testing.assert_allclose(transfers.transfer_end_s, [0.0114, 0.0114, 0.013])


def test_a_request_that_preempts_itself_gives_its_place_to_one_whose_kv_has_come() -> None:
    """The first request's KV arrives where the second runs, in the only place, and lacks the blocks that it holds."""
    nothing = one_step_cost(0.01)
    engine = state.KernelSettings(
        codes.VLLM_V1, 1, 1, 1, 32, block_size=16, num_blocks=5, chunked_prefill=1, router=codes.ROUND_ROBIN
    )
    plans = [PoolPlan(engine, nothing, role=role, link_bytes_per_s=1e3) for role in (PREFILL, BOTH)]
    arrays = [np.array(values, np.int64) for values in ((40, 60), (20, 10), (0, 0))]
    requests = RequestArrays(np.array([0.0, 0.03]), *arrays)
    rules = HandoffRules(bytes_per_token=1.0)
    run = prepare_loop(plans, requests, handoff_rules=rules).run()
    moved = pools_of(run).transfers.transfer_end_s[0]
    assert (run.requests["finish_s"] < 1.0).all()
    assert run.requests["finish_s"][0] < run.requests["finish_s"][1]
    assert run.requests["scheduled_s"][1] < moved < run.requests["first_token_s"][1]
