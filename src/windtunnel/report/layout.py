"""Layouts of reports as data: templates of facts, cards and tables over the fields of an object or a document.

A template is a format string of Python, with these rules:

- `{span_s}` is shown in the unit of its name, `{span_s:duration}` as `FORMATS` says, `{energy_j:/3.6e6}` divided by
  that number (`/1e12 .2f`: with two digits), and `{num_runs:# run}` as a count (`# leaf|leaves` names the plural);
  any other format is Python's.
- A part in brackets is left out where one of its fields is unknown (None, NaN or absent), zero or empty.
- The whole is empty where another field is unknown; then the next template of a list counts, or a fact or card is left
  out.

The layouts of a module stand in the YAML file beside it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from string import Formatter
from typing import Any

from windtunnel.report.numbers import billions, dollars, duration, energy, number, percent, quantity, span_text, words
from windtunnel.report.report import Card, Cards, Cell, Facts, Table
from windtunnel.schema import read_yaml
from windtunnel.units import format_bytes, format_count, format_seconds, format_si, units_for

FORMATS: Mapping[str, Callable[[Any], str]] = {
    "time": format_seconds,
    "duration": duration,
    "percent": percent,
    "signed percent": lambda share: f"{'+' if share > 0 else ''}{percent(share)}",
    "number": number,
    "billions": billions,
    "dollars": dollars,
    "energy": energy,
    "bytes": format_bytes,
    "SI": lambda value: format_si(value, "").rstrip(),
    "FLOP": lambda flops: format_si(flops, "FLOP"),
    "FLOP/s": lambda rate: format_si(rate, "FLOP/s"),
    "B/s": lambda rate: format_si(rate, "B/s"),
    "yes": lambda _: "yes",
    "yes or no": lambda is_so: "yes" if is_so else "no",
    "words": words,
    "time span": lambda interval: span_text(*(format_seconds(interval[end]) for end in ("low", "high"))),
    "number span": lambda interval: span_text(*(number(interval[end]) for end in ("low", "high"))),
}
"""Name of a format -> the text of a value; the spans are of intervals with `low` and `high`."""

Template = str | Sequence[str]
"""A template, or several, of which the first with a text counts."""
Column = Template | Callable[[Any], "str | Cell"]
"""Path of a field, a template, or a function of what a row shows."""
Columns = Mapping[str, Column] | Sequence[tuple[str, Column]]
"""Header -> column; or pairs, as two columns may have one header."""


def layouts_beside(module: str) -> Any:
    """Return the layouts of a module from its `__file__`: those in the YAML file of the same name."""
    return read_yaml(Path(module).with_suffix(".yaml"))


def filled(template: Template, thing: Any) -> str:
    """Return a template with the fields of `thing`; empty where one outside brackets is unknown."""
    if not isinstance(template, str):
        return next(filter(None, (filled(each, thing) for each in template)), "")
    texts = [
        _filled_part(part, thing, position % 2 == 1) for position, part in enumerate(re.split(r"[\[\]]", template))
    ]
    return "" if None in texts[::2] else "".join(text or "" for text in texts)


def rows_of(thing: Any, templates: Mapping[str, Template]) -> list[tuple[str, str]]:
    """Return (label, text) for every template with a text; labels may be templates too."""
    pairs = ((filled(label, thing), filled(template, thing)) for label, template in templates.items())
    return [(label, text) for label, text in pairs if text]


def facts_of(thing: Any, templates: Mapping[str, Template], **options: Any) -> Facts:
    """Return facts from label -> template."""
    return Facts(rows_of(thing, templates), **options)


def cards_of(thing: Any, templates: Mapping[str, Template]) -> Cards:
    """Return headline figures from label -> template; what follows a comma in a label is its note."""
    parts = ((value, label.partition(", ")) for label, value in rows_of(thing, templates))
    return Cards([Card(value, label, note) for value, (label, _, note) in parts])


def table_of(things: Iterable[Any], columns: Columns, **options: Any) -> Table:
    """Return a table with a row for each thing, an object or a mapping; the cell of a path sorts by its value."""
    pairs = list(columns.items() if isinstance(columns, Mapping) else columns)
    rows = [[_cell_of(thing, column) for _, column in pairs] for thing in things]
    return Table([header for header, _ in pairs], rows, **options)


def _cell_of(thing: Any, column: Column) -> str | Cell:
    """Return a cell; empty where a field is unknown."""
    if callable(column):
        return column(thing)
    if not isinstance(column, str) or "{" in column:
        return filled(column, thing)
    value = value_at(thing, column)
    if value is None or isinstance(value, str):
        return value or ""
    return Cell(shown(column.rpartition(".")[2], value, ""), float(value))


def _filled_part(part: str, thing: Any, is_optional: bool) -> str | None:
    """Return a part of a template with its fields; None where one is unknown."""
    texts = []
    for literal, path, spec, _ in Formatter().parse(part):
        texts.append(literal)
        if path is not None:
            value = value_at(thing, path)
            if value is None or (is_optional and not value):
                return None
            texts.append(shown(path.rpartition(".")[2], value, spec or ""))
    return "".join(texts)


def value_at(thing: Any, path: str) -> Any:
    """Return a field by its dotted path through attributes and keys; None where it is unknown."""
    for name in path.split("."):
        thing = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name)
        if thing is None:
            return None
    return None if isinstance(thing, float) and math.isnan(thing) else thing


def shown(name: str, value: Any, spec: str = "") -> str:
    """Return the text of a field by its format, or by the unit of its name."""
    if spec in FORMATS:
        return FORMATS[spec](value)
    if spec.startswith("/"):
        scale, _, precision = spec[1:].partition(" ")
        return format(value / float(scale), precision) if precision else number(value / float(scale))
    if spec.startswith("# "):
        return format_count(value, *spec[2:].split("|"))
    if spec or isinstance(value, str):
        return format(value, spec)
    return f"{value:,}" if isinstance(value, Integral) and not units_for(name) else quantity(name, float(value))
