"""Catalog of models, devices and nodes, shipped or added by a user: one file each, found by name.

A catalog is a folder with `models/`, `devices/`, `nodes/`, `engines/`, `traces/`, `clients/`, `providers/` and
`calibrations/`. The folders in the environment variable `WINDTUNNEL_CATALOG` (separated as in `PATH`) come first and
the shipped one last; between them comes the user's own (`users_folder`), where `windtunnel catalog add` puts models.
A model is its Hugging Face `config.json` under the name `organisation--model.json`;
`models/aliases.yaml` gives further names, and checkpoints that differ from a base model in their formats only;
`aliases.yaml` of nodes and devices has other names of theirs;
`models/generation.yaml` has what they publish about sampling. A shipped or installed engine is a folder of its own,
with its `defaults.yaml` beside its code (`ENGINES`).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from windtunnel.arguments import checked
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import is_file, read_bytes
from windtunnel.hardware import Device, Node
from windtunnel.model.architectures import language_model, quantization_of
from windtunnel.model.config import UnknownModelTypeError, known_architectures, model_from_config
from windtunnel.model.precision import Precision
from windtunnel.model.sampling import Sampling
from windtunnel.model.shape import ModelSpec
from windtunnel.plugins import Registry
from windtunnel.schema import Schema, decode, read_table, read_yaml

KINDS = ("models", "devices", "nodes", "engines", "traces", "clients", "providers", "calibrations")
"""Kinds of entries: the names of a catalog's folders."""
ALIASED = ("devices", "nodes", "traces")
"""Kinds whose `aliases.yaml` gives nothing but further names of entries."""

ENGINES = Registry("windtunnel.engines", "windtunnel.serving.engines", "engine", folders=True)
"""Folders of engines. One without `defaults.yaml` has schedulers alone and is no engine of the catalog."""

SEARCH_PATH_VARIABLE = "WINDTUNNEL_CATALOG"

_SHIPPED = Path(__file__).resolve().parent
_PACKAGE = _SHIPPED.parent
_INDEX_FILES = ("aliases", "defaults", "generation")
LEAST_RATE, LEAST_BYTES = 1e6, 1e5
"""Bytes, FLOP or cycles a second of hardware, and bytes of a memory or cache; fewer lack a unit."""
GENERIC_NODE = "pcie"
"""Node of a device whose usual node is not known: eight devices on PCIe."""
SWITCHED_NODE = "switch"
"""Name of that node where the device's file has the rate of its links; in no file, as the rate is the device's."""
LEAST_ALIKE = 0.4
"""Share of the keys of two config.json that must be in both for one to be named as like the other."""
EntryT = TypeVar("EntryT")
HardwareT = TypeVar("HardwareT", Device, Node)


def shipped(name: str) -> Path:
    """Return the path of a file at the root of the shipped catalog."""
    return _SHIPPED / name


class Variant(Schema, frozen=True):
    """An entry of `aliases.yaml`: a checkpoint with the shape of `base`, and formats, a context or prediction
    layers of its own."""

    base: str
    precision: Precision | None = None
    mixed_bits: tuple[tuple[str, float], ...] = ()
    """As in `ModelSpec`, of `precision`."""
    max_context_tokens: int | None = None
    prediction_layers: int | None = None
    named_after: str = ""
    """Model that nothing but its name says it to be; empty: an entry says so."""


class CheckpointName(Schema, frozen=True):
    """What the end of a checkpoint's name says of its formats (`checkpoint_names.yaml`)."""

    end: str
    precision: Precision
    organisation: str = ".*"
    has_experts: bool | None = None
    """Only of mixtures of experts, or only of others; None: of any."""


def search_path() -> list[Path]:
    """Return the catalog folders, in the order of search."""
    extra = [Path(part) for part in os.environ.get(SEARCH_PATH_VARIABLE, "").split(os.pathsep) if part]
    missing = next((folder for folder in extra if not folder.is_dir()), None)
    if missing:
        raise InputError(f"{SEARCH_PATH_VARIABLE} names {missing}, which is not a folder")
    own = users_folder()
    return [*extra, *([own] if own.is_dir() else []), _SHIPPED]


def users_folder() -> Path:
    """Return the user's own catalog, which need not exist."""
    return _users_folder(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME"))


@cache
def _users_folder(data: str | None, _home: str | None) -> Path:
    return Path(data or Path.home() / ".local" / "share") / "windtunnel" / "catalog"


def names(kind: str) -> list[str]:
    """Return the sorted names of all entries of a `kind` (`models`, `devices`, ...); InputError where there is none."""
    check_known(kind, KINDS, f"the catalog has no {kind!r}", f"it has {', '.join(KINDS)}")
    entries = _models() if kind == "models" else _files(kind)
    return sorted((name for name, entry in entries.items() if not isinstance(entry, str)), key=str.lower)


def find(kind: str, name: str) -> Path:
    """Return the file of the entry `name`; letter case and `-` for `_` do not matter. InputError where there is no such
    entry; the hint names near ones."""
    return _files(kind)[spelling(kind, name)]


def spelling(kind: str, name: str) -> str:
    """Return the name of an entry as the catalog spells it; of a device, also by the name that nvidia-smi prints.
    InputError where there is no such entry; the hint names near ones."""
    entries = _files(kind)
    if name in entries:
        return name
    others = other_names(kind)
    by_slug = {_slug(other): found for other, found in others.items()} | {_slug(entry): entry for entry in entries}
    if _slug(name) not in by_slug:
        if kind == "engines" and name in ENGINES:
            hint = "a package of an engine holds it beside its module, as package data"
            raise InputError(f"the installed engine {name!r} has no defaults.yaml in {ENGINES.folder(name)}", hint)
        own = ", or give a YAML file that describes yours" if kind in ("devices", "nodes") else ""
        raise InputError(
            f"there is no {kind.removesuffix('s')} {name!r} in the catalog",
            did_you_mean(name, [*entries, *others], f"list them with `windtunnel catalog {kind}`{own}"),
        )
    return by_slug[_slug(name)]


def other_names(kind: str) -> dict[str, str]:
    """Return further names (`dgx_b200`, `NVIDIA H100 80GB HBM3`) -> entry; the first folder of the search path wins."""
    files = [folder / kind / "aliases.yaml" for folder in reversed(search_path())] if kind in ALIASED else []
    return {other: name for file in files if file.is_file() for other, name in entry(file, dict[str, str]).items()}


def product_labels(device: str) -> list[str]:
    """Return the values of the Kubernetes label nvidia.com/gpu.product that nodes with a device may have: its names as
    nvidia-smi prints them, with hyphens. Empty where none is known."""
    printed = [other for other, name in other_names("devices").items() if name == device]
    return [name.replace(" ", "-") for name in printed if name.startswith(("NVIDIA ", "Tesla "))]


def known_name(kind: str, name: str) -> str:
    """Return an entry's name as the catalog spells it, no path; InputError where there is no such entry."""
    return _known_model(name, _models()) if kind == "models" else spelling(kind, name)


@checked
def model(name: Path | str | ModelSpec | Mapping[str, Any], allow_download: bool = False) -> ModelSpec:
    """Return the model called `name`, or described by it.

    Args:
        name: an id of the catalog (`meta-llama/Llama-3.1-8B`, letter case does not matter, the organisation may be left
            out where the rest is unique), or the path of a config.json or of a folder that holds one, with its
            `hf_quant_config.json` if there is one, or of a file that `windtunnel.save` wrote; or the model itself:
            a `ModelSpec`, its keys, or the keys of a config.json, which may have a `name`.
        allow_download: fetch the config from huggingface.co where the catalog does not have it.

    Raises:
        InputError: there is no such model, or its config cannot be read.
    """
    if isinstance(name, ModelSpec):
        return name
    if isinstance(name, Mapping):
        return _inline_model(name)
    name = str(name)
    if name.endswith((".yaml", ".yml")):
        return _inline_model(read_table(_path(name), "a model", "windtunnel.save writes one"))
    if looks_like_path(name):
        return _model_from_files(_path(name))
    entries = _models()
    if allow_download and _match_model(name, entries) is None:
        config, quantisation = download(name)
        return model_from_config(config, name, quantisation)
    return _resolve(_known_model(name, entries), entries)


def check_is_file(path: Path) -> None:
    """Raise InputError where there is no file `path`, and a model has that name; the hint names its option."""
    for name in () if path.exists() else names("models"):
        if str(path).lower() in (name.lower(), name.lower().rpartition("/")[2]):
            raise InputError(f"there is no file {path}", f"the model of that name is given by --model {name}")


def _inline_model(keys: Mapping[str, Any]) -> ModelSpec:
    """Read the model that `keys` describe: those of a `ModelSpec`, which lists its layers, or of a config.json."""
    if isinstance(keys.get("layers"), list | tuple):
        return decode(dict(keys), ModelSpec, "model")
    return model_from_config(keys, str(keys.get("name") or keys.get("_name_or_path") or "the model written out"))


def model_config(name: str) -> dict[str, Any]:
    """Return the config.json of the model called `name`, as `model` finds it. InputError where there is no such model,
    or it is a variant that has no config of its own."""
    if looks_like_path(name):
        return _read_json(_config_file(_path(name)))
    entries = _models()
    entry = entries[_target(_known_model(name, entries), entries)]
    if not isinstance(entry, Path):
        raise InputError(f"{name} has no config.json of its own", f"take the model that it is a variant of: {entry!r}")
    return _read_json(entry)


@checked
def device(name: Path | str) -> Device:
    """Return the device called `name` (`h100_sxm`), or the one in the YAML file at that path.

    Raises:
        InputError: there is no such device, or its file is wrong.
    """
    device = _hardware("devices", str(name), Device)
    if not device.peak_flops_per_s:
        raise InputError(f"{name}: peak_flops_per_s is empty; at least bf16 is needed")
    return device


@checked
def node(name: Path | str) -> Node:
    """Return the node called `name` (`dgx_h100`), or the one in the YAML file at that path.

    Raises:
        InputError: there is no such node, or its file is wrong.
    """
    return _hardware("nodes", str(name), Node)


def _hardware(kind: str, name: str, schema: type[HardwareT]) -> HardwareT:
    """Read a device or node by name or path, and check that its rates and counts are above zero."""
    path = Path(name) if name.endswith((".yaml", ".yml", ".json")) else find(kind, name)
    hardware = entry(path, schema)
    check_hardware(hardware, f"{path.name}: $")
    return hardware


def default_node(device: Device) -> Node:
    """Return the node in which `device` is usually sold: that of `nodes/defaults.yaml`, else eight devices on PCIe, or
    behind a switch of the device's own `scale_up_bytes_per_s`."""
    for folder in search_path():
        defaults = folder / "nodes" / "defaults.yaml"
        names_of_nodes = entry(defaults, dict[str, str]) if defaults.is_file() else {}
        if device.name in names_of_nodes:
            return msgspec.structs.replace(node(names_of_nodes[device.name]), device=device.name)
    generic = msgspec.structs.replace(node(GENERIC_NODE), device=device.name)
    return generic if device.scale_up_bytes_per_s is None else behind_switch(generic, device.scale_up_bytes_per_s)


def measured_device(device: Device) -> Device:
    """Return the shipped device whose measured tables price `device`; itself where they name none that is shipped."""
    file = shipped(f"devices/{device.measured_as}.yaml")
    return entry(file, Device) if file.is_file() else device


def power_share(device: Device) -> float:
    """Return the design power of a multiprocessor over that where it was measured; 1 where either is not known."""
    here, there = ((each.tdp_w or 0.0) / (each.num_sms or 1) for each in (device, measured_device(device)))
    return here / there if here and there else 1.0


def behind_switch(node: Node, bytes_per_s: float) -> Node:
    """Return a node whose devices reach each other through a switch at this rate."""
    link = msgspec.structs.replace(node.scale_up, name=SWITCHED_NODE, bytes_per_s=bytes_per_s)
    joined = {"scale_up": link, "scale_up_group_size": None, "scale_up_links": None}
    return msgspec.structs.replace(node, name=SWITCHED_NODE, title="Devices behind a switch", **joined)


def _files(kind: str) -> dict[str, Path]:
    """Return name -> file of all entries of a kind; the first folder of the search path wins."""
    files: dict[str, Path] = {}
    for folder in reversed(search_path()):
        files |= _listed(folder, kind)
    return files


def _listed(folder: Path, kind: str) -> dict[str, Path]:
    """Return the files of a folder by name; the shipped folder is listed once in a process."""
    if folder != _SHIPPED:
        return dict(_named_files(folder / kind, kind))
    return _shipped_files(kind, ENGINES.names() if kind == "engines" else ())


@cache
def _shipped_files(kind: str, engines: tuple[str, ...]) -> dict[str, Path]:
    """Return the shipped files of a kind, and the defaults of `engines`, shipped or installed, by name."""
    defaults = ((name, engine_file(name, "defaults.yaml")) for name in engines)
    return dict(_named_files(_SHIPPED / kind, kind)) | {name: file for name, file in defaults if file is not None}


def engine_file(name: str, file: str) -> Path | None:
    """Return a file of an engine's folder; None without one, or for an engine that a user's catalog adds."""
    folder = ENGINES.folder(name) if name in ENGINES.names() else None
    return folder / file if folder is not None and (folder / file).is_file() else None


def _named_files(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of all entries of a kind in a folder, which may be missing."""
    if not folder.is_dir():
        return
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
    """Return all names of models; the first folder of the search path wins."""
    entries: dict[str, ModelEntry] = {}
    for folder in reversed(search_path()):
        aliases = folder / "models" / "aliases.yaml"
        if aliases.is_file():
            entries |= entry(aliases, dict[str, str | Variant])
        entries |= _listed(folder, "models")
    return entries


VENDORS = ("nvidia", "amd")
"""Vendors of devices that publish checkpoints for their own."""


def checkpoints(name: str | ModelSpec, vendor: str = "") -> dict[str, ModelSpec]:
    """Return the checkpoints of one model, one for each choice of formats: the named one, then by the shortest name.
    That of a file is named by its path.

    Those for other devices than the `vendor`'s are left out, where it is one of `VENDORS`. A checkpoint of the same
    shape is the same model if its name begins with the model's (`Llama-3.3-70B-Instruct-FP8`). InputError where there
    is no such model.
    """
    named, entries = model(name), _models()
    shape, tail = _shape_of(named.name, entries), named.name.rpartition("/")[2].lower()
    found = {named.precision: named}
    foreign = tuple(f"{each}/" for each in VENDORS if vendor in VENDORS and each != vendor)
    for other in sorted(entries, key=lambda entry: (len(entry), entry)):
        rest = other.rpartition("/")[2].lower().partition(tail)
        if (
            not rest[0]
            and rest[1]
            and rest[2][:1] in ("", "-")
            and _shape_of(other, entries) == shape
            and not other.startswith(foreign)
        ):
            each = _resolve(other, entries)
            found.setdefault(each.precision, each)
    path = {named.name: name} if isinstance(name, str) and looks_like_path(name) else {}
    return {path.get(each.name, each.name): each for each in found.values()}


def _shape_of(name: str, entries: Mapping[str, ModelEntry]) -> str:
    """Return the entry whose config.json a checkpoint has the shape of; `name` where the catalog has none."""
    entry = entries.get(name)
    return entry.base if isinstance(entry, Variant) else name


def entry(path: Path, kind: type[EntryT]) -> EntryT:
    """Read an entry, a shipped one once in a process: a search reads thousands; InputError where missing or wrong."""
    read: Any = _shipped_entry if path.is_relative_to(_PACKAGE) else _entry
    content: EntryT = read(path, kind)
    return content


def _entry(path: Path, kind: Any) -> Any:
    return decode(read_yaml(path), kind, str(Path(*path.parts[-2:])))


_shipped_entry = cache(_entry)


def _match_model(name: str, entries: Mapping[str, ModelEntry]) -> str | None:
    """Return the entry that `name` means: the whole id, or its part after the slash where that is unique."""
    by_lower = {entry.lower(): entry for entry in entries}
    lower_name = name.lower()
    if lower_name in by_lower or "/" in name:
        return by_lower.get(lower_name)
    tails = [entry for lower, entry in by_lower.items() if lower.rpartition("/")[2] == lower_name]
    targets = {_target(entry, entries) for entry in tails}
    if len(targets) > 1:
        raise InputError(f"{name!r} may be {' or '.join(sorted(tails))}", "give the organisation too")
    return tails[0] if tails else None


def check_makes_text(name: str) -> None:
    """Raise InputError for the name of a diffusion model, with or without its organisation."""
    for full in read_yaml(shipped("diffusion.yaml")):
        if name.lower() in (full.lower(), full.lower().rpartition("/")[2]):
            raise InputError(
                f"{full} makes images or videos, and this is for models of text",
                f"windtunnel init diffusion writes a job: set model: {full}, then windtunnel simulate diffusion.yaml",
            )


def _known_model(name: str, entries: dict[str, ModelEntry]) -> str:
    """Return the entry that `name` means, which is added to `entries` where its name says what it is; raise InputError
    where there is none."""
    match = _match_model(name, entries)
    if match is None and (variant := _named_after(name, entries)) is not None:
        entries[name] = variant
        return name
    if match is None:
        check_makes_text(name)
        near, own = (
            did_you_mean(name, entries),
            "give the path of its config.json, or list models with `windtunnel catalog models`",
        )
        raise InputError(f"there is no model {name!r} in the catalog", f"{near} If not, {own}" if near else own)
    return match


def _named_after(name: str, entries: Mapping[str, ModelEntry]) -> Variant | None:
    """Return the checkpoint of a model of the catalog that `name` says to be; None where it says none."""
    organisation, _, tail = name.lower().rpartition("/")
    for says in entry(shipped("models") / "checkpoint_names.yaml", list[CheckpointName]):
        found = re.fullmatch(rf"(.+?)[-_.](?:{says.end})", tail)
        if found is None or not re.fullmatch(says.organisation, organisation):
            continue
        for base in (found[1], f"{found[1]}-bf16"):
            with suppress(InputError):
                match = _match_model(base, entries)
                model = None if match is None else _resolve(match, entries)
                if model is not None and says.has_experts in (None, model.has_experts):
                    return Variant(
                        base=_shape_of(model.name, entries),
                        precision=says.precision,
                        max_context_tokens=model.max_context_tokens,
                        prediction_layers=model.prediction_layers,
                        named_after=model.name,
                    )
    return None


def _target(name: str, entries: Mapping[str, ModelEntry]) -> str:
    """Return the entry that holds the model: `name`, or the end of its plain aliases."""
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
        read = _shipped_model if entry.is_relative_to(_SHIPPED) else _model_of
        return _with_generation(read(entry, target))
    assert isinstance(entry, Variant)
    if entry.base not in entries or isinstance(entries[entry.base], Variant):
        raise InputError(f"the variant {target!r} has the base {entry.base!r}, which is not a model of the catalog")
    base = _resolve(entry.base, entries)
    context = entry.max_context_tokens or base.max_context_tokens
    variant = msgspec.structs.replace(
        base,
        name=target,
        precision=entry.precision or base.precision,
        mixed_bits=entry.mixed_bits if entry.precision else base.mixed_bits,
        max_context_tokens=context,
        prediction_layers=base.prediction_layers if entry.prediction_layers is None else entry.prediction_layers,
        rotary_values=base.rotary_values * context // base.max_context_tokens,
        named_after=entry.named_after,
    )
    return _with_generation(variant)


def _with_generation(model: ModelSpec) -> ModelSpec:
    """Add the sampling parameters that the model publishes, where a catalog has them; keep the base's otherwise."""
    for folder in search_path():
        path = folder / "models" / "generation.yaml"
        published = entry(path, dict[str, Sampling]) if path.is_file() else {}
        if model.name in published:
            return msgspec.structs.replace(model, generation=published[model.name])
    return model


def _model_of(path: Path, name: str) -> ModelSpec:
    return model_from_config(_read_json(path), name)


_shipped_model = cache(_model_of)


def looks_like_path(name: str) -> bool:
    """Whether a model is given by a file, or by a folder with a config.json."""
    return name.endswith(".json") or name.startswith((".", "/", "~")) or is_file(Path(name) / "config.json")


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise InputError(f"there is no file {name}: nobody on this machine has that name") from None


def _model_from_files(path: Path) -> ModelSpec:
    """Read a model from its config.json, or from the folder that holds it."""
    raw, quantisation, name = config_files(str(path))
    if isinstance(raw, dict) and isinstance(raw.get("layers"), list):
        return _inline_model(raw)  # as `windtunnel.save` writes it
    try:
        model = model_from_config(raw, name, quantisation)
    except InputError as error:
        raise InputError(error.message, how_to_read(error, raw, str(path))) from None
    generation = _config_file(path).with_name("generation_config.json")
    if not (_config_file(path).name == "config.json" and generation.is_file()):
        return model
    keys = _read_json(generation)
    known = {name: keys[name] for name in Sampling.__struct_fields__ if name in keys}
    return msgspec.structs.replace(model, generation=decode({"temperature": 1.0} | known, Sampling, str(generation)))


def config_files(source: str) -> tuple[Any, dict[str, Any] | None, str]:
    """Return what a config.json holds, what is beside it of its formats, and the name of its folder or file. InputError
    where there is no such file, or it is no JSON.

    Args:
        source: path of the file, or of the folder with it.
    """
    config = _config_file(_path(source))
    quantisation = config.with_name("hf_quant_config.json")
    if config.name != "config.json":
        return _read_json(config), None, config.stem.replace("--", "/")
    return (
        _read_json(config),
        _read_json(quantisation) if quantisation.is_file() else None,
        config.absolute().parent.name,
    )


def how_to_read(error: InputError, config: Mapping[str, Any], source: str) -> str | None:
    """Return the hint of an error in reading a config.json; of an unknown `model_type` how it may be read."""
    if not isinstance(error, UnknownModelTypeError):
        return error.hint
    return _most_alike(config, source) or (error.hint or "").replace("CONFIG", source)


def _most_alike(config: Mapping[str, Any], source: str) -> str | None:
    """Name the shipped model whose language model shares most keys with that of `config`, and say how to read it so."""
    text, known = language_model(config), known_architectures()
    shipped = {name: _read_json(entry) for name, entry in _models().items() if isinstance(entry, Path)}
    types = {name: str(language_model(keys).get("model_type")).removesuffix("_text") for name, keys in shipped.items()}
    others = {name: language_model(keys).keys() for name, keys in shipped.items() if types[name] in known}
    shared = {name: len(text.keys() & keys) / len(text.keys() | keys) for name, keys in others.items()}
    name = max(shared, key=lambda name: shared[name])
    added = f"windtunnel catalog add {source} --like {types[name]}"
    hint = f"its keys are most like those of {name}; if its layers are the same: {added}"
    return hint if shared[name] >= LEAST_ALIKE else None


def _config_file(path: Path) -> Path:
    if path.suffix != ".json" and not path.exists():
        why = "for weights on another machine, say which model they are: --model NAME"
        raise InputError(f"there is no file {path}", f"give the path of a config.json; {why}")
    return path / "config.json" if path.is_dir() else path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_bytes(path))
        return content
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}", "is it cut off?") from None


def check_hardware(value: Any, where: str, is_rate: bool = False) -> None:
    """Raise InputError where a count of hardware is not above 0, or a rate or size lacks its unit."""
    if isinstance(value, Schema):
        for name in value.__struct_fields__:
            check_hardware(getattr(value, name), f"{where}.{name}", name.endswith("_per_s"))
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_hardware(inner, f"{where}.{key}", is_rate)
    elif isinstance(value, int | float) and (value < 0 or (value == 0 and not where.endswith(".latency_s"))):
        raise InputError(f"{where} is {value}; a number above zero is needed")
    elif isinstance(value, int | float) and is_rate and value < LEAST_RATE:
        raise InputError(f"{where} is {value}; at least {LEAST_RATE:g} a second is needed", "rates have units: 3.3TB/s")
    elif isinstance(value, int) and where.endswith("_bytes") and value < LEAST_BYTES:
        raise InputError(f"{where} is {value}; at least {LEAST_BYTES:g} bytes are needed", "sizes have units: 80GiB")


def _slug(name: str) -> str:
    return re.sub(r"[\s-]", "_", name.lower())


def download(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fetch config.json and, where it says no format, hf_quant_config.json of what huggingface.co calls `name`.
    InputError where it is no name of a model there, or nothing can be fetched."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name!r} is not a model id of huggingface.co; they look like organisation/model")
    config = _fetch_json(f"https://huggingface.co/{name}/resolve/main/config.json", name)
    if config is None:
        raise InputError(f"huggingface.co has no config.json of a model {name!r}", "check the spelling")
    quantisation = None
    if isinstance(config, Mapping) and quantization_of(config) is None:
        quantisation = _fetch_json(f"https://huggingface.co/{name}/resolve/main/hf_quant_config.json", name)
    return config, quantisation


def _fetch_json(url: str, name: str) -> Any:
    """Fetch the JSON at `url`; None where there is nothing."""
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
