"""The page of a simulated serving run, and its sections."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import Summary
from windtunnel.report.documents import run_document
from windtunnel.report.render.html import Section, cards, facts, figures, page, table
from windtunnel.report.render.plots import Axis, bar_chart
from windtunnel.report.render.tables import number, percent, span_text
from windtunnel.report.serving import run as run_tables
from windtunnel.report.serving.curves import LATENCIES, cdf, curves_over_time, measured
from windtunnel.report.serving.setup import load_line, model_line, provenance_rows
from windtunnel.schema import decode
from windtunnel.serving.over_time import over_time
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_seconds

MOST_SOURCES = 12


def run_page(result: Result) -> str:
    """Return a run as one HTML page that needs no network."""
    scenario, document = result.scenario, run_document(result)
    lead = "; ".join([*run_tables.deployment_lines(result), load_line(scenario)])
    return page(model_line(result.setup), lead, run_sections(scenario, document, result.requests, over_time(result)))


def run_sections(
    scenario: Scenario, document: Mapping[str, Any], requests: Table | None, series: Table | None
) -> list[Section]:
    """Return all sections of a run's page.

    Args:
        scenario: resolved.
        document: as `report.documents.run_document` writes it.
        requests: one row a request; None: not kept.
        series: one row a stretch of time; None: not kept.
    """
    summary, bound, provenance = summary_sections(scenario, document, requests)
    sections = [summary]
    if requests is not None:
        sections.append(Section("Distributions", figures(distributions(measured(requests), scenario))))
    if series is not None:
        sections.append(Section("Over time", figures(curves_over_time(series))))
    return [*sections, bound, provenance]


def summary_sections(scenario: Scenario, document: Mapping[str, Any], requests: Table | None = None) -> list[Section]:
    """Return the sections of a simulation's document: summary, bounds, and sources of its times."""
    summary = decode(document["summary"], Summary)
    memory = MemoryPlan(**{name: value for name, value in document["memory"].items() if name != "kv_tokens"})
    latencies = table(
        (*run_tables.LATENCY_HEADS, "80% of means"), _with_intervals(run_tables.latency_rows(summary), document)
    )
    rows = run_tables.throughput_rows(summary, scenario.slo)
    if requests is not None:
        rows += run_tables.overload_rows(scenario, requests)
    rows += run_tables.resource_rows(scenario, summary, memory)
    beside = f'<div class="row">{latencies}{facts([*rows, *_sureness(document)])}</div>'
    parts = [cards(headline(summary, document)), beside]
    if summary.tenants:
        parts.append(table(run_tables.TENANT_HEADS, run_tables.tenant_rows(summary)))
    if summary.pools:
        parts.append(table(run_tables.POOL_HEADS, run_tables.pool_rows(summary), left=2))
    return [Section("Summary", "\n".join(parts)), _bound(summary, document), _provenance(document)]


def headline(summary: Summary, document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headline figures as (value, label) pairs."""
    intervals = document.get("interval_80", {})
    shown = [(format_seconds(summary.ttft_s.mean), f"TTFT mean{_span(intervals.get('ttft'), format_seconds)}")]
    if summary.tpot_s is not None:
        shown.append((format_seconds(summary.tpot_s.mean), f"TPOT mean{_span(intervals.get('tpot'), format_seconds)}"))
    rate = summary.throughput
    shown.append((number(rate.output_tokens_per_s), f"output tokens/s{_span(intervals.get('throughput'), number)}"))
    shown.append((number(rate.output_tokens_per_s_per_device), "output tokens/s per device"))
    if summary.cost is not None:
        shown.append((f"${summary.cost.usd_per_million_output_tokens:,.2f}", "per million output tokens"))
    if summary.goodput is not None:
        shown.append((percent(summary.goodput.fraction), "goodput"))
    return [*shown, (summary.bound_by.replace("_", " "), "bound by")]


def _span(interval: Mapping[str, float] | None, shown: Any) -> str:
    return "" if interval is None else f", 80% {span_text(shown(interval['low']), shown(interval['high']))}"


def _with_intervals(rows: list[list[str]], document: Mapping[str, Any]) -> list[list[str]]:
    """Append each latency's 80% interval to its row; empty where it is unknown."""
    intervals = document.get("interval_80", {})
    texts = {
        title: span_text(*(format_seconds(intervals[name][end]) for end in ("low", "high")))
        for name, title in LATENCIES.items()
        if name in intervals
    }
    return [[*row, texts.get(row[0], "")] for row in rows]


def _sureness(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    calibration = document.get("calibration", {})
    name, reason = calibration.get("name"), calibration.get("not_calibrated")
    text = str(name) if name else f"none: {reason}" if reason else "none"
    return [("calibration", "; ".join([text, *calibration.get("remarks", [])]))]


def _bound(summary: Summary, document: Mapping[str, Any]) -> Section:
    busy = {name.replace("_", " "): share * 100 for name, share in _largest(summary.time_fractions).items()}
    drawn = [
        (bar_chart(list(busy), list(busy.values()), Axis("share of busy time (%)"), width=440), "by what bounds it")
    ]
    operators = _largest(document.get("operators", {}))
    if operators:
        values = [share * 100 for share in operators.values()]
        chart = bar_chart(list(operators), values, Axis("share of the device's time (%)"), width=440)
        drawn.append((chart, "by operator"))
    return Section(f"What bound it: {summary.bound_by.replace('_', ' ')}", figures(drawn))


def _largest(shares: Mapping[str, float], count: int = MOST_SOURCES) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:count])


def _provenance(document: Mapping[str, Any]) -> Section:
    return Section(
        "Where the operator times come from", facts(provenance_rows(document["coverage"], document["sources"]))
    )


def distributions(requests: Table, scenario: Scenario) -> list[tuple[str, str]]:
    """Return (SVG, caption) of each latency's distribution over `requests`."""
    return [
        cdf(name, {"requests": requests[f"{name}_s"]}, getattr(scenario.slo, f"{name}_s", None))
        for name in LATENCIES
        if np.isfinite(requests[f"{name}_s"]).any()
    ]
