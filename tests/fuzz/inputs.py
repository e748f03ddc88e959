"""Inputs as trees of builtins: the seeds, edits of them, and the files that they become."""

import copy
import csv
import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
Tree = dict[str, Any]
"""`command` and `files`, or `http`, as in seeds.yaml."""
Place = tuple[Any, ...]
"""Keys and positions from the root of a tree."""


class Edit(NamedTuple):
    """A change of a tree.

    `set` writes `value` at `place`, also under a new key; `delete` removes what is there; `double` repeats an item of
    a list, or a key of a file's table in its text; `move` renames a key to `value`; `cut` keeps a share of the file's
    text; `insert` writes a text at a share `value[0]` of it.
    """

    kind: str
    place: Place
    value: Any = None

    def as_data(self) -> list[Any]:
        return [self.kind, list(self.place), self.value]


@cache
def _seeds() -> dict[str, Tree]:
    return yaml.load((HERE / "seeds.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def seeds() -> dict[str, Tree]:
    """A copy of every seed, by name."""
    return copy.deepcopy(_seeds())


def places(tree: Any, place: Place = ()) -> Iterator[Place]:
    """Every place below the root."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*place, key)
        yield from places(tree[key], (*place, key))


def value_at(tree: Any, place: Place) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def edited(tree: Tree, edits: list[Edit]) -> Tree:
    """A copy of a tree with edits; one whose place is gone changes nothing."""
    tree = copy.deepcopy(tree)
    for edit in edits:
        try:
            _apply(tree, edit)
        except (KeyError, IndexError, TypeError):
            continue
    return tree


def _apply(tree: Tree, edit: Edit) -> None:
    *above, last = edit.place
    owner = value_at(tree, tuple(above))
    match edit.kind:
        case "set" if isinstance(owner, dict | list):
            owner[last] = copy.deepcopy(edit.value)
        case "delete":
            del owner[last]
        case "double" if isinstance(owner, list):
            owner.insert(last, copy.deepcopy(owner[last]))
        case "move" if isinstance(owner, dict):
            owner[edit.value] = owner.pop(last)
        case "double" | "cut" | "insert" if edit.place[0] == "files" and len(edit.place) > 1:
            name = edit.place[1]
            text = as_text(name, tree["files"][name])
            tree["files"][name] = _edited_text(text, edit)


def _edited_text(text: str, edit: Edit) -> str:
    if edit.kind == "cut":
        return text[: int(edit.value * len(text))]
    if edit.kind == "insert":
        share, words = edit.value
        position = int(share * len(text))
        return text[:position] + words + text[position:]
    lines = text.splitlines(keepends=True)
    number = next((index for index, line in enumerate(lines) if str(edit.place[-1]) in line), 0)
    return "".join([*lines[: number + 1], *lines[number:]])


def as_text(name: str, content: Any) -> str:
    """The text of a file of that name."""
    if isinstance(content, str):
        return content
    if name.endswith(".csv") and isinstance(content, list) and all(isinstance(row, dict) for row in content):
        table = io.StringIO()
        columns = list(dict.fromkeys(str(key) for row in content for key in row))
        rows = csv.DictWriter(table, columns, extrasaction="ignore")
        rows.writeheader()
        rows.writerows({str(key): value for key, value in row.items()} for row in content)
        return table.getvalue()
    if name.endswith(".jsonl") and isinstance(content, list):
        return "".join(f"{json.dumps(row)}\n" for row in content)
    if name.endswith((".json", ".jsonl")):
        return json.dumps(content)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def write_files(tree: Tree, folder: Path) -> None:
    """Write the files of a tree below a folder; names that no file can have are left out."""
    for name, content in tree.get("files", {}).items():
        path = folder / str(name)
        if path.parent == folder and str(name).strip(".") and "\0" not in str(name):
            path.write_bytes(as_text(str(name), content).encode("utf-8", "surrogatepass"))
