"""Scenarios with pools: what they resolve to, what they report, and transfers as they were measured."""

import csv
from pathlib import Path

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.serving.deployment import LINK_EFFICIENCY, TRANSFER_LATENCY_S
from windtunnel.serving.scenario import Scenario


def scenario(pools: list[dict[str, object]], **deployment: object) -> Scenario:
    return wt.scenario(
        model="meta-llama/Llama-3.1-8B",
        device="h100_sxm",
        rate_per_s=12,
        num_requests=200,
        input_tokens=2048,
        output_tokens=64,
        settings={"deployment.pools": pools, **{f"deployment.{name}": value for name, value in deployment.items()}},
    )


PREFILL, DECODE = {"name": "prompts", "role": "prefill"}, {"name": "outputs", "role": "decode", "replicas": 2}


def test_a_run_reports_its_pools_and_its_requests_where_they_were() -> None:
    result = wt.simulate(scenario([PREFILL, DECODE]))
    summary, requests = result.summary, result.requests
    assert [pool.name for pool in summary.pools] == ["prompts", "outputs"]
    assert [pool.num_devices for pool in summary.pools] == [1, 2]
    assert summary.num_devices == 3
    assert summary.cost is not None
    assert summary.cost.usd_per_hour == pytest.approx(sum(pool.usd_per_hour or 0.0 for pool in summary.pools))
    assert (requests["prefill_replica"] == 0).all()
    assert set(requests["replica"]) == {1, 2}
    assert summary.transfer_s is not None
    num_bytes = 2048 * 32 * 8 * 128 * 2 * 2  # layers, key/value heads, their width, keys and values, bytes
    assert (requests["transfer_end_s"] - requests["transfer_start_s"]).min() == pytest.approx(
        num_bytes / (0.72 * 50e9) + 4e-4
    )
    prefills = result.steps["replica"] == 0
    assert (result.steps["decode_tokens"][prefills] == 0).all()
    assert (result.steps["prefill_tokens"][~prefills] == 0).all()


@pytest.mark.full
def test_the_resolved_scenario_runs_the_same_again() -> None:
    first = wt.simulate(scenario([PREFILL, DECODE], transfer={"overlap": True, "router": "least_kv"}))
    again = wt.simulate(first.scenario)
    assert again.scenario == first.scenario
    for name in first.requests.columns:
        np.testing.assert_array_equal(first.requests[name], again.requests[name])


@pytest.mark.full
def test_a_pool_takes_from_the_deployment_what_it_leaves_out() -> None:
    pools = [PREFILL | {"engine": {"max_num_seqs": 7}}, DECODE | {"device": "l40s", "parallelism": {"tp": 2}}]
    result = wt.simulate(scenario(pools, engine={"max_num_batched_tokens": 4096}))
    prompts, outputs = (pool.setup for pool in result.pools)
    assert (prompts.engine.max_num_seqs, prompts.engine.max_num_batched_tokens) == (7, 4096)
    assert outputs.engine.max_num_batched_tokens == 4096
    assert (prompts.device.name, prompts.parallelism.tp) == ("h100_sxm", 1)
    assert (outputs.device.name, outputs.parallelism.tp) == ("l40s", 2)


def test_short_prompts_stay_where_they_decode() -> None:
    result = wt.simulate(scenario([PREFILL, DECODE], transfer={"local_prefill_tokens": 2048}))
    assert (result.requests["prefill_replica"] == result.requests["replica"]).all()
    assert np.isnan(result.requests["handed_s"]).all()
    assert result.summary.transfer_s is None
    assert result.summary.pools[0].utilisation.busy_fraction == 0


@pytest.mark.parametrize(
    ("pools", "deployment", "message"),
    [
        ([PREFILL], {}, "no pool decodes"),
        ([DECODE], {}, "no pool prefills"),
        ([PREFILL, PREFILL], {}, "two pools are called 'prompts'"),
        ([PREFILL, DECODE], {"replicas": 2}, "replicas and pools exclude each other"),
        ([PREFILL, DECODE | {"replicas": 0}], {}, "replicas is 0"),
        ([PREFILL, DECODE | {"parallelism": {"tp": 3}}], {}, "tp = 3 does not divide"),
        ([PREFILL, DECODE | {"engine": {"num_gpu_blocks": 100}}], {}, "pool outputs: request 0 of 2,112 tokens needs"),
        ([PREFILL, DECODE | {"engine": {"name": "sglang"}}], {"transfer": {"first_token": "decode"}}, "SGLang"),
        ([PREFILL, DECODE], {"transfer": {"link_efficiency": 1.5}}, "link_efficiency is 1.5"),
        ([PREFILL, DECODE], {"transfer": {"first_token": "decode", "streamed_by": "prefill"}}, "first_token is decode"),
        ([PREFILL, DECODE], {"transfer": {"router": "prefix_affinity"}}, "transfer.router is prefix_affinity"),
    ],
)
def test_pools_that_cannot_work_are_refused(
    pools: list[dict[str, object]], deployment: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        wt.simulate(scenario(pools, **deployment))


def two_turns(**deployment: object) -> wt.Result:
    """Two turns of one user; the second one's prompt begins with all of the first and its answer."""
    settings = {
        "deployment.pools": [PREFILL, DECODE | {"replicas": 1}],
        "deployment.transfer": {"bytes_per_s": 1e9, "latency_s": 0.0},
        "workload.sessions": {"turns": 2, "think_s": 1.0},
        **{f"deployment.{name}": value for name, value in deployment.items()},
    }
    made = wt.scenario(
        model="meta-llama/Llama-3.1-8B",
        device="h100_sxm",
        concurrency=1,
        num_requests=2,
        input_tokens=1600,
        output_tokens=161,
        settings=settings,
    )
    return wt.simulate(made)


@pytest.mark.full
def test_what_the_decode_side_has_cached_is_not_sent_again() -> None:
    result = two_turns()
    token_s = 32 * 8 * 128 * 2 * 2 / 1e9  # of KV over the link
    # Prompts of 1,600 and 3,361 tokens. The prefill side knows the first prompt, the decode side the answer too, but
    # its last token, which was never computed.
    assert result.requests["input_tokens"].tolist() == [1600, 3361]
    assert result.requests["cached_tokens"].tolist() == [0, 1600]
    sent_s = result.requests["transfer_end_s"] - result.requests["transfer_start_s"]
    np.testing.assert_allclose(sent_s, [1600 * token_s, (3361 - 1760) * token_s])
    assert result.summary.cache_hit_fraction == pytest.approx(1600 / 4961)


HOST = {"name": "host", "capacity_bytes": 10**11, "bandwidth_bytes_per_s": 1e9}


@pytest.mark.full
def test_a_store_gives_the_prefill_side_the_answers() -> None:
    """Of its own memory and host's the prefill side knows prompts alone; in a store it finds what the others wrote."""
    token_s = 32 * 8 * 128 * 2 * 2 / 1e9  # of KV from the tier
    own, shared = (two_turns(engine={"kv_tiers": [HOST | more]}) for more in ({}, {"shared_by": "deployment"}))
    assert own.requests["cached_tokens"].tolist() == [0, 1600]
    assert own.requests["loaded_tokens"].tolist() == [0, 0]
    assert shared.requests["cached_tokens"].tolist() == [0, 1760]
    assert shared.requests["loaded_tokens"].tolist() == [0, 160]
    assert shared.summary.cache_hit_fractions == pytest.approx({"device": 1600 / 4961, "host": 160 / 4961})
    assert shared.steps["load_s"].sum() == pytest.approx(160 * token_s)
    # What is read from the prefill side is the same: the decode side has all but what is new.
    names = ("transfer_start_s", "transfer_end_s")
    sent_s = [one.requests[names[1]] - one.requests[names[0]] for one in (own, shared)]
    np.testing.assert_allclose(*sent_s)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ({"block_size": 16}, {"block_size": 32}, "pools prompts and outputs share the KV tier 'host'"),
        ({}, {"enable_prefix_caching": False}, "pool outputs has kv_tiers and no prefix caching"),
        ({"kv_tiers": [HOST | {"capacity_bytes": 10}]}, {}, "pool prompts: the KV tier 'host' of 10 B holds no block"),
    ],
)
def test_tiers_that_cannot_be_are_refused(prefill: object, decode: object, message: str) -> None:
    pools = [PREFILL | {"engine": prefill}, DECODE | {"engine": decode}]
    with pytest.raises(InputError, match=message):
        two_turns(pools=pools, engine={"kv_tiers": [HOST | {"shared_by": "deployment"}]})


@pytest.mark.full
def test_preempted_requests_find_their_own_blocks_in_pools_too() -> None:
    """Or what a tier below keeps of them, also where the engine does not cache; else they are computed again."""
    again = {}
    for name, engine in {
        "cached": {},
        "computed": {"enable_prefix_caching": False},
        "swapped": {"enable_prefix_caching": False, "kv_tiers": [HOST | {"bandwidth_bytes_per_s": 1e12}]},
    }.items():
        pools = [PREFILL, DECODE | {"replicas": 1, "engine": {"num_gpu_blocks": 261, **engine}}]
        result = wt.simulate(scenario(pools))
        assert result.requests["num_preemptions"].sum() > 0
        assert result.requests["cached_tokens"].sum() == 0
        again[name] = result.steps["prefill_tokens"].sum() - result.requests["input_tokens"].sum()
    assert 0 < again["swapped"] <= again["cached"] < again["computed"]


def test_a_deployment_of_pools_is_not_one_setup() -> None:
    with pytest.raises(InputError, match="2 pools"):
        wt.resolve(scenario([PREFILL, DECODE]))


def test_transfers_take_as_long_as_mooncake_measured(reference: Path) -> None:
    """Qwen3-8B between two nodes of eight 200 Gb/s interfaces, 128 to 32,768 tokens: 0.5 to 32 ms. Latency and
    efficiency, our defaults, are from the ends of this very table; the points between are not.
    """
    with (reference / "serving" / "mooncake_pd_transfer.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        seconds = float(row["kv_size_MB"]) * 1e6 / (8 * 25e9 * LINK_EFFICIENCY) + TRANSFER_LATENCY_S
        assert seconds == pytest.approx(float(row["transfer_ms"]) / 1e3, rel=0.11)


@pytest.mark.interpreted
@pytest.mark.parametrize(("engine", "streamed_by"), [("vllm", "prefill"), ("sglang", "decode"), ("trtllm", "decode")])
def test_who_streams_the_first_output_is_the_engines_own(engine: str, streamed_by: str) -> None:
    result = wt.simulate(scenario([PREFILL, DECODE], engine={"name": engine}))
    known = "handed_s" if streamed_by == "prefill" else "transfer_end_s"
    assert (result.requests["first_token_s"] >= result.requests[known]).all()
    assert (result.requests["first_token_s"] == result.requests["handed_s"]).all() == (streamed_by == "prefill")
    assert result.scenario.deployment.transfer.streamed_by == streamed_by


@pytest.mark.full
def test_a_first_output_waits_for_a_place_where_it_decodes() -> None:
    """One place for requests of 64 outputs: the second's first output comes when the first is done."""
    one_place = DECODE | {"replicas": 1, "engine": {"max_num_seqs": 1}}
    result = wt.simulate(scenario([PREFILL, one_place], engine={"name": "trtllm"}))
    requests = result.requests
    assert (requests["first_token_s"][1:] >= requests["finish_s"][:-1]).all()
    told = wt.simulate(scenario([PREFILL, one_place], engine={"name": "trtllm"}, transfer={"streamed_by": "prefill"}))
    assert (told.requests["finish_s"] == requests["finish_s"]).all()
    assert (told.requests["first_token_s"] == told.requests["handed_s"]).all()


def test_prompts_are_not_held_to_the_budget_of_steps_that_never_compute_them() -> None:
    narrow = DECODE | {"engine": {"max_num_seqs": 64, "max_num_batched_tokens": 64}}
    result = wt.simulate(scenario([PREFILL, narrow], engine={"name": "trtllm"}))
    assert result.summary.num_requests == 200
    with pytest.raises(InputError, match="without chunked prefill a step takes 64"):
        wt.simulate(scenario([PREFILL, narrow], engine={"name": "trtllm"}, transfer={"local_prefill_tokens": 1}))


@pytest.mark.full
def test_a_calibration_may_know_of_transfers(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("""
engine: vllm
provenance: {fitted_on: runs, num_runs: 0, num_configurations: 0}
transfer:
  latency_s: 0.05
  link_efficiency: 0.5
  record: {num_runs: 4, num_configurations: 2, median_error: 0.05, median_error_before: 0.2}
""")
    named = {"calibration": str(profile)}
    learnt = wt.simulate(scenario([PREFILL, DECODE], **named))
    assert learnt.scenario.deployment.transfer.latency_s == 0.05
    assert learnt.summary.transfer_s is not None
    told = wt.simulate(scenario([PREFILL, DECODE], transfer={"latency_s": 0.05, "link_efficiency": 0.5}, **named))
    assert learnt.summary.transfer_s == told.summary.transfer_s
    other = wt.simulate(scenario([PREFILL, DECODE], transfer={"latency_s": 0.0}, **named))
    assert other.scenario.deployment.transfer.latency_s == 0.0
    assert other.scenario.deployment.transfer.link_efficiency == 0.5


@pytest.mark.full
def test_a_latent_cache_is_sent_to_every_device_that_decodes() -> None:
    """To one device and to two that share its heads; and inside a node."""
    taken = {}
    for tp in (1, 2):
        for link in ("scale_out", "scale_up"):
            result = wt.simulate(
                wt.scenario(
                    model="deepseek-ai/DeepSeek-V2-Lite",
                    device="h200_sxm",
                    rate_per_s=1,
                    num_requests=3,
                    input_tokens=1000,
                    output_tokens=4,
                    settings={
                        "deployment.pools": [PREFILL, DECODE | {"replicas": 1, "parallelism": {"tp": tp}}],
                        "deployment.transfer": {"latency_s": 0.0, "link": link},
                    },
                )
            )
            requests = result.requests
            taken[tp, link] = (requests["transfer_end_s"] - requests["transfer_start_s"]).min()
    assert taken[2, "scale_out"] == pytest.approx(2 * taken[1, "scale_out"])
    assert taken[1, "scale_up"] == pytest.approx(taken[1, "scale_out"] * 50 / 450)
