"""Keys of scenario, space and job files, from the schemas that decode them: types, units, defaults and meanings."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from windtunnel.units import units_for

UNITS = {
    "_bytes_per_s": "bytes a second (`400Gbps`)",
    "_flops_per_s": "FLOP a second (`989TFLOPS`)",
    "_usd_per_hour": "USD an hour",
    "_per_s": "per second (`10/s`)",
    "_bytes": "bytes (`16GiB`)",
    "_flops": "FLOP",
    "_s": "seconds (`50ms`)",
    "_w": "watts (`700W`)",
}
"""Suffix of a quantity's name -> its unit, for people; the first that fits."""


@dataclass(frozen=True)
class Key:
    """One key of a table."""

    name: str
    kind: str
    """Type, unit or choices, as Markdown."""
    default: str
    """YAML; empty where there is none and the key may be left out."""
    is_needed: bool
    meaning: str


@dataclass(frozen=True)
class KeyTable:
    """The keys of one schema."""

    name: str
    meaning: str
    keys: tuple[Key, ...]


def key_tables(schema: type[msgspec.Struct]) -> list[KeyTable]:
    """Return the tables of a schema and of all schemas below it, each once, in the order in which they are met."""
    return [_table(each) for each in _structs(types.type_info(schema), set())]


def _structs(kind: Any, seen: set[type]) -> Iterator[types.StructType]:
    if isinstance(kind, types.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
    for part in _parts(kind):
        yield from _structs(part, seen)


def _parts(kind: Any) -> Iterator[Any]:
    """Yield the types within a type."""
    if isinstance(kind, types.StructType):
        yield from (field.type for field in kind.fields)
    elif isinstance(kind, types.UnionType):
        yield from kind.types
    elif isinstance(kind, types.ListType | types.VarTupleType):
        yield kind.item_type
    elif isinstance(kind, types.TupleType):
        yield from kind.item_types
    elif isinstance(kind, types.DictType):
        yield kind.value_type
    elif isinstance(kind, types.Metadata):
        yield kind.type


def _table(kind: types.StructType) -> KeyTable:
    meanings = field_meanings(kind.cls)
    tag = [] if kind.tag is None else [Key(str(kind.tag_field), f"`{kind.tag}`", "", True, "Chooses this table.")]
    keys = [
        Key(field.name, _text(field.type, field.name), _default(field), field.required, meanings.get(field.name, ""))
        for field in kind.fields
    ]
    meaning = inspect.getdoc(kind.cls) or ""
    return KeyTable(kind.cls.__name__, meaning.partition("\n\n")[0].replace("\n", " "), (*tag, *keys))


@cache
def field_meanings(schema: type) -> Mapping[str, str]:
    """Return field -> the text below it in the source of a class and of those that it derives from."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):
            continue
        (definition,) = tree.body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return found


def _text(kind: Any, name: str) -> str:
    """Return a type for people."""
    unit = next((text for suffix, text in UNITS.items() if f"_{name}".endswith(suffix)), "")
    match kind:
        case types.StructType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case types.UnionType():
            texts = [_text(part, name) for part in kind.types if not isinstance(part, types.NoneType)]
            return " or ".join(dict.fromkeys(texts))
        case types.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.IntType() | types.FloatType():
            return unit or ("whole number" if isinstance(kind, types.IntType) else "number")
        case types.ListType() | types.VarTupleType() | types.TupleType():
            return f"list of {' and '.join(dict.fromkeys(_text(part, name) for part in _parts(kind)))}"
        case types.DictType():
            return f"table of {_text(kind.value_type, name)}"
        case types.Metadata():
            return _text(kind.type, name)
        case types.CustomType():
            return "table with a `type`: a kind of layer"
        case types.StrType():
            return "text"
        case types.BoolType():
            return "`true` or `false`"
    return "any value"


def _default(field: types.Field) -> str:
    """Return a default as YAML writes it; empty for none, and for a table of defaults."""
    if field.default in (msgspec.NODEFAULT, None) or isinstance(field.default, msgspec.Struct):
        return ""
    return json.dumps(msgspec.to_builtins(field.default))


def json_schema(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of files that a schema decodes; quantities may be texts with units."""
    document = msgspec.json.schema(schema, schema_hook=lambda _: {"type": "object"})
    by_name = {each.cls.__name__: field_meanings(each.cls) for each in _structs(types.type_info(schema), set())}
    for name, definition in document["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            _widen(value, units_for(key) is not None)
            if meaning := by_name.get(name, {}).get(key):
                value["description"] = meaning
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def _widen(value: Any, has_unit: bool) -> None:
    """Allow a text wherever the schema has a number with a unit."""
    if isinstance(value, dict) and has_unit:
        if value.get("type") in ("number", "integer"):
            value["type"] = [value["type"], "string"]
        for part in value.values():
            _widen(part, has_unit)
    elif isinstance(value, list) and has_unit:
        for part in value:
            _widen(part, has_unit)


def space_schema(scenario: type[msgspec.Struct], space: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a search space's file, where a scenario's keys stand beside the space's own."""
    shared, own = json_schema(scenario), json_schema(space)
    merged = {**shared, "$defs": {**own["$defs"], **shared["$defs"]}}
    table = dict(own["$defs"][space.__name__])
    scenario_table = shared["$defs"][scenario.__name__]
    own_keys = {name: value for name, value in table["properties"].items() if name not in ("scenario", "job")}
    table["properties"] = {**scenario_table["properties"], **own_keys}
    merged["$defs"][space.__name__] = table
    return {**merged, "$ref": f"#/$defs/{space.__name__}"}
