"""Texts that fit a JSON Schema: arguments of tool calls, and answers whose form is demanded."""

import json
from collections.abc import Mapping
from typing import Any

MOST_DEEP, MOST_ITEMS = 8, 4


def text_for(schema: Any) -> str:
    """Return the text of a value that fits a schema, with every property that it names."""
    return json.dumps(_value(schema, schema, 0))


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MOST_DEEP:
        return None
    if "$ref" in schema:
        return _value(_referred(str(schema["$ref"]), root), root, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value(schema[key][0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or "properties" in schema:
        return {name: _value(part, root, depth + 1) for name, part in (schema.get("properties") or {}).items()}
    if kind == "array":
        count = max(int(schema.get("minItems", 1)), 0)
        return [_value(schema.get("items", {"type": "string"}), root, depth + 1) for _ in range(min(count, MOST_ITEMS))]
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("maximum", 1))
    return {"boolean": True, "null": None}.get(str(kind), "lorem"[: schema.get("maxLength", 5)])


def _referred(path: str, root: Any) -> Any:
    """Return the part of a schema that a reference within it names."""
    part = root
    for name in path.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part
