"""Add a model to the user's own catalog, from its config.json or from huggingface.co, and say what was understood."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import write_text
from windtunnel.model.config import LIKE, QUANTISATION, known_architectures, read_config
from windtunnel.model.shape import ModelSpec

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class AddedModel:
    """A model that has a name now."""

    model: ModelSpec
    file: Path
    unread: list[str]
    """Keys of its config.json that nothing looked at."""
    replaced: bool
    """Whether the user's catalog had a model of that name."""


def add_model(source: str, like: str | None = None, name: str | None = None) -> AddedModel:
    """Read a model, and write its config.json into the user's catalog, under its name; nothing is written otherwise.
    InputError where its config.json cannot be found or read, or the name is one of the shipped catalog's.

    Args:
        source: path of a config.json or of the folder with one, or a name of huggingface.co, which is fetched.
        like: `model_type`, or model of the catalog, whose layers it has, where its own `model_type` is not known.
        name: what to call it; None: its name there, or that of its folder or file.
    """
    config, found_name = _found(source)
    if like is not None:
        config[LIKE] = _architecture(like)
    name = name or found_name
    if not _NAME.fullmatch(name) or catalog.looks_like_path(name):
        raise InputError(f"{name!r} is no name of a model", "take --as organisation/model")
    try:
        model, unread = read_config(config, name)
    except InputError as error:
        raise InputError(error.message, catalog.how_to_read(error, config, source)) from None
    file = catalog.users_folder() / "models" / f"{name.replace('/', '--')}.json"
    replaced = file.exists()
    if not replaced and name.lower() in {known.lower() for known in catalog.names("models")}:
        raise InputError(f"the catalog has a model {name!r} already", "take another name: --as organisation/model")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(config, indent=1) + "\n")
    return AddedModel(model, file, unread, replaced)


def _found(source: str) -> tuple[dict[str, Any], str]:
    """Return the config.json of `source`, with what is said beside it of its formats, and its name."""
    if catalog.looks_like_path(source):
        config, quantisation, name = catalog.config_files(source)
    else:
        (config, quantisation), name = catalog.download(source), source
    if not isinstance(config, Mapping):
        raise InputError(f"{source}: config.json holds {type(config).__name__}; an object is needed")
    return {**config, **({} if quantisation is None else {QUANTISATION: quantisation})}, name


def _architecture(like: str) -> str:
    """Return the `model_type` that `like` is, or that the model of that name has."""
    known = known_architectures()
    if like in known:
        return like
    try:
        return catalog.model(like).architecture
    except InputError as error:
        near = did_you_mean(like, known, error.hint)
        raise InputError(f"--like: {like!r} is neither a known model_type nor a model of the catalog", near) from None
