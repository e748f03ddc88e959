"""One result: its report, and the pages of its requests and its scenario."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from windtunnel.dashboard.pages.document import document_report
from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.errors import InputError
from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.records import REQUEST_COLUMNS
from windtunnel.metrics.summary import Summary
from windtunnel.report.lab.bench import bench_report
from windtunnel.report.layout import layouts_beside
from windtunnel.report.report import Code, Figures, Report, Section, stopped
from windtunnel.report.results import ResultEntry, records
from windtunnel.report.serving.curves import client_over_time, measured
from windtunnel.report.serving.run import distribution_sections, run_sections, verdict
from windtunnel.schema import decode
from windtunnel.serving.scenario import Scenario
from windtunnel.units import format_count, format_seconds

LAYOUT = layouts_beside(__file__)
PAGE_ROWS = 100


def result_view(entry: ResultEntry, report: Report, here: str = "run", **options: Any) -> View:
    """Return a page of a result: a report with model, deployment and load in a line each, and links to its parts."""
    parts = LAYOUT["parts"].get(entry.kind, {}) if not entry.name.endswith(".json") else {}
    lead = (entry.model, entry.deployment, entry.load, entry.problem, *report.lead)
    tabs = {label: link(part, entry.name) for part, label in parts.items()}
    title = LAYOUT["parts"]["simulate"][here]
    report = stopped(report, entry.not_starting) if report.verdict else report
    return View(replace(report, title=entry.name or ".", lead=lead), tabs, title, **options)


def overview(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the report of any result."""
    entry, document = dashboard.results.read(name)
    folder = dashboard.results.path(name)
    if entry.kind not in ("simulate", "bench"):
        return result_view(entry, document_report(folder, entry, document))
    scenario = decode(document["scenario"], Scenario, name)
    requests = records(folder / "requests.parquet") if folder.is_dir() else None
    if entry.kind == "bench":
        said = ("windtunnel", "model", "endpoint")
        remarks = {name: text for name, text in document.items() if isinstance(text, str) and name not in said}
        summary = decode(document["summary"], ClientSummary)
        report = bench_report(summary, {"model": "", "endpoint": "", **remarks}, scenario.slo)
        curves = Section("Over time", [] if requests is None else [Figures(client_over_time(measured(requests)))])
        sections = [*report.sections, *distribution_sections(scenario, requests, lambda: None), curves]
        return result_view(entry, replace(report, sections=sections))
    series = folder / "series.parquet"
    known = partial(records, series) if series.is_file() else lambda: None
    text, is_good = verdict(decode(document["summary"], Summary), scenario, requests)
    sections = run_sections(scenario, document, requests, known)
    return result_view(entry, Report("", sections=sections, verdict=text, is_good=is_good))


def document(dashboard: Dashboard, name: str, _query: Query) -> Any:
    """Return what the verb printed with `--json`."""
    return dashboard.results.read(name)[1]


def requests(dashboard: Dashboard, name: str, query: Query) -> View:
    """Show one page of the request table."""
    entry, _ = dashboard.results.read(name)
    shown = requests_document(dashboard, name, query)
    number = shown.pop("page")  # a page of the dashboard has this name for itself
    values = shown | {
        "number": number,
        "count": format_count(shown["num_requests"], "request"),
        "meanings": REQUEST_COLUMNS,
        "spans": LAYOUT["spans"],
        "rows": [list(map(_request_cell, shown["columns"], row)) for row in shown["rows"]],
        "address": lambda sort, down, page: link("requests", name, sort=sort, down=str(int(down)), page=str(page)),
    }
    return result_view(entry, Report(""), "requests", template="requests.html", values=values)


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
    report = Report("", sections=[Section("Scenario, every default filled in", [Code(text)])])
    again = {"again": link("try", run=name)}
    return result_view(entry, report, "scenario", template="scenario.html", values=again)
