"""Number formats of a published checkpoint, from its `quantization_config` or `hf_quant_config.json`.

A checkpoint names a format and a list of modules that it leaves alone, or a format for each module. `Precision` has one
format for each class of modules: the one that most layers have. Where the modules of one class differ in a layer (NVFP4
DeepSeek quantises only the output projection of attention), the widest format counts.
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

Names = tuple[str, ...]
"""Names that checkpoints give to one module, below `layers.N.`."""


Modules = tuple[tuple[Names, ...], tuple[Names, ...], tuple[Names, ...]]
"""Modules of one layer: of its attention, of its dense feed-forward or shared experts, of its routed experts."""


def precision_from_config(
    quantization_config: Any,
    hf_quant_config: Mapping[str, Any] | None,
    layers: Sequence[Modules],
    model: str,
) -> Precision:
    """Return the formats of a checkpoint.

    Args:
        quantization_config: that key of config.json; None where it has none.
        hf_quant_config: the content of `hf_quant_config.json`, which wins.
        layers: the modules of every layer, in order.
        model: the model's name, for errors.

    Raises:
        InputError: a format that `Format` does not have, or a config that cannot be understood.
    """
    scheme = _scheme(quantization_config, hf_quant_config, model)
    if scheme is None:
        return Precision()
    attention, linear, experts = (_of_most(scheme, enumerate(modules[part] for modules in layers)) for part in range(3))
    weights = linear or attention or Format.BF16
    return Precision(
        weights=weights,
        attention=None if attention == weights else attention,
        experts=None if experts == weights else experts,
        lm_head=scheme.format_of(("lm_head",)) if scheme.lm_head or scheme.names_lm_head else Format.BF16,
        kv_cache=scheme.kv_cache,
    )


def _of_most(scheme: "_Scheme", layers: Iterable[tuple[int, tuple[Names, ...]]]) -> Format | None:
    """Return the format of most `layers`, each given by its index and modules; None where there are no modules."""
    votes: Counter[Format] = Counter()
    for index, modules in layers:
        if modules:
            formats = [scheme.format_of(tuple(f"layers.{index}.{name}" for name in names)) for names in modules]
            votes[max(formats, key=BITS.__getitem__)] += 1
    return votes.most_common(1)[0][0] if votes else None


class _Modules:
    """A set of modules written as checkpoints write it: names, names with `*`, `re:` expressions, class names."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self.everything = any(re.fullmatch(r"[A-Z]\w*", pattern) for pattern in patterns)
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
            or any(".".join(parts[:end]) in self._layers for end in range(3, len(parts) + 1))
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
    """Return `layers.3.mlp` of `model.language_model.layers.3.mlp`; other names without the language model's prefix."""
    start = re.search(r"(?:^|\.)(layers\.)", name)
    return name[start.start(1) :] if start else name.removeprefix("language_model.").removeprefix("model.")


@dataclass(frozen=True)
class _Scheme:
    """A checkpoint's quantisation: formats for sets of modules, and the modules left alone."""

    groups: tuple[tuple[_Modules, Format], ...]
    ignored: _Modules = field(default_factory=lambda: _Modules(()))
    kv_cache: Format = Format.BF16
    lm_head: bool = False
    """Whether the method quantises the output layer too."""

    @property
    def names_lm_head(self) -> bool:
        """Whether a group lists the output layer by name; methods for all `Linear` modules leave it alone."""
        return any(not modules.everything and "lm_head" in modules for modules, _ in self.groups)

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
    if "quant_algo" in config:
        return _modelopt(config, model)
    if "config_groups" in config:
        return _compressed_tensors(config, model)
    return _single_format(config, model)


def _single_format(config: Mapping[str, Any], model: str) -> _Scheme:
    """Read a method with one format for all linear layers: fp8, fbgemm_fp8, mxfp4, awq, gptq."""
    method = str(config.get("quant_method"))
    ignored = _Modules(_strings(config, "modules_to_not_convert", model) + _strings(config, "ignored_layers", model))
    if method in ("fp8", "fbgemm_fp8"):
        return _Scheme(((_ALL, _fp8_format(config.get("weight_block_size"), model)),), ignored)
    if method == "mxfp4":
        # transformers and vLLM quantise only the routed experts with it.
        return _Scheme(((_Modules(("experts",)), Format.MXFP4),), ignored)
    if method.startswith(("awq", "gptq")) or method in ("auto-round", "autoround"):
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise InputError(f"{model}: {method} with {bits!r} bits is not known; allowed: 4", _HINT)
        return _Scheme(((_ALL, Format.INT4),), ignored, lm_head=bool(config.get("lm_head")))
    known = "fp8, fbgemm_fp8, mxfp4, awq, gptq, compressed-tensors, modelopt"
    raise InputError(f"{model}: quant_method {method!r} is not known; allowed: {known}", _HINT)


def _fp8_format(block_size: Any, model: str) -> Format:
    if block_size is None:
        return Format.FP8
    if block_size != [128, 128]:
        raise InputError(f"{model}: weight_block_size is {block_size!r}; allowed: [128, 128]", _HINT)
    return Format.FP8_BLOCK


def _modelopt(config: Mapping[str, Any], model: str) -> _Scheme:
    """Read NVIDIA ModelOpt: `quant_algo`, and `exclude_modules` or `ignore`, or an algorithm for each module."""
    ignored = _Modules(_strings(config, "exclude_modules", model) + _strings(config, "ignore", model))
    kv_cache = _kv_format(config.get("kv_cache_quant_algo", config.get("kv_cache_scheme")), model)
    algorithm = config.get("quant_algo")
    if algorithm is None:
        return _Scheme((), ignored, kv_cache)
    if algorithm != "MIXED_PRECISION":
        return _Scheme(((_ALL, _modelopt_format(algorithm, model)),), ignored, kv_cache)
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
    groups = [
        _object(group, name, model) for name, group in _object(config["config_groups"], "config_groups", model).items()
    ]
    return _Scheme(
        tuple(
            (_Modules(_strings(group, "targets", model) or ["Linear"]), _group_format(group, model)) for group in groups
        ),
        _Modules(_strings(config, "ignore", model)),
        _kv_format(config.get("kv_cache_scheme"), model),
    )


def _group_format(group: Mapping[str, Any], model: str) -> Format:
    """Return the format of one group, by its weights and whether activations are quantised too."""
    weights = _object(group.get("weights"), "weights", model)
    activations = bool(group.get("input_activations"))
    kind, bits, group_size = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    if kind == "float" and bits == 8 and activations:
        return _fp8_format(weights.get("block_structure"), model)
    known = {
        ("int", 8, True): Format.INT8,
        ("int", 4, False): Format.INT4,
        ("float", 4, True): Format.NVFP4 if group_size == 16 else None,
        ("float", 4, False): Format.MXFP4 if group_size == 32 else None,
    }
    group_format = known.get((str(kind), bits if isinstance(bits, int) else 0, activations))
    if group_format is None:
        with_or_without = "with" if activations else "without"
        weights_text = (
            f"{kind} weights of {bits} bits in groups of {group_size} {with_or_without} quantised activations"
        )
        raise InputError(f"{model}: {weights_text} are not known", _HINT)
    return group_format


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


ItemT = TypeVar("ItemT", int, str)


def list_of(kind: type[ItemT], plural: str, config: Mapping[str, Any], key: str, model: str) -> list[ItemT]:
    """Return a list of one kind of value; empty where `key` is absent.

    Raises:
        InputError: it is something else.
    """
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise InputError(f"{model}: {key} is {value!r}; a list of {plural} is needed")
    return value
