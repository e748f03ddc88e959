"""Variants of a recipe of srt-slurm: `base` with overrides of it, and sweeps over placeholders.

Source: `docs/overrides.md` and `docs/sweeps.md` of srt-slurm.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import table

OF_LOAD = ("name", "benchmark")
"""Keys of a recipe that say nothing of its servers."""
MOST_VARIANTS, MOST_SHOWN = 1000, 8


def chosen_variant(recipe: dict[str, Any], variant: str, file: str) -> dict[str, Any]:
    """Return the variant of a recipe that is named, or its only one; variants that differ in concurrencies alone are
    one.

    Args:
        recipe: the file as a table.
        variant: as srt-slurm selects it: `base`, `override_NAME`, `zip_override_NAME[0]`, a pattern of these, or of a
            sweep `NAME=VALUE,...`; empty: none is named.
        file: its name, for errors.

    Raises:
        InputError: several variants, or none of that name.
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
