"""Falcon-H1's layers with Mamba-2 beside attention: counts of transformers, memory, launches, prices, refusals."""

from typing import Any

import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.parallel_mamba2 import ParallelMamba2
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes, weight_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.schema import decode, encode

FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 21504,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 4096,
    "mamba_d_state": 256,
    "mamba_n_groups": 2,
    "mamba_n_heads": 32,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 20,
    "num_hidden_layers": 72,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 261120,
}
"""config.json of tiiuae/Falcon-H1-34B-Instruct."""


def shard(**degrees: int) -> Shard:
    model = model_from_config(FALCON, "Falcon-H1")
    return Shard(model, model.precision, Parallelism(**degrees))


def test_the_width_of_a_head_may_be_left_to_the_inner_width() -> None:
    """`configuration_falcon_h1.py`: "auto" shares `mamba_d_ssm`, or else `mamba_expand` times the hidden size."""
    assert model_from_config(FALCON | {"mamba_d_head": "auto"}, "Falcon-H1").layers == shard().model.layers
    attention = model_from_config(FALCON | {"mamba_d_head": "auto", "mamba_d_ssm": None}, "x").layers[0].attention
    assert isinstance(attention, ParallelMamba2)
    assert attention.recurrence.head_dim == 2 * 5120 // 32
    with pytest.raises(InputError, match="the inner width 4097 is not a multiple"):
        model_from_config(FALCON | {"mamba_d_head": "auto", "mamba_d_ssm": 4097}, "x")


def test_the_output_s_projection_has_a_bias_of_its_own() -> None:
    """`FalconH1Mixer`: `projectors_bias` is that of `out_proj` alone, `mamba_proj_bias` that of `in_proj`."""
    count = count_parameters(model_from_config(FALCON | {"projectors_bias": True}, "Falcon-H1"))
    assert count.attention == count_parameters(shard().model).attention + 72 * 5120


def test_parameters_are_those_of_transformers() -> None:
    """`FalconH1ForCausalLM` of 5.24 on the meta device, with the norm of outputs and without."""
    assert count_parameters(shard().model).total == 33_642_221_312
    with_norm = model_from_config(FALCON | {"mamba_rms_norm": True}, "Falcon-H1")
    assert count_parameters(with_norm).total == 33_642_221_312 + 72 * 4096


def test_a_request_keeps_a_state_beside_keys_and_values() -> None:
    state = 32 * 128 * 256 * 2 + 3 * (4096 + 2 * 2 * 256) * 2
    assert recurrent_state_bytes(shard()) == 72 * state
    assert kv_bytes_per_token(shard(), 4096) == 72 * 2 * 4 * 128 * 2


def test_both_parts_are_split_and_b_and_c_of_a_group_repeated() -> None:
    repeated = 72 * 2 * 2 * 256 * 5120 * 2  # bytes of all groups' B and C rows in every layer
    assert weight_bytes(shard(tp=4)) * 4 - weight_bytes(shard()) == pytest.approx(repeated, rel=1e-9)
    (kind,) = (attention for _, attention in shard().model.attentions)
    assert (kind.widest_tp, kind.shared_kv_heads) == (4, 4)  # 20 heads of attention and 32 of the recurrence
    with pytest.raises(InputError, match="tp = 8 does not divide"):
        wt.simulate(wt.scenario(model=FALCON, device="h200_sxm", tp=8, input_tokens=1, output_tokens=1, concurrency=1))


def test_each_part_has_its_launches_and_its_sum_over_ranks() -> None:
    names = [launch.name for launch in token_launches(shard(tp=2), 16)]
    first = names.index("mamba_in_proj")
    assert names[first : first + 9] == [
        "mamba_in_proj",
        "gated_norm",
        "mamba_out_proj",
        "mamba_all_reduce",
        "qkv_proj",
        "rope",
        "kv_cache_write",
        "o_proj",
        "mixers_sum",
    ]
    assert names[first + 9] == "attention_all_reduce"
    cores = ["mamba_convolution", "mamba_scan", "attention"]
    assert [launch.name for launch in decode_launches(shard(), 8, 512)] == [f"{name}_decode" for name in cores]
    assert [launch.name for launch in prefill_launches(shard(), 1, 512)] == [f"{name}_prefill" for name in cores]


def test_every_launch_has_a_price_on_devices_with_and_without_tables() -> None:
    for name in ("h100_sxm", "mi300x"):
        estimator = measured_estimator(catalog.device(name), catalog.node("pcie"), "vllm", "0.24.0")
        for launch in (
            decode_launches(shard(), 8, 512) + prefill_launches(shard(), 1, 1024) + token_launches(shard(), 8)
        ):
            assert float(estimator.estimate(launch.op).seconds) > 0


def test_a_model_is_written_and_read() -> None:
    model = shard().model
    assert decode(encode(model), ModelSpec) == model
    (kind,) = (attention for _, attention in model.attentions)
    assert isinstance(kind, ParallelMamba2)
    assert kind.text == "GQA beside Mamba-2"


def test_a_model_with_it_is_served_and_its_training_refused() -> None:
    workload = {"input_tokens": 128, "output_tokens": 8, "concurrency": 2, "num_requests": 4}
    result = wt.simulate(wt.scenario(model=FALCON, device="h200_sxm", **workload))
    assert result.summary.num_requests == 4
    with pytest.raises(InputError, match=r"parallel mamba2 attention .* has no backward pass here"):
        wt.train(model=FALCON, device="h200_sxm", num_devices=8, global_batch=8, sequence_tokens=512)
