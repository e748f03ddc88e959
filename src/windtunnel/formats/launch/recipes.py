"""Recipes of NVIDIA's srt-slurm: the servers of one deployment on a Slurm cluster, in a YAML file.

`resources` has their number and their GPUs, and `backend.<engine>_config` the options of those that prefill, of those
that decode, or of those that do both; layout 2 has both in `roles`. Variants are `base` with overrides, or sweeps over
placeholders. Sources: `docs/config-reference.md`, `docs/overrides.md` and `docs/sweeps.md` of srt-slurm.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import yaml

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import Command, table
from windtunnel.schema import parse_yaml

OF_LOAD = ("name", "benchmark")
"""Keys of a recipe that say nothing of its servers."""
MOST_VARIANTS, MOST_SHOWN = 1000, 8


def chosen_variant(recipe: dict[str, Any], variant: str, file: str) -> dict[str, Any]:
    """Return the variant of a recipe that is named, or its only one; variants that differ in concurrencies alone are
    one. InputError for several variants, or none of that name.

    Args:
        recipe: the file as a table.
        variant: as srt-slurm selects it: `base`, `override_NAME`, `zip_override_NAME[0]`, a pattern of these, or of a
            sweep `NAME=VALUE,...`; empty: none is named.
        file: its name, for errors.
    """
    of_overrides = _overridden(recipe) if "base" in recipe else {"": recipe}
    every = {
        ",".join(filter(None, (name, swept))): each
        for name, part in of_overrides.items()
        for swept, each in _swept(part)
    }
    if list(every) == [""] and not variant:
        return recipe
    names = [name for name in every if name != "base"] or list(every)
    found = [variant] if variant in every else [name for name in names if _is_meant(name, variant)]
    if not found:
        raise InputError(f"--from-command: {file} has no variant {variant!r}", _hint(file, list(every)))
    if len(found) > 1 and (joined := _joined([every[name] for name in found])) is not None:
        return joined
    if len(found) > 1:
        shown = ", ".join(found[:MOST_SHOWN]) + (", ..." if len(found) > MOST_SHOWN else "")
        raise InputError(f"--from-command: {file} describes {len(found)} variants: {shown}", _hint(file, found))
    return every[found[0]]


def _is_meant(name: str, variant: str) -> bool:
    """Whether a variant is among those that a pattern, the name of a group, or some values of a sweep mean."""
    of_sweep = "=" in variant and set(variant.split(",")) <= set(name.split(","))
    return of_sweep or any(fnmatchcase(each, variant or "*") for each in (name, re.sub(r"\[\d+\]", "", name)))


def _hint(file: str, names: list[str]) -> str:
    known = [name for name in names if name]
    return f"name one: --from-command '{file}:{known[0]}'" if known else "the file has no variants: leave the name out"


def _overridden(recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the base of a recipe and what each override makes of it, by the names that select them."""
    base = table(recipe["base"])
    variants = {"base": base}
    for key, part in recipe.items():
        if str(key).startswith("override_"):
            variants[str(key)] = _merged(base, table(part))
        elif str(key).startswith("zip_override_"):
            lengths = {len(leaf) for leaf in _lists(part) if len(leaf) != 1} or {1}
            if len(lengths) > 1 or 0 in lengths:
                raise InputError(
                    f"--from-command: lists of {key} have {' and '.join(map(str, sorted(lengths)))} values"
                )
            for index in range(min(lengths)):
                variants[f"{key}[{index}]"] = _merged(base, _slice(table(part), index))
    return variants


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with another over it, table by table; a null takes a key away."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merged(table(merged.get(key)), value)
        else:
            merged[key] = value
    return merged


def _lists(part: Any) -> Iterator[list[Any]]:
    if isinstance(part, list):
        yield part
    elif isinstance(part, dict):
        for each in part.values():
            yield from _lists(each)


def _slice(part: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return one of the variants that a table of lists stands for; lists of one value are of all of them."""
    sliced: dict[str, Any] = {}
    for key, value in part.items():
        if isinstance(value, list):
            sliced[key] = value[0 if len(value) == 1 else index]
        else:
            sliced[key] = _slice(value, index) if isinstance(value, dict) else value
    return sliced


def _swept(recipe: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the recipe of each combination of a sweep's values; the recipe itself without a sweep."""
    sweep = {str(name): values for name, values in table(recipe.get("sweep")).items() if isinstance(values, list)}
    rest = {key: value for key, value in recipe.items() if key != "sweep"}
    if (count := math.prod(map(len, sweep.values()))) > MOST_VARIANTS:
        raise InputError(f"--from-command: the sweep has {count:,} combinations; {MOST_VARIANTS:,} at most are read")
    for values in product(*sweep.values()):
        choice = dict(zip(sweep, values, strict=True))
        yield ",".join(f"{name}={value}" for name, value in choice.items()), _placed(rest, choice) if sweep else rest


def _placed(part: Any, choice: Mapping[str, Any]) -> Any:
    """Return a part of a recipe with values in place of `{name}`; a value keeps its type where it stands alone."""
    if isinstance(part, dict):
        return {key: _placed(each, choice) for key, each in part.items()}
    if isinstance(part, list):
        return [_placed(each, choice) for each in part]
    if not isinstance(part, str):
        return part
    alone = re.fullmatch(r"\{(\w+)\}", part)
    if alone and alone[1] in choice:
        return choice[alone[1]]
    return re.sub(r"\{(\w+)\}", lambda match: str(choice.get(match[1], match[0])), part)


def _joined(variants: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return variants that differ in their concurrencies alone as one with all of these; None where more differs."""
    of_benchmark = [dict(table(each.get("benchmark"))) for each in variants]
    several = [str(each.pop("concurrencies", each.pop("concurrency", ""))) for each in of_benchmark]
    rests = [
        [{key: value for key, value in each.items() if key not in OF_LOAD}, benchmark]
        for each, benchmark in zip(variants, of_benchmark, strict=True)
    ]
    if any(rest != rests[0] for rest in rests):
        return None
    numbers = [number for text in several for number in re.findall(r"\d+", text)]
    joined = copy.deepcopy(variants[0])
    return {**joined, "benchmark": {**of_benchmark[0], **({"concurrencies": numbers} if numbers else {})}}


ROLES = {"prefill": "prefill", "decode": "decode", "aggregated": "agg"}
"""Key of the options of servers -> their name in `resources`."""
FORMATS = {"fp4": ("nvfp4", "mxfp4"), "fp8": ("fp8", "fp8_block"), "bf16": ("bf16",)}
"""`model.precision` -> formats of weights that it may mean."""


def read_recipe(text: str, variant: str = "", file: str = "") -> dict[str, Any]:
    """Return a recipe, or its variant, in the keys of its first layout; empty where a text is none. InputError where it
    has several variants and none is named, or not the one that is."""
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
    """Return the commands of a recipe's servers. InputError for a number of servers or GPUs that is none."""
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
