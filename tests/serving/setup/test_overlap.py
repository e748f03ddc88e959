"""A step in two halves: the law of what is hidden, its price, and who may ask for it."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.test_simulate import PlainRoofline
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.exchange import SMS_OF_NORMAL_KERNELS, TokenExchange
from windtunnel.model.launches.forward import decode_launches, head_launches, token_launches
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.scenario import Setup, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.overlap import OCCUPIED_BY_LOW_LATENCY, Halves
from windtunnel.serving.setup.step_prices import DeployedModel, combined, lower_steps, price_steps, priced_parts

times = st.floats(0.001, 10)
NOTHING = np.zeros(1)


def simulated_s(rest_s: float, experts_s: float, dispatch_s: float, combine_s: float, num_layers: int) -> float:
    """Event by event: one stream computes and one exchanges; each takes the halves in turn, and waits for the other."""
    computed_s = sent_s = 0.0
    ready_s = [0.0, 0.0]
    for _ in range(num_layers):
        for compute_s, exchange_s in ((rest_s, dispatch_s), (experts_s, combine_s)):
            for half in (0, 1):
                computed_s = max(computed_s, ready_s[half]) + compute_s
                sent_s = max(sent_s, computed_s) + exchange_s
                ready_s[half] = sent_s
    return max(ready_s)


@given(times, times, times, times, st.integers(1, 12))
def test_what_is_hidden_equals_two_streams_event_by_event(a: float, e: float, d: float, c: float, layers: int) -> None:
    """But for the last layer's combine, which has no next layer's attention beside it."""
    one_after_the_other_s = 2 * layers * (a + e + d + c)
    parts = (np.array([layers * part]) for part in (a, e, d, c))
    hidden_s = Halves(NOTHING, NOTHING, NOTHING, NOTHING, *parts, NOTHING).hidden_s()
    expected_s = one_after_the_other_s - simulated_s(a, e, d, c, layers) + min(a, c)
    assert float(hidden_s[0]) == pytest.approx(expected_s, rel=1e-9)


def setup_of(**engine: Any) -> Setup:
    """Mixtral whose experts are spread over eight ranks."""
    engine = {"all2all_backend": "deepep_low_latency", "two_batch_overlap": True} | engine
    deployment = {"device": "h100_sxm", "parallelism": {"attention_dp": 8, "ep": 8}, "engine": engine}
    workload = {"arrivals": {"type": "closed_loop", "concurrency": 512}, "input_tokens": 64, "output_tokens": 400}
    known = {"model": "mistralai/Mixtral-8x7B-v0.1", "deployment": deployment}
    return resolve(scenario_from({**known, "workload": workload | {"num_requests": 512}}))


def total_s(launches: Any, is_part: Callable[[str], bool] = lambda _name: True) -> float:
    estimator = PlainRoofline()
    return sum(
        float(np.asarray(estimator.estimate(each.op).seconds)) * each.count * float(np.asarray(each.adds))
        for each in launches
        if is_part(each.name)
    )


@pytest.mark.parametrize(
    ("kernels", "room"),
    [("deepep_low_latency", 1 - OCCUPIED_BY_LOW_LATENCY), ("deepep_normal", 1 - SMS_OF_NORMAL_KERNELS / 132)],
)
def test_a_step_costs_two_halves_less_what_each_hides_of_the_other(kernels: str, room: float) -> None:
    setup = setup_of(all2all_backend=kernels)
    shard, step = shard_of(setup), explain_step(setup, step_batch(256, 1_000), PlainRoofline())
    launches, cores_s = token_launches(shard, 128.0), total_s(decode_launches(shard, 128.0, 1_000.0))
    experts_s = total_s(launches, lambda name: name == "experts")
    dispatch_s, combine_s = (
        total_s(launches, lambda name, part=part: name == part) for part in ("dispatch", "combine")
    )  # type: ignore[misc]
    rest_s = total_s(launches) - experts_s - dispatch_s - combine_s + cores_s
    computes, exchanges = (rest_s, experts_s), (room * dispatch_s, room * combine_s)
    hidden_s = sum(min(computed, sent) for computed in computes for sent in exchanges)
    both_s = 2 * (total_s(launches) + cores_s) + total_s(head_launches(shard, 256.0))
    assert step.device_s == pytest.approx(both_s)
    assert step.hidden_s == pytest.approx(hidden_s)
    assert 0 < hidden_s < 2 * (dispatch_s + combine_s)
    assert step.step_s == pytest.approx(both_s - hidden_s + step.unhidden_s)


@pytest.mark.parametrize("batch", [16, 31, 32, 200])
def test_the_loop_takes_what_explain_shows(batch: int) -> None:
    setup, estimator = setup_of(max_num_seqs=256, cudagraph_padding=False), PlainRoofline()
    lowered = lower_steps(estimator, DeployedModel(setup.device, shard_of(setup), setup.engine, setup.max_model_len))
    column = int(np.argmin(abs(lowered.cost.context_nodes - 1024)))
    context = float(lowered.cost.context_nodes[column])
    step = explain_step(setup, step_batch(batch, context), estimator)
    unhidden_step_s = setup.engine.host.unhidden_step_s or 0.0
    taken_s = lowered.cost.decode_token_s[batch] + lowered.cost.decode_attention_s[batch, column]
    assert taken_s == pytest.approx(step.device_s - step.hidden_s + step.unhidden_s - unhidden_step_s, rel=1e-9)
    assert (step.hidden_s > 0) == (batch >= 32)
    assert np.all(lowered.cost.decode_attention_s >= 0)


def test_steps_with_prompts_are_split_from_their_own_threshold_on() -> None:
    setup, estimator = setup_of(), PlainRoofline()
    hidden = [explain_step(setup, step_batch(prefill_tokens=n), estimator).hidden_s for n in (511, 512)]
    assert hidden[0] == 0 < hidden[1]
    deployed = DeployedModel(setup.device, shard_of(setup), setup.engine, setup.max_model_len)
    whole = lower_steps(estimator, deployed._replace(engine=setup_of(two_batch_overlap=False).engine))
    split = lower_steps(estimator, deployed)
    assert np.array_equal(split.mixed_token_s[:500], whole.mixed_token_s[:500])
    assert np.all(split.mixed_token_s[512:] != whole.mixed_token_s[512:])
    step = explain_step(setup, step_batch(prefill_tokens=4096), estimator)
    heads_s = sum(each.total_s for each in step.launches if each.name in ("lm_head", "sample", "attention_prefill"))
    assert split.mixed_token_s[4096] == pytest.approx(step.device_s - heads_s - step.hidden_s, rel=1e-3)


def test_halves_pay_where_exchanges_are_long_and_not_in_small_batches() -> None:
    """As SGLang found with DeepSeek-V3 on 72 H100: a loss with 32 requests a rank, a gain of a quarter with 256."""
    known: dict[str, Any] = {"all2all_backend": "deepep_low_latency", "num_redundant_experts": 32, "enable_eplb": True}
    gains = {}
    for batch in (32, 256):
        steps = []
        for overlaps in (False, True):
            engine = {
                "name": "sglang",
                "version": "0.4.10",
                **known,
                "two_batch_overlap": overlaps,
                "max_num_seqs": 512,
            }
            deployment = {"device": "h100_sxm", "parallelism": {"attention_dp": 72, "ep": 72}, "engine": engine}
            workload = {"arrivals": {"type": "burst"}, "input_tokens": 64, "output_tokens": 8, "num_requests": 1}
            scenario = {"model": "deepseek-ai/DeepSeek-V3", "deployment": deployment, "workload": workload}
            steps.append(explain_step(resolve(scenario_from(scenario)), step_batch(batch, 2_050)).step_s)
        gains[batch] = steps[0] / steps[1] - 1
    assert -0.4 < gains[32] < -0.1
    assert 0.1 < gains[256] < 0.4


def one_batch(device: str, model: str, kernels: str = "deepep_low_latency") -> Setup:
    """A model with a shared expert, whose experts are spread over 16 ranks of SGLang with single-batch overlap."""
    engine = {"name": "sglang", "all2all_backend": kernels, "single_batch_overlap": True, "max_num_seqs": 512}
    deployment = {"device": device, "parallelism": {"attention_dp": 16, "ep": 16}, "engine": engine}
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 64, "output_tokens": 8, "num_requests": 1}
    return resolve(scenario_from({"model": model, "deployment": deployment, "workload": workload}))


FP8, NVFP4 = "deepseek-ai/DeepSeek-V3", "nvidia/DeepSeek-R1-0528-NVFP4-v2"


@pytest.mark.parametrize(("device", "model", "down"), [("h200_sxm", FP8, 1), ("gb200", FP8, 0), ("gb200", NVFP4, 1)])
def test_a_combine_runs_beside_what_the_engine_sets_beside_it(device: str, model: str, down: int) -> None:
    """Down-projections where experts' kernels signal each one's end; shared experts beside the dispatch on Hopper."""
    setup = one_batch(device, model)
    step = explain_step(setup, step_batch(128, 2_000), PlainRoofline())
    took: dict[str, float] = {}
    for launch in step.launches:
        name = "shared" if launch.name in ("shared_gate_up_proj", "shared_down_proj") else launch.name
        took[name] = took.get(name, 0.0) + launch.total_s
    is_hopper = device == "h200_sxm"
    beside_dispatch_s, beside_combine_s = (took["shared"], 0.0) if is_hopper else (0.0, took["shared"])
    beside_combine_s += down * took["experts"] / 3
    sms = 3 / 132 if is_hopper else 32 / 152
    hidden_s = min(beside_dispatch_s, (1 - OCCUPIED_BY_LOW_LATENCY) * took["dispatch"])
    hidden_s += min(beside_combine_s, took["combine"] * (1 - sms))
    assert hidden_s > 0
    assert step.hidden_s == pytest.approx(hidden_s)
    deployed = DeployedModel(setup.device, shard_of(setup), setup.engine, setup.max_model_len)
    lowered = lower_steps(PlainRoofline(), deployed)
    engine = msgspec.structs.replace(setup.engine, single_batch_overlap=False)
    whole = lower_steps(PlainRoofline(), deployed._replace(engine=engine))
    assert whole.cost.decode_token_s[128] - lowered.cost.decode_token_s[128] == pytest.approx(step.hidden_s)
    assert whole.mixed_token_s[128] - lowered.mixed_token_s[128] == pytest.approx(step.hidden_s)


def test_parts_of_a_step_with_single_batch_overlap_add_up() -> None:
    """What is hidden is no sum of what is hidden of the parts: it is taken from their sum."""
    setup = one_batch("gb200", NVFP4)
    deployed = DeployedModel(setup.device, shard_of(setup), setup.engine, setup.max_model_len)
    parts = priced_parts(PlainRoofline(), deployed, lambda op: {"sent" if op.is_communication else "computed": 1.0})
    whole = price_steps(PlainRoofline(), deployed).lowered()
    assert combined(parts, dict.fromkeys(parts, 1.0)).lowered().mixed_token_s == pytest.approx(whole.mixed_token_s)


def test_single_batch_overlap_hides_low_latency_exchanges_alone() -> None:
    with pytest.raises(InputError, match="single_batch_overlap hides the exchange of tokens by DeepEP's low-latency"):
        one_batch("h200_sxm", FP8, "deepep_normal")
    with pytest.raises(InputError, match=r"two_batch_overlap and engine\.single_batch_overlap hide the same"):
        setup_of(name="sglang", single_batch_overlap=True)


@pytest.mark.parametrize("change", [{"all2all_backend": "all_gather"}, {"all2all_backend": "nvlink_one_sided"}])
def test_without_deepep_there_is_nothing_to_hide(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="two_batch_overlap hides the exchange of tokens by DeepEP") as found:
        setup_of(**change)
    assert "deepep_low_latency" in str(found.value.hint)


DP = "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel --all2all-backend deepep_low_latency"
WIDE = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --ep 8"


@pytest.mark.parametrize(
    ("command", "decode_tokens"),
    [
        (f"{DP} --enable-dbo --dbo-decode-token-threshold 48", 48),
        (f"{WIDE} --moe-a2a-backend deepep --enable-two-batch-overlap", None),
    ],
)
def test_command_lines_say_it(command: str, decode_tokens: int | None) -> None:
    engine = read_launch_command(command).engine
    assert engine["two_batch_overlap"] is True
    assert read_launch_command(f"{WIDE} --enable-single-batch-overlap").engine["single_batch_overlap"] is True
    assert engine.get("overlap_decode_tokens") == decode_tokens


@pytest.mark.parametrize("attention", ["--dp 8 --enable-dp-attention", ""])
def test_sglang_spreads_experts_over_all_ranks_that_exchange_tokens(attention: str) -> None:
    """`--moe-a2a-backend` sets `--ep-size`; with attention in heads alone each rank sends its share of the tokens."""
    command = f"sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 {attention} --moe-a2a-backend deepep"
    split = read_launch_command(command).raw["deployment"]["parallelism"]
    assert split["ep"] == 8
    engine = {"name": "sglang", "all2all_backend": "deepep_auto"}
    deployment = {"device": "h200_sxm", "parallelism": split, "engine": engine}
    workload = {"arrivals": {"type": "closed_loop", "concurrency": 8}, "input_tokens": 64, "output_tokens": 4}
    raw = {"model": "deepseek-ai/DeepSeek-V3", "deployment": deployment, "workload": workload | {"num_requests": 8}}
    shard = shard_of(resolve(scenario_from(raw)))
    launches = {launch.name: launch.op for launch in token_launches(shard, 64.0)}
    assert {"dispatch", "combine"} <= set(launches)
    assert "experts_all_reduce" not in launches
    assert isinstance(launches["dispatch"], TokenExchange)
    assert launches["dispatch"].num_tokens == (64 if attention else 8)
    engine["name"] = "vllm"
    shard = shard_of(resolve(scenario_from(raw)))
    assert ("dispatch" in {launch.name for launch in token_launches(shard, 64.0)}) == bool(attention)
