"""Typed access to one `config.json`: keys by any of their names, checked, with the facts that its architecture adds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from windtunnel.errors import InputError, did_you_mean
from windtunnel.model.architectures import KNOWN, Architecture, Rule
from windtunnel.model.quantization import list_of

_MOST_LAYERS = 10_000
MOST = 10**9
"""Largest count of a `config.json`."""


class AskedKeys(dict[str, Any]):
    """Keys of a config.json, and which of them were looked up; a copy by `{**keys}` looks up none."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        super().__init__(keys)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and note that it was looked up."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        """Return a value, and note that it was looked up."""
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether there is such a key, and note that it was looked up."""
        self.asked.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True)
class ConfigReader:
    """The keys of a language model; one that is absent or null counts as not given."""

    raw: Mapping[str, Any]
    name: str
    model_type: str
    architecture: Architecture
    asked: set[str] = field(default_factory=set, compare=False)
    """Names of keys that were looked up, given or not."""

    def first(self, *keys: str) -> tuple[str, Any]:
        """Return the first of `keys` or their aliases that is given, and its value; else (last key, None)."""
        names = [name for key in keys for name in (key, *KNOWN.aliases.get(key, ()))]
        self.asked.update(names)
        return next(((name, self.raw[name]) for name in names if self.raw.get(name) is not None), (keys[-1], None))

    def count(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least `minimum`, under the first of `keys` that is given; a list that gives every
        layer the same counts as that number."""
        key, value = self.first(*keys)
        if value is None and default is not None:
            return default
        if value is None:
            published = "give a model's config.json as published on Hugging Face"
            near = did_you_mean(keys[0], (str(known) for known in self.raw), published)
            raise InputError(
                f"{self.name}: config.json (model_type {self.model_type!r}) has no {' or '.join(dict.fromkeys(keys))}",
                near,
            )
        if isinstance(value, list) and len(value) > 1 and value == value[:1] * len(value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(f"{self.name}: {key} is {value!r}; a whole number of at least {minimum} is needed")
        if value > MOST:
            raise InputError(f"{self.name}: {key} is {value}, which is not plausible; at most {MOST:,} is read")
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return True or False, under the first of `keys` that is given."""
        key, value = self.first(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key} is {value!r}; true or false is needed")
        return value

    def inner(self, key: str) -> "ConfigReader":
        """Return a reader of the object under `key`, with this config's number of layers."""
        self.asked.add(key)
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key} is {value!r}; an object is needed")
        return self.of({"num_hidden_layers": self.num_layers, **value})

    def of(self, raw: Mapping[str, Any]) -> "ConfigReader":
        """Return a reader of other keys of the same model."""
        keys = AskedKeys(raw)
        keys.asked = getattr(self.raw, "asked", keys.asked)
        return replace(self, raw=keys)

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers, which may be text such as "3,4,5"; empty where it is not given."""
        name, value = self.first(key)
        if isinstance(value, str) and re.fullmatch(r"\d{1,9}(, *\d{1,9})*", value):
            value = [int(number) for number in value.split(",")]
        return list_of(int, "whole numbers", {name: value}, name, self.name)

    def per_layer(self, key: str, values: list[Any]) -> list[Any]:
        """Return `values`, the value of `key`, after checking that there is one for each layer; values of prediction
        layers may follow (Step-3.5)."""
        predicting = self.count("num_nextn_predict_layers", default=0, minimum=0)
        if len(values) not in (self.num_layers, self.num_layers + predicting):
            raise InputError(f"{self.name}: {key} must have one entry for each of the {self.num_layers} layers")
        return values[: self.num_layers]

    def named_layers(self, key: str, allowed: tuple[str, ...]) -> list[str]:
        """Return the names, or letters, that a config gives to its layers under `key`; empty where it gives none."""
        names = self.raw.get(key)
        if names is None:
            return []
        names = self.per_layer(key, list(names) if isinstance(names, list | str) else [])
        unknown = next((name for name in names if name not in allowed), None)
        if unknown is not None:
            raise InputError(
                f"{self.name}: {key} has {unknown!r}, which cannot be modelled; allowed: {', '.join(allowed)}"
            )
        return names

    def check_multiple(self, multiple: str, number: int, of: str, divisor: int) -> None:
        """Raise InputError unless `number`, the value of `multiple`, is a multiple of `divisor`."""
        if number % divisor:
            raise InputError(f"{self.name}: {multiple} {number} is not a multiple of {of} {divisor}")

    def layer_type(self, index: int) -> str:
        """Return what `layer_types` calls layer `index`; empty where it does not say."""
        names = self.raw.get("layer_types")
        return str(names[index]) if isinstance(names, list) and index < len(names) else ""

    def shares_kv(self, index: int) -> bool:
        """Whether layer `index` attends to keys and values of an earlier layer: one of the last ones (Gemma 3n), or all
        but the first of each group (cross-layer attention, arXiv:2405.12981, of Hunyuan-Large)."""
        own = self.num_layers - self.count("num_kv_shared_layers", default=0, minimum=0)
        return index >= own or (self.flag("use_cla") and index % self.count("cla_share_factor") > 0)

    def rule(self, rule: Rule) -> bool:
        """Return what an architecture's rule says for this config."""
        return rule if isinstance(rule, bool) else self.flag(rule)

    @property
    def max_positions(self) -> int:
        """The longest context; `model_max_length` wins where positions are not learned (vLLM
        `transformers_utils/model_arch_config_convertor.py`, `derive_max_model_len_and_key`)."""
        wins = self.architecture.position_rows is None and self.raw.get("model_max_length") is not None
        return self.count("model_max_length" if wins else "max_position_embeddings")

    @property
    def num_layers(self) -> int:
        blocks = self.raw.get("layers_block_type")
        num_layers = self.count("num_hidden_layers", default=len(blocks) if isinstance(blocks, list) else None)
        if num_layers > _MOST_LAYERS:
            raise InputError(f"{self.name}: {num_layers} layers are not plausible; at most {_MOST_LAYERS} are read")
        return num_layers * (2 if self.architecture.paired else 1)


def number_of(key: str, value: Any, most: float, name: str) -> float:
    """Return `value`, the number under `key`; raise InputError unless it is from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InputError(f"{name}: {key} is {value!r}; a number from 0 to {most:,} is needed")
    return value
