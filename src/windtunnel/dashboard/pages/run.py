"""One result: its report, and the pages of its requests and its scenario."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from windtunnel.dashboard.pages.document import document_report
from windtunnel.dashboard.results import ResultEntry, records
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import InputError
from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.records import REQUEST_COLUMNS
from windtunnel.metrics.summary import Summary
from windtunnel.report.lab.bench import LAYOUT as BENCH
from windtunnel.report.lab.bench import client_section
from windtunnel.report.layout import filled, layouts_beside
from windtunnel.report.report import Code, Figures, Section
from windtunnel.report.serving.curves import client_over_time, measured
from windtunnel.report.serving.run import distribution_sections, run_sections, verdict
from windtunnel.schema import decode
from windtunnel.serving.scenario import Scenario
from windtunnel.units import format_count, format_seconds

LAYOUT = layouts_beside(__file__)
PAGE_ROWS = 100


def result_view(
    entry: ResultEntry,
    sections: Sequence[Section],
    here: str = "run",
    template: str = "view.html",
    values: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
) -> View:
    """Return a page of a result: model, deployment and load in a line each, links to its parts, and `sections`."""
    parts = LAYOUT["parts"].get(entry.kind, {}) if not entry.name.endswith(".json") else {}
    lead = (entry.model, entry.deployment, entry.load, entry.problem)
    tabs = {label: link(part, entry.name) for part, label in parts.items()}
    return View(
        entry.name or ".",
        sections,
        lead,
        tabs=tabs,
        here=LAYOUT["parts"]["simulate"][here],
        template=template,
        values=values or {},
        scripts=scripts,
    )


def overview(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the report of any result."""
    entry, document = dashboard.results.read(name)
    folder = dashboard.results.path(name)
    if entry.kind not in ("simulate", "bench"):
        report = document_report(folder, entry, document)
        view = result_view(entry, report.sections)
        return replace(view, verdict=report.verdict, is_good=report.is_good)
    scenario = decode(document["scenario"], Scenario, name)
    requests = records(folder / "requests.parquet") if folder.is_dir() else None
    if entry.kind == "bench":
        said = ("windtunnel", "model", "endpoint")
        remarks = [(name, text) for name, text in document.items() if isinstance(text, str) and name not in said]
        summary = decode(document["summary"], ClientSummary)
        first = client_section(summary, [pair for pair in remarks if pair[1]], scenario.slo)
        sections = [first, *distribution_sections(scenario, requests, lambda: None)]
        curves = Section("Over time", [] if requests is None else [Figures(client_over_time(measured(requests)))])
        return replace(result_view(entry, [*sections, curves]), verdict=filled(BENCH["headline"], summary))
    series = folder / "series.parquet"
    known = partial(records, series) if series.is_file() else lambda: None
    text, is_good = verdict(decode(document["summary"], Summary), scenario, requests)
    view = result_view(entry, run_sections(scenario, document, requests, known))
    return replace(view, verdict=text, is_good=is_good)


def document(dashboard: Dashboard, name: str, _query: Query) -> Any:
    """Return what the verb printed with `--json`."""
    return dashboard.results.read(name)[1]


# ---------------------------------------------------------------------------------------------------- requests, file


def requests(dashboard: Dashboard, name: str, query: Query) -> View:
    """Show one page of the request table."""
    entry, _ = dashboard.results.read(name)
    shown = requests_document(dashboard, name, query)
    number = shown.pop("page")  # a page of the dashboard has this name for itself
    values = shown | {
        "number": number,
        "count": format_count(shown["num_requests"], "request"),
        "meanings": REQUEST_COLUMNS,
        "rows": [list(map(_request_cell, shown["columns"], row)) for row in shown["rows"]],
        "address": lambda sort, down, page: link("requests", name, sort=sort, down=str(int(down)), page=str(page)),
    }
    return result_view(entry, [], "requests", "requests.html", values)


def requests_document(dashboard: Dashboard, name: str, query: Query) -> dict[str, Any]:
    """Return one page of the request table: fields `page` from 1, `sort` by a column, `down` for the largest first."""
    path = dashboard.results.path(name) / "requests.parquet"
    if not path.is_file():
        raise InputError(f"{name} has no requests.parquet")
    table = records(path)
    columns = [name for name in LAYOUT["first_columns"] if name in table.columns]
    columns += [name for name in table.columns if name not in columns]
    sort, down = query.get("sort", columns[0]), query.get("down") == "1"
    if sort not in columns:
        raise InputError(f"requests have no column {sort!r}", f"they have {', '.join(columns)}")
    last = max(-(-len(table) // PAGE_ROWS), 1)
    page = query.get("page", "1")
    if not page.isdecimal() or not 1 <= int(page) <= last:
        raise InputError(f"page is {page!r}; there are 1 to {last}")
    values = table[sort]
    order = np.argsort(values, kind="stable")
    if down:
        # Unknown values stay at the end.
        known = len(order) - int(np.isnan(values).sum()) if values.dtype.kind == "f" else len(order)
        order = np.concatenate([order[:known][::-1], order[known:]])
    rows = order[(int(page) - 1) * PAGE_ROWS : int(page) * PAGE_ROWS]
    cells = [table[column][rows].tolist() for column in columns]
    return {
        "num_requests": len(table),
        "page": int(page),
        "num_pages": last,
        "sort": sort,
        "down": down,
        "columns": columns,
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def _request_cell(column: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        if np.isnan(value):
            return ""
        # Moments count from the start; spans are for people.
        return format_seconds(value) if column in LAYOUT["spans"] else f"{value:.6f}"
    return f"{value:,}"


def scenario(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the resolved scenario of the run's folder."""
    entry, _ = dashboard.results.read(name)
    file = dashboard.results.path(name) / "scenario.yaml"
    if not file.is_file():
        raise InputError(f"{name} has no scenario.yaml")
    text = file.read_text(encoding="utf-8", errors="replace")
    section = Section("Scenario, every default filled in", [Code(text)])
    return result_view(entry, [section], "scenario", "scenario.html", {"again": link("try", run=name)})
