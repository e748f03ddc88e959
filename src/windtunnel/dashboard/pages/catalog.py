"""Models, devices, nodes, engines, traces, clients and calibrations, with their sources."""

from dataclasses import replace
from typing import Any

from windtunnel.catalog import KINDS, known_name, names
from windtunnel.dashboard.results import NotThereError
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import did_you_mean
from windtunnel.report import catalog
from windtunnel.report.report import Report, Section


def page(_dashboard: Dashboard, rest: str, _query: Query) -> View:
    """Show the list of one kind, or one entry in full."""
    kind, name = _known(rest)
    tabs = {name: link("catalog", name) for name in KINDS}
    if name:
        return View(replace(catalog.entry_report(kind, name), title=name), tabs, kind)
    listed = catalog.list_report(kind, lambda name: link("catalog", kind, name))
    sections = [Section(f"{kind.capitalize()} ({len(names(kind))})", listed.lead)]
    return View(Report("Catalog", sections=sections), tabs, kind, "filter")


def document(_dashboard: Dashboard, rest: str, _query: Query) -> Any:
    """Return what `windtunnel catalog --json` prints."""
    kind, name = _known(rest)
    return catalog.entry(kind, name) if name else catalog.entries(kind)


def _known(rest: str) -> tuple[str, str]:
    """Return the kind that an address names, by default the first, and the entry."""
    kind, _, name = (rest or KINDS[0]).partition("/")
    if kind not in KINDS:
        raise NotThereError(f"the catalog has no {kind!r}", did_you_mean(kind, KINDS, f"one of: {', '.join(KINDS)}"))
    # A path would name a file.
    return kind, known_name(kind, name) if name else ""
