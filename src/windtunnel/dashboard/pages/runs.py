"""The tables of all results below the folder."""

import time
from functools import partial
from typing import Any

import msgspec

from windtunnel.dashboard.results import MOST_RESULTS
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.report.layout import layouts_beside, table_of
from windtunnel.report.numbers import percent, quantity, span_text
from windtunnel.report.report import Cell, Report, Section
from windtunnel.report.results import ResultEntry

TABLES = layouts_beside(__file__)


def page(dashboard: Dashboard, _rest: str, _query: Query) -> View:
    """Show all results by kind, kept up to date."""
    entries = dashboard.results.entries()
    sections = []
    for table in TABLES:
        listed = [entry for entry in entries if entry.kind in table["kinds"]]
        columns = [(head, partial(_cell, name=name)) for head, name in table["columns"]]
        if listed:
            title = f"{table['title']} ({len(listed):,})"
            sections.append(Section(title, [table_of(listed, columns, left=table["left"])]))
    cut = [f"Only the first {MOST_RESULTS:,} results are shown."] if dashboard.results.is_cut else []
    report = Report("Runs", cut, sections)
    return View(report, filters="filter: words of any column", template="runs.html", is_live=True)


def document(dashboard: Dashboard, _rest: str, _query: Query) -> Any:
    """Document all results."""
    return {
        "folder": str(dashboard.results.folder),
        "is_cut": dashboard.results.is_cut,
        "runs": [msgspec.to_builtins(entry) for entry in dashboard.results.entries()],
    }


def _cell(entry: ResultEntry, name: str) -> str | Cell:
    """Return an entry's cell; a figure has its interval, which holds 80% of measurements, where that is known."""
    match name:
        case "name":
            known = {None: "", 0.0: "breaks the SLO"}
            held = known.get(entry.figures.get("is_slo_held"), "" if entry.problem else "holds the SLO")
            held = "would not start" if entry.not_starting else held
            note = ", ".join(filter(None, ("measured" if entry.kind == "bench" else "", held, entry.problem)))
            tone = "better" if held.startswith("holds") else "worse" if held or entry.problem else ""
            return Cell(entry.name or ".", href=link("run", entry.name), note=note, tone=tone)
        case "broken":
            return entry.name or "."
        case "served":
            return Cell(entry.model.rpartition("/")[2], title=entry.model, note=entry.deployment)
        case "written":
            moment = time.localtime(entry.changed_s)
            return Cell(time.strftime("%Y-%m-%d", moment), entry.changed_s, note=time.strftime("%H:%M", moment))
        case "covered":
            return _covered(entry)
        case "calibration":
            return entry.calibration or ("none" if entry.kind == "simulate" else "")
    if hasattr(entry, name):
        return str(getattr(entry, name))
    value, interval = entry.figures.get(name), entry.intervals.get(name)
    if value is None:
        return ""
    span = "" if interval is None else span_text(*(quantity(name, bound) for bound in interval))
    return Cell(quantity(name, value), value, note=span)


def _covered(entry: ResultEntry) -> Cell:
    """Return the share of the device's time that is read from tables, not extrapolated."""
    if not entry.coverage:
        return Cell("")
    known = sum(entry.coverage.get(how, 0.0) for how in ("measured", "interpolated"))
    shares = ", ".join(f"{percent(part)} {how}" for how, part in entry.coverage.items())
    return Cell(percent(known), known, title=shares)
