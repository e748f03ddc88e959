"""Self-contained HTML pages of text, figures and tables: no network, readable light and dark.

Tables sort by a click on a header, and curves tell their values where the pointer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from windtunnel.report.version import version

STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))
"""Files that every page contains: the style, and the script that sorts tables and shows the values of curves."""


@dataclass(frozen=True)
class Section:
    """A heading and the HTML below it."""

    title: str
    body: str


@dataclass(frozen=True)
class Cell:
    """A table's cell with more than text."""

    text: str
    value: float | None = None
    """Sort key; None: the text."""
    href: str = ""
    """Address of its link."""
    note: str = ""
    """Small text behind it."""
    title: str = ""
    """Tooltip."""
    bar: float | None = None
    """Bar behind the text, as a fraction of the cell's width."""


def page(title: str, lead: str, sections: Sequence[Section], script: str = "") -> str:
    """Return a whole page; `title` and `lead` are text, `script` is JavaScript."""
    style, shared = (file.read_text(encoding="utf-8") for file in (STYLE, SCRIPT))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head>\n'
        f'<body><h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body_of(sections)}\n'
        f"<footer>windtunnel {escape(version())}</footer>\n<script>\n{shared}{script}</script></body></html>\n"
    )


def body_of(sections: Iterable[Section]) -> str:
    """Return sections as HTML, one below the other."""
    return "\n".join(f"<section><h2>{escape(section.title)}</h2>\n{section.body}\n</section>" for section in sections)


def paragraph(text: str) -> str:
    """Return text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str | Cell]], left: int = 1, right: int = 0) -> str:
    """Return a table that sorts by its headers; the first `left` and last `right` columns are texts, others numbers."""

    def kind(index: int) -> str:
        return "" if left <= index < len(headers) - right else ' class="text"'

    head = "".join(f'<th{kind(index)} tabindex="0">{escape(name)}</th>' for index, name in enumerate(headers))
    body = "\n".join(
        "<tr>" + "".join(_cell(cell, kind(index)) for index, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(cell: str | Cell, kind: str) -> str:
    if isinstance(cell, str):
        return f"<td{kind}>{escape(cell)}</td>"
    text = f'<a href="{escape(cell.href)}">{escape(cell.text)}</a>' if cell.href else escape(cell.text)
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    bar = "" if cell.bar is None else f'<svg class="bar"><rect width="{100 * cell.bar:.1f}%" height="100%"/></svg>'
    return f"<td{kind}{value}{title}>{bar}{text}{note}</td>"


def figures(drawn: Iterable[tuple[str, str]]) -> str:
    """Return (SVG, caption) pairs side by side, as many as fit."""
    parts = (f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in drawn)
    return f'<div class="row">{"".join(parts)}</div>'


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Return (value, label) pairs as large numbers."""
    parts = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in facts)
    return f'<div class="cards">{"".join(parts)}</div>'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return (name, text) pairs as a list."""
    parts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f"<dl>{parts}</dl>"
