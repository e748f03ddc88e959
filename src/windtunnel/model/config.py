"""Model shapes from the `config.json` that is published beside a model's weights on Hugging Face.

A config leaves out what the model's code fixes (biases, norms, which layers slide); `model.architectures` has those
facts. A `model_type` that is unknown there is read as Llama is, unless one of its keys announces a layer that
`ModelSpec` cannot express.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windtunnel.errors import InputError, did_you_mean
from windtunnel.model.architectures import (
    ALIASES,
    ARCHITECTURES,
    CLASS_DEFAULTS,
    HARMLESS_KEYS,
    LLAMA,
    SHAPE_WORDS,
    UNREADABLE,
    UNREADABLE_TYPES,
    Architecture,
    Rule,
)
from windtunnel.model.quantization import list_of, precision_from_config
from windtunnel.model.shape import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    FeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerGroup,
    ModelSpec,
)

_MOST_LAYERS = 10_000
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "swigluoai")
_LINEAR = "linear_attention"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", _LINEAR)
_QWEN3_NEXT_INTERVAL = 4
"""`full_attention_interval` where a Gated DeltaNet hybrid does not give it (transformers' Qwen3NextConfig)."""
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForVision2Seq")


def model_from_config(config: Mapping[str, Any], name: str, quant_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the `ModelSpec` that a Hugging Face `config.json` describes.

    Args:
        config: the parsed config.json; of a multimodal model the language model (`text_config`) is read.
        name: what to call the model, also in errors.
        quant_config: the parsed `hf_quant_config.json` of a ModelOpt checkpoint; it wins over `quantization_config`.

    Raises:
        InputError: a needed key is missing, or has the wrong type or an impossible value; or the model has layers that
            `ModelSpec` cannot express.
    """
    reader = _reader(config, name)
    architecture = ARCHITECTURES.get(reader.model_type, LLAMA)
    _refuse_unreadable(reader)
    num_norms = _num_norms(reader, architecture)
    layers = tuple(zip(_attentions(reader, architecture), _feed_forwards(reader, architecture), strict=True))
    _refuse_unknown_shapes(reader)
    max_context_tokens = reader.count("max_position_embeddings")
    has_positions = architecture.position_rows is not None
    return ModelSpec(
        name=name,
        hidden_size=reader.count("hidden_size"),
        vocab_size=reader.count("vocab_size"),
        max_context_tokens=max_context_tokens,
        layers=tuple(
            LayerGroup(num_layers=num, attention=attention, feed_forward=feed_forward, num_norms=num_norms)
            for (attention, feed_forward), num in Counter(layers).items()
        ),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=architecture.tied),
        norm_bias=architecture.norm_bias,
        lm_head_bias=reader.rule(architecture.lm_head_bias),
        learned_positions=max_context_tokens + (architecture.position_rows or 0) if has_positions else 0,
        architecture=reader.model_type if any(_has_window(attention) for attention, _ in layers) else "",
        precision=precision_from_config(reader.raw.get("quantization_config"), quant_config, layers, name),
    )


@dataclass(frozen=True)
class _Reader:
    """Typed access to one config: a key that is absent or null counts as not given."""

    raw: Mapping[str, Any]
    name: str
    model_type: str
    looked_up: set[str] = field(default_factory=set)
    """Names of keys that were looked up."""

    def first(self, *keys: str) -> tuple[str, Any]:
        """Return the first of `keys` or their aliases that is given, and its value; else (last key, None)."""
        names = [name for key in keys for name in (key, *ALIASES.get(key, ()))]
        self.looked_up.update(names)
        return next(((name, self.raw[name]) for name in names if self.raw.get(name) is not None), (keys[-1], None))

    def count(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least `minimum`, under the first of `keys` that is given."""
        key, value = self.first(*keys)
        if value is None and default is not None:
            return default
        if value is None:
            published = "give a model's config.json as published on Hugging Face"
            near = did_you_mean(keys[0], (str(known) for known in self.raw), published)
            raise InputError(
                f"{self.name}: config.json (model_type {self.model_type!r}) has no {' or '.join(keys)}", near
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(f"{self.name}: {key} is {value!r}; a whole number of at least {minimum} is needed")
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return True or False, under the first of `keys` that is given."""
        key, value = self.first(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key} is {value!r}; true or false is needed")
        return value

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers; empty where it is not given."""
        self.looked_up.add(key)
        return list_of(int, "whole numbers", self.raw, key, self.name)

    def per_layer(self, key: str, values: list[Any]) -> list[Any]:
        """Return `values`, the value of `key`, after checking that there is one for each layer."""
        if len(values) != self.num_layers:
            raise InputError(f"{self.name}: {key} must have one entry for each of the {self.num_layers} layers")
        return values

    def check_multiple(self, multiple: str, number: int, of: str, divisor: int) -> None:
        """Raise InputError unless `number`, the value of `multiple`, is a multiple of `divisor`."""
        if number % divisor:
            raise InputError(f"{self.name}: {multiple} {number} is not a multiple of {of} {divisor}")

    def rule(self, rule: Rule) -> bool:
        """Return what an architecture's rule says for this config."""
        return rule if isinstance(rule, bool) else self.flag(rule)

    @property
    def num_layers(self) -> int:
        num_layers = self.count("num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise InputError(f"{self.name}: {num_layers} layers are not plausible; at most {_MOST_LAYERS} are read")
        return num_layers


def _reader(config: Mapping[str, Any], name: str) -> _Reader:
    """Return the keys of the language model in `config`, then its outer keys, then the defaults of its class."""
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: config.json holds {type(config).__name__}; an object is needed")
    nested = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((part for part in nested if isinstance(part, Mapping)), config)
    model_type = str(text.get("model_type") or config.get("model_type") or "").removesuffix("_text")
    outer = {
        key: config[key] for key in ("tie_word_embeddings", "quantization_config", "architectures") if key in config
    }
    given = {key: value for key, value in text.items() if value is not None}
    return _Reader(CLASS_DEFAULTS.get(model_type, {}) | outer | given, name, model_type)


def _refuse_unreadable(reader: _Reader) -> None:
    """Raise InputError for a config that would be read wrongly: other layers, an encoder, an unknown activation."""
    layers = next((layers for key, layers in UNREADABLE.items() if reader.raw.get(key)), None)
    layers = layers or UNREADABLE_TYPES.get(reader.model_type)
    if layers:
        raise InputError(f"{reader.name}: {layers} cannot be modelled (model_type {reader.model_type!r})")
    if reader.count("word_embed_proj_dim", default=reader.count("hidden_size")) != reader.count("hidden_size"):
        raise InputError(f"{reader.name}: an embedding narrower than the layers, as in OPT-350M, cannot be modelled")
    if 0 in reader.numbers("attn_type_list"):
        raise InputError(f"{reader.name}: lightning attention cannot be modelled (model_type {reader.model_type!r})")
    architectures = list_of(str, "names", reader.raw, "architectures", reader.name)
    generative = not architectures or any(item.endswith(_GENERATIVE) for item in architectures)
    if reader.raw.get("is_encoder_decoder") or not generative:
        raise InputError(f"{reader.name} ({', '.join(architectures)}) is not a decoder-only language model")
    _, activation = reader.first("hidden_act")
    known = reader.model_type in ARCHITECTURES or activation is None or activation in _GATED_ACTIVATIONS
    if not known:
        raise InputError(
            f"{reader.name}: model_type {reader.model_type!r} is not known, and {activation!r} does not say how many "
            "matrices its feed-forward has",
            f"unknown types are read as Llama is, with one of {', '.join(_GATED_ACTIVATIONS)}",
        )


def _refuse_unknown_shapes(reader: _Reader) -> None:
    """Raise InputError where an unknown `model_type` has keys about its layers that nothing read."""
    unread = [
        key
        for key, value in reader.raw.items()
        if key not in reader.looked_up | HARMLESS_KEYS | UNREADABLE.keys()
        and any(word in key for word in SHAPE_WORDS)
        and (isinstance(value, list | dict) or type(value) is int)
        and value not in (0, 1, [], {})
    ]
    if reader.model_type not in ARCHITECTURES and unread:
        raise InputError(
            f"{reader.name}: model_type {reader.model_type!r} is not known, and its {', '.join(sorted(unread))} "
            "may announce layers that cannot be modelled",
            "remove the keys from a copy of config.json to have it read as Llama is",
        )


def _num_norms(reader: _Reader, architecture: Architecture) -> int:
    """Return the norms of a layer; Falcon's have one where attention and feed-forward run side by side."""
    if "parallel_attn" not in reader.raw:
        return architecture.num_norms
    side_by_side = reader.flag("parallel_attn") and not reader.flag("new_decoder_architecture")
    return reader.count("num_ln_in_parallel_attn", default=1 if side_by_side else 2)


def _attentions(reader: _Reader, architecture: Architecture) -> list[Attention]:
    """Return the attention of every layer, in order."""
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
    """Return `full_attention`, `sliding_attention` or `linear_attention` for every layer."""
    types = _named_layers(reader, "layer_types", _LAYER_TYPES)
    if types:
        return ["sliding_attention" if layer == "chunked_attention" else layer for layer in types]
    neo = _named_layers(reader, "attention_layers", ("global", "local"))
    if neo:
        return ["sliding_attention" if layer == "local" else "full_attention" for layer in neo]
    is_hybrid = reader.raw.get("linear_num_value_heads") is not None
    every = reader.count("full_attention_interval", default=_QWEN3_NEXT_INTERVAL if is_hybrid else 1)
    return [_LINEAR if (index + 1) % every else "full_attention" for index in range(reader.num_layers)]


def _named_layers(reader: _Reader, key: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the names that a config gives to its layers under `key`; empty where it gives none."""
    reader.looked_up.add(key)
    names = reader.raw.get(key)
    if names is None:
        return []
    names = reader.per_layer(key, names if isinstance(names, list) else [])
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None:
        raise InputError(
            f"{reader.name}: {key} has {unknown!r}, which cannot be modelled; allowed: {', '.join(allowed)}"
        )
    return names


def _windows(reader: _Reader, architecture: Architecture, types: list[str]) -> list[int | None]:
    """Return the sliding window of every layer in tokens; None where it attends to everything."""
    window = reader.count("sliding_window", default=0, minimum=0)
    if (
        not window
        or window >= reader.count("max_position_embeddings")
        or not reader.flag("use_sliding_window", default=True)
    ):
        return [None] * len(types)
    if "layer_types" in reader.raw or "attention_layers" in reader.raw:
        return [window if layer == "sliding_attention" else None for layer in types]
    if reader.flag("use_sliding_window"):
        first = reader.count("max_window_layers", default=0, minimum=0)
        return [window if index >= first else None for index in range(len(types))]
    every = reader.count(
        "sliding_window_pattern", "global_attn_every_n_layers", default=architecture.full_attention_every or 0
    )
    return [None if every and (index + 1) % every == 0 else window for index in range(len(types))]


def _has_window(attention: Attention) -> bool:
    return isinstance(attention, GroupedQueryAttention) and attention.window_tokens is not None


def _grouped_query(reader: _Reader, architecture: Architecture, window: int | None) -> GroupedQueryAttention:
    num_heads = reader.count("num_attention_heads")
    # Falcon's newer blocks group queries although they say multi_query.
    shares_one = reader.flag("multi_query") and not reader.flag("new_decoder_architecture")
    num_kv_heads = 1 if shares_one else reader.count("num_key_value_heads", default=num_heads)
    reader.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    return GroupedQueryAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(reader, num_heads),
        window_tokens=window,
        qkv_bias=reader.rule(architecture.qkv_bias),
        output_bias=reader.rule(architecture.output_bias),
        qk_norm=reader.rule(architecture.qk_norm),
        qk_norm_over_heads=reader.raw.get("qk_norm_type") == "per_layer",
        output_gate=reader.rule(architecture.output_gate),
        sinks=architecture.sinks,
    )


def _head_dim(reader: _Reader, num_heads: int) -> int:
    head_dim = reader.count("head_dim", default=0)
    hidden_size = reader.count("hidden_size")
    if not head_dim:
        reader.check_multiple("without head_dim, hidden_size", hidden_size, "num_attention_heads", num_heads)
    return head_dim or hidden_size // num_heads


def _latent(reader: _Reader) -> LatentAttention:
    return LatentAttention(
        num_heads=reader.count("num_attention_heads"),
        q_lora_rank=reader.count("q_lora_rank", default=0) or None,
        kv_lora_rank=reader.count("kv_lora_rank"),
        qk_nope_head_dim=reader.count("qk_nope_head_dim"),
        qk_rope_head_dim=reader.count("qk_rope_head_dim"),
        v_head_dim=reader.count("v_head_dim"),
        indexer=None if reader.raw.get("index_topk") is None else _indexer(reader),
    )


def _indexer(reader: _Reader) -> Indexer:
    if reader.count("q_lora_rank", default=0, minimum=0) == 0:
        raise InputError(f"{reader.name}: an indexer without compressed queries (q_lora_rank) cannot be modelled")
    return Indexer(
        num_heads=reader.count("index_n_heads"),
        head_dim=reader.count("index_head_dim"),
        top_k=reader.count("index_topk"),
    )


def _gated_delta(reader: _Reader) -> GatedDeltaAttention:
    num_key_heads = reader.count("linear_num_key_heads")
    num_value_heads = reader.count("linear_num_value_heads")
    reader.check_multiple("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
    return GatedDeltaAttention(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=reader.count("linear_key_head_dim"),
        value_head_dim=reader.count("linear_value_head_dim"),
        conv_kernel_size=reader.count("linear_conv_kernel_dim"),
    )


def _feed_forwards(reader: _Reader, architecture: Architecture) -> list[FeedForward]:
    """Return the feed-forward of every layer, in order."""
    sparse = _sparse_layers(reader)
    experts = _experts(reader, architecture) if any(sparse) else None
    dense = None if all(sparse) else _dense(reader, architecture)
    return [part for is_sparse in sparse if (part := experts if is_sparse else dense)]


def _sparse_layers(reader: _Reader) -> list[bool]:
    """Return whether each layer is a mixture of experts."""
    if not reader.count("num_local_experts", default=0, minimum=0):
        return [False] * reader.num_layers
    named = _named_layers(reader, "mlp_layer_types", ("dense", "sparse"))
    if named:
        return [layer == "sparse" for layer in named]
    if reader.raw.get("moe_layers"):
        listed = set(reader.numbers("moe_layers"))
        return [index in listed for index in range(reader.num_layers)]
    first = reader.count("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0, minimum=0)
    # ERNIE counts from the back with -1.
    last = reader.count("moe_layer_end_index", default=-1, minimum=-1) % reader.num_layers
    step = reader.count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    dense = set(reader.numbers("mlp_only_layers"))
    frequency = _moe_layer_frequency(reader)
    return [
        first <= index <= last and frequency[index] and index not in dense and (index + 1) % step == 0
        for index in range(reader.num_layers)
    ]


def _moe_layer_frequency(reader: _Reader) -> list[bool]:
    """Return whether DeepSeek's `moe_layer_freq`, a period or a list, lets each layer have experts."""
    if isinstance(reader.raw.get("moe_layer_freq"), list):
        frequency = reader.per_layer("moe_layer_freq", reader.numbers("moe_layer_freq"))
        return [bool(item) for item in frequency]
    every = reader.count("moe_layer_freq", default=1)
    return [index % every == 0 for index in range(reader.num_layers)]


def _dense(reader: _Reader, architecture: Architecture) -> DenseFeedForward:
    multiple = reader.count("expansion_ratio", default=architecture.width_multiple or 0, minimum=0)
    width = reader.count(
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "n_inner",
        default=multiple * reader.count("hidden_size") or None,
    )
    # Qwen 1 publishes the sum of its gate and up projections' widths.
    if reader.model_type == "qwen":
        width //= 2
    return DenseFeedForward(
        intermediate_size=width, gated=architecture.gated, bias=reader.rule(architecture.feed_forward_bias)
    )


def _experts(reader: _Reader, architecture: Architecture) -> ExpertsFeedForward:
    num_experts = reader.count("num_local_experts")
    chosen = reader.count("num_experts_per_tok")
    if chosen > num_experts:
        raise InputError(f"{reader.name}: each token uses {chosen} experts, and there are {num_experts}")
    width = reader.count("moe_intermediate_size", "intermediate_size")
    shared = reader.count("shared_expert_intermediate_size", default=0, minimum=0)
    num_shared = reader.count("n_shared_experts", default=architecture.shared_experts, minimum=0)
    return ExpertsFeedForward(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=width,
        shared_intermediate_size=shared or num_shared * width,
        shared_gate=architecture.shared_gate and shared > 0,
        gated=architecture.gated,
        bias=reader.rule(architecture.feed_forward_bias),
        router_bias=reader.rule(architecture.router_bias),
        fp32_router=architecture.fp32_router,
    )
