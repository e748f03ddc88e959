"""Write docs/reference/keys.md: every key of scenarios, search spaces and training jobs.

python docs/write_keys.py [--check]
"""

import sys
from pathlib import Path

from windtunnel.keys import KeyTable, key_tables
from windtunnel.search.space.space import Space
from windtunnel.serving.scenario import Scenario
from windtunnel.training.job import TrainingJob

PAGE = Path(__file__).with_name("reference") / "keys.md"
HEAD = """# Keys of files

Every key of a [scenario](#scenario), of a [search space](#space) and of a [training job](#trainingjob), with its type,
its default and what it means. `python docs/write_keys.py` writes this page from the schemas that decode the files.
`windtunnel init serving`, `search` or `training` writes a file to begin with, and a JSON Schema for editors.

Quantities may be numbers in SI units or texts with a unit. A key marked *needed* has no default. Where no default is
shown, the key may be left out: nothing is set, or the table's own defaults hold. A search space's file has the keys of
a scenario or of a job beside its own.
"""
LAST = ("ModelSpec", "LayerGroup")
"""Tables that few people write; they stand at the end."""


def page() -> str:
    """Return the page, each table once."""
    tables: dict[str, KeyTable] = {}
    for schema in (Scenario, Space, TrainingJob):
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
