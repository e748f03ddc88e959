"""Shapes of published models whose code fixes what their configs leave out.

The counts are those of transformers 5.23: `AutoModelForCausalLM.from_config` on the meta device, tied weights once.
"""

from typing import Any

import pytest

from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.parameters import count_parameters

OLD = {"activation_function": "gelu_new", "vocab_size": 50257}
MOE = {"hidden_act": "silu", "max_position_embeddings": 131072, "tie_word_embeddings": False}

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "GPT-2 XL": (
        1_557_611_200,
        OLD | {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024},
    ),
    "GPT-J": (
        6_050_882_784,
        OLD
        | {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048}
        | {"vocab_size": 50400, "tie_word_embeddings": False},
    ),
    "GPT-Neo 2.7B": (
        2_651_307_520,
        OLD
        | {"model_type": "gpt_neo", "hidden_size": 2560, "num_layers": 32, "num_heads": 20, "window_size": 256}
        | {"attention_layers": ["global", "local"] * 16, "max_position_embeddings": 2048},
    ),
    "CodeGen 7B": (
        7_064_213_504,
        OLD
        | {"model_type": "codegen", "n_embd": 4096, "n_layer": 33, "n_head": 16, "n_positions": 2048}
        | {"vocab_size": 51200, "tie_word_embeddings": False},
    ),
    "StarCoder": (
        15_517_456_384,
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576}
        | {"n_positions": 8192, "vocab_size": 49152, "multi_query": True, "activation_function": "gelu"},
    ),
    "OPT 6.7B": (
        6_658_473_984,
        {"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"ffn_dim": 16384, "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 4096},
    ),
    "BLOOM": (
        176_247_271_424,
        {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880},
    ),
    "MPT 7B": (
        6_649_286_656,
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4}
        | {"max_seq_len": 2048, "vocab_size": 50432, "no_bias": True},
    ),
    "Falcon 7B": (
        6_921_720_704,
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
        | {"vocab_size": 65024, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    ),
    "Falcon 180B": (
        178_557_088_768,
        {"model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232}
        | {"num_kv_heads": 8, "vocab_size": 65024, "multi_query": True, "parallel_attn": True}
        | {"new_decoder_architecture": True},
    ),
    "Llama 4 Maverick": (
        400_711_848_960,
        {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384}
        | {"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 8192, "max_position_embeddings": 1048576, "vocab_size": 202048, "hidden_act": "silu"}
        | {"use_qk_norm": False},
    ),
    "ERNIE 4.5 300B": (
        299_484_163_264,
        MOE
        | {"model_type": "ernie4_5_moe", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 54}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 103424, "moe_num_experts": 64}
        | {"moe_k": 8, "moe_intermediate_size": 3584, "moe_layer_start_index": 3, "moe_layer_end_index": 53}
        | {"moe_layer_interval": 1, "use_bias": False},
    ),
    "Apertus 8B": (
        8_053_338_176,
        {"model_type": "apertus", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072, "hidden_act": "xielu"}
        | {"max_position_embeddings": 65536, "tie_word_embeddings": False},
    ),
    "GLM 4.7 Flash": (
        29_943_390_976,
        MOE
        | {"model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47}
        | {"moe_intermediate_size": 1536, "num_attention_heads": 20, "num_key_value_heads": 20, "n_shared_experts": 1}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "kv_lora_rank": 512, "q_lora_rank": 768}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880}
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 46},
    ),
    "Trinity Mini": (
        26_123_974_400,
        MOE
        | {"model_type": "afmoe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024}
        | {"num_hidden_layers": 32, "num_dense_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1}
        | {"sliding_window": 2048, "global_attn_every_n_layers": 4, "vocab_size": 200192},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """To a millionth: BLOOM's norm after the embedding and Apertus' two numbers an activation are not counted."""
    published, config = MODELS[name]
    assert count_parameters(model_from_config(config, name)).total == pytest.approx(published, rel=1e-6)


TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
TINY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_routed_experts": 8}
TINY_COUNTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cwm": (4_708_608, {"head_dim": 128}),
    "deepseek_v2": (
        2_642_304,
        TINY_EXPERTS
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "dots1": (2_896_408, TINY_EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "granitemoeshared": (
        14_055_680,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "hunyuan_v1_dense": (2_742_784, {"head_dim": 32}),
    "hunyuan_v1_moe": (15_333_888, {"head_dim": 32, "num_experts": 8, "moe_topk": 2}),
    "nemotron_h": (
        1_686_456,
        TINY_EXPERTS
        | {"hybrid_override_pattern": "ME*-", "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 4}
        | {"ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 128, "head_dim": 32}
        | {"moe_shared_expert_intermediate_size": 96},
    ),
    "olmo": (2_740_224 + 256, {}),  # its last norm has no weights
    "stablelm": (2_744_832, {"use_qkv_bias": False}),
}
"""`model_type` -> parameters of a tiny model in transformers 5.24, and its keys beside `TINY`."""


@pytest.mark.parametrize("model_type", TINY_COUNTS)
def test_a_tiny_model_has_the_parameters_of_transformers(model_type: str) -> None:
    published, keys = TINY_COUNTS[model_type]
    model = model_from_config(TINY | keys | {"model_type": model_type}, model_type)
    assert count_parameters(model).total == published


def windows(name: str) -> dict[int | None, int]:
    """Layers by their window."""
    spec: dict[int | None, int] = {}
    for group in model_from_config(MODELS[name][1], name).layers:
        assert isinstance(group.attention, GroupedQueryAttention)
        window = group.attention.window_tokens
        spec[window] = spec.get(window, 0) + group.num_layers
    return spec


def test_local_layers_slide() -> None:
    assert windows("GPT-Neo 2.7B") == {None: 16, 256: 16}
    assert windows("Trinity Mini") == {None: 8, 2048: 24}


def test_a_chunk_is_bounded_by_a_window_of_its_size() -> None:
    assert windows("Llama 4 Maverick") == {None: 12, 8192: 36}


def test_one_head_may_serve_all_queries() -> None:
    kv_heads = {
        name: model_from_config(MODELS[name][1], name).layers[0].attention.num_kv_heads  # type: ignore[union-attr]
        for name in ("StarCoder", "Falcon 7B", "Falcon 180B", "GPT-J")
    }
    assert kv_heads == {"StarCoder": 1, "Falcon 7B": 1, "Falcon 180B": 8, "GPT-J": 16}
