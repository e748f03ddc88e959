"""Layers whose heads differ within a model (MiMo-V2-Flash, Gemma 4), and Step-3.7: counts, launches, prices."""

from typing import Any

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import DecodeAttention, GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import decode_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, state_bytes_per_request
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Coverage
from windtunnel.schema import decode, encode

MIMO, GEMMA, STEP = "XiaomiMiMo/MiMo-V2-Flash", "google/gemma-4-26B-A4B", "stepfun-ai/Step-3.7-Flash"


def shard(name: str, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def layers(name: str) -> dict[bool, GroupedQueryAttention]:
    """One attention of each sort, by whether it has a window."""
    found = [part for _, part in catalog.model(name).attentions if isinstance(part, GroupedQueryAttention)]
    return {bool(part.window_tokens): part for part in found}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        (MIMO, 309e9, 15e9),  # the model card: 309B total, 15B active
        (GEMMA, 25.2e9, 3.8e9),  # the model card: 25.2B total, 3.8B active
        ("google/gemma-4-31B-it", 30.7e9, 30.7e9),  # the model card: 30.7B, dense
        (STEP, 196e9, 11e9),  # Step-3.5-Flash's card: 196B, about 11B active, embedding and output layer aside
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, total: float, active: float) -> None:
    count = count_parameters(catalog.model(name))
    assert count.total == pytest.approx(total, rel=0.01)
    vocabulary = count.embedding + (count.lm_head if name == STEP else 0)
    assert min(abs(count.active - active), abs(count.active - vocabulary - active)) < 0.015 * active


@pytest.mark.parametrize("num_types", [45, 48])
def test_window_layers_of_step_have_more_heads_and_every_layer_a_gate_of_them(num_types: int) -> None:
    """As Step-3.5-Flash is published; counted by hand: matrices, routers with a bias, norms."""
    published = catalog.model_config(STEP) | {"model_type": "step3p5", "num_nextn_predict_layers": 3}
    types = ["sliding_attention" if index % 4 else "full_attention" for index in range(num_types)]
    model = model_from_config(published | {"layer_types": types}, "step")
    assert model.layers == catalog.model(STEP).layers
    heads = 12 * 64 + 33 * 96
    attention = 4096 * (heads * (2 * 128 + 1) + 45 * 2 * 8 * 128)
    experts = 42 * (3 * 4096 * 1280 * (288 + 1) + (4096 + 1) * 288)
    norms = 91 * 4096 + 45 * 2 * 128
    total = 2 * 128896 * 4096 + attention + 3 * 3 * 4096 * 11264 + experts + norms
    count = count_parameters(model)
    assert (count.total, count.active) == (total, total - 42 * 280 * 3 * 4096 * 1280)
    shard = Shard(model, model.precision, Parallelism(tp=8))
    assert sum(num * part.bytes_per_token(shard) for num, part in model.attentions) == 184_320 / 8
    launches = token_launches(shard, 16)
    gates = {launch.op.n for launch in launches if launch.name == "attention_gate_proj" and isinstance(launch.op, Gemm)}
    assert gates == {64 // 8, 96 // 8}
    assert sum(launch.count for launch in launches if launch.name == "attention_gate") == 45
    assert sum(launch.count for launch in launches if launch.name == "router_input") == 42


def test_heads_of_one_type_of_layers_win_over_those_of_all() -> None:
    other = {"attention_type": "full_attention", "num_attention_heads": 32, "num_attention_groups": 4}
    flat = catalog.model_config(STEP) | {"num_key_value_heads": 8, "attention_other_setting": other}
    found = {(part.num_heads, part.num_kv_heads) for _, part in model_from_config(flat, "step").attentions}  # type: ignore[attr-defined]
    assert found == {(32, 4), (64, 8)}
    with pytest.raises(InputError, match="attention_other_setting is 3; an object is needed"):
        model_from_config(flat | {"attention_other_setting": 3}, "step")


def test_window_layers_of_mimo_have_more_key_value_heads_and_sinks() -> None:
    window, full = layers(MIMO)[True], layers(MIMO)[False]
    assert (window.num_kv_heads, window.window_tokens, window.sinks) == (8, 128, True)
    assert (full.num_kv_heads, full.window_tokens, full.sinks) == (4, None, False)
    assert window.num_parameters(4096) == 4096 * (64 * 192 + 8 * (192 + 128) + 64 * 128) + 64
    assert full.num_parameters(4096) == 4096 * (64 * 192 + 4 * (192 + 128) + 64 * 128)
    assert sum(group.num_layers for group in catalog.model(MIMO).layers if group.attention == window) == 39


def test_values_of_mimo_are_narrower_than_keys() -> None:
    launches = token_launches(shard(MIMO, tp=4), 16)
    shapes = {launch.op.n for launch in launches if launch.name == "qkv_proj" and isinstance(launch.op, Gemm)}
    assert shapes == {16 * 192 + 320, 16 * 192 + 2 * 320}
    outputs = [launch.op for launch in launches if launch.name == "o_proj" and isinstance(launch.op, Gemm)]
    assert {op.k for op in outputs} == {16 * 128}
    assert kv_bytes_per_token(shard(MIMO), 10**6) == 9 * 4 * 320 * 2
    assert state_bytes_per_request(shard(MIMO), 10**6) == 39 * 128 * 8 * 320 * 2


def test_full_layers_of_gemma_have_wide_heads_whose_keys_are_their_values() -> None:
    window, full = layers(GEMMA)[True], layers(GEMMA)[False]
    assert (window.num_kv_heads, window.head_dim, window.values_are_keys) == (8, 256, False)
    assert (full.num_kv_heads, full.head_dim, full.values_are_keys) == (2, 512, True)
    assert full.num_parameters(2816) == 2816 * (16 * 512 + 2 * 512 + 16 * 512)
    assert window.num_parameters(2816) == 2816 * (16 * 256 + 2 * 8 * 256 + 16 * 256)
    assert kv_bytes_per_token(shard(GEMMA), 10**6) == 5 * 2 * 2 * 512 * 2


def test_a_dense_part_of_gemma_stands_beside_its_experts() -> None:
    group = catalog.model(GEMMA).layers[0]
    experts = group.feed_forward
    assert isinstance(experts, ExpertsFeedForward)
    assert (experts.intermediate_size, experts.shared_intermediate_size, experts.has_dense) == (704, 2112, True)
    assert group.num_norms == 7
    launches = {launch.name: launch for launch in token_launches(shard(GEMMA, tp=2), 16)}
    assert {"shared_all_reduce", "experts_all_reduce"} <= set(launches)
    assert catalog.model("google/gemma-4-31B-it").layers[0].num_norms == 4


@pytest.mark.parametrize(("name", "tp"), [(MIMO, 4), (GEMMA, 1)])
def test_every_sort_of_layer_has_measured_attention(name: str, tp: int) -> None:
    estimator = measured_estimator(catalog.device("h200_sxm"), None, "vllm", "0.24.0")
    ops = [launch.op for launch in decode_launches(shard(name, tp=tp), 16.0, 4096.0)]
    assert {(op.head_dim, op.window_tokens) for op in ops if isinstance(op, DecodeAttention)} == {
        MIMO: {(192, 128), (192, 0)},
        GEMMA: {(256, 1024), (512, 0)},
    }[name]
    assert {estimator.estimate(op).coverage for op in ops} <= {Coverage.MEASURED, Coverage.INTERPOLATED}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (MIMO, {"hybrid_layer_pattern": [0, 1]}, "one entry for each of the 48 layers"),
        (MIMO, {"swa_num_key_value_heads": 7}, "num_attention_heads 64 is not a multiple of num_key_value_heads 7"),
        (GEMMA, {"text_config": {"per_layer_config": {"5": 512}}}, "5 is 512; an object is needed"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    config = catalog.model_config(name)
    changed = {key: config[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    with pytest.raises(InputError, match=message):
        model_from_config(config | changed, "tiny")


@pytest.mark.parametrize("name", [MIMO, GEMMA, STEP])
def test_a_model_is_written_and_read(name: str) -> None:
    assert decode(encode(catalog.model(name)), ModelSpec) == catalog.model(name)
