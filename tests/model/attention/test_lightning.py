"""MiniMax-01's lightning attention: both ways to name its layers, states of vLLM, arithmetic, launches, refusals."""

from typing import Any

import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.lightning import LightningAttention, LightningCore
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.schema import decode, encode

MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "model_type": "minimax_text_01",
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "vocab_size": 200064,
}
"""config.json of MiniMaxAI/MiniMax-Text-01."""


def shard(**degrees: int) -> Shard:
    model = model_from_config(MINIMAX, "MiniMax-Text-01")
    return Shard(model, model.precision, Parallelism(**degrees))


def test_the_model_is_that_of_its_card() -> None:
    """456 billion parameters, 45.9 of them active (arXiv:2501.08313), tables of tokens counted once."""
    model = shard().model
    count = count_parameters(model)
    assert count.total == pytest.approx(456e9, rel=0.001)
    assert count.active - count.embedding - count.lm_head == pytest.approx(45.9e9, rel=0.005)
    num, kind = model.attentions[0]
    assert (num, type(kind)) == (70, LightningAttention)


def test_transformers_names_the_same_layers() -> None:
    names = ["full_attention" if kind else "linear_attention" for kind in MINIMAX["attn_type_list"]]
    config = {key: value for key, value in MINIMAX.items() if key != "attn_type_list"}
    config |= {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"], "layer_types": names}
    assert model_from_config(config, "MiniMax-Text-01").layers == shard().model.layers
    assert decode(encode(shard().model), ModelSpec, "model") == shard().model


def test_a_request_keeps_a_state_and_the_keys_of_full_attention() -> None:
    """A state of 64 heads of 128 x 128 values in each of 70 layers, and keys in 10 (`linear_attention_state_shape`)."""
    assert recurrent_state_bytes(shard()) == 70 * 64 * 128 * 128 * 2
    assert recurrent_state_bytes(shard(tp=8)) == 70 * 8 * 128 * 128 * 2
    assert kv_bytes_per_token(shard(), 10240000) == 10 * 2 * 8 * 128 * 2


def test_arithmetic_of_a_token_and_of_a_block() -> None:
    """In decode a token reads and writes the state; a prompt also meets half a block of 256, twice two FLOP a value."""
    state = 64 * 128 * 128
    one = LightningCore(4.0, 1.0, 64, 128, decode=True)
    assert one.flops == 4 * 5 * state
    assert one.num_bytes == 4 * (2 * state * 2 + 4 * 64 * 128 * 4)
    prompt = LightningCore(1.0, 2048.0, 64, 128)
    assert prompt.flops == 2048 * (4 * state + 2 * 2 * 64 * 128 * 256 / 2)
    assert prompt.num_kernels == 4


def test_launches() -> None:
    part = shard(tp=8)
    cores = {each.name: each.count for each in decode_launches(part, 2.0, 100_000.0)}
    assert cores["lightning_attention_decode"] == 70
    assert cores["attention_decode"] == 10
    assert "lightning_attention_prefill" in {each.name for each in prefill_launches(part, 1.0, 512.0)}
    names = [each.name for each in token_launches(part, 8.0)]
    assert {"qkv_activation", "attention_gate_proj", "gated_norm", "norm_all_reduce"} <= set(names)
    assert "norm_all_reduce" not in {each.name for each in token_launches(shard(), 8.0)}


def test_every_launch_has_a_price_and_the_core_that_of_the_roofline() -> None:
    part = shard(tp=8)
    estimator = measured_estimator(catalog.device("h200_sxm"), catalog.node("dgx_h200"), "vllm", "0.24.0")
    launches = decode_launches(part, 8, 512) + prefill_launches(part, 1, 1024) + token_launches(part, 8)
    found = {launch.name: estimator.estimate(launch.op) for launch in launches}
    assert all(float(estimate.seconds) > 0 for estimate in found.values())
    assert "not fitted to lightning_attention" in str(found["lightning_attention_decode"].source)


def test_a_model_with_it_is_served_and_its_training_refused() -> None:
    workload = {"input_tokens": 128, "output_tokens": 4, "concurrency": 2, "num_requests": 4}
    result = wt.simulate(wt.scenario(model=MINIMAX, device="h200_sxm", tp=8, **workload))
    assert result.summary.num_requests == 4
    with pytest.raises(InputError, match=r"lightning attention .* has no backward pass here"):
        wt.train(model=MINIMAX, device="h200_sxm", num_devices=8, tp=8, global_batch=8, sequence_tokens=512)


def test_other_models_with_a_list_of_kinds_are_refused() -> None:
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096, "attn_type_list": [0, 1]}
    with pytest.raises(InputError, match="lightning attention cannot be modelled"):
        model_from_config(llama, "llama")
    with pytest.raises(InputError, match="one entry for each of the 80 layers"):
        model_from_config(MINIMAX | {"attn_type_list": [0, 1]}, "short")
