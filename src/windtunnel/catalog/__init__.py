"""The models, devices and nodes that ship with Windtunnel, and those that a user adds: one file each, found by name.

A catalog is a folder with `models/`, `devices/`, `nodes/`, `engines/`, `traces/` and
`calibrations/`. The folders in the environment
variable `WINDTUNNEL_CATALOG` (separated as in `PATH`) come first and the shipped one last. A model is its Hugging Face
`config.json` under the name `organisation--model.json`; `models/aliases.yaml` gives further names, and checkpoints that
differ from a base model in their formats only.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from windtunnel.errors import InputError, did_you_mean, unreadable
from windtunnel.hardware import Device, Node
from windtunnel.model.config import model_from_config
from windtunnel.model.precision import Precision
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import Schema, decode, read_yaml

KINDS = ("models", "devices", "nodes", "engines", "traces", "calibrations")
"""What a catalog holds: the names of its folders."""

SEARCH_PATH_VARIABLE = "WINDTUNNEL_CATALOG"

_SHIPPED = Path(__file__).resolve().parent
_INDEX_FILES = ("aliases", "defaults")
_GENERIC_NODE = "pcie"
EntryT = TypeVar("EntryT")


def shipped(name: str) -> Path:
    """The path of `name`, a file at the root of the shipped catalog."""
    return _SHIPPED / name


class Variant(Schema, frozen=True):
    """An entry of `aliases.yaml`: a checkpoint with the shape of `base` and formats of its own."""

    base: str
    precision: Precision | None = None


def search_path() -> list[Path]:
    """The catalog folders, first found first."""
    extra = [Path(part) for part in os.environ.get(SEARCH_PATH_VARIABLE, "").split(os.pathsep) if part]
    missing = next((folder for folder in extra if not folder.is_dir()), None)
    if missing:
        raise InputError(f"{SEARCH_PATH_VARIABLE} names {missing}, which is not a folder")
    return [*extra, _SHIPPED]


def names(kind: str) -> list[str]:
    """The names of everything of a `kind` (`models`, `devices`, ...) that the catalog has, sorted.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"the catalog has no {kind!r}", did_you_mean(kind, KINDS, f"it has {', '.join(KINDS)}"))
    entries = _models() if kind == "models" else _files(kind)
    return sorted((name for name, entry in entries.items() if not isinstance(entry, str)), key=str.lower)


def find(kind: str, name: str) -> Path:
    """The file of the catalog's entry `name`; letter case and `-` for `_` do not matter.

    Raises:
        InputError: there is no such entry; the hint names those nearest.
    """
    entries = _files(kind)
    by_slug = {_slug(entry): entry for entry in entries}
    if _slug(name) not in by_slug:
        kind_of_thing = kind.removesuffix("s")
        raise InputError(
            f"there is no {kind_of_thing} {name!r} in the catalog",
            did_you_mean(name, entries, f"list them with `windtunnel catalog {kind}`"),
        )
    return entries[by_slug[_slug(name)]]


def model(name: str, allow_download: bool = False) -> ModelSpec:
    """The model called `name`.

    Args:
        name: an id of the catalog (`meta-llama/Llama-3.1-8B`, letter case does not matter, the organisation may be left
            out where the rest is unique), or the path of a config.json or of a folder that holds one, with its
            `hf_quant_config.json` if there is one.
        allow_download: fetch the config from huggingface.co where the catalog does not have it.

    Raises:
        InputError: there is no such model, or its config cannot be read.
    """
    if _looks_like_path(name):
        return _model_from_files(Path(name).expanduser())
    entries = _models()
    found = _match_model(name, entries)
    if found is not None:
        return _resolve(found, entries)
    if allow_download:
        return _download(name)
    raise InputError(
        f"there is no model {name!r} in the catalog",
        did_you_mean(
            name, entries, "give the path of its config.json, or list models with `windtunnel catalog models`"
        ),
    )


def model_config(name: str) -> dict[str, Any]:
    """The config.json of the model called `name`, as `model` finds it.

    Raises:
        InputError: there is no such model, or it is a variant that has no config of its own.
    """
    if _looks_like_path(name):
        path = Path(name).expanduser()
        found: dict[str, Any] = _read_json(path / "config.json" if path.is_dir() else path)
        return found
    entries = _models()
    match = _match_model(name, entries)
    if match is None:
        raise InputError(f"there is no model {name!r} in the catalog", did_you_mean(name, entries))
    entry = entries[_target(match, entries)]
    if not isinstance(entry, Path):
        raise InputError(f"{name} has no config.json of its own", f"take the model that it is a variant of: {entry!r}")
    config: dict[str, Any] = _read_json(entry)
    return config


def device(name: str) -> Device:
    """The device called `name` (`h100_sxm`), or the one in the YAML file at that path.

    Raises:
        InputError: there is no such device, or its file is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else find("devices", name)
    found = _positive(entry(path, Device), path)
    if not found.peak_flops_per_s:
        raise InputError(f"{path.name}: peak_flops_per_s is empty; at least bf16 is needed")
    return found


def node(name: str) -> Node:
    """The node called `name` (`dgx_h100`), or the one in the YAML file at that path.

    Raises:
        InputError: there is no such node, or its file is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else find("nodes", name)
    return _positive(entry(path, Node), path)


def default_node(device: Device) -> Node:
    """The node in which `device` is usually sold: what `nodes/defaults.yaml` names, else eight of them on PCIe."""
    for folder in search_path():
        defaults = folder / "nodes" / "defaults.yaml"
        names_of_nodes = entry(defaults, dict[str, str]) if defaults.is_file() else {}
        if device.name in names_of_nodes:
            return node(names_of_nodes[device.name])
    return msgspec.structs.replace(node(_GENERIC_NODE), device=device.name)


def _files(kind: str) -> dict[str, Path]:
    """Name -> file of everything of a kind, the first folder of the search path winning."""
    found: dict[str, Path] = {}
    for folder in reversed(search_path()):
        found |= _listed(folder, kind)
    return found


def _listed(folder: Path, kind: str) -> dict[str, Path]:
    if folder == _SHIPPED:
        return _listed_once(kind)
    return dict(_named_files(folder / kind, kind)) if (folder / kind).is_dir() else {}


@cache
def _listed_once(kind: str) -> dict[str, Path]:
    return dict(_named_files(_SHIPPED / kind, kind)) if (_SHIPPED / kind).is_dir() else {}


def _named_files(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    suffixes = {"models": (".json",), "traces": ()}.get(kind, (".yaml", ".yml"))
    with os.scandir(folder) as listing:
        for entry in listing:
            stem = entry.name.partition(".")[0] if not suffixes else Path(entry.name).stem
            visible = stem and stem not in _INDEX_FILES and not stem.startswith("_")
            if visible and (not suffixes or entry.name.endswith(suffixes)):
                yield (stem.replace("--", "/") if kind == "models" else stem), Path(entry.path)


ModelEntry = Path | Variant | str
"""A config.json, a variant of another entry, or another entry's name."""


def _models() -> dict[str, ModelEntry]:
    """Everything that a model may be called, the first folder of the search path winning."""
    found: dict[str, ModelEntry] = {}
    for folder in reversed(search_path()):
        aliases = folder / "models" / "aliases.yaml"
        if aliases.is_file():
            found |= entry(aliases, dict[str, str | Variant])
        found |= _listed(folder, "models")
    return found


def entry(path: Path, noun: type[EntryT]) -> EntryT:
    """The noun in a YAML file of the catalog; one that ships is read once in a process: a search looks up thousands.

    Raises:
        InputError: the file is missing or wrong.
    """
    if path.is_relative_to(_SHIPPED):
        found: EntryT = _shipped_entry(path, noun)  # type: ignore[arg-type]
        return found
    return decode(read_yaml(path), noun, path.name)


@cache
def _shipped_entry(path: Path, noun: Any) -> Any:
    return decode(read_yaml(path), noun, path.name)


def _match_model(name: str, entries: Mapping[str, ModelEntry]) -> str | None:
    """The entry that is meant by `name`: the whole id, or its part after the slash where that is unique."""
    by_lower = {entry.lower(): entry for entry in entries}
    wanted = name.lower()
    if wanted in by_lower or "/" in name:
        return by_lower.get(wanted)
    tails = [entry for lower, entry in by_lower.items() if lower.rpartition("/")[2] == wanted]
    targets = {_target(entry, entries) for entry in tails}
    if len(targets) > 1:
        raise InputError(f"{name!r} may be {' or '.join(sorted(tails))}", "give the organisation too")
    return tails[0] if tails else None


def _target(name: str, entries: Mapping[str, ModelEntry]) -> str:
    """The entry that holds the model: `name`, or what its plain aliases lead to."""
    seen = [name]
    while isinstance(entry := entries[seen[-1]], str):
        if entry not in entries or entry in seen:
            raise InputError(f"the alias {name!r} leads to {entry!r}, which is not in the catalog")
        seen.append(entry)
    return seen[-1]


def _resolve(name: str, entries: Mapping[str, ModelEntry]) -> ModelSpec:
    target = _target(name, entries)
    entry = entries[target]
    if isinstance(entry, Path):
        if entry.is_relative_to(_SHIPPED):
            return _shipped_model(entry, target)
        return model_from_config(_read_json(entry), target)
    assert isinstance(entry, Variant)
    if entry.base not in entries or isinstance(entries[entry.base], Variant):
        raise InputError(f"the variant {target!r} has the base {entry.base!r}, which is not a model of the catalog")
    base = _resolve(entry.base, entries)
    return msgspec.structs.replace(base, name=target, precision=entry.precision or base.precision)


@cache
def _shipped_model(path: Path, name: str) -> ModelSpec:
    return model_from_config(_read_json(path), name)


def _looks_like_path(name: str) -> bool:
    return name.endswith(".json") or name.startswith((".", "/", "~")) or (Path(name) / "config.json").is_file()


def _model_from_files(path: Path) -> ModelSpec:
    """A model from its config.json, or from the folder that holds it."""
    config = path / "config.json" if path.is_dir() else path
    quantisation = config.with_name("hf_quant_config.json")
    own_name = config.name == "config.json"
    return model_from_config(
        _read_json(config),
        config.absolute().parent.name if own_name else config.stem.replace("--", "/"),
        _read_json(quantisation) if own_name and quantisation.is_file() else None,
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", "is it cut off?") from None


HardwareT = TypeVar("HardwareT", Device, Node)


def _positive(found: HardwareT, path: Path) -> HardwareT:
    """`found`, whose rates and counts must be above zero."""
    _require_positive(found, f"{path.name}: $")
    return found


def _require_positive(value: Any, where: str) -> None:
    """Raise where a count or rate inside `value` is not above zero; only a latency may be zero."""
    if isinstance(value, Schema):
        for name in value.__struct_fields__:
            _require_positive(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _require_positive(inner, f"{where}.{key}")
    elif isinstance(value, int | float) and (value < 0 or (value == 0 and not where.endswith(".latency_s"))):
        raise InputError(f"{where} is {value}; a number above zero is needed")


def _slug(name: str) -> str:
    return re.sub(r"[\s-]", "_", name.lower())


def _download(name: str) -> ModelSpec:
    """The model that huggingface.co calls `name`."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name!r} is not a model id of huggingface.co; they look like organisation/model")
    config = _fetch_json(f"https://huggingface.co/{name}/resolve/main/config.json", name)
    if config is None:
        raise InputError(f"huggingface.co has no config.json of a model {name!r}", "check the spelling")
    quantisation = None
    if "quantization_config" not in config:
        quantisation = _fetch_json(f"https://huggingface.co/{name}/resolve/main/hf_quant_config.json", name)
    return model_from_config(config, name, quantisation)


def _fetch_json(url: str, name: str) -> Any:
    """What is at `url`; None where there is nothing."""
    # Loading urllib.request takes 30 ms, and few runs need it.
    from urllib.error import HTTPError
    from urllib.request import urlopen

    not_found, not_allowed = 404, (401, 403)
    try:
        with urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except HTTPError as error:
        if error.code == not_found:
            return None
        hint = "download its config.json and give the path" if error.code in not_allowed else "try again later"
        raise InputError(
            f"huggingface.co does not give the config of {name!r}: {error.code} {error.reason}", hint
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"the config of {name!r} cannot be fetched from huggingface.co: {error}", "give the path of its config.json"
        ) from None
