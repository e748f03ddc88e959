"""Keys of scenario, space and job files, from the schemas that decode them: their meanings, and JSON Schemas."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from windtunnel.units import units_for


def structs_in(schema: type[msgspec.Struct]) -> Iterator[types.StructType]:
    """Yield a schema and all schemas below it, each once, in the order in which they are met."""
    yield from _new_structs(types.type_info(schema), set())


def _new_structs(kind: Any, seen: set[type]) -> Iterator[types.StructType]:
    if isinstance(kind, types.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
    for part in parts_of(kind):
        yield from _new_structs(part, seen)


def parts_of(kind: Any) -> Iterator[Any]:
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


def json_schema(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of files that a schema decodes; quantities may be texts with units."""
    document = msgspec.json.schema(schema, schema_hook=lambda _: {"type": "object"})
    by_name = {each.cls.__name__: field_meanings(each.cls) for each in structs_in(schema)}
    for name, definition in document["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            _widen(value, units_for(key) is not None or key.endswith("_tokens"))
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
