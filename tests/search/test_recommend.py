"""The deployments that a recommendation tries, and the sentence that it ends in."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as changed

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import launch_script
from windtunnel.metrics.limits import parse_limits
from windtunnel.model.parallelism import Parallelism
from windtunnel.report.search.figures import engine_versions
from windtunnel.report.search.recommendation import recommendation
from windtunnel.report.search.study import SearchEvidence, rest_text, winner_rank
from windtunnel.report.search.study_files import point_document
from windtunnel.search.answers import scenario_of
from windtunnel.search.asker import Count
from windtunnel.search.capacity.capacity import capacities
from windtunnel.search.capacity.load import check_keeps_time
from windtunnel.search.evaluation.figures import taken_by
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.fleets import FleetSimulator, FleetSize, copied, fleets, lengthened, ways
from windtunnel.search.recommend import AS_IT_IS, CAPACITY, DEPLOYMENT, changes_space, deployments_space, layouts
from windtunnel.search.space.space import CHANGE, Space, point_at, scenario_at, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import SearchOutcome, Study, outcome_of, search
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.scenario import Scenario, keep_published_formats, resolve, scenario_from
from windtunnel.serving.simulate import simulate

LIMITS = parse_limits("ttft_p90=1s,tpot_p99=50ms")


def shared(model: str = "meta-llama/Llama-3.1-8B") -> dict[str, Any]:
    return {
        "model": model,
        "deployment": {"device": "h100_sxm"},
        "workload": {
            "arrivals": {"type": "poisson", "rate_per_s": 1},
            "input_tokens": 512,
            "output_tokens": 64,
            "num_requests": 100,
        },
    }


def names(space: Space) -> list[str]:
    return list(space.vary[DEPLOYMENT])


def test_checkpoints_are_those_of_the_same_model() -> None:
    """Llama-3.3-70B has the shape of Llama-3.1-70B, and is another model."""
    found = catalog.checkpoints("meta-llama/Llama-3.3-70B-Instruct", "nvidia")
    assert next(iter(found)) == "meta-llama/Llama-3.3-70B-Instruct"
    assert all("Llama-3.3-70B" in name for name in found)
    assert {str(model.precision.weights) for model in found.values()} == {"bf16", "fp8", "nvfp4", "int8"}
    assert "deepseek-ai/DeepSeek-V3.1" not in catalog.checkpoints("deepseek-ai/DeepSeek-V3")


def test_vendors_checkpoints_are_for_their_own_devices() -> None:
    space = deployments_space(shared("deepseek-ai/DeepSeek-R1-0528"), ["mi355x", "b200_sxm"], LIMITS, {})
    models = {name.partition(" ")[0]: set[str]() for name in names(space)}
    for name, settings in space.vary["deployment"].items():
        models[name.partition(" ")[0]].add(settings["model"])
    assert models["mi355x"] == {"deepseek-ai/DeepSeek-R1-0528", "amd/DeepSeek-R1-0528-MXFP4"}
    assert "nvidia/DeepSeek-R1-0528-NVFP4-v2" in models["b200_sxm"]
    assert not any(model.startswith("amd/") for model in models["b200_sxm"])


def test_a_format_is_tried_where_a_device_computes_it() -> None:
    space = deployments_space(shared("qwen3-32b"), ["a100_sxm", "h100_sxm", "b200_sxm"], LIMITS, {})
    by_device = {
        device: {name.partition(", ")[2] for name in names(space) if name.startswith(device)}
        for device in ("a100_sxm", "h100_sxm", "b200_sxm")
    }
    kept = "fp8 KV cache"
    assert by_device == {
        "a100_sxm": {"bf16"},
        "h100_sxm": {"bf16", "fp8_block", f"bf16, {kept}", f"fp8_block, {kept}"},
        # The NVFP4 checkpoint's KV cache is FP8 anyway.
        "b200_sxm": {"bf16", "fp8_block", "nvfp4", f"bf16, {kept}", f"fp8_block, {kept}"},
    }


def test_an_fp8_kv_cache_takes_half_the_memory_and_is_launched() -> None:
    space = deployments_space(shared("qwen3-32b"), ["h100_sxm"], LIMITS, {})
    plain, halved = (
        next(point for point in map(partial(point_at, space), range(space.num_points)) if point.title.startswith(title))
        for title in (f"h100_sxm TP 2, bf16{end}, max" for end in ("", ", fp8 KV cache"))
    )
    scenarios = [scenario_at(space, point.settings) for point in (plain, halved)]
    words = [launch_script(scenario, engine_versions(scenario)) for scenario in scenarios]
    assert ["--kv-cache-dtype fp8" in text for text in words] == [False, True]
    steps = [explain_step(resolve(scenario), step_batch(16, 4096)) for scenario in scenarios]
    assert steps[1].memory.kv_tokens == pytest.approx(2 * steps[0].memory.kv_tokens, rel=0.01)
    assert steps[1].memory.weight_bytes == steps[0].memory.weight_bytes
    assert steps[1].step_s < 0.97 * steps[0].step_s  # attention reads half the bytes, too


def test_layouts_are_those_that_divide_the_heads_of_a_node() -> None:
    dense, experts, latent = (
        list(layouts(catalog.model(name), 8)) for name in ("qwen2.5-0.5b", "qwen3-30b-a3b", "deepseek-ai/DeepSeek-V3")
    )
    assert dense == [{"tp": 1}, {"tp": 2}]  # 14 heads
    assert {"tp": 4, "ep": 4} in experts
    assert not any("attention_dp" in layout for layout in experts)
    assert {"tp": 1, "attention_dp": 8, "ep": 8} in latent


def test_pools_are_tried_when_asked() -> None:
    plain = deployments_space(shared(), ["h100_sxm"], LIMITS, {})
    split = deployments_space(shared(), ["h100_sxm"], LIMITS, {}, splits=True)
    assert len(names(split)) == 4 * len(names(plain))
    point = next(p for p in (point_at(split, i) for i in range(split.num_points)) if "2 decode" in p.title)
    assert [pool["replicas"] for pool in point.settings["deployment.pools"]] == [1, 2]


def test_a_device_needs_a_price() -> None:
    with pytest.raises(InputError, match="mi325x has no list price"):
        deployments_space(shared(), ["h100_sxm", "mi325x"], LIMITS, {})
    with pytest.raises(InputError, match="mi325x, h20 have no list price") as raised:
        deployments_space(shared(), ["mi325x", "h100_sxm", "h20"], LIMITS, {})
    assert "--prices mi325x=10.50,h20=10.50" in str(raised.value.hint)
    with pytest.raises(InputError, match="a price of gb300, which is not among"):
        deployments_space(shared(), ["h100_sxm"], LIMITS, {}, {"gb300": 9.0})
    space = deployments_space(shared(), ["gb200"], LIMITS, {}, {"gb200": 10.5}, splits=True)
    prices = [point_at(space, i).settings["deployment.price_usd_per_hour"] for i in range(space.num_points)]
    assert set(prices) == {10.5}


def test_wrong_names_are_refused() -> None:
    with pytest.raises(InputError, match="h100_sxn"):
        deployments_space(shared(), ["h100_sxn"], LIMITS, {})
    with pytest.raises(InputError, match=r"no checkpoint of .*nvidia/Qwen3-32B-NVFP4"):
        deployments_space(shared("nvidia/Qwen3-32B-NVFP4"), ["a100_sxm"], LIMITS, {})
    for name in ("devices", "usd_per_hour", "power_w"):
        with pytest.raises(InputError, match=f"{name} is 0; .* is needed"):
            deployments_space(shared(), ["h100_sxm"], LIMITS, {name: 0})


@pytest.fixture(scope="module")
def study() -> Study:
    space = deployments_space(shared(), ["h100_sxm", "l40s"], LIMITS, {"devices": 2})
    return search(space, Store(None, print))


@pytest.mark.full
@pytest.mark.compiled
def test_the_sentence_names_the_cheapest_and_what_the_next_costs(study: Study) -> None:
    outcome = study.outcomes[0]
    best = outcome.mean(outcome.ranking[0])
    text = recommendation(study, None)
    title = point_at(study.space, outcome.ranking[0]).choice[DEPLOYMENT]
    other = next(i for i in outcome.ranking if point_at(study.space, i).choice[DEPLOYMENT] != title)
    more = best.figures["requests_per_usd"] / outcome.mean(other).figures["requests_per_usd"] - 1
    assert text.startswith("Serve it on 1 x NVIDIA ")
    budget = study.point(outcome.ranking[0]).choice["max_num_batched_tokens"]
    assert (f"Start it with max_num_batched_tokens {budget}." in text) == (budget is not None)
    assert f"${best.figures['usd_per_hour']:,.2f}/h holds " in text
    assert f"{point_at(study.space, other).choice[DEPLOYMENT]}, costs {more:.1%} more" in text


@pytest.mark.full
@pytest.mark.compiled
def test_a_load_takes_as_many_replicas_as_it_needs(study: Study) -> None:
    load = 500.0
    cheapest = fleets(study.outcomes[0], load, 1)[0]
    assert f"{cheapest.devices} x NVIDIA" in recommendation(study, load)
    assert f"as {cheapest.copies} replicas of" in recommendation(study, load)
    assert "not simulated together: fewer may do, or more be needed" in recommendation(study, load)
    assert "fewer may do" not in recommendation(study, 1e-3)
    assert f"as {fleets(study.outcomes[0], 1e6, 1)[0].copies:,} replicas of" in recommendation(study, 1e6)
    scenario = copied(scenario_of(study, study.outcomes[0], cheapest.index), cheapest, load)
    assert scenario.deployment.replicas == cheapest.copies
    assert scenario.workload.arrivals.rate_per_s == load  # type: ignore[union-attr]


def holds(study: Study, fleet: FleetSize, copies: int, load: float) -> list[bool]:
    """Whether so many copies hold the limits for each stream of requests, each simulated as its scenario."""
    scenario = copied(scenario_of(study, study.outcomes[0], fleet.index), replace(fleet, copies=copies), load)
    runs = (simulate(msgspec.structs.replace(scenario, seed=seed)) for seed in range(study.outcomes[0].num_streams))
    return [run.summary.goodput is not None and run.summary.goodput.is_held for run in runs]


@pytest.mark.full
@pytest.mark.compiled
def test_replicas_are_simulated_behind_their_router() -> None:
    """A replica serves one request at a time, so that a queue of its own keeps it idle most of the time."""
    one = {DEPLOYMENT: {"h100_sxm TP 1": {"model": "llama-3.1-8b", "device": "h100_sxm"}}}
    raw = {**shared(), "limits": {"ttft_p90": 0.5}, "vary": one, "finalist_seeds": 3}
    raw["deployment"]["engine"] = {"max_num_seqs": 1}
    study, load = search(space_from(raw), Store(None, print)), 20.0
    counted = fleets(study.outcomes[0], load, 1)[0]
    found = FleetSimulator(study, study.outcomes[0], load).fewest(counted)
    assert found.copies < counted.copies
    assert all(holds(study, found, found.copies, load))
    assert not all(holds(study, found, found.copies - 1, load))
    assert found.usd_per_hour == pytest.approx(found.copies * 2.95, rel=0.5)
    text = recommendation(study, load, [found])
    assert f"Simulated behind one router, {found.copies - 1} replicas do not hold the load" in text


@pytest.mark.full
@pytest.mark.compiled
def test_more_replicas_are_taken_where_the_counted_ones_fail(study: Study) -> None:
    """Half of what one holds alone is not enough, and more are tried."""
    outcome, load = study.outcomes[0], 500.0
    counted = fleets(outcome, load, 1)[0]
    simulator = FleetSimulator(study, outcome, load)
    few = replace(counted, copies=2, devices=2)
    assert simulator.fewest(few).copies == simulator.fewest(counted).copies > 2


@pytest.mark.full
@pytest.mark.compiled
def test_a_load_that_is_not_sure_is_said_with_the_least_that_is(study: Study) -> None:
    outcome = study.outcomes[0]
    cheapest = fleets(outcome, 1e-3, 1)[0]
    least, mean = outcome.at_least(cheapest.index), outcome.mean(cheapest.index).load
    assert least is not None
    assert 0 < least < mean
    assert fleets(outcome, mean * 0.999, 1)[0].index == cheapest.index
    surest = fleets(outcome, mean * 0.999, 1, is_sure=True)[0]
    assert surest.usd_per_hour is not None
    assert surest.usd_per_hour < 2 * outcome.mean(cheapest.index).figures["usd_per_hour"]
    title = point_at(study.space, surest.index).title
    said = f"requests/s, take 1 replica of {title}, for ${surest.usd_per_hour:,.2f}/h"
    assert said in recommendation(study, mean * 0.999)
    assert "To be 95% sure" not in recommendation(study, least * 0.999)


@pytest.mark.full
@pytest.mark.compiled
def test_a_closed_loop_is_said_in_clients_and_costs_by_the_request() -> None:
    """Ten requests are lengthened until their number does not decide how many clients are held."""
    scenario = shared()
    scenario["workload"] |= {"arrivals": {"type": "closed_loop", "concurrency": 2}, "num_requests": 10}
    closed = search(deployments_space(scenario, ["h100_sxm"], LIMITS, {"devices": 1}), Store(None, print))
    outcome, text = closed.outcomes[0], recommendation(closed, None)
    assert re.search(r"/h holds \d{3} clients\.", text)
    assert "one for each request" not in text
    best, *others = [(closed.point(i).choice[DEPLOYMENT], outcome.mean(i).figures) for i in outcome.ranking]
    other = next(figures for name, figures in others if name != best[0])
    assert f"costs {best[1]['requests_per_usd'] / other['requests_per_usd'] - 1:.1%} more" in text


@pytest.mark.full
@pytest.mark.compiled
def test_nothing_is_recommended_where_nothing_holds() -> None:
    space = deployments_space(shared(), ["l40s"], parse_limits("ttft_p90=1us"), {"devices": 1})
    text = recommendation(search(space, Store(None, print)), None)
    assert text.startswith(
        "Nothing tried keeps the limits, even when hardly anything is sent: at all 21 points, TTFT p90"
    )
    assert re.search(
        r"TTFT p90 <= 1\.00 us is not met; nearest is l40s TP 1, .*, with \d+\.\d ms\. Try other devices", text
    )
    given = changed(space, load="given")
    text = recommendation(search(given, Store(None, print)), None)
    assert re.match(r"Nothing tried keeps the limits, at the given load: .*; nearest is l40s TP 1, .*, with \d", text)


@pytest.mark.full
@pytest.mark.compiled
def test_a_load_that_is_held_in_a_burst_is_called_so() -> None:
    """The arrivals of a curve are not lengthened, and all 40 are taken in at once."""
    raw = shared()
    raw["workload"] |= {"arrivals": {"type": "curve", "points": [{"at_s": 0, "rate_per_s": 1}]}, "num_requests": 40}
    space = deployments_space(raw, ["h100_sxm"], LIMITS, {"devices": 1})
    study = search(space, Store(None, print))
    text = recommendation(study, None)
    assert " requests/s in a burst of 40 requests; give --num-requests " in text, text
    assert "confidence" not in text
    assert "Sure at" not in text
    outcome = study.outcomes[0]
    point = point_document(study, outcome, outcome.ranking[0])
    assert point["burst"]["num_requests_needed"] > 40
    assert point["load_at_least"] is None


@pytest.mark.full
@pytest.mark.compiled
def test_what_is_recommended_carries_its_load_for_long(study: Study) -> None:
    """A hundred requests are gone before a deployment falls behind: more are drawn, and the winner's file has them."""
    outcome = study.outcomes[0]
    scenario = scenario_of(study, outcome, outcome.ranking[0])
    assert (scenario.workload.num_requests or 0) > 100
    longer = msgspec.structs.replace(scenario.workload, num_requests=20_000)
    found = capacities(msgspec.structs.replace(scenario, workload=longer), LIMITS, num_seeds=1)
    assert outcome.mean(outcome.ranking[0]).load == pytest.approx(found.load, rel=0.06)


def test_experts_in_blocks_are_split_where_the_engine_starts() -> None:
    """1,536 columns in eight leave 192 to a rank, one block of 128 and a half."""
    space = deployments_space(shared("Qwen/Qwen3-235B-A22B"), ["h100_sxm"], LIMITS, {})
    blocks = [name for name in names(space) if ", fp8_block" in name]
    assert any(name.startswith("h100_sxm TP 8 EP 8,") for name in blocks)
    assert any(name.startswith("h100_sxm TP 4,") for name in blocks)
    assert not any(name.startswith("h100_sxm TP 8,") for name in blocks)
    raw = {**shared("Qwen/Qwen3-235B-A22B-FP8"), "deployment": {"device": "h100_sxm", "parallelism": {"tp": 4}}}
    assert "Set --tensor-parallel-size 8 (now 4)" not in changes_space(scenario_from(raw, ""), LIMITS).vary[CHANGE]


def test_another_checkpoint_keeps_the_format_of_the_kv_cache() -> None:
    raw = shared("qwen3-32b") | read_launch_command("vllm serve Qwen/Qwen3-32B -tp 2 --kv-cache-dtype fp8").raw
    raw["deployment"]["device"] = "h100_sxm"
    keep_published_formats(raw)
    space = changes_space(scenario_from(raw, ""), LIMITS)
    changes = list(space.vary[CHANGE])
    assert not any("Remove --kv-cache-dtype" in name for name in changes)
    index = changes.index("Serve Qwen/Qwen3-32B-FP8 (now Qwen/Qwen3-32B)")
    precision = scenario_at(space, point_at(space, index).settings).precision
    assert precision is not None
    assert precision.kv_cache == "fp8"


def served(**engine: object) -> Scenario:
    raw = shared()
    raw["deployment"] = {"device": "h100_sxm", "parallelism": {"tp": 2}, "engine": {"max_num_seqs": 64, **engine}}
    return scenario_from(raw, "")


def test_changes_are_single_and_none_is_what_there_is() -> None:
    changes = changes_space(served(max_num_batched_tokens=2048), LIMITS).vary[CHANGE]
    assert isinstance(changes, dict)
    assert changes[AS_IT_IS] == {}
    assert all(len(settings) == 1 or "model" in settings for name, settings in changes.items() if name != AS_IT_IS)
    assert {
        *("Set --max-num-seqs 128 (now 64)", "Set --max-num-batched-tokens 8192 (now 2048)"),
        *("Set --tensor-parallel-size 1 (now 2)", "Set --tensor-parallel-size 4 (now 2)", "Add --kv-cache-dtype fp8"),
    } <= set(changes)
    assert not any("--max-num-seqs 64" in name or "--max-num-batched-tokens 2048" in name for name in changes)
    served_model = changes["Serve nvidia/Llama-3.1-8B-Instruct-FP8 (now meta-llama/Llama-3.1-8B)"]
    assert served_model["model"] == "nvidia/Llama-3.1-8B-Instruct-FP8"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "vllm serve qwen3-30b-a3b -tp 4 --enforce-eager --no-enable-prefix-caching --no-enable-chunked-prefill",
            {
                "Remove --enforce-eager",
                "Replace --no-enable-prefix-caching by --enable-prefix-caching",
                "Replace --no-enable-chunked-prefill by --enable-chunked-prefill",
                "Add --enable-expert-parallel",
            },
        ),
        (
            "sglang serve --model-path llama-3.1-8b --chunked-prefill-size 4096 --disable-radix-cache",
            {
                "Set --chunked-prefill-size 8192 (now 4096)",
                "Remove --disable-radix-cache",
                "Set --tp-size 2 (now 1)",
                "Add --kv-cache-dtype fp8_e4m3",
            },
        ),
        (
            "trtllm-serve llama-3.1-8b --tp_size 2 --max_num_tokens 4096",
            {
                "Set --max_num_tokens 8192 (now 4096)",
                'Add kv_cache_config.dtype: "fp8" in trtllm.yaml',
                "Add enable_chunked_prefill: true in trtllm.yaml",
            },
        ),
        (
            "vllm serve llama-3.1-8b --enable-lora --max-lora-rank 16 --max-loras 8 --max-cpu-loras 20",
            {"Set --max-loras 16 (now 8)", "Set --max-loras 32 (now 8); Set --max-cpu-loras 32 (now 20)"},
        ),
    ],
    ids=["vllm", "sglang", "trtllm", "adapters"],
)
def test_changes_are_named_as_they_are_typed(command: str, expected: set[str]) -> None:
    server = read_launch_command(command).raw
    raw = {**shared(server["model"]), **server}
    raw["deployment"]["device"] = "h100_sxm"
    space = changes_space(scenario_from(raw, ""), LIMITS, CAPACITY)
    assert set(space.vary[CHANGE]) >= expected
    assert len(set(space.vary[CHANGE])) == space.num_points


def pooled(prefill: str = "", decode: str = "", **changes: Any) -> Scenario:
    """A scenario of the pools that two commands start, with other settings of the prefill pool."""
    roles = {"producer": prefill, "consumer": decode}
    config = """--kv-transfer-config '{{"kv_connector": "NixlConnector", "kv_role": "kv_{}"}}'"""
    script = "".join(f"vllm serve qwen3-30b-a3b {config.format(role)} {text} &\n" for role, text in roles.items())
    raw = shared("qwen3-30b-a3b") | read_launch_command(script).raw
    raw["deployment"]["device"] = "h100_sxm"
    raw["deployment"]["pools"][0] |= changes
    return scenario_from(raw, "")


def test_pools_are_changed_one_by_one() -> None:
    scenario = pooled("-tp 2 --max-num-batched-tokens 4096", "-tp 2 --enable-expert-parallel --max-num-seqs 64")
    space = changes_space(scenario, LIMITS)
    changes = space.vary[CHANGE]
    assert isinstance(changes, dict)
    deployments = {
        name: scenario_at(space, point_at(space, index).settings).deployment for index, name in enumerate(changes)
    }
    assert deployments[AS_IT_IS] == scenario.deployment
    prefill, decode = scenario.deployment.pools
    after = deployments["prefill: Set --max-num-batched-tokens 8192 (now 4096)"].pools
    assert after == (changed(prefill, engine=changed(prefill.engine, max_num_batched_tokens=8192)), decode)
    after = deployments["decode: Set --tensor-parallel-size 4 (now 2)"].pools
    assert after == (prefill, changed(decode, parallelism=Parallelism(tp=4, ep=4)))
    assert "decode: Remove --enable-expert-parallel" in changes
    assert "prefill: Add --enable-expert-parallel" in changes
    assert deployments["2 replicas of decode (now 1)"].pools == (prefill, changed(decode, replicas=2))
    assert "Add --kv-cache-dtype fp8" in changes  # of both at once: they hand caches over
    assert not any("--kv-cache-dtype" in name for name in changes if ":" in name)
    (both,) = deployments["No pools: 2 replicas of decode, each serving whole requests"].pools
    assert both.role == "both"
    assert (both.engine.max_num_seqs, both.engine.max_num_batched_tokens) == (64, 4096)


@pytest.mark.full
def test_pools_that_scale_or_differ_have_fewer_changes() -> None:
    scaling = {"type": "target", "metric": "waiting", "target": 2, "min_replicas": 1, "max_replicas": 4}
    changes = changes_space(pooled("-tp 2", "-tp 4", autoscaling=scaling), LIMITS).vary[CHANGE]
    assert not any("replicas of prefill (now" in name for name in changes)
    assert {"target 4 of prefill (now 2)", "No autoscaling of prefill: 3 replicas"} <= {*changes}
    assert not any("No pools" in name for name in changes_space(pooled("-tp 2", "-tp 4"), LIMITS).vary[CHANGE])


def test_experts_stay_apart_where_tokens_are_exchanged() -> None:
    raw = shared("qwen3-30b-a3b")
    split = {"tp": 1, "attention_dp": 4, "ep": 4}
    raw["deployment"] |= {"parallelism": split, "engine": {"all2all_backend": "deepep_low_latency"}}
    changes = changes_space(scenario_from(raw, ""), LIMITS).vary[CHANGE]
    assert isinstance(changes, dict)
    assert not any(settings.get("ep") == 1 for settings in changes.values())
    assert changes["Set --tensor-parallel-size 2 (now 1)"] == {"tp": 2, "ep": 8}


def test_loads_that_moved_alike_are_said_to_move_once() -> None:
    drifts = {0: -0.0291, 1: -0.0289}
    answers = {at: Evaluation(is_lengthened=True, stream_requests=100, drift=drift) for at, drift in drifts.items()}
    assert "2 of them moved by -2.9% when last" in rest_text(SearchOutcome(None, answers, {}, [0, 1]), [0, 1])


@pytest.mark.full
@pytest.mark.compiled
def test_the_points_that_count_rest_on_long_streams() -> None:
    """Few requests give loads that are too high: points that were lengthened are compared with one another."""
    limits = parse_limits("ttft_p99=1s,tpot_p99=50ms")
    study = search(deployments_space(shared(), ["h100_sxm", "l4"], limits, {"devices": 2}), Store(None, print))
    outcome = study.outcomes[0]
    lengths = [outcome.evaluations[index].is_lengthened for index in outcome.ranking]
    assert lengths == sorted(lengths, reverse=True)
    assert 10 <= sum(lengths) < len(lengths)
    assert {run.stream_requests for index in outcome.seeds for run in outcome.runs(index)} == {16_000}
    assert "rest on 16,000 requests in each stream" in rest_text(outcome, outcome.ranking[:5])
    named = ways(study, lengthened(study, outcome, 300.0, 5), 300.0, 5)
    sized = lengthened(study, outcome, 300.0, 5)
    assert all(sized.evaluations[way.index].is_lengthened for way in named)


@pytest.mark.full
@pytest.mark.compiled
def test_the_change_that_gains_most_is_named() -> None:
    space = changes_space(served(max_num_seqs=32), LIMITS)
    text = recommendation(search(space, Store(None, print)), None)
    assert text.startswith("Set --max-num-seqs 128 (now 32): +")  # 32 at a time leave two devices idle
    assert " requests/$, " in text


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize(("gain", "leaves"), [(0.002, True), (0.02, False)])
def test_a_gain_below_the_distance_of_loads_changes_nothing(gain: float, leaves: bool) -> None:
    """The sentence, and what the files hold, are the deployment as it is."""
    space = changes_space(served(), LIMITS)
    answers = [Evaluation(load=load, holds=True, figures=figures(load)) for load in (10.0, 10.0 * (1 + gain))]
    changes = list(space.vary[CHANGE])
    present = changes.index(AS_IT_IS)
    other = next(index for index in range(len(changes)) if index != present)
    outcome = outcome_of(space, None, dict(zip((present, other), answers, strict=True)), {})
    evidence = SearchEvidence(Study(space, [outcome], Count()), top=2, recommends=True)
    assert recommendation(evidence.study, None).startswith("Leave it as it is") == leaves
    assert (outcome.ranking[winner_rank(evidence, 0)] == present) == leaves


def figures(load: float) -> dict[str, float]:
    return {"requests_per_usd": 100 * load, "requests_per_s": load, "devices": 1.0, "usd_per_hour": 3.0}


@pytest.mark.full
def test_a_changed_deployment_is_said_to_hold_the_load_or_not() -> None:
    study = search(changes_space(served(max_num_seqs=32), LIMITS), Store(None, print))
    outcome = study.outcomes[0]
    best = outcome.mean(outcome.ranking[0]).load
    present = outcome.mean(next(i for i in outcome.ranking if study.point(i).choice[CHANGE] == AS_IT_IS)).load
    assert recommendation(study, 0.9 * present).endswith("requests/s asked for.")
    assert recommendation(study, 0.99 * best).endswith("requests/s asked for are held; as it is, they are not.")
    assert recommendation(study, 100 * best).endswith("requests/s asked for: it takes more replicas.")
    ways = fleets(outcome, 100 * best, 1)
    name = study.point(ways[0].index).choice[CHANGE]
    needed = f"it takes {ways[0].copies} replicas with {name}, for ${ways[0].usd_per_hour:,.2f}/h."
    assert recommendation(study, 100 * best, ways).endswith(needed)


@pytest.mark.full
@pytest.mark.compiled
def test_a_deployment_that_breaks_its_limits_is_mended() -> None:
    """One device reads its weights too slowly; two, or weights of half the size, do not."""
    space = changes_space(scenario_from(shared(), ""), parse_limits("tpot_p50=5.5ms"))
    text = recommendation(search(space, Store(None, print)), None)
    assert text.startswith(("Set --tensor-parallel-size 2 (now 1): holds ", "Serve nvidia/")), text
    assert text.endswith("requests/s. As it is, TPOT p50 <= 5.50 ms is not met even when hardly anything is sent."), (
        text
    )


def test_changes_of_an_autoscaled_fleet_serve_its_own_load() -> None:
    """The autoscaler and fixed numbers of replicas are ranked beside the engine's settings; bounds stay in order."""
    raw = shared()
    scaling = {"type": "target", "metric": "outstanding", "target": 40, "min_replicas": 2, "max_replicas": 4}
    raw["deployment"] |= {"replicas": 2, "start_s": 60, "autoscaling": scaling}
    space = changes_space(scenario_from(raw), LIMITS)
    changes = space.vary[CHANGE]
    assert isinstance(changes, dict)
    assert space.load == "given"
    assert changes["min_replicas 3 (now 2)"] == {"deployment.autoscaling.min_replicas": 3, "deployment.replicas": 3}
    assert {"target 80 (now 40)", "max_replicas 3 (now 4)", "No autoscaling: 4 replicas"} <= changes.keys()
    assert "scale_down_after_s 150 (now 300)" in changes
    assert any("--max-num-seqs" in name for name in changes)
    for index in range(space.num_points):
        scenario_at(space, point_at(space, index).settings)


def test_changes_of_a_fleet_that_fails_are_of_its_replicas_and_its_router() -> None:
    raw = shared()
    faults = {"scheduled": [{"at_s": 5, "replica": 0, "repair_s": 5}], "retry": "start_over"}
    raw["deployment"] |= {"replicas": 2, "start_s": 60, "faults": faults}
    space = changes_space(scenario_from(raw), LIMITS)
    changes = space.vary[CHANGE]
    assert isinstance(changes, dict)
    assert space.load == "given"
    assert changes["3 replicas (now 2)"] == {"deployment.replicas": 3}
    assert changes["Routers that resume a lost request (retry: resume)"] == {"deployment.faults.retry": "resume"}


def test_a_fleet_costs_what_it_holds_on_average_and_its_budget_is_of_the_most() -> None:
    raw = shared()
    scaling = {"type": "target", "metric": "outstanding", "target": 40, "min_replicas": 1, "max_replicas": 8}
    raw["deployment"] |= {"start_s": 60, "autoscaling": scaling, "price_usd_per_hour": 2.0}
    scenario = scenario_from(raw)
    most, held = taken_by(scenario), taken_by(scenario, [2.5])
    assert (most.devices, most.usd_per_hour) == (8, 16.0)
    assert (held.devices, held.usd_per_hour) == (2.5, 5.0)


def test_a_capacity_of_a_fleet_needs_a_duration() -> None:
    raw = shared()
    raw["deployment"] |= {"start_s": 60, "faults": {"device_mtbf_s": "1000h", "mttr_s": "1h"}}
    with pytest.raises(InputError, match="the sooner these requests are over") as caught:
        check_keeps_time(scenario_from(raw))
    assert "workload.duration_s" in str(caught.value.hint)
    del raw["workload"]["num_requests"]
    check_keeps_time(scenario_from(raw | {"workload": raw["workload"] | {"duration_s": 60}}))


def test_changes_of_a_fleet_are_compared_by_what_it_holds() -> None:
    raw = shared()
    raw["deployment"] |= {"start_s": 60, "faults": {"device_mtbf_s": "1000h", "mttr_s": "1h"}, "replicas": 2}
    space = with_two_changes(changes_space(scenario_from(raw), LIMITS))
    held = {AS_IT_IS: (2.5, 4.0), "1 replica (now 2)": (1.0, 2.0)}
    evaluations = {
        index: Evaluation(
            load=1.0, holds=True, figures={"devices": devices, "usd_per_hour": usd, "requests_per_usd": 3600 / usd}
        )
        for index, (devices, usd) in enumerate(held.values())
    }
    text = recommendation(Study(space, [outcome_of(space, None, evaluations, {})], Count()), None)
    assert text == (
        "1 replica (now 2): +100% requests/$, $2.00/h (1 device held) in place of $4.00/h (2.50 devices held), at 1.00 "
        "requests/s."
    )


def with_two_changes(space: Space) -> Space:
    """Return a space with two changes."""
    changes = space.vary[CHANGE]
    assert isinstance(changes, dict)
    kept = {name: changes[name] for name in (AS_IT_IS, "1 replica (now 2)")}
    return changed(space, vary={CHANGE: kept})
