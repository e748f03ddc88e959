"""Models, devices, nodes, engines, traces and calibrations, with their sources."""

from typing import Any

from windtunnel.catalog import KINDS
from windtunnel.dashboard.frame import Query, View, link, tabs
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.state import Dashboard
from windtunnel.errors import did_you_mean
from windtunnel.report import catalog as catalog_report
from windtunnel.report.render.html import Cell, Section, facts, paragraph, table

FILTER = (
    '<p class="tools"><input type="search" id="filter" placeholder="filter" aria-label="filter the table" '
    'autocomplete="off"> <span id="count"></span></p>'
)


def page(_dashboard: Dashboard, rest: str, _query: Query) -> View:
    """Show the list of one kind, or one entry in full."""
    kind, _, name = rest.partition("/")
    kind = _known(kind or KINDS[0])
    lead = tabs({name: link("catalog", name) for name in KINDS}, kind)
    if name:
        return View(name, _entry(kind, name), lead=lead)
    listed = catalog_report.listed(kind)
    rows: list[list[str | Cell]] = [[Cell(row[0], href=link("catalog", kind, row[0])), *row[1:]] for row in listed.rows]
    body = table(listed.headers, rows, listed.left) + (paragraph(listed.note) if listed.note else "")
    return View("Catalog", [Section(f"{kind.capitalize()} ({len(rows)})", body)], lead=lead + FILTER)


def document(_dashboard: Dashboard, rest: str, _query: Query) -> Any:
    """Return what `windtunnel catalog --json` prints."""
    kind, _, name = rest.partition("/")
    kind = _known(kind or KINDS[0])
    return catalog_report.entry(kind, name) if name else catalog_report.entries(kind)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise NotThereError(f"the catalog has no {kind!r}", did_you_mean(kind, KINDS, f"one of: {', '.join(KINDS)}"))
    return kind


def _entry(kind: str, name: str) -> list[Section]:
    rows, sources = catalog_report.entry_rows(kind, name)
    indented = [(label.replace("  ", "\u2003"), text) for label, text in rows]
    return [
        Section(kind[:-1].capitalize(), facts(indented)),
        *([Section("Sources", facts(sources))] if sources else []),
    ]
