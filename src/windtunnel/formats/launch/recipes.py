"""Recipes of NVIDIA's srt-slurm: the servers of one deployment on a Slurm cluster, in a YAML file.

`resources` has their number and their GPUs, and `backend.<engine>_config` the options of those that prefill, of those
that decode, or of those that do both; layout 2 has both in `roles`. Source: `docs/config-reference.md` of srt-slurm.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import Command, table
from windtunnel.formats.launch.variants import chosen_variant
from windtunnel.schema import parse_yaml

ROLES = {"prefill": "prefill", "decode": "decode", "aggregated": "agg"}
"""Key of the options of servers -> their name in `resources`."""
FORMATS = {"fp4": ("nvfp4", "mxfp4"), "fp8": ("fp8", "fp8_block"), "bf16": ("bf16",)}
"""`model.precision` -> formats of weights that it may mean."""


def read_recipe(text: str, variant: str = "", file: str = "") -> dict[str, Any]:
    """Return a recipe, or its variant, in the keys of its first layout; empty where a text is none.

    Raises:
        InputError: it has several variants and none is named, or not the one that is.
    """
    try:
        recipe = table(parse_yaml(text))
    except yaml.YAMLError:
        return {}
    described = table(recipe.get("base")) or recipe
    if not isinstance(described.get("backend"), dict) and not isinstance(described.get("roles"), dict):
        return {}
    return _first_layout(chosen_variant(recipe, variant, file))


def _first_layout(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of layout 2 (`engine`, `roles`) in the keys of layout 1 (`docs/legacy-v1.md`)."""
    roles, engine = recipe.get("roles"), recipe.get("engine")
    if not isinstance(roles, dict):
        return recipe
    name = str(table(engine).get("type", "sglang")) if isinstance(engine, dict) else str(engine)
    options: dict[str, Any] = {}
    backend: dict[str, Any] = {"type": name, f"{name}_config": options}
    resources = dict(table(recipe.get("resources")))
    for role, resource in ROLES.items():
        if isinstance(part := roles.get(resource), dict):
            nodes = 0 if part.get("nodes") == "colocate" else part.get("nodes")
            options[role] = table(part.get("args"))
            backend |= {f"{role}_environment": part.get("env"), f"{role}_extra_args": part.get("extra_args")}
            counts = {f"{resource}_nodes": nodes, f"{resource}_workers": part.get("workers", 1)}
            resources |= counts | {f"gpus_per_{resource}": part.get("gpus")}
    return {**recipe, "backend": backend, "resources": resources}


def recipe_commands(recipe: Mapping[str, Any]) -> list[Command]:
    """Return the commands of a recipe's servers.

    Raises:
        InputError: a number of servers or GPUs that is none.
    """
    backend, resources = table(recipe.get("backend")), table(recipe.get("resources"))
    engine = str(backend.get("type", "sglang"))
    options = table(backend.get(f"{engine}_config"))
    return [
        _command(engine, recipe, role, table(options[role]), backend)
        for role, resource in ROLES.items()
        if role in options and (resources.get(f"{resource}_workers") or resources.get(f"{resource}_nodes"))
    ]


def _command(
    engine: str, recipe: Mapping[str, Any], role: str, options: dict[str, Any], backend: Mapping[str, Any]
) -> Command:
    environment, extra = table(backend.get(f"{role}_environment")), backend.get(f"{role}_extra_args")
    resources, model, name = table(recipe["resources"]), table(recipe.get("model")), ROLES[role]
    workers, nodes = (_count(resources, f"{name}_{what}", 1) for what in ("workers", "nodes"))
    gpus = _count(resources, f"gpus_per_{name}", nodes * _count(resources, "gpus_per_node", 0) // workers)
    options = {str(key).replace("_", "-"): value for key, value in options.items()}
    named = [options.pop("model-path", None), model.get("path"), options.get("served-model-name")]
    checkpoint = _checkpoint([str(each).removeprefix("hf:") for each in named if each], str(model.get("precision")))
    product = str(resources.get("gpu_type", ""))
    return Command(
        words=[f"dynamo.{engine}", checkpoint, "--config", f"{role}.yaml", *map(str, extra or ())],
        name=role,
        image=str(model.get("container", "")),
        environment={str(key): str(value) for key, value in environment.items()},
        replicas=workers,
        gpus=gpus or None,
        files={f"{role}.yaml": yaml.safe_dump(options)},
        product=next((each for each in (product, f"{product}_sxm") if _is_device(each)), product),
    )


def _count(resources: Mapping[str, Any], name: str, default: int) -> int:
    value = resources.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or value < 0 or (value == 0 and name.endswith("_workers")):
        raise InputError(f"--from-command: resources.{name} is {value!r}; a number is needed")
    return value


def _checkpoint(names: list[str], precision: str) -> str:
    """Return the model's checkpoint in the recipe's format, where one of its names is known; else its first name."""
    for name in names:
        with suppress(InputError):
            known = catalog.known_name("models", name)
            wanted, checkpoints = FORMATS.get(precision, (precision,)), catalog.checkpoints(known, "nvidia")
            has = {
                each: (str(model.precision.weights), str(model.precision.experts_format))
                for each, model in checkpoints.items()
            }
            fitting = [each for each, formats in has.items() if set(formats) & set(wanted)]
            return known if known in fitting or not fitting else fitting[0]
    return names[0] if names else ""


def _is_device(name: str) -> bool:
    with suppress(InputError):
        return bool(catalog.known_name("devices", name))
    return False
