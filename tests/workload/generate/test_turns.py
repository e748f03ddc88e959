from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.schema import decode
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays, generate
from windtunnel.workload.schema import Workload

SESSIONS: dict[str, Any] = {
    "arrivals": {"type": "poisson", "rate_per_s": 2},
    "input_tokens": {"type": "uniform", "min_tokens": 50, "max_tokens": 150},
    "output_tokens": {"type": "uniform", "min_tokens": 10, "max_tokens": 90},
    "sessions": {
        "turns": {"type": "geometric", "mean": 3},
        "think_s": {"type": "exponential", "mean_s": "20s"},
        "followup_tokens": 30,
        "tool_calls": {
            "per_turn": {"type": "geometric", "least": 0, "mean": 1.5},
            "run_s": {"type": "uniform", "min_s": 1, "max_s": 3},
            "output_tokens": 400,
        },
    },
    "num_requests": 20_000,
}


def requests_of(raw: dict[str, Any], seed: int = 0) -> RequestArrays:
    return generate(decode(raw, Workload), seed)


def path_tokens(prefixes: PrefixArrays) -> NDArray[np.int64]:
    """Tokens from the root to the end of each node."""
    tokens = prefixes.node_tokens.copy()
    for node, parent in enumerate(prefixes.node_parent):
        assert parent < node
        if parent >= 0:
            tokens[node] += tokens[parent]
    return tokens


def test_a_turn_holds_the_conversation_so_far() -> None:
    requests = requests_of(SESSIONS)
    assert requests.previous is not None
    assert requests.prefixes is not None
    assert requests.session is not None
    assert requests.num_requests == 20_000
    later = np.flatnonzero(requests.previous >= 0)
    before = requests.previous[later]
    assert np.all(before < later)
    assert np.array_equal(requests.session[later], requests.session[before])
    assert np.unique(before).size == before.size
    new_text = requests.input_tokens[later] - requests.input_tokens[before] - requests.output_tokens[before]
    assert set(new_text) == {30, 400}
    first = requests.previous < 0
    assert requests.input_tokens[first].min() == 50
    assert requests.input_tokens[first].max() == 150
    assert np.array_equal(path_tokens(requests.prefixes)[requests.prefixes.request_node], requests.input_tokens)
    # The parent of a later turn's text is its predecessor's output.
    parents = requests.prefixes.node_parent[requests.prefixes.request_node[later]]
    assert np.array_equal(parents, requests.prefixes.request_output_node[before])


def test_turns_calls_and_waits_have_the_asked_means() -> None:
    requests = requests_of(SESSIONS)
    assert requests.previous is not None
    assert requests.think_s is not None
    later = requests.previous >= 0
    new_text = requests.input_tokens[later] - (requests.input_tokens + requests.output_tokens)[requests.previous[later]]
    is_call = new_text == 400
    num_sessions = int((~later).sum())
    num_turns = num_sessions + int((~is_call).sum())
    assert num_turns / num_sessions == pytest.approx(3, rel=0.05)
    assert is_call.sum() / num_turns == pytest.approx(1.5, rel=0.05)
    waits_s = requests.think_s[later]
    assert waits_s[~is_call].mean() == pytest.approx(20, rel=0.05)
    assert 1 <= waits_s[is_call].min() < 1.01
    assert 2.99 < waits_s[is_call].max() <= 3


def test_arrivals_are_the_earliest_times_in_order() -> None:
    requests = requests_of(SESSIONS)
    assert requests.previous is not None
    assert requests.think_s is not None
    assert np.all(np.diff(requests.arrival_s) >= 0)
    later = requests.previous >= 0
    earliest = requests.arrival_s[requests.previous[later]] + requests.think_s[later]
    assert np.allclose(requests.arrival_s[later], earliest, rtol=0, atol=1e-6)


def test_a_session_ends_before_the_longest_context() -> None:
    raw = {**SESSIONS, "sessions": {**SESSIONS["sessions"], "max_context_tokens": 1000}}
    requests = requests_of(raw)
    assert requests.num_requests == 20_000
    drawn_all = requests.input_tokens + requests.output_tokens
    assert 950 < drawn_all.max() <= 1000
    raw["sessions"]["max_context_tokens"] = 40
    with pytest.raises(InputError, match="no first turn of a session is within max_context_tokens, which is 40"):
        requests_of(raw)


def test_few_sessions_are_the_first_of_many() -> None:
    def of(requests: RequestArrays) -> dict[int, list[int]]:
        assert requests.session is not None
        drawn: dict[int, list[int]] = {}
        for session, tokens in zip(requests.session, requests.input_tokens, strict=True):
            drawn.setdefault(int(session), []).append(int(tokens))
        return drawn

    many, few = of(requests_of(SESSIONS)), of(requests_of({**SESSIONS, "num_requests": 500}))
    cut = max(few)
    assert all(few[session] == many[session] for session in few if session != cut)
    assert few[cut] == many[cut][: len(few[cut])]


def test_sessions_behind_a_client_with_warmup() -> None:
    loop = {"type": "closed_loop", "concurrency": 4, "num_warmup_requests": 3}
    requests = requests_of({**SESSIONS, "arrivals": loop, "num_requests": 100})
    plain = requests_of({**SESSIONS, "arrivals": {"type": "burst"}, "num_requests": 100})
    assert requests.previous is not None
    assert plain.previous is not None
    assert requests.num_warmup == 3
    assert np.all(requests.previous[:3] == -1)
    assert np.array_equal(requests.previous[3:], np.where(plain.previous < 0, -1, plain.previous + 3))
    assert requests.prefixes is not None
    assert np.all(requests.prefixes.request_node[:3] == -1)


def test_shared_prompts_come_first_and_count_as_input() -> None:
    prompts = {"tokens": {"type": "uniform", "min_tokens": 500, "max_tokens": 900}, "count": 4, "alpha": 1}
    alone = {**SESSIONS, "num_requests": 5000}
    single = {name: alone[name] for name in ("arrivals", "input_tokens", "output_tokens", "num_requests")}
    for raw in (single, alone):
        plain, shared = requests_of(raw), requests_of({**raw, "shared_prompts": prompts})
        assert shared.prefixes is not None
        added = shared.input_tokens - plain.input_tokens
        assert np.array_equal(np.unique(added), np.unique(shared.prefixes.node_tokens[:4]))
        assert np.all(shared.prefixes.node_parent[:4] == -1)
    shared = requests_of({**single, "shared_prompts": prompts})
    assert shared.prefixes is not None
    # Zipf with alpha 1 over four prompts: 12, 6, 4 and 3 in 25.
    shares = np.bincount(shared.prefixes.request_node) / 5000
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)


TENANTS: dict[str, Any] = {
    "arrivals": {"type": "poisson", "rate_per_s": 10},
    "duration_s": 2000,
    "tenants": [
        {"name": "chat", "share": 3, "input_tokens": 100, "output_tokens": 10, "slo": {"ttft_s": 0.5}},
        {"name": "code", "share": 1, "input_tokens": 200, "output_tokens": 20, "priority": 2},
        {
            "name": "agent",
            "arrivals": {"type": "poisson", "rate_per_s": 1},
            "input_tokens": 300,
            "output_tokens": 30,
            "sessions": {"turns": 2, "think_s": 5},
            "shared_prompts": {"tokens": 1000},
        },
    ],
}


def test_tenants_take_their_shares_and_keep_their_lengths() -> None:
    requests = requests_of(TENANTS)
    assert requests.tenant is not None
    assert requests.ttft_limit_s is not None
    assert requests.tenant_names == ("chat", "code", "agent")
    counts = np.bincount(requests.tenant)
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.05)
    assert counts[2] == pytest.approx(2 * 2000, rel=0.1)
    for index, tokens in enumerate((10, 20, 30)):
        assert set(requests.output_tokens[requests.tenant == index]) == {tokens}
    assert np.array_equal(requests.priority, np.where(requests.tenant == 1, 2, 0))
    assert np.array_equal(requests.ttft_limit_s, np.where(requests.tenant == 0, 0.5, np.inf))
    assert np.all(np.diff(requests.arrival_s) >= 0)
    assert requests.previous is not None
    later = requests.previous >= 0
    assert np.all(requests.tenant[later] == 2)
    assert np.array_equal(requests.input_tokens[later], np.full(later.sum(), 1000 + 300 + 30 + 300))
    assert requests.prefixes is not None
    of_agent = requests.prefixes.request_node >= 0
    assert np.array_equal(of_agent, requests.tenant == 2)
    tokens = path_tokens(requests.prefixes)[requests.prefixes.request_node[of_agent]]
    assert np.array_equal(tokens, requests.input_tokens[of_agent])


def test_a_tenant_does_not_depend_on_the_others() -> None:
    longer = {**TENANTS, "tenants": [{**TENANTS["tenants"][0], "input_tokens": 999}, *TENANTS["tenants"][1:]]}
    before, after = requests_of(TENANTS), requests_of(longer)
    assert before.tenant is not None
    others = before.tenant != 0
    assert np.array_equal(before.arrival_s, after.arrival_s)
    assert np.array_equal(before.input_tokens[others], after.input_tokens[others])


def test_the_first_requests_of_all_tenants() -> None:
    raw = {name: value for name, value in TENANTS.items() if name != "duration_s"}
    few = requests_of({**raw, "num_requests": 1000})
    many = requests_of({**raw, "num_requests": 3000})
    assert few.num_requests == 1000
    assert np.array_equal(few.arrival_s, many.arrival_s[:1000])


def test_tenants_of_a_trace_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Session ID\n"
        "0,GPT-4,10,1,a\n1,ChatGPT,20,2,b\n2,GPT-4,30,0,a\n3,GPT-4,40,4,\n"
    )
    raw: dict[str, Any] = {
        "trace": {"path": str(path), "columns": {"tenant": "Model"}},
        "tenants": [{"name": "GPT-4", "priority": 3, "slo": {"ttft_s": 1}}],
    }
    requests = requests_of(raw)
    assert requests.tenant_names == ("GPT-4", "ChatGPT")
    assert list(requests.priority) == [3, 0, 3]
    assert requests.ttft_limit_s is not None
    assert list(requests.ttft_limit_s) == [1, np.inf, 1]
    assert requests.session is not None
    assert list(requests.session) == [0, 1, -1]
    assert list(requests.output_tokens) == [1, 2, 4], "BurstGPT's failed requests are left out"
    raw["tenants"].append({"name": "gpt"})
    with pytest.raises(InputError, match="no request of the trace is of tenant 'gpt'; it has GPT-4, ChatGPT"):
        requests_of(raw)
    raw["trace"]["failed"] = "refuse"
    with pytest.raises(InputError, match="row 3: Response tokens is not positive: 0"):
        requests_of(raw)


def test_block_ids_spell_a_forest(tmp_path: Path) -> None:
    path = tmp_path / "blocks.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 10, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 20, "input_length": 1600, "output_length": 5, "hash_ids": [7, 8, 4]}\n'
        '{"timestamp": 30, "input_length": 40, "output_length": 5, "hash_ids": []}\n'
        '{"timestamp": 40, "input_length": 600, "output_length": 5, "hash_ids": [5, 8]}\n'
    )
    prefixes = requests_of({"trace": {"path": str(path)}}).prefixes
    assert prefixes is not None
    # 8 follows 7 and 5: two nodes. The first prompt ends with 76 tokens; 64 of the third are its own.
    assert list(prefixes.node_parent) == [-1, 0, 1, 1, -1, 4]
    assert list(prefixes.node_tokens) == [512, 512, 76, 512, 512, 88]
    assert list(prefixes.request_node) == [2, 1, 3, -1, 5]
    assert np.all(prefixes.request_output_node == -1)
    with pytest.raises(
        InputError, match=r"row 1: hash_ids has more blocks of 1024 tokens \(3\) than .* its prompt: 1100"
    ):
        requests_of({"trace": {"path": str(path), "hash_block_tokens": 1024}})


@pytest.mark.full
def test_the_published_block_ids_spell_the_prompts(reference: Path) -> None:
    raw = {"trace": {"path": str(reference / "traces/mooncake_fast25_conversation.jsonl.gz")}}
    requests = requests_of(raw)
    assert requests.prefixes is not None
    # Counted in the file: 288,500 blocks, 182,790 of them distinct.
    assert requests.prefixes.node_parent.size == 182_790
    tokens = path_tokens(requests.prefixes)[requests.prefixes.request_node]
    assert np.array_equal(tokens, requests.input_tokens)


def test_shortened_prompts_still_share_their_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "blocks.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 100, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 10, "input_length": 1200, "output_length": 20, "hash_ids": [7, 8, 4]}\n'
        '{"timestamp": 20, "input_length": 900, "output_length": 200, "hash_ids": [7, 5]}\n'
    )
    # Cut to 1,000: prompts of 900, 980 and 800. The first ends after 388 tokens of block 8, the second after 468.
    cut = requests_of({"trace": {"path": str(path), "max_tokens": 1000, "shorten": "input"}})
    assert cut.prefixes is not None
    assert list(cut.prefixes.node_parent) == [-1, 0, 1, 0]
    assert list(cut.prefixes.node_tokens) == [512, 388, 80, 288]
    assert list(cut.prefixes.request_node) == [1, 2, 3]
    assert np.array_equal(path_tokens(cut.prefixes)[cut.prefixes.request_node], cut.input_tokens)
    # Blocks of 51.2 tokens: two hold 102.
    scaled = requests_of({"trace": {"path": str(path), "input_scale": 0.1}})
    assert scaled.prefixes is not None
    assert list(scaled.prefixes.node_tokens) == [51, 51, 8, 18, 39]
    assert np.array_equal(path_tokens(scaled.prefixes)[scaled.prefixes.request_node], scaled.input_tokens)
    with pytest.raises(InputError, match="makes a block of 512 shared prompt tokens shorter than one token") as refused:
        requests_of({"trace": {"path": str(path), "input_scale": 0.001}})
    assert refused.value.hint == "give an input_scale of at least 0.00195312"


def shared_fraction(requests: RequestArrays) -> float:
    """Fraction of prompt tokens that an earlier prompt has too, as an endless cache would find them."""
    forest = requests.prefixes
    assert forest is not None
    depth, seen, shared = path_tokens(forest), np.zeros(forest.node_parent.size, bool), 0
    for node in forest.request_node.tolist():
        last = node
        while node >= 0 and not seen[node]:
            seen[node] = True
            node = forest.node_parent[node]
        shared += depth[node] if node >= 0 else 0
        assert last >= 0
    return shared / int(requests.input_tokens.sum())


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "fraction"),
    # Counted in the file, over lists of blocks cut to the length of each prompt. A prompt that is cut loses its own end
    # first, so the fraction grows; scaling changes nothing.
    [
        ({}, 0.37362),
        ({"input_scale": 0.25}, 0.37367),
        ({"input_scale": 0.9}, 0.37358),
        ({"input_scale": 2}, 0.37362),
        ({"max_tokens": 131_072}, 0.37362),
        ({"max_tokens": 100_000}, 0.37479),
        ({"max_tokens": 32_768}, 0.38288),
        ({"max_tokens": 8192}, 0.43082),
    ],
)
def test_the_published_sharing_survives_scaling_and_shortening(
    reference: Path, options: dict[str, Any], fraction: float
) -> None:
    path = reference / "traces/mooncake_fast25_conversation.jsonl.gz"
    requests = requests_of({"trace": {"path": str(path), **options}})
    assert shared_fraction(requests) == pytest.approx(fraction, rel=5e-5)


def test_every_array_has_a_row_for_each_request() -> None:
    requests = requests_of({**TENANTS, "num_requests": 700})
    for field in fields(requests):
        value = getattr(requests, field.name)
        if isinstance(value, np.ndarray):
            assert len(value) == 700, field.name
    again = replace(requests)
    assert again.num_requests == 700
