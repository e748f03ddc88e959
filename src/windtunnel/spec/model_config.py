"""Reads a model's shape from the `config.json` that is published beside its weights on Hugging Face.

A config leaves out what the model's code fixes (biases, norms, which layers use the sliding window). Those facts are
the table `_ARCHITECTURES`, one line for each `model_type`, taken from `transformers/models/*/modeling_*.py` and the
modelling files published with the checkpoints. A `model_type` that is not in the table is read as Llama is, unless one
of its keys announces a layer that `ModelSpec` has no noun for.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.errors import InputError, did_you_mean
from windtunnel.spec.model import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    FeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
    ModelSpec,
)
from windtunnel.spec.quantization import precision_from_config

Rule = bool | str
"""A fact of an architecture: True or False, or the config key that decides it."""


@dataclass(frozen=True)
class _Architecture:
    """What the code of a `model_type` fixes and its config.json leaves out."""

    qkv_bias: Rule = "attention_bias"
    output_bias: Rule = "attention_bias"
    feed_forward_bias: Rule = "mlp_bias"
    qk_norm: Rule = "use_qk_norm"
    output_gate: Rule = "attn_output_gate"
    router_bias: Rule = "use_routing_bias"
    sinks: bool = False
    shared_gate: bool = False
    gated: bool = True
    num_norms: int = 2
    norm_bias: bool = False
    lm_head_bias: Rule = "lm_head_bias"
    tied: bool = False
    """Whether embeddings are tied where the config does not say."""
    full_attention_every: int | None = None
    """Every n-th layer attends to everything and the others to the sliding window; None: the window holds in all."""


_LLAMA = _Architecture()
_QWEN3_HYBRID = _Architecture(qk_norm=True, output_gate=True, shared_gate=True)
_DEEPSEEK = _Architecture(router_bias=True)
_GEMMA3 = _Architecture(num_norms=4, qk_norm=True, tied=True, full_attention_every=6)

_ARCHITECTURES: dict[str, _Architecture] = {
    "chatglm": _Architecture(
        qkv_bias="add_qkv_bias", output_bias="add_bias_linear", feed_forward_bias="add_bias_linear"
    ),
    "cohere": _Architecture(num_norms=1, tied=True),
    "cohere2": _Architecture(num_norms=1, tied=True, full_attention_every=4),
    "deepseek_v3": _DEEPSEEK,
    "gemma": _Architecture(tied=True),
    "gemma2": _Architecture(num_norms=4, tied=True, full_attention_every=2),
    "gemma3": _GEMMA3,
    "glm4": _Architecture(output_bias=False, num_norms=4),
    "glm4_moe": _Architecture(output_bias=False, router_bias=True),
    "gpt_neox": _Architecture(feed_forward_bias=True, gated=False, norm_bias=True),
    "gpt_oss": _Architecture(feed_forward_bias=True, router_bias=True, sinks=True, full_attention_every=2),
    "internlm": _Architecture(qkv_bias="bias", output_bias="bias"),
    "internlm2": _Architecture(qkv_bias="bias", output_bias="bias"),
    "internlm3": _Architecture(qkv_bias="qkv_bias", output_bias="bias", feed_forward_bias="bias"),
    "kimi_k2": _DEEPSEEK,
    "mimo": _Architecture(output_bias=False),
    "nemotron": _Architecture(gated=False, norm_bias=True),
    "olmo2": _Architecture(qk_norm=True),
    "olmo3": _Architecture(qk_norm=True),
    "olmoe": _Architecture(qk_norm=True),
    "phi": _Architecture(
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        qk_norm="qk_layernorm",
        gated=False,
        num_norms=1,
        norm_bias=True,
        lm_head_bias=True,
    ),
    "phimoe": _Architecture(norm_bias=True),
    "qwen": _Architecture(qkv_bias=True, output_bias=False),
    "qwen2": _Architecture(qkv_bias=True, output_bias=False),
    "qwen2_moe": _Architecture(qkv_bias=True, output_bias=False, shared_gate=True),
    "qwen2_vl": _Architecture(qkv_bias=True, output_bias=False),
    "qwen2_5_vl": _Architecture(qkv_bias=True, output_bias=False),
    "qwen3": _Architecture(qk_norm=True),
    "qwen3_moe": _Architecture(qk_norm=True),
    "qwen3_next": _QWEN3_HYBRID,
    "qwen3_5": _QWEN3_HYBRID,
    "qwen3_5_moe": _QWEN3_HYBRID,
    "qwen3_vl": _Architecture(qk_norm=True),
    "qwen3_vl_moe": _Architecture(qk_norm=True),
    "starcoder2": _Architecture(
        qkv_bias="use_bias",
        output_bias="use_bias",
        feed_forward_bias="use_bias",
        gated=False,
        norm_bias=True,
        tied=True,
    ),
}

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # Gemma 3 publishes only what differs from transformers' Gemma3TextConfig.
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gpt_neox": {"attention_bias": True},
    "starcoder2": {"use_bias": True},
}

_MOST_LAYERS = 10_000
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "swigluoai")
_LINEAR = "linear_attention"
_LAYER_TYPES = ("full_attention", "sliding_attention", _LINEAR)
_QWEN3_NEXT_INTERVAL = 4
"""`full_attention_interval` where a Gated DeltaNet hybrid does not give it (transformers' Qwen3NextConfig)."""
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForVision2Seq")

_UNREADABLE: dict[str, str] = {
    "altup_num_inputs": "alternating updates, as in Gemma 3n,",
    "attn_layer_period": "Mamba layers, as in Jamba,",
    "block_configs": "a different block in every layer, as in Nemotron-NAS,",
    "compress_ratios": "compressed sparse attention, as in DeepSeek-V4,",
    "cross_attention_layers": "cross-attention to images, as in Llama 3.2 Vision,",
    "global_head_dim": "heads of two widths, as in Gemma 4,",
    "hybrid_override_pattern": "Mamba layers, as in Nemotron-H,",
    "index_topk": "sparse attention with an indexer, as in DeepSeek-V3.2 and GLM-5,",
    "layers_block_type": "layers of other kinds, as in Nemotron-H and Zamba,",
    "linear_attn_config": "Kimi delta attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "num_kv_shared_layers": "layers that share a KV cache, as in Gemma 3n,",
    "sparse_attention_config": "block-sparse attention, as in MiniMax-M3,",
    "ssm_cfg": "state-space layers, as in Mamba,",
    "state_size": "state-space layers, as in Mamba,",
    "swa_num_key_value_heads": "window layers with other head counts, as in MiMo-V2,",
    "attention_chunk_size": "chunked attention, as in Llama 4,",
}
"""Keys that announce a layer with no noun in `ModelSpec`; harmless when null, 0 or empty."""


def model_from_config(config: Mapping[str, Any], name: str, quant_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The `ModelSpec` that a Hugging Face `config.json` describes.

    Args:
        config: the parsed config.json; of a multimodal model the language model (`text_config`) is read.
        name: what to call the model, also in errors.
        quant_config: the parsed `hf_quant_config.json` of a ModelOpt checkpoint; it wins over `quantization_config`.

    Raises:
        InputError: a needed key is missing, or has the wrong type or an impossible value; or the model has layers that
            `ModelSpec` cannot express.
    """
    reader = _reader(config, name)
    architecture = _ARCHITECTURES.get(reader.model_type, _LLAMA)
    _refuse_unreadable(reader)
    layers = tuple(zip(_attentions(reader, architecture), _feed_forwards(reader, architecture), strict=True))
    return ModelSpec(
        name=name,
        hidden_size=reader.count("hidden_size"),
        vocab_size=reader.count("vocab_size", "padded_vocab_size"),
        max_context_tokens=_max_context_tokens(reader),
        layers=tuple(
            LayerGroup(num_layers=num, attention=attention, feed_forward=feed_forward, num_norms=architecture.num_norms)
            for (attention, feed_forward), num in Counter(layers).items()
        ),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=architecture.tied),
        norm_bias=architecture.norm_bias,
        lm_head_bias=reader.rule(architecture.lm_head_bias),
        precision=precision_from_config(reader.raw.get("quantization_config"), quant_config, layers, name),
    )


@dataclass(frozen=True)
class _Reader:
    """Typed access to one config: a key that is absent or null counts as not given."""

    raw: Mapping[str, Any]
    name: str
    model_type: str

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of `keys` that is given, with its value; (last key, None) where none is."""
        return next(((key, self.raw[key]) for key in keys if self.raw.get(key) is not None), (keys[-1], None))

    def count(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`, under the first of `keys` that is given."""
        key, value = self.first(*keys)
        if value is None and default is not None:
            return default
        if value is None:
            near = did_you_mean(keys[0], (str(known) for known in self.raw))
            raise InputError(
                f"{self.name}: config.json (model_type {self.model_type!r}) has no {' or '.join(keys)}", near
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(f"{self.name}: {key} is {value!r}; a whole number of at least {minimum} is needed")
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or False, under the first of `keys` that is given."""
        key, value = self.first(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key} is {value!r}; true or false is needed")
        return value

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty where it is not given."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise InputError(f"{self.name}: {key} is {value!r}; a list of whole numbers is needed")
        return value

    def rule(self, rule: Rule) -> bool:
        """What an architecture's rule says for this config."""
        return rule if isinstance(rule, bool) else self.flag(rule)

    @property
    def num_layers(self) -> int:
        num_layers = self.count("num_hidden_layers", "num_layers")
        if num_layers > _MOST_LAYERS:
            raise InputError(f"{self.name}: {num_layers} layers are not plausible; at most {_MOST_LAYERS} are read")
        return num_layers


def _reader(config: Mapping[str, Any], name: str) -> _Reader:
    """The language model's part of `config`, its outer keys and its class's defaults behind it."""
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: config.json holds {type(config).__name__}; an object is needed")
    nested = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((part for part in nested if isinstance(part, Mapping)), config)
    model_type = str(text.get("model_type") or config.get("model_type") or "").removesuffix("_text")
    outer = {
        key: config[key] for key in ("tie_word_embeddings", "quantization_config", "architectures") if key in config
    }
    given = {key: value for key, value in text.items() if value is not None}
    return _Reader(_CLASS_DEFAULTS.get(model_type, {}) | outer | given, name, model_type)


def _refuse_unreadable(reader: _Reader) -> None:
    """Raise for what would be read wrongly: other layers, an encoder, an unknown activation."""
    what = next((what for key, what in _UNREADABLE.items() if reader.raw.get(key)), None)
    if what:
        raise InputError(f"{reader.name}: {what} cannot be modelled (model_type {reader.model_type!r})")
    if 0 in reader.numbers("attn_type_list"):
        raise InputError(f"{reader.name}: lightning attention cannot be modelled (model_type {reader.model_type!r})")
    architectures = _texts(reader, "architectures")
    generative = not architectures or any(item.endswith(_GENERATIVE) for item in architectures)
    if reader.raw.get("is_encoder_decoder") or not generative:
        raise InputError(f"{reader.name} ({', '.join(architectures)}) is not a decoder-only language model")
    _, activation = reader.first("hidden_act", "hidden_activation", "activation_function")
    known = reader.model_type in _ARCHITECTURES or activation is None or activation in _GATED_ACTIVATIONS
    if not known:
        raise InputError(
            f"{reader.name}: model_type {reader.model_type!r} is not known, and {activation!r} does not say how many "
            "matrices its feed-forward has",
            f"unknown types are read as Llama is, with one of {', '.join(_GATED_ACTIVATIONS)}",
        )


def _texts(reader: _Reader, key: str) -> list[str]:
    value = reader.raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{reader.name}: {key} is {value!r}; a list of names is needed")
    return value


def _max_context_tokens(reader: _Reader) -> int:
    return reader.count("max_position_embeddings", "seq_length", "max_seq_len", "max_sequence_length")


def _attentions(reader: _Reader, architecture: _Architecture) -> list[Attention]:
    """The attention of every layer, in order."""
    if reader.raw.get("kv_lora_rank") is not None:
        return [_latent(reader)] * reader.num_layers
    types = _layer_types(reader)
    shapes = list(zip(types, _windows(reader, architecture, types), strict=True))
    by_shape: dict[tuple[str, int | None], Attention] = {
        (layer, window): _gated_delta(reader) if layer == _LINEAR else _grouped_query(reader, architecture, window)
        for layer, window in set(shapes)
    }
    return [by_shape[shape] for shape in shapes]


def _layer_types(reader: _Reader) -> list[str]:
    """`full_attention`, `sliding_attention` or `linear_attention` for every layer, as far as the config tells."""
    types = reader.raw.get("layer_types")
    if types is None:
        is_hybrid = reader.raw.get("linear_num_value_heads") is not None
        every = reader.count("full_attention_interval", default=_QWEN3_NEXT_INTERVAL if is_hybrid else 1)
        return [_LINEAR if (index + 1) % every else "full_attention" for index in range(reader.num_layers)]
    if not isinstance(types, list) or len(types) != reader.num_layers:
        raise InputError(f"{reader.name}: layer_types must name each of the {reader.num_layers} layers")
    unknown = next((layer for layer in types if layer not in _LAYER_TYPES), None)
    if unknown is not None:
        raise InputError(
            f"{reader.name}: layer_types has {unknown!r}, which cannot be modelled; allowed: {', '.join(_LAYER_TYPES)}"
        )
    return types


def _windows(reader: _Reader, architecture: _Architecture, types: list[str]) -> list[int | None]:
    """The sliding window of every layer in tokens; None where it attends to everything."""
    window = reader.count("sliding_window", default=0, minimum=0)
    if not window or window >= _max_context_tokens(reader) or not reader.flag("use_sliding_window", default=True):
        return [None] * len(types)
    if "layer_types" in reader.raw:
        return [window if layer == "sliding_attention" else None for layer in types]
    if reader.flag("use_sliding_window"):
        first = reader.count("max_window_layers", default=0, minimum=0)
        return [window if index >= first else None for index in range(len(types))]
    every = reader.count("sliding_window_pattern", default=architecture.full_attention_every or 0)
    return [None if every and (index + 1) % every == 0 else window for index in range(len(types))]


def _grouped_query(reader: _Reader, architecture: _Architecture, window: int | None) -> GroupedQueryAttention:
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", "multi_query_group_num", default=num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"{reader.name}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return GroupedQueryAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(reader, num_heads),
        window_tokens=window,
        qkv_bias=reader.rule(architecture.qkv_bias),
        output_bias=reader.rule(architecture.output_bias),
        qk_norm=reader.rule(architecture.qk_norm),
        output_gate=reader.rule(architecture.output_gate),
        sinks=architecture.sinks,
    )


def _head_dim(reader: _Reader, num_heads: int) -> int:
    head_dim = reader.count("head_dim", "kv_channels", default=0)
    hidden_size = reader.count("hidden_size")
    if not head_dim and hidden_size % num_heads:
        raise InputError(
            f"{reader.name}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and there "
            "is no head_dim"
        )
    return head_dim or hidden_size // num_heads


def _latent(reader: _Reader) -> LatentAttention:
    return LatentAttention(
        num_heads=reader.count("num_attention_heads"),
        q_lora_rank=reader.count("q_lora_rank", default=0) or None,
        kv_lora_rank=reader.count("kv_lora_rank"),
        qk_nope_head_dim=reader.count("qk_nope_head_dim"),
        qk_rope_head_dim=reader.count("qk_rope_head_dim"),
        v_head_dim=reader.count("v_head_dim"),
    )


def _gated_delta(reader: _Reader) -> GatedDeltaAttention:
    num_key_heads = reader.count("linear_num_key_heads")
    num_value_heads = reader.count("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise InputError(
            f"{reader.name}: linear_num_value_heads {num_value_heads} is not a multiple of linear_num_key_heads "
            f"{num_key_heads}"
        )
    return GatedDeltaAttention(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=reader.count("linear_key_head_dim"),
        value_head_dim=reader.count("linear_value_head_dim"),
        conv_kernel_size=reader.count("linear_conv_kernel_dim"),
    )


def _feed_forwards(reader: _Reader, architecture: _Architecture) -> list[FeedForward]:
    """The feed-forward of every layer, in order."""
    sparse = _sparse_layers(reader)
    experts = _experts(reader, architecture) if any(sparse) else None
    dense = None if all(sparse) else _dense(reader, architecture)
    return [part for is_sparse in sparse if (part := experts if is_sparse else dense)]


def _sparse_layers(reader: _Reader) -> list[bool]:
    """Which layers are a mixture of experts."""
    if not reader.count("num_local_experts", "num_experts", "n_routed_experts", default=0, minimum=0):
        return [False] * reader.num_layers
    first = reader.count("first_k_dense_replace", default=0, minimum=0)
    step = reader.count("decoder_sparse_step", default=1)
    dense = set(reader.numbers("mlp_only_layers"))
    frequency = _moe_layer_frequency(reader)
    return [
        index >= first and frequency[index] and index not in dense and (index + 1) % step == 0
        for index in range(reader.num_layers)
    ]


def _moe_layer_frequency(reader: _Reader) -> list[bool]:
    """DeepSeek's `moe_layer_freq`: every n-th layer, or a list with one entry a layer."""
    if isinstance(reader.raw.get("moe_layer_freq"), list):
        frequency = reader.numbers("moe_layer_freq")
        if len(frequency) != reader.num_layers:
            raise InputError(f"{reader.name}: moe_layer_freq must say for each of the {reader.num_layers} layers")
        return [bool(item) for item in frequency]
    every = reader.count("moe_layer_freq", default=1)
    return [index % every == 0 for index in range(reader.num_layers)]


def _dense(reader: _Reader, architecture: _Architecture) -> DenseFeedForward:
    width = reader.count("dense_intermediate_size", "intermediate_size", "ffn_hidden_size")
    # Qwen 1 publishes the sum of its gate and up projections' widths.
    if reader.model_type == "qwen":
        width //= 2
    return DenseFeedForward(
        intermediate_size=width, gated=architecture.gated, bias=reader.rule(architecture.feed_forward_bias)
    )


def _experts(reader: _Reader, architecture: _Architecture) -> ExpertsFeedForward:
    num_experts = reader.count("num_local_experts", "num_experts", "n_routed_experts")
    chosen = reader.count("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_top_k")
    if chosen > num_experts:
        raise InputError(f"{reader.name}: each token uses {chosen} experts, and there are {num_experts}")
    width = reader.count("moe_intermediate_size", "intermediate_size")
    shared = reader.count("shared_expert_intermediate_size", "shared_intermediate_size", default=0, minimum=0)
    num_shared = reader.count("n_shared_experts", "num_shared_experts", default=0, minimum=0)
    return ExpertsFeedForward(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=width,
        shared_intermediate_size=shared or num_shared * width,
        shared_gate=architecture.shared_gate and shared > 0,
        gated=architecture.gated,
        bias=reader.rule(architecture.feed_forward_bias),
        router_bias=reader.rule(architecture.router_bias),
    )
