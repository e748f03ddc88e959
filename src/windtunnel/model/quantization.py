"""Number formats of a published checkpoint, from its `quantization_config` or `hf_quant_config.json`.

A checkpoint names a format and a list of modules that it leaves alone, or a format for each module. `Precision` has one
format for each class of modules: the one that most layers have. Where the modules of one class differ in a layer, the
widest format counts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.errors import InputError
from windtunnel.model.precision import BITS, Format, Precision
from windtunnel.schema import decode, read_yaml

_HINT = "remove its quantization_config and choose the formats yourself"

_MODELOPT = decode(read_yaml(Path(__file__).with_name("modelopt.yaml")), dict[str, Format])

PARTS = ("attention_format", "attention_output_format", "weights", "experts_format")
"""Parts of layers, by the attribute of `Precision` that has their format; "weights" are dense feed-forwards."""

Names = tuple[str, ...]
"""Names that checkpoints give to one module, below `layers.N.`."""


Modules = tuple[tuple[Names, ...], tuple[Names, ...], tuple[Names, ...]]
"""Modules of one layer: of its attention, the output projection last, of its dense feed-forward or shared experts, of
its routed experts."""


def precision_from_config(
    quantization_config: Any, hf_quant_config: Mapping[str, Any] | None, layers: Sequence[Modules], model: str
) -> tuple[Precision, dict[str, float]]:
    """Return the formats of a checkpoint, and the mean bits of a weight in the parts whose layers differ in format.
    InputError for a format that `Format` does not have, or a config that cannot be understood.

    Args:
        quantization_config: that key of config.json; None where it has none.
        hf_quant_config: the content of `hf_quant_config.json`, which wins.
        layers: the modules of every layer, in order.
        model: the model's name, for errors.
    """
    scheme = _scheme(quantization_config, hf_quant_config, model)
    if scheme is None:
        return Precision(), {}
    parts = zip(
        *((attention[:-1], attention[-1:], linear, experts) for attention, linear, experts in layers), strict=True
    )
    votes = [_votes(scheme, enumerate(modules)) for modules in parts]
    attention, output, linear, experts = (max(each, key=each.__getitem__, default=None) for each in votes)
    weights = linear or attention or Format.BF16
    # A group may list the output layer by name; methods for all `Linear` modules leave it alone.
    names_lm_head = any(not modules.everything and "lm_head" in modules for modules, _ in scheme.groups)
    precision = Precision(
        int4_bits=scheme.stored_bits.get(4, BITS[Format.INT4]),
        w8a16_bits=scheme.stored_bits.get(8, BITS[Format.W8A16]),
        weights=weights,
        attention=None if attention == weights else attention,
        attention_output=None if output == attention else output,
        experts=None if experts == weights else experts,
        lm_head=scheme.format_of(("lm_head",)) if scheme.lm_head or names_lm_head else Format.BF16,
        kv_cache=scheme.kv_cache,
    )
    means = (sum(map(precision.bits, each.elements())) / max(each.total(), 1) for each in votes)
    return precision, {part: mean for part, mean, each in zip(PARTS, means, votes, strict=True) if len(each) > 1}


def _votes(scheme: "_Scheme", layers: Iterable[tuple[int, tuple[Names, ...]]]) -> Counter[Format]:
    """Count the formats of `layers`, each given by its index and modules; empty where there are no modules."""
    votes: Counter[Format] = Counter()
    for index, modules in layers:
        if modules:
            formats = [scheme.format_of(tuple(f"layers.{index}.{name}" for name in names)) for names in modules]
            votes[max(formats, key=BITS.__getitem__)] += 1
    return votes


class _Modules:
    """A set of modules written as checkpoints write it: names, names with `*`, `re:` expressions, class names."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        # Classes are those of a module, never of one that holds it (compressed-tensors `match.py`, `_match_class`).
        self.everything = "Linear" in patterns
        expressions = [pattern[3:] for pattern in patterns if pattern.startswith("re:")]
        plain = [_below_prefix(pattern) for pattern in patterns if not pattern.startswith("re:")]
        starred = [name for name in plain if "*" in name]
        self._layers = {name for name in plain if name.startswith("layers.") and "*" not in name}
        self._parts = [f".{name}." for name in plain if name not in self._layers and "*" not in name]
        # Lists of `layers.N.self_attn*` are hundreds of names long: a prefix test is 20 times faster than expressions.
        self._starts = tuple(name[:-1] for name in starred if not re.search(r"[*?\[]", name[:-1]))
        globs = [name for name in starred if name[:-1] not in self._starts]
        self._glob = _any_of([translate(name) for name in globs] + [translate(name + ".*") for name in globs])
        self._expression = _any_of(expressions)

    def __contains__(self, name: str) -> bool:
        """Whether the module `name` (`layers.3.self_attn.q_proj`, `lm_head`) or one that holds it is in the set."""
        parts = name.split(".")
        return (
            self.everything
            or any(".".join(parts[:end]) in self._layers for end in range(2, len(parts) + 1))
            or any(part in f".{name}." for part in self._parts)
            or name.startswith(self._starts)
            or bool(self._glob and self._glob.match(name))
            or bool(self._expression and any(self._expression.match(prefix + name) for prefix in _PREFIXES))
        )


_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")


def _any_of(expressions: list[str]) -> re.Pattern[str] | None:
    try:
        return re.compile("|".join(f"(?:{expression})" for expression in expressions)) if expressions else None
    except re.error as error:
        raise InputError(f"the module names {expressions!r} are not regular expressions: {error}") from None


def _below_prefix(name: str) -> str:
    """Return `layers.3.mlp` of `model.language_model.layers.3.mlp` or `transformer.h.3.mlp.`; other names, those of
    towers and prediction layers too, without the language model's prefix."""
    name = name.rstrip(".")
    start = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(?=[\d*?\[])", name)
    if start and not re.search(r"vis|vit|tower|audio|speech|mtp", name[: start.start()]):
        return f"layers.{name[start.end() :]}"
    return name.removeprefix("language_model.").removeprefix("model.")


@dataclass(frozen=True)
class _Scheme:
    """A checkpoint's quantisation: formats for sets of modules, and the modules left alone."""

    groups: tuple[tuple[_Modules, Format], ...]
    ignored: _Modules = field(default_factory=lambda: _Modules(()))
    kv_cache: Format = Format.BF16
    lm_head: bool = False
    """Whether the method quantises the output layer too."""
    stored_bits: Mapping[int, float] = field(default_factory=dict)
    """Bits of an integer -> those of a stored weight, its share of the scale and zero point of its group included."""

    def format_of(self, names: Names) -> Format:
        """Return the format of the module that checkpoints call one of `names`."""
        if any(name in self.ignored for name in names):
            return Format.BF16
        return next((fmt for modules, fmt in self.groups if any(name in modules for name in names)), Format.BF16)


_ALL = _Modules(("Linear",))


def _scheme(quantization_config: Any, hf_quant_config: Mapping[str, Any] | None, model: str) -> _Scheme | None:
    if isinstance(quantization_config, Mapping) and quantization_config.get("moe_quant_algo"):
        # Routed experts of their own format beside one for all others (vLLM 0.24 `DeepseekV4FP8Config`).
        others = _single_format(quantization_config, model)
        experts = _modelopt_format(quantization_config["moe_quant_algo"], model)
        return _Scheme(((_Modules(("experts",)), experts), *others.groups), others.ignored)
    if hf_quant_config is not None:
        inner = _object(hf_quant_config, "hf_quant_config.json", model).get("quantization", hf_quant_config)
        return _modelopt(_object(inner, "hf_quant_config.json", model), model)
    if quantization_config is None:
        return None
    config = _object(quantization_config, "quantization_config", model)
    _refuse_sparse(config, model)
    if "quant_algo" in config:
        return _modelopt(config, model)
    return _compressed_tensors(config, model) if "config_groups" in config else _single_format(config, model)


def _refuse_sparse(config: Mapping[str, Any], model: str) -> None:
    """Raise InputError for a checkpoint that leaves out weights: two of each four, or any."""
    sparsity = _object(config.get("sparsity_config") or {}, "sparsity_config", model)
    keys = ("format", "sparsity_structure", "checkpoint_format", "quant_method")
    groups = config.get("config_groups")
    parts = [config, sparsity, *(groups.values() if isinstance(groups, Mapping) else ())]
    said = [str(part[key]) for part in parts if isinstance(part, Mapping) for key in keys if part.get(key)]
    found = next((name for name in said if name == "2:4" or re.search(r"marlin.24|^sparse", name)), None)
    if found is not None:
        raise InputError(f"{model}: sparse weights ({found!r}) cannot be modelled: nobody measured them", _HINT)


def _single_format(config: Mapping[str, Any], model: str) -> _Scheme:
    """Read a method with one format for all linear layers, modules that it leaves alone aside."""
    method = str(config.get("quant_method"))
    own = _own_bits(config, model)
    ignored = _Modules(own.pop(16))
    if method in ("fp8", "fbgemm_fp8", "mxfp8"):
        block_size = "1x32" if method == "mxfp8" else config.get("weight_block_size")
        return _Scheme(((_ALL, _fp8_format(block_size, model)),), ignored)
    if method == "mxfp4":
        # transformers and vLLM quantise only the routed experts with it.
        return _Scheme(((_Modules(("experts",)), Format.MXFP4),), ignored)
    if method.startswith(("awq", "gptq")) or method in ("auto-round", "autoround"):
        bits, data_type = config.get("bits", config.get("w_bit")), config.get("data_type", "int")
        if bits not in (4, 8):
            raise InputError(f"{model}: {method} with {bits!r} bits is not known; allowed: 4, 8", _HINT)
        if data_type != "int":
            raise InputError(f"{model}: {method} with data_type {data_type!r} is not known; allowed: 'int'", _HINT)
        has_zero_points = bool(config.get("zero_point", not config.get("sym", True)))
        group_size = config.get("group_size", config.get("q_group_size", 128))
        stored = {each: _stored_bits(each, group_size, has_zero_points, model) for each in (bits, *own)}
        formats = {4: Format.INT4, 8: Format.W8A16}
        groups = [(_Modules(names), formats[each]) for each, names in own.items()]
        return _Scheme(
            (*groups, (_ALL, formats[bits])), ignored, lm_head=bool(config.get("lm_head")), stored_bits=stored
        )
    if method == "quark":
        return _quark(config, model)
    if method in _UNPRICED:
        raise InputError(f"{model}: quant_method {method!r} cannot be modelled: {_UNPRICED[method]}", _HINT)
    needed = "quant_algo" if method.startswith("modelopt") else "config_groups"
    if needed == "quant_algo" or method == "compressed-tensors":
        raise InputError(
            f"{model}: its quantization_config ({method}) has no {needed}, so that it says no format", _HINT
        )
    known = "fp8, fbgemm_fp8, mxfp8, mxfp4, awq, gptq, auto-round, quark, compressed-tensors, modelopt"
    raise InputError(f"{model}: quant_method {method!r} is not known; allowed: {known}", _HINT)


_UNPRICED = {
    "bitsandbytes": "its kernels dequantise all weights before each product, and nobody measured them",
    "gguf": "its blocks have other bits in each tensor, and nobody measured their kernels",
}
"""Methods that nothing here prices -> the reason."""


def _stored_bits(bits: int, group_size: Any, has_zero_points: bool, model: str) -> float:
    """Return the bits of an integer weight with its share of a scale of 16 bits and a zero point a group; scales of
    whole channels (-1) do not count."""
    if group_size in (None, -1):
        return float(bits)
    if not isinstance(group_size, int) or group_size < 1:
        raise InputError(f"{model}: group_size is {group_size!r}; a positive whole number or -1 is needed", _HINT)
    return bits + (16.0 + bits * has_zero_points) / group_size


def _own_bits(config: Mapping[str, Any], model: str) -> dict[int, list[str]]:
    """Return the modules with bits of their own, by these; those of 16 bits are left alone.

    GPTQModel lists them under `dynamic`, behind `-:` those left alone (vLLM 0.24 `gptq_utils.py`,
    `get_dynamic_override`); AutoRound under `extra_config`, by name or expression (`inc.py`, `get_layer_config`).
    """
    own = {16: _strings(config, "modules_to_not_convert", model) + _strings(config, "ignored_layers", model)}
    for key, anywhere in (("dynamic", ""), ("extra_config", ".*")):
        for name, change in _object(config.get(key) or {}, key, model).items():
            bits = 16 if name.startswith("-:") else _object(change, name, model).get("bits", config.get("bits"))
            if bits == config.get("bits"):
                continue
            if bits not in (4, 8, 16):
                raise InputError(f"{model}: {key} gives {name!r} {bits!r} bits; allowed: 4, 8, 16", _HINT)
            is_expression = not anywhere or re.search(r"[*+?^$()\[\]{}|\\]", name)
            pattern = re.sub(r"^[-+]:", "", name)
            own.setdefault(bits, []).append(f"re:{anywhere}{pattern}" if is_expression else name)
    return own


def _quark(config: Mapping[str, Any], model: str) -> _Scheme:
    """Read AMD Quark: a format for all layers, others for layers by name, and the layers left alone."""
    by_layer = _object(config.get("layer_quant_config") or {}, "layer_quant_config", model)
    groups = [(_Modules((name,)), _quark_format(each, name, model)) for name, each in by_layer.items()]
    every = config.get("global_quant_config")
    if every:
        groups.append((_ALL, _quark_format(every, "global_quant_config", model)))
    cached = _object(config.get("kv_cache_quant_config") or {}, "kv_cache_quant_config", model)
    return _Scheme(tuple(groups), _Modules(_strings(config, "exclude", model)), Format.FP8 if cached else Format.BF16)


def _quark_format(config: Any, key: str, model: str) -> Format:
    parts = _object(config, key, model)
    weights = parts.get("weight")
    if isinstance(weights, list):
        raise InputError(f"{model}: weights that Quark quantises in several stages cannot be modelled", _HINT)
    weights, inputs = _object(weights, "weight", model), parts.get("input_tensors")
    stored = str(weights.get("dtype"))
    taken = None if inputs is None else str(_object(inputs, "input_tensors", model).get("dtype"))
    group_size = weights.get("group_size")
    shared = 32 if stored == "fp4" else None
    found = _GROUPS.get((_QUARK.get(stored), shared, taken and _QUARK.get(taken, taken)))
    if found is None or (shared and group_size != shared):
        text = f"{stored} weights in groups of {group_size} with {taken or '16-bit'} activations"
        raise InputError(f"{model}: {text} are not known", _HINT)
    return found


def _fp8_format(block_size: Any, model: str) -> Format:
    if block_size is None:
        return Format.FP8
    sizes = re.findall(r"[-\d.]+", str(block_size))  # a list, or text such as 128x128
    if sizes in (["1", "32"], ["32", "32"]):  # engines repeat a block's scale for its rows (vLLM 0.33 deepseek_v41)
        return Format.MXFP8
    if sizes != ["128", "128"]:
        raise InputError(f"{model}: weight_block_size is {block_size!r}; allowed: [128, 128], [32, 32], [1, 32]", _HINT)
    return Format.FP8_BLOCK


def _modelopt(config: Mapping[str, Any], model: str) -> _Scheme:
    """Read NVIDIA ModelOpt: `quant_algo`, and `exclude_modules` or `ignore`, or an algorithm for each module."""
    ignored = _Modules(_strings(config, "exclude_modules", model) + _strings(config, "ignore", model))
    kv_cache = _kv_format(config.get("kv_cache_quant_algo", config.get("kv_cache_scheme")), model)
    algorithm = config.get("quant_algo")
    if algorithm is None:
        return _Scheme((), ignored, kv_cache)
    if algorithm != "MIXED_PRECISION":
        weights_format = _modelopt_format(algorithm, model)
        stored = {}
        if weights_format in (Format.INT4, Format.INT4A8):
            stored[4] = _stored_bits(4, config.get("group_size", 128), bool(config.get("has_zero_point")), model)
        return _Scheme(((_ALL, weights_format),), ignored, kv_cache, stored_bits=stored)
    by_algorithm: dict[str, list[str]] = {}
    for name, layer in _object(config.get("quantized_layers"), "quantized_layers", model).items():
        by_algorithm.setdefault(str(_object(layer, name, model).get("quant_algo")), []).append(name)
    groups = tuple((_Modules(names), _modelopt_format(key, model)) for key, names in by_algorithm.items())
    return _Scheme(groups, ignored, kv_cache)


def _modelopt_format(algorithm: Any, model: str) -> Format:
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise InputError(f"{model}: quant_algo {algorithm!r} is not known; allowed: {', '.join(_MODELOPT)}", _HINT)
    return _MODELOPT[algorithm]


def _compressed_tensors(config: Mapping[str, Any], model: str) -> _Scheme:
    listed = _object(config["config_groups"], "config_groups", model).items()
    groups = [_object(group, name, model) for name, group in listed]
    targets = [_Modules(_strings(group, "targets", model) or ["Linear"]) for group in groups]
    formats = [_group_format(group, model) for group in groups]
    stored: dict[int, float] = {}
    for group, group_format in zip(groups, formats, strict=True):
        if bits := {Format.INT4: 4, Format.INT4A8: 4, Format.W8A16: 8}.get(group_format):
            weights = group["weights"]
            each = _stored_bits(bits, weights.get("group_size"), weights.get("symmetric") is False, model)
            stored[bits] = max(stored.get(bits, 0.0), each)
    left_alone, kv_cache = _Modules(_strings(config, "ignore", model)), _kv_format(config.get("kv_cache_scheme"), model)
    return _Scheme(tuple(zip(targets, formats, strict=True)), left_alone, kv_cache, stored_bits=stored)


_FLOAT4, _FLOAT8, _INT8 = ("float", 4), ("float", 8), ("int", 8)
_QUARK = {"fp4": _FLOAT4, "fp8_e4m3": _FLOAT8, "int8": _INT8, "int4": ("int", 4)}
"""Quark's names of types -> type and bits."""
_GROUPS: Mapping[tuple[Any, int | None, Any], Format] = {
    (_FLOAT4, 16, _FLOAT4): Format.NVFP4,
    (_FLOAT4, 16, None): Format.NVFP4A16,
    (_FLOAT4, 32, _FLOAT4): Format.MXFP4A4,
    (_FLOAT4, 32, None): Format.MXFP4,
    (_FLOAT8, 32, _FLOAT8): Format.MXFP8,
    (_FLOAT8, None, _FLOAT8): Format.FP8,
    (_FLOAT8, None, None): Format.W8A16,
    (_INT8, None, _INT8): Format.INT8,
    (_INT8, None, None): Format.W8A16,
    (("int", 4), None, _FLOAT8): Format.INT4A8,
    (("int", 4), None, None): Format.INT4,
}
"""Type and bits of weights, floating-point values that share a scale, type and bits of activations -> format."""


def _group_format(group: Mapping[str, Any], model: str) -> Format:
    """Return the format of one group, by its weights and activations; these are of the weights' type and bits where
    they give none."""
    weights, activations = _object(group.get("weights"), "weights", model), group.get("input_activations")
    kind, bits, group_size = (weights.get(key) for key in ("type", "num_bits", "group_size"))
    inputs = _object(activations, "input_activations", model) if activations else {}
    taken = (str(inputs.get("type", kind)), inputs.get("num_bits", bits)) if inputs else None
    shared = group_size if kind == "float" and isinstance(group_size, int) else None
    known = next((each for key, each in _GROUPS.items() if key == ((kind, bits), shared, taken)), None)
    if known is None:
        of_activations = f"{taken[0]} activations of {taken[1]} bits" if taken else "no quantised activations"
        raise InputError(
            f"{model}: {kind} weights of {bits} bits in groups of {group_size} with {of_activations} are not known",
            _HINT,
        )
    return _fp8_format(weights.get("block_structure"), model) if known is Format.FP8 else known


def _kv_format(scheme: Any, model: str) -> Format:
    """Return the KV cache's format from `kv_cache_quant_algo` ("FP8") or `kv_cache_scheme` (bits and type)."""
    if scheme is None:
        return Format.BF16
    kind = scheme
    if isinstance(scheme, Mapping):
        kind = {"float8": "FP8", "int8": "INT8", "float4": "NVFP4"}.get(f"{scheme.get('type')}{scheme.get('num_bits')}")
    known = {"FP8": Format.FP8, "INT8": Format.INT8, "NVFP4": Format.NVFP4}
    if not isinstance(kind, str) or kind not in known:
        raise InputError(f"{model}: the KV cache's format {scheme!r} is not known; allowed: {', '.join(known)}", _HINT)
    return known[kind]


def _object(value: Any, key: str, model: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{model}: {key} is {value!r}; an object is needed")
    return value


def _strings(config: Mapping[str, Any], key: str, model: str) -> list[str]:
    return list_of(str, "names", config, key, model)


ItemT = TypeVar("ItemT", int, str, dict[str, Any])


def list_of(kind: type[ItemT], plural: str, config: Mapping[str, Any], key: str, model: str) -> list[ItemT]:
    """Return a list of one kind of value; empty where `key` is absent. InputError where it is something else."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise InputError(f"{model}: {key} is {value!r}; a list of {plural} is needed")
    return value
