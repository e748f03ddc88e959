"""Shapes of published models whose code fixes what their configs leave out.

The counts are those of transformers 5.23: `AutoModelForCausalLM.from_config` on the meta device, tied weights once.
"""

from collections import Counter
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import Shard

OLD = {"activation_function": "gelu_new", "vocab_size": 50257}
MOE = {"hidden_act": "silu", "max_position_embeddings": 131072, "tie_word_embeddings": False}

KIMI_LAST = ["linear_attention", "linear_attention", "full_attention"]
GEMMA_3N = {
    "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "intermediate_size": [16384] * 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15,
    "laurel_rank": 64, "altup_num_inputs": 4, "sliding_window": 512, "max_position_embeddings": 32768,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip
GEMMA_4_E2B = {
    "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "sliding_window": 512, "max_position_embeddings": 131072,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip

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
    "Gemma 3n E4B": (6_835_235_568, GEMMA_3N),
    "Gemma 4 E2B": (4_628_569_344, GEMMA_4_E2B | {"global_head_dim": 512}),
    "Gemma 4 E2B, as transformers 5.24 writes it": (
        4_628_569_344,
        GEMMA_4_E2B | {"per_layer_config": {f"{index:02}": {"head_dim": 512} for index in range(4, 35, 5)}},
    ),
    "Bamba 9B v2": (
        9_780_235_392,
        {"model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27]}
        | {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64}
        | {"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False}
        | {"vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": False},
    ),
    "DBRX": (
        131_596_523_520,  # its page on huggingface.co: transformers 5.24 does not build it
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768}
        | {"vocab_size": 100352, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    "Kimi-Linear, as transformers 5.24 writes it": (
        49_122_675_072,
        MOE
        | {"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27}
        | {"num_attention_heads": 32, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1}
        | {"moe_intermediate_size": 1024, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128, "head_dim": 64, "linear_head_dim": 128, "linear_num_heads": 32}
        | {"linear_conv_kernel_dim": 4, "vocab_size": 163840, "mlp_layer_types": ["dense"] + ["sparse"] * 26}
        | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6 + KIMI_LAST},
    ),
    "LLaVA 1.5 7B": (
        6_738_939_904,
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
        | {"vision_config": {"patch_size": 14}},
    ),
    "PaliGemma 2 10B": (
        9_246_064_128,
        {"model_type": "paligemma", "vision_config": {"patch_size": 14}}
        | {
            "text_config": {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336}
            | {"num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "vocab_size": 257216}
        },
    ),
    "Idefics3 8B": (
        8_030_285_824,
        {"model_type": "idefics3", "vision_config": {"patch_size": 14}, "tie_word_embeddings": False}
        | {
            "text_config": {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8}
            | {"vocab_size": 128259, "max_position_embeddings": 131072}
        },
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
    "Granite 4.0 H Small": (
        32_207_337_984,
        {"model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10}
        | {"shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}
        | {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 256, "position_embedding_type": "nope"}
        | {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "tie_word_embeddings": True}
        | {"vocab_size": 100352, "max_position_embeddings": 131072},
    ),
    "EXAONE 3.5 32B": (
        32_003_200_000,
        {"model_type": "exaone", "hidden_size": 5120, "intermediate_size": 27392, "num_layers": 64}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400}
        | {"activation_function": "silu", "max_position_embeddings": 32768, "tie_word_embeddings": False},
    ),
    "K-EXAONE 236B": (
        236_571_150_336,
        MOE
        | {"model_type": "exaone_moe", "hidden_size": 6144, "intermediate_size": 18432, "moe_intermediate_size": 2048}
        | {"num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1}
        | {"sliding_window": 128, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12}
        | {"vocab_size": 153600},
    ),
    "GLM-4.5V": (
        106_852_245_504,
        MOE
        | {"model_type": "glm4v_moe_text", "hidden_size": 4096, "intermediate_size": 10944, "attention_bias": True}
        | {"moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "head_dim": 128}
        | {"num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 1, "vocab_size": 151552},
    ),
    "Muse Glimmer 30B": (
        27_854_780_928,
        MOE
        | {"model_type": "muse_glimmer_text", "hidden_size": 6656, "intermediate_size": 19968, "head_dim": 128}
        | {"num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "vocab_size": 202048}
        | {"sliding_window": 2048, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13},
    ),
    "Kolibri 1": (
        78_103_055_360,
        MOE
        | {"model_type": "kolibri1", "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48}
        | {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "num_experts_per_tok": 6, "num_experts": 384}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 10, "vocab_size": 128000},
    ),
    "LFM3 1.7B": (
        1_728_801_536,
        {"model_type": "lfm3", "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256}
        | {"vocab_size": 128000, "max_position_embeddings": 128000}
        | {
            "layer_types": [
                "conv",
                "conv",
                *["full_attention", "conv", "sliding_attention", "conv"] * 5,
                "full_attention",
                "conv",
            ]
        },
    ),
    "MiniMax-Text-01": (
        456_089_655_296,
        {"model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32}
        | {"num_experts_per_tok": 2, "vocab_size": 200064, "max_position_embeddings": 10240000}
        | {"attn_type_list": ([0] * 7 + [1]) * 10},
    ),
    "A.X K2 Light": (
        20_314_494_976 + 47 * 128,  # and the biases of its routers, which are no parameters in transformers
        MOE
        | {"model_type": "axk2", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512}
        | {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": 1}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "kv_lora_rank": 128, "q_lora_rank": 384}
        | {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "vocab_size": 163840}
        | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16, "gated_norm_rank": 16}
        | {"first_k_dense_replace": 1},
    ),
    "Mistral Small 4": (
        118_972_826_624,
        MOE
        | {"model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048}
        | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": 1}
        | {"n_routed_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 256, "q_lora_rank": 1024}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072}
        | {"first_k_dense_replace": 0},
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
    "cohere2_moe": (
        13_503_744,
        {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 128}
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "cwm": (4_708_608, {"head_dim": 128}),
    "deepseek_v2": (
        2_642_304,
        TINY_EXPERTS
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "distilbert": (3_413_504, {"dim": 256, "hidden_dim": 512, "n_layers": 4, "n_heads": 8, "num_key_value_heads": 8}),
    "dots1": (2_896_408, TINY_EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "gemma3n": (
        2_561_296,
        {"head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "altup_num_inputs": 4}
        | {"laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"intermediate_size": [512, 512, 256, 256]},
    ),
    "gemma4": (
        3_618_864,
        {"head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"per_layer_config": {"01": {"head_dim": 64}, "3": {"head_dim": 64}}},
    ),
    "granite_swa": (2_742_560, {"sliding_window": 128, "tie_word_embeddings": False}),
    "granitemoehybrid": (
        14_790_512,
        {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
        | {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
        | {"mamba_chunk_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "granitemoe_swa": (
        14_055_712,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "shared_intermediate_size": 96},
    ),
    "granitemoeshared": (
        14_055_680,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "helium": (2_742_528, {"head_dim": 32}),
    "hunyuan_v1_dense": (2_742_784, {"head_dim": 32}),
    "hunyuan_v1_moe": (15_333_888, {"head_dim": 32, "num_experts": 8, "moe_topk": 2}),
    "hyperclovax": (2_744_576, {}),
    "iquestcoder": (4_708_608, {}),
    "laguna": (
        2_838_040,
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "gating": True}
        | {"shared_expert_intermediate_size": 64, "num_attention_heads_per_layer": [4, 8, 8, 8]}
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "mellum": (
        2_750_976,
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mpnet": (3_479_552 - 32 * 8, {"num_key_value_heads": 8}),  # without the biases of relative positions
    "nemotron_h": (
        1_686_456,
        TINY_EXPERTS
        | {"hybrid_override_pattern": "ME*-", "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 4}
        | {"ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 128, "head_dim": 32}
        | {"moe_shared_expert_intermediate_size": 96},
    ),
    "olmo": (2_740_224 + 256, {}),  # its last norm has no weights
    "sarvam_mla": (
        2_642_304,
        TINY_EXPERTS
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "sarvam_moe": (
        2_896_384 + 24,  # and the biases of its routers, which are no parameters in transformers
        TINY_EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True},
    ),
    "seed_oss": (2_744_064, {"head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "stablelm": (2_744_832, {"use_qkv_bias": False}),
}
"""`model_type` -> parameters of a tiny model in transformers 5.24, and its keys beside `TINY`."""


@pytest.mark.parametrize("model_type", TINY_COUNTS)
def test_a_tiny_model_has_the_parameters_of_transformers(model_type: str) -> None:
    published, keys = TINY_COUNTS[model_type]
    model = model_from_config(TINY | keys | {"model_type": model_type}, model_type)
    assert count_parameters(model).total == published


def test_gates_of_norms_and_queries_are_launched() -> None:
    """A norm before attention and one before experts have a gate; that of the outputs comes with the queries."""
    model = model_from_config(MODELS["A.X K2 Light"][1], "light")
    launches = token_launches(Shard(model, model.precision, Parallelism(tp=4)), 64)
    count = Counter[str]()
    for launch in launches:
        count[launch.name] += launch.count
    assert count["norm_gate_down"] == count["norm_gate_up"] == count["norm_gate"] == 48 + 47
    shapes = {launch.name: (launch.op.n, launch.op.k) for launch in launches if isinstance(launch.op, Gemm)}
    assert shapes["norm_gate_down"] == shapes["norm_gate_up"][::-1] == (16, 2048)
    assert shapes["q_b_proj"] == (8 * (64 + 32 + 64), 2 * 384)
    assert shapes["q_kv_a_proj"] == (384 + 128 + 32, 2048)


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


def test_ling_has_its_card_s_parameters() -> None:
    """transformers lacks its code; the model card of inclusionAI/Ling-flash-2.0: 103B, of which 6.1B are active."""
    config = MOE | {
        "model_type": "bailing_moe",
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "vocab_size": 157184,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "moe_router_enable_expert_bias": True,
    }
    count = count_parameters(model_from_config(config, "Ling"))
    assert count.total == pytest.approx(103e9, rel=0.005)
    assert count.active == pytest.approx(6.1e9, rel=0.01)


def test_positions_of_a_model_that_has_none_are_not_rotated() -> None:
    attention = model_from_config(MODELS["Granite 4.0 H Small"][1], "granite").layers[1].attention
    assert isinstance(attention, GroupedQueryAttention)
    assert not attention.rotary


@pytest.mark.parametrize("model_type", ["jetmoe", "qwen4_exp", "zamba2", "rwkv"])
def test_layers_that_cannot_be_modelled_are_named(model_type: str) -> None:
    with pytest.raises(InputError, match=r"as in|RWKV|mixtures of attention"):
        model_from_config(TINY | {"model_type": model_type}, "refused")
