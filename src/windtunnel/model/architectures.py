"""Facts of each architecture that its code fixes and its `config.json` leaves out, and keys of unreadable layers.

Biases, norms, layers with a sliding window, the width of a feed-forward that no key names: by `model_type`, taken
from `transformers/models/*/modeling_*.py` and the modelling files published with the checkpoints.
"""

from dataclasses import dataclass, replace
from typing import Any

Rule = bool | str
"""A fact of an architecture: True or False, or the config key that decides it."""


@dataclass(frozen=True)
class Architecture:
    """Facts that the code of a `model_type` fixes and its config.json leaves out."""

    qkv_bias: Rule = "attention_bias"
    output_bias: Rule = "attention_bias"
    feed_forward_bias: Rule = "mlp_bias"
    qk_norm: Rule = "use_qk_norm"
    output_gate: Rule = "attn_output_gate"
    router_bias: Rule = "use_routing_bias"
    fp32_router: bool = False
    """vLLM and SGLang load the router in fp32 (`minimax_m2.py`, `hunyuan_v3.py`; vllm-project/vllm 52668)."""
    sinks: bool = False
    rotary: bool = True
    """Whether queries and keys are rotated by their position."""
    shared_gate: bool = False
    gated: bool = True
    num_norms: int = 2
    norm_bias: bool = False
    lm_head_bias: Rule = "lm_head_bias"
    tied: bool = False
    """Whether embeddings are tied, where the config does not say."""
    full_attention_every: int | None = None
    """Period of layers that attend to everything, the others to the sliding window; None: all layers slide."""
    shared_experts: int = 0
    """Number of shared experts where the config does not say."""
    width_multiple: int | None = None
    """Width of a feed-forward over the hidden size where the config gives none."""
    position_rows: int | None = None
    """Rows that a table of learned positions has beyond the longest context; None: positions are not learned."""


LLAMA = Architecture()
_GPT = Architecture(
    qkv_bias=True,
    output_bias=True,
    feed_forward_bias=True,
    gated=False,
    norm_bias=True,
    tied=True,
    width_multiple=4,
    position_rows=0,
)
_GPT_J = Architecture(
    feed_forward_bias=True, gated=False, num_norms=1, norm_bias=True, lm_head_bias=True, width_multiple=4
)
_ERNIE = Architecture(qkv_bias="use_bias", output_bias="use_bias", feed_forward_bias="use_bias", tied=True)

ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(qk_norm=True, output_gate=True, router_bias=True, num_norms=4),
    "apertus": Architecture(qk_norm=True, gated=False),
    "arcee": Architecture(gated=False),
    "bitnet": Architecture(num_norms=3),
    "bloom": replace(_GPT, position_rows=None),
    "chatglm": Architecture(
        qkv_bias="add_qkv_bias", output_bias="add_bias_linear", feed_forward_bias="add_bias_linear"
    ),
    "cohere": Architecture(num_norms=1, tied=True),
    "cohere2": Architecture(num_norms=1, tied=True, full_attention_every=4),
    "dots1": Architecture(qk_norm=True, router_bias=True),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, router_bias=True),
    "falcon": Architecture(
        qkv_bias="bias",
        output_bias="bias",
        feed_forward_bias="bias",
        gated=False,
        norm_bias=True,
        tied=True,
        width_multiple=4,
    ),
    "gemma": Architecture(tied=True),
    "gemma2": Architecture(num_norms=4, tied=True, full_attention_every=2),
    "gemma3": Architecture(num_norms=4, qk_norm=True, tied=True, full_attention_every=6),
    "glm4": Architecture(output_bias=False, num_norms=4),
    "glm4_moe": Architecture(output_bias=False, router_bias=True),
    "gpt_neo": replace(_GPT, qkv_bias=False),
    "gpt_neox": Architecture(feed_forward_bias=True, gated=False, norm_bias=True),
    "gpt_oss": Architecture(feed_forward_bias=True, router_bias=True, sinks=True, full_attention_every=2),
    "hunyuan_v1_dense": Architecture(qk_norm=True),
    "hunyuan_v1_moe": Architecture(qk_norm=True, shared_experts=1),
    "hy_v3": Architecture(qk_norm=True, router_bias=True, fp32_router=True),
    "internlm3": Architecture(qkv_bias="qkv_bias", output_bias="bias", feed_forward_bias="bias"),
    "jais2": Architecture(gated=False, norm_bias=True),
    "llama4": Architecture(full_attention_every=4, shared_experts=1),
    "minimax_m2": Architecture(fp32_router=True),
    "mimo": Architecture(output_bias=False),
    "mpt": Architecture(gated=False, tied=True, width_multiple=4),
    "nanochat": Architecture(gated=False, num_norms=0),
    "nemotron": Architecture(gated=False, norm_bias=True),
    # One norm before each block; squared ReLU; attention without positions (`modeling_nemotron_h.py` of
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16; vLLM 0.18 `nemotron_h.py`, `NemotronHAttention`).
    "nemotron_h": Architecture(router_bias=True, rotary=False, gated=False, num_norms=1),
    "olmo": Architecture(num_norms=0),
    "opt": replace(_GPT, position_rows=2),
    "persimmon": Architecture(
        qkv_bias=True, output_bias=True, feed_forward_bias=True, qk_norm="qk_layernorm", gated=False, norm_bias=True
    ),
    "phi": Architecture(
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        qk_norm="qk_layernorm",
        gated=False,
        num_norms=1,
        norm_bias=True,
        lm_head_bias=True,
    ),
    "phimoe": Architecture(norm_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True, output_bias=False, shared_gate=True),
    "stablelm": Architecture(qkv_bias="use_qkv_bias", output_bias=False, norm_bias=True),
    "starcoder2": Architecture(
        qkv_bias="use_bias",
        output_bias="use_bias",
        feed_forward_bias="use_bias",
        gated=False,
        norm_bias=True,
        tied=True,
    ),
    "vaultgemma": Architecture(tied=True, full_attention_every=2),
    **dict.fromkeys(
        ("olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"), Architecture(qk_norm=True)
    ),
    **dict.fromkeys(
        ("axk1", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"),
        Architecture(router_bias=True),
    ),
    **dict.fromkeys(("qwen", "qwen2", "qwen2_vl", "qwen2_5_vl"), Architecture(qkv_bias=True, output_bias=False)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"), Architecture(qk_norm=True, output_gate=True, shared_gate=True)
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT),
    **dict.fromkeys(("codegen", "gptj"), _GPT_J),
    **dict.fromkeys(("internlm", "internlm2"), Architecture(qkv_bias="bias", output_bias="bias")),
    **dict.fromkeys(
        (
            # DeepSeek-V2's router has no bias (`transformers/models/deepseek_v2/modeling_deepseek_v2.py`).
            "deepseek_v2",
            *(
                "cwm",
                "exaone4",
                "glm",
                "granite",
                "granitemoe",
                "granitemoeshared",
                "llama",
                "minicpm3",
                "ministral3",
                "mistral",
            ),
            *("mixtral", "phi3", "seed_oss", "smollm3", "solar_open", "youtu"),
        ),
        LLAMA,
    ),
}

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "max_position_embeddings": ("seq_length", "max_seq_len", "max_sequence_length", "n_positions"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_key_value_heads": ("multi_query_group_num", "num_kv_heads"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "shared_expert_intermediate_size": ("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    "sliding_window": ("attention_chunk_size", "window_size"),
    "vocab_size": ("padded_vocab_size",),
}
"""Other names of a key, the first that is given wins. Llama 4 attends within chunks of `attention_chunk_size`
tokens, which a window of that size bounds from above: a request sees half of it on average."""

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # Gemma 3 publishes only what differs from transformers' Gemma3TextConfig.
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rope_local_base_freq": 10000.0,
    },
    "bloom": {"seq_length": 2048},
    "falcon": {"max_position_embeddings": 2048},
    "gpt_neox": {"attention_bias": True},
    "starcoder2": {"use_bias": True},
}

UNREADABLE: dict[str, str] = {
    "altup_num_inputs": "alternating updates, as in Gemma 3n,",
    "attn_layer_period": "Mamba layers, as in Jamba,",
    "block_configs": "a different block in every layer, as in Nemotron-NAS,",
    "conv_L_cache": "short convolutions between attention, as in LFM2,",
    "compress_ratios": "compressed sparse attention, as in DeepSeek-V4,",
    "cross_attention_layers": "cross-attention to images, as in Llama 3.2 Vision,",
    "global_head_dim": "heads of two widths, as in Gemma 4,",
    "H_cycles": "layers that run several times, as in HRM,",
    "indexer_types": "layers that share an indexer, as in GLM-5.2,",
    "keep_window_size": "attention to a learned choice of keys, as in Doge,",
    "linear_attn_config": "Kimi delta attention",
    "mamba_d_state": "Mamba layers",
    "moe_latent_size": "experts behind a projection, as in Nemotron-3-Super,",
    "num_attention_heads_per_layer": "layers with different numbers of heads, as in Laguna,",
    "num_kv_shared_layers": "layers that share a KV cache, as in Gemma 3n,",
    "sparse_attention_config": "block-sparse attention, as in MiniMax-M3,",
    "ssm_cfg": "state-space layers, as in Mamba,",
    "state_size": "state-space layers, as in Mamba,",
    "swa_num_key_value_heads": "window layers with other head counts, as in MiMo-V2,",
}
"""Keys of layers that `ModelSpec` cannot express -> those layers; harmless when null, 0 or empty."""

UNREADABLE_TYPES: dict[str, str] = {
    "jetmoe": "mixtures of attention heads",
    "moshi": "a second decoder in every step",
}
"""Model types with layers that `ModelSpec` cannot express and that no key announces."""

TOWERS: dict[str, tuple[str, ...]] = {
    "vision tower": ("vision_config", "visual_config", "vision_tower_config", "vit_config"),
    "audio tower": ("audio_config", "speech_config"),
}
"""Part of a multimodal model that is not modelled -> the keys that announce it."""
