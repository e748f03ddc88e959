"""Model shapes from the `config.json` that is published beside a model's weights on Hugging Face.

A config leaves out what the model's code fixes (biases, norms, which layers slide); `architectures.yaml` has those
facts. A `model_type` that is unknown there is refused: nothing says how its layers differ from others.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Literal

from msgspec.structs import replace

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.model.architectures import KNOWN, Architecture, language_model, quantization_of
from windtunnel.model.config_reader import AskedKeys, ConfigReader, number_of
from windtunnel.model.precision import Format, Precision
from windtunnel.model.quantization import Modules, Names, list_of, precision_from_config
from windtunnel.model.shape import (
    Attention,
    FeedForward,
    LayerGroup,
    LayerInputs,
    ModelSpec,
    NgramTables,
    attention_kinds,
    feed_forward_kinds,
)
from windtunnel.model.towers import read_tower, tower_parameters

_FULL, _LINEAR, _COUNT = "full_attention", "linear_attention", "num_hidden_layers"
_QWEN3_NEXT_INTERVAL = 4
"""`full_attention_interval` where a Gated DeltaNet hybrid does not give it (transformers' Qwen3NextConfig)."""
ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")
"""Keys of the rotated share of a head."""
_BLOCK_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern` (`configuration_nemotron_h.py` of nvidia/Nemotron-H-56B-Base-8K)."""
_DRAFTER = "dspark_"
"""Beginning of keys of layers that draft (DSpark)."""
_MULTIMODAL = ("ForConditionalGeneration", "ForVision2Seq")
_SCORING, _MASKED = "ForSequenceClassification", "ForMaskedLM"
_GENERATIVE = ("ForCausalLM", "LMHeadModel", *_MULTIMODAL)
_DECIDING = re.compile(KNOWN.deciding.replace(" ", ""))

_LEFT_OUT, _WIDTHS_OF_BLOCKS = "no_op", {"attention": "n_heads_in_group", "ffn": "ffn_mult"}
"""Keys of the two parts of an entry of `block_configs`."""
_BLOCK_WIDTH = 256
"""Widths of feed-forwards are rounded up to multiples of it (`configuration_decilm.py`)."""

_CROSS = "cross_attention_layers"
"""Key of the layers that attend to images alone (Llama 3.2 Vision)."""

_OBJECTS = ("attn_config", "ffn_config")
"""Objects with settings of attention (MPT, DBRX) and of experts (DBRX)."""

LIKE = "windtunnel_like"
"""Key of a config.json whose `model_type` is not known: the one whose layers it has (`catalog add --like`)."""
QUANTISATION = "hf_quant_config"
"""Key under which a config.json of the user's catalog holds the `hf_quant_config.json` that was beside it."""

Layer = tuple[Attention | None, FeedForward | None]


def model_from_config(config: Mapping[str, Any], name: str, quant_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the `ModelSpec` that a Hugging Face `config.json` describes. InputError where a needed key is missing, or
    has the wrong type or an impossible value; or the `model_type` is not known or has layers that `ModelSpec` cannot
    express.

    Args:
        config: the parsed config.json; of a multimodal model the language model (`text_config`) is read.
        name: what to call the model, also in errors.
        quant_config: the parsed `hf_quant_config.json` of a ModelOpt checkpoint; it wins over `quantization_config`.
    """
    return read_config(config, name, quant_config)[0]


def read_config(
    config: Mapping[str, Any], name: str, quant_config: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, list[str]]:
    """Return what `model_from_config` does, and the keys of the language model that nothing looked at, in their order.
    InputError as `model_from_config` does."""
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: config.json holds {type(config).__name__}; an object is needed")
    quant_config = config.get(QUANTISATION) if quant_config is None else quant_config
    if isinstance(thinker := config.get("thinker_config"), Mapping):
        config = {**config, **thinker}  # Qwen's Omni models: it writes the text that a second model speaks
    reader = _reader(config, name)
    architecture = reader.architecture
    num_norms = _num_norms(reader)
    layers, skipped = _without_cross_attention(reader, _layers(reader))
    modules = [_modules(reader, attention, feed_forward) for attention, feed_forward in layers]
    max_context_tokens, learned = _positions(reader)
    if architecture is KNOWN.architectures.get(reader.model_type):  # an installed kind answers for all its keys
        _refuse_unread(reader)
    precision, mixed_bits = _precision(reader, quant_config, modules)
    own_type = str(language_model(config).get("model_type") or config.get("model_type") or "none")
    model = ModelSpec(
        name=name,
        hidden_size=reader.count("hidden_size"),
        vocab_size=reader.count("vocab_size"),
        max_context_tokens=max_context_tokens,
        layers=tuple(
            LayerGroup(
                num_layers=num,
                attention=attention,
                feed_forward=feed_forward,
                num_norms=num_norms if attention and feed_forward else 1,
            )
            for (attention, feed_forward), num in Counter(layers).items()
        ),
        tie_word_embeddings=architecture.encoder
        or reader.flag("tie_embedding", "tie_word_embeddings", default=architecture.tied),
        norm_bias=architecture.norm_bias,
        lm_head_bias=reader.rule(architecture.lm_head_bias),
        learned_positions=learned,
        head=_head(reader),
        architecture=reader.model_type,
        precision=precision,
        mixed_bits=tuple(mixed_bits.items()),
        left_out=_left_out(config, reader),
        tower_parameters=tower_parameters(config) + skipped,
        vision=None if skipped else read_tower(config),
        prediction_layers=_prediction_layers(reader),
        residual_streams=reader.count("hc_mult", default=1),
        earlier_blocks=_earlier_blocks(reader),
        norm_gate_rank=reader.count("gated_norm_rank", default=0, minimum=0),
        layer_inputs=_layer_inputs(reader),
        ngram_tables=_ngram_tables(reader),
        rotary_values=_rotary_values(reader, [part for part, _ in layers if part]),
        unknown_type=own_type if LIKE in config else "",
    )
    assert isinstance(reader.raw, AskedKeys)
    asked = reader.asked | reader.raw.asked | {"model_type", *_OBJECTS}
    return model, [key for key in language_model(config) if key not in asked and key not in (LIKE, QUANTISATION)]


def _positions(reader: ConfigReader) -> tuple[int, int]:
    """Return the longest context, and the rows of tables of learned positions and of kinds of tokens."""
    architecture, max_position = reader.architecture, reader.max_positions
    longest = _stretched(reader)
    if architecture.position_rows is not None or reader.raw.get("max_trained_positions") is not None:
        longest = min(longest, reader.count("max_trained_positions", "model_max_length", default=max_position))
    learned = 0 if architecture.position_rows is None else max_position + architecture.position_rows
    if architecture.encoder:
        learned += reader.count("type_vocab_size", default=0, minimum=0)
    return max(longest - architecture.unused_positions, 1), learned


def _refuse_unread(reader: ConfigReader) -> None:
    """Raise InputError for a key that by its name decides the shape of attention or experts, and that nothing reads."""
    known = reader.asked.union(KNOWN.aliases, *KNOWN.aliases.values())
    for key, value in reader.raw.items():
        if value and key not in known and _DECIDING.search(str(key)) and not str(key).startswith(_DRAFTER):
            raise InputError(
                f"{reader.name}: {key} is {value!r:.60}; this key is not known and may shape attention or experts",
                "if it does not change the layers, leave it out of a copy of config.json",
            )


def _stretched(reader: ConfigReader) -> int:
    """Return the longest context, as far as rotations are stretched to (vLLM 0.19 `config/model.py`,
    `_get_and_verify_max_len`): where a kind of rotation is not named here, its factor is in the length already."""
    given, longest = reader.raw.get("rope_scaling") or reader.raw.get("rope_parameters"), reader.max_positions
    scaling = given if isinstance(given, Mapping) else {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("yarn", "linear", "dynamic") or "gemma3" in str(reader.model_type):
        return longest
    factor = number_of("factor", scaling.get("factor") or 1, 10_000, reader.name)
    first = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(int(number_of("original_max_position_embeddings", first or longest, 2**40, reader.name) * factor), 1)


def _ngram_tables(reader: ConfigReader) -> NgramTables | None:
    """Return the tables that `engram_layer_ids` look up: for n-grams of 2 to `engram_max_ngram_size` tokens each head
    has its row."""
    layers = reader.numbers("engram_layer_ids")
    if not layers:
        return None
    return NgramTables(
        num_layers=len(layers),
        num_rows=sum(reader.numbers("engram_num_embeddings")),
        num_columns=reader.count("engram_n_heads") * (reader.count("engram_max_ngram_size", minimum=2) - 1),
        width=reader.count("engram_head_dim"),
    )


def _prediction_layers(reader: ConfigReader) -> int | None:
    if reader.raw.get(f"{_DRAFTER}block_size"):
        return 0  # DSpark drafts a block of tokens in one pass of other layers: not modelled
    given, known = reader.first("num_nextn_predict_layers"), reader.architecture.prediction_layers
    return known if given[1] is None else reader.count("num_nextn_predict_layers", minimum=0)


def _head(reader: ConfigReader) -> Literal["pooler", "score"] | None:
    """Return what an encoder's checkpoint has after its layers, by the name of its class."""
    if not reader.architecture.encoder:
        return None
    if any(name.endswith(_SCORING) for name in list_of(str, "names", reader.raw, "architectures", reader.name)):
        return "score"
    return "pooler" if reader.architecture.pooler else None


def _earlier_blocks(reader: ConfigReader) -> float:
    """Return the mean number of blocks before a layer, its own first layers included (vLLM 0.33
    `kimi_k3/nvidia/model.py`, `prev_valid_blocks`)."""
    size = reader.count("attn_res_block_size", default=0, minimum=0)
    return sum(-(-index // size) for index in range(reader.num_layers)) / reader.num_layers if size else 0.0


def _layer_inputs(reader: ConfigReader) -> LayerInputs | None:
    """Return what each layer adds to its hidden state beside attention and feed-forward (Gemma 3n and 4)."""
    size = reader.count("hidden_size_per_layer_input", default=0, minimum=0)
    if not size:
        return None
    return LayerInputs(
        size=size,
        vocab_size=reader.count("vocab_size_per_layer_input", "vocab_size"),
        num_states=reader.count("altup_num_inputs", default=1),
        laurel_rank=reader.count("laurel_rank", default=0, minimum=0),
    )


def _rotary_values(reader: ConfigReader, attentions: list[Attention]) -> int:
    """Count the cosines and sines of all positions (vLLM 0.19 `rotary_embedding/`).

    A linear scaling lengthens its table by its factor; layers with a window have a second, unscaled one where they have
    a base of their own. transformers 5 describes a table for each type of layers; a proportional one is as wide as
    heads (Gemma 4; vLLM 0.24 `gemma4_rope.py`).
    """
    scaling = reader.raw.get("rope_scaling") or reader.raw.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    typed = {key: part for key, part in scaling.items() if str(key).endswith("attention") and isinstance(part, Mapping)}
    values = 0
    for key, part in (typed or {"": scaling}).items():
        with_window = (True, False) if not typed else (key == "sliding_attention",)
        widths = (each.rotary_size for each in attentions if (each.window_tokens is not None) in with_window)
        types, given = (part.get("rope_type"), part.get("type")), {**part, **reader.raw}
        factor = number_of("factor", part.get("factor"), 10_000, reader.name) if "linear" in types else 1
        shares = (number_of(name, given[name], 1, reader.name) for name in ROTARY_SHARES if given.get(name) is not None)
        share = 1 if "proportional" in types or "qk_rope_head_dim" in given else next(shares, 1)
        rotated = reader.count("rotary_dim", default=int(max(widths, default=0) * share), minimum=0)
        tables = factor + ("rope_local_base_freq" in reader.raw and not typed)
        values += int(reader.max_positions * rotated * tables)
    return values


def _precision(
    reader: ConfigReader, quant_config: Mapping[str, Any] | None, modules: list[Modules]
) -> tuple[Precision, dict[str, float]]:
    """Return the formats of a checkpoint, and the mean bits of parts whose layers differ; DeepSeek-V4 says apart that
    its experts have four bits (vLLM 0.24 `models/deepseek_v4/quant_config.py`)."""
    quantised = reader.raw.get("quantization_config")
    precision, mixed_bits = precision_from_config(quantised, quant_config, modules, reader.name)
    said = reader.raw.get("expert_dtype") or (quantised.get("expert_dtype") if isinstance(quantised, Mapping) else None)
    experts = precision.experts or (Format.MXFP4 if said == "fp4" else None)
    kv_cache = reader.architecture.kv_cache or precision.kv_cache
    return replace(precision, experts=experts, kv_cache=kv_cache), mixed_bits


def _modules(reader: ConfigReader, attention: Attention | None, feed_forward: FeedForward | None) -> Modules:
    """Return the names of a layer's modules in checkpoints."""
    parts: list[tuple[Names, ...]] = [attention.modules if attention else (), (), ()]
    if feed_forward is not None:
        shares = getattr(feed_forward, "shared_intermediate_size", 0) > 0
        parts[1:] = feed_forward.shared_modules if shares else feed_forward.modules, feed_forward.expert_modules
    others = reader.architecture.module_names
    mixing, linear, experts = (
        tuple(tuple(others[name] for name in names if name in others) or names for names in part) for part in parts
    )
    return mixing, linear, experts


class UnknownModelTypeError(InputError):
    """A config.json of a `model_type` that cannot be read."""


def known_architectures() -> dict[str, Architecture]:
    """Return `model_type` -> architecture of all that can be read, those of installed kinds of layers too. InputError
    where one of these names a shipped type."""
    known = dict(KNOWN.architectures)
    for kind in (*attention_kinds(), *feed_forward_kinds()):
        if taken := sorted(kind.model_types.keys() & KNOWN.architectures.keys()):
            raise InputError(f"{kind.__name__} brings the model_type {taken[0]!r}, which ships", "give it another name")
        known |= kind.model_types
    return known


def _left_out(config: Mapping[str, Any], reader: ConfigReader) -> tuple[str, ...]:
    """Return the towers of a multimodal model, by their keys or else by the name of its class."""
    towers = tuple(
        part for part, keys in KNOWN.towers.items() if any(isinstance(config.get(key), Mapping) for key in keys)
    )
    classes = list_of(str, "names", reader.raw, "architectures", reader.name)
    # transformers calls text models ForCausalLM; ChatGLM, an older one, is read as text too.
    is_multimodal = reader.model_type != "chatglm" and any(name.endswith(_MULTIMODAL) for name in classes)
    towers += ("attention to images",) * bool(reader.raw.get(_CROSS))
    return towers or (("vision or audio tower",) if is_multimodal else ())


def _reader(config: Mapping[str, Any], name: str) -> ConfigReader:
    """Return the keys of the language model in `config`, then its outer keys, then the defaults of its class."""
    text = language_model(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "").removesuffix("_text")
    outer = {key: config[key] for key in ("tie_word_embeddings", "architectures") if key in config}
    parts = [part for part in (*map(text.get, _OBJECTS), text) if isinstance(part, Mapping)]
    given = {key: value for part in parts for key, value in part.items() if value is not None}
    defaults, quantised = KNOWN.class_defaults.get(model_type, {}), {"quantization_config": quantization_of(config)}
    if text is not config:
        defaults = {**KNOWN.nested_defaults.get(model_type, {}), **defaults}
    raw = AskedKeys(defaults | outer | given | quantised)
    known = known_architectures()
    if (like := config.get(LIKE)) is not None:
        check_known(like, known, f"{name}: {LIKE} is {like!r}, which is no model_type that is known")
        if model_type in known:
            raise InputError(
                f"{name}: model_type {model_type!r} is known, so it is read as itself", f"leave {LIKE} out"
            )
        model_type = like
    names = list_of(str, "names", raw, "architectures", name)
    # A class around a language model of a known type, such as NemotronH_Nano_Omni_Reasoning_V3, says nothing of it.
    is_inner = text is not config and not text.get("architectures") and not any(map(_makes_vectors, names))
    _refuse_other_models(raw, name, model_type, is_like=like is not None or is_inner)
    if model_type not in known:
        missing = f"model_type {model_type!r} is not known" if model_type else "config.json has no model_type"
        hint = "windtunnel catalog add CONFIG --like MODEL reads it as a model with the same layers"
        raise UnknownModelTypeError(
            f"{name}: {missing}, so that nothing says which biases, norms and windows its layers have",
            did_you_mean(model_type, known, hint),
        )
    reader = ConfigReader(raw, name, model_type, known[model_type])
    hidden_size = reader.count("hidden_size")
    if reader.count("word_embed_proj_dim", default=hidden_size) != hidden_size:
        raise InputError(f"{name}: an embedding narrower than the layers, as in OPT-350M, cannot be modelled")
    if not reader.architecture.lightning and 0 in reader.numbers("attn_type_list"):
        raise InputError(f"{name}: lightning attention cannot be modelled (model_type {model_type!r})")
    return reader


def _makes_vectors(class_name: str) -> bool:
    return class_name.endswith(("Model", _SCORING))


def _refuse_other_models(raw: Mapping[str, Any], name: str, model_type: str, is_like: bool) -> None:
    """Raise InputError for a config that would be read wrongly: layers that cannot be expressed, an encoder. The class
    of a model whose type is not known, or that is read like another, says nothing."""
    known = known_architectures().get(model_type)
    answered = {"block_configs": known.searched, "state_size": known.only} if known is not None else {}
    unreadable = [key for key in KNOWN.unreadable if raw.get(key) and not answered.get(key)]
    layers = KNOWN.unreadable[unreadable[0]] if unreadable else None
    layers = layers or KNOWN.unreadable_types.get(model_type)
    # An installed kind of layer that names the model type answers for all its keys.
    if layers and known is KNOWN.architectures.get(model_type):
        raise InputError(f"{name}: {layers} cannot be modelled (model_type {model_type!r})")
    architectures = list_of(str, "names", raw, "architectures", name)
    if known is not None and known.encoder:
        positions = raw.get("position_embedding_type") or "absolute"
        # ModernBERT's configs say absolute too, although its code rotates.
        is_odd = positions not in (("absolute",) if known.position_rows is not None else ("absolute", "rope"))
        if raw.get("is_decoder") or is_odd:
            made = "as a decoder" if raw.get("is_decoder") else f"with {positions!r} positions"
            raise InputError(f"{name}: an encoder of model_type {model_type!r} {made} cannot be modelled")
    later = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}
    both_ways = next((f"{key} is {raw[key]!r}" for key, values in later.items() if raw.get(key) in values), None)
    # Gemma 4's "vision" is about the tokens of an image alone.
    if both_ways and not (known is not None and known.encoder):
        raise InputError(f"{name}: a decoder whose tokens see later ones ({both_ways}) cannot be modelled")
    vectors, is_encoder = ("Model", _SCORING), known is not None and known.encoder
    endings = vectors if is_encoder else (*_GENERATIVE, *(known.text_classes if known else ()))
    is_known = not architectures or known is None or is_like or any(item.endswith(endings) for item in architectures)
    if raw.get("is_encoder_decoder") or not is_known:
        what = "is neither a decoder-only language model nor an encoder for vectors or scores"
        readable = {_MASKED: "Model"} if is_encoder else dict.fromkeys(vectors, "ForCausalLM")
        ending = next((end for end in readable if architectures and architectures[0].endswith(end)), None)
        if known is None or ending is None or raw.get("is_encoder_decoder"):
            raise InputError(f"{name} ({', '.join(architectures)}) {what}")
        other = f'"architectures": ["{architectures[0].removesuffix(ending)}{readable[ending]}"]'
        raise InputError(
            f"{name} ({', '.join(architectures)}) {what if is_encoder else 'is a decoder without an output layer'}",
            f"write {other} into a copy of config.json, and take --task embed{'' if is_encoder else ' or rerank'}",
        )


def _num_norms(reader: ConfigReader) -> int:
    """Return the norms of a layer; Falcon's have one where attention and feed-forward run side by side."""
    if "parallel_attn" not in reader.raw:
        # Gemma 4 norms before and after its experts too, and the output of the dense part beside them.
        return reader.architecture.num_norms + 3 * reader.flag("enable_moe_block")
    side_by_side = reader.flag("parallel_attn") and not reader.flag("new_decoder_architecture")
    return reader.count("num_ln_in_parallel_attn", default=1 if side_by_side else 2)


def _layers(reader: ConfigReader) -> list[Layer]:
    """Return attention and feed-forward of every layer, in order; blocks of a hybrid have one of the two."""
    if reader.architecture.searched:
        return list(filter(any, _searched_layers(reader)))
    kinds: dict[str, Any] = {
        name: kind for kind in (*attention_kinds(), *feed_forward_kinds()) for name in kind.layer_types
    }
    letters = reader.named_layers("hybrid_override_pattern", tuple(_BLOCK_LETTERS))
    named = reader.named_layers("layers_block_type", tuple(kinds)) if not letters else []
    if not named and reader.architecture.only:
        named = [reader.architecture.only] * reader.num_layers
    others = _BLOCK_LETTERS | reader.architecture.block_names
    blocks = [(index, kinds[others.get(name, name)], name) for index, name in enumerate(letters or named)]
    if not blocks:
        return list(zip(_attentions(reader), _feed_forwards(reader), strict=True))
    return [
        (kind.read(reader, index, name), None) if issubclass(kind, Attention) else (None, kind.read(reader))
        for index, kind, name in blocks
    ]


def _without_cross_attention(reader: ConfigReader, layers: list[Layer]) -> tuple[list[Layer], int]:
    """Return the layers that prompts without images pass, and the parameters of the others, which engines load and then
    skip whole (`modeling_mllama.py`, `MllamaTextModel.forward`)."""
    skipped, hidden_size = set(reader.numbers(_CROSS)), reader.count("hidden_size")
    parts = [part for index, part in enumerate(layers) if index in skipped]
    size = sum(attention.num_parameters(hidden_size) for attention, _ in parts if attention)
    size += sum(
        feed_forward.parameters(hidden_size).total + 2 * hidden_size for _, feed_forward in parts if feed_forward
    )
    return [part for index, part in enumerate(layers) if index not in skipped], size


def _searched_layers(reader: ConfigReader) -> Iterator[Layer]:
    """Yield the parts of every layer whose sizes a search chose one by one, or left out (`configuration_decilm.py` and
    `block_config.py` of nvidia/Llama-3_3-Nemotron-Super-49B-v1)."""
    attention = next(kind for kind in attention_kinds() if _FULL in kind.layer_types)
    dense = next(kind for kind in feed_forward_kinds() if "mlp" in kind.layer_types)
    blocks = list_of(dict, "objects", reader.raw, "block_configs", reader.name)
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    for index, block in enumerate(reader.per_layer("block_configs", blocks)):
        parts = {key: reader.of({**reader.raw, **block}).inner(key) for key in _WIDTHS_OF_BLOCKS}
        for key, part in parts.items():
            known = (_LEFT_OUT, _WIDTHS_OF_BLOCKS[key], "num_hidden_layers")
            if odd := next((name for name, value in part.raw.items() if value and name not in known), None):
                raise InputError(
                    f"{reader.name}: {odd} of layer {index} is {part.raw[odd]!r}, which cannot be modelled"
                )
        sizes: dict[str, Any] = {}
        if attends := not parts["attention"].flag(_LEFT_OUT):
            group = parts["attention"].count("n_heads_in_group")
            reader.check_multiple("num_attention_heads", num_heads, "n_heads_in_group", group)
            sizes["num_key_value_heads"] = num_heads // group
        if feeds := not parts["ffn"].flag(_LEFT_OUT):
            multiple = number_of("ffn_mult", parts["ffn"].raw.get("ffn_mult"), 1_000, reader.name)
            sizes["intermediate_size"] = _BLOCK_WIDTH * ceil(int(2 * multiple * hidden_size / 3) / _BLOCK_WIDTH)
        layer = reader.of({**reader.raw, **sizes})
        yield attention.read(layer, index, _FULL) if attends else None, dense.read(layer) if feeds else None


def _attentions(reader: ConfigReader) -> Iterator[Attention]:
    """Yield the attention of every layer, in order."""
    kinds, readers = attention_kinds(), _own_readers(reader)
    unnamed = [next((kind for kind in kinds if kind.reads(reader, index)), None) for index in range(reader.num_layers)]
    by_name = {name: kind for kind in kinds for name in kind.layer_types}
    names = _layer_types(reader, tuple(by_name)) if None in unnamed else [""] * reader.num_layers
    for index, (kind, name) in enumerate(zip(unnamed, names, strict=True)):
        if kind and reader.layer_type(index) == _LINEAR and not kind.is_recurrent:
            raise InputError(f"{reader.name}: nothing says what the linear attention of layer {index} is")
        yield (kind or by_name[name]).read(readers[index], index, name)


def _own_readers(reader: ConfigReader) -> list[ConfigReader]:
    """Return a reader for each layer: with values of its own from `per_layer_config` (transformers 5.24), by the number
    or the type of the layer, and from lists; feed-forwards of layers without keys may be twice as wide (Gemma 4)."""
    lists = {
        key: reader.per_layer(name, values)
        for name, key in KNOWN.per_layer.items()
        if isinstance(values := reader.raw.get(name), list) and (name != key or values != values[:1] * len(values))
    }
    given = reader.inner("per_layer_config") if reader.raw.get("per_layer_config") else reader.of({})
    parts = {str(name).lstrip("0") or "0": given.inner(name).raw for name in given.raw if name != _COUNT}
    is_wide, readers = reader.flag("use_double_wide_mlp"), []
    for index in range(reader.num_layers):
        own = {key: values[index] for key, values in lists.items()}
        own |= {**parts.get(reader.layer_type(index), {}), **parts.get(str(index), {})}
        if is_wide and reader.shares_kv(index):
            own["intermediate_size"] = 2 * reader.count("intermediate_size")
        readers.append(reader.of({**reader.raw, **own}) if own else reader)
    return readers


def _layer_types(reader: ConfigReader, known: tuple[str, ...]) -> list[str]:
    """Return the name of every layer's attention."""
    others = reader.architecture.block_names
    for key in ("layer_types", "attention_layers"):
        if types := reader.named_layers(key, (*known, *others)):
            return [others.get(name, name) for name in types]
    pattern = reader.numbers("hybrid_layer_pattern")
    if pattern:
        return [
            "sliding_attention" if slides else _FULL for slides in reader.per_layer("hybrid_layer_pattern", pattern)
        ]
    is_hybrid = reader.raw.get("linear_num_value_heads") is not None
    every = reader.count("full_attention_interval", default=_QWEN3_NEXT_INTERVAL if is_hybrid else 1)
    return [_LINEAR if (index + 1) % every else _FULL for index in range(reader.num_layers)]


def _feed_forwards(reader: ConfigReader) -> list[FeedForward]:
    """Return the feed-forward of every layer, in order: dense where no other kind has the layer."""
    *others, dense = sorted(feed_forward_kinds(), key=lambda kind: "mlp" in kind.layer_types)
    chosen, readers = [dense] * reader.num_layers, _own_readers(reader)
    for kind in others:
        chosen = [kind if has else before for has, before in zip(kind.layers(reader), chosen, strict=True)]
    pairs = {(kind, id(own)): (kind, own) for kind, own in zip(chosen, readers, strict=True)}
    read = {key: kind.read(own) for key, (kind, own) in pairs.items()}
    return [read[kind, id(own)] for kind, own in zip(chosen, readers, strict=True)]
