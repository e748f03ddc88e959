"""A run that is told of its requests while it runs gives the times of a simulation of the same requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from live_twins import scenario_of
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.simulate import simulate
from windtunnel.twin.live import LiveLoop, prepare_live
from windtunnel.workload.generate.requests import RequestArrays, generate

TIMES = ("scheduled_s", "first_token_s", "finish_s")


@dataclass
class Ended:
    """Columns of the requests of a live run, in order of sending."""

    columns: dict[str, Any]
    times: list[dict[int, float]]
    """Of every request: output tokens -> when they had been given."""


def driven(scenario: Scenario, seed: int = 0, tokens: list[list[int]] | None = None, size: int = 512) -> Ended:
    """Send a scenario's requests to a live run that is looked at at random times between them.

    `tokens`: ids of prompt and output of each; None: nobody has the ids of another.
    """
    requests, rng = generate(scenario.workload, scenario.seed), np.random.default_rng(seed)
    loop = LiveLoop(prepare_live(scenario, max_requests=size), size)
    number: dict[int, int] = {}
    names = (*TIMES, "num_preemptions", "rank", "output_tokens", "input_tokens")
    columns: dict[str, Any] = {name: np.full(requests.arrival_s.size, np.nan) for name in (*names, "cached", "replica")}
    times: list[dict[int, float]] = [{} for _ in range(requests.arrival_s.size)]

    def look() -> None:
        for row, given, is_finished in zip(*(column.tolist() for column in loop.look()), strict=True):
            i = number[row]
            times[i][given] = loop.until_s
            if is_finished:
                for name in names:
                    columns[name][i] = loop.requests[name][row]
                columns["cached"][i], columns["replica"][i] = loop.cached_tokens(row), loop.replica(row)

    def run_to(time_s: float) -> None:
        while True:
            event_s = loop.next_event_s()
            poll_s = loop.until_s + rng.exponential(0.01)
            if min(event_s, poll_s) >= time_s:
                return
            loop.advance(min(event_s, poll_s))
            look()

    loop.advance(0.0)
    for i, arrival_s in enumerate(requests.arrival_s.tolist()):
        run_to(arrival_s)
        lengths = int(requests.input_tokens[i]), int(requests.output_tokens[i])
        ids = range(i << 20, (i << 20) + sum(lengths)) if tokens is None else tokens[i]
        row = loop.add(arrival_s, *lengths, int(requests.priority[i]), ids)
        number[row] = i
        look()
    while loop.num_live:
        assert np.isfinite(loop.next_event_s())
        loop.advance(loop.next_event_s())
        look()
    return Ended(columns, times)


OWN, PER_REQUEST = "own_functions:shortest_first", ("vllm_v0", "sarathi", "orca", "faster_transformer", "lightllm")
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "sglang": {"engine": {"name": "sglang"}},
    "trtllm": {"engine": {"name": "trtllm"}},
    "replicas": {"replicas": 3, "router": "least_outstanding"},
    "random": {"replicas": 3, "router": "power_of_two"},
    "preempting": {"engine": {"num_gpu_blocks": 400, "max_num_seqs": 64}},
    "preempting sglang": {"engine": {"name": "sglang", "num_gpu_blocks": 6400, "max_num_seqs": 64}},
    "attention_dp": {"engine": {"name": "trtllm"}, "parallelism": {"tp": 2, "attention_dp": 2}},
    "speculative": {"engine": {"speculative": {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": 0.7}}},
    "deferred": {"replicas": 2, "router": "deferred", "router_limit": 4},
    "faults": {
        "replicas": 3,
        "router": "least_outstanding",
        "start_s": 0.2,
        "faults": {"scheduled": [{"at_s": 1.0, "replica": 1, "repair_s": 0.5}]},
    },
    "pipeline": {"parallelism": {"pp": 2, "tp": 2}},
    "pools": {
        "pools": [{"name": "p", "role": "prefill", "replicas": 2}, {"name": "d", "role": "decode", "replicas": 1}]
    },
    **{
        name: {"engine": {"scheduler": name}}
        for name in ("vllm_v0", "sarathi", "orca", "faster_transformer", "lightllm")
    },
    "preempting sarathi": {"engine": {"scheduler": "sarathi", "num_gpu_blocks": 400, "max_num_seqs": 64}},
    "pipeline sarathi": {"engine": {"scheduler": "sarathi"}, "parallelism": {"pp": 2, "tp": 2}},
    "own scheduler": {"engine": {"scheduler": OWN}, "replicas": 2},
    "preempting own scheduler": {
        "engine": {"scheduler": OWN, "num_gpu_blocks": 400, "max_num_seqs": 64, "enable_prefix_caching": False}
    },
    "own scheduler in pools": {
        "engine": {"scheduler": OWN},
        "pools": [{"name": "p", "role": "prefill", "replicas": 2}, {"name": "d", "role": "decode", "replicas": 1}],
    },
    "own order": {"engine": {"scheduling_policy": "own_functions:longest_sooner", "max_num_seqs": 4}},
    "own router": {"replicas": 3, "router": "own_functions:by_number"},
    "both own": {"replicas": 3, "router": "own_functions:by_number", "engine": {"scheduler": OWN}},
}


COMPILED = ("vllm", "sglang", "pools", "own order")


def forms(names: Iterable[str]) -> list[Any]:
    """Mark those that need a form of the loop of their own, which takes half a minute to compile."""
    return [pytest.param(name, marks=() if name in COMPILED else pytest.mark.interpreted) for name in names]


@pytest.mark.parametrize("name", forms(DEPLOYMENTS))
def test_times_are_those_of_a_simulation(name: str) -> None:
    scenario = scenario_of(dict(DEPLOYMENTS[name]))
    result, ended = simulate(scenario), driven(scenario)
    for column in TIMES:
        np.testing.assert_allclose(ended.columns[column], result.requests[column], rtol=1e-12, err_msg=column)
    for column, own in {"num_preemptions": "num_preemptions", "replica": "replica"}.items():
        np.testing.assert_array_equal(ended.columns[own], result.requests[column], err_msg=column)
    for i, times in enumerate(ended.times):
        assert min(times.values()) >= result.requests["first_token_s"][i] - 1e-9
        assert list(times) == sorted(times)
        assert max(times) == result.requests["output_tokens"][i]
        assert times[max(times)] == ended.columns["finish_s"][i]


def spelled(requests: RequestArrays) -> list[list[int]]:
    """Return ids that share beginnings as a workload's prompts do."""
    forest, all_ids = requests.prefixes, []
    assert forest is not None
    for i in range(requests.arrival_s.size):
        node, ids = int(forest.request_node[i]), []
        while node >= 0:
            first = (node + 1) << 20
            ids[:0] = range(first, first + int(forest.node_tokens[node]))
            node = int(forest.node_parent[node])
        rest = int(requests.input_tokens[i] + requests.output_tokens[i]) - len(ids)
        all_ids.append([*ids, *range((i + 1) << 40, ((i + 1) << 40) + rest)])
    return all_ids


@pytest.mark.parametrize("deployment", [{}, {"engine": {"num_gpu_blocks": 400}}, DEPLOYMENTS["pools"]])
def test_equal_beginnings_are_found_in_the_prefix_cache(deployment: dict[str, Any]) -> None:
    shared = {"tokens": 400, "count": 3}
    scenario = scenario_of(dict(deployment), shared_prompts=shared)
    requests = generate(scenario.workload, scenario.seed)
    result, ended = simulate(scenario), driven(scenario, tokens=spelled(requests))
    assert result.requests["cached_tokens"].sum() > 5000
    np.testing.assert_array_equal(ended.columns["cached"], result.requests["cached_tokens"])
    for column in TIMES:
        np.testing.assert_allclose(ended.columns[column], result.requests[column], rtol=1e-12, err_msg=column)


@pytest.mark.full
def test_rows_and_chunks_are_used_again() -> None:
    """Times do not depend on how many rows there are, and a chunk is known only while it is cached or used."""
    scenario = scenario_of({"engine": {"num_gpu_blocks": 300}}, num_requests=400, rate_per_s=6.0)
    few, many = driven(scenario, size=64), driven(scenario, size=512)
    for column in TIMES:
        np.testing.assert_allclose(few.columns[column], many.columns[column], rtol=1e-12, err_msg=column)


CANCELLING = {
    name: DEPLOYMENTS[name] for name in DEPLOYMENTS if name not in ("replicas", "random", "attention_dp", "faults")
}


@pytest.mark.parametrize("name", forms(CANCELLING))
def test_cancelled_requests_leave_nothing_behind(name: str) -> None:
    scenario = scenario_of(dict(CANCELLING[name]))
    requests, rng = generate(scenario.workload, 0), np.random.default_rng(1)
    loop = LiveLoop(prepare_live(scenario, max_requests=128), 128)
    tables: Any = loop.loop.pool if loop.loop.pools is None else loop.loop.pools
    idle = tables.ranks.copy()
    cancelled: dict[int, float] = {}
    lengths = zip(requests.input_tokens.tolist(), requests.output_tokens.tolist(), strict=True)
    for i, (input_tokens, output_tokens) in enumerate(lengths):
        loop.add(
            0.001 * (i + 1),
            input_tokens,
            output_tokens,
            tokens=range(i << 20, (i << 20) + input_tokens + output_tokens),
        )
    ended_early = 0
    while loop.num_live:
        loop.advance(loop.next_event_s())
        for row, given, is_finished in zip(*(column.tolist() for column in loop.look()), strict=True):
            if is_finished and row in cancelled:
                ended_early += given < requests.output_tokens[row]
                assert loop.until_s < cancelled[row] + 0.5
        live = [row for row in range(60) if np.isnan(loop.requests["finish_s"][row]) and row not in cancelled]
        if live and rng.random() < 0.2:
            row = int(rng.choice(live))
            cancelled[row] = loop.until_s
            loop.cancel(row)
    assert ended_early > 10
    for column in (
        "num_running",
        "num_waiting",
        "waiting_tokens",
        "num_outstanding",
        "remaining_tokens",
        "free_blocks",
        "num_prefilling",
        "num_in_flight",
        "num_ready",
        "first_waiting",
        "last_waiting",
        "first",
        "last",
        "waiting",
    ):
        np.testing.assert_array_equal(tables.ranks[column], idle[column], err_msg=column)


@pytest.mark.interpreted
def test_a_session_stays_on_its_replica() -> None:
    scenario = scenario_of({"replicas": 4, "router": "session_affinity"})
    loop = LiveLoop(prepare_live(scenario, max_requests=8), 8)
    replicas: dict[str, set[int]] = {"a": set(), "b": set()}
    for number in range(40):
        session = "ab"[number % 2] if number < 20 else f"other {number}"
        row = loop.add(
            max(loop.until_s, 0.0) + 0.01, 32, 2, tokens=range(number << 20, (number << 20) + 34), session=session
        )
        while loop.num_live:
            loop.advance(loop.next_event_s())
            loop.look()
        if number < 20:
            replicas[session].add(loop.replica(row))
    assert [len(each) for each in replicas.values()] == [1, 1]
    assert len(loop._sessions) == 8
