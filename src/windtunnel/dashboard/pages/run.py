"""One result: its summary, latency distributions, curves over time and bounds; and the pages of its parts."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from windtunnel.dashboard.frame import Query, View, first, lines, link, tabs
from windtunnel.dashboard.pages.document import document_sections
from windtunnel.dashboard.results import ResultEntry, records
from windtunnel.dashboard.state import Dashboard
from windtunnel.errors import InputError
from windtunnel.metrics.client import ClientSummary
from windtunnel.metrics.records import REQUEST_COLUMNS, Table
from windtunnel.report.lab.bench import client_rows
from windtunnel.report.render.html import Section, cards, facts, figures, table
from windtunnel.report.render.tables import number
from windtunnel.report.serving.curves import client_over_time, measured
from windtunnel.report.serving.page import distributions, run_sections
from windtunnel.report.serving.run import LATENCY_HEADS, latency_rows
from windtunnel.schema import decode
from windtunnel.serving.scenario import Scenario
from windtunnel.units import format_count, format_seconds

PARTS = {
    "run": "Summary",
    "timeline": "Timeline",
    "requests": "Requests",
    "step": "Step",
    "scenario": "Scenario",
}
CLIENT_PARTS = {name: PARTS[name] for name in ("run", "requests", "scenario")}
"""Parts of a client's measurements, which know no steps."""


def overview(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the summary of any result."""
    entry, document = dashboard.results.read(name)
    if entry.kind not in ("simulate", "bench"):
        shown = document_sections(dashboard.results.path(name), entry, document)
        scripts = ("plot.js",) if entry.kind == "search" else ()
        return View(entry.name or ".", shown, lead=head(entry), scripts=scripts)
    folder = dashboard.results.path(name)
    scenario = decode(document["scenario"], Scenario, name)
    requests = records(folder / "requests.parquet") if folder.is_dir() else None
    if entry.kind == "bench":
        return View(name or ".", _client(scenario, document, requests), lead=head(entry))
    series = records(folder / "series.parquet") if (folder / "series.parquet").is_file() else None
    return View(name or ".", run_sections(scenario, document, requests, series), lead=head(entry))


def document(dashboard: Dashboard, name: str, _query: Query) -> Any:
    """Return what the verb printed with `--json`."""
    return dashboard.results.read(name)[1]


def head(entry: ResultEntry, here: str = "run") -> str:
    """Return model, deployment and load in a line each, and links to the parts."""
    parts = PARTS if entry.kind == "simulate" else CLIENT_PARTS if entry.kind == "bench" else {}
    addresses = {label: link(part, entry.name) for part, label in parts.items()}
    shown = tabs(addresses, PARTS[here]) if parts and not entry.name.endswith(".json") else ""
    return lines(entry.model, entry.deployment, entry.load, entry.problem) + shown


def _client(scenario: Scenario, document: Mapping[str, Any], requests: Table | None) -> list[Section]:
    """Return a client's measurements of a real server."""
    summary = decode(document["summary"], ClientSummary)
    shown = [(format_seconds(summary.ttft_s.mean), "TTFT mean")]
    if summary.tpot_s is not None:
        shown.append((format_seconds(summary.tpot_s.mean), "TPOT mean"))
    shown.append((number(summary.output_tokens_per_s), "output tokens/s"))
    said = ("windtunnel", "model", "endpoint")
    remarks = [(name, text) for name, text in document.items() if isinstance(text, str) and text and name not in said]
    body = cards(shown) + table(LATENCY_HEADS, latency_rows(summary)) + facts([*client_rows(summary), *remarks])
    sections = [Section("Measured by the client", body)]
    if requests is not None:
        counted = measured(requests)
        sections.append(Section("Distributions", figures(distributions(counted, scenario))))
        sections.append(Section("Over time", figures(client_over_time(counted))))
    return sections


# ---------------------------------------------------------------------------------------------------- requests, file

PAGE_ROWS = 100
ASKED_FIRST = ("request", "arrival_s", "ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "queueing_s")
"""Columns that come first."""


def requests(dashboard: Dashboard, name: str, query: Query) -> View:
    """Show one page of the request table."""
    entry, _ = dashboard.results.read(name)
    shown = requests_document(dashboard, name, query)
    sort, down, number_of, last = shown["sort"], shown["down"], shown["page"], shown["num_pages"]
    columns = shown["columns"]
    heads = "".join(_sort_head(name, column, sort, down) for column in columns)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(_request_cell(column, row[index]))}</td>" for index, column in enumerate(columns))
        + "</tr>"
        for row in shown["rows"]
    )
    turns = [
        ("first", 1, number_of > 1),
        ("previous", number_of - 1, number_of > 1),
        ("next", number_of + 1, number_of < last),
        ("last", last, number_of < last),
    ]
    pager = " ".join(
        f'<a href="{_requests_link(name, sort, down, to)}">{label}</a>' if there else f"<span>{label}</span>"
        for label, to, there in turns
    )
    pages = (
        f'<p class="pager">{pager} page {number_of:,} of {last:,}; {format_count(shown["num_requests"], "request")}</p>'
    )
    grid = f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    return View(name or ".", [Section("Requests", pages + grid)], lead=head(entry, "requests"))


def requests_document(dashboard: Dashboard, name: str, query: Query) -> dict[str, Any]:
    """Return one page of the request table: fields `page` from 1, `sort` by a column, `down` for the largest first."""
    path = dashboard.results.path(name) / "requests.parquet"
    if not path.is_file():
        raise InputError(f"{name} has no requests.parquet")
    table = records(path)
    columns = [name for name in ASKED_FIRST if name in table.columns]
    columns += [name for name in table.columns if name not in columns]
    sort, down = first(query, "sort", columns[0]), first(query, "down") == "1"
    if sort not in columns:
        raise InputError(f"requests have no column {sort!r}", f"they have {', '.join(columns)}")
    last = max(-(-len(table) // PAGE_ROWS), 1)
    page = first(query, "page", "1")
    if not page.isdecimal() or not 1 <= int(page) <= last:
        raise InputError(f"page is {page!r}; there are 1 to {last}")
    values = table[sort]
    order = np.argsort(values, kind="stable")
    if down:
        # What is not known stays at the end.
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


def _sort_head(name: str, column: str, sort: str, down: bool) -> str:
    order = f' aria-sort="{"descending" if down else "ascending"}"' if column == sort else ""
    address = _requests_link(name, column, column == sort and not down, 1)
    meaning = escape(REQUEST_COLUMNS.get(column, ""))
    return f'<th{order} title="{meaning}"><a href="{address}">{escape(column)}</a></th>'


def _requests_link(name: str, sort: str, down: bool, page: int) -> str:
    return escape(link("requests", name, sort=sort, down=str(int(down)), page=str(page)))


def _request_cell(column: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        if np.isnan(value):
            return ""
        # Moments count from the start; spans are for people.
        return format_seconds(value) if column in SPANS else f"{value:.6f}"
    return f"{value:,}"


SPANS = ("queueing_s", "prefill_s", "ttft_s", "tpot_s", "e2e_s", "itl_max_s", "execution_s", "sent_late_s")
"""Columns that are durations; the other times are moments."""


def scenario(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the resolved scenario of the run's folder."""
    entry, _ = dashboard.results.read(name)
    file = dashboard.results.path(name) / "scenario.yaml"
    if not file.is_file():
        raise InputError(f"{name} has no scenario.yaml")
    text = file.read_text(encoding="utf-8", errors="replace")
    again = f'<p><a class="button" href="{escape(link("try", run=name))}">try it with changes</a></p>'
    body = f"{again}<pre>{escape(text)}</pre>"
    return View(name or ".", [Section("Scenario, every default filled in", body)], lead=head(entry, "scenario"))
