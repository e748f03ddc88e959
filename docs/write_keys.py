"""Write docs/reference/keys.md: every key of scenarios, search spaces, training jobs and diffusion jobs.

python docs/write_keys.py [--check]
"""

import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from windtunnel.diffusion.job import DiffusionJob
from windtunnel.diffusion.model import DiffusionModel
from windtunnel.keys import field_meanings, parts_of, structs_in
from windtunnel.search.space.space import Space
from windtunnel.serving.scenario import Scenario
from windtunnel.training.job import TrainingJob

PAGE = Path(__file__).with_name("reference") / "keys.md"
HEAD = """# Keys of files

Every key of a [scenario](#scenario), of a [search space](#space), of a [training job](#trainingjob) and of a
[diffusion job](#diffusionjob), with its type, its default and what it means. `python docs/write_keys.py` writes this
page from the schemas that decode the files. `windtunnel init serving`, `search`, `training` or `diffusion` writes a
file to begin with, and a JSON Schema for editors.

Quantities may be numbers in SI units or texts with a unit. A key marked *needed* has no default. Where no default is
shown, the key may be left out: nothing is set, or the table's own defaults hold. A search space's file has the keys of
a scenario or of a job beside its own.
"""
LAST = ("ModelSpec", "LayerGroup")
"""Tables that few people write; they stand at the end."""
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
    return [_table(each) for each in structs_in(schema)]


def _table(kind: types.StructType) -> KeyTable:
    meanings = field_meanings(kind.cls)
    tag = [] if kind.tag is None else [Key(str(kind.tag_field), f"`{kind.tag}`", "", True, "Chooses this table.")]
    keys = [
        Key(field.name, _text(field.type, field.name), _default(field), field.required, meanings.get(field.name, ""))
        for field in kind.fields
    ]
    meaning = inspect.getdoc(kind.cls) or ""
    return KeyTable(kind.cls.__name__, meaning.partition("\n\n")[0].replace("\n", " "), (*tag, *keys))


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
            return f"list of {' and '.join(dict.fromkeys(_text(part, name) for part in parts_of(kind)))}"
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


def page() -> str:
    """Return the page, each table once."""
    tables: dict[str, KeyTable] = {}
    for schema in (Scenario, Space, TrainingJob, DiffusionJob, DiffusionModel):
        tables |= {table.name: table for table in key_tables(schema) if table.name not in tables}
    ordered = sorted(tables.values(), key=lambda table: table.name in LAST)
    return "\n".join([HEAD, *map(_section, ordered)])


def _section(table: KeyTable) -> str:
    rows = []
    for key in table.keys:
        default = "*needed*" if key.is_needed else f"`{key.default}`" if key.default else ""
        rows.append(f"| `{key.name}` | {_cell(key.kind)} | {default} | {_cell(key.meaning)} |")
    head = "| key | value | default | meaning |\n|---|---|---|---|"
    return "\n".join([f"## {table.name}\n", f"{table.meaning}\n", head, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE.name} is old: python docs/write_keys.py")
    PAGE.write_text(page(), encoding="utf-8")
