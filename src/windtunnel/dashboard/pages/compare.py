"""Serving runs side by side: their figures, distributions, and the differences of their scenarios."""

from collections.abc import Sequence
from typing import Any

from windtunnel.dashboard.view import Dashboard, Query, View, link
from windtunnel.report.comparison import ComparedRun, check_runs, comparison_document, comparison_report
from windtunnel.report.report import Report
from windtunnel.report.results import records


def page(dashboard: Dashboard, _rest: str, query: Query) -> View:
    """Compare the runs of the fields `run` with the first of them; with fewer than two, offer all to choose from."""
    names = query.getlist("run")
    known = [entry.name for entry in dashboard.results.entries() if entry.kind in ("simulate", "bench")]
    values = {"known": known, "chosen": names}
    report = Report("Compare")
    if len(names) >= 2:
        report = comparison_report(_runs(dashboard, names), lambda name: link("run", name))
    return View(report, template="compare.html", values=values)


def document(dashboard: Dashboard, _rest: str, query: Query) -> dict[str, Any]:
    """Document the comparison: each figure of every run, and every path in which scenarios differ."""
    return comparison_document(_runs(dashboard, query.getlist("run")))


def _runs(dashboard: Dashboard, names: Sequence[str]) -> list[ComparedRun]:
    runs = []
    for name in names:
        entry, document = dashboard.results.read(name)
        path = dashboard.results.path(name)
        runs.append(ComparedRun(entry, document, records(path / "requests.parquet") if path.is_dir() else None))
    check_runs(runs)
    return runs
