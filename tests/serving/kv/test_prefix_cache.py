"""The prefix cache: against counts that need no simulator, against a cache of single blocks, and against real runs."""

import gzip
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from readers.multi_turn_client import recorded_conversations
from serving.pool_of_one import run_pool
from windtunnel.compiled.records import new_table
from windtunnel.serving.codes import ROUTERS, SCHEDULERS
from windtunnel.serving.setup.prefix_cache import path_tokens, prefix_cache
from windtunnel.serving.state.records import KernelSettings, StepCost, Tier
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

VLLM = KernelSettings(
    scheduler=SCHEDULERS.index("vllm_v1"),
    num_replicas=1,
    ranks_per_replica=1,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_prefill_tokens=8192,
    block_size=16,
    num_blocks=1 << 40,
)


def cost(settings: KernelSettings, decode_s: float = 0.02, token_s: float = 2e-5) -> StepCost:
    requests, tokens = settings.max_num_seqs + 1, settings.max_num_batched_tokens + settings.max_num_seqs + 1
    ends = np.array([0.0, 1.0])
    return StepCost(
        decode_token_s=np.full(requests, decode_s),
        mixed_token_s=decode_s + token_s * np.arange(tokens),
        sample_s=np.zeros(requests),
        context_nodes=ends,
        decode_attention_s=np.zeros((requests, 2)),
        chunk_nodes=ends,
        length_nodes=ends,
        prefill_attention_s=np.zeros((2, 2)),
        host_step_s=0.0,
        host_request_s=0.0,
        host_overlaps=0,
        recorded_step_s=np.zeros(0),
    )


def cached_tokens(settings: KernelSettings, requests: RequestArrays) -> NDArray[np.int64]:
    cache = prefix_cache(settings, requests)
    run_pool(settings, cost(settings), requests, cache=cache)
    found: NDArray[np.int64] = cache.requests["cached_tokens"]
    return found


def mooncake(path: Path, num_requests: int) -> tuple[RequestArrays, list[list[int]]]:
    """The trace's first requests, and the hashes of their whole blocks of 512 tokens."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(num_requests), strict=False)]
    parent: dict[int, int] = {}
    chains = []
    for row in rows:
        whole = row["hash_ids"][: row["input_length"] // 512]
        for above, block in zip([-1, *whole], whole, strict=False):
            parent.setdefault(block, above)
        chains.append(whole)
    place = {block: position for position, block in enumerate(parent)}
    place[-1] = -1
    n = len(rows)
    forest = PrefixArrays(
        node_parent=np.array([place[above] for above in parent.values()]),
        node_tokens=np.full(len(parent), 512),
        request_node=np.array([place[chain[-1]] if chain else -1 for chain in chains]),
        request_output_node=np.full(n, -1),
    )
    requests = RequestArrays(
        arrival_s=np.array([row["timestamp"] for row in rows]) / 1e3,
        input_tokens=np.array([row["input_length"] for row in rows]),
        output_tokens=np.array([row["output_length"] for row in rows]),
        priority=np.zeros(n, np.int64),
        prefixes=forest,
    )
    return requests, chains


@pytest.mark.compiled
def test_an_endless_cache_finds_every_block_that_the_trace_has_shown_before(reference: Path) -> None:
    requests, chains = mooncake(reference / "traces" / "mooncake_fast25_conversation.jsonl.gz", 3000)
    seen: set[int] = set()
    expected = []
    for chain, tokens in zip(chains, requests.input_tokens, strict=True):
        hits = next((k for k, block in enumerate(chain) if block not in seen), len(chain))
        expected.append(min(hits * 512, (int(tokens) - 1) // 16 * 16))
        seen.update(chain)
    np.testing.assert_array_equal(cached_tokens(VLLM, requests), expected)
    assert 0.3 < sum(expected) / requests.input_tokens.sum() < 0.5


@pytest.mark.compiled
def test_page_sizes_of_other_engines_find_no_less(reference: Path) -> None:
    requests, _ = mooncake(reference / "traces" / "mooncake_fast25_conversation.jsonl.gz", 300)
    by_block = {
        size: int(cached_tokens(VLLM._replace(block_size=size), requests).sum()) for size in (1, 16, 64, 512, 1024)
    }
    assert by_block[1] >= by_block[16] >= by_block[64] >= by_block[512] > by_block[1024] > 0


class BlockCache:
    """vLLM's pool of single blocks: hashes of whole blocks, and a queue of free ones, the next to be taken in front."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, object] = OrderedDict((block, None) for block in range(num_blocks))
        self.of_hash: dict[object, int] = {}

    def serve(self, hashes: list[object], most: int, num_blocks: int) -> int:
        """One request alone: look up, allocate, compute, free in reverse; returns the blocks that were found."""
        hits = next((k for k, key in enumerate(hashes[:most]) if key not in self.of_hash), most)
        taken = [self.of_hash[key] for key in hashes[:hits]]
        for block in taken:
            del self.free[block]
        while len(taken) < num_blocks:
            block, key = self.free.popitem(last=False)
            if self.of_hash.get(key) == block:
                del self.of_hash[key]
            taken.append(block)
        self.of_hash |= dict(zip(hashes, taken, strict=False))
        for position in reversed(range(num_blocks)):
            self.free[taken[position]] = hashes[position] if position < len(hashes) else None
            if position >= len(hashes):  # nothing whole is in it
                self.free.move_to_end(taken[position], last=False)
        return hits


@st.composite
def forests(draw: st.DrawFn) -> tuple[KernelSettings, RequestArrays]:
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_nodes = draw(st.integers(1, 12))
    parent = np.array([int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)])
    forest = PrefixArrays(
        node_parent=parent,
        node_tokens=rng.integers(1, 40, num_nodes),
        request_node=rng.integers(-1, num_nodes, n),
        request_output_node=np.full(n, -1),
    )
    path = np.append(path_tokens(forest.node_parent, forest.node_tokens), 0)[forest.request_node]
    requests = RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=path + rng.integers(1, 20, n),
        output_tokens=rng.integers(1, 20, n),
        priority=np.zeros(n, np.int64),
        concurrency=1,
        prefixes=forest,
    )
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    largest = int((-(-(requests.input_tokens + requests.output_tokens) // block_size)).max())
    settings = VLLM._replace(
        block_size=block_size, num_blocks=largest + draw(st.integers(0, 2 * largest)), concurrency=1
    )
    return settings, requests


@pytest.mark.full
@given(forests())
def test_one_request_at_a_time_finds_what_a_cache_of_single_blocks_finds(
    case: tuple[KernelSettings, RequestArrays],
) -> None:
    settings, requests = case
    forest, size = requests.prefixes, settings.block_size
    assert forest is not None
    pool = BlockCache(settings.num_blocks)
    expected = []
    for i, (inputs, outputs) in enumerate(zip(requests.input_tokens, requests.output_tokens, strict=True)):
        content: list[tuple[int, int]] = []
        node = int(forest.request_node[i])
        while node >= 0:
            content = [(node, k) for k in range(int(forest.node_tokens[node]))] + content
            node = int(forest.node_parent[node])
        content += [(-1 - i, k) for k in range(int(inputs + outputs) - len(content))]
        computed = int(inputs + outputs) - 1
        hashes: list[object] = [tuple(content[: (k + 1) * size]) for k in range(computed // size)]
        num_blocks = -(-computed // size)
        expected.append(pool.serve(hashes, (int(inputs) - 1) // size, num_blocks) * size)
    np.testing.assert_array_equal(cached_tokens(settings, requests), expected)


def recorded_requests(rows: pd.DataFrame, clients: int) -> RequestArrays:
    """Conversations in the order in which clients took them up; each client has one under way."""
    chats = recorded_conversations({name: rows[name].to_numpy() for name in rows.columns})
    n = chats.input_tokens.size
    return RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=chats.input_tokens,
        output_tokens=chats.output_tokens,
        priority=np.zeros(n, np.int64),
        concurrency=clients,
        previous=chats.previous,
        prefixes=PrefixArrays(chats.node_parent, chats.node_tokens, chats.request_node, chats.request_output_node),
    )


@pytest.mark.full
@pytest.mark.compiled
def test_recorded_chats_hit_as_often_as_the_engine_counted(reference: Path) -> None:
    """Eight clean runs of vLLM with Llama-3.3-70B, 16 to 512 clients with conversations of up to eight turns: within
    3 points, the error budget, and their peak KV use within 1.
    """
    folder = reference / "serving"
    runs = pd.read_csv(folder / "inferencex_multiturn_llama70b_fp4.csv")
    rows = pd.read_csv(folder / "per_request" / "inferencex_multiturn_llama70b_fp4.csv.gz")
    clean = runs[runs.clean == "yes"]
    assert len(clean) == 8
    for _, run in clean.iterrows():
        requests = recorded_requests(rows[rows.case == run["case"]], int(run.clients))
        settings = VLLM._replace(
            max_num_seqs=int(run.max_num_seqs), num_blocks=int(run.kv_cache_tokens) // 16, concurrency=int(run.clients)
        )
        decode_s = float(run.p50_tpot_ms) / 1e3
        cache = prefix_cache(settings, requests)
        records, steps = run_pool(settings, cost(settings, decode_s), requests, cache=cache)
        hits = 100 * cache.requests["cached_tokens"].sum() / records["input_tokens"].sum()
        assert hits == pytest.approx(run.gpu_hit_rate, abs=3.0), run["case"]
        peak = 100 * steps["used_blocks"].max() / settings.num_blocks
        assert peak == pytest.approx(run.peak_kv_usage_pct, abs=1.0), run["case"]


def chats(num_sessions: int, num_turns: int) -> RequestArrays:
    """Sessions of equal turns: 100 tokens of text, 50 of answer, 1 s to think."""
    n = num_sessions * num_turns
    turn, session = np.arange(n) % num_turns, np.arange(n) // num_turns
    texts = 2 * np.arange(n)
    previous = np.where(turn > 0, np.arange(n) - 1, -1)
    return RequestArrays(
        arrival_s=np.where(turn > 0, 0.0, session * 0.5),
        input_tokens=100 + 150 * turn,
        output_tokens=np.full(n, 50),
        priority=np.zeros(n, np.int64),
        previous=previous,
        think_s=np.where(turn > 0, 1.0, 0.0),
        session=session,
        prefixes=PrefixArrays(
            node_parent=np.stack([np.where(turn > 0, texts - 1, -1), texts], axis=1).ravel(),
            node_tokens=np.tile([100, 50], n),
            request_node=texts,
            request_output_node=texts + 1,
        ),
    )


def test_a_turn_is_sent_when_its_user_has_read_and_thought() -> None:
    requests = chats(5, 4)
    records, _ = run_pool(VLLM, cost(VLLM), requests)
    later = np.flatnonzero(requests.previous >= 0)  # type: ignore[operator]
    np.testing.assert_array_equal(records["arrival_s"][later], records["finish_s"][later - 1] + 1.0)


def test_a_closed_loop_keeps_so_many_sessions_under_way() -> None:
    requests = replace(chats(12, 3), arrival_s=np.zeros(36), concurrency=4)
    records, _ = run_pool(VLLM._replace(concurrency=4), cost(VLLM), requests)
    begin, end = records["arrival_s"][::3], records["finish_s"][2::3]
    under_way = (begin[None, :] <= begin[:, None]) & (end[None, :] > begin[:, None])
    assert under_way.sum(axis=1).max() == 4
    np.testing.assert_array_equal(np.sort(begin)[4:], np.sort(end)[: len(begin) - 4])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_later_turns_find_all_full_blocks_of_the_conversation(scheduler: str) -> None:
    requests = chats(5, 4)
    settings = VLLM._replace(scheduler=SCHEDULERS.index(scheduler))
    turn = np.arange(20) % 4
    computed = np.maximum(150 * turn - 1, 0)  # the last token of an answer is never computed
    np.testing.assert_array_equal(cached_tokens(settings, requests), computed // 16 * 16)


def test_a_cache_shortens_the_wait_for_the_first_token() -> None:
    requests = chats(20, 6)
    without, _ = run_pool(VLLM, cost(VLLM), requests)
    cached, _ = run_pool(VLLM, cost(VLLM), requests, cache=prefix_cache(VLLM, requests))

    def mean_ttft_s(records: Any) -> float:
        return float((records["first_token_s"] - records["arrival_s"]).mean())

    assert mean_ttft_s(cached) < 0.9 * mean_ttft_s(without)


@pytest.mark.parametrize(
    ("router", "keeps"), [("session_affinity", True), ("prefix_affinity", True), ("random", False)]
)
def test_affinity_keeps_a_session_where_its_cache_is(router: str, keeps: bool) -> None:
    requests = chats(40, 5)
    settings = VLLM._replace(num_replicas=4, router=ROUTERS.index(router))
    cache = prefix_cache(settings, requests)
    records, _ = run_pool(settings, cost(settings), requests, cache=cache)
    by_session = records["rank"].reshape(40, 5)
    assert (by_session == by_session[:, :1]).all() == keeps
    assert len(np.unique(by_session[:, 0])) == 4
    full = np.maximum(150 * (np.arange(200) % 5) - 1, 0) // 16 * 16
    found = cache.requests["cached_tokens"]
    assert (found == full).all() == keeps
    assert (found <= full).all()


def test_prefix_affinity_gives_way_to_an_uneven_load() -> None:
    """One system prompt for all: without the limit every request would go to the replica that was first."""
    n = 2000
    requests = RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=np.full(n, 200),
        output_tokens=np.full(n, 20),
        priority=np.zeros(n, np.int64),
        prefixes=PrefixArrays(np.array([-1]), np.array([160]), np.zeros(n, np.int64), np.full(n, -1)),
    )
    requests = replace(requests, arrival_s=np.arange(n) * 1e-3)
    settings = VLLM._replace(num_replicas=4, max_num_seqs=32, router=ROUTERS.index("prefix_affinity"))
    records, _ = run_pool(settings, cost(settings), requests, cache=prefix_cache(settings, requests))
    assert np.bincount(records["rank"], minlength=4).min() > n / 8


def tier(capacity_blocks: int, block_s: float, ranks_per_pool: int = 1) -> Any:
    found = new_table(Tier, 1)
    found.capacity_blocks, found.block_s, found.ranks_per_pool = capacity_blocks, block_s, ranks_per_pool
    return found


def test_a_large_tier_has_what_a_small_pool_has_lost() -> None:
    requests = chats(30, 5)
    small = VLLM._replace(num_blocks=120)
    cache = prefix_cache(small, requests, tier(1 << 30, 1e-6))
    run_pool(small, cost(small), requests, cache=cache)
    full = np.maximum(150 * (np.arange(150) % 5) - 1, 0) // 16 * 16
    np.testing.assert_array_equal(cache.requests["cached_tokens"], full)
    assert 0 < cache.loaded.sum() < full.sum() / 16
    assert (cached_tokens(small, requests) < full).any()


@pytest.mark.parametrize(("overlaps", "block_s"), [(False, 0.001), (True, 0.001), (True, 1.0)])
def test_loading_takes_its_time(overlaps: bool, block_s: float) -> None:
    """Two turns with another request between them that takes the whole pool: the second turn loads its blocks."""
    requests = RequestArrays(
        arrival_s=np.array([0.0, 5.0, 0.0]),
        input_tokens=np.array([320, 639, 480]),
        output_tokens=np.array([1, 1, 1]),
        priority=np.zeros(3, np.int64),
        previous=np.array([-1, -1, 0]),
        think_s=np.array([0.0, 0.0, 10.0]),
        prefixes=PrefixArrays(np.array([-1, 0]), np.array([320, 160]), np.array([0, -1, 1]), np.full(3, -1)),
    )
    settings = VLLM._replace(num_blocks=40)
    cache = prefix_cache(settings, requests, tier(1000, block_s), overlaps)
    records, steps = run_pool(settings, cost(settings), requests, cache=cache)
    assert cache.loaded[0, 2] == 20
    step_s, load_s = 0.02 + 2e-5 * 160, 20 * block_s
    taken_s = max(step_s, load_s) if overlaps else step_s + load_s
    assert records["first_token_s"][2] - records["scheduled_s"][2] == pytest.approx(taken_s)
    assert steps["load_s"].sum() == pytest.approx(taken_s - step_s)


def test_replicas_find_each_others_blocks_in_a_tier_that_they_share() -> None:
    requests = chats(20, 4)
    full = np.maximum(150 * (np.arange(80) % 4) - 1, 0) // 16 * 16
    settings = VLLM._replace(num_replicas=4, router=ROUTERS.index("random"))
    found = {}
    for ranks_per_pool in (1, 4):
        cache = prefix_cache(settings, requests, tier(1 << 30, 1e-6, ranks_per_pool))
        run_pool(settings, cost(settings), requests, cache=cache)
        found[ranks_per_pool] = cache.requests["cached_tokens"].copy()
    np.testing.assert_array_equal(found[4], full)
    assert found[1].sum() < full.sum()


def test_a_tier_swaps_preempted_requests_instead_of_computing_them_again() -> None:
    n = 40
    requests = RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=np.full(n, 200),
        output_tokens=np.full(n, 300),
        priority=np.zeros(n, np.int64),
    )
    settings = VLLM._replace(num_blocks=200)
    recomputed, steps = run_pool(settings, cost(settings), requests)
    swapped, swap_steps = run_pool(
        settings, cost(settings), requests, cache=prefix_cache(settings, requests, tier(1 << 20, 1e-6))
    )
    assert recomputed["num_preemptions"].sum() > 0
    assert swapped["num_preemptions"].sum() > 0
    again = steps["prefill_tokens"].sum() - 200 * n
    assert swap_steps["prefill_tokens"].sum() - 200 * n < 0.05 * again
    assert swapped["finish_s"].max() < recomputed["finish_s"].max()


@pytest.mark.parametrize("longest_first", [0, 1])
def test_the_longest_prefix_goes_first_where_sglang_is_told_so(longest_first: int) -> None:
    """One place, taken; a stranger waits in front of a request whose prompt is cached."""
    requests = RequestArrays(
        arrival_s=np.array([0.0, 1.0, 1.1, 1.2]),
        input_tokens=np.array([200, 50, 200, 201]),
        output_tokens=np.array([2, 100, 2, 2]),
        priority=np.zeros(4, np.int64),
        prefixes=PrefixArrays(np.array([-1]), np.array([200]), np.array([0, -1, -1, 0]), np.full(4, -1)),
    )
    settings = VLLM._replace(
        scheduler=SCHEDULERS.index("sglang"), block_size=1, max_num_seqs=1, longest_prefix_first=longest_first
    )
    records, _ = run_pool(settings, cost(settings), requests, cache=prefix_cache(settings, requests))
    assert (records["scheduled_s"][3] < records["scheduled_s"][2]) == bool(longest_first)


def test_no_blocks_are_lost() -> None:
    """After a run with preemptions the pool holds cached blocks that nobody uses, and free ones."""
    requests = chats(30, 4)
    settings = VLLM._replace(num_blocks=90, max_num_seqs=16)
    cache = prefix_cache(settings, requests)
    records, _ = run_pool(settings, cost(settings), requests, cache=cache)
    assert records["num_preemptions"].sum() > 0
    assert (cache.entries.references == 0).all()
    assert cache.entries.num_blocks.sum() == cache.ranks.evictable_blocks.sum() <= 90
