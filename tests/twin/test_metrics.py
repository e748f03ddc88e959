"""Metrics of a twin have the values of what its requests went through."""

import asyncio
import gc
import time

import numpy as np
import pytest

from live_twins import client_of, scenario_of, served
from windtunnel.serving.simulate import simulate
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Answer, Twin
from windtunnel.twin.live import prepare_live
from windtunnel.twin.metrics import token_bounds
from windtunnel.twin.server import TwinApp
from windtunnel.twin.start import twin_app


def values(text: str) -> dict[str, float]:
    """Return every sample by its name and labels."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sums_and_counts_are_those_of_a_simulation(engine: str) -> None:
    scenario = scenario_of(
        {"engine": {"name": engine}}, client={"first_token_s": 0, "stream_s": 0, "prompt_token_s": 0}
    )
    result = simulate(scenario)
    twin, metrics, _ = served(scenario)
    found = values(metrics.text(twin, twin.clock))
    labels = '{model_name="m",engine="0"}'
    requests = result.requests
    for measure, column in (("time_to_first_token", "ttft_s"), ("e2e_request_latency", "e2e_s")):
        assert found[f"{engine}:{measure}_seconds_count{labels}"] == len(requests)
        assert found[f"{engine}:{measure}_seconds_sum{labels}"] == pytest.approx(requests[column].sum(), rel=1e-9)
    assert found[f"{engine}:prompt_tokens_total{labels}"] == requests["input_tokens"].sum()
    assert found[f"{engine}:generation_tokens_total{labels}"] == requests["output_tokens"].sum()
    gaps = (requests["output_tokens"] - 1).sum()
    assert found[f"{engine}:inter_token_latency_seconds_count{labels}"] == gaps
    decode_s = (requests["finish_s"] - requests["first_token_s"]).sum()
    assert found[f"{engine}:inter_token_latency_seconds_sum{labels}"] == pytest.approx(decode_s, rel=1e-9)
    within = (requests["ttft_s"] <= 0.1).sum()
    assert found[f'{engine}:time_to_first_token_seconds_bucket{{model_name="m",engine="0",le="0.1"}}'] == within
    if engine == "vllm":
        steps = result.steps
        tokens = (steps["num_steps"] * (steps["decode_tokens"] + steps["prefill_tokens"])).sum()
        assert found[f"vllm:iteration_tokens_total_sum{labels}"] == tokens
        assert found[f"vllm:iteration_tokens_total_count{labels}"] == steps["num_steps"].sum()
        assert found['vllm:request_success_total{model_name="m",engine="0",finished_reason="length"}'] == len(requests)
        assert found[f"vllm:request_queue_time_seconds_sum{labels}"] == pytest.approx(requests["queueing_s"].sum())


def test_what_rates_are_taken_of_is_there_from_the_start() -> None:
    app = twin_app(scenario_of({}), None, names=('a "b"\\c',))
    found = values(app.metrics.text(app.twin, app.twin.clock))
    labels = r'model_name="a \"b\"\\c",engine="0"'
    for reason in ("stop", "length", "abort", "error"):
        assert found[f'vllm:request_success_total{{{labels},finished_reason="{reason}"}}'] == 0
    assert found[f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}}'] == 1
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert found[f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}}'] == 0
    assert not any(name.startswith(("vllm:spec_decode", "vllm:lora")) for name in found)
    assert found[f"vllm:request_max_num_generation_tokens_count{{{labels}}}"] == 0


@pytest.mark.full
def test_prompts_count_where_they_are_computed() -> None:
    pools = [{"name": name, "role": name, "replicas": 2 if name == "prefill" else 1} for name in ("prefill", "decode")]
    app = twin_app(scenario_of({"pools": pools}), None, names=("m",))

    async def talk() -> str:
        async with client_of(app) as client:
            for _ in range(2):
                asked = {"prompt": list(range(1000, 1064)), "max_tokens": 4, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=asked)).status_code == 200
            return (await client.get("/metrics")).text

    found = values(asyncio.run(talk()))
    for measure, total in (("prompt_tokens", 128), ("prefix_cache_queries", 128), ("generation_tokens", 8)):
        counted = [found[f'vllm:{measure}_total{{model_name="m",engine="{replica}"}}'] for replica in range(3)]
        assert sum(counted) == total
        assert (counted[2] > 0) == (measure == "generation_tokens")


def test_gauges_tell_what_is_under_way() -> None:
    app = twin_app(scenario_of({"engine": {"max_num_seqs": 2}}), 0.001, names=("m",), max_requests=16)
    answers: list[Answer] = []

    async def talk() -> tuple[dict[str, float], dict[str, float]]:
        for number in range(5):
            first = number << 20
            answers.append(app.twin.submit((320, 100), lambda *_: None, range(first, first + 420)))
        app.twin.run_to(app.twin.live.until_s + 0.05)
        app.twin.close()
        async with client_of(app) as client:
            during = values((await client.get("/metrics")).text)
        for answer in answers:
            app.twin.cancel(answer)
        app.twin.run_to(app.twin.live.until_s + 1.0)
        app.twin.close()
        return during, values(app.metrics.text(app.twin, app.twin.clock))

    during, after = asyncio.run(talk())
    labels = '{model_name="m",engine="0"}'
    assert (during[f"vllm:num_requests_running{labels}"], during[f"vllm:num_requests_waiting{labels}"]) == (2, 3)
    assert during['vllm:num_requests_waiting_by_reason{model_name="m",engine="0",reason="capacity"}'] == 3
    blocks = app.twin.deployment.first.memory.num_blocks
    assert 40 / blocks <= during[f"vllm:kv_cache_usage_perc{labels}"] <= 44 / blocks
    assert after[f"vllm:num_requests_running{labels}"] == after[f"vllm:num_requests_waiting{labels}"] == 0
    assert after['vllm:request_success_total{model_name="m",engine="0",finished_reason="abort"}'] == 5
    info = next(name for name in after if name.startswith("vllm:cache_config_info"))
    assert f'num_gpu_blocks="{blocks}"' in info


def test_buckets_of_lengths_are_vllms() -> None:
    assert token_bounds(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_hits_of_the_prefix_cache_are_counted(app: TwinApp) -> None:
    async def talk() -> dict[str, float]:
        async with client_of(app) as client:
            for _ in range(2):
                await client.post("/v1/completions", json={"prompt": list(range(100)), "max_tokens": 2})
            return values((await client.get("/metrics")).text)

    found = asyncio.run(talk())
    assert found['vllm:prefix_cache_queries_total{model_name="llama",engine="0"}'] == 200
    assert found['vllm:prefix_cache_hits_total{model_name="llama",engine="0"}'] == 96
    assert found['vllm:prompt_tokens_cached_total{model_name="llama",engine="0"}'] == 96
    for source, tokens in (("local_compute", 104), ("local_cache_hit", 96), ("external_kv_transfer", 0)):
        assert found[f'vllm:prompt_tokens_by_source_total{{model_name="llama",engine="0",source="{source}"}}'] == tokens
    assert found['vllm:request_prefill_kv_computed_tokens_sum{model_name="llama",engine="0"}'] == 104


def test_what_comes_from_lower_tiers_is_external() -> None:
    tiers = [{"name": "host", "capacity_bytes": 10**10, "bandwidth_bytes_per_s": 5e10}]
    app = twin_app(scenario_of({"engine": {"num_gpu_blocks": 80, "kv_tiers": tiers}}), None, names=("m",))

    async def talk() -> dict[str, float]:
        async with client_of(app) as client:
            for first in (0, 2000, 4000, 0):  # each fills most of the cache
                asked = {"prompt": list(range(first, first + 1000)), "max_tokens": 2}
                assert (await client.post("/v1/completions", json=asked)).status_code == 200
            return values((await client.get("/metrics")).text)

    found = asyncio.run(talk())
    labels = 'model_name="m",engine="0"'
    external = found[f"vllm:external_prefix_cache_hits_total{{{labels}}}"]
    local = found[f"vllm:prefix_cache_hits_total{{{labels}}}"]
    assert (external > 0, external + local) == (True, 992)
    assert found[f"vllm:external_prefix_cache_queries_total{{{labels}}}"] == 4000 - local
    assert found[f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}}'] == external


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_drafts_are_right_as_often_as_the_scenario_says(engine: str) -> None:
    speculative = {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": (0.8, 0.5, 0.5)}
    scenario = scenario_of({"engine": {"name": engine, "speculative": speculative}})
    twin, metrics, _ = served(scenario)
    found = values(metrics.text(twin, twin.clock))
    steps, labels = simulate(scenario).steps, 'model_name="m",engine="0"'
    drafts = (steps["num_steps"] * steps["decode_tokens"]).sum()
    if engine == "sglang":
        assert found[f"sglang:spec_verify_calls_total{{{labels}}}"] == drafts
        assert found[f"sglang:spec_accept_length{{{labels}}}"] == pytest.approx(2.4)
        assert found[f"sglang:spec_accept_rate{{{labels}}}"] == pytest.approx(1.4 / 3)
        return
    counted = "vllm:spec_decode_num"
    assert found[f"{counted}_drafts_total{{{labels}}}"] == drafts
    assert found[f"{counted}_draft_tokens_total{{{labels}}}"] == 3 * drafts
    accepted = [found[f'{counted}_accepted_tokens_per_pos_total{{{labels},position="{k}"}}'] for k in range(3)]
    assert accepted == [int(share * drafts + 1e-9) for share in (0.8, 0.4, 0.2)]
    assert found[f"{counted}_accepted_tokens_total{{{labels}}}"] == sum(accepted)
    generated, prompts = (found[f"vllm:{name}_tokens_total{{{labels}}}"] for name in ("generation", "prompt"))
    # Each request has its first token from its prompt, and its last drafts go beyond its end.
    assert 0 <= 60 + 2.4 * drafts - generated <= 60 * 4
    assert found[f"vllm:iteration_tokens_total_sum{{{labels}}}"] == pytest.approx(prompts + 2.4 * drafts)


def test_adapters_are_named_where_they_wait_and_run() -> None:
    app = twin_app(scenario_of({"engine": {"max_num_seqs": 2}}), 0.001, names=("m", "sql", "chat"), max_requests=16)

    async def talk() -> str:
        async with client_of(app) as client:
            for number, model in enumerate(("sql", "m", "chat", "sql")):
                asked = {"model": model, "prompt": list(range(99 * number, 99 * number + 90)), "max_tokens": 100}
                asyncio.ensure_future(client.post("/v1/completions", json=asked))  # noqa: RUF006
                await asyncio.sleep(0.01)
            app.twin.run_to(app.twin.live.until_s + 0.05)
            text = (await client.get("/metrics")).text
            app.twin.close()
            return text

    (line,) = (line for line in asyncio.run(talk()).splitlines() if line.startswith("vllm:lora_requests_info"))
    labels = 'max_lora="1",running_lora_adapters="sql",waiting_lora_adapters="chat,sql"'
    assert line.startswith(f"vllm:lora_requests_info{{{labels}}} ")
    assert abs(float(line.rpartition(" ")[2]) - time.time()) < 60


def test_parameters_of_requests_are_counted_once_for_all_answers(app: TwinApp) -> None:
    async def talk() -> dict[str, float]:
        async with client_of(app) as client:
            asked = {"prompt": ["a b", "c d"], "n": 3, "max_tokens": 7, "temperature": 1}
            await client.post("/v1/completions", json=asked)
            await client.post("/v1/embeddings", json={"input": "a b"})
            return values((await client.get("/metrics")).text)

    found = asyncio.run(talk())
    labels = '{model_name="llama",engine="0"}'
    assert (found[f"vllm:request_params_n_count{labels}"], found[f"vllm:request_params_n_sum{labels}"]) == (3, 7)
    assert found[f"vllm:request_max_num_generation_tokens_count{labels}"] == 3
    tokens = "vllm:request_params_max_tokens"
    assert (found[f"{tokens}_count{labels}"], found[f"{tokens}_sum{labels}"]) == (6, 42)


@pytest.mark.full
def test_tokens_of_sglangs_pool_are_used_cached_or_free() -> None:
    scenario = scenario_of({"engine": {"name": "sglang"}})
    twin, metrics, scrapes = served(scenario, every_s=1.0)
    used = []
    for text in (*scrapes, metrics.text(twin, twin.clock)):
        found = {name.partition("{")[0]: value for name, value in values(text).items()}
        parts = [found[f"sglang:kv_{name}_tokens"] for name in ("used", "evictable", "available")]
        assert (
            sum(parts) == found["sglang:max_total_num_tokens"] == found["sglang:num_pages"] * found["sglang:page_size"]
        )
        used.append((parts[0] > 0, found["sglang:gen_throughput"] > 0))
    assert (True, True) in used
    assert used[-1] == (False, False)


@pytest.mark.full
def test_a_day_leaves_no_memory_behind() -> None:
    """Rows, chunks and steps are used again: what a twin holds is the same after thousands of requests."""
    twin = Twin(prepare_live(scenario_of({"engine": {"num_gpu_blocks": 400}}), max_requests=64), TwinClock(None), 64)
    rng, held, objects = np.random.default_rng(0), [], list[int]()

    async def send() -> None:
        for number in range(1200):
            twin.clock.reached_s += 72.0
            first = int(rng.integers(1 << 40))
            twin.submit((200, 20), lambda *_: None, range(first, first + 220))
            twin.run_to(1e9)
            twin.close()
            await asyncio.sleep(0)
            if number % 400 == 399:
                gc.collect()
                objects.append(len(gc.get_objects()))
                forest = twin.live.forest
                assert forest is not None
                held.append((len(forest.known), len(forest.paths), len(twin._answers), len(twin._due)))
        twin.close()

    asyncio.run(send())
    assert twin.clock.reached_s >= 86_400
    forest = twin.live.forest
    assert forest is not None
    assert all(known <= forest.size for known, *_ in held)
    assert [rest for _, *rest in held] == [[0, 0, 0]] * 3
    assert objects[-1] - objects[0] < 100
