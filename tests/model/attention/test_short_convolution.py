"""LFM2's short convolutions: counts of transformers, states of vLLM, launches, prices, refusals."""

from typing import Any

import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.short_convolution import ShortConvolution
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.schema import decode, encode

ATTENTION = [2, 5, 8, 10, 12, 14]
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": ATTENTION,
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "tie_embedding": True,
    "vocab_size": 65536,
}
"""config.json of LiquidAI/LFM2-1.2B."""
MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
"""config.json of LiquidAI/LFM2-8B-A1B."""


def shard(config: dict[str, Any] = LFM2, **degrees: int) -> Shard:
    model = model_from_config(config, "LFM2")
    return Shard(model, model.precision, Parallelism(**degrees))


def test_parameters_are_those_of_transformers() -> None:
    """`Lfm2ForCausalLM` of 5.24 on the meta device; in `Lfm2MoeForCausalLM` biases of routers are no parameters."""
    assert count_parameters(shard().model).total == 1_170_340_608
    count = count_parameters(shard(MOE).model)
    assert count.total == 8_339_929_856 + 22 * 32
    assert count.active == pytest.approx(1.5e9, rel=0.05)  # its model card


def test_layers_may_be_named_or_listed_and_widths_adjusted_or_not() -> None:
    listed = model_from_config(LFM2, "LFM2")
    named = {"layer_types": ["full_attention" if index in ATTENTION else "conv" for index in range(16)]}
    assert model_from_config(LFM2 | named | {"full_attn_idxs": None}, "LFM2") == listed
    plain = {"block_auto_adjust_ff_dim": False, "block_ff_dim": None, "intermediate_size": 8192}
    assert model_from_config(LFM2 | plain, "LFM2") == listed


def test_biases_are_those_of_the_projections_and_the_convolution() -> None:
    """Three parts of the first projection, the convolution and the second, in ten layers."""
    with_bias = count_parameters(model_from_config(LFM2 | {"conv_bias": True}, "LFM2"))
    assert with_bias.total - 1_170_340_608 == 10 * (3 + 1 + 1) * 2048


def test_a_request_keeps_two_tokens_of_each_convolution() -> None:
    """vLLM 0.18 `short_conv_state_shape`: [kernel - 1, channels of a rank]."""
    assert recurrent_state_bytes(shard()) == 10 * 2 * 2048 * 2
    assert recurrent_state_bytes(shard(tp=4)) == 10 * 2 * 512 * 2
    assert kv_bytes_per_token(shard(), 4096) == 6 * 2 * 8 * 64 * 2


def test_a_step_has_two_gates_a_convolution_and_two_products() -> None:
    launches = {launch.name: launch for launch in token_launches(shard(tp=2), 16)}
    assert launches["conv_in_proj"].op == Gemm(16, 3 * 1024, 2048, Format.BF16)
    assert launches["conv_out_proj"].op == Gemm(16, 2048, 1024, Format.BF16)
    assert (launches["conv_input_gate"].count, launches["conv_output_gate"].count) == (10, 10)
    assert [launch.name for launch in decode_launches(shard(), 1, 1)] == [
        "short_convolution_decode",
        "attention_decode",
    ]
    cores = prefill_launches(shard(tp=2), 1, 1024)
    assert (cores[0].op.num_channels, cores[0].op.flops) == (1024, 2 * 1024 * 1024 * 3)


def test_every_launch_has_a_price_on_devices_with_and_without_tables() -> None:
    for name in ("h100_sxm", "mi300x"):
        estimator = measured_estimator(catalog.device(name), catalog.node("pcie"), "vllm", "0.24.0")
        for launch in (
            decode_launches(shard(), 8, 512) + prefill_launches(shard(), 1, 1024) + token_launches(shard(), 8)
        ):
            assert float(estimator.estimate(launch.op).seconds) > 0


def test_a_model_is_written_and_read() -> None:
    model = shard(MOE).model
    assert decode(encode(model), ModelSpec) == model
    kinds = {attention.text: num for num, attention in shard().model.attentions}
    assert kinds == {"convolution": 10, "GQA": 6}
    assert next(kind for _, kind in model.attentions if isinstance(kind, ShortConvolution)).widest_tp == 2048


def test_a_model_with_it_is_served_and_its_training_refused() -> None:
    workload = {"input_tokens": 128, "output_tokens": 8, "concurrency": 2, "num_requests": 4}
    result = wt.simulate(wt.scenario(model=LFM2, device="h100_sxm", **workload))
    assert result.summary.num_requests == 4
    with pytest.raises(InputError, match=r"short convolution attention .* has no backward pass here"):
        wt.train(model=LFM2, device="h100_sxm", num_devices=1, global_batch=8, sequence_tokens=512)
    with pytest.raises(InputError, match="conv_L_cache is 1; a whole number of at least 2 is needed"):
        model_from_config(LFM2 | {"conv_L_cache": 1}, "LFM2")
