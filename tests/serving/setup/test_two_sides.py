"""Attention and feed-forwards on different devices: the pipeline of micro-batches, its prices, its memory."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.test_simulate import PlainRoofline
from windtunnel.errors import InputError
from windtunnel.model.launches.forward import (
    attention_side,
    decode_launches,
    feed_forward_launches,
    hop_launch,
    token_launches,
)
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.setup.overlap import PingPong, plan_two_sides
from windtunnel.serving.simulate import simulate

times = st.floats(0.001, 10)


def simulated_s(attention_s: float, ffn_s: float, hop_s: float, microbatches: int, num_layers: int) -> float:
    """Event by event: each side takes the micro-batches in turn, each when it has come from the other side."""
    sides_free_s, back_s = [0.0, 0.0], [0.0] * microbatches
    for _ in range(num_layers):
        for i in range(microbatches):
            sides_free_s[0] = max(sides_free_s[0], back_s[i]) + attention_s
            sides_free_s[1] = max(sides_free_s[1], sides_free_s[0] + hop_s) + ffn_s
            back_s[i] = sides_free_s[1] + hop_s
    return max(back_s)


@given(times, times, st.floats(0, 10), st.integers(1, 6), st.integers(1, 12))
def test_the_formula_equals_the_pipeline_event_by_event(a: float, f: float, c: float, m: int, layers: int) -> None:
    arrays = [np.array(value) for value in (a, f, c, m)]
    step = PingPong(arrays[0], arrays[1], arrays[2], arrays[3], layers)
    assert float(step.step_s) == pytest.approx(simulated_s(a, f, c, m, layers), rel=1e-9)


def scenario_of(ffn: Any = None, **changes: Any) -> Scenario:
    """Mixtral on eight attention devices and eight for feed-forwards."""
    parallelism = {"tp": 2, "attention_dp": 4, "ffn": {"devices": 8, "microbatches": 3} | (ffn or {})}
    workload = {"arrivals": {"type": "static", "rate_per_s": 50}, "input_tokens": 300, "output_tokens": 40}
    deployment = {"device": "h100_sxm", "parallelism": parallelism} | changes.pop("deployment", {})
    return scenario_from(
        {
            "model": "mistralai/Mixtral-8x7B-v0.1",
            "deployment": deployment,
            "workload": workload | {"num_requests": 40},
            **changes,
        }
    )


def test_a_step_costs_what_its_parts_add_up_to() -> None:
    """96 requests a rank, 32 in each micro-batch: operators of both sides by hand, through the formula."""
    setup, estimator = resolve(scenario_of()), PlainRoofline()
    shard = shard_of(setup)
    step = explain_step(setup, step_batch(96, 1_000), estimator)

    def total_s(launches: Any) -> float:
        return sum(float(estimator.estimate(each.op).seconds) * each.count * float(each.adds) for each in launches)

    alone = attention_side(shard)
    attention_s = (total_s(token_launches(alone, 32)) + total_s(decode_launches(alone, 32, 1_000))) / 32
    ffn_s = total_s(feed_forward_launches(shard, 32)) / 32
    hop_s = total_s([hop_launch(shard, 32)])
    longest_s, round_s = max(attention_s, ffn_s), attention_s + ffn_s + 2 * hop_s
    pipeline_s = 2 * longest_s + round_s + 31 * max(3 * longest_s, round_s)
    assert step.sides is not None
    assert float(step.sides.step_s) == pytest.approx(pipeline_s)
    head_s = sum(
        launch.total_s for launch in step.launches if launch.name in ("lm_head", "logits_all_gather", "argmax")
    )
    assert step.step_s == pytest.approx(pipeline_s + head_s + step.unhidden_s, rel=0.02)


def test_the_feed_forward_side_computes_the_tokens_of_all_ranks() -> None:
    shard = shard_of(resolve(scenario_of()))
    experts = next(launch.op for launch in feed_forward_launches(shard, 32) if launch.name == "experts")
    assert (experts.num_tokens, experts.ep, experts.tp) == (128, 8, 1)  # type: ignore[attr-defined]
    names = [launch.name for launch in feed_forward_launches(shard, 32)]
    assert not any("all_gather" in name or "scatter" in name for name in names)


def test_a_hop_carries_a_token_to_each_of_its_experts() -> None:
    """Two of eight experts on eight devices: 8 (1 - (7/8)^2) = 1.875 copies of 4,096 values in bf16 for a token."""
    shard = shard_of(resolve(scenario_of()))
    copies = 8 * (1 - (7 / 8) ** 2)
    each_sends, each_receives = 32 * copies / 2, 4 * 32 * copies / 8
    message = float(hop_launch(shard, 32).op.message_bytes)  # type: ignore[attr-defined]
    assert message == pytest.approx(max(each_sends, each_receives) * 4_096 * 2)


def test_attention_devices_have_room_for_more_kv() -> None:
    setup = resolve(scenario_of())
    shard = shard_of(setup)
    whole = replace(shard, parallelism=msgspec.structs.replace(shard.parallelism, ffn=None))
    sides = plan_two_sides(shard, setup.device, setup.engine, 4_096)
    one = plan_memory(whole, setup.device, setup.engine, 4_096)
    assert sides.weight_bytes < 0.2 * one.weight_bytes
    assert sides.num_blocks > one.num_blocks


@pytest.mark.full
def test_runs_conserve_tokens_and_use_both_sides() -> None:
    result = simulate(scenario_of())
    assert int(result.requests["output_tokens"].sum()) == 40 * 40
    assert int(result.steps["prefill_tokens"].sum()) == 40 * 300
    assert result.summary.num_devices == 16
    attention, ffn = result.summary.sides
    assert (attention.num_devices, ffn.num_devices) == (8, 8)
    assert 0 < attention.busy_fraction <= result.summary.utilisation.busy_fraction
    assert 0 < ffn.busy_fraction <= result.summary.utilisation.busy_fraction
    assert result.summary.cost is not None
    assert result.summary.cost.usd_per_hour == pytest.approx(16 * (result.setup.device.price_usd_per_hour or 0))


@pytest.mark.full
def test_decode_pools_may_have_two_sides() -> None:
    pools = [{"name": "p", "role": "prefill", "parallelism": {"tp": 4}}, {"name": "d", "role": "decode"}]
    result = simulate(scenario_of(deployment={"pools": pools}))
    prefill, decode = result.summary.pools
    assert prefill.sides == ()
    assert [side.name for side in decode.sides] == ["attention", "feed-forward"]
    assert decode.num_devices == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn": {"ep": 3}}, "ep = 3 does not divide the 8 devices of ffn"),
        ({"ffn": {"devices": 16}}, "ffn.ep = 16 does not divide the 8 experts"),
        ({"ffn": {"microbatches": 0}}, "microbatches is 0; at least 1"),
        ({"deployment": {"parallelism": {"tp": 4, "ep": 4, "ffn": {"devices": 8}}}}, "experts are on its devices"),
        (
            {"model": "nvidia/Nemotron-H-56B-Base-8K", "deployment": {"parallelism": {"ffn": {"devices": 8}}}},
            "layers without attention or without a feed-forward",
        ),
        (
            {"model": "deepseek-ai/DeepSeek-V3", "deployment": {"parallelism": {"ffn": {"devices": 1}}}},
            "on each of 1 feed-forward devices",
        ),
        (
            {
                "deployment": {
                    "parallelism": {"ffn": {"devices": 8}},
                    "engine": {"speculative": {"method": "ngram", "num_draft_tokens": 2, "acceptance_fraction": 0.5}},
                }
            },
            "speculative decoding is not simulated",
        ),
    ],
)
def test_what_two_sides_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        simulate(scenario_of(**changes))
    assert raised.value.message or raised.value.hint


def test_a_step_with_prompts_takes_one_side_after_the_other() -> None:
    """A prompt of 300 tokens alone: the sum of all operators, without micro-batches."""
    setup, estimator = resolve(scenario_of()), PlainRoofline()
    step = explain_step(setup, step_batch(prefill_tokens=300), estimator)
    assert step.sides is None
    assert {"experts", "ffn_transfer"} <= {launch.name for launch in step.launches}
