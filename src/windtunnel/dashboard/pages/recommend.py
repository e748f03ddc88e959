"""What to serve a model on: a form, and the search that it starts, live until it ends in the answer."""

from dataclasses import replace
from typing import Any

from windtunnel import catalog
from windtunnel.dashboard.pages.search import progress_of
from windtunnel.dashboard.recommending import FORM, Recommendation
from windtunnel.dashboard.view import Dashboard, Moved, Query, View, link
from windtunnel.report.report import Cell, Code, Report, Section, Table
from windtunnel.report.search.study import search_report
from windtunnel.report.search.study_files import study_document
from windtunnel.schema import fields_of


def page(dashboard: Dashboard, rest: str, query: Query) -> View:
    """Show the form, filled in with the fields of the address; or the recommendation that the address names."""
    if rest:
        return _view(dashboard.recommendations.get(rest))
    rows = [
        [Cell(f"{each.number}", float(each.number), href=link("recommend", str(each.number))), each.command, each.state]
        for each in dashboard.recommendations.all()
    ]
    table = Table(("recommendation", "command", "state"), rows, left=3)
    values = {
        "given": dict(query) or FORM["first"],
        "fields": FORM["fields"],
        "choices": {kind: catalog.names(kind) for kind in ("models", "traces", "providers")},
        "devices": catalog.names("devices"),
    }
    sections = [Section("Recommendations of this dashboard", [table])] if rows else []
    return View(Report("Recommend", sections=sections), template="recommend.html", values=values)


def document(dashboard: Dashboard, rest: str, _query: Query) -> Any:
    """Document the list of recommendations, or one of them with the answers so far."""
    if not rest:
        every = dashboard.recommendations.all()
        return {"recommendations": [fields_of(each, "number", "command", "state") for each in every]}
    known = dashboard.recommendations.get(rest)
    shown = known.shown()
    if known.state == "failed":
        return {"state": known.state, "problem": known.problem}
    answered = len(shown.study.outcomes[0].evaluations)
    head = {"state": known.state, "num_answered": answered, "num_points": known.space.num_points}
    return {**head, "command": known.command, **study_document(shown)}


def start(dashboard: Dashboard, _rest: str, query: Query) -> Moved:
    """Start the search of a form; its page shows how it goes."""
    return Moved(link("recommend", str(dashboard.recommendations.start(query).number)))


def stop(dashboard: Dashboard, rest: str, _query: Query) -> Moved:
    """Stop a search; what it found is kept."""
    dashboard.recommendations.get(rest).stop.set()
    return Moved(link("recommend", rest))


def _view(known: Recommendation) -> View:
    state = known.state
    title = f"Recommend {known.number}: {known.space.model}"
    if state == "failed":
        report = Report(title, verdict=known.problem, is_good=False)
        return View(report, template="search.html", values={"progress": [], "stop": ""})
    shown = known.shown()
    report = search_report(shown)
    text = report.verdict
    if state == "stopped" and not shown.study.outcomes[0].ranking:
        text = "Stopped before anything was found that meets the limits."
    elif shown.recommends and state != "done":
        text = f"Best so far: {text[:1].lower()}{text[1:]}"
    lead = [*report.lead, *([known.problem] if known.problem else [])]
    sections = [Section("", [Code(known.command)], "The same on the command line"), *report.sections]
    is_under_way = state == "running"
    report = replace(report, title=title, lead=lead, sections=sections, verdict=text)
    words = "stopping" if is_under_way and known.stop.is_set() else state
    progress = [progress_of(shown.study, shown.study.outcomes[0], words)]
    values = {"progress": progress, "stop": link("stop", str(known.number)) if is_under_way else ""}
    return View(report, template="search.html", values=values, is_live=is_under_way)
