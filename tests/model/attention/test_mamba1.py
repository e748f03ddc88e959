"""Mamba-1, beside attention in Jamba and alone: counts of transformers, states of vLLM, launches, prices, refusals."""

from typing import Any

import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.mamba1 import Mamba1
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes, weight_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.schema import decode, encode

JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}
"""config.json of ai21labs/AI21-Jamba-1.5-Mini."""
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "state_size": 16,
    "time_step_rank": 160,
    "vocab_size": 50280,
}
"""config.json of state-spaces/mamba-2.8b-hf."""
FALCON: dict[str, Any] = MAMBA | {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "expand": 16,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "time_step_rank": "auto",
    "tie_word_embeddings": False,
    "vocab_size": 65024,
}
"""config.json of tiiuae/falcon-mamba-7b, whose `expand` nothing uses."""
CODESTRAL: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "chunk_size": 256,
    "conv_kernel": 4,
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
"""config.json of mistralai/Mamba-Codestral-7B-v0.1."""
COUNTS = [(JAMBA, 51_570_323_328), (MAMBA, 2_768_345_600), (FALCON, 7_272_665_088), (CODESTRAL, 7_285_403_648)]


def shard(config: dict[str, Any] = JAMBA, **degrees: int) -> Shard:
    model = model_from_config(config, config["model_type"])
    return Shard(model, model.precision, Parallelism(**degrees))


@pytest.mark.parametrize(("config", "total"), COUNTS)
def test_parameters_are_those_of_transformers(config: dict[str, Any], total: int) -> None:
    """The classes of 5.24 on the meta device."""
    assert count_parameters(shard(config).model).total == total


def test_layers_of_jamba_follow_their_periods() -> None:
    """Of eight layers one has attention; of two one has experts, of which a token meets two: 12 billion parameters."""
    model = shard().model
    assert count_parameters(model).active == pytest.approx(12e9, rel=0.01)  # its model card
    assert {kind.text for _, kind in model.attentions} == {"Mamba-1", "GQA"}
    assert sum(num for num, kind in model.attentions if isinstance(kind, Mamba1)) == 28
    assert sum(num for num, part in model.feed_forwards if isinstance(part, ExpertsFeedForward)) == 16
    assert not shard(JAMBA | {"num_experts": 1}).model.has_experts  # as AI21-Jamba-Reasoning-3B says it


def test_biases_are_those_of_both_projections() -> None:
    with_bias = count_parameters(model_from_config(MAMBA | {"use_bias": True}, "Mamba"))
    assert with_bias.total - count_parameters(shard(MAMBA).model).total == 64 * (2 * 5120 + 2560)


@pytest.mark.parametrize("config", [MAMBA, CODESTRAL])
def test_layers_without_feed_forward_have_one_norm(config: dict[str, Any]) -> None:
    (group,) = shard(config).model.layers
    assert (group.num_layers, group.feed_forward, group.num_norms) == (64, None, 1)
    assert kv_bytes_per_token(shard(config), 4096) == 0


def test_state_is_that_of_vllm() -> None:
    """vLLM 0.18 `mamba1_state_shape`: [channels, state] and [kernel - 1, channels], in 16 bits where nothing says."""
    assert recurrent_state_bytes(shard()) == 28 * 8192 * (16 + 3) * 2
    assert recurrent_state_bytes(shard(tp=2)) == 28 * 4096 * (16 + 3) * 2
    wide = Shard(shard().model, Precision(recurrent_state=Format.FP32), Parallelism())
    assert recurrent_state_bytes(wide) == 28 * 8192 * (16 * 4 + 3 * 2)
    assert recurrent_state_bytes(shard(CODESTRAL)) == 64 * (8192 * 128 + 3 * (8192 + 2 * 8 * 128)) * 2


def test_ranks_split_channels_and_sum_their_steps() -> None:
    launches = {launch.name: launch for launch in token_launches(shard(tp=2), 16)}
    shapes = [
        (op.n, op.k)
        for name, op in ((n, x.op) for n, x in launches.items())
        if name.startswith("mamba_") and op.kind == "gemm"
    ]
    assert shapes == [(8192, 4096), (288, 4096), (4096, 256), (4096, 4096)]
    assert launches["mamba_x_all_reduce"].op.message_bytes == 16 * 288 * 2
    assert weight_bytes(shard(MAMBA, tp=2)) == pytest.approx(weight_bytes(shard(MAMBA)) / 2)
    assert next(kind for _, kind in shard().model.attentions if isinstance(kind, Mamba1)).widest_tp == 8192


def test_a_scan_takes_tokens_in_turn() -> None:
    """h = a h + dt B x and y = C h are five operations for each value of state; no states of chunks are written."""
    cores = {launch.name: launch.op for launch in prefill_launches(shard(), 1, 1024)}
    scan = cores["mamba_scan_prefill"]
    assert (scan.flops, scan.num_kernels) == (5 * 1024 * 8192 * 16, 1)
    assert scan.num_bytes == 2 * 8192 * 16 * 2 + 1024 * (3 * 8192 + 2 * 16) * 2
    assert [launch.name for launch in decode_launches(shard(MAMBA), 1, 1)] == [
        "mamba_convolution_decode",
        "mamba_scan_decode",
    ]


@pytest.mark.parametrize("config", [JAMBA, MAMBA, CODESTRAL])
def test_every_launch_has_a_price_on_devices_with_and_without_tables(config: dict[str, Any]) -> None:
    one = shard(config)
    assert decode(encode(one.model), ModelSpec) == one.model
    for name in ("h100_sxm", "mi300x"):
        estimator = measured_estimator(catalog.device(name), catalog.node("pcie"), "vllm", "0.24.0")
        for launch in decode_launches(one, 8, 512) + prefill_launches(one, 1, 1024) + token_launches(one, 8):
            assert float(estimator.estimate(launch.op).seconds) > 0


@pytest.mark.parametrize("config", [JAMBA, FALCON, CODESTRAL])
def test_models_with_it_are_served(config: dict[str, Any]) -> None:
    workload = {"input_tokens": 128, "output_tokens": 8, "concurrency": 2, "num_requests": 4}
    assert wt.simulate(wt.scenario(model=config, device="h200_sxm", **workload)).summary.num_requests == 4


def test_what_cannot_be_modelled_is_refused() -> None:
    with pytest.raises(InputError, match=r"mamba1 attention .* has no backward pass here"):
        wt.train(model=MAMBA, device="h100_sxm", num_devices=1, global_batch=8, sequence_tokens=512)
    with pytest.raises(InputError, match="has no ssm_state_size"):
        model_from_config({key: value for key, value in MAMBA.items() if key != "state_size"}, "Mamba")
    with pytest.raises(InputError, match="num_heads 128 is not a multiple of n_groups 7"):
        model_from_config(CODESTRAL | {"n_groups": 7}, "Codestral")
